"""The working folder of a conversion, `OUT/.packing/`, which makes it safe to kill at any moment.

    lock              locked with flock by the running conversion, or shared by the tasks of one; the kernel releases it
                      when the process dies
    planning.lock     locked by the task that lists and plans for all of them
    job.json          what `packer commit` must know of a conversion by tasks: see `packer.conversion.saved`
    plan.json         fingerprint of listing and options; the names of the splits
    <shard>.….tmp     a shard being written, under a unique name; removed when its conversion starts again
    <shard>           a complete shard, on the disk (fsync), renamed from .tmp
    <shard>.part      its columns; written after the shard, so that a part proves its shard complete; names the plan
    .run-….tmp/       progress and stop requests of the tasks of an engine: see `packer.workers`
    <split>.index.tmp the index of a split while it is made
    quarantine/       copies of bad files
    replaced/         dataset.json of the set that is being replaced, while its files are removed
    names.json        new files of a change of the set: written and read by `packer.sets.change` only

Nothing leaves the folder before every shard is complete; `packer.conversion.commit` then moves everything into the set
and writes `dataset.json` last. The process that holds the lock owns the folder; the next one cleans up. Neither the
folder nor its content may be a link, which an attacker could have planted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from cache.errors import BadNameError, DatasetError, OutputError
from cache.files import BusyError, Folder, Lock
from cache.messages import quoted
from packer.columns import PartMeta, load_meta, remove_index
from packer.conversion.plan import Plan, PlannedShard
from packer.documents import remove_documents
from packer.output import output_errors
from readers.layout import (
    DATASET_FILE,
    DOCUMENTS,
    QUARANTINE_FOLDER,
    REPORT_FILE,
    WORK_FOLDER,
    SplitName,
    read_dataset_info,
)

__all__ = ["NAMES_FILE", "REPLACED_FOLDER", "Journal"]

REPLACED_FOLDER, NAMES_FILE = "replaced", "names.json"
_LOCK, _PLANNING_LOCK, _PLAN_FILE = "lock", "planning.lock", "plan.json"
_PATIENCE_SECONDS, _PLANNING_SECONDS = 1.0, 86_400.0
_MAX_PLAN_BYTES = 1 << 24


class Journal:
    """The working folder of the conversion into `out`, locked until `close`.

    place: `out`, opened.
    work: the folder, opened; folder: its path.

    Raises OutputError if another conversion has locked it, or if `out` has foreign content. A folder in which no work
    was begun is removed at the end.
    """

    @output_errors()
    def __init__(
        self,
        out: Path,
        *,
        beside_shards: bool = False,
        changes: bool = False,
        shared: bool = False,
        wait_seconds: float = 0.0,
    ) -> None:
        """beside_shards: `out` has shards to adopt, so it may have foreign content.

        changes: used by `packer.sets.change`, which cleans up after a killed change.
        shared: with other tasks of the same conversion; `join` replaces `begin`.
        wait_seconds: for the lock.
        """
        self.out = out
        self.folder = out / WORK_FOLDER
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out}: is a file; choose another output")
        if not beside_shards and not self.folder.is_dir():
            self._check_names(set())
        self.place = Folder(out, create=True)
        self._shared = shared
        self.work, self._lock = self._open_work(wait_seconds)
        self._removed = False
        try:
            if self.work.kind(NAMES_FILE) and not changes:
                raise OutputError(
                    f"{out}: a command that changed this set was killed; run  packer prune {quoted(out)}  first, which "
                    f"cleans up after it"
                )
            if beside_shards and self.work.kind(_PLAN_FILE):
                raise OutputError(f"{out}: has an unfinished conversion; run the same  packer convert  again first")
            if not (beside_shards or self._is_replacing()):
                self._check_names(self._moved_names())
        except BaseException:
            self.close()
            raise

    @property
    def unlocked(self) -> bool:
        """Whether this filesystem (Lustre without -o flock) has no locks; the caller warns."""
        return not self._lock.supported

    def _open_work(self, wait_seconds: float) -> tuple[Folder, Lock]:
        while True:
            try:
                work = self.place.folder(WORK_FOLDER, create=True)
                return work, work.lock(_LOCK, wait_seconds, shared=self._shared)
            except FileNotFoundError:  # the previous owner has just removed it
                continue
            except BusyError as error:
                raise OutputError(
                    f"{self.out}: another command is writing here; wait for it, or choose another output"
                ) from error

    def _is_replacing(self) -> bool:
        """Whether `out` was a set, which an interrupted conversion was replacing."""
        return bool(self.work.kind(_PLAN_FILE) and self.work.kind(f"{REPLACED_FOLDER}/{DATASET_FILE}"))

    def _check_names(self, own: set[str]) -> None:
        """Refuse to write among foreign files: `out` may contain only a packed set, or files moved by a commit."""
        if not self.out.is_dir() or (self.out / DATASET_FILE).exists():
            return
        with Folder(self.out) as place:
            foreign = [name for name in place.names() if name != WORK_FOLDER and name not in own]
        if foreign:
            raise OutputError(
                f"{self.out}: is not empty and not a packed set, so nothing is written to it (there is "
                f"{foreign[0]!r}); choose another output"
            )

    def _moved_names(self) -> set[str]:
        """Files that an interrupted commit may have moved into `out`; none without a plan."""
        if not self.work.kind(_PLAN_FILE):
            return set()
        shards = {name.removesuffix(".part") for name in self.work.names() if name.endswith(".part")}
        indexes = (f"{split}.index" for split in self._planned_splits())
        return {*shards, *indexes, *DOCUMENTS, REPORT_FILE, QUARANTINE_FOLDER}

    def finished_plan(self) -> str | None:
        """The plan fingerprint of the set in `out`; None if there is no set, "" if it has no fingerprint."""
        if not self.place.kind(DATASET_FILE):
            return None
        try:
            return str(read_dataset_info(self.out).made.get("plan", ""))
        except DatasetError:
            return ""

    @property
    def unfinished(self) -> str | None:
        """The plan fingerprint of an unfinished conversion; None if there is none, "" if it has no fingerprint."""
        return self._plan_fingerprint()

    @property
    def is_committed(self) -> bool:
        """Whether this conversion has become the set, and a kill has left some of its working files."""
        finished = self.finished_plan()
        parts = [name for name in self.work.names() if name.endswith(".part")]
        packed = any(self.work.kind(name.removesuffix(".part")) for name in parts)
        return finished is not None and self._plan_fingerprint() in (None, finished) and not packed

    @output_errors()
    def begin(self, plan: Plan, start_over: bool, *, sweep: bool = True) -> None:
        """Resume the unfinished conversion of the same plan, or start a new one. sweep: remove unfinished files.

        Raises OutputError if a conversion of another plan has packed a shard and `start_over` is false.
        """
        fingerprint = self._plan_fingerprint()
        if fingerprint is not None and fingerprint != plan.fingerprint:
            if not start_over and self._has_packed():
                raise OutputError(
                    f"{self.out}: has an unfinished conversion of another source or with other options (the "
                    f"source may have changed since); repeat that command, or pass overwrite=True to start over"
                )
            self._start_over()
        for name in self.work.names():
            if ".tmp" in name and sweep:
                self._remove(name)
        content = {"fingerprint": plan.fingerprint, "splits": list(plan.specs)}
        self.work.write(_PLAN_FILE, json.dumps(content).encode())

    @contextmanager
    def planning(self, wait: Callable[[], None]) -> Iterator[None]:
        """One task at a time enters the block; the others wait, and call `wait` first."""
        try:
            lock = self.work.lock(_PLANNING_LOCK, _PATIENCE_SECONDS)
        except BusyError:
            wait()
            lock = self.work.lock(_PLANNING_LOCK, _PLANNING_SECONDS)
        with lock:
            yield

    @output_errors()
    def join(self, plan: Plan, start_over: bool, first: Callable[[], None]) -> bool:
        """Take part in the conversion of this plan. The first task begins it, after calling `first`; returns whether it
        did.

        Raises OutputError like `begin`. Call it in the block of `planning`.
        """
        with self._lock.alone() as is_alone:
            begins = self._plan_fingerprint() != plan.fingerprint
            if begins:
                first()
            if is_alone or (begins and self._plan_fingerprint() is None):
                self.begin(plan, start_over, sweep=is_alone)
            elif begins:
                raise OutputError(
                    f"{self.out}: tasks of another conversion, of another source or with other options, are writing "
                    f"here; wait for them, or choose another output (if none runs, remove {self.folder})"
                )
        return begins

    def _plan_fingerprint(self) -> str | None:
        if not self.work.kind(_PLAN_FILE):
            return None
        try:
            return str(self._read_plan()["fingerprint"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""

    def _planned_splits(self) -> list[SplitName]:
        try:
            return [SplitName(name) for name in self._read_plan()["splits"]]
        except (BadNameError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def _read_plan(self) -> dict[str, list[str]]:
        content: dict[str, list[str]] = json.loads(self.work.read(_PLAN_FILE, _MAX_PLAN_BYTES))
        return content

    def _has_packed(self) -> bool:
        """Whether an unfinished conversion has written a complete shard, or has begun to replace a set."""
        return bool(self.work.kind(REPLACED_FOLDER)) or any(name.endswith(".part") for name in self.work.names())

    def _start_over(self) -> None:
        """Remove all remains of an unfinished conversion: its working folder, and files that its commit had moved."""
        if not self.place.kind(DATASET_FILE):
            remove_documents(self.place, DOCUMENTS)
            for name in self._moved_names().difference(DOCUMENTS) & set(self.place.names()):
                if self.place.kind(name) != "folder":
                    self.place.unlink(name)
                elif name == QUARANTINE_FOLDER:
                    self.place.remove_tree(name)
                else:
                    remove_index(self.place, name)
        self.empty()

    @output_errors()
    def empty(self) -> None:
        """Empty the working folder."""
        for name in self.work.names():
            if name not in (_LOCK, _PLANNING_LOCK, REPLACED_FOLDER):
                self._remove(name)

    def _remove(self, name: str) -> None:
        if self.work.kind(name) == "folder":
            self.work.remove_tree(name)
        else:
            self.work.unlink(name)

    def part_path(self, shard: PlannedShard) -> Path:
        return self.folder / f"{shard.name}.part"

    def load_whole(self, shard: PlannedShard, plan: Plan, on_error: str) -> PartMeta | None:
        """The facts of a complete shard; None if it must be written (again)."""
        try:
            meta = load_meta(self.part_path(shard))
        except DatasetError:
            return None
        if meta.plan != plan.fingerprint:  # written by a worker that outlived its conversion
            return None
        # The shard is in the working folder, or was moved into the set by an interrupted commit.
        status = self.work.lstat(shard.name)
        if status is None and not self.place.kind(DATASET_FILE):
            status = self.place.lstat(shard.name)
        if status is None or status.st_size != meta.shard.bytes:
            return None
        return None if any(item.action != _ACTION[on_error] for item in meta.left_out if item.action) else meta

    @output_errors()
    def remove(self) -> None:
        """Remove the working folder after the conversion; the lock last, which keeps others from starting."""
        if self._removed:
            return
        self._removed = True
        for name in self.work.names():
            if name != _LOCK:
                self._remove(name)
        self.work.unlink(_LOCK)
        self.place.remove_folder(WORK_FOLDER)

    def close(self) -> None:
        """Release the lock; unfinished work is kept for the next run."""
        try:
            if not self._removed and not self._is_in_use():
                if not self._shared:
                    self.remove()
                else:
                    with self._lock.alone() as is_alone:
                        if is_alone and not self._is_in_use():
                            self.remove()
        finally:
            self._removed = True
            self._lock.release()
            self.work.close()
            self.place.close()

    def _is_in_use(self) -> bool:
        return any(map(self.work.kind, (_PLAN_FILE, REPLACED_FOLDER, NAMES_FILE)))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_ACTION = {"raise": "", "skip": "skipped", "quarantine": "quarantined"}
