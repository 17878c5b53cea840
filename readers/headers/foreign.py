"""Images of formats that are not read: told by their first bytes, so that they are named and not overlooked.

ISO base media files (AVIF, HEIC) begin with a box "ftyp", whose brands say what they hold: ISO/IEC 14496-12, 4.3.
"""

from __future__ import annotations

import re

from readers.headers.header import Buffer

__all__ = ["FOREIGN_HEAD_BYTES", "FOREIGN_SUFFIXES", "foreign_medium"]

FOREIGN_HEAD_BYTES = 256
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


def foreign_medium(data: Buffer) -> str:
    """The name of the image format that `data` has and that is not read, such as "AVIF"; "" for anything else."""
    head = bytes(data[:FOREIGN_HEAD_BYTES])
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
