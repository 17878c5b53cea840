"""Which files of a packed set a node needs: the set as a plain list of files, and a portion of it.

Whole shards are staged, the whole index of each chosen split, and `dataset.json` last. `part=(i, n)` is the share of
node i of n under `readers.order.NodeLocal`: every shard with a sample of `local_part(i)`. Shards at the boundaries
belong to two nodes, and both stage them; without `overlap` the first of these does. `fraction` takes shards from the
front of each split's list (or of this node's share) until that much of the bytes is reached, at least one shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError, StagingError
from cache.files import read_regular
from cache.staging import FolderSource, Manifest, Source, StagedFile
from readers.index import Index
from readers.layout import DATASET_FILE, MAX_JSON_BYTES, DatasetInfo, SplitInfo, read_dataset_info
from readers.order.base import Int64s
from readers.order.local import NodeLocal, shard_starts

__all__ = ["Portion", "SetFiles", "describe_files", "set_files", "shard_owners", "shards_of_fraction"]


@dataclass(frozen=True)
class Portion:
    """A portion of a set: splits (None: all), part (i, n) of the samples of each, fraction of the bytes of that.

    overlap: whether a shard that belongs to two parts is in both.
    """

    splits: tuple[str, ...] | None = None
    part: tuple[int, int] | None = None
    fraction: float = 1.0
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.part is not None and not 0 <= self.part[0] < self.part[1]:
            raise ValueError(f"part {self.part[0]}/{self.part[1]}: expected i/n with i from 0 to n - 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {self.fraction}")


@dataclass(frozen=True)
class SetFiles:
    """A packed set as files.

    home: the local directory with dataset.json and the indexes.
    manifest: all files.
    head: dataset.json.
    indexes: the files of the index, by split.
    """

    home: Path
    info: DatasetInfo
    manifest: Manifest
    head: StagedFile
    indexes: dict[str, list[StagedFile]]

    def shards(self, portion: Portion) -> list[StagedFile]:
        """The shards of a portion, split by split. Raises UnknownNameError."""
        chosen = []
        for name in self.splits(portion):
            split = self.info.splits[name]
            listed = [self.manifest.by_path[split.shards[number].path] for number in self._share(split, portion)]
            chosen += listed[: shards_of_fraction([file.bytes for file in listed], portion.fraction)]
        return list(dict.fromkeys(chosen))

    def in_turn(self, shards: Sequence[StagedFile], starts: Int64s, turns: Int64s) -> list[StagedFile]:
        """`shards`, those of one split first and in the order `turns`: the split whose shards start at `starts`.

        Raises StagingError where no split has such shards.
        """
        found = [split for split in self.info.splits.values() if np.array_equal(shard_starts(split), starts)]
        if not found:
            raise StagingError(
                f"{self.manifest.source}: no split has the {len(starts) - 1} shards with {starts[-1]} samples that the "
                f"order is made for; make it with  readers.order.staged_first(reader.split_info)"
            )
        first = [self.manifest.by_path[split.shards[number].path] for split in found for number in turns.tolist()]
        wanted = set(shards)
        return list(dict.fromkeys([file for file in first if file in wanted] + list(shards)))

    def index(self, portion: Portion) -> list[StagedFile]:
        """The index files of a portion's splits."""
        return [file for name in self.splits(portion) for file in self.indexes[name]]

    def splits(self, portion: Portion) -> list[str]:
        if portion.splits is None:
            return list(self.info.splits)
        return [self.info.split(name, str(self.manifest.source))[0] for name in portion.splits]

    def _share(self, split: SplitInfo, portion: Portion) -> Sequence[int]:
        """Numbers of the shards that hold samples of this node's part."""
        if portion.part is None:
            return range(len(split.shards))
        node, nodes = portion.part
        order, shards = NodeLocal(split.samples, nodes=nodes), len(split.shards)
        index = Index(self.home / split.index, split.samples)
        columns = [index.column("shard"), *map(index.shard_column, self.info.separate)]
        try:
            if not portion.overlap:
                return list(np.flatnonzero(shard_owners(columns, order, shards) == node).tolist())
            return list(np.flatnonzero(_shards_of(columns, order.local_part(node), shards)).tolist())
        except IndexError:
            raise DatasetError(f"{self.home / split.index}: names a shard that the split does not have") from None


