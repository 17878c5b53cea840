"""`packer verify` of a set at an address: every byte of every shard is fetched once and summed, nothing is stored.

A shard with the size and the CRC32C of dataset.json is the shard that was packed, so samples are not looked at one by
one. What must be looked into (the formats' own structure, the pixels, the original source) needs the files here.
"""

from __future__ import annotations

import threading

from crc32c import crc32c

from cache.remote import ChangedError, MissingError, Remote, TruncatedError
from cache.staging import SourceError, StagedFile
from cache.staging.crew import work_off
from cache.staging.remote import RemoteSource
from packer.problems import Problem, Problems
from packer.verification import VerifyResult, check_index
from packer.watch import Silent, Watcher
from readers.errors import RemoteError
from readers.layout import ShardInfo
from readers.remote import RemoteHome, remote_errors

__all__ = ["verify_remote"]

_SHARDS_AT_ONCE = 4
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
    for name in home.info.splits:
        home.fetch_index(name)
        found = check_index(home.path, name, found)
    shards = [(name, shard) for name, split in home.info.splits.items() for shard in split.shards]
    total = sum(shard.bytes for _, shard in shards)
    checked = _Checked(RemoteSource(remote, home.path, frozenset()), found)
    watched.packing(0, total, lambda: (0, checked.done_bytes))
    try:
        work_off(shards, checked.check, workers or _SHARDS_AT_ONCE, checked.stop, lambda: None)
    finally:
        watched.packed()
    return VerifyResult(
        path=str(remote.url),
        shards=len(shards),
        samples=sum(split.samples for split in home.info.splits.values()),
        shard_bytes=total,
        deep=False,
        against=None,
        problems=tuple(found.problems),
        problem_count=found.count,
    )


class _Checked:
    """What the threads of one check share."""

    def __init__(self, source: RemoteSource, found: Problems) -> None:
        self._source, self._found = source, found
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.done_bytes = 0

    def check(self, item: tuple[str, ShardInfo]) -> None:
        """Fetch and sum one shard. Raises RemoteError where that says nothing about the shard."""
        split, shard = item
        crc = 0
        try:
            for chunk in self._source.chunks(StagedFile(shard.path, shard.bytes), lambda: None):
                if self.stop.is_set():
                    return
                crc = crc32c(chunk, crc)
                with self._lock:
                    self.done_bytes += len(chunk)
        except SourceError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, _OF_THE_SHARD):
                raise RemoteError(str(error)) from error
            self._wrong(split, shard, str(error))
            return
        if crc != shard.crc32c:
            self._wrong(
                split, shard, f"the CRC32C of the whole file is {crc:08x}, dataset.json says {shard.crc32c:08x}"
            )

    def _wrong(self, split: str, shard: ShardInfo, what: str) -> None:
        with self._lock:
            self._found.add(Problem(split, shard.path, what))
