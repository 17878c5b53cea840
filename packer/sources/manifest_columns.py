"""Which column of a manifest plays which part.

    path      the image; named by the caller, else the first of PATH_COLUMNS that the table has
    label     named by the caller, else the first of LABEL_COLUMNS; none: no labels
    split     a column called split or subset; none: one split
    files     further files of a sample, one field each: those that the caller names, and every column whose first
              20 values (as far as it has any) are all strings that lead to a file which is not the image itself
    metadata  all other columns, in the order of the table

Names of columns are compared without case where none fits exactly. A field found this way is called like its
column, in lower case (extensions in a tar have no case) and with _ for anything but letters and digits.

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
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from cache.errors import SourceError
from cache.messages import plural
from packer.sources.names import RESERVED_FIELDS, is_field_name
from packer.sources.tables import Row, Table
from readers.sample import NO_LABEL

__all__ = ["LABEL_COLUMNS", "PATH_COLUMNS", "Columns", "choose_columns", "is_missing", "json_payload", "number_labels"]

PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath", "file_path", "img")
LABEL_COLUMNS = (
    *("label", "class", "target", "category"),
    *("class_id", "label_id", "category_id", "class_name", "label_name", "labels", "classes", "synset"),
)
SPLIT_COLUMNS = ("split", "subset")
_LOOKED_AT = 20


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns by part; files maps field to column."""

    path: str
    label: str | None
    split: str | None
    files: Mapping[str, str]
    metadata: tuple[str, ...]


def is_missing(value: Any) -> bool:
    """Whether a row has no value here: null, an empty string, or NaN, which is what pandas makes of null."""
    return value is None or value == "" or value != value


def choose_columns(
    table: Table, path: str | None, label: str | None, fields: Mapping[str, str], folder: str
) -> Columns:
    """The part of every column. Raises SourceError, with the columns there are, where one is missing."""
    path = _required(table, path, "--path-column") if path else _first(table, PATH_COLUMNS)
    if path is None:
        raise SourceError(
            f"{table.path}: no column of image paths ({', '.join(PATH_COLUMNS)}); it has {_listed(table)}; "
            f"name it with  --path-column, and see that the first row holds the names of the columns"
        )
    for field, column in fields.items():
        _check_field(table, field, column)
    taken = {path, *fields.values()}
    label = _required(table, label, "--label-column") if label else _first(table, LABEL_COLUMNS, taken)
    split = _first(table, SPLIT_COLUMNS, taken | {label})
    rest = [name for name in table.columns if name not in taken | {label, split}]
    found = _file_columns(table, rest, path, folder)
    files = dict(fields)
    for column in found:
        field = _field_named(column)
        if field in files:
            raise SourceError(
                f"{table.path}: the columns {files[field]!r} and {column!r} would both become the field "
                f"{field!r}; name one yourself with  --field NAME={column}"
            )
        files[field] = column
    return Columns(path, label, split, files, tuple(name for name in rest if name not in found))


def _listed(table: Table) -> str:
    return ", ".join(map(repr, table.columns)) or "none"


def _required(table: Table, name: str, option: str) -> str:
    if name not in table.columns:
        raise SourceError(f"{table.path}: no column {name!r} for  {option};  it has {_listed(table)}")
    return name


def _first(table: Table, candidates: Iterable[str], taken: Iterable[str | None] = ()) -> str | None:
    free = [column for column in table.columns if column not in taken]
    folded = {column.casefold(): column for column in reversed(free)}
    for name in candidates:
        if name in free:
            return name
        if name in folded:
            return folded[name]
    return None


def _check_field(table: Table, field: str, column: str) -> None:
    if not is_field_name(field):
        raise SourceError(
            f"{table.path}: a field cannot be called {field!r}: take lower-case letters, digits and _, and "
            f"none of {', '.join(RESERVED_FIELDS)}"
        )
    _required(table, column, f"--field {field}")


def _field_named(column: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_") or "file"
    return f"{name}_file" if name in RESERVED_FIELDS else name


def _file_columns(table: Table, candidates: list[str], path: str, folder: str) -> list[str]:
    """Those of the candidates that name files. Reads as many rows as it takes to tell."""
    counts = dict.fromkeys(candidates, 0)
    open_ = set(candidates)
    for _, row in table.rows():
        for column in tuple(open_):
            value = row.get(column)
            if is_missing(value):
                continue
            if not isinstance(value, str) or value == row.get(path) or not os.path.isfile(os.path.join(folder, value)):
                counts[column] = 0
                open_.remove(column)
            else:
                counts[column] += 1
                if counts[column] == _LOOKED_AT:
                    open_.remove(column)
        if not open_:
            break
    return [column for column in candidates if counts[column]]


_NUMBER = re.compile(r"(-?[0-9]{1,18})(?:\.0+)?")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+[.,]?[0-9]*|[.,][0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?inf(?:inity)?", re.I)
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
    return [positions[name] for name in names], classes, warnings


def _refuse_strays(
    names: Sequence[str], rows: Sequence[int], strays: Sequence[int], lines: Sequence[int], table: Table
) -> None:
    """Raise SourceError where labels are numbers (in `rows`) but for some strays, rather than names."""
    fractions = [i for i in strays if _FRACTION.fullmatch(names[i])]
    found, meant = {names[i] for i in strays}, {names[i] for i in rows}
    if len(fractions) == len(strays):
        what = "is not a whole number; labels are class numbers or names"
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


def _means_none(value: Any) -> bool:
    """Whether text among class numbers is what pandas, R or SQL write for a missing value."""
    return isinstance(value, str) and value.strip().casefold() in _MISSING


def _as_number(value: Any) -> int | None:
    """The class number that a label is, None where it is no whole number."""
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
        f"or a name; another column can be named with  --label-column"
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
