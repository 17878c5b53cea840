"""A set of MosaicML's streaming package: index.json, and its shards of MDS, in a folder or one below for each split.

    index.json     {"version": 2, "shards": [{"format": "mds", "column_names": […], "column_encodings": […],
                   "column_sizes": […], "samples": 100, "compression": "zstd:3" or null, "hashes": ["sha1"],
                   "raw_data": {"basename": "shard.00000.mds", "bytes": 123, "hashes": {"sha1": …}},
                   "zip_data": {"basename": "shard.00000.mds.zstd", …} or null}, …]}
    a shard        uint32 samples n, n + 1 uint32 offsets of them, a copy of the description, the samples

What a sample is, the table of columns below says. A shard that is there both plain and compressed is read plain. A
compressed one is unpacked into memory, as large as its raw bytes, once for the listing, which looks for the labels, and
once by each worker that packs some of it. Hashes are compared when a worker opens a shard, as far as Python knows them.
Samples are called by number. Pickled columns are refused: unpickling runs what a file says.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadNameError, BadSampleError, SourceError
from cache.files import read_regular
from cache.messages import listed
from packer.formats.base import Arena, png_of
from packer.sources.base import NumberPlaces, SourceListing, SplitListing
from packer.sources.file_sets import FilesSource, numbered_keys, numbered_names, split_named, splits_by_value
from packer.sources.layouts import mds_folders
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile, UnpackedStream
from packer.sources.tables import Table, json_payload, number_labels
from packer.sources.targets import Roles, choose_roles
from readers.fields import check_field, encode_field
from readers.headers import sniff
from readers.layout import RelativePath
from readers.table import Buffer

__all__ = []


# ------------------------------------------------------------------------------
# The values in a sample of an MDS shard: what each encoding holds, and its bytes as fields.
#
#     sample      uint32 sizes of the columns of no fixed size, then the values of all columns
#     encodings   bytes; str (UTF-8); int (int64); uint8 … float64; str_int, str_float, str_decimal (text); json
#                 jpeg, png (encoded images); pil (uint32 width, height and length of the mode; the mode; pixels)
#                 ndarray:dtype:shape, where what is not given is in the value: a byte for the dtype, a byte for the
#                 number of dimensions and the width of each, the dimensions; then the values
#                 pkl (refused)
#
# Numbers are little-endian. (streaming/base/format/mds/encodings.py of mosaicml/streaming documents them.)


_SCALARS = {
    "int": "<i8",
    **{f"{kind}int{bits}": f"<{kind or 'i'}{bits // 8}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
_DTYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_NAMED_DTYPES = {name: dtype for name, dtype in _SCALARS.items() if name != "int"}
_CHANNELS_OF_MODE = {"L": 0, "RGB": 3, "RGBA": 4}
_PIL = struct.Struct("<III")
_MAX_MODE_BYTES = 16
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MdsColumn:
    """A column. size: the bytes of each value, 0 where they differ."""

    name: str
    encoding: str
    size: int

    @property
    def kind(self) -> str:
        """The encoding without its options."""
        return self.encoding.partition(":")[0]


def content_of(column: MdsColumn) -> str | None:
    """What a column holds, as in `packer.sources.targets`; None for an encoding that is not known."""
    kind = column.kind
    if kind in ("jpeg", "png", "pil"):
        return "image"
    if kind.startswith("float"):
        return "number"
    if kind in ("str_int", "int") or (kind in _SCALARS and not kind.startswith("float")):
        return "integer"
    contents = {"str": "text", "ndarray": "array", "bytes": "bytes", "json": "value"}
    return contents.get(kind, "value" if kind in ("str_float", "str_decimal") or kind in _SCALARS else None)


def ranges_of(columns: Sequence[MdsColumn], sample: memoryview) -> list[tuple[int, int]]:
    """(start, stop) of each value in a sample. Raises BadSampleError where they do not fill it."""
    count = sum(not column.size for column in columns)
    if len(sample) < 4 * count:
        raise BadSampleError(f"has {len(sample)} bytes, expected the sizes of {count} columns")
    sizes = iter(struct.unpack_from(f"<{count}I", sample))
    position, found = 4 * count, []
    for column in columns:
        size = column.size or next(sizes)
        found.append((position, position + size))
        position += size
    if position != len(sample):
        raise BadSampleError(f"has {len(sample):,} bytes, but its columns take {position:,}: damaged")
    return found


def image_of(column: MdsColumn, data: memoryview) -> Buffer:
    """An encoded image; pixels as PNG. Raises BadSampleError."""
    if column.kind == "ndarray":
        array = array_of(column, data)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
            raise BadSampleError(f"is {array.dtype} {list(array.shape)}, expected uint8 [h, w] or [h, w, 1, 3 or 4]")
        return png_of(array)
    if column.kind != "pil":
        return data
    if len(data) < _PIL.size:
        raise BadSampleError(f"has {len(data)} bytes, expected a size and a mode")
    width, height, mode_bytes = _PIL.unpack_from(data)
    mode = bytes(data[_PIL.size : _PIL.size + min(mode_bytes, _MAX_MODE_BYTES)]).decode("latin-1")
    channels = _CHANNELS_OF_MODE.get(mode)
    if channels is None:
        raise BadSampleError(f"has pixels of the mode {mode!r}, expected {', '.join(_CHANNELS_OF_MODE)}")
    pixels = np.frombuffer(data[_PIL.size + mode_bytes :], np.uint8)
    if pixels.size != width * height * max(1, channels) or not pixels.size:
        raise BadSampleError(f"has {pixels.size:,} bytes of pixels, expected {width} x {height} of {mode}")
    return png_of(pixels.reshape(height, width, channels) if channels else pixels.reshape(height, width))


def array_of(column: MdsColumn, data: memoryview) -> npt.NDArray[Any]:
    """The array in a value. Raises BadSampleError."""
    _, _, options = column.encoding.partition(":")
    name, _, sides = options.partition(":")
    try:
        if name:
            dtype = np.dtype(_NAMED_DTYPES[name])
        else:
            dtype, data = np.dtype(_DTYPES[data[0]]), data[1:]
        if sides:
            shape = tuple(int(side) for side in sides.split(","))
        else:
            dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
            end = 1 + dimensions * width
            shape = tuple(np.frombuffer(data[1:end], f"<u{width}", dimensions).tolist())
            data = data[end:]
        if math.prod(shape) * dtype.itemsize != len(data):
            raise BadSampleError(f"has {len(data):,} bytes of values, expected {list(shape)} of {dtype}")
        return np.frombuffer(data, dtype).reshape(shape)
    except (KeyError, IndexError, ValueError) as error:
        raise BadSampleError(f"is not an array: {error!r:.80}") from error


def value_of(column: MdsColumn, data: memoryview) -> Any:
    """A number, a text, or what JSON holds. Raises BadSampleError."""
    kind = column.kind
    try:
        if kind in _SCALARS:
            return np.frombuffer(data, _SCALARS[kind]).item()
        if len(data) > _MAX_TEXT_BYTES:
            raise BadSampleError(f"has {len(data):,} bytes of text, expected at most {_MAX_TEXT_BYTES:,}")
        text = bytes(data).decode("utf-8")
        if kind == "json":
            return json.loads(text)
        if kind == "str_int":
            return int(text)
        return float(text) if kind == "str_float" else text
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"is not of the encoding {kind!r}: {error}") from error


# ------------------------------------------------------------------------------
# The shards of an MDS set: what its index says of them, and their samples.
#
#     a shard     uint32 samples n, n + 1 uint32 offsets of them, a copy of what the index says, the samples
#
# A compressed shard is unpacked into memory, as large as its raw bytes.


INDEX_FILE = "index.json"
_VERSION = 2
_MAX_INDEX_BYTES = 256 << 20
_MAX_SAMPLES = 1 << 30
_MAX_SHARD_BYTES = 1 << 32
_COMPRESSIONS = {"gz": "gzip", "bz2": "bzip2", "zstd": "zstd"}
_STEP_BYTES = 1 << 20


class _File(NamedTuple):
    path: Path
    bytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MdsShard:
    """raw: the shard as it is, or would be. file: where it is. compression: of that, "" for none."""

    columns: tuple[MdsColumn, ...]
    samples: int
    raw: _File
    file: _File
    compression: str


def read_index(path: Path) -> list[MdsShard]:
    """The shards that an index names. Raises SourceError."""
    try:
        index = json.loads(read_regular(path, _MAX_INDEX_BYTES))
        if index["version"] != _VERSION:
            raise SourceError(f"{path}: version {index['version']!r:.20}, expected {_VERSION}")
        return [_shard(path.parent, info) for info in index["shards"]]
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    except SourceError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, BadNameError) as error:
        raise SourceError(f"{path}: not an index of MDS shards: {error!r:.120}") from error


def _shard(folder: Path, info: Mapping[str, Any]) -> MdsShard:
    if info["format"] != "mds" or info["version"] != _VERSION:
        raise SourceError(
            f"{folder}: shards of the format {info['format']!r:.20}, version {info['version']!r:.20}; expected 'mds', "
            f"version {_VERSION}"
        )
    columns = tuple(
        MdsColumn(str(name), str(encoding), int(size or 0))
        for name, encoding, size in zip(
            info["column_names"], info["column_encodings"], info["column_sizes"], strict=True
        )
    )
    raw, samples = _file(folder, info["raw_data"]), int(info["samples"])
    fixed_bytes = sum(column.size for column in columns)
    if (
        min(column.size for column in columns) < 0
        or not 0 <= samples <= _MAX_SAMPLES
        or not 0 <= raw.bytes <= _MAX_SHARD_BYTES
    ):
        raise SourceError(f"{raw.path}: claims {samples:,} samples of {fixed_bytes:,} bytes or more in {raw.bytes:,}")
    packed, compression = info.get("zip_data"), str(info.get("compression") or "").partition(":")[0]
    if packed is None or raw.path.exists():
        return MdsShard(columns, samples, raw, raw, "")
    if compression not in _COMPRESSIONS:
        raise SourceError(
            f"{folder}: its shards are compressed with {compression!r}, which is not read; unpack them next to their "
            f"index, this one as {raw.path.name}"
        )
    return MdsShard(columns, samples, raw, _file(folder, packed), _COMPRESSIONS[compression])


def _file(folder: Path, info: Mapping[str, Any]) -> _File:
    path = folder / RelativePath(info["basename"])
    return _File(path, int(info["bytes"]), {str(name): str(value) for name, value in (info["hashes"] or {}).items()})


def unknown_hashes(shard: MdsShard) -> list[str]:
    """The kinds of hashes of a shard's file that cannot be compared."""
    return [name for name in shard.file.hashes if name not in hashlib.algorithms_available]


