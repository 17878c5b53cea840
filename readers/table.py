"""Tables: the metadata of n samples without their bytes, that is keys, labels, classes, image headers and byte ranges.

A table consists of columns and, for a selection or another order, the numbers of the selected rows:

    packed     columns of an index, memory-mapped                 readers.opening.packed
    folder     columns of a scan                                  readers.opening.tree
    in memory  columns of any other source                        Table.of(…)
    take       a selection of rows: 8 bytes per sample
    concat     several tables in sequence

`take` copies no columns. A row has the same number in every table over the same columns, so a cache below a selection
keeps the same samples as a cache below the whole set.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import itertools
import math
import mmap
import operator
import os
import re
import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, DatasetError, StaleIndexError, UnknownNameError
from cache.files import open_regular
from cache.stores import Buffer as Buffer
from cache.stores import Extents, Int64s
from cache.stores.base import Payloads

# A column of strings: one UTF-8 blob and n + 1 offsets, so that a billion keys are two mapped files.
#
#     blob     uint8  [total bytes]   the concatenated strings, UTF-8, without terminators
#     offsets  uint64 [n + 1]         string i is blob[offsets[i]:offsets[i + 1]]


_BLOCK = 4096
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Strings")


class LazySequence(Sequence[_T]):
    """A read-only sequence whose items are built on access; equal to any sequence of the same items.

    A subclass defines `__len__`, and `_at` or `_between` or both.
    """

    __slots__ = ()

    def _at(self, number: int) -> _T:
        """Item `number`, 0 <= number < len."""
        return next(self._between(number, number + 1))

    def _between(self, first: int, stop: int) -> Iterator[_T]:
        """The items [first, stop)."""
        return map(self._at, range(first, stop))

    def __iter__(self) -> Iterator[_T]:
        return self._between(0, len(self))

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        n = len(self)
        if isinstance(index, slice):
            first, stop, step = index.indices(n)
            numbers = range(first, stop, step)
            return list(self._between(first, max(first, stop)) if step == 1 else map(self._at, numbers))
        if not -n <= index < n:
            raise IndexError(f"index {index} is outside the {n} items")
        return self._at(index + n if index < 0 else index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class Strings(LazySequence[str]):
    """A read-only sequence of strings over a blob and its offsets, each decoded on access.

    Raises DatasetError if the offsets are not ascending, or are outside the blob.
    """

    __slots__ = ("blob", "offsets")
    _errors: ClassVar[str] = "strict"

    def __init__(self, blob: npt.NDArray[np.uint8], offsets: npt.NDArray[np.uint64]) -> None:
        if len(offsets) == 0:
            raise DatasetError("a string column needs at least one offset, found none")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(blob):
            raise DatasetError(
                f"string offsets must run from 0 to the blob's {len(blob)} bytes, "
                f"found {int(offsets[0])} to {int(offsets[-1])}"
            )
        self.blob = blob
        self.offsets = offsets

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """A column from Python strings. Raises UnicodeEncodeError for lone surrogates (names that are not UTF-8)."""
        encoded = [text.encode("utf-8", cls._errors) for text in strings]
        offsets = np.zeros(len(encoded) + 1, np.uint64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _at(self, number: int) -> str:
        start, stop = int(self.offsets[number]), int(self.offsets[number + 1])
        if not start <= stop <= len(self.blob):
            raise DatasetError(
                f"string {number} has the offsets {start} to {stop}, outside the blob of {len(self.blob)}"
            )
        try:
            return str(self.blob[start:stop].tobytes(), "utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise DatasetError(f"string {number} is not UTF-8: {error}") from error

    def _between(self, first: int, stop: int) -> Iterator[str]:
        """The strings [first, stop), a block of them in memory at a time."""
        bounds = self.offsets
        if len(bounds) > 2 and bool((bounds[first + 1 : stop + 1] < bounds[first:stop]).any()):
            raise DatasetError("the offsets of a string column are not ascending")
        for start in range(first, stop, _BLOCK):
            part = bounds[start : min(start + _BLOCK, stop) + 1].tolist()
            base = part[0]
            data = self.blob[base : part[-1]].tobytes()
            if data.isascii():
                text = data.decode("ascii")
                for begin, end in itertools.pairwise(part):
                    yield text[begin - base : end - base]
                continue
            for begin, end in itertools.pairwise(part):
                try:
                    yield str(data[begin - base : end - base], "utf-8", self._errors)
                except UnicodeDecodeError as error:
                    raise DatasetError(f"a string of this column is not UTF-8: {error}") from error

    def take(self: _S, indices: npt.NDArray[Any]) -> _S:
        """The strings at `indices` (int64 [k]) as a new column."""
        offsets = np.zeros(len(indices) + 1, np.uint64)
        for first in range(0, len(indices), _BLOCK):
            part = indices[first : first + _BLOCK]
            starts, stops = self.offsets[part], self.offsets[part + 1]
            if bool(((starts > stops) | (stops > len(self.blob))).any()):
                raise DatasetError(
                    f"the offsets of a string column are not ascending, or exceed its blob of {len(self.blob)} bytes"
                )
            offsets[first + 1 : first + len(part) + 1] = stops - starts
        np.cumsum(offsets, out=offsets)
        blob = np.empty(int(offsets[-1]), np.uint8)
        for first in range(0, len(indices), _BLOCK):
            starts = self.offsets[indices[first : first + _BLOCK]].astype(np.int64)
            bounds = offsets[first : first + len(starts) + 1].astype(np.int64)
            # byte j of the new blob comes from byte j + shift of the old one, where shift is constant per string
            shift = np.repeat(starts - bounds[:-1], np.diff(bounds))
            blob[bounds[0] : bounds[-1]] = self.blob[shift + np.arange(bounds[0], bounds[-1])]
        return type(self)(blob, offsets)

    def __repr__(self) -> str:
        shown = ", ".join(repr(text) for text in self[:3])
        return f"Strings([{shown}{', …' if len(self) > 3 else ''}], n={len(self)})"


class Names(Strings):
    """File names; lone surrogates, for bytes that are not UTF-8, are allowed."""

    __slots__ = ()
    _errors = "surrogatepass"


class NamesBuilder:
    """Builds a column of names by appending; uses at most an eighth more memory than the column."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._offsets = array("Q", (0,))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, name: str) -> None:
        """Add one name."""
        self._blob += name.encode("utf-8", "surrogatepass")
        self._offsets.append(len(self._blob))

    def extend(self, names: Sequence[str]) -> None:
        """Add a list of names."""
        start = len(self._blob)
        joined = "".join(names)
        if joined.isascii():
            self._blob += joined.encode("ascii")
            lengths = map(len, names)
        else:
            encoded = [name.encode("utf-8", "surrogatepass") for name in names]
            self._blob += b"".join(encoded)
            lengths = map(len, encoded)
        ends = itertools.accumulate(lengths, initial=start)
        next(ends)
        self._offsets.extend(ends)

    def extend_encoded(self, blob: bytes, lengths: bytes) -> None:
        """Add names in the form of `encoded`."""
        ends = np.cumsum(np.frombuffer(lengths, np.uint16), dtype=np.uint64)
        ends += np.uint64(len(self._blob))
        self._blob += blob
        self._offsets.frombytes(ends.tobytes())

    def encoded(self, first: int = 0, stop: int | None = None) -> tuple[bytes, bytes]:
        """The names [first, stop) in a form for another process: (UTF-8 bytes, uint16 lengths)."""
        offsets = self._offsets[first : None if stop is None else stop + 1]
        return bytes(self._blob[offsets[0] : offsets[-1]]), _lengths(np.frombuffer(offsets, np.uint64))

    def build(self) -> Names:
        """The column, as a view of the memory of this builder; do not append names while the column is in use."""
        return Names(np.frombuffer(self._blob, np.uint8), np.frombuffer(self._offsets, np.uint64))


