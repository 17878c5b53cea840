"""The index of a new set, made of rows of the indexes of other sets.

A piece is some samples of one split of one set, in their stored order, possibly with other labels and longer keys. The
splits of a new set are lists of pieces. Their shards are listed piece by piece, and separate shards of fields after all
others, so that, as in every index, samples are in the order of the shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import readers
from cache.errors import SourceError, UnknownNameError
from cache.messages import listed, quoted
from packer.sources.tables import is_missing, open_table
from readers.fields import decode_field
from readers.layout import DatasetInfo, ShardInfo
from readers.opening.packed import packed_columns
from readers.reader import json_payloads
from readers.table import ABSENT, COLUMNS, NO_LABEL, Strings, Table, column_names, decode_name, encode_name
from readers.where import TableFacts, json_columns

__all__ = [
    "LabelChange",
    "Piece",
    "PieceColumns",
    "SplitShards",
    "check_alike",
    "check_targets",
    "decode_of",
    "labels_by_key",
    "mapped_classes",
    "open_pieces",
    "read_labels",
    "renumbering",
    "shards_of_split",
    "target_forms",
    "unified_classes",
    "unified_fields",
]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Some samples of a split of a set.

    root, info, split: the set, and the split, that the samples are from.
    table: the samples, in stored order.
    labels: labels that replace those of the index, int64 [n].
    prefix: the prefix of their keys.
    extra: columns that replace those of the index, by name.
    """

    root: Path
    info: DatasetInfo
    split: str
    table: Table
    labels: Int64s | None = None
    prefix: str = ""
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole split, unchanged."""
        return self.table.rows is None and self.labels is None and not self.prefix and not self.extra

    @property
    def current_labels(self) -> Int64s:
        """Class numbers, int64 [n]."""
        return self.table.labels if self.labels is None else self.labels

    @cached_property
    def keys(self) -> Strings:
        keys = self.table.columns.keys()
        keys = keys if self.table.rows is None else keys.take(self.table.rows)
        return Strings.of(self.prefix + key for key in keys) if self.prefix else keys

    def take(self, indices: Int64s) -> Piece:
        """The samples at `indices`, which are in ascending order."""
        if len(indices) == len(self):
            return self
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, table=self.table.take(indices), labels=labels)

    def relabelled(self, numbers: Int64s) -> Piece:
        """Labels mapped through `numbers`; unlabelled samples get numbers[-1]. Returns itself if nothing changes."""
        labels = self.current_labels
        new = numbers[labels]
        return self if np.array_equal(new, labels) else replace(self, labels=new)

    def columns(self, names: Collection[str]) -> dict[str, list[Any]]:
        """The columns of the table that its set was packed from, by `readers.where.json_columns`."""
        with readers.open(self.root, self.split, verify=True) as reader:
            rows = self.table.rows
            return json_columns(json_payloads(reader, np.arange(len(self)) if rows is None else rows), names)

    def facts(
        self,
        split: str,
        classes: Sequence[str],
        fields: Sequence[str],
        columns: Callable[[Collection[str]], Mapping[str, Sequence[Any]]],
    ) -> TableFacts:
        """The facts for expressions, as a part of a table with these classes, fields and columns."""
        return _PieceFacts(self, split, classes, fields, columns)


class _PieceFacts(TableFacts):
    def __init__(self, piece: Piece, split: str, classes: Sequence[str], fields: Sequence[str], columns: Any) -> None:
        super().__init__(piece.table, None, split, piece.labels, classes, columns)
        self._piece, self._fields = piece, fields
        self.keys = piece.keys

    def has(self, field: str) -> npt.NDArray[np.bool_]:
        if field in self._fields and field not in self._piece.table.fields:
            return np.zeros(len(self), np.bool_)
        return super().has(field)


def open_pieces(root: Path, info: DatasetInfo) -> dict[str, tuple[Piece, ...]]:
    """The splits of a set, each as one piece."""
    return {name: (Piece(root, info, name, Table(packed_columns(root, info, name))),) for name in info.splits}


class SplitShards(NamedTuple):
    """The shards of a new split.

    shards: in order, each with the piece that it belongs to (a shard may be listed for several), and the number of the
        piece's samples in it: 0 for a shard of a field.
    numbers: for each piece, the new number of each shard of its old split, int64.
    """

    shards: list[tuple[Piece, ShardInfo]]
    numbers: list[Int64s]


def shards_of_split(pieces: Sequence[Piece], separate: Sequence[str]) -> SplitShards:
    """The shards with the samples of these pieces, and those with their fields of `separate`."""
    shards: list[tuple[Piece, ShardInfo]] = []
    numbers = [np.zeros(max(1, len(piece.info.splits[piece.split].shards)), np.int64) for piece in pieces]
    for piece, new in zip(pieces, numbers, strict=True):
        known = piece.info.splits[piece.split].shards
        counts = np.bincount(piece.table.column("shard"), minlength=len(known))
        for number in np.flatnonzero(counts).tolist():
            new[number] = len(shards)
            shards.append((piece, replace(known[number], samples=int(counts[number]))))
    for piece, new in zip(pieces, numbers, strict=True):
        for number in _shards_of_fields(piece, separate).tolist():
            new[number] = len(shards)
            shards.append((piece, replace(piece.info.splits[piece.split].shards[number], samples=0)))
    return SplitShards(shards, numbers)


def _shards_of_fields(piece: Piece, separate: Sequence[str]) -> Int64s:
    """The numbers of a piece's shards of separate fields."""
    numbers = [np.zeros(0, np.int64)]
    for name in separate:
        if name in piece.table.columns.separate:
            has = piece.table.field_column(name, "offset") != np.uint64(ABSENT)
            numbers.append(np.unique(piece.table.shard_column(name)[has]).astype(np.int64))
    return np.unique(np.concatenate(numbers))


