"""Locks that die with their owner: `flock` on a small file.

The kernel drops a lock when the last descriptor of its opening closes, so a killed process leaves nothing behind. A
forked child shares the opening; where that would keep a dead leader's lock alive, the child closes its share.
Locks of users are kept by children, which read the copy too (`inherited`).

A file that was removed while somebody waited for its lock is not the file any more: `take` notices and says no.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from weakref import WeakSet

from cache.errors import StagingError

__all__ = ["FileLock", "is_locked", "locked"]

_BUSY = (errno.EAGAIN, errno.EACCES)


class FileLock:
    """One lock file; `take` never waits. inherited: forked children keep a share in it, if it is a shared one."""

    def __init__(self, path: Path, *, inherited: bool = False) -> None:
        self.path, self.inherited = path, inherited
        self._descriptor = -1

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def take(self, *, shared: bool = False) -> bool:
        """Try to get the lock; False where another has it, or where the file or its folder is gone.

        Raises StagingError where the filesystem has no locks or the file cannot be opened.
        """
        if self.held:
            return True
        try:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
            )
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StagingError(f"{self.path}: cannot be opened for locking: {error.strerror}") from error
        self._descriptor = descriptor
        if not (shared and self.inherited):
            _not_inherited().add(self)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StagingError(f"{self.path}: is no regular file, so not a lock of ours; remove it")
            got = _flock(descriptor, self.path, shared) and self._is_still(descriptor)
        except BaseException:
            self.release()
            raise
        if not got:
            self.release()
        return got

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _is_still(self, descriptor: int) -> bool:
        try:
            now = self.path.lstat()
        except OSError:
            return False
        held = os.fstat(descriptor)
        return (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino)

    def __del__(self) -> None:
        self.release()


@contextmanager
def locked(path: Path, seconds: float = 60.0) -> Iterator[None]:
    """Hold an exclusive lock for a short piece of work; waits for others that do the same.

    Raises StagingError where it is not free within `seconds`, or its directory is gone.
    """
    lock, end = FileLock(path), time.monotonic() + seconds
    while not lock.take():
        if not path.parent.is_dir():
            raise StagingError(f"{path.parent}: is gone")
        if time.monotonic() > end:
            raise StagingError(f"{path}: still locked by another process after {seconds:.0f} s")
        time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether somebody, this process included, has the lock now."""
    if not path.is_file():
        return False
    lock = FileLock(path)
    free = lock.take()
    lock.release()
    return not free


def _flock(descriptor: int, path: Path, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise StagingError(f"{path}: this filesystem has no locks ({error.strerror}); choose another target") from error
    return True


@cache
def _not_inherited() -> WeakSet[FileLock]:
    """Locks of this process that forked children let go of."""
    held: WeakSet[FileLock] = WeakSet()

    def forget() -> None:
        for lock in list(held):
            lock.release()

    os.register_at_fork(after_in_child=forget)
    return held
