"""Which samples are kept where not all fit: those whose hash is below a threshold.

The hash is of the sample's number alone, so every process and every job chooses the same ones, whatever the order of
its epochs; the samples of a smaller cache are among those of a larger one. There is no eviction: each sample is wanted
once an epoch, so a fixed share of the samples gives its share of hits, where keeping the latest ones would give none.

Nothing here holds an array as long as the set: samples are looked at in runs of about a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from readers.order.keys import UInt64s, counter_hash, derive_keys

__all__ = ["EVERYTHING", "Choice", "Weights", "chosen_below", "spread"]

EVERYTHING = 1 << 64
_KEY = derive_keys(0, 0, "kept in a cache")[0]
_RUN = 1 << 20
_MASK = EVERYTHING - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFT = np.uint64(48)
_BINS = 1 << 16
_Ints = npt.NDArray[np.int64]
Weights: TypeAlias = Callable[[_Ints], _Ints]


@dataclass(frozen=True, slots=True)
class Choice:
    """The samples of range(start, stop) whose hash is below threshold (0 to 2^64)."""

    start: int
    stop: int
    threshold: int

    def keeps(self, index: int) -> bool:
        """Whether one sample is kept."""
        if not self.start <= index < self.stop:
            return False
        return self.threshold == EVERYTHING or _hash(index) < self.threshold

    def mask(self, indices: _Ints) -> npt.NDArray[np.bool_]:
        """Which of these are kept, bool of the same shape."""
        inside: npt.NDArray[np.bool_] = (indices >= self.start) & (indices < self.stop)
        if self.threshold == EVERYTHING:
            return inside
        inside &= counter_hash(_KEY, indices) < np.uint64(self.threshold)
        return inside

    def kept(self) -> Iterator[_Ints]:
        """All that are kept, in stored order, in runs."""
        for run in _runs(self.start, self.stop):
            yield run[self.mask(run)]

    def total(self, weights: Weights) -> int:
        """Sum of the weights of what is kept."""
        return sum(int(weights(run).sum()) for run in self.kept())


def chosen_below(start: int, stop: int, limit: int, weights: Weights) -> int:
    """The largest threshold at which the weights of what is kept of range(start, stop) add up to at most `limit`.

    weights: of some samples, int64, 0 or more each.
    """
    totals = np.zeros(_BINS, np.int64)
    for run in _runs(start, stop):
        bins = (counter_hash(_KEY, run) >> _SHIFT).astype(np.int64)
        np.add.at(totals, bins, weights(run))
    below = np.cumsum(totals)
    if not len(below) or int(below[-1]) <= limit:
        return EVERYTHING
    number = int(np.searchsorted(below, limit, side="right"))
    left = limit - (int(below[number - 1]) if number else 0)
    hashes, heavy = _bin(start, stop, number, weights)
    order = np.argsort(hashes)
    fits = int(np.searchsorted(np.cumsum(heavy[order]), left, side="right"))
    return int(hashes[order[fits]])


def spread(start: int, stop: int, count: int) -> _Ints:
    """At most `count` samples from all over range(start, stop), always the same ones, in stored order."""
    from readers.order.permutation import Permutation

    size = stop - start
    wanted = np.arange(min(count, size), dtype=np.int64)
    return np.sort(start + Permutation(size, 0, purpose="measured").forward(wanted))


def _bin(start: int, stop: int, number: int, weights: Weights) -> tuple[UInt64s, _Ints]:
    """Hashes and weights of the samples whose hash begins with `number`."""
    hashes, heavy = [], []
    for run in _runs(start, stop):
        found = counter_hash(_KEY, run)
        inside = (found >> _SHIFT) == np.uint64(number)
        hashes.append(found[inside])
        heavy.append(weights(run[inside]))
    return np.concatenate(hashes), np.concatenate(heavy)


def _runs(start: int, stop: int) -> Iterator[_Ints]:
    return (np.arange(first, min(first + _RUN, stop), dtype=np.int64) for first in range(start, stop, _RUN))


def _hash(index: int) -> int:
    """`counter_hash` of one number, in Python's own integers: a microsecond, where NumPy takes twenty."""
    value = (int(index) * _GOLDEN + int(_KEY)) & _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31
