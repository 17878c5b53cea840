"""Tables, read row by row: CSV, TSV, JSON Lines or Parquet, chosen by the file's suffix.

A row is a mapping from column to value. None is a missing value; in JSON Lines, a column may also be absent from a
row. CSV and TSV values are strings ("" if empty), JSON and Parquet values keep their types. CSV and TSV need a header
row; columns without a header, such as the index that pandas writes, are ignored. In a table with the header of
labels.csv, the escaping of cells by `readers.staging` is undone.

Labels. If every label is an integer, they are class numbers, kept unchanged, and classes have no names. 3.0 and "3.0"
count as integers, since pandas writes them for columns with gaps, and so do true and false. If most labels are names,
all are: classes are the sorted names, and a label is the position of its name. Numbers among names are names as well,
with a warning. A name or a fraction among numbers is an error, since it would renumber all other labels. A missing
value and NaN mean "no label" (NO_LABEL); among numbers, so do -1 and the texts "NA", "None", "null" and the like.

JSON. One object per sample: compact, UTF-8, keys in the order of the columns. Values that JSON cannot express are
converted: NaN and infinities to null; dates, times and timestamps to ISO 8601 text; bytes to base64; others to text.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from cache.errors import MissingExtraError, PackerError, SourceError
from cache.files import open_regular
from cache.messages import plural, quoted
from packer.sources.base import SplitListing, checked_name, refusing
from readers.layout import FIELD_KINDS, SplitName
from readers.staging import LABELS_HEADER, without_apostrophe
from readers.table import NO_LABEL

__all__ = [
    "IS_VALID",
    "LABEL_COLUMNS",
    "PATH_COLUMNS",
    "RESERVED_FIELDS",
    "SPLIT_COLUMNS",
    "TABLE_SUFFIXES",
    "URL_COLUMNS",
    "Columns",
    "NamedColumns",
    "Row",
    "Table",
    "choose_columns",
    "column_values",
    "field_named",
    "first_column",
    "is_field_name",
    "is_missing",
    "is_url_list",
    "json_payload",
    "means_none",
    "number_labels",
    "open_table",
    "open_url_table",
    "parquet_file",
    "split_of_value",
    "splits_by_value",
]


Row = Mapping[str, Any]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
TABLE_SUFFIXES = (*_DELIMITERS, *_JSON_LINES, *_PARQUET)
_MAX_VALUE_BYTES = 64 << 20
_MAX_LINE = 64 << 20
_BATCH_ROWS = 4096
_BUFFER_BYTES = 1 << 20


def is_missing(value: Any) -> bool:
    """Whether a value is missing: null, an empty string, or NaN, which pandas uses for null."""
    return value is None or value == "" or value != value


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be read repeatedly. unit: what row numbers count, "line" or "row"."""

    path: Path
    columns: tuple[str, ...]

    @property
    def unit(self) -> str:
        return "line" if self.path.suffix.lower() in (*_DELIMITERS, *_JSON_LINES, ".txt") else "row"

    def rows(self) -> Iterator[tuple[int, Row]]:
        """(number, row) of every row. Numbers start at 1; a row of several lines has the number of its first line.

        Raises SourceError, naming the line or row, if the table is malformed.
        """
        suffix = self.path.suffix.lower()
        if suffix in _DELIMITERS:
            return _delimited_rows(self.path, _DELIMITERS[suffix])
        if suffix in _JSON_LINES:
            return _json_rows(self.path)
        return _parquet_rows(self.path)

    def where(self, number: int) -> str:
        """The name of a row in messages."""
        return f"{self.path}: {self.unit} {number}"


def open_table(path: Path) -> Table:
    """Open the table at `path` and read its column names, which for JSON Lines takes a pass over the whole file.

    Raises SourceError if the table cannot be read, MissingExtraError for Parquet without pyarrow.
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
    """The lines of a file. Raises SourceError for a line too long for a table."""
    number = 0
    while text := file.readline(_MAX_LINE):
        number += 1
        if len(text) == _MAX_LINE and not text.endswith(("\n", "\r")):
            raise SourceError(f"{path}: line {number}: longer than {_MAX_LINE:,} characters; is this a manifest?")
        yield text


def _delimited(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(first line, values) of every record, without blank lines. Column names are stripped of blanks."""
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
def parquet_file(path: Path) -> Iterator[Any]:
    """An open pyarrow.parquet.ParquetFile. Exceptions of pyarrow become SourceError."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "reading Parquet") from error
    options = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
    with refusing(path, "cannot be read as Parquet"), pyarrow.parquet.ParquetFile(path, **options) as file:
        yield file


def _parquet_columns(path: Path) -> list[str]:
    with parquet_file(path) as file:
        return list(file.schema_arrow.names)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    with parquet_file(path) as file:
        names = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            columns = [column_values(path, name, column) for name, column in zip(names, batch.columns, strict=True)]
            for values in zip(*columns, strict=True):
                number += 1
                yield number, dict(zip(names, values, strict=True))


def column_values(path: Path, name: str, column: Any) -> list[Any]:
    """A pyarrow column as Python objects. Nanoseconds become microseconds, the resolution of Python's times."""
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
_MISSING = (*_NOT_A_NUMBER, "na", "n/a", "#n/a", "none", "null", "nil", "-", "?")
_FEWEST_NAMES = 10  # names are taken for mistakes if there are ten times as many numbers
_MAX_LABEL = 1 << 53  # larger integers are not exact as floats, which labels in many tables are


