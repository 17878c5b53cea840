"""Tasks that lead to more tasks, shared out to forked processes. No process is needed: without one this one does them.

Processes are forked where that is safe: on Linux, in a program of one thread. They end with their parent, and Ctrl-C is
the parent's. What a process was doing when it died is done here.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from typing import Any, TypeAlias

__all__ = ["Task", "do_tasks"]

_PR_SET_PDEATHSIG = 1
Task: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], None]]"


def do_tasks(next_task: Callable[[], Task | None], processes: int) -> None:
    """Do tasks until there is none.

    next_task: (function, its arguments, what this process does with its result); None for nothing now, which is final
    when all before it are done.

    Raises what a task raises, when the tasks that have begun have ended.
    """
    if processes > 1 and sys.platform == "linux" and threading.active_count() == 1:
        try:
            pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start, (os.getpid(),))
        except (OSError, ImportError):  # a system without semaphores, or without a writable /dev/shm
            pool = None
        if pool is not None:
            try:
                _share(next_task, pool, 2 * processes)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            return
    while (task := next_task()) is not None:
        work, arguments, done = task
        done(work(*arguments))


def _share(next_task: Callable[[], Task | None], pool: ProcessPoolExecutor, most: int) -> None:
    waiting: dict[Future[Any], Task] = {}
    while True:
        while len(waiting) < most and (task := next_task()) is not None:
            work, arguments, done = task
            try:
                waiting[pool.submit(work, *arguments)] = task
            except BrokenExecutor:
                done(work(*arguments))
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            work, arguments, done = waiting.pop(future)
            try:
                result = future.result()
            except BrokenExecutor:  # a process died, and the pool with it
                result = work(*arguments)
            done(result)


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above could take effect
