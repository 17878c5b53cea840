"""Decoders of whole batches: which image is decoded where, by whom, and why one could not be.

    images, their headers  ──►  a list of pictures on a device, or for each image that has none the reason

Which images a device decodes follows from header facts; the CPU decodes the others, and those on which the device
failed.

    JPEG, baseline (SOF0), 1 or 3 components, both sides 64 or more      device
    JPEG, extended or progressive: nvJPEG's and rocJPEG's slow path      CPU
    JPEG, 4 components (CMYK, YCCK): refused by both, or wrong colours   CPU
    JPEG, a side under 64: rocJPEG refuses it, nvJPEG gains nothing      CPU
    PNG, WebP, GIF, BMP, TIFF, pixels of a cache, unknown                CPU

GPU libraries decode a list in one call, and one bad image fails the call. Then the list is halved, and each half is
tried by itself: a bad image among n costs about 2 log2(n) further calls, and no other image.

A new decoder is a file with a function of a device, which raises MissingExtraError where its package is missing, and
its entry in `_REGISTRY`, in the order in which "auto" tries them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from cache.errors import BadSampleError, MissingExtraError
from readers.decode.cpu import DECODER, decode_image
from readers.decode.device import Picture
from readers.decode.region import MAX_PIXELS, lent
from readers.decode.torchcodec import load_torchcodec
from readers.decode.torchvision import load_torchvision
from readers.headers import MEDIA, ImageHeader, exif_orientation, parse_any, read_frame
from readers.sample import Buffer, ImageInfo

__all__ = [
    "DECODERS",
    "CpuDecoder",
    "Decoded",
    "Decoder",
    "DecoderName",
    "ListDecoder",
    "decode_batch",
    "device_takes",
    "open_decoder",
    "routes",
    "same_as_promised",
]

Decoded: TypeAlias = Picture | BadSampleError
DecoderName: TypeAlias = Literal["auto", "cpu", "torchcodec", "torchvision"]
DECODERS: tuple[DecoderName, ...] = get_args(DecoderName)
# (function of a device, whether what it loads applies EXIF orientation)
_REGISTRY = {"torchcodec": (load_torchcodec, True), "torchvision": (load_torchvision, False)}

# How torch begins to say that a device is lost; from 2.8 on that has a class of its own, too.
_LOST = ("CUDA error", "HIP error")
_JPEG = MEDIA.index("jpeg")
_BASELINE = 0xC0
_LEAST_SIDE = 64


class Decoder(Protocol):
    """name: for resume tokens. device: where the pictures will be."""

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
        decoded = self._decode_or_halve(encoded)
        return [self._picture(*row) for row in zip(decoded, headers, images, strict=True)]

    def _decode_or_halve(self, encoded: list[torch.Tensor]) -> list[torch.Tensor | BadSampleError]:
        if not encoded:
            return []
        try:
            decoded = self.call(encoded)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or str(error).startswith(_LOST):
                raise  # the device is full or lost: the images are not at fault
            if len(encoded) == 1:
                return [BadSampleError(f"jpeg image: {self.name}: {error}")]
            half = len(encoded) // 2
            return self._decode_or_halve(encoded[:half]) + self._decode_or_halve(encoded[half:])
        if len(decoded) != len(encoded):
            raise RuntimeError(f"{self.name} decoded {len(encoded)} images to {len(decoded)}")
        return list(decoded)

    def _picture(self, found: torch.Tensor | BadSampleError, header: ImageHeader, image: Buffer) -> Decoded:
        if isinstance(found, BadSampleError):
            return found
        size, orientation = (header.height, header.width), header.orientation
        if self.turns and orientation != 1 and exif_orientation(image) == orientation:
            size, orientation = header.upright_size, 1  # but not where only XMP states the orientation
        if found.dtype != torch.uint8 or tuple(found.shape) != (3, *size):
            seen = f"{found.dtype} {list(found.shape)}"
            return BadSampleError(f"jpeg image: {self.name}: expected torch.uint8 {[3, *size]}, found {seen}")
        return Picture(found, orientation)


@dataclass(frozen=True)
class CpuDecoder:
    """Every image that `decode_image` takes, one after another; copied to a device where `device` is one."""

    device: torch.device
    name: str = DECODER

    def decode(self, images: Sequence[Buffer], headers: Sequence[ImageHeader]) -> list[Decoded]:
        return [self._decode_one(image, header) for image, header in zip(images, headers, strict=True)]

    def _decode_one(self, image: Buffer, header: ImageHeader) -> Decoded:
        try:
            pixels = np.ascontiguousarray(decode_image(image, size=header.upright_size))
        except BadSampleError as error:
            return error
        return Picture(torch.from_numpy(lent(pixels)).permute(2, 0, 1).to(self.device, non_blocking=True))


def open_decoder(name: DecoderName, device: torch.device, images: str = "images") -> Decoder:
    """The decoder called `name`. "auto" is, on a CUDA device, the first that is installed of torchcodec and
    torchvision, or else the CPU, with a warning; elsewhere it is the CPU. Raises MissingExtraError for one that is
    named and not installed.

    images: what the warning says is decoded on the CPU.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder is one of {', '.join(DECODERS)}, not {name!r}")
    if name in _REGISTRY:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} decodes on cpu and cuda devices, not on {device}; use decoder='cpu'")
        return _open(name, device)
    if name == "cpu" or device.type != "cuda":
        return CpuDecoder(device)
    reasons = []
    for installed in _REGISTRY:
        try:
            return _open(installed, device)
        except MissingExtraError as error:
            reasons.append(str(error))
    warnings.warn(f"{images} are decoded on the CPU: {'; '.join(reasons)}", stacklevel=2)
    return CpuDecoder(device)


