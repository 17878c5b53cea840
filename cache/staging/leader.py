"""One process of a node copies, the others wait; a process that finds no leader becomes it.

    take `leader` ── taken ──► check the files that are here ──► room? ──► copy the rest ──► ready.json
          │
          └─ busy ──► show progress, try again

Every process takes the lock once, so each has seen for itself that all files are there with the right sizes. A leader
that died left whole files under their names and parts in `.staging/`: its successor keeps the former and removes the
latter. A leader that fails raises its error; the others try themselves and get their own.

Readers of an incomplete copy wait for single files (`Arrivals`), but only while the copy's record says that the file is
wanted and a process holds `leader`. When no process has held it for a moment, copying has ended or failed, and nothing
waits any more.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.errors import NoRoomError, StagingError, StoppedError
from cache.files import Folder
from cache.filesystem import filesystem_type, free_space
from cache.locks import call_after_fork, copy_event, is_locked
from cache.messages import Watcher, human_bytes, human_seconds, plural
from cache.staging.copies import PART_PREFIX, Copy, Ready, is_own_folder, load_copy
from cache.staging.sources import INNER_FOLDER, Request, StagedFile, total_bytes
from cache.staging.transfer import Pace, transfer, work_off

__all__ = ["Arrivals", "CopyCounts", "bring", "no_room", "still_needed"]

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.05
_PATIENCE_SECONDS = 0.3
_POLL_SECONDS = 0.02
_IDLE_SECONDS = 0.5  # between its first files and the rest, and from a dead leader to the next, the lock is free
_BLOCK_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class CopyCounts:
    """Bytes and files that this process copied, files that it found whole, files that it found damaged."""

    copied_bytes: int = 0
    copied: int = 0
    found: int = 0
    damaged: int = 0

    def __add__(self, other: CopyCounts) -> CopyCounts:
        return CopyCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def bring(
    copy: Copy, request: Request, files: Sequence[StagedFile], since: float, stop: threading.Event, watcher: Watcher
) -> CopyCounts:
    """Return when some files of a request are in a copy, which this process holds.

    since: seconds since the epoch; files that were verified later are not verified again. Raises NoRoomError,
    StagingSourceError, StoppedError, StagingError.
    """
    if not request.verify and _all_there(copy, files):
        return CopyCounts(found=len(files))
    if not _become_leader(copy, files, request.verify, stop, watcher):
        return CopyCounts(found=len(files))
    try:
        return _Leader(copy, request, since, stop, watcher).lead(files)
    except StagingError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise NoRoomError(f"{copy.path}: {error.strerror} in the middle of copying; {_ADVICE}") from error
        where = error.filename or copy.path
        raise StagingError(f"{where}: cannot be written: {error.strerror or error}") from error
    finally:
        copy.leader.release()


def _become_leader(
    copy: Copy, files: Sequence[StagedFile], verify: bool, stop: threading.Event, watcher: Watcher
) -> bool:
    """Wait until this process leads (True), or another one has copied the files (False)."""
    started, watching, seen = time.monotonic(), False, copy.ready_stamp()
    try:
        while not copy.leader.take():
            if not watching and time.monotonic() - started > _PATIENCE_SECONDS:
                watching = True
                watcher.note(f"another process of this node is copying to {copy.path}; waiting for it")
                watcher.begin(0, total_bytes(files), lambda: (0, copy.progress()), waiting=True)
            if stop.wait(_WAIT_SECONDS):
                raise StoppedError("staging was stopped")
            if not copy.inner.is_dir():
                raise StagingError(f"{copy.path}: was removed while it was being staged; stage again")
            if not verify and (stamp := copy.ready_stamp()) != seen:
                seen = stamp
                if _all_there(copy, files):
                    return False
    finally:
        if watching:
            watcher.end()
    return True


def _all_there(copy: Copy, files: Sequence[StagedFile]) -> bool:
    ready = copy.ready()
    return bool(ready) and all(file.path in ready and copy.has(file) for file in files)


_ADVICE = "make room with  packer stage clean , choose another target, or stage less with a fraction"


class _Leader:
    """The process that copies, while it holds the lock."""

    def __init__(self, copy: Copy, request: Request, since: float, stop: threading.Event, watcher: Watcher) -> None:
        self.copy, self.request, self.since, self.watcher = copy, request, since, watcher
        self.failed = threading.Event()
        self.pace = Pace(request.bytes_per_second, stops=(stop, self.failed))
        self.ready: Ready = copy.ready()
        self.damaged: list[str] = []

    def lead(self, files: Sequence[StagedFile]) -> CopyCounts:
        present = [file for file in files if self._is_whole(file)]
        if self.request.verify:
            self._check(present)
        whole = {file.path for file in present} - set(self.damaged)
        missing = [file for file in files if file.path not in whole]
        _log.info(
            "%s: %s to copy by %s, %s of %s there already",
            self.copy.path,
            human_bytes(total_bytes(missing)),
            plural(self.request.threads, "thread"),
            len(whole),
            plural(len(files), "file"),
        )
        for part in self.copy.parts():
            part.unlink(missing_ok=True)
        if missing:
            self._check_room(missing)
            self._copy(missing)
        if missing or any(file.path not in self.ready for file in files) or self.request.verify:
            now = time.time()
            for file in files:
                self.ready.setdefault(file.path, (file.bytes, file.crc32c, now))
            self.copy.write_ready(self.ready)
        found = len(files) - len(missing)
        return CopyCounts(total_bytes(missing), len(missing), found, len(self.damaged))

    def _is_whole(self, file: StagedFile) -> bool:
        """Whether it is in place with the right size, and with a checksum of the source or of its copying."""
        known = self.ready.get(file.path)
        if known is not None and known[0] != file.bytes:
            del self.ready[file.path]
            known = None
        return self.copy.has(file) and (known is not None or file.crc32c is not None)

    def _check(self, files: Sequence[StagedFile]) -> None:
        """Read files that were not checked since; those with another checksum are copied again."""
        from cache.checksums import file_checksum

        def check(file: StagedFile) -> None:
            known = self.ready.get(file.path)
            expected = file.crc32c if known is None or file.crc32c is not None else known[1]
            if file_checksum(self.copy.path / file.path, self.pace.check) != expected:
                self.damaged.append(file.path)
            else:
                self.ready[file.path] = (file.bytes, expected, time.time())

        old = [file for file in files if self.ready.get(file.path, (0, 0, 0.0))[2] < self.since]
        work_off(old, check, self.request.threads, self.failed, lambda: None)
        for path in self.damaged:
            self.watcher.note(f"{self.copy.path / path}: damaged, copied again")

    def _check_room(self, missing: Sequence[StagedFile]) -> None:
        filesystem = filesystem_type(self.copy.path)
        free = free_space(self.copy.path, filesystem)
        replaced = total_bytes(file for file in missing if self.copy.has(file))
        needed, inodes = still_needed(missing)
        if needed > free.bytes + replaced or inodes > free.inodes:
            raise no_room(self.copy.path, needed, free.bytes, inodes, free.inodes)

    def _copy(self, missing: Sequence[StagedFile]) -> None:
        self.watcher.begin(0, total_bytes(missing), lambda: (0, self.pace.done_bytes))
        already = total_bytes(file for file in self.copy.files if file.path in self.ready)

        def tick() -> None:
            self.copy.write_progress(already + self.pace.done_bytes)

        try:
            folders = self._folders(missing)
            tick()
            last = self.request.manifest.last
            for batch in ([f for f in missing if f.path != last], [f for f in missing if f.path == last]):
                work_off(batch, self._copy_file, self.request.threads, self.failed, tick)
                self.pace.check()
                for path in folders:
                    with Folder(path) as folder:
                        folder.sync()
        finally:
            self.watcher.end()

    def _folders(self, files: Sequence[StagedFile]) -> list[Path]:
        """The directories that files go to, made where missing. Raises StagingError for one that leads elsewhere."""
        names = {os.path.dirname(file.path) for file in files}
        folders = {folder for name in names for folder in (self.copy.path / name / "_").parents}
        own = sorted(folder for folder in folders if folder == self.copy.path or self.copy.path in folder.parents)
        for folder in own:
            if not folder.is_symlink():
                folder.mkdir(mode=0o700, exist_ok=True)
            if not is_own_folder(folder):
                raise StagingError(f"{folder}: is not a directory of this user alone; remove it, then stage again")
        return own

    def _copy_file(self, file: StagedFile) -> None:
        part = self.copy.inner / f"{PART_PREFIX}{os.getpid()}-{threading.get_ident()}"
        started = time.monotonic()
        crc = transfer(self.request.manifest.source, file, part, self.copy.path / file.path, self.pace)
        self.ready[file.path] = (file.bytes, crc, time.time())
        took = human_seconds(time.monotonic() - started)
        _log.info("%s: %s in %s, CRC32C %08x", file.path, human_bytes(file.bytes), took, crc)


def still_needed(files: Sequence[StagedFile]) -> tuple[int, int]:
    """(bytes, inodes) that files take on a disk of 4 KiB blocks, their directories and our records included."""
    folders = {os.path.dirname(file.path) for file in files}
    blocks = sum(-(-file.bytes // _BLOCK_BYTES) * _BLOCK_BYTES for file in files)
    return blocks + (len(folders) + 8) * _BLOCK_BYTES, len(files) + len(folders) + 8


def no_room(where: Path | str, needed: int, free: int, inodes: int, free_inodes: int) -> NoRoomError:
    """The error that names what is missing, and what would fit."""
    if inodes > free_inodes:
        return NoRoomError(f"{where}: {inodes:,} inodes needed, {free_inodes:,} free; {_ADVICE}")
    share = int(100 * 0.98 * free / needed) / 100
    fits = f"a fraction of {share} would fit; " if share >= 0.01 else "nothing of it would fit; "
    return NoRoomError(f"{where}: {human_bytes(needed)} needed, {human_bytes(free)} free; {fits}{_ADVICE}")


class Arrivals:
    """The files that are on their way to one copy. Threads may share it.

    patience_seconds: the longest wait for one file. After a failed wait nothing waits any more.
    """

    def __init__(self, copy: Path, patience_seconds: float) -> None:
        self.copy, self.patience_seconds = copy, patience_seconds
        self._over = threading.Event()
        self._wanted: frozenset[str] | None = None
        call_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child."""
        self._over = copy_event(self._over)

    @property
    def over(self) -> bool:
        """Whether a wait has failed, so that there will be no other."""
        return self._over.is_set()

    def expects(self, path: str) -> bool:
        """Whether a missing file of this name may still arrive."""
        return self.patience_seconds > 0 and not self.over and self._is_wanted(path)

    def wait(self, path: str, is_there: Callable[[], bool]) -> bool:
        """Wait for the file of this name; False where it does not arrive."""
        started = busy = time.monotonic()
        while not is_there():
            now = time.monotonic()
            if not self.expects(path):
                return False
            if self._is_copied_to():
                busy = now
            if now - busy > _IDLE_SECONDS or now - started > self.patience_seconds:
                self._over.set()
                return is_there()
            self._over.wait(_POLL_SECONDS)
        return True

    def _is_wanted(self, path: str) -> bool:
        if self._wanted is None:
            copy = load_copy(self.copy)
            self._wanted = frozenset() if copy is None else frozenset(copy.wanted)
        return path in self._wanted

    def _is_copied_to(self) -> bool:
        """Whether there is a leader; queries share the lock, so they do not see each other."""
        try:
            return is_locked(self.copy / INNER_FOLDER / "leader", shared=True)
        except StagingError:
            return False
