"""An LMDB environment with one value per image: a directory with data.mdb, or such a file.

    Datum    a caffe.Datum: its label, and its image, encoded or as pixels, which become PNG
    bytes    the image itself; its key is its name, and the folders in the keys are splits and classes as in a tree

The first recognised value decides the layout. Samples come in the order of their keys; a place is a key.

liblmdb trusts the file that it maps, so a wrong byte may crash the process; the source is `isolated`. Nothing is
written or locked.

A Datum is a protocol buffer (caffe.proto): 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded. Its
pixels are uint8 [channels, height, width], blue first, as in OpenCV.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cache.errors import BadSampleError, FormatError, MissingExtraError, SourceError
from packer.formats.base import Arena, png_of
from packer.formats.tfrecord import varint_at
from packer.registry import HEAD_BYTES
from packer.sources.base import FileSource, ListingBuilder, ObjectPlaces, SourceListing, check_names
from packer.sources.folder import ArchiveMember, inner_name, list_members
from packer.sources.shards import split_of_name
from readers.headers import foreign_medium, sniff
from readers.opening.tree import SPLIT_NAMES
from readers.table import NO_LABEL, Buffer

__all__ = ["LmdbSource"]

_Value: TypeAlias = "tuple[bytes, memoryview]"
_LOOKED_AT = 100
_TABLE_BYTES = 48  # of a value that is a database in the environment
_MAX_DATABASES = 1024


class LmdbSource(FileSource):
    """The values of the environment at `root`."""

    kind = "LMDB environment"
    isolated = True

    def __init__(self, root: str | os.PathLike[str], layout: str = "auto") -> None:
        super().__init__(root)
        self.layout = layout
        self.file = self.root / "data.mdb" if self.root.is_dir() else self.root
        self._is_datum = False

    def list_files(self, split: str | None) -> SourceListing:
        self.note(self.file)
        split_name = split or split_of_name(self.root.name)
        left_out: list[tuple[str, str]] = []
        with self._opened() as (transaction, environment):
            self._is_datum = self._holds_datums(_values(transaction, environment, []))
            values = _values(transaction, environment, left_out)
            if not self._is_datum:
                return self._list_files(values, split, split_name, left_out)
            return self._list_datums(values, split_name, left_out)

    def _list_datums(self, values: Iterator[_Value], split: str, left_out: list[tuple[str, str]]) -> SourceListing:
        builder = ListingBuilder()
        for key, value in values:
            try:
                datum = _Datum.parse(value)
                label, size = datum.label, len(datum.data)
            except FormatError:  # the worker reports the problem
                label, size = NO_LABEL, len(value)
            builder.add([""], key, size, key=_text(key), label=label)
        part = builder.build()
        check_names(part.keys, str(self.root))
        return SourceListing({split: part}, {"image": "image"}, left_out=left_out)

    def _list_files(
        self, values: Iterator[_Value], split: str | None, split_name: str, left_out: list[tuple[str, str]]
    ) -> SourceListing:
        keys: list[bytes] = []
        members: list[ArchiveMember] = []
        for key, value in values:
            name, reason = inner_name(_text(key))
            if reason:
                left_out.append((_text(key), reason))
            else:
                members.append(ArchiveMember(name, len(value), (len(keys),)))
                keys.append(key)
        has_splits = any(member.name.partition("/")[0] in SPLIT_NAMES for member in members)
        listing = list_members(members, split if has_splits else split_name, self.root, left_out, self.layout)
        for part in listing.splits.values():
            part.places = ObjectPlaces.of(keys[number] for (number,) in part.places)
        return listing

    def _holds_datums(self, values: Iterator[_Value]) -> bool:
        """Whether the values are Datums, decided by the first Datum or image."""
        number = -1
        for number, (_, value) in enumerate(values):
            if sniff(value) or foreign_medium(value) or number > _LOOKED_AT:
                return False
            try:
                return bool(_Datum.parse(value))
            except FormatError:
                continue
        if number < 0:
            raise SourceError(f"{self.root}: has no values")
        return False

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """(transaction, environment), read only."""
        try:
            import lmdb
        except ImportError as error:
            raise MissingExtraError("lmdb", "lmdb", "reading an LMDB environment") from error
        path, is_folder = os.fspath(self.root), self.root.is_dir()
        try:
            options: dict[str, Any] = {"readonly": True, "lock": False, "readahead": False, "max_dbs": _MAX_DATABASES}
            environment = lmdb.open(path, subdir=is_folder, **options)
            with environment, environment.begin(buffers=True) as transaction:
                yield transaction, environment
        except lmdb.Error as error:
            raise SourceError(f"{self.root}: not an LMDB environment, truncated or damaged: {error}") from error

    @contextmanager
    def open_files(self) -> Iterator[LmdbReader]:
        with self._opened() as (transaction, _):
            yield LmdbReader(transaction, self._is_datum)


class LmdbReader:
    """Reads the values of one environment."""

    def __init__(self, transaction: Any, is_datum: bool) -> None:
        self._transaction, self._is_datum = transaction, is_datum

    def read(self, place: bytes, arena: Arena) -> Sequence[Buffer]:
        value = self._transaction.get(place)
        if value is None:
            raise BadSampleError("is no longer there")
        if not self._is_datum:
            return (bytes(value),)
        try:
            return (_Datum.parse(value).image(),)
        except FormatError as error:
            raise BadSampleError(f"is not a Datum with an image: {error}") from error

    def head(self, place: bytes) -> bytes:
        return bytes(self._transaction.get(place, b"")[:HEAD_BYTES])


def _values(transaction: Any, environment: Any, left_out: list[tuple[str, str]]) -> Iterator[_Value]:
    """Every key and its value, in order; databases and repeated keys are left out."""
    import lmdb

    flags = environment.open_db(None, transaction).flags(transaction)
    has_several, is_sorted, last = flags["dupsort"], not (flags["reverse_key"] or flags["integerkey"]), b""
    cursor = transaction.cursor()
    for key, value in cursor.iternext_nodup(keys=True, values=True):
        key, is_value = bytes(key), not has_several or cursor.count() == 1
        if is_sorted and key <= last:
            raise SourceError(f"{environment.path()}: its keys are not in order: damaged")
        last = key
        if is_value and len(value) == _TABLE_BYTES:
            with suppress(lmdb.Error):
                environment.open_db(key, transaction, create=False)
                is_value = False
        if is_value:
            yield key, value
        else:
            left_out.append((_text(key), "a nested database, or a key with several values"))


def _text(key: bytes) -> str:
    """A key as text, or in hexadecimal if it is not UTF-8."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.hex()


