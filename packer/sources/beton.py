"""A file of FFCV (.beton), version 2.

    header         uint16 version · uint16 fields · uint32 page size · uint64 samples · uint64 place of the allocations
    a field        uint8 type · 16 bytes of name · 1024 bytes of arguments, for each field
    metadata       of each sample, its fields one after the other, each at its alignment:
                     0 float     float64
                     1 int       int64
                     2 image     uint8 mode (0 JPEG, 1 pixels), uint16 width, uint16 height, uint64 place
                     3 bytes     uint64 place, uint64 bytes
                     4 array     uint64 place; the dtype and the shape are arguments
                     5 JSON      like bytes, followed by a zero
                     6 tensor    like an array
    heap           the data that the places point to
    allocations    uint64 sample, place, bytes of each place; to the end of the file

All little-endian. (ffcv/types.py and ffcv/fields of libffcv/ffcv.) The allocations give the size of an image. JPEGs
keep their bytes, pixels become PNG. Each place must be in the heap, and together they cannot take more than its size. A
file with user-defined fields (type 255) has an unknown layout, and is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from packer.formats.base import png_of
from packer.sources.columns import ColumnSource, Row, Rows
from packer.sources.shards import split_of_name
from packer.sources.streams import ByteFile, PlainFile

__all__ = ["BetonSource"]

_HEADER = Struct("<HHIQQ")
_FIELD = Struct("<B16s1024s")
_VERSION, _MAX_FIELDS, _CUSTOM = 2, 256, 255
_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("place", "<u8")])
_BYTES = np.dtype([("place", "<u8"), ("bytes", "<u8")])
_TYPES = {0: "<f8", 1: "<i8", 2: _IMAGE, 3: _BYTES, 4: "<u8", 5: _BYTES, 6: "<u8"}
_CONTENTS = {0: "number", 1: "integer", 2: "image", 3: "bytes", 4: "array", 5: "value", 6: "array"}
_SHAPE = Struct("<32QQ")  # sides, length of the description of the dtype
_PLAIN = re.compile(r"[<>|=]?[biuf][1248]")
_ALLOCATION = np.dtype([("sample", "<u8"), ("place", "<u8"), ("bytes", "<u8")])
_JPEG, _PIXELS = 0, 1
_MAX_JSON_BYTES = 64 << 20


class _Field(NamedTuple):
    """A field of the file. dtype, shape: of an array."""

    name: str
    kind: int
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def array_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class BetonSource(ColumnSource):
    """The samples in the file at `root`. label_column: the field with the label, None for the usual names.

    Place: (number of the sample, start and bytes of each of its fields in the heap).
    """

    kind = "FFCV file"

    def __init__(self, root: str | os.PathLike[str], label_column: str | None = None) -> None:
        super().__init__(root, label_column)
        self.fields: dict[str, _Field] = {}

    def find(self, split: str | None) -> Mapping[str, Sequence[int]]:
        with PlainFile(self.root) as file:
            self._read_fields(file, self.root.stat().st_size)
        return {split or split_of_name(self.root.name): [0]}

    def contents(self) -> dict[str, str]:
        return {field.name: _CONTENTS[field.kind] for field in self.fields.values()}

    def _read_fields(self, file: ByteFile, size: int) -> None:
        """Read the fields and the positions of all parts. Raises SourceError if the file claims more than it has."""
        version, count, _, samples, allocations = _HEADER.unpack(file.read(0, _HEADER.size))
        if version != _VERSION or not 0 < count <= _MAX_FIELDS:
            raise SourceError(
                f"{self.root}: version {version} with {count} fields, expected version {_VERSION} of FFCV"
            )
        start = _HEADER.size + count * _FIELD.size
        described = _FIELD.iter_unpack(file.read(_HEADER.size, count * _FIELD.size))
        self.fields = {field.name: field for field in (self._field(*values) for values in described)}
        if len(self.fields) < count:
            raise SourceError(f"{self.root}: two fields have the same name")
        types = [(f"f{number}", _TYPES[field.kind]) for number, field in enumerate(self.fields.values())]
        self.record, self.start = np.dtype(types, align=True), start
        heap = start + samples * self.record.itemsize
        if not heap <= allocations <= size or (size - allocations) % _ALLOCATION.itemsize:
            raise SourceError(
                f"{self.root}: has {size:,} bytes, but {samples:,} samples up to {heap:,} and allocations from "
                f"{allocations:,} on: truncated, or the program that wrote it did not finish"
            )
        self._samples, self._heap, self._allocations, self._size = samples, heap, allocations, size

    def _field(self, kind: int, name: bytes, arguments: bytes) -> _Field:
        text = name.partition(b"\0")[0].decode("latin-1")
        if kind not in _TYPES:
            problem = "user-defined, with a layout that only the program that wrote it knows; write the file without it"
            problem = problem if kind == _CUSTOM else "expected 0 to 6"
            raise SourceError(f"{self.root}: the field {text!r} is of the type {kind}, {problem}")
        if kind not in (4, 6):
            return _Field(text, kind)
        *sides, length = _SHAPE.unpack_from(arguments)
        while sides and not sides[-1]:
            sides.pop()
        try:
            [(_, dtype)] = json.loads(arguments[_SHAPE.size : _SHAPE.size + length])
        except (ValueError, TypeError, RecursionError) as error:
            raise SourceError(f"{self.root}: the field {text!r} is an array of an unknown kind: damaged") from error
        if not isinstance(dtype, str) or not _PLAIN.fullmatch(dtype) or not 0 < math.prod(sides) <= 1 << 40:
            raise SourceError(f"{self.root}: the field {text!r} is an array {sides} of {dtype!r:.40}, expected numbers")
        return _Field(text, kind, dtype, tuple(sides))

    def read_rows(self, part: int, columns: Sequence[str]) -> Rows:
        with PlainFile(self.root) as file:
            data = file.read(self.start, self._samples * self.record.itemsize)
            table = np.frombuffer(file.read(self._allocations, self._size - self._allocations), _ALLOCATION)
        records = np.frombuffer(data, self.record)
        table = table[np.argsort(table["place"], kind="stable")]
        places: list[npt.NDArray[Any]] = [np.arange(self._samples)]
        sizes = np.full(self._samples, 256 * len(self.fields), np.int64)
        values, claimed = {}, 0
        for number, field in enumerate(self.fields.values()):
            column = records[f"f{number}"]
            if field.name in columns:
                values[field.name] = column.tolist()
            if field.kind in (0, 1):
                continue
            starts = column if field.kind in (4, 6) else column["place"]
            counts = self._bytes_of(field, column, table)
            end = np.uint64(self._allocations)
            wrong = (starts < self._heap) | (starts > end) | (counts > end - np.minimum(starts, end))
            self._refuse(field, wrong & (counts > 0), f"outside of the data, {self._heap:,} to {self._allocations:,}")
            claimed += int(counts.sum())
            places += [starts, counts]
            sizes += counts.astype(np.int64) * 17 // 16
        if claimed > self._allocations - self._heap:
            raise SourceError(
                f"{self.root}: its samples claim {claimed:,} bytes of the {self._allocations - self._heap:,} that "
                f"there are: places are shared, so it is damaged"
            )
        return Rows(np.column_stack(places).astype(np.int64), sizes, values)

    def _bytes_of(self, field: _Field, column: Any, table: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """The bytes of each sample in a field; for an image, from the last allocation at its place."""
        if field.kind in (4, 6):
            return np.full(len(column), field.array_bytes, np.uint64)
        if field.kind != 2:
            return np.asarray(column["bytes"])
        if not len(table):
            raise SourceError(f"{self.root}: has no table of allocations: the program that wrote it did not finish")
        at = np.maximum(np.searchsorted(table["place"], column["place"], side="right") - 1, 0)
        self._refuse(field, table["place"][at] != column["place"], "where nothing was allocated")
        return np.asarray(table["bytes"][at], np.uint64)

    def _refuse(self, field: _Field, wrong: npt.NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            raise SourceError(f"{self.root}: sample {int(np.argmax(wrong))}: {field.name!r} is {why}: damaged")

    @contextmanager
    def open_rows(self) -> Iterator[Callable[[Any], Row]]:
        with PlainFile(self.root) as file:

            def row(place: tuple[int, ...]) -> Row:
                number, *heap = place
                data = file.read(self.start + number * self.record.itemsize, self.record.itemsize)
                record = np.frombuffer(data, self.record)[0]
                pairs = iter(zip(heap[::2], heap[1::2], strict=True))
                at = {field.name: next(pairs) for field in self.fields.values() if field.kind not in (0, 1)}

                raws = dict(zip(self.fields, record, strict=True))

                def value(name: str, kind: str) -> Any:
                    if name not in at:
                        return raws[name].item()
                    return _value(self.fields[name], raws[name], file.read(*at[name]))

                return value

            yield row


def _value(field: _Field, raw: Any, data: bytes) -> Any:
    if field.kind == 2:
        mode, height, width = int(raw["mode"]), int(raw["height"]), int(raw["width"])
        if mode == _JPEG:
            return data
        if mode != _PIXELS or len(data) != height * width * 3 or not data:
            raise BadSampleError(
                f"is of the mode {mode} and has {len(data):,} bytes, expected pixels {height} x {width} x 3"
            )
        return png_of(np.frombuffer(data, np.uint8).reshape(height, width, 3))
    if field.kind in (4, 6):
        return np.frombuffer(data, field.dtype).reshape(field.shape)
    if field.kind == 5 and len(data) > _MAX_JSON_BYTES:
        raise BadSampleError(f"has {len(data):,} bytes of JSON, expected at most {_MAX_JSON_BYTES:,}")
    return data if field.kind == 3 else json.loads(data.partition(b"\0")[0])
