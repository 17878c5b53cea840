"""The fields of an item or a batch: their selection, and their values, moved with the image.

Every set has a main field, usually "image", and "label" (an int, -1 without one), "key" (a str) and "index" (the number
of the sample). If labels are floats or vectors, they are in a field of kind target, and "label" stands for it: [] or
[k], in a batch [n] or [n, k]. Other fields of the set are decoded by their kind (`readers.fields`); a sample that lacks
one has None. Bytes that cannot be decoded make a bad sample, as for an image.

If the image is cropped, resized, flipped or turned, masks, boxes and points follow it (`FieldMoves`).

Only requested fields are read. Requesting fields changes neither the order nor the random draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, UnknownNameError
from readers.augment.geometry import Job, Pass
from readers.augment.ops.base import Op, Stage
from readers.augment.recipe import Placement
from readers.fields import decode_field
from readers.options import FieldOptions
from readers.reader import SAMPLE_ERRORS, Reader
from readers.table import ABSENT, Buffer, Table, checked_indices, upright_sides

_PLAIN_FIELDS = ("label", "key", "index")
# Encoded fields of a sample by name, None for a missing field; or the error of reading them.
Payloads: TypeAlias = Mapping[str, Buffer | None] | Exception


class Fields:
    """The fields of a batch or an item.

    fields: names, for tuples; or a mapping {name in the batch: field}, for dictionaries.
    main: the field that the caller decodes itself; it takes the place of "image" in the default fields.
    stored: the fields other than `main`, "label", "key" and "index".
    stacked: masks that every sample has; for images of one size they are stacked into one tensor.
    targets: fields of kind target, which are stacked into one tensor.
    label: the field of the label: the first target, or "label" for class numbers.

    Raises UnknownNameError for a field that the set lacks, TypeError for a path instead of a reader, and ValueError.
    """

    def __init__(
        self, fields: Sequence[str] | Mapping[str, str] | FieldOptions, reader: Reader, main: str = "image"
    ) -> None:
        options = fields if isinstance(fields, FieldOptions) else FieldOptions(names=fields)
        fields = (main, "label") if options.names == FieldOptions.names else options.names
        if isinstance(fields, str):
            raise UnknownNameError(f"fields are a list of names, not {fields!r}: write  fields=({fields!r},)")
        if isinstance(reader, str | os.PathLike):
            raise TypeError(f"expected a reader, not a path: write  readers.open({os.fspath(reader)!r}, split=…)")
        known = list(dict.fromkeys((main, *_PLAIN_FIELDS, *reader.fields)))
        self._names = tuple(fields) if isinstance(fields, Mapping) else None
        self._kinds = _kinds_of(reader)
        self.label = next((name for name, kind in self._kinds.items() if kind == "target"), "label")
        names = tuple(fields.values()) if isinstance(fields, Mapping) else tuple(fields)
        self.wanted = tuple(self.label if name == "label" else name for name in names)
        for name in self.wanted:
            if name == "image" and name not in reader.fields:
                raise UnknownNameError(
                    f"no field 'image': batches of images need one, and this set has {', '.join(reader.fields)}; "
                    f"take  readers.torch.ImageDataset(reader)  in a DataLoader, which returns {reader.fields[0]!r}"
                )
            if name not in known:
                raise UnknownNameError(f"no field {name!r}; a batch can have {', '.join(known)}")
        self.options = options
        self.stored = tuple(dict.fromkeys(name for name in self.wanted if name not in (main, *_PLAIN_FIELDS)))
        self._moves = FieldMoves(self._kinds, self.stored, self.options)
        self._read = self._moves.order
        table: Table | None = getattr(reader, "table", None)
        masks = [name for name in self.stored if self._kinds[name] == "mask"]
        self.stacked = frozenset(name for name in masks if not _is_lacking(table, name))
        self.targets = frozenset(name for name in self.stored if self._kinds[name] == "target")
        if self.moving and "image" in self.wanted and table is not None and table.forms and not table.has_headers:
            raise ValueError(
                f"{self.moving[0]} cannot follow images that a cache has resized, because their original size is not "
                f"in an index: open the cache with keep='encoded'"
            )

    @property
    def moving(self) -> tuple[str, ...]:
        """The fields that follow the image when it is cropped, resized, flipped or turned."""
        return self._moves.names

    def kind(self, name: str) -> str:
        """The kind of a stored field."""
        return self._kinds[name]

    def is_array(self, name: str) -> bool:
        """Whether the values of a stored field are arrays."""
        return self._kinds[name] in (*MOVING, "array", "image", "target")

    def check_ops(self, ops: Sequence[Op]) -> None:
        """Raise ValueError for ops that a field cannot follow."""
        if "image" not in self.wanted or not ops:
            return
        images = [name for name in self.stored if self._kinds[name] == "image"]
        if images:
            raise ValueError(
                f"ops change only the image, and {images[0]} is another image of the sample: leave it out of fields, "
                f"or take its bytes, with reader.with_kinds({{{images[0]!r}: 'file'}})"
            )
        mixing = [op for op in ops if op.stage is Stage.BATCH]
        if mixing and self.moving:
            raise ValueError(
                f"{mixing[0]!r} mixes images, which {self.moving[0]} does not follow: leave one of them out"
            )

    def refuse_targets(self, subject: str) -> None:
        """Raise ValueError for a set whose labels or images a DALI or rocAL pipeline cannot read. subject: its name."""
        if self._kinds.get("image") == "pixels":
            raise ValueError(f"{subject} decodes images, but this set has raw pixels: use ImageLoader")
        if self.label != "label":
            raise ValueError(
                f"{subject} returns class numbers, but the labels of this set are in its field {self.label!r}: use "
                f"ImageLoader or readers.torch, or leave out the label and read that field by the index"
            )

    def check_apart(self, why: str, advice: str) -> None:
        """Raise ValueError for fields that cannot follow the image, because its changes are not known here."""
        apart = [name for name in self.stored if name in self.moving or self._kinds[name] == "image"]
        if apart and "image" in self.wanted:
            raise ValueError(
                f"{why}, and {apart[0]} would not follow it: {advice}, or take its bytes, with "
                f"reader.with_kinds({{{apart[0]!r}: 'file'}})"
            )

    def collect(self, value: Callable[[str], Any]) -> Any:
        """`value(field)` of each field, as a tuple or a dictionary."""
        values = tuple(value(name) for name in self.wanted)
        return values if self._names is None else dict(zip(self._names, values, strict=True))

    # --- fields of every set --------------------------------------------------------------------------------------
    @staticmethod
    def value(reader: Reader, row: int, name: str) -> int | str:
        """The label, index or key of one row."""
        if name == "label":
            return int(reader.labels[row])
        return row if name == "index" else reader.keys[row]

    @staticmethod
    def column(reader: Reader, rows: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64] | list[str]:
        """Labels (int64 [n], -1 without one), indices (int64 [n]) or keys (list of str) of some rows."""
        if name == "label":
            labels: npt.NDArray[np.int64] = reader.labels[rows]
            return labels
        keys = reader.keys
        return rows if name == "index" else [keys[row] for row in rows.tolist()]

    # --- stored fields --------------------------------------------------------------------------------------------
    def read(self, reader: Reader, rows: Sequence[int] | npt.NDArray[np.int64], *more: str) -> list[Payloads]:
        """The bytes of the stored fields of some rows, and of `more` fields."""
        numbers, names = [int(row) for row in rows], (*self._read, *more)
        samples: list[Payloads] = []
        for payloads in zip(*_read_columns(reader, numbers, names), strict=True):
            error = next((data for data in payloads if isinstance(data, Exception)), None)
            samples.append(dict(zip(names, payloads, strict=True)) if error is None else error)
        return samples if names else [{} for _ in numbers]

    def decode(self, payloads: Payloads, placement: Placement | None = None) -> dict[str, Any]:
        """The values of the stored fields of a sample; arrays are NumPy arrays.

        placement: maps the image's pixels to their place in the result; None if they stay. Raises BadSampleError, or
        `payloads` if it is an error.
        """
        if isinstance(payloads, Exception):
            raise payloads
        values: dict[str, Any] = {}
        chosen: dict[str, npt.NDArray[np.bool_]] = {}
        for name in self._read:
            data = payloads[name]
            if data is None:
                if name in self.targets:
                    raise BadSampleError(f"has no label: its field {name} is missing")
                values[name] = None
                continue
            try:
                value = decode_field(self._kinds[name], data)
                if placement is not None:
                    value = self._moves.move(name, value, placement, chosen)
            except BadSampleError as error:
                raise BadSampleError(f"field {name}: {error}") from error
            values[name] = value
        return values

    def placement(
        self, reader: Reader, index: int, job: Job | None = None, size: tuple[int, int] = (0, 0)
    ) -> Placement | None:
        """The placement of a sample's image; None if its pixels stay in place, or if no field follows.

        job: the job on the image; None for none.
        size: (height, width) of the upright image before the job, (0, 0) if unknown.
        """
        if not self.moving:
            return None
        table: Table | None = getattr(reader, "table", None)
        before: list[Pass] = []
        if table is not None and table.forms:
            size, before = _conversions(table, index)
        if not all(size) or (job is None and not before):
            return None
        return Placement(size, before if job is None else (*before, *job.before, job.last))


def _kinds_of(reader: Any) -> dict[str, str]:
    """The kinds of a reader's fields; "file" for reader-like objects without kinds."""
    kinds: Mapping[str, str] = getattr(reader, "kinds", {})
    return {name: kinds.get(name, "file") for name in reader.fields}


