"""Where staged files come from: the seam, and a directory of this machine or of a parallel filesystem.

A source hands out a file's bytes chunk by chunk, and sees to it that all chunks are of one state of the file. The one
for addresses is `cache.staging.remote`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cache.errors import StagingSourceError
from cache.page import prefetch

__all__ = ["Checksum", "FolderSource", "Source", "StagedFile"]

Checksum = Callable[[Any, int], int]  # (bytes, CRC32C of what came before or 0) -> CRC32C of both
_CHUNK_BYTES = 1 << 20
_AHEAD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file: path relative to the source, size, and CRC32C of its bytes where the source tells it."""

    path: str
    bytes: int
    crc32c: int | None = None


class Source(Protocol):
    """Something that files are staged from. Its text is what people call it, and what the record of a copy keeps."""

    def __str__(self) -> str: ...

    def place(self, file: StagedFile) -> str:
        """Where a file lies, for people."""

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """The bytes of a file, exactly `file.bytes`; a chunk is valid until the next one is asked for.

        check: is called before each wait; it raises where the work was stopped. Raises StagingSourceError.
        """


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A directory. Bytes go through one buffer of 1 MiB, which stays in the CPU's cache while it is used.

    The kernel is asked to read ahead, so that a network filesystem sees large requests.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def place(self, file: StagedFile) -> str:
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
                    f"{source}: was written to while it was being copied; stage again when it is at rest"
                )
        finally:
            os.close(reader)


def _opened(source: Path, file: StagedFile) -> int:
    try:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StagingSourceError(f"{source}: cannot be read: {error.strerror}; is the source still there?") from error
    status = os.fstat(reader)
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
        os.close(reader)
        raise StagingSourceError(
            f"{source}: has {status.st_size} bytes, {file.bytes} expected: the source changed or is damaged; "
            f"run  packer verify  on it, then stage again"
        )
    return reader
