"""A table of image files: CSV, TSV, JSON Lines or Parquet.

    path      the image, or another main field (`packer.sources.layouts.main_of` of the first row, or the field that the
              caller assigns to this column); named by the caller, else the first of PATH_COLUMNS that the table has
    label     named by the caller, else the first of LABEL_COLUMNS; none: no labels. In the tables of noisy labels,
              noisy_labels_0, which has the right ones. Numbers with fractions, vectors and lists of names become a
              field named after the column (`packer.sources.columns`)
    split     named by the caller, else a column called split or subset; none: one split. In the table of noisy labels
              of imagenette and imagewoof `is_valid`: True is val, False is train
    files     further files of a sample, one field each: those that the caller names, and every column whose first
              20 non-empty values are all strings that name a file other than the image
    kinds     a field that the caller names with a kind of `readers.fields`, {"caption:text": "title"}, has bytes of
              that kind: the files that its column names or, if it names none, its values: text; lists of numbers, also
              as JSON in a string
    metadata  all other columns, in the order of the table

Column names are compared ignoring case if none matches exactly. A field found this way is named after its column, in
lower case (extensions in a tar are case-insensitive) and with _ for anything but letters and digits.

Paths are relative to the manifest's folder, or to `folder`; absolute ones are allowed. A sample's name is its path
relative to that folder; a file outside it is named by its path without the leading "/" and "..", so that no name in a
packed set leads out of it. Two rows of a split must not have the same name.

Files are examined (size, time) when the source is listed, and read in the workers; a missing one makes the sample bad,
whether it is the image or a further file.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from crc32c import crc32c

from cache.errors import BadSampleError, SourceError
from cache.messages import listed
from packer.formats.base import Arena
from packer.sources.base import FileSource, ListingBuilder, SourceListing, check_names, safe_name, size_and_time
from packer.sources.columns import target_field, targets_of
from packer.sources.folder import read_named
from packer.sources.layouts import MainField, main_of
from packer.sources.tables import (
    IS_VALID,
    Columns,
    NamedColumns,
    Row,
    Table,
    choose_columns,
    is_missing,
    json_payload,
    number_labels,
    open_table,
    split_of_value,
)
from readers.fields import encode_field
from readers.opening.tree import unique_keys
from readers.table import Buffer

__all__ = ["ManifestListing", "ManifestReader", "ManifestSource", "name_in_folder"]

# One entry per field: (path, bytes) of a file, the payload itself, or None for an absent field.
Place: TypeAlias = tuple[tuple[str, int] | bytes | None, ...]

_SPLIT_OF_VALID = {"true": "val", "false": "train"}
_MISSING, _NOT_A_FILE = -1, -2
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class ManifestSource(FileSource):
    """The files that the table at `root` names.

    path_column, label_column, split_column: None for the usual names.
    fields: field name, or name:kind -> column of further files or values.
    folder: the folder to which paths are relative, None for the folder of the manifest.
    """

    kind = "manifest"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        path_column: str | None = None,
        label_column: str | None = None,
        split_column: str | None = None,
        fields: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(root)
        self.path_column, self.label_column, self.split_column = path_column, label_column, split_column
        self.fields = dict(fields or {})
        self.folder = os.path.abspath(folder if folder is not None else self.root.parent)

    def list_files(self, split: str | None) -> SourceListing:
        if not os.path.isdir(self.folder):
            raise SourceError(f"{self.folder}: no such folder; paths in {self.root} are relative to it")
        table = open_table(self.root)
        named = NamedColumns(self.path_column, self.label_column, self.split_column)
        columns = choose_columns(table, named, self.fields, self.folder)
        listing = ManifestListing(table, columns, self.folder, split).listing()
        if columns.label is None and columns.metadata:
            listing.warnings.append(
                f"{self.root}: no column is called label, class, target, …, so no image has a label; it has "
                f"{listed([*map(repr, columns.metadata)], 20)}: if one holds labels, pass  label_column='COLUMN'"
            )
        return listing

    def mark(self) -> int:
        """Constant: the listing has all of the table's content, so a rewritten table with the same rows is the same."""
        return 0

    def open(self) -> AbstractContextManager[ManifestReader]:  # type: ignore[override]
        return self.open_files()

    def open_files(self) -> AbstractContextManager[ManifestReader]:
        return nullcontext(ManifestReader(self.folder))

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        yield from self._stamps
        for part in listing.splits.values():
            for place in part.places:
                yield from (os.path.join(self.folder, entry[0]) for entry in place if isinstance(entry, tuple))


