"""One file from the source to its place: read, checksum, write, sync, rename.

Bytes go through one buffer of 1 MiB, which stays in the CPU's cache between the three calls. copy_file_range(2) would
save one copy but refuses to cross filesystems (EXDEV), which staging always does, and reading back for the checksum
costs that copy again; see docs/staging.md for figures. Writes are of 128 KiB: for larger ones the kernel wants as large
pages in its cache, and finding such can take several times as long as copying. The kernel is asked to read ahead of
us, so that a network filesystem sees large requests, and to write behind us, so that the sync at the end has little
left to do.

The temporary file belongs to this process until it is renamed; it is removed on errors, and by the next leader.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cache.page import prefetch, write_behind
from cache.staging.errors import SourceError, StoppedError
from cache.staging.files import Checksum, StagedFile

__all__ = ["Pace", "checksum_of", "transfer"]

_CHUNK_BYTES = 1 << 20
_WRITE_BYTES = 1 << 17
_AHEAD_BYTES = 16 << 20
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


def transfer(source: Path, file: StagedFile, part: Path, place: Path, pace: Pace) -> int:
    """Copy a file to `part`, check it, sync it and rename it to `place`; returns the CRC32C of its bytes.

    Raises SourceError for a source that is gone or not what it should be, StoppedError, and OSError for the target.
    """
    reader = _open_source(source, file)
    try:
        before = os.fstat(reader)
        writer = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            crc = _stream(reader, writer, source, file, pace)
            _check_source(before, os.fstat(reader), source, file, crc)
            os.fsync(writer)
        finally:
            os.close(writer)
        os.replace(part, place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(reader)
    return crc


def checksum_of(path: Path, pace: Pace) -> int:
    """CRC32C of a whole file. Raises OSError, StoppedError."""
    crc, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            pace.check()
            crc = pace.checksum(buffer[:count], crc)
    return crc


def _open_source(source: Path, file: StagedFile) -> int:
    try:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"{source}: cannot be read: {error.strerror}; is the source still there?") from error
    status = os.fstat(reader)
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
        os.close(reader)
        raise SourceError(
            f"{source}: has {status.st_size} bytes, {file.bytes} expected: the source changed or is damaged; "
            f"run  packer verify  on it, then stage again"
        )
    return reader


def _stream(reader: int, writer: int, source: Path, file: StagedFile, pace: Pace) -> int:
    crc, offset, buffer = 0, 0, memoryview(bytearray(min(_CHUNK_BYTES, max(1, file.bytes))))
    while offset < file.bytes:
        pace.check()
        if offset % _AHEAD_BYTES == 0:
            prefetch(reader, ((offset + _CHUNK_BYTES, 2 * _AHEAD_BYTES),))
        try:
            count = os.preadv(reader, (buffer[: file.bytes - offset],), offset)
        except OSError as error:
            raise SourceError(f"{source}: reading at byte {offset} failed: {error.strerror}") from error
        if not count:
            raise SourceError(f"{source}: ended at byte {offset} of {file.bytes}: it changed while it was being copied")
        crc = pace.checksum(buffer[:count], crc)
        _write_all(writer, buffer[:count])
        offset += count
        if offset % _BEHIND_BYTES == 0:
            write_behind(writer, offset - _BEHIND_BYTES, _BEHIND_BYTES)
        pace.moved(count)
    return crc


def _write_all(writer: int, data: memoryview) -> None:
    while data:
        data = data[os.write(writer, data[:_WRITE_BYTES]) :]


def _check_source(before: os.stat_result, after: os.stat_result, source: Path, file: StagedFile, crc: int) -> None:
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise SourceError(f"{source}: was written to while it was being copied; stage again when it is at rest")
    if file.crc32c is not None and crc != file.crc32c:
        raise SourceError(
            f"{source}: the CRC32C of its bytes is {crc:08x}, {file.crc32c:08x} expected: the source changed or is "
            f"damaged; run  packer verify  on it, then stage again"
        )
