"""Stores: bytes at extents.

An extent is one run of bytes in one shard. A store knows no samples, fields, images or containers: a table records
where the bytes of a sample are, and a store reads them from files, from a server, from a copy over its source, or from
a cache over any other store. So stores stack, and a store of another package needs a single method, `read_one`.

StaleIndexError is raised for an extent outside its shard, a missing shard, and a shard whose size has changed; wrong
bytes are never returned. Stores pickle as their arguments, are thread-safe, and work in forked children.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | memoryview
Int64s: TypeAlias = npt.NDArray[np.int64]
_S = TypeVar("_S", bound="Store")
_Number = TypeVar("_Number", int, Int64s)


class Payloads(NamedTuple):
    """Numbering of the payloads of a table (`Extents.row`): field by field for sample 0, then for sample 1, ….

    width: payloads per sample. All methods take one number or an array.
    """

    width: int = 1

    def number(self, sample: _Number, field: int) -> _Number:
        """The number of the payload of a sample in a field, given by its position."""
        return sample * self.width + field if self.width > 1 else sample

    def sample(self, number: _Number) -> _Number:
        """The sample of a payload."""
        return number // self.width

    def field(self, number: _Number) -> _Number:
        """The field of a payload, by its position."""
        return number % self.width


class Extents(NamedTuple):
    """Locations of k payloads: int64 arrays of length k.

    row: the unique number of the payload in the table (`Payloads`), the same in every process; the key in caches.
    shard: position in the store's list of shards. offset, length: in bytes.
    """

    row: Int64s
    shard: Int64s
    offset: Int64s
    length: Int64s

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Extents:
        """A subset, by positions or by a mask."""
        return Extents(*(column[which] for column in self))


class Shards(NamedTuple):
    """The shards of a store: their paths, relative to the store's root, and their sizes in bytes."""

    paths: Sequence[str]
    bytes: Sequence[int]


class ByRow(Protocol):
    """Returns payloads by row; None for those that are not stored."""

    def hit(self, row: int) -> Buffer | None: ...

    def hits(self, rows: Int64s) -> list[Buffer | None]: ...


class Store(ABC):
    """Reads bytes at extents; see the module."""

    @abstractmethod
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        """The bytes of one extent. Raises StaleIndexError."""

    def read(self, extents: Extents) -> list[Buffer]:
        """The bytes of many extents, in their order. Views stay valid and never change."""
        return [self.read_one(*extent) for extent in zip(*(column.tolist() for column in extents), strict=True)]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:  # noqa: B027
        """Announce extents that will be read soon; returns at once.

        below_bytes: skip runs of at least this size, which keep a disk busy on their own.
        """

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        """Which extents are in the memory or on the disks of this node, as far as is known locally. bool [k]."""
        return np.zeros(len(extents.row), np.bool_)

    def check(self, shard: int) -> None:  # noqa: B027
        """Check that a shard still has its indexed size or its `state`. Raises StaleIndexError."""

    def close(self) -> None:  # noqa: B027
        """Close open files and connections; the next read opens them again."""

    @property
    def state(self) -> str:
        """A text that identifies the state of files that may be rewritten while they are read, as of their listing;
        `check` compares it. "" if an index identifies them.
        """
        return ""

    @property
    def by_row(self) -> ByRow | None:
        """Access to payloads by row alone, for stores that keep them so; None for others."""
        return None

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoreOver(Store):
    """A store over another one, `source`; passes on every call except reads."""

    source: Store

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        self.source.prefetch(extents, below_bytes)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        return self.source.holds(extents)

    def check(self, shard: int) -> None:
        self.source.check(shard)

    def close(self) -> None:
        self.source.close()

    @property
    def state(self) -> str:
        return self.source.state

    def stats(self) -> Any:
        """The counts of the store below, such as `CopyStats`; None if it has none."""
        return getattr(self.source, "stats", lambda: None)()