def shard_owners(columns: Sequence[npt.NDArray[Any]], order: NodeLocal, shards: int) -> Int64s:
    """The first node whose part has samples of each shard: int64 [shards], -1 for shards without samples.

    columns: shards by sample, of the images and of each field that has shards of its own. Raises IndexError for a
    number that is not below `shards`.
    """
    owners = np.full(shards, -1, np.int64)
    for node in range(order.nodes):
        owners[_shards_of(columns, order.local_part(node), shards) & (owners < 0)] = node
    return owners


def _shards_of(columns: Sequence[npt.NDArray[Any]], samples: range, shards: int) -> npt.NDArray[np.bool_]:
    """Which shards have some of the samples: bool [shards]."""
    found = np.zeros(shards, np.bool_)
    for column in columns:
        found[column[samples.start : samples.stop]] = True
    return found


def shards_of_fraction(sizes: Sequence[int], fraction: float) -> int:
    """How many shards, from the front, `fraction` of the bytes takes: at least one, where there is one."""
    sums = np.cumsum(np.asarray(sizes, np.int64))
    before = np.append(0, sums)[:-1]
    return int(((before < fraction * (sums[-1] if len(sums) else 0)) | (before == 0)).sum())


def set_files(dataset: str | os.PathLike[str]) -> SetFiles:
    """The files of a packed set. Raises DatasetError, StagingError."""
    home = Path(os.path.realpath(dataset))
    text = _bytes_of(home / DATASET_FILE)
    info = read_dataset_info(home)
    if text != _bytes_of(home / DATASET_FILE):
        raise StagingError(f"{home / DATASET_FILE}: is being rewritten; stage again when that is done")
    columns = {name: _columns(home, split.index) for name, split in info.splits.items()}
    return describe_files(FolderSource(home), home.name, home, info, text, columns)


def describe_files(
    source: Source,
    name: str,
    home: Path,
    info: DatasetInfo,
    text: bytes,
    columns: Mapping[str, Sequence[tuple[Any, ...]]],
    state: bytes = b"",
) -> SetFiles:
    """The files of a set at `source`, with all indexes in `home`.

    text: that of dataset.json, read as `info`.
    columns: of each split, (path, bytes, and anything else that differs between two states) of the files of its index.
    state: anything else that differs between two states of the set.
    """
    from crc32c import crc32c

    digest = hashlib.blake2b(text + state, digest_size=16)
    indexes = {}
    for split, files in columns.items():
        digest.update(json.dumps([split, files]).encode())
        checksums = {file: column.crc32c for file, column in info.splits[split].columns.items()}
        indexes[split] = [StagedFile(path, size, checksums.get(path.rpartition("/")[2])) for path, size, *_ in files]
    head = StagedFile(DATASET_FILE, len(text), crc32c(text))
    shards = [StagedFile(s.path, s.bytes, s.crc32c) for split in info.splits.values() for s in split.shards]
    unique = {file.path: file for file in (*shards, *chain.from_iterable(indexes.values()), head)}
    manifest = Manifest(source, name, digest.hexdigest(), tuple(unique.values()), last=DATASET_FILE)
    return SetFiles(home, info, manifest, head, indexes)


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_JSON_BYTES)
    except OSError:
        return b""  # read_dataset_info says what is wrong


def _columns(home: Path, folder: str) -> list[tuple[str, int, int]]:
    """(path, bytes, time of the last change in ns) of an index's columns, by name."""
    try:
        found = []
        for entry in os.scandir(home / folder):
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((f"{folder}/{entry.name}", status.st_size, status.st_mtime_ns))
        return sorted(found)
    except OSError as error:
        raise DatasetError(
            f"{home / folder}: the index cannot be listed: {error.strerror}; rebuild it with  packer index"
        ) from error
