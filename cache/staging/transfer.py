"""Copying one file: read, checksum, write, sync, rename; and the threads that do so.

Bytes come in chunks from a source and pass through no further buffer. copy_file_range(2) would save one copy but does
not cross filesystems (EXDEV), as staging always does, and reading back for the checksum costs that copy again; see
docs/staging.md for figures. Writes are of 128 KiB: for larger ones the kernel looks for equally large pages for its
cache, which can take several times as long as copying. Write-back starts early, so that the sync at the end has little
left to do.

The temporary file belongs to this process until it is renamed; it is removed on errors, and by the next leader.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cache.errors import StagingSourceError, StoppedError
from cache.files import Folder
from cache.filesystem import write_behind
from cache.staging.sources import Source, StagedFile

__all__ = ["Pace", "transfer", "work_off"]

_T = TypeVar("_T")
_WRITE_BYTES = 1 << 17
_BEHIND_BYTES = 16 << 20
_TICK_SECONDS = 0.2


@dataclass
class Pace:
    """Shared by the threads of one leader: progress, the cap on bytes per second, and whether to stop."""

    bytes_per_second: float | None = None
    done_bytes: int = 0
    stops: tuple[threading.Event, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def check(self) -> None:
        """Raise StoppedError when a caller asked to stop."""
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

    The caller syncs the folder of `place`. Raises StagingSourceError for a source that is missing or not as expected,
    StoppedError, and OSError for the target.
    """
    chunks = source.chunks(file, pace.check)
    try:
        first = next(chunks, None)  # a source that cannot be opened leaves no file
        with (
            Folder(part.parent) as scratch,
            Folder(place.parent) as folder,
            folder.writing(place.name, sync_name=False, scratch=scratch, temporary=part.name, mode=0o600) as writer,
        ):
            crc = _write(first, chunks, writer.fileno(), pace)
            if file.crc32c is not None and crc != file.crc32c:
                raise StagingSourceError(
                    f"{source.location(file)}: the CRC32C of its bytes is {crc:08x}, {file.crc32c:08x} expected: the "
                    f"source changed or is damaged; run  packer verify  on it, then stage again"
                )
    finally:
        chunks.close()
    return crc


def _write(first: memoryview | None, chunks: Iterator[memoryview], writer: int, pace: Pace) -> int:
    """Write all chunks, each before the next is asked for; returns their CRC32C."""
    from crc32c import crc32c

    crc, offset, behind = 0, 0, 0
    for chunk in () if first is None else itertools.chain((first,), chunks):
        pace.check()
        crc = crc32c(chunk, crc)
        data = chunk
        while data:
            data = data[os.write(writer, data[:_WRITE_BYTES]) :]
        offset += len(chunk)
        if offset - behind >= _BEHIND_BYTES:
            write_behind(writer, behind, offset - behind)
            behind = offset
        pace.moved(len(chunk))
    return crc


def work_off(
    items: Iterable[_T], work: Callable[[_T], None], threads: int, stop: threading.Event, tick: Callable[[], None]
) -> None:
    """Call `work` for each item from so many threads, and `tick` now and then from this one.

    Raises the first error of any thread when all have stopped. They are daemon threads, which stop within one item when
    one of them fails, when the caller is interrupted (Ctrl-C), or when `stop` is set; it is set in all of these cases,
    so `work` should check it.
    """
    waiting, errors, ended = deque(items), list[BaseException](), threading.Semaphore(0)

    def run() -> None:
        try:
            while waiting and not stop.is_set():
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread was quicker
                    break
                work(item)
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            ended.release()

    crew = [threading.Thread(target=run, name=f"stage-{n}", daemon=True) for n in range(min(threads, len(waiting)))]
    left = len(crew)
    try:
        for thread in crew:
            thread.start()
        while left:
            if ended.acquire(timeout=_TICK_SECONDS):
                left -= 1
            else:
                tick()
    finally:
        if left:
            stop.set()
        for thread in crew:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
