"""Neighbours: epochs of N nodes, each a process with its own directories, over one slow source that counts bytes.

    python benchmarks/neighbours.py --set DIR --work DIR [--nodes 2,4] [--bandwidth 50] [--latency 5] [--rounds 3] …

The source is one link for all nodes (`slow_source.SlowStore`). A node reads its share of each epoch in batches of 64,
announces the next two, and decodes nothing. Nodes begin each epoch together; an epoch lasts until the slowest node has
ended it. The time before the first epoch includes opening, staging at the pace of the link, and starting servers. In
the node-local order every second epoch exchanges samples between nodes; the others read local files only. "source /
set" is the bytes that all nodes together read from the source, divided by the bytes of the payloads or the shards.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, contender, main, slug
from machine import warm
from report import Claim, Column
from slow_source import SlowStore

__all__ = ["Node", "measure", "run_node"]

_BATCH, _AHEAD, _SEED, _EPOCHS = 64, 2, 1, 3


@dataclass(frozen=True)
class Node:
    """The arguments of a node's reader. place: the node's directory. shared: a directory of all nodes."""

    made: Path
    number: int
    nodes: int
    place: Path
    shared: Path
    bandwidth: float
    latency: float
    exchange: int

    def source(self, path: Path | None = None) -> Any:
        """The set behind the slow link."""
        import readers

        plain = readers.open(path or self.made, "train")
        return readers.Reader(plain.table, self.slow(plain.store))

    def slow(self, store: Any) -> SlowStore:
        return SlowStore(store, self.shared / "link", self.bandwidth, self.latency)

    def cached(self, stack: ExitStack) -> Any:
        import readers

        part = (self.number, self.nodes)
        return stack.enter_context(readers.cached(self.source(), 1.0, partition=part, directory=self.place))

    def staged(self, stack: ExitStack) -> tuple[Any, int]:
        """The reader over the copy of this node's part, and the bytes that were copied."""
        import readers
        from cache.stores.copied import Copied

        part, pace = (self.number, self.nodes), self.bandwidth / self.nodes
        staging = readers.stage(
            self.made,
            self.place,
            splits=("train",),
            part=part,
            overlap=False,
            bytes_per_second=pace,
            any_filesystem=True,
        )
        opened = readers.open(stack.enter_context(staging), "train", fallback=self.made)
        reader = readers.Reader(opened.table, Copied(opened.store.copy, self.slow(opened.store.source)))
        return reader, staging.counts.copied_bytes

    def share(self, stack: ExitStack, reader: Any) -> Any:
        import readers

        return stack.enter_context(
            readers.share(reader, self.shared / "job", node=self.number, nodes=self.nodes, host="127.0.0.1")
        )


