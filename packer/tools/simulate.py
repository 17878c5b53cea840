"""Simulation of the reads of a training job at scale, for each order and each cache, before the job runs.

    found = packer.simulate("imagenet-hdf5", packer.tools.simulate.Job(nodes=1000, ranks=8), caches=[0.0, 0.3])
    for row in found.rows:
        print(row.name, row.source, row.seconds)

No payload is read. Schedules give the positions of every rank, orders give the samples, and the index gives the byte
ranges. `readers.caching` and `readers.staging` decide which samples are cached and staged. A training job runs the same
functions; here they run for all nodes in one process. The merging of reads into requests is repeated here (`merge`).
Only times are modelled, from the given bandwidths (`run_epoch`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from cache import SharedByteCache
from cache.errors import DatasetError
from cache.messages import Silent, Watcher, human_bytes, human_seconds, parse_size, plural, table, wrapped
from cache.stores import Store
from cache.stores.base import Payloads
from cache.stores.ranges import GAP_BYTES, RUN_BYTES
from readers.caching.form import Encoded
from readers.caching.store import Capacity, Measures, Slots, Subset, budget
from readers.opening.packed import open_packed
from readers.opening.remote import open_remote
from readers.order import NodeLocal, Order, Schedule, Sequential, Shuffled, StagedFirst, block_shuffled
from readers.order.base import Int64s, derive_keys, uniform
from readers.order.local import shard_starts
from readers.order.quality import quality_of, step_quality
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.staging import shards_of_fraction
from readers.table import MemoryColumns, Strings, Table

__all__ = [
    "ORDERS",
    "Job",
    "Machine",
    "Row",
    "Samples",
    "Shuffles",
    "Simulation",
    "merge",
    "planned_set",
    "simulate",
    "simulation_lines",
    "subject_of",
]


# --- The parameters: the nodes of a job, the orders to compare, and the bandwidths of the machine.
ORDERS = ("global", "block", "node-local", "staged-first", "stored")


@dataclass(frozen=True, slots=True)
class Job:
    """A training job. Raises ValueError.

    nodes, ranks: number of nodes, and of ranks on each node; rank r is on node r // ranks.
    batch_size: samples per rank and step.
    step_seconds: time of a training step that does not wait for data.
    epochs: number of epochs to simulate, from epoch 0.
    prefetch: number of batches that each rank reads ahead.
    tail: "drop_last" or "exact": the use of the last positions of an epoch.
    peers: whether nodes serve each other from their caches; see `Holding`.
    most_reads: the most reads of an epoch to simulate; in larger epochs only some nodes are simulated, at least 8.
    """

    nodes: int = 1
    ranks: int = 1
    batch_size: int = 64
    step_seconds: float = 0.25
    epochs: int = 10
    prefetch: int = 3
    tail: Tail = "drop_last"
    peers: bool = False
    most_reads: int = 1 << 22

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks", "batch_size", "epochs", "prefetch", "most_reads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0 < self.step_seconds < math.inf:
            raise ValueError(f"step_seconds is {self.step_seconds}, expected a time above 0")
        if self.tail not in ("drop_last", "exact"):
            raise ValueError(f"tail is {self.tail!r}; expected drop_last or exact")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks


@dataclass(frozen=True, slots=True)
class Machine:
    """The bandwidths of the machine, in bytes per second. Raises ValueError.

    filesystem: bandwidth of the parallel filesystem, for all nodes together.
    node: bandwidth of the network of one node, in each direction.
    disk: bandwidth of the local disk of a node.
    filesystem_requests: requests per second of the parallel filesystem, for all nodes together.
    latency_seconds: latency of one request to the parallel filesystem.
    outstanding: number of requests that a rank has in flight.
    """

    filesystem: float = 40e9
    node: float = 2e9
    disk: float = 3e9
    filesystem_requests: float = math.inf
    latency_seconds: float = 0.001
    outstanding: int = 16

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0.0 if each.name == "latency_seconds" else math.nextafter(0.0, 1.0)
            if not value >= least:
                raise ValueError(f"{each.name} is {value}, expected a number above 0")


@dataclass(frozen=True, slots=True)
class Shuffles:
    """The orders to compare, and their parameters. Raises ValueError.

    names: names from `ORDERS`; node-local and staged-first have caches or copies that suit them, see `holding_of`.
    block_bytes, window: parameters of the block shuffle.
    exchange_every: parameter of node-local. shards: window of staged-first, in shards.
    """

    names: Sequence[str] = ORDERS[:4]
    block_bytes: int = 8 << 20
    window: int = 64
    exchange_every: int = 8
    shards: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [name for name in self.names if name not in ORDERS]
        if wrong or not self.names:
            raise ValueError(f"orders must be some of {', '.join(ORDERS)}, not {', '.join(wrong) or 'none'}")
        for name in ("block_bytes", "window", "exchange_every", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")


# --- The set to simulate: the index of an existing set, or the generated index of a planned set.
# A planned set has `shards` shards of equally many samples. Sizes are uniform between 0.5 and 1.5 times the mean, drawn
# by sample number, in pairs with a sum of twice the mean. Between two payloads are 1,024 bytes of headers. Memory: 28
# bytes per sample.
HEADER_BYTES = 1024
_MOST_SAMPLES = 1 << 28


@dataclass(frozen=True, eq=False)
class Subject:
    """The set to simulate.

    reader: gives the table; no payload is read.
    field: the field that training reads.
    starts: the first sample of each shard, then the number of samples, int64 [shards + 1]; None if shards are unknown.
    shard_bytes: sizes of the shards, int64 [shards].
    is_planned: whether the sizes are generated.
    """

    reader: Reader
    field: str
    starts: Int64s | None
    shard_bytes: Int64s
    is_planned: bool = False

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all samples."""
        return int(self.reader.sizes(self.field).sum())