def encoded(names: Names) -> tuple[bytes, bytes]:
    """Names of at most 65,535 bytes each for `NamesBuilder.extend_encoded`: (UTF-8 bytes, uint16 lengths)."""
    return names.blob.tobytes(), _lengths(names.offsets)


def _lengths(offsets: npt.NDArray[np.uint64]) -> bytes:
    return np.diff(offsets).astype(np.uint16).tobytes()


def repeated(strings: Callable[[], Iterable[str]], count: int) -> npt.NDArray[np.int64]:
    """The ascending positions, int64 [k], of strings that probably occur more than once; needs 8 bytes per string.

    Strings are compared by hash, and two different strings can have the same hash: compare them before raising.
    """
    hashes = np.fromiter(map(hash, strings()), np.int64, count)
    hashes.sort()
    doubles = hashes[1:][hashes[1:] == hashes[:-1]]
    if not len(doubles):
        return np.empty(0, np.int64)
    return np.flatnonzero(np.isin(np.fromiter(map(hash, strings()), np.int64, count), doubles))


NO_LABEL = -1


@dataclass(frozen=True, slots=True, repr=False)
class Sample:
    """One sample: its key, its label (None if it has none) and the bytes of each of its fields."""

    key: str
    label: int | None
    fields: Mapping[str, Buffer]

    @property
    def image(self) -> Buffer:
        """The encoded image: the field "image"."""
        return self.fields["image"]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(data):,} bytes" for name, data in self.fields.items())
        return f"Sample({self.key!r}, label={self.label}, {{{sizes}}})"

    def _repr_html_(self) -> str:
        return html_of(self)


