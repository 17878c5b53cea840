"""Stores: bytes at extents.

An extent is one run of bytes in one shard. A store knows no samples, fields, images or containers: a table says where
the bytes of a sample are, and a store reads them: from files, from a server, from a copy over its source, or from a
cache over any other store. So stores stack, and a store of another package needs a single method, `read_one`.

An extent that is not inside its shard, a missing shard, and one of another size than before raise StaleIndexError;
wrong bytes are never returned. Stores pickle by what they were opened with, threads share them, and they work in forked
children.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | memoryview
Int64s: TypeAlias = npt.NDArray[np.int64]
_S = TypeVar("_S", bound="Store")
_Number = TypeVar("_Number", int, Int64s)


class Payloads(NamedTuple):
    """The numbers of payloads in a table, `Extents.row`: of sample 0 first, field by field, then of sample 1.

    width: payloads of a sample. All methods take one number or an array.
    """

    width: int = 1

    def number(self, sample: _Number, field: int) -> _Number:
        """The number of the payload of a sample in the field at this position."""
        return sample * self.width + field if self.width > 1 else sample

    def sample(self, number: _Number) -> _Number:
        """The sample of a payload."""
        return number // self.width

    def field(self, number: _Number) -> _Number:
        """The position of a payload's field."""
        return number % self.width


class Extents(NamedTuple):
    """Where k payloads are: int64 arrays of length k.

    row: a number that no other payload of the table has (`Payloads`), the same in every process; the key in caches.
    shard: position in the store's list of shards. offset, length: bytes.
    """

    row: Int64s
    shard: Int64s
    offset: Int64s
    length: Int64s

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Extents:
        """Some of them, by position or by mask."""
        return Extents(*(column[which] for column in self))


class Shards(NamedTuple):
    """The shards of a store: their paths, relative to where they are, and their sizes in bytes."""

    paths: Sequence[str]
    bytes: Sequence[int]


class Store(ABC):
    """Bytes at extents; see the module."""

    @abstractmethod
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        """The bytes of one extent. Raises StaleIndexError."""

    def read(self, extents: Extents) -> list[Buffer]:
        """The bytes of many extents, in the order of the extents. Views stay valid and never change."""
        return [self.read_one(*one) for one in zip(*(column.tolist() for column in extents), strict=True)]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:  # noqa: B027
        """Announce extents that will be read soon; returns at once.

        below_bytes: leave out runs of this size and more, which keep a disk busy by themselves.
        """

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        """Which extents are in the memory or on the disks of this node, as far as is known without asking elsewhere."""
        return np.zeros(len(extents.row), np.bool_)

    def check(self, shard: int) -> None:  # noqa: B027
        """Compare the size of a shard with what is known of it. Raises StaleIndexError."""

    def location(self, shard: int) -> str:
        """The path or address of a shard, for messages and for readers of their own."""
        return f"shard {shard}"

    @property
    def tracks_files(self) -> bool:
        """Whether the files may be rewritten while they are read; then `state` and `is_current` are theirs."""
        return False

    def state(self) -> str:
        """A text that differs for files in another state than when they were listed."""
        return ""

    def is_current(self, shard: int) -> bool:
        """Whether the file of a shard is still in the state of `state`."""
        return True

    def for_decoding(self) -> Store:
        """The store to read images from that are decoded at once: this one, or one whose payloads take less decoding
        to the same pixels. `close` this one.
        """
        return self

    def drop_damaged(self, row: int) -> bool:
        """Whether this store kept a copy of the extent that was damaged, and now is forgotten: for those whom its bytes
        did not serve, as reading it again then helps.
        """
        return False

    def stats(self) -> Any:
        """Counts of reads, of a store that has them (`CopyStats`, `CachedStats`); None of others."""
        return None

    def close(self) -> None:  # noqa: B027
        """Close what is open; the next read opens it again."""

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoreOver(Store):
    """A store over another one, which passes everything but reads to it."""

    source: Store

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        self.source.prefetch(extents, below_bytes)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        return self.source.holds(extents)

    def check(self, shard: int) -> None:
        self.source.check(shard)

    def location(self, shard: int) -> str:
        return self.source.location(shard)

    @property
    def tracks_files(self) -> bool:
        return self.source.tracks_files

    def state(self) -> str:
        return self.source.state()

    def is_current(self, shard: int) -> bool:
        return self.source.is_current(shard)

    def drop_damaged(self, row: int) -> bool:
        return self.source.drop_damaged(row)

    def stats(self) -> Any:
        return self.source.stats()

    def close(self) -> None:
        self.source.close()


class Part(NamedTuple):
    """One store of several.

    shards: how many it has.
    samples: how many rows of the joined table are in this store.
    rows: their numbers there, int64 [samples]; None for 0, 1, ….
    payloads: how the payloads of the joined table and of the store are numbered.
    """

    store: Store
    shards: int
    samples: int
    rows: Int64s | None = None
    payloads: Payloads = Payloads()

    def of_store(self, row: _Number) -> _Number:
        """The row of an extent, or of many, as the store numbers it."""
        if self.rows is None:
            return row
        sample: Any = self.rows[self.payloads.sample(row)]
        number: _Number = self.payloads.number(sample, 0) + self.payloads.field(row)
        return number


class Joined(Store):
    """Stores one after the other, with consecutive numbers of shards. Raises what they raise."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._first_shard = [0, *accumulate(part.shards for part in parts)]
        self._first_row = [0, *accumulate(part.samples * part.payloads.width for part in parts)]

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        number = self._number(shard)
        part = self.parts[number]
        of_part = int(part.of_store(row - self._first_row[number]))
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

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        found = super().holds(extents)
        for number, which in self._split(extents):
            found[which] = self.parts[number].store.holds(self._of_part(number, extents.take(which)))
        return found

    def check(self, shard: int) -> None:
        number = self._number(shard)
        self.parts[number].store.check(shard - self._first_shard[number])

    def location(self, shard: int) -> str:
        number = self._number(shard)
        return self.parts[number].store.location(shard - self._first_shard[number])

    @property
    def tracks_files(self) -> bool:
        return any(part.store.tracks_files for part in self.parts)

    def state(self) -> str:
        return " ".join(part.store.state() for part in self.parts)

    def is_current(self, shard: int) -> bool:
        number = self._number(shard)
        return self.parts[number].store.is_current(shard - self._first_shard[number])

    def drop_damaged(self, row: int) -> bool:
        number = bisect_right(self._first_row, row) - 1
        part = self.parts[number]
        return part.store.drop_damaged(int(part.of_store(row - self._first_row[number])))

    def for_decoding(self) -> Store:
        parts = [part._replace(store=part.store.for_decoding()) for part in self.parts]
        changed = any(ours.store is not part.store for ours, part in zip(parts, self.parts, strict=True))
        return Joined(parts) if changed else self

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
        row = part.of_store(extents.row - self._first_row[number])
        return extents._replace(row=row, shard=extents.shard - self._first_shard[number])


# What the caches among a thread's stores have spent and given, apart from the stores below them.
#
# A cache adds here the time that it takes itself, without that of the store below it, so that caches over each other
# add up. The share of one read is the difference of the counts before and after it, in the thread that reads.


class Tiers(threading.local):
    """Sums of one thread. nanoseconds: spent in caches. hits, hit_bytes: payloads that they gave."""

    nanoseconds = 0
    hits = 0
    hit_bytes = 0

    def state(self) -> tuple[int, int, int]:
        """(nanoseconds, hits, hit_bytes) so far."""
        return self.nanoseconds, self.hits, self.hit_bytes


TIERS = Tiers()
