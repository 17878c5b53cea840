"""How full a cache is, and what it was worth so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from readers.cached.shelf import Shelf

__all__ = ["CachedStats", "stats_of"]


@dataclass(frozen=True, slots=True)
class CachedStats:
    """Of one cache, by all processes that use or used it.

    samples: of the set, or of this node's part. kept: those that have a place; present: those that are there (their
    images). capacity_bytes, used_bytes: of the payloads. hits, hit_bytes: reads that the cache served. misses: reads of
    samples that have a place and were not there yet. passed: reads of samples without a place. puts, put_bytes: what
    was stored. dropped: what was found wrong. users: processes that have it open. Hits of single reads are counted 64
    at a time, so a process that ends without closing may leave that many out.
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
        """Share of the samples that have a place and are there."""
        return self.present / max(1, self.kept)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "filled": self.filled}


def stats_of(shelf: Shelf) -> CachedStats:
    """Counts what is there: takes time in proportion to the samples."""
    slots, store = shelf.slots, shelf.store
    samples = slots.stop - slots.start
    if store is None:
        return CachedStats(shelf.keep.kind, samples, 0, 0)
    shelf.count_hits()
    present = int(store.present()[slots.of_field(slots.fields[0])].sum())
    kept = sum(len(run) for run in shelf.choice.kept())
    counted = store.stats()
    names = ("hits", "misses", "hit_bytes", "puts", "put_bytes", "passed", "dropped", "users")
    return CachedStats(
        shelf.keep.kind,
        samples,
        kept,
        present,
        store.capacity_bytes,
        store.used_bytes,
        **{name: int(getattr(counted, name)) for name in names},
    )
