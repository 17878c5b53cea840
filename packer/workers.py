"""Run shard tasks: in processes of this machine, or by an engine (`packer.engines`).

Python's cyclic garbage collector is switched off, or runs rarely, where there are millions of small objects without
cycles: it would visit all of them each time their number has grown by a quarter, a twentieth of the time of packing
small files. Objects without cycles are freed as always.
"""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from cache.errors import SourceError, WorkerError
from cache.messages import Counter, Watcher, plural
from cache.node import usable_cpus
from packer.engines.board import Board
from packer.engines.call import Call, Outcome, run_call
from packer.engines.local import InlineExecutor, open_processes, run_task

__all__ = ["Workers", "run_shards", "without_gc"]

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_AHEAD = 16  # tasks that wait at an engine, besides those that run
_UNKNOWN_SLOTS = 256
_WIND_DOWN_SECONDS, _PATIENCE_SECONDS = 10.0, 1.0


@dataclass(frozen=True)
class Workers:
    """Who runs the tasks of a command.

    count: tasks at a time; None: with processes, the CPUs that this process may use; with an engine, what that has.
    engine: None for processes of this machine.
    """

    count: int | None = None
    engine: Executor | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"workers must be at least 1, not {self.count}")
        if not isinstance(self.engine, Executor | None):
            raise TypeError(f"engine is an Executor, as packer.open_engine gives, not {self.engine!r:.80}")

    def at_most(self, count: int | None) -> Workers:
        """The same, with at most so many tasks at a time."""
        return self if count is None else Workers(min(count, self.count or count), self.engine)


def run_shards(
    work: Callable[[T, Counter], R],
    tasks: Iterable[T],
    count: int,
    workers: Workers,
    watcher: Watcher,
    size: tuple[int, int],
    *,
    source: object = None,
    folder: Path | None = None,
) -> list[R]:
    """Run `work` on `count` tasks; results are in the order of the tasks.

    watcher: sees progress, of size: (samples, bytes).
    source: part of the tasks that the caller passed in, which may not pickle; then SourceError is raised.
    folder: of the output, seen by all workers, for files about progress; default the current one.

    A task that has a `title` is logged under it when it is done.

    A task is pickled shortly before a worker runs it. On the first error, or Ctrl-C, the other tasks are stopped and
    the error is raised; a worker that dies is a WorkerError, unless the engine replaces it.
    """
    if count == 0:
        return []
    if workers.engine is not None:
        with Board(folder or Path()) as board:
            try:
                watcher.begin(*size, board.totals)
                return _Run(workers, board, watcher).results(work, tasks, count)
            finally:
                watcher.end()
    executor, counters = open_processes(min(workers.count or usable_cpus(), count), count, watcher.note)
    inline = isinstance(executor, InlineExecutor)
    futures: list[Future[R]] = []
    titles: dict[Future[R], str] = {}
    _log.info(
        "%s for %s",
        "this process alone" if inline else plural(min(workers.count or usable_cpus(), count), "worker process"),
        plural(count, "task"),
    )
    try:
        if not inline:
            _check_sendable(source)
        if inline:  # the work happens in submit
            watcher.begin(*size, counters.totals)
        for number, task in enumerate(tasks):
            futures.append(executor.submit(run_task, work, task, number))
            titles[futures[-1]] = _title(task, number)
            if inline:
                futures[-1].result()
        if not inline:  # the display has a thread, which must not be there when workers are forked
            watcher.begin(*size, counters.totals)
        for finished, future in enumerate(as_completed(futures), 1):
            if future.exception() is not None:
                break
            _log.info("%s: done, %d of %d", titles[future], finished, count)
        for future in futures:
            if future.done() and not future.cancelled():
                future.result()  # raises the error of the first task that has one
        return [future.result() for future in futures]
    except BrokenExecutor as error:
        raise WorkerError(
            "a worker process died, perhaps because the system ran out of memory; run the same command again "
            "(fewer workers need less memory): what is whole is kept"
        ) from error
    finally:
        counters.stop()
        for future in futures:  # not by shutdown(cancel_futures=True): it loses tasks that cannot be pickled, and waits
            future.cancel()
        executor.shutdown(wait=True)
        watcher.end()


def _title(task: object, number: int) -> str:
    """The name of a task in the log: its title, if it has one."""
    return str(getattr(task, "title", f"part {number + 1}"))


def _check_sendable(source: object) -> None:
    """The feeding thread of a pool hangs over a task that cannot be pickled (cpython issue 94777)."""
    try:
        pickle.dumps(source, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs code of the source
        raise SourceError(f"the source cannot be sent to worker processes: {error}; use workers=1") from error


class _Run:
    """Tasks on their way through an engine, some of them at a time: what waits there takes its memory."""

    def __init__(self, workers: Workers, board: Board, watcher: Watcher) -> None:
        assert workers.engine is not None
        self._engine, self._most, self._board = workers.engine, workers.count, board
        self._waiting: dict[Future[bytes], int] = {}
        self._watcher, self._is_noted = watcher, False

    def results(self, work: Callable[..., Any], tasks: Iterable[Any], count: int) -> list[Any]:
        found: list[Any] = [None] * count
        titles, finished = dict[int, str](), 0
        coming = enumerate(tasks)
        try:
            while True:
                for number, task in islice(coming, max(0, self._room() - len(self._waiting))):
                    titles[number] = _title(task, number)
                    call = pickle.dumps(Call.of(number, self._board.path, work, task), pickle.HIGHEST_PROTOCOL)
                    self._waiting[self._engine.submit(run_call, call)] = number
                    self._board.begin(number)
                if not self._waiting:
                    return found
                done = self._next_done()
                for future in sorted(done, key=self._waiting.__getitem__):
                    number, outcome = self._waiting.pop(future), _outcome(future)
                    self._board.end(number, outcome.done)
                    found[number] = outcome.result()
                    finished += 1
                    _log.info("%s: done, %d of %d", titles.pop(number), finished, count)
        finally:
            self._board.stop()
            for future in self._waiting:
                future.cancel()
            wait(self._waiting, _WIND_DOWN_SECONDS)

    def _next_done(self) -> set[Future[bytes]]:
        """The next tasks that are done; says once where there is no worker that could do any."""
        while True:
            done, _ = wait(self._waiting, _PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
            if done:
                return done
            if not self._is_noted and getattr(self._engine, "slots", 1) == 0:
                self._watcher.note("the engine has no workers; waiting for some to join it")
                self._is_noted = True

    def _room(self) -> int:
        """How many tasks the engine should have; it may grow and shrink."""
        if self._most is not None:
            return self._most
        slots = int(getattr(self._engine, "slots", _UNKNOWN_SLOTS))
        return slots + max(slots, _AHEAD)


def _outcome(future: Future[bytes]) -> Outcome:
    try:
        found: Outcome = pickle.loads(future.result())
    except Exception as error:  # each engine has errors of its own
        raise WorkerError(
            f"the engine has lost a shard ({type(error).__name__}: {error}); run the same command again: what is whole "
            f"is kept"
        ) from error
    return found


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off in this process, in all of its threads."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
