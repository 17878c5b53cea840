"""A directory whose set is changed, or made, by one command at a time: it always has the old set or the new one.

    lock, and clean up after a killed command          `.packing/lock`, which conversions lock, too
    new shards and indexes into `.packing/`
    names.json: their future names                     so that the next command can clean up after a kill
    renames and links, under free names
    dataset.json                                       which alone makes them the set; then `packer.documents`
    remove files that were retired long ago

Files of the old set are kept, since readers that have it open need them, even columns that are not mapped yet.
dataset.json lists them as retired. Indexes are removed by the first change after 30 days, or earlier, the oldest first,
if they take more than an eighth of the bytes of the shards (and 1 GiB); shards only by `prune`. A change that erases
samples retires nothing: names.json lists the old files next to the new ones, and files that it lists but dataset.json
does not name are removed, by this command or by the next one.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from cache.errors import OutputError, StaleIndexError
from cache.files import Folder, PathError
from cache.messages import Watcher, quoted
from packer.columns import PartColumns, is_index, remove_index, write_index
from packer.conversion.journal import NAMES_FILE, Journal
from packer.documents import remove_documents, repair_documents, write_dataset_info
from packer.output import output_errors
from readers.layout import (
    DATASET_FILE,
    DOCUMENTS,
    MAX_JSON_BYTES,
    WORK_FOLDER,
    DatasetInfo,
    Retired,
    ShardInfo,
    ShardPath,
    SplitInfo,
    now,
    read_dataset_info,
)

__all__ = ["Change", "files_of"]

_RETIRED_SECONDS = 30 * 24 * 3600.0
_RETIRED_BYTES, _RETIRED_SHARE = 1 << 30, 8
_NO_HARD_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class Change:
    """The directory `root`, locked until the end of a `with` block.

    new: whether a set is made there. Otherwise there is one, described by `info`.

    moves: new name of each file or folder of the working folder that belongs to the set.
    links: for new names, the shard of another set that is linked there.
    completed: the argument `erases` of a killed erasure that had become the set, and whose old files have been removed
        now; "" for none.

    Raises OutputError (locked, unfinished conversion, not empty where a new set is to be made), DatasetError.
    """

    def __init__(self, root: Path, watcher: Watcher, *, new: bool = False) -> None:
        self.root, self._watcher = root, watcher
        self._is_made = new and not root.exists()
        self.moves: dict[str, str] = {}
        self.links: dict[str, tuple[Path, ShardInfo]] = {}
        self.completed = ""
        before = None if new else read_dataset_info(root)
        self._journal = self._locked(watcher)
        try:
            with output_errors():
                self._clean()
                self.info = before if new else self._retire_old(read_dataset_info(root))
                if new:
                    self._check_empty()
                else:
                    repair_documents(self.place, scratch=self.work)
                if self._journal.unlocked:
                    watcher.note("warning: no file locks here; make sure that no other command writes this set")
        except BaseException:
            self._close()
            raise

    @property
    def place(self) -> Folder:
        """The directory, opened."""
        return self._journal.place

    @property
    def work(self) -> Folder:
        """The folder for new files, opened; remaining files in it are removed at the end."""
        return self._journal.work

    def free(self, names: Iterable[str]) -> str:
        """The first of these names that is free."""
        return next(name for name in names if not self.place.kind(name))

    def write_index(
        self,
        split: str,
        columns: Sequence[Path | PartColumns],
        counts: Sequence[int],
        fields: Iterable[str],
        shards: Iterable[ShardInfo],
        *,
        root: str,
        separate: Sequence[str] = (),
        numbers: Sequence[int] | None = None,
    ) -> SplitInfo:
        """Write the index of a split into the working folder, for `commit`; returns the description of the split.

        columns, counts, fields, separate, numbers: as for `packer.columns.write_index`.
        root: the folder of the source tree.
        """
        folder, work = f"{split}.index", self.work
        files = write_index(work, folder, columns, counts, [*fields], scratch=work, separate=separate, numbers=numbers)
        names = (f"{folder}{f'-{number}' if number > 1 else ''}" for number in range(1, 1 << 30))
        self.moves[folder] = self.free(names)
        return SplitInfo(sum(counts), tuple(shards), self.moves[folder], root, files)

    @output_errors()
    def commit(self, info: DatasetInfo, *, erases: str = "") -> int:
        """Make `info` the set, with the new indexes, `moves` and `links`.

        erases: describes the erased samples; the next command finds it if this one is killed.

        Files of the old set that `info` does not name are retired or, with `erases`, removed at the end, with all
        retired ones. Returns the number of symbolic links, which need the sets that they lead to. Raises
        StaleIndexError if a linked shard is not the one that was indexed.
        """
        names = [ShardPath(name) for name in (*self.moves.values(), *self.links)]
        content: Any = names
        if erases and self.info is not None:
            old = dict.fromkeys([*files_of(self.info), *(retired.path for retired in self.info.retired)])
            content = {"names": [*names, *(name for name in old if name not in files_of(info))], "erases": erases}
        self.work.write(NAMES_FILE, json.dumps(content).encode())
        symbolic = sum(self._link(name, path, shard) for name, (path, shard) in self.links.items())
        for name, new in self.moves.items():
            self._make_folder(new)
            self.work.rename(name, new, self.place)
        for folder in {above for name in names for above in _above(name)}:
            with self.place.folder(folder) as opened:
                opened.sync()
        self.place.sync()
        if erases:
            info = replace(info, retired=())
        elif self.info is not None:
            used = set(files_of(info))
            gone = (Retired(path, now(), content) for path, content in self.info.contents().items())
            info = replace(info, retired=tuple(old for old in (*self.info.retired, *gone) if old.path not in used))
        self.info = write_dataset_info(self.place, info, scratch=self.work, note=self._watcher.note)
        return symbolic

    @output_errors()
    def remove_retired(self) -> int:
        """Remove all retired files; returns their bytes."""
        assert self.info is not None
        removed, used = 0, set(files_of(self.info))
        for retired in self.info.retired:
            if retired.path not in used:
                removed += self._bytes_of(retired.path)
                self._remove(retired.path)
        if self.info.retired:
            self.info = write_dataset_info(self.place, replace(self.info, retired=()), scratch=self.work)
        return removed

    def __enter__(self) -> Change:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        """Remove files that do not belong to the set, and release the lock."""
        try:
            with output_errors():
                self._clean()
        finally:
            self._journal.close()
            if self._is_made:
                with suppress(OSError):  # it is empty if nothing was made
                    self.root.rmdir()

    def _locked(self, watcher: Watcher) -> Journal:
        try:
            return Journal(self.root, beside_shards=True, changes=True)
        except OutputError as error:
            if getattr(error.__cause__, "errno", None) != errno.EAGAIN:
                raise
        watcher.note(f"waiting for another command that writes {self.root}")
        return Journal(self.root, beside_shards=True, changes=True, wait_seconds=float("inf"))

    def _check_empty(self) -> None:
        names = [name for name in self.place.names() if name != WORK_FOLDER]
        if names:
            problem = "holds a set" if DATASET_FILE in names else f"is not empty (there is {names[0]!r})"
            raise OutputError(f"{self.root}: {problem}; choose another output")

    # --- what killed commands left ------------------------------------------------------------------------------
    def _clean(self) -> None:
        """Remove files that were moved or linked into the set but never became part of it, and the working files."""
        if self.work.kind(NAMES_FILE):
            info = read_dataset_info(self.root) if self.place.kind(DATASET_FILE) else None
            used = {*files_of(info), *(retired.path for retired in info.retired)} if info else set()
            if info is None:
                remove_documents(self.place, DOCUMENTS)
            names, erases = self._listed_names()
            if erases and info is not None and info.history[-1:] and info.history[-1].operation == "erase":
                self.completed = erases
            for name in names:
                if name not in used:
                    self._remove(name)
            for folder in {above for name in names for above in _above(name) if self.place.kind(above)}:
                with self.place.folder(folder) as opened:
                    opened.sync()
            self.place.sync()  # before the list is removed, since a crash could otherwise bring them back unlisted
        self._journal.empty()

    def _listed_names(self) -> tuple[list[str], str]:
        """The names, and the erased samples, "" for none."""
        try:
            content = json.loads(self.work.read(NAMES_FILE, MAX_JSON_BYTES))
            erases = str(content["erases"]) if isinstance(content, dict) else ""
            return [ShardPath(name) for name in (content["names"] if erases else content)], erases
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OutputError(
                f"{self.work.path / NAMES_FILE}: cannot be read ({error}), so it is unknown what a killed command "
                f"left here; run  packer verify {quoted(self.root)}  and, if it is whole, remove that file"
            ) from error

    def _remove(self, name: str) -> None:
        """Remove a shard, a link or an index; of a folder with other files, only its columns."""
        with suppress(FileNotFoundError):
            if self.place.kind(name) == "folder":
                remove_index(self.place, name)
            else:
                self.place.unlink(name)
            for folder in _above(name):
                if not self.place.remove_folder(folder):
                    break

    # --- retired files ------------------------------------------------------------------------------------------
    def _retire_old(self, info: DatasetInfo) -> DatasetInfo:
        """Remove retired indexes that are due; returns `info` without files that no longer exist."""
        left = max(_RETIRED_BYTES, sum(shard.bytes for shard in _shards_of(info)) // _RETIRED_SHARE)
        used = set(files_of(info))
        for retired in reversed(info.retired):
            if retired.path not in used and self._is_index(retired.path):
                left -= self._bytes_of(retired.path)
                if left < 0 or retired.age_seconds > _RETIRED_SECONDS:
                    self._remove(retired.path)
        return replace(info, retired=tuple(retired for retired in info.retired if self.place.kind(retired.path)))

    def _is_index(self, name: str) -> bool:
        try:
            return self.place.kind(name) == "folder" and is_index(self.place, name)
        except PathError:
            return False

    def _bytes_of(self, name: str) -> int:
        if self.place.kind(name) != "folder":
            status = self.place.lstat(name)
            return status.st_size if status is not None else 0
        with self.place.folder(name) as folder:
            return sum(status.st_size for file in folder.names() if (status := folder.lstat(file)) is not None)

    # --- links --------------------------------------------------------------------------------------------------
    def _link(self, name: str, path: Path, shard: ShardInfo) -> bool:
        """Link a shard, by a hard link if possible; returns whether the link is symbolic."""
        self._make_folder(name)
        target = os.path.realpath(path)
        try:
            size = os.stat(target).st_size
        except OSError as error:
            raise StaleIndexError(f"{path}: shard cannot be linked: {error.strerror}") from error
        if size != shard.bytes:
            raise StaleIndexError(f"{path}: has {size} bytes, expected {shard.bytes} as indexed; run  packer verify")
        try:
            self.place.link(name, target, hard=True)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            self.place.link(name, target)
            return True
        return False

    def _make_folder(self, name: str) -> None:
        folder = name.rpartition("/")[0]
        if folder:
            self.place.folder(folder, create=True).close()


def _shards_of(info: DatasetInfo) -> Iterator[ShardInfo]:
    for split in info.splits.values():
        yield from split.shards


def files_of(info: DatasetInfo) -> list[str]:
    """The shards and the folders of the indexes of a set."""
    return list(dict.fromkeys([*(shard.path for shard in _shards_of(info)), *(s.index for s in info.splits.values())]))


def _above(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
