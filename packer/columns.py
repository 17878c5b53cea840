"""The index columns of one shard while it is made, and their file: a part.

A part is a NumPy .npz (no pickle) with the columns of `readers.index` for the samples of one shard, except `shard`,
and `meta`, the shard's own facts as UTF-8 JSON. Writing the index of a split is putting its parts together.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.formats.base import PackedSample
from readers.errors import DatasetError
from readers.headers import MEDIA, ImageHeader
from readers.index import COLUMNS, FIELD_COLUMNS, encode_name
from readers.layout import ShardInfo
from readers.strings import Strings

__all__ = ["LeftOut", "PartMeta", "ShardColumns", "load_meta", "load_part", "save_part", "string_columns"]

_HEADER_COLUMNS = ("height", "width", "components", "process", "orientation", "media")
_MEDIA_CODE = {media: code for code, media in enumerate(MEDIA)}
_NO_HEADER = ImageHeader("", 0, 0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not in the set: its name within the split, why, and what was done (skipped, quarantined)."""

    name: str
    reason: str
    action: str


@dataclass(frozen=True, slots=True)
class PartMeta:
    """The facts of one finished shard.

    fields, unreadable (images without a readable header) and class_names (label -> name) are those of a shard that
    was adopted; a shard we wrote has the fields of its set.
    """

    shard: ShardInfo
    payload_bytes: int
    left_out: tuple[LeftOut, ...] = ()
    fields: tuple[str, ...] = ()
    unreadable: int = 0
    class_names: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PartMeta:
        value = json.loads(text)
        left_out = tuple(LeftOut(**item) for item in value["left_out"])
        shard = ShardInfo(**value.pop("shard"))
        return cls(**value | {"shard": shard, "left_out": left_out, "fields": tuple(value["fields"])})


class ShardColumns:
    """Collects the index columns of one shard, sample by sample."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._keys: list[str] = []
        self._labels: list[int] = []
        self._headers: list[ImageHeader] = []
        self._names: list[tuple[str, ...]] = []
        self._lengths: list[Sequence[int]] = []
        self._crcs: list[Sequence[int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, sample: PackedSample, lengths: Sequence[int], crcs: Sequence[int]) -> None:
        """One sample; lengths and crcs follow the fields (0 where a field is absent)."""
        self._keys.append(sample.key)
        self._labels.append(sample.label)
        self._headers.append(sample.header or _NO_HEADER)
        self._names.append(sample.names)
        self._lengths.append(lengths)
        self._crcs.append(crcs)

    def payload_bytes(self) -> int:
        """Bytes of all fields of all samples."""
        return sum(map(sum, self._lengths))

    def arrays(self, offsets: dict[str, list[int]]) -> dict[str, npt.NDArray[Any]]:
        """The columns, given where the writer put each field (ABSENT for none)."""
        n = len(self._keys)
        found: dict[str, npt.NDArray[Any]] = {"label": np.array(self._labels, COLUMNS["label"])}
        media, height, width, components, process, orientation = zip(*self._headers, strict=True) if n else ((),) * 6
        codes = [_MEDIA_CODE[name] for name in media]
        values = (height, width, components, process, orientation, codes)
        for name, column in zip(_HEADER_COLUMNS, values, strict=True):
            found[name] = np.array(column, COLUMNS[name])
        found |= string_columns("key", self._keys)
        for number, field_name in enumerate(self._fields):
            found[f"{field_name}.offset"] = np.array(offsets[field_name], FIELD_COLUMNS["offset"])
            found[f"{field_name}.length"] = np.array([v[number] for v in self._lengths], FIELD_COLUMNS["length"])
            found[f"{field_name}.crc32c"] = np.array([v[number] for v in self._crcs], FIELD_COLUMNS["crc32c"])
            names = [encode_name(names[number], key) for names, key in zip(self._names, self._keys, strict=True)]
            found |= string_columns(f"{field_name}.name", names)
        return found


def string_columns(name: str, strings: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The two columns of a string column."""
    column = Strings.of(strings)
    return {name: column.blob, f"{name}.offset": column.offsets}


def save_part(path: Path, arrays: dict[str, npt.NDArray[Any]], meta: PartMeta) -> None:
    """Write a part: temporary name, fsync, rename."""
    memory = io.BytesIO()
    columns: dict[str, Any] = {**arrays, "meta": np.frombuffer(meta.to_json().encode(), np.uint8)}
    np.savez(memory, **columns)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(memory.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_part(path: Path) -> Any:
    """An open part: a mapping from column to array, which reads a column when asked. Close it after use."""
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path}: not the part of an index it should be: {error}") from error


def load_meta(path: Path) -> PartMeta:
    """The facts of the shard a part belongs to. Raises DatasetError."""
    with load_part(path) as part:
        try:
            return PartMeta.from_json(part["meta"].tobytes().decode())
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise DatasetError(f"{path}: its meta record cannot be read: {error}") from error
