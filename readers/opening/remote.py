"""Packed sets in object stores and on web servers: a local index, and ranged GETs for the shards.

dataset.json and the index of each opened split are fetched once into a local directory:

    $XDG_CACHE_HOME/packer/sets/          ~/.cache without the variable; $PACKER_CACHE_DIR replaces the first two parts
      <name>-<address>-<state>/           address, state: 16 hex digits each
        dataset.json
        train.index/                      the columns, mapped as those of a local set are
        .lock                             flock: one process fetches, others wait for it

`state` covers the bytes of dataset.json and what the server reports of it (ETag, time), and dataset.json is the last
file written of a set: a changed set has another directory, and two states never mix. After an index was fetched,
dataset.json must still be the same. Names of columns follow from dataset.json, so the server need not list files.
States that were not opened for 30 days are removed.

The CRC32C of every sample is always checked: it costs nothing next to a GET, and a shard that was replaced by one of
the same size must not pass.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from crc32c import crc32c

from cache.errors import (
    DatasetError,
    MissingError,
    NoBucketError,
    OutputError,
    PackerError,
    StagingError,
    StaleIndexError,
)
from cache.files import Folder, atomic_write, sync_file
from cache.locks import locked
from cache.remote import Facts, Remote, RemoteUrl, Span, parse_url
from cache.stores import Files, Store
from cache.stores.copied import Copied
from cache.stores.remote import RemoteFiles
from readers.layout import (
    DATASET_FILE,
    MAX_JSON_BYTES,
    DatasetInfo,
    SplitInfo,
    parse_dataset_info,
    read_dataset_info,
)
from readers.opening.packed import Checked, OpenedSet, PackedColumns, Recognised, handed_out, shards_of
from readers.reader import Reader
from readers.table import Index, Table

_FIRST_BYTES = 8 << 20
_OLD_SECONDS = 30 * 24 * 3600.0
_COLUMN_BYTES_A_SAMPLE = 1 << 16  # limit against a hostile server: most mean bytes of a key or name
_LOCK_SECONDS = 600.0


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
    index_cache: the directory for indexes; see `index_cache_folder`.

    Pickles by address; unpickled and forked copies connect by themselves. Raises what `open_packed`
    does, RemoteError, MissingExtraError, and StaleIndexError where the set changed since it was opened.
    """
    if not patience_seconds >= 0:
        raise ValueError(f"patience_seconds must be 0 or more, not {patience_seconds}")
    if patience_seconds and local is None:
        raise ValueError("patience_seconds is for a local copy: only a copy waits for staging")
    address = parse_url(url)
    copy = None if local is None else Path(local)
    home = _home(address, split, copy, index_cache)
    info = read_dataset_info(home)
    name, chosen = info.split(split, str(address))
    origin = _Origin(address, name, info.fingerprint(), index_cache)
    columns = _RemoteColumns(info, name, home / chosen.index, str(address), _RemoteSet(Remote(address), info, name))
    columns.origin = origin
    shards = shards_of(chosen)
    # If the copy's dataset.json is used, the source must be the set that was copied.
    same_set = partial(origin.home, f"{copy}: a copy of another version of {address}; stage it again")
    store: Store = RemoteFiles(address, shards, same_set if copy == home else None)
    if copy is not None:
        store = Copied(Files(copy, shards, recognise=Recognised(columns, None)), store, patience_seconds)
    return Reader(Table(columns), handed_out(Checked(store, columns), columns))


@dataclass(frozen=True)
class _Origin:
    """The source of a fetched index."""

    url: RemoteUrl
    split: str
    fingerprint: str
    index_cache: str | os.PathLike[str] | None

    def home(self, changed: str) -> RemoteHome:
        """The current set at the address. Raises StaleIndexError with the message `changed` if it is another set."""
        home = RemoteHome(Remote(self.url), self.index_cache)
        if home.info.fingerprint() != self.fingerprint:
            raise StaleIndexError(changed)
        return home


class _RemoteSet(OpenedSet):
    """The set at an address: dataset.json is requested again if bytes disagree with the index."""

    def __init__(self, remote: Remote, info: DatasetInfo, split: str) -> None:
        super().__init__(Path(), replace(info, read_from=None), split, str(remote.url))
        self._remote = remote

    def check(self, path: str) -> None:
        """Nothing: fetched files do not change."""

    def _state(self) -> Facts:
        return self._remote.head(DATASET_FILE)[0]

    def _read(self) -> tuple[Facts, DatasetInfo]:
        text, facts = self._remote.whole(DATASET_FILE, MAX_JSON_BYTES)
        return facts, parse_dataset_info(text, self._remote.url.at(DATASET_FILE))


class _RemoteColumns(PackedColumns):
    """Columns that are fetched again if they were unpickled on another machine, or if the cache was emptied."""

    origin: _Origin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.directory.is_dir():
            changed = f"{self.origin.url}: changed since this reader was opened; open it again"
            self.directory = self.origin.home(changed).fetch_index(self.split)


def _home(url: RemoteUrl, split: str | None, local: Path | None, index_cache: str | os.PathLike[str] | None) -> Path:
    """The directory with dataset.json and the split's index: the copy, or the directory for fetched files."""
    if local is not None and (local / DATASET_FILE).is_file():
        _, chosen = read_dataset_info(local).split(split, local)
        if (local / chosen.index).is_dir():
            return local
    home = RemoteHome(Remote(url), index_cache)
    name, _ = home.info.split(split, str(url))
    home.fetch_index(name)
    return home.path


