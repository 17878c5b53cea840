"""One process's use of a staged copy: choose a target, hold the copy, have its files copied, release it.

    open()   target → store → copy (under the store's lock: quota, record) → users' lock → files
    close()  background thread stopped and joined → users' lock released → removed, if requested and unused

A session belongs to the process that opened it. After a fork both processes hold the users' lock, and only the one that
opened the session cleans up.

The target is the first directory that is writable, local, owned by the user and large enough. Candidates, in order: the
one that the user names (then no other is tried), those of the batch system (`cache.launchers`: $SLURM_TMPDIR and the
like), $TMPDIR, and usual places at sites without a variable: /mnt/bb/$USER (Frontier's NVMe), /local, /scratch/local,
/dev/shm. A directory that already has the set, or to which another process of the node is staging it, is chosen at
once, so that all ranks of a node agree.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from cache.errors import NoRoomError, NoTargetError, StagingError, StagingSourceError, StoppedError
from cache.files import Folder
from cache.filesystem import filesystem_type, free_space, is_local, write_behind
from cache.launchers import scratch_variables
from cache.locks import call_after_fork, copy_event, is_locked
from cache.messages import Silent, Watcher, human_bytes, human_seconds, plural
from cache.staging.copies import (
    PART_PREFIX,
    Copy,
    Ready,
    Removed,
    Store,
    discard,
    evictable_bytes,
    find_store,
    is_own_folder,
    load_copy,
    make_room,
    make_store,
    new_copy,
    remove_copies,
    sweep,
)
from cache.staging.sources import INNER_FOLDER, Request, Source, StagedFile, total_bytes
from cache.system import require

# Copying one file: read, checksum, write, sync, rename; and the threads for it.
#
# Bytes come in chunks from a source, without further buffering. copy_file_range(2) would save one copy, but it cannot
# cross filesystems (EXDEV), which staging always does, and reading back for the checksum would cost that copy again;
# see docs/performance.md. Writes are of 128 KiB: for larger ones the kernel looks for equally large pages for its
# cache, which can take several times as long as copying. Write-back starts early, so that the sync at the end has
# little left to do.
#
# The temporary file belongs to this process until it is renamed; it is removed on errors, and by the next leader.

_T = TypeVar("_T")
_WRITE_BYTES = 1 << 17
_BEHIND_BYTES = 16 << 20
_TICK_SECONDS = 0.2


@dataclass
class Pace:
    """State shared by the threads of one leader: progress, the limit in bytes per second, and the stop request."""

    bytes_per_second: float | None = None
    done_bytes: int = 0
    stops: tuple[threading.Event, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def check(self) -> None:
        """Raise StoppedError if a stop was requested."""
        if any(stop.is_set() for stop in self.stops):
            raise StoppedError("staging was stopped")

    def moved(self, size: int) -> None:
        """Count bytes, and wait while the limit is exceeded."""
        now = time.monotonic()
        with self._lock:
            self.done_bytes += size
            if self.bytes_per_second is None:
                return
            self._free_at = max(self._free_at, now) + size / self.bytes_per_second
            until = self._free_at
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))


def transfer(source: Source, file: StagedFile, part: Path, place: Path, pace: Pace) -> int:
    """Copy a file to `part`, check it, sync it and rename it to `place`; returns the CRC32C of its bytes.

    The caller syncs the folder of `place`. Raises StagingSourceError if the source is missing or has changed,
    StoppedError, and OSError for errors of the target.
    """
    chunks = source.chunks(file, pace.check)
    try:
        first = next(chunks, None)  # if the source cannot be opened, no file is created
        with (
            Folder(part.parent) as scratch,
            Folder(place.parent) as folder,
            folder.writing(place.name, sync_name=False, scratch=scratch, temporary=part.name, mode=0o600) as writer,
        ):
            crc = _write(first, chunks, writer.fileno(), pace)
            if file.crc32c is not None and crc != file.crc32c:
                raise StagingSourceError(
                    f"{source.location(file)}: the CRC32C of its bytes is {crc:08x}, expected {file.crc32c:08x}: the "
                    f"source changed or is damaged; run  packer verify  on it, then stage again"
                )
    finally:
        chunks.close()
    return crc


def _write(first: memoryview | None, chunks: Iterator[memoryview], writer: int, pace: Pace) -> int:
    """Write all chunks, each before the next is requested; returns their CRC32C."""
    from crc32c import crc32c

    crc, offset, behind = 0, 0, 0
    for chunk in () if first is None else itertools.chain((first,), chunks):
        pace.check()
        crc = crc32c(chunk, crc)
        data = chunk
        while data:
            data = data[os.write(writer, data[:_WRITE_BYTES]) :]
        offset += len(chunk)
        if offset - behind >= _BEHIND_BYTES:
            write_behind(writer, behind, offset - behind)
            behind = offset
        pace.moved(len(chunk))
    return crc


def work_off(
    items: Iterable[_T], work: Callable[[_T], None], threads: int, stop: threading.Event, tick: Callable[[], None]
) -> None:
    """Call `work` for each item from this number of threads, and `tick` now and then from the calling thread.

    Raises the first error of any thread after all have stopped. They are daemon threads, which stop within one item
    when one of them fails, when the caller is interrupted (Ctrl-C), or when `stop` is set; it is set in all of these
    cases, so `work` should check it.
    """
    waiting, errors, ended = deque(items), list[BaseException](), threading.Semaphore(0)

    def run() -> None:
        try:
            while waiting and not stop.is_set():
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread took the last item
                    break
                work(item)
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            ended.release()

    crew = [threading.Thread(target=run, name=f"stage-{n}", daemon=True) for n in range(min(threads, len(waiting)))]
    left = len(crew)
    try:
        for thread in crew:
            thread.start()
        while left:
            if ended.acquire(timeout=_TICK_SECONDS):
                left -= 1
            else:
                tick()
    finally:
        if left:
            stop.set()
        for thread in crew:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


# One process of a node copies, the others wait; a process that finds no leader becomes the leader.
#
#     take `leader` ── taken ──► check existing files ──► room? ──► copy the rest ──► ready.json
#           │
#           └─ busy ──► show progress, try again
#
# Every process takes the lock once, so each has verified that all files exist with the right sizes. A leader that died
# leaves complete files under their names and parts in `.staging/`: its successor keeps the former and removes the
# latter. A leader that fails raises its error; the others try themselves and get their own errors.
#
# Readers of an incomplete copy wait for single files (`Arrivals`), but only if the copy's record requests the file and
# a process holds `leader`. If no process has held it for a moment, copying has ended or failed, and no read waits any
# more.

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.05
_PATIENCE_SECONDS = 0.3
_POLL_SECONDS = 0.02
_IDLE_SECONDS = 0.5  # the lock is free between the first files and the rest, and from a dead leader to the next
_BLOCK_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class CopyCounts:
    """Bytes and files that this process copied, files that it found complete, files that it found damaged."""

    copied_bytes: int = 0
    copied: int = 0
    found: int = 0
    damaged: int = 0

    def __add__(self, other: CopyCounts) -> CopyCounts:
        return CopyCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def bring(
    copy: Copy, request: Request, files: Sequence[StagedFile], since: float, stop: threading.Event, watcher: Watcher
) -> CopyCounts:
    """Return when these files of a request are in a copy that this process holds.

    since: seconds since the epoch; files that were verified later are not verified again. Raises NoRoomError,
    StagingSourceError, StoppedError, StagingError.
    """
    if not request.options.verify and _all_there(copy, files):
        return CopyCounts(found=len(files))
    if not _become_leader(copy, files, request.options.verify, stop, watcher):
        return CopyCounts(found=len(files))
    try:
        return _Leader(copy, request, since, stop, watcher).lead(files)
    except StagingError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise NoRoomError(f"{copy.path}: {error.strerror} during the copy; {_ADVICE}") from error
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
        self.pace = Pace(request.options.bytes_per_second, stops=(stop, self.failed))
        self.ready: Ready = copy.ready()
        self.damaged: list[str] = []

    def lead(self, files: Sequence[StagedFile]) -> CopyCounts:
        present = [file for file in files if self._is_whole(file)]
        if self.request.options.verify:
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
        if missing or any(file.path not in self.ready for file in files) or self.request.options.verify:
            now = time.time()
            for file in files:
                self.ready.setdefault(file.path, (file.bytes, file.crc32c, now))
            self.copy.write_ready(self.ready)
        kept = len(files) - len(missing)
        return CopyCounts(total_bytes(missing), len(missing), kept, len(self.damaged))

    def _is_whole(self, file: StagedFile) -> bool:
        """Whether the file is in place with the right size and a checksum, from the source or from its copying."""
        known = self.ready.get(file.path)
        if known is not None and known[0] != file.bytes:
            del self.ready[file.path]
            known = None
        return self.copy.has(file) and (known is not None or file.crc32c is not None)

    def _check(self, files: Sequence[StagedFile]) -> None:
        """Verify files that were not verified since; those with a wrong checksum are copied again."""
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
        """The directories of the files, created if missing. Raises StagingError for one outside the copy."""
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
    """(bytes, inodes) that files need on a disk with 4 KiB blocks, including their directories and our records."""
    folders = {os.path.dirname(file.path) for file in files}
    blocks = sum(-(-file.bytes // _BLOCK_BYTES) * _BLOCK_BYTES for file in files)
    return blocks + (len(folders) + 8) * _BLOCK_BYTES, len(files) + len(folders) + 8


def no_room(where: Path | str, needed: int, free: int, inodes: int, free_inodes: int) -> NoRoomError:
    """The error that says what is missing, and what would fit."""
    if inodes > free_inodes:
        return NoRoomError(f"{where}: {inodes:,} inodes needed, {free_inodes:,} free; {_ADVICE}")
    share = int(100 * 0.98 * free / needed) / 100
    fits = f"a fraction of {share} would fit; " if share >= 0.01 else "nothing of it would fit; "
    return NoRoomError(f"{where}: {human_bytes(needed)} needed, {human_bytes(free)} free; {fits}{_ADVICE}")


class Arrivals:
    """Waits for files that are being copied. Thread-safe.

    patience_seconds: the longest wait for one file. After the first timeout no read waits again.
    """

    def __init__(self, copy: Path, patience_seconds: float) -> None:
        self.copy, self.patience_seconds = copy, patience_seconds
        self._over = threading.Event()
        self._wanted: frozenset[str] | None = None
        call_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: replace the event, which contains a lock."""
        self._over = copy_event(self._over)

    @property
    def over(self) -> bool:
        """Whether a wait has timed out, so that there will be no other."""
        return self._over.is_set()

    def expects(self, path: str) -> bool:
        """Whether a missing file of this name may still arrive."""
        return self.patience_seconds > 0 and not self.over and self._is_wanted(path)

    def wait(self, path: str, is_there: Callable[[], bool]) -> bool:
        """Wait for the file of this name; False if it does not arrive."""
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
        """Whether there is a leader; queries take the lock shared, so they do not disturb each other."""
        try:
            return is_locked(self.copy / INNER_FOLDER / "leader", shared=True)
        except StagingError:
            return False


