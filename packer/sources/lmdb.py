"""An LMDB environment: a value for each image, under its key. A directory with data.mdb, or such a file itself.

    Datum    a caffe.Datum: its label, and its image, encoded or as pixels, which become PNG
    bytes    the image itself; its key is its name, and the folders in the keys are splits and classes as in a tree

The first value that is either says which layout it is. Samples come in the order of their keys.

The file is a B+ tree of pages (mdb.c of LMDB 0.9, data version 1, little-endian, 64 bits):

    page     u64 number · u16 · u16 flags · u16 lower, u16 upper (u32 pages of a large value) · u16 places of nodes
    meta     page header · u32 0xbeefc0de · u32 version · u64 · u64 · table of free pages · main table · u64 last page ·
             u64 transaction; pages 0 and 1 are metas, and the one of the later transaction counts
    table    u32 page size · u16 · u16 depth · u64 × 3 · u64 entries · u64 root page
    node     u16 low, u16 high of a size or a page · u16 flags · u16 key size · key · value, or the page of a large one

It is read here and not by liblmdb, which trusts what it maps: one wrong byte makes it abort or fault. So each page and
range is checked, nothing is written or locked, and workers share nothing.

A Datum is a protocol buffer (caffe.proto): 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded. Its
pixels are uint8 [channels, height, width], blue first, as OpenCV has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np

from cache.errors import BadSampleError, FormatError, SourceError
from packer.formats.base import Arena, png_of
from packer.formats.tfrecord import varint_at
from packer.registry import HEAD_BYTES
from packer.sources.base import FileSource, ListingBuilder, SourceListing, check_names
from packer.sources.folder import ArchiveMember, inner_name, list_members
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile
from readers.headers import foreign_medium, sniff
from readers.opening.tree import SPLIT_NAMES
from readers.table import NO_LABEL, Buffer

__all__ = ["LmdbSource"]

_PAGE = Struct("<8x2xHHH")  # flags, lower, upper
_META = Struct("<16xII16xI76xQQQQ")  # magic, version, page size, entries, root, last page, transaction
_NODE = Struct("<HHHH")
_NUMBER = Struct("<Q")
_MAGIC, _VERSION, _NO_PAGE = 0xBEEFC0DE, 1, (1 << 64) - 1
_HEADER_BYTES = 16
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_LARGE, _OTHER = 1, 6  # of a node: its value has pages of its own; it is a table, or one of several values of a key
_LOOKED_AT = 100
_PEEK_BYTES = 64
_MAX_VALUE_BYTES = 1 << 31


class _Value(NamedTuple):
    key: bytes
    offset: int
    length: int


class _Environment:
    """The values of the main table of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = PlainFile(path)
        self._size = path.stat().st_size
        self.left_out: list[tuple[str, str]] = []
        self._page_bytes = 4096
        first = self._meta(0)
        self._page_bytes = first[0] if first else 0
        if not 256 <= self._page_bytes <= 1 << 16 or self._page_bytes & (self._page_bytes - 1):
            raise SourceError(
                f"{path}: not an LMDB environment of version {_VERSION} and little-endian 64 bits, or damaged; write "
                f"it again with  mdb_dump  and  mdb_load"
            )
        metas = [meta for meta in (first, self._meta(self._page_bytes)) if meta]
        _, self.entries, self._root, last, _ = max(metas, key=lambda meta: meta[4])
        if (last + 1) * self._page_bytes > self._size:
            raise SourceError(
                f"{path}: has {self._size} bytes, but its pages need {(last + 1) * self._page_bytes}: truncated?"
            )

    def _meta(self, offset: int) -> tuple[int, int, int, int, int] | None:
        """(page size, entries, root, last page, transaction) of a meta page; None where there is none."""
        if offset + _META.size > self._size:
            return None
        magic, version, page_bytes, entries, root, last, transaction = _META.unpack(self.read(offset, _META.size))
        is_meta = magic == _MAGIC and version == _VERSION
        return (page_bytes, entries, root, last, transaction) if is_meta else None

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file. Raises SourceError where they lie outside."""
        if offset + length > self._size or length > _MAX_VALUE_BYTES:
            raise SourceError(f"{self._path}: {length} bytes at {offset} are outside the file, or too many: damaged")
        data = bytearray(length)
        self._file.read_into(offset, memoryview(data))
        return bytes(data)

    def values(self) -> Iterator[_Value]:
        """Every value, in the order of keys. Raises SourceError for a tree that is damaged."""
        seen = set[int]()
        ahead = [self._root] if self._root != _NO_PAGE else []
        while ahead:
            number = ahead.pop()
            if number in seen:
                raise self._damaged(number, "is in its tree twice")
            seen.add(number)
            page = self.read(number * self._page_bytes, self._page_bytes)
            flags, lower, _ = _PAGE.unpack_from(page)
            if flags & (_BRANCH | _LEAF) not in (_BRANCH, _LEAF) or not _HEADER_BYTES <= lower <= len(page):
                raise self._damaged(number, f"has the flags {flags:#x} and ends at {lower}")
            nodes = [self._node(page, number, i) for i in range(_HEADER_BYTES, lower - 1, 2)]
            if flags & _BRANCH:
                ahead += [low | high << 16 | more << 32 for low, high, more, _, _ in reversed(nodes)]
            else:
                yield from self._leaf(page, number, nodes)

    def _node(self, page: bytes, number: int, place: int) -> tuple[int, int, int, bytes, int]:
        """(low, high, flags, key, where the value begins in the page) of a node."""
        at = int.from_bytes(page[place : place + 2], "little")
        if not _HEADER_BYTES <= at <= len(page) - _NODE.size:
            raise self._damaged(number, f"has a node at {at}")
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        start = at + _NODE.size + key_bytes
        if start > len(page):
            raise self._damaged(number, f"has a key of {key_bytes} bytes at {at}")
        return low, high, flags, page[at + _NODE.size : start], start

    def _leaf(self, page: bytes, number: int, nodes: list[tuple[int, int, int, bytes, int]]) -> Iterator[_Value]:
        for low, high, flags, key, start in nodes:
            length = low | high << 16
            if flags & _OTHER:
                self.left_out.append((_text(key), "a database in the environment, or a key of several values"))
            elif not flags & _LARGE:
                if start + length > len(page):
                    raise self._damaged(number, f"has a value of {length} bytes at {start}")
                yield _Value(key, number * self._page_bytes + start, length)
            else:
                if start + _NUMBER.size > len(page):
                    raise self._damaged(number, f"has no room for a page number at {start}")
                large = int(_NUMBER.unpack_from(page, start)[0]) * self._page_bytes
                if not _PAGE.unpack(self.read(large, _PAGE.size))[0] & _OVERFLOW:
                    raise self._damaged(large // self._page_bytes, "is not that of a large value")
                if large + _HEADER_BYTES + length > self._size:
                    raise self._damaged(number, f"has a value of {length} bytes, more than the file")
                yield _Value(key, large + _HEADER_BYTES, length)

    def _damaged(self, page: int, what: str) -> SourceError:
        return SourceError(f"{self._path}: page {page} {what}: damaged")

    def close(self) -> None:
        self._file.close()


class LmdbSource(FileSource):
    """The values of the environment at `root`."""

    kind = "LMDB environment"

    def __init__(self, root: str | os.PathLike[str], layout: str = "auto") -> None:
        super().__init__(root)
        self.layout = layout
        self.file = self.root / "data.mdb" if self.root.is_dir() else self.root
        self._is_datum = False

    def list_file(self, split: str | None) -> SourceListing:
        with closing(_Environment(self.file)) as environment:
            self._is_datum = _holds_datums(environment, self.root)
            environment.left_out.clear()
            listing = self._list_datums(environment, split) if self._is_datum else self._list_files(environment, split)
        listing.left_out += environment.left_out
        return listing

    def _list_datums(self, environment: _Environment, split: str | None) -> SourceListing:
        builder = ListingBuilder()
        for value in environment.values():
            try:
                datum = _parse(environment, value)
                label, size = datum.label, datum.length
            except FormatError:  # the worker says what is wrong with it
                label, size = NO_LABEL, value.length
            builder.add([""], tuple(value)[1:], size, key=_text(value.key), label=label)
        part = builder.build()
        check_names(part.keys, str(self.root))
        return SourceListing({split or split_of_name(self.root.name): part}, {"image": "image"})

    def _list_files(self, environment: _Environment, split: str | None) -> SourceListing:
        left_out: list[tuple[str, str]] = []
        members: list[ArchiveMember] = []
        for value in environment.values():
            name, reason = inner_name(_text(value.key))
            if reason:
                left_out.append((_text(value.key), reason))
            else:
                members.append(ArchiveMember(name, value.length, tuple(value)[1:]))
        if split is None and not any(member.name.partition("/")[0] in SPLIT_NAMES for member in members):
            split = split_of_name(self.root.name)
        return list_members(members, split, self.root, left_out, self.layout, by_position=False)

    @contextmanager
    def open_file(self) -> Iterator[LmdbReader]:
        with closing(_Environment(self.file)) as environment:
            yield LmdbReader(environment, self._is_datum)


class LmdbReader:
    """Reads the values of one environment."""

    def __init__(self, environment: _Environment, is_datum: bool) -> None:
        self._environment, self._is_datum = environment, is_datum

    def read(self, place: tuple[int, int], arena: Arena) -> Sequence[Buffer]:
        if not self._is_datum:
            return (self._environment.read(*place),)
        try:
            datum = _parse(self._environment, _Value(b"", *place))
            return (datum.image(self._environment.read(datum.offset, datum.length)),)
        except FormatError as error:
            raise BadSampleError(f"is not a Datum with an image: {error}") from error

    def head(self, place: tuple[int, int]) -> bytes:
        return self._environment.read(place[0], min(place[1], HEAD_BYTES))


def _holds_datums(environment: _Environment, root: Path) -> bool:
    """Whether the values are Datums, by the first that is one or an image."""
    empty = True
    for number, value in enumerate(environment.values()):
        empty = False
        head = environment.read(value.offset, min(value.length, HEAD_BYTES))
        if sniff(head) or foreign_medium(head):
            return False
        try:
            if _parse(environment, value).length:
                return True
        except FormatError:
            pass
        if number >= _LOOKED_AT:
            break
    if empty:
        raise SourceError(f"{root}: holds no values")
    return False


def _text(key: bytes) -> str:
    """A key as text; one that is not UTF-8 in hexadecimal."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.hex()


