"""Columns: all that is known of n rows, each had when it is asked for; a table takes its rows from them.

Those of an index are mapped files (`readers.packed`); the others are in memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.index import COLUMNS, FIELD_COLUMNS
from readers.sample import ImageInfo
from readers.strings import Strings

__all__ = ["Columns", "MemoryColumns"]


class Columns(ABC):
    """Columns of n rows, each had when it is asked for. They pickle, by path where they are files."""

    fields: tuple[str, ...] = ("image",)
    classes: tuple[str, ...] = ()
    title: str = ""  # what people call it: a directory or an address, and the split
    place: str = ""  # what commands are given
    has_headers: bool = True
    has_checksums: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def column(self, name: str) -> npt.NDArray[Any]:
        """One of `readers.index.COLUMNS`, length n."""

    @abstractmethod
    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        """One of `readers.index.FIELD_COLUMNS` of a field, length n."""

    @abstractmethod
    def keys(self) -> Strings: ...

    @abstractmethod
    def names(self, field: str) -> Strings:
        """Original file names as `readers.index.encode_name` stores them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that other columns would not have."""

    @property
    @abstractmethod
    def shard_bytes(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """Size of each shard."""

    def shard_place(self, shard: int) -> str:
        """What messages call a shard."""
        return f"{self.place or self.title}, shard {shard}"

    def explained(self, error: Exception) -> Exception:
        """`error`, which came up while this was opened or read, or a better one in its place."""
        return error


class MemoryColumns(Columns):
    """Columns in memory; those that are not given say that nothing is known.

    columns: by the names of `readers.index.COLUMNS` and "<field>.<name>" of FIELD_COLUMNS.
    names: by field, as they are stored. fingerprint: default: of the keys, the labels and the classes.
    """

    def __init__(
        self,
        keys: Sequence[str],
        columns: Mapping[str, npt.ArrayLike],
        fields: tuple[str, ...] = ("image",),
        classes: tuple[str, ...] = (),
        *,
        names: Mapping[str, Strings] | None = None,
        shard_bytes: Sequence[int] | npt.NDArray[np.int64] | None = None,
        title: str = "",
    ) -> None:
        self._keys = keys if isinstance(keys, Strings) else Strings.of(keys)
        self.fields, self.classes, self.title, self.place = fields, classes, title, title
        self.has_headers = all(name in columns for name in ImageInfo._fields)
        self.has_checksums = all(f"{field}.crc32c" in columns for field in fields)
        self._names = dict(names or {})
        self._shard_bytes = shard_bytes
        dtypes = COLUMNS | {f"{field}.{name}": kind for field in fields for name, kind in FIELD_COLUMNS.items()}
        self._columns = {name: np.ascontiguousarray(values, dtypes[name]) for name, values in columns.items()}
        for name, values in self._columns.items():
            if values.shape != (len(self._keys),):
                raise ValueError(f"column {name} has the shape {values.shape}, expected ({len(self._keys)},)")
        self._dtypes = dtypes

    def __len__(self) -> int:
        return len(self._keys)

    def column(self, name: str) -> npt.NDArray[Any]:
        if name not in self._columns:
            missing = -1 if name == "label" else 0
            return np.broadcast_to(np.array(missing, self._dtypes[name]), (len(self),))
        return self._columns[name]

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        return self.column(f"{field}.{name}")

    def keys(self) -> Strings:
        return self._keys

    def names(self, field: str) -> Strings:
        if field not in self._names:
            self._names[field] = Strings(np.zeros(0, np.uint8), np.zeros(len(self) + 1, np.uint64))
        return self._names[field]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr((self.title, self.fields, self.classes)).encode(), digest_size=16)
        for column in (self._keys.blob, self._keys.offsets, self.column("label")):
            digest.update(np.ascontiguousarray(column).data)
        for field in self.fields:
            for name in FIELD_COLUMNS:
                digest.update(np.ascontiguousarray(self.field_column(field, name)).data)
        return digest.hexdigest()

    @property
    def shard_bytes(self) -> Sequence[int] | npt.NDArray[np.int64]:
        if self._shard_bytes is not None:
            return self._shard_bytes
        ends = [self.field_column(f, "offset").astype(np.int64) + self.field_column(f, "length") for f in self.fields]
        shard = self.column("shard")
        sizes = np.zeros(int(shard.max(initial=0)) + 1, np.int64)
        for end in ends:
            np.maximum.at(sizes, shard, np.where(end < 0, 0, end))
        self._shard_bytes = sizes.tolist()
        return self._shard_bytes
