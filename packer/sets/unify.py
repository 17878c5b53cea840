"""What several sets must have in common to become one, and what is made one: fields, and classes by their names.

dataset.json says once for all shards: format, label offset, what shards made elsewhere call things, and what readers
will decode the images to. Sets that differ there are refused, with the command that makes them alike. Fields are those
of all sets; a sample has those that its set has. Classes are those of all sets, by name: the first set's keep their
numbers, and new names come behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import readers
from cache.errors import SourceError
from cache.messages import quoted
from readers.fields import decode_field
from readers.layout import DatasetInfo
from readers.sample import NO_LABEL

__all__ = [
    "check_alike",
    "check_targets",
    "decode_of",
    "renumbering",
    "target_forms",
    "unified_classes",
    "unified_fields",
]


_TARGET = "target"


def decode_of(*infos: DatasetInfo) -> str:
    """What the images of sets that are alike were checked to decode to; "none" for shards made elsewhere."""
    found = set()
    for info in infos:
        options = info.made.get("options")
        known = options.get("decode") if isinstance(options, dict) else None
        found.add(str(known or ("RGB" if "by" in info.made else "none")))
    return "none" if "none" in found else found.pop()


def check_alike(infos: Mapping[str, DatasetInfo]) -> None:
    """Raise SourceError where sets (by their titles) cannot be one set."""
    (first_title, first), *others = infos.items()
    for title, info in others:
        for what, one, other, remedy in (
            ("the format", first.format, info.format, f"packer reshard {quoted(title)} --to {first.format} -o DIR"),
            ("the label offset", first.label_offset, info.label_offset, f"packer reshard {quoted(title)} -o DIR"),
            ("names in shards made elsewhere", first.adopted, info.adopted, f"packer reshard {quoted(title)} -o DIR"),
            ("decode", decode_of(first), decode_of(info), "packer convert  with the same decode=… for both"),
        ):
            if one != other and not (what == "decode" and "none" in (one, other)):
                raise SourceError(
                    f"{first_title} and {title} cannot be one set: {what} is {_quoted(one)} in the first and "
                    f"{_quoted(other)} in the second; make them alike with  {remedy}"
                )


def _quoted(value: Any) -> str:
    return f"{value!r:.80}"


def unified_fields(sets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The fields of all sets (by their titles), the image first. Raises SourceError where one has two kinds."""
    fields: dict[str, str] = {}
    for title, found in sets.items():
        for name, kind in found.items():
            if fields.setdefault(name, kind) != kind:
                raise SourceError(
                    f"{title}: the field {name} is of the kind {kind!r}, elsewhere of the kind {fields[name]!r}; pack "
                    f"one of them under another name"
                )
    return {name: fields[name] for name in sorted(fields, key=lambda name: name != "image")}


def unified_classes(sets: Sequence[tuple[str, Sequence[str], int]]) -> tuple[str, ...]:
    """The names of the classes of all sets. sets: title, names, and the highest label, -1 for none.

    Raises SourceError where labels have names in one set and none in another.
    """
    named = [title for title, classes, _ in sets if classes]
    for title, classes, highest in sets:
        if highest >= len(classes) and named:
            other = next((name for name in named if name != title), title)
            raise SourceError(
                f"{title}: has the label {highest} and {len(classes)} names of classes, while {other} names its "
                f"classes, so it is unknown which are the same; name them first:  "
                f"packer relabel {quoted(title)} --classes FILE"
            )
    return tuple(dict.fromkeys(name for _, classes, _ in sets for name in classes))


def target_forms(root: Path, info: DatasetInfo) -> dict[str, str]:
    """Dtype and shape of the labels that are not class numbers, by field: those of a sample, as all are alike."""
    found: dict[str, str] = {}
    for split in info.splits if _TARGET in info.fields.values() else ():
        with readers.open(root, split) as reader:
            for name in [name for name, kind in reader.kinds.items() if kind == _TARGET and name not in found]:
                first = next((i for i in range(len(reader)) if reader.has(i, name)), None)
                if first is not None:
                    value = decode_field(_TARGET, reader.read(first, name))
                    found[name] = f"{value.dtype} {list(value.shape)}"
    return found


def check_targets(sets: Mapping[str, Mapping[str, str]]) -> None:
    """Raise SourceError where labels of two sets (by their titles) that are not class numbers differ in their form."""
    known: dict[str, tuple[str, str]] = {}
    for title, forms in sets.items():
        for name, form in forms.items():
            expected, first = known.setdefault(name, (form, title))
            if form != expected:
                raise SourceError(
                    f"{title}: its labels ({name}) are {form}, those of {first} {expected}: all labels of a set are "
                    f"alike; pack one of them again, with labels of the same form or under another name"
                )


def renumbering(old: Sequence[str], new: Sequence[str]) -> npt.NDArray[np.int64]:
    """The new number of each old class by its name, and NO_LABEL at the end, for labels of -1: int64 [classes + 1]."""
    numbers = {name: number for number, name in enumerate(new)}
    return np.array([*(numbers[name] for name in old), NO_LABEL], np.int64)
