"""Places to view, as readers: packed sets, local or remote, and any source of `packer convert`, unpacked."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import readers
from cache.errors import SourceError, UnknownNameError
from cache.remote import Remote, is_remote
from cache.stores import Buffer, Store
from cache.stores.base import Payloads
from packer.formats.base import Arena
from packer.sources import Source, open_source
from packer.sources.base import SourceListing, SourceReader, SplitListing
from readers.layout import DATASET_FILE, DatasetInfo, read_dataset_info
from readers.opening.remote import RemoteHome
from readers.opening.tree import has_image_suffix
from readers.reader import Reader
from readers.table import MemoryColumns, Names, Table, encode_name

__all__ = [
    "Place",
    "open_place",
]


# --- Unpacked sources as readers: a folder, an archive, a table or any other source, read in place.
# The source lists its samples, and reads them on demand. Other facts of an index (sides, media, checksums) are unknown
# until the samples are read.
_ANY_BYTES = 1 << 62  # a source has no shard sizes to check against


class SourceStore(Store):
    """A store of the samples of a split of a source, with one read at a time. The first read opens the source."""

    def __init__(self, source: Source, listing: SplitListing, fields: int) -> None:
        self._source, self._listing, self._payloads = source, listing, Payloads(fields)
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._reader: SourceReader | None = None
        self._last: tuple[int, list[Buffer | None]] = (-1, [])

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        sample, number = self._payloads.sample(row), self._payloads.field(row)
        with self._lock:
            if self._last[0] != sample:
                if self._reader is None:
                    self._reader = self._stack.enter_context(self._source.open())
                size = max(0, int(self._listing.bytes[sample])) + 1
                arena = Arena(lambda: None, size)
                arena.begin(size)
                self._last = sample, list(self._reader.read(self._listing.places[sample], arena))
            payload = self._last[1][number]
        if payload is None:
            raise UnknownNameError(f"sample {sample} of {self._source.title} has no such field")
        return payload

    def location(self, shard: int) -> str:
        return self._source.title

    def close(self) -> None:
        with self._lock:
            self._stack.close()
            self._reader, self._last = None, (-1, [])


def open_unpacked(path: str | os.PathLike[str]) -> tuple[Source, dict[str, Reader]]:
    """Open a source of `packer convert`, with a reader for each of its splits. Raises SourceError."""
    source = open_source(path)
    listing = source.list(None)
    parts = {name: _images_of(listing, part) for name, part in listing.splits.items()}
    splits = {name: part for name, part in parts.items() if len(part)}
    if not splits:
        raise SourceError(f"{path}: {source.title} has no samples")
    return source, {name: _reader(source, listing, name, part, Path(path)) for name, part in splits.items()}


def _images_of(listing: SourceListing, part: SplitListing) -> SplitListing:
    """The samples of a split, without files that are not named like images if the source lists all files of a tree."""
    if not listing.skip_strays:
        return part
    names = part.names.columns[0]
    called = np.fromiter(map(has_image_suffix, names), np.bool_, len(part))
    return part if called.all() else part.take(np.flatnonzero(called))


def _reader(source: Source, listing: SourceListing, split: str, part: SplitListing, path: Path) -> Reader:
    fields = tuple(listing.fields)
    keys = Names.of(part.keys)
    columns = {"label": np.full(len(part), -1) if listing.late_labels else part.labels}
    if len(fields) == 1 and not listing.estimated:
        columns[f"{fields[0]}.length"] = np.maximum(part.bytes, 0)
    names = {
        field: Names.of(encode_name(name, key) for name, key in zip(column, keys, strict=True))
        for field, column in zip(fields, part.names.columns, strict=False)
    }
    memory = MemoryColumns(
        keys,
        columns,
        fields,
        tuple(listing.classes),
        names=names,
        kinds=listing.fields,
        shard_bytes=[_ANY_BYTES],
        title=f"{os.path.abspath(path)} ({split})",
    )
    return Reader(Table(memory), SourceStore(source, part, len(fields)))


@dataclass(frozen=True)
class Place:
    """An opened set or source. Closing it closes its readers.

    name: name for titles. address: path or address for commands.
    container: the format of the shards, or the kind of source.
    dataset: the content of dataset.json; None if it is not packed.
    """

    name: str
    address: str
    container: str
    splits: dict[str, Reader]
    dataset: DatasetInfo | None = None
    _stack: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_place(place: str | os.PathLike[str], split: str | None = None) -> Place:
    """Open a packed set, by its directory or address, or a source.

    split: the only split to open; None for all.

    Raises DatasetError, UnknownNameError, StaleIndexError, RemoteError, SourceError and MissingExtraError.
    """
    stack = ExitStack()
    try:
        return _opened(place, split, stack)
    except BaseException:
        stack.close()
        raise


def _opened(place: str | os.PathLike[str], split: str | None, stack: ExitStack) -> Place:
    address = str(place) if is_remote(place) else os.path.abspath(os.path.expanduser(place))
    if is_remote(place):
        home = RemoteHome(Remote(address))
        info, shown = home.info, str(home.url)
    elif (Path(address) / DATASET_FILE).is_file():
        info, shown = read_dataset_info(Path(address)), address
    else:
        source, unpacked = open_unpacked(address)
        chosen = unpacked if split is None else {split: _pick(unpacked, split, address)}
        for reader in chosen.values():
            stack.enter_context(reader)
        kind = source.title.removesuffix(address).strip() or "source"
        return Place(_name(address), address, kind, chosen, None, stack)
    names = info.splits if split is None else [info.split(split, address)[0]]
    splits = {name: stack.enter_context(readers.open(address, name)) for name in names}
    return Place(_name(shown), shown, info.format, splits, info, stack)


def _name(address: str) -> str:
    return os.path.basename(address.rstrip("/")) or address


def _pick(unpacked: dict[str, Reader], split: str, address: str) -> Reader:
    if split not in unpacked:
        raise readers.UnknownNameError(f"{address}: no split {split!r}; it has {', '.join(unpacked)}")
    return unpacked[split]
