"""Structs in Thrift's compact protocol, as plain values, without a description of them.

    struct    a field after the other, then a zero byte; a struct is {number of the field: value}
    field     a byte: the step from the number of the field before (0: the number follows), and the type
    values    whole numbers as zigzag varints; bytes with their length before them; lists of one type; structs

(The compact protocol is in Thrift's documentation: thrift-compact-protocol.md of apache/thrift.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import FormatError, MissingExtraError, PackerError, SourceError
from packer.formats.tfrecord import varint_at
from packer.sources.streams import PlainFile

__all__ = ["BinaryColumn", "batches_of", "has_child", "open_parquet", "parquet_file", "row_bytes", "translated"]


Struct = dict[int, Any]

_MAX_DEPTH = 16
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def read_struct(data: memoryview, position: int = 0, depth: int = 0) -> tuple[Struct, int]:
    """The struct at `position`, and where it ends. Raises FormatError where it is none, or is cut off."""
    if depth > _MAX_DEPTH:
        raise FormatError("structs are nested too deep")
    found: Struct = {}
    field = 0
    while True:
        head, position = _byte(data, position)
        if not head:
            return found, position
        if head >> 4:
            field += head >> 4
        else:
            field, position = _number(data, position)
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            found[field] = kind == _TRUE
        else:
            found[field], position = _value(data, position, kind, depth)


def _value(data: memoryview, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        return _number(data, position)
    if kind == _STRUCT:
        return read_struct(data, position, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, position, depth + 1)
    if kind in (_TRUE, _FALSE, _BYTE):
        return _byte(data, position)
    if kind not in (_BINARY, _DOUBLE):
        raise FormatError(f"a value of the type {kind}")
    length, position = varint_at(data, position, len(data)) if kind == _BINARY else (8, position)
    if length > len(data) - position:
        raise FormatError(f"{length:,} bytes at {position}, of {len(data):,}")
    return bytes(data[position : position + length]), position + length


def _list(data: memoryview, position: int, depth: int) -> tuple[list[Any], int]:
    if depth > _MAX_DEPTH:
        raise FormatError("lists are nested too deep")
    head, position = _byte(data, position)
    count = head >> 4
    if count == 15:
        count, position = varint_at(data, position, len(data))
    if count > len(data) - position:
        raise FormatError(f"a list of {count:,} values in {len(data) - position:,} bytes")
    found = []
    for _ in range(count):
        value, position = _value(data, position, head & 15, depth)
        found.append(value)
    return found, position


def _byte(data: memoryview, position: int) -> tuple[int, int]:
    if position >= len(data):
        raise FormatError(f"it is cut off at byte {position}")
    return data[position], position + 1


def _number(data: memoryview, position: int) -> tuple[int, int]:
    value, position = varint_at(data, position, len(data))
    return (value >> 1) ^ -(value & 1), position


# ------------------------------------------------------------------------------
# What a Parquet file says of its row groups, and the headers of its pages: how much memory reading some rows takes.
#
# A footer may say anything of its row groups, and a page of a few bytes may unpack to 2 GiB. So the header of every
# page is read before its row group is. Rows are then read a batch at a time, of as many as fit into memory: the
# values of a row are in a page, or, where they are numbers of entries in a dictionary, in that. A page, or a
# dictionary, is unpacked as a whole. It is all read here since pyarrow ends the process where a column of a footer is
# not as it should be.
#
#     file             "PAR1", column chunks, footer, uint32 bytes of the footer, "PAR1"
#     footer           FileMetaData: 3 rows, 4 row groups {1 columns, 3 rows}
#     a column         ColumnChunk {3 metadata {3 path, 5 values, 6 bytes unpacked, 7 bytes packed, 9 place of the first
#                      data page, 11 place of the dictionary}}
#     column chunk     [dictionary page] data page, …; each is a header, and `compressed_page_size` bytes
#     header           PageHeader {1 type, 2 uncompressed_page_size, 3 compressed_page_size, 5, 7 or 8 what is in the
#                      page
#                      {1 number of values}}
#
# (parquet.thrift of apache/parquet-format documents it.)


_TAIL_BYTES = 8
_MAX_FOOTER_BYTES = 64 << 20
_MAX_ROWS_OF_ALL = 1 << 40
_DICTIONARY = 2
_INSIDE = {0: 5, 2: 7, 3: 8}  # by the type of a page, the field that says what is in it
_BATCH_BYTES = 32 << 20
_DICTIONARY_BYTES = 256 << 20
_MAX_ROWS = 4096
_MAX_PAGE_BYTES = 1 << 30
_BOMB_BYTES, _BOMB_RATIO = 64 << 20, 1000  # images hardly shrink at all
_PEEK_BYTES, _MAX_HEADER_BYTES = 4096, 16 << 20


class Chunk(NamedTuple):
    """A column of a row group: its path ("image.bytes"), its values, and where its pages are."""

    path: str
    values: int
    unpacked: int
    start: int
    stop: int


class Group(NamedTuple):
    """A row group."""

    rows: int
    chunks: tuple[Chunk, ...]


class Page(NamedTuple):
    """A page: whether it is a dictionary, its bytes packed and unpacked, and how many values it has."""

    is_dictionary: bool
    packed: int
    unpacked: int
    values: int


def read_groups(file: PlainFile) -> list[Group]:
    """The row groups of a file. Raises SourceError where its footer does not fit the file."""
    size = file.path.stat().st_size
    tail = _read(file, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    length = int.from_bytes(tail[:4], "little")
    if bytes(tail[4:]) != b"PAR1" or length > min(size - _TAIL_BYTES, _MAX_FOOTER_BYTES):
        raise SourceError(f"{file.path}: cannot be read as Parquet: it has no footer, so it is truncated or damaged")
    try:
        footer, _ = read_struct(_read(file, size - _TAIL_BYTES - length, length))
        groups = [_group(group, size) for group in footer[4]]
        rows = sum(group.rows for group in groups)
        if rows != footer[3] or rows > min(_MAX_ROWS_OF_ALL, size):  # an image has more than a byte
            raise FormatError(f"it claims {footer[3]:,} rows, and its groups {rows:,}, in {size:,} bytes")
    except (FormatError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{file.path}: cannot be read as Parquet: its footer is damaged: {error}") from error
    return groups


def _group(group: Struct, size: int) -> Group:
    chunks = []
    for column in group[1]:
        about = column[3]
        path = b".".join(about[3]).decode("utf-8")
        dictionary = about.get(11) or about[9]
        start = min(about[9], dictionary)
        stop = start + about[7]
        if start < 4 or not start <= stop <= size or about[5] < 0 or about[6] < 0:
            raise FormatError(f"{path!r} is at {start:,} to {stop:,} of {size:,} bytes")
        chunks.append(Chunk(path, about[5], about[6], start, stop))
    if group[3] < 0:
        raise FormatError(f"a group has {group[3]} rows")
    return Group(group[3], tuple(chunks))


def batch_rows(file: PlainFile, chunks: Iterable[Chunk]) -> int:
    """How many rows of a row group to read at a time, for these of its chunks.

    Raises SourceError where a page unpacks to too much, or is not one.
    """
    rows = _MAX_ROWS
    for chunk in chunks:
        for page in pages_of(file, chunk):
            is_bomb = page.unpacked > _BOMB_BYTES and page.unpacked > _BOMB_RATIO * page.packed
            if is_bomb or page.unpacked > _MAX_PAGE_BYTES:
                raise SourceError(
                    f"{file.path}: {chunk.path}: a page of {page.packed:,} bytes unpacks to {page.unpacked:,}: a "
                    f"decompression bomb; images take pages of at most {_MAX_PAGE_BYTES:,} bytes"
                )
            if page.is_dictionary:
                rows = min(rows, _DICTIONARY_BYTES // max(1, page.unpacked))
            else:
                rows = min(rows, _BATCH_BYTES * max(1, page.values) // max(1, page.unpacked))
    return max(1, rows)


def pages_of(file: PlainFile, chunk: Chunk) -> Iterator[Page]:
    """The pages of a column chunk. Raises SourceError where they do not fill it."""
    start, values = chunk.start, 0
    while start < chunk.stop and values < chunk.values:
        try:
            page, header = _page_at(file, start, chunk.stop)
        except (FormatError, TypeError, AttributeError) as error:
            raise SourceError(f"{file.path}: {chunk.path}: no page at byte {start:,}: {error}") from error
        start += header + page.packed
        if start > chunk.stop:
            raise SourceError(f"{file.path}: {chunk.path}: a page ends at {start:,}, beyond {chunk.stop:,}: damaged")
        values += 0 if page.is_dictionary else page.values
        yield page
    if values != chunk.values:
        raise SourceError(
            f"{file.path}: {chunk.path} claims {chunk.values:,} values, its pages have {values:,}: damaged"
        )


def _page_at(file: PlainFile, start: int, stop: int) -> tuple[Page, int]:
    """(page, bytes of its header). Raises FormatError."""
    length = _PEEK_BYTES
    while True:
        length = min(length, stop - start)
        try:
            header, end = read_struct(_read(file, start, length))
            break
        except FormatError:
            if length in (stop - start, _MAX_HEADER_BYTES):
                raise
        length = min(length * 16, _MAX_HEADER_BYTES)
    kind, unpacked, packed = (header.get(field, -1) for field in (1, 2, 3))
    values = header.get(_INSIDE.get(kind, 0), {}).get(1, 0)
    if min(unpacked, packed, values) < 0:
        raise FormatError(f"its header has the sizes {packed} and {unpacked}, and {values} values")
    return Page(kind == _DICTIONARY, packed, unpacked, values), end


def _read(file: PlainFile, offset: int, length: int) -> memoryview:
    data = memoryview(bytearray(length))
    file.read_into(offset, data)
    return data


# ------------------------------------------------------------------------------
# Rows of a Parquet file, a batch at a time, in as much memory as its pages say that they take.
#
# What pyarrow raises becomes SourceError. It uses no threads: workers read files of their own, and may have been
# forked.


_BUFFER_BYTES = 1 << 20


def open_parquet(path: Path) -> Any:
    """A pyarrow.parquet.ParquetFile, which has its `path` and `groups`. Raises SourceError, MissingExtraError."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "reading Parquet") from error
    with closing(PlainFile(path)) as plain:
        groups = read_groups(plain)
    with translated(path):
        file = pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    file.path, file.groups = path, groups
    return file


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """`open_parquet`, for as long as the context lasts."""
    file = open_parquet(path)
    try:
        with translated(path):
            yield file
    finally:
        file.close()


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """What pyarrow raises becomes SourceError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, PackerError):
            raise
        raise SourceError(f"{path}: cannot be read as Parquet: {error}") from error


def row_bytes(group: Group, columns: Sequence[str]) -> int:
    """Bytes of a row in these columns on average, as far as the footer is right."""
    total = sum(chunk.unpacked for chunk in _chunks(group, columns))
    return min(max(1, total // max(1, group.rows)), 1 << 30)


def batches_of(file: Any, number: int, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a row group, some at a time."""
    with closing(PlainFile(file.path)) as pages:
        rows = batch_rows(pages, _chunks(file.groups[number], columns))
    return file.iter_batches(rows, row_groups=[number], columns=list(columns), use_threads=False)  # type: ignore[no-any-return]


