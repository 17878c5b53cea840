"""A set of MosaicML's streaming package: index.json and MDS shards, in a folder or in one folder per split.

    index.json     {"version": 2, "shards": [{"format": "mds", "column_names": […], "column_encodings": […],
                   "column_sizes": […], "samples": 100, "compression": "zstd:3" or null, "hashes": ["sha1"],
                   "raw_data": {"basename": "shard.00000.mds", "bytes": 123, "hashes": {"sha1": …}},
                   "zip_data": {"basename": "shard.00000.mds.zstd", …} or null}, …]}
    a shard        uint32 samples n, n + 1 uint32 offsets of them, a copy of the description, the samples
    a sample       uint32 sizes of the columns without a fixed size, then the values of all columns
    encodings      bytes; str (UTF-8); int (int64); uint8 … float64; str_int, str_float, str_decimal (text); json
                   jpeg, png (encoded images); pil (uint32 width, height and length of the mode; the mode; pixels)
                   ndarray:dtype:shape; if one is missing, it is in the value: a byte for the dtype, a byte for the
                   number of dimensions and the width of each, the dimensions; then the values
Numbers are little-endian (streaming/base/format/mds/encodings.py of mosaicml/streaming). If a shard exists both plain
and compressed, the plain one is read; a compressed one is unpacked into memory, once for the listing and once by each
worker that packs some of it. Hashes that Python supports are verified when a worker opens a shard. Samples are named by
number. Pickled columns are refused, since unpickling runs code from the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadNameError, BadSampleError, SourceError
from cache.files import read_regular
from cache.messages import listed
from packer.formats.base import png_of
from packer.sources.base import of_sample, refusing
from packer.sources.columns import ColumnSource, Row, Rows, is_mask
from packer.sources.layouts import mds_folders
from packer.sources.shards import split_of_name
from packer.sources.streams import ByteFile, PlainFile, UnpackedStream
from readers.headers import sniff
from readers.layout import RelativePath
from readers.table import Buffer

__all__ = ["MdsSource"]

_INDEX, _VERSION = "index.json", 2
_MAX_INDEX_BYTES, _MAX_SHARD_BYTES, _MAX_TEXT_BYTES = 256 << 20, 1 << 32, 64 << 20
_COMPRESSIONS = {"gz": "gzip", "bz2": "bzip2", "zstd": "zstd"}
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "x")
_PNG_BYTES = 1 << 10  # by which, plus a sixteenth, a PNG may be larger than its pixels
_DTYPES = {
    f"{name}{bits}": np.dtype(f"<{name[0]}{bits // 8}")
    for name, widths in (("uint", (8, 16, 32, 64)), ("int", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in widths
}
_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
          64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
_CONTENTS = {"jpeg": "image", "png": "image", "pil": "image", "str": "text", "ndarray": "array", "bytes": "bytes",
             "json": "value", "str_float": "value", "str_decimal": "value", "str_int": "integer", "int": "integer",
             **{name: "number" if name.startswith("float") else "integer" for name in _DTYPES}}  # fmt: skip
_CHANNELS_OF_MODE = {"L": 0, "RGB": 3, "RGBA": 4}
_PIL = struct.Struct("<III")


# --- the values of a sample -----------------------------------------------------------------------------------------
class Column(NamedTuple):
    """A column. size: the bytes of each value, 0 if they vary."""

    name: str
    encoding: str
    size: int

    @property
    def kind(self) -> str:
        """The encoding without its options."""
        return self.encoding.partition(":")[0]


def ranges_of(columns: Sequence[Column], sizes: bytes, start: int, stop: int) -> list[tuple[int, int]]:
    """(start, stop) of each value of the sample [start, stop), which begins with `sizes`. Raises BadSampleError."""
    free = iter(np.frombuffer(sizes, "<u4").tolist())
    ends = start + len(sizes) + np.cumsum([0, *(column.size or next(free) for column in columns)], dtype=object)
    if ends[-1] != stop:
        raise BadSampleError(f"has {stop - start:,} bytes, but its columns take {ends[-1] - start:,}: damaged")
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def value_of(column: Column, kind: str, data: memoryview) -> Any:
    """A value for a field of this kind. Raises BadSampleError, ValueError, LookupError."""
    if kind in ("image", "mask"):
        return image_of(column, data)
    if column.kind == "ndarray":
        return array_of(column, data)
    if kind == "file":
        return data
    if column.kind == "int" or column.kind in _DTYPES:
        return np.frombuffer(data, _DTYPES.get(column.kind, "<i8")).item()
    if len(data) > _MAX_TEXT_BYTES:
        raise BadSampleError(f"has {len(data):,} bytes of text, expected at most {_MAX_TEXT_BYTES:,}")
    decoders: dict[str, Callable[[str], Any]] = {"json": json.loads, "str_int": int, "str_float": float}
    return decoders.get(column.kind, str)(bytes(data).decode("utf-8"))


def image_of(column: Column, data: memoryview) -> Buffer:
    """The encoded image; pixels as PNG. Raises BadSampleError."""
    if column.kind == "ndarray":
        array = array_of(column, data)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
            raise BadSampleError(f"is {array.dtype} {list(array.shape)}, expected uint8 [h, w] or [h, w, 1, 3 or 4]")
        return png_of(array)
    if column.kind != "pil":
        return data
    width, height, mode_bytes = _PIL.unpack_from(data)
    mode, pixels = bytes(data[_PIL.size :][: min(mode_bytes, 16)]).decode("latin-1"), data[_PIL.size + mode_bytes :]
    channels = _CHANNELS_OF_MODE.get(mode)
    if channels is None or len(pixels) != width * height * max(1, channels) or not pixels:
        raise BadSampleError(f"has {len(pixels):,} bytes of pixels, expected {width} x {height} of {mode}")
    return png_of(np.frombuffer(pixels, np.uint8).reshape((height, width, channels) if channels else (height, width)))


def array_of(column: Column, data: memoryview) -> npt.NDArray[Any]:
    """The array in a value. Raises BadSampleError."""
    _, name, sides = f"{column.encoding}::".split(":")[:3]
    if not name:
        name, data = _CODES[data[0]], data[1:]
    shape = tuple(int(side) for side in sides.split(",")) if sides else ()
    if not sides:
        dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
        end = 1 + dimensions * width
        shape, data = tuple(np.frombuffer(data[1:end], f"<u{width}", dimensions).tolist()), data[end:]
    if math.prod(shape) * _DTYPES[name].itemsize != len(data):
        raise BadSampleError(f"has {len(data):,} bytes of values, expected {list(shape)} of {name}")
    return np.frombuffer(data, _DTYPES[name]).reshape(shape)


# --- shards ---------------------------------------------------------------------------------------------------------
class _File(NamedTuple):
    path: Path
    bytes: int
    hashes: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, info: Mapping[str, Any]) -> _File:
        return cls(folder / RelativePath(info["basename"]), int(info["bytes"]), dict(info["hashes"] or {}))


class MdsShard(NamedTuple):
    """A shard as index.json describes it.

    raw: the uncompressed file. file: the one that is read. compression: of `file`, "" if it is uncompressed.
    """

    columns: tuple[Column, ...]
    samples: int
    raw: _File
    file: _File
    compression: str


def read_index(path: Path) -> list[MdsShard]:
    """The shards listed in an index.json. Raises SourceError."""
    with refusing(path, "not an index of MDS shards"):
        try:
            return [_shard(path.parent, info) for info in json.loads(read_regular(path, _MAX_INDEX_BYTES))["shards"]]
        except BadNameError as error:
            raise SourceError(f"{path}: not an index of MDS shards: {error}") from error


def _shard(folder: Path, info: Mapping[str, Any]) -> MdsShard:
    if info["format"] != "mds" or info["version"] != _VERSION:
        raise SourceError(
            f"{folder}: shards of the format {info['format']!r:.20}, version {info['version']!r:.20}; expected 'mds', "
            f"version {_VERSION}"
        )
    described = zip(info["column_names"], info["column_encodings"], info["column_sizes"], strict=True)
    columns = tuple(Column(str(name), str(encoding), int(size or 0)) for name, encoding, size in described)
    raw, samples = _File.of(folder, info["raw_data"]), int(info["samples"])
    if min(column.size for column in columns) < 0 or not 0 <= 4 * samples <= raw.bytes <= _MAX_SHARD_BYTES:
        raise SourceError(f"{raw.path}: has {raw.bytes:,} bytes, but claims {samples:,} samples")
    compression = str(info.get("compression") or "").partition(":")[0]
    if info.get("zip_data") is None or raw.path.exists():
        return MdsShard(columns, samples, raw, raw, "")
    if compression not in _COMPRESSIONS:
        raise SourceError(
            f"{folder}: its shards are compressed with {compression!r}, which is not read; unpack them next to their "
            f"index, this one as {raw.path.name}"
        )
    return MdsShard(columns, samples, raw, _File.of(folder, info["zip_data"]), _COMPRESSIONS[compression])


class _Memory(ByteFile):
    """A compressed shard, unpacked into memory. Raises SourceError if its size is not that in the index."""

    def __init__(self, shard: MdsShard) -> None:
        with UnpackedStream(shard.file.path, shard.compression) as stream:
            self._data = memoryview(stream.read(0, shard.raw.bytes))
            if stream.read_some(memoryview(bytearray(1))):
                raise SourceError(f"{shard.file.path}: unpacks to more than the {shard.raw.bytes:,} in index.json")

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self._data[offset : offset + len(target)]


def open_shard(shard: MdsShard) -> ByteFile:
    """Open a shard: the file itself, or its unpacked content in memory if it is compressed."""
    return _Memory(shard) if shard.compression else PlainFile(shard.file.path)


def bounds_of(file: ByteFile, shard: MdsShard) -> npt.NDArray[np.int64]:
    """The start and end of every sample in a shard, int64 [n, 2]. Raises SourceError."""
    ends = 4 * (shard.samples + 2)
    numbers = np.frombuffer(file.read(0, ends), "<u4").astype(np.int64)
    offsets = numbers[1:]
    if numbers[0] != shard.samples:
        raise SourceError(f"{shard.raw.path}: has {numbers[0]:,} samples, but index.json says {shard.samples:,}")
    if offsets[0] < ends or offsets[-1] > shard.raw.bytes or (np.diff(offsets) < 0).any():
        raise SourceError(f"{shard.raw.path}: its offsets fall, or lead beyond its end: damaged")
    return np.stack((offsets[:-1], offsets[1:]), axis=1)


def _known_hash(file: _File) -> str | None:
    return next((name for name in file.hashes if name in hashlib.algorithms_available), None)


def _compare(file: _File) -> None:
    """Verify the first of a file's hashes that Python supports. Raises SourceError."""
    name = _known_hash(file)
    if name is not None:
        digest = hashlib.new(name, usedforsecurity=False)
        with refusing(file.path), open(file.path, "rb") as opened:
            while data := opened.read(1 << 20):
                digest.update(data)
        if digest.hexdigest() != file.hashes[name]:
            raise SourceError(f"{file.path}: its {name} differs from index.json: damaged; download it again")


