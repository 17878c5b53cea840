"""A tree of image files as columns: splits, classes, keys, and files in the order of torchvision's ImageFolder.

    root/<split>/<class>/**/file    splits train, val, valid, validation, test
    root/<class>/**/file            one split, "train" unless named
    root/**/file                    files directly in the split's folder have no label

Only names are used here, no file is opened; sizes and times come from `scan`. Classes are sorted by
name, over all splits together, so that a label means the same in each.

A file takes 36 bytes of columns and the bytes of its name in its folder: a tree of ten million files takes half a
gigabyte. A split, or any other selection, is rows of the columns of the tree; paths, names and keys are built on use.
"""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import itertools
import json
import os
import signal
import stat
import sys
import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.stores import LooseFiles
from cache.system import CLOEXEC, DIRECTORY
from readers.layout import same_split
from readers.reader import Reader
from readers.table import LazySequence, MemoryColumns, Names, NamesBuilder, Strings, Table, encoded, repeated

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor


SPLIT_NAMES = ("train", "val", "valid", "validation", "test")
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif", ".jxl"),
)
_BLOCK = 4096
Rows: TypeAlias = "range | npt.NDArray[np.int64]"


class TreeFile(NamedTuple):
    """A file: its path relative to the root ("/" between parts), size in bytes, times of modification and change in ns.

    bytes is -1 for a file that cannot be examined, such as a dangling link.
    """

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int = 0


