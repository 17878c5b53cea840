"""A set of MosaicML's streaming package: index.json, and its shards of MDS, in a folder or one below for each split.

    index.json     {"version": 2, "shards": [{"format": "mds", "column_names": […], "column_encodings": […],
                   "column_sizes": […], "samples": 100, "compression": "zstd:3" or null, "hashes": ["sha1"],
                   "raw_data": {"basename": "shard.00000.mds", "bytes": 123, "hashes": {"sha1": …}},
                   "zip_data": {"basename": "shard.00000.mds.zstd", …} or null}, …]}
    a shard        uint32 samples n, n + 1 uint32 offsets of them, a copy of the description, the samples

`packer.sources.mds_columns` says what a sample is. A shard that is there both plain and compressed is read plain. A
compressed one is unpacked into memory, as large as its raw bytes, once for the listing, which looks for the labels, and
once by each worker that packs some of it. Hashes are compared when a worker opens a shard, as far as Python knows them.
Samples are called by number. Pickled columns are refused: unpickling runs what a file says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from cache.messages import listed
from packer.formats.base import Arena
from packer.sources.base import SourceListing, SplitListing
from packer.sources.file_sets import FilesSource, numbered_keys, numbered_names, split_named, splits_by_value
from packer.sources.folder_kinds import mds_folders
from packer.sources.mds_columns import MdsColumn, array_of, content_of, image_of, ranges_of, value_of
from packer.sources.mds_shards import INDEX_FILE, MdsShard, OpenShard, read_index, unknown_hashes
from packer.sources.places import NumberPlaces
from packer.sources.roles import Roles, choose_roles
from packer.sources.shards import split_of_name
from packer.sources.tables import Table, json_payload, number_labels
from readers.fields import check_field, encode_field
from readers.headers import sniff
from readers.sample import Buffer

__all__ = ["MdsSource"]

_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "x")
_ROWS = "rows"  # what keys begin with where a column names the splits
_PNG_BYTES = 1 << 10  # by which a PNG of pixels may be larger than they are, and a sixteenth


class MdsSource(FilesSource):
    """The set at `root`. label_column: None takes the usual names. split_column: its values are the splits."""

    kind = "MDS set"

    def __init__(
        self, root: str | os.PathLike[str], label_column: str | None = None, split_column: str | None = None
    ) -> None:
        super().__init__(Path(root))
        self.label_column, self.split_column = label_column, split_column
        self.columns: tuple[MdsColumn, ...] = ()
        self.shards: list[MdsShard] = []
        self.roles: Roles | None = None

    def list_files(self, split: str | None) -> SourceListing:
        folders, wanted = mds_folders(self.root), split
        if self.split_column is not None:
            split = None
        elif "" in folders:
            folders = {split or split_of_name(self.root.name): folders[""]}
        elif split is not None:
            split = split_named(split, folders, self.root)
        parts = {name: read_index(self.note(folder / INDEX_FILE)) for name, folder in folders.items()}
        if self.split_column is not None:
            parts = {_ROWS: [shard for shards in parts.values() for shard in shards]}
        self.shards = [shard for shards in parts.values() for shard in shards]
        if not self.shards:
            raise SourceError(f"{self.root}: no shards in its index")
        self.columns = self.shards[0].columns
        for shard in self.shards:
            self._check(shard)
        self.roles = self._choose()
        listing = SourceListing({}, self.roles.fields, shuffles=not any(shard.compression for shard in self.shards))
        values: dict[str | None, list[Any]] = {name: [] for name in (self.roles.label, self.split_column)}
        number = 0
        for name, shards in parts.items():
            found = [self._list_shard(i, values) for i in range(number, number + len(shards))]
            number += len(shards)
            listing.splits[name] = self._split(name, found)
        self._number_labels(listing, values[self.roles.label])
        unknown = {name for shard in self.shards for name in unknown_hashes(shard)}
        if unknown:
            listing.warnings.append(
                f"{self.root}: hashes of {listed(sorted(unknown))} are not compared: Python lacks them"
            )
        if self.split_column is not None:
            where = f"{self.root}: column {self.split_column!r}"
            listing.splits = splits_by_value(listing.splits[_ROWS], values[self.split_column], where)
            split = None if wanted is None else split_named(wanted, listing.splits, self.root)
        if split is not None:
            listing.splits = {split: listing.splits[split]}
        return listing

    def _split(self, name: str, found: Sequence[npt.NDArray[np.int64]]) -> SplitListing:
        """places: int64 [n, 3], (number of the shard, start, stop)."""
        assert self.roles is not None
        places = np.concatenate(found) if found else np.zeros((0, 3), np.int64)
        if not len(places):
            raise SourceError(f"{self.root}: no samples in {name}")
        sizes = places[:, 2] - places[:, 1]
        sizes += sizes // 16 + _PNG_BYTES * (1 + len(self.columns))
        count = len(places)
        return SplitListing(
            "",
            numbered_keys(name, count),
            np.zeros(count, np.int64),
            numbered_names(count, len(self.roles.fields)),
            sizes,
            NumberPlaces(places),
            np.zeros(count, np.int64),
        )

    def _number_labels(self, listing: SourceListing, values: list[Any]) -> None:
        """Labels of all samples, over all splits."""
        assert self.roles is not None
        if self.roles.label is None:
            values = [None] * sum(map(len, listing.splits.values()))
        table = Table(self.root / self.roles.label if self.roles.label else self.root, ())
        numbers, listing.classes, warnings = number_labels(values, range(1, len(values) + 1), table)
        listing.warnings += warnings
        labels, first = np.array(numbers, np.int64), 0
        for part in listing.splits.values():
            part.labels, first = labels[first : first + len(part)], first + len(part)

    def _check(self, shard: MdsShard) -> None:
        """Raise SourceError for a shard that is not as its index says."""
        if shard.columns != self.columns:
            raise SourceError(f"{shard.raw.path}: has other columns than the shards before")
        size = self.note(shard.file.path).stat().st_size
        if size != shard.file.bytes:
            raise SourceError(f"{shard.file.path}: has {size:,} bytes, but its index says {shard.file.bytes:,}")

    def _choose(self) -> Roles:
        contents: dict[str, str] = {}
        for column in self.columns:
            what = content_of(column)
            if column.kind == "pkl":
                raise SourceError(
                    f"{self.root}: the column {column.name!r} is pickled, and unpickling runs what a file says; write "
                    f"the set again with another encoding for it, such as json or ndarray"
                )
            if what is None:
                raise SourceError(f"{self.root}: the column {column.name!r} has the encoding {column.encoding!r:.40}")
            contents[column.name] = what
        first = self._first_sample()
        for column in self.columns if first else ():
            if contents[column.name] == "bytes" and sniff(first[column.name]):
                contents[column.name] = "image"
            if contents[column.name] == "array" and "image" not in contents.values() and column.name in _IMAGE_NAMES:
                contents[column.name] = "image"
            if contents[column.name] == "image" and "mask" in column.name.lower():
                contents[column.name] = _as_mask(column, first[column.name])
        name = self.split_column
        if name is not None and contents.get(name) not in ("integer", "text"):
            possible = [other for other, what in contents.items() if what in ("integer", "text")]
            raise SourceError(
                f"{self.root}: no column {name!r} of names (split_column={name!r}); splits could be in "
                f"{', '.join(possible) or 'none'}"
            )
        if name is not None and name != self.label_column:
            del contents[name]
        return choose_roles(contents, self.label_column, self.root)

    def _first_sample(self) -> dict[str, memoryview]:
        for number, shard in enumerate(self.shards):
            if shard.samples:
                with closing(self.open_shard(number)) as opened:
                    sample = opened.sample(*opened.bounds()[0])
                try:
                    return {
                        column.name: sample[a:b]
                        for column, (a, b) in zip(self.columns, ranges_of(self.columns, sample), strict=True)
                    }
                except BadSampleError as error:
                    raise SourceError(f"{shard.raw.path}: sample 0 {error}") from error
        return {}

    # --- shards ---
    def _list_shard(self, number: int, values: dict[str | None, list[Any]]) -> npt.NDArray[np.int64]:
        """Places of the samples of a shard. values: by column, to which those of the samples are added."""
        wanted = [(i, values[column.name]) for i, column in enumerate(self.columns) if column.name in values]
        with closing(self.open_shard(number)) as opened:
            bounds = opened.bounds()
            for i, (start, stop) in enumerate(bounds.tolist() if wanted else ()):
                try:
                    for column, found in wanted:
                        found.append(opened.value(start, stop, self.columns, column))
                except BadSampleError as error:
                    raise SourceError(f"{self.shards[number].raw.path}: sample {i} {error}") from error
        return np.column_stack((np.full(len(bounds), number, np.int64), bounds))

    def open_shard(self, number: int, *, compare: bool = False) -> OpenShard:
        """A shard. compare: its hashes. Raises SourceError where it is damaged, or has changed."""
        self.check(self.shards[number].file.path)
        return OpenShard(self.shards[number], compare=compare)

    @contextmanager
    def open(self) -> Iterator[MdsReader]:
        with closing(MdsReader(self)) as reader:
            yield reader


class MdsReader:
    """Reads samples, with one shard open at a time."""

    def __init__(self, source: MdsSource) -> None:
        self._source = source
        self._shard: OpenShard | None = None
        self._number = -1

    def read(self, place: tuple[int, int, int], arena: Arena) -> Sequence[Buffer | None]:
        number, start, stop = place
        if self._shard is None or number != self._number:
            self.close()
            self._shard, self._number = self._source.open_shard(number, compare=True), number
        return _payloads(self._source, self._shard.sample(start, stop))

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None


def _payloads(source: MdsSource, sample: memoryview) -> list[Buffer | None]:
    roles, found = source.roles, {}
    assert roles is not None
    for column, (start, stop) in zip(source.columns, ranges_of(source.columns, sample), strict=True):
        found[column.name] = (column, sample[start:stop])
    payloads: list[Buffer | None] = []
    for name, kind in roles.fields.items():
        if name == "json":
            payloads.append(json_payload({key: value_of(*found[key]) for key in roles.metadata}, roles.metadata))
            continue
        column, data = found[roles.columns[name]]
        try:
            if kind == "target":
                value = array_of(column, data) if column.kind == "ndarray" else value_of(column, data)
                payloads.append(encode_field("target", value))
                continue
            if kind in ("image", "mask"):
                payloads.append(image_of(column, data))
            else:
                payloads.append(encode_field("array", array_of(column, data)) if kind == "array" else data)
        except BadSampleError as error:
            raise BadSampleError(f"its column {column.name!r} {error}") from error
    return payloads


def _as_mask(column: MdsColumn, data: memoryview) -> str:
    try:
        check_field("mask", image_of(column, data))
    except BadSampleError:
        return "image"
    return "mask"
