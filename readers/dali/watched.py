"""A feed whose pipeline has worker processes: one that dies is an error, where DALI alone might wait for it for ever.

DALI talks to its workers through locks in shared memory. A worker that is killed (out of memory) may hold one, or be
waited for by a condition that counts it; then no call into DALI returns. So the calls are made in a thread, and whoever
wants a batch waits for the thread and looks after the workers meanwhile. A thread that got stuck is left to itself.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Any

from readers.dali.feeds import Feed, Output, open_feed
from readers.errors import WorkerError

__all__ = ["WatchedFeed"]

_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # DALI notices most deaths by itself and says so
_JOIN_SECONDS = 10.0
_Call = tuple[AbstractContextManager[Any], Callable[[Feed], Any]]


class WatchedFeed:
    """A feed of this pipeline, whose workers are started at once. Dropping it ends the pipeline and the workers."""

    def __init__(self, pipeline: Any, output: Output) -> None:
        before = multiprocessing.active_children()
        pipeline.start_py_workers()
        self._workers = [child for child in multiprocessing.active_children() if child not in before]
        self._feed = open_feed(pipeline, output)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_serve, args=(self._feed, self._calls, self._answers), name="packer-dali", daemon=True
        )
        thread.start()
        self._stop = weakref.finalize(self, _stop, thread, self._calls, self._workers)

    def take(self) -> tuple[Any, Any]:
        result: tuple[Any, Any] = self._call(_take)
        return result

    def reset(self) -> None:
        self._call(_reset)

    def here(self) -> AbstractContextManager[Any]:
        return self._feed.here()

    def _call(self, function: Callable[[Feed], Any]) -> Any:
        """Have the thread do it. Raises WorkerError where a worker has died."""
        self._calls.put((self._feed.here(), function))
        dead_since: float | None = None
        while True:
            try:
                result, error = self._answers.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                dead_since = dead_since or (time.monotonic() if self._dead() else None)
                if dead_since is not None and time.monotonic() - dead_since > _GRACE_SECONDS:
                    raise self._died() from None
                continue
            if error is None:
                return result
            dead = not isinstance(error, StopIteration) and self._dead()
            raise self._died() if dead else error

    def _dead(self) -> BaseProcess | None:
        return next((worker for worker in self._workers if not worker.is_alive()), None)

    def _died(self) -> WorkerError:
        dead = self._dead()
        code = dead.exitcode if dead is not None else None
        return WorkerError(
            f"a process that reads for DALI died (exit status {code}; -9 often means out of memory); start the loop "
            f"again from the last state_dict, with fewer workers or a smaller prefetch"
        )


def _take(feed: Feed) -> Any:
    return feed.take()


def _reset(feed: Feed) -> None:
    feed.reset()


def _serve(feed: Feed, calls: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        context, function = call
        answer: tuple[Any, BaseException | None]
        try:
            with context:
                answer = (function(feed), None)
        except BaseException as error:
            answer = (None, error.with_traceback(None))  # whose frames would keep the pipeline alive
        answers.put(answer)
        del call, context, function, answer


def _stop(thread: threading.Thread, calls: queue.SimpleQueue[Any], workers: list[BaseProcess]) -> None:
    calls.put(None)
    stuck = any(not worker.is_alive() for worker in workers)
    thread.join(_LOOK_SECONDS if stuck else _JOIN_SECONDS)
    if thread.is_alive():
        for worker in workers:
            worker.kill()
            worker.join(_JOIN_SECONDS)
