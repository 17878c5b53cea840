"""Locks in forked processes.

A forked child has one thread and every lock as it was at that moment: one that another thread of the parent had is held
in the child for ever. So whoever owns a lock that a child may need is told in the child, before any of its code runs,
and makes a new one. Nobody is kept alive for that.

    self._lock = threading.Lock()
    tell_after_fork(self)                  # calls self.after_fork() in every forked child
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from threading import Event
from typing import Protocol

__all__ = ["Forked", "renewed_event", "tell_after_fork"]


class Forked(Protocol):
    """Has locks that must be made again in a forked child."""

    def after_fork(self) -> None: ...


_owners: weakref.WeakValueDictionary[int, Forked] = weakref.WeakValueDictionary()


def tell_after_fork(owner: Forked) -> None:
    """Call `owner.after_fork()` in every child that this process forks from now on, while `owner` lives."""
    _watch()
    _owners[id(owner)] = owner


def renewed_event(event: Event) -> Event:
    """A new event that is set if this one is; an event has a lock inside."""
    new = Event()
    if event.is_set():
        new.set()
    return new


@cache
def _watch() -> None:
    os.register_at_fork(after_in_child=_tell_all)


def _tell_all() -> None:
    for owner in list(_owners.values()):
        owner.after_fork()
