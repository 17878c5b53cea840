"""A file of FFCV (.beton), version 2.

    header         uint16 version · uint16 fields · uint32 page size · uint64 samples · uint64 place of the allocations
    a field        uint8 type · 16 bytes of name · 1024 bytes of arguments, for each field
    metadata       of each sample, its fields one after the other, each at its alignment:
                     0 float     float64
                     1 int       int64
                     2 image     uint8 mode (0 JPEG, 1 pixels), uint16 width, uint16 height, uint64 place
                     3 bytes     uint64 place, uint64 bytes
                     4 array     uint64 place; the dtype and the shape are arguments
                     5 JSON      as bytes, and a zero behind it
                     6 tensor    as an array
    heap           what the places lead to
    allocations    uint64 sample, place, bytes of each place; to the end of the file

All little-endian. (ffcv/types.py and ffcv/fields of libffcv/ffcv.) The allocations say how many bytes an image has.
JPEGs keep their bytes, pixels become PNG. Each place must be in the heap, and together they cannot take more than there
is. A file with fields of the user's own making (type 255) has an unknown layout, and is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena, png_of
from packer.sources.base import FileSource, NumberPlaces, SourceListing, SplitListing
from packer.sources.file_sets import numbered_keys, numbered_names
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile
from packer.sources.tables import json_payload
from packer.sources.targets import Roles, choose_roles
from readers.fields import encode_field
from readers.table import NO_LABEL, Buffer

__all__ = ["BetonSource"]

_HEADER = Struct("<HHIQQ")
_FIELD = Struct("<B16s1024s")
_VERSION = 2
_MAX_FIELDS = 256
_CUSTOM = 255
_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("place", "<u8")])
_BYTES = np.dtype([("place", "<u8"), ("bytes", "<u8")])
_TYPES = {0: "<f8", 1: "<i8", 2: _IMAGE, 3: _BYTES, 4: "<u8", 5: _BYTES, 6: "<u8"}
_CONTENTS = {0: "number", 1: "integer", 2: "image", 3: "bytes", 4: "array", 5: "value", 6: "array"}
_SHAPE = Struct("<32QQ")  # sides, length of the description of the dtype
_PLAIN = re.compile(r"[<>|=]?[biuf][1248]")
_ALLOCATION = np.dtype([("sample", "<u8"), ("place", "<u8"), ("bytes", "<u8")])
_JPEG, _PIXELS = 0, 1
_MAX_JSON_BYTES = 64 << 20
_MAX_LABEL = 1 << 53


class _Field(NamedTuple):
    """A field of the file. dtype, shape: of an array."""

    name: str
    kind: int
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def array_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class _Layout(NamedTuple):
    """Where things are. record: the metadata of a sample."""

    fields: tuple[_Field, ...]
    record: np.dtype[Any]
    samples: int
    metadata: int
    heap: int
    allocations: int


class BetonSource(FileSource):
    """The samples in the file at `root`. label_column: the field that is the label, None takes the usual names."""

    kind = "FFCV file"

    def __init__(self, root: str | os.PathLike[str], label_column: str | None = None) -> None:
        super().__init__(root)
        self.label_column = label_column
        self.layout: _Layout | None = None
        self.roles: Roles | None = None

    def list_file(self, split: str | None) -> SourceListing:
        with closing(PlainFile(self.root)) as file:
            size = self.root.stat().st_size
            self.layout = layout = _read_layout(file, size)
            contents = {field.name: _CONTENTS[field.kind] for field in layout.fields}
            self.roles = choose_roles(contents, self.label_column, self.root)
            shape = (layout.samples,)
            records = np.frombuffer(
                _read(file, layout.metadata, layout.samples * layout.record.itemsize), layout.record
            )
            count = (size - layout.allocations) // _ALLOCATION.itemsize
            table = np.frombuffer(_read(file, layout.allocations, count * _ALLOCATION.itemsize), _ALLOCATION)
        sizes, images = self._sizes(records.reshape(shape), table, layout)
        labels = np.full(layout.samples, NO_LABEL, np.int64)
        if self.roles.label is not None:
            labels = records[_column(layout, self.roles.label)].astype(np.int64)
            wrong = np.flatnonzero((labels < NO_LABEL) | (labels > _MAX_LABEL))
            if len(wrong):
                raise SourceError(
                    f"{self.root}: sample {wrong[0]} has the label {labels[wrong[0]]}; classes count from 0"
                )
        name = split or split_of_name(self.root.name)
        part = SplitListing(
            "",
            numbered_keys(name, layout.samples),
            labels,
            numbered_names(layout.samples, len(self.roles.fields)),
            sizes,
            NumberPlaces(np.column_stack((np.arange(layout.samples), *images))),
            np.zeros(layout.samples, np.int64),
        )
        return SourceListing({name: part}, self.roles.fields)

    def _sizes(
        self, records: npt.NDArray[Any], table: npt.NDArray[Any], layout: _Layout
    ) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
        """At least the bytes of each sample, and those of each of its images. Raises SourceError for lying places."""
        table = table[np.argsort(table["place"], kind="stable")]
        total = np.full(layout.samples, 256 * len(layout.fields), np.int64)
        images: list[npt.NDArray[np.uint64]] = []
        claimed = 0
        for number, field in enumerate(layout.fields):
            column = records[f"f{number}"]
            if field.kind == 2:
                found = self._allocated(column["place"], table, field)
                starts, images = column["place"], [*images, found]
            elif field.kind in (3, 5):
                starts, found = column["place"], column["bytes"]
            elif field.kind in (4, 6):
                starts, found = column, np.full(len(column), field.array_bytes, np.uint64)
            else:
                continue
            end = np.uint64(layout.allocations)
            wrong = (starts < layout.heap) | (starts > end) | (found > end - np.minimum(starts, end))
            wrong &= found > 0
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                raise SourceError(
                    f"{self.root}: sample {i}: {field.name!r} is {int(found[i]):,} bytes at {int(starts[i]):,}, "
                    f"outside of the data, which are at {layout.heap:,} to {layout.allocations:,}: damaged"
                )
            claimed += int(found.sum())
            total += found.astype(np.int64) + found.astype(np.int64) // 16
        if claimed > layout.allocations - layout.heap:
            raise SourceError(
                f"{self.root}: its samples claim {claimed:,} bytes of the {layout.allocations - layout.heap:,} that "
                f"there are: places are shared, so it is damaged"
            )
        return total, [image.astype(np.int64) for image in images]

    def _allocated(
        self, places: npt.NDArray[np.uint64], table: npt.NDArray[Any], field: _Field
    ) -> npt.NDArray[np.uint64]:
        """The bytes at each place, by the allocations."""
        if not len(table):
            raise SourceError(f"{self.root}: has no table of allocations: the program that wrote it did not finish")
        # Of several allocations at one place only the last has bytes.
        at = np.searchsorted(table["place"], places, side="right") - 1
        wrong = np.flatnonzero((at < 0) | (table["place"][np.maximum(at, 0)] != places))
        if len(wrong):
            raise SourceError(
                f"{self.root}: sample {wrong[0]}: {field.name!r} is at {int(places[wrong[0]]):,}, where nothing was "
                f"allocated: damaged"
            )
        return np.asarray(table["bytes"][at], np.uint64)

    @contextmanager
    def open_file(self) -> Iterator[BetonReader]:
        with closing(PlainFile(self.root)) as file:
            yield BetonReader(self, file)


class BetonReader:
    """Reads samples. Place: (number of the sample, the bytes of each of its images)."""

    def __init__(self, source: BetonSource, file: PlainFile) -> None:
        assert source.layout is not None and source.roles is not None
        self._file, self._layout, self._roles = file, source.layout, source.roles

    def read(self, place: tuple[int, ...], arena: Arena) -> Sequence[Buffer | None]:
        number, *sizes = place
        layout = self._layout
        data = _read(self._file, layout.metadata + number * layout.record.itemsize, layout.record.itemsize)
        record = np.frombuffer(data, layout.record)[0]
        sizes_left = iter(sizes)
        found: dict[str, Any] = {}
        for i, field in enumerate(layout.fields):
            size = next(sizes_left) if field.kind == 2 else 0
            try:
                found[field.name] = self._value(field, record[f"f{i}"], size)
            except BadSampleError as error:
                raise BadSampleError(f"its field {field.name!r} {error}") from error
        target = self._roles.target
        if target is not None:
            column = self._roles.columns[target]
            found[column] = encode_field("target", found[column])
        payloads: list[Buffer | None] = [found[column] for column in self._roles.columns.values()]
        if self._roles.metadata:
            payloads.append(json_payload(found, self._roles.metadata))
        return payloads

    def _value(self, field: _Field, value: Any, size: int) -> Any:
        if field.kind in (0, 1):
            return value.item()
        if field.kind == 2:
            return _image(value, _read(self._file, int(value["place"]), size))
        if field.kind in (4, 6):
            data = _read(self._file, int(value), field.array_bytes)
            return encode_field("array", np.frombuffer(data, field.dtype).reshape(field.shape))
        data = _read(self._file, int(value["place"]), int(value["bytes"]))
        if field.kind == 3:
            return data
        if len(data) > _MAX_JSON_BYTES:
            raise BadSampleError(f"has {len(data):,} bytes of JSON, expected at most {_MAX_JSON_BYTES:,}")
        try:
            return json.loads(data.partition(b"\0")[0])
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"is not JSON: {error}") from error


def _image(value: Any, data: bytes) -> bytes:
    mode, height, width = int(value["mode"]), int(value["height"]), int(value["width"])
    if mode == _JPEG:
        return data
    if mode != _PIXELS or len(data) != height * width * 3 or not data:
        raise BadSampleError(
            f"is of the mode {mode} and has {len(data):,} bytes, expected pixels {height} x {width} x 3"
        )
    return png_of(np.frombuffer(data, np.uint8).reshape(height, width, 3))


def _read(file: PlainFile, offset: int, length: int) -> bytes:
    data = bytearray(length)
    file.read_into(offset, memoryview(data))
    return bytes(data)


def _column(layout: _Layout, name: str) -> str:
    return next(f"f{number}" for number, field in enumerate(layout.fields) if field.name == name)


def _read_layout(file: PlainFile, size: int) -> _Layout:
    """The layout of a file of `size` bytes. Raises SourceError where it claims more than it has."""
    version, count, _, samples, allocations = _HEADER.unpack(_read(file, 0, _HEADER.size))
    if version != _VERSION or not 0 < count <= _MAX_FIELDS:
        raise SourceError(f"{file.path}: version {version} with {count} fields, expected version {_VERSION} of FFCV")
    metadata = _HEADER.size + count * _FIELD.size
    if metadata > size:
        raise SourceError(f"{file.path}: ends at byte {size:,}, inside of the description of its fields: truncated?")
    fields = tuple(
        _field(file.path, *_FIELD.unpack(_read(file, _HEADER.size + number * _FIELD.size, _FIELD.size)))
        for number in range(count)
    )
    if len({field.name for field in fields}) < count:
        raise SourceError(f"{file.path}: two fields have the same name")
    record = np.dtype([(f"f{number}", _TYPES[field.kind]) for number, field in enumerate(fields)], align=True)
    heap = metadata + samples * record.itemsize
    if not heap <= allocations <= size or (size - allocations) % _ALLOCATION.itemsize:
        raise SourceError(
            f"{file.path}: has {size:,} bytes, but {samples:,} samples up to {heap:,} and allocations from "
            f"{allocations:,} on: truncated, or the program that wrote it did not finish"
        )
    if not samples:
        raise SourceError(f"{file.path}: no samples")
    return _Layout(fields, record, samples, metadata, heap, allocations)


def _field(path: Path, kind: int, name: bytes, arguments: bytes) -> _Field:
    try:
        text = name.partition(b"\0")[0].decode("ascii")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: the name of a field is {name!r}: damaged") from error
    if kind == _CUSTOM:
        raise SourceError(
            f"{path}: the field {text!r} is of a kind of its own, whose layout only the program that wrote it knows; "
            f"write the file again without it"
        )
    if kind not in _TYPES:
        raise SourceError(f"{path}: the field {text!r} is of the type {kind}, expected 0 to 6")
    if kind not in (4, 6):
        return _Field(text, kind)
    *sides, length = _SHAPE.unpack_from(arguments)
    while sides and not sides[-1]:
        sides.pop()
    try:
        [(_, dtype)] = json.loads(arguments[_SHAPE.size : _SHAPE.size + length])
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{path}: the field {text!r} is an array of an unknown kind: damaged") from error
    if not isinstance(dtype, str) or not _PLAIN.fullmatch(dtype) or not 0 < math.prod(sides) <= 1 << 40:
        raise SourceError(f"{path}: the field {text!r} is an array {sides} of {dtype!r:.40}, expected numbers")
    return _Field(text, kind, dtype, tuple(sides))
