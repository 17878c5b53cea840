"""Removing staged copies: on request, when a quota is full, when their source has changed.

Only files that a copy's own record names are removed, only from a directory with the marker of staging, and only where
no process holds the copy. A copy is first renamed inside the store, so that no process opens it half removed; files of
others stay in that directory, and are reported. Symbolic links are never followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cache.errors import NoRoomError
from cache.files import Folder
from cache.staging.copies import REMOVING_PREFIX, Copy, Store, load_copy
from cache.staging.sources import INNER_FOLDER

__all__ = ["Removed", "discard", "evictable_bytes", "make_room", "remove_copies", "sweep"]


@dataclass(frozen=True, slots=True)
class Removed:
    """One removal. kept: why the copy is still there, "" where it is not. foreign: files of others in it."""

    path: Path
    source: str
    bytes: int
    kept: str = ""
    foreign: tuple[Path, ...] = ()


def remove_copies(store: Store, chosen: Callable[[Copy], bool], dry_run: bool = False) -> list[Removed]:
    """Remove the copies for which `chosen` is true, unless a process holds them; under the lock of the store."""
    return [_remove(copy, dry_run) for copy in store.copies() if chosen(copy)]


def make_room(
    store: Store, path: Path, planned: int, quota_bytes: int | None, enough: Callable[[], bool]
) -> list[Removed]:
    """Remove least recently used copies until `planned` bytes at `path` fit the quota, and `enough` is true.

    Under the lock of the store. Without a quota nothing is removed. Raises NoRoomError where those in use are too many.
    """
    removed: list[Removed] = []
    if quota_bytes is None:
        return removed
    others = [other for other in store.copies() if other.path != path]
    total = planned + sum(other.planned_bytes for other in others)
    if planned > quota_bytes:
        raise NoRoomError(f"{path}: {planned:,} bytes to be staged, the quota is {quota_bytes:,}; stage less of it")
    for other in others:
        if total <= quota_bytes and enough():
            break
        gone = _remove(other, dry_run=False)
        removed.append(gone)
        total -= 0 if gone.kept else other.planned_bytes
    if total > quota_bytes:
        held = ", ".join(gone.path.name for gone in removed if gone.kept)
        raise NoRoomError(f"{store.path}: {total:,} bytes with this set, the quota is {quota_bytes:,}; in use: {held}")
    return [gone for gone in removed if not gone.kept]


def evictable_bytes(store: Store, but: str) -> int:
    """Bytes of copies that no process holds, other than the one in the directory called `but`."""
    return sum(copy.stored_bytes() for copy in store.copies() if copy.path.name != but and not copy.in_use())


def discard(copy: Copy) -> None:
    """Remove the directories of a copy that was never recorded."""
    _remove_empty((copy.inner, copy.path))


def sweep(store: Store, dry_run: bool = False) -> list[Removed]:
    """Finish removals that were interrupted; under the lock of the store."""
    swept: list[Removed] = []
    for copy in store.leaving():
        size = copy.stored_bytes()
        swept.append(Removed(copy.path, copy.source, size, foreign=() if dry_run else tuple(_empty(copy))))
    if not dry_run:
        for path in store.path.glob(f"{REMOVING_PREFIX}*"):  # of a removal that was killed after its last file
            _remove_empty((path / INNER_FOLDER, path))
    return swept


def _remove(copy: Copy, dry_run: bool) -> Removed:
    size = copy.stored_bytes()
    if not (copy.users.take() and copy.leader.take()):
        copy.users.release()
        return Removed(copy.path, copy.source, size, kept="in use")
    try:
        if dry_run:
            return Removed(copy.path, copy.source, size)
        moved = copy.path.with_name(f"{REMOVING_PREFIX}{os.getpid()}-{copy.path.name}")
        with Folder(copy.path.parent) as store:
            store.rename(copy.path.name, moved.name)
        gone = load_copy(moved)
        return Removed(copy.path, copy.source, size, foreign=tuple(_empty(gone)) if gone else ())
    finally:
        copy.leader.release()
        copy.users.release()


def _empty(copy: Copy) -> list[Path]:
    """Remove a copy's own files, its empty directories, and its record last; returns the files that are not its own."""
    known = {file.path for file in copy.files}
    foreign: list[Path] = []
    for folder, folders, names in os.walk(copy.path, topdown=False, followlinks=False):
        if Path(folder) == copy.inner:
            continue
        for name in names + [name for name in folders if (Path(folder) / name).is_symlink()]:
            path = Path(folder) / name
            if path.relative_to(copy.path).as_posix() in known:
                path.unlink(missing_ok=True)
            else:
                foreign.append(path)
        _remove_empty(Path(folder) / name for name in folders if name != INNER_FOLDER)
    if not foreign and copy.is_recorded():
        inner = sorted(copy.inner.iterdir(), key=lambda path: path.name == "copy.json")
        for path in inner:
            path.unlink()
        _remove_empty((copy.inner, copy.path))
    return foreign


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # not empty, or a symbolic link
            pass
