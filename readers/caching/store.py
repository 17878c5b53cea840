"""A cache over any store: payloads in memory that the processes of a node share, in the form that is kept.

A hit is a view of shared memory, without a lock or a copy (unless it was compressed). A miss is read from the store
below, together with the other misses of the batch, converted, and stored for all processes. What does not fit passes
through. Views stay valid as long as they are referenced: nothing is evicted or overwritten.

The shared memory has numbered slots:

    0                      what all users agree on (`readers.caching.terms`), as JSON
    then, field by field   one slot for each row of the subset
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cache import SharedByteCache
from cache.stores import Buffer, Extents, Int64s, Store, StoreOver
from cache.stores.tiers import TIERS
from readers.caching.budget import Slots
from readers.caching.form import Form, compress, decompress
from readers.caching.terms import Terms
from readers.index import Columns

__all__ = ["CHECKS", "Cached", "CachedStats", "Check", "Originals"]

Check: TypeAlias = Literal["never", "first", "always"]
CHECKS = ("never", "first", "always")
_COUNTED_TOGETHER = 64
_LEAST_BYTES = 64  # what the shortest payload takes


class Cached(StoreOver):
    """`source` behind shared memory. Without it (`shared` is None) nothing is kept, but images are still converted,
    unless their form is for decoders alone, who take the original as well.

    columns: those whose rows the extents name.
    check: when payloads are compared with their CRC32C: that of the index, or else of the shared memory.

    Files that were rewritten since they were listed are never stored, and dropped where they are checked.
    """

    def __init__(
        self,
        source: Store,
        shared: SharedByteCache | None,
        slots: Slots,
        terms: Terms,
        form: Form,
        columns: Columns,
        check: Check = "never",
    ) -> None:
        self.source, self.shared, self.slots, self.terms = source, shared, slots, terms
        self.form, self.columns, self.check_payloads = form, columns, check
        self._setup()

    def _setup(self) -> None:
        self.subset = replace(self.slots.subset, threshold=self.terms.threshold)
        fields = self.columns.fields
        self._image = fields.index("image") if "image" in fields and self.form.converts else -1
        self._packed = {fields.index(name) for name in self.terms.packed}
        self._plain = self.check_payloads == "never" and not self._packed
        self._tracks_files = self.source.tracks_files
        self._checked = bytearray()
        self._hit_bytes: deque[int] = deque()
        # Most sets have one field and keep it unchanged: then the slot is the row plus a constant.
        rows = self.slots.subset.rows
        self._start = self._stop = self._shift = 0
        if self._plain and self.slots.width == 1 and isinstance(rows, range) and self.shared is not None:
            self._start, self._stop, self._shift = rows.start, rows.stop, 1 - rows.start
            self._fetch = self.shared.get

    # --- reading ------------------------------------------------------------------------------------------------
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        data = self.hit(row)
        if data is not None:
            return data
        data = self._look_up(row, shard)
        if data is None:
            return self._store(row, shard, self.source.read_one(row, shard, offset, length))
        self._note_hit(data)
        return data

    def hit(self, row: int) -> Buffer | None:
        """The cached payload of a row where that is a single look-up; None does not mean that it is not cached."""
        if not self._start <= row < self._stop:
            return None
        data = self._fetch(row + self._shift)
        if data is not None:
            self._note_hit(data)
        return data

    def read(self, extents: Extents) -> list[Buffer]:
        start, below = time.perf_counter_ns(), 0
        rows, shards = extents.row.tolist(), extents.shard.tolist()
        if self.shared is None:
            results: list[Buffer | None] = [None] * len(rows)
        elif self._plain:
            fetch = self.shared.get
            results = [fetch(slot) if slot >= 0 else None for slot in self.slots.many(extents.row).tolist()]
        else:
            results = [self._look_up(row, shard) for row, shard in zip(rows, shards, strict=True)]
        self._count(results)
        missing = [i for i, data in enumerate(results) if data is None]
        if missing:
            below = time.perf_counter_ns()
            found = self.source.read(extents.take(np.array(missing, np.int64)))
            below = time.perf_counter_ns() - below
            for i, data in zip(missing, found, strict=True):
                results[i] = self._store(rows[i], shards[i], data)
        TIERS.nanoseconds += time.perf_counter_ns() - start - below
        return results  # type: ignore[return-value]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        """Announce those that are not cached."""
        missing = extents.take(~self.has(extents.row))
        if len(missing.row):
            self.source.prefetch(missing, below_bytes)

    def has(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Which extents, by their rows, are cached."""
        shared = self.shared
        if shared is None:
            return np.zeros(len(rows), np.bool_)
        return np.array([slot >= 0 and shared.has(slot) for slot in self.slots.many(rows).tolist()], np.bool_)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        return self.has(extents.row) | self.source.holds(extents)

    def drop_damaged(self, row: int) -> bool:
        slot = self.slots.one(row)
        if self.shared is not None and slot >= 0 and self.shared.has(slot) and not self.shared.check(slot):
            return True
        return self.source.drop_damaged(row)

    def close(self) -> None:
        """Leave the shared memory and close the store below; later reads pass through."""
        self._count_hits()
        shared, self.shared = self.shared, None
        self._start = self._stop = 0
        if shared is not None:
            shared.close()
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "shared", "slots", "terms", "form", "columns", "check_payloads")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- filling ------------------------------------------------------------------------------------------------
    @property
    def has_room(self) -> bool:
        """Whether the shortest payload still fits."""
        return self.shared is not None and self.shared.capacity_bytes - self.shared.used_bytes >= _LEAST_BYTES

    def convert(self, row: int, data: Buffer) -> Buffer:
        """The payload in the form that is kept, perhaps in memory of this thread, which its next call overwrites.

        Raises BadSampleError.
        """
        return self.form.lend(data) if self._image >= 0 and row % self.slots.width == self._image else data

    def put(self, row: int, shard: int, converted: Buffer) -> bool:
        """Store a converted payload; False where it is cached already, is being written, does not fit, or is of a file
        that was rewritten (checked here, after the read)."""
        slot = self.slots.one(row)
        if self.shared is None or slot < 0 or (self._tracks_files and not self.source.is_current(shard)):
            return False
        return self.shared.put(slot, compress(converted) if row % self.slots.width in self._packed else converted)

    def stats(self) -> CachedStats:
        """How full it is and how often it was hit; the time grows with the number of samples."""
        if self.shared is None:
            return CachedStats(self.form.kind, len(self.subset), 0, 0)
        self._count_hits()
        first = self.slots.first(self.slots.fields[0])
        present = int(self.shared.present()[first : first + len(self.subset)].sum())
        kept = sum(len(run) for run in self.subset.kept())
        return CachedStats(
            self.form.kind,
            len(self.subset),
            kept,
            present,
            self.shared.capacity_bytes,
            self.shared.used_bytes,
            **asdict(self.shared.stats()),
        )

    # --- inside -------------------------------------------------------------------------------------------------
    def _look_up(self, row: int, shard: int) -> Buffer | None:
        shared, slot = self.shared, self.slots.one(row)
        if shared is None or slot < 0:
            return None
        stored = shared.get(slot)
        if stored is None or self._plain:
            return stored
        try:
            data = decompress(stored) if row % self.slots.width in self._packed else stored
        except ValueError:
            shared.drop(slot)
            return None
        if self.check_payloads == "never" or (self.check_payloads == "first" and self._was_checked(slot)):
            return data
        fresh = not self._tracks_files or self.source.is_current(shard)
        if not (fresh and self._is_right(shared, slot, data, row)):
            shared.drop(slot)  # so that it is read again
            return None
        if self._checked:
            self._checked[slot] = 1
        return data

    def _was_checked(self, slot: int) -> bool:
        if not self._checked:
            self._checked = bytearray(len(self.slots))
        return bool(self._checked[slot])

    def _is_right(self, shared: SharedByteCache, slot: int, data: Buffer, row: int) -> bool:
        sample, number = divmod(row, self.slots.width)
        if not self.columns.has_checksums or number == self._image:  # the index has checksums of originals only
            return shared.check(slot)
        from crc32c import crc32c

        return crc32c(data) == int(self.columns.field_column(self.columns.fields[number], "crc32c")[sample])

    def _store(self, row: int, shard: int, data: Buffer) -> Buffer:
        """Convert a payload, store it if it has a slot, and return it as it is handed out."""
        kept = self._has_place(row)
        converted = data if self.form.is_for_decoders and not kept else self.convert(row, data)
        if self.shared is None or row % self.slots.width not in self.slots.numbers:
            return _owned(converted, data)
        slot = self.slots.one(row)
        if not (kept and (self.put(row, shard, converted) or self.shared.has(slot))):
            self.shared.count(passed=1)
            return _owned(converted, data)
        self.shared.count(misses=1)
        # the memory of the process need not hold it a second time
        stored = self.shared.get(slot) if self._plain else None
        return _owned(converted, data) if stored is None else stored

    def _has_place(self, row: int) -> bool:
        """Whether a payload has a slot; of a form that others can do without, whether there is also room left."""
        if self.shared is None or (self.form.is_for_decoders and self.shared.full):
            return False
        return self.slots.one(row) >= 0 and self.subset.keeps(row // self.slots.width)

    def hits(self, rows: Int64s) -> list[Buffer | None]:
        """`hit` for many rows, counted together."""
        if self._start == self._stop:
            return [None] * len(rows)
        start, stop, shift, fetch = self._start, self._stop, self._shift, self._fetch
        found: list[Buffer | None] = [fetch(row + shift) if start <= row < stop else None for row in rows.tolist()]
        self._count(found)
        return found

    def _count(self, found: list[Buffer | None]) -> None:
        sizes = [len(data) for data in found if data is not None]
        if sizes and self.shared is not None:
            size = sum(sizes)
            self.shared.count(hits=len(sizes), hit_bytes=size)
            TIERS.hits += len(sizes)
            TIERS.hit_bytes += size

    def _note_hit(self, data: Buffer) -> None:
        self._hit_bytes.append(len(data))
        if len(self._hit_bytes) >= _COUNTED_TOGETHER:
            self._count_hits()

    def _count_hits(self) -> None:
        """Add the hits since the last call to the statistics: each addition takes a lock."""
        hits = size = 0
        try:
            while True:  # each is taken by one thread only
                size += self._hit_bytes.popleft()
                hits += 1
        except IndexError:
            if hits and self.shared is not None:
                self.shared.count(hits=hits, hit_bytes=size)


class Originals(StoreOver):
    """A cache whose images are for decoders alone: all others read images below it, and what else it keeps from it.

    below: the store that the cache is over, with the images as they are.
    """

    def __init__(self, source: Cached, below: Store) -> None:
        self.source: Cached = source
        self.below = below
        fields = source.columns.fields
        self._image, self._width = fields.index("image") if "image" in fields else -1, len(fields)

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self._store_of(row).read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        images = extents.row % self._width == self._image
        if images.all() or not images.any():
            return (self.below if images.any() else self.source).read(extents)
        return [self.read_one(*one) for one in zip(*(column.tolist() for column in extents), strict=True)]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        images = extents.row % self._width == self._image
        for store, which in ((self.below, images), (self.source, ~images)):
            if which.any():
                store.prefetch(extents.take(which), below_bytes)

    def for_decoding(self) -> Store:
        return self.source

    def drop_damaged(self, row: int) -> bool:
        return self._store_of(row).drop_damaged(row)

    def close(self) -> None:
        self.source.close()
        self.below.close()

    def _store_of(self, row: int) -> Store:
        return self.below if row % self._width == self._image else self.source


def _owned(converted: Buffer, data: Buffer) -> Buffer:
    """What a form has made of `data`, to be kept: `data` itself, and bytes that are not overwritten."""
    return converted if converted is data else bytes(converted)


@dataclass(frozen=True, slots=True)
class CachedStats:
    """Statistics of one cache, over all processes that use or used it.

    Hits of single reads are counted 64 at a time, so up to that many are lost where a process ends without closing.

    samples: of the set, or of this node's part.
    kept: samples that have a slot.
    present: samples whose first field is cached.
    capacity_bytes, used_bytes: of the payloads.
    hits, hit_bytes: reads that the cache served.
    misses: reads of samples that have a slot and were not cached yet.
    passed: reads of samples without a slot.
    puts, put_bytes: payloads that were stored.
    dropped: payloads that were found damaged.
    users: processes that have it open.
    """

    kind: str
    samples: int
    kept: int
    present: int
    capacity_bytes: int = 0
    used_bytes: int = 0
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    puts: int = 0
    put_bytes: int = 0
    passed: int = 0
    dropped: int = 0
    users: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per read, 0 to 1."""
        return self.hits / max(1, self.hits + self.misses + self.passed)

    @property
    def filled(self) -> float:
        """Share of the samples with a slot that are cached, 0 to 1."""
        return self.present / max(1, self.kept)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "filled": self.filled}