def _chunks(group: Group, columns: Sequence[str]) -> list[Chunk]:
    """The chunks that these columns, or parts of columns, take."""
    return [
        chunk
        for chunk in group.chunks
        if any(chunk.path == column or chunk.path.startswith(f"{column}.") for column in columns)
    ]


def has_child(kind: Any, name: str) -> bool:
    """Whether a type is a struct with such a field."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) and kind.get_field_index(name) >= 0


class BinaryColumn:
    """A column of bytes, or of structs with them, whose values are views."""

    def __init__(self, column: Any) -> None:
        import pyarrow as pa

        self._column = column
        self._is_struct = pa.types.is_struct(column.type)
        values = column.field("bytes") if self._is_struct else column
        if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
            values = values.cast(pa.large_binary())
        width = np.int64 if pa.types.is_large_binary(values.type) else np.int32
        _, offsets, data = values.buffers()
        self._offsets = np.frombuffer(
            offsets, width, len(values) + 1, values.offset * np.dtype(width).itemsize
        ).tolist()
        self._data = memoryview(data) if data is not None else memoryview(b"")
        self._valid = values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None
        if column.null_count:
            whole = column.is_valid().to_numpy(zero_copy_only=False)
            self._valid = whole if self._valid is None else self._valid & whole

    def value(self, row: int) -> memoryview | None:
        """The bytes in a row; None for null."""
        if self._valid is not None and not self._valid[row]:
            return None
        return self._data[self._offsets[row] : self._offsets[row + 1]]

    def why(self, row: int) -> str:
        """Why there is no image."""
        value = self._column[row].as_py() if self._is_struct else None
        path = value.get("path") if value else None
        if path:
            return f"has no bytes, only the path {path!r:.100}; embed the images (push_to_hub does, or save with bytes)"
        return "has no image: the column is null"
