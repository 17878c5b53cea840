"""Sources of rows with columns, one sample per row; and labels that are not class numbers: fields of the kind target.

    numbers   most values have a fraction, or all are floating-point numbers and any has a fraction: float32, NaN for
              a missing value
    vectors   lists of numbers of equal length; in CSV as JSON, "[0, 1, 1]": float32, or int64 if all are whole numbers
              and some are neither 0 nor 1
    names     lists of texts: float32, 1 for each class that is named, in the sorted order of all names, which are the
              classes of the set; an empty list names none

The first 1,000 values decide whether a column contains one of these; then all values must, or it is an error.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena
from packer.sources.base import FileSource, SourceListing, check_names, numbered, of_sample
from packer.sources.tables import (
    LABEL_COLUMNS,
    RESERVED_FIELDS,
    Table,
    field_named,
    first_column,
    json_payload,
    means_none,
    number_labels,
    splits_by_value,
)
from readers.fields import check_field, encode_field
from readers.layout import FieldName
from readers.opening.tree import unique_keys
from readers.table import Buffer, Names

__all__ = ["CAPTION_COLUMNS", "ColumnSource", "Row", "Rows", "Targets", "is_mask", "target_field", "targets_of"]


_LOOKED_AT = 1000
_MOST_CLASSES = 1 << 20


def target_field(column: str) -> str:
    """The name of the field for a column of targets: that of the column, unless containers use it themselves."""
    return FieldName("target" if column.lower() in RESERVED_FIELDS else field_named(column))


@dataclass(frozen=True, slots=True)
class Targets:
    """A column of targets.

    length: of its vectors, -1 for single numbers. dtype: "" for the dtype of the values. classes: the names of the
    elements of vectors; values are then lists of names, or of their numbers.
    """

    length: int
    dtype: str = "float32"
    classes: tuple[str, ...] = ()

    def payload(self, value: Any) -> bytes:
        """The bytes of a value of the column. Raises BadSampleError."""
        value = _parsed(value)
        if self.length >= 0 and not isinstance(value, list):
            raise BadSampleError(f"its label is {value!r:.60}, expected a list")
        if self.classes:
            known = {name: number for number, name in enumerate(self.classes)}
            vector = np.zeros(len(self.classes), np.float32)
            for item in value if isinstance(value, list) else ():
                number = known.get(item.strip(), -1) if isinstance(item, str) else item
                if not isinstance(number, int) or not 0 <= number < len(vector):
                    raise BadSampleError(f"its label names {item!r:.60}, which is none of {len(vector)} classes")
                vector[number] = 1
            return bytes(encode_field("target", vector))
        if self.length < 0 and means_none(value):
            value = math.nan
        try:
            return bytes(encode_field("target", np.array(value, self.dtype or None)))
        except (ValueError, TypeError, OverflowError) as error:
            raise BadSampleError(f"its label {value!r:.60} is not {self.length} numbers: {error}") from error


def is_mask(data: Buffer) -> bool:
    """Whether an encoded image can be a mask."""
    try:
        check_field("mask", data)
    except BadSampleError:
        return False
    return True


def targets_of(values: Callable[[], Iterable[tuple[int, Any]]], table: Table) -> Targets | None:
    """The targets in the column of labels, None if it contains class numbers or names.

    values: returns (row number, value) of every row, each time it is called. Raises SourceError, naming the row.
    """
    head = [_parsed(value) for _, value in itertools.islice(values(), _LOOKED_AT)]
    if 2 * sum(isinstance(value, list) for value in head) > sum(not means_none(value) for value in head):
        return _vectors(values(), table)
    return Targets(-1) if _are_fractions(head) else None


def _parsed(value: Any) -> Any:
    """A list from its JSON text, a tuple, or an array."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return list(value) if isinstance(value, tuple | np.ndarray) else value


def _are_fractions(values: Sequence[Any]) -> bool:
    """Whether values are numbers with fractions, rather than class numbers with a mistake among them."""
    present = [value for value in values if not means_none(value)]
    try:
        numbers = [float(value) for value in present]
    except (TypeError, ValueError):
        return False
    fractions = sum(not number.is_integer() for number in numbers)
    return fractions > 0 and (all(isinstance(value, float) for value in present) or 2 * fractions > len(numbers))


