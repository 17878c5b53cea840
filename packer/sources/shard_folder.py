"""A folder of shards made elsewhere, of any format, as one source.

    train-00000-of-00008.tfrecord, …     all in one folder, or
    train/000000.tar, val/000000.tar     in a folder a split

The shards are of one format. Samples come in the order of the names of the files. A split is what the shards say, or
the name of the folder, or is read off the names of the files; where none says one, all are train. Where a key occurs in
several shards, keys begin with the name of their shard. A gap in the numbers of the names is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import SourceError
from cache.messages import plural
from packer.formats.base import LocateOptions
from packer.sources.base import SourceListing, file_stamp, wanted_split
from packer.sources.folder import FolderSource
from packer.sources.layouts import shard_files
from packer.sources.shards import OpenedShard, ShardFile, ShardReader, list_shards, missing_shards, split_of_name
from packer.sources.streams import StreamKeeper

__all__ = ["ShardFolderSource", "open_shards"]


def open_shards(root: str | os.PathLike[str], layout: str = "auto", **options: Any) -> ShardFolderSource | FolderSource:
    """The source; with layout="tree" the folder of files that it is then, none of which is an image."""
    if layout == "tree" and not options:
        return FolderSource(root, layout)
    return ShardFolderSource(root, **options)


class ShardFolderSource:
    """The samples of the shards in the folder `root`; the options are those of `ShardSource`."""

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        self.root = Path(root)
        fields = dict(options.pop("fields", None) or {})
        self.options = LocateOptions(**options, extra_fields=fields, check_payload=True, lenient=True)
        self._files: list[tuple[str, ShardFile]] = []
        self._stamps: list[tuple[int, int]] = []
        self._keepers: list[StreamKeeper] = []
        self._fields = 1

    @property
    def title(self) -> str:
        return f"folder of shards {self.root}"

    def list(self, split: str | None) -> SourceListing:
        found = [(folder, ShardFile(path)) for folder, path in shard_files(self.root)]
        if not found:
            raise SourceError(f"{self.root}: no shards in it")
        kinds = {file.kind: file.path for _, file in found}
        if len(kinds) > 1:
            names = ", ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
            raise SourceError(f"{self.root}: shards of several formats: {names}; keep each in a folder of its own")
        says_splits = any(folder or _says_split(file.path.name) for folder, file in found)
        one = split or "train"
        self._files = [
            (folder or split_of_name(file.path.name) if says_splits else one, file) for folder, file in found
        ]
        self._keepers = [StreamKeeper(file.path) for _, file in self._files]
        self._stamps = [file_stamp(file.path) for _, file in self._files]
        listing = list_shards(self._files, self.root, self.options)
        self._fields = len(listing.fields)
        split = wanted_split(split, listing.splits, str(self.root))
        listing.splits = {name: part for name, part in listing.splits.items() if split in (None, name)}
        for part in listing.splits.values():
            part.stamps = np.array([self._stamps[place[0]][1] for place in part.places], np.int64)
        count, some = missing_shards(str(file.path.name) for _, file in self._files)
        if count:
            missing = plural(count, "shard")
            listing.warnings.append(f"{self.root}: by their names {missing} are missing, such as {', '.join(some)}")
        return listing

    @contextmanager
    def open(self) -> Iterator[ShardReader]:
        for (_, file), stamp in zip(self._files, self._stamps, strict=True):
            if file_stamp(file.path) != stamp:
                raise SourceError(f"{file.path}: has changed since it was listed; run the same command again")
        with ExitStack() as opened:
            shards = [
                OpenedShard(file, keeper, opened) for (_, file), keeper in zip(self._files, self._keepers, strict=True)
            ]
            yield ShardReader(shards, self._fields)

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield from (file.path for _, file in self._files)


def _says_split(name: str) -> bool:
    return split_of_name(name) != "train" or "train" in name.lower()
