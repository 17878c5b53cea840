"""The reader of a set that is staged in part: each shard from the copy where it is there, from the source otherwise.

A shard that is read from the source is looked for in the copy again after a second, so that training moves over to the
copy while staging goes on behind it. With some patience the reader waits for a shard that is on its way. Where the
order wants the shards as they are staged (`readers.order.StagedFirst`), that reads the source once in place of twice.
Index and dataset.json come from the copy, or from the source for a split that was not staged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.staging import Arrivals
from readers.errors import DatasetError, StaleIndexError
from readers.layout import DatasetInfo, read_dataset_info
from readers.sample import Buffer
from readers.shard_file import ShardFile
from readers.shards import Backend, ShardReader

__all__ = ["FallbackReader", "FallbackStats"]

_LOOK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FallbackStats:
    """Samples that a reader read from the copy and from the source (each field of a sample counts), and for how many
    seconds its threads together waited for shards to arrive. Each process counts for itself."""

    local: int = 0
    source: int = 0
    waited_seconds: float = 0.0

    @property
    def local_share(self) -> float:
        """Of all samples read; 0 before the first."""
        return self.local / max(1, self.local + self.source)


class FallbackReader(ShardReader):
    """A `ShardReader` over a local copy and its source.

    patience_seconds: how long to wait for a shard that is being staged before it is read from the source. After a wait
    in vain there is no other; nobody waits for a shard that is not on its way.

    Raises what ShardReader does, and StaleIndexError where the two are not the same set. A source that cannot be read
    is no error while the copy has what is asked for.
    """

    def __init__(
        self,
        local: str | os.PathLike[str],
        split: str | None = None,
        *,
        fallback: str | os.PathLike[str],
        backend: Backend = "pread",
        verify: bool = False,
        open_shards: int = 512,
        patience_seconds: float = 0.0,
    ) -> None:
        if not patience_seconds >= 0:
            raise ValueError(f"patience_seconds must be 0 or more, not {patience_seconds}")
        self.local, self.fallback = Path(local), Path(fallback)
        self.patience_seconds = patience_seconds
        home = self._home(split)
        super().__init__(home, split, backend=backend, verify=verify, open_shards=open_shards)

    def is_local(self, number: int) -> bool:
        """Whether shard `number` of the split lies in the copy now."""
        shard = self.split_info.shards[number]
        try:
            return (self.local / shard.path).stat().st_size == shard.bytes
        except OSError:
            return False

    def stats(self) -> FallbackStats:
        """What was read from where, since this reader was opened."""
        return self._stats

    def read(self, index: int, field: str = "image") -> Buffer:
        """As `ShardReader.read`."""
        if not -len(self) <= index < len(self):
            raise self._no_such_sample(index)
        source = self._prepare(self._shard_of[index])
        data = super().read(index, field)
        self._count(not source, source)
        return data

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> list[Buffer]:
        """As `ShardReader.read_many`."""
        if self.backend == "mmap":
            return super().read_many(indices, field)  # calls `read`
        wanted = np.asarray(indices, np.int64)
        if wanted.size and (int(wanted.min()) < -len(self) or int(wanted.max()) >= len(self)):
            return super().read_many(indices, field)  # says what is wrong
        numbers, counts = np.unique(self.index.column("shard")[wanted], return_counts=True)
        from_source = [self._prepare(number) for number in numbers.tolist()]
        data = super().read_many(wanted, field)
        source = int(counts[from_source].sum())
        self._count(len(data) - source, source)
        return data

    def read_into(self, index: int, field: str, target: memoryview) -> int:
        """As `ShardReader.read_into`."""
        if not -len(self) <= index < len(self):
            raise self._no_such_sample(index)
        source = self._prepare(self._shard_of[index])
        size = super().read_into(index, field, target)
        self._count(not source, source)
        return size

    def close(self) -> None:
        """Close the shards; the next read opens them again."""
        super().close()
        self._borrowed.clear()

    def after_fork(self) -> None:
        """In a forked child: as `ShardReader.after_fork`."""
        super().after_fork()
        self._stats_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "local": self.local,
            "fallback": self.fallback,
            "patience_seconds": self.patience_seconds,
        }

    # --- inside -------------------------------------------------------------------------------------------------
    def _setup(self) -> None:
        self._borrowed: dict[int, tuple[ShardFile, float]] = {}
        self._arrivals = Arrivals(self.local, self.patience_seconds)
        self._stats, self._stats_lock = FallbackStats(), threading.Lock()
        super()._setup()

    def _prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str, below_bytes: int) -> None:
        """What is waited for is not announced: the source would be read for it, and then copied."""
        wanted = np.asarray(indices, np.int64)
        if self.patience_seconds and not self._arrivals.over:
            numbers, which = np.unique(self.index.column("shard")[wanted], return_inverse=True)
            now = np.array([not self._comes_later(number) for number in numbers.tolist()], np.bool_)
            wanted = wanted[now[which]]
        super()._prefetch(wanted, field, below_bytes)

    def _comes_later(self, number: int) -> bool:
        if number >= len(self._shards) or self._shards[number] is not None or self.is_local(number):
            return False
        return self._arrivals.expects(self.split_info.shards[number].path)

    def _prepare(self, number: int) -> bool:
        """Wait for a shard, where there is patience and hope; whether it is then read from the source."""
        if number >= len(self._shards) or self._shards[number] is not None:
            return False
        if self.patience_seconds and not self._arrivals.over:
            began = time.monotonic()
            if self._arrivals.wait(self.split_info.shards[number].path, lambda: self.is_local(number)):
                self._borrowed.pop(number, None)
            self._count(0, 0, time.monotonic() - began)
        shard = self._open_shard(number)
        return self._shards[number] is not shard

    def _count(self, local: int, source: int, waited: float = 0.0) -> None:
        with self._stats_lock:
            old = self._stats
            self._stats = FallbackStats(old.local + local, old.source + source, old.waited_seconds + waited)

    def _home(self, split: str | None) -> Path:
        """Where dataset.json and the index of the split are read: the copy if they are there."""
        local, source = _info(self.local), _info(self.fallback)
        if local is not None and source is not None and local.fingerprint() != source.fingerprint():
            raise StaleIndexError(f"{self.local}: a copy of another state of {self.fallback}; stage it again")
        if local is None:
            return self.fallback
        _, chosen = local.split(split, self.local)
        return self.local if source is None or (self.local / chosen.index).is_dir() else self.fallback

    def _shard_path(self, number: int) -> Path:
        name = self.split_info.shards[number].path
        return (self.local if self.is_local(number) else self.fallback) / name

    def _open_shard(self, number: int) -> ShardFile:
        """Shards of the copy stay open as usual; those of the source are borrowed, for a second at a time."""
        shard, until = self._borrowed.get(number, (None, 0.0))
        now = time.monotonic()
        if shard is not None and now < until:
            return shard
        if self.is_local(number):
            self._borrowed.pop(number, None)
            return super()._open_shard(number)
        if shard is None:
            while len(self._borrowed) >= self.open_shards:
                self._borrowed.pop(next(iter(self._borrowed)), None)
            shard = self._new_shard_file(number)
        self._borrowed[number] = (shard, now + _LOOK_AGAIN_SECONDS)
        return shard


def _info(directory: Path) -> DatasetInfo | None:
    try:
        return read_dataset_info(directory)
    except DatasetError:
        if (directory / "dataset.json").exists():
            raise
        return None
