"""Filesystems: their type, whether they are local to this node, their free space; and the kernel's page cache.

Types come from /proc/self/mountinfo (proc(5)), because statfs(2) gives all FUSE filesystems the same number. A
filesystem counts as local unless its type is known to be a network filesystem.

Ranges in the page cache are half-open byte ranges of one file, [offset, offset + length). Nothing in this module blocks
on the disk except `drop`, which first flushes dirty pages, since only clean pages can be dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cache.errors import CacheDirectoryError
from cache.node import available_memory_bytes
from cache.system import READ, require_shared_memory

_REMOTE = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs", "davfs", "ncpfs",
    "lustre", "gpfs", "mmfs", "beegfs", "ceph", "cephfs", "glusterfs", "pvfs2", "orangefs", "panfs", "wekafs", "dvs",
    "ocfs2", "gfs2", "acfs", "coda", "autofs", "fuse",
))  # fmt: skip
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.bindfs"))
_MEMORY = frozenset(("tmpfs", "ramfs"))
_UNLIMITED_INODES = 1 << 62
_MARGIN_BYTES = 256 << 20
_MARGIN_SHARE = 20  # 1/20 of the total, if that is more


@dataclass(frozen=True, slots=True)
class Free:
    """What this user can still write: bytes, and inodes (a very large number if unlimited)."""

    bytes: int
    inodes: int


@dataclass(frozen=True)
class Budget:
    """The limits of a cache. directory_bytes: free space of the directory's filesystem, whose size is size_bytes;
    memory_bytes: memory available to this process. None: no limit.

    Of each limit, 256 MiB or 1/20, whichever is more, is left for batches, workers and other programs; of a directory
    at most half, since the margin would otherwise take all of a small tmpfs (64 MiB in containers).
    """

    directory_bytes: int | None
    size_bytes: int | None
    memory_bytes: int | None

    @property
    def bytes(self) -> int:
        """The largest possible size of a cache."""
        room = []
        if self.directory_bytes is not None:
            margin = max(min(_MARGIN_BYTES, self.directory_bytes // 2), self.directory_bytes // _MARGIN_SHARE)
            room.append(self.directory_bytes - margin)
        if self.memory_bytes is not None:
            room.append(self.memory_bytes - max(_MARGIN_BYTES, self.memory_bytes // _MARGIN_SHARE))
        return max(0, min(room))

    @property
    def is_cramped(self) -> bool:
        """Whether the filesystem is the limit because it is much smaller than the free memory."""
        if self.directory_bytes is None or self.size_bytes is None or self.memory_bytes is None:
            return False
        return self.directory_bytes < self.memory_bytes and self.size_bytes < self.memory_bytes // 4


def cache_budget(directory: str | Path | None = "/dev/shm") -> Budget:
    """The limits of a cache in a directory: its free space, and memory if it is a tmpfs. None: anonymous memory.

    Raises CacheDirectoryError for a missing directory, PlatformError.
    """
    require_shared_memory()
    if directory is None:
        return Budget(None, None, available_memory_bytes())
    try:
        facts = os.statvfs(directory)
        memory = available_memory_bytes() if is_in_memory(Path(directory)) else None
    except OSError as error:
        reason = f"no cache can be made there ({error.strerror}); name another tmpfs"
        raise CacheDirectoryError(error.errno, reason, str(directory)) from error
    return Budget(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize, memory)


def free_space(path: Path, filesystem: str) -> Free:
    """What can be written below a directory; in a tmpfs at most the memory of this process. Raises OSError."""
    status = os.statvfs(path)
    size = status.f_bavail * status.f_frsize
    if filesystem in _MEMORY:
        size = min(size, available_memory_bytes())
    return Free(size, status.f_favail if status.f_files else _UNLIMITED_INODES)


def filesystem_type(path: Path, mountinfo: str | None = None) -> str:
    """The type of the filesystem of an existing path; "" if unknown."""
    try:
        text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
        real = os.path.realpath(path)
    except OSError:
        return ""
    best, name = -1, ""
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        words = before.split(" ")
        if not dash or len(words) < 5:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        covers = real == mount or real.startswith(mount.rstrip("/") + "/")
        if covers and len(mount) >= best:  # of several mounts at one place, the last one is visible
            best, name = len(mount), after.split(" ")[0]
    return name


def is_local(filesystem: str) -> bool:
    """Whether a filesystem of this type is local to the node."""
    if filesystem.startswith("fuse."):
        return filesystem in _LOCAL_FUSE
    return filesystem not in _REMOTE


def is_in_memory(directory: Path) -> bool:
    """Whether a directory is in a tmpfs or ramfs; True if that is unknown. Raises OSError."""
    os.stat(directory)
    return filesystem_type(directory) in ("", *_MEMORY)


# --- the page cache ----
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
    """Start writing a dirty range to the disk and return at once, so that a later fsync has little left to do.

    This is a hint (sync_file_range(2), Linux only); it never fails.
    """
    function = getattr(_libc(), "sync_file_range", None)
    if function is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def drop(path: str | os.PathLike[str], ranges: Sequence[tuple[int, int]] = ((0, 0),), *, synced: bool = False) -> None:
    """Drop one file's pages from the page cache, so that the next read comes from the disk.

    ranges: (offset, length) to drop, widened to whole pages; a length of 0 means up to the end of the file.
    synced: whether the file has no dirty pages, so that no fsync is needed.
    """
    descriptor = os.open(path, READ)
    try:
        if not synced:
            os.fsync(descriptor)
        for offset, length in ranges if hasattr(os, "posix_fadvise") else ():
            first = offset - offset % _PAGE_BYTES
            size = length and -(-(offset + length) // _PAGE_BYTES) * _PAGE_BYTES - first
            os.posix_fadvise(descriptor, first, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
