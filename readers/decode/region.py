"""What part of an image to decode, and the memory to decode it into."""

from __future__ import annotations

from typing import NamedTuple

from readers.errors import BadSampleError
from readers.headers.header import MAX_PIXELS

__all__ = ["MAX_PIXELS", "Region", "Scratch", "check_pixels"]

_KEPT_BYTES = 64 << 20


class Region(NamedTuple):
    """A box of an upright image (EXIF orientation applied), in pixels, at 1/reduce of its size.

    reduce is 1, 2, 4 or 8. top and left are multiples of it; height and width are too, except where the box ends at
    the edge of the image. The decoded box has ceil(height / reduce) rows and ceil(width / reduce) columns.
    coarse: colour that a JPEG stores at half the size may be repeated instead of interpolated, which is quicker and
    hardly seen where the box is then made half as large or less.
    """

    top: int
    left: int
    height: int
    width: int
    reduce: int = 1
    coarse: bool = False


class Scratch:
    """Memory of one thread, used for one image after another: what was decoded before is overwritten.

    Up to 64 MiB of each kind are kept; an image that needs more gets memory of its own.
    """

    __slots__ = ("_encoded", "_pixels")

    def __init__(self) -> None:
        self._encoded = bytearray()
        self._pixels = bytearray()

    def encoded(self, size: int) -> bytearray:
        """At least `size` bytes for encoded data."""
        if len(self._encoded) < size:
            fresh = bytearray(_rounded(size))
            if len(fresh) > _KEPT_BYTES:
                return fresh
            self._encoded = fresh
        return self._encoded

    def pixels(self, size: int) -> bytearray | memoryview:
        """At least `size` bytes for decoded pixels."""
        if len(self._pixels) < size:
            fresh = bytearray(_rounded(size))
            if len(fresh) > _KEPT_BYTES:
                return fresh
            self._pixels = fresh
        return self._pixels


def check_pixels(height: int, width: int) -> None:
    """Raise BadSampleError for an image so large that decoding it could take the machine down."""
    if height * width > MAX_PIXELS:
        raise BadSampleError(f"{height} x {width} pixels are more than the {MAX_PIXELS} that are decoded")


def _rounded(size: int) -> int:
    return -(-size // (1 << 20)) << 20
