"""A simulated slow file system: delays all reads of files below a directory in this process.

The model is one link with a latency. The link starts to deliver a request `latency` after it was made, or after all
earlier requests, and needs n / bandwidth for n bytes. A read that continues the last read of the same descriptor has no
latency (read-ahead), and ranges announced with posix_fadvise are requested at that moment. Nothing is cached, as for a
set larger than memory. Memory maps are not delayed, so open indexes cost nothing.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
from cache.stores import Buffer, Extents, Store, StoreOver

__all__ = ["SlowSource", "SlowStore"]

_ANNOUNCED_BYTES = 8 << 20  # larger announcements are of streams, which read-ahead covers
_Place = tuple[int, int, int]


class SlowSource:
    """A context that delays os.pread, os.preadv and os.posix_fadvise of files below `root`. read_bytes: delivered."""

    def __init__(self, root: Path, bytes_per_second: float, latency_seconds: float) -> None:
        self.root, self.bytes_per_second, self.latency_seconds = str(root.resolve()), bytes_per_second, latency_seconds
        self.read_bytes = 0
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._ends: dict[int, tuple[int, int]] = {}  # descriptor -> inode, end of the last read
        self._announced: dict[_Place, float] = {}
        self._real = os.pread, os.preadv, os.posix_fadvise

    def __enter__(self) -> SlowSource:
        os.pread, os.preadv, os.posix_fadvise = self._pread, self._preadv, self._advise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.pread, os.preadv, os.posix_fadvise = self._real

    def _pread(self, descriptor: int, length: int, offset: int) -> bytes:
        self._deliver(descriptor, offset, length)
        return self._real[0](descriptor, length, offset)

    def _preadv(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        self._deliver(descriptor, offset, sum(map(len, buffers)))
        return self._real[1](descriptor, buffers, offset, flags)

    def _advise(self, descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED and length <= _ANNOUNCED_BYTES and self._is_slow(descriptor):
            place = os.fstat(descriptor).st_ino, offset, length
            with self._lock:
                if place not in self._announced:
                    self._announced[place] = self._arrival(length, self.latency_seconds)
                    self.read_bytes += length
        elif not self._is_slow(descriptor):
            self._real[2](descriptor, offset, length, advice)

    def _deliver(self, descriptor: int, offset: int, length: int) -> None:
        if not self._is_slow(descriptor):
            return
        inode = os.fstat(descriptor).st_ino
        with self._lock:
            arrival = self._announced.pop((inode, offset, length), 0.0)
            if not arrival:
                goes_on = self._ends.get(descriptor) == (inode, offset)
                arrival = self._arrival(length, 0.0 if goes_on else self.latency_seconds)
                self.read_bytes += length
            self._ends[descriptor] = inode, offset + length
        time.sleep(max(0.0, arrival - time.monotonic()))

    def _arrival(self, length: int, latency: float) -> float:
        self._free_at = max(time.monotonic() + latency, self._free_at) + length / self.bytes_per_second
        return self._free_at

    def _is_slow(self, descriptor: int) -> bool:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(self.root + "/")


class SlowStore(StoreOver):
    """The same link in front of a store, for any number of processes, which share `state`, a file of 16 bytes.

    A read of many extents is one request. Announcements (`prefetch`) request nothing.
    """

    def __init__(self, source: Store, state: Path, bytes_per_second: float, latency_seconds: float) -> None:
        self.source, self.state_path = source, state
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        self._wait(length)
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        self._wait(int(extents.length.sum()))
        return self.source.read(extents)

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        """Do nothing: the link reads nothing ahead."""

    def _wait(self, size: int) -> None:
        with open(self.state_path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free_at, moved = struct.unpack("<dQ", file.read(16))
            arrival = max(time.monotonic() + self.latency_seconds, free_at) + size / self.bytes_per_second
            file.seek(0)
            file.write(struct.pack("<dQ", arrival, moved + size))
        time.sleep(max(0.0, arrival - time.monotonic()))

    @staticmethod
    def moved_bytes(state: Path) -> int:
        """The number of bytes that the link has delivered; makes a missing file."""
        if not state.exists():
            state.write_bytes(bytes(16))
        return int(struct.unpack("<dQ", state.read_bytes())[1])
