"""A cache of opaque bytes that all processes of a node share: a fixed number of slots, and no eviction.

The first process to write a slot fills it; from then on it is read as a view of the shared memory, without a lock, a
copy or a system call. Data that do not fit are not stored, and no process waits for another one to fill a slot.
`cache.shared.layout` describes the bytes and the rules for filling.

All processes that have opened a segment own it jointly: the last user removes it, unless it persists. Views stay valid
after `close`, even after the segment is removed; the memory is freed with the last view. Linux only, 64 bits.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cache.checksums import crc32c
from cache.errors import CacheFullError, ClosedCacheError, ForeignCacheError, MissingExtraError
from cache.launchers import job_name
from cache.locks import ByteLocks
from cache.node import available_memory_bytes
from cache.shared.file import FileBackend, MemfdBackend
from cache.shared.layout import (
    LENGTH_BITS,
    LENGTH_MASK,
    MAX_LENGTH,
    SUSPECT,
    USE,
    Backend,
    CacheStats,
    Identity,
    Layout,
    Segment,
    SlotTable,
    Spec,
)
from cache.shared.membership import Membership
from cache.system import require_shared_memory

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
_HITS, _MISSES, _HIT_BYTES, _PUTS, _PUT_BYTES, _PASSED, _DROPPED = range(1, 8)


class SharedByteCache:
    """One segment as used by this process. Thread-safe; can be forked and pickled."""

    def __init__(self, backend: Backend, spec: Spec, segment: Segment, lock: ByteLocks) -> None:
        layout = segment.layout
        self._backend, self._spec = backend, spec
        self._member: Membership | None = Membership(backend, segment, lock)
        self._words: memoryview | _Closed = segment.slots.words
        self._arena: memoryview | _Closed = segment.arena
        self._start, self._end, self._layout = layout.arena_at, layout.arena_end, layout
        self._leave = weakref.finalize(self, self._member.leave)
        self._leave.atexit = False  # too early: see `cache.shared.membership`

    @classmethod
    def open(
        cls,
        *,
        fingerprint: str,
        kind: str,
        slots: int,
        capacity_bytes: int,
        directory: str | Path = "/dev/shm",
        backend: str | Backend = "file",
        job: str | None = None,
        persist: bool = False,
        comm: Any = None,
        title: str = "",
    ) -> SharedByteCache:
        """Open the segment of this (user, job, fingerprint, kind, slots), or create it.

        fingerprint, kind, job: identify the data set, the form in which it is cached, and the job (default: the number
            that the batch system gave it, else "0"); together about 800 characters at most.
        slots: the number of samples.
        capacity_bytes: room for their bytes. A segment that is in use keeps its capacity.
        directory: a tmpfs for the files of the backend "file".
        backend: "file", "memfd" (a new segment, for this process and its children), "mpi" (collective over `comm`,
            default COMM_WORLD; shared by its ranks on this node), or a `Backend`.
        persist: keep the segment when its last user leaves.
        title: the data set's name for users, shown by `list_caches`.

        If another file has the segment's name, or a stopped process is still creating it, the segment is created under
        another name, with a warning. Raises CacheFullError if there is no room for it, CacheDirectoryError if files
        cannot be created in the directory, ForeignCacheError or CacheBusyError if all names are taken.
        """
        require_shared_memory()
        identity = Identity(os.geteuid(), job_name(os.environ) if job is None else job, fingerprint, kind, slots)
        spec = Spec(identity, capacity_bytes, Path(directory), persist, comm, title)
        if isinstance(backend, str):
            if backend not in _BACKENDS:
                raise ValueError(f"no cache backend {backend!r}; there are {', '.join(_BACKENDS)}")
            backend = _BACKENDS[backend]()
        return cls(backend, spec, *backend.attach(spec))

    @staticmethod
    def table_bytes(slots: int) -> int:
        """The size of a segment in bytes, apart from its capacity."""
        return Layout(slots, 0).total_bytes

    def get(self, slot: int) -> memoryview | None:
        """A read-only view of the bytes, which never change; None if the slot is empty."""
        word = self._words[slot]
        if word and slot >= 0:
            start = word >> LENGTH_BITS << 6
            stop = start + (word & LENGTH_MASK)
            if self._start <= start and stop <= self._end:
                return self._arena[start:stop]
        return self._search(slot)

    def has(self, slot: int) -> bool:
        """Whether the slot is filled. After a crash, bytes that are still to be checked count as filled."""
        table = self._table(slot)
        return table.words[slot] != 0 or table.owners[slot] == SUSPECT

    def present(self) -> npt.NDArray[np.bool_]:
        """`has` of every slot, bool [slots]."""
        return self._user().segment.slots.present()

    def put(self, slot: int, data: Buffer) -> bool:
        """Copy the bytes into the slot. False: no room, or another process has filled it or is filling it."""
        table, member = self._table(slot), self._user()
        view = memoryview(cast("bytes", data))
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if table.words[slot] or (table.owners[slot] == SUSPECT and self._settle(slot) is not None):
            return False
        if len(view) > MAX_LENGTH or not member.users.number or not table.has_room(slot, len(view)):
            return False
        stored = member.fill(slot, view)
        if stored:
            self._add((_PUTS, 1), (_PUT_BYTES, len(view)))
        return stored

    def drop(self, slot: int) -> None:
        """Discard wrong bytes. The slot can be filled again, but the space is lost."""
        if self.has(slot):
            self._user().erase(slot)
            self._add((_DROPPED, 1))

    def check(self, slot: int) -> bool:
        """Whether the slot has bytes that match the CRC32C stored with them. Wrong bytes are dropped."""
        table = self._table(slot)
        word, crc = table.words[slot], table.crcs[slot]
        if not word:
            return self.get(slot) is not None  # `get` checks what a crash left
        span = table.span(word)
        if span is not None and crc32c(self._arena[slice(*span)]) == crc:
            return True
        if table.words[slot] == word:
            self.drop(slot)
        return False

    def count(self, *, hits: int = 0, misses: int = 0, hit_bytes: int = 0, passed: int = 0) -> None:
        """Add to the statistics, for example once per batch; `get` counts nothing."""
        self._add((_HITS, hits), (_MISSES, misses), (_HIT_BYTES, hit_bytes), (_PASSED, passed))

    def stats(self) -> CacheStats:
        """The statistics of all processes since the segment was created."""
        return self._user().users.stats()

    @property
    def slots(self) -> int:
        """The number of slots, one per sample."""
        return self._layout.slots

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena in bytes; may differ from the requested one if the segment existed already."""
        return self._layout.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Used part of the capacity: samples padded to 64 bytes, including unfinished and dropped ones."""
        return self._user().segment.slots.tail - self._start

    @property
    def full(self) -> bool:
        """Whether there is no room for a sample of average size. Smaller ones may still fit."""
        return self._user().segment.slots.is_full

    def close(self) -> None:
        """Leave the segment; the last user removes it, unless it persists. Views stay valid."""
        self._words = self._arena = _Closed()
        self._leave()
        self._member = None

    def __enter__(self) -> SharedByteCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., SharedByteCache], tuple[Any, ...]]:
        ticket = self._backend.ticket(self._user().segment)
        spec = replace(self._spec, capacity_bytes=self.capacity_bytes, comm=None)
        return _attach_again, (self._backend, spec, ticket)

    def __repr__(self) -> str:
        state = "closed" if self._member is None else f"{self.used_bytes} of {self.capacity_bytes} bytes used"
        return f"<SharedByteCache {self._backend.name} {self._spec.identity.kind!r}, {self.slots} slots, {state}>"

    def _user(self) -> Membership:
        member = self._member
        if member is None:
            raise ClosedCacheError("the cache is closed")
        return member

    def _table(self, slot: int) -> SlotTable:
        if not 0 <= slot < self._layout.slots:
            raise IndexError(f"slot {slot} of a cache of {self._layout.slots} slots")
        return self._user().segment.slots

    def _search(self, slot: int) -> memoryview | None:
        """`get` for a slot that is empty, unchecked or damaged."""
        table = self._table(slot)
        word = table.words[slot]
        if word and table.span(word) is None:  # the table is damaged: no process writes such a word
            self.drop(slot)
        return self._settle(slot) if table.owners[slot] == SUSPECT else None

    def _settle(self, slot: int) -> memoryview | None:
        """Check what a crash left in the slot, and publish or drop it."""
        table, member = self._table(slot), self._user()
        word, crc = table.pending[slot], table.crcs[slot]
        span = table.span(word)
        view = self._arena[slice(*span)] if span else None
        right = view is not None and crc32c(view) == crc
        if member.settle(slot, word, right) and not right:
            self._add((_DROPPED, 1))
        return view if right and table.words[slot] == word else None  # if not published, another fill may reuse it

    def _add(self, *counts: tuple[int, int]) -> None:
        member = self._user()
        with member.counting:
            for column, count in counts:
                if count:
                    member.users.add(column, count)


class _Closed:
    """Replaces the memory after `close`, so that `get` need not check whether the cache is open."""

    def __getitem__(self, key: object) -> NoReturn:
        raise ClosedCacheError("the cache is closed")


def _attach_again(backend: Backend, spec: Spec, ticket: Mapping[str, Any]) -> SharedByteCache:
    return SharedByteCache(backend, spec, *backend.attach_again(spec, ticket))


# Segments in an MPI shared window, for MPI ranks on nodes without a writable tmpfs.
#
# `open` is collective over the ranks of `comm` on this node. The first rank allocates the memory
# (`MPI.Win.Allocate_shared`), zeroes it and turns it into a segment; the others map it. MPI's own locks outlive a dead
# owner, so locks are taken on an empty file in the temporary folder, which is unlinked before `open` returns.
#
# Freeing a window is collective, too, and would invalidate views, so it is left to MPI_Finalize; `close` only leaves
# the segment. A forked child may read and fill, which needs no MPI. A segment cannot be pickled and does not persist.


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
        """Nothing to do: MPI frees the memory, perhaps already."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        raise TypeError("a cache in an MPI window cannot be pickled: fork, or open it on a rank of the communicator")

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, ByteLocks]:
        raise TypeError("a cache in an MPI window cannot be attached to")


