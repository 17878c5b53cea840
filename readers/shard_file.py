"""An open shard. The descriptor closes with the last reference to it, so that no read can see it reused."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

from readers.errors import StaleIndexError
from readers.replaced import failed_read

__all__ = ["ShardFile"]


class ShardFile:
    """One open shard: its descriptor, its size, and under "mmap" a view of it.

    Raises StaleIndexError where the file is missing, no regular file, or not of `expected_bytes`.
    """

    __slots__ = ("bytes", "descriptor", "path", "view")

    def __init__(self, path: Path, expected_bytes: int, mapped: bool) -> None:
        self.descriptor = -1
        self.path = path
        self.view: memoryview | None = None
        try:
            # O_NONBLOCK: a named pipe put in a shard's place must not hang the reader
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.descriptor)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise failed_read(path, error) from error
            raise StaleIndexError(f"{path}: shard cannot be opened: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise StaleIndexError(f"{path}: not a regular file")
        self.bytes = status.st_size
        if self.bytes != expected_bytes:
            raise StaleIndexError(
                f"{path}: has {self.bytes} bytes, {expected_bytes} were indexed: the shard was truncated or "
                f"changed; restore it, or, if the shard is right and nothing replaces the set now, rebuild the index "
                f"with  packer index"
            )
        if mapped and self.bytes:
            try:
                self.view = memoryview(mmap.mmap(self.descriptor, self.bytes, access=mmap.ACCESS_READ))
            except OSError as error:
                raise StaleIndexError(f"{path}: shard cannot be mapped: {error.strerror}") from error
        elif mapped:
            self.view = memoryview(b"")

    def reread(self, offset: int, length: int) -> bytes:
        """The range again, in as many reads as it takes (one read returns at most 2 GiB); a short file raises."""
        parts = []
        while length > 0:
            try:
                part = os.pread(self.descriptor, min(length, 1 << 30), offset)
                found = len(part) or os.fstat(self.descriptor).st_size
            except OSError as error:
                raise failed_read(self.path, error) from error
            if not part:
                raise StaleIndexError(f"{self.path}: shrank from {self.bytes} to {found} bytes while it was being read")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def read_into(self, target: memoryview, offset: int, length: int) -> None:
        """Fill `target`, which must have `length` bytes (ValueError), from there on. Raises as `reread` does."""
        try:
            count = os.preadv(self.descriptor, (target,), offset)
        except OSError as error:
            raise failed_read(self.path, error) from error
        if count != length:
            target[:] = self.reread(offset, length)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
