"""Advice on how to pack images for a training job, from encodings measured on a sample of them.

A random sample is encoded as by `packer convert` (`packer.conversion.images.reencode`), compared with the originals,
and decoded as by an ImageLoader with one thread: decode, RandomResizedCrop and flip, from memory. The measure is the
CPU time of the process, on which other work on the machine has little influence. The variants take turns, so any
influence is the same for all of them. Nothing is written.

Errors are differences between crops of the original and of the variant, both decoded in full. Both crops show the same
part of the image, with a box that is not rounded to pixels, and Pillow resizes them (bilinear with antialiasing) to the
training size. The errors therefore come from the variant alone, not from the rounding of crop boxes.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from cache.messages import Silent, Watcher, human_bytes, human_seconds, plural, quoted, table, wrapped
from cache.node import usable_cpus
from cache.stores import Store
from packer.conversion.images import check_image, decode_fully, reencode, remarks_of
from packer.conversion.options import Reencode
from packer.conversion.plan import default_shard_bytes
from packer.formats.base import Arena
from packer.sources import Source, default_output_name, open_source
from packer.sources.base import Slice, SourceListing
from packer.sources.contents import EMPTY, is_stray, reason_of
from packer.workers import without_gc
from readers.caching.form import as_form
from readers.coefficients import unsupported_reason
from readers.decode import decode_image
from readers.headers import ImageHeader
from readers.layout import DATASET_FILE, read_dataset_info
from readers.options import Ranks
from readers.order.base import Permutation
from readers.reader import Reader
from readers.table import Buffer, ImageInfo, MemoryColumns, Table, headers_of

__all__ = [
    "READERS",
    "Advice",
    "Choices",
    "Job",
    "Measured",
    "advice_lines",
    "advise",
]

READERS = ("packer", "dali", "rocal", "webdataset", "tensorflow", "h5py")
_SPARE = 1.1  # times the rate that training needs: reading and copying batches take CPU time, too


# --- The ways to pack images ----------------------------------------------------------------------------------------
_TRAINED_SIDE, _KEPT_SIDE = 224, 256  # ImageNet recipes resize to the second and crop to the first
_MAX_SIDES = (500, 400, 256)  # for crops of 224 pixels
_LARGE_SIDE = 1000  # in addition, if the median longest side is above 1.5 times this
_ALMOST_ALL = 0.9  # share of images made smaller, above which keeping the bytes of the others makes no difference
_PLAIN_MEDIA = ("bmp", "tiff", "gif")  # packing can only re-encode these as PNG


@dataclass(frozen=True, slots=True)
class Choices:
    """The encodings to try. image_size: side of the training crops, in pixels.

    max_sides, qualities: the values to try; () for the defaults.
    """

    image_size: int = _TRAINED_SIDE
    max_sides: tuple[int, ...] = ()
    qualities: tuple[int, ...] = ()

    def scaled(self, side: int) -> int:
        """Scale a side meant for crops of 224 pixels to the crops of this job."""
        return round(side * self.image_size / _TRAINED_SIDE)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to pack images, or to keep them in memory.

    reencode: the option of conversion; None keeps the original bytes.
    keep: a form of `readers.cached` instead; images of this form exist in memory only.
    """

    name: str
    reencode: Reencode | None = None
    keep: str = ""

    @property
    def is_original(self) -> bool:
        return self.reencode is None and not self.keep

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of `packer convert` for this variant."""
        how = self.reencode
        if how is None:
            return ()
        codec = ("--reencode", how.codec) if how.codec != "keep" or how == Reencode("keep") else ()
        sizes = {"--max-side": how.max_side, "--resize-short": how.resize_short, "--quality": how.quality}
        return (*codec, *(text for flag, size in sizes.items() if size is not None for text in (flag, str(size))))

    @property
    def suffix(self) -> str:
        """Part of the name of a set packed as this variant: "max500-q90"."""
        how = self.reencode
        if how is None:
            return ""
        sizes = {"max": how.max_side, "short": how.resize_short, "q": how.quality}
        codec = [how.codec] if how.codec != "keep" else []
        return "-".join([*codec, *(f"{name}{size}" for name, size in sizes.items() if size is not None)]) or "png"


def choose_variants(headers: Sequence[ImageHeader], choices: Choices) -> tuple[list[Variant], list[str]]:
    """The variants for images with these headers, the original first; and the reasons why some are missing."""
    longest = [max(header.height, header.width) for header in headers]
    shortest = [min(header.height, header.width) for header in headers]
    large = choices.scaled(_LARGE_SIDE)
    usual = ([large] if sorted(longest)[len(longest) // 2] > 1.5 * large else []) + [*map(choices.scaled, _MAX_SIDES)]
    sides, qualities = choices.max_sides or usual, choices.qualities or (95, 90, 85)
    short = choices.scaled(_KEPT_SIDE)
    jpegs = all(header.media == "jpeg" for header in headers)
    variants, notes, idle = [Variant("unchanged")], list[str](), list[str]()
    if any(header.media in _PLAIN_MEDIA for header in headers):
        variants.append(Variant("png for uncompressed images", Reencode("keep")))
    resizes: list[tuple[str, str, int | None, int | None, int]] = [("same size", "", None, None, len(headers))]
    resizes += [(f"max side {side}", f"--max-side {side}", side, None, sum(each > side for each in longest))
                for side in sides]  # fmt: skip
    resizes.append((f"short side {short}", f"--resize-short {short}", None, short, sum(s > short for s in shortest)))
    for name, flag, max_side, short_side, changed in resizes:
        if not changed:
            idle.append(flag)
            continue
        if flag and (changed < _ALMOST_ALL * len(headers) or not jpegs):
            some = f"{name}, others kept" if changed < len(headers) else name
            variants.append(Variant(some, Reencode("keep", max_side, short_side)))
        codec = "keep" if jpegs else "jpeg"
        variants += [Variant(f"{name}, q{q}", Reencode(codec, max_side, short_side, q)) for q in qualities]
        if changed < len(headers) and not notes:
            count = plural(len(headers), "image")
            notes.append(f"{flag} makes {changed} of {count} smaller; with a quality, the others are encoded again")
    if idle:
        notes.append(f"{', '.join(idle)}: no image of the sample is larger, so nothing changes")
    quality, max_side = sorted(qualities)[len(qualities) // 2], next((s for s in sides if max(longest) > s), None)
    name = f"max side {max_side}" if max_side else "same size"
    variants.append(Variant(f"webp, {name}, q{quality}", Reencode("webp", max_side, None, quality)))
    variants.append(Variant(f"pixels, short side {short}", keep=f"decoded:{short}"))
    if any(header.media == "jpeg" for header in headers):
        if reason := unsupported_reason():
            notes.append(f"coefficients in memory were not measured: {reason}")
        else:
            variants.append(Variant("coefficients", keep="coefficients"))
    return variants, notes


# --- A random sample of a source ------------------------------------------------------------------------------------
# The same listing and seed give the same images. They are drawn from all splits together, read in the order of the
# source (an archive is read once), and checked as in packing. Files that are not images, or do not decode, are left out
# and counted.
_SAMPLE_BYTES = 256 << 20
_LARGEST_BYTES = 1 << 30
_DRAWN = 4  # limit of drawn samples, as a multiple of the requested images, if some samples are not images
_REASON = 60  # characters


@dataclass(frozen=True, slots=True)
class _Image:
    """An image of the sample. name: its file name, else its key."""

    name: str
    key: str
    data: bytes
    header: ImageHeader


@dataclass(slots=True)
class _Sample:
    """Images drawn from a source at random.

    drawn: samples read to get them. left_out: the number of samples left out, by reason. examples: the name of the
    first one, by reason. damaged: the number of those left out because they do not decode. remarks: the number of
    images and the name of the first one, by remark.
    """

    images: list[_Image] = field(default_factory=list)
    drawn: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    damaged: int = 0
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, samples: Slice, i: int, image: Buffer | None, listing: SourceListing) -> None:
        """Add the i-th of some samples, if it is an image that decodes in full."""
        name = samples.names[i][0] or samples.keys[i]
        self.drawn += 1
        try:
            if image is None:
                raise SourceError(
                    "without an image" if samples.bytes[i] <= _LARGEST_BYTES else "too large to be sampled"
                )
            if listing.skip_strays and is_stray(image, name):
                raise SourceError(reason_of(image, name))
            if not len(image):
                raise BadSampleError(EMPTY)
            header, remarks = check_image(image, "RGB")
            decode_fully(image, "RGB")
        except (SourceError, BadSampleError) as error:
            self.damaged += isinstance(error, BadSampleError)
            reason = str(error) if len(str(error)) <= _REASON else f"{str(error)[: _REASON - 1]}…"
            self.left_out[reason] += 1
            self.examples.setdefault(reason, name)
            return
        for remark in remarks:
            count, first = self.remarks.get(remark, (0, name))
            self.remarks[remark] = (count + 1, first)
        self.images.append(_Image(name, samples.keys[i], bytes(image), header))


def _draw(source: Source, listing: SourceListing, count: int, seed: int, watcher: Watcher) -> _Sample:
    """Draw `count` images, or all if there are fewer. Raises SourceError if none can be read."""
    listed = sum(map(len, listing.splits.values()))
    limit, sample = min(listed, _DRAWN * count), _Sample()
    chosen = Permutation(listed, seed, purpose="advise").forward(np.arange(limit, dtype=np.int64))
    size = 0
    watcher.begin(min(count, limit), 0, lambda: (len(sample.images), size))
    try:
        while sample.drawn < limit and len(sample.images) < count and size < _SAMPLE_BYTES:
            block = np.sort(chosen[sample.drawn : sample.drawn + count - len(sample.images)])
            with source.open() as reader:
                for samples, i in _in_order(listing, block):
                    arena = Arena(lambda: None, max(samples.bytes[i], 0) + 1)
                    fits = samples.bytes[i] <= _LARGEST_BYTES
                    image = reader.read(samples.places[i], arena)[0] if fits else None
                    sample.add(samples, i, image, listing)
                    size += 0 if image is None else len(image)
                    if size >= _SAMPLE_BYTES:
                        break
    finally:
        watcher.end()
    if not sample.images:
        reasons = "; ".join(f"{n} {reason} ({sample.examples[reason]})" for reason, n in sample.left_out.items())
        drawn = plural(sample.drawn, "sample")
        raise SourceError(f"{source.title}: no image among {drawn}: {reasons or 'it is empty'}")
    return sample


def _in_order(listing: SourceListing, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[Slice, int]]:
    """Yield (slice, position in the slice) of samples, given by ascending numbers over all splits."""
    first = 0
    for part in listing.splits.values():
        inside = numbers[(numbers >= first) & (numbers < first + len(part))]
        for samples in part.take(inside - first).slices():
            yield from ((samples, i) for i in range(len(samples.keys)))
        first += len(part)


# --- Measuring ------------------------------------------------------------------------------------------------------
_COMPARE_SHARE = 0.7  # of the time, for encoding and comparing images
_LEAST_IMAGES, _COMPARED, _TIMED = 3, 64, 48
_CROPS = 2  # per compared image
_MOST_BYTES = 512 << 20  # of encoded images in memory
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_ROUND_SHARE = 0.1  # of the time, at most, for one round
_LEAST_ROUND_SECONDS = 0.02  # CPU time of a variant in a round: clocks count in milliseconds
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of an interval around it. high: inf if unknown."""

    value: float
    low: float
    high: float

    @property
    def most(self) -> float:
        """The upper end; the value if the upper end is unknown."""
        return self.high if math.isfinite(self.high) else self.value


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured size, speed and error of a variant. Times are CPU seconds of one thread for one image.

    images: number of images encoded. unchanged: the share of them whose bytes stay the same.
    refused: number of images that cannot be encoded as this variant; reason: the error of the first one.
    image_bytes: mean of an image. set_bytes: all images of the source, with a 95 % interval.
    decode: decode, RandomResizedCrop and flip. low and high are the second-fastest and second-slowest round, or the
    fastest and slowest of three rounds.
    encode: 0 for the original.
    error: mean absolute difference of pixel values from the original, on a scale of 255. worst: mean difference of the
    worst crop. largest: largest difference of one value. psnr: in dB over all crops, None without any difference.
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


