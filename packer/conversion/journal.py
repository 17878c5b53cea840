"""The working folder of a conversion, `OUT/.packing/`, and what makes it safe to kill at any moment.

    lock              held with flock by the running conversion; the kernel drops it when the process dies
    plan.json         fingerprint of listing and options; the names of the splits
    <shard>.tmp       a shard being written; removed when its conversion starts again
    <shard>           a whole shard, on the disk (fsync), renamed from .tmp
    <shard>.part      its columns; written after the shard, so that a part vouches for its shard
    quarantine/       copies of bad files
    replaced/         dataset.json of the set that --overwrite is replacing, while its files are removed

Nothing leaves the folder before every shard is whole; `packer.conversion.commit` then moves it all up and writes
`dataset.json` last. Who owns the folder is the process that holds the lock; whoever comes next cleans up.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

from packer.columns import PartMeta, load_meta
from packer.conversion.plan import Plan, PlannedShard
from readers.errors import DatasetError, OutputError
from readers.layout import DATASET_FILE, read_dataset_info

__all__ = ["REPLACED_FOLDER", "WORK_FOLDER", "Journal", "fsync_folder"]

WORK_FOLDER = ".packing"
REPLACED_FOLDER = "replaced"
_PLAN_FILE = "plan.json"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class Journal:
    """The working folder of the conversion into `out`, locked while this object lives.

    Raises OutputError where another conversion holds it, or `out` holds something that is not ours.
    """

    def __init__(self, out: Path, *, beside_shards: bool = False) -> None:
        """beside_shards: `out` holds shards to adopt, so it need not be empty or ours."""
        self.out = out
        self.folder = out / WORK_FOLDER
        self.unlocked = False
        if not beside_shards:
            self._check_target()
        elif (self.folder / _PLAN_FILE).exists():
            raise OutputError(f"{out}: holds an unfinished conversion; run the same  packer convert  again first")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"{out}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self.unlocked = True  # the caller warns: this filesystem (Lustre without -o flock) has no locks
            else:
                os.close(self._lock)
                raise OutputError(
                    f"{out}: another conversion is writing here; wait for it, or choose another output with -o"
                ) from error

    def _check_target(self) -> None:
        out = self.out
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out}: is a file; choose another output with -o")
        if out.is_dir() and not (out / DATASET_FILE).exists() and not self.folder.is_dir() and any(out.iterdir()):
            raise OutputError(
                f"{out}: is not empty and not a packed set, so nothing is written into it; choose another with -o"
            )

    def finished(self) -> str | None:
        """The plan fingerprint of the whole set in `out`; None where there is no whole set, "" if it has none."""
        if not (self.out / DATASET_FILE).exists():
            return None
        try:
            return str(read_dataset_info(self.out).made.get("plan", ""))
        except DatasetError:
            return ""

    def begin(self, plan: Plan, start_over: bool) -> None:
        """Take up the unfinished conversion of the same plan, or start a new one.

        Raises OutputError where an unfinished conversion of another plan is here and `start_over` is false.
        """
        path = self.folder / _PLAN_FILE
        found = self._planned(path)
        if found is not None and found != plan.fingerprint:
            if not start_over:
                raise OutputError(
                    f"{self.out}: holds an unfinished conversion of another source or with other options (the "
                    f"source may have changed since); repeat that command, or add --overwrite to start over"
                )
            self._start_over()
        for left in self.folder.glob("*.tmp*"):
            left.unlink()
        temporary = self.folder / (_PLAN_FILE + ".new")
        temporary.write_text(json.dumps({"fingerprint": plan.fingerprint, "splits": list(plan.specs)}))
        temporary.replace(path)

    def _planned(self, path: Path) -> str | None:
        try:
            return str(json.loads(path.read_text())["fingerprint"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _start_over(self) -> None:
        """Drop everything an unfinished conversion left: its working folder, and what its commit had moved up."""
        if not (self.out / DATASET_FILE).exists():
            for part in self.folder.glob("*.part"):
                (self.out / part.stem).unlink(missing_ok=True)
            for split in self._planned_splits():
                shutil.rmtree(self.out / f"{split}.index", ignore_errors=True)
        self.empty()

    def empty(self) -> None:
        """Drop what is in the working folder."""
        for item in self.folder.iterdir():
            if item.is_dir():
                if item.name != REPLACED_FOLDER:
                    shutil.rmtree(item)
            elif item.name != "lock":
                item.unlink()

    def _planned_splits(self) -> list[str]:
        try:
            names = json.loads((self.folder / _PLAN_FILE).read_text())["splits"]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [name for name in names if isinstance(name, str) and "/" not in name]

    def part_path(self, shard: PlannedShard) -> Path:
        return self.folder / f"{shard.name}.part"

    def done(self, shard: PlannedShard, on_error: str) -> PartMeta | None:
        """The facts of a shard that is whole already; None where it must be written (again)."""
        try:
            meta = load_meta(self.part_path(shard))
            size = self.shard_path(shard).stat().st_size
        except (DatasetError, OSError):
            return None
        if size != meta.shard.bytes or any(item.action != _ACTION[on_error] for item in meta.left_out if item.action):
            return None
        return meta

    def shard_path(self, shard: PlannedShard) -> Path:
        """Where a whole shard lies: in the working folder, or already moved up by a commit that was cut off."""
        inside = self.folder / shard.name
        return inside if inside.exists() or (self.out / DATASET_FILE).exists() else self.out / shard.name

    def remove(self) -> None:
        """The conversion is over: drop the working folder, and with it the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock; what is unfinished stays for the next run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_ACTION = {"raise": "", "skip": "skipped", "quarantine": "quarantined"}


def fsync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
