"""One process's use of a staged copy: choose a target, hold the copy, see to its files, let go.

    open()   target → store → copy (under the store's lock: quota, record) → users' lock → files
    close()  background thread stopped and waited for → users' lock released → removed, if asked for and nobody holds it

A session belongs to the process that opened it. Of a fork both keep the users' lock, and only the opener cleans up.

The target is the first directory that is writable, local, the user's own and large enough. In order: what the user
names (then nothing else is tried), what the batch system names (`cache.launchers`: $SLURM_TMPDIR and the like),
$TMPDIR, and what sites provide without a variable: /mnt/bb/$USER (Frontier's NVMe), /local, /scratch/local, /dev/shm. A
directory where the set is already, or is being staged by another process of the node, is taken at once, so that all
ranks of a node agree.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cache.errors import NoRoomError, NoTargetError, StagingError, StoppedError
from cache.filesystem import filesystem_type, free_space, is_local
from cache.launchers import scratch_variables
from cache.locks import is_locked
from cache.messages import Silent, Watcher
from cache.staging.copies import Copy, Store, find_store, make_store, new_copy
from cache.staging.leader import CopyCounts, How, bring, no_room, still_needed
from cache.staging.removal import Removed, discard, evictable_bytes, make_room, remove_copies, sweep
from cache.staging.sources import Manifest, StagedFile

__all__ = ["CLEANUPS", "Request", "Session", "candidates"]

CLEANUPS = ("atexit", "never")
_SITES = ("/mnt/bb/$USER", "/local", "/scratch/local", "/dev/shm")


@dataclass(frozen=True)
class Request:
    """What to stage and where. files: needed before work starts. later: brought by a thread meanwhile."""

    manifest: Manifest
    files: Sequence[StagedFile]
    later: Sequence[StagedFile] = ()
    target: str | os.PathLike[str] | None = None
    quota_bytes: int | None = None
    any_filesystem: bool = False
    cleanup: str = "never"

    def __post_init__(self) -> None:
        if self.cleanup not in CLEANUPS:
            raise ValueError(f"cleanup must be one of {', '.join(CLEANUPS)}, not {self.cleanup!r}")

    @property
    def all_files(self) -> list[StagedFile]:
        return [*self.files, *self.later]


class Session:
    """See above. After `open`, `path` is the directory of the copy, `choice` the target, `brought` what was done."""

    def __init__(self, request: Request, how: How, watcher: Watcher | None = None) -> None:
        self.request, self.watcher = request, watcher or Silent()
        self.how = replace(how, last=request.manifest.last, since=time.time())
        self.choice: Choice | None = None
        self.counts = CopyCounts()
        self.error: StagingError | None = None
        self.done = False
        self._path: Path | None = None
        self._copy: Copy | None = None
        self._store: Store | None = None
        self._owner = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        if self._path is None:
            raise StagingError("nothing is staged: the session was never open")
        return self._path

    def open(self) -> Path:
        """Stage; returns the local directory. Raises StagingError and its kinds."""
        request = self.request
        self._owner = os.getpid()
        self.choice = _choose(
            candidates(request.target),
            self._need,
            make=request.target is not None,
            any_filesystem=request.any_filesystem,
        )
        self._tell_choice(self.choice)
        try:
            self._copy = copy = self._made(self.choice.target.path)
            self._path = copy.path
            self.counts = self._bring(copy, request.files)
        except BaseException:
            self.close()
            raise
        if request.later:
            self._thread = threading.Thread(target=self._bring_later, args=(copy,), name="staging", daemon=True)
            self._thread.start()
        else:
            self.done = True
        if request.later or request.cleanup == "atexit":
            atexit.register(self.close)
        return copy.path

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for what a thread brings; False where that is not done by then. Raises what it ended with."""
        if self._thread is not None:
            self._thread.join(seconds)
        if self.error is not None:
            raise self.error
        return self.done

    def stop(self) -> None:
        """Ask to stop copying, from any thread; `open` raises StoppedError then, if files are still missing."""
        self._stop.set()

    def close(self) -> None:
        """Stop, let go, and clean up where that was asked for. Does nothing in a forked child, or a second time."""
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
        copy.let_go()
        if self.request.cleanup == "atexit" and copy.path.is_dir():  # a batch script's trap may have been quicker
            with self._store.lock():
                self._tell_removed(remove_copies(self._store, lambda other: other.path == copy.path), "cleaned up")

    # --- inside -------------------------------------------------------------------------------------------------
    def _made(self, target: Path) -> Copy:
        try:
            self._store = make_store(target)
            return self._held_copy(self._store)
        except StagingError:
            raise
        except OSError as error:
            raise StagingError(f"{target}: cannot be written: {error.strerror or error}") from error

    def _bring(self, copy: Copy, files: Sequence[StagedFile]) -> CopyCounts:
        return bring(copy, self.request.manifest.source, files, self.how, self._stop, self.watcher)

    def _bring_later(self, copy: Copy) -> None:
        try:
            self.counts += self._bring(copy, self.request.later)
            self.done = True
        except StoppedError:
            pass
        except StagingError as error:
            self.error = error
            self.watcher.note(f"staging in the background ended: {error}")

    def _need(self, target: Path) -> Need:
        """What a target must have free, given what is there already."""
        request = self.request
        store = find_store(target)
        name = request.manifest.folder_name
        copy = next((copy for copy in store.copies() if copy.path.name == name), None) if store else None
        missing = [file for file in request.all_files if copy is None or not copy.has(file)]
        needed, inodes = still_needed(missing)
        parts = sum(part.stat().st_size for part in copy.parts()) if copy and not copy.in_use() else 0
        joins = copy is not None and (not missing or is_locked(copy.leader.path))
        evictable = evictable_bytes(store, name) if store and request.quota_bytes is not None else 0
        return Need(max(0, needed - parts), inodes, joins, evictable)

    def _held_copy(self, store: Store) -> Copy:
        """The copy's directory, recorded, within the quota and held by us."""
        manifest = self.request.manifest
        with store.lock():
            sweep(store)
            self._tell_removed(remove_copies(store, self._is_stale), "its source has changed")
            copy = new_copy(store.path, manifest)
            if copy.wanted:
                self.watcher.note(f"{copy.path}: staged before, looking at what is there")
            try:
                self._plan(store, copy)
            except BaseException:
                if not copy.wanted:
                    discard(copy)
                raise
            if not copy.hold():
                raise StagingError(f"{copy.path}: was removed while it was opened; stage again")
            return copy

    def _plan(self, store: Store, copy: Copy) -> None:
        """Record what is wanted, after others have made room for it."""
        files = self.request.all_files
        new = {file.path for file in files} - copy.wanted
        needed, _ = still_needed([file for file in files if not copy.has(file)])

        def enough() -> bool:
            return free_space(store.path, filesystem_type(store.path)).bytes >= needed

        if new:
            planned = copy.planned_bytes + sum(file.bytes for file in files if file.path in new)
            self._tell_removed(make_room(store, copy.path, planned, self.request.quota_bytes, enough), "quota")
            copy.wanted |= new
            copy.save()

    def _is_stale(self, copy: Copy) -> bool:
        """A copy of the same source as it was before it changed."""
        manifest = self.request.manifest
        return copy.source == str(manifest.source) and copy.fingerprint != manifest.fingerprint

    def _tell_choice(self, choice: Choice) -> None:
        for path, why in choice.refused:
            self.watcher.note(f"not {path}: {why}")
        kind = choice.filesystem or "unknown"
        self.watcher.note(f"staging to {choice.target.path} ({kind}, named by {choice.target.named_by})")

    def _tell_removed(self, removed: list[Removed], why: str) -> None:
        for gone in removed:
            if not gone.kept:
                self.watcher.note(f"{why}: removed {gone.path}")
            for path in gone.foreign:
                self.watcher.note(f"{path}: not ours, left there")


