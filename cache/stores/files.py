"""Shards as files of this machine or of a mounted filesystem.

A shard is opened on first use, at most `open_shards` at a time; a descriptor is closed only when no read uses it.
Descriptors are only used with `pread`, which has no shared position, so threads and forked children may share them.

Files are read by "pread", which copies the bytes and is safe whatever happens to the file, or mapped, which gives views
of the page cache: a file that is truncated while mapped kills the process with SIGBUS.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cache.errors import StaleIndexError
from cache.files import FileState
from cache.filesystem import prefetch
from cache.locks import call_after_fork
from cache.stores.base import Buffer, Extents, Int64s, Shards, Store
from cache.stores.ranges import GAP_BYTES, BlockPool, ReadPlan, plan_reads
from cache.system import READ, pread, preadv

_REBUILD = "rebuild the index with  packer index"


class Files(Store):
    """Shards below a directory.

    mapped: return views of the page cache.
    open_shards: how many files may be open at a time; fewer if the limit of the process is lower.
    recognise: called with (number, path, file) when a shard is opened for the first time or has changed; raises
        StaleIndexError if it is not the shard that the index describes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        shards: Shards,
        *,
        mapped: bool = False,
        open_shards: int = 512,
        recognise: Callable[[int, str, OpenFile], None] | None = None,
    ) -> None:
        self.root, self.shards, self.mapped, self.open_shards = os.fspath(root), shards, mapped, max(1, open_shards)
        self.recognise = recognise
        self._setup()

    def _setup(self) -> None:
        self._files: list[OpenFile | None] = [None] * len(self.shards.paths)
        self._opened: deque[int] = deque()
        self._recognised: dict[int, FileState] = {}
        self._lock = threading.Lock()
        self._blocks = BlockPool()
        self._sizes = np.asarray(self.shards.bytes, np.int64)
        call_after_fork(self)

    # --- reading ------------------------------------------------------------------------------------------------
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        """`bytes`, or for a mapped file a read-only memoryview."""
        file = self._files[shard] or self._open(shard)
        if file.view is not None:
            file.check(offset, length)
            return file.view[offset : offset + length]
        try:
            data = pread(file.descriptor, length, offset)
        except OSError as error:
            raise unreadable(file.path, error) from error
        except (MemoryError, OverflowError):
            file.check(offset, length)
            raise
        if len(data) == length > 0:
            return data
        file.check(offset, length)
        return file.reread(offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        """Read-only memoryviews of one block of memory; reads are sorted by offset, and neighbours merged."""
        if self.mapped:
            return super().read(extents)
        plan = self._plan(extents)
        block = self._blocks.take(plan.total_bytes)
        for shard, offset, length, place in plan.runs():
            file = self._files[shard] or self._open(shard)
            file.read_into(block[place : place + length], offset, length)
        return plan.views(block.toreadonly(), extents.length)

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        for shard, offset, length, _ in self._plan(extents).runs():
            if below_bytes is None or length < below_bytes:
                file = self._files[shard] or self._open(shard)
                prefetch(file.descriptor, ((offset, length),))

    def check(self, shard: int) -> None:
        if self._files[shard] is None:
            self._open(shard)

    def location(self, shard: int) -> str:
        return f"{self.root}/{self.shards.paths[shard]}"

    # --- life ---------------------------------------------------------------------------------------------------
    def is_open(self, shard: int) -> bool:
        """Whether the shard is open in this process."""
        return self._files[shard] is not None

    def has(self, shard: int) -> bool:
        """Whether the shard exists now, with its indexed size."""
        try:
            return os.stat(self.location(shard)).st_size == self.shards.bytes[shard]
        except OSError:
            return False

    def close(self) -> None:
        with self._lock:
            self._files = [None] * len(self._files)
            self._opened.clear()
        self._blocks.clear()

    def after_fork(self) -> None:
        """In a forked child: keep the open shards, replace the lock, which another thread may have held."""
        self._lock = threading.Lock()
        self._opened = deque(shard for shard, file in enumerate(self._files) if file is not None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("root", "shards", "mapped", "open_shards", "recognise")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    def _plan(self, extents: Extents) -> ReadPlan:
        check_inside(self._sizes, extents, self.location)
        return plan_reads(extents.shard, extents.offset, extents.length, GAP_BYTES)

    def _open(self, shard: int) -> OpenFile:
        with self._lock:
            file = self._files[shard]
            if file is None:
                while len(self._opened) >= self.open_shards:
                    self._files[self._opened.popleft()] = None
                file = self._files[shard] = self._open_file(shard)
                self._opened.append(shard)
            return file

    def _open_file(self, shard: int) -> OpenFile:
        """Open a shard; if the process may open no more files, the oldest are closed first."""
        while True:
            try:
                file = OpenFile(self.location(shard), self.shards.bytes[shard], self.mapped)
                if self.recognise is not None and self._recognised.get(shard) != file.state:
                    self.recognise(shard, self.shards.paths[shard], file)
                    self._recognised[shard] = file.state
                return file
            except StaleIndexError as error:
                if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE) or not self._opened:
                    raise
            self._files[self._opened.popleft()] = None


class OpenFile:
    """One open shard: its descriptor, size and state, and a view if it is mapped.

    The descriptor closes with the last reference, so no read can see it reused for another file. Raises StaleIndexError
    if the file is missing, not a regular file, or not of `expected_bytes`.
    """

    __slots__ = ("bytes", "descriptor", "path", "state", "view")

    def __init__(self, path: str, expected_bytes: int, mapped: bool) -> None:
        self.descriptor = -1
        self.path = path
        self.view: memoryview | None = None
        try:
            self.descriptor = os.open(path, READ)
            status = os.fstat(self.descriptor)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise unreadable(path, error) from error
            raise StaleIndexError(
                f"{path}: shard cannot be opened: {error.strerror}; restore it, or run  packer verify  to see "
                f"what else is missing"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise StaleIndexError(f"{path}: not a regular file")
        self.bytes, self.state = status.st_size, FileState.of(status)
        if self.bytes != expected_bytes:
            raise StaleIndexError(
                f"{path}: has {self.bytes} bytes, expected {expected_bytes} as indexed: the shard was truncated or "
                f"changed; restore it, or, if the shard is right and the set is not being replaced, {_REBUILD}"
            )
        if mapped and self.bytes:
            try:
                self.view = memoryview(mmap.mmap(self.descriptor, self.bytes, access=mmap.ACCESS_READ))
            except OSError as error:
                raise StaleIndexError(f"{path}: shard cannot be mapped: {error.strerror}") from error
        elif mapped:
            self.view = memoryview(b"")

    def check(self, offset: int, length: int) -> None:
        """Raise StaleIndexError for a range that is not inside the file as it was opened."""
        if not 0 <= offset <= offset + length <= self.bytes or length < 0:
            raise self.too_short(offset, length)

    def reread(self, offset: int, length: int) -> bytes:
        """Read a range, in as many reads as it takes (one returns at most 2 GiB). Raises StaleIndexError if short."""
        parts, first, expected = [], offset, length
        while length > 0:
            try:
                part = pread(self.descriptor, min(length, 1 << 30), offset)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not part:
                raise self.too_short(first, expected)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def read_into(self, target: memoryview, offset: int, length: int) -> None:
        """Fill `target`, which must have `length` bytes (ValueError), from `offset` on. Raises like `reread`."""
        try:
            count = preadv(self.descriptor, (target,), offset)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if count != length:
            target[:] = self.reread(offset, length)

    def too_short(self, offset: int, length: int) -> StaleIndexError:
        """The error for a range that extends beyond the end of the file."""
        try:
            size = os.fstat(self.descriptor).st_size
        except OSError as error:
            return unreadable(self.path, error)
        if size < self.bytes:
            return StaleIndexError(f"{self.path}: shrank from {self.bytes} to {size} bytes while it was being read")
        return StaleIndexError(
            f"{self.path}: bytes {offset} to {offset + length} are outside the shard, which has {size}; {_REBUILD}"
        )

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class LooseFiles(Store):
    """Files of one sample each, read whole: shard i is file i, with its present length.

    sizes: in bytes when they were listed, int64 [n]. times: of modification and status change then, ns, int64 [n, 2].
    """

    def __init__(self, root: str, paths: Sequence[str], sizes: Int64s, times: Int64s) -> None:
        self.root, self.paths, self.sizes, self.times = root, paths, sizes, times

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        path = self.location(shard)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise StaleIndexError(f"{path}: cannot be read any more: {error.strerror}") from error

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        for shard in extents.shard.tolist():
            try:
                descriptor = os.open(self.location(shard), READ)
            except OSError:
                continue  # the later read raises
            try:
                prefetch(descriptor, ((0, 0),))
            finally:
                os.close(descriptor)

    def location(self, shard: int) -> str:
        return f"{self.root}/{self.paths[shard]}"

    def check(self, shard: int) -> None:
        """Compare the size and the times of the file. Raises StaleIndexError."""
        try:
            status = os.stat(self.location(shard))
        except OSError as error:
            raise unreadable(self.location(shard), error) from error
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if now != (int(self.sizes[shard]), *self.times[shard].tolist()):
            raise StaleIndexError(f"{self.location(shard)}: was rewritten since it was listed; open the folder again")

    @cached_property
    def state(self) -> str:
        """Hash of the folder, and of the files' sizes and times when they were listed; 32 hex digits."""
        digest = hashlib.blake2b(os.fsencode(os.path.realpath(self.root)), digest_size=16)
        for column in (self.sizes, self.times):
            digest.update(np.ascontiguousarray(column, "<i8").data)
        return digest.hexdigest()


def check_inside(sizes: Int64s, extents: Extents, place: Callable[[int], str]) -> None:
    """Raise StaleIndexError for an extent outside its shard. sizes: of the shards; place: returns the path of one."""
    size = sizes[extents.shard]
    bad = (extents.offset < 0) | (extents.length < 0) | (extents.length > size - extents.offset)
    if bad.any():
        shard, offset, length = (int(column[bad.argmax()]) for column in extents[1:])
        raise StaleIndexError(
            f"{place(shard)}: bytes {offset} to {offset + length} are outside the shard, which has "
            f"{int(sizes[shard])}; {_REBUILD}"
        )


def unreadable(path: str, error: OSError) -> StaleIndexError:
    """The error for a failed system call on a shard."""
    if error.errno == errno.ESTALE:
        return StaleIndexError(
            f"{path}: was replaced or removed on the file server while it was open (ESTALE): the set has changed; open "
            f"it again when the replacement is complete"
        )
    return StaleIndexError(f"{path}: cannot be read: {error.strerror}")