class TreeFiles(LazySequence[TreeFile]):
    """Files of a tree, as rows of columns that all selections of it share.

    folders: relative to the root, with a "/" at the end; "" for the root itself
    folder   int32 [n]      number of the folder that a file is in
    names    [n]            its name there
    facts    int64 [n, 3]   bytes (-1: could not be examined), times of modification and change in ns
    rows     [k]            the files that these are, in their order
    folder_times   int64 [folders]   when names in them changed last, in ns; empty where that is not known
    """

    __slots__ = ("facts", "folder", "folder_times", "folders", "names", "rows")

    def __init__(
        self,
        folders: Sequence[str],
        folder: npt.NDArray[np.int32],
        names: Strings,
        facts: npt.NDArray[np.int64],
        rows: Rows | None = None,
        folder_times: npt.ArrayLike = (),
    ) -> None:
        self.folders, self.folder, self.names, self.facts = folders, folder, names, facts
        self.folder_times = np.asarray(folder_times, np.int64)
        self.rows: Rows = range(len(names)) if rows is None else rows

    @classmethod
    def of(cls, paths: Sequence[str], sizes: Sequence[int]) -> TreeFiles:
        """Files that are not in a folder of this machine, such as members of an archive; their times are 0."""
        folders: dict[str, int] = {}
        numbers = np.empty(len(paths), np.int32)
        names = NamesBuilder()
        for i, path in enumerate(paths):
            cut = path.rfind("/") + 1
            numbers[i] = folders.setdefault(path[:cut], len(folders))
            names.append(path[cut:])
        facts = np.zeros((len(paths), 3), np.int64)
        facts[:, 0] = sizes
        return cls(list(folders), numbers, names.build(), facts)

    def __len__(self) -> int:
        return len(self.rows)

    def _at(self, number: int) -> TreeFile:
        row = int(self.rows[number])
        return TreeFile(self.folders[self.folder[row]] + self.names[row], *self.facts[row].tolist())

    def take(self, indices: Rows) -> TreeFiles:
        """Some of these files, in the order of `indices`."""
        if isinstance(indices, range):
            rows: Rows = self.rows[indices.start : indices.stop : indices.step]
        else:
            whole = isinstance(self.rows, range) and self.rows == range(len(self.names))
            rows = indices if whole else np.asarray(self.rows)[indices]
        return TreeFiles(self.folders, self.folder, self.names, self.facts, rows, self.folder_times)

    def column(self, number: int) -> npt.NDArray[np.int64]:
        """int64 [k]: 0: sizes, 1: times of modification, 2: times of change; a view if the rows are consecutive."""
        return self.facts[_index(self.rows), number]

    def in_folders(self) -> npt.NDArray[np.int32]:
        """int32 [k]: the number of each file's folder in `folders`."""
        return self.folder[_index(self.rows)]

    def used_folders(self) -> list[int]:
        """The numbers of the folders that have files, ascending."""
        used = np.zeros(len(self.folders), np.bool_)  # np.unique would import modules, which takes as long as a listing
        used[self.in_folders()] = True
        return list(np.flatnonzero(used).tolist())

    def paths(self, first: int = 0, stop: int | None = None, skip: int = 0) -> Iterator[str]:
        """The paths of the files [first, stop) without the first `skip` characters; one block in memory at a time."""
        folders, chosen = self.folders, self.rows[first:stop]
        for start in range(0, len(chosen), _BLOCK):
            rows = chosen[start : start + _BLOCK]
            if isinstance(rows, range):
                names: Sequence[str] = self.names[rows.start : rows.stop]
            else:
                names = list(self.names.take(rows))
            numbers = self.folder[_index(rows)].tolist()
            prefix = {number: folders[number][skip:] for number in set(numbers)}
            yield from [prefix[number] + name for number, name in zip(numbers, names, strict=True)]

    def compact(self) -> tuple[list[str], npt.NDArray[np.int32], Strings, npt.NDArray[np.int64]]:
        """The columns with only these rows: folders, folder, names, facts."""
        rows = np.asarray(self.rows, np.int64)
        used = self.used_folders()
        number = np.zeros(len(self.folders), np.int32)
        number[used] = np.arange(len(used))
        folders = [self.folders[i] for i in used]
        return folders, number[self.folder[rows]], self.names.take(rows), self.facts[rows]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only these rows."""
        return TreeFiles, self.compact()


def _index(rows: Rows) -> slice | npt.NDArray[np.int64]:
    """Rows as an index for NumPy; consecutive rows give a view."""
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows


class TreeNames(LazySequence[str]):
    """The names of files relative to a folder whose path in the tree has `skip` characters."""

    __slots__ = ("files", "skip")

    def __init__(self, files: TreeFiles, skip: int = 0) -> None:
        self.files, self.skip = files, skip

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: npt.NDArray[np.int64]) -> TreeNames:
        """The names at `indices`."""
        return TreeNames(self.files.take(indices), self.skip)

    def _between(self, first: int, stop: int) -> Iterator[str]:
        return self.files.paths(first, stop, self.skip)


class Keys(LazySequence[str]):
    """The keys of samples from the names of their files. whole: bool [n], whether the key keeps the suffix."""

    __slots__ = ("names", "whole")

    def __init__(self, names: Sequence[str], whole: npt.NDArray[np.bool_]) -> None:
        self.names, self.whole = names, whole

    def __len__(self) -> int:
        return len(self.names)

    def take(self, indices: npt.NDArray[np.int64]) -> Keys:
        """The keys at `indices`."""
        if isinstance(self.names, (Strings, TreeNames)):
            return Keys(self.names.take(indices), self.whole[indices])
        return Keys([self.names[i] for i in indices.tolist()], self.whole[indices])

    def _between(self, first: int, stop: int) -> Iterator[str]:
        for start in range(first, stop, _BLOCK):
            end = min(start + _BLOCK, stop)
            names, whole = self.names[start:end], self.whole[start:end]
            if not whole.any():
                yield from map(key_of_name, names)
                continue
            for name, is_key in zip(names, whole.tolist(), strict=True):
                yield name if is_key else key_of_name(name)


def key_of_name(name: str) -> str:
    """The key for a file name: the name without its last suffix."""
    dot = name.rfind(".")
    return name[:dot] if dot > name.rfind("/") + 1 else name


def has_image_suffix(name: str) -> bool:
    """Whether a file name has the suffix of an image format."""
    return name.lower().endswith(IMAGE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class TreeSplit:
    """One split: its folder ("" for the root), its files, and their labels, int32 [n]; -1 for none."""

    root: str
    files: TreeFiles
    labels: npt.NDArray[np.int32]

    @property
    def names(self) -> TreeNames:
        """The names of the files, relative to `root`."""
        return TreeNames(self.files, len(self.root) + 1 if self.root else 0)

    def folders(self) -> list[str]:
        """The folders of the files, relative to `root`, without a final "/", sorted."""
        skip = len(self.root) + 1 if self.root else 0
        return sorted(self.files.folders[i][skip:].rstrip("/") for i in self.files.used_folders())


def unique_keys(names: Sequence[str]) -> Keys:
    """Keys for distinct file names: the name without the suffix, or the whole name if two keys would be equal.

    If only one of the files with a common short key is an image (a.jpg, a.txt), the image gets the short key.
    """
    count = len(names)
    whole = np.zeros(count, np.bool_)
    positions = repeated(lambda: Keys(names, whole), count).tolist()
    if not positions:
        return Keys(names, whole)
    named = [(i, names[i]) for i in positions]
    images = Counter(key_of_name(name) for _, name in named if has_image_suffix(name))
    others = Counter(key_of_name(name) for _, name in named if not has_image_suffix(name))
    for i, name in named:
        key = key_of_name(name)
        whole[i] = images[key] + (0 if has_image_suffix(name) else others[key]) != 1
    chosen = Keys(names, whole)
    doubles = [chosen[i] for i in repeated(lambda: chosen, count).tolist()]
    return chosen if len(set(doubles)) == len(doubles) else Keys(names, np.ones(count, np.bool_))


def arrange(
    files: TreeFiles, split: str | None, where: str | Path, left_out: list[tuple[str, str]]
) -> tuple[dict[str, TreeSplit], tuple[str, ...]]:
    """Sort files into splits and classes. Returns the splits and the class names (position = label) of all splits.

    split: the one split to take, or the name for a tree without splits.
    where: the tree, for messages.
    left_out: gets (path, reason) of the files outside of the splits.

    Raises SourceError where images are outside of the splits, or there is no such split.
    """
    folder = files.in_folders()
    tops = {files.folders[number].partition("/")[0] for number in files.used_folders()}
    known = [name for name in SPLIT_NAMES if name in tops]
    if split is not None and known and split not in known:
        split = next((other for other in same_split(split) if other in known), split)
    if split is not None and known and split not in known:
        raise SourceError(f"{where}: no split {split!r}; it has {', '.join(known)}")
    roots = {f"{name}/": name for name in known} if known else {"": split or "train"}
    facts = _FolderFacts(files.folders, roots)
    split_of = facts.split[folder]
    if known:
        _leave_out_strays(files.take(np.flatnonzero(split_of < 0)), known[0], split, where, left_out)
    classes = tuple(sorted({facts.classes[i] for i in files.used_folders() if facts.split[i] >= 0} - {""}))
    numbers = {name: number for number, name in enumerate(classes)} | {"": -1}
    label_of = np.array([numbers.get(name, -1) for name in facts.classes], np.int32)
    splits = {}
    for number, (root, name) in enumerate(roots.items()):
        if split in (None, name):
            members = files.take(_in_order(np.flatnonzero(split_of == number), folder, facts.rank))
            splits[name] = TreeSplit(root.rstrip("/"), members, label_of[members.in_folders()])
    return splits, classes


class _FolderFacts:
    """Split and class by the number of a folder.

    split: the number of its split, -1 outside all splits.
    classes: the name of its class, "" for none.
    rank: its position among the folders. torchvision sorts a class by folder path, which differs from the order of the
        walk where folders nest.
    """

    def __init__(self, folders: Sequence[str], roots: dict[str, str]) -> None:
        numbers = {root: number for number, root in enumerate(roots)}
        self.split = np.full(len(folders), -1, np.int32)
        self.rank = np.zeros(len(folders), np.int32)
        self.classes = [""] * len(folders)
        order = []
        for i, path in enumerate(folders):
            root = "" if "" in numbers else path[: path.find("/") + 1]
            if root in numbers:
                self.split[i] = numbers[root]
                self.classes[i] = path[len(root) :].partition("/")[0]
                order.append((self.classes[i], path[:-1], i))
        for place, (_, _, i) in enumerate(sorted(order)):
            self.rank[i] = place


def _in_order(rows: npt.NDArray[np.int64], folder: npt.NDArray[np.int32], rank: npt.NDArray[np.int32]) -> Rows:
    """The rows sorted by the rank of their folders; a range if they are consecutive."""
    ranks = rank[folder[rows]]
    if bool((ranks[1:] < ranks[:-1]).any()):
        rows = rows[np.argsort(ranks, kind="stable")]
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
        return range(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _leave_out_strays(
    strays: TreeFiles, first: str, split: str | None, where: str | Path, left_out: list[tuple[str, str]]
) -> None:
    for path in strays.paths():
        if split is None and has_image_suffix(path):
            raise SourceError(
                f"{where}: {path!r} is outside the split {first!r} and would be left out; move it into a "
                f"split, or take one split at a time with  split={first!r}"
            )
        left_out.append((path, "outside the splits"))


# Walk a tree: the names of its files, folder by folder, and their sizes and times.
#
# Symbolic links are followed; a link to a folder above it is reported and left out, and a folder that links reach on
# more than 64 paths is an error. The depth of a tree is limited only by the length of paths.
#
# A file takes 3 µs from the kernel's cache, three quarters of it for `stat`, mostly Python's work under the
# interpreter's lock, and a round trip on a network file system. So the folders of a large tree are distributed to
# forked processes (`do_tasks`). Each lists a folder and examines its files at once: NFS has just sent their attributes,
# and the inodes of a folder are close together on a disk. The files of a large folder are divided again. The folders
# are sorted at the end, so the result does not depend on the processes.


UNKNOWN = -1  # a file that cannot be examined, such as a dangling link
NOT_REGULAR = -2
_MOST_VISITS = 64
_RUN = 1 << 16  # names sorted at a time; the files of a folder with more are divided among processes
_SLICE = 1 << 14  # files of a large folder that a process gets at a time
_EXAMINE_BLOCK = 1 << 15  # files that are put in order at a time
_ALONE_SECONDS = 0.2  # work alone first: covers 75,000 files in memory, or hundreds on a slow server
_MOST_FOLDERS = 64  # folders that a process gets at a time
_LeftOut: TypeAlias = "tuple[str, int, str, str]"  # folder as sorted, files before it in that folder, path, reason


class _Folder(NamedTuple):
    """A listed folder, without its files.

    files: number of files. time_ns: time of the last change of its names, before it was listed.
    folders: its subfolders, sorted, and whether each is a link.
    left_out: (files before it, name, reason).
    is_examined: False where only the names of its files are known.
    """

    files: int
    time_ns: int
    folders: list[tuple[str, bool]]
    left_out: list[tuple[int, str, str]]
    is_examined: bool


class _Found(NamedTuple):
    """Several folders, and columns of their files, in this order.

    names: in the form of `NamesBuilder.encoded`. facts: int64, as in `TreeFiles`; 0 for folders not examined.
    """

    folders: list[_Folder]
    names: tuple[bytes, bytes]
    facts: bytes


def scan(root: str | os.PathLike[str], left_out: list[tuple[str, str]], processes: int = 1) -> TreeFiles:
    """Every visible file below `root`, folder by folder.

    left_out: receives (path, reason) of the files and folders that are left out.
    processes: most processes for listing a large tree.

    Raises SourceError for a folder that cannot be read: its files would be lost silently.
    """
    walk = _Walk(os.fspath(root))
    walk.run(processes)
    return walk.files(left_out)


# --- in any process -----------------------------------------------------------------------------------------------
def _list_folders(paths: Sequence[str], share: bool) -> _Found:
    """List folders and examine their files, except those of large folders if `share`. Raises SourceError."""
    names, facts, folders = NamesBuilder(), array("q"), []
    for path in paths:
        try:
            with _opened(path) as folder:
                folders.append(_list(folder, names, facts, share))
        except OSError as error:
            raise SourceError(f"{path}: cannot be listed: {error.strerror}") from error
    return _Found(folders, names.encoded(), facts.tobytes())


@contextmanager
def _opened(path: str) -> Iterator[int | str]:
    """A folder's descriptor, which saves the kernel looking up the path of each file; on Windows the path."""
    if os.stat not in os.supports_dir_fd:
        yield path
        return
    descriptor = os.open(path, os.O_RDONLY | DIRECTORY | CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _list(place: int | str, names: NamesBuilder, facts: array[int], share: bool) -> _Folder:
    """Add the files of an open folder to `names` and `facts`. The names of a large folder are merged in sorted runs."""
    time_ns = os.stat(place).st_mtime_ns
    start = len(names)
    below: dict[str, bool] = {}
    runs: list[Sequence[str]] = []
    with os.scandir(place) as entries:
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
            _examine(files, place, facts)
        else:
            facts.frombytes(bytes(24 * len(files)))
    return _Folder(len(names) - start, time_ns, sorted(below.items()), left_out, is_examined)


def _examine(names: Sequence[str], place: int | str, facts: array[int]) -> None:
    """Size in bytes (or UNKNOWN, NOT_REGULAR), times of modification and of change in ns of every file.

    The time of change (ctime) cannot be set, so it reveals a file that was rewritten and given its old time again.
    """
    from readers.coefficients.compiled import codec_if_built

    codec = codec_if_built()
    if codec is not None and isinstance(place, int):
        facts.frombytes(codec.examine(place, os.fsencode("\0".join((*names, "")))))
        return
    for name in names:
        try:
            if isinstance(place, int):
                status = os.stat(name, dir_fd=place)
            else:
                status = os.stat(os.path.join(place, name))
        except OSError:
            facts.extend((UNKNOWN, 0, 0))
            continue
        facts.append(status.st_size if stat.S_ISREG(status.st_mode) else NOT_REGULAR)
        facts.append(status.st_mtime_ns)
        facts.append(status.st_ctime_ns)


def _examine_files(folder: str, names: tuple[bytes, bytes]) -> bytes:
    """The facts of a folder's files; UNKNOWN if the folder cannot be opened any more."""
    facts, builder = array("q"), NamesBuilder()
    builder.extend_encoded(*names)
    try:
        with _opened(folder) as place:
            _examine(builder.build(), place, facts)
    except OSError:
        return array("q", (UNKNOWN, 0, 0) * len(builder)).tobytes()
    return facts.tobytes()


# --- in the main process --------------------------------------------------------------------------------------------
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
        """Do all work, with other processes if there is much of it."""
        until = time.monotonic() + _ALONE_SECONDS
        while (processes < 2 or not self._paths or time.monotonic() < until) and (task := self._next(1, processes > 1)):
            work, arguments, done = task
            done(work(*arguments))
        if self._ahead or self._slices:
            do_tasks(lambda: self._next(min(_MOST_FOLDERS, 1 + len(self._ahead) // (2 * processes)), True), processes)

    def _next(self, folders: int, share: bool) -> Task | None:
        """The next task: examine files of a large folder, or list folders; None if there is nothing to do now."""
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
        """Whether a link leads to one of the folders above it. Raises SourceError for links that multiply paths."""
        path = self._path(relative)
        identity = _identity(path)
        above = itertools.accumulate(relative.split("/")[:-2], lambda path, name: f"{path}{name}/", initial="")
        if any(_identity(self._path(folder)) == identity for folder in above):
            return True
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:  # two links in each of 24 nested folders make 16 million paths
            raise SourceError(
                f"{path}: is reached on more than {_MOST_VISITS} paths, through links to links; remove links, or "
                f"convert the image folders one by one"
            )
        return False

    # --- results
    def _add(self, batch: Sequence[tuple[str, bool]], listed: _Found) -> None:
        """Add the folders of `batch` and their files."""
        below: list[tuple[str, bool]] = []
        start = len(self._names)
        for (relative, is_linked), folder in zip(batch, listed.folders, strict=True):
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
        self._names.extend_encoded(*listed.names)
        self._facts.frombytes(listed.facts)

    def _put(self, first: int, facts: bytes) -> None:
        self._facts[3 * first : 3 * first + len(facts) // 8] = array("q", facts)

    def files(self, left_out: list[tuple[str, str]]) -> TreeFiles:
        """All files, in the order of a walk. left_out: receives (path, reason)."""
        facts, names = np.frombuffer(self._facts, np.int64).reshape(-1, 3), self._names.build()
        del self._facts, self._names
        where = [_sorted_as(path) for path in self._paths]
        order = sorted(range(len(where)), key=where.__getitem__)
        counts = np.array(self._counts, np.int64)
        if order != list(range(len(order))):
            sorted_order = np.array(order, np.int64)
            names = _names_at(names, _blocks(counts, sorted_order))  # frees the old column before the next one is made
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
    """A sort key for a folder's path: a folder comes right before its contents."""
    return folder.replace("/", "\0")


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be listed: {error.strerror}") from error
    return status.st_dev, status.st_ino


def _blocks(counts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """The old row of each file, in blocks, when folders with these numbers of files are reordered."""
    stops = np.cumsum(counts[order])
    shifts = (np.cumsum(counts) - counts)[order] - (stops - counts[order])
    total = int(counts.sum())
    for first in range(0, total, _EXAMINE_BLOCK):
        rows = np.arange(first, min(first + _EXAMINE_BLOCK, total))
        yield rows + shifts[np.searchsorted(stops, rows, side="right")]


def _names_at(names: Names, blocks: Iterable[npt.NDArray[np.int64]]) -> Names:
    builder = NamesBuilder()
    for rows in blocks:
        builder.extend_encoded(*encoded(names.take(rows)))
    return builder.build()


def _facts_at(facts: npt.NDArray[np.int64], blocks: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    selected, first = np.empty_like(facts), 0
    for rows in blocks:
        selected[first : first + len(rows)] = facts[rows]
        first += len(rows)
    return selected


# Plain files as a reader: the table is a scan of names and sizes, the store reads whole files.


class _FolderColumns(MemoryColumns):
    """The files of a scan, without header facts."""

    path: Path
    split: str
    paths: Strings

    def names(self, field: str) -> Strings:
        return Strings.of(f"={path}" for path in self.paths)

    def fingerprint(self) -> str:
        """32 hex digits over names, labels and classes; not over the content of the files, which is not read."""
        text = json.dumps([self.split, list(self.classes), list(self.paths)])
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        digest.update(self.column("label").data)
        return digest.hexdigest()


def open_folder(path: str | os.PathLike[str], split: str | None = None) -> Reader:
    """Open a folder of image files; see `readers.opening.tree` for the supported layouts.

    Images are recognised by their suffix, as in torchvision; a file is opened only when it is read. Raises SourceError
    for a tree that cannot be used; reading raises StaleIndexError for a file that was removed.
    """
    root = Path(path)
    if not root.is_dir():
        raise SourceError(f"{root}: not a directory")
    files = scan(root, [])
    images = np.fromiter(map(has_image_suffix, files.paths()), np.bool_, len(files))
    splits, classes = arrange(files.take(np.flatnonzero(images)), split, root, [])
    name = "train" if split is None and "train" in splits else next(iter(splits))
    part = splits[name]
    if not part.names:
        raise SourceError(f"{root}: no image files found")
    sizes = np.maximum(part.files.column(0), 0)
    times = np.stack([part.files.column(1), part.files.column(2)], axis=1)
    names = Strings.of(part.names)
    columns = _FolderColumns(
        Strings.of(unique_keys(part.names)),
        {"label": part.labels, "shard": np.arange(len(sizes)), "image.length": sizes},
        classes=classes,
        shard_bytes=sizes,
        title=f"{os.path.abspath(root)} ({name})",
    )
    columns.path, columns.split, columns.paths = root, name, names
    where = os.path.join(root, part.root) if part.root else os.fspath(root)
    return Reader(Table(columns), LooseFiles(where, names, sizes, times))


# Tasks that create more tasks, distributed to forked processes; without processes, this process does all tasks.
#
# Processes are forked if that is safe: on Linux, in a program with one thread. They end with their parent, which
# handles Ctrl-C. If a process dies, its task is done in the main process.


_PR_SET_PDEATHSIG = 1
Task: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], None]]"


def do_tasks(next_task: Callable[[], Task | None], processes: int) -> None:
    """Do tasks until there are none.

    next_task: returns (function, its arguments, callback for its result in this process); None for nothing now, which
    is final once all earlier tasks are done.

    Raises the error of a task, after the tasks that have begun have ended.
    """
    if processes > 1 and sys.platform == "linux" and threading.active_count() == 1:
        import multiprocessing  # takes 16 ms with concurrent.futures; few trees need it
        from concurrent.futures import ProcessPoolExecutor

        try:
            pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start, (os.getpid(),))
        except (OSError, ImportError):  # a system without semaphores, or without a writable /dev/shm
            pool = None
        if pool is not None:
            try:
                _share(next_task, pool, 2 * processes)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            return
    while (task := next_task()) is not None:
        work, arguments, done = task
        done(work(*arguments))


def _share(next_task: Callable[[], Task | None], pool: ProcessPoolExecutor, most: int) -> None:
    from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, wait

    waiting: dict[Future[Any], Task] = {}
    while True:
        while len(waiting) < most and (task := next_task()) is not None:
            work, arguments, done = task
            try:
                waiting[pool.submit(work, *arguments)] = task
            except BrokenExecutor:
                done(work(*arguments))
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            work, arguments, done = waiting.pop(future)
            try:
                result = future.result()
            except BrokenExecutor:  # a process died, and the pool with it
                result = work(*arguments)
            done(result)


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above could take effect
