"""The reader of packed sets: index + `pread`. It knows nothing of HDF5, TFRecord or tar.

A shard is opened on first use, at most `open_shards` at a time; a descriptor is closed only when no read holds it.
Descriptors are only used with `pread`, which has no shared position, so threads and forked children may share them;
pickling carries the path and the options, and the copy opens its own.

Back ends: "pread" copies the bytes out (safe under every kind of change to the file); "mmap" hands out views of
the page cache without a copy (a file that shrinks under a map kills the process with SIGBUS, so use it on files
that nobody rewrites).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cache.forks import tell_after_fork
from cache.page import prefetch
from readers.blocks import BlockPool
from readers.criteria import checked_indices
from readers.errors import DamagedSampleError, DatasetError, StaleIndexError, UnknownNameError
from readers.index import ABSENT, FieldColumns, Index, decode_name
from readers.layout import DatasetInfo, read_dataset_info
from readers.ranges import GAP_BYTES, ReadPlan, first_outside, plan_reads
from readers.replaced import as_replaced, failed_read
from readers.sample import NO_LABEL, Buffer, ImageInfo, Sample
from readers.selection import Selectable
from readers.shard_file import ShardFile
from readers.stream import stream_ahead
from readers.strings import Strings

__all__ = ["Backend", "ShardReader"]

Backend = Literal["pread", "mmap"]
_LARGE_RUN_BYTES = 1 << 20  # a read this large keeps a disk busy by itself; announcing it costs more than it gains


class ShardReader(Selectable):
    """Random access to one split of a packed set.

    path: the directory with `dataset.json`. split: None takes the only split, or "train". verify: check the CRC32C
    of everything read. Raises DatasetError (no or bad set), UnknownNameError (no such split), StaleIndexError (a
    shard is missing or of another size than was indexed) and DamagedSampleError (a checksum differs).
    """

    _gap_bytes = GAP_BYTES

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None = None,
        *,
        backend: Backend = "pread",
        verify: bool = False,
        open_shards: int = 512,
    ) -> None:
        if backend not in ("pread", "mmap"):
            raise ValueError(f"backend must be 'pread' or 'mmap', not {backend!r}")
        self.path = Path(path)
        self.dataset: DatasetInfo = read_dataset_info(self.path)
        self.split, self.split_info = self.dataset.split(split, self.path)
        self.backend, self.verify, self.open_shards = backend, verify, max(1, open_shards)
        self.index = Index(self.path / self.split_info.index, self.split_info.samples)
        try:
            self._setup()
        except DatasetError as error:
            raise as_replaced(self.path, self.dataset, error) from error

    def _setup(self) -> None:
        self._samples = self.split_info.samples
        self._shards: list[ShardFile | None] = [None] * len(self.split_info.shards)
        self._opened: deque[int] = deque()
        self._lock = threading.Lock()
        self._blocks = BlockPool()
        self._place: object = self.path  # what messages call the set
        self._columns: dict[str, FieldColumns] = {}
        self._shard_of = self.index.column("shard").data  # memoryviews give integers, faster than scalars
        self._labels: npt.NDArray[np.int64] = self.index.column("label")  # now: later they may be another set's
        self._keys: Strings | None = None
        self._fingerprint = ""
        self._ranges(self.fields[0])
        tell_after_fork(self)

    # --- what it holds ------------------------------------------------------------------------------------------
    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.dataset.fields)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [n], mapped; NO_LABEL (-1) where a sample has none."""
        return self._labels

    @property
    def keys(self) -> Strings:
        """Keys of the samples; decoded one by one when asked for."""
        if self._keys is None:
            self._keys = self.index.keys()
        return self._keys

    @property
    def info(self) -> ImageInfo:
        """Image dimensions and coding, arrays [n]."""
        return self.index.info()

    @property
    def fingerprint(self) -> str:
        """Of the whole set, and the split: changes whenever a shard, the index or the labels' meaning do.

        Of adopted shards whose index has no checksums it takes in what the index says, which is read for that once.
        """
        if not self._fingerprint:
            known = self.dataset.fingerprint()
            if not self.dataset.covers_index(self.split):
                known = f"{known}-{self.index.digest(self.fields)}"
            self._fingerprint = f"{known}/{self.split}"
        return self._fingerprint

    def sizes(self, field: str = "image") -> npt.NDArray[np.int64]:
        """Encoded bytes of a field by sample, int64 [n], mapped; 0 where a sample lacks it."""
        return self._ranges(field).lengths.view("<i8")

    def image_info(self, indices: Sequence[int] | npt.NDArray[Any]) -> ImageInfo:
        """Image dimensions and coding of some samples, in the order asked for. Raises IndexError."""
        wanted = checked_indices(indices, self)
        return ImageInfo._make(column[wanted] for column in self.info)

    def name(self, index: int, field: str = "image") -> str:
        """The file name, relative to the split's folder, that a field came from; "" where it came from no file."""
        self._ranges(field)
        return decode_name(self.index.names(field)[index], self.keys[index])

    def byte_range(self, index: int, field: str = "image") -> tuple[Path | str, int, int] | None:
        """(shard's path or address, offset, length) of a field, for readers of their own; None where there is none."""
        columns = self._ranges(field)
        offset = self._at(columns.offset, index)
        if offset == ABSENT:
            return None
        number = self._shard_of[index]
        if number >= len(self._shards):
            raise self._no_such_shard(number)
        return self._told_path(number), offset, columns.length[index]

    def __len__(self) -> int:
        return self._samples

    def __repr__(self) -> str:
        return f"ShardReader({str(self.path)!r}, split={self.split!r}, {self._samples} samples)"

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, index: int, field: str = "image") -> Buffer:
        """The bytes of one field: `bytes` (pread) or a read-only memoryview (mmap).

        Raises IndexError outside the set and UnknownNameError for a field the set or this sample lacks.
        """
        try:
            columns = self._columns[field]
            offset, length = columns.offset[index], columns.length[index]
            number = self._shard_of[index]
        except KeyError:
            self._ranges(field)
            return self.read(index, field)
        except IndexError:
            raise self._no_such_sample(index) from None
        try:
            shard = self._shards[number] or self._open_shard(number)
        except IndexError:
            raise self._no_such_shard(number) from None
        if offset + length > shard.bytes:
            raise self._bad_range(index, field, offset, length, number)
        if shard.view is not None:
            data: Buffer = shard.view[offset : offset + length]
        else:
            try:
                data = os.pread(shard.descriptor, length, offset)
            except OSError as error:
                raise failed_read(shard.path, error) from error
            if len(data) != length:
                data = shard.reread(offset, length)
        if self.verify:
            self._verify(data, index, field)
        return data

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> list[Buffer]:
        """The bytes of many samples in the order asked for, as read-only memoryviews of one block of memory.

        The reads are sorted by place and neighbours are fetched together. The block stays as it is while a view of it
        lives, and is used again afterwards.
        """
        if self.backend == "mmap":
            return [self.read(int(i), field) for i in indices]
        wanted, plan, length = self._plan(indices, field)
        block = self._blocks.take(plan.total_bytes)
        self._fill(block, plan)
        frozen = block.toreadonly()
        stops = (plan.place + length).tolist()
        views: list[Buffer] = [frozen[a:b] for a, b in zip(plan.place.tolist(), stops, strict=True)]
        if self.verify:
            for i, view in zip(wanted.tolist(), views, strict=True):
                self._verify(view, i, field)
        return views

    def _fill(self, block: memoryview, plan: ReadPlan) -> None:
        """Read the runs of a plan into their places."""
        columns = (plan.run_shard, plan.run_offset, plan.run_length, plan.run_place)
        for number, offset, count, place in zip(*(column.tolist() for column in columns), strict=True):
            shard = self._shards[number] or self._open_shard(number)
            shard.read_into(block[place : place + count], offset, count)

    def read_into(self, index: int, field: str, target: memoryview) -> int:
        """Read a field into the front of `target` (uint8, at least the field's length); returns its length."""
        columns = self._ranges(field)
        offset, length, number = self._at(columns.offset, index), columns.length[index], self._shard_of[index]
        if number >= len(self._shards):
            raise self._no_such_shard(number)
        shard = self._shards[number] or self._open_shard(number)
        if offset + length > shard.bytes:
            raise self._bad_range(index, field, offset, length, number)
        window = target[:length]
        shard.read_into(window, offset, length)
        if self.verify:
            self._verify(window, index, field)
        return length

    def prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> None:
        """Ask the kernel to read these samples into the page cache; returns at once."""
        self._prefetch(indices, field, below_bytes=1 << 62)

    def _prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str, below_bytes: int) -> None:
        _, plan, _ = self._plan(indices, field)
        runs = zip(plan.run_shard.tolist(), plan.run_offset.tolist(), plan.run_length.tolist(), strict=True)
        for number, offset, count in runs:
            if count < below_bytes:
                shard = self._shards[number] or self._open_shard(number)
                prefetch(shard.descriptor, ((offset, count),))

    def stream(self, indices: Iterable[int] | None = None, field: str = "image") -> Iterator[Buffer]:
        """The bytes of samples in a known order (default: as stored), with the kernel asked ahead."""

        def announce(block: Sequence[int]) -> None:
            self._prefetch(block, field, _LARGE_RUN_BYTES)

        return stream_ahead(self, range(len(self)) if indices is None else indices, field, announce)

    def sample(self, index: int) -> Sample:
        """One sample with all its fields."""
        fields = {name: self.read(index, name) for name in self.fields if self.has(index, name)}
        label = int(self.labels[index])
        return Sample(self.keys[index], None if label == NO_LABEL else label, fields)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(self._samples))

    def check_shard(self, number: int) -> None:
        """Open shard `number` of the split. Raises StaleIndexError where it is missing or of another size."""
        if self._shards[number] is None:
            self._open_shard(number)

    def has(self, index: int, field: str) -> bool:
        """Whether a sample has a field."""
        return self._at(self._ranges(field).offset, index) != ABSENT

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close the shards; the next read opens them again."""
        with self._lock:
            self._shards = [None] * len(self._shards)
            self._opened.clear()
        self._blocks.clear()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def after_fork(self) -> None:
        """In a forked child: go on with the shards that were open, whatever another thread was doing at that moment."""
        self._lock = threading.Lock()
        self._opened = deque(number for number, shard in enumerate(self._shards) if shard is not None)

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "dataset", "split", "split_info", "backend", "verify", "open_shards", "index")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _ranges(self, field: str) -> FieldColumns:
        columns = self._columns.get(field)
        if columns is None:
            if field not in self.dataset.fields:
                raise UnknownNameError(f"{self._place}: no field {field!r}; it has {', '.join(self.fields)}")
            columns = self._columns[field] = FieldColumns(self.index, field)
        return columns

    def _plan(
        self, indices: Sequence[int] | npt.NDArray[Any], field: str
    ) -> tuple[npt.NDArray[np.int64], ReadPlan, npt.NDArray[np.int64]]:
        columns = self._ranges(field)
        wanted = np.asarray(indices, np.int64)
        if wanted.size and (int(wanted.min()) < -self._samples or int(wanted.max()) >= self._samples):
            raise IndexError(f"indices {wanted.min()} to {wanted.max()} are not all inside the samples of {self}")
        shard = self.index.column("shard")[wanted]
        raw_offset, raw_length = columns.offsets[wanted], columns.lengths[wanted]
        if wanted.size:
            if int(shard.max()) >= len(self._shards):
                raise self._no_such_shard(int(shard.max()))
            sizes = np.array([s.bytes for s in self.split_info.shards], np.uint64)[shard]
            i = first_outside(raw_offset, raw_length, sizes)
            if i is not None:
                raise self._bad_range(int(wanted[i]), field, int(raw_offset[i]), int(raw_length[i]), int(shard[i]))
        offset, length = raw_offset.astype(np.int64), raw_length.astype(np.int64)
        return wanted, plan_reads(shard, offset, length, self._gap_bytes), length

    def _told_path(self, number: int) -> Path | str:
        return self._shard_path(number)

    def _shard_path(self, number: int) -> Path:
        return self.path / self.split_info.shards[number].path

    def _open_shard(self, number: int) -> ShardFile:
        with self._lock:
            shard = self._shards[number]
            if shard is None:
                while len(self._opened) >= self.open_shards:
                    self._shards[self._opened.popleft()] = None
                shard = self._shards[number] = self._new_shard_file(number)
                self._opened.append(number)
            return shard

    def _new_shard_file(self, number: int) -> ShardFile:
        """Open a shard; where this process may open no more files, those opened first make room."""
        expected = self.split_info.shards[number].bytes
        while True:
            try:
                return ShardFile(self._shard_path(number), expected, self.backend == "mmap")
            except StaleIndexError as error:
                if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE) or not self._opened:
                    raise as_replaced(self.path, self.dataset, error) from error.__cause__
            self._shards[self._opened.popleft()] = None

    def _verify(self, data: Buffer, index: int, field: str) -> None:
        from crc32c import crc32c  # loaded only where checksums are asked for

        expected, found = int(self._ranges(field).crc32c[index]), crc32c(data)
        if found != expected:
            where = self.byte_range(index, field)
            raise DamagedSampleError(
                f"sample {index} (key {self.keys[index]!r}, field {field!r}) at {where}: CRC32C is {found:08x}, "
                f"the index says {expected:08x}; run  packer verify {self._place}"
            )

    def _at(self, column: memoryview, index: int) -> int:
        try:
            value: int = column[index]
        except IndexError:
            raise self._no_such_sample(index) from None
        return value

    def _no_such_sample(self, index: int) -> IndexError:
        return IndexError(f"sample {index} is outside the {self._samples} of {self}")

    def _no_such_shard(self, number: int) -> DatasetError:
        return DatasetError(
            f"{self.index.directory}: names shard {number}, the split has {len(self._shards)}; "
            f"rebuild it with  packer index"
        )

    def _bad_range(self, index: int, field: str, offset: int, length: int, number: int) -> Exception:
        if offset == ABSENT:
            return UnknownNameError(f"sample {index} of {self._place} has no field {field!r}")
        return StaleIndexError(
            f"{self._told_path(number)}: the index puts sample {index} at bytes {offset} to {offset + length}, "
            f"but the shard has {self.split_info.shards[number].bytes}; rebuild the index with  packer index"
        )
