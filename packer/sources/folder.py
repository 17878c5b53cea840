"""A tree of image files (`readers.tree` says which layouts). What is an image is decided by content, in the worker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from cache.node import usable_cpus
from packer.conversion.arena import Arena
from packer.sources.base import FieldNames, SourceListing, SplitListing, check_names
from packer.sources.contents import HEAD_BYTES, advice, is_stray, reason_of
from packer.sources.files import read_file, read_head
from packer.sources.tree_layouts import check_layout
from readers.examine import scan
from readers.tree import Keys, TreeFiles, TreeSplit, arrange, unique_keys

__all__ = ["FolderSource", "TreeListing", "list_tree"]

_LARGE_BYTES = 64 << 20


class FolderSource:
    """The files below `root`."""

    def __init__(self, root: str | os.PathLike[str], layout: str = "auto") -> None:
        """layout: "tree" takes folders for classes whatever they look like; see `packer.sources.tree_layouts`."""
        self.root, self.layout = Path(root), layout

    @property
    def title(self) -> str:
        return f"image folder {self.root}"

    def list(self, split: str | None) -> SourceListing:
        left_out: list[tuple[str, str]] = []
        files = _without_large_strays(self.root, scan(self.root, left_out, usable_cpus()), left_out)
        return list_tree(files, split, str(self.root), left_out, self.layout)

    def open(self) -> FolderReader:
        return FolderReader(os.fspath(self.root))

    def paths(self, listing: SourceListing) -> Iterator[str]:
        prefix = os.fspath(self.root).rstrip("/") + "/"
        return (prefix + path for part in listing.splits.values() for path, _ in part.places)


def _without_large_strays(root: Path, files: TreeFiles, left_out: list[tuple[str, str]]) -> TreeFiles:
    """Look at very large files now: what is no image is neither planned nor given room."""
    strays = []
    for i in np.flatnonzero(files.column(0) > _LARGE_BYTES).tolist():
        path = files[i].path
        with suppress(BadSampleError):  # the worker says what is wrong with it
            head = read_head(os.path.join(root, path), HEAD_BYTES)
            if is_stray(head, path):
                strays.append(i)
                left_out.append((path, reason_of(head, path)))
    return files.take(np.delete(np.arange(len(files)), strays)) if strays else files


def list_tree(
    files: TreeFiles, split: str | None, where: str, left_out: list[tuple[str, str]], layout: str = "auto"
) -> SourceListing:
    """The listing of a tree of files; the place of a sample is (path relative to the root, bytes)."""
    splits, classes = arrange(files, split, where, left_out)
    warnings: list[str] = []
    if layout == "auto":
        whole = split is None or not any(part.root for part in splits.values())
        warnings = check_layout(files, splits, classes, where, whole)
    listing = SourceListing({}, {"image": "image"}, classes, left_out, warnings, skip_strays=True)
    for name, part in splits.items():
        if len(part.files):
            check_names(part.names, where)
            listing.splits[name] = TreeListing(part, unique_keys(part.names).whole)
    if not listing.splits:
        seen = advice(where, left_out, Counter(reason for _, reason in left_out))
        raise SourceError(f"{where}: no files found" + (f" but\n  {seen}" if seen else ""))
    return listing


class TreeListing(SplitListing):
    """A split of a tree: keys, names and places are views of its files. whole: see `readers.tree.Keys`."""

    def __init__(self, part: TreeSplit, whole: npt.NDArray[np.bool_]) -> None:
        files, names = part.files, part.names
        self.part, self.whole = part, whole
        sizes = files.column(0)
        super().__init__(
            root=part.root,
            keys=Keys(names, whole),
            labels=part.labels,
            names=FieldNames(names),
            bytes=np.maximum(sizes, 0) if (sizes < 0).any() else sizes,
            places=TreePlaces(files),
            stamps=files.column(1),
        )

    def take(self, indices: npt.NDArray[np.int64]) -> TreeListing:
        part = TreeSplit(self.root, self.part.files.take(indices), self.part.labels[indices])
        return TreeListing(part, self.whole[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeListing, (self.part, self.whole)


class TreePlaces(Sequence["tuple[str, int]"]):
    """(path, bytes) of files; -1 bytes: could not be examined."""

    def __init__(self, files: TreeFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._files[index][:2]
        first, stop, step = index.indices(len(self))
        found = zip(self._files.paths(first, stop), self._files.column(0)[first:stop].tolist(), strict=True)
        return list(found)[::step]

    def take(self, indices: npt.NDArray[np.int64]) -> TreePlaces:
        return TreePlaces(self._files.take(indices))


class FolderReader:
    """Reads files of the tree."""

    def __init__(self, root: str) -> None:
        self._prefix = root.rstrip("/") + "/"

    def read(self, place: tuple[str, int], arena: Arena) -> Sequence[memoryview]:
        return (read_file(self._prefix + place[0], place[1], arena),)

    def head(self, place: tuple[str, int]) -> bytes:
        return read_head(self._prefix + place[0], HEAD_BYTES)

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
