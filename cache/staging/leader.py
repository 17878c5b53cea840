"""One of the processes of a node copies, the others wait; whoever finds the leader gone leads.

    take `leader` ── got it ──► look at what is here ──► room? ──► copy the rest ──► ready.json
          │
          └─ busy ──► show progress, try again

Every process goes through the lock once, so every one has seen for itself that all files are there, with the right
sizes. A leader that died left whole files under their names and parts in `.staging/`: its successor keeps the former
and removes the latter. A leader that fails tells its own caller; the others try themselves and learn why.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cache.errors import NoRoomError, StagingError, StoppedError
from cache.staging.copies import PART_PREFIX, Copy, Ready
from cache.staging.crew import work_off
from cache.staging.files import total_bytes
from cache.staging.mounts import filesystem_type, free_space
from cache.staging.records import fsync_folder, is_own_folder, read_number, write_number
from cache.staging.sources import Checksum, Source, StagedFile
from cache.staging.transfer import Pace, checksum_of, transfer
from cache.staging.watch import StagingWatcher

__all__ = ["Brought", "How", "bring", "no_room", "still_needed"]

_WAIT_SECONDS = 0.05
_PATIENCE_SECONDS = 0.3
_BLOCK_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class How:
    """How files are copied.

    last: a path that is put in place when all others of its request are. verify: also read what is here already.
    since: what was checked after this time (seconds since the epoch) need not be checked again.
    """

    checksum: Checksum
    last: str = ""
    threads: int = 4
    bytes_per_second: float | None = None
    verify: bool = False
    since: float = 0.0


@dataclass(frozen=True)
class Brought:
    """What was done by this process: bytes copied, files copied, files found whole, files found damaged."""

    copied_bytes: int = 0
    copied: int = 0
    found: int = 0
    damaged: int = 0

    def __add__(self, other: Brought) -> Brought:
        return Brought(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def bring(
    copy: Copy, source: Source, files: Sequence[StagedFile], how: How, stop: threading.Event, watcher: StagingWatcher
) -> Brought:
    """See to it that files are in a copy that this process holds.

    Raises NoRoomError, StagingSourceError, StoppedError, StagingError.
    """
    if not how.verify and _all_there(copy, files):
        return Brought(found=len(files))
    if not _lead_or_find(copy, files, how, stop, watcher):
        return Brought(found=len(files))
    try:
        return _Leader(copy, source, how, stop, watcher).lead(files)
    except StagingError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise NoRoomError(f"{copy.path}: {error.strerror} in the middle of copying; {_ADVICE}") from error
        where = error.filename or copy.path
        raise StagingError(f"{where}: cannot be written: {error.strerror or error}") from error
    finally:
        copy.leader.release()


def _lead_or_find(
    copy: Copy, files: Sequence[StagedFile], how: How, stop: threading.Event, watcher: StagingWatcher
) -> bool:
    """Wait until this process leads (True), or another one has brought the files (False)."""
    started, watching, seen = time.monotonic(), False, copy.ready_stamp()
    try:
        while not copy.leader.take():
            if not watching and time.monotonic() - started > _PATIENCE_SECONDS:
                watching = True
                watcher.note(f"another process of this node is copying to {copy.path}; waiting for it")
                watcher.waiting(total_bytes(files), partial(_told_progress, copy))
            if stop.wait(_WAIT_SECONDS):
                raise StoppedError("staging was stopped")
            if not copy.inner.is_dir():
                raise StagingError(f"{copy.path}: was removed while it was being staged; stage again")
            if not how.verify and (stamp := copy.ready_stamp()) != seen:
                seen = stamp
                if _all_there(copy, files):
                    return False
    finally:
        if watching:
            watcher.copied()
    return True


def _all_there(copy: Copy, files: Sequence[StagedFile]) -> bool:
    ready = copy.ready()
    return bool(ready) and all(file.path in ready and copy.has(file) for file in files)


_ADVICE = "make room with  packer stage clean , choose another target, or stage less with a fraction"


class _Leader:
    """The process that copies, while it does."""

    def __init__(self, copy: Copy, source: Source, how: How, stop: threading.Event, watcher: StagingWatcher) -> None:
        self.copy, self.source, self.how, self.watcher = copy, source, how, watcher
        self.failed = threading.Event()
        self.pace = Pace(how.checksum, how.bytes_per_second, stops=(stop, self.failed))
        self.ready: Ready = copy.ready()
        self.damaged: list[str] = []

    def lead(self, files: Sequence[StagedFile]) -> Brought:
        present = [file for file in files if self._is_whole(file)]
        if self.how.verify:
            self._check(present)
        whole = {file.path for file in present} - set(self.damaged)
        missing = [file for file in files if file.path not in whole]
        for part in self.copy.parts():
            part.unlink(missing_ok=True)
        if missing:
            self._check_room(missing)
            self._copy(missing)
        if missing or any(file.path not in self.ready for file in files) or self.how.verify:
            now = time.time()
            for file in files:
                self.ready.setdefault(file.path, (file.bytes, file.crc32c, now))
            self.copy.write_ready(self.ready)
        found = len(files) - len(missing)
        return Brought(total_bytes(missing), len(missing), found, len(self.damaged))

    def _is_whole(self, file: StagedFile) -> bool:
        """In place with the right size, and with a checksum from the source or from when it was copied."""
        known = self.ready.get(file.path)
        if known is not None and known[0] != file.bytes:
            del self.ready[file.path]
            known = None
        return self.copy.has(file) and (known is not None or file.crc32c is not None)

    def _check(self, files: Sequence[StagedFile]) -> None:
        """Read files that nobody checked lately; those with another checksum are copied anew."""

        def check(file: StagedFile) -> None:
            known = self.ready.get(file.path)
            expected = file.crc32c if known is None or file.crc32c is not None else known[1]
            if checksum_of(self.copy.path / file.path, self.pace) != expected:
                self.damaged.append(file.path)
            else:
                self.ready[file.path] = (file.bytes, expected, time.time())

        old = [file for file in files if self.ready.get(file.path, (0, 0, 0.0))[2] < self.how.since]
        work_off(old, check, self.how.threads, self.failed, lambda: None)
        for path in self.damaged:
            self.watcher.note(f"{self.copy.path / path}: damaged, copied anew")

    def _check_room(self, missing: Sequence[StagedFile]) -> None:
        filesystem = filesystem_type(self.copy.path)
        free = free_space(self.copy.path, filesystem)
        replaced = total_bytes(file for file in missing if self.copy.has(file))
        needed, inodes = still_needed(missing)
        if needed > free.bytes + replaced or inodes > free.inodes:
            raise no_room(self.copy.path, needed, free.bytes, inodes, free.inodes)

    def _copy(self, missing: Sequence[StagedFile]) -> None:
        self.watcher.copying(total_bytes(missing), lambda: self.pace.done_bytes)
        already = total_bytes(file for file in self.copy.files if file.path in self.ready)
        tick = partial(self._tell_progress, already)
        try:
            (self.copy.inner / "progress").unlink(missing_ok=True)  # whatever somebody put in its place
            folders = self._folders(missing)
            tick()
            for batch in (
                [f for f in missing if f.path != self.how.last],
                [f for f in missing if f.path == self.how.last],
            ):
                work_off(batch, self._one, self.how.threads, self.failed, tick)
                self.pace.check()
                for folder in folders:
                    fsync_folder(folder)
        finally:
            self.watcher.copied()

    def _folders(self, files: Sequence[StagedFile]) -> list[Path]:
        """The directories that files go to, made where missing. Raises StagingError for one that leads elsewhere."""
        folders = {folder for file in files for folder in (self.copy.path / file.path).parents}
        own = sorted(folder for folder in folders if folder == self.copy.path or self.copy.path in folder.parents)
        for folder in own:
            if not folder.is_symlink():
                folder.mkdir(mode=0o700, exist_ok=True)
            if not is_own_folder(folder):
                raise StagingError(f"{folder}: is not a directory of our own; remove it, then stage again")
        return own

    def _one(self, file: StagedFile) -> None:
        part = self.copy.inner / f"{PART_PREFIX}{os.getpid()}-{threading.get_ident()}"
        crc = transfer(self.source, file, part, self.copy.path / file.path, self.pace)
        self.ready[file.path] = (file.bytes, crc, time.time())

    def _tell_progress(self, already: int) -> None:
        write_number(self.copy.inner / "progress", already + self.pace.done_bytes)


def still_needed(files: Sequence[StagedFile]) -> tuple[int, int]:
    """(bytes, inodes) that files take on a disk of 4 KiB blocks, their directories and our records included."""
    folders = {os.path.dirname(file.path) for file in files}
    blocks = sum(-(-file.bytes // _BLOCK_BYTES) * _BLOCK_BYTES for file in files)
    return blocks + (len(folders) + 8) * _BLOCK_BYTES, len(files) + len(folders) + 8


def no_room(where: Path | str, needed: int, free: int, inodes: int, free_inodes: int) -> NoRoomError:
    """The error that says what is missing, and what would fit."""
    if inodes > free_inodes:
        return NoRoomError(f"{where}: {inodes:,} inodes needed, {free_inodes:,} free; {_ADVICE}")
    share = int(100 * 0.98 * free / needed) / 100
    fits = f"a fraction of {share} would fit; " if share >= 0.01 else "nothing of it would fit; "
    return NoRoomError(f"{where}: {_human(needed)} needed, {_human(free)} free; {fits}{_ADVICE}")


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _told_progress(copy: Copy) -> int:
    return read_number(copy.inner / "progress")
