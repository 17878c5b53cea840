"""The index of a new set, made of rows of the indexes of others.

A piece is some samples of one split of one set, in their stored order, maybe with other labels and longer keys. The
splits of a new set are lists of pieces. Their shards are listed piece by piece, those of fields with shards of their
own behind all others, so that, as in every index, samples are in the order of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import readers
from readers.layout import DatasetInfo, ShardInfo
from readers.opening.packed import packed_columns
from readers.table import ABSENT, COLUMNS, Strings, Table, column_names, decode_name, encode_name
from readers.where import TableFacts, json_columns, json_payloads

__all__ = ["Piece", "PieceColumns", "SplitShards", "open_pieces", "shards_of_split"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Some samples of a split of a set.

    root, info, split: the set, and the split that they are from.
    table: the samples, in stored order.
    labels: other labels than those of the index, int64 [n].
    prefix: what comes before their keys.
    extra: columns in place of those of the index, by name.
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
        """Whether it is the split as it is."""
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
        """The samples at `indices`, which rise."""
        if len(indices) == len(self):
            return self
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, table=self.table.take(indices), labels=labels)

    def relabelled(self, numbers: Int64s) -> Piece:
        """With the label numbers[label], and numbers[-1] in place of none; itself where that is the same."""
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
        """What an expression sees of it, as a part of a table with these classes, fields and columns."""
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

    shards: in order, each with the piece that it is of (the same shard may be listed for several), and how many of the
        piece's samples it has: 0 for one of a field.
    numbers: for each piece, the new number of each shard of its old split, int64.
    """

    shards: list[tuple[Piece, ShardInfo]]
    numbers: list[Int64s]


def shards_of_split(pieces: Sequence[Piece], separate: Sequence[str]) -> SplitShards:
    """The shards that the samples of these pieces are in, and those with their fields of `separate`."""
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
    """The numbers of the shards of a piece's fields that are not in the shards of its samples."""
    found = [np.zeros(0, np.int64)]
    for name in separate:
        if name in piece.table.columns.separate:
            has = piece.table.field_column(name, "offset") != np.uint64(ABSENT)
            found.append(np.unique(piece.table.shard_column(name)[has]).astype(np.int64))
    return np.unique(np.concatenate(found))


class PieceColumns:
    """The columns of a piece, for `packer.columns.write_index`.

    numbers: the new number of each shard.
    separate: the fields that have shards of their own in the new set.
    """

    def __init__(self, piece: Piece, numbers: Int64s, separate: Sequence[str]) -> None:
        self._piece, self._numbers = piece, numbers
        self._known = {
            *piece.extra,
            *(name.removesuffix(".npy") for name in column_names(piece.table.fields, separate)),
        }
        self._texts: tuple[str, Strings] | None = None  # the blob and the offsets are asked for one after the other

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
        found: Int64s = self._numbers[numbers]
        return found

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
