"""Walk a tree: the names of its files, folder by folder, and their sizes and times.

Symbolic links are followed; a link to a folder above it is reported and left out, and a folder that links reach on more
than 64 paths is an error. A tree may be as deep as paths can be long.

Python's `stat` takes 2.5 µs a file from the kernel's cache, most of it under the interpreter's lock, and a round trip
on a network file system. So slices of a large tree go to forked children, each of which sends its results back through
a pipe and ends. If a child dies, this process examines its slice itself.
"""

from __future__ import annotations

import heapq
import itertools
import os
import stat
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from cache.errors import SourceError
from readers.strings import Names, NamesBuilder, Strings
from readers.tree import TreeFiles

__all__ = ["NOT_REGULAR", "UNKNOWN", "FolderFiles", "examine", "scan"]

UNKNOWN = -1  # a file that cannot be examined, such as a dangling link
NOT_REGULAR = -2
_MOST_VISITS = 64
_RUN = 1 << 16  # names of a folder that are sorted at a time
_BLOCK = 4096  # files, or numbers, in memory as Python objects at a time
_FEWEST_FILES = 4096  # for a process of its own: forking takes as long as examining about a thousand


class FolderFiles(NamedTuple):
    """A folder, and the names of files in it: names[first:stop], all of them without a stop."""

    folder: str
    names: Sequence[str]
    first: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        return (len(self.names) if self.stop is None else self.stop) - self.first


