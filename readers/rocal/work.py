"""One batch for rocAL: read, vetted, and filled up to exactly `batch_size` images.

    rows 0 to count - 1       samples of the epoch
    rows count to batch_size  repeats that nobody sees: rocAL takes no short batch

A bad sample that is skipped leaves no gap: the rows behind it move up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.order import Order
from readers.order.base import Int64s
from readers.rocal.vet import Limits, Vetted, blank, substitutes, vet
from readers.sample import NO_LABEL, Buffer, Reader

__all__ = ["BadSample", "OnError", "SourceBatch", "SourceWork", "padding_batch"]

OnError: TypeAlias = Literal["raise", "skip", "substitute"]
# What is wrong with one sample only. Anything else is wrong with the set, and ends the epoch.
_SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_INT32 = np.iinfo(np.int32)
_SMALL = Limits(16, 16)


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that rocAL did not get: its number in the set, its position in the epoch, and why."""

    index: int
    position: int
    key: str
    reason: str


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


@dataclass(slots=True)
class SourceWork:
    """One epoch of one rank. positions: of step s, int64 [k], k <= batch_size. cursor_after: of step s."""

    reader: Reader
    order: Order
    positions: Callable[[int], Int64s]
    cursor_after: Callable[[int], int]
    batch_size: int
    seed: int
    epoch: int
    on_error: OnError
    limits: Limits
    convert: bool
    quality: int

    def make(self, step: int) -> SourceBatch:
        """The batch of a step. Raises BadSampleError where on_error="raise" lets it through."""
        positions = self.positions(step)
        indices = self.order.indices(self.epoch, positions)
        data, sizes = self._read(indices), self._sizes(indices)
        vetted: list[Vetted] = []
        kept: list[int] = []
        bad: list[BadSample] = []
        for row, (index, position) in enumerate(zip(indices.tolist(), positions.tolist(), strict=True)):
            try:
                vetted.append(self._vet(data[row], sizes[row]))
            except _SAMPLE_ERRORS as error:
                bad.append(self._bad(index, position, error))
                if self.on_error == "skip":
                    continue
                index, image = self._substitute(position, error)
                vetted.append(image)
            kept.append(index)
        labels = self._labels(np.array(kept, np.int64))
        converted = Counter(image.reason for image in vetted if image.reason)
        images = [image.data for image in vetted]
        return _filled(images, kept, self.batch_size, self.cursor_after(step), labels, bad, converted)

    def _vet(self, data: Buffer | Exception, size: tuple[int, int]) -> Vetted:
        if isinstance(data, Exception):
            raise data
        return vet(data, self.limits, size=size, convert=self.convert, quality=self.quality)

    def _sizes(self, indices: Int64s) -> list[tuple[int, int]]:
        info = self.reader.image_info(indices)
        return list(zip(info.height.tolist(), info.width.tolist(), strict=True))

    def _read(self, indices: Int64s) -> Sequence[Buffer | Exception]:
        try:
            return self.reader.read_many(indices)
        except _SAMPLE_ERRORS:
            return [self._read_one(int(index)) for index in indices]

    def _read_one(self, index: int) -> Buffer | Exception:
        try:
            return self.reader.read(index)
        except _SAMPLE_ERRORS as error:
            return error

    def _bad(self, index: int, position: int, error: Exception) -> BadSample:
        key = self.reader.keys[index]
        if self.on_error == "raise":
            raise BadSampleError(
                f"sample {index} ({key}): {error}; find all such samples with `packer verify --deep`, or read on with "
                f"on_error='skip' or 'substitute'"
            ) from error
        return BadSample(index, position, key, str(error))

    def _substitute(self, position: int, error: Exception) -> tuple[int, Vetted]:
        """Another sample of the epoch for a row; which one follows from the position alone."""
        others = substitutes(self.seed, self.epoch, position, len(self.order))
        for index in self.order.indices(self.epoch, np.array(others, np.int64)).tolist():
            try:
                return index, self._vet(self._read_one(index), self._sizes(np.array([index]))[0])
            except _SAMPLE_ERRORS:
                continue
        raise BadSampleError(f"{len(others)} samples in place of a bad one were bad as well, the first: {error}")

    def _labels(self, indices: Int64s) -> list[int]:
        labels = self.reader.labels[indices]
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
