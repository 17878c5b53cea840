"""Sources for the tests of cached readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import by_subject

import packer
from cache.stores import Buffer, Extents, Store, StoreOver
from readers.reader import Reader

__all__ = ["SlowReader", "SlowStore", "images", "pack_set"]


def pack_set(source: Path, output: Path, **options: Any) -> Path:
    packer.convert(source, to="tar", output=output, **by_subject(options, workers=1, samples=7))
    return output


def images(reader: Any) -> list[bytes]:
    """The encoded images of all samples."""
    return [bytes(data) for data in reader.read_many(range(len(reader)))]


class SlowStore(StoreOver):
    """A store that takes `seconds` for a read, remembers which rows were read, and cannot read some rows."""

    def __init__(self, source: Store, seconds: float = 0.0, broken: Mapping[int, Exception] | None = None) -> None:
        self.source, self.seconds, self.broken = source, seconds, dict(broken or {})
        self.reads: list[int] = []
        self.prefetched: list[int] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        self._note([row])
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        self._note(extents.row.tolist())
        return self.source.read(extents)

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        self.prefetched += extents.row.tolist()
        self.source.prefetch(extents, below_bytes)

    def _note(self, rows: list[int]) -> None:
        time.sleep(self.seconds)
        for row in rows:
            if row in self.broken:
                raise self.broken[row]
        with self._lock:
            self.reads += rows


class SlowReader(Reader):
    """A reader over a `SlowStore`. Rows are rows of the table, which are samples where the set has one field."""

    store: SlowStore

    def __init__(self, base: Reader, seconds: float = 0.0, broken: Mapping[int, Exception] | None = None) -> None:
        super().__init__(base.table, SlowStore(base.store, seconds, broken))

    @property
    def reads(self) -> list[int]:
        return self.store.reads

    @property
    def prefetched(self) -> list[int]:
        return self.store.prefetched
