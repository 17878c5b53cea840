"""A tree of image files (`readers.tree` says which layouts). What is an image is decided by content, in the worker."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from cache.node import usable_cpus
from packer.conversion.arena import Arena
from packer.sources.base import SourceListing, SplitListing, check_names
from packer.sources.files import read_file
from readers.errors import SourceError
from readers.tree import TreeFile, arrange, scan, unique_keys

__all__ = ["FolderSource", "list_tree"]


class FolderSource:
    """The files below `root`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    @property
    def title(self) -> str:
        return f"image folder {self.root}"

    def list(self, split: str | None) -> SourceListing:
        left_out: list[tuple[str, str]] = []
        files = scan(self.root, left_out, usable_cpus())
        return list_tree(files, split, str(self.root), left_out)

    def open(self) -> FolderReader:
        return FolderReader(os.fspath(self.root))

    def paths(self, listing: SourceListing) -> Iterator[str]:
        prefix = os.fspath(self.root).rstrip("/") + "/"
        return (prefix + place[0] for part in listing.splits.values() for place in part.places)


def list_tree(files: list[TreeFile], split: str | None, where: str, left_out: list[tuple[str, str]]) -> SourceListing:
    """The listing of a tree of files; the place of a sample is (path relative to the root, bytes)."""
    splits, classes = arrange(files, split, where, left_out)
    listing = SourceListing({}, {"image": "image"}, classes, left_out, skip_strays=True)
    for name, part in splits.items():
        if not part.names:
            continue
        check_names(part.names, where)
        listing.splits[name] = SplitListing(
            root=part.root,
            keys=unique_keys(part.names),
            labels=part.labels,
            names=[(file_name,) for file_name in part.names],
            bytes=[max(0, file.bytes) for file in part.files],
            places=[(file.path, file.bytes) for file in part.files],
            stamps=[file.mtime_ns for file in part.files],
        )
    if not listing.splits:
        raise SourceError(f"{where}: no files found")
    return listing


class FolderReader:
    """Reads files of the tree."""

    def __init__(self, root: str) -> None:
        self._prefix = root.rstrip("/") + "/"

    def read(self, place: tuple[str, int], arena: Arena) -> Sequence[memoryview]:
        return (read_file(self._prefix + place[0], place[1], arena),)

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
