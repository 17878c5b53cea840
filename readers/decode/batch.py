"""Decoders of whole batches, and the choice of the decoder for each image.

    images, their headers  ──►  a list with a picture on a device, or an error, for each image

Which images a device decodes follows from header facts; the CPU decodes the others, and those on which the device
failed.

    JPEG, baseline (SOF0), 1 or 3 components, both sides 64 or more      device
    JPEG, extended or progressive: nvJPEG's slow path                    CPU
    JPEG, 4 components (CMYK, YCCK): refused, or in wrong colours        CPU
    JPEG that stores RGB: nvJPEG takes the values for YCbCr              CPU, as the bytes say, not the index
    JPEG whose chroma is finer than its luma, or of two kinds: not
        known to be right on a GPU                                       CPU, as the bytes say, not the index
    JPEG, grey, with sampling factors other than 1 x 1: nvJPEG takes
        the blocks in another order, and gives wrong pixels              CPU, as the bytes say, not the index
    JPEG, a side under 64: nvJPEG gains nothing, rocJPEG refuses it      CPU
    PNG, WebP, GIF, BMP, TIFF, pixels of a cache, unknown                CPU

GPU libraries decode a list in one call, and one bad image fails the call. Then the list is halved, and each half is
tried alone: a bad image among n costs about 2 log2(n) further calls, and no other image.

Their errors do not say whether the image or the device is at fault: torchcodec and torchvision raise RuntimeError for
everything, from a broken bit stream to a lost device, and the same status of nvJPEG may mean either. So a decoder is
probed, with an image that is known to be good, when it is opened and again when a call fails. If the probe fails, the
device is at fault (DeviceError); otherwise the images are. A decoder that refuses the first images all for one reason
is of no use for this set, and a DeviceError as well.

A new decoder is a file with a function of a device, which raises what importing its package does, and its entry in
`_REGISTRY`, in the order in which "auto" tries them.
"""

from __future__ import annotations

import base64
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from cache.errors import BadSampleError, DeviceError, MissingExtraError
from cache.messages import shortened
from readers.decode.cpu import DECODER, decode_image
from readers.decode.device import Picture, has_jpeg_engine, load_torchcodec, load_torchvision
from readers.decode.region import MAX_PIXELS, lent
from readers.headers import MEDIA, ImageHeader, exif_orientation, read_frame, stores_rgb
from readers.table import Buffer, ImageInfo

__all__ = [
    "DECODERS",
    "PROBE",
    "CpuDecoder",
    "Decoded",
    "Decoder",
    "DecoderName",
    "ListDecoder",
    "decode_batch",
    "decoders_here",
    "device_takes",
    "open_decoder",
    "reason_of",
    "routes",
    "same_as_promised",
]

Decoded: TypeAlias = Picture | BadSampleError
DecoderName: TypeAlias = Literal["auto", "cpu", "torchcodec", "torchvision"]
DECODERS: tuple[DecoderName, ...] = get_args(DecoderName)


class _Library(NamedTuple):
    """A library of decoders.

    load: loads its decoder for a device. turns: whether the decoder applies EXIF orientation. needs, extra: the package
    and the extra to install.
    """

    load: Callable[[torch.device], Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]]
    turns: bool
    needs: str
    extra: str


_REGISTRY = {
    "torchcodec": _Library(load_torchcodec, True, "torchcodec >= 0.16", "gpu"),
    "torchvision": _Library(load_torchvision, False, "torchvision >= 0.20", "torchvision"),
}
# A baseline 4:2:0 JPEG of 64 x 64 pixels in four colours, and the colours in the middle of its quarters.
PROBE = base64.b85decode(
    "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeNA{DF5"
    "34LjeZ|2MP!Z6AB6wC>j<TC@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@BBH01*fPKmb4k0U`hb5di}c0sq7R7"
    "61VO0RR910000000000000062mizX6c7Ob00000000000000000030!~huq0RRI50RR91000000000000adG2nPSe02C1c000000000000000000"
    "00|Jncy0|5X65d#qbKLCmWK-RzkU;-<bzyTftQ>Xv|U;-<bzyX|q-JZ+<8dwa;WB?4%2AZt^29^UdSpWn7*#"
)
_PROBED = {(16, 16): (200, 40, 40), (16, 48): (40, 179, 60), (48, 16): (50, 60, 191), (48, 48): (128, 128, 128)}
_NEAR = 6  # tolerance of 255: inverse DCTs and colour conversions round differently
_ALIKE = 16  # if the first images, this many, are all refused for the same reason, the decoder is at fault
_REASON_CHARACTERS = 300
_JPEG = MEDIA.index("jpeg")
_BASELINE = 0xC0
_LEAST_SIDE = 64
_ONE_BY_ONE = 0x11  # the sampling factors of a component


