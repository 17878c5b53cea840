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

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, MissingExtraError, SourceError
from cache.messages import Watcher, plural
from cache.stores import Store
from packer.conversion.images import check_image, decode_fully, reencode, remarks_of
from packer.conversion.plan import Reencode
from packer.formats.base import Arena
from packer.sources import Source
from packer.sources.base import Slice, SourceListing, SourceReader, StrayReader
from packer.sources.contents import EMPTY, is_stray, reason_of
from packer.workers import without_gc
from readers import Ranks
from readers.caching.form import as_form
from readers.coefficients.compiled import load_functions, unsupported_reason
from readers.decode import decode_image
from readers.headers import ImageHeader
from readers.index import MemoryColumns
from readers.order.base import Permutation
from readers.reader import Reader
from readers.sample import Buffer, ImageInfo, headers_of
from readers.table import Table

__all__ = [
    "Choices",
    "Estimate",
    "ImageSample",
    "Measured",
    "Variant",
    "choose_coefficients",
    "choose_variants",
    "draw",
    "estimate_total",
    "measure",
    "require_loader",
]

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
        return [
            ImageLoader(one, len(few), augment=ops, shuffle=False, threads=1, ranks=Ranks(rank=0, world_size=1))
            for one in made
        ]

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
    sizes = np.array(list(trial.sizes.values()), np.float64)
    known = np.array([len(image.data) for image in sample.images], np.float64) if trial.variant.is_original else sizes
    rounds = sorted(trial.rounds)
    inner = rounds[1:-1] if len(rounds) > 3 else rounds
    means, squares, largest = zip(*trial.differences, strict=True)
    square = sum(squares) / len(squares)
    return Measured(
        trial.variant,
        len(sizes),
        float(sizes.mean()),
        estimate_total(known, sample.total),
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


def estimate_total(sizes: npt.NDArray[np.float64], total: int) -> Estimate:
    """Bytes of all `total` images of a source, from the sizes of n of them, float64 [n].

    Source: W. G. Cochran, "Sampling Techniques", 3rd ed., 2.8, with the correction for finite populations, so that a
    sample of everything has no interval; Student's t by its expansion in 1/(n - 1).
    """
    n = len(sizes)
    value = float(sizes.sum()) * total / n
    if n >= total:
        return Estimate(value, value, value)
    if n < 2:
        return Estimate(value, 0.0, math.inf)
    free = n - 1
    quantile = _Z + (_Z**3 + _Z) / (4 * free) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * free**2)
    spread = quantile * total * float(sizes.std(ddof=1) * np.sqrt((1 - n / total) / n))
    return Estimate(value, max(0.0, value - spread), value + spread)


# --- The ways to pack images that are measured: which ones make sense for the images of a sample.
_TRAINED_SIDE, _KEPT_SIDE = 224, 256  # of ImageNet recipes: resized to the second, cropped to the first
_MAX_SIDES = (500, 400, 256)  # for crops of 224 pixels
_LARGE_SIDE = 1000  # in addition, for images more than half as large again
_QUALITIES = (95, 90, 85)
_ALMOST_ALL = 0.9  # of the images made smaller: keeping the bytes of the others makes no difference
_PLAIN_MEDIA = ("bmp", "tiff", "gif")  # which packing can only write as PNG


@dataclass(frozen=True, slots=True)
class Choices:
    """What to try. image_size: side of the crops that training takes, in pixels.

    max_sides, qualities: what to try of each; () for the usual ones.
    """

    image_size: int = _TRAINED_SIDE
    max_sides: tuple[int, ...] = ()
    qualities: tuple[int, ...] = ()

    @property
    def short_side(self) -> int:
        """The short side of what training resizes images to before it crops them, as 256 for 224."""
        return round(self.image_size * _KEPT_SIDE / _TRAINED_SIDE)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to pack images, or to keep them in memory.

    reencode: as conversion takes it; None for the bytes as they are.
    keep: a form of `readers.cached` in place of it; such images exist in memory only.
    """

    name: str
    reencode: Reencode | None = None
    keep: str = ""

    @property
    def is_original(self) -> bool:
        return self.reencode is None and not self.keep

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of `packer convert` that make it."""
        how = self.reencode
        if how is None:
            return ()
        plain = how == Reencode(how.codec)
        flags = ["--reencode", how.codec] if how.codec != "keep" or plain else []
        for name, value in (("max-side", how.max_side), ("resize-short", how.resize_short), ("quality", how.quality)):
            flags += [f"--{name}", str(value)] if value is not None else []
        return tuple(flags)

    @property
    def suffix(self) -> str:
        """Part of the name of a set of such images: "max500-q90"."""
        how = self.reencode
        if how is None:
            return ""
        parts = [how.codec if how.codec != "keep" else ""]
        for letter, value in (("max", how.max_side), ("short", how.resize_short), ("q", how.quality)):
            parts.append(f"{letter}{value}" if value is not None else "")
        return "-".join(part for part in parts if part) or "png"


