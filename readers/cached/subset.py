"""Which samples are kept where not all fit: those whose hash is below a threshold.

The hash is of the sample's row alone, so every process and every job chooses the same ones, whatever the order of its
epochs; the samples of a smaller cache are among those of a larger one. There is no eviction: each sample is wanted once
an epoch, so a fixed share of the samples gives its share of hits, where keeping the latest ones would give none.

Nothing here has an array as long as the set: samples are looked at in runs of about a million.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from readers.order.permutation import UInt64s, counter_hash, derive_keys

__all__ = ["EVERYTHING", "Subset", "Weights"]

EVERYTHING = 1 << 64
_KEY = derive_keys(0, 0, "kept in a cache")[0]
_RUN = 1 << 20
_MASK = EVERYTHING - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFT = np.uint64(48)
_BINS = 1 << 16
_Ints = npt.NDArray[np.int64]
Weights: TypeAlias = Callable[[_Ints], _Ints]


@dataclass(frozen=True, eq=False)
class Subset:
    """Those of `rows` (a range, or int64 in rising order) whose hash is below threshold (0 to 2^64)."""

    rows: range | _Ints
    threshold: int = EVERYTHING

    def __len__(self) -> int:
        """How many rows there are, kept or not."""
        return len(self.rows)

    def rank(self, row: int) -> int:
        """The position of a row among `rows`; -1 for any other."""
        rows = self.rows
        if isinstance(rows, range):
            return row - rows.start if rows.start <= row < rows.stop else -1
        at = bisect_left(rows.data, row)
        return at if at < len(rows) and rows[at] == row else -1

    def ranks(self, rows: _Ints) -> _Ints:
        """The same for many."""
        if isinstance(self.rows, range):
            inside = (rows >= self.rows.start) & (rows < self.rows.stop)
            return np.where(inside, rows - self.rows.start, -1)
        at = np.searchsorted(self.rows, rows)
        found = np.append(self.rows, -1)[at] == rows
        return np.where(found, at, -1)

    def keeps(self, row: int) -> bool:
        """Whether a row is kept."""
        return self.rank(row) >= 0 and (self.threshold == EVERYTHING or _hash(row) < self.threshold)

    def mask(self, rows: _Ints) -> npt.NDArray[np.bool_]:
        """Which of these are kept, bool of the same shape."""
        return (self.ranks(rows) >= 0) & self._below(rows)

    def kept(self) -> Iterator[_Ints]:
        """All rows that are kept, in stored order, in runs."""
        for run in self._runs():
            yield run[self._below(run)]

    def total(self, weights: Weights) -> int:
        """Sum of the weights of what is kept."""
        return sum(int(weights(run).sum()) for run in self.kept())

    def limited(self, limit: int, weights: Weights) -> Subset:
        """With the largest threshold at which the weights of what is kept add up to at most `limit`.

        weights: of some rows, int64, 0 or more each.
        """
        totals = np.zeros(_BINS, np.int64)
        for run in self._runs():
            bins = (counter_hash(_KEY, run) >> _SHIFT).astype(np.int64)
            np.add.at(totals, bins, weights(run))
        below = np.cumsum(totals)
        if not len(below) or int(below[-1]) <= limit:
            return replace(self, threshold=EVERYTHING)
        number = int(np.searchsorted(below, limit, side="right"))
        left = limit - (int(below[number - 1]) if number else 0)
        hashes, heavy = self._bin(number, weights)
        order = np.argsort(hashes)
        fits = int(np.searchsorted(np.cumsum(heavy[order]), left, side="right"))
        return replace(self, threshold=int(hashes[order[fits]]))

    def spread(self, count: int) -> _Ints:
        """At most `count` rows from all over, always the same ones, in stored order."""
        from readers.order.permutation import Permutation

        wanted = np.arange(min(count, len(self)), dtype=np.int64)
        ranks = np.sort(Permutation(len(self), 0, purpose="measured").forward(wanted))
        return ranks + self.rows.start if isinstance(self.rows, range) else self.rows[ranks]

    def _below(self, rows: _Ints) -> npt.NDArray[np.bool_]:
        if self.threshold == EVERYTHING:
            return np.ones(len(rows), np.bool_)
        below: npt.NDArray[np.bool_] = counter_hash(_KEY, rows) < np.uint64(self.threshold)
        return below

    def _bin(self, number: int, weights: Weights) -> tuple[UInt64s, _Ints]:
        """Hashes and weights of the rows whose hash begins with `number`."""
        hashes, heavy = [], []
        for run in self._runs():
            found = counter_hash(_KEY, run)
            inside = (found >> _SHIFT) == np.uint64(number)
            hashes.append(found[inside])
            heavy.append(weights(run[inside]))
        return np.concatenate(hashes), np.concatenate(heavy)

    def _runs(self) -> Iterator[_Ints]:
        for first in range(0, len(self), _RUN):
            part = self.rows[first : first + _RUN]
            yield np.arange(part.start, part.stop, dtype=np.int64) if isinstance(part, range) else part


def _hash(row: int) -> int:
    """`counter_hash` of one number, in Python's own integers: a microsecond, where NumPy takes twenty."""
    value = (int(row) * _GOLDEN + int(_KEY)) & _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31
