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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from readers.examine import scan
from readers.layout import same_split
from readers.listing import (
    IMAGE_SUFFIXES,
    Keys,
    Rows,
    TreeFile,
    TreeFiles,
    TreeNames,
    has_image_suffix,
    key_of_name,
)
from readers.strings import repeated

__all__ = [
    "IMAGE_SUFFIXES",
    "SPLIT_NAMES",
    "Keys",
    "TreeFile",
    "TreeFiles",
    "TreeNames",
    "TreeSplit",
    "arrange",
    "has_image_suffix",
    "key_of_name",
    "scan",
    "unique_keys",
]

SPLIT_NAMES = ("train", "val", "valid", "validation", "test")


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
    """Sort files into splits and classes. Returns the splits and the class names (position = label).

    split names the one split to take, or the name for a tree without splits; classes are those of all splits.
    Files outside of the splits are appended to `left_out`; raises SourceError where images are among them, or where
    there is no such split.
    """
    folder = files.in_folders()
    tops = {files.folders[number].partition("/")[0] for number in files.used_folders()}
    found = [name for name in SPLIT_NAMES if name in tops]
    if split is not None and found and split not in found:
        split = next((other for other in same_split(split) if other in found), split)
    if split is not None and found and split not in found:
        raise SourceError(f"{where}: no split {split!r}; it has {', '.join(found)}")
    roots = {f"{name}/": name for name in found} if found else {"": split or "train"}
    places = _Places(files.folders, roots)
    split_of = places.split[folder]
    if found:
        _leave_out_strays(files.take(np.flatnonzero(split_of < 0)), found[0], split, where, left_out)
    classes = tuple(sorted({places.classes[i] for i in files.used_folders() if places.split[i] >= 0} - {""}))
    numbers = {name: number for number, name in enumerate(classes)} | {"": -1}
    label_of = np.array([numbers.get(name, -1) for name in places.classes], np.int32)
    splits = {}
    for number, (root, name) in enumerate(roots.items()):
        if split in (None, name):
            its = files.take(_in_order(np.flatnonzero(split_of == number), folder, places.rank))
            splits[name] = TreeSplit(root.rstrip("/"), its, label_of[its.in_folders()])
    return splits, classes


class _Places:
    """What the folder of a file says of it, by the number of the folder.

    split: the number of its split, -1 outside of all; classes: the name of its class, "" for none; rank: where it
    comes among the folders. torchvision sorts a class by folder path, which differs from walking where folders nest.
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
                f"{where}: {path!r} lies beside the split {first!r} and would be left out; move it into a "
                f"split, or take one split at a time with  split={first!r}"
            )
        left_out.append((path, "beside the splits"))
