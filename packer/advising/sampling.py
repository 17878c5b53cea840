"""A random sample of a source: the same images for the same listing and seed, read once and checked as in packing.

What is not an image, or does not decode, is left out and counted. Samples are drawn from all splits together, by a
permutation that is a function of the seed, and read in the order of the source: an archive is gone through once.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.messages import Watcher, plural
from packer.conversion.images import check_image, decode_fully, remarks_of
from packer.formats.base import Arena
from packer.sources import Source
from packer.sources.base import Slice, SourceListing, SourceReader, StrayReader
from packer.sources.contents import EMPTY, is_stray, reason_of
from packer.workers import without_gc
from readers.headers import ImageHeader
from readers.order.permutation import Permutation
from readers.sample import Buffer

__all__ = ["ImageSample", "SampledImage", "draw"]

_MOST_BYTES = 256 << 20
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

    title: of the source. splits: samples by split, as listed. listed_bytes: of all samples with all their fields, 0
    where the listing does not know them. drawn: how many were read for these images; left_out counts those of them
    that are not here by the reason, and examples names the first; damaged: of them, the images that do not decode.
    read_bytes, read_seconds: of reading them, by one thread.
    """

    title: str
    splits: dict[str, int]
    fields: tuple[str, ...]
    listed_bytes: int
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
    sizes = [part.bytes for part in listing.splits.values()]
    known = all(bool((size > 0).all()) for size in sizes)
    found = ImageSample(
        source.title,
        {name: len(part) for name, part in listing.splits.items()},
        tuple(listing.fields),
        sum(int(size.sum()) for size in sizes) if known else 0,
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
        while found.drawn < limit and len(found.images) < count and size < _MOST_BYTES:
            block = chosen[found.drawn : found.drawn + count - len(found.images)]
            images: dict[int, SampledImage] = {}
            with source.open() as reader:
                for number, samples, i in _in_order(listing, np.sort(block)):
                    found.drawn += 1
                    image = _read_one(samples, i, reader, listing, found)
                    if image is not None:
                        images[number] = image
                        size += len(image.data)
                    if size >= _MOST_BYTES:
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
