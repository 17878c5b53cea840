"""Rows of a Parquet file, a batch at a time, in as much memory as its pages say that they take.

What pyarrow raises becomes SourceError. It uses no threads: workers read files of their own, and may have been forked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import MissingExtraError, PackerError, SourceError
from packer.sources.parquet_pages import Chunk, Group, batch_rows, read_groups
from packer.sources.streams import PlainFile

__all__ = [
    "BinaryColumn",
    "batches_of",
    "has_child",
    "open_parquet",
    "parquet_file",
    "row_bytes",
    "translated",
]

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
