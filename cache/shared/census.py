"""Which segments there are, who uses them, and the removal of those that nobody does.

Looking takes no lock, so it disturbs nobody who opens or closes at that moment. Removing takes the lock that every user
shares, and what cannot be had alone stays. Only files with our names, of this user and beginning with our magic are
touched, and those that a maker killed half-way has left.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.errors import ForeignCacheError
from cache.shared.file import NAME, open_file, remove_unused
from cache.shared.layout import begins_like_ours, read_header
from cache.shared.locks import USE, Descriptor
from cache.shared.segment import Segment
from cache.shared.users import CacheStats, Users

__all__ = ["CacheInfo", "clean_caches", "list_caches"]

_NO_ARENA = memoryview(b"")


@dataclass(frozen=True)
class CacheInfo:
    """One segment. Half-made and damaged ones have no slots, and the size of the file as their capacity.

    title: what its first user called the data set. users: process ids of those alive, as they see them. age_s: seconds
    since it was made.
    """

    name: str
    uid: int
    job: str
    fingerprint: str
    kind: str
    slots: int
    capacity_bytes: int
    used_bytes: int
    in_use: bool
    users: tuple[int, ...]
    stats: CacheStats
    age_s: float
    persist: bool
    title: str = ""


def list_caches(directory: str | Path = "/dev/shm") -> list[CacheInfo]:
    """The segments of this user there, by name."""
    return [_described(path, file) for path, file in _files(Path(directory))]


def clean_caches(directory: str | Path = "/dev/shm", *, all: bool = False) -> list[CacheInfo]:
    """Remove the segments of this user that nobody uses, with `all` those that persist too; which they were."""
    found = _files(Path(directory))
    return [info for path, file in found if (info := _described(path, file)) and remove_unused(path, persistent=all)]


def _files(directory: Path) -> Iterator[tuple[Path, Descriptor]]:
    for path in sorted(directory.iterdir()):
        if NAME.fullmatch(path.name):
            with contextlib.suppress(ForeignCacheError):
                file = open_file(path)
                if file is not None and begins_like_ours(file.number):
                    yield path, file


def _described(path: Path, file: Descriptor) -> CacheInfo:
    facts = os.fstat(file.number)
    try:
        found = read_header(file.number, str(path))
    except ForeignCacheError:
        found = None
    if found is None:
        age = max(0.0, time.time() - facts.st_mtime)
        held, nothing = file.is_held(USE), CacheStats()
        return CacheInfo(path.name, facts.st_uid, "", "", "", 0, facts.st_size, 0, held, (), nothing, age, False)
    layout, told, _ = found
    segment = Segment(layout, file, memoryview(mmap.mmap(file.number, layout.arena_at, prot=mmap.PROT_READ)), _NO_ARENA)
    users = Users(segment.table, file)
    return CacheInfo(
        name=path.name,
        uid=facts.st_uid,
        **{name: str(told.get(name, "")) for name in ("job", "fingerprint", "kind", "title")},
        slots=layout.slots,
        capacity_bytes=layout.capacity_bytes,
        used_bytes=segment.slots.tail - layout.arena_at,
        in_use=file.is_held(USE),
        users=tuple(users.pids()),
        stats=users.stats(),
        age_s=max(0.0, time.time() - told["created_ns"] / 1e9),
        persist=segment.persist,
    )
