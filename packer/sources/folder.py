"""A tree of image files (`readers.tree` says which layouts). What is an image is decided by content, in the worker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cache.node import usable_cpus
from packer.conversion.arena import Arena
from packer.sources.base import SourceListing, SplitListing, check_names
from packer.sources.contents import HEAD_BYTES, advice, is_stray, reason_of
from packer.sources.files import read_file, read_head
from packer.sources.tree_layouts import check_layout
from readers.errors import BadSampleError, SourceError
from readers.tree import TreeFile, arrange, scan, unique_keys

__all__ = ["FolderSource", "list_tree"]

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
        return (prefix + place[0] for part in listing.splits.values() for place in part.places)


def _without_large_strays(root: Path, files: list[TreeFile], left_out: list[tuple[str, str]]) -> list[TreeFile]:
    """Look at very large files now: what is no image is neither planned nor made room for."""
    strays = set()
    for file in files:
        if file.bytes > _LARGE_BYTES:
            with suppress(BadSampleError):  # the worker says what is wrong with it
                head = read_head(os.path.join(root, file.path), HEAD_BYTES)
                if is_stray(head, file.path):
                    strays.add(file.path)
                    left_out.append((file.path, reason_of(head, file.path)))
    return [file for file in files if file.path not in strays] if strays else files


def list_tree(
    files: list[TreeFile], split: str | None, where: str, left_out: list[tuple[str, str]], layout: str = "auto"
) -> SourceListing:
    """The listing of a tree of files; the place of a sample is (path relative to the root, bytes)."""
    splits, classes = arrange(files, split, where, left_out)
    warnings: list[str] = []
    if layout == "auto":
        whole = split is None or not any(part.root for part in splits.values())
        warnings = check_layout(files, splits, classes, where, whole)
    listing = SourceListing({}, {"image": "image"}, classes, left_out, warnings, skip_strays=True)
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
        seen = advice(where, left_out, Counter(reason for _, reason in left_out))
        raise SourceError(f"{where}: no files found" + (f" but\n  {seen}" if seen else ""))
    return listing


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
