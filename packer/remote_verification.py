"""`packer verify` of a set at an address: every shard and index file is fetched once and summed, nothing is stored.

A shard with the size and the CRC32C of dataset.json is the shard that was packed, so samples are not looked at one by
one. What must be looked into (the formats' own structure, the pixels, the original source) needs the files here.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from crc32c import crc32c

from cache.remote import ChangedError, MissingError, Remote, TruncatedError
from cache.staging import StagedFile, StagingSourceError, work_off
from cache.staging.remote import RemoteSource
from packer.index_check import check_index
from packer.problems import Problem, Problems, VerifyResult
from packer.watch import Silent, Watcher
from readers.errors import DatasetError, RemoteError
from readers.remote import RemoteHome, remote_errors

__all__ = ["verify_remote"]

_FILES_AT_ONCE = 4
_OF_THE_SHARD = (ChangedError, MissingError, TruncatedError)


def verify_remote(address: str, *, deep: bool, workers: int | None, watcher: Watcher | None) -> VerifyResult:
    """Check shards and index of a set at an address. workers: shards at a time; default 4.

    Raises RemoteError where the server cannot be reached, and for what only a copy allows.
    """
    with remote_errors():
        remote = Remote(address)
    if deep:
        raise RemoteError(
            f"{remote.url}: --deep and --against need the files here; run  packer stage {remote.url} --to DIR  and "
            f"verify the copy"
        )
    home, watched = RemoteHome(remote), watcher or Silent()
    found = Problems()
    sound = []
    for name, split in home.info.splits.items():
        try:
            here = home.fetch_index(name)
            check_index(home.path, home.info, name, found, f"; remove {here}, and it is fetched again")
            sound.append(name)
        except DatasetError as error:
            found.add(Problem(name, split.index, str(error)))
    shards = [(name, shard) for name, split in home.info.splits.items() for shard in split.shards]
    files = [(name, _File(shard.path, shard.bytes, shard.crc32c)) for name, shard in shards]
    for name in sound:
        split = home.info.splits[name]
        files += [(name, _File(f"{split.index}/{file}", c.bytes, c.crc32c)) for file, c in split.columns.items()]
    total = sum(file.bytes for _, file in files)
    checked = _Checked(RemoteSource(remote, home.path, frozenset()), found)
    watched.begin(0, total, lambda: (0, checked.done_bytes))
    try:
        work_off(files, checked.check, workers or _FILES_AT_ONCE, checked.stop, lambda: None)
    finally:
        watched.end()
    return VerifyResult(
        path=str(remote.url),
        shards=len(shards),
        samples=sum(split.samples for split in home.info.splits.values()),
        shard_bytes=sum(shard.bytes for _, shard in shards),
        deep=False,
        against=None,
        problems=tuple(found.problems),
        problem_count=found.count,
    )


class _File(NamedTuple):
    """A shard, or a file of an index."""

    path: str
    bytes: int
    crc32c: int


class _Checked:
    """What the threads of one check share."""

    def __init__(self, source: RemoteSource, found: Problems) -> None:
        self._source, self._found = source, found
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.done_bytes = 0

    def check(self, item: tuple[str, _File]) -> None:
        """Fetch and sum one file. Raises RemoteError where that says nothing about the file."""
        split, file = item
        crc = 0
        try:
            for chunk in self._source.chunks(StagedFile(file.path, file.bytes), lambda: None):
                if self.stop.is_set():
                    return
                crc = crc32c(chunk, crc)
                with self._lock:
                    self.done_bytes += len(chunk)
        except StagingSourceError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, _OF_THE_SHARD):
                raise RemoteError(str(error)) from error
            self._wrong(split, file, str(error))
            return
        if crc != file.crc32c:
            self._wrong(split, file, f"the CRC32C of the whole file is {crc:08x}, dataset.json says {file.crc32c:08x}")

    def _wrong(self, split: str, file: _File, what: str) -> None:
        with self._lock:
            self._found.add(Problem(split, file.path, what))
