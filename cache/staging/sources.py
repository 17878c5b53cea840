"""The files to stage, and where their bytes come from.

A manifest lists every file of a source that may ever be staged: path relative to the source, size, and CRC32C if known.
This module does not know shards or data sets. A request names some files of a manifest; its `last` file is put in place
after all others, so that its presence shows that they are complete.

A source returns the bytes of a file chunk by chunk, and makes sure that all chunks belong to one state of the file.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from cache.errors import MissingExtraError, RemoteError, StagingError, StagingSourceError
from cache.filesystem import prefetch
from cache.node import usable_cpus
from cache.remote import Facts, Remote, Span
from cache.system import READ

INNER_FOLDER = ".staging"
_CHUNK_BYTES = 1 << 20
_AHEAD_BYTES = 16 << 20
_FILES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file: path relative to the source, size in bytes, and CRC32C if the source knows it."""

    path: str
    bytes: int
    crc32c: int | None = None


class Source(Protocol):
    """A place to stage files from. `str()` of it is shown to users, and kept in the record of a copy.

    files_at_once: how many files are copied at a time by default.
    """

    @property
    def files_at_once(self) -> int: ...

    def __str__(self) -> str: ...

    def location(self, file: StagedFile) -> str:
        """Path or address of a file, for messages."""

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """The bytes of a file, exactly `file.bytes`; a chunk is valid until the next one is requested.

        check: called before each wait; raises if the work was stopped. Raises StagingSourceError.
        """


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A directory. Bytes pass through one buffer of 1 MiB, which stays in the CPU cache.

    The kernel is asked to read ahead, so that a network filesystem gets large requests.
    """

    path: Path

    @property
    def files_at_once(self) -> int:
        return min(_FILES_AT_ONCE, max(2, usable_cpus()))

    def __str__(self) -> str:
        return str(self.path)

    def location(self, file: StagedFile) -> str:
        return str(self.path / file.path)

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """See `Source`."""
        source = self.path / file.path
        reader = _opened(source, file)
        try:
            before = os.fstat(reader)
            offset, buffer = 0, memoryview(bytearray(min(_CHUNK_BYTES, max(1, file.bytes))))
            while offset < file.bytes:
                check()
                if offset % _AHEAD_BYTES == 0:
                    prefetch(reader, ((offset + _CHUNK_BYTES, 2 * _AHEAD_BYTES),))
                try:
                    count = os.preadv(reader, (buffer[: file.bytes - offset],), offset)
                except OSError as error:
                    raise StagingSourceError(f"{source}: reading at byte {offset} failed: {error.strerror}") from error
                if not count:
                    raise StagingSourceError(
                        f"{source}: ended at byte {offset} of {file.bytes}: it changed while it was being copied"
                    )
                yield buffer[:count]
                offset += count
            after = os.fstat(reader)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise StagingSourceError(
                    f"{source}: was written to while it was being copied; stage again when nothing writes to it"
                )
        finally:
            os.close(reader)


def _opened(source: Path, file: StagedFile) -> int:
    try:
        reader = os.open(source, READ)
    except OSError as error:
        raise StagingSourceError(f"{source}: cannot be read: {error.strerror}; is the source still there?") from error
    status = os.fstat(reader)
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
        os.close(reader)
        raise StagingSourceError(
            f"{source}: has {status.st_size} bytes, expected {file.bytes}: the source changed or is damaged; "
            f"run  packer verify  on it, then stage again"
        )
    return reader


@dataclass(frozen=True)
class Manifest:
    """A source and its files.

    name: of the set, for messages. fingerprint: at least 16 hex digits that change whenever the files do; it names the
    directory of the copy. Raises StagingError for a path that leads outside the source, or occurs twice.
    """

    source: Source
    name: str
    fingerprint: str
    files: tuple[StagedFile, ...] = field(repr=False)
    last: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{16,128}", self.fingerprint):
            raise StagingError(f"{self.source}: fingerprint {self.fingerprint!r} is not made of 16 hex digits or more")
        for file in self.files:
            if not inside(file.path):
                raise StagingError(f"{self.source}: the path {file.path!r} leads outside the set")
        if len(self.by_path) != len(self.files):
            raise StagingError(f"{self.source}: names a file twice")

    @cached_property
    def by_path(self) -> Mapping[str, StagedFile]:
        return {file.path: file for file in self.files}

    @property
    def folder_name(self) -> str:
        """The name of the copy's directory: the set's name in plain letters, and its fingerprint."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", self.name).strip("._-")[:80] or "set"
        return f"{plain}-{self.fingerprint[:16]}"