def _vectors(values: Iterable[tuple[int, Any]], table: Table) -> Targets:
    length, is_whole, is_binary = -1, True, True
    names: set[str] = set()
    first = 0
    for row, value in values:
        vector = _parsed(value)
        if not isinstance(vector, list):
            raise SourceError(
                f"{table.where(row)}: the label {value!r:.60} is not a list, and others are; write [] for no names, "
                f"and a vector in every row"
            )
        if vector and all(isinstance(item, str) for item in vector):
            names.update(item.strip() for item in vector)
            continue
        if not all(isinstance(item, int | float) for item in vector):
            raise SourceError(f"{table.where(row)}: the label {value!r:.60} is not a list of numbers, or of names")
        if not vector:
            continue
        if length >= 0 and len(vector) != length:
            raise SourceError(
                f"{table.where(row)}: the label has {len(vector)} numbers, that of {table.unit} {first} has {length}: "
                f"all labels have the same length"
            )
        first, length = (row, len(vector)) if length < 0 else (first, length)
        is_whole &= all(isinstance(item, int) for item in vector)
        is_binary &= all(item in (0, 1) for item in vector)
    if names and length >= 0:
        raise SourceError(f"{table.path}: some labels are lists of names, others of numbers ({table.where(first)})")
    if names:
        if "" in names or len(names) > _MOST_CLASSES:
            raise SourceError(f"{table.path}: {len(names):,} class names, one of them perhaps empty")
        return Targets(len(names), classes=tuple(sorted(names)))
    return Targets(max(length, 0), "int64" if is_whole and not is_binary else "float32")


# ------------------------------------------------------------------------------
# The role of each column of a record.
#
# image     the column of images with a usual name, else the first one; further ones are separate fields, masks if they
#           are named so and their first value can be one
# target    the column of labels if it contains numbers with fractions, or arrays (`packer.sources.columns`)
# label     named by the caller; else a column of class labels, else one of numbers or texts with a usual name
# caption   a column of texts called caption, captions, text or prompt
# arrays, bytes    separate fields
# json      all other columns, together


CONTENTS = ("image", "mask", "class", "integer", "number", "text", "texts", "array", "bytes", "value")
"""Kinds of columns; numbers may have fractions, "texts" are several per row, "value" is any JSON value."""
_IMAGE_COLUMNS = ("image", "img", "images", "jpg", "jpeg", "png", "webp", "picture", "photo", "x")
CAPTION_COLUMNS = ("caption", "captions", "text", "prompt")
_MORE_LABELS = ("y", "cls", "fine_label")
_NAMES = ("class", "integer", "text")
_TARGETS = ("number", "array", "texts", "value")
_FIELD_KINDS = {"image": "image", "mask": "mask", "array": "array", "bytes": "file"}


@dataclass(frozen=True, slots=True)
class Roles:
    """fields: field -> kind, in order; columns: field -> column, for all fields but json.

    label: None for none. target: the field with the labels, if they are not class labels.
    metadata: the columns of the json.
    """

    fields: Mapping[str, str]
    columns: Mapping[str, str]
    label: str | None
    metadata: tuple[str, ...]
    target: str | None = None


