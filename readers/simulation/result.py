"""What a simulation found. Bytes are of all nodes unless a name says otherwise; times are seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from readers.simulation.job import Job, Machine

__all__ = ["Epoch", "Memory", "Row", "Simulation", "Spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread: least, median, mean, most."""

    least: float
    median: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one node, bytes.

    cache: shared memory that a cache reserves, its slots included. tables: of the orders of all ranks. readahead:
    encoded batches that all ranks have ahead. disk: a staged copy.
    """

    cache: int = 0
    tables: int = 0
    readahead: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Without the disk."""
        return self.cache + self.tables + self.readahead


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch.

    source: bytes requested from the parallel filesystem, copies to nodes included. copied: of them, the copies.
    error: half of the interval that holds the source bytes in 95 % of the cases, where nodes were sampled; else 0.
    pages: the bytes of the requests, not of the copies, in whole pages of 4,096 bytes.
    requests: to the filesystem, without those of copying, which are whole files.
    sizes: requests by size: those of at least 2^(k-1) and below 2^k bytes under 2^k.
    local, peers: bytes that a node had itself, and that another one served.
    nodes: source bytes of each node. steps: source bytes of each step, without copies.
    seconds, first_step, waited, binds: see `readers.simulation.timing.Clock`.
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
        """The bytes of the requests."""
        return self.source - self.copied


@dataclass(frozen=True, slots=True)
class Row:
    """One order with one capacity.

    order: of `readers.simulation.ORDERS`. cache: the capacity as it was asked for. spec: of the order.
    mixes: how well the steps of all ranks mix the set in the first epoch, by `readers.order.quality.step_quality`;
    rank_mixes: the same of the batches of single ranks.
    staged_after: seconds until all is copied to the nodes, where something is; else 0.
    node_source: source bytes of each node that was simulated, over all epochs.
    step_source: source bytes of the steps of the first epoch and of the last, of all nodes; in at most 200 parts.
    code: what sets it up.
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
    code: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.order}, cache {self.cache}"

    @property
    def first(self) -> Epoch:
        return self.epochs[0]

    @property
    def later(self) -> tuple[Epoch, ...]:
        """The epochs after the first, or that one where it is alone."""
        return self.epochs[1:] or self.epochs

    @property
    def seconds(self) -> float:
        """Of all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def source(self) -> int:
        """Bytes of all epochs from the filesystem."""
        return sum(epoch.source for epoch in self.epochs)

    def imbalance(self, name: str) -> float:
        """Of "nodes" or "steps": the most over the mean, in the later epochs together."""
        spreads = [getattr(epoch, name) for epoch in self.later]
        mean = sum(spread.mean for spread in spreads)
        return sum(spread.most for spread in spreads) / mean if mean else 1.0

    def mean(self, name: str) -> float:
        """Of a number of the later epochs."""
        return sum(float(getattr(epoch, name)) for epoch in self.later) / len(self.later)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result.

    samples, payload_bytes, shards: of the set. is_planned: whether its sizes are made up.
    steps: of an epoch. unread: samples of an epoch that no rank reads (drop_last).
    nodes_simulated: all of them, or some that stand for all.
    best: number of the recommended row; reason: why.
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
    best: int
    reason: str
    notes: tuple[str, ...] = field(default=())

    @property
    def is_exact(self) -> bool:
        return self.nodes_simulated == self.job.nodes

    def to_dict(self) -> dict[str, Any]:
        """For JSON; an unlimited rate is null."""
        found = asdict(self)
        found["is_exact"] = self.is_exact
        found["machine"] = {k: None if v == float("inf") else v for k, v in found["machine"].items()}
        for row, plain in zip(self.rows, found["rows"], strict=True):
            plain |= {"name": row.name, "seconds": row.seconds, "source": row.source}
        return found
