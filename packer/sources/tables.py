"""Rows of a table, one at a time: CSV, TSV, JSON Lines or Parquet, chosen by the file's suffix.

A row is a mapping from column to value; None is a missing value, a column may be absent from a JSON Lines
row. CSV and TSV values are strings as they stand ("" for an empty one), JSON and Parquet values keep their
types. CSV and TSV need a header row; columns whose header is empty (such as the index that pandas writes) are
ignored. Cells of a table with the header of labels.csv are taken as they were before `readers.staging` wrote them.

Labels. Where every label is a whole number (also 3.0 or "3.0", which is what a column with gaps becomes in
pandas, and true and false) they are class numbers, kept as they are, and the classes have no names. Where most
labels are names, every label is one; classes are the sorted names, and a label is the position of its name. Numbers
among names are names, too, with a warning; a name, or a fraction, among numbers is an error, since a single one would
otherwise renumber all others. No label, which is NO_LABEL: a missing value, NaN, the number -1, and among numbers
what pandas takes for a missing value ("NA", "None", "null").

JSON. One object for each sample, compact, UTF-8, keys in the order of the columns. What JSON has no words
for: NaN and infinities become null; dates, times and timestamps ISO 8601 text; bytes base64; anything else
its text.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, TextIO

from cache.errors import MissingExtraError, SourceError
from cache.messages import plural
from readers.sample import NO_LABEL
from readers.staging import LABELS_HEADER, without_apostrophe

__all__ = [
    "TABLE_SUFFIXES",
    "Row",
    "Table",
    "column_values",
    "is_missing",
    "json_payload",
    "number_labels",
    "open_table",
]

Row = Mapping[str, Any]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
TABLE_SUFFIXES = (*_DELIMITERS, *_JSON_LINES, *_PARQUET)
_MAX_VALUE_BYTES = 64 << 20
_MAX_LINE = 64 << 20
_BATCH_ROWS = 4096


def is_missing(value: Any) -> bool:
    """Whether a row has no value here: null, an empty string, or NaN, which is what pandas makes of null."""
    return value is None or value == "" or value != value


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
    named, is_ours = all(header), tuple(header) == LABELS_HEADER
    for line, values in records:
        if len(values) != len(header):
            raise SourceError(
                f"{path}: line {line}: has {len(values)} values, but the header has {len(header)} columns"
            )
        row = dict(zip(header, map(without_apostrophe, values) if is_ours else values, strict=True))
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
            columns = [column_values(path, name, column) for name, column in zip(names, batch.columns, strict=True)]
            for values in zip(*columns, strict=True):
                number += 1
                yield number, dict(zip(names, values, strict=True))


def column_values(path: Path, name: str, column: Any) -> list[Any]:
    """A column of pyarrow as Python objects.

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


