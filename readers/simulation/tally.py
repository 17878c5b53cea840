"""Count, for an epoch, the bytes and requests of every node in every step, for one order and several capacities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from readers.order.base import Int64s
from readers.simulation.deal import Deal, Part
from readers.simulation.holding import Bools, Holding, Staging
from readers.simulation.job import Job
from readers.simulation.reads import Requests, Samples, merge

__all__ = ["Step", "Traffic", "Variant", "count"]

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
    local: bytes from the node's own memory or disk. peers: bytes from other nodes; served: to them. What a node reads
    from the filesystem for another one counts as its own.
    most_requests: of one rank in a step, by itself or by others for it, int64 [steps].
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


class Step(NamedTuple):
    """Some steps of an epoch, as all variants see them.

    nodes: of each sample, by the number of the node in the job. seen: whether that node has read it before. by_any:
    whether any node has.
    """

    part: Part
    samples: Samples
    nodes: Int64s
    seen: Bools
    by_any: Bools


def count(traffic: Traffic, variant: Variant, step: Step, deal: Deal, job: Job) -> None:
    """Add some steps of an epoch."""
    part, samples = step.part, step.samples
    width = traffic.source.shape[1]
    table = _Table(part, width)
    cell = samples.batch // job.ranks
    held = _held(variant, step)
    traffic.payload += int(samples.length.sum())
    most = np.zeros(part.steps * deal.ranks, np.int64)
    own = np.ones(len(held), np.bool_)
    if variant.holding.shared:
        homes = variant.holding.homes(samples.sample)
        own = homes == step.nodes
        asked = np.flatnonzero(~own)
        # Where only some nodes are simulated, each does for others as much as others do for it.
        at = cell[asked] if width != job.nodes else cell[asked] // width * width + homes[asked]
        table.add(traffic.peers, cell[asked], samples.length[asked])
        table.add(traffic.served, at, samples.length[asked])
        # A range of neighbouring payloads is one request to the node that has them, which reads it by itself.
        lacking = ~held[asked]
        found = samples.where(~own & ~held)
        requests = merge(found._replace(batch=found.batch * job.nodes + homes[asked][lacking]), 0)
        batch, home = np.divmod(requests.batch, job.nodes)
        cells = batch // job.ranks
        _add_requests(traffic, table, requests, cells if width != job.nodes else cells // width * width + home)
        most += np.bincount(batch, minlength=len(most))
    near = own & held
    table.add(traffic.local, cell[near], samples.length[near])
    if variant.staging is not None:
        np.maximum.at(traffic.staged, part.first + cell[near] // width, variant.staging.arrives[samples.shard[near]])
    requests = merge(samples.where(own & ~held))
    _add_requests(traffic, table, requests, requests.batch // job.ranks)
    most += np.bincount(requests.batch, minlength=len(most))
    traffic.most_requests[table.rows] = most.reshape(part.steps, deal.ranks).max(axis=1)


@dataclass(frozen=True)
class _Table:
    """Adds to tables of [steps, nodes]."""

    part: Part
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.part.first, self.part.first + self.part.steps)

    def add(self, table: Int64s, cells: Int64s, weights: Int64s | None = None) -> None:
        """cells: step * nodes + node, from the first step of the part on."""
        if len(cells):
            sums = np.bincount(cells, weights, minlength=self.part.steps * self.width)
            table[self.rows] += sums.astype(np.int64).reshape(self.part.steps, self.width)


def _add_requests(traffic: Traffic, table: _Table, requests: Requests, cells: Int64s) -> None:
    table.add(traffic.source, cells, requests.bytes)
    table.add(traffic.requests, cells)
    traffic.sizes += np.bincount(np.frexp(requests.bytes)[1], minlength=_SIZES)
    ends = -(-(requests.address + requests.bytes) // _PAGE)
    traffic.pages += _PAGE * int((ends - requests.address // _PAGE)[requests.bytes > 0].sum())


def _held(variant: Variant, step: Step) -> Bools:
    """Which samples are read from memory or a disk: of the node itself, or of the one whose part they are in."""
    holding, samples = variant.holding, step.samples
    if variant.staging is not None:
        staged: Bools = variant.staging.arrives[samples.shard] >= 0
        return staged
    if holding.kept is None:
        return np.zeros(len(step.nodes), np.bool_)
    kept: Bools = holding.kept[samples.sample]
    if holding.shared:
        return kept & step.by_any
    if holding.parts is not None:
        kept &= holding.homes(samples.sample) == step.nodes
    return kept & step.seen
