"""One process's use of a segment: its lock, its number, the table's lock; and what a fork makes of them.

A forked child goes on with the mapping it was born with. It closes its copy of the parent's lock, which would
otherwise keep the parent alive in the kernel's eyes, and becomes a user of its own, before any code of the child
runs. A child that cannot (no /proc, no number left) reads and does not fill.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from functools import cache
from multiprocessing import util
from pathlib import Path

import crc32c

from cache.shared.file import remove_unused
from cache.shared.layout import word_of
from cache.shared.locks import USE, Descriptor, Mutex, wait_shared
from cache.shared.segment import Backend, Segment
from cache.shared.users import Users

__all__ = ["Membership", "leave_all"]

_FORK_WAIT_S = 2.0
_LAST = -100
_members: weakref.WeakSet[Membership] = weakref.WeakSet()
_left_to_others: set[Path] = set()  # whom a signal may have ended by the time that we do


class Membership:
    """Being a user of a segment, until `leave`."""

    def __init__(self, backend: Backend, segment: Segment, lock: Descriptor) -> None:
        self.backend, self.segment = backend, segment
        self._lock: Descriptor | None = None
        self.counting = threading.Lock()
        self._sign_on(lock)
        _watch()
        _members.add(self)

    def leave(self) -> None:
        """Be no user any more; the last one removes the segment, unless it persists. Again: nothing."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        lock.let_go(USE)  # first, so that of two who leave at once one comes second and gets it alone
        if lock.try_alone(USE):
            self.backend.leave_last(self.segment)
        elif self.segment.path is not None:
            _left_to_others.add(self.segment.path)

    def fill(self, slot: int, data: memoryview) -> bool:
        """Claim the slot, write, publish. False where it is taken, the arena is full or the lock stuck."""
        mutex, users, table = self.mutex, self.users, self.segment.slots
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
            crc = crc32c.crc32c(data)
            self.segment.write(start, data)
        except BaseException:
            table.abandon(slot, word, users.owner)
            raise
        held = mutex.acquire()  # for the order of stores; a claimed slot is its claimant's, so it works without, too
        try:
            return table.publish(slot, word, crc, users.owner)
        finally:
            if held:
                mutex.release()

    def erase(self, slot: int) -> None:
        """Empty the slot, even if the lock is stuck: at worst a fill of this moment is lost."""
        mutex = self.mutex
        held = mutex.acquire()
        try:
            self.segment.slots.erase(slot)
        finally:
            if held:
                mutex.release()

    def settle(self, slot: int, word: int, right: bool) -> bool:
        """What came of checking a word that a crash had left. False where somebody else has settled it."""
        mutex = self.mutex
        if not mutex.acquire():
            return False
        try:
            return self.segment.slots.settle(slot, word, right)
        finally:
            mutex.release()

    def fork(self) -> None:
        """In the child: leave the parent's locks to the parent."""
        if self._lock is None:
            return
        self._lock = None
        self.counting = threading.Lock()
        self.users = Users(self.segment.table, self.segment.anchor)
        self.mutex = Mutex(self.segment.anchor)
        with contextlib.suppress(OSError):
            lock = self.segment.anchor.reopened()
            wait_shared(lock, USE, _FORK_WAIT_S, "the segment")
            self._sign_on(lock)

    def _sign_on(self, lock: Descriptor) -> None:
        self.users = Users(self.segment.table, lock)
        self.users.join()
        self.mutex = Mutex(lock)
        self._lock = lock


def leave_all() -> None:
    """End this process's use of every segment, as happens at exit."""
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
    """Once this process's own children have been ended and joined: a worker that is killed can remove nothing."""
    util.Finalize(None, leave_all, exitpriority=_LAST)


@cache
def _watch() -> None:
    os.register_at_fork(after_in_child=_fork_all)
    util.register_after_fork(leave_all, _leave_at_exit)  # a Process forgets what its parent was to do at exit
    _leave_at_exit()
