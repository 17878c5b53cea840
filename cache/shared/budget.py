"""How many bytes a cache may take here."""

from __future__ import annotations

import os
from pathlib import Path

from cache.node import available_memory_bytes

__all__ = ["budget_bytes", "lies_in_memory"]

_MARGIN_BYTES = 256 << 20
_MARGIN_SHARE = 20  # a twentieth, where that is more


def budget_bytes(directory: str | Path | None = "/dev/shm") -> int:
    """The smaller of what is free in that tmpfs and of the memory that this process may take, less a margin.

    The margin is 256 MiB or a twentieth: for the batches, the workers and whoever else writes there. Of a folder on a
    disk only the first counts, of None (anonymous memory) only the second. Raises FileNotFoundError without the folder.
    """
    limits = []
    if directory is not None:
        facts = os.statvfs(directory)
        limits.append(facts.f_bavail * facts.f_frsize)
    if directory is None or lies_in_memory(Path(directory)):
        limits.append(available_memory_bytes())
    room = min(limits)
    return max(0, room - max(_MARGIN_BYTES, room // _MARGIN_SHARE))


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
