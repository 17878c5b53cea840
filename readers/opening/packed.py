"""Recognising a set: whether files that a reader opens later are still those of the set that it was opened from.

Shards, and most columns of the index, are opened when they are first needed, also by a reader that was unpickled in
another process. By then the directory may hold another set, with the same names and sizes. Two things tell:

    the set       dataset.json is the last file of a set that is written and the first that is removed. So a file that
                  was opened while dataset.json still was the one that had been read belongs to the set. Where it is
                  another file, it is read again: a copy of the same set is as good, and commands that change a set
                  leave the files that readers need, listed or as retired.
    the samples   The last sample of each shard is compared with its CRC32C in the index, since a shard may be put in
                  the place of another by hand. One that was restored, copied or linked is the same shard.

This is done when a process opens a shard for the first time, or in another state than before. Nothing is stored on the
disk: inodes and times are those that this reader has seen.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cache.errors import DamagedSampleError, DatasetError, MissingError, StaleIndexError, UnknownNameError
from cache.files import FileState
from cache.messages import quoted
from cache.stores import Buffer, Extents, Files, Shards, Store, StoreOver
from cache.stores.base import Joined, Part, Payloads, location
from cache.stores.files import OpenFile, unreadable
from readers.layout import DATASET_FILE, PIXELS, DatasetInfo, SplitInfo, read_dataset_info
from readers.reader import Reader
from readers.table import (
    ABSENT,
    FIELD_COLUMNS,
    NO_LABEL,
    REBUILD,
    Columns,
    ImageInfo,
    Index,
    MemoryColumns,
    Strings,
    Table,
    encode_name,
)

_SAMPLES = 5  # samples of a shard to compare if the last one is wrong


class OpenedSet:
    """One split of the set in the directory `root`, in the state in which dataset.json was read (`info`).

    place: the directory or address of the set, for messages.
    """

    def __init__(self, root: Path, info: DatasetInfo, split: str, place: str = "") -> None:
        self.root, self.info, self.split, self.place = root, info, split, place or str(root)
        self._seen: tuple[Any, frozenset[str]] = (info.read_from, frozenset())

    def check(self, path: str) -> None:
        """Raise StaleIndexError if a file that was just opened does not belong to this set.

        path: of the shard or of the index's folder, as in dataset.json.
        """
        try:
            gone, lost = self._look()
        except OSError as error:
            raise unreadable(str(self.root / DATASET_FILE), error) from error
        if gone or path in lost:
            raise self._replaced(gone, f"{path} belongs to another set") from None

    def explained(self, error: Exception) -> Exception:
        """The StaleIndexError of a set that was replaced, or `error`, which occurred with one of its files."""
        if str(error).startswith(self._prefix):
            return error
        try:
            gone, lost = self._look()
        except OSError:
            return error
        return self._replaced(gone, str(error)) if gone or lost else error

    def _state(self) -> Any:
        """A value that changes with dataset.json. Raises OSError."""
        return FileState.at(self.root / DATASET_FILE)

    def _read(self) -> tuple[Any, DatasetInfo]:
        """The current `_state` and content of dataset.json. Raises DatasetError, OSError."""
        now = read_dataset_info(self.root)
        return now.read_from, now

    def _look(self) -> tuple[str, frozenset[str]]:
        """Why the set is gone, "" if it exists; and the files of the split that no longer belong to it."""
        seen, lost = self._seen
        try:
            if self._state() != seen:
                state, now = self._read()
                lost = self._lost_in(now)
                self._seen = state, lost
            return "", lost
        except (FileNotFoundError, MissingError):
            return f"is being replaced or was removed (its {DATASET_FILE} is missing)", frozenset()
        except DatasetError as error:
            return f"is being replaced or was damaged ({error})", frozenset()

    def _lost_in(self, now: DatasetInfo) -> frozenset[str]:
        """The paths of this split at which the set `now` has other content, or none."""
        of_split = replace(self.info, splits={self.split: self.info.splits[self.split]})
        kept = {retired.path: retired.content for retired in now.retired} | now.contents()
        return frozenset(path for path, content in of_split.contents().items() if kept.get(path) not in (content, ""))

    @property
    def _prefix(self) -> str:
        return f"{self.place}: the set "

    def _replaced(self, gone: str, detail: str) -> StaleIndexError:
        state = gone or "has been replaced by another"
        return StaleIndexError(f"{self._prefix}{state} since it was opened; open it again when that is done ({detail})")


class Recognised:
    """For `Files`: raises StaleIndexError for a shard that is not the one that the index describes.

    opened: the set of the shard; None if only its samples can identify it.
    samples: whether to compare some samples; False if every sample is compared when read, so that the intact part of a
        damaged shard can be read.
    """

    def __init__(self, columns: Columns, opened: OpenedSet | None, samples: bool = True) -> None:
        self.columns, self.opened, self.samples = columns, opened, samples

    def __call__(self, shard: int, path: str, file: OpenFile) -> None:
        if self.opened is not None:
            self.opened.check(path)
        if not self.samples:
            return
        field, first, stop = self._rows(shard)
        if stop == first or self._is_right(file, field, stop - 1):
            return
        others = {first + (stop - 1 - first) * i // (_SAMPLES - 1) for i in range(_SAMPLES - 1)} - {stop - 1}
        if others and all(self._is_right(file, field, row) for row in others):
            return  # a single damaged sample, which is reported when it is read
        raise StaleIndexError(
            f"{file.path}: not the shard that was indexed, though its size is the same: samples have another CRC32C "
            f"than in the index; restore the right shard, or, if it is damaged, read its intact samples with "
            f"verify=True;  packer verify {quoted(self.columns.place)}  lists the others"
        )

    def _rows(self, shard: int) -> tuple[str, int, int]:
        """A field in the shard, and its rows [first, stop) there; no rows if unknown."""
        columns = self.columns
        fields = [next((field for field in columns.fields if field not in columns.separate), ""), *columns.separate]
        for field in filter(None, fields):
            of_rows = columns.shard_column(field)  # samples are in the order of their shards
            first, stop = of_rows.searchsorted(np.array([shard, shard + 1], of_rows.dtype)).tolist()
            if first < stop and of_rows[first] == of_rows[stop - 1] == shard:
                return field, first, stop
        return "", 0, 0

    def _is_right(self, file: OpenFile, field: str, row: int) -> bool:
        """Whether a payload has the checksum of the index; True if there is nothing to compare."""
        from crc32c import crc32c

        offset, length, expected = (
            int(self.columns.field_column(field, name)[row]) for name in ("offset", "length", "crc32c")
        )
        if offset == ABSENT or not length or offset + length > file.bytes:
            return True
        try:
            return crc32c(file.reread(offset, length) if file.view is None else file.view[offset:][:length]) == expected
        except StaleIndexError as error:
            if getattr(error.__cause__, "errno", None) == errno.ESTALE:
                raise
            return True  # reported when the sample is read


# Packed sets as readers: dataset.json and an index for the table, shards in a directory for the store.
#
# A set may be replaced while a reader opens it or has it open. Files opened later must belong to the same set
# (`Recognised`). If they do not, the message says that the set was replaced: rebuilding the index would then do harm.


_log = logging.getLogger(__name__)

Backend = Literal["pread", "mmap"]


class PackedColumns(Index):
    """The index of one split with its entries in dataset.json.

    directory: the directory of the index. place: the address of the set, if it is not `path`.
    opened: checks whether the set is still the one that was opened; None if unknown.
    """

    def __init__(
        self, dataset: DatasetInfo, split: str, directory: Path, place: str = "", opened: OpenedSet | None = None
    ) -> None:
        self.dataset, self.split, self.opened = dataset, split, opened
        self.split_info: SplitInfo = dataset.splits[split]
        super().__init__(directory, self.split_info.samples, dataset.fields, dataset.separate)
        self.kinds, self.classes = dataset.fields, dataset.classes
        self.place = place or str(self.path)
        self.title = f"{place or os.path.abspath(self.path)} ({split})"
        self._fingerprint = ""
        self._are_labels_checked = False
        self._shard_bytes = [shard.bytes for shard in self.split_info.shards]

    @property
    def path(self) -> Path:
        """The directory with dataset.json and the index."""
        return self.directory.parents[len(Path(self.split_info.index).parts) - 1]

    def column(self, name: str) -> npt.NDArray[Any]:
        """As `Columns.column`. Raises DatasetError for a label that is not the number of a class."""
        column = super().column(name)
        if name == "label" and not self._are_labels_checked and len(column):
            known, low, high = len(self.classes), int(column.min()), int(column.max())
            if low < NO_LABEL or (known and high >= known):
                row = int(column.argmin() if low < NO_LABEL else column.argmax())
                expected = f"0 to {known - 1}" if known else "0 or more"
                raise DatasetError(
                    f"{self.title}: sample {row} ({self.keys()[row]!r:.80}) has the label {column[row]}, expected "
                    f"{expected}, or {NO_LABEL} for none; {REBUILD}"
                )
            self._are_labels_checked = True
        return column

    def check_set(self) -> None:
        if self.opened is not None:
            self.opened.check(self.split_info.index)

    def fingerprint(self) -> str:
        """The fingerprint of the whole set and the split: changes with any shard, the index and the classes.

        For adopted shards whose index has no checksums, the index itself is hashed, once.
        """
        if not self._fingerprint:
            known = self.dataset.fingerprint()
            if not self.dataset.covers_index(self.split):
                known = f"{known}-{super().fingerprint()}"
            self._fingerprint = f"{known}/{self.split}"
        return self._fingerprint

    @property
    def shard_bytes(self) -> Sequence[int]:
        return self._shard_bytes

    def shard_place(self, shard: int) -> str:
        return f"{self.place}/{self.split_info.shards[shard].path}"

    def explained(self, error: Exception) -> Exception:
        """A StaleIndexError if the set in `path` is no longer the one that was opened, else `error`."""
        stale = _errno(error) == errno.ESTALE
        if isinstance(error, UnknownNameError) or (stale and isinstance(error, StaleIndexError)):
            return error
        if stale:
            return StaleIndexError(
                f"{self.path}: files of the set were replaced on the file server while it was opened (ESTALE); open it "
                f"again after the replacement"
            )
        return self.opened.explained(error) if self.opened is not None else error


class Checked(StoreOver):
    """A store that compares bytes with the CRC32C of the index. Raises DamagedSampleError."""

    def __init__(self, source: Store, columns: Columns) -> None:
        self.source, self.columns = source, columns

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        data = self.source.read_one(row, shard, offset, length)
        self._check(data, row, shard, offset)
        return data

    def read(self, extents: Extents) -> list[Buffer]:
        from crc32c import crc32c

        blocks = self.source.read(extents)
        payloads, expected = Payloads(len(self.columns.fields)), np.empty(len(blocks), np.uint32)
        samples, numbers = payloads.sample(extents.row), payloads.field(extents.row)
        for number in {*numbers.tolist()}:
            which = numbers == number
            expected[which] = self.columns.field_column(self.columns.fields[number], "crc32c")[samples[which]]
        for i in [
            i for i, (data, crc) in enumerate(zip(blocks, expected.tolist(), strict=True)) if crc32c(data) != crc
        ]:
            self._check(blocks[i], *(int(column[i]) for column in extents[:3]))
        return blocks

    def _check(self, data: Buffer, row: int, shard: int, offset: int) -> None:
        from crc32c import crc32c

        payloads = Payloads(len(self.columns.fields))
        sample, number = payloads.sample(row), payloads.field(row)
        field = self.columns.fields[number]
        expected, actual = int(self.columns.field_column(field, "crc32c")[sample]), crc32c(data)
        if actual != expected:
            damaged = DamagedSampleError(
                f"sample {sample} (key {self.columns.keys()[sample]!r}, field {field!r}) at byte {offset} of "
                f"{location(self.source, row, shard)}: CRC32C is {actual:08x}, the index says {expected:08x}; "
                f"run  packer verify {quoted(self.columns.place)}"
            )
            raise self.columns.explained(damaged)


class Pixels(StoreOver):
    """A store of raw-pixel images, [height, width, 3], of the size in the index.

    It returns them with the header that caches of decoded images use (`readers.headers.base`), by which decoders
    recognise them. Raises DamagedSampleError.
    """

    def __init__(self, source: Store, columns: Columns) -> None:
        self.source, self.columns = source, columns

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self._behind_header(row, self.source.read_one(row, shard, offset, length))

    def read(self, extents: Extents) -> list[Buffer]:
        blocks = self.source.read(extents)
        return [self._behind_header(row, data) for row, data in zip(extents.row.tolist(), blocks, strict=True)]

    def _behind_header(self, row: int, data: Buffer) -> Buffer:
        from readers.headers.base import pixels_header

        payloads = Payloads(len(self.columns.fields))
        sample, number = payloads.sample(row), payloads.field(row)
        if self.columns.fields[number] != "image":
            return data
        height, width = (int(self.columns.column(name)[sample]) for name in ("height", "width"))
        if len(data) != 3 * height * width:
            raise DamagedSampleError(
                f"sample {sample}: has {len(data):,} bytes of pixels, expected 3 x {height} x {width} by the index; "
                f"run  packer verify {quoted(self.columns.place)}"
            )
        return b"".join((pixels_header(height, width), data))


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
    backend: "pread" copies bytes out; "mmap" returns views of the page cache, for files that nothing rewrites.
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
        raise StaleIndexError(f"{path}: a copy of another version of {fallback}; stage it again")
    home, info = Path(fallback), source
    if local is not None:
        _, chosen = local.split(split, Path(path))
        if source is None or (Path(path) / chosen.index).is_dir():
            home, info = Path(path), local
    columns = packed_columns(home, info if info is not None else read_dataset_info(home), split)
    copy, origin = (
        _files(Path(root), columns, Recognised(columns, opened, samples), backend, open_shards)
        for root, opened, samples in (
            (path, _opened_set(Path(path), local, columns), True),  # a wrong shard is read from the source
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
    return PackedColumns(dataset, name, path / info.index, opened=OpenedSet(path, dataset, name))


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
    """The store for a reader of the samples in `columns`: `store`, or one that adds headers to raw pixels."""
    return Pixels(store, columns) if columns.kinds.get("image") == PIXELS else store


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


def concat(readers: Sequence[Reader]) -> Reader:
    """Concatenate readers: classes are unified by name, and labels renumbered.

    The columns are copied into memory. Closing the result closes all readers. Raises ValueError for readers without the
    same fields in the same order, and for readers whose images are converted (cache the result instead).
    """
    if not readers:
        raise ValueError("concat needs at least one reader, but the list is empty")
    tables = [reader.table for reader in readers]
    if any(list(table.kinds.items()) != list(tables[0].kinds.items()) or table.forms for table in tables):
        raise ValueError("concat needs readers with the same fields in order and kind, and without converted images")
    fields = tables[0].fields
    classes = tuple(dict.fromkeys(name for table in tables for name in table.classes))
    counts = [len(table.columns.shard_bytes) for table in tables]
    first_shards = [0, *accumulate(counts)]
    columns = {"label": [_renumbered(table, classes) for table in tables]}
    columns["shard"] = [table.column("shard") + first for table, first in zip(tables, first_shards, strict=False)]
    for field in {field for table in tables for field in table.columns.separate}:
        pairs = zip(tables, first_shards, strict=False)
        columns[f"{field}.shard"] = [table.shard_column(field) + first for table, first in pairs]
    names = [name for name in ImageInfo._fields if all(table.has_headers for table in tables)]
    for name in [*names, *(f"{field}.{name}" for field in fields for name in FIELD_COLUMNS)]:
        columns[name] = [table.column(name) for table in tables]
    whole = _JoinedColumns(
        Strings.of(key for table in tables for key in table.keys),
        {name: np.concatenate(parts) for name, parts in columns.items()},
        fields,
        classes,
        names={
            field: Strings.of(
                encode_name(table.name(i, field), table.keys[i]) for table in tables for i in range(len(table))
            )
            for field in fields
        },
        kinds=tables[0].kinds,
        shard_bytes=[size for table in tables for size in table.columns.shard_bytes],
        title=" + ".join(table.title for table in tables),
    )
    whole.parts = [table.columns for table in tables]

    def joined(stores: Iterable[Store]) -> Joined:
        payloads = Payloads(len(fields))
        parts = zip(stores, counts, tables, strict=True)
        return Joined([Part(store, count, len(table), table.rows, payloads) for store, count, table in parts])

    decoding = joined(reader.decoding or reader.store for reader in readers)
    has_decoding = any(reader.decoding is not None for reader in readers)
    return Reader(Table(whole), joined(reader.store for reader in readers), decoding if has_decoding else None)


def _renumbered(table: Table, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """The labels of a table as numbers of the classes `classes`."""
    numbers = np.array([*map(classes.index, table.classes), NO_LABEL], np.int64)
    return numbers[table.labels] if table.classes else table.labels


class _JoinedColumns(MemoryColumns):
    parts: Sequence[Columns] = ()

    def explained(self, error: Exception) -> Exception:
        """The explanation of the first part that has one, else `error`."""
        return next((other for part in self.parts if (other := part.explained(error)) is not error), error)
