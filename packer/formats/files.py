"""The files that shards are in: read through a sliding window, written in large gathered writes.

A `Window` gives the walkers of tar, TFRecord and RecordIO small pieces without a system call for each. It uses `pread`
rather than a memory map, so that a file that shrinks while it is walked is an error and not a SIGBUS.

A `GatherFile` copies nothing: the pieces are kept by reference until `flush`, so their memory must not change before.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cache.checksums import JoinedChecksum, crc32c
from cache.errors import FormatError
from cache.files import sync_file
from cache.filesystem import write_behind
from readers.sample import Buffer

__all__ = ["GatherFile", "Window"]

_WINDOW_BYTES = 1 << 20
_CHECKSUM_BYTES = 8 << 20
_MAX_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 1024
_FLUSH_BYTES = 2 << 20
_WRITE_BEHIND_BYTES = 8 << 20


class Window:
    """Random access to `size` bytes of a regular file. Raises FormatError for anything that is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0
        self._data = b""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise FormatError(f"{path}: not a regular file")
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises FormatError where the file ends before."""
        inside = offset - self._start
        if inside < 0 or inside + length > len(self._data):
            if offset + length > self.size:
                raise FormatError(
                    f"{self.path}: ends at byte {self.size}, {length} bytes were expected at {offset}: truncated?"
                )
            self._data = self._fetch(offset, max(length, min(_WINDOW_BYTES, self.size - offset)))
            self._start, inside = offset, 0
        return self._data[inside : inside + length]

    def read_up_to(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`, or fewer where the file ends before."""
        return self.read(offset, min(length, self.size - offset)) if offset < self.size else b""

    def _fetch(self, offset: int, length: int) -> bytes:
        parts = []
        while length > 0:
            part = os.pread(self._descriptor, min(length, 1 << 30), offset)
            if not part:
                raise FormatError(f"{self.path}: shrank to {offset} bytes while it was being read")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def checksum(self) -> int:
        """CRC32C of the whole file."""
        crc = 0
        for offset in range(0, self.size, _CHECKSUM_BYTES):
            crc = crc32c(self.read(offset, min(_CHECKSUM_BYTES, self.size - offset)), crc)
        return crc

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class GatherFile:
    """A new file at `path` (which must not exist), written from position `start` on.

    position: offset of the next piece. checksum: of the file; the caller of `append` updates it.
    """

    __slots__ = ("_announced", "_bytes", "_pieces", "checksum", "descriptor", "path", "position")

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if start:
            os.lseek(self.descriptor, start, os.SEEK_SET)
        self.position = start
        self.checksum = JoinedChecksum()
        self._pieces: list[Buffer] = []
        self._bytes = 0
        self._announced = start  # up to here the kernel was asked to start writing

    def append(self, pieces: tuple[Buffer, ...], total_bytes: int) -> None:
        """Queue pieces of `total_bytes` altogether."""
        self._pieces += pieces
        self.position += total_bytes
        self._bytes += total_bytes
        if self._bytes >= _FLUSH_BYTES or len(self._pieces) >= _MAX_PIECES:
            self.flush()

    def flush(self) -> None:
        """Write what is queued."""
        pieces = self._pieces
        if not pieces:
            return
        for first in range(0, len(pieces), _MAX_PIECES):
            self._write(pieces[first : first + _MAX_PIECES])
        if self.position - self._announced >= _WRITE_BEHIND_BYTES:
            write_behind(self.descriptor, self._announced, self.position - self._announced)
            self._announced = self.position
        self._pieces = []
        self._bytes = 0

    def _write(self, pieces: list[Buffer]) -> None:
        left = sum(map(len, pieces))
        while left:
            written = os.writev(self.descriptor, pieces)
            left -= written
            if not left:
                return
            while pieces and written >= len(pieces[0]):
                written -= len(pieces[0])
                pieces = pieces[1:]
            pieces = [memoryview(pieces[0])[written:], *pieces[1:]]

    def sync_and_close(self) -> None:
        """Flush the file, sync it to the disk, and close it."""
        self.flush()
        sync_file(self.descriptor)
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def abort(self) -> None:
        """Close and remove the file."""
        self._pieces = []
        self.close()
        self.path.unlink(missing_ok=True)
