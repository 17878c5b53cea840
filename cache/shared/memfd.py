"""Segments without a name: memory of this process that its children inherit, where no tmpfs can be written to.

Every `open` makes a new one. A forked child has it as it is; a pickled copy opens it through /proc/<pid>/fd of the
process that pickled it, which must still be there and belong to the same user. The kernel frees the memory with its
last mapping, so nothing is ever left behind, and `persist` has no meaning. Seals keep the size as it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from typing import Any

from cache.errors import CacheFullError, ForeignCacheError
from cache.shared.file import reserve
from cache.shared.layout import read_header
from cache.shared.locks import USE, Descriptor, wait_shared
from cache.shared.segment import Segment, Spec, map_segment

__all__ = ["MemfdBackend"]

_WAIT_S = 10.0


class MemfdBackend:
    """One anonymous file per `open`."""

    name = "memfd"

    def attach(self, spec: Spec) -> tuple[Segment, Descriptor]:
        layout = spec.layout
        try:
            lock = Descriptor(os.memfd_create("packer-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            raise CacheFullError(error.errno, f"no anonymous memory: {error.strerror}") from error
        reserve(lock, layout.total_bytes, "memfd", in_memory=True)
        fcntl.fcntl(lock.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        segment = map_segment(lock, layout)
        segment.begin(spec)
        lock.try_shared(USE)
        return segment, lock

    def leave_last(self, segment: Segment) -> None:
        """The kernel does."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        facts = os.fstat(segment.anchor.number)
        return {"path": f"/proc/{os.getpid()}/fd/{segment.anchor.number}", "inode": (facts.st_dev, facts.st_ino)}

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, Descriptor]:
        path = str(ticket["path"])
        try:
            lock = Descriptor(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            told = f"the process that pickled the cache must still have it open ({error.strerror})"
            raise ForeignCacheError(error.errno, told, path) from error
        facts = os.fstat(lock.number)
        found = read_header(lock.number, path) if (facts.st_dev, facts.st_ino) == tuple(ticket["inode"]) else None
        if found is None or found[2] != spec.identity.digest:
            raise ForeignCacheError(f"{path} is another file by now: pickle the cache again")
        wait_shared(lock, USE, _WAIT_S, path)
        return map_segment(lock, found[0]), lock