def choose_roles(contents: Mapping[str, str], label: str | None, where: object) -> Roles:
    """The role of every column. contents: column -> one of CONTENTS; label: the column named by the caller.

    Raises SourceError if there is no image, or no such label.
    """
    images = [name for name, kind in contents.items() if kind == "image"]
    image = first_column(images, _IMAGE_COLUMNS) or next(iter(images), None)
    if image is None:
        there = ", ".join(f"{name!r} ({kind})" for name, kind in contents.items())
        raise SourceError(f"{where}: no column of images; it has {there or 'none'}")
    target = label if contents.get(label or "") in _TARGETS else None
    label = None if target else label
    if label is not None and contents.get(label) not in _NAMES:
        problem = "no column" if label not in contents else "neither numbers nor names in the column"
        possible = [name for name, content in contents.items() if content in _NAMES]
        raise SourceError(
            f"{where}: {problem} {label!r} (label_column={label!r}); labels could be in {', '.join(possible) or 'none'}"
        )
    usual = (*LABEL_COLUMNS, *_MORE_LABELS)
    for kinds in () if target else (("class",), ("integer", "text")):
        of_kind = [name for name, kind in contents.items() if kind in kinds]
        label = label or first_column(of_kind, usual) or (of_kind[0] if kinds == ("class",) and of_kind else None)
    if label is None and target is None:
        target = first_column([name for name, kind in contents.items() if kind == "number"], usual)
    texts = [name for name, kind in contents.items() if kind in ("text", "texts") and name != label]
    caption = first_column(texts, CAPTION_COLUMNS)
    fields, columns = {"image": "image"}, {"image": image}
    if target is not None:
        fields[target_field(target)], columns[target_field(target)] = "target", target
    if caption is not None:
        fields["caption"], columns["caption"] = "text", caption
    metadata = []
    for name, kind in contents.items():
        if name in (image, label, caption, target):
            continue
        if kind not in _FIELD_KINDS:
            metadata.append(name)
            continue
        field = field_named(name)
        if field in columns:
            both = f"{columns[field]!r} and {name!r}"
            raise SourceError(f"{where}: the columns {both} would both become the field {field!r}; rename one")
        fields[field], columns[field] = _FIELD_KINDS[kind], name
    if metadata:
        fields["json"] = "json"
    return Roles(fields, columns, label, tuple(metadata), target and target_field(target))


# ------------------------------------------------------------------------------
# The base of sources whose samples are rows: Hugging Face, MDS, FFCV.


Row: TypeAlias = Callable[[str, str], Any]
"""Returns the value of a column of a row for a field of a kind: the bytes of an image, mask or file, else an argument
for `encode_field`; "json" for a JSON value. Raises BadSampleError."""
_ROWS = "rows"  # the prefix of numeric keys if a column names the splits


@dataclass(slots=True)
class Rows:
    """Rows of a file. places: int64 [n, k]; sizes: bytes of each; values: of the requested columns.

    names: of the images, None if some have none.
    """

    places: npt.NDArray[np.int64]
    sizes: npt.NDArray[Any]
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    names: Sequence[str | None] | None = None


