"""The region of an image to decode, scratch memory for decoding, checks of headers, and EXIF orientation of pixels."""

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

    reduce is 1, 2, 4 or 8. top and left are multiples of it, and so are height and width unless the box ends at the
    edge of the image. The decoded box has ceil(height / reduce) rows and ceil(width / reduce) columns.
    coarse: subsampled chroma of a JPEG may be repeated instead of interpolated. This is faster, and hardly visible if
    the decoded box is then resized to half its size or less.
    """

    top: int
    left: int
    height: int
    width: int
    reduce: int = 1
    coarse: bool = False


class Scratch:
    """Memory of one thread for decoding; each image overwrites the one before it.

    Up to 64 MiB each are kept for encoded data and for pixels; a larger image gets separate memory.
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
    """The memory itself, or new memory of whole MiB if it is too small."""
    return memory if len(memory) >= size else bytearray(-(-size // (1 << 20)) << 20)


def check_header(header: ImageHeader, size: tuple[int, int] | None = None) -> None:
    """Raise BadSampleError for an image of more than MAX_PIXELS pixels, or of another size than in the index.

    size: the upright (height, width) in the index, None if unknown.
    """
    if size is not None and header.upright_size != size:
        actual = header.upright_size
        raise BadSampleError(f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {actual}")
    if header.height * header.width > MAX_PIXELS:
        raise BadSampleError(f"{header.height} x {header.width} pixels are more than the {MAX_PIXELS} that are decoded")


def readable_frame(data: Buffer, size: tuple[int, int] | None = None) -> tuple[ImageHeader, int]:
    """The header of an image, and the position of the height in a JPEG, 0 for other media.

    Raises BadSampleError for an image that no decoder here supports, and for another upright (height, width) than
    `size`.
    """
    header, frame = read_frame(data)
    check_header(header, size)
    if frame:
        check_coding(data, header, frame)
    return header, frame


def check_coding(data: Buffer, header: ImageHeader, frame: int) -> None:
    """Raise BadSampleError for a JPEG that neither TurboJPEG nor Pillow supports.

    These are JPEGs of other than 8 bits per sample, of two components, hierarchical JPEGs, and lossless JPEGs with
    arithmetic coding. frame: the position of the height; the byte before it is the number of bits.
    """
    bits = data[frame - 1]
    if bits != _BITS:
        raise BadSampleError(f"jpeg image: has {bits} bits a sample; the decoders accept only {_BITS}")
    if header.components == 2:
        raise BadSampleError("jpeg image: has 2 components; the decoders accept 1, 3 or 4")
    if header.process not in _PROCESSES:
        raise BadSampleError(f"jpeg image: is of process SOF{header.process & 15}, which no decoder accepts")


def has_clean_header(source: Any) -> bool:
    """Whether libjpeg reads the header of a JPEG without a warning; TurboJPEG decodes no other JPEGs."""
    try:
        simplejpeg.decode_jpeg_header(source, strict=True)
    except ValueError:
        return False
    return True


def upright(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """The upright pixels for an EXIF orientation, as a view that may have negative strides.

    pixels: [height, width, channels] or [height, width]. Source: EXIF 2.32, tag 0x0112. Orientations 2 to 4 mirror or
    rotate by 180 degrees; 5 to 8 also exchange rows and columns.
    """
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows = slice(None, None, -1) if orientation in (3, 4, 7, 8) else slice(None)
    columns = slice(None, None, -1) if orientation in (2, 3, 6, 7) else slice(None)
    return np.asarray(pixels[rows, columns])


def pixels_of(data: Buffer, header: ImageHeader) -> npt.NDArray[np.uint8]:
    """The pixels of an image that a cache stores decoded, uint8 [height, width, 3]: a view of `data`, after its
    header, and read-only if `data` is."""
    count = header.height * header.width * 3
    return np.frombuffer(data, np.uint8, count, PIXELS_HEADER_BYTES).reshape(header.height, header.width, 3)


def with_header(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The image of these pixels, uint8 [height, width, 3], with a header, for `decode_image`."""
    height, width, _ = pixels.shape
    return pixels_header(height, width) + pixels.tobytes()


def lent(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A view of the pixels that is marked writable, for a library that only reads them; a write can crash the process.

    torch warns about a read-only array even if it does not write to it.
    """
    return pixels if pixels.flags.writeable else np.asarray(_Lent(pixels))


class _Lent:
    """An array interface marked writable; keeps its array alive as long as a view of it exists."""

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._pixels = pixels
        interface: dict[str, Any] = dict(pixels.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
