"""Batches made ahead of their use by one thread.

rocAL asks for a batch and waits for it, so that whatever can be ready before must be. One lock guards everything. The
thread is a daemon, holds no reference to who takes the batches, and ends by itself after the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from cache.forks import tell_after_fork

__all__ = ["Ahead"]

_T = TypeVar("_T")
_JOIN_SECONDS = 10.0
_WAKE_SECONDS = 1.0


class Ahead(Generic[_T]):
    """`make(0)` to `make(steps - 1)`, in order, at most `depth` of them made and not yet taken."""

    def __init__(self, make: Callable[[int], _T], steps: int, depth: int) -> None:
        self._make, self._steps, self._depth = make, steps, depth
        self._changed = threading.Condition()
        self._made: deque[_T] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        tell_after_fork(self)
        self._thread = threading.Thread(target=self._run, name="packer-rocal-ahead", daemon=True)
        self._thread.start()

    def take(self) -> _T:
        """The next one; raises what making it raised, once those before it are taken."""
        with self._changed:
            while not self._made:
                if self._error is not None:
                    raise self._error
                if self._stopped or not self._thread.is_alive():
                    raise RuntimeError("there is no further batch: the reading thread has ended")
                self._changed.wait(_WAKE_SECONDS)
            taken = self._made.popleft()
            self._changed.notify_all()
        return taken

    def stop(self) -> None:
        """End the thread; one in the middle of a batch finishes it first."""
        with self._changed:
            self._stopped = True
            self._made.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def after_fork(self) -> None:
        """In a forked child, which has no such thread."""
        self._changed = threading.Condition()
        self._made.clear()

    def _run(self) -> None:
        for step in range(self._steps):
            with self._changed:
                while len(self._made) >= self._depth and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
            try:
                made = self._make(step)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._stopped:
                    self._made.append(made)
                self._changed.notify_all()