class PieceColumns:
    """The columns of a piece, for `packer.columns.write_index`.

    numbers: the new number of each shard.
    separate: the fields that have separate shards in the new set.
    """

    def __init__(self, piece: Piece, numbers: Int64s, separate: Sequence[str]) -> None:
        self._piece, self._numbers = piece, numbers
        self._known = {
            *piece.extra,
            *(name.removesuffix(".npy") for name in column_names(piece.table.fields, separate)),
        }
        self._texts: tuple[str, Strings] | None = None  # cached, since blob and offsets are requested one by one

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name in self._piece.extra:
            return self._piece.extra[name]
        table = self._piece.table
        if name == "label":
            return self._piece.current_labels
        if name == "shard":
            return self._shards(table.column("shard"))
        if name in COLUMNS:
            return table.column(name)
        field, _, column = name.rpartition(".")
        if column == "shard":
            return self._shards(table.shard_column(field) if field in table.fields else table.column("shard"))
        if name == "key" or name.endswith(".name"):
            return self._strings(name).blob
        if name == "key.offset" or name.endswith(".name.offset"):
            return self._strings(field).offsets
        return table.field_column(field, column)

    def _shards(self, numbers: npt.NDArray[Any]) -> Int64s:
        shard_numbers: Int64s = self._numbers[numbers]
        return shard_numbers

    def _strings(self, name: str) -> Strings:
        """The keys, or the names of a field."""
        if self._texts is None or self._texts[0] != name:
            self._texts = name, self._piece.keys if name == "key" else self._names(name.removesuffix(".name"))
        return self._texts[1]

    def _names(self, field: str) -> Strings:
        names = self._piece.table.names(field)
        if not self._piece.prefix:
            return names
        old = self._piece.table.keys  # names are stored relative to the keys
        return Strings.of(
            encode_name(decode_name(name, key), new)
            for name, key, new in zip(names, old, self._piece.keys, strict=True)
        )


# Unifying sets: the requirements, and how their fields and classes are joined.
#
# dataset.json states once for all shards: format, label offset, names in foreign shards, and the form to which readers
# will decode the images. Sets that differ there are refused, with the command that makes them alike. The fields are
# those of all sets; a sample has the fields of its set. Classes are joined by name: those of the first set keep their
# numbers, and new names follow.


_TARGET = "target"


def decode_of(*infos: DatasetInfo) -> str:
    """The form to which the images of these sets were checked to decode; "none" for foreign shards."""
    modes = set()
    for info in infos:
        options = info.made.get("options")
        known = options.get("decode") if isinstance(options, dict) else None
        modes.add(str(known or ("RGB" if "by" in info.made else "none")))
    return "none" if "none" in modes else modes.pop()


def check_alike(infos: Mapping[str, DatasetInfo]) -> None:
    """Raise SourceError if sets (by their titles) cannot be joined."""
    (first_title, first), *others = infos.items()
    for title, info in others:
        for subject, value, other, remedy in (
            ("the format", first.format, info.format, f"packer reshard {quoted(title)} --to {first.format} -o DIR"),
            ("the label offset", first.label_offset, info.label_offset, f"packer reshard {quoted(title)} -o DIR"),
            ("names in shards made elsewhere", first.adopted, info.adopted, f"packer reshard {quoted(title)} -o DIR"),
            ("decode", decode_of(first), decode_of(info), "packer convert  with the same decode=… for both"),
        ):
            if value != other and not (subject == "decode" and "none" in (value, other)):
                raise SourceError(
                    f"{first_title} and {title} cannot be one set: {subject} is {_quoted(value)} in the first and "
                    f"{_quoted(other)} in the second; make them alike with  {remedy}"
                )


