"""The test suite of engines. Checks run in the process of the executor: that of the test, or rank 0 of MPI.

A subclass defines how a check is run (the fixture `run`). Tasks are functions of this module, which workers import.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

import packer
from cache.errors import OutputError, SourceError, WorkerError
from cache.messages import Counter, Silent
from packer import ConvertResult
from packer.sources.folder import FolderReader, FolderSource
from packer.testing.samples import files_of
from packer.workers import Workers, run_shards

__all__ = [
    "CHECKS",
    "DEADLINE",
    "EngineSuite",
    "Run",
    "Slow",
    "Twice",
    "Unsendable",
    "check_on_rank_0",
    "converted",
    "data_of",
    "die_once",
    "double",
    "parts",
    "run_here",
    "wait_for",
]

DEADLINE = 300.0
Run = Callable[[str, Path, Path], None]


class Sizes(Silent):
    """Records the totals and the final progress of a run."""

    def begin(self, samples: int, total_bytes: int, done: Any, *, waiting: bool = False) -> None:
        self.total, self._done = (samples, total_bytes), done

    def end(self) -> None:
        self.done = self._done()


class Twice(Executor):
    """Runs each call twice concurrently and waits for both, as an engine may do that considers a worker lost."""

    def __init__(self, engine: Executor) -> None:
        self._engine = engine

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        calls = [self._engine.submit(fn, *args, **kwargs) for _ in range(2)]
        both: Future[Any] = Future()
        lock, running = threading.Lock(), list(calls)

        def ended(call: Future[Any]) -> None:
            with lock:
                running.remove(call)
                if running:
                    return
            if both.set_running_or_notify_cancel():
                both.set_result(call.result())

        for call in calls:
            call.add_done_callback(ended)
        return both


def parts(out: Path) -> int:
    """The number of completed shards of an unfinished conversion."""
    try:
        return sum(name.endswith(".part") for name in os.listdir(out / ".packing"))
    except FileNotFoundError:
        return 0


def wait_for(condition: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE} s for {why}"
        time.sleep(0.005)


# --- tasks ----------------------------------------------------------------------------------------------------------
def double(number: int, counter: Counter) -> int:
    counter.report(1, number)
    return 2 * number


def fail_at_3(number: int, counter: Counter) -> int:
    """A task that fails for 3, and otherwise waits until it is stopped."""
    if number == 3:
        raise OutputError(f"no place for {number}")
    end = time.monotonic() + DEADLINE
    while not counter.stopped():
        assert time.monotonic() < end, "this task is not stopped"
        time.sleep(0.01)
    return number


class NoCopies(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not for others")


def fail_alone(number: int, counter: Counter) -> int:
    raise NoCopies(f"alone with {number}")


def fail_unexpectedly(number: int, counter: Counter) -> int:
    return number // 0


class SlowReader(FolderReader):
    def read(self, place: Any, arena: Any) -> Any:
        time.sleep(0.01)
        return super().read(place, arena)


class Slow(FolderSource):
    """A source whose reads are slow."""

    def open(self) -> SlowReader:
        return SlowReader(str(self.root))


class Unsendable(FolderSource):
    def __reduce__(self) -> str:
        raise TypeError("not for others")


def die_once(marker: Path, counter: Counter) -> int:
    """A task that kills the first worker to run it."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def data_of(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a set, by name, without those that contain the name of its source, or dates."""
    return {name: data for name, data in files.items() if name not in ("dataset.json", "README.md", "SHA256SUMS")}


# --- checks ---------------------------------------------------------------------------------------------------------
def converted(engine: Executor | None, tree: Path, out: Path, to: str = "tar") -> ConvertResult:
    return packer.convert(
        tree, to, out, shards=packer.Shards(samples=4), run=packer.Run(workers=None if engine else 1, engine=engine)
    )


def check_results_come_in_the_order_of_the_tasks(engine: Executor, tree: Path, folder: Path) -> None:
    sizes, count = Sizes(), 40
    results = run_shards(double, range(count), count, Workers(engine=engine), sizes, (count, 780), folder=folder)
    assert results == [2 * number for number in range(count)]
    assert sizes.total == (count, 780) and sizes.done == (count, 780, 0)
    assert list(folder.iterdir()) == [], "files about progress are left"


