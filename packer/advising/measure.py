"""Measure variants of the images of a sample: bytes, CPU time to make and to decode them, and what is lost.

Encoding is `packer.conversion.images.reencode`, which `packer convert` runs. Decoding is an ImageLoader with one thread
over the encoded bytes in memory: decode, RandomResizedCrop, flip. The CPU time of the process is taken, which other
work on the machine changes little, and the variants take turns, so that it changes all alike: rounds in which all were
slower count as the others do.

Errors are between crops of the original and of the variant, both decoded in full. The box is the same part of the
image in both, not rounded to pixels, and Pillow resizes it (bilinear with antialiasing) to the size that training sees.
So they are those of the variant alone, without the small differences that random crops of another size would have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from cache.messages import Watcher
from cache.stores import Buffer, Store
from packer.advising.sampling import ImageSample, SampledImage
from packer.advising.variants import Variant
from packer.conversion.images import reencode
from readers.caching.form import as_form
from readers.decode import decode_image
from readers.index import MemoryColumns
from readers.reader import Reader
from readers.sample import ImageInfo, headers_of
from readers.table import Table

__all__ = ["Estimate", "Measured", "estimate_total", "measure", "require_loader"]

_ENCODE_SHARE, _COMPARE_SHARE = 0.45, 0.7  # of the time, until which the first two phases last
_LEAST_IMAGES, _COMPARED, _TIMED = 3, 64, 48
_CROPS = 2  # of each image that is compared
_MOST_BYTES = 512 << 20  # of encoded images in memory
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_ROUND_SHARE = 0.1  # of the time, that one round may take
_LEAST_ROUND_SECONDS = 0.02  # CPU time of a variant in a round: clocks count in milliseconds
_Z = 1.96  # of a normal distribution, for 95 %
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with an interval that holds the true one in about 95 % of all cases."""

    value: float
    low: float
    high: float

    @property
    def most(self) -> float:
        """The upper end; the value where one sample gives no interval."""
        return self.high if math.isfinite(self.high) else self.value


@dataclass(frozen=True, slots=True)
class Measured:
    """What a variant takes. Times are CPU seconds of one image by one thread; errors are of 255.

    images: how many were measured. unchanged: the share of them whose bytes stay as they are.
    refused: images that cannot be encoded so, and why the first of them.
    image_bytes: of one image, and of all images of the source.
    decode: decode, RandomResizedCrop and flip; low and high are the second and the last but one of the rounds.
    encode: 0 for the images as they are.
    error: mean difference of pixel values from the original. worst: the same of the worst crop. largest: difference of
    one value. psnr: in dB over all crops, None where nothing differs.
    """

    variant: Variant
    images: int
    image_bytes: float
    set_bytes: Estimate
    decode: Estimate
    encode: float = 0.0
    error: float = 0.0
    worst: float = 0.0
    largest: int = 0
    psnr: float | None = None
    unchanged: float = 0.0
    refused: int = 0
    reason: str = ""

    def per_second(self, cpus: int) -> float:
        """Images/s that so many CPUs decode and augment."""
        return cpus / self.decode.value


@dataclass(slots=True)
class _Trial:
    """A variant with its images so far: by position in the sample, None where it was refused."""

    variant: Variant
    encoded: dict[int, Buffer] = field(default_factory=dict)  # of as many images as memory is meant for
    sizes: dict[int, int] = field(default_factory=dict)
    unchanged: int = 0
    refused: int = 0
    reason: str = ""
    seconds: float = 0.0
    differences: list[tuple[float, float, int]] = field(default_factory=list)  # mean, mean square, largest; by crop
    rounds: list[float] = field(default_factory=list)


def require_loader() -> None:
    """Raises MissingExtraError without torch, which all measuring needs."""
    import readers.loader  # noqa: F401


def measure(
    sample: ImageSample, variants: Sequence[Variant], image_size: int, scale: tuple[float, float], seconds: float,
    watcher: Watcher,
) -> list[Measured]:  # fmt: skip
    """Measure variants for about `seconds`. Left out are those that every image refuses, or that change none.

    scale: range of the areas of crops, as of RandomResizedCrop. Raises MissingExtraError without torch.
    """
    start, trials = time.monotonic(), [_Trial(variant) for variant in variants]
    count = _encode(sample.images, trials, start + _ENCODE_SHARE * seconds, watcher)
    trials = [trial for trial in trials if trial.variant.is_original or 0 < len(trial.sizes) > trial.unchanged]
    common = [i for i in range(count) if all(i in trial.encoded for trial in trials)]
    _compare(sample.images, common, trials, image_size, scale, start + _COMPARE_SHARE * seconds)
    _time(common, trials, image_size, scale, start + seconds, seconds, watcher)
    return [_measured(sample, trial, count) for trial in trials]