class OpenShard:
    """A shard, on the disk or unpacked into memory. Raises SourceError where it is damaged."""

    def __init__(self, shard: MdsShard, *, compare: bool = False) -> None:
        """compare: its hashes."""
        self._shard = shard
        self._memory: memoryview | None = None
        self._file: PlainFile | None = None
        if compare:
            _compare(shard.file)
        if shard.compression:
            self._memory = _unpacked(shard)
        else:
            self._file = PlainFile(shard.file.path)

    def sample(self, start: int, stop: int) -> memoryview:
        """The bytes [start, stop)."""
        if self._memory is not None:
            return self._memory[start:stop]
        data = memoryview(bytearray(stop - start))
        assert self._file is not None
        self._file.read_into(start, data)
        return data

    def value(self, start: int, stop: int, columns: Sequence[MdsColumn], number: int) -> Any:
        """The value of a column of the sample [start, stop), without its other columns. Raises BadSampleError."""
        count = sum(not column.size for column in columns)
        if stop - start < 4 * count:
            raise BadSampleError(f"has {stop - start} bytes, expected the sizes of {count} columns")
        sizes = iter(np.frombuffer(self.sample(start, start + 4 * count), "<u4").tolist())
        position = start + 4 * count
        lengths = [column.size or next(sizes) for column in columns]
        if position + sum(lengths) != stop:
            raise BadSampleError(f"has {stop - start:,} bytes, but its columns take others: damaged")
        position += sum(lengths[:number])
        return value_of(columns[number], self.sample(position, position + lengths[number]))

    def bounds(self) -> npt.NDArray[np.int64]:
        """int64 [n, 2]: where samples begin and end."""
        shard = self._shard
        ends = 4 * (shard.samples + 2)
        if ends > shard.raw.bytes:
            raise SourceError(f"{shard.raw.path}: has {shard.raw.bytes:,} bytes, but claims {shard.samples:,} samples")
        numbers = np.frombuffer(self.sample(0, ends), "<u4").astype(np.int64)
        offsets = numbers[1:]
        if numbers[0] != shard.samples:
            raise SourceError(f"{shard.raw.path}: has {numbers[0]:,} samples, but index.json says {shard.samples:,}")
        if offsets[0] < ends or offsets[-1] > shard.raw.bytes or (np.diff(offsets) < 0).any():
            raise SourceError(f"{shard.raw.path}: its offsets lead outside of it, or fall: damaged")
        return np.stack((offsets[:-1], offsets[1:]), axis=1)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _unpacked(shard: MdsShard) -> memoryview:
    """All of a compressed shard, as long as it says, piece by piece: a false length takes no memory."""
    stream = UnpackedStream(shard.file.path, shard.compression)
    parts = bytearray()
    try:
        while len(parts) < shard.raw.bytes:
            part = bytearray(min(_STEP_BYTES, shard.raw.bytes - len(parts)))
            stream.read_into(len(parts), memoryview(part))
            parts += part
        if stream.read_some(memoryview(bytearray(1))):
            raise SourceError(f"{shard.file.path}: unpacks to more than the {shard.raw.bytes:,} bytes in index.json")
    finally:
        stream.close()
    return memoryview(parts)


