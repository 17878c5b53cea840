"""Reads that were announced: on their way in the background, and kept until each of their samples was taken once.

    announced ──► queue of runs ──► at most 24 GETs at a time ──► bytes, until taken
                     above the cap the oldest are dropped: whoever wants them reads them again

A run is one range of a shard with one or several samples in it. A run that failed is forgotten: the reader asks again
and meets the error itself. When the interpreter ends, what is still queued is not begun.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any

from cache.remote import PARALLEL

__all__ = ["Ahead", "Run"]

_CAP_BYTES = 256 << 20
_PARALLEL = PARALLEL - 8  # what is wanted now finds room


class Run:
    """One announced range. parts: what lies where in it, as key -> (start, stop) relative to the run."""

    def __init__(
        self, begin: Callable[[], Future[Any]], size_bytes: int, parts: dict[Hashable, tuple[int, int]]
    ) -> None:
        self.begin, self.bytes, self.parts = begin, size_bytes, parts
        self.future: Future[Any] | None = None


class Ahead:
    """The announced reads of one reader in one process. Threads may share it. seconds: the longest wait for one."""

    def __init__(self, seconds: float, cap_bytes: int = _CAP_BYTES) -> None:
        self._seconds, self._cap_bytes = seconds, cap_bytes
        self._lock = threading.RLock()  # a future that is done at once calls back at once
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._of: dict[Hashable, Run] = {}
        self._queue: deque[Run] = deque()
        self._running = 0
        self._held_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, run: Run) -> None:
        """Announce a run; returns at once."""
        with self._lock:
            self._runs[id(run)] = run
            self._held_bytes += run.bytes
            self._of.update((key, run) for key in run.parts)
            self._queue.append(run)
            while self._held_bytes > self._cap_bytes and len(self._runs) > 1:
                self._forget(next(iter(self._runs.values())))
            self._go_on()

    def take(self, key: Hashable) -> memoryview | None:
        """The bytes of a sample that was announced, waiting for them where they are on their way; None otherwise."""
        with self._lock:
            run = self._of.get(key)
            if run is None:
                return None
            if run.future is None:
                self._begin(run)
            future = run.future
        try:
            data = future.result(self._seconds) if future is not None else None
        except (OSError, ImportError, CancelledError, TimeoutError, RuntimeError):
            data = None
        with self._lock:
            start, stop = run.parts[key]
            if self._of.get(key) is run:
                del self._of[key]
                if data is None or not any(self._of.get(other) is run for other in run.parts):
                    self._forget(run)
        return None if data is None else memoryview(data[0])[start:stop]

    def clear(self) -> None:
        """Forget all of it; what is on its way ends by itself."""
        with self._lock:
            for run in list(self._runs.values()):
                self._forget(run)

    def _forget(self, run: Run) -> None:
        if self._runs.pop(id(run), None) is None:
            return
        self._held_bytes -= run.bytes
        for key in run.parts:
            if self._of.get(key) is run:
                del self._of[key]
        if run in self._queue:
            self._queue.remove(run)
        if run.future is not None:
            run.future.cancel()

    def _go_on(self) -> None:
        while self._queue and self._running < _PARALLEL:
            self._begin(self._queue[0])

    def _begin(self, run: Run) -> None:
        if run in self._queue:
            self._queue.remove(run)
        try:
            run.future = run.begin()
        except RuntimeError:  # the interpreter is about to end
            self._queue.clear()
            return
        self._running += 1
        run.future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._running -= 1
            self._go_on()
