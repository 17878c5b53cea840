"""The directory in a target that is ours: `<target>/packer-staged-<uid>/`, private to its user.

.packer-staged      marker: without it, made for this very directory, nothing below is touched
lock                flock, exclusive, for moments: while copies are added, counted or removed
<set>-<fingerprint>/  one copy each, see `cache.staging.copies`
removing-…            a copy on its way out; whoever has the lock finishes the removal
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from cache.errors import NoTargetError
from cache.staging.copies import Copy, load_copy
from cache.staging.locks import locked
from cache.staging.records import is_own_folder, read_record, write_record

__all__ = ["REMOVING_PREFIX", "Store", "find_store", "make_store", "store_path"]

REMOVING_PREFIX = "removing-"
_MARKER = ".packer-staged"
_KIND = "packer-staged-store"


@dataclass(frozen=True, slots=True)
class Store:
    """A marked directory of ours."""

    path: Path

    def lock(self) -> AbstractContextManager[None]:
        """Hold this while copies are added, counted or removed."""
        return locked(self.path / "lock")

    def copies(self) -> list[Copy]:
        """Copies that carry our marker, least recently used first; anything else here is passed over."""
        shown = (load_copy(path) for path in self._folders() if not path.name.startswith(REMOVING_PREFIX))
        return sorted((copy for copy in shown if copy is not None), key=Copy.last_use)

    def leaving(self) -> list[Copy]:
        """Copies on their way out: somebody is removing them now, was killed doing so, or met files of others there."""
        shown = (load_copy(path) for path in self._folders() if path.name.startswith(REMOVING_PREFIX))
        return [copy for copy in shown if copy is not None]

    def _folders(self) -> list[Path]:
        try:
            return sorted(
                self.path / entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False)
            )
        except OSError:
            return []


def store_path(target: Path) -> Path:
    """Where our directory in a target is, or would be."""
    return target / f"packer-staged-{os.geteuid()}"


def find_store(target: Path) -> Store | None:
    """Our directory in a target; None where there is none. Raises NoTargetError where its name is taken."""
    path = store_path(target)
    if not path.is_symlink() and not path.exists():
        return None
    if not is_own_folder(path):
        raise NoTargetError(f"{path} is not a directory that belongs to this user alone, so nothing is done in it")
    if read_record(path / _MARKER, _KIND, path) is None:
        if _is_new(path):
            return None
        raise NoTargetError(f"{path} holds files but not the marker of a staging directory, so they stay as they are")
    return Store(path)


def make_store(target: Path) -> Store:
    """Our directory in a target, made where it is missing. Raises NoTargetError, OSError."""
    path = store_path(target)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    store = find_store(target)
    if store is None:
        write_record(path / _MARKER, _KIND, path, {})  # several processes may do so at once: they write the same
        store = Store(path)
    return store


def _is_new(path: Path) -> bool:
    """Whether it holds nothing but a marker that somebody is writing now."""
    return all(entry.name.startswith(_MARKER) for entry in path.iterdir())
