"""Processes of this machine, with the counters of all shards in memory that they share.

Workers ignore Ctrl-C (the parent stops them through the counters) and die with their parent. They are forked where
that is safe, which starts them at once, and spawned in programs that run threads already.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any, ParamSpec, TypeVar

from cache.messages import Counter

__all__ = ["Counters", "InlineExecutor", "open_processes", "run_task"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_PR_SET_PDEATHSIG = 1
_ALLOCATIONS = 100_000

_counters: Any = None


class Counters:
    """Progress of all shards in memory shared with the workers: three numbers a shard, and a stop flag."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def totals(self) -> tuple[int, int, int]:
        """(samples, source bytes, samples left out) so far in this run."""
        values = self.array[1:]
        return sum(values[0::3]), sum(values[1::3]), sum(values[2::3])

    def stop(self) -> None:
        self.array[0] = 1


class _ShardCounter:
    def __init__(self, array: Any, shard: int) -> None:
        self._array, self._first = array, 1 + 3 * shard

    def report(self, samples: int, payload_bytes: int, left_out: int = 0) -> None:
        self._array[self._first] += samples
        self._array[self._first + 1] += payload_bytes
        self._array[self._first + 2] += left_out

    def stopped(self) -> bool:
        return bool(self._array[0])


class InlineExecutor(Executor):
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


def open_processes(
    workers: int, shards: int, note: Callable[[str], None], *, inline: bool = True
) -> tuple[Executor, Counters]:
    """An executor with `workers` processes and the counters its tasks report to. inline: one worker is this process.

    Processes share locks and counters in /dev/shm; where that is missing this process does the work, and `note` is
    called.
    """
    numbers = 3 * shards + 1
    if workers > 1 or not inline:
        safe = sys.platform == "linux" and threading.active_count() == 1
        context: Any = multiprocessing.get_context("fork" if safe else "spawn")
        try:
            if safe:  # inherited; multiprocessing's own is a file for a moment, which a kill would leave behind
                array: Any = (ctypes.c_uint64 * numbers).from_buffer(mmap.mmap(-1, 8 * numbers))
            else:
                array = context.RawArray(ctypes.c_uint64, numbers)
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(array, os.getpid()))
            return pool, Counters(array)
        except (OSError, ImportError) as error:  # ImportError: a system without semaphores
            note(
                f"worker processes need a writable /dev/shm ({error}), so this process does all the work; mount "
                f"a tmpfs there, or pass workers=1 to confirm this"
            )
    counters = Counters((ctypes.c_uint64 * numbers)())
    _share(counters.array)
    return InlineExecutor(), counters


def run_task(work: Callable[[T, Counter], R], task: T, number: int) -> R:
    """In a worker: a task with the counter of its shard."""
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


def _collect_rarely() -> None:
    """In a worker: ignore objects inherited by the fork, whose pages a collection would copy, and collect rarely."""
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, 50, 50)
