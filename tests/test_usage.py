"""The sampler: marks, gauges, probes that fail, memory that does not grow, percentiles by time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from suites.staging import wait_for
from usage_doubles import MEMINFO, FakeMachine, sampler

import packer
import readers
from packer.tools.monitor import load
from packer.tools.monitor.record import Buffer
from readers import Threads
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader


def test_a_training_marks_counts_and_gauges(machine: FakeMachine) -> None:
    found, queue = sampler(machine), iter([1.0, "broken", 3.0])
    found.gauge("queue", lambda: next(queue), 4)  # type: ignore[arg-type,return-value]
    for epoch in range(4):
        found.mark(f"epoch {epoch}")
        for _ in range(5):
            found.step(images=32)
        machine.pass_time(2.0)
        found.sample()
    usage = found.stop()
    assert usage.column("queue").tolist()[::2] == [1, 3] and np.isnan(usage.column("queue")[[1, 3]]).all()
    assert usage.column("steps").tolist()[1:] == [2.5] * 3 and usage.column("images").tolist()[1:] == [80] * 3
    assert [(mark.name, mark.seconds) for mark in usage.marks] == [(f"epoch {n}", 2.0 * n) for n in range(4)]
    spans = usage.spans()
    assert [mark for mark, _ in spans] == list(usage.marks)
    assert [span.times.tolist() for _, span in spans] == [[2.0], [4.0], [6.0], [8.0]]


def test_a_probe_that_fails_is_noted_and_no_more(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write(meminfo=MEMINFO)
    found = sampler(machine)
    monkeypatch.setattr("psutil.virtual_memory", lambda: 1 // 0)
    for _ in range(3):
        machine.pass_time()
        found.sample()
    usage = found.stop()
    assert (
        "memory could not be read: ZeroDivisionError" in found.notes[-1]
        and found.notes.count(found.notes[-1]) == 1
        and len(usage.times) == 3
    )


def test_a_probe_that_hangs_keeps_no_one_waiting(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GPU that has fallen off the bus: marks are taken, and the end comes."""
    monkeypatch.setattr("packer.tools.monitor.sampler._PATIENCE_SECONDS", 0.05)
    found, hangs, go = sampler(machine), threading.Event(), threading.Event()
    machine.pass_time()
    found.sample()
    machine.pass_time()
    found.gauge("stuck", lambda: [hangs.set(), go.wait(300)][1])
    thread = threading.Thread(target=found.sample)
    thread.start()
    assert hangs.wait(300)
    found.mark("meanwhile")
    usage = found.stop()
    go.set()
    thread.join()
    assert len(usage.times) == len(found.usage().times) == 1 and [mark.name for mark in usage.marks] == ["meanwhile"]
    assert "did not end" in found.notes[0]


def test_the_queue_of_a_loader_can_be_watched(tree: Path) -> None:
    reader = readers.open_folder(tree, "train")
    loader = ImageLoader(reader, 2, augment=[Resize(8), CenterCrop(8)], threads=Threads(1, prefetch=2))
    assert loader.ready == 0
    batches = iter(loader)
    next(batches)
    wait_for(lambda: loader.ready == 2, "two batches")
    for _ in batches:
        pass
    assert loader.ready == 0


def test_a_forked_child_leaves_the_record_alone(machine: FakeMachine, tmp_path: Path) -> None:
    found = sampler(machine, tmp_path / "run.jsonl")
    machine.pass_time()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found.mark("child")
            machine.pass_time()
            found.sample()
            found.stop()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    found.mark("parent")
    found.stop()
    usage = load(tmp_path / "run.jsonl")
    assert [mark.name for mark in usage.marks] == ["parent"] and len(usage.times) == 1


@pytest.mark.parametrize(("rank", "nodes", "name"), [(0, 1, "run.jsonl"), (1, 1, None), (2, 2, "run.node1.jsonl")])
def test_each_node_has_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int, name: str | None
) -> None:
    given = {
        "RANK": rank,
        "WORLD_SIZE": 2 * nodes,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": rank // 2,
    }
    for variable, value in given.items():
        monkeypatch.setenv(variable, str(value))
    with packer.monitor(tmp_path / "run.jsonl") as usage:
        usage.mark("begin")
    assert [path.name for path in tmp_path.iterdir()] == ([name] if name else [])


# --- memory ----------------------------------------------------------------------------------------------------------
def test_a_long_run_takes_the_memory_of_a_short_one() -> None:
    """Rows are merged into means by time; nothing of the time is lost."""
    buffer, rows = Buffer(8), []
    for number in range(1000):
        rows.append(buffer.add(number + 1.0, 1.0, [number, *([7.0] if number > 500 else [])]))
    times, durations, values = buffer.arrays()
    assert len(times) <= 9 and times[-1] == 1000 and durations.sum() == 1000
    assert np.average(values[:, 0], weights=durations) == pytest.approx(np.arange(1000).mean())
    assert np.nanmin(values[:, 1]) == 7.0 and np.isnan(values[0, 1])
    assert len([row for row in rows if row]) < 8 * 9, "the file grows with the logarithm of the time"


def test_percentiles_count_time_and_not_samples(machine: FakeMachine) -> None:
    found = sampler(machine)
    found.gauge("queue", lambda: machine.now)
    for seconds in (1.0, 1.0, 8.0):
        machine.pass_time(seconds)
        found.sample()
    queue = found.stop().percentiles()["queue"]
    assert queue == (101, 110, 110, 110, 110, 110, pytest.approx(0.1 * (101 + 102) + 0.8 * 110))


def test_heat_rows_are_shares_of_the_limit(machine: FakeMachine) -> None:
    """Every second core of 256 is busy; eight share a row."""

    def write(seconds: int) -> None:
        ticks = (100 + 100 * seconds, 0)
        machine.write(
            stat="cpu 1 1 1 1\n"
            + "".join(f"cpu{n} {ticks[1 - n % 2]} 0 0 {ticks[n % 2]} 0 0 0 0 0 0\n" for n in range(256))
        )

    write(0)
    found = sampler(machine)
    for second in range(1, 5):
        machine.pass_time()
        write(second)
        found.gauge("queue", lambda second=second: float(second), 8)  # type: ignore[misc]
        found.sample()
    rows = {row.name: row for row in found.stop().summary(most_cores=32).heat_rows(columns=2)}
    assert len([name for name in rows if "–" in name]) == 32 and rows["cpu0–7 busy"].values == (0.5, 0.5)
    assert rows["queue"].values == (1.5 / 8, 3.5 / 8) and rows["queue"].full == 8
    assert list(rows)[-1] == "cpu248–255 busy"
