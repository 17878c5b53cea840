"""Other labels: for whole classes by their names, or for single samples by a table with the columns key and label.

A label is the name of a class, or a whole number; nothing, NaN and -1 mean none. A name that the set does not have yet
is a new class, behind the others. A third column, split, says which split a key is in, if it is in several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError, UnknownNameError
from cache.messages import listed
from packer.sets.pieces import Piece
from packer.sources.tables import is_missing, open_table
from readers.sample import NO_LABEL

__all__ = ["LabelChange", "labels_by_key", "mapped_classes", "read_labels"]

_WHOLE = re.compile(r"[+-]?\d{1,18}(\.0+)?")


@dataclass(frozen=True)
class LabelChange:
    """New labels of single samples. labels: (split, "" for any; key) -> (label as written, where it is written)."""

    title: str
    labels: Mapping[tuple[str, str], tuple[Any, str]]

    @classmethod
    def of(cls, labels: Mapping[str, Any], title: str = "labels") -> LabelChange:
        """From labels by key."""
        return cls(title, {("", key): (label, f"{title}: {key}") for key, label in labels.items()})


def read_labels(path: Path) -> LabelChange:
    """Read a table (.csv, .tsv, .jsonl, .parquet). Raises SourceError: no such column, or two labels of one key."""
    table = open_table(path)
    for name in ("key", "label"):
        if name not in table.columns:
            raise SourceError(f"{path}: no column {name!r}; it has {', '.join(table.columns)}, expected key and label")
    found: dict[tuple[str, str], tuple[Any, str]] = {}
    for number, row in table.rows():
        key, label, where = row.get("key"), row.get("label"), table.where(number)
        split = row.get("split")
        if not isinstance(key, str) or not key:
            raise SourceError(f"{where}: the key is {key!r:.80}, expected a text")
        place = ("" if is_missing(split) else str(split), key)
        if found.setdefault(place, (label, where))[0] != label and not (
            is_missing(label) and is_missing(found[place][0])
        ):
            raise SourceError(f"{where}: the key {key!r} has the label {label!r} here, and {found[place][0]!r} before")
    return LabelChange(str(path), found)


def mapped_classes(
    classes: Sequence[str], names: Mapping[str, str], title: str
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The classes under new names, and the new number of each label: int64 [classes + 1], the last one for none.

    Raises UnknownNameError for a class that there is not, ValueError for an empty name.
    """
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise UnknownNameError(f"{title}: no class {unknown[0]!r}; it has {listed(classes) or 'none'}")
    if not all(names.values()):
        raise ValueError("a class cannot have an empty name")
    renamed = [names.get(name, name) for name in classes]
    new = tuple(dict.fromkeys(renamed))
    numbers = {name: number for number, name in enumerate(new)}
    return new, np.array([*(numbers[name] for name in renamed), NO_LABEL], np.int64)


def labels_by_key(
    splits: Mapping[str, Sequence[Piece]], classes: Sequence[str], change: LabelChange
) -> tuple[tuple[str, ...], dict[str, tuple[Piece, ...]]]:
    """The classes and the splits with the labels of a change.

    Raises UnknownNameError for a key that no sample has, SourceError for a label that means nothing.
    """
    numbering = _Numbering(
        classes, any(bool((p.current_labels >= 0).any()) for parts in splits.values() for p in parts)
    )
    numbers = {place: numbering.number(label, where) for place, (label, where) in change.labels.items()}
    used: set[tuple[str, str]] = set()
    changed: dict[str, tuple[Piece, ...]] = {}
    for name, pieces in splits.items():
        wanted = {key: (split, key) for split, key in numbers if split == ""}
        wanted |= {key: (split, key) for split, key in numbers if split == name}
        new: list[Piece] = []
        for piece in pieces:
            places = [(i, wanted[key]) for i, key in enumerate(piece.keys) if key in wanted]
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
    """Class numbers of labels as they are written; new names become new classes."""

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
                    f"{where}: no class is called {text!r}, and classes of this set are called by numbers"
                )
            if number >= 0 and not (self._count and number >= self._count):
                if not self._count:
                    self._first_number = self._first_number or f"{where}: the label is {text}"
                    self._refuse_both()
                return number
            raise SourceError(f"{where}: the label is {text}, expected -1 to {self._count - 1}, or the name of a class")
        if not isinstance(label, str) or not self._takes_names:
            what = "a text" if self._takes_names else "a whole number, as all labels of this set"
            raise SourceError(f"{where}: the label is {label!r:.80}, expected {what}")
        number = self._numbers.setdefault(text, len(self._numbers))
        self._refuse_both()
        return number

    def _refuse_both(self) -> None:
        if self._first_number and self._numbers and not self._count:
            raise SourceError(
                f"{self._first_number}, and others are names, such as {next(iter(self._numbers))!r}; a set without "
                f"classes gets numbers alone, or names alone"
            )
