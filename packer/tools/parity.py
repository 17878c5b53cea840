"""Differences of decoders and resizers from Pillow, on images of a set. Needs torch:
`pip install 'packer-vision[torch]'`.

A model trained with one decoder and evaluated with another sees different data, and no loss curve shows it. Every
decoder and resizer that runs here is compared with Pillow on the same bytes, or on the same pixels and boxes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, DeviceError, MissingExtraError
from readers.augment import RandomResizedCrop, Recipe
from readers.augment.geometry import Job
from readers.caching.form import Coefficients
from readers.coefficients import unsupported_reason
from readers.decode.region import with_header
from readers.reader import Reader
from readers.table import Buffer

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch", "packer.tools.parity") from error

from readers.augment.cpu import Renderer
from readers.augment.fused import BatchRenderer, Engine, triton_fault
from readers.decode.batch import DECODERS, Decoder, decode_batch, device_takes, open_decoder
from readers.decode.device import Picture, upright_tensor
from readers.headers import read_header

__all__ = ["Parity", "compare_with_pillow"]

_BATCH = 16
_Pixels: TypeAlias = npt.NDArray[np.uint8]


class _Batch(NamedTuple):
    """Encoded images, their pixels by Pillow, their jobs, and the pixels of their boxes by Pillow."""

    encoded: list[Buffer]
    decoded: list[_Pixels]
    jobs: list[Job]
    boxes: list[_Pixels]


# Our pixels, Pillow's pixels, and whether the decoder took the image, rather than the CPU.
_Compared: TypeAlias = Iterator[tuple[_Pixels, _Pixels, bool]]
_Contender: TypeAlias = tuple[str, str, Callable[[_Batch], _Compared]]


@dataclass(frozen=True, slots=True)
class Parity:
    """The differences of one decoder or resizer from Pillow, in pixel values from 0 to 255.

    what: "decoder", "resizer", or "both" for a box decoded and resized as in the loader. images: number of images
    compared. by_device: number of images that the decoder took; the CPU decoded the others. mean: mean absolute
    difference of all values. worst_image: mean difference of the worst image. largest: largest difference of one value.
    reason: the reason why it did not run, else "".
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


def compare_with_pillow(
    reader: Reader, *, samples: int = 200, size: int = 224, seed: int = 0, device: torch.device | str = "cpu"
) -> list[Parity]:
    """Compare every decoder and resizer that runs here with Pillow, on `samples` images drawn by `seed`.

    Boxes are drawn as by RandomResizedCrop(size). Images that Pillow cannot decode are left out. Raises ValueError for
    no samples, and BadSampleError if the size of a decoded image differs from Pillow's.
    """
    if samples < 1 or not len(reader):
        raise ValueError(f"{samples} of {len(reader)} samples leave nothing to compare")
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(reader), min(samples, len(reader)), replace=False))
    contenders, missing = _contenders(torch.device(device))
    rows: list[list[tuple[float, int, int, bool]]] = [[] for _ in contenders]
    for start in range(0, len(chosen), _BATCH):
        batch = _batch(reader, chosen[start : start + _BATCH], size, seed)
        for (_, name, compare), row in zip(contenders, rows, strict=True):
            for pixels, pillows, by_device in compare(batch):
                if pixels.shape != pillows.shape:
                    raise BadSampleError(f"{name}: expected {pillows.shape} pixels as Pillow's, found {pixels.shape}")
                apart = np.abs(pixels.astype(np.int16) - pillows)
                row.append((float(apart.mean()), apart.size, int(apart.max()), by_device))
    return [_parity(subject, name, row) for (subject, name, _), row in zip(contenders, rows, strict=True)] + missing


def _parity(subject: str, name: str, rows: Sequence[tuple[float, int, int, bool]]) -> Parity:
    """Summarize rows: mean difference of an image, its number of values, largest difference, and by_device."""
    if not rows:
        return Parity(subject, name)
    means, values, largest, by_device = zip(*rows, strict=True)
    mean = float(np.average(means, weights=values))
    return Parity(subject, name, len(rows), sum(by_device), mean, max(means), max(largest))