def examine(groups: Collection[FolderFiles], processes: int = 1) -> array[int]:
    """Size in bytes (or UNKNOWN, NOT_REGULAR), times of modification and of change in ns of every file: int64 [3 n].

    The time of change (ctime) cannot be set, so it differs for a file that was rewritten and given its old time again.
    Symbolic links are followed. Processes are forked where that is safe: on Linux, in a program without threads.
    """
    count = sum(group.size for group in groups)
    processes = min(processes, count // _FEWEST_FILES)
    if processes < 2 or sys.platform != "linux" or threading.active_count() > 1:
        return _examine(groups)
    bounds = [count * number // processes for number in range(processes + 1)]
    slices = list(itertools.pairwise(bounds))
    children: list[tuple[int, int]] = []
    try:
        for first, stop in slices[1:]:
            children.append(_fork(groups, first, stop))
        found = _examine(_slice(groups, *slices[0]))
        for (_, pipe), (first, stop) in zip(children, slices[1:], strict=True):
            if not _receive(pipe, found, stop - first):
                found += _examine(_slice(groups, first, stop))
    finally:
        for _, pipe in children:
            os.close(pipe)  # a child that is still writing fails and ends
        for process, _ in children:
            with suppress(ChildProcessError):  # in a program that ignores SIGCHLD
                os.waitpid(process, 0)
    return found


def _slice(groups: Iterable[FolderFiles], first: int, stop: int) -> Iterator[FolderFiles]:
    """The files numbered [first, stop) over all groups."""
    for group in groups:
        count = group.size
        if first < count and stop > 0:
            yield group._replace(first=group.first + max(0, first), stop=group.first + min(count, stop))
        first, stop = first - count, stop - count


def _examine(groups: Iterable[FolderFiles]) -> array[int]:
    found = array("q")
    for group in groups:
        try:
            descriptor = os.open(group.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            found.extend((UNKNOWN, 0, 0) * group.size)
            continue
        try:
            for first in range(group.first, group.first + group.size, _BLOCK):
                stop = min(first + _BLOCK, group.first + group.size)
                _examine_names(group.names[first:stop], descriptor, found)
        finally:
            os.close(descriptor)
    return found


def _examine_names(names: Sequence[str], descriptor: int, found: array[int]) -> None:
    """Relative to the folder's descriptor, which spares the kernel the path to it."""
    for name in names:
        try:
            status = os.stat(name, dir_fd=descriptor)
        except OSError:
            found.extend((UNKNOWN, 0, 0))
            continue
        found.append(status.st_size if stat.S_ISREG(status.st_mode) else NOT_REGULAR)
        found.append(status.st_mtime_ns)
        found.append(status.st_ctime_ns)


def _fork(groups: Iterable[FolderFiles], first: int, stop: int) -> tuple[int, int]:
    """(process, pipe) of a child that examines the files [first, stop) and writes the results to the pipe."""
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(receiver)  # or writing would wait for this very process to read
            with os.fdopen(sender, "wb") as file:
                file.write(_examine(_slice(groups, first, stop)))
        finally:
            os._exit(0)  # also after an error: no other code of this process may run in the child
    os.close(sender)
    return process, receiver


def _receive(pipe: int, found: array[int], files: int) -> bool:
    """Append a child's results for that many files; False, and nothing, where it did not send all."""
    before = len(found)
    with os.fdopen(pipe, "rb", closefd=False) as file:
        try:
            for first in range(0, 3 * files, _BLOCK):
                found.fromfile(file, min(_BLOCK, 3 * files - first))
        except EOFError:
            del found[before:]
            return False
    return True


def scan(root: str | os.PathLike[str], left_out: list[tuple[str, str]], processes: int = 1) -> TreeFiles:
    """Every visible file below `root`, folder by folder.

    left_out: gets (path, reason) of the files and folders that are left out.
    processes: how many may examine the files of a large tree.

    Raises SourceError for a folder that cannot be read: its files would be lost silently.
    """
    walk = _Walk(os.fspath(root))
    walk.run()
    facts = np.frombuffer(examine(walk, processes), np.int64).reshape(-1, 3)
    sizes = [stop - start for start, stop in walk.bounds()]
    folder = np.repeat(np.arange(len(walk.folders), dtype=np.int32), sizes)
    files = TreeFiles(walk.folders, folder, walk.names, facts, folder_times=walk.times)
    odd = np.flatnonzero(facts[:, 0] == NOT_REGULAR)
    if len(odd):
        walk.left_out += [(i, files[i].path, "not a regular file") for i in odd.tolist()]
        walk.left_out.sort(key=itemgetter(0))
        files = files.take(np.flatnonzero(facts[:, 0] != NOT_REGULAR))
    left_out += [(path, reason) for _, path, reason in walk.left_out]
    return files


class _Walk:
    """The names below a folder, folder by folder.

    folders: relative to the root, with a "/" at the end.
    starts: how many names come before those of each folder.
    times: when names in each folder changed last, in ns, before it was listed.
    left_out: (files before it, path, reason) of what is left out.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.folders: list[str] = []
        self.starts: list[int] = []
        self.times: list[int] = []
        self.names: Strings = Names.of(())
        self.left_out: list[tuple[int, str, str]] = []
        self._found = NamesBuilder()
        self._visits: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        """Walk without recursion, so that a tree may be as deep as a path can be long."""
        above: list[tuple[int, int]] = []  # (device, inode) of the folders above the one that is visited
        ahead = [("", 0)]  # (path relative to the root, its depth), the next one last
        while ahead:
            relative, depth = ahead.pop()
            del above[depth:]
            found = self._visit(relative, above)
            ahead += [(f"{relative}{name}/", depth + 1) for name in reversed(found)]
        self.names = self._found.build()

    def bounds(self) -> Iterator[tuple[int, int]]:
        """The names [first, stop) of each folder."""
        return itertools.pairwise([*self.starts, len(self.names)])

    def __len__(self) -> int:
        return len(self.folders)

    def __iter__(self) -> Iterator[FolderFiles]:
        for relative, (first, stop) in zip(self.folders, self.bounds(), strict=True):
            yield FolderFiles(self._path(relative), self.names, first, stop)

    def __contains__(self, item: object) -> bool:
        return any(item == group for group in self)

    def _path(self, relative: str) -> str:
        return f"{self.root}/{relative}".rstrip("/") if relative else self.root

    def _visit(self, relative: str, above: list[tuple[int, int]]) -> list[str]:
        """Add the files of a folder, and the folder to `above`; returns the names of the folders in it."""
        folder = self._path(relative)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{folder}: cannot be listed: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                self._leave_out(relative.rstrip("/"), "a link that leads back to a folder above it")
                return []
            self._count_visit(folder, identity)
            above.append(identity)
            self.folders.append(relative)
            self.starts.append(len(self._found))
            self.times.append(status.st_mtime_ns)
            return self._list(descriptor, relative)
        except OSError as error:
            raise SourceError(f"{folder}: cannot be listed: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _list(self, descriptor: int, relative: str) -> list[str]:
        """Add the files of an open folder by name. Sorted runs of a large one are merged, as columns."""
        is_folder: set[str] = set()
        runs: list[Sequence[str]] = []
        with os.scandir(descriptor) as entries:
            while batch := list(itertools.islice(entries, _RUN)):
                names = sorted([entry.name for entry in batch])
                is_folder.update([entry.name for entry in batch if entry.name[0] != "." and entry.is_dir()])
                if len(batch) < _RUN and not runs:
                    return self._add(names, is_folder, relative)
                run = NamesBuilder()
                run.extend(names)
                runs.append(run.build())
        folders: list[str] = []
        merged = heapq.merge(*runs)
        while names := list(itertools.islice(merged, _RUN)):
            folders += self._add(names, is_folder, relative)
        return folders

    def _add(self, names: list[str], is_folder: set[str], relative: str) -> list[str]:
        """Add the files among some names, in their order, and record what is left out; returns the folders."""
        folders: list[str] = []
        files: list[str] = []
        for name in names:
            if name[0] == ".":
                self._leave_out(relative + name, "hidden", len(files))
            elif name in is_folder:
                folders.append(name)
            else:
                files.append(name)
        self._found.extend(files)
        return folders

    def _count_visit(self, folder: str, identity: tuple[int, int]) -> None:
        """Refuse links that multiply: two links in each of 24 folders are 16 million paths to the last."""
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:
            raise SourceError(
                f"{folder}: is reached on more than {_MOST_VISITS} paths, through links to links; remove links, or "
                f"convert the folders that hold the images one by one"
            )

    def _leave_out(self, path: str, reason: str, more: int = 0) -> None:
        self.left_out.append((len(self._found) + more, path, reason))