class _Datum(NamedTuple):
    channels: int
    height: int
    width: int
    label: int
    is_encoded: bool
    data: memoryview

    @classmethod
    def parse(cls, value: memoryview) -> _Datum:
        """Parse a caffe.Datum. Raises FormatError if the bytes are not one with data."""
        numbers = {1: 0, 2: 0, 3: 0, 5: NO_LABEL, 7: 0}
        data: memoryview | None = None
        position = 0
        while position < len(value):
            tag, position = varint_at(value, position, len(value))
            number, wire = tag >> 3, tag & 7
            if number in numbers and wire == 0:
                numbers[number], position = varint_at(value, position, len(value))
            elif number == 4 and wire == 2:
                length, position = varint_at(value, position, len(value))
                data = value[position : position + length]
                if len(data) < length:
                    raise FormatError(f"its data has {length} bytes, more than are left")
                position += length
            elif number == 6:
                raise FormatError("its data are floating-point numbers, not an image")
            else:
                raise FormatError(f"a Datum has no field {number} of wire type {wire}")
        if not data:
            raise FormatError("it has no data")
        label = numbers[5] - (1 << 64) if numbers[5] >= 1 << 63 else numbers[5]
        if not NO_LABEL <= label < 1 << 31:
            raise FormatError(f"its label is {label}, expected 0 to 2^31")
        return cls(numbers[1], numbers[2], numbers[3], label, bool(numbers[7]), data)

    def image(self) -> bytes:
        """The encoded image; pixels as PNG. Raises FormatError."""
        if self.is_encoded or sniff(self.data):
            return bytes(self.data)
        shape = (self.channels, self.height, self.width)
        if self.channels not in (1, 3) or self.channels * self.height * self.width != len(self.data):
            raise FormatError(f"it has {len(self.data)} bytes of pixels, expected {shape} with 1 or 3 channels")
        return png_of(np.frombuffer(self.data, np.uint8).reshape(shape)[::-1].transpose(1, 2, 0))
