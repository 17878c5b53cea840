"""The staging directory in a target, its copies and their records.

    <target>/packer-staged-<uid>/    private to its user
      .packer-staged                 marker: unless it was made for this very directory, nothing below is touched
      lock                           flock, exclusive, held briefly: while copies are added, counted or removed
      removing-…                     a copy that is being removed; the next process with the lock finishes the removal
      <set>-<fingerprint>/           one copy
        dataset.json, shards, …      under their names in the source; each renamed from a complete temporary file
        .staging/
          copy.json                  the source, its fingerprint, all its files, and which of them are requested
          ready.json                 files that were copied and checked; written last
          leader                     flock, exclusive: held by the one process that copies
          users                      flock, shared: held by every process that reads; its mtime is the last use
          progress                   bytes that were copied so far, as text, written by the leader
          part-…                     a file that is being copied

The process with `leader` may add files and write ready.json; a process that gets `users` and `leader` exclusively may
remove the directory; copy.json changes under the lock of the store. A file under its final name is complete and synced.

Records are small JSON files that name their kind, their version and the inode of their directory. A marker that was
copied or forged does not match the inode, and is ignored.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import NoRoomError, NoTargetError, StagingError
from cache.files import Folder, atomic_write, is_temporary
from cache.locks import FlockFile, is_locked, locked
from cache.staging.sources import INNER_FOLDER, Manifest, StagedFile, inside, total_bytes

PART_PREFIX = "part-"
REMOVING_PREFIX = "removing-"
_MARKER = ".packer-staged"
_STORE_KIND, _COPY_KIND, _READY_KIND = "packer-staged-store", "packer-staged-copy", "packer-staged-ready"
_VERSION = 1
MAX_RECORD_BYTES = 1 << 28
Ready = dict[str, tuple[int, int | None, float]]  # path -> bytes, CRC32C, time of the last check of its bytes


class Copy:
    """A directory of the store. `files` are all files of the source, `wanted` the paths requested so far."""

    def __init__(self, path: Path, source: str, fingerprint: str, files: tuple[StagedFile, ...], wanted: set[str]):
        self.path, self.source, self.fingerprint, self.files, self.wanted = path, source, fingerprint, files, wanted
        self.inner = path / INNER_FOLDER
        self.leader = FlockFile(self.inner / "leader")
        self.users = FlockFile(self.inner / "users", inherited=True)

    @property
    def planned_bytes(self) -> int:
        """Its size when all requested files are copied."""
        return total_bytes(file for file in self.files if file.path in self.wanted)

    def stored_bytes(self) -> int:
        """The current size of its files, including partial ones."""
        paths = [f"{self.path}/{file.path}" for file in self.files] + list(map(str, self.parts()))
        return sum(_regular_size(path) or 0 for path in paths)

    def parts(self) -> list[Path]:
        try:
            return [path for path in self.inner.iterdir() if path.name.startswith(PART_PREFIX)]
        except OSError:
            return []

    def in_use(self) -> bool:
        """Whether any process, this one included, reads it or writes to it."""
        return is_locked(self.users.path) or is_locked(self.leader.path)

    def last_use(self) -> float:
        """When a process last began or stopped using it, in seconds since the epoch."""
        try:
            return self.users.path.lstat().st_mtime
        except OSError:
            return 0.0

    def hold(self, seconds: float = 10.0) -> bool:
        """Take the users' lock; False if the copy has been removed."""
        end = time.monotonic() + seconds
        while not self.users.take(shared=True):
            if not self.inner.is_dir():
                return False
            if time.monotonic() > end:
                raise StagingError(f"{self.path}: is being removed by another process; try again")
            time.sleep(0.01)
        os.utime(self.users.path)
        return True

    def release(self) -> None:
        if self.users.is_held:
            try:
                os.utime(self.users.path)
            except OSError:
                pass
            self.users.release()

    def save(self) -> None:
        """Write the record of the copy. The caller holds the lock of the store. Raises OSError."""
        content = {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "files": [[file.path, file.bytes, file.crc32c] for file in self.files],
            "wanted": sorted(self.wanted),
        }
        _write_record(self.inner / "copy.json", _COPY_KIND, self.path, content)

    def is_recorded(self) -> bool:
        return _read_record(self.inner / "copy.json", _COPY_KIND, self.path) is not None

    def ready(self) -> Ready:
        """The content of ready.json, without comparing sizes on the disk."""
        record = _read_record(self.inner / "ready.json", _READY_KIND, self.path) or {}
        files = record.get("files")
        try:
            return {path: (int(size), crc, float(at)) for path, (size, crc, at) in files.items()} if files else {}
        except (AttributeError, TypeError, ValueError):
            return {}

    def ready_stamp(self) -> int:
        """A value that changes whenever ready.json is written; 0 if it does not exist."""
        try:
            return (self.inner / "ready.json").lstat().st_mtime_ns
        except OSError:
            return 0

    def write_ready(self, ready: Ready) -> None:
        _write_record(self.inner / "ready.json", _READY_KIND, self.path, {"files": ready})

    def progress(self) -> int:
        """Bytes that were copied, as last written by the leader; 0 without a record."""
        try:
            with Folder(self.inner) as inner:
                return int(inner.read("progress", 32))
        except (OSError, ValueError):
            return 0

    def write_progress(self, done_bytes: int) -> None:
        """Write the number of bytes copied, not durably. Raises OSError."""
        with Folder(self.inner) as inner:
            inner.write("progress", f"{done_bytes}\n".encode(), durable=False)

    def has(self, file: StagedFile) -> bool:
        """Whether a regular file of the right size is in place."""
        return _regular_size(f"{self.path}/{file.path}") == file.bytes