def _open(name: str, device: torch.device) -> ListDecoder:
    load, turns = _REGISTRY[name]
    return ListDecoder(f"{name}/{device.type}", device, load(device), turns)


def routes(info: ImageInfo) -> npt.NDArray[np.bool_]:
    """Which of n images a device decodes, bool [n]."""
    height, width = info.height.astype(np.float64), info.width.astype(np.float64)  # whose product fits
    return np.asarray(_rule(info.media, info.process, info.components, height, width))


def device_takes(header: ImageHeader) -> bool:
    """The same for one image."""
    media = MEDIA.index(header.media)
    return bool(_rule(media, header.process, header.components, header.height, header.width))


def _rule(media: Any, process: Any, components: Any, height: Any, width: Any) -> Any:
    """Numbers, or arrays of them."""
    coding = (media == _JPEG) & (process == _BASELINE) & ((components == 1) | (components == 3))
    return coding & (height >= _LEAST_SIDE) & (width >= _LEAST_SIDE) & (height * width <= MAX_PIXELS)


def same_as_promised(data: Buffer, size: tuple[int, int]) -> ImageHeader | None:
    """The header of an image that may be sent to a device: one it takes, of the upright (height, width) in the index.

    None sends the image to the CPU, which reports what is wrong: no GPU library may get bytes that are not what the
    index promises.
    """
    try:
        header = parse_any(data)
    except BadSampleError:
        return None
    return header if header.upright_size == size and device_takes(header) else None


def decode_batch(images: Sequence[Buffer], decoder: Decoder) -> list[Decoded]:
    """Decode images of any kind: a picture on the decoder's device for each, or why there is none; in their order."""
    results: dict[int, Decoded] = {}
    headers: dict[int, ImageHeader] = {}
    on_device: list[int] = []
    for row, image in enumerate(images):
        try:
            headers[row], frame = read_frame(image)
        except BadSampleError as error:
            results[row] = error
        else:
            # An image that our own parser refuses has no frame: GPU libraries may not get it.
            if frame and device_takes(headers[row]):
                on_device.append(row)
    decoded = decoder.decode([images[row] for row in on_device], [headers[row] for row in on_device])
    results |= {row: one for row, one in zip(on_device, decoded, strict=True) if isinstance(one, Picture)}
    others = [row for row in headers if row not in results]
    decoded = CpuDecoder(decoder.device).decode([images[row] for row in others], [headers[row] for row in others])
    results |= zip(others, decoded, strict=True)
    return [results[row] for row in range(len(images))]