def index_cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The cache of remote indexes: `folder`, $PACKER_CACHE_DIR, $XDG_CACHE_HOME/packer or ~/.cache/packer."""
    if folder is None:
        folder = os.environ.get("PACKER_CACHE_DIR")
    return default_cache_folder() if folder is None else Path(folder).expanduser().absolute()


def default_cache_folder() -> Path:
    """The default cache of remote indexes: $XDG_CACHE_HOME/packer or ~/.cache/packer."""
    return (Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "packer").absolute()


class RemoteHome:
    """A remote set's dataset.json, fetched on creation, and its local directory.

    Raises DatasetError if there is no set, RemoteError, MissingExtraError, and OutputError if the directory cannot be
    written.
    """

    def __init__(self, remote: Remote, folder: str | os.PathLike[str] | None = None) -> None:
        self.remote, self.url = remote, remote.url
        try:
            self.text, self.facts = remote.whole(DATASET_FILE, MAX_JSON_BYTES)
        except NoBucketError:
            raise
        except MissingError as error:
            unfinished = f"{self.url}: no packed set (no {DATASET_FILE}), or an upload that is not finished"
            raise DatasetError(unfinished) from error
        self.info: DatasetInfo = parse_dataset_info(self.text, self.url.at(DATASET_FILE))
        self.state = _digest(self.text, self.facts.etag.encode(), repr(self.facts.modified).encode())
        self.base = index_cache_folder(folder) / "sets"
        self._prefix = f"{_plain(self.url.name)}-{_digest(str(self.url).encode())}-"
        self.path = self.base / f"{self._prefix}{self.state}"
        with _writing(self.path):
            self._ensure_folder()

    def fetch_index(self, split: str) -> Path:
        """The local directory of a split's index, fetched if it is missing. Raises StaleIndexError, DatasetError."""
        info = self.info.splits[split]
        place = self.path / info.index
        if not place.is_dir():
            with _writing(self.path):
                self._fetch_locked(info, place)
        return place

    # --- inside -------------------------------------------------------------------------------------------------
    def _ensure_folder(self) -> None:
        if not (self.path / DATASET_FILE).is_file():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self.path / DATASET_FILE, self.text)
            self._prune()
        os.utime(self.path)

    def _prune(self) -> None:
        """Remove other versions of this address that have not been opened for a long time."""
        for other in self.base.glob(f"{self._prefix}*"):
            if other != self.path and not other.is_symlink() and other.stat().st_mtime < time.time() - _OLD_SECONDS:
                shutil.rmtree(other, ignore_errors=True)

    def _fetch_locked(self, info: SplitInfo, place: Path) -> None:
        try:
            with locked(self.path / ".lock", _LOCK_SECONDS):
                if not place.is_dir():
                    self._fetch(info, place)
        except StagingError as error:
            raise OutputError(f"{error}; choose another directory with PACKER_CACHE_DIR") from error

    def _fetch(self, info: SplitInfo, place: Path) -> None:
        """Fetch every column under a temporary name, check all, then rename them together."""
        part = self.path / ".part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        try:
            names = self.info.column_names
            self.remote.each(lambda name: self._column(info, name, part / name), names)
            now, _ = self.remote.head(DATASET_FILE)
            if not _same(now, self.facts):
                raise StaleIndexError(f"{self.url}: was changed while its index was fetched; open it again")
            try:
                Index(part, info.samples, self.info.fields, self.info.separate).check()
            except DatasetError as error:
                message = str(error).replace(str(part), self.url.at(info.index))
                raise DatasetError(f"{message}; then upload it again") from error
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with Folder(self.path) as home, home.folder(part.name) as columns, Folder(place.parent) as parent:
                columns.sync()
                home.rename(part.name, place.name, parent, durable=True)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _column(self, info: SplitInfo, name: str, target: Path) -> None:
        """Fetch one column, 8 MiB a GET. Raises DatasetError if it disagrees with dataset.json."""
        path, samples, known = f"{info.index}/{name}", info.samples, info.columns.get(name)
        try:
            data, facts = self.remote.whole(path, _FIRST_BYTES, cut=True)
        except MissingError as error:
            raise DatasetError(f"{self.url.at(path)}: missing index column; upload the set again") from error
        if known and facts.bytes != known.bytes:
            raise _damaged(self.url.at(path), f"has {facts.bytes} bytes, dataset.json says {known.bytes}")
        if facts.bytes > (1 << 20) + samples * _COLUMN_BYTES_A_SAMPLE:
            raise DatasetError(f"{self.url.at(path)}: has {facts.bytes} bytes, which is too many for {samples} samples")
        with open(target, "xb") as file:
            file.write(data)
            crc = crc32c(data)
            for start in range(len(data), facts.bytes, _FIRST_BYTES):
                stop = min(start + _FIRST_BYTES, facts.bytes)
                more, _ = self.remote.read(Span(path, start, stop, facts.etag, facts.bytes))
                file.write(more)
                crc = crc32c(more, crc)
            sync_file(file)
        if known and crc != known.crc32c:
            raise _damaged(self.url.at(path), f"the CRC32C is {crc:08x}, dataset.json says {known.crc32c:08x}")


def _damaged(place: str, problem: str) -> DatasetError:
    return DatasetError(f"{place}: {problem}: the index is damaged or has been changed; upload the set again")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk into OutputError, with what to do about them."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PackerError):
            raise
        raise OutputError(
            f"{path}: the index of a remote set cannot be stored there: {error.strerror or error}; choose another "
            f"directory with PACKER_CACHE_DIR"
        ) from error


def _same(a: Facts, b: Facts) -> bool:
    return a.bytes == b.bytes and a.etag == b.etag and (bool(a.etag) or a.modified == b.modified)


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[:60].strip("._-") or "set"
