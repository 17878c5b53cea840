"""Images that are decoded already (`readers.headers.pixels`): looked at where they lie, whatever part is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from readers.headers import ImageHeader
from readers.headers.pixels import HEADER_BYTES, header
from readers.sample import Buffer

__all__ = ["lent", "pixels_of", "with_header"]


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
