"""What every format module shares: the parsed header, the numbers of the formats, the wording of an error.

Offsets in messages are bytes from the start of the image, whatever larger buffer it lies in.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

from cache.errors import BadSampleError

__all__ = ["MAX_PIXELS", "MEDIA", "SUFFIX", "Buffer", "ImageHeader", "bad", "check_size", "truncated", "unpack"]

Buffer: TypeAlias = bytes | memoryview

# The position is the code that an index column stores: append, never reorder. Pixels are never in a file.
MEDIA = ("", "jpeg", "png", "webp", "gif", "bmp", "tiff", "pixels")
# Four times the size from which Pillow speaks of a decompression bomb: 1 GB of RGB.
MAX_PIXELS = 4 * 89_478_485
SUFFIX = {"jpeg": "jpg", "png": "png", "webp": "webp", "gif": "gif", "bmp": "bmp", "tiff": "tif"}


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
