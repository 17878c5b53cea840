"""An archive of an image tree, read as it is: tar, also compressed as a whole (gzip, bzip2, xz, zstd), and zip.

The tree may be any that the folder source takes (see `readers.tree`), with or without one folder around it
all: imagenette2/train/… is taken as train/…, unless that one folder is a split. Splits, classes, labels,
names and keys are those of the folder that the archive unpacks to. The order is not: samples of a split come
in the order in which their bytes lie in the archive, so that packing reads it from front to back.

A tar in which samples have their labels in members of their own is a WebDataset shard: see `packer.sources.shards`.

Hidden files, names that lead out of the archive, devices and links that lead to no file in it are left out
and reported. Two members of the same name are an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import SourceError
from packer.sources.base import SourceListing, SourceReader
from packer.sources.folder import ArchiveMember, list_members
from packer.sources.shards import ShardSource
from packer.sources.streams import StreamKeeper, compression_of, file_stamp
from packer.sources.tar_archive import TarReader, tar_members
from packer.sources.zip_archive import ZipReader, is_zip, zip_members

__all__ = ["ArchiveSource"]


class ArchiveSource:
    """The members of the archive at `root`."""

    def __init__(self, root: str | os.PathLike[str], layout: str = "auto", **keys: Any) -> None:
        """keys: those of `ShardSource`, where the archive is one of WebDataset."""
        self.root, self.layout, self._keys = Path(root), layout, keys
        self._shard: ShardSource | None = None
        self._keeper = StreamKeeper(self.root)
        self._stamp: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        return f"archive {self.root}"

    def list(self, split: str | None) -> SourceListing:
        self._stamp = file_stamp(self.root)
        left_out: list[tuple[str, str]] = []
        warnings: list[str] = []
        if is_zip(self.root):
            members: list[ArchiveMember] | None = zip_members(self.root, left_out)
        else:
            members = tar_members(self.root, left_out, warnings)
        if members is None:
            self._shard = ShardSource(self.root, **self._keys)
            return self._shard.list(split)
        if self._keys:
            raise SourceError(
                f"{self.root}: {', '.join(sorted(self._keys))} can be given for shards only, and this archive holds "
                f"files: their labels are their folders"
            )
        listing = list_members(members, split, self.root, left_out, self.layout)
        for part in listing.splits.values():
            part.stamps = np.full(len(part), self._stamp[1], np.int64)
        listing.warnings += warnings
        listing.shuffles = is_zip(self.root) or not compression_of(self.root)
        return listing

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield self.root

    def open(self) -> SourceReader:
        if self._shard is not None:
            return self._shard.open()
        if self._stamp is not None and file_stamp(self.root) != self._stamp:
            raise SourceError(f"{self.root}: has changed since it was listed; run the same command again")
        return ZipReader(self.root) if is_zip(self.root) else TarReader(self._keeper)
