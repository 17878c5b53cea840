"""Run shard tasks in processes of this machine.

Workers ignore Ctrl-C (the parent stops them through the counters) and die with their parent. They are forked where
that is safe, which starts them at once, and spawned in programs that run threads already.

Python's cyclic garbage collector is switched off, or runs rarely, where there are millions of small objects without
cycles: it would visit all of them each time their number has grown by a quarter, a twentieth of the time of packing
small files. Objects without cycles are freed as always.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from cache.errors import SourceError, WorkerError
from cache.messages import Counter, Watcher

__all__ = ["run_shards", "without_gc"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_PR_SET_PDEATHSIG = 1
_ALLOCATIONS = 100_000

_counters: Any = None


class _Counters:
    """Progress of all shards in memory shared with the workers: samples and bytes by shard, and a stop flag."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def totals(self) -> tuple[int, int]:
        """(samples, source bytes) done so far in this run."""
        values = self.array[1:]
        return sum(values[0::2]), sum(values[1::2])

    def stop(self) -> None:
        self.array[0] = 1


class _ShardCounter:
    def __init__(self, array: Any, shard: int) -> None:
        self._array, self._first = array, 1 + 2 * shard

    def report(self, samples: int, payload_bytes: int) -> None:
        self._array[self._first] += samples
        self._array[self._first + 1] += payload_bytes

    def stopped(self) -> bool:
        return bool(self._array[0])


class _InlineExecutor(Executor):
    """Runs each task at once in this process: for a single worker, and for debugging."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future


def _open_executor(workers: int, shards: int, note: Callable[[str], None]) -> tuple[Executor, _Counters]:
    """An executor with `workers` processes (1: this one) and the counters its tasks report to.

    Processes share locks and counters in /dev/shm; where that is missing this process does the work, and `note` is
    called.
    """
    numbers = 2 * shards + 1
    if workers > 1:
        safe = sys.platform == "linux" and threading.active_count() == 1
        context: Any = multiprocessing.get_context("fork" if safe else "spawn")
        try:
            if safe:  # inherited; multiprocessing's own is a file for a moment, which a kill would leave behind
                array: Any = (ctypes.c_uint64 * numbers).from_buffer(mmap.mmap(-1, 8 * numbers))
            else:
                array = context.RawArray(ctypes.c_uint64, numbers)
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(array, os.getpid()))
            return pool, _Counters(array)
        except (OSError, ImportError) as error:  # ImportError: a system without semaphores
            note(
                f"worker processes need a writable /dev/shm ({error}), so this process does all the work; mount "
                f"a tmpfs there, or pass workers=1 to confirm this"
            )
    counters = _Counters((ctypes.c_uint64 * numbers)())
    _share(counters.array)
    return _InlineExecutor(), counters


def run_shards(
    work: Callable[[T, Counter], R],
    tasks: Iterable[T],
    count: int,
    workers: int,
    watcher: Watcher,
    samples: int,
    total_bytes: int,
    source: object = None,
) -> list[R]:
    """Run `work` on `count` tasks in up to `workers` processes; results are in the order of the tasks.

    watcher: sees progress, of so many `samples` and `total_bytes`.
    source: part of the tasks that the caller passed in, which may not pickle; then SourceError is raised.

    A task is pickled shortly before a worker runs it. On the first error, or Ctrl-C, the other tasks are stopped and
    the error is raised; a worker that dies is a WorkerError.
    """
    if count == 0:
        return []
    executor, counters = _open_executor(min(workers, count), count, watcher.note)
    inline = isinstance(executor, _InlineExecutor)
    futures: list[Future[R]] = []
    try:
        if not inline:
            _check_sendable(source)
        if inline:  # the work happens in submit
            watcher.begin(samples, total_bytes, counters.totals)
        for number, task in enumerate(tasks):
            futures.append(executor.submit(_run, work, task, number))
            if inline:
                futures[-1].result()
        if not inline:  # the display has a thread, which must not be there when workers are forked
            watcher.begin(samples, total_bytes, counters.totals)
        wait(futures, return_when=FIRST_EXCEPTION)
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


def _check_sendable(source: object) -> None:
    """The feeding thread of a pool hangs over a task that cannot be pickled (cpython issue 94777)."""
    try:
        pickle.dumps(source, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs code of the source
        raise SourceError(f"the source cannot be sent to worker processes: {error}; use workers=1") from error


def _run(work: Callable[[T, Counter], R], task: T, number: int) -> R:
    return work(task, _ShardCounter(_counters, number))


def _share(array: Any) -> None:
    global _counters
    _counters = array


def _start(array: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the line above could take effect
    _collect_rarely()
    _share(array)


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


def _collect_rarely() -> None:
    """In a worker: ignore objects inherited by the fork, whose pages a collection would copy, and collect rarely."""
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, 50, 50)
