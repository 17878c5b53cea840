"""An output file fed with pieces, written in large gathered writes.

Nothing is copied: the pieces are kept by reference until `flush`, so their memory must not change before it.
"""

from __future__ import annotations

import os
from pathlib import Path

from cache.files import sync_file
from cache.filesystem import write_behind
from packer.formats.checksum import JoinedChecksum
from readers.sample import Buffer

__all__ = ["GatherFile"]

_MAX_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 1024
_FLUSH_BYTES = 2 << 20
_WRITE_BEHIND_BYTES = 8 << 20


class GatherFile:
    """A new file at `path` (which must not exist), written from position `start` on.

    position: where the next piece will lie. checksum: of the file, kept by whoever appends.
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
        """Write what is queued, forget it."""
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
        """Flush, have the file on the disk, close it."""
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
