"""Locks on bytes of a segment's file that the kernel drops when their holder dies.

They are locks of an open file description (F_OFD_SETLK), so two descriptions in one process exclude each other as those
of two processes do, and asking (F_OFD_GETLK) takes nothing. The bytes, which need not exist in the file:

    2^62            USE     shared by everybody who uses the segment; alone: while it is made, checked or removed
    2^62 + 1        TABLE   alone, for some microseconds, while slots are claimed and words go out
    2^62 + 2 + n    user n  alone, as long as user n lives

A description lives as long as any descriptor of it, those that a fork copied included. So locks are taken on
descriptions that nothing else has a copy of: mappings hold another one, and a child closes what it was born with and
opens its own (`reopened`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable

from cache.errors import CacheBusyError

__all__ = ["TABLE", "USE", "Descriptor", "Mutex", "user_byte", "wait_shared"]

USE = 1 << 62
TABLE = USE + 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid (must be 0)
_PATIENCE_S = 0.5  # a put gives up after that: its holder has been stopped
_AWAY_S = 5.0  # and does not wait again for so long
_LONGEST_PAUSE_S = 0.02


def user_byte(number: int) -> int:
    """The byte that user `number` holds."""
    return TABLE + 1 + number


class Descriptor:
    """A file descriptor that closes itself when nobody refers to it any more."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # bound early: modules go first at exit
        if self.number >= 0:
            close(self.number)

    def reopened(self) -> Descriptor:
        """Another description of the same file, even of one without a name."""
        return Descriptor(os.open(f"/proc/self/fd/{self.number}", os.O_RDWR | os.O_CLOEXEC))

    def try_alone(self, byte: int) -> bool:
        """Take the byte for oneself, or turn a shared lock into that at one stroke; False leaves all as it was."""
        return self._set(fcntl.F_WRLCK, byte)

    def try_shared(self, byte: int) -> bool:
        """Take the byte together with others, or let them in beside oneself."""
        return self._set(fcntl.F_RDLCK, byte)

    def let_go(self, byte: int) -> None:
        self._set(fcntl.F_UNLCK, byte)

    def is_held(self, byte: int) -> bool:
        """Whether another description has a lock on the byte."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self.number, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self.number, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody has it
            return False
        return True


def wait_shared(
    lock: Descriptor, byte: int, seconds: float, name: str, progress: Callable[[], object] | None = None
) -> None:
    """`try_shared`, again and again. Raises CacheBusyError when it takes longer than that.

    progress: something that changes while the holder is at work; the time then counts from its last change.
    """
    deadline, pause, seen = time.monotonic() + seconds, 0.0005, progress() if progress else None
    while not lock.try_shared(byte):
        now = time.monotonic()
        if progress is not None and (found := progress()) != seen:
            deadline, seen = now + seconds, found
        if now > deadline:
            raise CacheBusyError(
                f"{name} is held by a process that makes or checks it and has not got on for {seconds:g} s; it may "
                f"have been stopped (SIGSTOP)"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class Mutex:
    """One at a time among all threads and processes, for some microseconds; waits half a second at most.

    Who could not get it tries but once for the next seconds, so a holder that was stopped (SIGSTOP) costs the others
    their puts and no time. A thread's own signal handlers get False, not a deadlock.
    """

    def __init__(self, lock: Descriptor) -> None:
        self._lock = lock
        self._threads = threading.Lock()
        self._away_until = 0.0
        self._take = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, TABLE, 1, 0)
        self._give = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, TABLE, 1, 0)

    def acquire(self) -> bool:
        """Whether it is ours now; then `release` must follow."""
        if not self._threads.acquire(timeout=_PATIENCE_S):
            return False
        try:
            if self._taken() or self._waited():
                return True
        except BaseException:
            self._threads.release()
            raise
        self._threads.release()
        return False

    def release(self) -> None:
        fcntl.fcntl(self._lock.number, fcntl.F_OFD_SETLK, self._give)
        self._threads.release()

    def _taken(self) -> bool:
        try:
            fcntl.fcntl(self._lock.number, fcntl.F_OFD_SETLK, self._take)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _waited(self) -> bool:
        now = time.monotonic()
        if now < self._away_until:
            return False
        deadline, pause = now + _PATIENCE_S, 0.0
        while time.monotonic() < deadline:
            time.sleep(pause)
            if self._taken():
                return True
            pause = min(pause + 0.0001, 0.005)
        self._away_until = time.monotonic() + _AWAY_S
        return False
