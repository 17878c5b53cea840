"""List a tree of image files: splits, classes, and files in the order of torchvision's ImageFolder.

    root/<split>/<class>/**/file    splits train, val, valid, validation, test
    root/<class>/**/file            one split, "train" unless named
    root/**/file                    files right under the split's folder have no label

Only names are looked at here, no file is opened; sizes and times come from the directory. Classes are sorted by
name, over all splits together, so that a label means the same in each. Symbolic links are followed; a link that
leads back to a folder above it is reported and left out, and a folder that links reach on more than 64 paths is an
error. A tree may be as deep as paths can be long.
"""

from __future__ import annotations

import os
from collections import Counter as Counted
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

from readers.errors import SourceError
from readers.examine import NOT_REGULAR, FolderFiles, examine
from readers.layout import same_split

__all__ = [
    "IMAGE_SUFFIXES",
    "SPLIT_NAMES",
    "TreeFile",
    "TreeSplit",
    "arrange",
    "has_image_suffix",
    "key_of_name",
    "scan",
    "unique_keys",
]

SPLIT_NAMES = ("train", "val", "valid", "validation", "test")
_MOST_VISITS = 64
_BY_NAME = attrgetter("name")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class TreeFile(NamedTuple):
    """A file: its path relative to the root ("/" between parts), size in bytes, times of modification and change in ns.

    bytes is -1 for a file that cannot be examined, such as a dangling link.
    """

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int = 0


@dataclass(slots=True)
class TreeSplit:
    """One split: the folder it came from ("" for the root), and its files with names relative to that folder."""

    root: str
    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    files: list[TreeFile] = field(default_factory=list)


def key_of_name(name: str) -> str:
    """The key that a file name implies: the name without its last suffix."""
    dot = name.rfind(".")
    return name[:dot] if dot > name.rfind("/") + 1 else name


