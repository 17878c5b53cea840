"""What part of an image to decode, the memory to decode it into, and pixels as seen, by EXIF orientation.

Any part of an image that a cache has decoded (`readers.headers.base`) is a view of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError
from readers.headers import ImageHeader, read_frame
from readers.headers.base import MAX_PIXELS, PIXELS_HEADER_BYTES, pixels_header
from readers.table import Buffer

__all__ = [
    "MAX_PIXELS",
    "Region",
    "Scratch",
    "check_coding",
    "check_header",
    "has_clean_header",
    "lent",
    "pixels_of",
    "readable_frame",
    "upright",
    "with_header",
]

_KEPT_BYTES = 64 << 20
_BITS = 8
_PROCESSES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA)


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
    """Memory of one thread, used for one image after another: each overwrites what was decoded before.

    Up to 64 MiB of each kind are kept; an image that needs more gets separate memory.
    """

    __slots__ = ("_encoded", "_pixels")

    def __init__(self) -> None:
        self._encoded = bytearray()
        self._pixels = bytearray()

    def encoded(self, size: int) -> bytearray:
        """At least `size` bytes for encoded data."""
        memory = _enlarged(self._encoded, size)
        if len(memory) <= _KEPT_BYTES:
            self._encoded = memory
        return memory

    def pixels(self, size: int) -> bytearray | memoryview:
        """At least `size` bytes for decoded pixels."""
        memory = _enlarged(self._pixels, size)
        if len(memory) <= _KEPT_BYTES:
            self._pixels = memory
        return memory


def _enlarged(memory: bytearray, size: int) -> bytearray:
    """The memory itself, or new memory in whole MiB where it is too small."""
    return memory if len(memory) >= size else bytearray(-(-size // (1 << 20)) << 20)


def check_header(header: ImageHeader, size: tuple[int, int] | None = None) -> None:
    """Raise BadSampleError for an image that is not of the upright (height, width) in the index, or so large that
    decoding it could exhaust the machine.
    """
    if size is not None and header.upright_size != size:
        found = header.upright_size
        raise BadSampleError(f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {found}")
    if header.height * header.width > MAX_PIXELS:
        raise BadSampleError(f"{header.height} x {header.width} pixels are more than the {MAX_PIXELS} that are decoded")


def readable_frame(data: Buffer, size: tuple[int, int] | None = None) -> tuple[ImageHeader, int]:
    """The header of an image, and the byte of a JPEG that holds its height, 0 for others.

    Raises BadSampleError for what no decoder here takes, and for another upright (height, width) than `size`.
    """
    header, frame = read_frame(data)
    check_header(header, size)
    if frame:
        check_coding(data, header, frame)
    return header, frame


def check_coding(data: Buffer, header: ImageHeader, frame: int) -> None:
    """Raise BadSampleError for a JPEG that neither TurboJPEG nor Pillow takes.

    Other than 8 bits a sample, which the frame states before its height at `frame`; two components; hierarchical
    JPEGs, and lossless ones of arithmetic coding.
    """
    bits = data[frame - 1]
    if bits != _BITS:
        raise BadSampleError(f"jpeg image: has {bits} bits a sample; no decoder here takes other than {_BITS}")
    if header.components == 2:
        raise BadSampleError("jpeg image: has 2 components; decoders here take 1, 3 or 4")
    if header.process not in _PROCESSES:
        raise BadSampleError(f"jpeg image: is of process SOF{header.process & 15}, which no decoder here takes")


def has_clean_header(source: Any) -> bool:
    """Whether libjpeg reports nothing for a JPEG before its pixels: TurboJPEG decodes no others."""
    try:
        simplejpeg.decode_jpeg_header(source, strict=True)
    except ValueError:
        return False
    return True


def upright(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Pixels [height, width, channels], or [height, width], as seen: a view, perhaps with negative strides.

    Source: EXIF 2.32, tag 0x0112. The numbers 2 to 4 mirror or turn by 180 degrees; 5 to 8 exchange rows and columns as
    well.
    """
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows = slice(None, None, -1) if orientation in (3, 4, 7, 8) else slice(None)
    columns = slice(None, None, -1) if orientation in (2, 3, 6, 7) else slice(None)
    return np.asarray(pixels[rows, columns])


def pixels_of(data: Buffer, header: ImageHeader) -> npt.NDArray[np.uint8]:
    """The pixels behind the header of decoded ones, uint8 [height, width, 3]: a view, read-only where `data` is."""
    count = header.height * header.width * 3
    return np.frombuffer(data, np.uint8, count, PIXELS_HEADER_BYTES).reshape(header.height, header.width, 3)


def with_header(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels, uint8 [height, width, 3], as an image that `decode_image` takes."""
    height, width, _ = pixels.shape
    return pixels_header(height, width) + pixels.tobytes()


def lent(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same pixels, marked writable for a library that takes no others and will only read; writing would fault.

    torch warns of a read-only array even where it does not write to it.
    """
    return pixels if pixels.flags.writeable else np.asarray(_Lent(pixels))


class _Lent:
    """An array under other flags, kept alive for as long as a view of it is."""

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._pixels = pixels
        interface: dict[str, Any] = dict(pixels.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
