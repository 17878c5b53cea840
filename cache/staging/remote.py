"""Staging from an address: several ranged GETs of each file at a time, in order, all of one object.

All GETs ask for the ETag of the first answer. What is on this machine already (dataset.json and the indexes, which were
fetched to know what to stage) is copied from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import MissingExtraError, RemoteError, StagingSourceError
from cache.remote import Facts, Remote, Span
from cache.staging.sources import FolderSource, StagedFile

_GET_BYTES = 8 << 20
_AHEAD = 3  # GETs of one file under way; with 8 files at a time they hold at most 192 MiB
_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class RemoteSource:
    """The files below an address. here: a directory that has those in `from_here`."""

    remote: Remote
    here: Path
    from_here: frozenset[str]

    def __str__(self) -> str:
        return str(self.remote.url)

    def location(self, file: StagedFile) -> str:
        return self.remote.url.at(file.path)

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """See `cache.staging.sources.Source`."""
        if file.path in self.from_here:
            yield from FolderSource(self.here).chunks(file, check)
            return
        starts = deque(range(0, file.bytes, _GET_BYTES))
        pending: deque[Future[tuple[Any, Facts]]] = deque()
        etag, at_once = "", 1  # until the first answer, which gives the ETag to ask for
        try:
            while starts or pending:
                while starts and len(pending) < at_once:
                    start = starts.popleft()
                    stop = min(start + _GET_BYTES, file.bytes)
                    pending.append(self.remote.submit(Span(file.path, start, stop, etag, file.bytes)))
                data, facts = self._wait(pending.popleft(), check)
                if etag and facts.etag and facts.etag != etag:
                    raise StagingSourceError(f"{self.location(file)}: changed while it was being copied; stage again")
                etag, at_once = etag or facts.etag, _AHEAD
                yield memoryview(data)
        except (RemoteError, MissingExtraError) as error:
            raise StagingSourceError(f"{error}; is the source still what it was? then stage again") from error
        finally:
            for future in pending:
                future.cancel()

    def _wait(self, future: Future[tuple[Any, Facts]], check: Callable[[], None]) -> tuple[Any, Facts]:
        """The answer; GETs are bounded, so this ends."""
        while True:
            check()
            try:
                return future.result(_TICK_SECONDS)
            except FutureTimeout:
                if future.done():
                    raise