class ColumnSource(FileSource):
    """Files of rows.

    label_column: None for the usual names. split_column: its values are the splits, instead of those of the files.
    shuffles, estimated: as in a listing.
    """

    shuffles: bool = True
    estimated: bool = False

    def __init__(
        self, root: str | os.PathLike[str], label_column: str | None = None, split_column: str | None = None
    ) -> None:
        super().__init__(root)
        self.label_column, self.split_column = label_column, split_column
        self.roles = Roles({}, {}, None, ())
        self.targets: Targets | None = None

    @abstractmethod
    def find(self, split: str | None) -> Mapping[str, Sequence[Any]]:
        """The files, or other parts, of each split, for `read_rows`. split: the name of one without a name."""

    @abstractmethod
    def contents(self) -> dict[str, str]:
        """The kind of each column, of CONTENTS, after `find` was called."""

    @abstractmethod
    def read_rows(self, part: Any, columns: Sequence[str]) -> Rows:
        """The rows of a part, with the values of these columns."""

    @abstractmethod
    def open_rows(self) -> AbstractContextManager[Callable[[Any], Row]]:
        """A function from a place to its row."""

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of the numbers in a column, if the files state them."""
        return ()

    def target_of(self, column: str) -> Targets | None:
        """The targets in a column, None if its values are packed in their own dtype."""
        return None

    def warnings(self) -> list[str]:
        """Further warnings about the files."""
        return []

    def list_files(self, split: str | None) -> SourceListing:
        parts = self.find(split)
        if self.split_column is not None:
            parts = {_ROWS: [part for group in parts.values() for part in group]}
        contents = self.contents()
        self._take_splits(contents)
        self.roles = roles = choose_roles(contents, self.label_column, self.root)
        self.targets = None if roles.target is None else self.target_of(roles.columns[roles.target])
        listing = SourceListing({}, roles.fields, warnings=self.warnings(), shuffles=self.shuffles)
        listing.estimated = self.estimated
        columns = [name for name in dict.fromkeys((roles.label, self.split_column)) if name is not None]
        read = {name: [self.read_rows(part, columns) for part in group] for name, group in parts.items()}
        for name, rows in read.items():
            listing.splits[name] = self._split(name, rows)
        every = [rows for group in read.values() for rows in group]
        if roles.label is not None:
            self._number_labels(listing, [value for rows in every for value in rows.values[roles.label]])
        listing.classes = listing.classes or (self.targets.classes if self.targets else ())
        if self.split_column is not None:
            names = dict(enumerate(self.class_names(self.split_column)))
            values = [names.get(value, value) for rows in every for value in rows.values[self.split_column]]
            where = f"{self.root}: column {self.split_column!r}"
            listing.splits = splits_by_value(listing.splits[_ROWS], values, where)
        return listing

    def _take_splits(self, contents: dict[str, str]) -> None:
        """Remove the column of splits from `contents`, unless it is the label. Raises SourceError."""
        name = self.split_column
        if name is not None and contents.get(name) not in _NAMES:
            possible = ", ".join(name for name, content in contents.items() if content in _NAMES)
            raise SourceError(
                f"{self.root}: no column {name!r} of names (split_column={name!r}); splits could be in "
                f"{possible or 'none'}"
            )
        if name is not None and name != self.label_column:
            del contents[name]

    def _split(self, name: str, read: Sequence[Rows]) -> Any:
        places = np.concatenate([rows.places for rows in read]) if read else np.empty((0, 1), np.int64)
        sizes = np.concatenate([rows.sizes for rows in read]) if read else 0
        part = numbered(name, places, sizes, len(self.roles.fields))
        if all(rows.names is not None for rows in read):
            names = Names.of(name or "" for rows in read for name in rows.names or ())
            if len(part) and len(names) == len({*names} - {""}) == len(part):
                check_names(names, str(self.root))
                part.keys = unique_keys(names)
                part.names.columns = (names, *part.names.columns[1:])
        return part

    def _number_labels(self, listing: SourceListing, values: Sequence[Any]) -> None:
        """Number the labels of all samples, over all splits, since a name means the same in each."""
        label = self.roles.label or ""
        table = Table(self.root / label, ())
        numbers, classes, warnings = number_labels(values, range(1, len(values) + 1), table)
        listing.classes = self.class_names(label) or classes
        listing.warnings += warnings
        labels, first = np.array(numbers, np.int64), 0
        wrong = np.flatnonzero(labels >= len(listing.classes))
        if listing.classes and len(wrong):
            raise SourceError(
                f"{self.root}: row {wrong[0] + 1} has the {label!r} {labels[wrong[0]]}, the last is "
                f"{len(listing.classes) - 1}"
            )
        for part in listing.splits.values():
            part.labels, first = labels[first : first + len(part)], first + len(part)

    @contextmanager
    def open_files(self) -> Iterator[_ColumnReader]:
        with self.open_rows() as row_of:
            yield _ColumnReader(self.roles, self.targets, row_of)


class _ColumnReader:
    """Makes fields from rows."""

    def __init__(self, roles: Roles, targets: Targets | None, row_of: Callable[[Any], Row]) -> None:
        self._roles, self._targets, self._row_of = roles, targets, row_of

    def read(self, place: Any, arena: Arena) -> Sequence[Buffer | None]:
        roles, value_of = self._roles, self._row_of(place)
        payloads: list[Buffer | None] = []
        for name, kind in roles.fields.items():
            if name == "json":
                record = {column: value_of(column, "json") for column in roles.metadata}
                payloads.append(json_payload(record, roles.metadata))
                continue
            with of_sample(f"its column {roles.columns[name]!r}"):
                value = value_of(roles.columns[name], kind)
                if kind == "target" and self._targets is not None:
                    value = self._targets.payload(value)
                elif value is not None and kind not in ("image", "mask", "file"):
                    value = encode_field(kind, value)
                payloads.append(value)
        return payloads
