"""Packed sets as readers: dataset.json and an index for the table, shards below a directory for the store.

A set may be replaced while a reader opens it or has it open. What is opened later must be of the same set
(`readers.recognition`). Where it is not, or does not fit, the message says that the set was replaced: rebuilding the
index would do harm then.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from cache.errors import DamagedSampleError, DatasetError, StaleIndexError, UnknownNameError
from cache.messages import quoted
from cache.stores import Buffer, Extents, Files, Shards, Store, StoreOver
from readers.index import REBUILD, Columns, Index
from readers.layout import DATASET_FILE, DatasetInfo, SplitInfo, read_dataset_info
from readers.reader import Reader
from readers.recognition import OpenedSet, Recognised
from readers.sample import NO_LABEL
from readers.strings import Strings
from readers.table import Table

__all__ = [
    "Backend",
    "Checked",
    "PackedColumns",
    "handed_out",
    "open_copied",
    "open_packed",
    "packed_columns",
    "shards_of",
]

_log = logging.getLogger(__name__)

Backend = Literal["pread", "mmap"]


class PackedColumns(Columns):
    """The index of one split, and what dataset.json says of it.

    place: the address of the set, where that is not the directory of the index.
    opened: tells whether the set is still the one that was opened; None where that is not known.
    """

    def __init__(
        self, dataset: DatasetInfo, split: str, index: Index, place: str = "", opened: OpenedSet | None = None
    ) -> None:
        self.dataset, self.split, self.index, self.opened = dataset, split, index, opened
        self.split_info: SplitInfo = dataset.splits[split]
        self.fields, self.kinds, self.classes = tuple(dataset.fields), dataset.fields, dataset.classes
        self.separate = dataset.separate
        self.place = place or str(self.path)
        self.title = f"{place or os.path.abspath(self.path)} ({split})"
        self._fingerprint = ""
        self._are_labels_checked = False
        self._shard_bytes = [shard.bytes for shard in self.split_info.shards]

    @property
    def path(self) -> Path:
        """The directory with dataset.json and the index."""
        return self.index.directory.parents[len(Path(self.split_info.index).parts) - 1]

    def __len__(self) -> int:
        return self.split_info.samples

    def column(self, name: str) -> npt.NDArray[Any]:
        return self.index.column(name) if name != "label" else self._checked_labels()

    def _checked_labels(self) -> npt.NDArray[Any]:
        """The labels. Raises DatasetError for one that is not the number of a class."""
        labels, known = self.index.column("label"), len(self.classes)
        if not self._are_labels_checked and len(labels):
            low, high = int(labels.min()), int(labels.max())
            if low < NO_LABEL or (known and high >= known):
                row = int(labels.argmin() if low < NO_LABEL else labels.argmax())
                expected = f"0 to {known - 1}" if known else "0 or more"
                raise DatasetError(
                    f"{self.title}: sample {row} ({self.keys()[row]!r:.80}) has the label {labels[row]}, expected "
                    f"{expected}, or {NO_LABEL} for none; {REBUILD}"
                )
        self._are_labels_checked = True
        return labels

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        return self.index.field_column(field, name)

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        return self.index.shard_column(field) if field in self.separate else self.index.column("shard")

    def keys(self) -> Strings:
        return self.index.keys()

    def names(self, field: str) -> Strings:
        return self.index.names(field)

    def fingerprint(self) -> str:
        """Of the whole set and the split: changes with any shard, the index and the meaning of the labels.

        For adopted shards whose index has no checksums, the index itself is hashed, once.
        """
        if not self._fingerprint:
            known = self.dataset.fingerprint()
            if not self.dataset.covers_index(self.split):
                known = f"{known}-{self.index.digest(self.fields)}"
            self._fingerprint = f"{known}/{self.split}"
        return self._fingerprint

    @property
    def shard_bytes(self) -> Sequence[int]:
        return self._shard_bytes

    def shard_place(self, shard: int) -> str:
        return f"{self.place}/{self.split_info.shards[shard].path}"

    def explained(self, error: Exception) -> Exception:
        """A StaleIndexError that says so where the set in `path` is no longer the one that was opened."""
        stale = _errno(error) == errno.ESTALE
        if isinstance(error, UnknownNameError) or (stale and isinstance(error, StaleIndexError)):
            return error
        if stale:
            return StaleIndexError(
                f"{self.path}: files of the set were replaced on the file server while it was opened (ESTALE); open it "
                f"again when that is done"
            )
        return self.opened.explained(error) if self.opened is not None else error


class Checked(StoreOver):
    """A store whose bytes must have the CRC32C of the index. Raises DamagedSampleError."""

    def __init__(self, source: Store, columns: Columns) -> None:
        self.source, self.columns = source, columns

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        data = self.source.read_one(row, shard, offset, length)
        self._check(data, row, shard, offset)
        return data

    def read(self, extents: Extents) -> list[Buffer]:
        found = self.source.read(extents)
        for data, row, shard, offset in zip(found, *(column.tolist() for column in extents[:3]), strict=True):
            self._check(data, row, shard, offset)
        return found

    def _check(self, data: Buffer, row: int, shard: int, offset: int) -> None:
        from crc32c import crc32c

        sample, number = divmod(row, len(self.columns.fields))
        field = self.columns.fields[number]
        expected, found = int(self.columns.field_column(field, "crc32c")[sample]), crc32c(data)
        if found != expected:
            damaged = DamagedSampleError(
                f"sample {sample} (key {self.columns.keys()[sample]!r}, field {field!r}) at byte {offset} of "
                f"{self.source.location(shard)}: CRC32C is {found:08x}, the index says {expected:08x}; "
                f"run  packer verify {quoted(self.columns.place)}"
            )
            raise self.columns.explained(damaged)


def open_packed(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    backend: Backend = "pread",
    verify: bool = False,
    open_shards: int = 512,
    recognise: bool = True,
) -> Reader:
    """One split of a packed set.

    path: the directory with `dataset.json`.
    split: None takes the only split, or "train".
    backend: "pread" copies bytes out; "mmap" gives views of the page cache, for files that nothing rewrites.
    verify: check the CRC32C of everything that is read.
    open_shards: how many shards may be open at a time.
    recognise: compare a sample of each shard when it is opened; False where all of them are compared anyway.

    Raises DatasetError (no or bad set), UnknownNameError (no such split), StaleIndexError (a shard is missing or of
    another size than was indexed) and DamagedSampleError (a checksum differs).
    """
    root = Path(path)
    columns = packed_columns(root, read_dataset_info(root), split)
    known = Recognised(columns, columns.opened, recognise and not verify)
    store: Store = _files(root, columns, known, backend, open_shards)
    return _opened(columns, Checked(store, columns) if verify else store)


def open_copied(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    fallback: str | os.PathLike[str],
    backend: Backend = "pread",
    verify: bool = False,
    patience_seconds: float = 0.0,
    open_shards: int = 512,
) -> Reader:
    """One split of a set that is partly staged: each shard from the copy in `path`, or else from `fallback`.

    Index and dataset.json come from the copy, or from the source for a split that was not staged.

    patience_seconds: see `cache.stores.copied.Copied`.

    Raises what `open_packed` does, and StaleIndexError where the two are not the same set.
    """
    from cache.stores.copied import Copied

    local, source = _info(Path(path)), _info(Path(fallback))
    if local is not None and source is not None and local.fingerprint() != source.fingerprint():
        raise StaleIndexError(f"{path}: a copy of another state of {fallback}; stage it again")
    home, info = Path(fallback), source
    if local is not None:
        _, chosen = local.split(split, Path(path))
        if source is None or (Path(path) / chosen.index).is_dir():
            home, info = Path(path), local
    columns = packed_columns(home, info if info is not None else read_dataset_info(home), split)
    copy, origin = (
        _files(Path(root), columns, Recognised(columns, opened, samples), backend, open_shards)
        for root, opened, samples in (
            (path, _opened_set(Path(path), local, columns), True),  # what is wrong there is read from the source
            (fallback, _opened_set(Path(fallback), source, columns), not verify),
        )
    )
    store: Store = Copied(copy, origin, patience_seconds)
    return _opened(columns, Checked(store, columns) if verify else store)


def shards_of(split: SplitInfo) -> Shards:
    """The shards of a split, for a store."""
    return Shards(tuple(shard.path for shard in split.shards), tuple(shard.bytes for shard in split.shards))


def packed_columns(path: Path, dataset: DatasetInfo, split: str | None) -> PackedColumns:
    """The columns of a split of the set in the directory `path`. Raises UnknownNameError."""
    name, info = dataset.split(split, path)
    opened = OpenedSet(path, dataset, name)
    index = Index(path / info.index, info.samples, partial(opened.check, info.index))
    return PackedColumns(dataset, name, index, opened=opened)


def _files(root: Path, columns: PackedColumns, known: Recognised, backend: Backend, open_shards: int) -> Files:
    if backend not in ("pread", "mmap"):
        raise ValueError(f"backend must be 'pread' or 'mmap', not {backend!r}")
    shards = shards_of(columns.split_info)
    return Files(root, shards, mapped=backend == "mmap", open_shards=open_shards, recognise=known)


def _opened_set(root: Path, info: DatasetInfo | None, columns: PackedColumns) -> OpenedSet | None:
    return OpenedSet(root, info, columns.split) if info is not None else None


def _opened(columns: PackedColumns, store: Store) -> Reader:
    try:
        columns.field_column(columns.fields[0], "offset")
        columns.field_column(columns.fields[0], "length")
        _log.info("opened %s: %d samples", columns.title, len(columns))
        return Reader(Table(columns), handed_out(store, columns))
    except DatasetError as error:
        raise columns.explained(error) from error


def handed_out(store: Store, columns: Columns) -> Store:
    """What a reader of the samples in `columns` reads from: `store`, or raw pixels with their headers."""
    if columns.kinds.get("image") != "pixels":
        return store
    from readers.pixels import Pixels

    return Pixels(store, columns)


def _info(directory: Path) -> DatasetInfo | None:
    try:
        return read_dataset_info(directory)
    except DatasetError:
        if (directory / DATASET_FILE).exists():
            raise
        return None


def _errno(error: BaseException | None) -> int | None:
    """The error number of the system call that caused an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__
    return None