class Decoder(Protocol):
    """name: for resume tokens. device: where the pictures will be."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def decode(self, images: Sequence[Buffer], headers: Sequence[ImageHeader]) -> list[Decoded]:
        """A picture or an error for each image, in their order. headers: their results of `read_header`."""


@dataclass(frozen=True)
class ListDecoder:
    """Decodes JPEGs by a library's function.

    call: takes a list of encoded images (uint8 [bytes], on the CPU) and returns a list of pixels, uint8 [3, height,
        width] on `device`, or raises. turns: whether it applies EXIF orientation.

    `decode` raises DeviceError if the device or the library is at fault, not an image.
    """

    name: str
    device: torch.device
    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    turns: bool
    _seen: Counter[str] = field(default_factory=Counter, repr=False)  # images, by why they were refused; "": decoded

    def probe(self) -> str:
        """Why this decoder cannot be used; "" if it decodes a known good image."""
        try:
            (image,) = self.call([torch.from_numpy(np.frombuffer(PROBE, np.uint8).copy())])
            seen = {at: tuple(image[:, at[0], at[1]].tolist()) for at in _PROBED}
        except Exception as error:  # whatever a library raises
            return reason_of(error)
        apart = max(abs(a - b) for at, known in _PROBED.items() for a, b in zip(known, seen[at], strict=True))
        return f"it decodes a known image to {seen}, expected {_PROBED}" if apart > _NEAR else ""

    def decode(self, images: Sequence[Buffer], headers: Sequence[ImageHeader]) -> list[Decoded]:
        if not images:
            return []
        encoded = [torch.from_numpy(lent(np.frombuffer(image, np.uint8))) for image in images]
        results: Sequence[torch.Tensor | BadSampleError]
        try:
            results = self._call(encoded)
        except Exception as error:  # whatever a library raises
            self._check_device(error)
            results = self._halve(encoded, error)
        made = [self._picture(*row) for row in zip(results, headers, images, strict=True)]
        refused = [result for result in made if isinstance(result, BadSampleError)]
        self._seen[""] += len(made) - len(refused)
        if refused:
            self._check_device(refused[0])
            self._check_use(refused)
        return made

    def _call(self, encoded: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        decoded = self.call(encoded)
        if len(decoded) != len(encoded):
            raise DeviceError(f"{self.name} decoded {len(encoded)} images to {len(decoded)}")
        return decoded

    def _halve(self, encoded: list[torch.Tensor], error: Exception) -> list[torch.Tensor | BadSampleError]:
        """Find the images on which a call failed, by halving the list."""
        if len(encoded) == 1:
            return [BadSampleError(f"jpeg image: {self.name}: {reason_of(error)}")]
        results: list[torch.Tensor | BadSampleError] = []
        half = len(encoded) // 2
        for some in (encoded[:half], encoded[half:]):
            try:
                results += self._call(some)
            except Exception as again:  # as above
                results += self._halve(some, again)
        return results

    def _check_device(self, error: Exception) -> None:
        """Raise DeviceError if the probe fails now, because then no image is at fault."""
        fault = self.probe()
        if fault:
            raise DeviceError(
                f"{self.name} has failed, and now fails on an image that it decoded before ({fault}): the GPU, its "
                f"driver or this library is at fault, not your images; the first error was: {reason_of(error)}"
            ) from error

    def _check_use(self, refused: Sequence[BadSampleError]) -> None:
        """Raise DeviceError if all images so far were refused for the same reason."""
        self._seen.update(map(str, refused))
        if not self._seen[""] and len(self._seen) == 2 and sum(self._seen.values()) >= _ALIKE:
            raise DeviceError(
                f"{self.name} decodes a known image, but refused all {sum(self._seen.values())} images of this set so "
                f"far for the same reason: {refused[0]}; give decoder='cpu'"
            )

    def _picture(self, result: torch.Tensor | BadSampleError, header: ImageHeader, image: Buffer) -> Decoded:
        if isinstance(result, BadSampleError):
            return result
        size, orientation = (header.height, header.width), header.orientation
        if self.turns and orientation != 1 and exif_orientation(image) == orientation:
            size, orientation = header.upright_size, 1  # unless only XMP has the orientation
        if result.dtype != torch.uint8 or tuple(result.shape) != (3, *size):
            seen = f"{result.dtype} {list(result.shape)}"
            return BadSampleError(f"jpeg image: {self.name}: expected torch.uint8 {[3, *size]}, found {seen}")
        return Picture(result, orientation)


@dataclass(frozen=True)
class CpuDecoder:
    """Decodes images by `decode_image`, one after another, and copies them to `device`."""

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
    """The decoder called `name`, after it has decoded a known image.

    Raises MissingExtraError for a named decoder that is not installed, DeviceError for one that does not work.

    "auto" is, on a CUDA device with a JPEG engine, the first of torchcodec and torchvision that works, or else the CPU,
    with a warning that has the reasons. On other devices it is the CPU.

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
    for library in _REGISTRY:
        try:
            decoder = _open(library, device)
        except (MissingExtraError, DeviceError) as error:
            reasons.append(str(error))
            continue
        if _has_engine(device) is not False:
            return decoder
        reasons.append(
            f"{library} works, but nvJPEG finds no JPEG engine on {device}, so it would decode by kernels, which may "
            f"be slower than the CPU: decoder={library!r} selects it anyway"
        )
        break
    warnings.warn(f"{images} are decoded on the CPU: {'; '.join(reasons)}", stacklevel=2)
    return CpuDecoder(device)


