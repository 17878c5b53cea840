"""Open one split of a remote set: the index of a local one, and ranged GETs, or a local copy of some shards.

The CRC32C of every sample is checked always: it costs nothing next to a GET, and a shard that was replaced by one of
the same size must not pass.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import StaleIndexError
from cache.remote import Remote, RemoteUrl, parse_url
from cache.stores import Files, Store
from cache.stores.copied import Copied
from cache.stores.remote import RemoteFiles
from readers.index import Index
from readers.layout import DATASET_FILE, read_dataset_info
from readers.packed import Checked, PackedColumns, shards_of
from readers.reader import Reader
from readers.remote.home import RemoteHome
from readers.table import Table

__all__ = ["open_remote"]


def open_remote(
    url: str | RemoteUrl,
    split: str | None = None,
    *,
    local: str | os.PathLike[str] | None = None,
    patience_seconds: float = 0.0,
    index_cache: str | os.PathLike[str] | None = None,
) -> Reader:
    """One split of a remote set.

    url: the address of the directory with `dataset.json`.
    local: a copy of some or all of its files, on this machine.
    patience_seconds: how long to wait for a shard that is being staged there; see `cache.stores.copied`.
    index_cache: where the index is cached; see `readers.remote.home`.

    Pickles by address; the copy connects by itself, also in a forked process. Raises what `readers.packed.open_packed`
    does, RemoteError, MissingExtraError, and StaleIndexError where the set changed since it was opened.
    """
    if not patience_seconds >= 0:
        raise ValueError(f"patience_seconds must be 0 or more, not {patience_seconds}")
    if patience_seconds and local is None:
        raise ValueError("patience_seconds is for a local copy: nothing else is on its way")
    address = parse_url(url)
    copy = None if local is None else Path(local)
    home = _home(address, split, copy, index_cache)
    info = read_dataset_info(home)
    name, chosen = info.split(split, str(address))
    origin = _Origin(address, name, info.fingerprint(), index_cache)
    index = _FetchedIndex(home / chosen.index, chosen.samples, origin)
    columns = PackedColumns(info, name, index, place=str(address))
    shards = shards_of(chosen)
    store: Store = RemoteFiles(address, shards, _SameSet(origin, copy) if copy == home else None)
    if copy is not None:
        store = Copied(Files(copy, shards), store, patience_seconds)
    return Reader(Table(columns), Checked(store, columns))


@dataclass(frozen=True)
class _Origin:
    """Where an index was fetched from."""

    url: RemoteUrl
    split: str
    fingerprint: str
    index_cache: str | os.PathLike[str] | None


@dataclass(frozen=True)
class _SameSet:
    """Where dataset.json is that of a copy, the source must be the same set."""

    origin: _Origin
    copy: Path

    def __call__(self) -> None:
        home = RemoteHome(Remote(self.origin.url), self.origin.index_cache)
        if home.info.fingerprint() != self.origin.fingerprint:
            raise StaleIndexError(f"{self.copy}: a copy of another state of {self.origin.url}; stage it again")


class _FetchedIndex(Index):
    """An index that is fetched again where a pickle arrives on another machine, or the cache was emptied."""

    def __init__(self, directory: Path, samples: int, origin: _Origin) -> None:
        super().__init__(directory, samples)
        self._origin = origin

    def __reduce__(self) -> tuple[Any, ...]:
        return _fetched, (self.directory, self.samples, self._origin)


def _fetched(directory: Path, samples: int, origin: _Origin) -> _FetchedIndex:
    if not directory.is_dir():
        home = RemoteHome(Remote(origin.url), origin.index_cache)
        if home.info.fingerprint() != origin.fingerprint:
            raise StaleIndexError(f"{origin.url}: changed since this reader was opened; open it again")
        directory = home.fetch_index(origin.split)
    return _FetchedIndex(directory, samples, origin)


def _home(url: RemoteUrl, split: str | None, local: Path | None, index_cache: str | os.PathLike[str] | None) -> Path:
    """The directory that has dataset.json and the split's index: the copy, or what is fetched from the address."""
    if local is not None and (local / DATASET_FILE).is_file():
        _, chosen = read_dataset_info(local).split(split, local)
        if (local / chosen.index).is_dir():
            return local
    home = RemoteHome(Remote(url), index_cache)
    name, _ = home.info.split(split, str(url))
    home.fetch_index(name)
    return home.path