CLEANUPS = ("atexit", "never")


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """How files are copied.

    verify: also read existing files and compare checksums (sizes are always compared).
    cleanup: "atexit" removes the copy when the last process that uses it exits, "never" keeps it.
    quota_bytes: remove the least recently used copies that are not in use until all copies fit.
    threads: files copied at a time.
    bytes_per_second: a limit for this node.
    any_filesystem: stage even to a filesystem that other nodes share.
    """

    verify: bool = False
    cleanup: str = "never"
    quota_bytes: int | None = None
    threads: int | None = None
    bytes_per_second: float | None = None
    any_filesystem: bool = False

    def __post_init__(self) -> None:
        if self.cleanup not in CLEANUPS:
            raise ValueError(f"cleanup must be one of {', '.join(CLEANUPS)}, not {self.cleanup!r}")
        for name in ("quota_bytes", "threads", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")

    def copying_threads(self, source: Source) -> int:
        """`threads`, or the default of the source."""
        return self.threads or source.files_at_once


@dataclass(frozen=True)
class Request:
    """What to stage, where and how.

    files: needed before work starts. later: copied by a thread in the background.
    target: a directory; None for the first suitable one.
    """

    manifest: Manifest
    files: Sequence[StagedFile]
    later: Sequence[StagedFile] = ()
    target: str | os.PathLike[str] | None = None
    options: CopyOptions = CopyOptions()

    @property
    def threads(self) -> int:
        """How many files are copied at a time."""
        return self.options.copying_threads(self.manifest.source)

    @property
    def all_files(self) -> list[StagedFile]:
        return [*self.files, *self.later]


def inside(path: Any) -> bool:
    """Whether a relative path stays in its directory, and outside of staging's folder there."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    parts = path.split("/")
    return parts[0] != INNER_FOLDER and not any(part in ("", ".", "..") for part in parts)


def total_bytes(files: Iterable[StagedFile]) -> int:
    """The total size of some files."""
    return sum(file.bytes for file in files)


# Staging from an address: several ranged GETs of each file at a time, in order, all of one object.
#
# All answers must have the ETag of the first, and later GETs require it. Files that are already on this machine
# (dataset.json and the indexes, which were fetched to learn what to stage) are copied from there.


_GET_BYTES = 8 << 20
_AHEAD = 3  # GETs of one file in flight: over all files they hold at most 192 MiB
_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class RemoteSource:
    """The files below an address. here: a directory with local copies of the files in `from_here`."""

    remote: Remote
    here: Path
    from_here: frozenset[str]
    files_at_once: ClassVar[int] = _FILES_AT_ONCE  # more than CPUs, since copying waits for the network

    def __str__(self) -> str:
        return str(self.remote.url)

    def location(self, file: StagedFile) -> str:
        return self.remote.url.at(file.path)

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """See `Source`."""
        if file.path in self.from_here:
            yield from FolderSource(self.here).chunks(file, check)
            return
        starts = deque(range(0, file.bytes, _GET_BYTES))
        pending: deque[Future[tuple[Any, Facts]]] = deque()
        etag = ""  # until the first answer; requests sent before it are compared with it later
        try:
            while starts or pending:
                while starts and len(pending) < _AHEAD:
                    start = starts.popleft()
                    stop = min(start + _GET_BYTES, file.bytes)
                    pending.append(self.remote.submit(Span(file.path, start, stop, etag, file.bytes)))
                data, facts = self._wait(pending.popleft(), check)
                if etag and facts.etag and facts.etag != etag:
                    raise StagingSourceError(f"{self.location(file)}: changed while it was being copied; stage again")
                etag = etag or facts.etag
                yield memoryview(data)
        except (RemoteError, MissingExtraError) as error:
            raise StagingSourceError(f"{error}; check that the source has not changed, then stage again") from error
        finally:
            for future in pending:
                future.cancel()

    def _wait(self, future: Future[tuple[Any, Facts]], check: Callable[[], None]) -> tuple[Any, Facts]:
        """The answer of a GET; GETs are bounded, so this ends."""
        while True:
            check()
            try:
                return future.result(_TICK_SECONDS)
            except FutureTimeout:
                if future.done():
                    raise