def decoders_here(device: torch.device) -> dict[str, str]:
    """For each library, "" if it decodes on this device, or why not; for "engine", whether the GPU has a JPEG engine:
    "yes", "no", or "" if unknown."""
    faults = dict.fromkeys(_REGISTRY, "")
    for library in _REGISTRY:
        try:
            _open(library, device)
        except (MissingExtraError, DeviceError) as error:
            faults[library] = str(error)
    faults["engine"] = {True: "yes", False: "no", None: ""}[_has_engine(device)]
    return faults


def _open(name: str, device: torch.device) -> ListDecoder:
    library = _REGISTRY[name]
    try:
        call = library.load(device)
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == name:
            raise MissingExtraError(library.needs, library.extra, f"decoding on {device.type}") from error
        raise DeviceError(
            f"{name} is installed but cannot be loaded together with torch {torch.__version__}: {reason_of(error)}; "
            f"decoding "
            f"on {device.type} needs {library.needs}, of the release that fits this torch and its CUDA"
        ) from error
    decoder = ListDecoder(f"{name}/{device.type}", device, call, library.turns)
    fault = decoder.probe()
    if fault:
        raise DeviceError(f"{name} cannot decode a known JPEG on {device}: {fault}")
    return decoder


def _has_engine(device: torch.device) -> bool | None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return has_jpeg_engine() if device.type == "cuda" else None


def reason_of(error: BaseException) -> str:
    """The message of an error and its causes in one line."""
    texts = [str(error) or type(error).__name__]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    return shortened("; ".join(" ".join(text.split()) for text in texts), _REASON_CHARACTERS)


def routes(info: ImageInfo) -> npt.NDArray[np.bool_]:
    """Whether a device decodes each of n images, bool [n]."""
    height, width = info.height.astype(np.float64), info.width.astype(np.float64)  # whose product fits
    return np.asarray(_rule(info.media, info.process, info.components, height, width))


def device_takes(header: ImageHeader) -> bool:
    """Whether a device decodes an image."""
    media = MEDIA.index(header.media)
    return bool(_rule(media, header.process, header.components, header.height, header.width))


def _rule(media: Any, process: Any, components: Any, height: Any, width: Any) -> Any:
    """The rule for routing to a device, for numbers or arrays."""
    coding = (media == _JPEG) & (process == _BASELINE) & ((components == 1) | (components == 3))
    return coding & (height >= _LEAST_SIDE) & (width >= _LEAST_SIDE) & (height * width <= MAX_PIXELS)


def same_as_promised(data: Buffer, size: tuple[int, int]) -> ImageHeader | None:
    """The header of an image that may be sent to a device, else None: the device takes it, and its upright (height,
    width) agrees with the index.

    None sends the image to the CPU, which reports the error: GPU libraries must not get bytes that disagree with the
    index. JPEGs that store RGB or have unusual sampling factors, which the index does not record, also go to the CPU;
    the factors of a single component mean nothing (T.81, A.2.2).
    """
    try:
        header, frame = read_frame(data)
    except BadSampleError:
        return None
    return header if header.upright_size == size and _may_have(header, frame, data) else None


def _may_have(header: ImageHeader, frame: int, data: Buffer) -> bool:
    """Whether an image may be sent to a device; an image without a frame was refused by this package's parser."""
    if not frame or not device_takes(header):
        return False
    luma, *chroma = data[frame + 6 : frame + 5 + 3 * header.components : 3]  # sampling factors: across, then down
    if not chroma:
        return luma == _ONE_BY_ONE
    blue, red = chroma
    usual = blue == red and blue >> 4 <= luma >> 4 and blue & 15 <= luma & 15
    return usual and not stores_rgb(data, frame)


def decode_batch(images: Sequence[Buffer], decoder: Decoder) -> list[Decoded]:
    """Decode images of any kind; returns a picture on the decoder's device, or an error, for each, in their order."""
    results: dict[int, Decoded] = {}
    headers: dict[int, ImageHeader] = {}
    on_device: list[int] = []
    for row, image in enumerate(images):
        try:
            headers[row], frame = read_frame(image)
        except BadSampleError as error:
            results[row] = error
        else:
            if _may_have(headers[row], frame, image):
                on_device.append(row)
    decoded = decoder.decode([images[row] for row in on_device], [headers[row] for row in on_device])
    results |= {row: picture for row, picture in zip(on_device, decoded, strict=True) if isinstance(picture, Picture)}
    others = [row for row in headers if row not in results]
    decoded = CpuDecoder(decoder.device).decode([images[row] for row in others], [headers[row] for row in others])
    results |= zip(others, decoded, strict=True)
    return [results[row] for row in range(len(images))]
