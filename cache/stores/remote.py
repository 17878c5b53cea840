"""Shards in an object store or on a web server, read by ranged GETs.

One extent is one GET. Many extents are sorted, and neighbours merged, with up to 256 GETs in flight. The first GET of a
shard compares its size with the index and remembers its ETag; later ones require it.

`prefetch` fetches extents in the background, and keeps them until each sample was read once:

    announced ──► queue of runs ──► up to 224 GETs at a time ──► bytes, until taken
            above the limit the oldest are dropped, and so are those left over after as many bytes were read since their
            announcement, as after a loop that ended early; they are read again when they are needed

A run is one range of a shard with one or more samples. A failed run is forgotten: the read that follows requests it
again, and raises. When the interpreter ends, queued runs are not started.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from cache.errors import MissingError, StaleIndexError
from cache.remote import Facts, Patience, Remote, RemoteUrl, Span, parallel_gets
from cache.stores.base import Buffer, Extents, Shards, Store
from cache.stores.files import check_inside
from cache.stores.ranges import ReadPlan, plan_reads

_GAP_BYTES = 64 << 10  # reading a larger gap costs more than another request, many of which are in flight
_GET_BYTES = 8 << 20
_Key = tuple[int, int, int]


class RemoteFiles(Store):
    """Shards below an address. Pickles as its address; the copy opens its own connection, also in a forked process.

    first: called once in each process before the first request; may raise.
    patience: by default from the environment.
    gap_bytes: the largest gap between two extents that one GET fetches.

    Raises RemoteError, MissingExtraError, and StaleIndexError if a shard is missing or was replaced.
    """

    def __init__(
        self,
        url: RemoteUrl,
        shards: Shards,
        first: Callable[[], object] | None = None,
        *,
        patience: Patience | None = None,
        gap_bytes: int = _GAP_BYTES,
    ) -> None:
        self.url, self.shards, self.first, self.patience, self.gap_bytes = url, shards, first, patience, gap_bytes
        self._setup()

    def _setup(self) -> None:
        self._remote = Remote(self.url, self.patience)
        self._sizes = np.asarray(self.shards.bytes, np.int64)
        self._etags: dict[int, str] = {}
        self._ahead: Ahead | None = None
        self._ahead_of = -1
        self._asked = False

    # --- reading ------------------------------------------------------------------------------------------------
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        if not 0 <= offset <= offset + length <= self.shards.bytes[shard] or length < 0:
            extent = Extents(*(np.array([value]) for value in (row, shard, offset, length)))
            check_inside(self._sizes, extent, self.location)
        announced = self._announced
        data: Any = announced.take([(shard, offset, length)])[0] if announced else None
        if data is None:
            data = self._get([(shard, offset, offset + length)])[0]
        return bytes(data)

    def read(self, extents: Extents) -> list[Buffer]:
        """Read-only memoryviews."""
        announced = self._announced
        if not announced:
            return self._read_now(extents)
        results: list[Any] = announced.take(list(_keys(extents)))
        missing = [i for i, data in enumerate(results) if data is None]
        for i, data in zip(missing, self._read_now(extents.take(np.array(missing, np.int64))), strict=True):
            results[i] = data
        return results

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        announced = self._announced
        places = {key: i for i, key in enumerate(_keys(extents)) if key not in announced and key[2]}  # once each
        if not places:  # an empty extent needs no GET
            return
        extents = extents.take(np.array([*places.values()]))
        self._ask_first()
        plan = self._plan(extents)
        parts: list[dict[Hashable, tuple[int, int]]] = [{} for _ in plan.run_offset]
        starts = (plan.place - plan.run_place[plan.run_of]).tolist()
        for key, run, start in zip(places, plan.run_of.tolist(), starts, strict=True):
            parts[run][key] = (start, start + key[2])
        for some, (shard, offset, length, _) in zip(parts, plan.runs(), strict=True):
            announced.add(Run(self._starter(shard, offset, offset + length), length, some))

    def check(self, shard: int) -> None:
        path, size = self.shards.paths[shard], self.shards.bytes[shard]
        with _indexed():
            facts, _ = self._remote.head(path)
        if facts.bytes != size:
            raise StaleIndexError(
                f"{self.location(shard)}: has {facts.bytes} bytes, expected {size} as indexed: the shard was "
                f"truncated or changed; upload the set again"
            )
        self._pin(shard, facts)

    def location(self, shard: int) -> str:
        return self.url.at(self.shards.paths[shard])

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Drop prefetched bytes and the connection; the next read connects again."""
        self._announced.clear()
        self._remote.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("url", "shards", "first", "patience", "gap_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    @property
    def _announced(self) -> Ahead:
        """The prefetched reads of this process; a forked child does not receive those of its parent."""
        if self._ahead is None or self._ahead_of != os.getpid():
            self._ahead, self._ahead_of = Ahead(self._remote.patience.most_seconds), os.getpid()
        return self._ahead

    def _plan(self, extents: Extents) -> ReadPlan:
        check_inside(self._sizes, extents, self.location)
        return plan_reads(extents.shard, extents.offset, extents.length, self.gap_bytes)

    def _read_now(self, extents: Extents) -> list[Buffer]:
        """Read by parallel GETs of at most 8 MiB: views of the answers; only runs of several GETs are joined."""
        if not len(extents.row):
            return []
        plan = self._plan(extents)
        ranges, counts = [], []
        for shard, offset, length, _ in plan.runs():
            starts = range(0, max(1, length), _GET_BYTES)
            ranges += [(shard, offset + start, offset + min(length, start + _GET_BYTES)) for start in starts]
            counts.append(len(starts))
        answers, runs = iter(self._get(ranges)), list[memoryview]()
        for count in counts:
            parts = [next(answers) for _ in range(count)]
            runs.append(memoryview(parts[0] if count == 1 else b"".join(parts)))
        starts_in_run = plan.place - plan.run_place[plan.run_of]
        places = zip(plan.run_of.tolist(), starts_in_run.tolist(), extents.length.tolist(), strict=True)
        return [runs[run][start : start + length] for run, start, length in places]

    def _get(self, ranges: list[tuple[int, int, int]]) -> list[Any]:
        """The bytes of each (shard, start, stop), by one GET each."""
        if not ranges:
            return []
        self._ask_first()
        with _indexed():
            answers = self._remote.read_many([self._span(*entry) for entry in ranges])
        for (shard, _, _), (_, facts) in zip(ranges, answers, strict=True):
            self._pin(shard, facts)
        return [data for data, _ in answers]

    def _span(self, shard: int, start: int, stop: int) -> Span:
        return Span(self.shards.paths[shard], start, stop, self._etags.get(shard, ""), self.shards.bytes[shard])

    def _starter(self, shard: int, start: int, stop: int) -> Callable[[], Future[Any]]:
        return lambda: self._remote.submit(self._span(shard, start, stop))

    def _pin(self, shard: int, facts: Facts) -> None:
        """Make sure that all bytes of a shard come from one object, with the ETag of the first answer."""
        if facts.etag and self._etags.setdefault(shard, facts.etag) != facts.etag:
            raise StaleIndexError(f"{self.location(shard)}: changed while it was read; open the set again")

    def _ask_first(self) -> None:
        if not self._asked and self.first is not None:
            self.first()
        self._asked = True


def _keys(extents: Extents) -> Iterator[_Key]:
    return zip(extents.shard.tolist(), extents.offset.tolist(), extents.length.tolist(), strict=True)


@contextmanager
def _indexed() -> Iterator[None]:
    """Translate a missing object to StaleIndexError, since only indexed objects are read."""
    try:
        yield
    except MissingError as error:
        raise StaleIndexError(str(error)) from error


_CAP_BYTES = 256 << 20


class Run:
    """One prefetched range. parts: its samples, as key -> (start, stop) relative to the run."""

    def __init__(
        self, begin: Callable[[], Future[Any]], size_bytes: int, parts: dict[Hashable, tuple[int, int]]
    ) -> None:
        self.begin, self.bytes, self.parts = begin, size_bytes, parts
        self.left = len(parts)
        self.since = 0  # bytes taken before it was announced
        self.future: Future[Any] | None = None
        self.data: memoryview | None = None

    def answer(self, seconds: float) -> memoryview | None:
        """The bytes, after waiting for them; None if the GET failed."""
        if self.data is None and self.future is not None:
            with suppress(OSError, ImportError, CancelledError, TimeoutError, RuntimeError):
                self.data = memoryview(self.future.result(seconds)[0]).toreadonly()
        return self.data


class Ahead:
    """The prefetched reads of one reader in one process. Thread-safe. seconds: the longest wait for one."""

    def __init__(self, seconds: float, cap_bytes: int = _CAP_BYTES) -> None:
        self._seconds, self._cap_bytes = seconds, cap_bytes
        self._most = parallel_gets() * 7 // 8  # the rest is for reads that wait
        self._lock = threading.RLock()  # the callback of a finished future runs at once, in this thread
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._of: dict[Hashable, Run] = {}
        self._queue: OrderedDict[int, Run] = OrderedDict()
        self._running = 0
        self._held_bytes = self._taken_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, run: Run) -> None:
        """Prefetch a run; returns at once."""
        with self._lock:
            self._runs[id(run)] = run
            run.since = self._taken_bytes
            self._held_bytes += run.bytes
            self._of.update((key, run) for key in run.parts)
            self._queue[id(run)] = run
            while self._held_bytes > self._cap_bytes and len(self._runs) > 1:
                self._forget(next(iter(self._runs.values())))
            while self._taken_bytes - (oldest := next(iter(self._runs.values()))).since > self._cap_bytes:
                self._forget(oldest)
            self._begin_more()

    def take(self, keys: Sequence[Hashable]) -> list[memoryview | None]:
        """The bytes of prefetched samples, read-only, after waiting for GETs in flight; None for others."""
        with self._lock:
            runs = [self._of.get(key) for key in keys]
            for run in runs:
                if run is not None and run.future is None:
                    self._begin(run)
        answers = {run: run.answer(self._seconds) for run in {*runs} if run is not None}
        taken: list[memoryview | None] = [None] * len(keys)
        with self._lock:
            for i, (key, run) in enumerate(zip(keys, runs, strict=True)):
                if run is None:
                    continue
                start, stop = run.parts[key]
                data = answers[run]
                taken[i] = None if data is None else data[start:stop]
                if self._of.get(key) is run:
                    del self._of[key]
                    self._taken_bytes += stop - start
                    run.left -= 1
                    if data is None or not run.left:
                        self._forget(run)
        return taken

    def clear(self) -> None:
        """Forget all runs; GETs in flight end by themselves."""
        with self._lock:
            for run in list(self._runs.values()):
                self._forget(run)

    def _forget(self, run: Run) -> None:
        if self._runs.pop(id(run), None) is None:
            return
        self._held_bytes -= run.bytes
        for key in run.parts:
            if self._of.get(key) is run:
                del self._of[key]
        self._queue.pop(id(run), None)
        if run.future is not None:
            run.future.cancel()

    def _begin_more(self) -> None:
        while self._queue and self._running < self._most:
            self._begin(next(iter(self._queue.values())))

    def _begin(self, run: Run) -> None:
        self._queue.pop(id(run), None)
        try:
            run.future = run.begin()
        except RuntimeError:  # the interpreter is shutting down
            self._queue.clear()
            return
        self._running += 1
        run.future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._running -= 1
            self._begin_more()
