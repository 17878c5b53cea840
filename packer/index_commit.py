"""The last step of `packer.index`: indexes under names that nobody uses, links, then dataset.json, which names them.

Until dataset.json is replaced, nothing of the set that is there has changed, so a kill leaves it whole; afterwards its
old indexes are removed. An index whose bytes are already there is left where it is, so that a second run
changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cache.errors import FormatError, OutputError
from packer.conversion.commit import write_dataset_info
from packer.conversion.journal import Journal
from packer.found_shards import FoundShard, FoundShards
from packer.index_writer import column_files, is_index, remove_index
from readers.index import column_names
from readers.layout import DatasetInfo, ShardInfo

__all__ = ["IndexCommit"]

_OF_CONVERSION = ("by", "plan", "payload_bytes", "left_out")


class IndexCommit:
    """Put what was made in the working folder in its place. Until dataset.json is replaced, the old set is whole."""

    def __init__(self, journal: Journal, found: FoundShards) -> None:
        self._place, self._work, self._found = journal.place, journal.work, found
        old = found.there.info if found.there else None
        self._old = old
        self._used = [split.index for split in old.splits.values()] if old else []

    def run(self, info: DatasetInfo) -> None:
        retargeted = [shard for shard in self._found.shards if self._must_link(shard, info)]
        splits = {name: replace(split, index=self._put(name, info)) for name, split in info.splits.items()}
        for number, shard in enumerate(retargeted):
            self._work.symlink(f"{number}.link", shard.path.resolve())
            self._work.rename(f"{number}.link", shard.name, self._place)
        self._place.sync()
        new = replace(info, splits=splits, made=self._made(info))
        if self._old is None or replace(new, made=self._old.made) != self._old:
            write_dataset_info(self._place, new, scratch=self._work)
        self._tidy({split.index for split in splits.values()}, list(splits))

    def _tidy(self, used: set[str], splits: Sequence[str]) -> None:
        """Remove indexes that dataset.json does not name: the old ones, and what a run that was cut off has left."""
        names = [name for split in splits for name in _names(split, 1)]
        left = [name for name in names if self._place.kind(name) == "folder" and is_index(self._place, name)]
        for name in dict.fromkeys([*self._used, *left]):
            if name not in used:
                with contextlib.suppress(OSError):  # nobody reads it any more
                    remove_index(self._place, name)

    def _put(self, split: str, info: DatasetInfo) -> str:
        """Move the index of a split into the set under a name that the set there does not use, or leave its own where
        that has the same bytes; returns the name."""
        names = _names(split, len(self._used) + 1)
        current = self._old.splits[split].index if self._old and split in self._old.splits else names[0]
        if self._has(current, split, info):
            return current
        name = next(name for name in names if name not in self._used)
        if not is_index(self._place, name):
            raise OutputError(f"{self._place.path / name}: holds other things than an index and is in the way; move it")
        remove_index(self._place, name)
        self._work.rename(f"{split}.index", name, self._place)
        return name

    def _has(self, name: str, split: str, info: DatasetInfo) -> bool:
        try:
            return column_files(self._place.path / name, column_names(info.fields)) == info.splits[split].columns
        except FormatError:
            return False

    def _must_link(self, shard: FoundShard, info: DatasetInfo) -> bool:
        """Whether a link to a shard must be made. Raises OutputError where something else has its name."""
        target = self._place.path / shard.name
        if os.path.realpath(shard.path) == os.path.realpath(target):
            return False
        kind = self._place.kind(shard.name)
        if not kind:
            return True
        old = _shard_named(self._old, shard.name)
        if kind == "link" and old is not None and old == _shard_named(info, shard.name):
            return True  # the shard was moved, and is what it was
        raise OutputError(
            f"{target}: is in the way of a link to {shard.path}; choose another output with -o, or move it elsewhere"
        )

    def _made(self, info: DatasetInfo) -> Mapping[str, Any]:
        """How the set was made; not by a conversion any more where its shards are others."""
        same = self._found.known and _shards_of(self._found.known) == _shards_of(info)
        return info.made if same else {name: value for name, value in info.made.items() if name not in _OF_CONVERSION}


def _names(split: str, others: int) -> list[str]:
    """What the index of a split may be called."""
    return [f"{split}.index", *(f"{split}.index-{number}" for number in range(2, others + 2))]


def _shards_of(info: DatasetInfo) -> list[ShardInfo]:
    return [shard for split in info.splits.values() for shard in split.shards]


def _shard_named(info: DatasetInfo | None, name: str) -> ShardInfo | None:
    return next((shard for shard in _shards_of(info) if shard.path == name), None) if info else None