def _compare(file: _File) -> None:
    """Compare the first hash that Python knows with that of the file. Raises SourceError."""
    name = next((name for name in file.hashes if name in hashlib.algorithms_available), None)
    if name is None:
        return
    digest = hashlib.new(name, usedforsecurity=False)
    try:
        with open(file.path, "rb") as opened:
            while data := opened.read(_STEP_BYTES):
                digest.update(data)
    except OSError as error:
        raise SourceError(f"{file.path}: cannot be read: {error.strerror}") from error
    if digest.hexdigest() != file.hashes[name]:
        raise SourceError(f"{file.path}: its {name} is not that in index.json: damaged; download it again")


_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "x")
_ROWS = "rows"  # what keys begin with where a column names the splits
_PNG_BYTES = 1 << 10  # by which a PNG of pixels may be larger than they are, and a sixteenth


class MdsSource(FilesSource):
    """The set at `root`. label_column: None takes the usual names. split_column: its values are the splits."""

    kind = "MDS set"

    def __init__(
        self, root: str | os.PathLike[str], label_column: str | None = None, split_column: str | None = None
    ) -> None:
        super().__init__(Path(root))
        self.label_column, self.split_column = label_column, split_column
        self.columns: tuple[MdsColumn, ...] = ()
        self.shards: list[MdsShard] = []
        self.roles: Roles | None = None

    def list_files(self, split: str | None) -> SourceListing:
        folders, wanted = mds_folders(self.root), split
        if self.split_column is not None:
            split = None
        elif "" in folders:
            folders = {split or split_of_name(self.root.name): folders[""]}
        elif split is not None:
            split = split_named(split, folders, self.root)
        parts = {name: read_index(self.note(folder / INDEX_FILE)) for name, folder in folders.items()}
        if self.split_column is not None:
            parts = {_ROWS: [shard for shards in parts.values() for shard in shards]}
        self.shards = [shard for shards in parts.values() for shard in shards]
        if not self.shards:
            raise SourceError(f"{self.root}: no shards in its index")
        self.columns = self.shards[0].columns
        for shard in self.shards:
            self._check(shard)
        self.roles = self._choose()
        listing = SourceListing({}, self.roles.fields, shuffles=not any(shard.compression for shard in self.shards))
        values: dict[str | None, list[Any]] = {name: [] for name in (self.roles.label, self.split_column)}
        number = 0
        for name, shards in parts.items():
            found = [self._list_shard(i, values) for i in range(number, number + len(shards))]
            number += len(shards)
            listing.splits[name] = self._split(name, found)
        self._number_labels(listing, values[self.roles.label])
        unknown = {name for shard in self.shards for name in unknown_hashes(shard)}
        if unknown:
            listing.warnings.append(
                f"{self.root}: hashes of {listed(sorted(unknown))} are not compared: Python lacks them"
            )
        if self.split_column is not None:
            where = f"{self.root}: column {self.split_column!r}"
            listing.splits = splits_by_value(listing.splits[_ROWS], values[self.split_column], where)
            split = None if wanted is None else split_named(wanted, listing.splits, self.root)
        if split is not None:
            listing.splits = {split: listing.splits[split]}
        return listing

    def _split(self, name: str, found: Sequence[npt.NDArray[np.int64]]) -> SplitListing:
        """places: int64 [n, 3], (number of the shard, start, stop)."""
        assert self.roles is not None
        places = np.concatenate(found) if found else np.zeros((0, 3), np.int64)
        if not len(places):
            raise SourceError(f"{self.root}: no samples in {name}")
        sizes = places[:, 2] - places[:, 1]
        sizes += sizes // 16 + _PNG_BYTES * (1 + len(self.columns))
        count = len(places)
        return SplitListing(
            "",
            numbered_keys(name, count),
            np.zeros(count, np.int64),
            numbered_names(count, len(self.roles.fields)),
            sizes,
            NumberPlaces(places),
            np.zeros(count, np.int64),
        )

    def _number_labels(self, listing: SourceListing, values: list[Any]) -> None:
        """Labels of all samples, over all splits."""
        assert self.roles is not None
        if self.roles.label is None:
            values = [None] * sum(map(len, listing.splits.values()))
        table = Table(self.root / self.roles.label if self.roles.label else self.root, ())
        numbers, listing.classes, warnings = number_labels(values, range(1, len(values) + 1), table)
        listing.warnings += warnings
        labels, first = np.array(numbers, np.int64), 0
        for part in listing.splits.values():
            part.labels, first = labels[first : first + len(part)], first + len(part)

    def _check(self, shard: MdsShard) -> None:
        """Raise SourceError for a shard that is not as its index says."""
        if shard.columns != self.columns:
            raise SourceError(f"{shard.raw.path}: has other columns than the shards before")
        size = self.note(shard.file.path).stat().st_size
        if size != shard.file.bytes:
            raise SourceError(f"{shard.file.path}: has {size:,} bytes, but its index says {shard.file.bytes:,}")

    def _choose(self) -> Roles:
        contents: dict[str, str] = {}
        for column in self.columns:
            what = content_of(column)
            if column.kind == "pkl":
                raise SourceError(
                    f"{self.root}: the column {column.name!r} is pickled, and unpickling runs what a file says; write "
                    f"the set again with another encoding for it, such as json or ndarray"
                )
            if what is None:
                raise SourceError(f"{self.root}: the column {column.name!r} has the encoding {column.encoding!r:.40}")
            contents[column.name] = what
        first = self._first_sample()
        for column in self.columns if first else ():
            if contents[column.name] == "bytes" and sniff(first[column.name]):
                contents[column.name] = "image"
            if contents[column.name] == "array" and "image" not in contents.values() and column.name in _IMAGE_NAMES:
                contents[column.name] = "image"
            if contents[column.name] == "image" and "mask" in column.name.lower():
                contents[column.name] = _as_mask(column, first[column.name])
        name = self.split_column
        if name is not None and contents.get(name) not in ("integer", "text"):
            possible = [other for other, what in contents.items() if what in ("integer", "text")]
            raise SourceError(
                f"{self.root}: no column {name!r} of names (split_column={name!r}); splits could be in "
                f"{', '.join(possible) or 'none'}"
            )
        if name is not None and name != self.label_column:
            del contents[name]
        return choose_roles(contents, self.label_column, self.root)

    def _first_sample(self) -> dict[str, memoryview]:
        for number, shard in enumerate(self.shards):
            if shard.samples:
                with closing(self.open_shard(number)) as opened:
                    sample = opened.sample(*opened.bounds()[0])
                try:
                    return {
                        column.name: sample[a:b]
                        for column, (a, b) in zip(self.columns, ranges_of(self.columns, sample), strict=True)
                    }
                except BadSampleError as error:
                    raise SourceError(f"{shard.raw.path}: sample 0 {error}") from error
        return {}

    # --- shards ---
    def _list_shard(self, number: int, values: dict[str | None, list[Any]]) -> npt.NDArray[np.int64]:
        """Places of the samples of a shard. values: by column, to which those of the samples are added."""
        wanted = [(i, values[column.name]) for i, column in enumerate(self.columns) if column.name in values]
        with closing(self.open_shard(number)) as opened:
            bounds = opened.bounds()
            for i, (start, stop) in enumerate(bounds.tolist() if wanted else ()):
                try:
                    for column, found in wanted:
                        found.append(opened.value(start, stop, self.columns, column))
                except BadSampleError as error:
                    raise SourceError(f"{self.shards[number].raw.path}: sample {i} {error}") from error
        return np.column_stack((np.full(len(bounds), number, np.int64), bounds))

    def open_shard(self, number: int, *, compare: bool = False) -> OpenShard:
        """A shard. compare: its hashes. Raises SourceError where it is damaged, or has changed."""
        self.check(self.shards[number].file.path)
        return OpenShard(self.shards[number], compare=compare)

    @contextmanager
    def open(self) -> Iterator[MdsReader]:
        with closing(MdsReader(self)) as reader:
            yield reader


