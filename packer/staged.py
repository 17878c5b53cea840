"""The staged copies of this node: which there are, and removing those that nobody uses.

Only directories that carry our marker are looked at; see `cache.staging`. Making a copy is `readers.stage`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache.remote import is_remote
from cache.staging import Copy, Removed, Store, candidates, find_store, remove_copies, sweep
from packer.place import place_told
from readers.errors import StagingError

__all__ = ["CleanResult", "StagedCopy", "clean_staged", "staged_copies"]


@dataclass(frozen=True)
class StagedCopy:
    """One copy. bytes: on the disk now, of wanted_bytes. last_use: seconds since the epoch.

    leaving: it is being removed, or whoever removed it was killed; `clean_staged` and the next staging finish that.
    """

    path: str
    source: str
    bytes: int
    wanted_bytes: int
    last_use: float
    in_use: bool
    leaving: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CleanResult:
    """What was removed, and what was kept because somebody uses it."""

    removed: tuple[StagedCopy, ...]
    kept: tuple[StagedCopy, ...]
    foreign: tuple[str, ...]  # files in removed copies that were not ours; they are still there

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def staged_copies(to: str | os.PathLike[str] | None = None) -> list[StagedCopy]:
    """The copies in a target directory (None: in all that staging would look at), least recently used first."""
    stores = _stores(to)
    leaving = [_described(copy, leaving=True) for store in stores for copy in store.leaving()]
    return leaving + [_described(copy) for store in stores for copy in store.copies()]


def clean_staged(
    dataset: str | os.PathLike[str] | None = None, to: str | os.PathLike[str] | None = None, *, dry_run: bool = False
) -> CleanResult:
    """Remove the copies of a set (None: all copies) that nobody uses, and what interrupted removals left of any.

    Raises StagingError.
    """
    source = None if dataset is None else _source_text(dataset)

    def chosen(copy: Copy) -> bool:
        return source is None or source in (copy.source, os.path.realpath(copy.path))

    removed, kept, foreign = list[StagedCopy](), list[StagedCopy](), list[str]()
    for store in _stores(to):
        with store.lock():
            described = {copy.path: _described(copy) for copy in store.copies()}
            described |= {copy.path: _described(copy, leaving=True) for copy in store.leaving()}
            for gone in [*sweep(store, dry_run), *remove_copies(store, chosen, dry_run)]:
                if gone.bytes or not gone.foreign:  # else only files of others have stayed there
                    (kept if gone.kept else removed).append(described[gone.path])
                foreign += _paths(gone)
    return CleanResult(tuple(removed), tuple(kept), tuple(foreign))


def _source_text(dataset: str | os.PathLike[str]) -> str:
    """A set as records of copies call it."""
    return str(place_told(dataset)) if is_remote(dataset) else os.path.realpath(dataset)


def _stores(to: str | os.PathLike[str] | None) -> list[Store]:
    """Our directories in the candidates; those that are not ours are an error only where the user named one."""
    found: dict[Path, Store] = {}
    for target in candidates(to):
        try:
            store = find_store(target.path)
        except (StagingError, OSError):
            if to is not None:
                raise
            continue
        if store is not None:
            found.setdefault(store.path.resolve(), store)
    return list(found.values())


def _described(copy: Copy, leaving: bool = False) -> StagedCopy:
    size, wanted = copy.stored_bytes(), copy.planned_bytes
    return StagedCopy(str(copy.path), copy.source, size, wanted, copy.last_use(), copy.in_use(), leaving)


def _paths(gone: Removed) -> list[str]:
    return [str(path) for path in gone.foreign]
