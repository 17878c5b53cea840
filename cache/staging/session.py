"""One process's use of a staged copy: choose a target, hold the copy, have its files copied, release it.

    open()   target → store → copy (under the store's lock: quota, record) → users' lock → files
    close()  background thread stopped and joined → users' lock released → removed, if requested and unused

A session belongs to the process that opened it. After a fork both processes hold the users' lock, and only the one that
opened the session cleans up.

The target is the first directory that is writable, local, the user's own and large enough. In order: what the user
names (then nothing else is tried), what the batch system names (`cache.launchers`: $SLURM_TMPDIR and the like),
$TMPDIR, and what sites provide without a variable: /mnt/bb/$USER (Frontier's NVMe), /local, /scratch/local, /dev/shm. A
directory where the set is already, or is being staged by another process of the node, is chosen at once, so that all
ranks of a node agree.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cache.errors import NoRoomError, NoTargetError, StagingError, StoppedError
from cache.filesystem import filesystem_type, free_space, is_local
from cache.launchers import scratch_variables
from cache.locks import is_locked
from cache.messages import Silent, Watcher
from cache.staging.copies import Copy, Store, find_store, make_store, new_copy
from cache.staging.leader import CopyCounts, bring, no_room, still_needed
from cache.staging.removal import Removed, discard, evictable_bytes, make_room, remove_copies, sweep
from cache.staging.sources import Request, StagedFile

__all__ = ["CLEANUPS", "Session", "Target", "candidates"]

CLEANUPS = ("atexit", "never")
_SITES = ("/mnt/bb/$USER", "/local", "/scratch/local", "/dev/shm")


class Session:
    """See the module. `counts` is what this process has copied and found."""

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
        """Stage; returns the local directory. Raises StagingError and its kinds."""
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
        if request.later or request.cleanup == "atexit":
            atexit.register(self.close)
        return copy.path

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the files that a thread copies; False where they are not all here by then. Raises its error."""
        if self._thread is not None:
            self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self._is_done

    def stop(self) -> None:
        """Ask to stop copying, from any thread; `open` raises StoppedError then, if files are still missing."""
        self._stop.set()

    def close(self) -> None:
        """Stop, release the copy, and remove it if requested. Does nothing in a forked child, or a second time."""
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
        if self.request.cleanup == "atexit" and copy.path.is_dir():  # a batch script's trap may have been quicker
            with self._store.lock():
                self._note_removed(remove_copies(self._store, lambda other: other.path == copy.path), "cleaned up")

    # --- the copy -----------------------------------------------------------------------------------------------
    def _open_copy(self, target: Path) -> Copy:
        """The copy's directory, recorded, within the quota and held by this process."""
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
        """Record which files are wanted, after room was made for them."""
        files = self.request.all_files
        new = {file.path for file in files} - copy.wanted
        needed, _ = still_needed([file for file in files if not copy.has(file)])

        def enough() -> bool:
            return free_space(store.path, filesystem_type(store.path)).bytes >= needed

        if new:
            planned = copy.planned_bytes + sum(file.bytes for file in files if file.path in new)
            self._note_removed(make_room(store, copy.path, planned, self.request.quota_bytes, enough), "quota")
            copy.wanted |= new
            copy.save()

    def _is_stale(self, copy: Copy) -> bool:
        """Whether it is a copy of an earlier state of the same source."""
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
            self.watcher.note(f"staging in the background ended: {error}")

    def _note_removed(self, removed: Iterable[Removed], why: str) -> None:
        for copy in removed:
            if not copy.kept:
                self.watcher.note(f"{why}: removed {copy.path}")
            for path in copy.foreign:
                self.watcher.note(f"{path}: not ours, left there")

    # --- its target ---------------------------------------------------------------------------------------------
    def _choose_target(self) -> Path:
        """The first fit target. Raises NoTargetError, NoRoomError."""
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
        raise kind(f"nowhere to stage to: {reasons}; name a directory of this node with target=DIR")

    def _shortage(self, target: Path, filesystem: str) -> NoRoomError | None:
        """The error of a target that is too small; None where it is large enough, or the set is there or on its way."""
        request, store = self.request, find_store(target)
        name = request.manifest.folder_name
        copy = next((copy for copy in store.copies() if copy.path.name == name), None) if store else None
        missing = [file for file in request.all_files if copy is None or not copy.has(file)]
        if copy is not None and (not missing or is_locked(copy.leader.path)):
            return None
        needed, inodes = still_needed(missing)
        if copy is not None and not copy.in_use():
            needed = max(0, needed - sum(part.stat().st_size for part in copy.parts()))
        evictable = evictable_bytes(store, name) if store and request.quota_bytes is not None else 0
        free = free_space(target, filesystem)
        if needed <= free.bytes + evictable and inodes <= free.inodes:
            return None
        return no_room(target, needed, free.bytes + evictable, inodes, free.inodes)

    def _check_target(self, path: Path) -> str:
        """The filesystem type of a directory that can be written to. Raises NoTargetError, OSError."""
        if path.exists() and not path.is_dir():
            raise NoTargetError("not a directory")
        if self.request.target is not None:
            if not path.parent.is_dir():
                raise NoTargetError(f"there is no directory {path.parent} to make it in")
            if not path.is_dir() and path.parent == Path(path.anchor):
                raise NoTargetError(f"no such directory, and none is made in {path.parent}")
            path.mkdir(exist_ok=True)
        if not path.is_dir():
            raise NoTargetError("no such directory")
        filesystem = filesystem_type(path)
        if not self.request.any_filesystem and not is_local(filesystem):
            raise NoTargetError(f"a {filesystem} filesystem, which is not local to this node")
        if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            raise NoTargetError("not writable")
        return filesystem


class Target(NamedTuple):
    """A directory that may be staged to, and who named it."""

    path: Path
    named_by: str


def candidates(target: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> list[Target]:
    """The directories to try, in order. Raises NoTargetError where `target` names a variable that is not set."""
    env = os.environ if environ is None else environ
    if target is not None:
        return [Target(_expand(os.fspath(target), env), "the user")]
    found = [Target(Path(env[name]), f"${name}") for name in scratch_variables() if env.get(name)]
    for site in _SITES:
        if "$USER" not in site or env.get("USER"):
            found.append(Target(Path(site.replace("$USER", env.get("USER", ""))), "the usual directories"))
    return found


def _expand(text: str, environ: Mapping[str, str]) -> Path:
    """A path with $NAME, ${NAME} and ~ replaced; absolute. Raises NoTargetError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise NoTargetError(
                f"the target {text!r} names ${name}, which is not set here: outside a job it may be missing; name "
                f"a directory, or leave the target out and the first that fits is taken"
            )
        return environ[name]

    path = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    if not path:
        raise NoTargetError("the target is an empty path")
    return Path(path).expanduser().absolute()