class MdsReader:
    """Reads samples, with one shard open at a time."""

    def __init__(self, source: MdsSource) -> None:
        self._source = source
        self._shard: OpenShard | None = None
        self._number = -1

    def read(self, place: tuple[int, int, int], arena: Arena) -> Sequence[Buffer | None]:
        number, start, stop = place
        if self._shard is None or number != self._number:
            self.close()
            self._shard, self._number = self._source.open_shard(number, compare=True), number
        return _payloads(self._source, self._shard.sample(start, stop))

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None


def _payloads(source: MdsSource, sample: memoryview) -> list[Buffer | None]:
    roles, found = source.roles, {}
    assert roles is not None
    for column, (start, stop) in zip(source.columns, ranges_of(source.columns, sample), strict=True):
        found[column.name] = (column, sample[start:stop])
    payloads: list[Buffer | None] = []
    for name, kind in roles.fields.items():
        if name == "json":
            payloads.append(json_payload({key: value_of(*found[key]) for key in roles.metadata}, roles.metadata))
            continue
        column, data = found[roles.columns[name]]
        try:
            if kind == "target":
                value = array_of(column, data) if column.kind == "ndarray" else value_of(column, data)
                payloads.append(encode_field("target", value))
                continue
            if kind in ("image", "mask"):
                payloads.append(image_of(column, data))
            else:
                payloads.append(encode_field("array", array_of(column, data)) if kind == "array" else data)
        except BadSampleError as error:
            raise BadSampleError(f"its column {column.name!r} {error}") from error
    return payloads


def _as_mask(column: MdsColumn, data: memoryview) -> str:
    try:
        check_field("mask", image_of(column, data))
    except BadSampleError:
        return "image"
    return "mask"
