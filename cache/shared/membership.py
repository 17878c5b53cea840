"""The users of segments: joining and leaving, also across forks; listing and removing segments.

A forked child continues with the mapping of its parent. Before any other code of the child runs, it closes its copy of
the parent's lock, which would make the parent look alive, and becomes a separate user. A child that cannot (no /proc,
no free number) reads and does not fill.

Listing takes no lock, so it does not disturb processes that open or close a segment. Removing needs USE exclusively, so
segments in use stay. Only files of this user with the name and the magic of a segment are touched, and the remains of
killed creators.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import util
from pathlib import Path
from types import FrameType

from cache.checksums import crc32c
from cache.errors import ForeignCacheError
from cache.locks import ByteLocks, ByteMutex, wait_shared
from cache.shared.file import NAME, open_file, remove_unused
from cache.shared.layout import TABLE, USE, Backend, CacheStats, Segment, Users, begins_like_ours, read_header, word_of
from cache.system import at_fork, require_shared_memory

_FORK_WAIT_S = 2.0
_LAST = -100
_members: weakref.WeakSet[Membership] = weakref.WeakSet()
_left_to_others: set[Path] = set()  # segments whose other users may be killed before this process ends
_NO_ARENA = memoryview(b"")


class Membership:
    """This process as a user of a segment, until `leave`."""

    def __init__(self, backend: Backend, segment: Segment, lock: ByteLocks) -> None:
        self.backend, self.segment = backend, segment
        self._lock: ByteLocks | None = None
        self.counting = threading.Lock()
        self._join(lock)
        _watch()
        _members.add(self)

    def leave(self) -> None:
        """Stop using the segment; the last user removes it, unless it persists. Further calls do nothing."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        lock.release(USE)  # first, so that if two leave at once, the second gets it exclusively
        if lock.try_exclusive(USE):
            self.backend.leave_last(self.segment)
        elif self.segment.path is not None:
            _left_to_others.add(self.segment.path)

    def fill(self, slot: int, data: memoryview) -> bool:
        """Claim the slot, write, publish. False if it is claimed, the arena is full, or the lock is stuck."""
        users, table, mutex = self.users, self.segment.slots, self.mutex
        if not mutex.acquire():
            return False
        try:
            start = table.claim(slot, len(data), users)
        finally:
            mutex.release()
        if start is None:
            return False
        word = word_of(start, len(data))
        try:
            crc = crc32c(data)
            self.segment.write(start, data)
        except BaseException:
            table.abandon(slot, word, users.owner)
            raise
        locked = mutex.acquire()  # only for the order of stores: no other user changes a claimed slot
        try:
            return table.publish(slot, word, crc, users.owner)
        finally:
            if locked:
                mutex.release()

    def erase(self, slot: int) -> None:
        """Empty the slot, even if the lock is stuck; at worst a concurrent fill is lost."""
        with self._locked_table():
            self.segment.slots.erase(slot)

    def settle(self, slot: int, word: int, right: bool) -> bool:
        """Publish a word that a crash left, or free its slot. False if another process has done so."""
        with self._locked_table() as locked:
            return locked and self.segment.slots.settle(slot, word, right)

    @contextlib.contextmanager
    def _locked_table(self) -> Iterator[bool]:
        """The lock of the table; yields False if it is stuck."""
        locked = self.mutex.acquire()
        try:
            yield locked
        finally:
            if locked:
                self.mutex.release()

    def fork(self) -> None:
        """In a forked child: leave the parent's locks to the parent."""
        if self._lock is None:
            return
        self._lock = None
        self.counting = threading.Lock()
        self.users = Users(self.segment.table, self.segment.anchor)
        self.mutex = ByteMutex(self.segment.anchor, TABLE)
        with contextlib.suppress(OSError):
            lock = self.segment.anchor.reopen()
            wait_shared(lock, USE, _FORK_WAIT_S, "the segment")
            self._join(lock)

    def _join(self, lock: ByteLocks) -> None:
        self.users = Users(self.segment.table, lock)
        self.users.join()
        self.mutex = ByteMutex(lock, TABLE)
        self._lock = lock


