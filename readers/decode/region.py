"""What part of an image to decode, the memory to decode it into, and images that are decoded already.

The latter (`readers.headers.pixels`) are looked at where they are, whatever part is wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.headers import ImageHeader
from readers.headers.header import MAX_PIXELS
from readers.headers.pixels import HEADER_BYTES, header
from readers.sample import Buffer

__all__ = ["MAX_PIXELS", "Region", "Scratch", "check_pixels", "lent", "pixels_of", "with_header"]

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


def pixels_of(data: Buffer, header: ImageHeader) -> npt.NDArray[np.uint8]:
    """The pixels behind the header, uint8 [height, width, 3]: a view, read-only where `data` is."""
    count = header.height * header.width * 3
    return np.frombuffer(data, np.uint8, count, HEADER_BYTES).reshape(header.height, header.width, 3)


def with_header(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels, uint8 [height, width, 3], as an image that `decode_image` takes."""
    height, width, _ = pixels.shape
    return header(height, width) + pixels.tobytes()


def lent(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same pixels, marked writable for a library that takes no others and will only read; writing would fault.

    torch warns of a read-only array even where it does not write to it.
    """
    return pixels if pixels.flags.writeable else np.asarray(_Lent(pixels))


class _Lent:
    """An array under other flags; keeps it alive for as long as anybody looks."""

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._pixels = pixels
        interface: dict[str, Any] = dict(pixels.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
