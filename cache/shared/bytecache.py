"""A cache of opaque bytes that all processes of a node share: a fixed number of slots, nothing is ever evicted.

A slot is filled once, by the first process that does so, and read from then on as a view of the shared memory: without
a lock, a copy or a system call. What does not fit is not stored, and no process ever waits for the fill of another.
`cache.shared.layout` describes the bytes, `cache.shared.layout` the rules of filling.

All processes that have opened a segment own it together: it is removed with its last user, unless it persists.
Views outlive `close`, and even the segment's name; the memory goes with the last of them. Linux only, 64 bits.
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
    """One segment, as this process uses it. Threads may share it, and it can be forked and pickled."""

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

        fingerprint, kind, job: the data set, what is kept of it, and the job (default: that of the batch system, else
            "0"); about 800 characters together at most.
        slots: the number of samples.
        capacity_bytes: room for their bytes; a segment that is in use keeps the capacity it has.
        directory: where files of the backend "file" are, a tmpfs.
        backend: "file", "memfd" (a new segment, for this process and its children), "mpi" (collective over `comm`,
            default COMM_WORLD; shared by its ranks on this node), or a `Backend`.
        persist: keep the segment when its last user leaves.
        title: what users call the data set, for `list_caches`.

        Where another file has its name, or a process that was stopped is creating it, the segment is created under
        another name, with a warning. Raises CacheFullError where there is no room for it, CacheDirectoryError where
        files cannot be created in the directory, ForeignCacheError or CacheBusyError where all names are taken.
        """
        require_shared_memory()
        identity = Identity(os.geteuid(), job_name(os.environ) if job is None else job, fingerprint, kind, slots)
        spec = Spec(identity, capacity_bytes, Path(directory), persist, comm, title)
        if isinstance(backend, str):
            if backend not in _BACKENDS:
                raise ValueError(f"no cache backend {backend!r}: there are {', '.join(_BACKENDS)}")
            backend = _BACKENDS[backend]()
        return cls(backend, spec, *backend.attach(spec))

    @staticmethod
    def table_bytes(slots: int) -> int:
        """What a segment of so many slots takes besides its capacity."""
        return Layout(slots, 0).total_bytes

    def get(self, slot: int) -> memoryview | None:
        """A read-only view of the bytes, which never change; None where there are none (yet)."""
        word = self._words[slot]
        if word and slot >= 0:
            start = word >> LENGTH_BITS << 6
            stop = start + (word & LENGTH_MASK)
            if self._start <= start and stop <= self._end:
                return self._arena[start:stop]
        return self._search(slot)

    def has(self, slot: int) -> bool:
        """Whether the slot is filled; after a crash, bytes yet to be checked count too."""
        table = self._table(slot)
        return table.words[slot] != 0 or table.owners[slot] == SUSPECT

    def present(self) -> npt.NDArray[np.bool_]:
        """`has` of every slot, bool [slots]."""
        return self._user().segment.slots.present()

    def put(self, slot: int, data: Buffer) -> bool:
        """Fill the slot with a copy of the bytes. False: no room, or another process has filled it or is filling it."""
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
        """Stop returning these bytes, which are wrong. The slot can be filled again; the space is lost."""
        if self.has(slot):
            self._user().erase(slot)
            self._add((_DROPPED, 1))

    def check(self, slot: int) -> bool:
        """Whether there are bytes with the CRC32C that they were stored with. Wrong bytes are dropped."""
        table = self._table(slot)
        word, crc = table.words[slot], table.crcs[slot]
        if not word:
            return self.get(slot) is not None  # what a crash left is checked there
        span = table.span(word)
        if span is not None and crc32c(self._arena[slice(*span)]) == crc:
            return True
        if table.words[slot] == word:
            self.drop(slot)
        return False

    def count(self, *, hits: int = 0, misses: int = 0, hit_bytes: int = 0, passed: int = 0) -> None:
        """Add to the statistics, for instance once a batch: `get` counts nothing."""
        self._add((_HITS, hits), (_MISSES, misses), (_HIT_BYTES, hit_bytes), (_PASSED, passed))

    def stats(self) -> CacheStats:
        """What all processes have done with the segment since it was made."""
        return self._user().users.stats()

    @property
    def slots(self) -> int:
        """How many samples there can be: slots 0 to slots - 1."""
        return self._layout.slots

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena; not that requested where the segment existed already."""
        return self._layout.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Used part of the capacity: samples, at multiples of 64, those being filled and lost ones included."""
        return self._user().segment.slots.tail - self._start

    @property
    def full(self) -> bool:
        """Whether there is no room for one more sample of average size. Smaller ones may still fit."""
        return self._user().segment.slots.is_full

    def close(self) -> None:
        """Leave the segment; the last user to leave removes it, unless it persists. Views stay valid."""
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
        """`get` of a slot without a usable word."""
        table = self._table(slot)
        word = table.words[slot]
        if word and table.span(word) is None:  # damage: no process writes that
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
        return view if right and table.words[slot] == word else None  # not published: another fill may use its room

    def _add(self, *counts: tuple[int, int]) -> None:
        member = self._user()
        with member.counting:
            for column, count in counts:
                if count:
                    member.users.add(column, count)


class _Closed:
    """In place of the memory, so that `get` need not check whether the cache is open."""

    def __getitem__(self, key: object) -> NoReturn:
        raise ClosedCacheError("the cache is closed")


def _attach_again(backend: Backend, spec: Spec, ticket: Mapping[str, Any]) -> SharedByteCache:
    return SharedByteCache(backend, spec, *backend.attach_again(spec, ticket))


# Segments in an MPI shared window: for ranks of MPI where no tmpfs may be written to.
#
# `open` is collective over the ranks of `comm` on this node. The first rank allocates the memory
# (`MPI.Win.Allocate_shared`), zeroes it and turns it into a segment; the others map it. MPI's own locks outlive a dead
# owner, so locks are taken on an empty file in the temporary folder, which has no name any more when `open` returns.
#
# Freeing a window is collective, too, and would invalidate views, so it is left to MPI_Finalize; `close` only leaves
# the segment. A forked child may read and fill, which needs no MPI. Nothing can be pickled, nothing persists.


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


_BACKENDS: dict[str, type[Backend]] = {"file": FileBackend, "memfd": MemfdBackend, "mpi": MpiBackend}