class ImageInfo(NamedTuple):
    """Values from the header of each image; arrays [n]. Sizes are as stored, before EXIF orientation.

    media: position in `readers.headers.MEDIA`; process: low byte of the JPEG SOF marker (0xC0 baseline, 0xC2
    progressive, 0 for other media); orientation: EXIF's 1..8. All are 0 if the header cannot be read.
    """

    height: npt.NDArray[np.uint32]
    width: npt.NDArray[np.uint32]
    components: npt.NDArray[np.uint8]
    process: npt.NDArray[np.uint8]
    orientation: npt.NDArray[np.uint8]
    media: npt.NDArray[np.uint8]


def html_of(shown: object) -> str:
    """The HTML of a reader or a sample for notebooks. The notebook module is imported late, because it imports this
    module."""
    return str(importlib.import_module("readers.frameworks.notebook").html_of(shown))


def headers_of(images: Iterable[Buffer | None]) -> ImageInfo:
    """The header values of images; zeros for None and for unreadable headers, which raise their error on decoding."""
    from readers.headers import MEDIA, read_header

    facts = []
    for image in images:
        fact = (0, 0, 0, 0, 0, 0)
        with suppress(BadSampleError):
            if image is not None:
                header = read_header(image)
                fact = (*header[1:], MEDIA.index(header.media))
        facts.append(fact)
    columns = np.array(facts, np.int64).reshape(-1, len(ImageInfo._fields)).T
    dtypes = (np.uint32, np.uint32, np.uint8, np.uint8, np.uint8, np.uint8)
    return ImageInfo._make(column.astype(dtype) for column, dtype in zip(columns, dtypes, strict=True))


