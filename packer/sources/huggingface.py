"""A data set of Hugging Face in Parquet: images in it as `struct{bytes, path}`, or as bytes.

A repository's folder, or one file; `packer.sources.hub_files` says which file is which split. The columns have the
roles of `packer.sources.roles`: ClassLabels have their names, an image keeps its bytes, its path is the sample's name
where all paths of a split differ, and what is neither image nor label is in the field json.

Listing reads the labels and the paths alone. Rows are read a batch at a time and in the order of the files, since a row
group is unpacked from its start; each image is then a view of the batch. Before a row group is read, the headers of its
pages say how much memory that takes (`packer.sources.parquet_pages`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena
from packer.sources.base import FieldNames, SourceListing, SplitListing, check_names, safe_name
from packer.sources.file_sets import FilesSource, numbered_keys, numbered_names, split_named, splits_by_value
from packer.sources.hub_columns import contents_of, looked_at
from packer.sources.hub_files import class_names, features_in, readme_features, splits_of
from packer.sources.hub_targets import hub_targets
from packer.sources.parquet_batches import (
    BinaryColumn,
    batches_of,
    has_child,
    open_parquet,
    parquet_file,
    row_bytes,
    translated,
)
from packer.sources.places import NumberPlaces
from packer.sources.roles import Roles, choose_roles
from packer.sources.tables import Table, column_values, json_payload, number_labels
from packer.sources.targets import Targets
from readers.fields import encode_field
from readers.sample import NO_LABEL, Buffer
from readers.strings import Names, Strings
from readers.tree import unique_keys

__all__ = ["HuggingFaceSource"]

_MAX_LABEL = 1 << 53
_ROWS = "rows"  # what keys of numbers begin with where a column names the splits


@dataclass(frozen=True, slots=True)
class _File:
    """groups: of which rows the row groups are, and how many bytes a row has in them on average."""

    path: Path
    split: str
    group_rows: tuple[int, ...]
    row_bytes: tuple[int, ...]


class HuggingFaceSource(FilesSource):
    """The files at `root`, a folder or a Parquet file.

    label_column: None takes the first ClassLabel. split_column: its values are the splits, instead of the files.
    """

    kind = "Hugging Face data set"

    def __init__(
        self, root: str | os.PathLike[str], label_column: str | None = None, split_column: str | None = None
    ) -> None:
        super().__init__(Path(root))
        self.label_column, self.split_column = label_column, split_column
        self.files: list[_File] = []
        self.roles: Roles | None = None
        self.targets: Targets | None = None

    def list_files(self, split: str | None) -> SourceListing:
        found = splits_of(self.root)
        wanted = split
        if self.split_column is not None:
            found, split = {_ROWS: [path for paths in found.values() for path in paths]}, None
        if split is not None:
            only = len(found) == 1 and self.root.is_file()
            split = split if only else split_named(split, found, self.root)
            found = {split: next(iter(found.values()))} if only else found
        first = next(iter(found.values()))[0]
        with parquet_file(self.note(first)) as file:
            schema, features = file.schema_arrow, features_in(file.schema_arrow.metadata, first)
            features = features if features is not None else readme_features(self.root) or {}
            contents, left = contents_of(schema, features, first)
            contents |= looked_at(file, schema, contents, features)
            self._check_split_column(contents)
        self.roles = roles = choose_roles(contents, self.label_column, self.root)
        self.files = []
        listing = SourceListing({}, roles.fields, warnings=left, shuffles=False, estimated=True)
        labels: dict[str, list[Any]] = {}
        values: list[Any] = []
        for name, paths in found.items():
            parts = [self._list_file(path, name, schema) for path in paths]
            labels[name] = [part[0] for part in parts]
            values += [part[2] for part in parts]
            if split in (None, name):
                listing.splits[name] = self._split(name, [part[1] for part in parts])
        self._number_labels(listing, labels, features)
        if roles.target is not None:
            column = roles.columns[roles.target]
            every = [path for paths in found.values() for path in paths]
            feature, kind = features.get(column), schema.field(column).type
            self.targets = hub_targets(self.root, column, kind, feature, lambda: _values(every, column))
            listing.classes = self.targets.classes
        return listing if self.split_column is None else self._dealt(listing, values, features, wanted)

    def _check_split_column(self, contents: dict[str, str]) -> None:
        """Take the column of splits out of `contents`. Raises SourceError where it cannot be one."""
        name = self.split_column
        if name is None or name == self.label_column:
            return
        if contents.pop(name, None) not in ("class", "integer", "text"):
            possible = [name for name, what in contents.items() if what in ("class", "integer", "text")]
            raise SourceError(
                f"{self.root}: no column {name!r} of names (split_column={name!r}); splits could be in "
                f"{', '.join(possible) or 'none'}"
            )

    def _dealt(
        self, listing: SourceListing, parts: Sequence[Any], features: Mapping[str, Any], wanted: str | None
    ) -> SourceListing:
        """The listing with the splits that a column names. parts: its values by file."""
        column = self.split_column or ""
        values = [value for part in parts for value in column_values(self.root, column, part)]
        feature = features.get(column) or {}
        if feature.get("_type") == "ClassLabel":
            names = class_names(feature, f"{self.root}: {column!r}")
            values = [names[value] if isinstance(value, int) and 0 <= value < len(names) else value for value in values]
        listing.splits = splits_by_value(listing.splits[_ROWS], values, f"{self.root}: column {column!r}")
        if wanted is not None:
            wanted = split_named(wanted, listing.splits, self.root)
            listing.splits = {wanted: listing.splits[wanted]}
        return listing

    def _list_file(self, path: Path, split: str, schema: Any) -> tuple[Any, Any, Any]:
        """(labels, paths of images, splits) of a file, as arrays of pyarrow, which is added to `files`."""
        roles = self._roles()
        with parquet_file(self.note(path)) as file:
            its = file.schema_arrow
            for column in {*roles.columns.values(), roles.label, self.split_column, *roles.metadata} - {None}:
                if column not in its.names or its.field(column).type != schema.field(column).type:
                    raise SourceError(
                        f"{path}: its column {column!r} is missing, or not as in {self.root}'s first file"
                    )
            needed = self._columns()
            rows = tuple(group.rows for group in file.groups)
            sizes = tuple(row_bytes(group, needed) for group in file.groups)
            self.files.append(_File(path, split, rows, sizes))
            return self._read_columns(file, sum(rows))

    def _read_columns(self, file: Any, rows: int) -> tuple[Any, Any, Any]:
        """(labels, paths of images, splits) of all rows, None where there are no such columns."""
        import pyarrow as pa

        label, image = self._roles().label, self._roles().columns["image"]
        has_path = has_child(file.schema_arrow.field(image).type, "path")
        split = self.split_column
        columns = [name for name in dict.fromkeys((label, split)) if name is not None] + [f"{image}.path"] * has_path
        batches = [batch for n in range(len(file.groups)) for batch in batches_of(file, n, columns)] if columns else []
        if columns and sum(batch.num_rows for batch in batches) != rows:
            raise SourceError(f"{file.path}: its pages have other rows than the {rows:,} of its footer: damaged")
        paths = [batch.column(image).field("path") for batch in batches] if has_path else None

        def column(name: str | None) -> Any:
            chunks = [] if name is None else [batch.column(name) for batch in batches]
            return None if name is None else pa.chunked_array(chunks, file.schema_arrow.field(name).type)

        whole = None if paths is None else pa.chunked_array(paths, pa.string() if not paths else paths[0].type)
        return column(label), whole, column(split)

    def _split(self, split: str, paths: Sequence[Any]) -> SplitListing:
        """The listing of a split. Places: (number of the file, row group, row in it)."""
        numbers = [number for number, file in enumerate(self.files) if file.split == split]
        places, sizes = [], []
        for number in numbers:
            file = self.files[number]
            for group, (rows, size) in enumerate(zip(file.group_rows, file.row_bytes, strict=True)):
                column = np.arange(rows, dtype=np.int64)
                places.append(np.column_stack((np.full(rows, number), np.full(rows, group), column)))
                sizes.append(np.full(rows, size))
        count = sum(map(len, places))
        if not count:
            raise SourceError(f"{self.root}: no rows in {split}")
        fields = len(self._roles().fields)
        keys: Any = numbered_keys(split, count)
        names = numbered_names(count, fields)
        found = _distinct_names(self.root, paths, count)
        if found is not None:
            check_names(found, str(self.root))
            keys = unique_keys(found)
            names = FieldNames(found, *numbered_names(count, max(1, fields - 1)).columns[: fields - 1])
        return SplitListing(
            "",
            keys,
            np.full(count, NO_LABEL, np.int64),
            names,
            np.concatenate(sizes).astype(np.int64),
            NumberPlaces(np.concatenate(places).astype(np.int64)),
            np.zeros(count, np.int64),
        )

    def _number_labels(
        self, listing: SourceListing, labels: Mapping[str, list[Any]], features: Mapping[str, Any]
    ) -> None:
        """Labels of all samples, over all splits: a name means the same in each."""
        label = self._roles().label
        if label is None:
            return
        feature = features.get(label) or {}
        if feature.get("_type") == "ClassLabel":
            listing.classes = class_names(feature, f"{self.root}: {label!r}")
        every = (part for parts in labels.values() for part in parts)
        values = [value for part in every for value in column_values(self.root, label, part)]
        rows = Table(self.root / label, ())
        numbers, classes, warnings = number_labels(values, range(1, len(values) + 1), rows)
        listing.classes, listing.warnings = listing.classes or classes, listing.warnings + warnings
        found, first = np.array(numbers, np.int64), 0
        most = len(listing.classes) - 1 if listing.classes else _MAX_LABEL
        wrong = np.flatnonzero(found > most)
        if len(wrong):
            raise SourceError(
                f"{self.root}: row {wrong[0] + 1} has the {label!r} {found[wrong[0]]}, the last is {most}"
            )
        for name, parts in labels.items():
            count = sum(map(len, parts))
            if name in listing.splits:
                listing.splits[name].labels = found[first : first + count]
            first += count

    def _columns(self) -> list[str]:
        """The columns of all fields."""
        roles = self._roles()
        return [*roles.columns.values(), *roles.metadata]

    def _roles(self) -> Roles:
        assert self.roles is not None
        return self.roles

    @contextmanager
    def open(self) -> Iterator[HuggingFaceReader]:
        with closing(HuggingFaceReader(self)) as reader:
            yield reader


class HuggingFaceReader:
    """Reads rows, best in their order: a batch of them is in memory, and the rest of its row group comes after it."""

    def __init__(self, source: HuggingFaceSource) -> None:
        assert source.roles is not None
        self._source, self._roles, self._columns = source, source.roles, source._columns()
        self._file: Any = None
        self._group = (-1, -1)
        self._batches: Iterator[Any] = iter(())
        self._batch: _Batch | None = None

    def read(self, place: tuple[int, int, int], arena: Arena) -> Sequence[Buffer | None]:
        number, group, row = place
        if self._group != (number, group) or (self._batch is not None and row < self._batch.first):
            self._start(number, group)
        path = self._source.files[number].path
        while self._batch is None or row >= self._batch.first + self._batch.rows:
            first = self._batch.first + self._batch.rows if self._batch else 0
            with translated(path):
                found = next(self._batches, None)
            if found is None:
                raise SourceError(f"{path}: row group {group} has {first:,} rows, but claims more: damaged")
            self._batch = _Batch(found, first, self._roles, path, self._source.targets)
        return self._batch.payloads(row - self._batch.first)

    def _start(self, number: int, group: int) -> None:
        path = self._source.files[number].path
        if self._group[0] != number:
            self.close()
            self._source.check(path)
            self._file = open_parquet(path)
        self._group, self._batch = (number, group), None
        self._batches = batches_of(self._file, group, self._columns)

    def close(self) -> None:
        self._group, self._batch, self._batches = (-1, -1), None, iter(())
        if self._file is not None:
            self._file.close()
            self._file = None


class _Batch:
    """Rows of a row group from `first` on."""

    def __init__(self, batch: Any, first: int, roles: Roles, path: Path, targets: Targets | None) -> None:
        self.first, self.rows, self._roles = first, batch.num_rows, roles
        self._binary = {
            field: BinaryColumn(batch.column(column))
            for field, column in roles.columns.items()
            if field not in ("caption", roles.target)
        }
        self._targets = targets
        self._labels = column_values(path, "label", batch.column(roles.columns[roles.target])) if roles.target else []
        caption = roles.columns.get("caption")
        self._texts = column_values(path, caption, batch.column(caption)) if caption is not None else []
        self._rest = {name: column_values(path, name, batch.column(name)) for name in roles.metadata}

    def payloads(self, row: int) -> list[Buffer | None]:
        found: list[Buffer | None] = []
        for field in self._roles.fields:
            if field == "json":
                record = {name: values[row] for name, values in self._rest.items()}
                found.append(json_payload(record, self._roles.metadata))
            elif field == self._roles.target and self._targets is not None:
                found.append(self._targets.payload(self._labels[row]))
            elif field == "caption":
                text = self._texts[row]
                found.append(None if text is None else encode_field("text", text))
            else:
                found.append(self._binary[field].value(row))
        if found[0] is None:
            raise BadSampleError(self._binary["image"].why(row))
        return found


def _values(paths: Sequence[Path], column: str) -> Iterator[Any]:
    """Those of a column in some files."""
    for path in paths:
        with parquet_file(path) as file:
            for group in range(len(file.groups)):
                for batch in batches_of(file, group, [column]):
                    yield from column_values(path, column, batch.column(column))


def _distinct_names(root: Path, paths: Sequence[Any], count: int) -> Strings | None:
    """The names of a split's images, by their paths; None where some have none, or two the same."""
    if any(part is None for part in paths):
        return None
    values = (path for part in paths for chunk in part.chunks for path in column_values(root, "path", chunk))
    found = Names.of(safe_name(path or "") for path in values)
    return found if len(found) == count and "" not in set(found) and len(set(found)) == count else None
