"""What is known of n samples, column by column: in memory, or as the index of a split, mapped and never loaded.

An index is one `.npy` file per column in `<split>.index/`:

    shard.npy               uint32 [n]      position in the split's list of shards
    <field>.shard.npy       uint32 [n]      the same, of a field that has shards of its own (`separate` in dataset.json)
    <field>.offset.npy      uint64 [n]      byte offset of the field in its shard; 2^64 - 1 where a sample lacks it
    <field>.length.npy      uint64 [n]      bytes; 0 is legal
    <field>.crc32c.npy      uint32 [n]      CRC32C (Castagnoli) of those bytes
    <field>.name.npy        uint8  [bytes]  original file names, UTF-8, one after the other; see `encode_name`
    <field>.name.offset.npy uint64 [n + 1]
    label.npy               int64  [n]      class number from 0; -1 for none (the shards store label + label_offset)
    key.npy                 uint8  [bytes]  keys, UTF-8, one after the other
    key.offset.npy          uint64 [n + 1]
    height.npy, width.npy   uint32 [n]      pixels as stored, before EXIF orientation; 0 where unknown
    components.npy          uint8  [n]
    process.npy             uint8  [n]      JPEG: low byte of the SOF marker (0xC0 baseline, 0xC2 progressive); else 0
    orientation.npy         uint8  [n]      EXIF 1..8
    media.npy               uint8  [n]      position in readers.headers.MEDIA

All little-endian, C order, in NumPy's format 1.0 (numpy.lib.format). Opening costs the same for a thousand samples
and for a billion, and processes share the pages.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError
from cache.files import open_regular
from readers.sample import NO_LABEL, ImageInfo
from readers.strings import Strings

_C = TypeVar("_C", bound="Columns")
ABSENT = 2**64 - 1
REBUILD = "unless the set is being replaced right now, rebuild it with  packer index"
COLUMNS: dict[str, str] = {
    "shard": "<u4",
    "label": "<i8",
    "height": "<u4",
    "width": "<u4",
    "components": "|u1",
    "process": "|u1",
    "orientation": "|u1",
    "media": "|u1",
}
FIELD_COLUMNS: dict[str, str] = {"offset": "<u8", "length": "<u8", "crc32c": "<u4"}


def column_names(fields: Iterable[str], separate: Iterable[str] = ()) -> list[str]:
    """The files that every index of these fields has. separate: fields that have shards of their own."""
    names = [*COLUMNS, "key", "key.offset", *(f"{field}.shard" for field in separate)]
    for field in fields:
        names += [f"{field}.{name}" for name in (*FIELD_COLUMNS, "name", "name.offset")]
    return [f"{name}.npy" for name in names]


def encode_name(name: str, key: str) -> str:
    """A field's file name as stored: "+rest" for key + rest, "=name" for any other, "" for no file."""
    if not name:
        return ""
    return "+" + name[len(key) :] if name.startswith(key) else "=" + name


def decode_name(stored: str, key: str) -> str:
    """The inverse of `encode_name`."""
    if not stored:
        return ""
    if stored[0] not in "+=":
        raise DatasetError(f"the stored file name {stored!r:.80} of sample {key!r:.80} starts with neither + nor =")
    return key + stored[1:] if stored[0] == "+" else stored[1:]


