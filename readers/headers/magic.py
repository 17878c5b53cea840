"""Recognise an image by its first bytes: one of the media, or of a format that is not read.

The latter are recognised so that they can be named in messages instead of being overlooked. ISO base media files (AVIF,
HEIC) begin with a box "ftyp", whose brands say what they hold: ISO/IEC 14496-12, 4.3.
"""

from __future__ import annotations

import re

from readers.headers.base import Buffer

__all__ = ["FOREIGN_SUFFIXES", "foreign_medium", "sniff"]

_HEAD_BYTES, _FOREIGN_HEAD_BYTES = 18, 256
_BMP_VERSIONS = (12, 40, 52, 56, 64, 108, 124)  # bytes of the second header
FOREIGN_SUFFIXES = (
    *(".avif", ".avifs", ".heic", ".heif", ".jp2", ".j2k", ".j2c", ".jpx", ".jpf", ".jpc", ".jxl", ".jxr", ".wdp"),
    *(".psd", ".exr", ".dcm", ".ico", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".dds", ".qoi", ".svg", ".tga", ".xcf"),
    *(".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".rw2", ".orf"),
)

_MAGIC = {
    b"\0\0\0\x0cjP  \r\n\x87\n": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\0\0\0\x0cJXL \r\n\x87\n": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"II\xbc\x01": "JPEG XR",
    b"8BPS\0": "Photoshop",
    b"\x76\x2f\x31\x01": "OpenEXR",
    b"#?RADIANCE\n": "Radiance HDR",
    b"qoif": "QOI",
    b"DDS \x7c\0\0\0": "DDS",
    b"gimp xcf ": "GIMP",
    b"BPG\xfb": "BPG",
    b"FLIF": "FLIF",
    b"\x8aMNG\r\n\x1a\n": "MNG",
    b"\x8bJNG\r\n\x1a\n": "JNG",
    b"FUJIFILMCCD-RAW": "camera raw",
    b"IIRO": "camera raw",
    b"IIU\0": "camera raw",
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    b"crx ": "camera raw",
}
_NETPBM = re.compile(rb"P[1-6]\s(?:#[^\n]*\n|\s)*\d+\s+\d+\s|P7\nWIDTH |P[Ff]\n\d+ \d+\n")
_ICON = re.compile(rb"\0\0[\1\2]\0[\1-\x40]\0..[\0-\xff]\0", re.S)
_SVG = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*(?:<!DOCTYPE svg|<svg[\s>])", re.S)


def sniff(data: Buffer) -> str:
    """The medium of `data` by its first bytes: one of MEDIA, "" for anything else. Never raises."""
    head = bytes(data[:_HEAD_BYTES])
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "webp"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "tiff"
    # Two letters are too few: a caption may begin with them.
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _BMP_VERSIONS:
        return "bmp"
    return ""


def foreign_medium(data: Buffer) -> str:
    """The name of an image format that is not read, such as "AVIF"; "" for anything else. Never raises."""
    head = bytes(data[:_FOREIGN_HEAD_BYTES])
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[4:8] == b"ftyp":
        size = min(int.from_bytes(head[:4], "big"), len(head))
        brands = [head[8:12], *(head[at : at + 4] for at in range(16, size, 4))]
        found = [_BRANDS[brand] for brand in brands if brand in _BRANDS]
        return "AVIF" if "AVIF" in found else found[0] if found else ""
    if head[128:132] == b"DICM":
        return "DICOM"
    if _NETPBM.match(head):
        return "Netpbm"
    if _ICON.match(head):
        return "icon"
    return "SVG" if _SVG.match(head) else ""
