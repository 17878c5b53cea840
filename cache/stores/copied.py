"""A copy over its source: each shard is read from the copy if it is there, from the source otherwise.

After a shard was read from the source, the copy is checked again a second later, so training moves over to the copy
while staging continues. With `patience_seconds`, a read waits for a shard that is being staged: if the order follows
the staging, the source is then read once instead of twice.
"""

from __future__ import annotations

import threading
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import DamagedSampleError, StaleIndexError
from cache.locks import call_after_fork
from cache.staging.session import Arrivals
from cache.stores.base import Buffer, Extents, Int64s, Store, StoreOver, location, put
from cache.stores.files import Files

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class CopyStats:
    """Payloads read from the copy and from the source, and the seconds that all threads together waited for shards.
    Counted per process."""

    local: int = 0
    source: int = 0
    waited_seconds: float = 0.0

    @property
    def local_share(self) -> float:
        """The share of the payloads that came from the copy; 0 before the first read."""
        return self.local / max(1, self.local + self.source)


class Copied(Store):
    """`copy` over `source`, which have the same shards under the same numbers.

    patience_seconds: how long to wait for a shard that is being staged before reading it from the source. After one
    timeout no read waits again; reads never wait for a shard that is not being staged. Raises the errors of both
    stores; an unreadable source does not matter while the copy has the shard.
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
            data = [next(parts[0] if is_local else parts[1]) for is_local in local.tolist()]
        hits = int(local.sum())
        self._count(hits, len(local) - hits)
        return data

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        """Skips shards that reads will wait for; their source would be read twice."""
        shards, which = np.unique(extents.shard, return_inverse=True)
        states = [None if self._may_arrive(shard) else self._is_local(shard) for shard in shards.tolist()]
        for state, store in ((True, self.copy), (False, self.source)):
            chosen = extents.take(np.array([known is state for known in states], np.bool_)[which])
            if len(chosen.row):
                store.prefetch(chosen, below_bytes)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        shards, which = np.unique(extents.shard, return_inverse=True)
        local: npt.NDArray[np.bool_] = np.array([self._is_here(shard) for shard in shards.tolist()], np.bool_)[which]
        return local

    def check(self, shard: int) -> None:
        (self.copy if self._is_local(shard) else self.source).check(shard)

    def location(self, shard: int) -> str:
        return self.copy.location(shard) if self.copy.has(shard) else location(self.source, 0, shard)

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        self.copy.close()
        self.source.close()
        self._retry_at.clear()

    def after_fork(self) -> None:
        """In a forked child: replace the lock."""
        self._stats_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"copy": self.copy, "source": self.source, "patience_seconds": self.patience_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _where(self, extents: Extents) -> npt.NDArray[np.bool_]:
        """For each extent, whether it is read from the copy; bool [k]."""
        shards, which = np.unique(extents.shard, return_inverse=True)
        return np.array([self._is_local(shard) for shard in shards.tolist()], np.bool_)[which]

    def _is_local(self, shard: int) -> bool:
        """Whether to read from the copy, after waiting for a shard that is being staged."""
        if self.copy.is_open(shard):
            return True
        if self._may_arrive(shard):
            began = time.monotonic()
            self._arrivals.wait(self.copy.shards.paths[shard], lambda: self.copy.has(shard))
            self._retry_at.pop(shard, None)
            self._count(0, 0, time.monotonic() - began)
        return self._is_here(shard)

    def _is_here(self, shard: int) -> bool:
        """Whether the copy has the shard, now or a second ago."""
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
        """Whether to wait for a missing shard."""
        if not self.patience_seconds or self._arrivals.over or self.copy.is_open(shard) or self.copy.has(shard):
            return False
        return self._arrivals.expects(self.copy.shards.paths[shard])

    def _count(self, local: int, source: int, waited: float = 0.0) -> None:
        with self._stats_lock:
            old = self._stats
            self._stats = CopyStats(old.local + local, old.source + source, old.waited_seconds + waited)


# The data of other nodes, as a level between this node's data and the source.
#
#     read ──► owner of the extent?  this node, or it is local ──► own store (its copy, its cache, the source)
#                     │ another node
#                     └──► that node answers, with the right bytes ──► done
#                                 │ no
#                                 └──► own store, which reads the source
#
# The owner of an extent follows from the order (`owners`), so no directory has to be asked. The owner reads missing
# extents from the source, and keeps them if its store does; so each byte leaves the source once, whichever node reads
# it first.
#
# A node that fails is not asked for `pause_seconds`, then asked again by one reader, and the pause doubles with each
# failure, up to about a minute. Only the first failure of a node causes a warning.

_LONGEST_PAUSE = 16  # times pause_seconds
_MOST_WARNINGS = 8  # of one store in one process
_FAILURES = (OSError, DamagedSampleError)


@dataclass(frozen=True, eq=False)
class RowOwners:
    """Node g owns the extents of rows bounds[g] to bounds[g + 1]."""

    bounds: Int64s

    def __call__(self, extents: Extents) -> Int64s:
        owners: Int64s = np.searchsorted(self.bounds, extents.row, side="right") - 1
        return owners

    def one(self, row: int, shard: int) -> int:
        """The owner of one extent."""
        return bisect_right(self.bounds.data, row) - 1


@dataclass(frozen=True, eq=False)
class ShardOwners:
    """The owner of each shard: int64 [shards]."""

    nodes: Int64s

    def __call__(self, extents: Extents) -> Int64s:
        owners: Int64s = self.nodes[extents.shard]
        return owners

    def one(self, row: int, shard: int) -> int:
        """The owner of one extent."""
        return int(self.nodes[shard])


@dataclass(frozen=True, slots=True)
class NeighbourStats:
    """Payloads, by the node that served them. Counted per process.

    own: this node. near, near_bytes: other nodes. far: this node, because the owner did not answer, or wrongly.
    failures: failed requests to nodes. left_out: the nodes that are not asked at present.
    """

    own: int = 0
    near: int = 0
    near_bytes: int = 0
    far: int = 0
    failures: int = 0
    left_out: tuple[int, ...] = ()


class _Peer:
    """Another node, as seen by this process; `lock` guards the fields and connecting.

    store: of its data; None after a failure, and before it was first asked. trial: the same for one reader, after a
    failure. failures: since it last answered. retry_at: when to ask again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: Store | None = None
        self.trial: Store | None = None
        self.failures = 0
        self.retry_at = 0.0
        self.was_reported = False


