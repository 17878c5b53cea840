"""The shards of an MDS set: what its index says of them, and their samples.

    a shard     uint32 samples n, n + 1 uint32 offsets of them, a copy of what the index says, the samples

A compressed shard is unpacked into memory, as large as its raw bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadNameError, BadSampleError, SourceError
from cache.files import read_regular
from packer.sources.mds_columns import MdsColumn, value_of
from packer.sources.streams import PlainFile, UnpackedStream
from readers.layout import RelativePath

__all__ = ["INDEX_FILE", "MdsShard", "OpenShard", "read_index", "unknown_hashes"]

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
