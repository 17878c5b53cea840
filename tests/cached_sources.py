"""What the tests of cached readers read from."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import packer
from readers.selection import Selectable

__all__ = ["SlowReader", "images", "made_set"]


def made_set(source: Path, output: Path, **options: Any) -> Path:
    packer.convert(source, to="tar", output=output, workers=1, samples_per_shard=7, **options)
    return output


def images(reader: Any) -> list[bytes]:
    """Of all samples."""
    return [bytes(data) for data in reader.read_many(range(len(reader)))]


class SlowReader(Selectable):
    """A reader that takes `seconds` for a read, remembers what was read, and cannot read some samples."""

    def __init__(self, base: Any, seconds: float = 0.0, broken: Mapping[int, Exception] | None = None) -> None:
        self.base, self.seconds, self.broken = base, seconds, dict(broken or {})
        self.reads: list[int] = []
        self.prefetched: list[int] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.base[index]

    def read(self, index: int, field: str = "image") -> Any:
        return self.read_many([index], field)[0]

    def read_many(self, indices: Any, field: str = "image") -> Any:
        time.sleep(self.seconds)
        for index in indices:
            if int(index) in self.broken:
                raise self.broken[int(index)]
        with self._lock:
            self.reads += [int(index) for index in indices]
        return self.base.read_many(indices, field)

    def prefetch(self, indices: Any, field: str = "image") -> None:
        self.prefetched += [int(index) for index in indices]
