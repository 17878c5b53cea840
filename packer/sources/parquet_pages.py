"""What a Parquet file says of its row groups, and the headers of its pages: how much memory reading some rows takes.

A footer may say anything of its row groups, and a page of a few bytes may unpack to 2 GiB. So the header of every page
is read before its row group is. Rows are then read a batch at a time, of as many as fit into memory: the values of a
row are in a page, or, where they are numbers of entries in a dictionary, in that. A page, or a dictionary, is unpacked
as a whole. It is all read here since pyarrow ends the process where a column of a footer is not as it should be.

    file             "PAR1", column chunks, footer, uint32 bytes of the footer, "PAR1"
    footer           FileMetaData: 3 rows, 4 row groups {1 columns, 3 rows}
    a column         ColumnChunk {3 metadata {3 path, 5 values, 6 bytes unpacked, 7 bytes packed, 9 place of the first
                     data page, 11 place of the dictionary}}
    column chunk     [dictionary page] data page, …; each is a header, and `compressed_page_size` bytes
    header           PageHeader {1 type, 2 uncompressed_page_size, 3 compressed_page_size, 5, 7 or 8 what is in the page
                     {1 number of values}}

(parquet.thrift of apache/parquet-format documents it.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cache.errors import FormatError, SourceError
from packer.sources.streams import PlainFile
from packer.sources.thrift import Struct, read_struct

__all__ = ["Chunk", "Group", "Page", "batch_rows", "pages_of", "read_groups"]

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
