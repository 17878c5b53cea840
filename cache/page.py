"""The kernel's page cache: ask it ahead, ask what it holds, drop a file from it.

Ranges are half-open byte ranges of one file, [offset, offset + length). Nothing here blocks on the disk except
`drop`, which first has dirty pages written so that they can be dropped at all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from functools import cache

__all__ = ["drop", "prefetch", "resident_bytes", "write_behind"]

_PAGE_BYTES = mmap.PAGESIZE
_SYNC_FILE_RANGE_WRITE = 2


def prefetch(descriptor: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Start reading (offset, length) ranges into the page cache and return at once."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    for offset, length in ranges:
        advise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def write_behind(descriptor: int, offset: int, length: int) -> None:
    """Start writing a dirty range to the disk and return, so that a later fsync has little left to wait for.

    A hint (sync_file_range(2), Linux only): it promises nothing, and a filesystem that refuses it is fine.
    """
    function = getattr(_libc(), "sync_file_range", None)
    if function is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def drop(path: str | os.PathLike[str]) -> None:
    """Put one file's pages out of the page cache, so that the next read is a cold one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes of a file the page cache holds now (whole pages, by `mincore(2)`)."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0
        with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
            pages = (size + _PAGE_BYTES - 1) // _PAGE_BYTES
            states = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(view)
            try:
                failed = _libc().mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), states)
            finally:
                del anchor
            if failed:
                raise OSError(ctypes.get_errno(), "mincore failed", os.fspath(path))
    return min(size, sum(state & 1 for state in states) * _PAGE_BYTES)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