def new_copy(store: Path, manifest: Manifest) -> Copy:
    """Create or find the directory for a copy. The caller holds the store's lock. Raises OSError, StagingError."""
    path = store / manifest.folder_name
    if path.is_symlink() or (path.exists() and not is_own_folder(path)):
        raise StagingError(f"{path}: is not a directory of this user alone; remove it, or choose another target")
    known = load_copy(path)
    if known is not None:
        return known
    copy = Copy(path, str(manifest.source), manifest.fingerprint, manifest.files, set())
    if path.exists() and any(entry.name != INNER_FOLDER for entry in path.iterdir()):
        raise StagingError(f"{path}: has files but no marker of staging, so nothing is written to it; remove it")
    if copy.inner.is_symlink():
        raise StagingError(f"{copy.inner}: is a symbolic link, which staging never creates; remove it")
    copy.inner.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return copy


def load_copy(path: Path) -> Copy | None:
    """The copy in a directory; None without a valid record."""
    if not is_own_folder(path) or not is_own_folder(path / INNER_FOLDER):
        return None
    record = _read_record(path / INNER_FOLDER / "copy.json", _COPY_KIND, path)
    if record is None:
        return None
    try:
        files = tuple(StagedFile(*_checked_entry(entry)) for entry in record["files"])
        requested = {name for name in record["wanted"] if isinstance(name, str)}
        return Copy(path, str(record["source"]), str(record["fingerprint"]), files, requested)
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Store:
    """A marked staging directory."""

    path: Path

    def lock(self) -> AbstractContextManager[None]:
        """The lock for adding, counting or removing copies."""
        return locked(self.path / "lock")

    def copies(self) -> list[Copy]:
        """Copies with a valid record, least recently used first; all other files are ignored."""
        return sorted(self._load(leaving=False), key=Copy.last_use)

    def leaving(self) -> list[Copy]:
        """Copies that are being removed, or whose removal was interrupted or found foreign files."""
        return self._load(leaving=True)

    def _load(self, leaving: bool) -> list[Copy]:
        try:
            names = sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return []
        copies = (load_copy(self.path / name) for name in names if name.startswith(REMOVING_PREFIX) == leaving)
        return [copy for copy in copies if copy is not None]


def find_store(target: Path) -> Store | None:
    """The staging directory in a target; None if there is none. Raises NoTargetError if its name is taken."""
    path = _store_path(target)
    if not path.is_symlink() and not path.exists():
        return None
    if not is_own_folder(path):
        raise NoTargetError(f"{path} is not a directory that belongs to this user alone, so it is not touched")
    if _read_record(path / _MARKER, _STORE_KIND, path) is None:
        if all(is_temporary(entry.name) or entry.name == _MARKER for entry in path.iterdir()):
            return None  # another process is writing the marker now
        if _read_record(path / _MARKER, _STORE_KIND, path) is None:  # the marker is written before any other file
            raise NoTargetError(f"{path} has files but not the marker of a staging directory, so they are not touched")
    return Store(path)


def make_store(target: Path) -> Store:
    """The staging directory in a target; created if missing. Raises NoTargetError, OSError."""
    path = _store_path(target)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    if find_store(target) is None:
        _write_record(path / _MARKER, _STORE_KIND, path, {})  # concurrent processes write the same content
    return Store(path)