def _window(mpi: Any, comm: Any, layout: Layout) -> memoryview:
    """The memory of the first rank, as mapped by this rank."""
    if comm.size == 1:  # MPI would use the heap, which forked children do not share
        return memoryview(mmap.mmap(-1, layout.total_bytes))
    try:
        window = mpi.Win.Allocate_shared(layout.total_bytes if comm.rank == 0 else 0, 1, comm=comm)
    except mpi.Exception as error:
        raise CacheFullError(errno.ENOMEM, f"no window of {layout.total_bytes} bytes: {error}") from error
    return memoryview(window.Shared_query(0)[0]).cast("B")


def _agree(comm: Any, spec: Spec) -> Layout:
    """The layout of the first rank. All ranks raise alike; otherwise some would wait forever."""
    digests = comm.allgather(spec.identity.digest)
    if len(set(digests)) > 1:
        raise ValueError("the ranks of a node must open the same cache: job, fingerprint, kind or slots differ")
    layout = Layout(spec.identity.slots, comm.bcast(spec.capacity_bytes))
    room = comm.bcast(_room() if comm.rank == 0 else 0)
    if room < layout.total_bytes:
        raise CacheFullError(errno.ENOSPC, f"no room for a window of {layout.total_bytes} bytes: {room} are free")
    return layout


def _room() -> int:
    """Free bytes for a window. MPI uses /dev/shm and may not reserve it: touching a missing page kills (SIGBUS)."""
    with contextlib.suppress(OSError):
        facts = os.statvfs("/dev/shm")
        return min(facts.f_bavail * facts.f_frsize, available_memory_bytes())
    return available_memory_bytes()


def _common_file(comm: Any) -> ByteLocks:
    """An unlinked empty file, opened by each rank."""
    path, lock = "", None
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp(prefix="packer-cache-")
            lock = ByteLocks(number)
    path = comm.bcast(path)
    if comm.rank:
        with contextlib.suppress(OSError):
            lock = ByteLocks(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
    everywhere = all(comm.allgather(lock is not None))
    if comm.rank == 0 and path:
        os.unlink(path)
    if lock is None or not everywhere:
        raise ForeignCacheError(f"the ranks of this node do not share {tempfile.gettempdir()}, where locks are kept")
    return lock


_BACKENDS: dict[str, type[Backend]] = {"file": FileBackend, "memfd": MemfdBackend, "mpi": MpiBackend}
