"""One staged copy: a directory of our store, and `.staging/` in it.

    <set>-<fingerprint>/
      dataset.json, shards, …      under the names they have in the source; each was renamed from a whole temporary file
      .staging/
        copy.json                  which source, its fingerprint, all its files, and which of them are wanted here
        ready.json                 files that are here and were checked; written last
        leader                     flock, exclusive: held by the one process that copies
        users                      flock, shared: held by everybody who reads; its mtime is the last use
        progress                   bytes that are here so far, as text, written by the leader
        part-…                     a file on its way

Whoever holds `leader` may add files and write ready.json; whoever gets `users` and `leader` exclusively may remove the
directory; copy.json changes under the lock of the store. A file under its own name is whole and was synced first.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cache.errors import StagingError
from cache.staging.files import INNER_FOLDER, Manifest, inside, total_bytes
from cache.staging.locks import FileLock, is_locked
from cache.staging.records import is_own_folder, read_record, write_record
from cache.staging.sources import StagedFile

__all__ = ["COPY_KIND", "PART_PREFIX", "Copy", "Ready", "load_copy", "new_copy"]

COPY_KIND = "packer-staged-copy"
PART_PREFIX = "part-"
_READY_KIND = "packer-staged-ready"
Ready = dict[str, tuple[int, int | None, float]]  # path -> bytes, CRC32C, time of the last check of its bytes


class Copy:
    """A directory of the store. `files` are all of the source's, `wanted` the paths that were asked for so far."""

    def __init__(self, path: Path, source: str, fingerprint: str, files: tuple[StagedFile, ...], wanted: set[str]):
        self.path, self.source, self.fingerprint, self.files, self.wanted = path, source, fingerprint, files, wanted
        self.inner = path / INNER_FOLDER
        self.leader = FileLock(self.inner / "leader")
        self.users = FileLock(self.inner / "users", inherited=True)

    @property
    def planned_bytes(self) -> int:
        """What it takes when all that is wanted is here."""
        return total_bytes(file for file in self.files if file.path in self.wanted)

    def stored_bytes(self) -> int:
        """What its files take now, those on their way included."""
        sizes = (_regular_size(self.path / file.path) or 0 for file in self.files)
        return sum(sizes) + sum(_regular_size(part) or 0 for part in self.parts())

    def parts(self) -> list[Path]:
        try:
            return [path for path in self.inner.iterdir() if path.name.startswith(PART_PREFIX)]
        except OSError:
            return []

    def in_use(self) -> bool:
        """Whether anybody, this process included, reads it or writes to it."""
        return is_locked(self.users.path) or is_locked(self.leader.path)

    def last_use(self) -> float:
        """When somebody last began or ended to use it, in seconds since the epoch."""
        try:
            return self.users.path.lstat().st_mtime
        except OSError:
            return 0.0

    def hold(self, seconds: float = 10.0) -> bool:
        """Take the users' lock; False where the copy was removed meanwhile."""
        end = time.monotonic() + seconds
        while not self.users.take(shared=True):
            if not self.inner.is_dir():
                return False
            if time.monotonic() > end:
                raise StagingError(f"{self.path}: is being removed by another process; try again")
            time.sleep(0.01)
        os.utime(self.users.path)
        return True

    def let_go(self) -> None:
        if self.users.held:
            try:
                os.utime(self.users.path)
            except OSError:
                pass
            self.users.release()

    def want(self, paths: Iterable[str]) -> None:
        """Add to what is wanted; under the lock of the store. Raises OSError."""
        self.wanted |= set(paths)
        self.save()

    def save(self) -> None:
        content = {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "files": [[file.path, file.bytes, file.crc32c] for file in self.files],
            "wanted": sorted(self.wanted),
        }
        write_record(self.inner / "copy.json", COPY_KIND, self.path, content)

    def ready(self) -> Ready:
        """What ready.json vouches for; sizes on the disk are not looked at here."""
        record = read_record(self.inner / "ready.json", _READY_KIND, self.path) or {}
        files = record.get("files")
        try:
            return {path: (int(size), crc, float(at)) for path, (size, crc, at) in files.items()} if files else {}
        except (AttributeError, TypeError, ValueError):
            return {}

    def ready_stamp(self) -> int:
        """Changes whenever ready.json is written; 0 where there is none."""
        try:
            return (self.inner / "ready.json").lstat().st_mtime_ns
        except OSError:
            return 0

    def write_ready(self, ready: Ready) -> None:
        write_record(self.inner / "ready.json", _READY_KIND, self.path, {"files": ready})

    def has(self, file: StagedFile) -> bool:
        """Whether a regular file of the right size is in place."""
        return _regular_size(self.path / file.path) == file.bytes


def new_copy(store: Path, manifest: Manifest) -> Copy:
    """The directory for a manifest's copy, made or found; under the lock of the store. Raises OSError, StagingError."""
    path = store / manifest.folder_name
    if path.is_symlink() or (path.exists() and not is_own_folder(path)):
        raise StagingError(f"{path}: is not a directory of our own; remove it, or choose another target")
    known = load_copy(path)
    if known is not None:
        return known
    copy = Copy(path, str(manifest.source), manifest.fingerprint, manifest.files, set())
    if path.exists() and any(entry.name != INNER_FOLDER for entry in path.iterdir()):
        raise StagingError(f"{path}: holds files but no marker of ours, so nothing is written into it; remove it")
    if copy.inner.is_symlink():
        raise StagingError(f"{copy.inner}: is a symbolic link, which nothing of ours is; remove it")
    copy.inner.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return copy


def load_copy(path: Path) -> Copy | None:
    """The copy in a directory; None where it carries no marker of ours."""
    if not is_own_folder(path) or not is_own_folder(path / INNER_FOLDER):
        return None
    record = read_record(path / INNER_FOLDER / "copy.json", COPY_KIND, path)
    if record is None:
        return None
    try:
        files = tuple(StagedFile(*_checked_entry(entry)) for entry in record["files"])
        wanted = {name for name in record["wanted"] if isinstance(name, str)}
        return Copy(path, str(record["source"]), str(record["fingerprint"]), files, wanted)
    except (KeyError, TypeError, ValueError):
        return None


def _checked_entry(entry: Any) -> tuple[str, int, int | None]:
    path, size, crc = entry
    if not inside(path) or not isinstance(size, int) or not (crc is None or isinstance(crc, int)):
        raise ValueError("not a file of a copy")
    return path, size, crc


def _regular_size(path: Path) -> int | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
