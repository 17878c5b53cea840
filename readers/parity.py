"""How far decoders and resizers are from Pillow, on images of a set. Needs torch: `pip install 'packer-vision[torch]'`.

Training on one and evaluating with another changes the data in a way that no loss curve shows. Every decoder and
resizer that runs here is compared with what Pillow makes of the same bytes, or of the same pixels and boxes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, MissingExtraError
from readers.augment import RandomResizedCrop, Recipe
from readers.augment.recipe import Job
from readers.decode.region import with_header
from readers.reader import Reader
from readers.sample import Buffer

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch", "readers.parity") from error

from readers.augment.cpu import Renderer
from readers.augment.fused import BatchRenderer, triton_runs
from readers.decode.batch import DECODERS, Decoder, decode_batch, device_takes, open_decoder
from readers.decode.device import Picture, upright_tensor
from readers.headers import read_header

__all__ = ["Parity", "compare_with_pillow"]

_BATCH = 16
_Pixels: TypeAlias = npt.NDArray[np.uint8]
# Encoded images, what Pillow makes of each, jobs, what Pillow makes of each box.
_Batch: TypeAlias = tuple[list[Buffer], list[_Pixels], list[Job], list[_Pixels]]


@dataclass(frozen=True, slots=True)
class Parity:
    """One contender against Pillow, in steps of 255 over all values of all images.

    what: "decoder", "resizer", or "both", for a box decoded and resized as the loader does it. images: how many were
    compared; by_device: how many of them the decoder itself took, the others having gone to the CPU. mean: absolute
    difference; worst_image: the largest mean of one image; largest: of one value. reason: why it did not run, else "".
    """

    what: str
    name: str
    images: int = 0
    by_device: int = 0
    mean: float = 0.0
    worst_image: float = 0.0
    largest: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Tally:
    def __init__(self, what: str, name: str) -> None:
        self.what, self.name, self.by_device = what, name, 0
        self._means: list[float] = []
        self._values: list[int] = []
        self._largest = 0

    def add(self, found: _Pixels, pillow: _Pixels) -> None:
        if found.shape != pillow.shape:
            raise BadSampleError(f"{self.name}: expected {pillow.shape} pixels as Pillow's, found {found.shape}")
        apart = np.abs(found.astype(np.int16) - pillow)
        self._means.append(float(apart.mean()))
        self._values.append(apart.size)
        self._largest = max(self._largest, int(apart.max()))

    def result(self) -> Parity:
        mean = float(np.average(self._means, weights=self._values)) if self._means else 0.0
        worst = max(self._means, default=0.0)
        return Parity(self.what, self.name, len(self._means), self.by_device, mean, worst, self._largest)


def compare_with_pillow(
    reader: Reader, *, samples: int = 200, size: int = 224, seed: int = 0, device: torch.device | str = "cpu"
) -> list[Parity]:
    """Compare everything that runs here, on `samples` images drawn by `seed`; boxes are RandomResizedCrop(size)'s.

    Images that Pillow cannot decode are left out. Raises ValueError for no samples, and BadSampleError where a decoder
    gives another size than Pillow does.
    """
    if samples < 1 or not len(reader):
        raise ValueError(f"{samples} of {len(reader)} samples leave nothing to compare")
    place = torch.device(device)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(reader), min(samples, len(reader)), replace=False))
    comparisons, missing = _comparisons(place)
    for start in range(0, len(chosen), _BATCH):
        batch = _batch(reader, chosen[start : start + _BATCH], size, seed)
        for compare, tally in comparisons:
            compare(batch, tally)
    return [tally.result() for _, tally in comparisons] + missing


def _comparisons(device: torch.device) -> tuple[list[tuple[Callable[[_Batch, _Tally], None], _Tally]], list[Parity]]:
    found: list[tuple[Callable[[_Batch, _Tally], None], _Tally]] = []
    missing = []
    for name in DECODERS[1:]:
        try:
            decoder = open_decoder(name, device)
        except MissingExtraError as error:
            missing.append(Parity("decoder", name, reason=str(error)))
        else:
            found.append((_decoding(decoder), _Tally("decoder", decoder.name)))
    found.append((_resize_on_the_cpu, _Tally("resizer", "cpu")))
    found.append((_resizing(BatchRenderer(device, dtype=torch.uint8, engine="torch")), _Tally("resizer", "torch")))
    if triton_runs(device):
        kernel = BatchRenderer(device, dtype=torch.uint8, engine="triton")
        found.append((_resizing(kernel), _Tally("resizer", "triton")))
    else:
        reason = "needs triton, and a GPU or TRITON_INTERPRET=1"
        missing.append(Parity("resizer", "triton", reason=reason))
    found.append((_both_on_the_cpu, _Tally("both", "cpu")))
    return found, missing


def _batch(reader: Reader, indices: npt.NDArray[np.int64], size: int, seed: int) -> _Batch:
    from PIL import Image

    encoded: list[Buffer] = []
    decoded: list[_Pixels] = []
    for data in reader.read_many(indices):
        pixels = _by_pillow(data)
        if pixels is not None:
            encoded.append(data)
            decoded.append(pixels)
    heights, widths = (np.array([pixels.shape[axis] for pixels in decoded], np.int64) for axis in (0, 1))
    jobs = Recipe([RandomResizedCrop(size)]).plan(seed, 0, indices[: len(decoded)], heights, widths).jobs()
    boxes = []
    for pixels, ((top, left, height, width, *_), *_) in zip(decoded, jobs, strict=True):
        box = Image.fromarray(pixels).crop((left, top, left + width, top + height))
        boxes.append(np.asarray(box.resize((size, size), Image.Resampling.BILINEAR)))
    return encoded, decoded, jobs, boxes


def _by_pillow(data: Buffer) -> _Pixels | None:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError):
        return None


def _decoding(decoder: Decoder) -> Callable[[_Batch, _Tally], None]:
    def compare(batch: _Batch, tally: _Tally) -> None:
        for found, data, pillow in zip(decode_batch(batch[0], decoder), batch[0], batch[1], strict=True):
            if isinstance(found, Picture):
                tally.by_device += device_takes(read_header(data))
                tally.add(upright_tensor(found).permute(1, 2, 0).cpu().numpy(), pillow)

    return compare


def _resizing(renderer: BatchRenderer) -> Callable[[_Batch, _Tally], None]:
    def compare(batch: _Batch, tally: _Tally) -> None:
        _, decoded, jobs, boxes = batch
        if boxes:
            tensors = (torch.from_numpy(pixels.copy()).to(renderer.device) for pixels in decoded)
            pictures = [Picture(tensor.permute(2, 0, 1)) for tensor in tensors]
            made = renderer.render(pictures, jobs, (boxes[0].shape[0], boxes[0].shape[1]))
            _add_all(tally, made.permute(0, 2, 3, 1).cpu().numpy(), boxes)

    return compare


def _resize_on_the_cpu(batch: _Batch, tally: _Tally) -> None:
    _add_all(tally, _rendered([with_header(pixels) for pixels in batch[1]], batch), batch[3])


def _both_on_the_cpu(batch: _Batch, tally: _Tally) -> None:
    _add_all(tally, _rendered(batch[0], batch), batch[3])


def _rendered(images: Sequence[Buffer], batch: _Batch) -> Iterator[_Pixels]:
    renderer, (_, decoded, jobs, boxes) = Renderer(), batch
    for image, pixels, job, box in zip(images, decoded, jobs, boxes, strict=True):
        out = torch.empty((1, *box.shape), dtype=torch.uint8).permute(0, 3, 1, 2)
        renderer.render(image, job, (pixels.shape[0], pixels.shape[1]), out)
        yield out[0].permute(1, 2, 0).numpy()


def _add_all(tally: _Tally, found: Any, pillow: Sequence[_Pixels]) -> None:
    for ours, theirs in zip(found, pillow, strict=True):
        tally.add(ours, theirs)
