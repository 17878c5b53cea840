"""Locks that the kernel drops when the process that has them ends. Nothing has to be repaired after a crash.

    FlockFile   flock of a small file, exclusive or shared; `Folder.lock` takes one below a folder
    ByteLocks   single bytes of a file, by locks of its open file description (F_OFD_SETLK): two descriptions in one
                process exclude each other as those of two processes do, and asking (F_OFD_GETLK) takes nothing
    ByteMutex   one byte for some microseconds, between threads and processes

A lock lives as long as any descriptor of its opening, and a fork copies descriptors. `FlockFile` therefore closes its
copy in a forked child unless the lock is meant to be inherited; `ByteLocks` are taken on descriptions that nothing else
has a copy of (`reopened`).

A process that had a lock may have removed its file, and then a lock on it excludes no process: `is_at` compares.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event
from typing import Protocol

from cache.errors import CacheBusyError, StagingError

__all__ = [
    "BusyError",
    "ByteLocks",
    "ByteMutex",
    "FlockFile",
    "Forked",
    "Lock",
    "call_after_fork",
    "copy_event",
    "is_at",
    "is_locked",
    "locked",
    "take_lock",
    "wait_shared",
]

_BUSY = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid (must be 0)
_PATIENCE_SECONDS = 0.5  # of a mutex: a process that has it for longer has been stopped
_AWAY_SECONDS = 5.0  # how long a mutex is then only tried, not waited for
_LONGEST_PAUSE_SECONDS = 0.02


class BusyError(OSError):
    """Another process has the lock."""


class Lock:
    """An exclusive lock until it is released or the process ends. supported: False where the filesystem has none."""

    def __init__(self, descriptor: int, supported: bool) -> None:
        self._descriptor, self.supported = descriptor, supported

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def take_lock(descriptor: int) -> Lock | None:
    """The exclusive lock of an open file, with a descriptor of its own; None where another process has it."""
    try:
        supported = True
        if not _flock(descriptor, shared=False):
            return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        supported = False
    return Lock(os.dup(descriptor), supported)


def is_at(descriptor: int, name: str | os.PathLike[str], parent: int | None = None) -> bool:
    """Whether the open file still has this name (in the open directory `parent`, if given)."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(found, os.fstat(descriptor))


class FlockFile:
    """One lock file; `take` never waits. inherited: forked children share a lock that was taken as a shared one."""

    def __init__(self, path: Path, *, inherited: bool = False) -> None:
        self.path, self.inherited = path, inherited
        self._descriptor, self._shared = -1, False
        call_after_fork(self)

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def take(self, *, shared: bool = False) -> bool:
        """Try to get the lock; False where another process has it, or where the file or its folder is gone.

        Raises StagingError where the filesystem has no locks or the file cannot be opened.
        """
        if self.held:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor, self._shared = os.open(self.path, flags, 0o600), shared
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StagingError(f"{self.path}: cannot be opened for locking: {error.strerror}") from error
        taken = False
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise StagingError(f"{self.path}: expected a lock file, which is a regular file; remove it")
            taken = _flock(self._descriptor, shared) and is_at(self._descriptor, self.path)
        except StagingError:
            raise
        except OSError as error:
            raise StagingError(
                f"{self.path}: this filesystem has no locks ({error.strerror}); choose another target"
            ) from error
        finally:
            if not taken:
                self.release()
        return taken

    def release(self) -> None:
        """Let go of the lock: at once, even if another thread is starting a process, which has a copy until its exec.

        A lock that forked children share ends with the last of them.
        """
        if self.held and not (self._shared and self.inherited):
            with suppress(OSError):  # where the filesystem has no locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def after_fork(self) -> None:
        """In a forked child: the lock is the parent's, unless it is shared."""
        if not (self._shared and self.inherited):
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


@contextmanager
def locked(path: Path, seconds: float = 60.0) -> Iterator[None]:
    """Have an exclusive lock for a short piece of work; waits for other processes that do the same.

    Raises StagingError where it is not free within `seconds`, or its directory is gone.
    """
    lock, end = FlockFile(path), time.monotonic() + seconds
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


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """Whether a process, this one included, has the lock now; shared: has it exclusively."""
    lock = FlockFile(path)
    try:
        return path.is_file() and not lock.take(shared=shared)
    finally:
        lock.release()


class ByteLocks:
    """A file descriptor that closes itself, and locks on bytes of its file, which need not exist."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # bound early: modules go first at exit
        if self.number >= 0:
            close(self.number)

    def reopened(self) -> ByteLocks:
        """Another description of the same file, even of one without a name."""
        return ByteLocks(os.open(f"/proc/self/fd/{self.number}", os.O_RDWR | os.O_CLOEXEC))

    def try_alone(self, byte: int) -> bool:
        """Take the byte exclusively, or turn a shared lock into that atomically; False leaves all as it was."""
        return self._set(fcntl.F_WRLCK, byte)

    def try_shared(self, byte: int) -> bool:
        """Take the byte together with others, or admit them to a lock that was exclusive."""
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
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another description has it
            return False
        return True


def wait_shared(
    lock: ByteLocks, byte: int, seconds: float, name: str, progress: Callable[[], object] | None = None
) -> None:
    """`try_shared`, again and again. Raises CacheBusyError when it takes longer than `seconds`.

    progress: something that changes while the other process works; the time then counts from its last change.
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
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class ByteMutex:
    """One at a time among all threads and processes, for some microseconds; waits half a second at most.

    After a wait in vain it is only tried for the next seconds, so a process that was stopped (SIGSTOP) with it costs
    the others their puts and no time. A thread's own signal handlers get False, not a deadlock.
    """

    def __init__(self, lock: ByteLocks, byte: int) -> None:
        self._lock = lock
        self._take = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)  # once: there are two for each put
        self._give = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
        self._threads = threading.Lock()
        self._away_until = 0.0

    def acquire(self) -> bool:
        """Whether this thread has it now; then `release` must follow."""
        if not self._threads.acquire(timeout=_PATIENCE_SECONDS):
            return False
        taken = False
        try:
            taken = self._taken() or self._waited()
        finally:
            if not taken:
                self._threads.release()
        return taken

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
        deadline, pause = now + _PATIENCE_SECONDS, 0.0
        while time.monotonic() < deadline:
            time.sleep(pause)
            if self._taken():
                return True
            pause = min(pause + 0.0001, 0.005)
        self._away_until = time.monotonic() + _AWAY_SECONDS
        return False


def _flock(descriptor: int, shared: bool) -> bool:
    """Whether the lock was free. Raises OSError where the filesystem has none."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


# --- locks in forked processes ----
class Forked(Protocol):
    """Has locks that must be made again in a forked child."""

    def after_fork(self) -> None: ...


_owners: weakref.WeakValueDictionary[int, Forked] = weakref.WeakValueDictionary()


def call_after_fork(owner: Forked) -> None:
    """Call `owner.after_fork()` in every child that this process forks from now on, while `owner` lives."""
    _watch()
    _owners[id(owner)] = owner


def copy_event(event: Event) -> Event:
    """A new event that is set if this one is; an event has a lock inside."""
    new = Event()
    if event.is_set():
        new.set()
    return new


@cache
def _watch() -> None:
    os.register_at_fork(after_in_child=_call_all)


def _call_all() -> None:
    for owner in list(_owners.values()):
        owner.after_fork()