# --- encoding ---------------------------------------------------------------------------------------------------
def _encode(images: Sequence[SampledImage], trials: Sequence[_Trial], until: float, watcher: Watcher) -> int:
    """Encode images by all variants, one image after the other, until the time is up; how many."""
    done = stored = 0
    watcher.begin(len(images), 0, lambda: (done, 0))
    try:
        for i, image in enumerate(images):
            if done >= _LEAST_IMAGES and time.monotonic() > until:
                break
            for trial in trials:
                _encode_one(i, image, trial, done < _LEAST_IMAGES or stored < _MOST_BYTES)
            done += 1
            stored += sum(trial.sizes.get(i, 0) for trial in trials)
    finally:
        watcher.end()
    return done


def _encode_one(i: int, image: SampledImage, trial: _Trial, stores: bool) -> None:
    how, started = trial.variant.reencode, time.thread_time()
    data: Buffer = image.data
    try:
        if how is not None:
            data = reencode(image.data, image.header, image.name, image.key, how)[0]
        elif trial.variant.keep:
            data = as_form(trial.variant.keep).convert(image.data)
    except BadSampleError as error:
        trial.refused += 1
        trial.reason = trial.reason or str(error)
        return
    trial.seconds += time.thread_time() - started
    trial.unchanged += data is image.data
    trial.sizes[i] = len(data)
    if stores:
        trial.encoded[i] = data


# --- what is lost -----------------------------------------------------------------------------------------------
def _compare(
    images: Sequence[SampledImage],
    common: Sequence[int],
    trials: Sequence[_Trial],
    image_size: int,
    scale: tuple[float, float],
    until: float,
) -> None:
    """Compare crops of the first images by all variants with those of the originals."""
    from readers.augment import RandomResizedCrop
    from readers.augment.recipe import Recipe

    recipe = Recipe([RandomResizedCrop(image_size, scale=scale)])
    for number, i in enumerate(common[:_COMPARED]):
        if number >= _LEAST_IMAGES and time.monotonic() > until:
            break
        original = decode_image(images[i].data)
        height, width = original.shape[:2]
        positions = np.arange(_CROPS, dtype=np.int64) + _CROPS * i
        plan = recipe.plan(0, 0, positions, np.full(_CROPS, height), np.full(_CROPS, width)).boxes
        boxes = [*zip(*(side.tolist() for side in (plan.left, plan.top, plan.width, plan.height)), strict=True)]
        shares = [(left / width, top / height, (left + w) / width, (top + h) / height) for left, top, w, h in boxes]
        wanted = [_crop(original, share, image_size) for share in shares]
        for trial in trials:
            if trial.variant.is_original or trial.encoded[i] is images[i].data:
                trial.differences += [(0.0, 0.0, 0)] * _CROPS
                continue
            pixels = decode_image(trial.encoded[i])
            for share, crop in zip(shares, wanted, strict=True):
                apart = np.abs(_crop(pixels, share, image_size) - crop)
                trial.differences.append((float(apart.mean()), float(np.square(apart).mean()), int(apart.max())))


def _crop(pixels: Pixels, share: tuple[float, float, float, float], size: int) -> npt.NDArray[np.float32]:
    """A box, as shares of the width and height, resized to a square of `size`: float32 [size, size, 3]."""
    from PIL import Image

    height, width = pixels.shape[:2]
    left, top, right, bottom = share
    box = (left * width, top * height, min(right, 1.0) * width, min(bottom, 1.0) * height)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box), np.float32)


# --- decoding ---------------------------------------------------------------------------------------------------
class _Memory(Store):
    """Encoded images in memory, by row."""

    def __init__(self, images: Sequence[Buffer]) -> None:
        self._images = images

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self._images[row]


def _reader(images: Sequence[Buffer]) -> Reader:
    """A reader of images in memory, with their headers as an index has them."""
    info = headers_of(images)
    columns = {name: np.asarray(getattr(info, name)) for name in ImageInfo._fields}
    keys = [str(number) for number in range(len(images))]
    return Reader(Table(MemoryColumns(keys, columns, title="the sample")), _Memory(images))