def choose_variants(headers: Sequence[ImageHeader], choices: Choices) -> tuple[list[Variant], list[str]]:
    """The variants for images with these headers, the images as they are first; and why some are missing."""
    sides = choices.max_sides or _usual_sides(headers, choices.image_size)
    short, qualities = choices.short_side, choices.qualities or _QUALITIES
    jpegs = all(header.media == "jpeg" for header in headers)
    codec = "keep" if jpegs else "jpeg"
    found, notes = [Variant("as it is")], list[str]()
    if any(header.media in _PLAIN_MEDIA for header in headers):
        found.append(Variant("png, where it is not compressed", Reencode("keep")))
    resizes: list[tuple[str, int | None, int | None]] = [("same size", None, None)]
    resizes += [(f"max side {side}", side, None) for side in sides] + [(f"short side {short}", None, short)]
    smaller, idle = "", list[str]()
    for name, max_side, resize_short in resizes:
        changed = _changed(headers, max_side, resize_short)
        flag = f"--max-side {max_side}" if max_side else f"--resize-short {resize_short}"
        if (max_side or resize_short) and not changed:
            idle.append(flag)
            continue
        if changed and (changed < _ALMOST_ALL * len(headers) or not jpegs):
            some = f"{name}, others kept" if changed < len(headers) else name
            found.append(Variant(some, Reencode("keep", max_side, resize_short)))
        for quality in qualities:
            found.append(Variant(f"{name}, q{quality}", Reencode(codec, max_side, resize_short, quality)))
        if not smaller and changed:
            smaller = name
            notes += _notes_on(flag, changed, len(headers))
    if idle:
        notes.append(f"{', '.join(idle)}: no image of the sample is larger, so nothing would change")
    middle = sorted(qualities)[len(qualities) // 2]
    side = next((side for side in sides if _changed(headers, side, None)), None)
    name = f"webp, max side {side}" if side else "webp, same size"
    found.append(Variant(f"{name}, q{middle}", Reencode("webp", side, None, middle)))
    found.append(Variant(f"pixels, short side {short}", keep=f"decoded:{short}"))
    return found, notes


def choose_coefficients(headers: Sequence[ImageHeader]) -> tuple[list[Variant], list[str]]:
    """What a cache keeps of JPEGs without a loss, where this machine decodes it; and why it is missing.

    Compiles the decoder, where that has not been done.
    """
    if all(header.media != "jpeg" for header in headers):
        return [], []
    try:
        reason = unsupported_reason()
        if not reason:
            load_functions()
    except MissingExtraError as error:
        reason = str(error)
    if reason:
        return [], [f"coefficients in memory were not measured: {reason}"]
    return [Variant("coefficients", keep="coefficients")], []


def _usual_sides(headers: Sequence[ImageHeader], image_size: int) -> tuple[int, ...]:
    """Longest sides to try, the largest first."""
    longest = sorted(max(header.height, header.width) for header in headers)
    large = round(_LARGE_SIDE * image_size / _TRAINED_SIDE)
    usual = [round(side * image_size / _TRAINED_SIDE) for side in _MAX_SIDES]
    return (large, *usual) if longest[len(longest) // 2] > 1.5 * large else tuple(usual)


def _changed(headers: Sequence[ImageHeader], max_side: int | None, short_side: int | None) -> int:
    """How many images are made smaller."""
    if max_side is not None:
        return sum(max(header.height, header.width) > max_side for header in headers)
    return sum(short_side is not None and min(header.height, header.width) > short_side for header in headers)


def _notes_on(flag: str, changed: int, count: int) -> list[str]:
    if changed == count:
        return []
    return [f"{flag} makes {changed} of {plural(count, 'image')} smaller; with a quality, the others are encoded again"]


# --- A random sample of a source: the same images for the same listing and seed, read once and checked as in packing.
# What is not an image, or does not decode, is left out and counted. Samples are drawn from all splits together, by a
# permutation that is a function of the seed, and read in the order of the source: an archive is gone through once.
_MOST_BYTES_SAMPLING = 256 << 20
_LARGE_BYTES = 4 << 20
_LARGEST_BYTES = 1 << 30
_DRAWN = 4  # times as many as asked for, where some are not images
_REASON = 60  # characters


@dataclass(frozen=True, slots=True)
class SampledImage:
    """An image of the sample: its file name or key, its key, its bytes and its header."""

    name: str
    key: str
    data: bytes
    header: ImageHeader


@dataclass(slots=True)
class ImageSample:
    """Images of a source, in random order, and what is known of the source.

    title: of the source. splits: samples by split, as listed. drawn: how many were read for these images; left_out
    counts those of them that are not here by the reason, and examples names the first; damaged: of them, the images
    that do not decode.
    read_bytes, read_seconds: of reading them, by one thread.
    """

    title: str
    splits: dict[str, int]
    fields: tuple[str, ...]
    images: list[SampledImage] = field(default_factory=list)
    drawn: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    damaged: int = 0
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    listing_warnings: tuple[str, ...] = ()
    read_bytes: int = 0
    read_seconds: float = 0.0

    @property
    def listed(self) -> int:
        """Samples in all splits, images or not."""
        return sum(self.splits.values())

    @property
    def total(self) -> int:
        """Images in the source: those listed, less the share that was found to be none."""
        return self.listed - round(self.listed * sum(self.left_out.values()) / self.drawn) if self.drawn else 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What conversion would say of these images."""
        return (*self.listing_warnings, *remarks_of([self.remarks]))


def draw(source: Source, split: str | None, count: int, seed: int, watcher: Watcher) -> ImageSample:
    """Draw `count` images, or all where there are fewer. Raises SourceError where none can be read."""
    watcher.note(f"listing {source.title}")
    with without_gc():
        listing = source.list(split)
    found = ImageSample(
        source.title,
        {name: len(part) for name, part in listing.splits.items()},
        tuple(listing.fields),
        listing_warnings=tuple(listing.warnings),
    )
    if "image" not in listing.fields:
        raise SourceError(f"{source.title}: has no images: its fields are {', '.join(listing.fields) or 'none'}")
    _read_all(source, listing, count, seed, found, watcher)
    if not found.images:
        reasons = "; ".join(
            f"{number} {reason} ({found.examples[reason]})" for reason, number in found.left_out.items()
        )
        raise SourceError(f"{source.title}: no image among {plural(found.drawn, 'sample')}: {reasons or 'it is empty'}")
    return found


def _read_all(
    source: Source, listing: SourceListing, count: int, seed: int, found: ImageSample, watcher: Watcher
) -> None:
    """Draw blocks of samples until there are `count` images, or enough bytes of them."""
    limit = min(found.listed, _DRAWN * count)
    chosen = Permutation(found.listed, seed, purpose="advise").forward(np.arange(limit, dtype=np.int64))
    size = 0
    watcher.begin(min(count, limit), 0, lambda: (len(found.images), found.read_bytes))
    try:
        while found.drawn < limit and len(found.images) < count and size < _MOST_BYTES_SAMPLING:
            block = chosen[found.drawn : found.drawn + count - len(found.images)]
            images: dict[int, SampledImage] = {}
            with source.open() as reader:
                for number, samples, i in _in_order(listing, np.sort(block)):
                    found.drawn += 1
                    image = _read_one(samples, i, reader, listing, found)
                    if image is not None:
                        images[number] = image
                        size += len(image.data)
                    if size >= _MOST_BYTES_SAMPLING:
                        break
            found.images += [images[number] for number in block.tolist() if number in images]
    finally:
        watcher.end()


def _in_order(
    listing: SourceListing, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Iterator[tuple[int, Slice, int]]:
    """(number, slice, position in it) of samples, by rising numbers over all splits."""
    ends = [0, *itertools.accumulate(len(part) for part in listing.splits.values())]
    for part, first, stop in zip(listing.splits.values(), ends, ends[1:], strict=False):
        inside = numbers[(numbers >= first) & (numbers < stop)]
        waiting = iter(inside.tolist())
        for samples in part.take(inside - first).slices():
            for i in range(len(samples.keys)):
                yield next(waiting), samples, i


class _NoImage(Exception):
    """Why a sample is left out."""


def _read_one(
    samples: Slice, i: int, reader: SourceReader, listing: SourceListing, found: ImageSample
) -> SampledImage | None:
    """One image, decoded in full to see that it is whole; None for anything else, which is counted."""
    name = samples.names[i][0] or samples.keys[i]
    image: Buffer = b""
    try:
        image = _bytes_of(samples, i, name, reader, listing, found)
        header, remarks = check_image(image, "RGB")
        decode_fully(image, "RGB")
    except (_NoImage, BadSampleError) as error:
        found.damaged += isinstance(error, BadSampleError)
        reason = str(error) if len(str(error)) <= _REASON else f"{str(error)[: _REASON - 1]}…"
        found.left_out[reason] += 1
        found.examples.setdefault(reason, name)
        return None
    for remark in remarks:
        known, first = found.remarks.get(remark, (0, name))
        found.remarks[remark] = (known + 1, first)
    return SampledImage(name, samples.keys[i], bytes(image), header)


def _bytes_of(
    samples: Slice, i: int, name: str, reader: SourceReader, listing: SourceListing, found: ImageSample
) -> Buffer:
    """The bytes of a file that is meant to be an image. Raises _NoImage, BadSampleError."""
    place, size = samples.places[i], samples.bytes[i]
    if size > _LARGE_BYTES and listing.skip_strays:
        head = cast(StrayReader, reader).head(place)
        if is_stray(head, name):
            raise _NoImage(reason_of(head, name))
    if size > _LARGEST_BYTES:
        raise _NoImage("too large to be sampled")
    started, arena = time.perf_counter(), Arena(lambda: None, max(size, 0) + 1)
    image = reader.read(place, arena)[0]
    found.read_seconds += time.perf_counter() - started
    if image is None:
        raise _NoImage("without an image")
    found.read_bytes += len(image)
    if listing.skip_strays and is_stray(image, name):
        raise _NoImage(reason_of(image, name))
    if not len(image):
        raise BadSampleError(EMPTY)
    return image