def _is_lacking(table: Table | None, name: str) -> bool:
    """Whether samples may lack a field."""
    return table is None or bool((table.field_column(name, "offset") == ABSENT).any())


def _read_columns(reader: Reader, rows: list[int], names: Sequence[str]) -> list[Sequence[Buffer | Exception | None]]:
    """The bytes of each field of some rows, read together if possible."""
    if not isinstance(reader, Reader):
        return [[_read_one(reader, row, name) for row in rows] for name in names]
    numbers = checked_indices(rows, reader)
    columns, at = reader.table.columns, reader.table.at(numbers)
    has = {name: columns.field_column(name, "offset")[at] != ABSENT for name in names}
    try:
        data = reader.read_fields({name: numbers[present] for name, present in has.items()})
    except SAMPLE_ERRORS:
        return [[_read_one(reader, row, name) for row in rows] for name in names]
    left = {name: iter(payloads) for name, payloads in data.items()}
    return [
        [next(left[name]) if is_present else None for is_present in present.tolist()] for name, present in has.items()
    ]


def _read_one(reader: Reader, row: int, name: str) -> Buffer | Exception | None:
    try:
        return reader.read(row, name)
    except UnknownNameError:
        return None  # this sample lacks it
    except SAMPLE_ERRORS as error:
        return error