def _time(
    common: Sequence[int],
    trials: Sequence[_Trial],
    image_size: int,
    scale: tuple[float, float],
    until: float,
    seconds: float,
    watcher: Watcher,
) -> None:
    """Decode and augment the same images by all variants in turn, with the same crops, until the time is up."""
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    ops = [RandomResizedCrop(image_size, scale=scale), RandomHorizontalFlip()]
    few = list(common[:_TIMED])

    def loaders() -> list[Any]:
        made = [_reader([trial.encoded[i] for i in few]) for trial in trials]
        return [ImageLoader(one, len(few), augment=ops, shuffle=False, threads=1, rank=0, world_size=1) for one in made]

    begin = time.monotonic()
    turn = loaders()
    first = [_seconds(loader, 0, 1) for loader in turn]  # warms up; also says how many images a round may have
    allowed = _ROUND_SHARE * seconds / max(sum(first) * len(few), 1e-9)
    if allowed < 1:
        few = few[: max(_LEAST_IMAGES, int(len(few) * allowed))]
        turn = loaders()
    repeats = [max(1, math.ceil(_LEAST_ROUND_SECONDS / max(len(few) * each, 1e-9))) for each in first]
    watcher.begin(100, 0, lambda: (min(100, round(100 * (time.monotonic() - begin) / max(until - begin, 1e-9))), 0))
    try:
        for number in range(_MOST_ROUNDS):
            if number >= _LEAST_ROUNDS and time.monotonic() > until:
                break
            for trial, loader, count in zip(trials, turn, repeats, strict=True):
                trial.rounds.append(_seconds(loader, number, count))
    finally:
        watcher.end()
    rounds = np.array([trial.rounds for trial in trials])
    slowness = rounds.mean(axis=0) / np.median(rounds.mean(axis=0))
    for trial in trials:
        trial.rounds = (np.array(trial.rounds) / slowness).tolist()


def _seconds(loader: Any, epoch: int, count: int) -> float:
    """CPU seconds of this process for an image, over an epoch `count` times."""
    images, started = 0, time.process_time()
    for _ in range(count):
        loader.set_epoch(epoch)
        for batch in loader:
            images += len(batch[0])
    return (time.process_time() - started) / images


# --- results ----------------------------------------------------------------------------------------------------
def _measured(sample: ImageSample, trial: _Trial, count: int) -> Measured:
    places = sorted(trial.sizes)
    sizes = np.array([trial.sizes[i] for i in places], np.float64)
    originals = np.array([len(sample.images[i].data) for i in places], np.float64)
    whole = float(sample.listed_bytes) if len(sample.fields) == 1 and not sample.left_out else 0.0
    rounds = sorted(trial.rounds)
    inner = rounds[1:-1] if len(rounds) > 3 else rounds
    means, squares, largest = zip(*trial.differences, strict=True)
    square = sum(squares) / len(squares)
    return Measured(
        trial.variant,
        len(sizes),
        float(sizes.mean()),
        estimate_total(sizes, originals, sample.total, whole),
        Estimate(median(rounds), inner[0], inner[-1]),
        0.0 if trial.variant.is_original else trial.seconds / len(sizes),
        sum(means) / len(means),
        max(means),
        max(largest),
        10 * math.log10(255**2 / square) if square > 0 else None,
        0.0 if trial.variant.keep else trial.unchanged / len(sizes),
        trial.refused,
        trial.reason,
    )


def estimate_total(
    sizes: npt.NDArray[np.float64], originals: npt.NDArray[np.float64], total: int, original_bytes: float
) -> Estimate:
    """Bytes of all `total` images of a source, from those of n: `sizes`, and as they are, float64 [n] each.

    original_bytes: of all images as they are, 0 if unknown. Known, it is multiplied with the ratio of the two, unless
    that varies more than the sizes do, as it does for pixels.

    Source: W. G. Cochran, "Sampling Techniques", 3rd ed., 2.8 and 6.4, with the correction for finite populations, so
    that a sample of everything has no interval; Student's t by its expansion in 1/(n - 1).
    """
    n = len(sizes)
    value, rest, times = float(sizes.mean()) * total, sizes - sizes.mean(), float(total)
    if original_bytes:
        ratio = float(sizes.sum() / originals.sum())
        apart = sizes - ratio * originals
        if np.square(apart).sum() <= np.square(rest).sum():
            value, rest, times = ratio * original_bytes, apart, original_bytes / float(originals.mean())
    if n >= total:
        return Estimate(value, value, value)
    if n < 2:
        return Estimate(value, 0.0, math.inf)
    free = n - 1
    quantile = _Z + (_Z**3 + _Z) / (4 * free) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * free**2)
    spread = float(np.sqrt(np.square(rest).sum() / free / n * (1 - n / total)))
    return Estimate(value, max(0.0, value - quantile * spread * times), value + quantile * spread * times)
