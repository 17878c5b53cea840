"""Several stores one after the other, as one: their shards are numbered through."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cache.stores.base import Buffer, Extents, Int64s, Store

__all__ = ["Joined", "Part"]


class Part(NamedTuple):
    """One store of several.

    shards: how many it has. samples: how many rows of the joined table are of this store; rows: their numbers there,
    int64 [samples], where those are not 0, 1, …. width: how many payloads a row has (`Extents.row` is row * width + the
    number of the payload).
    """

    store: Store
    shards: int
    samples: int
    rows: Int64s | None = None
    width: int = 1

    def of_store(self, row: int) -> int:
        """The row of an extent as the store numbers it."""
        return row if self.rows is None else int(self.rows[row // self.width]) * self.width + row % self.width


class Joined(Store):
    """Stores one after the other. Raises what they raise."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._first_shard = [0, *accumulate(part.shards for part in parts)]
        self._first_row = [0, *accumulate(part.samples * part.width for part in parts)]

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        number = self._number(shard)
        part = self.parts[number]
        of_part = part.of_store(row - self._first_row[number])
        return part.store.read_one(of_part, shard - self._first_shard[number], offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        found: list[Buffer] = [b""] * len(extents.row)
        for number, which in self._split(extents):
            data = self.parts[number].store.read(self._of_part(number, extents.take(which)))
            for i, one in zip(which.tolist(), data, strict=True):
                found[i] = one
        return found

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        for number, which in self._split(extents):
            self.parts[number].store.prefetch(self._of_part(number, extents.take(which)), below_bytes)

    def check(self, shard: int) -> None:
        number = self._number(shard)
        self.parts[number].store.check(shard - self._first_shard[number])

    def place(self, shard: int) -> str:
        number = self._number(shard)
        return self.parts[number].store.place(shard - self._first_shard[number])

    @property
    def tracks_files(self) -> bool:
        return any(part.store.tracks_files for part in self.parts)

    def state(self) -> str:
        return " ".join(part.store.state() for part in self.parts)

    def is_current(self, shard: int) -> bool:
        number = self._number(shard)
        return self.parts[number].store.is_current(shard - self._first_shard[number])

    def close(self) -> None:
        for part in self.parts:
            part.store.close()

    def _number(self, shard: int) -> int:
        return bisect_right(self._first_shard, shard) - 1

    def _split(self, extents: Extents) -> list[tuple[int, Int64s]]:
        """(part, positions of the extents that are in it), for those parts that have any."""
        numbers = np.searchsorted(self._first_shard, extents.shard, side="right") - 1
        return [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]

    def _of_part(self, number: int, extents: Extents) -> Extents:
        part = self.parts[number]
        row = extents.row - self._first_row[number]
        if part.rows is not None:
            row = part.rows[row // part.width] * part.width + row % part.width
        return extents._replace(row=row, shard=extents.shard - self._first_shard[number])
