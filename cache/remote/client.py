"""What lies below one address, for a process and all its threads: also where it was forked, or got this pickled.

    with Remote("s3://bucket/set") as remote:
        text, facts = remote.whole("dataset.json", 1 << 20)
        parts = remote.read_many([Span("train-000000.tar", 0, 1024), …])      # in parallel, in this order

All addresses of a process share one pool of threads, which is made when it is first used. No read waits longer than
`Patience.most_seconds` at the network.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, TypeVar

from cache.errors import UnsupportedError
from cache.remote.courier import Courier, ReadByCourier
from cache.remote.store import Facts, ObjectStore, Patience, Span
from cache.remote.url import RemoteUrl, parse_url

__all__ = ["PARALLEL", "Remote"]

PARALLEL = 32
_T = TypeVar("_T")
_V = TypeVar("_V")


class _Process:
    """What this process has: its pool, and its courier where it was forked with obstore in it."""

    def __init__(self, forked: bool) -> None:
        self.forked = forked
        self.lock = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.courier: Courier | None = None


_process = _Process(False)


def _after_fork() -> None:
    """A child has neither the parent's threads nor those of obstore."""
    global _process
    _process = _Process(_process.forked or "obstore" in sys.modules)


os.register_at_fork(after_in_child=_after_fork)


class Remote:
    """Reading and writing below an address. It pickles by that; the copy connects by itself.

    Raises RemoteError and its kinds from every method, and MissingExtraError where obstore is missing.
    """

    def __init__(self, url: str | RemoteUrl, patience: Patience | None = None) -> None:
        self.url = parse_url(url)
        self.patience = patience or Patience.from_environment()
        self._store: ObjectStore | ReadByCourier | None = None
        self._made_in: _Process | None = None

    def __repr__(self) -> str:
        return f"Remote({str(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "patience": self.patience, "_store": None, "_made_in": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, span: Span) -> tuple[Any, Facts]:
        """The bytes of one span (bytes-like), by one GET, and the facts of its object. An empty span asks nothing."""
        if span.start >= span.stop:
            return b"", Facts(span.bytes or 0, span.etag, 0.0)
        return self._reading().read(span)

    def read_many(self, spans: Sequence[Span]) -> list[tuple[Any, Facts]]:
        """The same for many spans, `PARALLEL` at a time, in the order asked for."""
        return self.each(self.read, spans)

    def submit(self, span: Span) -> Future[tuple[Any, Facts]]:
        """Begin to read. Raises RuntimeError where the interpreter is about to end."""
        return _pool().submit(self.read, span)

    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        """A whole object that has at most so many bytes; cut: or as many of them, by one ranged GET."""
        return self._reading().whole(path, most_bytes, cut)

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        """Size, ETag and time of an object, and its attributes."""
        return self._reading().head(path)

    def each(self, work: Callable[[_T], _V], items: Iterable[_T]) -> list[_V]:
        """Call `work`, which calls one of these methods, for each item in parallel; the first error ends it."""
        waiting = list(items)
        if len(waiting) == 1:
            return [work(waiting[0])]
        futures: list[Future[_V]] = [_pool().submit(work, item) for item in waiting]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # what is under way ends before the caller cleans up

    # --- writing ------------------------------------------------------------------------------------------------
    @property
    def store(self) -> ObjectStore:
        """For listing and writing. Raises UnsupportedError in a process that was forked with obstore in it."""
        store = self._reading()
        if isinstance(store, ReadByCourier):
            raise UnsupportedError(f"{self.url}: a forked process can only read; write from one that was spawned")
        return store

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Forget the connection; the next call makes another one."""
        self._store = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reading(self) -> ObjectStore | ReadByCourier:
        store = self._store
        if store is None or self._made_in is not _process:
            if _process.forked:
                store = ReadByCourier(_courier(), self.url, self.patience)
            else:
                store = ObjectStore(self.url, self.patience)
            self._store, self._made_in = store, _process
        return store


def _pool() -> ThreadPoolExecutor:
    process = _process
    with process.lock:
        if process.pool is None:
            process.pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="remote")
        return process.pool


def _courier() -> Courier:
    process = _process
    with process.lock:
        if process.courier is None or not process.courier.alive:
            process.courier = Courier()
        return process.courier