# --- labels ---
_NUMBER = re.compile(r"(-?[0-9]{1,18})(?:\.0+)?")
_PADDED = re.compile(r"-?0[0-9]")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+[.,]?[0-9]*|[.,][0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?inf(?:inity)?", re.I)
_JOINT = re.compile(r"[|;,]")
_NOT_A_NUMBER = ("nan", "<na>", "-nan")
_MISSING = ("na", "n/a", "#n/a", "none", "null", "nil", "-", "?")
_FEWEST_NAMES = 10  # names that are less than a tenth of the numbers are mistakes, however many there are
_MAX_LABEL = 1 << 53  # beyond it floats, and with them the labels of many a table, are not exact


def number_labels(
    values: Sequence[Any], lines: Sequence[int], table: Table
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Labels and class names of all rows of a table, and warnings. lines: the number of the row of each value.

    Raises SourceError, naming the row, for a label that is neither a whole number nor a name, or does not fit the rest.
    """
    numbers = [_as_number(value) for value in values]
    _refuse_spellings(values, numbers, lines, table)
    strays = [i for i, number in enumerate(numbers) if number is None and not _means_none(values[i])]
    if not strays:
        for number, line in zip(numbers, lines, strict=True):
            if number is not None and not NO_LABEL <= number <= _MAX_LABEL:
                raise SourceError(
                    f"{table.where(line)}: the label {number} is out of range: classes count from 0 to 2^53"
                )
        return [NO_LABEL if number is None else number for number in numbers], (), []
    names = [_as_name(value, line, table) for value, line in zip(values, lines, strict=True)]
    rows = [i for i, number in enumerate(numbers) if number is not None and names[i]]
    _refuse_strays(names, rows, strays, lines, table)
    classes = tuple(sorted(set(names) - {""}))
    positions = {name: number for number, name in enumerate(classes)} | {"": NO_LABEL}
    warnings = []
    if rows:
        warnings.append(
            f"{table.path}: labels are names, so the whole numbers among them ({plural(len(rows), 'row')}, the first "
            f"in {table.unit} {lines[rows[0]]}: {names[rows[0]]!r}) are names too"
        )
    joined = [name for name in classes if _is_joined(name, positions)]
    if joined:
        warnings.append(
            f"{table.path}: labels such as {joined[0]!r} look like several in one, but each is a class of its own "
            f"({plural(len(joined), 'class')}); for several labels an image write lists:  {_as_list(joined[0])}"
        )
    return [positions[name] for name in names], classes, warnings


def _refuse_spellings(values: Sequence[Any], numbers: Sequence[int | None], lines: Sequence[int], table: Table) -> None:
    """Raise SourceError where two texts are the same number and may be two classes: 01 and 1."""
    if not any(isinstance(value, str) and _PADDED.match(value.strip()) for value in values):
        return
    spelled: dict[int, tuple[str, int]] = {}
    for value, number, line in zip(values, numbers, lines, strict=True):
        if number is not None and number != NO_LABEL and isinstance(value, str):
            text = value.strip().partition(".")[0]
            first, at = spelled.setdefault(number, (text, line))
            if first != text:
                raise SourceError(
                    f"{table.where(line)}: the label {text!r} is the same number as {first!r} in {table.unit} {at}; "
                    f"write one of them in every row, or names, such as class_{text}, where they are two classes"
                )


def _refuse_strays(
    names: Sequence[str], rows: Sequence[int], strays: Sequence[int], lines: Sequence[int], table: Table
) -> None:
    """Raise SourceError where labels are numbers (in `rows`) but for some strays, rather than names."""
    fractions = [i for i in strays if _FRACTION.fullmatch(names[i])]
    found, meant = {names[i] for i in strays}, {names[i] for i in rows}
    if len(fractions) == len(strays):
        what = (
            "is not a whole number; labels are class numbers or names, unless most have fractions (--field "
            "NAME:target=COLUMN takes all as such numbers)"
        )
    elif rows and (len(found) <= len(meant) or len(strays) * _FEWEST_NAMES < len(rows)):
        be = "is a whole number" if len(rows) == 1 else "are whole numbers"
        what = f"is a name, but {plural(len(rows), 'other label')} {be}"
    else:
        return
    more = f" (and so for {plural(len(strays) - 1, 'more row')})" if len(strays) > 1 else ""
    raise SourceError(
        f"{table.where(lines[strays[0]])}: the label {names[strays[0]]!r} {what}{more}; write a whole number there, or "
        f"nothing where there is no label; to have classes by name, write a name in every row, such as class_3 for 3"
    )


def _is_joined(name: str, known: Mapping[str, int]) -> bool:
    """Whether a name looks like several: with | between them, or with ; or , next to a name of its own."""
    parts = [part.strip() for part in _JOINT.split(name)]
    return len(parts) > 1 and all(parts) and ("|" in name or any(part in known for part in parts))


def _as_list(name: str) -> str:
    return json.dumps([part.strip() for part in _JOINT.split(name)], ensure_ascii=False)


def _means_none(value: Any) -> bool:
    """Whether text among class numbers is what pandas, R or SQL write for a missing value."""
    return isinstance(value, str) and value.strip().casefold() in _MISSING


def _as_number(value: Any) -> int | None:
    """The class number that a label is, None where it is not a whole number."""
    if is_missing(value):
        return NO_LABEL
    if isinstance(value, str):
        text = value.strip()
        match = _NUMBER.fullmatch(text)
        return int(match[1]) if match else NO_LABEL if text.casefold() in ("", *_NOT_A_NUMBER) else None
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return None


def _as_name(value: Any, line: int, table: Table) -> str:
    """The class name that a label is, "" for none."""
    if is_missing(value):
        return ""
    if isinstance(value, str):
        name = value.strip()
        if "\0" in name or not _is_text(name):
            raise SourceError(f"{table.where(line)}: the label {name!r} is not text that could be a class name")
        return "" if name.casefold() in _NOT_A_NUMBER else name
    if isinstance(value, int):
        return str(value)
    raise SourceError(
        f"{table.where(line)}: the label {value!r:.60} is a {type(value).__name__}, expected a whole number "
        f"or a name; name another column with  label_column='COLUMN'"
    )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_payload(row: Row, columns: Iterable[str]) -> bytes | None:
    """The JSON object of a row; None where the row has none of the columns."""
    found = {column: row[column] for column in columns if column in row}
    if not found:
        return None
    try:
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_convert)
    except ValueError:
        text = json.dumps(_finite(found), ensure_ascii=False, separators=(",", ":"), default=_convert)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: legal in JSON only as an escape
        return json.dumps(json.loads(text), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _convert(value: Any) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return str(value)
