"""A packed set of ours as a source, so that every format converts to every other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

import readers
from cache.errors import BadSampleError, DamagedSampleError, SourceError, StaleIndexError
from packer.comparison import check_columns
from packer.sources.base import Arena, ListingBuilder, SourceListing, SplitListing
from readers.index import decode_name
from readers.layout import DATASET_FILE, read_dataset_info
from readers.sample import Buffer

__all__ = ["PackedSource"]


class PackedSource:
    """A directory with dataset.json. The index is verified at the start, every sample as it is read."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    @property
    def title(self) -> str:
        return f"packed set {self.root}"

    @staticmethod
    def fits(root: Path) -> bool:
        """Whether a directory is a packed set."""
        return (root / DATASET_FILE).exists()

    def list(self, split: str | None) -> SourceListing:
        info = read_dataset_info(self.root)
        names = list(info.splits) if split is None else [info.split(split, self.root)[0]]
        listing = SourceListing({}, info.fields, info.classes)
        for name in names:
            check_columns(self.root, info.splits[name])
            with readers.open(self.root, name) as reader:
                listing.splits[name] = _list_split(reader)
        if not listing.splits:
            raise SourceError(f"{self.root}: has no splits")
        return listing

    def open(self) -> PackedReader:
        return PackedReader(self.root)

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield self.root / DATASET_FILE
        for split in read_dataset_info(self.root).splits.values():
            yield from (self.root / shard.path for shard in split.shards)
            yield from (self.root / split.index).iterdir()


def _list_split(reader: readers.Reader) -> SplitListing:
    keys = list(reader.keys)
    columns = [
        [decode_name(stored, key) for stored, key in zip(reader.table.columns.names(field), keys, strict=True)]
        for field in reader.fields
    ]
    sizes = np.zeros(len(reader), np.int64)
    for field in reader.fields:
        sizes += reader.table.field_column(field, "length").astype(np.int64)
    builder = ListingBuilder(len(columns))
    stamps = reader.table.field_column(reader.fields[0], "crc32c")
    for i, (key, label, size, stamp) in enumerate(
        zip(keys, reader.labels.tolist(), sizes.tolist(), stamps.tolist(), strict=True)
    ):
        names = [column[i] for column in columns]
        builder.add(names, (reader.split, i), size, key=key, label=label, stamp=stamp)
    return builder.build(reader.split_info.root)


class PackedReader:
    """Reads samples of any split, and checks them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._splits: dict[str, readers.Reader] = {}

    def read(self, place: tuple[str, int], arena: Arena) -> Sequence[Buffer | None]:
        split, index = place
        reader = self._splits.get(split)
        if reader is None:
            reader = self._splits[split] = readers.open(self._root, split, verify=True)
        payloads: list[Buffer | None] = []
        try:
            for field in reader.fields:
                if not reader.has(index, field):
                    payloads.append(None)
                    continue
                payloads.append(reader.read(index, field))
        except DamagedSampleError as error:
            raise BadSampleError(str(error)) from error
        except StaleIndexError as error:
            raise SourceError(str(error)) from error
        return payloads

    def __enter__(self) -> PackedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._splits.values():
            reader.close()