class Columns(ABC):
    """Columns of n rows, each loaded on first use; a table takes rows of them. They pickle, by path if they are files.

    title: what messages call the set: its directory or address, and the split.
    place: the directory or address, as commands take it.
    separate: fields that have shards of their own.
    kinds: what the bytes of fields are (`readers.fields`), where that is known.
    """

    fields: tuple[str, ...] = ("image",)
    separate: tuple[str, ...] = ()
    kinds: Mapping[str, str] = {}
    classes: tuple[str, ...] = ()
    title: str = ""
    place: str = ""
    has_headers: bool = True
    has_checksums: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def column(self, name: str) -> npt.NDArray[Any]:
        """One of `COLUMNS`, length n."""

    @abstractmethod
    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        """One of `FIELD_COLUMNS` of a field, length n."""

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        """The shard that has a field of each sample, length n: `column("shard")`, unless it has shards of its own."""
        return self.column("shard")

    @abstractmethod
    def keys(self) -> Strings: ...

    @abstractmethod
    def names(self, field: str) -> Strings:
        """Original file names as `encode_name` stores them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that differs for other columns."""

    @property
    @abstractmethod
    def shard_bytes(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """Size of each shard."""

    def with_kinds(self: _C, kinds: Mapping[str, str]) -> _C:
        """The same columns, with these kinds of fields."""
        other = copy.copy(self)
        other.kinds = kinds
        return other

    def shard_place(self, shard: int) -> str:
        """The shard as messages name it."""
        return f"{self.place or self.title}, shard {shard}"

    def explained(self, error: Exception) -> Exception:
        """The exception to raise for `error`, which occurred while the set was opened or read."""
        return error


class MemoryColumns(Columns):
    """Columns in memory; a column that is not given is 0 everywhere, and -1 for labels.

    columns: by the names of `COLUMNS` and "<field>.<name>" of FIELD_COLUMNS; "<field>.shard" of a field that has shards
    of its own.
    names: file names by field, as `encode_name` stores them.
    kinds: of the fields, where they are known.
    shard_bytes: size of each shard; default: where its last sample ends.
    """

    def __init__(
        self,
        keys: Sequence[str],
        columns: Mapping[str, npt.ArrayLike],
        fields: tuple[str, ...] = ("image",),
        classes: tuple[str, ...] = (),
        *,
        names: Mapping[str, Strings] | None = None,
        kinds: Mapping[str, str] | None = None,
        shard_bytes: Sequence[int] | npt.NDArray[np.int64] | None = None,
        title: str = "",
    ) -> None:
        self._keys = keys if isinstance(keys, Strings) else Strings.of(keys)
        self.fields, self.classes, self.title, self.place = fields, classes, title, title
        self.separate = tuple(field for field in fields if f"{field}.shard" in columns)
        self.has_headers = all(name in columns for name in ImageInfo._fields)
        self.has_checksums = all(f"{field}.crc32c" in columns for field in fields)
        self._names, self.kinds = dict(names or {}), kinds or {}
        self._shard_bytes = shard_bytes
        dtypes = COLUMNS | {f"{field}.{name}": kind for field in fields for name, kind in FIELD_COLUMNS.items()}
        dtypes |= {f"{field}.shard": COLUMNS["shard"] for field in fields}
        self._columns = {name: np.ascontiguousarray(values, dtypes[name]) for name, values in columns.items()}
        for name, values in self._columns.items():
            if values.shape != (len(self._keys),):
                raise ValueError(f"column {name} has the shape {values.shape}, expected ({len(self._keys)},)")
        self._dtypes = dtypes

    def __len__(self) -> int:
        return len(self._keys)

    def column(self, name: str) -> npt.NDArray[Any]:
        if name not in self._columns:
            unknown = NO_LABEL if name == "label" else 0
            return np.broadcast_to(np.array(unknown, self._dtypes[name]), (len(self),))
        return self._columns[name]

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        return self.column(f"{field}.{name}")

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        return self.column(f"{field}.shard" if field in self.separate else "shard")

    def keys(self) -> Strings:
        return self._keys

    def names(self, field: str) -> Strings:
        if field not in self._names:
            self._names[field] = Strings(np.zeros(0, np.uint8), np.zeros(len(self) + 1, np.uint64))
        return self._names[field]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr((self.title, self.fields, self.classes)).encode(), digest_size=16)
        for column in (self._keys.blob, self._keys.offsets, self.column("label")):
            digest.update(np.ascontiguousarray(column).data)
        for field in self.fields:
            for name in FIELD_COLUMNS:
                digest.update(np.ascontiguousarray(self.field_column(field, name)).data)
        return digest.hexdigest()

    @property
    def shard_bytes(self) -> Sequence[int] | npt.NDArray[np.int64]:
        if self._shard_bytes is not None:
            return self._shard_bytes
        ends = [self.field_column(f, "offset").astype(np.int64) + self.field_column(f, "length") for f in self.fields]
        shards = [self.shard_column(field) for field in self.fields]
        sizes = np.zeros(max(int(shard.max(initial=0)) for shard in shards) + 1, np.int64)
        for shard, end in zip(shards, ends, strict=True):
            np.maximum.at(sizes, shard, np.where(end < 0, 0, end))
        self._shard_bytes = sizes.tolist()
        return self._shard_bytes


