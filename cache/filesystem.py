"""Filesystems: their kind, whether they belong to this node, their free space; and the kernel's page cache.

Types come from /proc/self/mountinfo (proc(5)), where FUSE filesystems have their own names, which the numbers of
statfs(2) lack. A filesystem counts as local unless its type is known to be served by another machine.

Of the page cache, ranges are half-open byte ranges of one file, [offset, offset + length). Nothing here blocks on the
disk except `drop`, which has dirty pages written first, since only clean ones can be dropped.
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
_MARGIN_SHARE = 20  # a twentieth, where that is more


@dataclass(frozen=True, slots=True)
class Free:
    """What this user can still write: bytes, and inodes (a very large number where there is no limit)."""

    bytes: int
    inodes: int


@dataclass(frozen=True)
class Budget:
    """What limits a cache. directory_bytes: free in the directory's filesystem, of size_bytes; memory_bytes: available
    to this process. None: not a limit here.

    A margin of 256 MiB or a twentieth of each is left for batches, workers and other programs. Of a directory it is
    half at most, since a small tmpfs (64 MiB in containers) would be all margin otherwise.
    """

    directory_bytes: int | None
    size_bytes: int | None
    memory_bytes: int | None

    @property
    def bytes(self) -> int:
        """The largest size of a cache."""
        room = []
        if self.directory_bytes is not None:
            margin = max(min(_MARGIN_BYTES, self.directory_bytes // 2), self.directory_bytes // _MARGIN_SHARE)
            room.append(self.directory_bytes - margin)
        if self.memory_bytes is not None:
            room.append(self.memory_bytes - max(_MARGIN_BYTES, self.memory_bytes // _MARGIN_SHARE))
        return max(0, min(room))

    @property
    def is_cramped(self) -> bool:
        """Whether the filesystem is the limit only because it is much smaller than the free memory."""
        if self.directory_bytes is None or self.size_bytes is None or self.memory_bytes is None:
            return False
        return self.directory_bytes < self.memory_bytes and self.size_bytes < self.memory_bytes // 4


def cache_budget(directory: str | Path | None = "/dev/shm") -> Budget:
    """What limits a cache in that directory: its space, and memory if it is a tmpfs. None: anonymous memory.

    Raises CacheDirectoryError for a missing directory, PlatformError.
    """
    require_shared_memory()
    if directory is None:
        return Budget(None, None, available_memory_bytes())
    try:
        facts = os.statvfs(directory)
        memory = available_memory_bytes() if is_in_memory(Path(directory)) else None
    except OSError as error:
        what = f"no cache can be made there ({error.strerror}); name another tmpfs"
        raise CacheDirectoryError(error.errno, what, str(directory)) from error
    return Budget(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize, memory)


def free_space(path: Path, filesystem: str) -> Free:
    """What can be written below a directory; in a tmpfs no more than the memory of this process. Raises OSError."""
    status = os.statvfs(path)
    size = status.f_bavail * status.f_frsize
    if filesystem in _MEMORY:
        size = min(size, available_memory_bytes())
    return Free(size, status.f_favail if status.f_files else _UNLIMITED_INODES)


def filesystem_type(path: Path, mountinfo: str | None = None) -> str:
    """The type of the filesystem of an existing path; "" where it is not known."""
    try:
        text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
        real = os.path.realpath(path)
    except OSError:
        return ""
    best, found = -1, ""
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        words = before.split(" ")
        if not dash or len(words) < 5:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        covers = real == mount or real.startswith(mount.rstrip("/") + "/")
        if covers and len(mount) >= best:  # of mounts at one place the last one is seen
            best, found = len(mount), after.split(" ")[0]
    return found


def is_local(filesystem: str) -> bool:
    """Whether a filesystem of this type belongs to the node."""
    if filesystem.startswith("fuse."):
        return filesystem in _LOCAL_FUSE
    return filesystem not in _REMOTE


def is_in_memory(directory: Path) -> bool:
    """Whether a directory is in a tmpfs or ramfs; True where that is not known. Raises OSError."""
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
    """Start writing a dirty range to the disk and return, so that a later fsync has little left to wait for.

    A hint (sync_file_range(2), Linux only); it never fails.
    """
    function = getattr(_libc(), "sync_file_range", None)
    if function is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def drop(path: str | os.PathLike[str], ranges: Sequence[tuple[int, int]] = ((0, 0),), *, synced: bool = False) -> None:
    """Drop one file's pages from the page cache, so that the next read comes from the disk.

    ranges: (offset, length) of what to drop, widened to whole pages; a length of 0 is all that follows.
    synced: whether the file is known to have no dirty pages, so that no fsync is needed.
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