# --- targets ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Target:
    """A directory that may be staged to, and who named it."""

    path: Path
    named_by: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a target must have free. joins: the set is there, or on its way; nothing is asked of it then."""

    bytes: int
    inodes: int
    joins: bool = False
    evictable_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The target that was taken, and why those before it were not: (path, reason)."""

    target: Target
    filesystem: str
    free_bytes: int
    refused: tuple[tuple[str, str], ...]


def candidates(target: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> list[Target]:
    """The directories to look at, in order. Raises NoTargetError where `target` names a variable that is not set."""
    env = os.environ if environ is None else environ
    if target is not None:
        return [Target(_expand(os.fspath(target), env), "the user")]
    found = [Target(Path(env[name]), f"${name}") for name in scratch_variables() if env.get(name)]
    for site in _SITES:
        if "$USER" not in site or env.get("USER"):
            found.append(Target(Path(site.replace("$USER", env.get("USER", ""))), "the usual places"))
    return found


def _expand(text: str, environ: Mapping[str, str]) -> Path:
    """A path with $NAME, ${NAME} and ~ replaced; absolute. Raises NoTargetError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise NoTargetError(f"the target {text!r} names ${name}, which is not set here")
        return environ[name]

    path = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    if not path:
        raise NoTargetError("the target is an empty path")
    return Path(path).expanduser().absolute()


def _choose(targets: list[Target], need: Callable[[Path], Need], *, make: bool, any_filesystem: bool = False) -> Choice:
    """The first fit target. make: create the directory where it is missing. Raises NoTargetError, NoRoomError."""
    refused: list[tuple[str, str]] = []
    short: NoRoomError | None = None
    for target in targets:
        try:
            filesystem = _usable(target.path, make, any_filesystem)
            wanted, free = need(target.path), free_space(target.path, filesystem)
        except (OSError, NoTargetError) as error:
            refused.append((str(target.path), error.strerror or str(error)))
            continue
        available = free.bytes + wanted.evictable_bytes
        if wanted.joins or (wanted.bytes <= available and wanted.inodes <= free.inodes):
            return Choice(target, filesystem, free.bytes, tuple(refused))
        short = no_room(target.path, wanted.bytes, available, wanted.inodes, free.inodes)
        refused.append((str(target.path), str(short).partition(": ")[2].rpartition("; ")[0]))
    if short is not None and len(targets) == 1:
        raise short
    if len(targets) == 1:
        path, why = refused[0]
        reason = why if why.startswith(path) else f"{path}: {why}"
        raise NoTargetError(f"{reason}; choose another directory with target=DIR")
    reasons = "; ".join(f"{path} ({why})" for path, why in refused)
    kind = NoTargetError if short is None else NoRoomError
    raise kind(f"nowhere to stage to: {reasons}; name a directory of this node with target=DIR")


def _usable(path: Path, make: bool, any_filesystem: bool) -> str:
    """The filesystem type of a directory that can be written to. Raises NoTargetError, OSError."""
    if path.exists() and not path.is_dir():
        raise NoTargetError("not a directory")
    if make:
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        raise NoTargetError("no such directory")
    filesystem = filesystem_type(path)
    if not any_filesystem and not is_local(filesystem):
        raise NoTargetError(f"a {filesystem} filesystem, which is not local to this node")
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise NoTargetError("not writable")
    return filesystem
