"""The reader of packed sets in object stores and on web servers: the index of a local one, and ranged GETs.

One sample is one GET. Many are sorted, those that lie near each other fetched together, and up to 32 ranges at a time.
What `prefetch` announces is fetched in the background. The first GET of a shard compares its size with dataset.json and
remembers its ETag; later ones ask for that very object. The CRC32C of every sample is checked always: it costs nothing
next to a GET, and a shard that was replaced by one of the same size must not pass.

With a local copy of the set, or of a part of it, the shards that are there are read there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.remote import Facts, Remote, RemoteUrl, Span, parse_url
from cache.staging import Arrivals
from readers.criteria import checked_indices
from readers.errors import StaleIndexError
from readers.layout import DATASET_FILE, read_dataset_info
from readers.ranges import ReadPlan
from readers.remote.ahead import Ahead, Run
from readers.remote.errors import remote_errors
from readers.remote.home import RemoteHome
from readers.sample import Buffer
from readers.shard_file import ShardFile
from readers.shards import ShardReader

__all__ = ["RemoteReader"]

_GAP_BYTES = 256 << 10  # about what passes in the time that another request would take
_GET_BYTES = 8 << 20
_LOOK_AGAIN_SECONDS = 1.0


class RemoteReader(ShardReader):
    """Random access to one split of a remote set; see `ShardReader` for its methods.

    url: the address of the directory with `dataset.json`. local: a copy of some or all of its files, on this machine.
    patience_seconds: how long to wait for a shard that is being staged there; see `readers.fallback`.
    index_cache: where the index is kept; see `readers.remote.home`. Pickles by address; the copy connects by itself,
    also in a forked process. Raises what ShardReader does, RemoteError, MissingExtraError, and StaleIndexError where
    the set changed since it was opened.
    """

    _gap_bytes = _GAP_BYTES

    def __init__(
        self,
        url: str | RemoteUrl,
        split: str | None = None,
        *,
        local: str | os.PathLike[str] | None = None,
        patience_seconds: float = 0.0,
        index_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if not patience_seconds >= 0:
            raise ValueError(f"patience_seconds must be 0 or more, not {patience_seconds}")
        if patience_seconds and local is None:
            raise ValueError("patience_seconds is for a local copy: nothing else is on its way")
        self.patience_seconds = patience_seconds
        with remote_errors():
            self.url = parse_url(url)
        self.local = None if local is None else Path(local)
        self._index_cache = index_cache
        self._checked = False
        super().__init__(self._home(split), split, verify=True)

    def is_local(self, number: int) -> bool:
        """Whether shard `number` of the split lies in the local copy now."""
        if self.local is None:
            return False
        shard = self.split_info.shards[number]
        try:
            return (self.local / shard.path).stat().st_size == shard.bytes
        except OSError:
            return False

    def __repr__(self) -> str:
        return f"RemoteReader({str(self.url)!r}, split={self.split!r}, {self._samples} samples)"

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, index: int, field: str = "image") -> Buffer:
        """The bytes of one field, by one GET, or from the local copy."""
        start, stop, number = self._where(index, field)
        if self._local_shard(number) is not None:
            return super().read(index, field)
        data = self._announced.take((index % self._samples, field)) if self._announced else None
        if data is None:
            data = self._get([(number, start, stop)])[0]
        self._verify(data, index, field)
        return bytes(data)

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> list[Buffer]:
        """The bytes of many samples in the order asked for, as read-only memoryviews."""
        if not self._announced:
            return super().read_many(indices, field)
        wanted = checked_indices(indices, self)
        results: list[Buffer | None] = [self._announced.take((index, field)) for index in wanted.tolist()]
        for index, data in zip(wanted.tolist(), results, strict=True):
            if data is not None:
                self._verify(data, index, field)
        missing = [place for place, data in enumerate(results) if data is None]
        for place, data in zip(missing, super().read_many(wanted[missing], field), strict=True):
            results[place] = data
        return [data.toreadonly() if isinstance(data, memoryview) else data for data in results if data is not None]

    def read_into(self, index: int, field: str, target: memoryview) -> int:
        """Read a field into the front of `target` (uint8, at least the field's length); returns its length."""
        data = self.read(index, field)
        target[: len(data)] = data
        return len(data)

    def check_shard(self, number: int) -> None:
        """Ask for the size of shard `number`. Raises StaleIndexError where it is missing or of another size."""
        if self._local_shard(number) is not None:
            return
        shard = self.split_info.shards[number]
        with remote_errors(indexed=True):
            facts, _ = self._remote.head(shard.path)
        if facts.bytes != shard.bytes:
            raise StaleIndexError(
                f"{self._told_path(number)}: has {facts.bytes} bytes, {shard.bytes} were indexed: the shard was "
                f"truncated or changed; upload the set again"
            )
        self._pin(number, facts)

    def close(self) -> None:
        """Drop what was announced, and the connection; the next read makes another one."""
        self._announced.clear()
        self._remote.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "url": self.url,
            "local": self.local,
            "patience_seconds": self.patience_seconds,
            "_index_cache": self._index_cache,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._checked = False
        if not self.index.directory.is_dir():  # another machine, or the cache was emptied
            known = self.dataset.fingerprint()
            self.path = self._home(self.split)
            self.dataset = read_dataset_info(self.path)
            if self.dataset.fingerprint() != known:
                raise StaleIndexError(f"{self.url}: changed since this reader was opened; open it again")
            self.split, self.split_info = self.dataset.split(self.split, str(self.url))
            self.index = type(self.index)(self.path / self.split_info.index, self.split_info.samples)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _setup(self) -> None:
        super()._setup()
        self._place = self.url
        with remote_errors():
            self._remote = Remote(self.url)
        self._etags: dict[int, str] = {}
        self._look_again: dict[int, float] = {}
        self._arrivals = None if self.local is None else Arrivals(self.local, self.patience_seconds)
        self._ahead: Ahead | None = None
        self._ahead_of = -1

    def _home(self, split: str | None) -> Path:
        """The directory that has dataset.json and the split's index: the copy, or what is fetched from the address."""
        if self.local is not None and (self.local / DATASET_FILE).is_file():
            info = read_dataset_info(self.local)
            _, chosen = info.split(split, self.local)
            if (self.local / chosen.index).is_dir():
                return self.local
        with remote_errors():
            home = RemoteHome(Remote(self.url), self._index_cache)
        name, _ = home.info.split(split, str(self.url))
        home.fetch_index(name)
        return home.path

    @property
    def _announced(self) -> Ahead:
        """Of this process: a forked child does not get what its parent is fetching."""
        if self._ahead is None or self._ahead_of != os.getpid():
            self._ahead, self._ahead_of = Ahead(self._remote.patience.most_seconds), os.getpid()
        return self._ahead

    def _where(self, index: int, field: str) -> tuple[int, int, int]:
        """(start, stop, shard) of a field. Raises what `ShardReader.read` does for what cannot be."""
        columns = self._ranges(field)
        offset, length, number = self._at(columns.offset, index), columns.length[index], self._shard_of[index]
        if number >= len(self._shards):
            raise self._no_such_shard(number)
        if offset + length > self.split_info.shards[number].bytes:
            raise self._bad_range(index, field, offset, length, number)
        return offset, offset + length, number

    def _fill(self, block: memoryview, plan: ReadPlan) -> None:
        """Runs of local shards by `preadv`, all others by parallel GETs of at most 8 MiB."""
        columns = (plan.run_shard, plan.run_offset, plan.run_length, plan.run_place)
        wanted, places = [], []
        for number, offset, count, place in zip(*(column.tolist() for column in columns), strict=True):
            shard = self._local_shard(number)
            if shard is not None:
                shard.read_into(block[place : place + count], offset, count)
                continue
            for start in range(0, count, _GET_BYTES):
                wanted.append((number, offset + start, offset + min(count, start + _GET_BYTES)))
                places.append(place + start)
        for (_, start, stop), place, data in zip(wanted, places, self._get(wanted), strict=True):
            block[place : place + stop - start] = memoryview(data)

    def _get(self, wanted: list[tuple[int, int, int]]) -> list[Any]:
        """The bytes of (shard, start, stop), one GET each."""
        if not wanted:
            return []
        self._check_source()
        with remote_errors(indexed=True):
            answers = self._remote.read_many([self._span(*one) for one in wanted])
        for (number, _, _), (_, facts) in zip(wanted, answers, strict=True):
            self._pin(number, facts)
        return [data for data, _ in answers]

    def _span(self, number: int, start: int, stop: int) -> Span:
        shard = self.split_info.shards[number]
        return Span(shard.path, start, stop, self._etags.get(number, ""), shard.bytes)

    def _pin(self, number: int, facts: Facts) -> None:
        """All of a shard comes from one object: the first answer's ETag is asked of all others."""
        if facts.etag and self._etags.setdefault(number, facts.etag) != facts.etag:
            raise StaleIndexError(f"{self._told_path(number)}: changed while it was read; open the set again")

    def _check_source(self) -> None:
        """Once, where dataset.json is that of the copy: the source must be the same set."""
        if self._checked or self.local is None or self.path != self.local:
            return
        with remote_errors():
            home = RemoteHome(self._remote, self._index_cache)
        if home.info.fingerprint() != self.dataset.fingerprint():
            raise StaleIndexError(f"{self.local}: a copy of another state of {self.url}; stage it again")
        self._checked = True

    def _prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str, below_bytes: int) -> None:
        """Announce those samples that are neither local, nor on their way to the copy, nor announced already."""
        announced = self._announced
        wanted = np.unique(checked_indices(indices, self))
        shard = self.index.column("shard")[wanted]
        there = {
            number: self._comes_later(number) or self._local_shard(number) is not None
            for number in np.unique(shard).tolist()
        }
        far = [i for i, number in zip(wanted.tolist(), shard.tolist(), strict=True)
               if not there[number] and (i, field) not in announced and self.has(i, field)]  # fmt: skip
        if not far:
            return
        self._check_source()
        _, plan, length = self._plan(far, field)
        run_of = np.searchsorted(plan.run_place, plan.place, side="right") - 1
        parts: dict[int, dict[Any, tuple[int, int]]] = {}
        for i, run, place, count in zip(far, run_of.tolist(), plan.place.tolist(), length.tolist(), strict=True):
            start = place - int(plan.run_place[run])
            parts.setdefault(run, {})[(i, field)] = (start, start + count)
        for run, inside in parts.items():
            offset, size = int(plan.run_offset[run]), int(plan.run_length[run])
            announced.add(Run(self._beginner(int(plan.run_shard[run]), offset, offset + size), size, inside))

    def _beginner(self, number: int, start: int, stop: int) -> Any:
        def begin() -> Future[Any]:
            return self._remote.submit(self._span(number, start, stop))

        return begin

    def _told_path(self, number: int) -> Path | str:
        return self.url.at(self.split_info.shards[number].path)

    def _shard_path(self, number: int) -> Path:
        assert self.local is not None, "only shards of a copy are opened"
        return self.local / self.split_info.shards[number].path

    def _comes_later(self, number: int) -> bool:
        """Whether it is worth waiting for a shard that is not there."""
        if self._arrivals is None or self._shards[number] is not None or self.is_local(number):
            return False
        return self._arrivals.expects(self.split_info.shards[number].path)

    def _local_shard(self, number: int) -> ShardFile | None:
        """The open shard of the copy; one that is not there is looked for again after a second."""
        if self.local is None:
            return None
        shard = self._shards[number]
        if shard is not None:
            return shard
        if self._comes_later(number):
            assert self._arrivals is not None
            self._arrivals.wait(self.split_info.shards[number].path, lambda: self.is_local(number))
            self._look_again.pop(number, None)
        now = time.monotonic()
        if now < self._look_again.get(number, 0.0):
            return None
        if not self.is_local(number):
            self._look_again[number] = now + _LOOK_AGAIN_SECONDS
            return None
        return self._open_shard(number)
