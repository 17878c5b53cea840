"""What a decoder of whole batches promises, and what those share that take a list and fail as a whole.

    images, their headers  ──►  a list of pictures on a device, or for each image that has none the reason

GPU libraries decode a list in one call, and one bad image fails the call. Then the list is halved, and each half
tried by itself: a bad image among n costs about 2 log2(n) further calls, and no other image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from cache.errors import BadSampleError
from readers.decode.cpu import DECODER, decode_image
from readers.decode.orient import upright_size
from readers.decode.picture import Picture
from readers.decode.region import lent
from readers.headers import ImageHeader, exif_orientation
from readers.sample import Buffer

__all__ = ["CpuDecoder", "Decoded", "Decoder", "ListDecoder"]

Decoded: TypeAlias = Picture | BadSampleError
# How torch begins to say that a device is lost; from 2.8 on that has a class of its own, too.
_LOST = ("CUDA error", "HIP error")


class Decoder(Protocol):
    """name: for resume tokens. device: where the pictures will lie."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def decode(self, images: Sequence[Buffer], headers: Sequence[ImageHeader]) -> list[Decoded]:
        """A picture or an error for each image, in their order. headers: what `read_header` says of them."""


@dataclass(frozen=True)
class ListDecoder:
    """JPEGs by a function that takes a list of encoded images (uint8 [bytes], on the CPU) and returns one of pixels,
    uint8 [3, height, width] on `device`, or raises. turns: whether it applies EXIF orientation itself.
    """

    name: str
    device: torch.device
    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    turns: bool

    def decode(self, images: Sequence[Buffer], headers: Sequence[ImageHeader]) -> list[Decoded]:
        encoded = [torch.from_numpy(lent(np.frombuffer(image, np.uint8))) for image in images]
        decoded = self._tried(encoded)
        return [self._picture(*row) for row in zip(decoded, headers, images, strict=True)]

    def _tried(self, encoded: list[torch.Tensor]) -> list[torch.Tensor | BadSampleError]:
        if not encoded:
            return []
        try:
            decoded = self.call(encoded)
        except (RuntimeError, ValueError) as error:
            if _ends_the_batch(error):
                raise
            if len(encoded) == 1:
                return [BadSampleError(f"jpeg image: {self.name}: {error}")]
            half = len(encoded) // 2
            return self._tried(encoded[:half]) + self._tried(encoded[half:])
        if len(decoded) != len(encoded):
            raise RuntimeError(f"{self.name} decoded {len(encoded)} images to {len(decoded)}")
        return list(decoded)

    def _picture(self, found: torch.Tensor | BadSampleError, header: ImageHeader, image: Buffer) -> Decoded:
        if isinstance(found, BadSampleError):
            return found
        size, orientation = (header.height, header.width), header.orientation
        if self.turns and orientation != 1 and exif_orientation(image) == orientation:
            size, orientation = upright_size(*size, orientation), 1  # and not, if XMP alone told it
        if found.dtype != torch.uint8 or tuple(found.shape) != (3, *size):
            seen = f"{found.dtype} {list(found.shape)}"
            return BadSampleError(f"jpeg image: {self.name}: expected torch.uint8 {[3, *size]}, found {seen}")
        return Picture(found, orientation)


def _ends_the_batch(error: Exception) -> bool:
    """The device is lost, or full: no fault of an image."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or str(error).startswith(_LOST)


class CpuDecoder:
    """Everything that `decode_image` takes, one image after another; copied to a device where that is asked for."""

    name = DECODER

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def decode(self, images: Sequence[Buffer], headers: Sequence[ImageHeader]) -> list[Decoded]:
        sizes = [upright_size(header.height, header.width, header.orientation) for header in headers]
        return [self._one(image, size) for image, size in zip(images, sizes, strict=True)]

    def _one(self, image: Buffer, size: tuple[int, int]) -> Decoded:
        try:
            pixels = np.ascontiguousarray(decode_image(image, size=size))
        except BadSampleError as error:
            return error
        return Picture(torch.from_numpy(lent(pixels)).permute(2, 0, 1).to(self.device, non_blocking=True))
