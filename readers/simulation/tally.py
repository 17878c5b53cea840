"""Count, for an epoch, the bytes and requests of every node in every step, for one order and several capacities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.order.base import Int64s
from readers.simulation.deal import Deal, Part
from readers.simulation.holding import Bools, Holding, Staging
from readers.simulation.job import Job
from readers.simulation.reads import Samples, merge

__all__ = ["Traffic", "Variant", "count"]

_PAGE = 4096
_SIZES = 64  # powers of two


@dataclass(frozen=True, eq=False)
class Variant:
    """What nodes keep, in memory or on disks."""

    holding: Holding
    staging: Staging | None = None


@dataclass(eq=False)
class Traffic:
    """An epoch. Arrays are [steps, nodes that are simulated], int64.

    source, requests: bytes and requests to the parallel filesystem; pages: the former in whole pages of 4,096 bytes.
    local: bytes from the node's own memory or disk. peers: bytes from other nodes; served: to them.
    most_requests: of one rank in a step, int64 [steps].
    staged: bytes that a node must have copied before the batches of a step can be read, int64 [steps].
    sizes: requests by the power of two that their bytes reach, int64 [64].
    payload: bytes that training reads.
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


def count(
    traffic: Traffic, variant: Variant, part: Part, deal: Deal, job: Job, samples: Samples, nodes: Int64s, seen: Bools
) -> None:
    """Add some steps of an epoch.

    nodes: of each sample, by the number of the node in the job. seen: whether that node has read it before.
    """
    held, peers = _held(variant, samples, nodes, seen)
    width = traffic.source.shape[1]
    rows = slice(part.first, part.first + part.steps)
    cell = samples.batch // job.ranks

    def add(table: Int64s, cells: Int64s, weights: npt.NDArray[Any] | None = None) -> None:
        sums = np.bincount(cells, weights, minlength=part.steps * width)
        table[rows] += sums.astype(np.int64).reshape(part.steps, width)

    traffic.payload += int(samples.length.sum())
    if peers is not None:
        homes = variant.holding.homes(samples.sample[peers])
        add(traffic.peers, cell[peers], samples.length[peers])
        if width == job.nodes:
            add(traffic.served, (cell[peers] // width) * width + homes, samples.length[peers])
        else:  # as much as a node is given, on average
            add(traffic.served, cell[peers], samples.length[peers])
        held = held | peers
        own = held & ~peers
    else:
        own = held
    if own.any():
        add(traffic.local, cell[own], samples.length[own])
    if variant.staging is not None and own.any():
        need = variant.staging.arrives[samples.shard[own]]
        np.maximum.at(traffic.staged, part.first + cell[own] // width, need)
    requests = merge(samples.where(~held))
    if not len(requests.batch):
        return
    cells = requests.batch // job.ranks
    add(traffic.source, cells, requests.bytes)
    add(traffic.requests, cells)
    of_ranks = np.bincount(requests.batch, minlength=part.steps * deal.ranks).reshape(part.steps, deal.ranks)
    traffic.most_requests[rows] = of_ranks.max(axis=1)
    traffic.sizes += np.bincount(np.frexp(requests.bytes)[1], minlength=_SIZES)
    ends = -(-(requests.address + requests.bytes) // _PAGE)
    traffic.pages += _PAGE * int((ends - requests.address // _PAGE)[requests.bytes > 0].sum())


def _held(variant: Variant, samples: Samples, nodes: Int64s, seen: Bools) -> tuple[Bools, Bools | None]:
    """Which samples need no request: those that the node itself holds, and those that another one serves."""
    holding = variant.holding
    if variant.staging is not None:
        staged: Bools = variant.staging.arrives[samples.shard] >= 0
        return staged, None
    if holding.kept is None:
        return np.zeros(len(nodes), np.bool_), None
    kept: Bools = holding.kept[samples.sample]
    if holding.parts is None:
        return kept & seen, None
    own = holding.homes(samples.sample) == nodes
    if holding.filled:
        return kept & own, kept & ~own
    return kept & own & seen, None