def has_image_suffix(name: str) -> bool:
    """Whether a file name ends as images do."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def unique_keys(names: list[str]) -> list[str]:
    """Keys for distinct file names: without the suffix, or the whole name where two keys would be the same.

    Beside one image, files of other kinds (a.jpg, a.txt) leave the short key to the image.
    """
    keys = list(map(key_of_name, names))
    if len(set(keys)) == len(keys):
        return keys
    images: dict[str, int] = {}
    others: dict[str, int] = {}
    for key, name in zip(keys, names, strict=True):
        counts = images if has_image_suffix(name) else others
        counts[key] = counts.get(key, 0) + 1
    chosen = []
    for key, name in zip(keys, names, strict=True):
        rivals = images.get(key, 0) + (0 if has_image_suffix(name) else others[key])
        chosen.append(key if rivals == 1 else name)
    return chosen if len(set(chosen)) == len(chosen) else list(names)


def scan(root: str | os.PathLike[str], left_out: list[tuple[str, str]], processes: int = 1) -> list[TreeFile]:
    """Every visible file below `root`, folder by folder; (path, reason) of what is left out is appended.

    processes: how many may examine the files of a large tree. Raises SourceError for a folder that cannot be read:
    what it holds would be lost silently.
    """
    walk = _Walk()
    walk.run(os.fspath(root))
    found = examine(walk.folders, processes)
    files = list(map(TreeFile, walk.paths, found[0::3], found[1::3], found[2::3]))
    if any(file.bytes == NOT_REGULAR for file in files):
        walk.left_out += [(i, f.path, "not a regular file") for i, f in enumerate(files) if f.bytes == NOT_REGULAR]
        walk.left_out.sort(key=itemgetter(0))
        files = [file for file in files if file.bytes != NOT_REGULAR]
    left_out += [(path, reason) for _, path, reason in walk.left_out]
    return files


class _Walk:
    """The names below a folder: paths of files, the same by folder, and (files before it, path, reason) of the rest."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.folders: list[FolderFiles] = []
        self.left_out: list[tuple[int, str, str]] = []
        self._visits: Counted[tuple[int, int]] = Counted()

    def run(self, root: str) -> None:
        """Walk without recursion, so that a tree may be as deep as a path can be long."""
        above: list[tuple[int, int]] = []  # the folders on the way to the one that is visited, as (device, inode)
        ahead = [(root, "", 0)]  # (path, path relative to the root, its depth), the next one last
        while ahead:
            folder, relative, depth = ahead.pop()
            del above[depth:]
            found = self._visit(folder, relative, above)
            ahead += [(f"{folder}/{name}", f"{relative}{name}/", depth + 1) for name in reversed(found)]

    def _visit(self, folder: str, relative: str, above: list[tuple[int, int]]) -> list[str]:
        """Take up the files of a folder, and put it on `above`; returns the names of the folders in it."""
        names: list[str] = []
        folders: list[str] = []
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{folder}: cannot be listed: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                self._leave_out(0, relative.rstrip("/"), "a link that leads back to a folder above it")
                return []
            self._count_visit(folder, identity)
            above.append(identity)
            with os.scandir(descriptor) as entries:
                for entry in sorted(entries, key=_BY_NAME):
                    name = entry.name
                    if name[0] == ".":
                        self._leave_out(len(names), relative + name, "hidden")
                    elif entry.is_dir():
                        folders.append(name)
                    else:
                        names.append(name)
        except OSError as error:
            raise SourceError(f"{folder}: cannot be listed: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.paths += [relative + name for name in names]
        self.folders.append(FolderFiles(folder, names))
        return folders

    def _count_visit(self, folder: str, identity: tuple[int, int]) -> None:
        """Links that lead to links multiply: two in each of 24 folders are 16 million paths to the last."""
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:
            raise SourceError(
                f"{folder}: is reached on more than {_MOST_VISITS} paths, through links to links; remove links, or "
                f"convert the folders that hold the images one by one"
            )

    def _leave_out(self, names_before: int, path: str, reason: str) -> None:
        self.left_out.append((len(self.paths) + names_before, path, reason))


def arrange(
    files: list[TreeFile], split: str | None, where: str | Path, left_out: list[tuple[str, str]]
) -> tuple[dict[str, TreeSplit], tuple[str, ...]]:
    """Sort files into splits and classes. Returns the splits and the class names (position = label).

    split names the one split to take, or the name for a tree without splits; classes are those of all splits.
    Files beside the splits are appended to `left_out`; raises SourceError where images are among them, or where
    there is no such split.
    """
    tops = {file[0].partition("/")[0] for file in files if "/" in file[0]}
    found = [name for name in SPLIT_NAMES if name in tops]
    if split is not None and found and split not in found:
        split = next((other for other in same_split(split) if other in found), split)
    if split is not None and found and split not in found:
        raise SourceError(f"{where}: no split {split!r}; it has {', '.join(found)}")
    prefixes = {f"{name}/": name for name in found} if found else {"": split or "train"}
    if found:
        _leave_out_strays(files, prefixes, split, where, left_out)
    splits = {name: TreeSplit(prefix.rstrip("/")) for prefix, name in prefixes.items()}
    classes = _sort_in(files, prefixes, splits)
    numbers = {name: number for number, name in enumerate(classes)}
    for part in splits.values():
        part.labels = [numbers[name.partition("/")[0]] if "/" in name else -1 for name in part.names]
    return {name: part for name, part in splits.items() if split in (None, name)}, classes


def _leave_out_strays(
    files: list[TreeFile],
    prefixes: dict[str, str],
    split: str | None,
    where: str | Path,
    left_out: list[tuple[str, str]],
) -> None:
    for file in files:
        if file.path[: file.path.find("/") + 1] in prefixes:
            continue
        if split is None and has_image_suffix(file.path):
            first = next(iter(prefixes.values()))
            raise SourceError(
                f"{where}: {file.path!r} lies beside the split {first!r} and would be left out; move it into a "
                f"split, or convert one split at a time with  --split {first}"
            )
        left_out.append((file.path, "beside the splits"))


def _sort_in(files: list[TreeFile], prefixes: dict[str, str], splits: dict[str, TreeSplit]) -> tuple[str, ...]:
    classes = set()
    whole = "" in prefixes
    deep = False
    for file in files:
        path = file.path
        prefix = "" if whole else path[: path.find("/") + 1]
        if prefix not in prefixes:
            continue
        part = splits[prefixes[prefix]]
        name = path[len(prefix) :]
        part.names.append(name)
        part.files.append(file)
        top, slash, rest = name.partition("/")
        if slash:
            classes.add(top)
            deep = deep or "/" in rest
    if deep:
        for part in splits.values():
            _sort_as_image_folder(part)
    return tuple(sorted(classes))


def _sort_as_image_folder(part: TreeSplit) -> None:
    """torchvision sorts a class by folder path, then by name, which differs from walking where folders nest."""

    def place(i: int) -> tuple[str, str, str]:
        folder, _, base = part.names[i].rpartition("/")
        return folder.partition("/")[0], folder, base

    order = sorted(range(len(part.names)), key=place)
    part.names = [part.names[i] for i in order]
    part.files = [part.files[i] for i in order]