@dataclass(slots=True)
class _Trial:
    """A variant with the images measured so far, by position in the sample.

    differences: (mean, mean square, largest) of each crop. rounds: CPU seconds to decode and augment an image, of each
    round.
    """

    variant: Variant
    encoded: dict[int, Buffer] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    differences: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict)
    unchanged: int = 0
    refused: int = 0
    reason: str = ""
    seconds: float = 0.0
    rounds: list[float] = field(default_factory=list)

    def encode(self, i: int, image: _Image) -> Buffer | None:
        """Encode the image as this variant; None if that is refused."""
        how, started = self.variant.reencode, time.thread_time()
        data: Buffer = image.data
        try:
            if how is not None:
                data = reencode(image.data, image.header, image.name, image.key, how)[0]
            elif self.variant.keep:
                data = as_form(self.variant.keep).convert(image.data)
        except BadSampleError as error:
            self.refused, self.reason = self.refused + 1, self.reason or str(error)
            return None
        self.seconds += time.thread_time() - started
        self.unchanged += data is image.data
        self.sizes[i] = len(data)
        return data

    def measured(self, sample: _Sample, total: int, common: Sequence[int]) -> Measured:
        """The result; errors are over the compared images in `common`. total: number of images in the source."""
        sizes, rounds = [*self.sizes.values()], sorted(self.rounds)
        whole = [len(image.data) for image in sample.images] if self.variant.is_original else sizes
        inner = rounds[1:-1] if len(rounds) > 3 else rounds
        crops = [crop for i in common for crop in self.differences.get(i, ())]
        means, squares, largest = zip(*crops, strict=True)
        square = sum(squares) / len(squares)
        return Measured(
            self.variant,
            len(sizes),
            sum(sizes) / len(sizes),
            estimate_total(np.array(whole, np.float64), total),
            Estimate(median(rounds), inner[0], inner[-1]),
            0.0 if self.variant.is_original else self.seconds / len(sizes),
            sum(means) / len(means),
            max(means),
            max(largest),
            10 * math.log10(255**2 / square) if square > 0 else None,
            0.0 if self.variant.keep else self.unchanged / len(sizes),
            self.refused,
            self.reason,
        )


