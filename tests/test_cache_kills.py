"""Processes that fill one cache over a folder, killed and stopped at random moments: no wrong byte, no process blocked,
nothing left. TRIALS (default 200) is the number of kills, SEED makes a run repeatable. Run by `make test-faults`."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg

import cache
import readers

pytestmark = pytest.mark.faults

TRIALS = int(os.environ.get("TRIALS", "200"))
SEED = int(os.environ.get("SEED", "0"))
PROCESSES, SAMPLES, DEADLINE = 4, 60, 300.0
WRONG, FAILED = 9, 8


def use(folder: Path, memory: Path, keep: str, expected: list[bytes], seed: int) -> None:
    """Opens the cache, fills and reads, again and again; ends with WRONG when it sees a wrong byte."""
    draw = random.Random(seed)
    warnings.simplefilter("ignore")
    try:
        while True:
            base = readers.open_folder(folder)
            with readers.cached(
                base, keep=keep, directory=memory, job="kills", check=draw.choice(["never", "always"])
            ) as reader:
                if draw.random() < 0.3:
                    reader.prefill(threads=2)
                for _ in range(draw.randrange(60)):
                    some = draw.sample(range(SAMPLES), draw.randrange(1, 9))
                    if [bytes(data) for data in reader.read_many(some)] != [expected[i] for i in some]:
                        os._exit(WRONG)
    except BaseException:
        os._exit(FAILED)


def end(process: Any, how: str, draw: random.Random) -> None:
    """Kill it; or stop it for a moment before, while the others continue."""
    if how == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(draw.random() * 0.05)
    process.kill()
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL, f"status {process.exitcode}: {WRONG} is a wrong byte, {FAILED} an error"


@pytest.mark.parametrize("keep", ["encoded", "decoded:16"])
def test_fillers_killed_at_any_moment(
    tmp_path: Path, keep: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cache.shared.file.STANDSTILL_SECONDS", 0.5)
    folder, memory = tmp_path / "folder", tmp_path / "memory"
    folder.mkdir()
    memory.mkdir()
    for number in range(SAMPLES):
        (folder / f"{number:03d}.jpg").write_bytes(make_jpeg(number, (96, 64)))
    with readers.open_folder(folder) as base:
        form = readers.cached(base, 0, keep)
        expected = [bytes(data) for data in form.read_many(range(SAMPLES))]
    draw, context = random.Random(f"{SEED} {keep}"), multiprocessing.get_context("fork")
    counts = {"killed": 0, "stopped": 0}
    crew: list[Any] = []
    started = 0
    while sum(counts.values()) < TRIALS:
        while len(crew) < PROCESSES:
            started += 1
            crew.append(context.Process(target=use, args=(folder, memory, keep, expected, started)))
            crew[-1].start()
        time.sleep(draw.random() * 0.1)
        for process in draw.sample(crew, draw.choice([1, 1, 1, PROCESSES])):
            how = draw.choice(["killed", "killed", "killed", "stopped"])
            end(process, how, draw)
            counts[how] += 1
            crew.remove(process)
    for process in crew:
        end(process, "killed", draw)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            readers.open_folder(folder) as base,
            readers.cached(base, keep=keep, directory=memory, job="kills") as reader,
        ):
            assert [bytes(data) for data in reader.read_many(range(SAMPLES))] == expected
            assert reader.stats().present == SAMPLES, "a slot that can no longer be filled"
    assert time.monotonic() - began < DEADLINE
    cache.clean_caches(memory)
    assert os.listdir(memory) == [], "left behind"
    with capsys.disabled():
        print(f"\ncache over a folder, {keep}: {sum(counts.values())} trials: {counts}, {started} processes")
