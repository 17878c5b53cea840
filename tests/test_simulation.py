"""A simulated job reads what a real one reads: ranks of this process, counted at the system calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import readers
from cache.stores.ranges import plan_reads
from readers.feed import Feed, FeedOptions
from readers.order import NodeLocal, Order, Sequential, Shuffled, StagedFirst, block_shuffled
from readers.simulation import ORDERS, Job, Shuffles, planned_set, simulate
from readers.simulation.reads import Samples, merge

FOREVER = 1000.0  # of patience: a wait that does not end by itself exceeds all limits of tests
BLOCK_BYTES, WINDOW, EXCHANGE = 3000, 3, 3
SHUFFLES = Shuffles(ORDERS, block_bytes=BLOCK_BYTES, window=WINDOW, exchange_every=EXCHANGE, shards=3, seed=5)


class Counted:
    """Reads of shards below `root` by the thread that made it, as (node, step): [bytes, requests]."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.thread, self.at = f"{root}/", threading.get_ident(), (0, 0)
        self.reads: dict[tuple[int, int], list[int]] = {}
        pread, preadv = os.pread, os.preadv
        monkeypatch.setattr(os, "pread", lambda fd, size, offset: self._note(fd, size) or pread(fd, size, offset))
        monkeypatch.setattr(
            os, "preadv", lambda fd, into, offset: self._note(fd, sum(map(len, into))) or preadv(fd, into, offset)
        )

    def _note(self, descriptor: int, size: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if threading.get_ident() == self.thread and path.startswith(self.root) and path.endswith(".tar"):
            count = self.reads.setdefault(self.at, [0, 0])
            count[0] += size
            count[1] += 1


@pytest.fixture
def counted(source: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(source, monkeypatch)


def order_of(name: str, reader: readers.Reader, job: Job) -> Order:
    orders: dict[str, Callable[[], Order]] = {
        "global": lambda: Shuffled(len(reader), 5),
        "stored": lambda: Sequential(len(reader), 5),
        "block": lambda: block_shuffled(reader, 5, BLOCK_BYTES, WINDOW),
        "node-local": lambda: NodeLocal(len(reader), job.nodes, EXCHANGE, 5),
        "staged-first": lambda: StagedFirst(
            readers.order.staged_first(reader.split_info).starts, window=SHUFFLES.shards, seed=5
        ),
    }
    return orders[name]()


def open_node(
    name: str, source: Path, order: Any, cache: float, node: int, job: Job, place: dict[str, Any], disks: Path
) -> tuple[ExitStack, list[readers.Reader]]:
    """The readers of a node's ranks, and what closes them. disks: where each node has a directory."""
    stack = ExitStack()
    if name == "staged-first" and cache:
        staging = readers.stage(
            source, disks / str(node), splits=("train",), background=True, order=order, fraction=cache
        )
        local = stack.enter_context(staging)
        opened = [readers.open(local, "train", fallback=source, patience_seconds=FOREVER) for _ in range(job.ranks)]
    else:
        opened = [readers.open(source, "train") for _ in range(job.ranks)]
        if cache and name != "staged-first":
            where = {**place, "job": f"{place['job']}-{node}"}
            part = (node, job.nodes) if name == "node-local" else None
            share = min(1.0, cache * job.nodes) if part else cache
            opened = [readers.cached(reader, share, partition=part, **where) for reader in opened]
    for reader in opened:
        stack.enter_context(reader)
    return stack, opened


def run_for_real(
    name: str, cache: float, job: Job, source: Path, counted: Counted, place: dict[str, Any], disks: Path
) -> Iterator[dict[tuple[int, int], list[int]]]:
    """The reads of each epoch."""
    with ExitStack() as stack, readers.open(source, "train") as plain:
        order = order_of(name, plain, job)
        ranks: list[Feed] = []
        for node in range(job.nodes):
            context, opened = open_node(name, source, order, cache, node, job, place, disks)
            stack.enter_context(context)
            for reader in opened:
                options = FeedOptions(rank=len(ranks), world_size=job.world_size, tail=job.tail)
                ranks.append(Feed(reader, order, job.batch_size, options))
        for epoch in range(job.epochs):
            counted.reads = {}
            for step in range(ranks[0].steps(epoch)):
                for rank, feed in enumerate(ranks):
                    counted.at = (rank // job.ranks, step)
                    _, rows = feed.rows(epoch, step)
                    feed.read(rows)
            yield counted.reads


CASES = [
    *((name, cache, Job(2, 2, 3, epochs=4)) for name in ORDERS for cache in (0.0, 0.3, 1.0)),
    *((name, 0.5, Job(3, 1, 5, epochs=3, tail="exact")) for name in ORDERS),
    ("node-local", 0.2, Job(5, 1, 2, epochs=4)),
    ("global", 0.7, Job(1, 1, 7, epochs=2, tail="exact")),
]


@pytest.mark.parametrize(("name", "cache", "job"), CASES, ids=str)
def test_bytes_and_requests_are_those_of_real_readers(
    name: str, cache: float, job: Job, source: Path, counted: Counted, place: dict[str, Any], tmp_path: Path
) -> None:
    shuffles = Shuffles((name,), BLOCK_BYTES, WINDOW, EXCHANGE, shards=SHUFFLES.shards, seed=5)
    (row,) = simulate(source, job, split="train", caches=[cache], shuffles=shuffles).rows
    nodes = np.zeros(job.nodes, np.int64)
    for epoch, reads in zip(row.epochs, run_for_real(name, cache, job, source, counted, place, tmp_path), strict=True):
        total = np.array(list(reads.values()) or [[0, 0]]).sum(axis=0)
        assert (epoch.source - epoch.copied, epoch.requests) == tuple(total), f"epoch {epoch.epoch}"
        steps = [sum(n for (_, at), (n, _) in reads.items() if at == step) for step in range(36)]
        assert epoch.steps.most == max(steps)
        if epoch.epoch == 0:
            first = row.step_source["first"]
            assert list(first) == steps[: len(first)] and not any(steps[len(first) :])
        for (node, _), (size, _) in reads.items():
            nodes[node] += size
    copied = row.first.copied // job.nodes
    assert row.node_source == tuple((nodes + copied).tolist())
    copies = [file.stat().st_size for file in (tmp_path / "0").rglob("train*.tar")]
    assert copied == sum(copies) and bool(copies) == (name == "staged-first" and cache > 0)


# --- parts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_requests_are_those_that_one_batch_at_a_time_would_be_planned(seed: int) -> None:
    """Neighbours near and far, payloads that overlap and repeat, and runs longer than a request may be."""
    random = np.random.default_rng(seed)
    gaps = random.choice([0, 512, 16 << 10, (16 << 10) + 1, 1 << 20], 4000)
    length = random.choice([0, 100, 90_000, 5 << 20], 4000, p=(0.1, 0.4, 0.4, 0.1))
    offset = np.cumsum(gaps + length) - length - (seed % 2) * random.integers(0, 200_000, 4000)
    offset = np.maximum(offset, 0)
    batch = np.sort(random.integers(0, 7, 900))
    sample = random.integers(0, 4000, 900) if seed < 4 else np.sort(random.integers(0, 400, 900))
    order = np.lexsort((offset[sample], batch))
    some = Samples(batch, sample[order], 0 * batch, offset[sample][order], length[sample][order])
    found = merge(some)
    for number in range(7):
        mine = sample[batch == number]
        plan = plan_reads(np.zeros(len(mine), np.int64), offset[mine], length[mine])
        chosen = found.batch == number
        np.testing.assert_array_equal(found.address[chosen], plan.run_offset)
        np.testing.assert_array_equal(found.bytes[chosen], plan.run_length)


def test_some_nodes_stand_for_all_within_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planned_set(40_000, 5000, 10)
    job = Job(50, 2, 4, epochs=4)
    shuffles = Shuffles(("global", "node-local"), exchange_every=3)
    whole = simulate(planned, job, caches=[0.5], shuffles=shuffles)
    monkeypatch.setattr("readers.simulation.run._MOST_READS", 1 << 13)
    part = simulate(planned, job, caches=[0.5], shuffles=shuffles)
    assert whole.is_exact and not part.is_exact and part.nodes_simulated == 10
    for all_nodes, some_nodes in zip(whole.rows, part.rows, strict=True):
        for exact, estimate in zip(all_nodes.epochs, some_nodes.epochs, strict=True):
            assert exact.error == 0
            assert abs(estimate.source - exact.source) <= max(2 * estimate.error, 0.02 * exact.source)
    assert any("10 of 50 nodes" in note for note in part.notes)