def is_own_folder(path: Path) -> bool:
    """Whether a path is a directory (not a link) of this user that no other user may write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _store_path(target: Path) -> Path:
    return target / f"packer-staged-{os.geteuid()}"


def _write_record(path: Path, kind: str, folder: Path, content: dict[str, Any]) -> None:
    """Write a record about `folder`. Raises OSError."""
    whole = {"kind": kind, "version": _VERSION, "inode": folder.lstat().st_ino, **content}
    data = json.dumps(whole).encode()
    if len(data) > MAX_RECORD_BYTES:
        raise StagingError(
            f"{folder}: the names of its files take {len(data):,} bytes, the limit is {MAX_RECORD_BYTES:,}; stage "
            f"one split at a time, or the shards"
        )
    atomic_write(path, data, mode=0o600)


def _read_record(path: Path, kind: str, folder: Path) -> dict[str, Any] | None:
    """The record of `folder`; None unless it has this kind and was written for this very folder."""
    try:
        with Folder(path.parent) as parent, parent.open(path.name) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_size > MAX_RECORD_BYTES:
                return None
            content = json.loads(file.read())
        inode = folder.lstat().st_ino
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("kind") != kind or content.get("version") != _VERSION:
        return None
    return content if content.get("inode") == inode else None


def _checked_entry(entry: Any) -> tuple[str, int, int | None]:
    path, size, crc = entry
    if not inside(path) or not isinstance(size, int) or not (crc is None or isinstance(crc, int)):
        raise ValueError("not a file of a copy")
    return path, size, crc


def _regular_size(path: str) -> int | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


# Removing staged copies: on request, when a quota is exceeded, when their source has changed.
#
# Only files that a copy's record names are removed, only from a directory with the marker of staging, and only while
# no process uses the copy. A copy is first renamed inside the store, so that no process opens a half-removed one;
# foreign files stay in that directory, and are reported. Symbolic links are never followed.


@dataclass(frozen=True, slots=True)
class Removed:
    """One removal. kept: why the copy is still there, "" if it is not. foreign: files in it that are not its own."""

    path: Path
    source: str
    bytes: int
    kept: str = ""
    foreign: tuple[Path, ...] = ()


def remove_copies(store: Store, chosen: Callable[[Copy], bool], dry_run: bool = False) -> list[Removed]:
    """Remove the unused copies for which `chosen` is true. The caller holds the lock of the store."""
    return [_remove(copy, dry_run) for copy in store.copies() if chosen(copy)]


def make_room(
    store: Store, path: Path, planned: int, quota_bytes: int | None, enough: Callable[[], bool]
) -> list[Removed]:
    """Remove least recently used copies until `planned` bytes at `path` fit the quota, and `enough` is true.

    The caller holds the lock of the store. Without a quota nothing is removed. Raises NoRoomError if copies in use take
    too much room.
    """
    removed: list[Removed] = []
    if quota_bytes is None:
        return removed
    others = [other for other in store.copies() if other.path != path]
    total = planned + sum(other.planned_bytes for other in others)
    if planned > quota_bytes:
        raise NoRoomError(f"{path}: {planned:,} bytes to stage, the quota is {quota_bytes:,}; stage less of it")
    for other in others:
        if total <= quota_bytes and enough():
            break
        gone = _remove(other, dry_run=False)
        removed.append(gone)
        total -= 0 if gone.kept else other.planned_bytes
    if total > quota_bytes:
        in_use = ", ".join(gone.path.name for gone in removed if gone.kept)
        raise NoRoomError(
            f"{store.path}: {total:,} bytes with this set, the quota is {quota_bytes:,}; in use: {in_use}"
        )
    return [gone for gone in removed if not gone.kept]


def evictable_bytes(store: Store, but: str) -> int:
    """Bytes of unused copies, except the one in the directory `but`."""
    return sum(copy.stored_bytes() for copy in store.copies() if copy.path.name != but and not copy.in_use())


def discard(copy: Copy) -> None:
    """Remove the directories of a copy that was never recorded."""
    _remove_empty((copy.inner, copy.path))


def sweep(store: Store, dry_run: bool = False) -> list[Removed]:
    """Finish interrupted removals. The caller holds the lock of the store."""
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
    """Remove a copy's files, its empty directories, and its record last; returns the foreign files."""
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
