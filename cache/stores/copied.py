"""A copy over its source: each shard from the copy where it is there, from the source otherwise.

The copy is checked again a second after a shard was read from the source, so training moves over to the copy while
staging continues. With patience a read waits for a shard that is on its way: where the order follows the staging, the
source is then read once and not twice.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import StaleIndexError
from cache.locks import call_after_fork
from cache.staging import Arrivals
from cache.stores.base import Buffer, Extents, Store
from cache.stores.files import Files

__all__ = ["Copied", "CopyStats"]

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class CopyStats:
    """Payloads read from the copy and from the source, and the seconds that all threads together waited for shards to
    arrive. Each process has its own counts."""

    local: int = 0
    source: int = 0
    waited_seconds: float = 0.0

    @property
    def local_share(self) -> float:
        """Of all payloads read; 0 before the first."""
        return self.local / max(1, self.local + self.source)


class Copied(Store):
    """`copy` over `source`, which have the same shards under the same numbers.

    patience_seconds: how long to wait for a shard that is being staged before it is read from the source. After one
    failed wait there are no others; a shard that is not on its way is not waited for. Raises what the two raise; a
    source that cannot be read does not matter while the copy has the shard.
    """

    def __init__(self, copy: Files, source: Store, patience_seconds: float = 0.0) -> None:
        if not patience_seconds >= 0:
            raise ValueError(f"patience_seconds must be 0 or more, not {patience_seconds}")
        self.copy, self.source, self.patience_seconds = copy, source, patience_seconds
        self._setup()

    def _setup(self) -> None:
        self._retry_at: dict[int, float] = {}
        self._arrivals = Arrivals(Path(self.copy.root), self.patience_seconds)
        self._stats, self._stats_lock = CopyStats(), threading.Lock()
        call_after_fork(self)

    def stats(self) -> CopyStats:
        """Counts since this store was opened."""
        return self._stats

    # --- reading ------------------------------------------------------------------------------------------------
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        local = self._is_local(shard)
        data = (self.copy if local else self.source).read_one(row, shard, offset, length)
        self._count(local, not local)
        return data

    def read(self, extents: Extents) -> list[Buffer]:
        local = self._where(extents)
        if local.all():
            data = self.copy.read(extents)
        elif not local.any():
            data = self.source.read(extents)
        else:
            parts = iter(self.copy.read(extents.take(local))), iter(self.source.read(extents.take(~local)))
            data = [next(parts[0] if here else parts[1]) for here in local.tolist()]
        here = int(local.sum())
        self._count(here, len(local) - here)
        return data

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        """Shards that reads will wait for are left out: their source would be read twice."""
        shards, which = np.unique(extents.shard, return_inverse=True)
        states = [None if self._may_arrive(shard) else self._is_local(shard) for shard in shards.tolist()]
        for state, store in ((True, self.copy), (False, self.source)):
            chosen = extents.take(np.array([known is state for known in states], np.bool_)[which])
            if len(chosen.row):
                store.prefetch(chosen, below_bytes)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        shards, which = np.unique(extents.shard, return_inverse=True)
        found: npt.NDArray[np.bool_] = np.array([self._is_here(shard) for shard in shards.tolist()], np.bool_)[which]
        return found

    def check(self, shard: int) -> None:
        (self.copy if self._is_local(shard) else self.source).check(shard)

    def location(self, shard: int) -> str:
        return (self.copy if self.copy.has(shard) else self.source).location(shard)

    def has_copy(self, shard: int) -> bool:
        """Whether the shard is in the copy now."""
        return self.copy.has(shard)

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        self.copy.close()
        self.source.close()
        self._retry_at.clear()

    def after_fork(self) -> None:
        """In a forked child."""
        self._stats_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"copy": self.copy, "source": self.source, "patience_seconds": self.patience_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _where(self, extents: Extents) -> npt.NDArray[np.bool_]:
        """For each extent, whether it is read from the copy."""
        shards, which = np.unique(extents.shard, return_inverse=True)
        return np.array([self._is_local(shard) for shard in shards.tolist()], np.bool_)[which]

    def _is_local(self, shard: int) -> bool:
        """Whether to read from the copy, after waiting for a shard that is on its way."""
        if self.copy.is_open(shard):
            return True
        if self._may_arrive(shard):
            began = time.monotonic()
            self._arrivals.wait(self.copy.shards.paths[shard], lambda: self.copy.has(shard))
            self._retry_at.pop(shard, None)
            self._count(0, 0, time.monotonic() - began)
        return self._is_here(shard)

    def _is_here(self, shard: int) -> bool:
        """Whether the copy has the shard now, or had it a second ago."""
        if self.copy.is_open(shard):
            return True
        now = time.monotonic()
        if now < self._retry_at.get(shard, 0.0):
            return False
        if self.copy.has(shard):
            try:
                self.copy.check(shard)
                return True
            except StaleIndexError:
                pass  # just removed
        self._retry_at[shard] = now + _RETRY_SECONDS
        return False

    def _may_arrive(self, shard: int) -> bool:
        """Whether to wait for a shard that is not there."""
        if not self.patience_seconds or self._arrivals.over or self.copy.is_open(shard) or self.copy.has(shard):
            return False
        return self._arrivals.expects(self.copy.shards.paths[shard])

    def _count(self, local: int, source: int, waited: float = 0.0) -> None:
        with self._stats_lock:
            old = self._stats
            self._stats = CopyStats(old.local + local, old.source + source, old.waited_seconds + waited)