class _Datum(NamedTuple):
    """A Datum, whose data are `length` bytes at `offset` of the file."""

    channels: int
    height: int
    width: int
    label: int
    encoded: bool
    offset: int
    length: int

    def image(self, data: bytes) -> bytes:
        """The encoded image; pixels as PNG, which is lossless. Raises FormatError."""
        if self.encoded or sniff(data):
            return data
        if self.channels not in (1, 3) or self.channels * self.height * self.width != len(data):
            raise FormatError(
                f"it has {len(data)} bytes of pixels, expected {self.channels} x {self.height} x {self.width} with 1 "
                f"or 3 channels"
            )
        planes = np.frombuffer(data, np.uint8).reshape(self.channels, self.height, self.width)
        return png_of(planes[::-1].transpose(1, 2, 0))


def _parse(environment: _Environment, value: _Value) -> _Datum:
    """A caffe.Datum, without a look at its data. Raises FormatError where the bytes are not one with data."""
    numbers = {1: 0, 2: 0, 3: 0, 5: NO_LABEL, 7: 0}
    data: tuple[int, int] | None = None
    position, end = value.offset, value.offset + value.length
    while position < end:
        peek = memoryview(environment.read(position, min(_PEEK_BYTES, end - position)))
        tag, start = varint_at(peek, 0, len(peek))
        number, wire = tag >> 3, tag & 7
        if number in numbers and wire == 0:
            numbers[number], start = varint_at(peek, start, len(peek))
            position += start
        elif number == 4 and wire == 2:
            length, start = varint_at(peek, start, len(peek))
            if length > end - position - start:
                raise FormatError(f"its data has {length} bytes, more than are left")
            data, position = (position + start, length), position + start + length
        elif number == 6:
            raise FormatError("its data are floating-point numbers, not an image")
        else:
            raise FormatError(f"a Datum has no field {number} of wire type {wire}")
    if data is None:
        raise FormatError("it has no data")
    label = numbers[5] - (1 << 64) if numbers[5] >= 1 << 63 else numbers[5]
    if not NO_LABEL <= label < 1 << 31:
        raise FormatError(f"its label is {label}, expected 0 to 2^31")
    return _Datum(numbers[1], numbers[2], numbers[3], label, bool(numbers[7]), *data)
