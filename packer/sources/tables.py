"""Rows of a table, one at a time: CSV, TSV, JSON Lines or Parquet, chosen by the file's suffix.

A row is a mapping from column to value; None is a missing value, a column may be absent from a JSON Lines
row. CSV and TSV values are strings as they stand ("" for an empty one), JSON and Parquet values keep their
types. CSV and TSV need a header row; columns whose header is empty (such as the index that pandas writes) are
ignored.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cache.errors import MissingExtraError, SourceError

__all__ = ["TABLE_SUFFIXES", "Row", "Table", "open_table"]

Row = Mapping[str, Any]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
TABLE_SUFFIXES = (*_DELIMITERS, *_JSON_LINES, *_PARQUET)
_MAX_VALUE_BYTES = 64 << 20
_MAX_LINE = 64 << 20
_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be read again and again. unit: what its numbers count, "line" or "row"."""

    path: Path
    columns: tuple[str, ...]

    @property
    def unit(self) -> str:
        return "row" if self.path.suffix.lower() in _PARQUET else "line"

    def rows(self) -> Iterator[tuple[int, Row]]:
        """(number from 1, row) of every row; the number of a row of several lines is that of the first.

        Raises SourceError with the line or row where the table is malformed.
        """
        suffix = self.path.suffix.lower()
        if suffix in _DELIMITERS:
            return _delimited_rows(self.path, _DELIMITERS[suffix])
        if suffix in _JSON_LINES:
            return _json_rows(self.path)
        return _parquet_rows(self.path)

    def where(self, number: int) -> str:
        """How errors name a row."""
        return f"{self.path}: {self.unit} {number}"


def open_table(path: Path) -> Table:
    """The table at `path`, with its columns in order. JSON Lines are read through once to find them.

    Raises SourceError where it cannot be read, MissingExtraError for Parquet without pyarrow.
    """
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        _, header = next(_delimited(path, _DELIMITERS[suffix]), (0, []))
        columns = [name for name in header if name]
        if not columns:
            raise SourceError(f"{path}: empty; a manifest starts with a row of column names")
    elif suffix in _JSON_LINES:
        columns = list({name: None for _, row in _json_rows(path) for name in row})
    elif suffix in _PARQUET:
        columns = _parquet_columns(path)
    else:
        raise SourceError(f"{path}: no manifest; its name must end in {', '.join(TABLE_SUFFIXES)}")
    twice = next((name for i, name in enumerate(columns) if name in columns[:i]), None)
    if twice is not None:
        raise SourceError(f"{path}: two columns are called {twice!r}; rename one")
    return Table(path, tuple(columns))


def _open_text(path: Path) -> TextIO:
    try:
        return open(path, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file, none of which may be longer than all values of a row need."""
    number = 0
    while text := file.readline(_MAX_LINE):
        number += 1
        if len(text) == _MAX_LINE and not text.endswith(("\n", "\r")):
            raise SourceError(f"{path}: line {number}: longer than {_MAX_LINE:,} characters; is this a manifest?")
        yield text


def _delimited(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(first line, values) of every record that is not a blank line; names in the first are stripped of blanks."""
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_VALUE_BYTES))
    line, is_header = 1, True
    with _open_text(path) as file:
        reader = csv.reader(_lines(file, path), delimiter=delimiter, strict=True)
        try:
            for values in reader:
                if values:
                    yield line, [value.strip() for value in values] if is_header else values
                    is_header = False
                line = reader.line_num + 1
        except csv.Error as error:
            raise SourceError(f"{path}: line {line}: malformed: {error}") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{path}: not UTF-8 at line {line} or soon after; save it as UTF-8") from error


def _delimited_rows(path: Path, delimiter: str) -> Iterator[tuple[int, Row]]:
    records = _delimited(path, delimiter)
    _, header = next(records, (0, []))
    named = all(header)
    for line, values in records:
        if len(values) != len(header):
            raise SourceError(
                f"{path}: line {line}: has {len(values)} values, but the header has {len(header)} columns"
            )
        row = dict(zip(header, values, strict=True))
        if not named:
            row.pop("", None)
        yield line, row


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    line = 0
    with _open_text(path) as file:
        try:
            for line, text in enumerate(_lines(file, path), 1):
                if not text.strip():
                    continue
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise SourceError(f"{path}: line {line}: expected a JSON object, found {type(row).__name__}")
                yield line, row
        except UnicodeDecodeError as error:
            raise SourceError(f"{path}: not UTF-8 after line {line}; save it as UTF-8") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise SourceError(f"{path}: line {line}: not JSON: {error}") from error


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """An open pyarrow.parquet.ParquetFile; what pyarrow raises becomes SourceError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "reading a Parquet manifest") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{path}: cannot be read as Parquet: {error}") from error


def _parquet_columns(path: Path) -> list[str]:
    with _parquet_file(path) as file:
        return list(file.schema_arrow.names)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    with _parquet_file(path) as file:
        names = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            columns = [_values(path, name, column) for name, column in zip(names, batch.columns, strict=True)]
            for values in zip(*columns, strict=True):
                number += 1
                yield number, dict(zip(names, values, strict=True))


def _values(path: Path, name: str, column: Any) -> list[Any]:
    """A column as Python objects.

    Nanoseconds become microseconds, which is what Python's own times can hold.
    """
    import pyarrow as pa

    kind = column.type
    try:
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            column = column.cast(pa.timestamp("us", kind.tz), safe=False)
        elif pa.types.is_time64(kind) and kind.unit == "ns":
            column = column.cast(pa.time64("us"), safe=False)
        elif pa.types.is_duration(kind) and kind.unit == "ns":
            column = column.cast(pa.duration("us"), safe=False)
        return list(column.to_pylist())
    except (ValueError, OverflowError) as error:
        raise SourceError(f"{path}: column {name!r} of type {kind} cannot be read: {error}") from error