def _conversions(table: Table, index: int) -> tuple[tuple[int, int], list[Pass]]:
    """(height, width) of an upright image as packed, and the passes that caches applied to it."""
    info = table.stored_headers(np.array([index], np.int64))
    heights, widths = upright_sides(info)
    passes: list[Pass] = []
    for form in table.forms:
        passes += form.passes(info)
        info = form.info(info)
    return (int(heights[0]), int(widths[0])), passes


# Fields follow the image when it is cropped, resized, flipped or turned:
#
# mask            same geometry, nearest pixel; `mask_fill` beyond the edges
# boxes           clipped to the visible part; `min_visible` and `keep_boxes` decide on boxes that are cut off
# rows of boxes   arrays and points with a row for each box, by their names: "box_labels" for "boxes", "face_box_ages"
#                 for "face_boxes"; the rows of boxes that are left out are left out, too
# points          moved; points beyond the edges keep coordinates outside the image


MOVING = ("mask", "boxes", "points")


class FieldMoves:
    """Moves the fields of a sample with its image.

    kinds: kinds of all fields of the set. wanted: the requested fields.
    names: the requested fields that follow the image. order: all fields to read, boxes before their rows.
    """

    def __init__(self, kinds: Mapping[str, str], requested: Sequence[str], options: FieldOptions) -> None:
        self._kinds, self._options = kinds, options
        prefixes = {f"{_singular(name)}_": name for name, kind in kinds.items() if kind == "boxes"}
        self._boxes_of = {
            name: boxes
            for name in requested
            for prefix, boxes in prefixes.items()
            if name.startswith(prefix) and kinds[name] in ("array", "points")
        }
        self.names = tuple(name for name in requested if kinds[name] in MOVING or name in self._boxes_of)
        self.order = tuple(dict.fromkeys((*self._boxes_of.values(), *requested)))

    def move(self, name: str, value: Any, placement: Placement, chosen: dict[str, npt.NDArray[np.bool_]]) -> Any:
        """The value of a field for the moved image; call it for fields in their `order`.

        chosen: for each field of boxes of this sample, which boxes are kept; filled here. Raises BadSampleError.
        """
        kind, options = self._kinds[name], self._options
        if kind == "mask":
            return placement.mask(value, options.mask_fill)
        if kind == "boxes":
            boxes, shares = placement.boxes(value)
            visible = (shares > 0) & (shares >= options.min_visible)
            if options.keep_boxes:
                boxes[~visible, 2:] = boxes[~visible, :2]
                return boxes
            chosen[name] = visible
            return boxes[visible]
        if kind == "points":
            value = placement.points(value)
        rows = chosen.get(self._boxes_of.get(name, ""))
        if rows is None:
            return value
        if not value.ndim or len(value) != len(rows):
            raise BadSampleError(
                f"has shape {list(value.shape)}, expected a row for each of {len(rows)} {self._boxes_of[name]}"
            )
        return value[rows]


def _singular(name: str) -> str:
    return name[:-2] if name.endswith("boxes") else name