class Index:
    """The mapped columns of one split, opened on first use and checked against `samples`.

    check_set: called when a column was opened, and when it could not be; raises where the set is another one by now.
    """

    def __init__(
        self, directory: str | os.PathLike[str], samples: int, check_set: Callable[[], None] | None = None
    ) -> None:
        self.directory = Path(directory)
        self.samples = samples
        self.check_set = check_set
        self._mapped: dict[str, npt.NDArray[Any]] = {}
        self._texts: dict[str, Strings] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Index, (self.directory, self.samples, self.check_set)

    def column(self, name: str) -> npt.NDArray[Any]:
        """One of COLUMNS, read-only, length n."""
        return self._fixed(name, COLUMNS[name])

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        """One of FIELD_COLUMNS of a field, read-only, length n."""
        return self._fixed(f"{field}.{name}", FIELD_COLUMNS[name])

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        """The shards of a field that has shards of its own, read-only, length n."""
        return self._fixed(f"{field}.shard", COLUMNS["shard"])

    def keys(self) -> Strings:
        return self._strings("key")

    def names(self, field: str) -> Strings:
        """Original file names of a field as stored; decode each with `decode_name`."""
        return self._strings(f"{field}.name")

    def check(self, fields: Iterable[str], separate: Iterable[str] = ()) -> None:
        """Open every column once. Raises DatasetError for the first that is missing or wrong."""
        for field in separate:
            self.shard_column(field)
        for name in COLUMNS:
            self.column(name)
        self.keys()
        for field in fields:
            for name in FIELD_COLUMNS:
                self.field_column(field, name)
            self.names(field)

    def digest(self, fields: Iterable[str]) -> str:
        """16 hex digits over the columns that decide which bytes and label a sample has."""
        digest = hashlib.blake2b(digest_size=8)
        columns = [self.column("shard"), self.column("label")]
        columns += [self.field_column(field, name) for field in fields for name in FIELD_COLUMNS]
        for column in columns:
            digest.update(column.data)
        return digest.hexdigest()

    def _fixed(self, name: str, dtype: str) -> npt.NDArray[Any]:
        array = self._mapped.get(name)
        if array is not None:
            return array
        with self._of_the_set():
            array = _map_npy(self.directory / f"{name}.npy", dtype)
            if len(array) != self.samples:
                raise DatasetError(
                    f"{self.directory / name}.npy: {len(array)} entries, dataset.json says {self.samples}; {REBUILD}"
                )
        self._mapped[name] = array
        return array

    def _strings(self, name: str) -> Strings:
        if name in self._texts:
            return self._texts[name]
        with self._of_the_set():
            blob = _map_npy(self.directory / f"{name}.npy", "|u1")
            offsets = _map_npy(self.directory / f"{name}.offset.npy", "<u8")
            if len(offsets) != self.samples + 1:
                raise DatasetError(
                    f"{self.directory / name}.offset.npy: {len(offsets)} entries, expected {self.samples + 1}; "
                    f"{REBUILD}"
                )
            try:
                texts = Strings(blob, offsets)
            except DatasetError as error:
                raise DatasetError(f"{self.directory / name}.npy: {error}") from error
        self._texts[name] = texts
        return texts

    @contextmanager
    def _of_the_set(self) -> Iterator[None]:
        """Around the opening of columns: what they are, or what is wrong with them, counts in an unchanged set only."""
        try:
            yield
        finally:
            if self.check_set is not None:
                self.check_set()


# The header as numpy.save writes it for one dimension. NumPy's own parser compiles it as Python, which bytes from
# outside do not deserve, and which fails in a process forked while another thread was compiling (CPython gh-106905).
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(rb"\{'descr': '([<|][a-z]\d)', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n")


def _map_npy(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Map a one-dimensional .npy of a known dtype. Raises DatasetError where its header is not true of the file."""
    try:
        with open_regular(path) as file:
            magic, length = file.read(len(_MAGIC)), int.from_bytes(file.read(2), "little")
            if magic != _MAGIC:
                raise ValueError(f"it starts with {magic!r}, expected {_MAGIC!r}")
            header = _HEADER.fullmatch(file.read(length))
            if header is None:
                raise ValueError("its header is not that of a one-dimensional array")
            start, samples = file.tell(), int(header[2])
            size = os.fstat(file.fileno()).st_size
            expected = np.dtype(dtype)
            if header[1].decode() != expected.str:
                raise ValueError(f"dtype {header[1].decode()}, expected {expected.str}")
            if start + samples * expected.itemsize != size:
                raise ValueError(f"{size} bytes, its header says {start + samples * expected.itemsize}")
            if samples == 0:
                return np.zeros(0, expected)
            view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: missing index column; {REBUILD}") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not the index column it should be: {error}") from error
    return np.frombuffer(view, expected, count=samples, offset=start)
