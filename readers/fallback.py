"""The reader of a set that is staged in part: each shard from the copy where it is there, from the source otherwise.

A shard that is read from the source is looked for in the copy again after a second, so that training moves over to the
copy while staging goes on behind it. Index and dataset.json come from the copy, or from the source for a split that
was not staged.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from readers.errors import DatasetError, StaleIndexError
from readers.layout import DatasetInfo, read_dataset_info
from readers.shard_file import ShardFile
from readers.shards import Backend, ShardReader

__all__ = ["FallbackReader"]

_LOOK_AGAIN_SECONDS = 1.0


class FallbackReader(ShardReader):
    """A `ShardReader` over a local copy and its source.

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
    ) -> None:
        self.local, self.fallback = Path(local), Path(fallback)
        home = self._home(split)
        super().__init__(home, split, backend=backend, verify=verify, open_shards=open_shards)

    def is_local(self, number: int) -> bool:
        """Whether shard `number` of the split lies in the copy now."""
        shard = self.split_info.shards[number]
        try:
            return (self.local / shard.path).stat().st_size == shard.bytes
        except OSError:
            return False

    def close(self) -> None:
        """Close the shards; the next read opens them again."""
        super().close()
        self._borrowed.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "local": self.local, "fallback": self.fallback}

    # --- inside -------------------------------------------------------------------------------------------------
    def _setup(self) -> None:
        self._borrowed: dict[int, tuple[ShardFile, float]] = {}
        super()._setup()

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
