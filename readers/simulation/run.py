"""The simulation: every order once, with all capacities at the same time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.messages import Silent, Watcher, human_bytes, parse_size
from readers.caching.budget import Capacity
from readers.order import NodeLocal, Order, Sequential, Shuffled, StagedFirst, block_shuffled
from readers.order.base import Int64s
from readers.order.quality import quality_of, step_quality
from readers.packed import open_packed
from readers.reader import Reader
from readers.remote import open_remote
from readers.simulation.advice import code_of, notes_of, recommend
from readers.simulation.deal import Deal
from readers.simulation.holding import History, Holding, holding_of, share_of, staging_of
from readers.simulation.job import Job, Machine, Shuffles
from readers.simulation.reads import sort_by_place
from readers.simulation.result import Epoch, Memory, Row, Simulation, Spread
from readers.simulation.subject import Subject, subject_of
from readers.simulation.tally import Step, Traffic, Variant, count
from readers.simulation.timing import Copying, run_epoch

__all__ = ["simulate"]

Floats: TypeAlias = npt.NDArray[np.float64]
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

    dataset: a path or address of a packed set, a reader, or `planned_set(…)`. split: of a path or address.
    caches: what each node may keep: a share of the set, or bytes, as `readers.cached` takes them.
    shuffles, machine: default: four orders, and the bandwidths of `Machine`.

    Where an epoch has more than `job.most_reads` reads, some of the nodes are simulated, at least 8, chosen at random,
    and numbers are estimates with an interval. Raises ValueError, and what opening the set raises.
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
            rows += _OrderRun(name, order, subject, job, machine, nodes, shuffles, done).rows(caches)
    finally:
        watcher.end()
    deal = Deal(Sequential(len(subject)), job, nodes[:1])
    whole = deal.steps * job.batch_size * job.world_size
    best, reason = recommend(rows)
    found = Simulation(
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
        best=best,
        reason=reason,
    )
    return notes_of(found, shuffles, skipped=[name for name in shuffles.names if name not in names])


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
    """One order. nodes: those that are simulated. done: reads so far, for the watcher."""

    name: str
    order: Order
    subject: Subject
    job: Job
    machine: Machine
    nodes: Int64s
    shuffles: Shuffles
    done: list[int]

    def rows(self, caches: Sequence[Capacity]) -> list[Row]:
        variants = [self._variant(capacity) for capacity in caches]
        deal = Deal(self.order, self.job, self.nodes)
        history = History(len(self.subject), self.job.nodes, len(self.nodes) == self.job.nodes)
        epochs: list[list[Epoch]] = [[] for _ in variants]
        nodes_source = [np.zeros(len(self.nodes), np.int64) for _ in variants]
        curves: list[dict[str, tuple[int, ...]]] = [{} for _ in variants]
        rank_mixes = 1.0
        for epoch in range(self.job.epochs):
            history.begin_epoch()
            traffics = [Traffic.empty(deal.steps, len(self.nodes)) for _ in variants]
            means: list[Floats] = []
            for part in deal.parts():
                samples = sort_by_place(self.subject, self.order.indices(epoch, part.positions), part.batches)
                node = self.nodes[samples.batch // self.job.ranks % len(self.nodes)]
                step = Step(part, samples, node, *history.visit(samples.sample, node))
                if epoch == 0:
                    sizes = np.maximum(1, np.bincount(samples.batch))
                    means.append(np.bincount(samples.batch, samples.sample)[sizes == self.job.batch_size]
                                 / self.job.batch_size)  # fmt: skip
                for traffic, variant in zip(traffics, variants, strict=True):
                    count(traffic, variant, step, deal, self.job)
                self.done[0] += len(part.positions)
            if epoch == 0:
                rank_mixes = quality_of(np.concatenate(means), self.job.batch_size, len(self.subject))
            for i, (traffic, variant) in enumerate(zip(traffics, variants, strict=True)):
                epochs[i].append(self._epoch(epoch, traffic, variant))
                nodes_source[i] += traffic.source.sum(axis=0) + self._copied(epoch, variant) // self.job.nodes
                if epoch in (0, self.job.epochs - 1):
                    curves[i]["first" if epoch == 0 else "last"] = _curve(traffic, self.job)
        mixes = step_quality(self.order, self.job.world_size * self.job.batch_size)
        return [
            Row(
                order=self.name,
                cache=_capacity_text(capacity),
                spec=self.order.spec(),
                epochs=tuple(epochs[i]),
                memory=self._memory(variants[i]),
                mixes=mixes,
                rank_mixes=rank_mixes,
                staged_after=0.0 if (copying := self._copying(0, variants[i])) is None else copying.seconds,
                node_source=tuple(nodes_source[i].tolist()),
                step_source=curves[i],
                code=code_of(self.order, capacity, self.subject, self.job, self.shuffles),
            )
            for i, capacity in enumerate(caches)
        ]

    def _variant(self, capacity: Capacity) -> Variant:
        if isinstance(self.order, StagedFirst) and not self.job.peers:
            return Variant(Holding(None), staging_of(self.subject, self.order, capacity))
        return Variant(holding_of(self.subject, self.order, capacity, self.job))

    def _copied(self, epoch: int, variant: Variant) -> int:
        """Bytes that all nodes together copy in this epoch."""
        return 0 if epoch or variant.staging is None else variant.staging.node_bytes * self.job.nodes

    def _copying(self, epoch: int, variant: Variant) -> Copying | None:
        copied = self._copied(epoch, variant)
        if not copied:
            return None
        return Copying.of(copied / self.job.nodes, self.job, self.machine)

    def _epoch(self, epoch: int, traffic: Traffic, variant: Variant) -> Epoch:
        job, copied = self.job, self._copied(epoch, variant)
        whole = job.nodes / len(self.nodes)
        clock = run_epoch(
            traffic,
            job,
            self.machine,
            is_staged=variant.staging is not None,
            copying=self._copying(epoch, variant),
        )
        of_nodes = traffic.source.sum(axis=0) + copied / job.nodes
        return Epoch(
            epoch=epoch,
            payload=round(traffic.payload * whole),
            source=round(float(traffic.source.sum()) * whole) + copied,
            copied=copied,
            error=_interval(of_nodes, job.nodes),
            pages=round(traffic.pages * whole),
            requests=round(int(traffic.requests.sum()) * whole),
            sizes={power: int(number) for power, number in enumerate(traffic.sizes.tolist()) if number},
            local=round(int(traffic.local.sum()) * whole),
            peers=round(int(traffic.peers.sum()) * whole),
            nodes=_spread(of_nodes),
            steps=_spread(traffic.source.sum(axis=1) * whole),
            seconds=clock.seconds,
            first_step=clock.first_step,
            waited=clock.waited,
            binds=clock.binds,
        )

    def _memory(self, variant: Variant) -> Memory:
        job, staging = self.job, variant.staging
        tables = int(getattr(self.order, "table_bytes", 0))
        mean = self.subject.payload_bytes / len(self.subject)
        return Memory(
            cache=variant.holding.node_bytes,
            tables=job.ranks * tables,
            readahead=round(job.ranks * job.prefetch * job.batch_size * mean),
            disk=0 if staging is None else staging.node_bytes,
        )


def _interval(of_nodes: npt.NDArray[Any], nodes: int) -> int:
    """1.96 standard errors of the sum over all nodes, from a sample of them without replacement."""
    sampled = len(of_nodes)
    if sampled == nodes:
        return 0
    return round(1.96 * nodes * float(of_nodes.std(ddof=1)) * math.sqrt((1 - sampled / nodes) / sampled))


def _spread(values: npt.NDArray[Any]) -> Spread:
    return Spread(float(values.min()), float(np.median(values)), float(values.mean()), float(values.max()))


def _curve(traffic: Traffic, job: Job) -> tuple[int, ...]:
    """Bytes from the filesystem over an epoch, the mean of a step in each part."""
    steps = traffic.source.sum(axis=1) * (job.nodes / traffic.source.shape[1])
    return tuple(round(float(part.mean())) for part in np.array_split(steps, min(_CURVE, len(steps))))


def _capacity_text(capacity: Capacity) -> str:
    share = share_of(capacity)
    return f"{100 * share:g} %" if share is not None else human_bytes(parse_size(str(capacity)))