def upright_sides(info: ImageInfo) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(heights, widths) of the upright images, int64 [n]; 0 if the header cannot be read."""
    stored = np.array([info.height, info.width], np.int64)
    heights, widths = np.where(info.orientation >= 5, stored[::-1], stored)
    return heights, widths


# Columns: in memory, or as the index of a split, memory-mapped and never loaded as a whole.
#
# An index is one `.npy` file per column in `<split>.index/`:
#
#     shard.npy               uint32 [n]      position in the split's list of shards
#     <field>.shard.npy       uint32 [n]      the same for a field with separate shards (`separate` in dataset.json)
#     <field>.offset.npy      uint64 [n]      byte offset of the field in its shard; 2^64 - 1 if a sample lacks it
#     <field>.length.npy      uint64 [n]      bytes; 0 is legal
#     <field>.crc32c.npy      uint32 [n]      CRC32C (Castagnoli) of those bytes
#     <field>.name.npy        uint8  [bytes]  original file names, UTF-8, concatenated; see `encode_name`
#     <field>.name.offset.npy uint64 [n + 1]
#     label.npy               int64  [n]      class number from 0; -1 for none (the shards store label + label_offset)
#     key.npy                 uint8  [bytes]  keys, UTF-8, concatenated
#     key.offset.npy          uint64 [n + 1]
#     height.npy, width.npy   uint32 [n]      pixels as stored, before EXIF orientation; 0 if unknown
#     components.npy          uint8  [n]
#     process.npy             uint8  [n]      JPEG: low byte of the SOF marker (0xC0 baseline, 0xC2 progressive); else 0
#     orientation.npy         uint8  [n]      EXIF 1..8
#     media.npy               uint8  [n]      position in readers.headers.MEDIA
#
# All are little-endian, in C order, in NumPy's format 1.0 (numpy.lib.format). The time to open an index does not depend
# on the number of samples, and processes share its pages.


_C = TypeVar("_C", bound="Columns")
_I = TypeVar("_I", bound="Index")
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
    """The file names of an index with these fields. separate: fields with separate shards."""
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
    """The inverse of `encode_name`. Raises DatasetError for other texts."""
    if not stored:
        return ""
    if stored[0] not in "+=":
        raise DatasetError(f"the stored file name {stored!r:.80} of sample {key!r:.80} starts with neither + nor =")
    return key + stored[1:] if stored[0] == "+" else stored[1:]


class Columns(ABC):
    """Columns of n rows, each loaded on first use. They can be pickled; columns of files are pickled as paths.

    title: name of the set in messages: its directory or address, and the split.
    place: the directory or address, as an argument of commands.
    separate: fields with separate shards.
    kinds: kinds of fields (`readers.fields`), if known.
    has_headers, has_checksums: whether image headers and CRC32C values are known.
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
        """The column with a name of `COLUMNS`, or "<field>.<name>" with a name of FIELD_COLUMNS; length n."""

    @abstractmethod
    def keys(self) -> Strings: ...

    @abstractmethod
    def names(self, field: str) -> Strings:
        """The original file names of a field, as stored by `encode_name`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that identifies these columns."""

    @property
    def shard_bytes(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """Size of each shard in bytes."""
        return ()

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        """The column of a field with a name of `FIELD_COLUMNS`, length n."""
        return self.column(f"{field}.{name}")

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        """The shard number of a field for each sample, length n."""
        return self.column(f"{field}.shard" if field in self.separate else "shard")

    def with_kinds(self: _C, kinds: Mapping[str, str]) -> _C:
        """A copy of the columns with these kinds of fields."""
        other = copy.copy(self)
        other.kinds = kinds
        return other

    def shard_place(self, shard: int) -> str:
        """The name of a shard in messages."""
        return f"{self.place or self.title}, shard {shard}"

    def explained(self, error: Exception) -> Exception:
        """The exception to raise in place of `error`, which occurred while the set was opened or read."""
        return error

    def update(self, digest: Any) -> None:
        """Add the columns that determine the bytes and label of each sample, except the shards, to a digest."""
        digest.update(np.ascontiguousarray(self.column("label")).data)
        for field in self.fields:
            for name in FIELD_COLUMNS:
                digest.update(np.ascontiguousarray(self.field_column(field, name)).data)


def _dtype_of(name: str) -> str:
    """The dtype of a column with this name."""
    return COLUMNS.get(name) or (FIELD_COLUMNS | COLUMNS)[name.rpartition(".")[2]]


class MemoryColumns(Columns):
    """Columns in memory; missing columns are all 0, and missing labels are all -1.

    columns: arrays by name: names of `COLUMNS`, and "<field>.<name>" with names of FIELD_COLUMNS; "<field>.shard" for a
        field with separate shards.
    names: file names by field, as stored by `encode_name`.
    kinds: kinds of the fields, if known.
    shard_bytes: size of each shard; by default, the end of its last sample.

    Raises ValueError for a column of another length.
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
        self._columns = {name: np.ascontiguousarray(values, _dtype_of(name)) for name, values in columns.items()}
        for name, values in self._columns.items():
            if values.shape != (len(self._keys),):
                raise ValueError(f"column {name} has the shape {values.shape}, expected ({len(self._keys)},)")

    def __len__(self) -> int:
        return len(self._keys)

    def column(self, name: str) -> npt.NDArray[Any]:
        if name not in self._columns:
            unknown = NO_LABEL if name == "label" else 0
            return np.broadcast_to(np.array(unknown, _dtype_of(name)), (len(self),))
        return self._columns[name]

    def keys(self) -> Strings:
        return self._keys

    def names(self, field: str) -> Strings:
        if field not in self._names:
            self._names[field] = Strings(np.zeros(0, np.uint8), np.zeros(len(self) + 1, np.uint64))
        return self._names[field]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr((self.title, self.fields, self.classes)).encode(), digest_size=16)
        for column in (self._keys.blob, self._keys.offsets):
            digest.update(np.ascontiguousarray(column).data)
        self.update(digest)
        return digest.hexdigest()

    @property
    def shard_bytes(self) -> Sequence[int] | npt.NDArray[np.int64]:
        if self._shard_bytes is None:
            shards = [self.shard_column(field) for field in self.fields]
            sizes = np.zeros(max(int(shard.max(initial=0)) for shard in shards) + 1, np.int64)
            for field, shard in zip(self.fields, shards, strict=True):
                end = self.field_column(field, "offset").astype(np.int64) + self.field_column(field, "length")
                np.maximum.at(sizes, shard, np.where(end < 0, 0, end))
            self._shard_bytes = sizes.tolist()
        return self._shard_bytes


class Index(Columns):
    """The memory-mapped columns of one split, opened on first use; their lengths are checked against `samples`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        samples: int,
        fields: Iterable[str] = ("image",),
        separate: Iterable[str] = (),
    ) -> None:
        self.directory, self.samples = Path(directory), samples
        self.fields, self.separate = tuple(fields), tuple(separate)
        self._mapped: dict[str, npt.NDArray[Any]] = {}
        self._texts: dict[str, Strings] = {}

    def __len__(self) -> int:
        return self.samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}, "_texts": {}}

    def __copy__(self: _I) -> _I:
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__)
        return other

    def column(self, name: str) -> npt.NDArray[Any]:
        array = self._mapped.get(name)
        if array is None:
            with self._opening():
                array = self._map(name, _dtype_of(name), self.samples)
            self._mapped[name] = array
        return array

    def keys(self) -> Strings:
        return self._strings("key")

    def names(self, field: str) -> Strings:
        return self._strings(f"{field}.name")

    def fingerprint(self) -> str:
        """16 hex digits over the columns that determine the bytes and label of each sample."""
        digest = hashlib.blake2b(self.column("shard").data, digest_size=8)
        self.update(digest)
        return digest.hexdigest()

    def check(self) -> None:
        """Open every column once. Raises DatasetError for the first missing or damaged column."""
        for field in self.separate:
            self.shard_column(field)
        for name in COLUMNS:
            self.column(name)
        self.keys()
        for field in self.fields:
            for name in FIELD_COLUMNS:
                self.field_column(field, name)
            self.names(field)

    def check_set(self) -> None:
        """Called after a column was opened, or failed to open; raises if the set was replaced in the meantime."""

    def _strings(self, name: str) -> Strings:
        if name not in self._texts:
            with self._opening():
                blob = self._map(name, "|u1")
                offsets = self._map(f"{name}.offset", "<u8", self.samples + 1)
                try:
                    self._texts[name] = Strings(blob, offsets)
                except DatasetError as error:
                    raise DatasetError(f"{self.directory / name}.npy: {error}") from error
        return self._texts[name]

    def _map(self, name: str, dtype: str, entries: int | None = None) -> npt.NDArray[Any]:
        array = _map_npy(self.directory / f"{name}.npy", dtype)
        if entries is not None and len(array) != entries:
            raise DatasetError(
                f"{self.directory / name}.npy: {len(array)} entries, expected {entries} by dataset.json; {REBUILD}"
            )
        return array

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Wraps the opening of columns, because results and errors are only valid if the set was not replaced."""
        try:
            yield
        finally:
            self.check_set()


# NumPy's parser compiles the header as Python. This is unsafe for untrusted bytes, and it fails in a process that was
# forked while another thread was compiling (CPython gh-106905).
_NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTHS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}  # by the major version
_NPY_HEADER_BYTES = 10_000  # as numpy.load
_NPY_HEADER = re.compile(
    rb"\{\s*'descr'\s*:\s*'([<>=|]?(?:b1|[iu][1248]|f[248]|c8|c16))'\s*,\s*'fortran_order'\s*:\s*(True|False)\s*,"
    rb"\s*'shape'\s*:\s*\(((?:\d{1,18}, ?)*(?:\d{1,18},?)?)\)\s*,?\s*\}\s*"
)
_MOST_SIDES, _MAX_VALUES = 32, 1 << 31


def npy_header(data: Buffer) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """(dtype, whether in Fortran order, shape, offset of the values) of .npy bytes in the format of numpy.lib.format.

    Only dtypes of plain numbers and booleans are supported. Raises ValueError for others, and for other bytes.
    """
    if bytes(data[: len(_NPY_MAGIC)]) != _NPY_MAGIC:
        raise ValueError(f"the first bytes {bytes(data[: len(_NPY_MAGIC)])!r}, expected {_NPY_MAGIC!r}")
    layout = _NPY_LENGTHS.get(data[6]) if len(data) > 7 and data[7] == 0 else None
    if layout is None or len(data) < 8 + layout.size:
        raise ValueError(
            f"the version {bytes(data[6:8])!r} and {len(data)} bytes, expected 1.0, 2.0 or 3.0 and a header"
        )
    start, length = 8 + layout.size, layout.unpack_from(data, 8)[0]
    if length > min(_NPY_HEADER_BYTES, len(data) - start):
        raise ValueError(
            f"a header of {length:,} bytes, expected at most {min(_NPY_HEADER_BYTES, len(data) - start):,}"
        )
    header = bytes(data[start : start + length])
    match = _NPY_HEADER.fullmatch(header)
    if match is None:
        raise ValueError(f"the header {header!r:.120}, expected a dtype of plain numbers, an order and a shape")
    sides = tuple(map(int, match[3].replace(b" ", b"").rstrip(b",").split(b","))) if match[3] else ()
    if len(sides) > _MOST_SIDES:
        raise ValueError(f"a shape of {len(sides)} sides, expected at most {_MOST_SIDES}")
    return np.dtype(match[1].replace(b"|", b"=").decode()), match[2] == b"True", sides, start + length


def npy_layout(data: Buffer) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """As `npy_header`, with a check that the values fill the rest of the bytes exactly. Raises BadSampleError."""
    try:
        dtype, is_fortran, shape, start = npy_header(data)
        if math.prod(max(side, 1) for side in shape) > _MAX_VALUES:
            raise ValueError(f"the shape {list(shape)}, expected at most {_MAX_VALUES:,} values")
        size, expected = len(data) - start, math.prod(shape) * dtype.itemsize
        if size != expected:
            raise ValueError(f"{size:,} bytes of values, expected {expected:,} for {dtype} {list(shape)}")
    except ValueError as error:
        raise BadSampleError(f"not an array in .npy form: found {error}") from error
    return dtype, is_fortran, shape, start


def parse_npy(data: Buffer, copy: bool = True) -> npt.NDArray[Any]:
    """The array in .npy bytes, in native byte order. Raises BadSampleError.

    copy: whether to copy the values; if not, the array is a read-only view of the bytes if alignment, byte order and
        memory order allow it.
    """
    dtype, is_fortran, shape, start = npy_layout(data)
    flat = np.frombuffer(data, dtype, math.prod(shape), start)
    values = flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
    if dtype == np.bool_:  # bytes other than 0 and 1 are not valid booleans
        return np.asarray(values.view(np.uint8) != 0, order="C")
    if not copy and dtype.isnative and flat.flags.aligned and not is_fortran:
        values.flags.writeable = False
        return values
    return np.array(values, dtype.newbyteorder("="), order="C")


def _map_npy(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Map a one-dimensional .npy file of a known dtype. Raises DatasetError if the file is missing or different."""
    expected = np.dtype(dtype)
    try:
        with open_regular(path) as file:
            kind, _, shape, start = npy_header(file.read(4096))
            size = os.fstat(file.fileno()).st_size
            if kind != expected or len(shape) != 1:
                raise ValueError(f"found {kind} {list(shape)}, expected {expected} in one dimension")
            if start + shape[0] * expected.itemsize != size:
                raise ValueError(f"{size} bytes, its header says {start + shape[0] * expected.itemsize}")
            if not shape[0]:
                return np.zeros(0, expected)
            view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: missing index column; {REBUILD}") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not the index column it should be: {error}") from error
    return np.frombuffer(view, expected, count=shape[0], offset=start)


