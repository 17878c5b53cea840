"""What nodes keep, and therefore read once or from each other: the rules of `readers.cached` and `readers.stage`.

    global, block, stored   readers.cached(reader, capacity): the same share of the set on every node; a sample is kept
                            when the node reads it for the first time
    node-local              readers.cached(reader, capacity, partition=(node, nodes)): a share of the node's part, in as
                            many bytes as the share of the set would take
    staged-first            readers.stage(set, order=order, background=True, fraction=…): shards on a local disk, whole,
                            from the front of the list, copied in the order of `StagedFirst.shards`; reads wait for them
    peers                   readers.share over caches of parts, under every order: a sample of another node's part is
                            asked from that node, which reads it through its own cache

Which samples a cache keeps is the choice of `readers.caching.budget`, made by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache import SharedByteCache
from cache.messages import parse_size
from readers.caching.budget import Capacity, Measures, Slots, Subset, budget
from readers.caching.form import Encoded
from readers.order import NodeLocal, StagedFirst
from readers.order.base import Int64s, Order
from readers.reader import Reader
from readers.simulation.job import Job
from readers.simulation.subject import Subject
from readers.staged_files import shards_of_fraction
from readers.table import Table

__all__ = ["Bools", "History", "Holding", "Staging", "holding_of", "share_of", "staging_of"]

Bools: TypeAlias = npt.NDArray[np.bool_]
_RUN = 1 << 20


@dataclass(frozen=True, eq=False)
class Holding:
    """What the memory of nodes keeps.

    kept: which samples have a slot, on all nodes or on the one whose part they are in; bool [n], None for none.
    parts: the first sample of each node's part and the number of all, where nodes keep parts; int64 [nodes + 1].
    node_bytes: memory that a node reserves, at most.
    shared: nodes ask each other.
    """

    kept: Bools | None
    parts: Int64s | None = None
    node_bytes: int = 0
    shared: bool = False

    def homes(self, samples: Int64s) -> Int64s:
        """The node whose part each sample is in."""
        assert self.parts is not None
        return self.parts.searchsorted(samples, side="right") - 1


@dataclass(frozen=True, eq=False)
class Staging:
    """What nodes copy to their disks.

    arrives: bytes that a node has copied when each shard is whole, int64 [shards]; -1 for those that are not staged.
    node_bytes: of a node.
    """

    arrives: Int64s
    node_bytes: int


class History:
    """Which samples were read in earlier epochs, and by which node."""

    def __init__(self, samples: int, nodes: int, is_whole: bool) -> None:
        """is_whole: all nodes are simulated, so each read of an epoch is known: 2 or 4 bytes a sample and epoch.
        Otherwise 8 bytes a read.
        """
        self._samples, self._epoch = samples, -1
        self._kind = np.uint16 if nodes < 1 << 16 else np.uint32
        self._whole: list[npt.NDArray[Any]] | None = [] if is_whole else None
        self._keys = np.zeros(0, np.int64)
        self._waiting: list[Int64s] = []

    def begin_epoch(self) -> None:
        self._epoch += 1
        if self._whole is not None:
            self._whole.append(np.full(self._samples, np.iinfo(self._kind).max, self._kind))
        elif self._waiting:
            self._keys = np.sort(np.concatenate([self._keys, *self._waiting]))
            self._waiting = []

    def visit(self, samples: Int64s, nodes: Int64s) -> tuple[Bools, Bools]:
        """Whether these nodes have read these samples in an earlier epoch, and whether any node has; they have from now
        on. Where nodes are sampled, any node has from the second epoch on: what drop_last leaves out is not known.
        """
        if self._whole is not None:
            wanted = nodes.astype(self._kind)
            seen, by_any = np.zeros((2, len(samples)), np.bool_)
            for before in self._whole[:-1]:
                reader = before[samples]
                seen |= reader == wanted
                by_any |= reader != np.iinfo(self._kind).max
            self._whole[-1][samples] = wanted
            return seen, by_any
        keys = nodes * self._samples + samples
        self._waiting.append(keys)
        by_any = np.full(len(samples), self._epoch > 0)
        if not len(self._keys):
            return np.zeros(len(samples), np.bool_), by_any
        at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        return self._keys[at] == keys, by_any


def holding_of(subject: Subject, order: Order, capacity: Capacity, job: Job) -> Holding:
    """What memory keeps under an order. Raises ValueError for a capacity that is none."""
    n = len(subject)
    if not job.peers and not isinstance(order, NodeLocal):
        threshold, size = _budget(subject, range(n), capacity)
        return Holding(_mask(subject, 0, n, threshold), None, _with_slots(size, n)) if size else Holding(None)
    local = NodeLocal(n, job.nodes)
    parts = np.array([local.local_part(node).start for node in range(job.nodes)] + [n], np.int64)
    share = share_of(capacity)
    if share is not None:
        capacity = min(1.0, share * job.nodes)
    kept, most = np.zeros(n, np.bool_), 0
    for node in range(job.nodes):
        part = local.local_part(node)
        threshold, size = _budget(subject, part, capacity)
        if size:
            kept[part.start : part.stop] = _mask(subject, part.start, part.stop, threshold)
            most = max(most, _with_slots(size, len(part)))
    if not most:
        return Holding(None)
    return Holding(kept, parts, most, job.peers)


def staging_of(subject: Subject, order: StagedFirst, capacity: Capacity) -> Staging | None:
    """What is staged under an order; None for nothing."""
    share = share_of(capacity)
    if share is None:
        share = min(1.0, parse_size(str(capacity)) / max(1, int(subject.shard_bytes.sum())))
    if not share:
        return None
    count = shards_of_fraction(subject.shard_bytes.tolist(), share)
    turns = order.shards()
    turns = turns[turns < count]
    arrives = np.full(len(subject.shard_bytes), -1, np.int64)
    arrives[turns] = np.cumsum(subject.shard_bytes[turns])
    return Staging(arrives, int(arrives.max()))


def share_of(capacity: Capacity) -> float | None:
    """The share of the set that a capacity is; None for one in bytes."""
    if isinstance(capacity, str) and capacity.strip().endswith("%"):
        return float(capacity.strip()[:-1]) / 100
    return capacity if isinstance(capacity, float) else None


def _budget(subject: Subject, part: range, capacity: Capacity) -> tuple[int, int]:
    rows = subject.reader.table.rows
    subset = Subset(part if rows is None else np.unique(rows[part.start : part.stop]))
    number = subject.reader.table.number(subject.field)
    slots = Slots((subject.field,), (number,), len(subject.reader.fields), subset)
    whole = Reader(Table(subject.reader.table.columns), subject.reader.store)
    return budget(capacity, Measures(whole, slots, Encoded(), {}, 0.0), None)


def _mask(subject: Subject, start: int, stop: int, threshold: int) -> Bools:
    subset, table = Subset(range(len(subject.reader.table.columns)), threshold), subject.reader.table
    runs = [np.arange(first, min(stop, first + _RUN), dtype=np.int64) for first in range(start, stop, _RUN)]
    return np.concatenate([subset.mask(table.at(run)) for run in runs])


def _with_slots(size: int, samples: int) -> int:
    return size + SharedByteCache.table_bytes(1 + samples)
