"""The reader: a table, which locates the bytes of each sample, over a store, which reads them.

    few = reader.select(labels=["cat", "dog"], min_side=224)
    tenth = few.select(fraction=0.1, seed=1)

All readers are of one class. A packed set, a folder, a remote set, a staged copy with its source as fallback, a cache
and a selection of any of these differ only in their tables and stores. Your own store makes a reader, too:

    class FromDatabase(Store):
        def read_one(self, row, shard, offset, length): return database.image(row)

    reader = Reader(Table.of(keys, labels, classes), FromDatabase())
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import math
import operator
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, cast, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from cache.errors import (
    BadSampleError,
    DamagedSampleError,
    DatasetError,
    SourceError,
    StaleIndexError,
    UnknownNameError,
)
from cache.messages import listed
from cache.stores import Buffer, Store
from cache.stores.base import Extents, Payloads, layers, location
from readers.layout import FIELD_KINDS, DatasetInfo, SplitInfo
from readers.table import ABSENT as _ABSENT
from readers.table import NO_LABEL, ImageInfo, Sample, Table, checked_indices, headers_of, html_of, parse_npy
from readers.where import TableFacts, json_columns, parse_where

_BLOCK_SAMPLES = 64
_BATCH_SAMPLES = 128  # samples a batch when streaming an order of `readers.order`
_JSON_BLOCK = 4096
_SHOWN = 5
_AHEAD_BLOCKS = 4
_LARGE_RUN_BYTES = 1 << 20  # one read of this size keeps a disk busy; announcing it costs more than it gains
_AHEAD_SAMPLES, _AHEAD_BYTES = 1024, 128 << 20
_KEPT_BYTES = 256 << 20  # most bytes of announced reads that a store keeps until they are taken (`cache.stores.remote`)
OPEN_BYTES = _KEPT_BYTES - (32 << 20)  # most bytes of announced blocks: with more, some would be dropped unread
# A longer wait per sample means a disk or a network; from then on reads are announced in advance.
_SLOW_SECONDS = 0.0001
SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
Indices: TypeAlias = Sequence[int] | npt.NDArray[Any]
Int64s: TypeAlias = npt.NDArray[np.int64]
_R = TypeVar("_R", bound="Reader")
_Data = TypeVar("_Data", bound=Sequence[Any])


class Reader:
    """Random access to n samples: by number, many at once, or as a stream in a known order.

    table: keys, labels and byte ranges of the samples.
    store: reads the bytes.
    main: the default field: "image", or the first field of a set without images.
    decoding: store of the same images in a form that only this package decodes, if a cache keeps one.

    A reader pickles by the arguments it was opened with, works in forked children, and may be shared by threads.
    """

    def __init__(self, table: Table, store: Store, decoding: Store | None = None) -> None:
        self.table, self.store, self.decoding = table, store, decoding
        self._setup()

    def _setup(self) -> None:
        self._read_one, self.main = self.store.read_one, self.table.main
        self._columns: dict[str, tuple[int, memoryview, memoryview, memoryview]] = {}
        self._info: ImageInfo | None = None
        columns = self.table.columns
        columns.column("shard")  # map it now with the other columns: a new version may replace the files later
        self._rows = None if self.table.rows is None else self.table.rows.data
        self._shard_bytes = columns.shard_bytes
        self._width = len(columns.fields)
        # If rows are payload numbers, a store that keeps payloads by row needs no extent.
        self._kept = self.store.by_row if self._rows is None and self._width == 1 else None
        self._only = self.fields[0] if self._kept is not None else None

    # --- properties --------------------------------------------------------------------------------------------
    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields; "image" is the first, if it exists."""
        return self.table.fields

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each field (`readers.fields`)."""
        return self.table.kinds

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; position = label."""
        return self.table.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class name (torchvision's attribute)."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [n]; NO_LABEL (-1) for samples without a label."""
        return self.table.labels

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples; each is decoded on access."""
        return self.table.keys

    @property
    def fingerprint(self) -> str:
        """A short text that identifies the data set and the selected samples; part of resume tokens."""
        return self.table.fingerprint

    @property
    def info(self) -> ImageInfo:
        """Dimensions and coding of the images as they are read, arrays [n].

        Without an index, the first access reads every image.
        """
        if self._info is None:
            self._info = self.table.headers(None) if self.table.has_headers else self.image_info(range(len(self)))
        return self._info

    def image_info(self, indices: Indices) -> ImageInfo:
        """`info` of some samples, in the order of `indices`; reads no other samples."""
        numbers = checked_indices(indices, self)
        return self.table.headers(numbers) if self.table.has_headers else headers_of(read_good(self, numbers))

    def sizes(self, field: str = "") -> npt.NDArray[np.int64]:
        """Encoded bytes of a field by sample, int64 [n]; 0 where a sample lacks it. Reads no payload.

        For a folder: the sizes when it was listed. For images that a cache re-encodes: estimates.
        """
        if self.table.forms and not self.table.has_headers and (field or self.main) == "image":
            return self.table.forms[-1].bytes(self.info, self.table.field_column(field, "length").view("<i8"))
        return self.table.sizes(field)

    def name(self, index: int, field: str = "") -> str:
        """Name of the file that a field came from, relative to the split's folder; "" if it came from no file."""
        return self.table.name(index, field)

    def has(self, index: int, field: str) -> bool:
        """Whether a sample has a field."""
        return self._range(index, field) is not None

    def byte_range(self, index: int, field: str = "") -> tuple[Path | str, int, int] | None:
        """(shard's path or address, offset, length) of a field, for other readers; None if the sample lacks it."""
        field = field or self.main
        extent = self._range(index, field)
        if extent is None:
            return None
        row = Payloads(self._width).number(self.table.row(index), self.table.number(field))
        place = location(self.store, row, extent[0])
        return place if "://" in place else Path(place), extent[1], extent[2]

    # The following raise DatasetError if the reader was not opened from a packed set.
    @property
    def dataset(self) -> DatasetInfo:
        """The content of dataset.json."""
        return self._packed("dataset")  # type: ignore[no-any-return]

    @property
    def split_info(self) -> SplitInfo:
        """The split in dataset.json."""
        return self._packed("split_info")  # type: ignore[no-any-return]

    @property
    def path(self) -> Path:
        """The directory with dataset.json and the index, or the folder."""
        return self._packed("path")  # type: ignore[no-any-return]

    @property
    def split(self) -> str:
        """The split that was opened."""
        return self._packed("split")  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.table.described})"

    _repr_html_ = html_of

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, index: int, field: str = "") -> Buffer:
        """The bytes of one field of one sample.

        field: default: `main`. Raises IndexError for an index out of range, and UnknownNameError for a field that the
        set or the sample lacks.
        """
        field = field or self.main
        if field == self._only and self._kept is not None:
            data = self._kept.hit(index)
            if data is not None:
                return data
        try:
            number, shards, offsets, lengths = self._columns[field]  # memoryviews give integers, faster than scalars
            row = index if self._rows is None else self._rows[index]
            offset, length, shard = offsets[row], lengths[row], shards[row]
            size = self._shard_bytes[shard]
        except (KeyError, IndexError):
            return self._read_first(index, field)
        if offset + length > size:
            raise self.table.bad_extent(self.table.row(index), field, offset, length, shard)
        if row < 0:
            row += len(self.table.columns)
        try:
            return self._read_one(int(row) * self._width + number, shard, offset, length)
        except StaleIndexError as error:
            raise self.table.columns.explained(error) from error.__cause__

    def array(self, which: int | str, field: str = "") -> npt.NDArray[Any]:
        """The array in a field of one sample, by number or key.

        It is a read-only view of the bytes if these are aligned and in native order, else a copy. field: of a kind
        stored as .npy; default: `main`. Raises BadSampleError for bytes that are no .npy of plain numbers, and as
        `read` does.
        """
        index = self.table.find(which) if isinstance(which, str) else which
        try:
            return parse_npy(self.read(index, field), copy=False)
        except BadSampleError as error:
            name = field or self.main
            raise BadSampleError(f"sample {index} ({self.keys[index]}): field {name}: {error}") from error

    def read_many(self, indices: Indices, field: str = "") -> list[Buffer]:
        """The bytes of many samples, in the order of `indices`.

        Reads are sorted by extent, and neighbours are fetched together. Views stay valid while they are referenced.
        """
        field = field or self.main
        if field == self._only and self._kept is not None:
            indices = checked_indices(indices, self)
            data = self._kept.hits(indices)
            missing = [i for i, payload in enumerate(data) if payload is None]
            if missing:
                for i, payload in zip(missing, self._read_extents(indices[missing], field), strict=True):
                    data[i] = payload
            return data  # type: ignore[return-value]
        return self._read_extents(indices, field)

    def read_fields(self, rows: Mapping[str, Indices]) -> dict[str, list[Buffer]]:
        """The bytes of several fields, each for its own samples: {field: samples} to {field: bytes}.

        They are planned as one read: neighbours are fetched together, whichever field they are of, and a server is
        waited for once. Raises as `read_many` does.
        """
        extents = {name: self.table.extents(indices, name) for name, indices in rows.items()}
        data = iter(self._read_all(extents))
        return {name: list(itertools.islice(data, len(some.row))) for name, some in extents.items()}

    def _read_extents(self, indices: Indices, field: str) -> list[Buffer]:
        return self._read_all({field: self.table.extents(indices, field)})

    def _read_all(self, extents: Mapping[str, Extents]) -> list[Buffer]:
        """The bytes of all extents of some fields, field by field."""
        if not extents:
            return []
        first, *more = extents.values()
        try:
            return self.store.read(Extents(*map(np.concatenate, zip(first, *more, strict=True))) if more else first)
        except StaleIndexError as error:
            for field, some in extents.items():
                self.table.check(some, field)
            raise self.table.columns.explained(error) from error.__cause__

    def prefetch(self, indices: Indices, field: str = "") -> None:
        """Announce samples that will be read soon, for example to the kernel; returns at once.

        Samples that lack the field are left out.
        """
        self._announce(indices, field, None)

    def stream(
        self, indices: Iterable[int] | Ordered | None = None, field: str = "", epoch: int = 0
    ) -> Iterator[Buffer]:
        """The bytes of samples in a known order (default: as stored), read ahead.

        indices: sample numbers, or an order of `readers.order`, of which one epoch is read.

        A disk is fast only while several reads are outstanding, so the next blocks are announced before a block is
        read (for an order, by `Announcer`). One block is in memory at a time.
        """
        if isinstance(indices, Ordered):
            yield from self._stream_of(indices, field, epoch)
            return
        order = iter(range(len(self)) if indices is None else indices)
        announced: deque[list[int]] = deque()
        while True:
            while len(announced) < _AHEAD_BLOCKS:
                block = list(itertools.islice(order, _BLOCK_SAMPLES))
                if not block:
                    break
                self._announce(block, field, _LARGE_RUN_BYTES)
                announced.append(block)
            if not announced:
                return
            yield from self.read_many(announced.popleft(), field)

    def sample(self, index: int) -> Sample:
        """One sample with all its fields."""
        row = self.table.row(index)
        fields = {name: self.read(index, name) for name in self.fields if self.has(index, name)}
        label = int(self.table.columns.column("label")[row])
        return Sample(self.table.columns.keys()[row], None if label == NO_LABEL else label, fields)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(len(self)))

    @overload
    def __getitem__(self, which: int | str) -> Sample: ...
    @overload
    def __getitem__(self, which: slice) -> list[Sample]: ...
    def __getitem__(self, which: int | str | slice) -> Sample | list[Sample]:
        """A sample by number or key, a list of samples by slice.

        The first access by key builds an index of all keys (8 bytes a sample). Raises IndexError, UnknownNameError
        (unknown key) and TypeError.
        """
        if isinstance(which, slice):
            return [self.sample(i) for i in range(*which.indices(len(self)))]
        if isinstance(which, str):
            return self.sample(self.table.find(which))
        try:
            index = operator.index(which)
        except TypeError:
            raise TypeError(
                f"expected a sample number, a key or a slice, found {type(which).__name__}; for many samples at once "
                f"use select(indices=…) or read_many(…)"
            ) from None
        return self.sample(index)

    # --- other readers ------------------------------------------------------------------------------------------
    def select(
        self,
        *,
        labels: int | str | Iterable[int | str] | None = None,
        keys: str | Iterable[str] | None = None,
        min_bytes: int | None = None,
        max_bytes: int | None = None,
        min_side: int | None = None,
        indices: npt.ArrayLike | None = None,
        mask: npt.ArrayLike | None = None,
        where: str | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> Reader:
        """A reader of the samples that meet all criteria, in stored order, or in the order of `indices`.

        labels: class numbers or names.
        keys: exact keys, or a pattern with * ? [abc], in which * also matches "/".
        min_bytes, max_bytes: limits on the size of the encoded image.
        min_side: least length of the shorter side in pixels, by the image's header.
        indices: sample numbers, which may repeat.
        mask: bool [n].
        where: an expression such as 'min_side >= 64 and label in ("cat", 3)'; see `readers.where`.
        fraction: random share of the remaining samples, drawn by `seed`; a smaller one is a subset of a larger one.

        Only sample numbers are copied. Closing the selection closes this reader. Raises SourceError if no sample is
        left, UnknownNameError for an unknown class or key, IndexError, and ValueError.
        """
        criteria = Criteria(labels, keys, min_bytes, max_bytes, min_side, indices, mask, where, fraction, seed)
        return Reader(self.table.take(criteria.apply(self)), self.store, self.decoding)

    def with_kinds(self: _R, kinds: Mapping[str, str]) -> _R:
        """The same samples with other kinds of fields, as {"mask": "mask"}. Raises UnknownNameError and ValueError."""
        if "image" in kinds or not set(kinds.values()) <= set(FIELD_KINDS):
            raise ValueError(f"a field other than the image is of kind {', '.join(FIELD_KINDS)}; found {dict(kinds)!r}")
        other = copy.copy(self)
        other.table = self.table.with_kinds(kinds)
        return other

    def for_decoding(self) -> Reader:
        """The same samples for `readers.decode`: in the cache's form if a cache keeps images in a form that only this
        package decodes (`keep="coefficients"`), else this reader. The decoded pixels are the same.
        """
        return self if self.decoding is None else Reader(self.table, self.decoding)

    def drop_damaged(self, index: int, field: str = "") -> bool:
        """Drop a damaged copy of a field from a cache; return whether one was dropped.

        Call it for bytes that could not be decoded: the next read returns the bytes of the set.
        """
        field = field or self.main
        row, number = self.table.row(index), self.table.number(field)
        shard = int(self.table.columns.shard_column(field)[row])
        below = layers(self.store, Payloads(self._width).number(row, number), shard)
        return any(store.drop_damaged(row) for store, row, _ in below if hasattr(store, "drop_damaged"))

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close the store; the next read opens it again."""
        self.store.close()

    def __enter__(self: _R) -> _R:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "store": self.store, "decoding": self.decoding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _read_first(self, index: int, field: str) -> Buffer:
        """The first read of a field, possibly by several threads at once. Raises as `read` does."""
        if field not in self._columns:
            number = self.table.number(field)
            columns = self.table.columns
            offsets, lengths = (columns.field_column(field, name).data for name in ("offset", "length"))
            self._columns[field] = (number, columns.shard_column(field).data, offsets, lengths)
        shard = self._columns[field][1][self.table.row(index)]
        if shard >= len(self._shard_bytes):
            raise self.table.no_such_shard(shard)
        return self.read(index, field)

    def _range(self, index: int, field: str) -> tuple[int, int, int] | None:
        """(shard, offset, length) of a field."""
        self.table.number(field)
        columns, row = self.table.columns, self.table.row(index)
        extent = [int(columns.field_column(field, name)[row]) for name in ("offset", "length")]
        shard = int(columns.shard_column(field)[row])
        if extent[0] == _ABSENT:
            return None
        if shard >= len(columns.shard_bytes):
            raise self.table.no_such_shard(shard)
        return shard, extent[0], extent[1]

    def _announce(self, indices: Indices, field: str, below_bytes: int | None) -> None:
        field, numbers = field or self.main, checked_indices(indices, self)
        self.table.number(field)
        offsets = self.table.columns.field_column(field, "offset")[self.table.at(numbers)]
        extents = self.table.extents(numbers[offsets != _ABSENT], field)
        try:
            self.store.prefetch(extents, below_bytes)
        except StaleIndexError as error:
            self.table.check(extents, field)
            raise self.table.columns.explained(error) from error.__cause__

    def _stream_of(self, order: Ordered, field: str, epoch: int) -> Iterator[Buffer]:
        size, announcer = _BATCH_SAMPLES, Announcer(self, order, epoch, field=field)
        at_once = _AHEAD_SAMPLES // size  # an order computes a thousand rows nearly as quickly as those of a batch

        @lru_cache(4)
        def several(number: int) -> tuple[Int64s, Int64s]:
            positions = np.arange(number * at_once * size, min(len(order), (number + 1) * at_once * size))
            return positions, order.indices(epoch, positions)

        def rows_of(batch: int) -> tuple[Int64s, Int64s]:
            number, first = batch // at_once, batch % at_once * size
            positions, rows = several(number)
            return positions[first : first + size], rows[first : first + size]

        for batch in range(-(-len(order) // size)):
            announcer.announce(batch, -(-len(order) // size), size, joined(rows_of))
            yield from announcer.read(self.read_many, rows_of(batch)[1], field)

    def _packed(self, name: str) -> Any:
        value = getattr(self.table.columns, name, None)
        if value is None:
            raise DatasetError(f"{self}: not opened from a packed set, so it has no {name}")
        return value


@runtime_checkable
class Ordered(Protocol):
    """The part of an order (`readers.order`) that `Reader.stream` uses."""

    def __len__(self) -> int: ...

    def indices(self, epoch: int, positions: Int64s) -> Int64s: ...


@runtime_checkable
class _OfBlocks(Ordered, Protocol):
    """An order that reads whole blocks, such as `Woven`."""

    @property
    def open_samples(self) -> int: ...

    @property
    def open_positions(self) -> int: ...

    def is_read_alone(self, processes: int, workers: int, batch_size: int) -> bool: ...

    def visits(self, epoch: int, positions: Int64s) -> Int64s: ...

    def samples_of(self, epoch: int, visits: Int64s) -> list[Int64s]: ...


class Announcer:
    """Announces the coming reads of one process in an epoch, each sample once.

    Announcing begins when reads wait. An order of blocks is announced by whole blocks, 4,096 samples ahead and from the
    first batch on, if no other process reads the same blocks and their samples fit into the memory for announced reads.
    Shared blocks are announced by samples, after a warning. processes: the ranks. warns: False in all workers but one.
    """

    def __init__(
        self,
        reader: Reader,
        order: Ordered,
        epoch: int,
        processes: int = 1,
        workers: int = 1,
        batch_size: int = 1,
        field: str = "",
        warns: bool = True,
    ) -> None:
        self._reader, self.order, self._epoch, self._workers, self._field = reader, order, epoch, workers, field
        is_alone = isinstance(order, _OfBlocks) and order.is_read_alone(processes, workers, batch_size)
        self._blocks = cast(_OfBlocks, order) if is_alone else None
        dealt = f", workers={workers}, batch_size={batch_size}" if workers > 1 else ""
        is_shared = warns and isinstance(order, _OfBlocks) and not is_alone
        self._better = f"readers.order.woven(reader, nodes={processes}{dealt})" if is_shared else ""
        self._announced = 0
        self._visits: set[int] = set()
        self._done: Int64s | None = None  # samples of open blocks that were read before the resume
        self._seconds = self._bytes = 0.0  # moving averages per sample: seconds waited, bytes read

    def announce(self, batch: int, stop: int, size: int, rows_of: Callable[[int, int], tuple[Int64s, Int64s]]) -> None:
        """Call it before reading a batch of `size` samples: announces that batch and later ones, up to `stop`.

        rows_of: returns (positions, rows) of all batches from one to another, int64 [k] each.
        """
        blocks = self._blocks
        if blocks is None and not self._announced and self._seconds < _SLOW_SECONDS:
            return
        if self._better:
            warnings.warn(
                f"samples of one block of this order go to several processes, which each fetch it; faster is  "
                f"{self._better}",
                stacklevel=2,
            )
            self._better = ""
        ahead = 2
        if self._bytes:
            samples, most_bytes = _AHEAD_SAMPLES, float(_AHEAD_BYTES)
            if blocks is not None:  # few GETs bring many samples
                samples, most_bytes = 4 * samples, min(most_bytes, _KEPT_BYTES - blocks.open_samples * self._bytes)
            ahead = max(2, math.ceil(min(samples, most_bytes / self._bytes) / self._workers / max(1, size)))
        first, stop = max(batch + (blocks is None), self._announced), min(stop, batch + ahead)
        if first < stop and (first <= batch + ahead * 3 // 4 or stop < batch + ahead):  # several batches at a time
            self._reader.prefetch(self._rows_with(*rows_of(first, stop)), self._field)
            self._announced = stop

    def read(self, read: Callable[..., _Data], rows: Any, *more: Any) -> _Data:
        """Call `read` and measure how long it waits for storage."""
        began, worked = time.perf_counter(), time.thread_time()
        data = read(rows, *more)
        waited = time.perf_counter() - began - (time.thread_time() - worked)
        self._seconds += (waited / max(1, len(rows)) - self._seconds) / (8 if self._bytes else 1)
        self._bytes = sum(0 if isinstance(payload, Exception) else len(payload) for payload in data) / max(1, len(rows))
        return data

    def _rows_with(self, positions: Int64s, rows: Int64s) -> Int64s:
        """Rows to announce for a batch: all rows of blocks that it is the first to use, and rows outside blocks."""
        order = self._blocks
        if order is None or not len(rows) or order.open_samples * self._bytes > OPEN_BYTES:
            return rows
        visits, first = order.visits(self._epoch, positions), int(positions.min())
        fresh = np.array(sorted({*visits[visits >= 0].tolist()} - self._visits), np.int64)
        if self._done is None:
            begun = np.arange(max(0, first - order.open_positions), first)
            self._done = order.indices(self._epoch, begun)
        self._visits.update(fresh.tolist())
        needed = np.concatenate([rows[visits < 0], *order.samples_of(self._epoch, fresh)])
        return needed[~np.isin(needed, self._done)] if len(self._done) else needed


def joined(rows_of: Callable[[int], tuple[Int64s, Int64s]]) -> Callable[[int, int], tuple[Int64s, Int64s]]:
    """(positions, rows) of several batches, from those of one."""

    def of_all(first: int, stop: int) -> tuple[Int64s, Int64s]:
        positions, rows = zip(*map(rows_of, range(first, stop)), strict=True)
        return np.concatenate(positions), np.concatenate(rows)

    return of_all


def read_good(reader: Reader, indices: Indices, field: str = "image") -> list[Buffer | None]:
    """Payloads, with None for those that cannot be read; reading one of these alone raises its error."""
    with suppress(*SAMPLE_ERRORS):
        return list(reader.read_many(indices, field))
    payloads: list[Buffer | None] = [None] * len(indices)
    for i, index in enumerate(indices):
        with suppress(*SAMPLE_ERRORS):
            payloads[i] = reader.read(index, field)
    return payloads


def depth_warning(reader: Reader, row: int, keeper: str = "8-bit RGB") -> str:
    """The warning for an image of more than 8 bits a channel that is reduced to 8. keeper: the form that holds 8."""
    return (
        f"{reader.table.described}: sample {row} ({reader.keys[row]}) has more than 8 bits a channel, and {keeper} "
        f"keeps only the upper 8 bits; decode='unchanged' keeps all of them"
    )


# Selection. Criteria are evaluated from cheap to expensive: those on image headers, for which a folder has to read
# files, come last.


@dataclass(frozen=True)
class Criteria:
    """The arguments of `readers.reader.Reader.select`. Raises ValueError for invalid ones."""

    labels: int | str | Iterable[int | str] | None = None
    keys: str | Iterable[str] | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    min_side: int | None = None
    indices: npt.ArrayLike | None = None
    mask: npt.ArrayLike | None = None
    where: str | None = None
    fraction: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, expected more than 0 and at most 1")
        if self.where is not None:
            parse_where(self.where)

    def apply(self, reader: Reader) -> npt.NDArray[np.int64]:
        """Numbers of the samples that meet all criteria, int64, in stored order, or in the order of `indices`.

        Raises SourceError if none is left, UnknownNameError for classes and keys that the reader lacks.
        """
        left = np.arange(len(reader)) if self.indices is None else checked_indices(self.indices, reader)
        if self.mask is not None:
            mask = np.asarray(self.mask)
            if mask.dtype != np.bool_ or mask.shape != (len(reader),):
                raise ValueError(f"mask must be bool [{len(reader)}], found {mask.dtype} {list(mask.shape)}")
            left = left[mask[left]]
        if self.labels is not None:
            left = left[np.isin(reader.labels[left], self._label_numbers(reader))]
        if self.min_bytes is not None or self.max_bytes is not None:
            sizes = reader.sizes()[left]
            most = np.iinfo(np.int64).max if self.max_bytes is None else self.max_bytes
            left = left[(sizes >= (self.min_bytes or 0)) & (sizes <= most)]
        if self.keys is not None:
            left = left[self._has_key(left, reader)]
        if self.min_side is not None:
            info = reader.image_info(left)
            left = left[np.minimum(info.height, info.width) >= self.min_side]
        if self.where is not None:
            facts = TableFacts(
                reader.table.take(left),
                lambda: reader.image_info(left),
                getattr(reader.table.columns, "split", ""),
                columns=lambda names: json_columns(json_payloads(reader, left), names),
            )
            left = left[parse_where(self.where).mask(facts)]
        if self.fraction is not None and left.size:
            left = left[_share(len(left), self.fraction, self.seed)]
        if not left.size:
            criteria = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seed"}
            described = ", ".join(f"{name}={value!r:.60}" for name, value in criteria.items() if value is not None)
            raise SourceError(f"nothing is selected: none of the {len(reader)} samples of {reader} has {described}")
        return left

    def _label_numbers(self, reader: Reader) -> npt.NDArray[np.int64]:
        labels = [self.labels] if isinstance(self.labels, (int, str, np.integer)) else list(self.labels or ())
        numbers = {name: number for number, name in enumerate(reader.classes)}
        count = len(numbers)
        unknown = [x for x in labels if (x not in numbers if isinstance(x, str) else count and not -1 <= x < count)]
        if unknown:
            known = listed(numbers, _SHOWN) or "none"
            raise UnknownNameError(f"{reader}: no class {unknown[0]!r}; it has {count}: {known}")
        return np.array([numbers[x] if isinstance(x, str) else x for x in labels], np.int64)

    def _has_key(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.bool_]:
        keys = reader.keys
        whole = len(left) == len(reader) and bool((np.diff(left) == 1).all())
        candidates = keys if whole else [keys[i] for i in left.tolist()]
        if isinstance(self.keys, str):
            match = re.compile(fnmatch.translate(self.keys)).match
            return np.array([match(key) is not None for key in candidates], np.bool_)
        chosen = set(self.keys or ())
        missing = sorted(chosen.difference(candidates))
        if missing:
            few = listed([repr(key) for key in missing], _SHOWN)
            raise UnknownNameError(f"{reader}: {len(missing)} keys are not among the {len(left)} asked: {few}")
        return np.array([key in chosen for key in candidates], np.bool_)


def json_payloads(reader: Reader, indices: npt.NDArray[np.int64]) -> Iterator[tuple[str, Buffer | None]]:
    """(key, payload of the field "json") of each sample; None if it has no such field or the field is no JSON."""
    return field_payloads(reader, indices, "json" if reader.kinds.get("json") == "json" else None)


def field_payloads(
    reader: Reader, indices: npt.NDArray[np.int64], field: str | None
) -> Iterator[tuple[str, Buffer | None]]:
    """(key, payload of a field) of each sample; None if the sample lacks the field. field: None for no payloads."""
    keys = reader.table.take(indices).keys
    if field is None:
        yield from ((key, None) for key in keys)
        return
    has = reader.table.field_column(field, "offset")[indices] != np.uint64(_ABSENT)
    for first in range(0, len(indices), _JSON_BLOCK):
        block = slice(first, first + _JSON_BLOCK)
        payloads = iter(reader.read_many(indices[block][has[block]], field))
        yield from zip(keys[block], (next(payloads) if present else None for present in has[block]), strict=True)


def _share(count: int, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """Random numbers below `count`, ascending, at least one; a smaller fraction is a subset of a larger one."""
    from readers.order.base import Permutation

    number = max(1, round(count * fraction))
    return np.sort(Permutation(count, seed, purpose="fraction").forward(np.arange(number, dtype=np.int64)))
