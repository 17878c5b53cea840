"""Locks that the kernel releases when the process that holds them ends, so a crash leaves nothing to repair.

    FlockFile   flock of a small file, exclusive or shared; `Folder.lock` takes one below a folder
    ByteLocks   locks on single bytes of a file, owned by its open file description (F_OFD_SETLK): two descriptions in
                one process exclude each other as two processes do; F_OFD_GETLK queries without locking
    ByteMutex   one byte, locked for microseconds, between threads and processes

A lock lasts as long as any descriptor of its open file description, and a fork copies descriptors. `FlockFile`
therefore closes its copy in a forked child unless the lock is meant to be inherited; `ByteLocks` are taken on
descriptions that no other process shares (`reopen`).

The process that held a lock may have removed its file; a lock on the removed file then excludes no one, so `is_at`
compares the two.

A forked child has one thread and a copy of every `threading.Lock`; a lock that another thread of the parent held stays
locked in the child forever. `call_after_fork` lets the owners of locks replace them in the child before any of its
other code runs:

    self._lock = threading.Lock()
    call_after_fork(self)                  # calls self.after_fork() in every forked child
"""

from __future__ import annotations

import errno
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
from typing import Protocol

from cache.errors import CacheBusyError, StagingError
from cache.system import CLOEXEC, NOFOLLOW, NONBLOCK, at_fork, fcntl

_BUSY = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid (must be 0)
_PATIENCE_SECONDS = 0.5  # of a mutex: a process that holds it for longer has been stopped
_SKIP_SECONDS = 5.0  # after a time-out the mutex is tried without waiting for this long
_LONGEST_PAUSE_SECONDS = 0.02


class BusyError(OSError):
    """Another process holds the lock."""


class Lock:
    """A lock, until it is released or the process ends. supported: whether the filesystem supports locks."""

    def __init__(self, descriptor: int, supported: bool) -> None:
        self._descriptor, self.supported = descriptor, supported

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Upgrade a shared lock to an exclusive one in the block, if no other process has it; yields whether it did.

        The upgrade is not atomic: another process may hold the lock exclusively in between, so read again what it
        guards. On a filesystem without locks, yields False.
        """
        if not self.supported:
            yield False
            return
        exclusive = _flock(self._descriptor, shared=False)
        try:
            if exclusive:
                yield True
        finally:
            while not _flock(self._descriptor, shared=True):
                time.sleep(_LONGEST_PAUSE_SECONDS)
        if not exclusive:
            yield False

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


@contextmanager
def alone(descriptor: int) -> Iterator[None]:
    """Hold a lock on an open file that excludes all other processes, including forked children that inherited it."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def take_lock(descriptor: int, *, shared: bool = False) -> Lock | None:
    """Lock an open file through a new descriptor; None if another process holds the lock."""
    try:
        supported = True
        if not _flock(descriptor, shared):
            return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        supported = False
    return Lock(os.dup(descriptor), supported)


def is_at(descriptor: int, name: str | os.PathLike[str], parent: int | None = None) -> bool:
    """Whether the open file still has this name (in the open directory `parent`, if given)."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(status, os.fstat(descriptor))


class FlockFile:
    """One lock file; `take` never waits. inherited: forked children keep a shared lock of the parent."""

    def __init__(self, path: Path, *, inherited: bool = False) -> None:
        self.path, self.inherited = path, inherited
        self._descriptor, self._shared = -1, False
        call_after_fork(self)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor >= 0

    def take(self, *, shared: bool = False) -> bool:
        """Try to take the lock; False if another process holds it, or if the file or its folder is gone.

        Raises StagingError if the filesystem has no locks or the file cannot be opened.
        """
        if self.is_held:
            return True
        flags = os.O_RDWR | os.O_CREAT | CLOEXEC | NOFOLLOW | NONBLOCK
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
        """Release the lock at once, even while another thread starts a process, which has a copy until its exec.

        A shared lock that forked children inherited ends when the last of them releases it.
        """
        if self.is_held and not (self._shared and self.inherited):
            with suppress(OSError):  # filesystems without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def after_fork(self) -> None:
        """In a forked child: drop the lock, which the parent keeps, unless it is shared."""
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
    """Hold an exclusive lock for a short time, waiting for other processes that hold it.

    Raises StagingError if it is not free within `seconds`, or if its directory is gone.
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
    """Whether any process, this one included, holds the lock now; shared: holds it exclusively."""
    lock = FlockFile(path)
    try:
        return path.is_file() and not lock.take(shared=shared)
    finally:
        lock.release()


