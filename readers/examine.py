"""Walk a tree: the names of its files, folder by folder, and their sizes and times.

Symbolic links are followed; a link to a folder above it is reported and left out, and a folder that links reach on more
than 64 paths is an error. A tree may be as deep as paths can be long.

A file costs 3 µs from the kernel's cache, three quarters of it for `stat`, most of that Python's own work under the
interpreter's lock, and a round trip on a network file system. So the folders of a large tree are shared out to forked
processes (`readers.forked`). Each lists a folder and examines its files at once: NFS has just sent what `stat` asks
for, and the inodes of a folder are near each other on a disk. The files of a large folder are shared out again. Which
process did what changes nothing, since the folders are put in order at the end.
"""

from __future__ import annotations

import heapq
import itertools
import os
import stat
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from readers.strings import Names, NamesBuilder, encoded
from readers.tree import TreeFiles

if TYPE_CHECKING:
    from readers.forked import Task

__all__ = ["NOT_REGULAR", "UNKNOWN", "scan"]

UNKNOWN = -1  # a file that cannot be examined, such as a dangling link
NOT_REGULAR = -2
_MOST_VISITS = 64
_RUN = 1 << 16  # names of a folder that are sorted at a time; a folder of more is shared out
_SLICE = 1 << 14  # files of it that a process gets at a time
_BLOCK = 1 << 15  # files that are put in order at a time
_FEWEST_FILES = 4096  # before other processes are started, which takes as long as examining a thousand
_MOST_FOLDERS = 64  # that a process gets at a time
_LeftOut: TypeAlias = "tuple[str, int, str, str]"  # folder as it is sorted, files before it there, path, reason


class _Folder(NamedTuple):
    """What a folder holds, without its files.

    files: how many it has. time_ns: when names in it changed last, before it was listed.
    folders: those in it, sorted, and whether each is a link.
    left_out: (files before it, name, reason).
    is_examined: False where only the names of its files are known.
    """

    files: int
    time_ns: int
    folders: list[tuple[str, bool]]
    left_out: list[tuple[int, str, str]]
    is_examined: bool


class _Found(NamedTuple):
    """Several folders, and columns of the files of all, in their order.

    names: as `NamesBuilder.encoded` gives them. facts: int64, as in `TreeFiles`; 0 where a folder is not examined.
    """

    folders: list[_Folder]
    names: tuple[bytes, bytes]
    facts: bytes


def scan(root: str | os.PathLike[str], left_out: list[tuple[str, str]], processes: int = 1) -> TreeFiles:
    """Every visible file below `root`, folder by folder.

    left_out: gets (path, reason) of the files and folders that are left out.
    processes: how many may list the folders of a large tree.

    Raises SourceError for a folder that cannot be read: its files would be lost silently.
    """
    walk = _Walk(os.fspath(root))
    walk.run(processes)
    return walk.files(left_out)


# --- in any process -----------------------------------------------------------------------------------------------
def _list_folders(paths: Sequence[str], share: bool) -> _Found:
    """List folders, and examine their files; with `share` not those of a large one. Raises SourceError."""
    names, facts, folders = NamesBuilder(), array("q"), []
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                folders.append(_list(descriptor, names, facts, share))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceError(f"{path}: cannot be listed: {error.strerror}") from error
    return _Found(folders, names.encoded(), facts.tobytes())


def _list(descriptor: int, names: NamesBuilder, facts: array[int], share: bool) -> _Folder:
    """Add the files of an open folder to `names` and `facts`. Sorted runs of a large one are merged, as columns."""
    time_ns = os.fstat(descriptor).st_mtime_ns
    start = len(names)
    below: dict[str, bool] = {}
    runs: list[Sequence[str]] = []
    with os.scandir(descriptor) as entries:
        while batch := list(itertools.islice(entries, _RUN)):
            is_last = len(batch) < _RUN
            run = sorted([entry.name for entry in batch])
            below.update({e.name: e.is_symlink() for e in batch if e.name[0] != "." and e.is_dir()})
            if is_last and not runs:
                runs.append(run)
            else:
                builder = NamesBuilder()
                builder.extend(run)
                runs.append(builder.build())
    left_out: list[tuple[int, str, str]] = []
    is_examined = not share or len(runs) < 2
    merged: Iterator[str] = heapq.merge(*runs) if len(runs) > 1 else iter(runs[0] if runs else ())
    while block := list(itertools.islice(merged, _RUN)):
        files = [name for name in block if name[0] != "." and name not in below]
        if len(files) < len(block):
            hidden = (name for name in block if name[0] == ".")
            left_out += [(len(names) - start + bisect_left(files, name), name, "hidden") for name in hidden]
        names.extend(files)
        if is_examined:
            _examine(files, descriptor, facts)
        else:
            facts.frombytes(bytes(24 * len(files)))
    return _Folder(len(names) - start, time_ns, sorted(below.items()), left_out, is_examined)


