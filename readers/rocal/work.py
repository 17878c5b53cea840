"""One batch for rocAL: read, vetted, and filled up to exactly `batch_size` images.

    rows 0 to count - 1       samples of the epoch
    rows count to batch_size  repeats that nobody sees: rocAL takes no short batch

A bad sample that is skipped leaves no gap: the rows behind it move up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from readers.feed import SAMPLE_ERRORS, BadSample, Feed, read_sample
from readers.order.base import Int64s
from readers.rocal.vet import Limits, Vetted, blank, vet
from readers.sample import NO_LABEL, Buffer

__all__ = ["SourceBatch", "SourceWork", "padding_batch"]

_INT32 = np.iinfo(np.int32)
_SMALL = Limits(16, 16)


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """images: batch_size contiguous uint8 arrays. labels: int32 [batch_size]. indices: int64 [count], the samples of
    the first rows. cursor: of the epoch, once this batch has been seen."""

    images: list[npt.NDArray[np.uint8]]
    labels: npt.NDArray[np.int32]
    indices: Int64s
    cursor: int
    bad: Sequence[BadSample] = ()
    converted: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return len(self.indices)

    def feed(self) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.int32], list[int]]:
        """What rocAL wants of a RAW_COMPRESSED source: a list of images, labels, and a list of their bytes."""
        return self.images, self.labels, [len(image) for image in self.images]


def padding_batch(batch_size: int, limits: Limits) -> SourceBatch:
    """A batch without a sample: grey images, so large that a box of any other image lies within them."""
    return _filled([], [], batch_size, cursor=0, size=limits)


@dataclass(frozen=True, slots=True)
class SourceWork:
    """The batches of a feed's first epoch. convert, quality: as in `external_source`."""

    feed: Feed
    limits: Limits
    convert: bool
    quality: int

    def make(self, step: int) -> SourceBatch:
        """The batch of a step. Raises BadSampleError where on_error="raise" lets it through."""
        epoch = self.feed.start.epoch
        positions, indices = self.feed.rows(epoch, step)
        data, sizes = self.feed.read(indices), self._sizes(indices)
        vetted: list[Vetted] = []
        kept: list[int] = []
        bad: list[BadSample] = []
        for row, (index, position) in enumerate(zip(indices.tolist(), positions.tolist(), strict=True)):
            try:
                vetted.append(self._vet(data[row], sizes[row]))
            except SAMPLE_ERRORS as error:
                bad.append(self.feed.bad(index, position, error))
                if self.feed.options.on_error == "skip":
                    continue
                index, image = self.feed.substitute(epoch, position, error, self._read_and_vet)
                vetted.append(image)
            kept.append(index)
        labels = self._labels(np.array(kept, np.int64))
        converted = Counter(image.reason for image in vetted if image.reason)
        images = [image.data for image in vetted]
        cursor = self.feed.after(step + 1).cursor
        return _filled(images, kept, self.feed.batch_size, cursor, labels, bad, converted)

    def _read_and_vet(self, index: int) -> Vetted:
        return self._vet(read_sample(self.feed.reader, index), self._sizes(np.array([index]))[0])

    def _vet(self, data: Buffer | Exception, size: tuple[int, int]) -> Vetted:
        if isinstance(data, Exception):
            raise data
        return vet(data, self.limits, size=size, convert=self.convert, quality=self.quality)

    def _sizes(self, indices: Int64s) -> list[tuple[int, int]]:
        info = self.feed.reader.image_info(indices)
        return list(zip(info.height.tolist(), info.width.tolist(), strict=True))

    def _labels(self, indices: Int64s) -> list[int]:
        labels = self.feed.reader.labels[indices]
        if labels.size and not _INT32.min <= int(labels.min()) <= int(labels.max()) <= _INT32.max:
            raise ValueError(f"rocAL takes labels of 32 bits, found {labels.min()} to {labels.max()}")
        return [int(label) for label in labels]


def _filled(
    images: Sequence[npt.NDArray[np.uint8]],
    indices: Sequence[int],
    batch_size: int,
    cursor: int,
    labels: Sequence[int] = (),
    bad: Sequence[BadSample] = (),
    converted: Counter[str] | None = None,
    size: Limits = _SMALL,
) -> SourceBatch:
    missing = batch_size - len(images)
    filler = images[0] if images else blank(size)
    told = np.array([*labels, *[NO_LABEL] * missing], np.int32)
    every = [*images, *[filler] * missing]
    return SourceBatch(every, told, np.array(indices, np.int64), cursor, tuple(bad), converted or Counter())
