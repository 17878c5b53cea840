"""The lock of an open file: flock, which the kernel drops when the last process that holds it ends.

Whoever held it before may have removed the file meanwhile, so that the lock is one on a file without a name, which the
next one never meets: `is_at` tells.
"""

from __future__ import annotations

import errno
import fcntl
import os
from types import TracebackType

__all__ = ["BusyError", "Lock", "is_at", "take_lock"]

_BUSY = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class BusyError(OSError):
    """A lock that another process holds."""


class Lock:
    """A lock that is held until it is released or the process ends. supported: False where nothing is really locked."""

    def __init__(self, descriptor: int, supported: bool) -> None:
        self._descriptor, self.supported = descriptor, supported

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def take_lock(descriptor: int) -> Lock | None:
    """The exclusive lock of an open file, which keeps a descriptor of its own; None where another has it."""
    supported = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return None
        if error.errno not in _NO_LOCKS:
            raise
        supported = False
    return Lock(os.dup(descriptor), supported)


def is_at(descriptor: int, parent: int, last: str) -> bool:
    """Whether the open file still has its name: whoever held its lock before may have removed it."""
    try:
        there = os.stat(last, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
