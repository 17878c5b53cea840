"""What is simulated: the nodes of a job, the shuffles to compare, and what the machine delivers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from readers.order.schedule import Tail

__all__ = ["ORDERS", "Job", "Machine", "Shuffles"]

ORDERS = ("global", "block", "node-local", "staged-first", "stored")


@dataclass(frozen=True, slots=True)
class Job:
    """A training. Raises ValueError.

    nodes, ranks: nodes, and ranks of each; rank r is on node r // ranks.
    batch_size: samples of one rank in a step.
    step_seconds: a training step that never waits for data.
    epochs: how many to simulate, from epoch 0.
    prefetch: batches that each rank has ahead.
    tail: "drop_last", or "exact": what the last positions of an epoch are for.
    peers: nodes serve each other from their caches; see `readers.simulation.holding`.
    most_reads: of an epoch, to simulate; of larger ones some nodes are simulated, at least 8.
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
            raise ValueError(f"tail is {self.tail!r}; a simulation knows drop_last and exact")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine delivers, bytes a second. Raises ValueError.

    filesystem: the parallel filesystem, to all nodes together.
    node: the network of one node, in each direction.
    disk: the local disk of a node.
    filesystem_requests: requests a second that the parallel filesystem answers, to all nodes together.
    latency_seconds: of one request to it.
    outstanding: requests that a rank has under way at a time.
    """

    filesystem: float = 40e9
    node: float = 2e9
    disk: float = 3e9
    filesystem_requests: float = math.inf
    latency_seconds: float = 0.001
    outstanding: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name == "latency_seconds" else math.nextafter(0.0, 1.0)
            if not value >= least:
                raise ValueError(f"{field.name} is {value}, expected a number above 0")


@dataclass(frozen=True, slots=True)
class Shuffles:
    """The orders to compare, and their parameters. Raises ValueError.

    names: of `ORDERS`; node-local and staged-first have copies that fit them, see `readers.simulation.holding`.
    block_bytes, window: of the block shuffle.
    exchange_every: of node-local. shards: the window of staged-first.
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
            raise ValueError(f"orders are some of {', '.join(ORDERS)}, not {', '.join(wrong) or 'none'}")
        for name in ("block_bytes", "window", "exchange_every", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
