"""Sizes and times of many files, asked for in several processes where that pays.

Python's `stat` takes 2.5 µs a file with the answer at hand, most of it under the interpreter's lock, and a round trip
with a file system across a network. So slices of the files go to forked children, each of which sends its answers back
through a pipe and ends. A child that dies is no loss: this process asks for its slice itself.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
import threading
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

__all__ = ["NOT_REGULAR", "UNKNOWN", "FolderFiles", "examine"]

UNKNOWN = -1  # a file that cannot be examined, such as a dangling link
NOT_REGULAR = -2
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

    The time of change (ctime) cannot be set, so it tells a file that was rewritten and given its old time again.

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
            os.close(pipe)  # a child that is still writing then fails, and ends
        for process, _ in children:
            with suppress(ChildProcessError):  # a program that ignores SIGCHLD has none to wait for
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
    """By descriptor, files are looked up relative to the folder, which spares the kernel the path to it."""
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
    """(process, pipe) of a child that examines the files [first, stop) and writes what it found to the pipe."""
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(receiver)  # or writing would wait for ever for this very process to read
            with os.fdopen(sender, "wb") as file:
                file.write(_examine(_slice(groups, first, stop)))
        finally:
            os._exit(0)  # whatever happened: nothing of this process may run on in the child
    os.close(sender)
    return process, receiver


def _receive(pipe: int, found: array[int], files: int) -> bool:
    """Append what a child found of so many files; False, and nothing, where the child could not send it all."""
    before = len(found)
    with os.fdopen(pipe, "rb", closefd=False) as file:
        try:
            for first in range(0, 3 * files, _BLOCK):
                found.fromfile(file, min(_BLOCK, 3 * files - first))
        except EOFError:
            del found[before:]
            return False
    return True