def _measure(
    sample: _Sample, total: int, variants: Sequence[Variant], image_size: int, scale: tuple[float, float],
    seconds: float, watcher: Watcher,
) -> list[Measured]:  # fmt: skip
    """Measure variants for about `seconds`, without those that refuse most images or change none.

    scale: range of crop areas, as in RandomResizedCrop.
    """
    start, trials = time.monotonic(), [_Trial(variant) for variant in variants]
    until, stored, done = start + _COMPARE_SHARE * seconds, 0, 0
    common: list[int] = []  # images encoded by every variant, except by those that have refused all images so far
    watcher.begin(len(sample.images), 0, lambda: (done, 0))
    try:
        for i, image in enumerate(sample.images):
            if i >= _LEAST_IMAGES and time.monotonic() > until:
                break
            encoded = [trial.encode(i, image) for trial in trials]
            if all(data is not None or not trial.sizes for trial, data in zip(trials, encoded, strict=True)):
                if len(common) < _COMPARED:
                    _compare(i, image.data, encoded, trials, image_size, scale)
                if len(common) < _LEAST_IMAGES or (len(common) < _TIMED and stored < _MOST_BYTES):
                    for trial, data in zip(trials, encoded, strict=True):
                        if data is not None:
                            trial.encoded[i] = data
                            stored += len(data)
                common.append(i)
            done += 1
    finally:
        watcher.end()
    trials = [t for t in trials if t.variant.is_original or (len(t.sizes) > t.unchanged and 2 * len(t.sizes) >= done)]
    common = [i for i in common if all(i in trial.sizes for trial in trials)]
    if not common:
        raise SourceError("no image of the sample can be encoded in every variant: choose a codec and sizes yourself")
    timed = [i for i in common if i in trials[0].encoded]
    _time(timed, trials, image_size, scale, start + seconds, seconds, watcher)
    return [trial.measured(sample, total, common) for trial in trials]


