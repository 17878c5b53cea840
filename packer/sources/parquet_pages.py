"""The pages of a Parquet file, before they are unpacked: how much memory reading some rows takes.

A footer may say anything of its row groups, and a page of a few bytes may unpack to 2 GiB. So the header of every page
is read before its row group is. Rows are then read a batch at a time, of as many as fit into memory: the values of a
row are in a page, or, where they are numbers of entries in a dictionary, in that. A page, or a dictionary, is unpacked
as a whole.

    column chunk     [dictionary page] data page, …; each is a header, and `compressed_page_size` bytes
    header           PageHeader in Thrift's compact protocol: 1 type, 2 uncompressed_page_size, 3 compressed_page_size,
                     5, 7 or 8 what is in the page, of which 1 is the number of values

(parquet.thrift of apache/parquet-format; the compact protocol is in Thrift's documentation.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cache.errors import FormatError, SourceError
from packer.formats.example import varint_at
from packer.sources.streams import PlainFile

__all__ = ["Page", "batch_rows", "pages_of"]

_DICTIONARY = 2
_BATCH_BYTES = 32 << 20
_DICTIONARY_BYTES = 256 << 20
_MAX_ROWS = 4096
_MAX_PAGE_BYTES = 1 << 30
_BOMB_BYTES, _BOMB_RATIO = 64 << 20, 1000  # images hardly shrink at all
_PEEK_BYTES, _MAX_HEADER_BYTES = 4096, 16 << 20
_MAX_DEPTH = 16
_BOOLEANS, _BYTE, _VARINTS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 11, 12


class Page(NamedTuple):
    """A page: whether it is a dictionary, its bytes packed and unpacked, and how many values it has."""

    is_dictionary: bool
    packed: int
    unpacked: int
    values: int


def batch_rows(file: PlainFile, group: Any, leaves: Iterable[int]) -> int:
    """How many rows of a row group (pyarrow's RowGroupMetaData) to read at a time, for these of its column chunks.

    Raises SourceError where a page unpacks to too much, or is not one.
    """
    rows = _MAX_ROWS
    for leaf in leaves:
        chunk = group.column(leaf)
        for page in pages_of(file, chunk):
            if page.unpacked > _MAX_PAGE_BYTES or (
                page.unpacked > _BOMB_BYTES and page.unpacked > _BOMB_RATIO * page.packed
            ):
                raise SourceError(
                    f"{file.path}: {chunk.path_in_schema}: a page of {page.packed:,} bytes unpacks to "
                    f"{page.unpacked:,}: a decompression bomb; images take pages of at most {_MAX_PAGE_BYTES:,} bytes"
                )
            if page.is_dictionary:
                rows = min(rows, _DICTIONARY_BYTES // max(1, page.unpacked))
            else:
                rows = min(rows, _BATCH_BYTES * max(1, page.values) // max(1, page.unpacked))
    return max(1, rows)


def pages_of(file: PlainFile, chunk: Any) -> Iterator[Page]:
    """The pages of a column chunk (pyarrow's ColumnChunkMetaData). Raises SourceError where they do not fill it."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    stop, size = start + chunk.total_compressed_size, file.path.stat().st_size
    if start < 4 or stop > size or chunk.num_values < 0:
        raise SourceError(
            f"{file.path}: {chunk.path_in_schema} claims bytes {start:,} to {stop:,} of {size:,}: truncated or damaged"
        )
    values = 0
    while start < stop and values < chunk.num_values:
        try:
            page, header = _page_at(file, start, stop)
        except FormatError as error:
            raise SourceError(f"{file.path}: {chunk.path_in_schema}: no page at byte {start:,}: {error}") from error
        start += header + page.packed
        if start > stop:
            raise SourceError(
                f"{file.path}: {chunk.path_in_schema}: a page ends at {start:,}, beyond {stop:,}: damaged"
            )
        values += 0 if page.is_dictionary else page.values
        yield page
    if values != chunk.num_values:
        raise SourceError(
            f"{file.path}: {chunk.path_in_schema} claims {chunk.num_values:,} values, its pages {values:,}: damaged"
        )


def _page_at(file: PlainFile, start: int, stop: int) -> tuple[Page, int]:
    """(page, bytes of its header). Raises FormatError."""
    length = _PEEK_BYTES
    while True:
        length = min(length, stop - start)
        data = memoryview(bytearray(length))
        file.read_into(start, data)
        try:
            return _parse(data)
        except FormatError:
            if length in (stop - start, _MAX_HEADER_BYTES):
                raise
        length = min(length * 16, _MAX_HEADER_BYTES)


def _parse(data: memoryview) -> tuple[Page, int]:
    numbers, end = _struct(data, 0)
    kind, unpacked, packed = (numbers.get((key,), -1) for key in (1, 2, 3))
    inside = {0: 5, 2: 7, 3: 8}.get(kind, 0)
    values = numbers.get((inside, 1), 0)
    if unpacked < 0 or packed < 0 or values < 0:
        raise FormatError(f"its header has the sizes {packed} and {unpacked}, and {values} values")
    return Page(kind == _DICTIONARY, packed, unpacked, values), end


def _struct(data: memoryview, position: int, above: tuple[int, ...] = ()) -> tuple[dict[tuple[int, ...], int], int]:
    """The whole numbers in a struct, by the numbers of their fields, and where it ends. Raises FormatError."""
    if len(above) > _MAX_DEPTH:
        raise FormatError("structs are nested too deep")
    found: dict[tuple[int, ...], int] = {}
    field = 0
    while True:
        head, position = _byte(data, position)
        if not head:
            return found, position
        kind, delta = head & 15, head >> 4
        if delta:
            field += delta
        else:
            field, position = _zigzag(data, position)
        key = (*above, field)
        if kind == _STRUCT:
            inner, position = _struct(data, position, key)
            found |= inner
        elif kind in _VARINTS:
            found[key], position = _zigzag(data, position)
        else:
            position = _skip(data, position, kind, len(above))
        if position > len(data):
            raise FormatError(f"a field ends at {position}, beyond {len(data)} bytes")


def _skip(data: memoryview, position: int, kind: int, depth: int) -> int:
    """Where a value that is not needed ends."""
    if kind in _BOOLEANS:
        return position
    if kind == _BYTE:
        return position + 1
    if kind == _DOUBLE:
        return position + 8
    if kind == _BINARY:
        length, position = varint_at(data, position, len(data))
        return position + length
    if kind in _LISTS and depth < _MAX_DEPTH:
        head, position = _byte(data, position)
        count = head >> 4
        if count == 15:
            count, position = varint_at(data, position, len(data))
        if count > len(data):
            raise FormatError(f"a list of {count:,} values")
        for _ in range(count):
            position = _item(data, position, head & 15, depth + 1)
        return position
    raise FormatError(f"a value of the type {kind}")


def _item(data: memoryview, position: int, kind: int, depth: int) -> int:
    if kind == _STRUCT:
        return _struct(data, position, (0,) * depth)[1]
    if kind in _VARINTS:
        return _zigzag(data, position)[1]
    return position + 1 if kind in _BOOLEANS else _skip(data, position, kind, depth)


def _byte(data: memoryview, position: int) -> tuple[int, int]:
    if position >= len(data):
        raise FormatError(f"it is cut off at byte {position}")
    return data[position], position + 1


def _zigzag(data: memoryview, position: int) -> tuple[int, int]:
    value, position = varint_at(data, position, len(data))
    return (value >> 1) ^ -(value & 1), position