def run_node(node: Node, kind: str, barrier: Any, results: Any) -> None:
    """A node's process; puts (number, copied bytes, seconds before the first epoch and of each epoch, CPU seconds)."""
    from readers.order import NodeLocal, Shuffled
    from readers.order.schedule import make_schedule

    seconds: list[float] = []
    with ExitStack() as stack:
        barrier.wait()
        started, copied = time.perf_counter(), 0
        if "staged" in kind:
            reader, copied = node.staged(stack)
        else:
            reader = node.cached(stack) if "cached" in kind else node.source()
        if "shared" in kind:
            reader = node.share(stack, reader)
        seconds.append(time.perf_counter() - started)
        barrier.wait()
        started, samples = time.perf_counter(), len(reader)
        order: Any = (
            NodeLocal(samples, node.nodes, node.exchange, _SEED) if "staged" in kind else Shuffled(samples, _SEED)
        )
        for epoch in range(_EPOCHS):
            schedule = make_schedule(order, epoch, _BATCH, node.number, node.nodes, "exact")
            steps = [order.indices(epoch, schedule.positions(step)) for step in range(schedule.steps())]
            for step, rows in enumerate(steps):
                for ahead in steps[1 : _AHEAD + 1] if step == 0 else steps[step + _AHEAD : step + _AHEAD + 1]:
                    reader.prefetch(ahead)
                reader.read_many(rows)
            seconds.append(time.perf_counter() - started)
            barrier.wait()  # all nodes have read the epoch, and the main process counts the bytes
            barrier.wait()
            started = time.perf_counter()
        results.put((node.number, copied, seconds, time.process_time()))
        barrier.wait()


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each epoch, and its bytes from the source relative to the set."""
    import readers

    nodes, kind = chosen.options["nodes"], chosen.options["kind"]
    work = Path(arguments.work) / f"neighbours-benchmark-{slug(chosen.name)}"
    shutil.rmtree(work, ignore_errors=True)
    (work / "shared").mkdir(parents=True)
    link = work / "shared" / "link"
    with readers.open(arguments.set, "train") as plain:
        payloads, shards = int(plain.sizes().sum()), sum(shard.bytes for shard in plain.split_info.shards)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(nodes + 1, timeout=arguments.timeout), context.Queue()
    before, started = SlowStore.moved_bytes(link), []
    for number in range(nodes):
        (work / str(number)).mkdir()
        node = Node(arguments.set, number, nodes, work / str(number), link.parent, arguments.bandwidth * 1e6,
                    arguments.latency / 1e3, arguments.exchange)  # fmt: skip
        started.append(context.Process(target=run_node, args=(node, kind, barrier, results)))
        started[-1].start()
    barrier.wait()
    barrier.wait()
    moved = []
    for _ in range(_EPOCHS):
        barrier.wait()
        now = SlowStore.moved_bytes(link)
        moved.append((now - before) / payloads)
        before = now
        barrier.wait()
    reports = [results.get(timeout=60) for _ in started]
    barrier.wait()
    for process in started:
        process.join()
    shutil.rmtree(work)
    copied = sum(report[1] for report in reports)
    # Every node copies the index files, which do not count as bytes of shards.
    moved[0] += max(0, copied - nodes * _index_bytes(arguments.set)) / shards
    before_s, *slowest = [max(report[2][part] for report in reports) for part in range(1 + _EPOCHS)]
    return {
        "before_s": before_s,
        **{f"epoch{epoch}_s": seconds for epoch, seconds in enumerate(slowest)},
        **{f"epoch{epoch}_moved": share for epoch, share in enumerate(moved)},
        "all_s": before_s + sum(slowest),
        "moved": sum(moved),
        "cpu_ms_sample": 1e3 * sum(report[3] for report in reports) / (_EPOCHS * len(plain)),
    }


def _index_bytes(made: Path) -> int:
    import readers

    with readers.open(made, "train") as plain:
        index = made / plain.split_info.index
    return sum(file.stat().st_size for file in index.iterdir()) + (made / "dataset.json").stat().st_size


_KINDS = {
    "source, global shuffle": "source",
    "caches of 1/N, global shuffle": "cached",
    "ours: caches of 1/N, shared, global shuffle": "cached shared",
    "staged 1/N, node-local order": "staged",
    "ours: staged 1/N, shared, node-local order": "staged shared",
}


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    counts = [int(text) for text in arguments.nodes.split(",")]
    for nodes in counts:
        for name, kind in _KINDS.items():
            contender(f"{name}, {nodes} nodes", nodes=nodes, kind=kind)(run_node)
    shared = [f"{name}, {nodes} nodes" for nodes in counts for name in _KINDS if "shared" in name]
    return Benchmark(
        title="Epochs of nodes that read from each other",
        columns=(
            Column("before_s", "before, s", "{:.2f}"),
            *(Column(f"epoch{epoch}_s", f"epoch {epoch + 1}, s", "{:.2f}") for epoch in range(_EPOCHS)),
            *(Column(f"epoch{epoch}_moved", f"source / set, epoch {epoch + 1}", "{:.2f}") for epoch in range(_EPOCHS)),
            Column("all_s", "all, s", "{:.2f}"),
            Column("moved", "source / set", "{:.3f}"),
            Column("cpu_ms_sample", "CPU ms a sample", "{:.2f}"),
        ),
        key="all_s",
        limits=tuple(("all_s", f"source, global shuffle, {nodes} nodes") for nodes in counts),
        measure=measure,
        before=lambda chosen, arguments: warm([arguments.set]),
        claims=tuple(Claim(name, "moved", at_most=1.0005) for name in shared),
        less_is_better=True,
    )


if __name__ == "__main__":
    main(
        _benchmark,
        __doc__,
        set="a packed set on this machine",
        work="folder for copies, caches and the nodes' shared directory",
        nodes=("2,4", "numbers of nodes"),
        bandwidth=(50.0, "MB/s of the source, for all nodes together"),
        latency=(5.0, "milliseconds per request to the source"),
        exchange=(2, "epochs between two exchanges of the node-local order"),
    )