def number_labels(
    values: Sequence[Any], lines: Sequence[int], table: Table
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Labels of all rows of a table, class names, and warnings. lines: the row number of each value.

    Raises SourceError, naming the row, for a label that is neither an integer nor a name, or does not fit the others.
    """
    numbers = [_as_number(value) for value in values]
    _refuse_spellings(values, numbers, lines, table)
    strays = [i for i, number in enumerate(numbers) if number is None and not means_none(values[i])]
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
            f"{table.path}: labels such as {joined[0]!r} look like several in one, but each is a separate class "
            f"({plural(len(joined), 'class')}); for several labels per image write lists:  {_as_list(joined[0])}"
        )
    return [positions[name] for name in names], classes, warnings


def _refuse_spellings(values: Sequence[Any], numbers: Sequence[int | None], lines: Sequence[int], table: Table) -> None:
    """Raise SourceError if a number is spelled in two ways that may mean two classes, such as 01 and 1."""
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
    """Raise SourceError if labels are numbers with some exceptions, rather than names.

    rows: the positions of the numbers. strays: those of the exceptions.
    """
    fractions = [i for i in strays if _FRACTION.fullmatch(names[i])]
    strange, meant = {names[i] for i in strays}, {names[i] for i in rows}
    if len(fractions) == len(strays):
        problem = (
            "is not a whole number; labels are class numbers or names, unless most have fractions (--field "
            "NAME:target=COLUMN takes all labels as numbers)"
        )
    elif rows and (len(strange) <= len(meant) or len(strays) * _FEWEST_NAMES < len(rows)):
        be = "is a whole number" if len(rows) == 1 else "are whole numbers"
        problem = f"is a name, but {plural(len(rows), 'other label')} {be}"
    else:
        return
    more = f" (and so for {plural(len(strays) - 1, 'more row')})" if len(strays) > 1 else ""
    raise SourceError(
        f"{table.where(lines[strays[0]])}: the label {names[strays[0]]!r} {problem}{more}; write a whole number, or "
        f"nothing for no label; to have classes by name, write a name in every row, such as class_3 for 3"
    )


def _is_joined(name: str, known: Mapping[str, int]) -> bool:
    """Whether a label looks like several class names: joined by |, or by ; or , if one of them is also a class."""
    parts = [part.strip() for part in _JOINT.split(name)]
    return len(parts) > 1 and all(parts) and ("|" in name or any(part in known for part in parts))


def _as_list(name: str) -> str:
    return json.dumps([part.strip() for part in _JOINT.split(name)], ensure_ascii=False)


def means_none(value: Any) -> bool:
    """Whether a value among numbers is missing, or a text that pandas, R or SQL write for a missing value."""
    return is_missing(value) or (isinstance(value, str) and value.strip().casefold() in _MISSING)


def _as_number(value: Any) -> int | None:
    """The class number in a label, None if it is not an integer."""
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
    """The class name in a label, "" for none. Raises SourceError."""
    if is_missing(value):
        return ""
    if isinstance(value, str):
        name = value.strip()
        if "\0" in name or not _is_text(name):
            raise SourceError(f"{table.where(line)}: the label {name!r} is not valid as a class name")
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
    """The JSON object of a row; None if the row has none of the columns."""
    content = {column: row[column] for column in columns if column in row}
    if not content:
        return None
    try:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_convert)
    except ValueError:
        text = json.dumps(_finite(content), ensure_ascii=False, separators=(",", ":"), default=_convert)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can express only as an escape
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


def splits_by_value(part: SplitListing, values: Sequence[Any], where: str) -> dict[str, SplitListing]:
    """Divide the samples of a listing by a column of splits. Splits are in the order of their first samples.

    values: the column's value for each sample. where: the column, for messages.

    Raises SourceError for a value that cannot be the name of a split.
    """
    rows: dict[Any, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    splits: dict[str, list[int]] = {}
    for value, numbers in rows.items():
        splits.setdefault(split_of_value(value, f"{where}, row {numbers[0] + 1}"), []).extend(numbers)
    return {name: part.take(np.array(sorted(numbers), np.int64)) for name, numbers in splits.items()}


def split_of_value(value: Any, where: str) -> str:
    """The split named by the value of a column. Raises SourceError."""
    return checked_name(SplitName, "" if is_missing(value) else str(value).strip(), where)


# ------------------------------------------------------------------------------
# Choosing the columns of a manifest, by the rules in `packer.sources.manifest`.


PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath", "file_path", "img")
LABEL_COLUMNS = (
    *("label", "class", "target", "category"),
    *("class_id", "label_id", "category_id", "class_name", "label_name", "labels", "classes", "synset"),
)
SPLIT_COLUMNS = ("split", "subset")
_NOISY, _RIGHT, IS_VALID = "noisy_labels_", "noisy_labels_0", "is_valid"
_LOOKED_AT = 20
_KINDS_OF_VALUES = ("text", "json", "array", "boxes", "points", "target")
RESERVED_FIELDS = ("image", "json", "label", "key", "shard", "cls")  # names with a meaning in the containers


@dataclass(frozen=True, slots=True)
class Columns:
    """The roles of a table's columns.

    files: further field -> column. kinds: field -> kind, if stated by the caller.
    values: the fields whose column holds the values themselves, not paths of files.
    """

    path: str
    label: str | None
    split: str | None
    files: Mapping[str, str]
    metadata: tuple[str, ...]
    kinds: Mapping[str, str]
    values: frozenset[str]

    def with_target(self, field: str) -> Columns:
        """These columns, with the label column turned into a field of targets. Raises SourceError."""
        assert self.label is not None
        if field in self.files:
            both = f"{self.files[field]!r} and {self.label!r}"
            raise SourceError(f"the columns {both} would both become the field {field!r}; rename one")
        files, kinds = {**self.files, field: self.label}, {**self.kinds, field: "target"}
        return replace(self, label=None, files=files, kinds=kinds, values=self.values | {field})


class NamedColumns(NamedTuple):
    """The columns named by the caller; None for the usual names."""

    path: str | None = None
    label: str | None = None
    split: str | None = None

    def checked(self, table: Table) -> NamedColumns:
        """These columns. Raises SourceError if the table lacks one."""
        for name, argument in zip(self, ("path_column", "label_column", "split_column"), strict=True):
            if name is not None:
                _required(table, name, f"({argument}={name!r})")
        return self


def choose_columns(table: Table, named: NamedColumns, fields: Mapping[str, str], folder: str) -> Columns:
    """Assign a role to every column. Raises SourceError, listing the columns, if a required one is missing."""
    path, label, split = named.checked(table)
    path = path or first_column(table.columns, PATH_COLUMNS)
    if path is None:
        raise SourceError(
            f"{table.path}: no column of image paths ({', '.join(PATH_COLUMNS)}); it has {_listed(table)}; "
            f"name it with  path_column='COLUMN', and check that the first row holds the names of the columns"
        )
    kinds = {field: kind for field, colon, kind in (key.partition(":") for key in fields) if colon}
    fields = {key.partition(":")[0]: column for key, column in fields.items()}
    for field, column in fields.items():
        _check_field(table, field, column, kinds.get(field, "file"))
    taken = {path, *fields.values()} | ({split} if split else set())
    label = label or first_column(table.columns, LABEL_COLUMNS, taken)
    split = split or first_column(table.columns, SPLIT_COLUMNS, taken | {label})
    if any(name.startswith(_NOISY) for name in table.columns):
        label = label or next((name for name in table.columns if name == _RIGHT and name not in taken), None)
        split = split or next((name for name in table.columns if name == IS_VALID and name != label), None)
    rest = [name for name in table.columns if name not in taken | {label, split}]
    file_columns = _file_columns(table, rest, path, folder)
    files = dict(fields)
    for column in file_columns:
        field = field_named(column)
        if field in files:
            raise SourceError(
                f"{table.path}: the columns {files[field]!r} and {column!r} would both become the field "
                f"{field!r}; name one of them:  --field {quoted(f'NAME={column}')}  (in Python: "
                f"fields={{'NAME': {column!r}}})"
            )
        files[field] = column
    value_columns = {field: column for field, column in fields.items() if kinds.get(field) in _KINDS_OF_VALUES}
    paths = _file_columns(table, list(value_columns.values()), path, folder)
    values = frozenset(field for field, column in value_columns.items() if column not in paths)
    return Columns(path, label, split, files, tuple(name for name in rest if name not in file_columns), kinds, values)


def _listed(table: Table) -> str:
    return ", ".join(map(repr, table.columns)) or "none"


def _required(table: Table, name: str, argument: str) -> str:
    if name not in table.columns:
        raise SourceError(f"{table.path}: no column {name!r} {argument}; it has {_listed(table)}")
    return name


def first_column(columns: Iterable[str], names: Iterable[str], taken: Iterable[str | None] = ()) -> str | None:
    """The first of `names` that is a column (ignoring case) and not taken, or None."""
    free = [column for column in columns if column not in {*taken}]
    folded = {column.casefold(): column for column in reversed(free)}
    return next((name if name in free else folded[name] for name in names if name in free or name in folded), None)


def _check_field(table: Table, field: str, column: str, kind: str) -> None:
    if kind not in FIELD_KINDS:
        raise SourceError(f"{table.path}: field {field}: {kind!r} is not a kind; kinds are {', '.join(FIELD_KINDS)}")
    if not is_field_name(field):
        raise SourceError(
            f"{table.path}: a field cannot be called {field!r}: take lower-case letters, digits and _, and "
            f"none of {', '.join(RESERVED_FIELDS)}"
        )
    _required(table, column, f"for the field {field}")


def field_named(column: str) -> str:
    """The name of the field for a column."""
    name = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_") or "file"
    return f"{name}_file" if name in RESERVED_FIELDS else name


def _file_columns(table: Table, candidates: list[str], path: str, folder: str) -> list[str]:
    """The candidates that contain paths of files. Reads no more rows than needed."""
    counts = dict.fromkeys(candidates, 0)  # files found per column; a column with any other value is removed
    for _, row in table.rows():
        for column in [column for column, count in counts.items() if count < _LOOKED_AT]:
            value = row.get(column)
            if is_missing(value):
                continue
            if isinstance(value, str) and value != row.get(path) and os.path.isfile(os.path.join(folder, value)):
                counts[column] += 1
            else:
                del counts[column]
        if all(count == _LOOKED_AT for count in counts.values()):
            break
    return [column for column in candidates if counts.get(column)]


def is_field_name(name: str) -> bool:
    """Whether every container allows this name for a further field: in a tar, it is a case-insensitive extension."""
    return re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) is not None and name not in RESERVED_FIELDS


# ------------------------------------------------------------------------------
# Tables of URLs.


URL_COLUMNS = ("url", "image_url", "img_url", "uri", "link", "urls")
_MAX_ADDRESS = 64 << 10
_is_url = re.compile(r"\s*https?://", re.IGNORECASE).match


@dataclass(frozen=True, slots=True)
class _TextTable(Table):
    """A text file with one URL per line; blank lines and lines that begin with # are skipped."""

    def rows(self) -> Iterator[tuple[int, Row]]:
        with refusing(self.path, "not a list of addresses in UTF-8 text"), open_regular(self.path) as file:
            number = 0
            while line := file.readline(_MAX_ADDRESS):
                number += 1
                text = line.decode().strip()
                if len(line) == _MAX_ADDRESS:
                    raise SourceError(f"{self.where(number)}: longer than {_MAX_ADDRESS:,} bytes")
                if text and not text.startswith("#"):
                    yield number, {"url": text}


def open_url_table(path: Path) -> Table:
    """Open a table of URLs, or a text file with one per line."""
    return open_table(path) if path.suffix.lower() in TABLE_SUFFIXES else _TextTable(path, ("url",))


def is_url_list(path: Path) -> bool:
    """Whether a file is a table or text file with URLs of images instead of paths."""
    suffix = path.suffix.lower()
    if suffix not in (*TABLE_SUFFIXES, ".txt") or not path.is_file():
        return False
    try:
        table = Table(path, ()) if suffix in TABLE_SUFFIXES else _TextTable(path, ())
        row = next((row for _, row in table.rows()), {})
    except PackerError:  # reported when it is opened as a manifest
        return False
    # A manifest may state the origin of its files, so a column of paths takes precedence.
    column = first_column(row, (*PATH_COLUMNS, *URL_COLUMNS))
    return column is not None and isinstance(row[column], str) and _is_url(row[column]) is not None
