"""What every format shares: the parsed header, the codes of the media, sizes, and the wording of errors.

Offsets in messages are bytes from the start of the image, also where it is part of a larger buffer.

Decoded pixels, as a cache hands them out, have a header of their own, of 16 bytes. They exist in memory only: in a file
they are not an image.

    0    89 "PXL" 0D 0A 1A 0A       the magic; the bytes after the name are PNG's, and for the same reasons
    8    uint32 height, uint32 width, little-endian
    16   height x width pixels of the upright image, row by row, each uint8 red, green, blue
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError

__all__ = [
    "MAX_PIXELS",
    "MEDIA",
    "PIXELS_HEADER_BYTES",
    "PIXELS_MAGIC",
    "SUFFIX",
    "Buffer",
    "ImageHeader",
    "RefusedImageError",
    "bad",
    "check_size",
    "parse_pixels",
    "pixels_header",
    "shrunk",
    "shrunk_sides",
    "truncated",
    "unpack",
    "upright_size",
]

Buffer: TypeAlias = bytes | memoryview

# The position is the code that an index column stores: append, never reorder. The last two are never in a
# file.
MEDIA = ("", "jpeg", "png", "webp", "gif", "bmp", "tiff", "pixels", "coefficients")
SUFFIX = {"jpeg": "jpg", "png": "png", "webp": "webp", "gif": "gif", "bmp": "bmp", "tiff": "tif"}
# Four times the size from which Pillow speaks of a decompression bomb: 1 GB of RGB.
MAX_PIXELS = 4 * 89_478_485
PIXELS_MAGIC = b"\x89PXL\r\n\x1a\n"
_PIXELS_SIZE = struct.Struct("<8xII")
PIXELS_HEADER_BYTES = _PIXELS_SIZE.size


class ImageHeader(NamedTuple):
    """What the first bytes of an encoded image promise about its pixels.

    `height` and `width` are as stored, before `orientation` (EXIF 1..8, 1 where absent or invalid) is
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
    """(height, width) of the upright image, for an image stored with these."""
    return (width, height) if orientation >= 5 else (height, width)


def shrunk(width: int, height: int, factor: float) -> tuple[int, int]:
    """(width, height) times `factor`, for packing and caching alike; unchanged for a factor of 1 or more.

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
    """An image that is given to no decoder, also where one would take it."""


def bad(media: str, at: int, expected: str, found: object) -> BadSampleError:
    """The error for byte `at` of an image, for the caller to raise."""
    return BadSampleError(f"{media} image, byte {at}: expected {expected}, found {found}")


def truncated(media: str, at: int, expected: str, data: Buffer) -> BadSampleError:
    """The error for what should be at byte `at` and does not fit into `data`, for the caller to raise."""
    return bad(media, at, expected, f"the end at byte {len(data)} (truncated)")


def unpack(media: str, layout: struct.Struct, data: Buffer, at: int) -> tuple[Any, ...]:
    """The fields of `layout` at byte `at`, any number from 0 up; BadSampleError past the end of `data`."""
    if at + layout.size > len(data):
        raise truncated(media, at, f"{layout.size} bytes", data)
    return layout.unpack_from(data, at)


def check_size(media: str, at: int, height: int, width: int) -> None:
    """Raise BadSampleError for a size, written at byte `at`, without pixels or beyond a uint32."""
    if not (0 < height <= 0xFFFFFFFF and 0 < width <= 0xFFFFFFFF):
        raise bad(media, at, "a height and a width of 1 to 4294967295", f"{height} and {width}")


def pixels_header(height: int, width: int) -> bytes:
    """The 16 bytes before decoded pixels."""
    return PIXELS_MAGIC + struct.pack("<II", height, width)


def parse_pixels(data: Buffer) -> ImageHeader:
    """The header of decoded pixels, whose magic has been seen; raises BadSampleError."""
    height, width = unpack("pixels", _PIXELS_SIZE, data, 0)
    check_size("pixels", 8, height, width)
    end = PIXELS_HEADER_BYTES + height * width * 3
    if end > len(data):
        raise truncated("pixels", PIXELS_HEADER_BYTES, f"pixels up to byte {end}", data)
    return ImageHeader("pixels", height, width, 3, 0, 1)
