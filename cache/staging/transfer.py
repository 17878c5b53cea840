"""One file from the source to its place: read, checksum, write, sync, rename.

Bytes come in chunks from a source and go through no further buffer. copy_file_range(2) would save one copy but refuses
to cross filesystems (EXDEV), which staging always does, and reading back for the checksum costs that copy again; see
docs/staging.md for figures. Writes are of 128 KiB: for larger ones the kernel wants as large pages in its cache, and
finding such can take several times as long as copying. The kernel is asked to write behind us, so that the sync at the
end has little left to do.

The temporary file belongs to this process until it is renamed; it is removed on errors, and by the next leader.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cache.errors import StagingSourceError, StoppedError
from cache.page import write_behind
from cache.staging.sources import Checksum, Source, StagedFile

__all__ = ["Pace", "checksum_of", "transfer"]

_CHUNK_BYTES = 1 << 20
_WRITE_BYTES = 1 << 17
_BEHIND_BYTES = 16 << 20


@dataclass
class Pace:
    """What the threads of one copying share: progress, the cap on bytes per second, and whether to stop."""

    checksum: Checksum
    bytes_per_second: float | None = None
    done_bytes: int = 0
    stops: tuple[threading.Event, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def check(self) -> None:
        """Raises StoppedError where somebody asked to stop."""
        if any(stop.is_set() for stop in self.stops):
            raise StoppedError("staging was stopped")

    def moved(self, size: int) -> None:
        """Count bytes, and wait until the cap allows more."""
        now = time.monotonic()
        with self._lock:
            self.done_bytes += size
            if self.bytes_per_second is None:
                return
            self._free_at = max(self._free_at, now) + size / self.bytes_per_second
            until = self._free_at
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.1))


def transfer(source: Source, file: StagedFile, part: Path, place: Path, pace: Pace) -> int:
    """Copy a file to `part`, check it, sync it and rename it to `place`; returns the CRC32C of its bytes.

    Raises StagingSourceError for a source that is gone or not as expected, StoppedError, and OSError for the target.
    """
    chunks = source.chunks(file, pace.check)
    try:
        first = next(chunks, None)  # a source that cannot be opened leaves no file
        writer = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            crc = _written(first, chunks, writer, pace)
            if file.crc32c is not None and crc != file.crc32c:
                raise StagingSourceError(
                    f"{source.place(file)}: the CRC32C of its bytes is {crc:08x}, {file.crc32c:08x} expected: the "
                    f"source changed or is damaged; run  packer verify  on it, then stage again"
                )
            os.fsync(writer)
        finally:
            os.close(writer)
        os.replace(part, place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        chunks.close()
    return crc


def _written(first: memoryview | None, chunks: Iterator[memoryview], writer: int, pace: Pace) -> int:
    """Write all chunks; returns their CRC32C. Each is done with before the next is asked for."""
    crc, offset, behind = 0, 0, 0
    for chunk in () if first is None else itertools.chain((first,), chunks):
        pace.check()
        crc = pace.checksum(chunk, crc)
        _write_all(writer, chunk)
        offset += len(chunk)
        if offset - behind >= _BEHIND_BYTES:
            write_behind(writer, behind, offset - behind)
            behind = offset
        pace.moved(len(chunk))
    return crc


def checksum_of(path: Path, pace: Pace) -> int:
    """CRC32C of a whole file. Raises OSError, StoppedError."""
    crc, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            pace.check()
            crc = pace.checksum(buffer[:count], crc)
    return crc


def _write_all(writer: int, data: memoryview) -> None:
    while data:
        data = data[os.write(writer, data[:_WRITE_BYTES]) :]