def _examine(names: Iterable[str], descriptor: int, facts: array[int]) -> None:
    """Size in bytes (or UNKNOWN, NOT_REGULAR), times of modification and of change in ns of every file.

    The time of change (ctime) cannot be set, so it differs for a file that was rewritten and given its old time again.
    Names are relative to the folder's descriptor, which spares the kernel the path to it.
    """
    for name in names:
        try:
            status = os.stat(name, dir_fd=descriptor)
        except OSError:
            facts.extend((UNKNOWN, 0, 0))
            continue
        facts.append(status.st_size if stat.S_ISREG(status.st_mode) else NOT_REGULAR)
        facts.append(status.st_mtime_ns)
        facts.append(status.st_ctime_ns)


def _examine_files(folder: str, names: tuple[bytes, bytes]) -> bytes:
    """The facts of files of a folder; of a folder that cannot be opened any more UNKNOWN."""
    facts, builder = array("q"), NamesBuilder()
    builder.extend_encoded(*names)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return array("q", (UNKNOWN, 0, 0) * len(builder)).tobytes()
    try:
        _examine(builder.build(), descriptor, facts)
    finally:
        os.close(descriptor)
    return facts.tobytes()


# --- in the process that was asked ----------------------------------------------------------------------------------
class _Walk:
    """The folders below `root`, in the order in which they were listed, and the columns of their files."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._ahead = [("", False)]  # (path relative to the root, whether a link is part of it), the next one last
        self._paths: list[str] = []  # of the folders, with a "/" at the end
        self._counts, self._times = array("q"), array("q")
        self._names, self._facts = NamesBuilder(), array("q")
        self._left_out: list[_LeftOut] = []
        self._visits: Counter[tuple[int, int]] = Counter()  # of folders behind links
        self._slices: list[tuple[str, int, int]] = []  # of large folders: path, and rows of the files to examine

    # --- work, for this process or another one
    def run(self, processes: int) -> None:
        """Do all work, with other processes where there is much of it."""
        while (processes < 2 or len(self._names) < _FEWEST_FILES) and (task := self._next(1, processes > 1)):
            work, arguments, done = task
            done(work(*arguments))
        if self._ahead or self._slices:
            from readers.forked import do_tasks

            do_tasks(lambda: self._next(min(_MOST_FOLDERS, 1 + len(self._ahead) // (2 * processes)), True), processes)

    def _next(self, folders: int, share: bool) -> Task | None:
        """What to do next: examine files of a large folder, or list up to so many folders; None: nothing for now."""
        if self._slices:
            path, first, stop = self._slices.pop()
            names = self._names.encoded(first, stop)
            return _examine_files, (path, names), lambda facts: self._put(first, facts)
        batch: list[tuple[str, bool]] = []
        while self._ahead and len(batch) < folders:
            relative, is_linked = self._ahead.pop()
            if is_linked and self._leads_back(relative):
                reason = "a link that leads back to a folder above it"
                self._left_out.append((_sorted_as(relative), 0, relative.rstrip("/"), reason))
            else:
                batch.append((relative, is_linked))
        if not batch:
            return None
        paths = [self._path(relative) for relative, _ in batch]
        return _list_folders, (paths, share), lambda found: self._add(batch, found)

    def _path(self, relative: str) -> str:
        return f"{self.root}/{relative}".rstrip("/") if relative else self.root

    def _leads_back(self, relative: str) -> bool:
        """Whether a folder behind a link is one of those above it. Raises SourceError for links that multiply."""
        path = self._path(relative)
        identity = _identity(path)
        above = itertools.accumulate(relative.split("/")[:-2], lambda path, name: f"{path}{name}/", initial="")
        if any(_identity(self._path(folder)) == identity for folder in above):
            return True
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:  # two links in each of 24 folders are 16 million paths to the last
            raise SourceError(
                f"{path}: is reached on more than {_MOST_VISITS} paths, through links to links; remove links, or "
                f"convert the folders that hold the images one by one"
            )
        return False

    # --- results
    def _add(self, batch: Sequence[tuple[str, bool]], found: _Found) -> None:
        """The folders of `batch`, and their files."""
        below: list[tuple[str, bool]] = []
        start = len(self._names)
        for (relative, is_linked), folder in zip(batch, found.folders, strict=True):
            self._paths.append(relative)
            self._counts.append(folder.files)
            self._times.append(folder.time_ns)
            where, stop = _sorted_as(relative), start + folder.files
            self._left_out += [(where, at, relative + name, reason) for at, name, reason in folder.left_out]
            below += [(f"{relative}{name}/", is_linked or is_link) for name, is_link in folder.folders]
            if not folder.is_examined:
                path = self._path(relative)
                self._slices += [(path, at, min(at + _SLICE, stop)) for at in range(start, stop, _SLICE)]
            start = stop
        self._ahead += reversed(below)
        self._names.extend_encoded(*found.names)
        self._facts.frombytes(found.facts)

    def _put(self, first: int, facts: bytes) -> None:
        self._facts[3 * first : 3 * first + len(facts) // 8] = array("q", facts)

    def files(self, left_out: list[tuple[str, str]]) -> TreeFiles:
        """All files, in the order of a walk. left_out: gets (path, reason)."""
        facts, names = np.frombuffer(self._facts, np.int64).reshape(-1, 3), self._names.build()
        del self._facts, self._names
        where = [_sorted_as(path) for path in self._paths]
        order = sorted(range(len(where)), key=where.__getitem__)
        counts = np.array(self._counts, np.int64)
        if order != list(range(len(order))):
            sorted_order = np.array(order, np.int64)
            names = _names_at(names, _blocks(counts, sorted_order))  # the old column ends before the next one begins
            facts = _facts_at(facts, _blocks(counts, sorted_order))
            counts = counts[order]
        folder = np.repeat(np.arange(len(order), dtype=np.int32), counts)
        paths, times = [self._paths[i] for i in order], [self._times[i] for i in order]
        files = TreeFiles(paths, folder, names, facts, folder_times=times)
        odd = np.flatnonzero(facts[:, 0] == NOT_REGULAR)
        starts = np.cumsum(counts) - counts
        for i in odd.tolist():
            place = where[order[folder[i]]], i - int(starts[folder[i]])
            self._left_out.append((*place, files[i].path, "not a regular file"))
        self._left_out.sort(key=itemgetter(0, 1))
        left_out += [(path, reason) for _, _, path, reason in self._left_out]
        return files.take(np.flatnonzero(facts[:, 0] != NOT_REGULAR)) if len(odd) else files


def _sorted_as(folder: str) -> str:
    """A folder's path as a text that sorts like the list of its names: it comes right before what is in it."""
    return folder.replace("/", "\0")


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be listed: {error.strerror}") from error
    return status.st_dev, status.st_ino


def _blocks(counts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """The old row of each file, in blocks, when folders of so many files are put in order."""
    stops = np.cumsum(counts[order])
    shifts = (np.cumsum(counts) - counts)[order] - (stops - counts[order])
    total = int(counts.sum())
    for first in range(0, total, _BLOCK):
        rows = np.arange(first, min(first + _BLOCK, total))
        yield rows + shifts[np.searchsorted(stops, rows, side="right")]


def _names_at(names: Names, blocks: Iterable[npt.NDArray[np.int64]]) -> Names:
    builder = NamesBuilder()
    for rows in blocks:
        builder.extend_encoded(*encoded(names.take(rows)))
    return builder.build()


def _facts_at(facts: npt.NDArray[np.int64], blocks: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    found, first = np.empty_like(facts), 0
    for rows in blocks:
        found[first : first + len(rows)] = facts[rows]
        first += len(rows)
    return found
