"""A tree of image files as columns: splits, classes, keys, and files in the order of torchvision's ImageFolder.

    root/<split>/<class>/**/file    splits train, val, valid, validation, test
    root/<class>/**/file            one split, "train" unless named
    root/**/file                    files directly in the split's folder have no label

Only names are used here, no file is opened; sizes and times come from `readers.examine.scan`. Classes are sorted by
name, over all splits together, so that a label means the same in each.

A file takes 36 bytes of columns and the bytes of its name in its folder: a tree of ten million files takes half a
gigabyte. A split, or any other selection, is rows of the columns of the tree; paths, names and keys are built on use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from readers.layout import same_split
from readers.strings import LazySequence, NamesBuilder, Strings, repeated

__all__ = [
    "IMAGE_SUFFIXES",
    "SPLIT_NAMES",
    "Keys",
    "Rows",
    "TreeFile",
    "TreeFiles",
    "TreeNames",
    "TreeSplit",
    "arrange",
    "has_image_suffix",
    "key_of_name",
    "unique_keys",
]

SPLIT_NAMES = ("train", "val", "valid", "validation", "test")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
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
    folder   int32 [n]      which of them a file is in
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
        """Files that no folder of this machine holds, such as the members of an archive; their times are 0."""
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
        """int64 [k]: 0 the sizes, 1 the times of modification, 2 of change; a view where the rows are consecutive."""
        return self.facts[_index(self.rows), number]

    def in_folders(self) -> npt.NDArray[np.int32]:
        """int32 [k]: the number in `folders` that each file is in."""
        return self.folder[_index(self.rows)]

    def used_folders(self) -> list[int]:
        """The numbers in `folders` that any file is in, in rising order."""
        used = np.zeros(len(self.folders), np.bool_)  # np.unique loads modules for as long as a listing takes
        used[self.in_folders()] = True
        return list(np.flatnonzero(used).tolist())

    def paths(self, first: int = 0, stop: int | None = None, skip: int = 0) -> Iterator[str]:
        """The paths of the files [first, stop), without the first `skip` letters, a block in memory at a time."""
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
        """The columns of these rows alone: folders, folder, names, facts."""
        rows = np.asarray(self.rows, np.int64)
        used = self.used_folders()
        number = np.zeros(len(self.folders), np.int32)
        number[used] = np.arange(len(used))
        folders = [self.folders[i] for i in used]
        return folders, number[self.folder[rows]], self.names.take(rows), self.facts[rows]

    def __reduce__(self) -> tuple[Any, ...]:
        """These rows alone, for another process."""
        return TreeFiles, self.compact()


def _index(rows: Rows) -> slice | npt.NDArray[np.int64]:
    """Rows as NumPy takes them: consecutive ones are a view."""
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows


class TreeNames(LazySequence[str]):
    """The names of files relative to a folder, whose path in the tree has `skip` letters."""

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
    """The keys of samples by the names of their files. whole, bool [n]: where the key is the name with its suffix."""

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
    """The key that a file name implies: the name without its last suffix."""
    dot = name.rfind(".")
    return name[:dot] if dot > name.rfind("/") + 1 else name


def has_image_suffix(name: str) -> bool:
    """Whether a file name ends as images do."""
    return name.lower().endswith(IMAGE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class TreeSplit:
    """One split: the folder it came from ("" for the root), its files, and their labels, int32 [n]; -1 for none."""

    root: str
    files: TreeFiles
    labels: npt.NDArray[np.int32]

    @property
    def names(self) -> TreeNames:
        """The names of the files, relative to `root`."""
        return TreeNames(self.files, len(self.root) + 1 if self.root else 0)

    def folders(self) -> list[str]:
        """The folders that the files are in, relative to `root`, without a "/" at the end; sorted."""
        skip = len(self.root) + 1 if self.root else 0
        return sorted(self.files.folders[i][skip:].rstrip("/") for i in self.files.used_folders())


def unique_keys(names: Sequence[str]) -> Keys:
    """Keys for distinct file names: without the suffix, or the whole name where two keys would be the same.

    Next to one image, files of other kinds (a.jpg, a.txt) leave the short key to the image.
    """
    count = len(names)
    whole = np.zeros(count, np.bool_)
    positions = repeated(lambda: Keys(names, whole), count).tolist()
    if not positions:
        return Keys(names, whole)
    found = [(i, names[i]) for i in positions]
    images = Counter(key_of_name(name) for _, name in found if has_image_suffix(name))
    others = Counter(key_of_name(name) for _, name in found if not has_image_suffix(name))
    for i, name in found:
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
    found = [name for name in SPLIT_NAMES if name in tops]
    if split is not None and found and split not in found:
        split = next((other for other in same_split(split) if other in found), split)
    if split is not None and found and split not in found:
        raise SourceError(f"{where}: no split {split!r}; it has {', '.join(found)}")
    roots = {f"{name}/": name for name in found} if found else {"": split or "train"}
    facts = _FolderFacts(files.folders, roots)
    split_of = facts.split[folder]
    if found:
        _leave_out_strays(files.take(np.flatnonzero(split_of < 0)), found[0], split, where, left_out)
    classes = tuple(sorted({facts.classes[i] for i in files.used_folders() if facts.split[i] >= 0} - {""}))
    numbers = {name: number for number, name in enumerate(classes)} | {"": -1}
    label_of = np.array([numbers.get(name, -1) for name in facts.classes], np.int32)
    splits = {}
    for number, (root, name) in enumerate(roots.items()):
        if split in (None, name):
            its = files.take(_in_order(np.flatnonzero(split_of == number), folder, facts.rank))
            splits[name] = TreeSplit(root.rstrip("/"), its, label_of[its.in_folders()])
    return splits, classes


class _FolderFacts:
    """What the folder of a file implies, by the number of the folder.

    split: the number of its split, -1 outside of all.
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
    """The rows by the rank of their folders; a range where they are consecutive."""
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
