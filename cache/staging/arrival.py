"""Waiting for a file of a copy that another thread or process is bringing.

Only while there is reason to: the copy's record says that the file is wanted, and somebody holds the lock of those who
copy. When nobody has held it for a moment, copying has ended or failed, and waiting is over for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from cache.errors import StagingError
from cache.forks import renewed_event, tell_after_fork
from cache.staging.copies import load_copy
from cache.staging.files import INNER_FOLDER
from cache.staging.locks import FileLock

__all__ = ["Arrivals"]

_POLL_SECONDS = 0.02
_IDLE_SECONDS = 0.5  # between its first files and the rest, and from a dead leader to the next, the lock is free


class Arrivals:
    """The files that are on their way to one copy. Threads may share it.

    patience_seconds: the longest wait for one file. A wait in vain is the last one of all.
    """

    def __init__(self, copy: Path, patience_seconds: float) -> None:
        self.copy, self.patience_seconds = copy, patience_seconds
        self._over = threading.Event()
        self._wanted: frozenset[str] | None = None
        tell_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child."""
        self._over = renewed_event(self._over)

    @property
    def over(self) -> bool:
        """Whether a wait was in vain, so that there will be no other."""
        return self._over.is_set()

    def expects(self, path: str) -> bool:
        """Whether it makes sense to wait for the file of this name, if it is not there."""
        return self.patience_seconds > 0 and not self.over and self._is_wanted(path)

    def wait(self, path: str, is_there: Callable[[], bool]) -> bool:
        """Wait for the file of this name; False where it does not come."""
        started = busy = time.monotonic()
        while not is_there():
            now = time.monotonic()
            if not self.expects(path):
                return False
            if self._is_copied_to():
                busy = now
            if now - busy > _IDLE_SECONDS or now - started > self.patience_seconds:
                self._over.set()
                return is_there()
            self._over.wait(_POLL_SECONDS)
        return True

    def _is_wanted(self, path: str) -> bool:
        if self._wanted is None:
            copy = load_copy(self.copy)
            self._wanted = frozenset() if copy is None else frozenset(copy.wanted)
        return path in self._wanted

    def _is_copied_to(self) -> bool:
        """Whether somebody holds the lock of the leader; those who ask share it, so they do not see each other."""
        lock = FileLock(self.copy / INNER_FOLDER / "leader")
        try:
            return lock.path.is_file() and not lock.take(shared=True)
        except StagingError:
            return False
        finally:
            lock.release()