class Neighbours(StoreOver):
    """`source`, the store of this node, combined with the data of other nodes.

    node: the number of this node.
    owners: returns the node that owns each extent.
    connect: returns a store of a node's data, which raises an OSError or a DamagedSampleError if the node does not
        answer, or sends other bytes than those of the set; None if the node's address is unknown. Called again after
        failures.
    pause_seconds: how long a node is not asked after its first failure.

    Raises the errors of `source`.
    """

    def __init__(
        self,
        source: Store,
        node: int,
        owners: RowOwners | ShardOwners,
        connect: Callable[[int], Store | None],
        pause_seconds: float = 5.0,
    ) -> None:
        self.source, self.node, self.owners, self.connect = source, node, owners, connect
        self.pause_seconds = pause_seconds
        self._setup()

    def _setup(self) -> None:
        self._peers: dict[int, _Peer] = {}
        self._lock, self._counts, self._warnings = threading.Lock(), Counter[str](), 0
        call_after_fork(self)

    def stats(self) -> NeighbourStats:
        """Counts since this store was opened; `source.stats()` has those of the node's own store."""
        with self._lock:
            left_out = tuple(sorted(node for node, peer in self._peers.items() if peer.failures))
            return NeighbourStats(**self._counts, left_out=left_out)

    # --- reading ------------------------------------------------------------------------------------------------
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        if self.owners.one(row, shard) == self.node:
            self._count(own=1)
            return self.source.read_one(row, shard, offset, length)
        return self.read(Extents(*(np.array([value], np.int64) for value in (row, shard, offset, length))))[0]

    def read(self, extents: Extents) -> list[Buffer]:
        own, others = self._split(extents)
        if not others:
            self._count(own=len(own))
            return self.source.read(extents)
        requests = [(node, which, self._store_of(node)) for node, which in others]
        if len(others) > 1 or len(own):  # ask all at the same time
            for _, which, store in requests:
                if store is not None:
                    store.prefetch(extents.take(which))
        payloads: list[Buffer] = [b""] * len(extents.row)
        self._read_own(extents, own, payloads)
        for node, which, store in requests:
            data = self._ask(node, store, extents.take(which))
            if data is None:
                self._read_own(extents, which, payloads)
                self._count(far=len(which))
                continue
            put(payloads, which, data)
            self._count(near=len(which), near_bytes=sum(map(len, data)))
        self._count(own=len(own))
        return payloads

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        own, others = self._split(extents)
        for node, which in others:
            peer = self._peers.get(node)
            if peer is not None and peer.failures:
                own = np.concatenate([own, which])
            elif (store := self._store_of(node)) is not None:
                store.prefetch(extents.take(which), below_bytes)
        if len(own):
            self.source.prefetch(extents.take(own), below_bytes)

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        with self._lock:
            peers, self._peers = self._peers, {}
        for peer in peers.values():
            if peer.store is not None:
                peer.store.close()
        self.source.close()

    def after_fork(self) -> None:
        """In a forked child: replace the lock and the connections."""
        self._lock, self._peers = threading.Lock(), {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("source", "node", "owners", "connect", "pause_seconds")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _split(self, extents: Extents) -> tuple[Int64s, list[tuple[int, Int64s]]]:
        """Positions of the extents that this node reads itself, and of those of each other node."""
        owners = self.owners(extents)
        away = np.flatnonzero(owners != self.node)
        if len(away):
            away = away[~self.source.holds(extents.take(away))]
        own = np.ones(len(owners), np.bool_)
        own[away] = False
        of_away = owners[away]
        return np.flatnonzero(own), [(node, away[of_away == node]) for node in np.unique(of_away).tolist()]

    def _read_own(self, extents: Extents, which: Int64s, out: list[Buffer]) -> None:
        if len(which):
            put(out, which, self.source.read(extents.take(which)))

    def _ask(self, node: int, store: Store | None, extents: Extents) -> list[Buffer] | None:
        """The extents from a node; None if it does not answer, or wrongly."""
        if store is None:
            return None
        try:
            data = store.read(extents)
        except _FAILURES as error:
            self._failed(node, store, str(error))
            return None
        peer = self._peers.get(node)
        if peer is not None and peer.trial is store:
            with peer.lock:
                if peer.trial is store:
                    peer.store, peer.trial, peer.failures = store, None, 0
        return data

    def _store_of(self, node: int) -> Store | None:
        """The store of a node; None during a pause, and after it for all readers except the first to ask."""
        peer = self._peer(node)
        with peer.lock:
            if peer.store is not None:
                return peer.store
            now = time.monotonic()
            if now < peer.retry_at:
                return None
            peer.retry_at = now + self._pause(peer)
            try:
                store, reason = self.connect(node), "it has not published its address"
            except OSError as error:
                store, reason = None, str(error)
            if store is not None and not peer.failures:
                peer.store = store
            else:
                peer.trial = store
        if store is None:
            self._failed(node, None, reason)
        return store

    def _failed(self, node: int, store: Store | None, reason: str) -> None:
        """Pause a node. store: the one that failed, None if there was none."""
        peer = self._peer(node)
        with peer.lock:
            if store is not None and store is not peer.store and store is not peer.trial:
                return  # another thread has reported this failure
            peer.store, peer.trial, peer.failures = None, None, peer.failures + 1
            pause = self._pause(peer)
            peer.retry_at = time.monotonic() + pause
            is_new, peer.was_reported = not peer.was_reported, True
        self._count(failures=1)
        if store is not None:
            store.close()
        if is_new and self._may_warn():
            warnings.warn(
                f"node {node} is not asked for {pause:g} s, and its data are read from the source: {reason}",
                stacklevel=2,
            )

    def _peer(self, node: int) -> _Peer:
        with self._lock:
            return self._peers.setdefault(node, _Peer())

    def _pause(self, peer: _Peer) -> float:
        return self.pause_seconds * min(2.0 ** max(0, min(peer.failures, 32) - 1), _LONGEST_PAUSE)

    def _may_warn(self) -> bool:
        with self._lock:
            self._warnings += 1
            return self._warnings <= _MOST_WARNINGS

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count