class ManifestListing:
    """Builds the listing row by row."""

    def __init__(self, table: Table, columns: Columns, folder: str, split: str | None) -> None:
        self._table, self._columns, self._folder, self._split = table, columns, folder, split
        self._targets = None if columns.label is None else targets_of(self._labels, table)
        if self._targets is not None and columns.label is not None:
            self._columns = columns.with_target(target_field(columns.label))
        arrays = [name for name in self._columns.values if self._columns.kinds[name] == "array"]
        self._dtypes = {name: self._dtype_of(self._columns.files[name]) for name in arrays}
        self._splits: dict[str, ListingBuilder] = {}
        self._lines: dict[str, dict[str, int]] = {}  # split -> name -> line number
        self._main, self._columns = self._choose_main(self._columns)
        self._images = self._missing = 0
        self._first_missing = ""

    def _choose_main(self, columns: Columns) -> tuple[MainField, Columns]:
        """The main field in the column of paths: as given by the caller, or by the name in the first row."""
        named = next((name for name, column in columns.files.items() if column == columns.path), None)
        if named is not None:
            files = {name: column for name, column in columns.files.items() if name != named}
            rest = replace(columns, files=files, values=columns.values - {named})
            return MainField(named, columns.kinds.get(named, "file")), rest
        return main_of(str(row.get(columns.path, "")) for _, row in islice(self._table.rows(), 1)), columns

    def _labels(self) -> Iterator[tuple[int, Any]]:
        return ((line, row.get(self._columns.label or "")) for line, row in self._table.rows())

    def _dtype_of(self, column: str) -> np.dtype[Any]:
        """The common dtype of all arrays in a column, whose numbers may be whole in some rows; int64 without any."""
        dtypes: set[np.dtype[Any]] = set()
        for _, row in self._table.rows():
            with suppress(ValueError, TypeError, RecursionError):  # the row is named when it is added
                values = np.asarray(_parsed(row.get(column)))
                dtypes |= {values.dtype} if values.size and values.dtype.kind in "biuf" else set()
        return np.result_type(*dtypes) if dtypes else np.dtype(np.int64)

    def listing(self) -> SourceListing:
        labels: list[Any] = []
        lines: list[int] = []
        label_column = self._columns.label
        for line, row in self._table.rows():
            self._add(line, row, len(lines))
            lines.append(line)
            labels.append(row.get(label_column) if label_column is not None else None)
        if not lines:
            raise SourceError(f"{self._table.path}: no rows")
        # Over all splits, including unrequested ones, since a label means the same in each.
        numbers, classes, warnings = number_labels(labels, lines, self._table)
        labels_of_rows = np.array(numbers, np.int64)
        if self._targets is not None:
            classes = self._targets.classes
        has_json = bool(self._columns.metadata)
        listing = SourceListing({}, self._fields(), classes, warnings=warnings, json_listed=has_json)
        for name, builder in self._splits.items():
            part = builder.build()
            part.labels = labels_of_rows[part.labels]
            check_names((name for names in part.names for name in names if name), str(self._table.path))
            part.keys = unique_keys(part.names.columns[0])
            listing.splits[name] = part
        if self._images and self._missing == self._images:
            raise SourceError(
                f"{self._table.path}: no image is at the path in its column {self._columns.path!r}; looked for "
                f"{self._first_missing}, relative to {self._folder}; name another folder with  folder='DIR'"
            )
        return listing

    def _fields(self) -> dict[str, str]:
        fields = {self._main.name: self._main.kind} | {
            name: self._columns.kinds.get(name, "file") for name in self._columns.files
        }
        return fields | {"json": "json"} if self._columns.metadata else fields

    def _add(self, line: int, row: Row, position: int) -> None:
        split = self._split_of(line, row)
        part = self._splits.setdefault(split, ListingBuilder(len(self._fields())))
        image = _path(self._table, line, row, self._columns.path)
        if image is None:
            raise SourceError(f"{self._table.where(line)}: no path in the column {self._columns.path!r}")
        parts = [image, *(self._part(line, row, name, column) for name, column in self._columns.files.items())]
        names = tuple(name_in_folder(part, self._folder) if isinstance(part, str) else "" for part in parts)
        if not names[0]:
            raise SourceError(f"{self._table.where(line)}: {image!r} is not the path of a file")
        first = self._lines.setdefault(split, {}).setdefault(names[0], line)
        if first != line:
            raise SourceError(
                f"{self._table.path}: {self._table.unit}s {first} and {line} have the same image "
                f"{names[0]!r}; a set holds a sample once"
            )
        # The label follows when those of all rows are known; until then it is the position of the row.
        part.add(names if not self._columns.metadata else (*names, ""), *self._place(parts, row), label=position)

    def _part(self, line: int, row: Row, name: str, column: str) -> str | bytes | None:
        """The path of a file, or the bytes of a value; None if empty."""
        if name not in self._columns.values:
            return _path(self._table, line, row, column)
        value, kind = row.get(column), self._columns.kinds[name]
        if is_missing(value) and kind != "target":
            return None
        try:
            if kind == "target" and self._targets is not None:
                return self._targets.payload(value)
            parsed = value if kind == "text" else _parsed(value)
            return bytes(encode_field(kind, np.asarray(parsed, self._dtypes[name]) if kind == "array" else parsed))
        except (BadSampleError, ValueError, RecursionError) as error:
            raise SourceError(f"{self._table.where(line)}: column {column!r}, field {name}: {error}") from error

    def _place(self, parts: Sequence[str | bytes | None], row: Row) -> tuple[Any, ...]:
        """The places of a row's payloads, their bytes, and marks of a change."""
        place: list[tuple[str, int] | bytes | None] = []
        total, marks = 0, []
        for part in parts:
            if not isinstance(part, str):
                place.append(part)
                total += len(part or b"")
                marks += [] if part is None else [crc32c(part)]
                continue
            path = os.path.join(self._folder, part)
            size, mtime_ns = _examine(path)
            if not place:
                self._images += 1
                self._missing += size == _MISSING
                self._first_missing = self._first_missing or (path if size == _MISSING else "")
            place.append((part, size))
            total += max(0, size)
            marks.append(mtime_ns)
        if self._columns.metadata:
            payload = json_payload(row, self._columns.metadata)
            place.append(payload)
            total += len(payload or b"")
            marks.append(crc32c(payload or b""))
        return tuple(place), total, *marks

    def _split_of(self, line: int, row: Row) -> str:
        if self._columns.split is None:
            return self._split or "train"
        value = row.get(self._columns.split)
        where = f"{self._table.where(line)}: column {self._columns.split!r}"
        if self._columns.split == IS_VALID:
            name = "" if is_missing(value) else str(value).strip()
            if name.lower() not in _SPLIT_OF_VALID:
                raise SourceError(f"{self._table.where(line)}: {IS_VALID!r} is {name!r}, expected True or False")
            return _SPLIT_OF_VALID[name.lower()]
        return split_of_value(value, where)


