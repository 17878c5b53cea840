"""Segments in an MPI shared window: for ranks of MPI where no tmpfs may be written to.

`open` is collective over the ranks of `comm` on this node. The first rank allocates the memory
(`MPI.Win.Allocate_shared`), zeroes it and turns it into a segment; the others map it. MPI's own locks outlive a dead
owner, so locks are taken on an empty file in the temporary folder, which has no name any more when `open` returns.

Freeing a window is collective, too, and would invalidate views, so it is left to MPI_Finalize; `close` only leaves the
segment. A forked child may read and fill, which needs no MPI. Nothing can be pickled, nothing persists.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from cache.errors import CacheFullError, ForeignCacheError, MissingExtraError
from cache.locks import ByteLocks
from cache.node import available_memory_bytes
from cache.shared.layout import USE, Layout
from cache.shared.segment import Segment, Spec

__all__ = ["MpiBackend"]


class MpiBackend:
    """One shared window per node and `open`."""

    name = "mpi"

    def attach(self, spec: Spec) -> tuple[Segment, ByteLocks]:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingExtraError("mpi4py and an MPI library", "mpi", "the MPI cache") from error
        comm = (spec.comm or MPI.COMM_WORLD).Split_type(MPI.COMM_TYPE_SHARED)
        layout = _agree(comm, spec)
        memory = _window(MPI, comm, layout)
        lock = _common_file(comm)
        segment = Segment(
            layout,
            lock.reopen(),
            memory[: layout.arena_at],
            memory[: layout.total_bytes].toreadonly(),
            window=memory[: layout.total_bytes],
        )
        if comm.rank == 0:
            memory[: layout.arena_at] = bytes(layout.arena_at)  # MPI does not promise zeros
            segment.begin(spec)
        lock.try_shared(USE)
        comm.Barrier()
        return segment, lock

    def leave_last(self, segment: Segment) -> None:
        """MPI frees the memory; it may be gone already."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        raise TypeError("a cache in an MPI window cannot be pickled: fork, or open it on a rank of the communicator")

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, ByteLocks]:
        raise TypeError("a cache in an MPI window cannot be attached to")


def _window(mpi: Any, comm: Any, layout: Layout) -> memoryview:
    """Memory of the first rank, as each rank has it mapped."""
    if comm.size == 1:  # MPI takes that from the heap, which forked children would not share
        return memoryview(mmap.mmap(-1, layout.total_bytes))
    try:
        window = mpi.Win.Allocate_shared(layout.total_bytes if comm.rank == 0 else 0, 1, comm=comm)
    except mpi.Exception as error:
        raise CacheFullError(errno.ENOMEM, f"no window of {layout.total_bytes} bytes: {error}") from error
    return memoryview(window.Shared_query(0)[0]).cast("B")


def _agree(comm: Any, spec: Spec) -> Layout:
    """The layout of the first rank. All ranks raise alike, or some would wait for ever."""
    digests = comm.allgather(spec.identity.digest)
    if len(set(digests)) > 1:
        raise ValueError("the ranks of a node must open the same cache: job, fingerprint, kind or slots differ")
    layout = Layout(spec.identity.slots, comm.bcast(spec.capacity_bytes))
    room = comm.bcast(_room() if comm.rank == 0 else 0)
    if room < layout.total_bytes:
        raise CacheFullError(errno.ENOSPC, f"no room for a window of {layout.total_bytes} bytes: {room} are free")
    return layout


def _room() -> int:
    """MPI allocates windows in /dev/shm and may not reserve them: touching a missing page kills (SIGBUS)."""
    with contextlib.suppress(OSError):
        facts = os.statvfs("/dev/shm")
        return min(facts.f_bavail * facts.f_frsize, available_memory_bytes())
    return available_memory_bytes()


def _common_file(comm: Any) -> ByteLocks:
    """An empty file without a name, opened by each rank."""
    path, found = "", None
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp(prefix="packer-cache-")
            found = ByteLocks(number)
    path = comm.bcast(path)
    if comm.rank:
        with contextlib.suppress(OSError):
            found = ByteLocks(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
    everywhere = all(comm.allgather(found is not None))
    if comm.rank == 0 and path:
        os.unlink(path)
    if found is None or not everywhere:
        raise ForeignCacheError(f"the ranks of this node do not share {tempfile.gettempdir()}, where they keep locks")
    return found
