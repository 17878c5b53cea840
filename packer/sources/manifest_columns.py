"""Which column of a manifest plays which part.

    path      the image; named by the caller, else the first of PATH_COLUMNS that the table has
    label     named by the caller, else the first of LABEL_COLUMNS; none: no labels
    split     a column called split or subset; none: one split
    files     further files of a sample, one field each: those that the caller names, and every column whose first
              20 values (as far as it has any) are all strings that lead to a file which is not the image itself
    metadata  all other columns, in the order of the table

Names of columns are compared without case where none fits exactly. A field found this way is called like its
column, in lower case (extensions in a tar have no case) and with _ for anything but letters and digits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packer.sources.names import RESERVED_FIELDS, is_field_name
from packer.sources.tables import Table
from readers.errors import SourceError

__all__ = ["LABEL_COLUMNS", "PATH_COLUMNS", "Columns", "choose_columns", "is_missing"]

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