def subject_of(reader: Reader, field: str = "") -> Subject:
    """The subject for an existing set. Raises UnknownNameError for an unknown field, ValueError without samples."""
    field = field or reader.main
    reader.table.number(field)
    if not len(reader):
        raise ValueError(f"{reader.table.title}: no samples to simulate")
    sizes = np.asarray(reader.table.columns.shard_bytes, np.int64)
    starts = None
    if reader.table.rows is None:
        try:
            starts = shard_starts(reader.split_info)
        except DatasetError:  # not a packed set
            pass
        if starts is not None and int(starts[-1]) != len(reader):
            starts = None
    return Subject(reader, field, starts, sizes)


def planned_set(samples: int, mean_bytes: int, shards: int) -> Subject:
    """The subject for a set that is not packed yet. Raises ValueError."""
    if not 1 <= samples <= _MOST_SAMPLES or mean_bytes < 2 or not 1 <= shards <= samples:
        raise ValueError(
            f"samples={samples}, mean_bytes={mean_bytes}, shards={shards}: expected 1 to {_MOST_SAMPLES:,} samples of "
            f"at least 2 bytes, in 1 to as many shards"
        )
    drawn = uniform(derive_keys(0, 0, "planned sizes")[0], np.arange(samples // 2, dtype=np.int64))
    change: Int64s = ((drawn - 0.5) * mean_bytes).astype(np.int64)
    length = np.full(samples, mean_bytes, np.int64)
    length[: 2 * len(change) : 2] += change
    length[1 : 2 * len(change) : 2] -= change
    size, longer = divmod(samples, shards)
    starts = np.append(0, np.cumsum(size + (np.arange(shards) < longer)))
    shard = np.repeat(np.arange(shards, dtype=np.uint32), np.diff(starts))
    ends = np.cumsum(length + HEADER_BYTES)
    begins = np.append(0, ends)[starts]
    columns = MemoryColumns(
        Strings(np.zeros(0, np.uint8), np.zeros(samples + 1, np.uint64)),
        {"shard": shard, "image.offset": ends - length - begins[shard], "image.length": length},
        shard_bytes=np.diff(begins),
        title="a planned set",
    )
    return Subject(Reader(Table(columns), _NoBytes()), "image", starts, np.diff(begins), is_planned=True)


class _NoBytes(Store):
    """The store of a planned set: every read fails."""

    def read_one(self, row: int, shard: int, offset: int, length: int) -> NoReturn:
        raise DatasetError("a planned set has no bytes to read")


# --- The positions that each rank reads in each step, a few steps at a time.
# The positions of whole steps differ by a constant, so only the first step of each rank's schedule is computed, and the
# last step if it is partial.
_PART_READS = 1 << 20


class Part(NamedTuple):
    """Consecutive steps of the simulated ranks.

    first, steps: the first step and the number of steps. positions: int64 [k], by batch. batches: the batch of each
    position, int64 [k]: step * ranks + rank, with the step counted from `first` and the rank among the simulated ranks.
    """

    first: int
    steps: int
    positions: Int64s
    batches: Int64s


class Deal:
    """The positions of an epoch, by step and rank. Raises ValueError if an epoch has no step.

    nodes: the simulated nodes, ascending.
    """

    def __init__(self, order: Order, job: Job, nodes: Int64s) -> None:
        ranks = (nodes[:, None] * job.ranks + np.arange(job.ranks)).ravel().tolist()
        schedules = [Schedule(order, job.batch_size, rank, job.world_size, job.tail) for rank in ranks]
        self.ranks = len(ranks)
        self.steps = schedules[0].steps()
        self._whole = len(order) // schedules[0].step_samples
        self._step_samples = schedules[0].step_samples
        self._part_reads = min(_PART_READS, job.most_reads)
        if not self.steps:
            raise ValueError(
                f"an epoch of {len(order):,} samples has no step of {job.world_size:,} ranks with {job.batch_size} "
                f"each (drop_last): take fewer ranks, a smaller batch_size, or tail='exact'"
            )
        self._first = np.stack([s.positions(0) for s in schedules]) if self._whole else np.zeros((0, 0), np.int64)
        self._last = [s.positions(self._whole) for s in schedules] if self.steps > self._whole else []
        self.samples = self._whole * self._first.size + sum(map(len, self._last))

    def parts(self) -> Iterator[Part]:
        """Yield the whole epoch in parts of at most about a million reads."""
        at_once = max(1, self._part_reads // max(1, self._first.size))
        for first in range(0, self._whole, at_once):
            steps = min(at_once, self._whole - first)
            moved = self._step_samples * (first + np.arange(steps, dtype=np.int64))
            positions = self._first + moved[:, None, None]
            batches = np.repeat(np.arange(steps * self.ranks), self._first.shape[1])
            yield Part(first, steps, positions.ravel(), batches)
        if self._last:
            sizes = [len(positions) for positions in self._last]
            yield Part(self._whole, 1, np.concatenate(self._last), np.repeat(np.arange(self.ranks), sizes))


# --- The requests of a reader, for all batches of some steps at a time.
# They are those of `Reader.read_many`: samples that are not cached are sorted by place, and neighbours with gaps of at
# most GAP_BYTES become one request of at most about RUN_BYTES. `cache.stores.ranges` does the same for one batch.
Bools = npt.NDArray[np.bool_]


class Samples(NamedTuple):
    """Samples to read, sorted by batch, then by place; int64 [k] each.

    address: the start of the payload, as if all shards were one file with more than a gap between them.
    """

    batch: Int64s
    sample: Int64s
    shard: Int64s
    address: Int64s
    length: Int64s

    def where(self, chosen: Bools) -> Samples:
        return self if chosen.all() else Samples(*(column[chosen] for column in self))


class Requests(NamedTuple):
    """Requests, sorted by batch: the batch, the address and the number of bytes; int64 [r] each."""

    batch: Int64s
    address: Int64s
    bytes: Int64s


def sort_by_place(subject: Subject, samples: Int64s, batches: Int64s) -> Samples:
    """Sort the samples of each batch by place. samples, batches: int64 [k], sorted by batch."""
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
    """The requests for samples sorted by batch and place; neighbours with gaps of at most `gap_bytes` share one."""
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
    """The furthest end up to each sample within its batch: the sample's own end, unless payloads overlap."""
    if bool(((end[1:] >= end[:-1]) | (batch[1:] != batch[:-1])).all()):
        return end
    ends, rank = np.unique(end, return_inverse=True)
    furthest = np.maximum.accumulate(batch * len(ends) + rank)
    reach: Int64s = ends[furthest - batch * len(ends)]
    return reach


def _cut(first: Int64s, last: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Split runs longer than RUN_BYTES, at samples that begin after the end of all previous samples."""
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


# --- The samples that nodes keep, and so read only once or from each other, by `readers.cached` and `readers.stage`:
#   global, block, stored   readers.cached(reader, capacity): the same share of the set on every node; a node keeps a
#                           sample when it first reads it
#   node-local              readers.cached(reader, capacity, partition=(node, nodes)): a share of the node's part, with
#                           the bytes of that share of the whole set
#   staged-first            readers.stage(set, order=order, background=True, fraction=…): whole shards on a local disk,
#                           from the front of the list, copied in the order of `StagedFirst.shards`; reads wait for them
#   peers                   readers.share over caches of parts, under every order: a node requests a sample of another
#                           node's part from that node, which reads it through its own cache
#
# The functions of `readers.caching.store` choose the samples that a cache keeps.
_RUN = 1 << 20


@dataclass(frozen=True, eq=False)
class Holding:
    """The samples that nodes keep, in memory or on disk.

    kept: whether a sample has a slot, on all nodes or on the node with its part; bool [n], None for no samples.
    parts: if nodes keep parts, the first sample of each part, then the number of samples; int64 [nodes + 1].
    node_bytes: the most memory that a node reserves; with `arrives`, the bytes that a node copies to its disk.
    shared: whether nodes request samples from each other.
    arrives: the bytes that a node has copied when each shard is complete, int64 [shards], -1 for shards that are not
    staged; None without staging.
    """

    kept: Bools | None = None
    parts: Int64s | None = None
    node_bytes: int = 0
    shared: bool = False
    arrives: Int64s | None = None

    def homes(self, samples: Int64s) -> Int64s:
        """The node with the part of each sample."""
        assert self.parts is not None
        return self.parts.searchsorted(samples, side="right") - 1


class History:
    """The node that read each sample in each earlier epoch. Memory: 2 or 4 bytes per sample and epoch.

    is_whole: whether all nodes are simulated, so that every read of an epoch is known.
    """

    def __init__(self, samples: int, nodes: int, is_whole: bool) -> None:
        self._samples, self._is_whole = samples, is_whole
        self._kind = np.uint16 if nodes < 1 << 16 else np.uint32
        self._none = int(np.iinfo(self._kind).max)
        self._epochs: list[npt.NDArray[Any]] = []

    def begin_epoch(self) -> None:
        self._epochs.append(np.full(self._samples, self._none, self._kind))

    def visit(self, samples: Int64s, nodes: Int64s) -> tuple[Bools, Bools]:
        """Record reads: whether each node has read its sample in an earlier epoch, and whether any node has.

        If only some nodes are simulated, every sample counts as read by some node from the second epoch on, because the
        samples that drop_last leaves out are unknown.
        """
        owners = nodes.astype(self._kind)
        seen, by_any = np.zeros((2, len(samples)), np.bool_)
        for before in self._epochs[:-1]:
            node = before[samples]
            seen |= node == owners
            by_any |= (node != self._none) if self._is_whole else True
        self._epochs[-1][samples] = owners
        return seen, by_any


def holding_of(subject: Subject, order: Order, capacity: Capacity, job: Job) -> Holding:
    """The samples that nodes keep under an order. Raises ValueError for an invalid capacity."""
    n, share = len(subject), share_of(capacity)
    if isinstance(order, StagedFirst) and not job.peers:
        return _staging(subject, order, capacity, share)
    if not job.peers and not isinstance(order, NodeLocal):
        threshold, size = _budget(subject, range(n), capacity)
        return Holding(_mask(subject, 0, n, threshold), None, _with_slots(size, n)) if size else Holding()
    local = NodeLocal(n, job.nodes)
    parts = [local.local_part(node) for node in range(job.nodes)]
    if share is not None:
        capacity = min(1.0, share * job.nodes)
    kept, most = np.zeros(n, np.bool_), 0
    for part in parts:
        threshold, size = _budget(subject, part, capacity)
        if size:
            kept[part.start : part.stop] = _mask(subject, part.start, part.stop, threshold)
            most = max(most, _with_slots(size, len(part)))
    starts = np.array([*(part.start for part in parts), n], np.int64)
    return Holding(kept, starts, most, job.peers) if most else Holding()


def _staging(subject: Subject, order: StagedFirst, capacity: Capacity, share: float | None) -> Holding:
    if share is None:
        share = min(1.0, _size(capacity) / max(1, int(subject.shard_bytes.sum())))
    if not share:
        return Holding()
    count = shards_of_fraction(subject.shard_bytes.tolist(), share)
    turns = order.shards()
    turns = turns[turns < count]
    arrives = np.full(len(subject.shard_bytes), -1, np.int64)
    arrives[turns] = np.cumsum(subject.shard_bytes[turns])
    return Holding(node_bytes=int(arrives.max()), arrives=arrives)


def share_of(capacity: Capacity) -> float | None:
    """The share of the set that a capacity states; None for a capacity in bytes."""
    if isinstance(capacity, str) and capacity.strip().endswith("%"):
        return float(capacity.strip()[:-1]) / 100
    return capacity if isinstance(capacity, float) else None


def _budget(subject: Subject, part: range, capacity: Capacity) -> tuple[int, int]:
    rows = subject.reader.table.rows
    subset = Subset(part if rows is None else np.unique(rows[part.start : part.stop]))
    number = subject.reader.table.number(subject.field)
    slots = Slots((subject.field,), (number,), Payloads(len(subject.reader.fields)), subset)
    whole = Reader(Table(subject.reader.table.columns), subject.reader.store)
    return budget(capacity, Measures(whole, slots, Encoded(), {}, 0.0), None)


def _mask(subject: Subject, start: int, stop: int, threshold: int) -> Bools:
    subset, table = Subset(range(len(subject.reader.table.columns)), threshold), subject.reader.table
    runs = [np.arange(first, min(stop, first + _RUN), dtype=np.int64) for first in range(start, stop, _RUN)]
    return np.concatenate([subset.mask(table.at(run)) for run in runs])


def _with_slots(size: int, samples: int) -> int:
    return size + SharedByteCache.table_bytes(1 + samples)


# --- Counting: the bytes and requests of every node in every step of an epoch.
_PAGE = 4096
_SIZES = 64  # powers of two


@dataclass(eq=False)
class Traffic:
    """The traffic of an epoch. Arrays are int64 [steps, simulated nodes] unless noted.

    source, requests: bytes and requests to the parallel filesystem. A node's reads for another node count as its own.
    local: bytes from the node's memory or disk. peers: bytes from other nodes. served: bytes to other nodes.
    most_requests: the most requests for one rank in a step, by its own node or by others, int64 [steps].
    staged: bytes that a node must have copied before the batches of a step can be read, int64 [steps].
    sizes: number of requests by power of two: 2^(k-1) up to 2^k bytes at k, int64 [64].
    payload: bytes that training reads. pages: `source` in whole pages of 4,096 bytes.
    """

    source: Int64s
    requests: Int64s
    local: Int64s
    peers: Int64s
    served: Int64s
    most_requests: Int64s
    staged: Int64s
    sizes: Int64s = field(default_factory=lambda: np.zeros(_SIZES, np.int64))
    payload: int = 0
    pages: int = 0

    @classmethod
    def empty(cls, steps: int, nodes: int) -> Traffic:
        a, b, c, d, e = np.zeros((5, steps, nodes), np.int64)
        return cls(a, b, c, d, e, np.zeros(steps, np.int64), np.zeros(steps, np.int64))


class Step(NamedTuple):
    """Some steps of an epoch, the same for all capacities.

    nodes: the node that reads each sample, by its number in the job. seen: whether that node has read it in an earlier
    epoch. by_any: whether any node has.
    """

    part: Part
    samples: Samples
    nodes: Int64s
    seen: Bools
    by_any: Bools


def count(traffic: Traffic, holding: Holding, step: Step, deal: Deal, job: Job) -> None:
    """Add some steps of an epoch to its traffic."""
    part, samples = step.part, step.samples
    width = traffic.source.shape[1]
    rows = slice(part.first, part.first + part.steps)
    most = np.zeros(part.steps * deal.ranks, np.int64)

    def add(table: Int64s, cells: Int64s, weights: Int64s | None = None) -> None:
        """Add to a table of [steps, nodes]. cells: step * nodes + node, with the step counted from the part's first."""
        sums = np.bincount(cells, weights, minlength=part.steps * width)
        table[rows] += sums.astype(np.int64).reshape(part.steps, width)

    def add_requests(requests: Requests, batch: Int64s, cells: Int64s) -> None:
        nonlocal most
        add(traffic.source, cells, requests.bytes)
        add(traffic.requests, cells)
        traffic.sizes += np.bincount(np.frexp(requests.bytes)[1], minlength=_SIZES)
        ends = -(-(requests.address + requests.bytes) // _PAGE)
        traffic.pages += _PAGE * int((ends - requests.address // _PAGE)[requests.bytes > 0].sum())
        most += np.bincount(batch, minlength=len(most))

    cell = samples.batch // job.ranks
    kept = _kept(holding, step)
    traffic.payload += int(samples.length.sum())
    own = np.ones(len(kept), np.bool_)
    if holding.shared:
        homes = holding.homes(samples.sample)
        own = homes == step.nodes

        def at(cells: Int64s, home: Int64s) -> Int64s:
            """The cells of the nodes that serve: if only some nodes are simulated, each serves as much as it gets."""
            return cells if width != job.nodes else cells // width * width + home

        remote = np.flatnonzero(~own)
        add(traffic.peers, cell[remote], samples.length[remote])
        add(traffic.served, at(cell[remote], homes[remote]), samples.length[remote])
        # A run of adjacent payloads is one request to the node with their part, which makes one read of it.
        lacking = ~own & ~kept
        missing = samples.where(lacking)
        requests = merge(missing._replace(batch=missing.batch * job.nodes + homes[lacking]), 0)
        batch, home = np.divmod(requests.batch, job.nodes)
        add_requests(requests, batch, at(batch // job.ranks, home))
    near = own & kept
    add(traffic.local, cell[near], samples.length[near])
    if holding.arrives is not None:
        np.maximum.at(traffic.staged, part.first + cell[near] // width, holding.arrives[samples.shard[near]])
    requests = merge(samples.where(own & ~kept))
    add_requests(requests, requests.batch, requests.batch // job.ranks)
    traffic.most_requests[rows] = most.reshape(part.steps, deal.ranks).max(axis=1)


def _kept(holding: Holding, step: Step) -> Bools:
    """Whether each sample is read from memory or disk, of the node itself or of the node with its part."""
    samples = step.samples
    if holding.arrives is not None:
        staged: Bools = holding.arrives[samples.shard] >= 0
        return staged
    if holding.kept is None:
        return np.zeros(len(step.nodes), np.bool_)
    kept: Bools = holding.kept[samples.sample]
    if holding.shared:
        return kept & step.by_any
    if holding.parts is not None:
        kept &= holding.homes(samples.sample) == step.nodes
    return kept & step.seen


# --- The time of an epoch, from its traffic and the bandwidths of the machine.
# All ranks wait for each other at the end of a step, so the slowest node determines the time to read a step:
#
#   filesystem   bytes of all nodes / filesystem
#   requests     requests of all nodes / filesystem_requests
#   network      the larger of the bytes that one node receives and sends / node
#   latency      the most requests of a rank, `outstanding` at a time * latency
#   disk         bytes of a node from its staged copy / disk; memory is assumed to cost nothing
#
# The time to read a step is the largest of these. Ranks read up to `prefetch` batches ahead, so reading step s begins
# when step s - prefetch has begun, step s - 1 is read, and the shards of step s are staged. A step begins when its
# batches are read and the previous step has ended. Staging proceeds meanwhile at a node's share of the filesystem's
# bandwidth, or that of its network or disk, whichever is least, and is assumed not to slow down other reads.
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
RESOURCES = ("filesystem", "requests", "network", "latency", "disk")


def copy_seconds(node_bytes: float, job: Job, machine: Machine) -> float:
    """The time in which each node copies `node_bytes` from the filesystem to its disk."""
    return node_bytes / min(machine.filesystem / job.nodes, machine.node, machine.disk)


def run_epoch(traffic: Traffic, job: Job, machine: Machine, *, is_staged: bool, copied: float) -> dict[str, Any]:
    """The times of an epoch, as fields of `Epoch`, from the traffic of the simulated nodes.

    is_staged: whether local bytes are on a disk. copied: bytes that each node copies during the epoch.
    """
    costs = _costs(traffic, job, machine, is_staged)
    reading = np.max(np.stack(list(costs.values())), axis=0)
    rate = copy_seconds(copied, job, machine) / copied if copied else 0.0
    arrives = traffic.staged.astype(np.float64) * rate
    begins = _begins(reading, arrives, job)
    seconds = begins[-1] + job.step_seconds
    waited = seconds - len(reading) * job.step_seconds
    binds = max(costs, key=lambda name: float(costs[name].sum()))
    if waited <= 0.05 * len(reading) * job.step_seconds:
        binds = "GPU"
    elif float(arrives.max()) > float(reading.sum()) / 2 and float(arrives.max()) > 0.5 * waited:
        binds = "staging"
    return {"seconds": seconds, "first_step": begins[0], "waited": waited, "binds": binds}


def _costs(traffic: Traffic, job: Job, machine: Machine, is_staged: bool) -> dict[str, Floats]:
    """Seconds to read each step, by resource."""
    whole = job.nodes / traffic.source.shape[1]
    received = (traffic.source + traffic.peers).max(axis=1)
    return {
        "filesystem": traffic.source.sum(axis=1) * whole / machine.filesystem,
        "requests": traffic.requests.sum(axis=1) * whole / machine.filesystem_requests,
        "network": np.maximum(received, traffic.served.max(axis=1)) / machine.node,
        "latency": -(-traffic.most_requests // machine.outstanding) * machine.latency_seconds,
        "disk": traffic.local.max(axis=1) / (machine.disk if is_staged else math.inf),
    }


def _begins(reading: Floats, arrives: Floats, job: Job) -> list[float]:
    """The time at which each step begins."""
    begins: list[float] = []
    read = 0.0
    for step, (seconds, arrival) in enumerate(zip(reading.tolist(), arrives.tolist(), strict=True)):
        earliest = begins[step - job.prefetch] if step >= job.prefetch else 0.0
        read = max(read, earliest, arrival) + seconds
        begins.append(max(read, begins[-1] + job.step_seconds if begins else 0.0))
    return begins


# --- The result of a simulation. Bytes are of all nodes unless noted; times are in seconds.
@dataclass(frozen=True, slots=True)
class Spread:
    """The minimum, median, mean and maximum of some values."""

    least: float
    median: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory and disk space of one node, in bytes.

    cache: shared memory that the cache reserves, with its slots. tables: tables of the orders of all ranks. readahead:
    encoded batches that all ranks read ahead. disk: the staged copy.
    """

    cache: int = 0
    tables: int = 0
    readahead: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All memory, without the disk."""
        return self.cache + self.tables + self.readahead


@dataclass(frozen=True, slots=True)
class Epoch:
    """The result of one epoch.

    payload: bytes that training reads.
    source: bytes requested from the parallel filesystem, with staging. copied: the part of them that staging copies.
    error: half of the 95 % confidence interval of `source` if only some nodes were simulated, else 0.
    pages: the requested bytes, without staging, in whole pages of 4,096 bytes.
    requests: number of requests to the filesystem, without staging.
    sizes: number of requests by size; at k, the requests of at least 2^(k-1) and below 2^k bytes.
    local, peers: bytes from the node itself, and from other nodes.
    nodes: source bytes of a node. steps: source bytes of a step, without staging.
    seconds: time of the epoch. first_step: time until the first step begins. waited: time in which no step ran, with
    the time until the first step. binds: the bottleneck: one of RESOURCES, "staging", or "GPU" if waits are at most 5 %
    of the training time.
    """

    epoch: int
    payload: int
    source: int
    copied: int
    error: int
    pages: int
    requests: int
    sizes: dict[int, int]
    local: int
    peers: int
    nodes: Spread
    steps: Spread
    seconds: float
    first_step: float
    waited: float
    binds: str

    @property
    def requested(self) -> int:
        """Bytes of the requests, without staging."""
        return self.source - self.copied


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one order with one capacity.

    order: name from `packer.tools.simulate.ORDERS`. cache: the given capacity, as text. spec: spec of the order.
    mixes: shuffle quality of the steps of all ranks in the first epoch, by `readers.order.quality.step_quality`.
    rank_mixes: shuffle quality of the batches of single ranks in the first epoch.
    staged_after: seconds until staging is complete; 0 without staging.
    node_source: source bytes of each simulated node, over all epochs.
    step_source: source bytes of a step, of all nodes, over the first and the last epoch; means of at most 200 parts.
    """

    order: str
    cache: str
    spec: dict[str, Any]
    epochs: tuple[Epoch, ...]
    memory: Memory
    mixes: float
    rank_mixes: float
    staged_after: float
    node_source: tuple[int, ...]
    step_source: dict[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        return f"{self.order}, cache {self.cache}"

    @property
    def first(self) -> Epoch:
        return self.epochs[0]

    @property
    def later(self) -> tuple[Epoch, ...]:
        """The epochs after the first; the first if there is only one."""
        return self.epochs[1:] or self.epochs

    @property
    def seconds(self) -> float:
        """Time of all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def source(self) -> int:
        """Bytes of all epochs from the filesystem."""
        return sum(epoch.source for epoch in self.epochs)

    def imbalance(self, name: str) -> float:
        """The maximum over the mean, in the later epochs together. name: "nodes" or "steps"."""
        spreads = [getattr(epoch, name) for epoch in self.later]
        mean = sum(spread.mean for spread in spreads)
        return sum(spread.most for spread in spreads) / mean if mean else 1.0

    def mean(self, name: str) -> float:
        """The mean of a field over the later epochs."""
        return sum(float(getattr(epoch, name)) for epoch in self.later) / len(self.later)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation.

    samples, payload_bytes, shards: size of the set. is_planned: whether its sizes are generated.
    steps: number of steps per epoch. unread: samples of an epoch that no rank reads (drop_last).
    nodes_simulated: number of simulated nodes; if not all, they represent all.
    """

    title: str
    is_planned: bool
    samples: int
    payload_bytes: int
    shards: int
    job: Job
    machine: Machine
    steps: int
    unread: int
    nodes_simulated: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return self.nodes_simulated == self.job.nodes

    def to_dict(self) -> dict[str, Any]:
        """The result as a dictionary for JSON; an unlimited rate is None."""
        plain = asdict(self) | {"is_exact": self.is_exact}
        plain["machine"] = {name: None if value == math.inf else value for name, value in plain["machine"].items()}
        for row, entry in zip(self.rows, plain["rows"], strict=True):
            entry |= {"name": row.name, "seconds": row.seconds, "source": row.source}
        return plain


# --- The simulation: one pass per order, for all capacities at the same time.
Source: TypeAlias = "Subject | Reader | str | os.PathLike[str]"
_LEAST_NODES = 8
_CURVE = 200


def simulate(
    dataset: Source,
    job: Job,
    *,
    split: str | None = None,
    caches: Sequence[Capacity] = (0.0, 0.1, 0.3, 1.0),
    shuffles: Shuffles | None = None,
    machine: Machine | None = None,
    watcher: Watcher | None = None,
) -> Simulation:
    """Simulate a job over a set, with each order and each capacity of the nodes' caches.

    dataset: a path or address of a packed set, a reader, or `planned_set(…)`. split: the split of a path or address.
    caches: capacities of each node: a share of the set, or bytes, as in `readers.cached`.
    shuffles, machine: by default, four orders and the default bandwidths of `Machine`.

    If an epoch has more than `job.most_reads` reads, only some nodes are simulated, at least 8, chosen at random, and
    the results are estimates with an interval. Raises ValueError, and the errors of opening the set.
    """
    if isinstance(dataset, Subject):
        return _simulate(dataset, job, caches, shuffles or Shuffles(), machine or Machine(), watcher or Silent())
    if isinstance(dataset, Reader):
        subject = subject_of(dataset)
        return _simulate(subject, job, caches, shuffles or Shuffles(), machine or Machine(), watcher or Silent())
    is_address = isinstance(dataset, str) and "://" in dataset
    with open_remote(str(dataset), split) if is_address else open_packed(dataset, split) as reader:
        return simulate(reader, job, caches=caches, shuffles=shuffles, machine=machine, watcher=watcher)


def _simulate(
    subject: Subject, job: Job, caches: Sequence[Capacity], shuffles: Shuffles, machine: Machine, watcher: Watcher
) -> Simulation:
    if not caches:
        raise ValueError("caches: give at least one capacity, as 0.0 for none")
    nodes = _simulated_nodes(len(subject), job, shuffles.seed)
    names = [name for name in dict.fromkeys(shuffles.names) if name != "staged-first" or subject.starts is not None]
    if not names:
        raise ValueError(f"staged-first is for packed sets, and {subject.reader.table.title} has no list of shards")
    reads = len(subject) * len(nodes) // job.nodes * job.epochs
    done = [0]
    rows: list[Row] = []
    watcher.begin(reads * len(names), 0, lambda: (done[0], 0))
    try:
        for name in names:
            order = _order(name, subject, job, shuffles)
            rows += _OrderRun(name, order, subject, job, machine, nodes, done).rows(caches)
    finally:
        watcher.end()
    deal = Deal(Sequential(len(subject)), job, nodes[:1])
    whole = deal.steps * job.batch_size * job.world_size
    notes = [f"{name} was left out: the set has no list of shards" for name in shuffles.names if name not in names]
    if len(nodes) != job.nodes:
        error = human_bytes(max(epoch.error for row in rows for epoch in row.epochs))
        notes.append(
            f"{len(nodes)} of {job.nodes:,} nodes were simulated, drawn at random; bytes of an epoch are within "
            f"{error} of the bytes of all nodes, with 95 % confidence; the slowest of all nodes may read more"
        )
    return Simulation(
        title=subject.reader.table.title,
        is_planned=subject.is_planned,
        samples=len(subject),
        payload_bytes=subject.payload_bytes,
        shards=len(subject.shard_bytes),
        job=job,
        machine=machine,
        steps=deal.steps,
        unread=max(0, len(subject) - whole) if job.tail == "drop_last" else 0,
        nodes_simulated=len(nodes),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _simulated_nodes(samples: int, job: Job, seed: int) -> Int64s:
    most = max(_LEAST_NODES, job.most_reads * job.nodes // max(1, samples))
    if most >= job.nodes:
        return np.arange(job.nodes, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(job.nodes, most, replace=False))


def _order(name: str, subject: Subject, job: Job, shuffles: Shuffles) -> Order:
    n, seed = len(subject), shuffles.seed
    if name == "block":
        return block_shuffled(subject.reader, seed, shuffles.block_bytes, shuffles.window, subject.field)
    if name == "node-local":
        return NodeLocal(n, job.nodes, shuffles.exchange_every, seed)
    if name == "staged-first" and subject.starts is not None:
        return StagedFirst(subject.starts, shuffles.shards, seed=seed)
    return Shuffled(n, seed) if name == "global" else Sequential(n, seed)


@dataclass(eq=False)
class _OrderRun:
    """The simulation of one order. nodes: the simulated nodes. done: number of reads so far, for the watcher."""

    name: str
    order: Order
    subject: Subject
    job: Job
    machine: Machine
    nodes: Int64s
    done: list[int]

    def rows(self, caches: Sequence[Capacity]) -> list[Row]:
        job, size = self.job, self.job.batch_size
        holdings = [holding_of(self.subject, self.order, capacity, job) for capacity in caches]
        deal = Deal(self.order, job, self.nodes)
        history = History(len(self.subject), job.nodes, len(self.nodes) == job.nodes)
        epochs: list[list[Epoch]] = [[] for _ in holdings]
        nodes_source = np.zeros((len(holdings), len(self.nodes)), np.int64)
        curves: list[dict[str, tuple[int, ...]]] = [{} for _ in holdings]
        rank_mixes = 1.0
        for epoch in range(job.epochs):
            history.begin_epoch()
            traffics = [Traffic.empty(deal.steps, len(self.nodes)) for _ in holdings]
            means: list[Floats] = []
            for part in deal.parts():
                samples = sort_by_place(self.subject, self.order.indices(epoch, part.positions), part.batches)
                node = self.nodes[samples.batch // job.ranks % len(self.nodes)]
                step = Step(part, samples, node, *history.visit(samples.sample, node))
                if epoch == 0:
                    whole = np.bincount(samples.batch) == size
                    means.append(np.bincount(samples.batch, samples.sample)[whole] / size)
                for traffic, holding in zip(traffics, holdings, strict=True):
                    count(traffic, holding, step, deal, job)
                self.done[0] += len(part.positions)
            if epoch == 0:
                rank_mixes = quality_of(np.concatenate(means), size, len(self.subject))
            for i, (traffic, holding) in enumerate(zip(traffics, holdings, strict=True)):
                copied = holding.node_bytes if holding.arrives is not None and epoch == 0 else 0
                epochs[i].append(self._epoch(epoch, traffic, holding.arrives is not None, copied))
                nodes_source[i] += traffic.source.sum(axis=0) + copied
                if epoch in (0, job.epochs - 1):
                    curves[i]["first" if epoch == 0 else "last"] = _curve(traffic, job)
        mixes = step_quality(self.order, job.world_size * size)
        return [
            Row(
                order=self.name,
                cache=_capacity_text(capacity),
                spec=self.order.spec(),
                epochs=tuple(epochs[i]),
                memory=self._memory(holdings[i]),
                mixes=mixes,
                rank_mixes=rank_mixes,
                staged_after=0.0
                if holdings[i].arrives is None
                else copy_seconds(holdings[i].node_bytes, job, self.machine),
                node_source=tuple(nodes_source[i].tolist()),
                step_source=curves[i],
            )
            for i, capacity in enumerate(caches)
        ]

    def _epoch(self, epoch: int, traffic: Traffic, is_staged: bool, copied: int) -> Epoch:
        """The result of an epoch. copied: bytes that each node copies in this epoch."""
        nodes, whole = self.job.nodes, self.job.nodes / len(self.nodes)
        of_nodes = traffic.source.sum(axis=0) + copied

        def total(table: Int64s) -> int:
            return round(int(table.sum()) * whole)

        return Epoch(
            epoch=epoch,
            payload=round(traffic.payload * whole),
            source=total(traffic.source) + copied * nodes,
            copied=copied * nodes,
            error=_interval(of_nodes, nodes),
            pages=round(traffic.pages * whole),
            requests=total(traffic.requests),
            sizes={power: int(number) for power, number in enumerate(traffic.sizes.tolist()) if number},
            local=total(traffic.local),
            peers=total(traffic.peers),
            nodes=_spread(of_nodes),
            steps=_spread(traffic.source.sum(axis=1) * whole),
            **run_epoch(traffic, self.job, self.machine, is_staged=is_staged, copied=copied),
        )

    def _memory(self, holding: Holding) -> Memory:
        job, is_staged = self.job, holding.arrives is not None
        mean = self.subject.payload_bytes / len(self.subject)
        return Memory(
            cache=0 if is_staged else holding.node_bytes,
            tables=job.ranks * int(getattr(self.order, "table_bytes", 0)),
            readahead=round(job.ranks * job.prefetch * job.batch_size * mean),
            disk=holding.node_bytes if is_staged else 0,
        )


def _interval(of_nodes: npt.NDArray[Any], nodes: int) -> int:
    """1.96 standard errors of the sum over all nodes, from nodes sampled without replacement."""
    sampled = len(of_nodes)
    if sampled == nodes:
        return 0
    return round(1.96 * nodes * float(of_nodes.std(ddof=1)) * math.sqrt((1 - sampled / nodes) / sampled))


def _spread(values: npt.NDArray[Any]) -> Spread:
    return Spread(float(values.min()), float(np.median(values)), float(values.mean()), float(values.max()))


def _curve(traffic: Traffic, job: Job) -> tuple[int, ...]:
    """Bytes per step from the filesystem, of all nodes, as the means of at most _CURVE parts of an epoch."""
    steps = traffic.source.sum(axis=1) * (job.nodes / traffic.source.shape[1])
    return tuple(round(float(part.mean())) for part in np.array_split(steps, min(_CURVE, len(steps))))


def _size(capacity: Capacity) -> int:
    return parse_size(capacity) if isinstance(capacity, str) else int(capacity)


def _capacity_text(capacity: Capacity) -> str:
    share = share_of(capacity)
    return f"{100 * share:g} %" if share is not None else human_bytes(_size(capacity))


# --- A simulation as lines for a terminal: the set, the job and the machine, two tables, and notes.
BYTES = ("order", "cache", "first epoch", "later", "a node", "requests", "of", "nodes", "steps", "peers")
COSTS = ("order", "cache", "memory", "disk", "a step mixes", "a rank", "first epoch", "later", "waiting", "waits for")
_BYTES_OPTIONAL, _COSTS_OPTIONAL = ("peers", "steps", "of"), ("disk", "waiting", "a rank")
BYTES_REMARK = (
    "Bytes from the filesystem, of all nodes and of a node in a later epoch; requests of a later epoch and their mean "
    "size; nodes, steps: the largest over the mean in later epochs; peers: bytes from other nodes in a later epoch."
)
COSTS_REMARK = (
    "Of a node: memory of cache, orders and batches ahead, disk of a staged copy. How well a step of all ranks and a "
    "batch of one rank mix, where a global shuffle is 1. The time of an epoch, the share of a later one in which GPUs "
    "wait, and the cause."
)


def simulation_lines(result: Simulation, width: int = 120) -> list[str]:
    """The whole result as lines."""
    lines = described(result)
    for headings, cells, optional, remark in (
        (BYTES, bytes_cells, _BYTES_OPTIONAL, BYTES_REMARK),
        (COSTS, costs_cells, _COSTS_OPTIONAL, COSTS_REMARK),
    ):
        lines += ["", *table(headings, [cells(row, result) for row in result.rows], width, left=2, optional=optional)]
        lines += wrapped(remark, width, "")
    notes = [line for note in result.notes for line in wrapped(f"note: {note}", width, " " * 6)]
    return [*lines, "", *notes] if notes else lines


def described(result: Simulation) -> list[str]:
    """The set, the job and the machine, in three lines."""
    job, machine = result.job, result.machine
    epochs = f"{job.epochs} epoch{'s' * (job.epochs > 1)}"
    size = human_bytes(result.payload_bytes)
    exact = "all simulated" if result.is_exact else f"of which {result.nodes_simulated:,} were simulated"
    limits = [
        f"{human_bytes(machine.filesystem)}/s filesystem",
        f"{human_bytes(machine.node)}/s a node",
        f"{human_bytes(machine.disk)}/s a disk",
        f"{1e3 * machine.latency_seconds:g} ms a request, {machine.outstanding} at a time",
    ]
    if math.isfinite(machine.filesystem_requests):
        limits.append(f"{machine.filesystem_requests:,.0f} requests/s")
    return [
        f"{result.title}: {plural(result.samples, 'sample')}, {size} in {plural(result.shards, 'shard')}",
        f"{plural(job.nodes, 'node')} x {plural(job.ranks, 'rank')}, {exact}; batches of {job.batch_size}, "
        f"{plural(result.steps, 'step')} of {1e3 * job.step_seconds:g} ms in an epoch, {epochs}"
        + (", nodes serve each other" if job.peers else ""),
        "given: " + ", ".join(limits),
    ]


def bytes_cells(row: Row, result: Simulation) -> tuple[str, ...]:
    """The cells of a row under BYTES."""
    requests = row.mean("requests")
    return (
        row.order,
        row.cache,
        human_bytes(row.first.source),
        human_bytes(row.mean("source")),
        human_bytes(row.mean("source") / result.job.nodes),
        f"{requests:,.0f}",
        human_bytes(row.mean("requested") / requests) if requests else "–",
        f"{row.imbalance('nodes'):.2f}",
        f"{row.imbalance('steps'):.2f}",
        human_bytes(row.mean("peers")) if result.job.peers else "–",
    )


def costs_cells(row: Row, result: Simulation) -> tuple[str, ...]:
    """The cells of a row under COSTS."""
    return (
        row.order,
        row.cache,
        human_bytes(row.memory.total),
        human_bytes(row.memory.disk) if row.memory.disk else "–",
        f"{row.mixes:.2f}",
        f"{row.rank_mixes:.2f}",
        human_seconds(row.first.seconds),
        human_seconds(row.mean("seconds")),
        f"{row.mean('waited') / row.mean('seconds'):.0%}",
        _waits(row.first, row.later),
    )


def _waits(first: Epoch, later: tuple[Epoch, ...]) -> str:
    """The bottleneck of the first epoch, then the most frequent one of the later epochs."""
    names = [epoch.binds for epoch in later]
    common = max(dict.fromkeys(names), key=names.count)
    shown = {"GPU": "nothing"}
    both = dict.fromkeys([shown.get(first.binds, first.binds), shown.get(common, common)])
    return ", then ".join(both)