def _compare(
    i: int, original: bytes, encoded: Sequence[Buffer | None], trials: Sequence[_Trial], image_size: int,
    scale: tuple[float, float],
) -> None:  # fmt: skip
    """Compare crops of an image in all variants with the same crops of the original."""
    from readers.augment import RandomResizedCrop
    from readers.augment.recipe import Recipe

    whole = decode_image(original)
    height, width = whole.shape[:2]
    positions = np.arange(_CROPS, dtype=np.int64) + _CROPS * i
    recipe = Recipe([RandomResizedCrop(image_size, scale=scale)])
    plan = recipe.plan(0, 0, positions, np.full(_CROPS, height), np.full(_CROPS, width)).boxes
    boxes = zip(*(side.tolist() for side in (plan.left, plan.top, plan.width, plan.height)), strict=True)
    shares = [(left / width, top / height, (left + w) / width, (top + h) / height) for left, top, w, h in boxes]
    originals = [_crop(whole, share, image_size) for share in shares]
    for trial, data in zip(trials, encoded, strict=True):
        if data is None:
            continue
        if data is original:
            trial.differences[i] = [(0.0, 0.0, 0)] * _CROPS
            continue
        pixels = decode_image(data)
        apart = [np.abs(_crop(pixels, share, image_size) - crop) for share, crop in zip(shares, originals, strict=True)]
        trial.differences[i] = [(float(d.mean()), float(np.square(d).mean()), int(d.max())) for d in apart]


def _crop(pixels: Pixels, share: tuple[float, float, float, float], size: int) -> npt.NDArray[np.float32]:
    """A box, as shares of the width and height, resized to a square of `size`: float32 [size, size, 3]."""
    from PIL import Image

    height, width = pixels.shape[:2]
    left, top, right, bottom = share
    box = (left * width, top * height, min(right, 1.0) * width, min(bottom, 1.0) * height)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box), np.float32)


class _Memory(Store):
    """Encoded images in memory, by row."""

    def __init__(self, images: Sequence[Buffer]) -> None:
        self._images = images

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self._images[row]


def _time(
    images: Sequence[int], trials: Sequence[_Trial], image_size: int, scale: tuple[float, float], until: float,
    seconds: float, watcher: Watcher,
) -> None:  # fmt: skip
    """Decode and augment the same images with the same crops in all variants, in turn, until the time is up."""
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    ops = [RandomResizedCrop(image_size, scale=scale), RandomHorizontalFlip()]

    def loader_of(trial: _Trial) -> Any:
        data = [trial.encoded[i] for i in images]
        info = headers_of(data)
        columns = {name: np.asarray(getattr(info, name)) for name in ImageInfo._fields}
        table = Table(MemoryColumns([str(i) for i in images], columns, title="the sample"))
        return ImageLoader(
            Reader(table, _Memory(data)), len(data), augment=ops, shuffle=False, threads=1, ranks=Ranks(0, 1)
        )

    begin = time.monotonic()
    turn = [loader_of(trial) for trial in trials]
    first = [_seconds(loader, 0, 1) for loader in turn]  # warms up, and limits the images of a round
    allowed = _ROUND_SHARE * seconds / max(sum(first) * len(images), 1e-9)
    if allowed < 1:
        images = images[: max(_LEAST_IMAGES, int(len(images) * allowed))]
        turn = [loader_of(trial) for trial in trials]
    repeats = [max(1, math.ceil(_LEAST_ROUND_SECONDS / max(len(images) * each, 1e-9))) for each in first]
    watcher.begin(100, 0, lambda: (min(100, round(100 * (time.monotonic() - begin) / max(until - begin, 1e-9))), 0))
    try:
        for number in range(_MOST_ROUNDS):
            if number >= _LEAST_ROUNDS and time.monotonic() > until:
                break
            for trial, loader, count in zip(trials, turn, repeats, strict=True):
                trial.rounds.append(_seconds(loader, number, count))
    finally:
        watcher.end()
    of_round = np.mean([trial.rounds for trial in trials], axis=0)
    for trial in trials:  # remove the slowness that all variants share in a round
        trial.rounds = (np.array(trial.rounds) * np.median(of_round) / of_round).tolist()


def _seconds(loader: Any, epoch: int, count: int) -> float:
    """CPU seconds of this process per image, over `count` passes of one epoch."""
    images, started = 0, time.process_time()
    for _ in range(count):
        loader.set_epoch(epoch)
        images += sum(len(batch[0]) for batch in loader)
    return (time.process_time() - started) / images


