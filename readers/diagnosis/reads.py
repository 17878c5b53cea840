"""Times of reads: single samples at random, and batches as the loader reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.stores import Extents, Store

__all__ = ["PlaceReads", "Reads", "time_reads", "time_store"]

_LEAST_READS = 8
_ENOUGH_READS = 400
_ENOUGH_BATCHES = 100
_SLOW_READ_SECONDS = 0.0004  # of a sample, as in the loader: from then on the next batch is announced


@dataclass(frozen=True, slots=True)
class Reads:
    """Seconds of a read: percentiles over `count` reads; bytes_per_second over all of them, one after the other."""

    p50: float
    p90: float
    p99: float
    bytes_per_second: float
    count: int


@dataclass(frozen=True, slots=True)
class PlaceReads:
    """Reads of single samples at random, and of batches, sorted by place within the batch."""

    single: Reads
    batch: Reads


def time_store(
    store: Store, extents: Extents, batch_size: int, seconds: float, prepare: Callable[[], None]
) -> PlaceReads:
    """Single reads, then batches. prepare: called before samples are read again, outside of the clock."""
    order = np.random.default_rng(1).permutation(len(extents.row))
    singles = [tuple(int(column[i]) for column in extents) for i in order.tolist()]
    size = min(batch_size, len(order))
    batches = [extents.take(order[i : i + size]) for i in range(0, len(order) - size + 1, size)]
    mean = 0.0  # seconds of a sample

    def read_batch(number: int) -> int:
        nonlocal mean
        start = time.perf_counter()
        if mean > _SLOW_READ_SECONDS and number + 1 < len(batches):
            store.prefetch(batches[number + 1])
        data = store.read(batches[number])
        mean += ((time.perf_counter() - start) / size - mean) / 8
        return sum(map(len, data))

    return PlaceReads(
        time_reads(singles, lambda one: len(store.read_one(*one)), seconds / 2, prepare=prepare),
        time_reads(range(len(batches)), read_batch, seconds / 2, _ENOUGH_BATCHES, prepare),
    )


def time_reads(
    items: Sequence[Any],
    read: Callable[[Any], int],
    seconds: float,
    enough: int = _ENOUGH_READS,
    prepare: Callable[[], None] = lambda: None,
) -> Reads:
    """Times of read(item), which returns bytes; all items again and again until there are enough, or time is up."""
    found, size, end = list[float](), 0, time.perf_counter() + seconds
    while len(found) < enough and (len(found) < _LEAST_READS or time.perf_counter() < end):
        start = time.perf_counter()
        prepare()
        if not found:
            end += time.perf_counter() - start
        for item in items:
            start = time.perf_counter()
            size += read(item)
            now = time.perf_counter()
            found.append(now - start)
            if (now > end and len(found) >= _LEAST_READS) or len(found) >= enough:
                break
    p50, p90, p99 = np.percentile(found, (50, 90, 99)).tolist()
    return Reads(p50, p90, p99, size / max(sum(found), 1e-9), len(found))