class Part(NamedTuple):
    """One store of a `Joined` store.

    shards: number of its shards.
    samples: how many rows of the joined table are in this store.
    rows: their row numbers in the store, int64 [samples]; None for 0, 1, ….
    payloads: the numbering of the payloads in the joined table and in the store.
    """

    store: Store
    shards: int
    samples: int
    rows: Int64s | None = None
    payloads: Payloads = Payloads()

    def of_store(self, row: _Number) -> _Number:
        """Translate the row of an extent, or of many, to the numbering of the store."""
        if self.rows is None:
            return row
        sample: Any = self.rows[self.payloads.sample(row)]
        number: _Number = self.payloads.number(sample, 0) + self.payloads.field(row)
        return number


class Joined(Store):
    """Stores joined one after the other, with consecutive shard numbers. Raises the errors of its parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._first_shard = [0, *accumulate(part.shards for part in parts)]
        self._first_row = [0, *accumulate(part.samples * part.payloads.width for part in parts)]

    def below(self, row: int, shard: int) -> tuple[Store, int, int]:
        """The store of a shard, and the numbers of the extent and the shard in that store."""
        number = bisect_right(self._first_shard, shard) - 1
        part = self.parts[number]
        return part.store, int(part.of_store(row - self._first_row[number])), shard - self._first_shard[number]

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        store, row, shard = self.below(row, shard)
        return store.read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        data: list[Buffer] = [b""] * len(extents.row)
        for store, which, some in self._split(extents):
            put(data, which, store.read(some))
        return data

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        for store, _, some in self._split(extents):
            store.prefetch(some, below_bytes)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        local = super().holds(extents)
        for store, which, some in self._split(extents):
            local[which] = store.holds(some)
        return local

    def check(self, shard: int) -> None:
        number = bisect_right(self._first_shard, shard) - 1
        self.parts[number].store.check(shard - self._first_shard[number])

    def close(self) -> None:
        for part in self.parts:
            part.store.close()

    @property
    def state(self) -> str:
        return " ".join(part.store.state for part in self.parts).strip()

    def _split(self, extents: Extents) -> Iterator[tuple[Store, Int64s, Extents]]:
        """(store, positions of its extents, those extents in its numbering), for each store that has any."""
        numbers = np.searchsorted(self._first_shard, extents.shard, side="right") - 1
        for number in np.unique(numbers).tolist():
            part, which = self.parts[number], np.flatnonzero(numbers == number)
            some = extents.take(which)
            row = part.of_store(some.row - self._first_row[number])
            yield part.store, which, some._replace(row=row, shard=some.shard - self._first_shard[number])


def put(data: list[Buffer], which: Int64s, some: Sequence[Buffer]) -> None:
    """Put payloads at their positions in `data`."""
    for i, payload in zip(which.tolist(), some, strict=True):
        data[i] = payload


def layers(store: Store, row: int = 0, shard: int = 0) -> Iterator[tuple[Store, int, int]]:
    """A store and those below it, each with the numbers of the extent and its shard there."""
    while True:
        yield store, row, shard
        if isinstance(store, Joined):
            store, row, shard = store.below(row, shard)
        elif isinstance(store, StoreOver):
            store = store.source
        else:
            return


def layer(store: Store, kind: type[_S]) -> _S | None:
    """The first store of a kind in a stack of stores."""
    while not isinstance(store, kind):
        if not isinstance(store, StoreOver):
            return None
        store = store.source
    return store


def location(store: Store, row: int, shard: int) -> str:
    """The path or address of a shard, for messages and for other packages, from the first layer that knows it."""
    for layer, _, number in layers(store, row, shard):
        if hasattr(layer, "location"):
            return str(layer.location(number))
    return f"shard {shard}"


# Time spent in, and payloads from, the caches among a thread's stores.
#
# Each cache adds the time that it takes itself, without that of the store below it, so that stacked caches add up. The
# share of one read is the difference of the counts before and after it, in the thread that reads.


class Tiers(threading.local):
    """Sums of one thread. nanoseconds: spent in caches. hits, hit_bytes: payloads served by them."""

    nanoseconds = 0
    hits = 0
    hit_bytes = 0

    def state(self) -> tuple[int, int, int]:
        """(nanoseconds, hits, hit_bytes) so far."""
        return self.nanoseconds, self.hits, self.hit_bytes


TIERS = Tiers()