class ByteLocks:
    """A file descriptor that closes itself, with locks on bytes of its file; the bytes need not exist."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # bound early: modules go first at exit
        if self.number >= 0:
            close(self.number)

    def reopen(self) -> ByteLocks:
        """A new open file description of the same file, even of one without a name."""
        return ByteLocks(os.open(f"/proc/self/fd/{self.number}", os.O_RDWR | CLOEXEC))

    def try_exclusive(self, byte: int) -> bool:
        """Lock the byte exclusively, or upgrade a shared lock atomically; False changes nothing."""
        return self.set(_request(fcntl.F_WRLCK, byte))

    def try_shared(self, byte: int) -> bool:
        """Lock the byte shared, or downgrade an exclusive lock."""
        return self.set(_request(fcntl.F_RDLCK, byte))

    def release(self, byte: int) -> None:
        self.set(_request(fcntl.F_UNLCK, byte))

    def is_locked(self, byte: int) -> bool:
        """Whether another open file description has a lock on the byte."""
        answer = fcntl.fcntl(self.number, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, byte))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def set(self, request: bytes) -> bool:
        """Set a packed `struct flock`; returns whether that succeeded."""
        try:
            fcntl.fcntl(self.number, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another description has the lock
            return False
        return True


def wait_shared(
    lock: ByteLocks, byte: int, seconds: float, name: str, progress: Callable[[], object] | None = None
) -> None:
    """Repeat `try_shared`. Raises CacheBusyError if it takes longer than `seconds`.

    progress: returns a value that changes while the other process works; each change restarts the time-out.
    """
    deadline, pause, seen = time.monotonic() + seconds, 0.0005, progress() if progress else None
    while not lock.try_shared(byte):
        now = time.monotonic()
        if progress is not None and (state := progress()) != seen:
            deadline, seen = now + seconds, state
        if now > deadline:
            raise CacheBusyError(
                f"{name} is locked by a process that creates or checks it and has made no progress for {seconds:g} s; "
                f"it may have been stopped (SIGSTOP)"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class ByteMutex:
    """A mutex between threads and processes, held for microseconds; waits at most half a second.

    After a time-out it is tried without waiting for the next seconds, so a process that was stopped (SIGSTOP) while it
    held the mutex costs the others their puts but no time. A signal handler of the owning thread gets False, not a
    deadlock.
    """

    def __init__(self, lock: ByteLocks, byte: int) -> None:
        self._lock = lock
        self._take = _request(fcntl.F_WRLCK, byte)  # packed once, since each put needs both
        self._give = _request(fcntl.F_UNLCK, byte)
        self._threads = threading.Lock()
        self._skip_until = 0.0

    def acquire(self) -> bool:
        """Whether this thread owns the mutex now; if so, `release` must follow."""
        if not self._threads.acquire(timeout=_PATIENCE_SECONDS):
            return False
        acquired = False
        try:
            acquired = self._lock.set(self._take) or self._wait()
        finally:
            if not acquired:
                self._threads.release()
        return acquired

    def release(self) -> None:
        self._lock.set(self._give)
        self._threads.release()

    def _wait(self) -> bool:
        now, pause = time.monotonic(), 0.0
        if now < self._skip_until:
            return False
        while time.monotonic() < now + _PATIENCE_SECONDS:
            time.sleep(pause)
            if self._lock.set(self._take):
                return True
            pause = min(pause + 0.0001, 0.005)
        self._skip_until = time.monotonic() + _SKIP_SECONDS
        return False


def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def _flock(descriptor: int, shared: bool) -> bool:
    """Try to lock without waiting; returns whether the lock was free. Raises OSError if locks are not supported."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


class _Owner(Protocol):
    def after_fork(self) -> None: ...


_owners: weakref.WeakValueDictionary[int, _Owner] = weakref.WeakValueDictionary()


def call_after_fork(owner: _Owner) -> None:
    """Call `owner.after_fork()` in every child that this process forks while `owner` is alive."""
    _register()
    _owners[id(owner)] = owner


def copy_event(event: threading.Event) -> threading.Event:
    """A new event in the same state, for a forked child: an event contains a lock."""
    new = threading.Event()
    if event.is_set():
        new.set()
    return new


@cache
def _register() -> None:
    def call_owners() -> None:
        for owner in list(_owners.values()):
            owner.after_fork()

    at_fork(after_in_child=call_owners)