def _quoted(value: Any) -> str:
    return f"{value!r:.80}"


def unified_fields(sets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The fields of all sets (by their titles), the image first. Raises SourceError if one has two kinds."""
    fields: dict[str, str] = {}
    for title, kinds in sets.items():
        for name, kind in kinds.items():
            if fields.setdefault(name, kind) != kind:
                raise SourceError(
                    f"{title}: the field {name} has the kind {kind!r}, elsewhere the kind {fields[name]!r}; pack "
                    f"one of them under another name"
                )
    return {name: fields[name] for name in sorted(fields, key=lambda name: name != "image")}


def unified_classes(sets: Sequence[tuple[str, Sequence[str], int]]) -> tuple[str, ...]:
    """The class names of all sets. sets: title, class names, and the highest label, -1 for none.

    Raises SourceError if labels have names in one set and none in another.
    """
    named = [title for title, classes, _ in sets if classes]
    for title, classes, highest in sets:
        if highest >= len(classes) and named:
            other = next((name for name in named if name != title), title)
            raise SourceError(
                f"{title}: has the label {highest} and {len(classes)} class names, while {other} names its "
                f"classes, so it is unknown which are the same; name them first:  "
                f"packer relabel {quoted(title)} --classes FILE"
            )
    return tuple(dict.fromkeys(name for _, classes, _ in sets for name in classes))


def target_forms(root: Path, info: DatasetInfo) -> dict[str, str]:
    """Dtype and shape of the labels that are not class numbers, by field, from one sample, since all are alike."""
    forms: dict[str, str] = {}
    for split in info.splits if _TARGET in info.fields.values() else ():
        with readers.open(root, split) as reader:
            for name in [name for name, kind in reader.kinds.items() if kind == _TARGET and name not in forms]:
                first = next((i for i in range(len(reader)) if reader.has(i, name)), None)
                if first is not None:
                    value = decode_field(_TARGET, reader.read(first, name))
                    forms[name] = f"{value.dtype} {list(value.shape)}"
    return forms


def check_targets(sets: Mapping[str, Mapping[str, str]]) -> None:
    """Raise SourceError if labels that are not class numbers differ in dtype or shape. sets: by their titles."""
    known: dict[str, tuple[str, str]] = {}
    for title, forms in sets.items():
        for name, form in forms.items():
            expected, first = known.setdefault(name, (form, title))
            if form != expected:
                raise SourceError(
                    f"{title}: its labels ({name}) are {form}, those of {first} {expected}: all labels of a set have "
                    f"one dtype and shape; repack one of them, with matching labels or under another name"
                )


def renumbering(old: Sequence[str], new: Sequence[str]) -> npt.NDArray[np.int64]:
    """The new number of each old class, by name, and NO_LABEL at the end, for labels of -1: int64 [classes + 1]."""
    numbers = {name: number for number, name in enumerate(new)}
    return np.array([*(numbers[name] for name in old), NO_LABEL], np.int64)


# --- new labels of whole classes or of single samples ---------------------------------------------------------------
# New labels of single samples are in a table with the columns key and label. A label is a class name or a whole number;
# an empty cell, NaN and -1 mean no label. An unknown name becomes a new class, after the others. A third column, split,
# names the split of a key that occurs in several.


_WHOLE = re.compile(r"[+-]?\d{1,18}(\.0+)?")


@dataclass(frozen=True)
class LabelChange:
    """New labels of single samples. labels: (split, "" for any; key) -> (label as written, where it is written)."""

    title: str
    labels: Mapping[tuple[str, str], tuple[Any, str]]

    @classmethod
    def of(cls, labels: Mapping[str, Any], title: str = "labels") -> LabelChange:
        """New labels by key."""
        return cls(title, {("", key): (label, f"{title}: {key}") for key, label in labels.items()})


def read_labels(path: Path) -> LabelChange:
    """Read a table (.csv, .tsv, .jsonl, .parquet). Raises SourceError: missing column, or two labels for one key."""
    table = open_table(path)
    for name in ("key", "label"):
        if name not in table.columns:
            raise SourceError(f"{path}: no column {name!r}; it has {', '.join(table.columns)}, expected key and label")
    known: dict[tuple[str, str], tuple[Any, str]] = {}
    for number, row in table.rows():
        key, label, where = row.get("key"), row.get("label"), table.where(number)
        split = row.get("split")
        if not isinstance(key, str) or not key:
            raise SourceError(f"{where}: the key is {key!r:.80}, expected a text")
        place = ("" if is_missing(split) else str(split), key)
        if known.setdefault(place, (label, where))[0] != label and not (
            is_missing(label) and is_missing(known[place][0])
        ):
            raise SourceError(f"{where}: the key {key!r} has the label {label!r} here, and {known[place][0]!r} before")
    return LabelChange(str(path), known)


def mapped_classes(
    classes: Sequence[str], names: Mapping[str, str], title: str
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The classes under new names, and the new number of each label: int64 [classes + 1], the last one for no label.

    Raises UnknownNameError for an unknown class, ValueError for an empty name.
    """
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise UnknownNameError(f"{title}: no class {unknown[0]!r}; it has {listed(classes) or 'none'}")
    if not all(names.values()):
        raise ValueError("a class cannot have an empty name")
    renamed = [names.get(name, name) for name in classes]
    new = tuple(dict.fromkeys(renamed))
    return new, renumbering(renamed, new)


def labels_by_key(
    splits: Mapping[str, Sequence[Piece]], classes: Sequence[str], change: LabelChange
) -> tuple[tuple[str, ...], dict[str, tuple[Piece, ...]]]:
    """The classes and the splits with the labels of a change.

    Raises UnknownNameError for a key that no sample has, SourceError for an invalid label.
    """
    numbering = _Numbering(
        classes, any(bool((p.current_labels >= 0).any()) for parts in splits.values() for p in parts)
    )
    numbers = {place: numbering.number(label, where) for place, (label, where) in change.labels.items()}
    used: set[tuple[str, str]] = set()
    changed: dict[str, tuple[Piece, ...]] = {}
    for name, pieces in splits.items():
        places_of = {key: (split, key) for split, key in numbers if split == ""}
        places_of |= {key: (split, key) for split, key in numbers if split == name}
        new: list[Piece] = []
        for piece in pieces:
            places = [(i, places_of[key]) for i, key in enumerate(piece.keys) if key in places_of]
            used.update(place for _, place in places)
            labels = np.array(piece.current_labels)
            labels[[i for i, _ in places]] = [numbers[place] for _, place in places]
            same = np.array_equal(labels, piece.current_labels)
            new.append(piece if same else replace(piece, labels=labels))
        changed[name] = tuple(new)
    missing = [place for place in numbers if place not in used]
    if missing:
        split, key = missing[0]
        where = change.labels[missing[0]][1]
        raise UnknownNameError(f"{where}: no sample has the key {key!r}{f' in the split {split!r}' if split else ''}")
    return numbering.classes, changed


class _Numbering:
    """Class numbers of the labels in a table; new names become new classes."""

    def __init__(self, classes: Sequence[str], has_labels: bool) -> None:
        self._numbers = {name: number for number, name in enumerate(classes)}
        self._takes_names = bool(classes) or not has_labels
        self._count = len(classes)
        self._are_like_numbers = any(map(_WHOLE.fullmatch, classes))
        self._first_number = ""  # in a set without classes

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def number(self, label: Any, where: str) -> int:
        if is_missing(label):
            return NO_LABEL
        text = str(label).strip()
        if text in self._numbers:
            return self._numbers[text]
        if isinstance(label, (int, float, str)) and not isinstance(label, bool) and _WHOLE.fullmatch(text):
            number = int(text.partition(".")[0])
            if number == NO_LABEL:
                return number
            if self._are_like_numbers:
                raise SourceError(
                    f"{where}: no class is called {text!r}, and the classes of this set are called by numbers"
                )
            if number >= 0 and not (self._count and number >= self._count):
                if not self._count:
                    self._first_number = self._first_number or f"{where}: the label is {text}"
                    self._refuse_both()
                return number
            raise SourceError(f"{where}: the label is {text}, expected -1 to {self._count - 1}, or a class name")
        if not isinstance(label, str) or not self._takes_names:
            expected = "a text" if self._takes_names else "a whole number, as all labels of this set"
            raise SourceError(f"{where}: the label is {label!r:.80}, expected {expected}")
        number = self._numbers.setdefault(text, len(self._numbers))
        self._refuse_both()
        return number

    def _refuse_both(self) -> None:
        if self._first_number and self._numbers and not self._count:
            raise SourceError(
                f"{self._first_number}, and others are names, such as {next(iter(self._numbers))!r}; a set without "
                f"classes needs either numbers or names"
            )