_SITES = ("/mnt/bb/$USER", "/local", "/scratch/local", "/dev/shm")


class Session:
    """A session; see the module. `counts`: what this process has copied and found."""

    def __init__(self, request: Request, watcher: Watcher | None = None) -> None:
        self.request, self.watcher = request, watcher or Silent()
        self.counts = CopyCounts()
        self._since = time.time()
        self._error: StagingError | None = None
        self._is_done = False
        self._path: Path | None = None
        self._copy: Copy | None = None
        self._store: Store | None = None
        self._owner = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """The directory of the copy. Raises StagingError before `open`."""
        if self._path is None:
            raise StagingError("nothing is staged: the session was never open")
        return self._path

    def open(self) -> Path:
        """Stage the set; returns the local directory. Raises StagingError and its subclasses."""
        request = self.request
        self._owner = os.getpid()
        target = self._choose_target()
        try:
            self._copy = copy = self._open_copy(target)
            self._path = copy.path
            self.counts = self._bring(copy, request.files)
        except BaseException:
            self.close()
            raise
        if request.later:
            self._thread = threading.Thread(target=self._bring_later, args=(copy,), name="staging", daemon=True)
            self._thread.start()
        else:
            self._is_done = True
        if request.later or request.options.cleanup == "atexit":
            atexit.register(self.close)
        return copy.path

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the files that a thread copies; False if some are missing after `seconds`. Raises its error."""
        if self._thread is not None:
            self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self._is_done

    def stop(self) -> None:
        """Request a stop, from any thread; `open` then raises StoppedError if files are missing."""
        self._stop.set()

    def close(self) -> None:
        """Stop, release the copy, and remove it if requested. Does nothing in a forked child or on a second call."""
        if os.getpid() != self._owner:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        atexit.unregister(self.close)
        copy, self._copy = self._copy, None
        if copy is None or self._store is None:
            return
        copy.release()
        if (
            self.request.options.cleanup == "atexit" and copy.path.is_dir()
        ):  # a batch script's trap may have been faster
            with self._store.lock():
                self._note_removed(remove_copies(self._store, lambda other: other.path == copy.path), "cleaned up")

    # --- the copy -----------------------------------------------------------------------------------------------
    def _open_copy(self, target: Path) -> Copy:
        """The copy's directory: recorded, within the quota, and held by this process."""
        try:
            self._store = store = make_store(target)
            with store.lock():
                sweep(store)
                self._note_removed(remove_copies(store, self._is_stale), "its source has changed")
                copy = new_copy(store.path, self.request.manifest)
                if copy.wanted:
                    self.watcher.note(f"{copy.path}: staged before; checking its files")
                try:
                    self._plan(store, copy)
                except BaseException:
                    if not copy.wanted:
                        discard(copy)
                    raise
                if not copy.hold():
                    raise StagingError(f"{copy.path}: was removed while it was opened; stage again")
                return copy
        except StagingError:
            raise
        except OSError as error:
            raise StagingError(f"{target}: cannot be written: {error.strerror or error}") from error

    def _plan(self, store: Store, copy: Copy) -> None:
        """Make room for new files, and record that they are requested."""
        files = self.request.all_files
        new = {file.path for file in files} - copy.wanted
        needed, _ = still_needed([file for file in files if not copy.has(file)])

        def enough() -> bool:
            return free_space(store.path, filesystem_type(store.path)).bytes >= needed

        if new:
            planned = copy.planned_bytes + sum(file.bytes for file in files if file.path in new)
            self._note_removed(make_room(store, copy.path, planned, self.request.options.quota_bytes, enough), "quota")
            copy.wanted |= new
            copy.save()

    def _is_stale(self, copy: Copy) -> bool:
        """Whether this is a copy of an earlier state of the same source."""
        manifest = self.request.manifest
        return copy.source == str(manifest.source) and copy.fingerprint != manifest.fingerprint

    def _bring(self, copy: Copy, files: Sequence[StagedFile]) -> CopyCounts:
        return bring(copy, self.request, files, self._since, self._stop, self.watcher)

    def _bring_later(self, copy: Copy) -> None:
        try:
            self.counts += self._bring(copy, self.request.later)
            self._is_done = True
        except StoppedError:
            pass
        except StagingError as error:
            self._error = error
            self.watcher.note(f"staging in the background stopped: {error}")

    def _note_removed(self, removed: Iterable[Removed], why: str) -> None:
        for copy in removed:
            if not copy.kept:
                self.watcher.note(f"{why}: removed {copy.path}")
            for path in copy.foreign:
                self.watcher.note(f"{path}: not a file of the copy, so it is kept")

    # --- its target ---------------------------------------------------------------------------------------------
    def _choose_target(self) -> Path:
        """The first suitable target. Raises NoTargetError, NoRoomError."""
        refused: list[tuple[Path, str]] = []
        kind: type[StagingError] = NoTargetError
        for path, named_by in (targets := candidates(self.request.target)):
            try:
                filesystem = self._check_target(path)
                shortage = self._shortage(path, filesystem)
            except (OSError, NoTargetError) as error:
                refused.append((path, error.strerror or str(error)))
                continue
            if shortage is None:
                for other, why in refused:
                    self.watcher.note(f"not {other}: {why}")
                self.watcher.note(f"staging to {path} ({filesystem or 'unknown'}, named by {named_by})")
                return path
            if len(targets) == 1:
                raise shortage
            kind = NoRoomError
            refused.append((path, str(shortage).partition(": ")[2].rpartition("; ")[0]))
        if len(refused) == 1:
            path, why = refused[0]
            reason = why if why.startswith(str(path)) else f"{path}: {why}"
            raise NoTargetError(f"{reason}; choose another directory with target=DIR")
        reasons = "; ".join(f"{path} ({why})" for path, why in refused)
        raise kind(f"no directory to stage to: {reasons}; name a directory of this node with target=DIR")

    def _shortage(self, target: Path, filesystem: str) -> NoRoomError | None:
        """The error of a target that is too small; None if it has room, or has the set, complete or being copied."""
        request, store = self.request, find_store(target)
        name = request.manifest.folder_name
        copy = next((copy for copy in store.copies() if copy.path.name == name), None) if store else None
        missing = [file for file in request.all_files if copy is None or not copy.has(file)]
        if copy is not None and (not missing or is_locked(copy.leader.path)):
            return None
        needed, inodes = still_needed(missing)
        if copy is not None and not copy.in_use():
            needed = max(0, needed - sum(part.stat().st_size for part in copy.parts()))
        evictable = evictable_bytes(store, name) if store and request.options.quota_bytes is not None else 0
        free = free_space(target, filesystem)
        if needed <= free.bytes + evictable and inodes <= free.inodes:
            return None
        return no_room(target, needed, free.bytes + evictable, inodes, free.inodes)

    def _check_target(self, path: Path) -> str:
        """The filesystem type of a writable directory. Raises NoTargetError, OSError."""
        if path.exists() and not path.is_dir():
            raise NoTargetError("not a directory")
        if self.request.target is not None:
            if not path.parent.is_dir():
                raise NoTargetError(f"there is no directory {path.parent} to create it in")
            if not path.is_dir() and path.parent == Path(path.anchor):
                raise NoTargetError(f"no such directory, and none is created in {path.parent}")
            path.mkdir(exist_ok=True)
        if not path.is_dir():
            raise NoTargetError("no such directory")
        filesystem = filesystem_type(path)
        if not self.request.options.any_filesystem and not is_local(filesystem):
            raise NoTargetError(f"a {filesystem} filesystem, which is not local to this node")
        if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            raise NoTargetError("not writable")
        return filesystem


class Target(NamedTuple):
    """A candidate for staging, and who named it."""

    path: Path
    named_by: str


def candidates(target: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> list[Target]:
    """The directories to try, in order. Raises NoTargetError if `target` names a variable that is not set."""
    require("staging", os.open in os.supports_dir_fd)
    env = os.environ if environ is None else environ
    if target is not None:
        return [Target(_expand(os.fspath(target), env), "the user")]
    targets = [Target(Path(env[name]), f"${name}") for name in scratch_variables() if env.get(name)]
    for site in _SITES:
        if "$USER" not in site or env.get("USER"):
            targets.append(Target(Path(site.replace("$USER", env.get("USER", ""))), "the usual directories"))
    return targets


def _expand(text: str, environ: Mapping[str, str]) -> Path:
    """A path with $NAME, ${NAME} and ~ replaced; absolute. Raises NoTargetError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise NoTargetError(
                f"the target {text!r} names ${name}, which is not set; outside a job it may be missing; name "
                f"a directory, or leave the target out to use the first suitable one"
            )
        return environ[name]

    path = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    if not path:
        raise NoTargetError("the target is an empty path")
    return Path(path).expanduser().absolute()
