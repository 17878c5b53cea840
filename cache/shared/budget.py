"""How many bytes a cache may take here, and what sets that limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cache.errors import CacheDirectoryError
from cache.node import available_memory_bytes

__all__ = ["Budget", "budget", "budget_bytes", "lies_in_memory"]

_MARGIN_BYTES = 256 << 20
_MARGIN_SHARE = 20  # a twentieth, where that is more


@dataclass(frozen=True)
class Budget:
    """What there is. directory_bytes: free in the directory's file system, of size_bytes; memory_bytes: what this
    process may still take. None: this does not count here.

    A margin of 256 MiB or a twentieth is left of each: for the batches, the workers and whoever else writes there. Of a
    directory it is half at most, since a small tmpfs (a container's 64 MiB) would be all margin otherwise.
    """

    directory_bytes: int | None
    size_bytes: int | None
    memory_bytes: int | None

    @property
    def bytes(self) -> int:
        """What a cache may take."""
        room = []
        if self.directory_bytes is not None:
            margin = max(min(_MARGIN_BYTES, self.directory_bytes // 2), self.directory_bytes // _MARGIN_SHARE)
            room.append(self.directory_bytes - margin)
        if self.memory_bytes is not None:
            room.append(self.memory_bytes - max(_MARGIN_BYTES, self.memory_bytes // _MARGIN_SHARE))
        return max(0, min(room))

    @property
    def is_cramped(self) -> bool:
        """Whether the file system is the limit only because it was made much smaller than the memory that is free."""
        if self.directory_bytes is None or self.size_bytes is None or self.memory_bytes is None:
            return False
        return self.directory_bytes < self.memory_bytes and self.size_bytes < self.memory_bytes // 4


def budget(directory: str | Path | None = "/dev/shm") -> Budget:
    """What limits a cache in that directory. Of a folder on a disk memory does not count; of None (anonymous memory)
    nothing else does. Raises CacheDirectoryError without the folder."""
    if directory is None:
        return Budget(None, None, available_memory_bytes())
    try:
        facts = os.statvfs(directory)
        memory = available_memory_bytes() if lies_in_memory(Path(directory)) else None
    except OSError as error:
        told = f"no cache can be made there ({error.strerror}); name another tmpfs"
        raise CacheDirectoryError(error.errno, told, str(directory)) from error
    return Budget(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize, memory)


def budget_bytes(directory: str | Path | None = "/dev/shm") -> int:
    """`budget(directory).bytes`."""
    return budget(directory).bytes


def lies_in_memory(directory: Path) -> bool:
    """Whether it is of a tmpfs or ramfs; yes where nobody says."""
    device = os.stat(directory).st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number}
    return not kinds or bool(kinds & {"tmpfs", "ramfs"})