def estimate_total(sizes: npt.NDArray[np.float64], total: int) -> Estimate:
    """Estimate the bytes of all `total` images of a source from the sizes of n of them, float64 [n].

    The interval is the 95 % confidence interval. Source: W. G. Cochran, "Sampling Techniques", 3rd ed., 2.8. The finite
    population correction makes the interval of a complete sample empty. The quantile of Student's t is the first term
    of its expansion.
    """
    n = len(sizes)
    value = float(sizes.sum()) * total / n
    if n >= total:
        return Estimate(value, value, value)
    if n < 2:
        return Estimate(value, 0.0, math.inf)
    quantile = 1.96 + 2.37 / (n - 1)
    spread = quantile * total * float(sizes.std(ddof=1) * np.sqrt((1 - n / total) / n))
    return Estimate(value, max(0.0, value - spread), value + spread)


# --- Recommendations: a function of the measurements and the job ----------------------------------------------------
# Each recommendation of a lossy variant states its error, and to keep the originals.
_BETTER = 1.05  # times the rate of a variant with less error, to be worth its own error
_STEP = 1.3  # times the rate of the previous variant, in the list of a reason
_WORTHWHILE = 0.8  # of the bytes, at most, for a lossless encoding to be recommended for its size alone
# Approximate bytes of a sample in addition to its image: docs/performance.md.
_OVERHEAD = {"hdf5": 60, "tfrecord": 300, "tar": 1800}
_FORMATS = {
    "packer": ("hdf5", "the readers of this package read any format at the same speed"),
    "dali": ("tfrecord", "DALI's own readers.tfrecord reads it; with readers.dali of this package any format does"),
    "rocal": ("tfrecord", "rocAL's own reader reads it; with readers.rocal of this package any format does"),
    "webdataset": ("tar", "WebDataset reads tar shards"),
    "tensorflow": ("tfrecord", "tf.data reads it"),
    "h5py": ("hdf5", "h5py reads it"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """The job that will read the set. Raises ValueError.

    images_per_second: the rate that all GPUs of a node need together; None if unknown. gpus: per node. reader: one of
    READERS. max_error: the largest acceptable mean error, on a scale of 255.
    """

    images_per_second: float | None = None
    gpus: int = 1
    reader: str = "packer"
    max_error: float | None = None

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise ValueError(f"reader must be one of {', '.join(READERS)}, not {self.reader!r}")
        for name in ("images_per_second", "gpus"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.max_error is not None and self.max_error < 0:
            raise ValueError(f"max_error must be 0 or more, not {self.max_error}")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation. choice: the action; reason: its figures; commands: the commands to run."""

    topic: str
    choice: str
    reason: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The measurements and the job, from which all recommendations follow.

    source: path or address of the source. name: name of a set made of it. packed: the format if the source is a packed
    set, else "". flags: the options with which `packer convert` opens it. splits: number of images by split.
    drawn: number of samples read; damaged: number of those that do not decode.
    cpus: number of CPUs usable by this process. measured: the variants, the original first.
    """

    source: str
    measured: tuple[Measured, ...]
    job: Job
    splits: dict[str, int]
    cpus: int
    drawn: int = 0
    damaged: int = 0
    packed: str = ""
    flags: tuple[str, ...] = ()
    name: str = "set"

    @property
    def total(self) -> int:
        """Number of images in all splits."""
        return sum(self.splits.values())

    @property
    def original(self) -> Measured:
        """The measurement of the original images."""
        return self.measured[0]

    def rate(self, result: Measured) -> float:
        """Images/s that the usable CPUs of this machine can decode and augment."""
        return self.cpus / result.decode.value

    def keeps_up(self, result: Measured) -> bool:
        """Whether decoding is fast enough for training; True if the rate of training is unknown."""
        needed = self.job.images_per_second
        return needed is None or self.rate(result) >= _SPARE * needed


@dataclass(frozen=True)
class Advice(Facts):
    """The measured variants, and the recommendations that follow from them.

    title: title of the source. sampled: number of images in the sample. left_out: number of samples that are not images
    or are damaged, by reason. chosen: position of the variant to pack. frontier: positions of the variants for which a
    gain in images/s costs the least error.
    """

    title: str = ""
    sampled: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    seconds: float = 0.0
    image_size: int = _TRAINED_SIDE
    chosen: int = 0
    frontier: tuple[int, ...] = ()
    recommendations: tuple[Recommendation, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The advice as numbers, strings, lists and dictionaries; an unknown upper end is None."""
        plain = asdict(self) | {"total": self.total}
        for entry, result in zip(plain["measured"], self.measured, strict=True):
            entry |= {"images_per_second": self.rate(result), "flags": list(result.variant.flags)}
            if not math.isfinite(result.set_bytes.high):
                entry["set_bytes"]["high"] = None
        return plain


def recommend(facts: Facts) -> list[Recommendation]:
    """All recommendations, the most important first."""
    chosen, job = choose(facts), facts.job
    container, why = _format(facts, chosen)
    converts = not chosen.variant.is_original or container != facts.packed
    named = "-".join(filter(None, (facts.name, chosen.variant.suffix, container)))
    output = _as_path(named if converts else facts.source)
    shards, flags = _shards(facts, chosen)
    leaves_out = ("--on-error", "quarantine") if facts.damaged or chosen.refused else ()
    words = ("packer", "convert", _as_path(facts.source), *facts.flags, *chosen.variant.flags, "--to", container)
    words = (*words, *flags, *leaves_out, *(("-o", output) if chosen.variant.flags else ()))
    commands = (_command(*words),) if converts else ()
    if chosen.variant.is_original:
        choice = "pack them unchanged" if converts else "nothing to convert: keep the set unchanged"
        images = Recommendation("images", choice, _why_original(facts), commands)
    else:
        images = Recommendation("images", f"pack them as: {chosen.variant.name}", _why(facts, chosen), commands)
    result = [images]
    if facts.damaged:
        share = f"{plural(facts.damaged, 'image')} of {facts.drawn:,} drawn ({facts.damaged / facts.drawn:.1%})"
        stops = "packing stops at the first one, and --on-error quarantine copies them aside"
        verify = () if converts else (_command("packer", "verify", _as_path(facts.source), "--deep"),)
        choice = "leave damaged images out" if converts else "look for damaged images"
        result.append(Recommendation("damage", choice, f"{share} cannot be decoded; {stops}", verify))
    export = _command("packer", "export-index", output, "--for", job.reader)
    index = (export,) if job.reader in ("dali", "rocal") else ()
    result.append(Recommendation("format", container, why, index))
    return [*result, shards] if converts else result


def choose(facts: Facts) -> Measured:
    """The variant to pack.

    If the original keeps up: the original, or the smallest lossless variant if that is much smaller. If a lossless form
    in memory keeps up: the original. Otherwise the variant with the least error that keeps up. If none does: the least
    error of those about as fast as the fastest, or the original if that is about as fast.
    """
    most = math.inf if facts.job.max_error is None else facts.job.max_error
    allowed = [result for result in facts.measured if not result.variant.keep and result.error <= most]
    enough = [result for result in allowed if facts.keeps_up(result)]
    if facts.original in enough:
        exact = [result for result in enough if result.psnr is None and not result.refused]
        smallest = min(exact, key=lambda result: result.image_bytes)
        return smallest if smallest.image_bytes <= _WORTHWHILE * facts.original.image_bytes else facts.original
    if _lossless_form(facts) is not None:
        return facts.original
    if enough:
        return min(enough, key=lambda result: (result.error, result.image_bytes))
    quickest = max(map(facts.rate, allowed))
    if quickest < _BETTER * facts.rate(facts.original):
        return facts.original
    return min(
        (result for result in allowed if facts.rate(result) * _BETTER >= quickest), key=lambda result: result.error
    )


def _lossless_form(facts: Facts) -> Measured | None:
    """A form for a cache of this package that keeps up and has the same pixels; None if there is none."""
    forms = (
        result for result in facts.measured if result.variant.keep and result.psnr is None and facts.keeps_up(result)
    )
    return next(forms, None) if facts.job.reader == "packer" else None


def frontier(facts: Facts, gain: float = _BETTER) -> list[Measured]:
    """The variants to pack that are faster than every variant with less error by `gain` or more, by ascending error."""
    chosen: list[Measured] = []
    for result in sorted(facts.measured, key=lambda result: (result.error, -facts.rate(result))):
        if not result.variant.keep and (not chosen or facts.rate(result) >= gain * facts.rate(chosen[-1])):
            chosen.append(result)
    return chosen


def _why_original(facts: Facts) -> str:
    needed, form = facts.job.images_per_second, _lossless_form(facts)
    decoded = f"{plural(facts.cpus, 'CPU')} decode {facts.rate(facts.original):,.0f} images/s"
    if needed is None:
        steps = "; ".join(
            f"{facts.rate(result) / _SPARE:,.0f} images/s {result.variant.name}"
            + (f" (mean error {result.error:.1f} of 255)" if result.psnr is not None else "")
            for result in frontier(facts, _STEP)
        )
        flags = "--images-per-second or --simulate-step"
        return f"{decoded}; the rate that training needs is unknown ({flags}). With a tenth to spare, up to {steps}"
    if facts.keeps_up(facts.original):
        return f"decoding is fast enough: {decoded}, training needs {needed:,.0f}; nothing is lost"
    if form is not None:
        return (
            f"{decoded}, training needs {needed:,.0f}, and a cache gives {facts.rate(form):,.0f} without any loss: "
            f'readers.cached(reader, keep="{form.variant.keep}"), {human_bytes(form.set_bytes.value)} for the whole set'
        )
    limit = "" if facts.job.max_error is None else f" with a mean error up to {facts.job.max_error:g}"
    return f"{decoded} and training needs {needed:,.0f}, but no variant{limit} is faster by {_BETTER - 1:.0%}"


def _why(facts: Facts, chosen: Measured) -> str:
    needed, original = facts.job.images_per_second or 0, facts.original
    cpus, rate = plural(facts.cpus, "CPU"), facts.rate(chosen)
    size = (
        f"{human_bytes(chosen.image_bytes)} an image instead of {human_bytes(original.image_bytes)}, "
        f"{human_bytes(chosen.set_bytes.value)} in all instead of {human_bytes(original.set_bytes.value)}"
    )
    cost = f"encoding takes {human_seconds(chosen.encode * facts.total / facts.cpus)} on {cpus}"
    if chosen.psnr is None:
        return f"{size}, without any loss, and {rate:,.0f} images/s; {cost}"
    gain = (
        f"this variant gives {rate:,.0f} with the smallest error"
        if facts.keeps_up(chosen)
        else f"no variant gives that with a tenth to spare; this variant gives {rate:,.0f}"
    )
    return (
        f"{cpus} decode the unchanged images at {facts.rate(original):,.0f} images/s, and training needs "
        f"{needed:,.0f}; {gain} "
        f"(mean {chosen.error:.2g} of 255, worst crop {chosen.worst:.2g}, PSNR {chosen.psnr:.0f} dB); {size}; {cost}. "
        f"The loss cannot be undone: keep the originals"
    )


def _format(facts: Facts, chosen: Measured) -> tuple[str, str]:
    """The container to pack, and the reason."""
    container, why = _FORMATS[facts.job.reader]
    if facts.job.reader == "packer" and facts.packed:
        return facts.packed, f"{why}, and this set is {facts.packed} already"
    share = {name: size / max(1.0, chosen.image_bytes) for name, size in _OVERHEAD.items()}
    others = ", ".join(f"{name} {share[name]:.1%}" for name in _OVERHEAD if name != container)
    size = human_bytes(chosen.image_bytes)
    return container, f"{why}; it adds about {share[container]:.1%} to images of {size} ({others})"


def _shards(facts: Facts, chosen: Measured) -> tuple[Recommendation, tuple[str, ...]]:
    """The recommended shards of the largest split, and the flags for them.

    `packer convert` sizes shards by the original bytes. If that would give another number of shards, the flags set the
    number of samples per shard instead.
    """
    split = max(facts.splits, key=lambda name: facts.splits[name])
    samples, gpus = facts.splits[split], facts.job.gpus
    workers = max(1, facts.cpus // gpus)

    def usual(size: float) -> int:
        return max(1, min(samples, math.ceil(size / default_shard_bytes(round(size)))))

    size = chosen.image_bytes * samples
    count = usual(size) if facts.job.reader in ("packer", "h5py") else max(usual(size), gpus * workers)
    count, flags = min(samples, count), tuple[str, ...]()
    why = f"{human_bytes(size)} in {split}: 8 shards a split, but none under 64 MiB or over 1 GiB"
    if count > usual(size):
        why = f"each of {plural(gpus, 'rank')} times {plural(workers, 'worker')} needs its own shard"
    if count != usual(facts.original.image_bytes * samples):
        each = max(1, samples // count) if count > usual(size) else math.ceil(samples / count)
        flags, count = ("--samples-per-shard", str(each)), math.ceil(samples / each)
    return Recommendation("shards", f"{plural(count, 'shard')} of about {human_bytes(size / count)}", why), flags


def _as_path(path: str) -> str:
    """The path, written so that no command takes it for an option."""
    return f"./{path}" if path.startswith("-") else path


def _command(*words: str) -> str:
    return " ".join(map(quoted, words))


# --- The public function --------------------------------------------------------------------------------------------
def advise(
    source: str | os.PathLike[str] | Source,
    *,
    split: str | None = None,
    samples: int = 128,
    seed: int = 0,
    seconds: float = 45.0,
    crop_scale: float = 0.08,
    choices: Choices | None = None,
    job: Job | None = None,
    flags: tuple[str, ...] = (),
    watcher: Watcher | None = None,
) -> Advice:
    """Measure variants of a random sample of a source, and recommend what to pack.

    source: a packed set, a folder of images, an archive, or any other source of `packer.convert`.
    split: the only split to sample; None for all. samples: number of images to draw. seed: seed of the draw.
    seconds: approximate time to measure, after the sample is read.
    crop_scale: the smallest area of a random crop, as a share of the image's area.
    choices, job: the encodings to try, and the job to advise on.
    flags: options with which `packer convert` opens the source, for the commands of the recommendations.
    watcher: receives the progress.

    Writes nothing. Raises SourceError without images, ValueError for invalid options, and MissingExtraError
    without torch, which the loader needs.
    """
    if samples < 1 or not 0 < crop_scale <= 1 or not 0 <= seed < 1 << 32:
        raise ValueError(f"samples={samples}, crop_scale={crop_scale}, seed={seed}: expected at least 1 sample, a "
                         f"scale above 0 and at most 1, a seed from 0 to 2^32 - 1")  # fmt: skip
    import readers.loader  # noqa: F401  # raises MissingExtraError before the work

    choices, job, watcher, started = choices or Choices(), job or Job(), watcher or Silent(), time.monotonic()
    opened = open_source(source) if isinstance(source, (str, os.PathLike)) else source
    root = Path(str(getattr(opened, "root", source)))
    watcher.note(f"listing {opened.title}")
    with without_gc():
        listing = opened.list(split)
    if "image" not in listing.fields:
        names = ", ".join(listing.fields) or "none"
        raise SourceError(
            f"{opened.title}: has no images, which advise compares in several sizes and codecs (fields: {names}); "
            f"others are packed as they are:  packer convert {quoted(root)} --to hdf5"
        )
    sample = _draw(opened, listing, samples, seed, watcher)
    share = len(sample.images) / sample.drawn
    splits = {name: max(1, round(len(part) * share)) for name, part in listing.splits.items() if len(part)}
    variants, notes = choose_variants([image.header for image in sample.images], choices)
    watcher.note(f"measuring {plural(len(variants), 'variant')} of {plural(len(sample.images), 'image')}")
    total, scale = sum(splits.values()), (crop_scale, 1.0)
    measured = tuple(_measure(sample, total, variants, choices.image_size, scale, seconds, watcher))
    missing = [variant.name for variant in variants if all(variant != result.variant for result in measured)]
    if missing:
        notes.append(
            f"{', '.join(missing)}: almost no image of the sample can be encoded in this variant, or becomes smaller"
        )
    facts = Facts(
        source=str(root),
        measured=measured,
        job=job,
        splits=splits,
        cpus=usable_cpus(),
        drawn=sample.drawn,
        damaged=sample.damaged,
        packed=read_dataset_info(root).format if (root / DATASET_FILE).is_file() else "",
        flags=flags,
        name=default_output_name(opened, "").removesuffix("-"),
    )
    return Advice(
        **{each.name: getattr(facts, each.name) for each in fields(facts)},
        title=opened.title,
        sampled=len(sample.images),
        left_out=dict(sample.left_out),
        seed=seed,
        seconds=time.monotonic() - started,
        image_size=choices.image_size,
        chosen=measured.index(choose(facts)),
        frontier=tuple(measured.index(result) for result in frontier(facts)),
        recommendations=tuple(recommend(facts)),
        notes=(*notes, *_notes(sample, listing, facts)),
    )


def _notes(sample: _Sample, listing: SourceListing, facts: Facts) -> list[str]:
    """The limits of the measurement."""
    notes = [f"{count} of {sample.drawn} drawn left out: {reason} (the first: {sample.examples[reason]})"
             for reason, count in sample.left_out.most_common()]  # fmt: skip
    notes += [*listing.warnings, *remarks_of([sample.remarks])]
    encoded = min(result.images + result.refused for result in facts.measured)
    if encoded < len(sample.images):
        notes.append(
            f"only {encoded} of {plural(len(sample.images), 'image')} were encoded in time; measure longer (seconds=)"
        )
    refused = Counter({result.reason: result.refused for result in facts.measured if result.refused})
    notes += [f"{plural(count, 'image')} cannot be encoded again: {reason}" for reason, count in refused.most_common()]
    if facts.job.reader != "packer":
        notes.append(f"images/s are those of ImageLoader; {facts.job.reader} may be slower or faster")
    if len(listing.fields) > 1:
        others = ", ".join(name for name in listing.fields if name != "image")
        notes.append(f"sizes are those of the images, without {others}")
    return notes


# --- As lines for a terminal ----------------------------------------------------------------------------------------
_HEADINGS = ("variant", "an image", "the set", "images/s", "error", "worst", "PSNR", "encoding")
_REMARK = "error, worst crop: mean difference from the original, of 255; encoding: the set, on all CPUs"


def advice_lines(advice: Advice, width: int = 110) -> list[str]:
    """The table of variants, then numbered recommendations with their commands."""
    splits = ", ".join(f"{name} {count:,}" for name, count in advice.splits.items())
    rate = advice.job.images_per_second
    needed = "" if rate is None else f"; needed: {rate:,.0f} images/s"
    quickest = max(map(advice.rate, advice.measured))
    first, *variants = table(
        _HEADINGS,
        [_cells(advice, entry) for entry in advice.measured],
        width - 2,
        bars=[advice.rate(entry) / quickest for entry in advice.measured],
        optional=("encoding", "worst", "PSNR", "an image"),
    )
    lines = [
        f"{advice.title}: {plural(advice.total, 'image')} ({splits}), of which {advice.sampled:,} were sampled",
        f"decode, RandomResizedCrop({advice.image_size}) and flip from memory on {plural(advice.cpus, 'CPU')}{needed}",
        "",
        f"  {first}",
        *(f"{'→' if number == advice.chosen else ' '} {line}" for number, line in enumerate(variants)),
        "",
        *wrapped(
            "error, worst crop: mean difference from the original, of 255; encoding: the set, on all CPUs", width, ""
        ),
    ]
    lines += [line for note in advice.notes for line in wrapped(f"note: {note}", width, " " * 6)]
    for number, entry in enumerate(advice.recommendations, 1):
        lines += ["", f"{number}. {entry.topic}: {entry.choice}", *wrapped(f"   {entry.reason}", width, "   ")]
        lines += [f"   $ {command}" for command in entry.commands]
    return lines


def _cells(advice: Advice, result: Measured) -> tuple[str, ...]:
    """The cells of a variant under _HEADINGS; its size with half of the interval in percent, if that rounds above 0."""
    around = 50 * (result.set_bytes.most - result.set_bytes.low) / max(result.set_bytes.value, 1.0)
    size = human_bytes(result.set_bytes.value) + (f" ±{around:.0f} %" if around >= 0.5 else "")
    cells = (result.variant.name, human_bytes(result.image_bytes), size, f"{advice.rate(result):,.0f}")
    if result.variant.is_original:
        return (*cells, "", "", "", "")
    encoding = human_seconds(result.encode * advice.total / advice.cpus)
    return (
        *cells,
        f"{result.error:.2f}",
        f"{result.worst:.1f}",
        "same" if result.psnr is None else f"{result.psnr:.1f}",
        encoding,
    )
