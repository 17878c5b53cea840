"""Common to all image formats: the parsed header, the codes of media, sizes, and the wording of errors.

Offsets in messages are bytes from the start of the image, even if it is part of a larger buffer.

Decoded pixels, as a cache hands them out, have their own header, of 16 bytes. They exist in memory only: in a file
they are not an image.

    0    89 "PXL" 0D 0A 1A 0A       the magic; the bytes after the name are PNG's, and for the same reasons
    8    uint32 height, uint32 width, little-endian
    16   height x width pixels of the upright image, row by row, each uint8 red, green, blue
"""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError

Buffer: TypeAlias = bytes | memoryview

# The position is the code that an index column stores: append, never reorder. Pixels and coefficients are never in a
# file.
MEDIA = ("", "jpeg", "png", "webp", "gif", "bmp", "tiff", "pixels", "coefficients", "avif", "heif", "jxl")
SUFFIX = {"jpeg": "jpg", "png": "png", "webp": "webp", "gif": "gif", "bmp": "bmp", "tiff": "tif"}
SUFFIX |= {"avif": "avif", "heif": "heic", "jxl": "jxl"}
# Four times Pillow's threshold for decompression bombs: 1 GB of RGB.
MAX_PIXELS = 4 * 89_478_485
PIXELS_MAGIC = b"\x89PXL\r\n\x1a\n"
_PIXELS_SIZE = struct.Struct("<8xII")
PIXELS_HEADER_BYTES = _PIXELS_SIZE.size


class ImageHeader(NamedTuple):
    """The header of an encoded image.

    `height` and `width` are as stored, before `orientation` (EXIF 1..8, 1 if absent or invalid) is
    applied, and fit a uint32. `components` is the number of stored channels, 1..255; palette indices are 1
    channel. `process` is the low byte of a JPEG's SOF marker (0xC0 baseline, 0xC1 extended, 0xC2 progressive)
    and 0 for the other media.
    """

    media: str
    height: int
    width: int
    components: int
    process: int
    orientation: int

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""
        return upright_size(self.height, self.width, self.orientation)


def upright_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """(height, width) of the upright image, for an image stored with `height` and `width`."""
    return (width, height) if orientation >= 5 else (height, width)


def shrunk(width: int, height: int, factor: float) -> tuple[int, int]:
    """(width, height) times `factor`, in packing and in caching; unchanged for a factor of at least 1.

    Sides are rounded to the nearest pixel, halves to the even one, and are never 0.
    """
    if factor >= 1:
        return width, height
    return max(1, round(width * factor)), max(1, round(height * factor))


