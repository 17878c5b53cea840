"""Packed sets as sources, which is how every format converts to every other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import readers
from cache.errors import BadSampleError, DamagedSampleError, SourceError, StaleIndexError
from packer.columns import check_columns
from packer.formats.base import Arena, png_of
from packer.sources.base import FieldNames, NumberPlaces, SourceListing, SplitListing
from readers.decode import decode_image
from readers.layout import DATASET_FILE, PIXELS, read_dataset_info
from readers.table import Buffer, Names, decode_name

__all__ = ["PackedSource"]


class PackedSource:
    """The packed set in a directory with dataset.json. Its index is verified first, every sample when it is read.

    raw: return raw pixels unchanged; otherwise they become PNG.
    """

    def __init__(self, root: str | os.PathLike[str], *, raw: bool = False) -> None:
        self.root, self._raw = Path(root), raw

    @property
    def title(self) -> str:
        return f"packed set {self.root}"

    def list(self, split: str | None) -> SourceListing:
        info = read_dataset_info(self.root)
        names = list(info.splits) if split is None else [info.split(split, self.root)[0]]
        fields = {name: "image" if kind == PIXELS else kind for name, kind in info.fields.items()}
        listing = SourceListing({}, fields, info.classes)
        for name in names:
            check_columns(self.root, info.splits[name])
            with readers.open(self.root, name) as reader:
                listing.splits[name] = _list_split(reader, list(info.splits).index(name))
        if not listing.splits:
            raise SourceError(f"{self.root}: has no splits")
        return listing

    @contextmanager
    def open(self) -> Iterator[PackedReader]:
        with ExitStack() as opened:
            yield PackedReader(self.root, opened, self._raw)

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield self.root / DATASET_FILE
        for split in read_dataset_info(self.root).splits.values():
            yield from (self.root / shard.path for shard in split.shards)
            yield from (self.root / split.index).iterdir()


def _list_split(reader: readers.Reader, number: int) -> SplitListing:
    """The listing of a split. Place: (number of the split, index of the sample)."""
    keys, table = Names.of(reader.keys), reader.table
    names = [Names.of(map(decode_name, table.columns.names(field), keys)) for field in reader.fields]
    sizes = np.sum([table.field_column(field, "length").astype(np.int64) for field in reader.fields], axis=0)
    return SplitListing(
        reader.split_info.root,
        keys,
        np.array(reader.labels),
        FieldNames(*names),
        sizes,
        NumberPlaces(np.stack((np.full(len(reader), number), np.arange(len(reader))), axis=1)),
        table.field_column(reader.fields[0], "crc32c").astype(np.int64),
    )


class PackedReader:
    """Reads and verifies samples of any split."""

    def __init__(self, root: Path, opened: ExitStack, raw: bool) -> None:
        self._root, self._opened, self._raw = root, opened, raw
        self._splits = list(read_dataset_info(root).splits)
        self._readers: dict[int, readers.Reader] = {}

    def read(self, place: tuple[int, int], arena: Arena) -> Sequence[Buffer | None]:
        split, index = place
        reader = self._readers.get(split)
        try:
            if reader is None:
                opened = readers.open(self._root, self._splits[split], verify=True)
                reader = self._readers[split] = self._opened.enter_context(opened)
            payloads = [reader.read(index, field) if reader.has(index, field) else None for field in reader.fields]
        except DamagedSampleError as error:
            raise BadSampleError(str(error)) from error
        except StaleIndexError as error:
            raise SourceError(str(error)) from error
        kinds = reader.kinds
        return [
            png_of(decode_image(data)) if data is not None and kinds[field] == PIXELS and not self._raw else data
            for field, data in zip(reader.fields, payloads, strict=True)
        ]
