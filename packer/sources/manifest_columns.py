"""Which column of a manifest means what; the rules are in `packer.sources.manifest`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cache.errors import SourceError
from cache.messages import quoted
from packer.sources.tables import Table, is_missing
from readers.layout import FIELD_KINDS

__all__ = [
    "IS_VALID",
    "LABEL_COLUMNS",
    "RESERVED_FIELDS",
    "Columns",
    "NamedColumns",
    "choose_columns",
    "field_named",
]

PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath", "file_path", "img")
LABEL_COLUMNS = (
    *("label", "class", "target", "category"),
    *("class_id", "label_id", "category_id", "class_name", "label_name", "labels", "classes", "synset"),
)
SPLIT_COLUMNS = ("split", "subset")
_NOISY, _RIGHT, IS_VALID = "noisy_labels_", "noisy_labels_0", "is_valid"
_LOOKED_AT = 20
_KINDS_OF_VALUES = ("text", "json", "array", "boxes", "points", "target")
RESERVED_FIELDS = ("image", "json", "label", "key", "shard", "cls")  # the containers use these themselves


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns by part; files maps field to column, and kinds to its kind, where that was said. values: the fields
    of which the column holds the value, and not the path of a file."""

    path: str
    label: str | None
    split: str | None
    files: Mapping[str, str]
    metadata: tuple[str, ...]
    kinds: Mapping[str, str]
    values: frozenset[str]

    def with_target(self, field: str) -> Columns:
        """The same, where the column of labels holds targets and so becomes a field. Raises SourceError."""
        assert self.label is not None
        if field in self.files:
            both = f"{self.files[field]!r} and {self.label!r}"
            raise SourceError(f"the columns {both} would both become the field {field!r}; rename one")
        files, kinds = {**self.files, field: self.label}, {**self.kinds, field: "target"}
        return replace(self, label=None, files=files, kinds=kinds, values=self.values | {field})


class NamedColumns(NamedTuple):
    """The columns that the caller names; None for the usual names."""

    path: str | None = None
    label: str | None = None
    split: str | None = None


def choose_columns(table: Table, named: NamedColumns, fields: Mapping[str, str], folder: str) -> Columns:
    """The part of every column. Raises SourceError, with the columns there are, where one is missing."""
    path, label, split = named
    for name, argument in zip(named, ("path_column", "label_column", "split_column"), strict=True):
        if name is not None:
            _required(table, name, f"({argument}={name!r})")
    path = path or _first(table, PATH_COLUMNS)
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
    label = label or _first(table, LABEL_COLUMNS, taken)
    split = split or _first(table, SPLIT_COLUMNS, taken | {label})
    if any(name.startswith(_NOISY) for name in table.columns):
        label = label or next((name for name in table.columns if name == _RIGHT and name not in taken), None)
        split = split or next((name for name in table.columns if name == IS_VALID and name != label), None)
    rest = [name for name in table.columns if name not in taken | {label, split}]
    found = _file_columns(table, rest, path, folder)
    files = dict(fields)
    for column in found:
        field = field_named(column)
        if field in files:
            raise SourceError(
                f"{table.path}: the columns {files[field]!r} and {column!r} would both become the field "
                f"{field!r}; name one of them:  --field {quoted(f'NAME={column}')}  (in Python: "
                f"fields={{'NAME': {column!r}}})"
            )
        files[field] = column
    given = {field: column for field, column in fields.items() if kinds.get(field) in _KINDS_OF_VALUES}
    paths = _file_columns(table, list(given.values()), path, folder)
    values = frozenset(field for field, column in given.items() if column not in paths)
    return Columns(path, label, split, files, tuple(name for name in rest if name not in found), kinds, values)


def _listed(table: Table) -> str:
    return ", ".join(map(repr, table.columns)) or "none"


def _required(table: Table, name: str, argument: str) -> str:
    if name not in table.columns:
        raise SourceError(f"{table.path}: no column {name!r} {argument}; it has {_listed(table)}")
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
    """What the field of a column is called."""
    name = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_") or "file"
    return f"{name}_file" if name in RESERVED_FIELDS else name


def _file_columns(table: Table, candidates: list[str], path: str, folder: str) -> list[str]:
    """Those of the candidates that name files. Reads only as many rows as that needs."""
    counts = dict.fromkeys(candidates, 0)  # of the files in a column; one with anything else is removed
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
    """Whether a further field can be called so in every container: in a tar it is an extension, which has no case."""
    return re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) is not None and name not in RESERVED_FIELDS