class Form(Protocol):
    """A conversion of stored images before they are handed out; see `readers.caching.form`."""

    @property
    def kind(self) -> str:
        """A short text that identifies the form; part of fingerprints and of the names of caches."""

    def info(self, original: ImageInfo) -> ImageInfo:
        """The header values of the converted images, from those of the originals."""

    def bytes(self, info: ImageInfo, original: Int64s) -> Int64s:
        """Estimated sizes of the converted images in bytes, int64 [n].

        info: their header values. original: sizes of the original images in bytes, int64 [n].
        """

    def passes(self, original: ImageInfo) -> Sequence[Any]:
        """The geometry of the conversion of each upright image, as a `readers.augment.geometry.Pass`."""


class Table:
    """The metadata of samples: all rows of `columns`, or some of them.

    rows: int64 [k], None for all; rows may repeat. forms: the conversions of images, in order.
    """

    def __init__(self, columns: Columns, rows: Int64s | None = None, forms: tuple[Form, ...] = ()) -> None:
        self.columns, self.rows, self.forms = columns, rows, forms
        self._labels: npt.NDArray[np.int64] | None = None
        self._by_hash: npt.NDArray[np.int64] | None = None  # sample numbers, sorted by the hashes of their keys
        self._fingerprint = ""
        if rows is None:
            self.labels  # noqa: B018  # read now: the files may be replaced by those of another set

    @classmethod
    def of(
        cls,
        keys: Sequence[str],
        labels: Sequence[int] | None = None,
        classes: Sequence[str] = (),
        sizes: Mapping[str, npt.ArrayLike] | None = None,
        title: str = "",
    ) -> Table:
        """A table in memory, for the samples of a custom store.

        keys: n names.
        labels: class numbers, -1 for none.
        classes: names of the classes.
        sizes: for each field, its size in bytes in each sample, -1 in a sample without the field. By default there is
            one field, "image", of unknown sizes (0).
        title: the name of the table in messages.
        """
        n = len(keys)
        sizes = {"image": np.zeros(n, np.int64)} if sizes is None else sizes
        columns: dict[str, npt.NDArray[Any]] = {"label": np.full(n, NO_LABEL) if labels is None else np.asarray(labels)}
        for field, values in sizes.items():
            length = np.asarray(values, np.int64)
            columns[f"{field}.length"] = np.maximum(length, 0)
            columns[f"{field}.offset"] = np.where(length < 0, np.uint64(ABSENT), np.uint64(0))
        return cls(MemoryColumns(keys, columns, tuple(sizes), tuple(classes), title=title))

    # --- columns ------------------------------------------------------------------------------------------------
    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields; "image" is the first one if it exists."""
        return self.columns.fields

    @property
    def main(self) -> str:
        """The default field: "image", or the first field of a set without images."""
        return "image" if "image" in self.fields or not self.fields else self.fields[0]

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each field (`readers.fields`), which says how its bytes are decoded."""
        return {name: name if name in ("image", "json") else "file" for name in self.fields} | dict(self.columns.kinds)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, also of those without samples, so that labels have the same meaning in a selection."""
        return self.columns.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [n]; NO_LABEL (-1) for samples without a label."""
        if self._labels is None:
            self._labels = self.column("label")
        return self._labels

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples, each decoded on access."""
        keys = self.columns.keys()
        return keys if self.rows is None else _ChosenStrings(keys, self.rows)

    @property
    def title(self) -> str:
        """The name of the set in messages."""
        of_all = self.columns.title
        return of_all if self.rows is None else f"{len(self):,} samples of {of_all}"

    @property
    def described(self) -> str:
        """The title and the number of samples, for messages."""
        return f"{self.title}, {len(self):,} samples" if self.rows is None else self.title

    @property
    def fingerprint(self) -> str:
        """A short text that identifies the data set, the selected samples, and their forms."""
        if not self._fingerprint:
            text = self.columns.fingerprint()
            if self.rows is not None:
                digest = hashlib.blake2b(text.encode() + b"\0", digest_size=16)
                digest.update(np.ascontiguousarray(self.rows, "<i8").data)
                text = digest.hexdigest()
            for form in self.forms:
                text = hashlib.blake2b(f"{text}\0{form.kind}".encode(), digest_size=16).hexdigest()
            self._fingerprint = text
        return self._fingerprint

    def column(self, name: str) -> npt.NDArray[Any]:
        """The column with a name of `readers.table.COLUMNS`, length n."""
        column = self.columns.column(name)
        return column if self.rows is None else column[self.rows]

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        """The column of a field with a name of `readers.table.FIELD_COLUMNS`, length n. Raises UnknownNameError."""
        self.number(field)
        column = self.columns.field_column(field, name)
        return column if self.rows is None else column[self.rows]

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        """The number of the shard with a field of each sample, length n. Raises UnknownNameError."""
        self.number(field)
        column = self.columns.shard_column(field)
        return column if self.rows is None else column[self.rows]

    def sizes(self, field: str = "") -> npt.NDArray[np.int64]:
        """Size of a field in each sample in bytes, int64 [n]; 0 in samples without it. Sizes of converted images are
        estimates."""
        field = field or self.main
        sizes: Int64s = self.field_column(field, "length").view("<i8")
        if field == "image" and self.columns.kinds.get(field) == "pixels":
            from readers.headers.base import PIXELS_HEADER_BYTES

            sizes = sizes + PIXELS_HEADER_BYTES  # readers hand pixels out with a header
        if field == "image" and self.forms:
            info = self.stored_headers(None)
            for form in self.forms:
                info = form.info(info)
                sizes = form.bytes(info, sizes)
        return sizes

    def headers(self, indices: Int64s | None) -> ImageInfo:
        """Header values of some images, or of all (None), after conversion. Only valid if `has_headers`."""
        info = self.stored_headers(indices)
        for form in self.forms:
            info = form.info(info)
        return info

    def stored_headers(self, indices: Int64s | None) -> ImageInfo:
        """As `headers`, before conversion."""
        columns = (self.columns.column(name) for name in ImageInfo._fields)
        rows = self.rows if indices is None else self.at(indices)
        return ImageInfo._make(column if rows is None else column[rows] for column in columns)

    @property
    def has_headers(self) -> bool:
        """Whether header values are known without reading images."""
        return self.columns.has_headers

    def names(self, field: str = "") -> Strings:
        """Original file names of a field, as stored by `readers.table.encode_name`."""
        field = field or self.main
        self.number(field)
        names = self.columns.names(field)
        return names if self.rows is None else names.take(self.rows)

    def name(self, index: int, field: str = "") -> str:
        """The name of the source file of a field, relative to the folder of the split; "" if it has none."""
        field = field or self.main
        self.number(field)
        row = self.row(index)
        return decode_name(self.columns.names(field)[row], self.columns.keys()[row])

    def number(self, field: str) -> int:
        """Position of a field. Raises UnknownNameError."""
        try:
            return self.fields.index(field)
        except ValueError:
            raise UnknownNameError(
                f"{self.columns.place or self.title}: no field {field!r}; it has {', '.join(self.fields)}"
            ) from None

    # --- extents ----------------------------------------------------------------------------------------
    def at(self, indices: Int64s) -> Int64s:
        """The rows of samples, int64 [k]. indices: sample numbers from 0."""
        return indices if self.rows is None else self.rows[indices]

    def find(self, key: str) -> int:
        """The number of the first sample with this key. Raises UnknownNameError.

        The first call builds an index of the keys, which needs 8 bytes per sample and is kept in this process.
        """
        keys, hashed = self.keys, hash(key)
        if self._by_hash is None:
            hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
            self._by_hash = hashes.argsort(kind="stable")
        start = bisect_left(self._by_hash.data, hashed, key=lambda number: hash(keys[number]))
        for number in self._by_hash.data[start:]:
            if keys[number] == key:
                return number
            if hash(keys[number]) != hashed:
                break
        example = f"; the first is {keys[0]!r}" if len(self) else ""
        raise UnknownNameError(f"{self.described}: no sample has the key {key!r}{example}")

    def row(self, index: int) -> int:
        """The row of one sample; a negative index counts from the end. Raises IndexError."""
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"sample {index} is outside the {n} of {self.title or 'this table'}")
        index = index + n if index < 0 else index
        return index if self.rows is None else int(self.rows[index])

    def extents(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "") -> Extents:
        """The extents of a field of some samples, in this order; stores check that they are inside a shard.

        Raises IndexError, UnknownNameError (unknown field, or a sample without it), DatasetError (unknown shard).
        """
        field = field or self.main
        number = self.number(field)
        rows = self.at(checked_indices(indices, self))
        shard = self.columns.shard_column(field)[rows].astype(np.int64)
        offset = self.columns.field_column(field, "offset")[rows].view(np.int64)
        length = self.columns.field_column(field, "length")[rows].view(np.int64)
        extents = Extents(Payloads(len(self.columns.fields)).number(rows, number), shard, offset, length)
        if len(rows):
            if int(shard.max()) >= len(self.columns.shard_bytes):
                raise self.no_such_shard(int(shard.max()))
            if offset.min() < 0:  # an absent field, or no valid offset
                self.check(extents, field)
        return extents

    def check(self, extents: Extents, field: str) -> None:
        """Check that all extents are inside their shards, by the sizes in dataset.json.

        Raises UnknownNameError for the first bad extent if the sample lacks the field, else StaleIndexError.
        """
        size = np.asarray(self.columns.shard_bytes, np.uint64)[extents.shard]
        offset, length = extents.offset.view(np.uint64), extents.length.view(np.uint64)
        bad = np.flatnonzero((length > size) | (offset > size - np.minimum(length, size)))
        if len(bad):
            i = int(bad[0])
            row = Payloads(len(self.columns.fields)).sample(int(extents.row[i]))
            raise self.bad_extent(row, field, int(offset[i]), int(length[i]), int(extents.shard[i]))

    def no_such_shard(self, shard: int) -> DatasetError:
        return DatasetError(
            f"{self.columns.place}: the index names shard {shard}, the split has {len(self.columns.shard_bytes)}; "
            f"rebuild it with  packer index"
        )

    def bad_extent(self, row: int, field: str, offset: int, length: int, shard: int) -> Exception:
        """The error for an extent outside its shard."""
        if offset == ABSENT:
            return UnknownNameError(f"sample {row} of {self.columns.place or self.title} has no field {field!r}")
        return StaleIndexError(
            f"{self.columns.shard_place(shard)}: the index puts sample {row} at bytes {offset} to {offset + length}, "
            f"but the shard has {self.columns.shard_bytes[shard]}; rebuild the index with  packer index"
        )

    # --- other tables -------------------------------------------------------------------------------------------
    def take(self, indices: npt.ArrayLike) -> Table:
        """The samples at `indices`, in this order. Indices may repeat; negative ones count from the end.

        A read-only memory map (numpy.load(path, mmap_mode="r")) stays mapped and is pickled as its path. Raises
        IndexError, ValueError.
        """
        chosen = checked_indices(indices, self)
        return Table(self.columns, chosen if self.rows is None else self.rows[chosen], self.forms)

    def with_kinds(self, kinds: Mapping[str, str]) -> Table:
        """The same samples, with other kinds of some fields. Raises UnknownNameError."""
        checked = {self.fields[self.number(name)]: kind for name, kind in kinds.items()}
        return Table(self.columns.with_kinds(self.kinds | checked), self.rows, self.forms)

    def __len__(self) -> int:
        return len(self.columns) if self.rows is None else len(self.rows)

    def __repr__(self) -> str:
        return f"Table({self.described})"

    def __getstate__(self) -> dict[str, Any]:
        rows = None if self.rows is None else _mapped_file(self.rows) or self.rows
        return {"columns": self.columns, "rows": rows, "forms": self.forms}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        if isinstance(rows, tuple):
            path, offset, count = rows
            try:
                rows = np.memmap(path, np.int64, "r", offset, (count,))
            except (OSError, ValueError) as error:
                raise StaleIndexError(
                    f"{path}: the indices of a selection cannot be mapped any more: {error}"
                ) from error
        self.__init__(state["columns"], rows, state["forms"])  # type: ignore[misc]


def checked_indices(indices: npt.ArrayLike, samples: Any) -> npt.NDArray[np.int64]:
    """Indices as int64 [k] from 0; negative indices count from the end. Raises ValueError and IndexError."""
    array = np.asanyarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"indices must be integers in one dimension, found {array.dtype} {list(array.shape)}")
    if array.dtype != np.int64:
        array = array.astype(np.int64)
    n = len(samples)
    if array.size and (int(array.min()) < -n or int(array.max()) >= n):
        raise IndexError(f"indices {array.min()} to {array.max()} are not all inside the samples of {samples}")
    if array.size and int(array.min()) < 0:
        array = np.where(array < 0, array + n, array)
    return array


class _ChosenStrings(LazySequence[str]):
    """The strings of some rows of a column, each decoded on access."""

    def __init__(self, strings: Strings, rows: Int64s) -> None:
        self._strings, self._rows = strings, rows

    def __len__(self) -> int:
        return len(self._rows)

    def _at(self, number: int) -> str:
        return self._strings[int(self._rows[number])]

    def _between(self, first: int, stop: int) -> Iterator[str]:
        for start in range(first, stop, _BLOCK):
            yield from self._strings.take(self._rows[start : min(start + _BLOCK, stop)])


def _mapped_file(rows: npt.NDArray[np.int64]) -> tuple[str, int, int] | None:
    """(path, offset, entries) of a whole read-only memory map of a file; None for any other array, also for a part of
    a map."""
    if not isinstance(rows, np.memmap) or rows.mode != "r" or not isinstance(rows.base, mmap.mmap):
        return None
    return str(rows.filename), rows.offset, len(rows)