def shrunk_sides(sides: npt.NDArray[Any], factor: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """`shrunk` for one side of many images, int64 of the same shape."""
    whole = sides.astype(np.int64)
    return np.where(factor >= 1, whole, np.maximum(1, np.rint(whole * factor)).astype(np.int64))


class RefusedImageError(BadSampleError):
    """An image that is refused even if a decoder would accept it."""


def bad(media: str, at: int, expected: str, actual: object) -> BadSampleError:
    """The error for byte `at` of an image; the caller raises it."""
    return BadSampleError(f"{media} image, byte {at}: expected {expected}, found {actual}")


def truncated(media: str, at: int, expected: str, data: Buffer) -> BadSampleError:
    """The error for data that ends before the expected bytes at `at`; the caller raises it."""
    return bad(media, at, expected, f"the end at byte {len(data)} (truncated)")


def unpack(media: str, layout: struct.Struct, data: Buffer, at: int) -> tuple[Any, ...]:
    """The fields of `layout` at byte `at` >= 0. Raises BadSampleError beyond the end of `data`."""
    if at + layout.size > len(data):
        raise truncated(media, at, f"{layout.size} bytes", data)
    return layout.unpack_from(data, at)


def check_size(media: str, at: int, height: int, width: int) -> None:
    """Raise BadSampleError if a size, stored at byte `at`, is 0 or exceeds uint32."""
    if not (0 < height <= 0xFFFFFFFF and 0 < width <= 0xFFFFFFFF):
        raise bad(media, at, "a height and a width of 1 to 4294967295", f"{height} and {width}")


def pixels_header(height: int, width: int) -> bytes:
    """The 16 bytes before decoded pixels."""
    return PIXELS_MAGIC + struct.pack("<II", height, width)


def stored_bytes(payload: Buffer) -> Buffer:
    """The pixels behind their header."""
    return payload[PIXELS_HEADER_BYTES:]


def parse_pixels(data: Buffer) -> ImageHeader:
    """The header of decoded pixels, whose magic has been seen; raises BadSampleError."""
    height, width = unpack("pixels", _PIXELS_SIZE, data, 0)
    check_size("pixels", 8, height, width)
    end = PIXELS_HEADER_BYTES + height * width * 3
    if end > len(data):
        raise truncated("pixels", PIXELS_HEADER_BYTES, f"pixels up to byte {end}", data)
    return ImageHeader("pixels", height, width, 3, 0, 1)


# The header of an image that is kept as quantised DCT coefficients: `readers.coefficients.layout` says what follows.
#
# Such images exist in caches only, for the decoders of this package. In a file or a shard they are not an image:
# `sniff` and `parse_header` refuse them.


MEDIUM = "coefficients"
MAGIC = b"\x89DCT\r\n\x1a\n"
VERSION = 1
HEADER = struct.Struct("<8sIHHBBBBI")


def parse_coefficients_header(data: Buffer) -> ImageHeader:
    """The size, the components and the orientation; what else the header says is not looked at. Raises BadSampleError.

    Sizes are as stored, before the orientation is applied; the process is 0.
    """
    if len(data) < HEADER.size:
        raise truncated(MEDIUM, 0, f"a header of {HEADER.size} bytes", data)
    magic, _, height, width, version, components, _, orientation, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise bad(MEDIUM, 0, f"the magic {MAGIC.hex(' ')}", magic.hex(" "))
    if version != VERSION:
        raise bad(MEDIUM, 16, f"version {VERSION}", f"{version}; empty the cache that wrote it")
    if not height or not width:
        raise bad(MEDIUM, 12, "a height and a width of 1 to 65535", f"{height} and {width}")
    if components not in (1, 3):
        raise bad(MEDIUM, 17, "1 or 3 components", components)
    if not 1 <= orientation <= 8:
        raise bad(MEDIUM, 19, "an orientation of 1 to 8", orientation)
    return ImageHeader(MEDIUM, height, width, components, 0, orientation)


# Recognise an image by its first bytes: one of the media, or of a format that is not read.
#
# The latter are recognised so that they can be named in messages instead of being overlooked. ISO base media files
# (AVIF, HEIC) begin with a box "ftyp", whose brands say what they hold: ISO/IEC 14496-12, 4.3.


_HEAD_BYTES, _FOREIGN_HEAD_BYTES = 18, 256
_BMP_VERSIONS = (12, 40, 52, 56, 64, 108, 124)  # bytes of the second header
FOREIGN_SUFFIXES = (
    *(".jp2", ".j2k", ".j2c", ".jpx", ".jpf", ".jpc", ".jxr", ".wdp"),
    *(".psd", ".exr", ".dcm", ".ico", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".dds", ".qoi", ".svg", ".tga", ".xcf"),
    *(".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".rw2", ".orf"),
)

_MAGIC = {
    b"\0\0\0\x0cjP  \r\n\x87\n": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
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
    **dict.fromkeys((b"avif", b"avis"), "avif"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "heif"),
    b"crx ": "camera raw",
}
_JXL = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")  # a codestream, and one in boxes
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
    if head.startswith(_JXL):
        return "jxl"
    brand = _brand_of(data) if head[4:8] == b"ftyp" else ""
    return brand if brand in MEDIA else ""


def _brand_of(data: Buffer) -> str:
    """What the brands of an ISO file say that it holds; "" for nothing known."""
    head = bytes(data[:_FOREIGN_HEAD_BYTES])
    size = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12], *(head[at : at + 4] for at in range(16, size, 4))]
    known = [_BRANDS[brand] for brand in brands if brand in _BRANDS]
    return "avif" if "avif" in known else known[0] if known else ""


def foreign_medium(data: Buffer) -> str:
    """The name of an image format that is not read, such as "JPEG 2000"; "" for anything else. Never raises."""
    head = bytes(data[:_FOREIGN_HEAD_BYTES])
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[4:8] == b"ftyp":
        brand = _brand_of(data)
        return "" if brand in MEDIA else brand
    if head[128:132] == b"DICM":
        return "DICOM"
    if _NETPBM.match(head):
        return "Netpbm"
    if _ICON.match(head):
        return "icon"
    return "SVG" if _SVG.match(head) else ""
