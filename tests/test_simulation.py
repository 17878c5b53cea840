"""A simulated job reads the same bytes as a real one: ranks in this process, counted at the system calls."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from suites.programs import run_packer

import readers
from cache.stores import Store, files
from cache.stores.copied import Neighbours, RowOwners
from cache.stores.ranges import plan_reads
from packer.cli.group import cli
from packer.tools.simulate import ORDERS, Job, Machine, Row, Samples, Shuffles, Simulation, merge, planned_set, simulate
from readers.feed import Feed, FeedOptions
from readers.order import NodeLocal, Order, Sequential, Shuffled, StagedFirst, block_shuffled

FOREVER = 1000.0  # seconds of patience: a wait that does not end by itself exceeds all limits of tests
BLOCK_BYTES, WINDOW, EXCHANGE = 3000, 3, 3
SHUFFLES = Shuffles(ORDERS, block_bytes=BLOCK_BYTES, window=WINDOW, exchange_every=EXCHANGE, shards=3, seed=5)


class Counted:
    """Reads of shards below `root` by the thread that created it, as (node, step): [bytes, requests]."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.thread, self.at = f"{root}/", threading.get_ident(), (0, 0)
        self.reads: dict[tuple[int, int], list[int]] = {}
        pread, preadv = os.pread, os.preadv
        monkeypatch.setattr(files, "pread", lambda fd, size, offset: self._note(fd, size) or pread(fd, size, offset))
        monkeypatch.setattr(
            files, "preadv", lambda fd, into, offset: self._note(fd, sum(map(len, into))) or preadv(fd, into, offset)
        )

    def _note(self, descriptor: int, size: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if threading.get_ident() == self.thread and path.startswith(self.root) and path.endswith(".tar"):
            count = self.reads.setdefault(self.at, [0, 0])
            count[0] += size
            count[1] += 1


@pytest.fixture
def counted(source: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Without the sample of each shard that a process reads to recognise the shard."""
    monkeypatch.setattr("readers.opening.packed.Recognised._is_right", lambda *arguments: True)
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
    """The readers of a node's ranks, and the stack that closes them. disks: the directory of each node."""
    stack, staged = ExitStack(), name == "staged-first" and cache and not job.peers
    if staged:
        options: dict[str, Any] = {"splits": ("train",), "background": True, "order": order, "fraction": cache}
        local = stack.enter_context(readers.stage(source, disks / str(node), **options))
        opened = [readers.open(local, "train", fallback=source, patience_seconds=FOREVER) for _ in range(job.ranks)]
    else:
        opened = [readers.open(source, "train") for _ in range(job.ranks)]
    if cache and not staged:
        where = {**place, "job": f"{place['job']}-{node}"}
        part = (node, job.nodes) if name == "node-local" or job.peers else None
        share = min(1.0, cache * job.nodes) if part else cache
        opened = [readers.cached(reader, share, partition=part, **where) for reader in opened]
    for reader in opened:
        stack.enter_context(reader)
    return stack, opened


class OneByOne(Store):
    """The server of a node: each payload is a separate range, like those of tar shards."""

    def __init__(self, source: Store) -> None:
        self.source = source

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Any:
        return self.source.read_one(row, shard, offset, length)


def share(node: int, job: Job, stores: list[Any], opened: list[readers.Reader]) -> list[readers.Reader]:
    """The readers of a node's ranks, over the caches of all nodes."""
    rows = RowOwners(np.array([*(NodeLocal(36, job.nodes).local_part(n).start for n in range(job.nodes)), 36]))
    stores[node] = OneByOne(opened[0].store)
    return [readers.Reader(r.table, Neighbours(r.store, node, rows, stores.__getitem__)) for r in opened]


def run_for_real(
    name: str, cache: float, job: Job, source: Path, counted: Counted, place: dict[str, Any], disks: Path
) -> Iterator[dict[tuple[int, int], list[int]]]:
    """The reads of each epoch."""
    with ExitStack() as stack, readers.open(source, "train") as plain:
        order = order_of(name, plain, job)
        ranks: list[Feed] = []
        stores: list[Any] = [None] * job.nodes
        for node in range(job.nodes):
            context, opened = open_node(name, source, order, cache, node, job, place, disks)
            stack.enter_context(context)
            for reader in share(node, job, stores, opened) if job.peers else opened:
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
    *((name, cache, Job(2, 2, 3, epochs=4)) for name in ORDERS for cache in (0.0, 0.3)),
    *((name, 0.5, Job(3, 1, 5, epochs=3, tail="exact")) for name in ORDERS),
    *((name, cache, Job(3, 2, 3, epochs=4, peers=True)) for name in ORDERS for cache in (0.2, 1.0)),
    ("staged-first", 1.0, Job(2, 2, 3, epochs=4)),
    ("node-local", 0.2, Job(5, 1, 2, epochs=4)),
]


@pytest.mark.parametrize(("name", "cache", "job"), CASES, ids=str)
def test_bytes_and_requests_equal_those_of_real_readers(
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
    if not job.peers:  # otherwise a read counts for the node that asked
        assert row.node_source == tuple((nodes + copied).tolist())
    copies = [file.stat().st_size for file in (tmp_path / "0").rglob("train*.tar")]
    assert copied == sum(copies) and bool(copies) == (name == "staged-first" and cache > 0 and not job.peers)


# --- parts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", (0, 1, 3, 5))
def test_merged_requests_equal_those_planned_batch_by_batch(seed: int) -> None:
    """Near and distant neighbours, payloads that overlap and repeat, and runs longer than a request may be."""
    random = np.random.default_rng(seed)
    gaps = random.choice([0, 512, 16 << 10, (16 << 10) + 1, 1 << 20], 4000)
    length = random.choice([0, 100, 90_000, 5 << 20], 4000, p=(0.1, 0.4, 0.4, 0.1))
    offset = np.cumsum(gaps + length) - length - (seed % 2) * random.integers(0, 200_000, 4000)
    offset = np.maximum(offset, 0)
    batch = np.sort(random.integers(0, 7, 900))
    sample = random.integers(0, 4000, 900) if seed < 4 else np.sort(random.integers(0, 400, 900))
    order = np.lexsort((offset[sample], batch))
    some = Samples(batch, sample[order], 0 * batch, offset[sample][order], length[sample][order])
    merged = merge(some)
    for number in range(7):
        in_batch = sample[batch == number]
        plan = plan_reads(np.zeros(len(in_batch), np.int64), offset[in_batch], length[in_batch])
        chosen = merged.batch == number
        np.testing.assert_array_equal(merged.address[chosen], plan.run_offset)
        np.testing.assert_array_equal(merged.bytes[chosen], plan.run_length)


def test_a_sample_of_nodes_estimates_all_within_the_interval() -> None:
    planned = planned_set(20_000, 5000, 10)
    job = Job(50, 2, 4, epochs=3)
    shuffles = Shuffles(("global", "node-local"), exchange_every=3)
    whole = simulate(planned, job, caches=[0.5], shuffles=shuffles)
    part = simulate(planned, replace(job, most_reads=4000), caches=[0.5], shuffles=shuffles)
    assert whole.is_exact and not part.is_exact and part.nodes_simulated == 10
    for all_nodes, some_nodes in zip(whole.rows, part.rows, strict=True):
        for exact, estimate in zip(all_nodes.epochs, some_nodes.epochs, strict=True):
            assert exact.error == 0
            assert abs(estimate.source - exact.source) <= max(2 * estimate.error, 0.02 * exact.source)
    assert any("10 of 50 nodes" in note for note in part.notes)


def small(**options: Any) -> Simulation:
    job = {"nodes": 4, "ranks": 2, "batch_size": 5, "epochs": 4, **options}
    return simulate(planned_set(4000, 20_000, 16), Job(**job), caches=[0.0, 0.5], shuffles=Shuffles(exchange_every=3))


def row_of(simulation: Simulation, order: str, cache: str) -> Row:
    return next(row for row in simulation.rows if (row.order, row.cache) == (order, cache))


def test_neighbours_leave_the_source_one_copy_of_the_set() -> None:
    """Under every order, a kept sample is read once, by the node whose part it belongs to."""
    alone, shared = small(tail="exact"), small(tail="exact", peers=True)
    for order in ("global", "block", "node-local", "staged-first"):
        row = row_of(shared, order, "50 %")
        assert row.first.requested >= shared.payload_bytes == row.first.payload
        assert [epoch.source for epoch in row.later] == [0, 0, 0]
        assert all(epoch.local + epoch.peers == shared.payload_bytes for epoch in row.later)
    assert row_of(alone, "global", "50 %").later[-1].source > 0.5 * shared.payload_bytes
    exchange = row_of(alone, "node-local", "50 %").epochs[2]
    assert exchange.source > 0.7 * shared.payload_bytes > 0 == row_of(alone, "node-local", "50 %").epochs[1].source


def test_the_limit_is_the_scarce_resource() -> None:
    """The same traffic on machines that lack one resource each."""
    planned, job = planned_set(4000, 20_000, 16), Job(4, 2, 5, step_seconds=0.01, epochs=1)
    rich = {"filesystem": 1e12, "node": 1e12, "disk": 1e12, "latency_seconds": 0.0}
    poor: dict[str, dict[str, Any]] = {
        "GPU": {},
        "filesystem": {"filesystem": 1e6},
        "network": {"node": 1e6},
        "latency": {"latency_seconds": 1.0},
        "requests": {"filesystem_requests": 100.0},
    }
    for binds, less in poor.items():
        simulation = simulate(
            planned, job, caches=[0.0], shuffles=Shuffles(("global",)), machine=Machine(**{**rich, **less})
        )
        epoch = simulation.rows[0].first
        assert epoch.binds == binds
        assert (epoch.seconds >= simulation.steps * job.step_seconds) and (binds == "GPU") == (epoch.waited < 0.01)
    bytes_each = simulation.rows[0].first.source
    slow = simulate(planned, job, caches=[0.0], shuffles=Shuffles(("global",)), machine=Machine(filesystem=1e6))
    assert slow.rows[0].first.seconds == pytest.approx(bytes_each / 1e6, rel=0.02)


def test_an_epoch_may_be_simulated_in_parts() -> None:
    whole, parts = small(tail="exact"), small(tail="exact", most_reads=1000)
    assert parts.is_exact and parts.rows == whole.rows


def test_prefetching_evens_out_single_steps() -> None:
    """A filesystem whose rate suffices for the average step, but not for every step."""
    planned, stored = planned_set(4000, 20_000, 16), Shuffles(("stored",))
    job = Job(4, 2, 5, step_seconds=0.01, epochs=2)
    mean = simulate(planned, job, caches=[0.5], shuffles=stored).rows[0].epochs[-1].steps.mean
    machine, seconds = Machine(filesystem=mean / job.step_seconds, latency_seconds=0.0), []
    for prefetch in (1, 2, 20):
        simulation = simulate(planned, replace(job, prefetch=prefetch), caches=[0.5], shuffles=stored, machine=machine)
        seconds.append(simulation.rows[0].epochs[-1].seconds)
    assert seconds[0] > seconds[1] > seconds[2] >= simulation.steps * job.step_seconds


def test_staging_ends_with_the_last_copy() -> None:
    planned = planned_set(4000, 20_000, 16)
    machine = Machine(filesystem=4e6, node=2e6, disk=5e6)
    job = Job(4, 2, 5, step_seconds=0.001, epochs=2)
    (row,) = simulate(planned, job, caches=[1.0], shuffles=Shuffles(("staged-first",)), machine=machine).rows
    whole = int(planned.shard_bytes.sum())
    assert row.first.source == row.first.copied == 4 * whole and row.memory.disk == whole
    assert row.staged_after == pytest.approx(whole / 1e6), "a quarter of the filesystem is not the least of the three"
    assert row.first.binds == "staging" and row.staged_after * 0.9 < row.first.seconds < row.staged_after * 1.1
    assert 0 < row.first.first_step < row.staged_after / 8, "not one shard of sixteen"
    assert row.epochs[1].source == 0 and row.epochs[1].first_step < 0.1


def test_the_result_has_plain_values(source: Path) -> None:
    simulation = simulate(source, Job(2, 2, 3, epochs=2), split="train", caches=[0.0, "50%", 6000])
    again = json.loads(json.dumps(simulation.to_dict()))
    assert again["is_exact"] and again["machine"]["filesystem_requests"] is None and len(again["rows"]) == 12
    assert [row["cache"] for row in again["rows"][:3]] == ["0 %", "50 %", "6 kB"]
    assert again["rows"][0]["source"] == sum(epoch["source"] for epoch in again["rows"][0]["epochs"])
    with readers.open(source, "train") as reader:
        assert simulate(reader, Job(2, 2, 3, epochs=2), caches=[0.0, "50%", 6000]) == simulation


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Job(nodes=0), "nodes is 0"),
        (lambda: Job(step_seconds=0.0), "step_seconds is 0"),
        (lambda: Job(tail="pad"), "expected drop_last or exact"),
        (lambda: Machine(filesystem=0.0), "filesystem is 0"),
        (lambda: Shuffles(("random",)), "orders must be some of global, block"),
        (lambda: Shuffles(window=0), "window is 0"),
        (lambda: planned_set(10, 100, 11), "shards=11"),
        (lambda: simulate(planned_set(10, 100, 1), Job(nodes=4)), "no step of 4 ranks with 64 each"),
        (lambda: simulate(planned_set(100, 100, 1), Job(), caches=[1.5]), "from 0 to 1, not 1.5"),
        (lambda: simulate(planned_set(100, 100, 1), Job(), caches=[]), "at least one"),
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_folders_have_no_shards_to_stage(tree: Path) -> None:
    with readers.open_folder(tree / "train") as reader:
        simulation = simulate(reader, Job(2, 1, 3, epochs=2), caches=[0.5])
        assert [row.order for row in simulation.rows] == ["global", "block", "node-local"]
        assert any("staged-first was left out" in note for note in simulation.notes)
        with pytest.raises(ValueError, match="no list of shards"):
            simulate(reader, Job(), shuffles=Shuffles(("staged-first",)))


# --- the command ----------------------------------------------------------------------------------------------------
def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


def test_the_command_shows_a_row_for_each_order_and_cache(source: Path) -> None:
    job = ("--split", "train", "--nodes", 2, "--ranks", 2, "--batch-size", 3, "--epochs", 3)
    done = command(source, *job, "--cache", "0", "--cache", "50%", "--orders", "global,staged-first")
    assert done.exit_code == 0, done.output
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("global", "staged-first"))]
    assert rows == 2 * [["global", "0"], ["global", "50"], ["staged-first", "0"], ["staged-first", "50"]]
    assert "nothing" in done.stdout


def test_a_set_that_is_only_planned() -> None:
    planned = ("--samples", 3000, "--mean-bytes", "9kB", "--shards", 7, "--nodes", 3, "--epochs", 2)
    done = command(*planned, "--orders", "global,stored", "--cache", "1MB", "--peers", "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 0 and not done.stderr and result["is_planned"] and result["shards"] == 7
    assert [row["order"] for row in result["rows"]] == ["global", "stored"] and result["job"]["peers"]
    assert result["payload_bytes"] == 27_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name a SET, or describe one"),
        ("--samples 100 --nodes 9", "take fewer ranks, a smaller batch_size, or --tail exact"),
        ("--samples 1000 --cache 3", "a share above 1"),
        ("--samples 1000 --orders random", "orders must be some of"),
        ("{set} --samples 3", "leave out SET"),
        ("{set} --split none", "none"),
        ("nowhere", "does not exist"),
    ],
)
def test_options_that_the_command_refuses(arguments: str, message: str, source: Path) -> None:
    done = run_packer("simulate", *arguments.format(set=source).split())
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
