"""Read a file through a sliding window: the walkers of tar and TFRecord see small pieces without a read call each.

`pread` rather than a memory map, so that a file that shrinks while it is walked is an error and no SIGBUS.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from crc32c import crc32c

from cache.errors import FormatError

__all__ = ["Window"]

_WINDOW_BYTES = 1 << 20
_CHECKSUM_BYTES = 8 << 20


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
