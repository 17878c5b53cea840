"""What a directory's filesystem is: its type, whether it belongs to this node, and what is free on it.

Types come from /proc/self/mountinfo (proc(5)), where FUSE filesystems have their own names, which the numbers of
statfs(2) lack. A filesystem counts as local unless its type is known to be served by another machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cache.node import available_memory_bytes

__all__ = ["Free", "filesystem_type", "free_space", "is_local"]

_REMOTE = frozenset(
    (
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "smbfs",
            "afs",
            "9p",
            "virtiofs",
            "vboxsf",
            "vmhgfs",
            "prl_fs",
            "davfs",
            "ncpfs",
        ),
        *(
            "lustre",
            "gpfs",
            "mmfs",
            "beegfs",
            "ceph",
            "cephfs",
            "glusterfs",
            "pvfs2",
            "orangefs",
            "panfs",
            "wekafs",
            "dvs",
        ),
        *("ocfs2", "gfs2", "acfs", "coda", "autofs", "fuse"),
    )
)
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.bindfs"))
_MEMORY = frozenset(("tmpfs", "ramfs"))
_UNLIMITED_INODES = 1 << 62


@dataclass(frozen=True, slots=True)
class Free:
    """What this user can still write: bytes, and inodes (a very large number where there is no limit)."""

    bytes: int
    inodes: int


def filesystem_type(path: Path, mountinfo: str | None = None) -> str:
    """The type of the filesystem that holds an existing path, "" where it cannot be told."""
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


def free_space(path: Path, filesystem: str) -> Free:
    """What can be written below a directory; in memory, no more than this process may take. Raises OSError."""
    status = os.statvfs(path)
    size = status.f_bavail * status.f_frsize
    if filesystem in _MEMORY:
        size = min(size, available_memory_bytes())
    return Free(size, status.f_favail if status.f_files else _UNLIMITED_INODES)