def _parsed(value: Any) -> Any:
    """A list from its JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _path(table: Table, line: int, row: Row, column: str) -> str | None:
    """The path in a column, None if empty."""
    value = row.get(column)
    if is_missing(value):
        return None
    if not isinstance(value, str):
        raise SourceError(
            f"{table.where(line)}: the column {column!r} has a {type(value).__name__}, expected the path of a file"
        )
    if _URL.match(value):
        raise SourceError(f"{table.where(line)}: {value!r} is a URL; download the files first, and name those")
    return value


def _examine(path: str) -> tuple[int, int]:
    """(bytes, modification time in ns) of a file."""
    size, time = size_and_time(path)
    return (_NOT_A_FILE if size < 0 and os.path.exists(path) else size), time


class ManifestReader:
    """Reads the files of a row."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def read(self, place: Place, arena: Arena) -> Sequence[Buffer | None]:
        payloads: list[Buffer | None] = []
        for entry in place:
            if not isinstance(entry, tuple):
                payloads.append(entry)
                continue
            path, size = entry
            if size == _NOT_A_FILE:
                raise BadSampleError(f"{path!r} is not a regular file")
            payloads.append(read_named(self._folder, path, size, arena))
        return payloads


def name_in_folder(path: str, folder: str) -> str:
    """The name of a file relative to `folder` (absolute, normalised) if it is below, else its `safe_name`."""
    whole = posixpath.normpath(posixpath.join(folder, path))
    prefix = folder.rstrip("/") + "/"
    return whole[len(prefix) :] if whole.startswith(prefix) else safe_name(path)