def _leave_all() -> None:
    """Leave all segments, as at exit."""
    for member in list(_members):
        member.leave()
    while _left_to_others:
        with contextlib.suppress(OSError):
            remove_unused(_left_to_others.pop())


def _fork_all() -> None:
    for member in list(_members):
        member.fork()
    _leave_at_exit()


def _leave_at_exit(_: object = None) -> None:
    """Leave after the children of this process were joined, since a worker that is killed removes nothing."""
    util.Finalize(None, _leave_all, exitpriority=_LAST)


@cache
def _watch() -> None:
    at_fork(after_in_child=_fork_all)
    util.register_after_fork(_leave_all, _leave_at_exit)  # a multiprocessing.Process does not inherit finalizers
    _leave_at_exit()


def remove_on_sigterm() -> None:
    """Make SIGTERM leave all segments of this process before it does what it did before.

    A library installs no signal handlers on its own, and the default action of SIGTERM runs no atexit handlers, so the
    segment of a cancelled job stays until a process opens or cleans it. After this call the last process removes it,
    as at a normal exit. Children that are forked later inherit the handler. Further calls change nothing. Raises
    ValueError outside the main thread.
    """
    before = signal.getsignal(signal.SIGTERM)
    if getattr(before, "leaves_caches", False):
        return

    def leave(number: int, frame: FrameType | None) -> None:
        if before == signal.SIG_IGN:
            return
        _leave_all()
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    leave.leaves_caches = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, leave)


@dataclass(frozen=True)
class CacheInfo:
    """One segment. An incomplete or damaged one has no slots, and the size of its file as capacity.

    title: the data set's name, from the first user. users: process ids of the living, each in its own namespace. age_s:
    seconds since the creation.
    """

    name: str
    uid: int
    job: str
    fingerprint: str
    kind: str
    slots: int
    capacity_bytes: int
    used_bytes: int
    in_use: bool
    users: tuple[int, ...]
    stats: CacheStats
    age_s: float
    persist: bool
    title: str = ""


def list_caches(directory: str | Path = "/dev/shm") -> list[CacheInfo]:
    """The segments of this user in a directory, by name."""
    return [_describe(path, file) for path, file in _files(Path(directory))]


def clean_caches(
    directory: str | Path = "/dev/shm", *, all: bool = False, names: Collection[str] | None = None
) -> list[CacheInfo]:
    """Remove the segments of this user that are not in use, with `all` also persistent ones; returns them.

    names: only segments of these names.
    """
    caches = [(path, file) for path, file in _files(Path(directory)) if names is None or path.name in names]
    return [info for path, file in caches if (info := _describe(path, file)) and remove_unused(path, persistent=all)]


def _files(directory: Path) -> Iterator[tuple[Path, ByteLocks]]:
    require_shared_memory()
    for path in sorted(directory.iterdir()):
        if NAME.fullmatch(path.name):
            with contextlib.suppress(ForeignCacheError):
                file = open_file(path)
                if file is not None and begins_like_ours(file.number):
                    yield path, file


def _describe(path: Path, file: ByteLocks) -> CacheInfo:
    facts = os.fstat(file.number)
    try:
        header = read_header(file.number, str(path))
    except ForeignCacheError:
        header = None
    if header is None:
        age = max(0.0, time.time() - facts.st_mtime)
        is_used, nothing = file.is_locked(USE), CacheStats()
        return CacheInfo(path.name, facts.st_uid, "", "", "", 0, facts.st_size, 0, is_used, (), nothing, age, False)
    layout, content, _ = header
    segment = Segment(layout, file, memoryview(mmap.mmap(file.number, layout.arena_at, prot=mmap.PROT_READ)), _NO_ARENA)
    users = Users(segment.table, file)
    return CacheInfo(
        name=path.name,
        uid=facts.st_uid,
        **{name: str(content.get(name, "")) for name in ("job", "fingerprint", "kind", "title")},
        slots=layout.slots,
        capacity_bytes=layout.capacity_bytes,
        used_bytes=segment.slots.tail - layout.arena_at,
        in_use=file.is_locked(USE),
        users=tuple(users.pids()),
        stats=users.stats(),
        age_s=max(0.0, time.time() - content["created_ns"] / 1e9),
        persist=segment.persist,
    )
