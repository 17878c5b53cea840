"""The requests that a reader makes for batches: all batches of some steps at a time.

A batch is read as `Reader.read_many` reads it: its samples that are nowhere nearer are sorted by place, and neighbours
with gaps of at most GAP_BYTES are one request of at most about RUN_BYTES (`cache.stores.ranges`, where the same is done
for one batch).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.stores.ranges import GAP_BYTES, RUN_BYTES
from readers.order.base import Int64s
from readers.simulation.subject import Subject

__all__ = ["Requests", "Samples", "merge", "sort_by_place"]

Bools = npt.NDArray[np.bool_]


class Samples(NamedTuple):
    """Samples that are read, by batch and in each batch by place; int64 [k] each.

    address: where the payload begins, if all shards were one file, with more than a gap between them.
    """

    batch: Int64s
    sample: Int64s
    shard: Int64s
    address: Int64s
    length: Int64s

    def where(self, chosen: Bools) -> Samples:
        return self if chosen.all() else Samples(*(column[chosen] for column in self))


class Requests(NamedTuple):
    """Requests, by batch: of which batch, where from (address), and how many bytes; int64 [r] each."""

    batch: Int64s
    address: Int64s
    bytes: Int64s


def sort_by_place(subject: Subject, samples: Int64s, batches: Int64s) -> Samples:
    """The samples of some batches, given by batch (int64 [k] both)."""
    extents = subject.reader.table.extents(samples, subject.field)
    sizes = subject.shard_bytes + (GAP_BYTES + 1)
    address = (np.cumsum(sizes) - sizes)[extents.shard] + extents.offset
    count = int(batches[-1]) + 1
    if len(samples) % count == 0 and int(batches[len(samples) // count - 1]) == 0:  # batches of one size
        size = len(samples) // count
        order = address.reshape(count, size).argsort(axis=1, kind="stable")
        order += size * np.arange(count)[:, None]
        order = order.ravel()
    else:
        order = np.lexsort((address, batches))
    return Samples(batches, samples[order], extents.shard[order], address[order], extents.length[order])


def merge(samples: Samples, gap_bytes: int = GAP_BYTES) -> Requests:
    """The requests for samples, which are sorted by batch and place; those with gaps of at most `gap_bytes` are one."""
    batch, start = samples.batch, samples.address
    if not len(batch):
        return Requests(batch, start, start)
    end = _reach(batch, start + samples.length)
    joins = batch[1:] == batch[:-1]
    joins &= start[1:] <= end[:-1] + gap_bytes
    first = np.flatnonzero(np.append(True, ~joins))
    last = np.append(first[1:], len(batch)) - 1
    if int((end[last] - start[first]).max()) > RUN_BYTES:
        first = _cut(first, last, start, end)
        last = np.append(first[1:], len(batch)) - 1
    return Requests(batch[first], start[first], end[last] - start[first])


def _reach(batch: Int64s, end: Int64s) -> Int64s:
    """The furthest end up to each sample, in its batch. Payloads seldom overlap, and then it is its own end."""
    if bool(((end[1:] >= end[:-1]) | (batch[1:] != batch[:-1])).all()):
        return end
    ends, rank = np.unique(end, return_inverse=True)
    furthest = np.maximum.accumulate(batch * len(ends) + rank)
    reach: Int64s = ends[furthest - batch * len(ends)]
    return reach


def _cut(first: Int64s, last: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Split runs longer than RUN_BYTES where a sample begins at or after everything before it has ended."""
    cuts: list[Int64s] = [first]
    for i in np.flatnonzero(end[last] - start[first] > RUN_BYTES).tolist():
        at, stop = int(first[i]), int(last[i]) + 1
        while True:
            after = at + 1 + int(end[at + 1 : stop].searchsorted(start[at] + RUN_BYTES, side="right"))
            while after < stop and start[after] < end[after - 1]:
                after += 1
            if after >= stop:
                break
            cuts.append(np.array([after]))
            at = after
    return np.sort(np.concatenate(cuts))