class MdsSource(ColumnSource):
    """The MDS set at `root`. Place: (shard number, start, stop)."""

    kind = "MDS set"

    def find(self, split: str | None) -> Mapping[str, Sequence[int]]:
        self.shards: list[MdsShard] = []
        parts = {}
        for name, folder in mds_folders(self.root).items():
            first = len(self.shards)
            self.shards += read_index(self.note(folder / _INDEX))
            parts[name or split or split_of_name(self.root.name)] = range(first, len(self.shards))
        if not self.shards:
            raise SourceError(f"{self.root}: no shards in its index")
        self.columns = {column.name: number for number, column in enumerate(self.shards[0].columns)}
        self.shuffles = not any(shard.compression for shard in self.shards)
        self._sizes = 4 * sum(not column.size for column in self.shards[0].columns)
        for shard in self.shards:
            size = self.note(shard.file.path).stat().st_size
            if size != shard.file.bytes:
                raise SourceError(f"{shard.file.path}: has {size:,} bytes, but its index says {shard.file.bytes:,}")
            if shard.columns != self.shards[0].columns:
                raise SourceError(f"{shard.raw.path}: has other columns than earlier shards")
        return parts

    def contents(self) -> dict[str, str]:
        contents: dict[str, str] = {}
        for column in self.shards[0].columns:
            if column.kind not in _CONTENTS:
                why = "is pickled, and unpickling could run any code" if column.kind == "pkl" else "is not known"
                raise SourceError(
                    f"{self.root}: the column {column.name!r} has the encoding {column.encoding!r:.40}, which {why}; "
                    f"write the set again with another encoding, such as json or ndarray"
                )
            contents[column.name] = _CONTENTS[column.kind]
        shard = next((shard for shard in self.shards if shard.samples), None)
        if shard is None:
            return contents
        with open_shard(shard) as file, refused(f"{shard.raw.path}: sample 0"):
            row = self._row(file, *bounds_of(file, shard)[0].tolist())
            for name, kind in contents.items():
                if kind == "bytes" and sniff(row(name, "file")):
                    contents[name] = "image"
                if kind == "array" and "image" not in contents.values() and name in _IMAGE_NAMES:
                    contents[name] = "image"
                if contents[name] == "image" and "mask" in name.lower():
                    contents[name] = "mask" if is_mask(row(name, "image")) else "image"
        return contents

    def warnings(self) -> list[str]:
        files = (shard.file for shard in self.shards)
        unknown = sorted({name for file in files for name in file.hashes if name not in hashlib.algorithms_available})
        return [f"{self.root}: hashes of {listed(unknown)} are not compared: Python lacks them"] if unknown else []

    def read_rows(self, part: int, columns: Sequence[str]) -> Rows:
        shard = self.shards[part]
        values: dict[str, list[Any]] = {name: [] for name in columns}
        with open_shard(shard) as file:
            bounds = bounds_of(file, shard)
            for number, (start, stop) in enumerate(bounds.tolist() if columns else ()):
                with refused(f"{shard.raw.path}: sample {number}"):
                    row = self._row(file, start, stop)
                    for name in columns:
                        values[name].append(row(name, "json"))
        sizes = (bounds[:, 1] - bounds[:, 0]) * 17 // 16 + _PNG_BYTES * (1 + len(self.columns))
        return Rows(np.column_stack((np.full(len(bounds), part), bounds)), sizes, values)

    def _row(self, file: ByteFile, start: int, stop: int, data: memoryview | None = None) -> Row:
        """A function that returns a column's value of the sample [start, stop).

        The sample's bytes are `data`; without it, every value is read from the file when it is requested.
        """

        def read(first: int, last: int) -> memoryview:
            return memoryview(file.read(first, last - first)) if data is None else data[first - start : last - start]

        columns = self.shards[0].columns
        if stop - start < self._sizes:
            raise BadSampleError(f"has {stop - start} bytes, expected the sizes of its columns: damaged")
        ranges = ranges_of(columns, bytes(read(start, start + self._sizes)), start, stop)

        def value(name: str, kind: str) -> Any:
            number = self.columns[name]
            return value_of(columns[number], kind, read(*ranges[number]))

        return value

    @contextmanager
    def open_rows(self) -> Iterator[Callable[[Any], Row]]:
        at, file = -1, ByteFile()

        def row(place: tuple[int, int, int]) -> Row:
            nonlocal at, file
            number, start, stop = place
            if at != number:
                file.close()
                _compare(self.shards[number].file)
                file, at = open_shard(self.shards[number]), number
            return self._row(file, start, stop, memoryview(file.read(start, stop - start)))

        try:
            yield row
        finally:
            file.close()


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Turn a BadSampleError into a SourceError: a damaged sample makes the listing fail."""
    try:
        with of_sample(where):
            yield
    except BadSampleError as error:
        raise SourceError(str(error)) from error