def _contenders(device: torch.device) -> tuple[list[_Contender], list[Parity]]:
    """The decoders and resizers that run here, and those that do not, with the reasons."""
    contenders: list[_Contender] = []
    missing = []
    for decoder_name in DECODERS[1:]:
        try:
            decoder = open_decoder(decoder_name, device)
        except (MissingExtraError, DeviceError) as error:
            missing.append(Parity("decoder", decoder_name, reason=str(error)))
        else:
            contenders.append(("decoder", decoder.name, partial(_decode, decoder)))
    contenders.append(("resizer", "cpu", partial(_render, decoded=True)))
    engines: tuple[Engine, ...] = ("torch", "triton")
    for engine in engines:
        if engine == "triton" and (fault := triton_fault(device)):
            missing.append(Parity("resizer", engine, reason=fault))
        else:
            renderer = BatchRenderer(device, dtype=torch.uint8, engine=engine)
            contenders.append(("resizer", engine, partial(_resize, renderer)))
    contenders.append(("both", "cpu", partial(_render, decoded=False)))
    contenders.append(("both", "cpu, exact colours", partial(_render, decoded=False, exact_colours=True)))
    reason = unsupported_reason()
    if reason:
        missing.append(Parity("both", "coefficients", reason=reason))
    else:
        contenders.append(("both", "coefficients", partial(_render, decoded=False, form=Coefficients())))
    return contenders, missing


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
    for pixels, ((top, left, height, width, *_), *_) in zip(decoded, (job.last for job in jobs), strict=True):
        box = Image.fromarray(pixels).crop((left, top, left + width, top + height))
        boxes.append(np.asarray(box.resize((size, size), Image.Resampling.BILINEAR)))
    return _Batch(encoded, decoded, jobs, boxes)


def _by_pillow(data: Buffer) -> _Pixels | None:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError):
        return None


def _decode(decoder: Decoder, batch: _Batch) -> _Compared:
    decoded = decode_batch(batch.encoded, decoder)
    for picture, data, pillows in zip(decoded, batch.encoded, batch.decoded, strict=True):
        if isinstance(picture, Picture):
            yield upright_tensor(picture).permute(1, 2, 0).cpu().numpy(), pillows, device_takes(read_header(data))


def _resize(renderer: BatchRenderer, batch: _Batch) -> _Compared:
    if batch.boxes:
        tensors = (torch.from_numpy(pixels.copy()).to(renderer.device) for pixels in batch.decoded)
        pictures = [Picture(tensor.permute(2, 0, 1)) for tensor in tensors]
        height, width, _ = batch.boxes[0].shape
        made = renderer.render(pictures, batch.jobs, (height, width)).permute(0, 2, 3, 1).cpu().numpy()
        yield from ((resized, pillows, False) for resized, pillows in zip(made, batch.boxes, strict=True))


def _render(
    batch: _Batch, *, decoded: bool, exact_colours: bool = False, form: Coefficients | None = None
) -> _Compared:
    """Render boxes on the CPU. decoded: from Pillow's pixels; else from the encoded images, or their cached form."""
    renderer = Renderer()
    images = [with_header(pixels) for pixels in batch.decoded] if decoded else batch.encoded
    for image, pixels, planned, box in zip(images, batch.decoded, batch.jobs, batch.boxes, strict=True):
        job = planned
        if exact_colours:
            job = Job(planned.last._replace(region=planned.last.region._replace(coarse=False)))
        image = image if form is None else form.convert(image)
        out = torch.empty((1, *box.shape), dtype=torch.uint8).permute(0, 3, 1, 2)
        renderer.render(image, job, (pixels.shape[0], pixels.shape[1]), out)
        yield out[0].permute(1, 2, 0).numpy(), box, False