def check_no_task_no_call(engine: Executor, tree: Path, folder: Path) -> None:
    assert run_shards(double, [], 0, Workers(engine=engine), Silent(), (0, 0)) == []


def check_the_first_error_stops_the_others(engine: Executor, tree: Path, folder: Path) -> None:
    with pytest.raises(OutputError, match=r"^no place for 3$"):
        run_shards(fail_at_3, [3, 1, 2], 3, Workers(engine=engine), Silent(), (0, 0), folder=folder)
    assert list(folder.iterdir()) == []


def check_errors_that_cannot_be_sent(engine: Executor, tree: Path, folder: Path) -> None:
    with pytest.raises(WorkerError, match=r"NoCopies: alone with 5"):
        run_shards(fail_alone, [5], 1, Workers(engine=engine), Silent(), (0, 0), folder=folder)
    with pytest.raises(ZeroDivisionError) as caught:
        run_shards(fail_unexpectedly, [5], 1, Workers(engine=engine), Silent(), (0, 0), folder=folder)
    assert "fail_unexpectedly" in str(caught.value.__cause__), "the traceback in the worker is lost"


def check_a_source_that_cannot_be_sent(engine: Executor, tree: Path, folder: Path) -> None:
    with pytest.raises(SourceError, match="cannot be sent to workers: not for others"):
        packer.convert(Unsendable(tree), "tar", folder / "out", run=packer.Run(engine=engine))


def check_a_set_is_the_same(engine: Executor, tree: Path, folder: Path) -> None:
    """All commands that run shards write the same bytes with the engine as without, and these verify."""
    sets = {"a": folder / "local", "b": folder / "engine"}
    with_engine: dict[str, dict[str, Any]] = {"a": {"workers": 1}, "b": {"engine": engine}}
    for name, out in sets.items():
        packer.convert(tree, "hdf5", out, shards=packer.Shards(samples=9), run=packer.Run(**with_engine[name]))
    assert files_of(sets["a"]) == files_of(sets["b"])
    assert packer.verify(sets["b"], deep=True, engine=engine).ok
    groups = []
    for name, options in with_engine.items():
        packer.reshard(
            sets["b"],
            folder / f"{name}-resharded",
            to="tfrecord",
            shards=packer.Shards(shuffle=1),
            run=packer.Run(**options),
        )
        packer.index(sorted(sets["b"].glob("*.h5")), folder / f"{name}-index", **options)
        packer.extract(sets["b"], folder / f"{name}-tree", **options)
        groups.append(packer.dedup(sets["b"], near=6, dry_run=True, **options).groups)
    assert groups[0] == groups[1]
    for made in ("resharded", "index", "tree"):
        contents = [files_of(folder / f"{name}-{made}") for name in with_engine]
        if made == "resharded":
            contents = [data_of(files) for files in contents]  # the history has dates
        assert contents[0] == contents[1]


def check_tasks_that_run_twice_at_the_same_time(engine: Executor, tree: Path, folder: Path) -> None:
    converted(None, tree, folder / "once", "hdf5")
    converted(Twice(engine), tree, folder / "twice", "hdf5")
    assert files_of(folder / "once") == files_of(folder / "twice")


CHECKS = {name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")}


def run_here(engine: Executor) -> Run:
    """The value of the fixture `run` for an engine opened by this process."""
    return lambda check, tree, folder: CHECKS[check](engine, tree, folder)


def check_on_rank_0(name: str, tree: Path, folder: Path) -> None:
    """Run all checks in an engine of this name, opened once, and print the traceback of each check that fails."""
    with packer.open_engine(name) as engine:
        if engine is None:
            return
        for check, function in CHECKS.items():
            (folder / check).mkdir()
            try:
                function(engine, tree, folder / check)
            except BaseException:
                print(f"FAILED {check}\n{traceback.format_exc()}")
    print("all checks have run")


class EngineSuite:
    """The tests of an engine: one for each check."""

    @pytest.fixture
    def run(self) -> Any:
        """A function run(name, tree, folder) that runs a check, and raises if the engine fails it."""
        raise NotImplementedError

    @pytest.mark.parametrize("check", CHECKS)
    def test_promise(self, check: str, run: Run, tree: Path, tmp_path: Path) -> None:
        run(check, tree, tmp_path)
