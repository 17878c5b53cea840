"""A segment as one process has it mapped, and the backends that provide segments.

A backend creates or finds the memory; everything above it works on `Segment` alone. The table is mapped
for writing, the arena for reading only: no view can overwrite samples. Samples are written by `pwrite`, which is
several times cheaper than faulting in the pages of a mapping; memory without a file is copied into.

A segment is never closed. Views keep its mapping, `put` its descriptor; each ends with its last reference.

The slot table says who may fill which slot with which part of the arena, and what is published. The states of a slot;
the order of stores makes sure that a process killed after any of them leaves one of these:

    word  pending  owner
    0     0        0         empty
    0     w        user      being filled, if the user is alive; else empty, with the room of w kept for this slot
    0     w        0         empty, with the room of w kept for this slot: the fill failed
    0     w        SUSPECT   left by a crash: to be checked before it is published
    w     any      any       published, until it is dropped

Words are stored last, and arena space is never given to two fills that both completed, so the bytes of a word that was
seen never change. Dropped bytes stay lost space, since a process may still look at them; the room of a dead fill goes
to the next fill of the same slot, which is nearly always of the same size. A user killed between reserving space and
recording it loses one sample's space.

Stores keep their order on x86. Elsewhere the lock's system calls between the bytes and the word order them. Numbers
read here may come from a damaged file: `span` accepts nothing outside the arena.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cache.checksums import crc32c
from cache.errors import CacheFullError
from cache.locks import ByteLocks
from cache.shared.layout import (
    ALIGNMENT,
    HEADER_BYTES,
    LENGTH_BITS,
    LENGTH_MASK,
    MAGIC,
    SUSPECT,
    Identity,
    Layout,
    Users,
    make_header,
    padded,
    word_of,
)

__all__ = ["PERSIST_AT", "Backend", "Segment", "SlotTable", "Spec", "map_segment"]

PERSIST_AT = 1040
_STATE, _PERSIST, _TABLE_CRC = 1024 // 8, PERSIST_AT // 8, 1056 // 8
_BOOT_AT, _BOOT_BYTES = 1064, 16
_IN_USE, _CLOSED = 1, 2
_TAIL, _TAKEN = 1032 // 8, 1080 // 8


class SlotTable:
    """The columns of a mapped segment. Methods that change something need the table's lock."""

    def __init__(self, layout: Layout, table: memoryview) -> None:
        slots = layout.slots
        self.layout = layout
        self.words = table[layout.words_at : layout.words_at + 8 * slots].cast("Q")
        self.pending = table[layout.pending_at : layout.pending_at + 8 * slots].cast("Q")
        self.crcs = table[layout.crcs_at : layout.crcs_at + 4 * slots].cast("I")
        self.owners = table[layout.owners_at : layout.owners_at + 4 * slots].cast("I")
        self._columns = table[layout.words_at : layout.arena_at]
        self._head = table[: layout.words_at].cast("Q")
        self._start, self._end = layout.arena_at, layout.arena_end

    @property
    def tail(self) -> int:
        """Where the free part of the arena begins."""
        return min(max(self._head[_TAIL], self._start), self._end)

    @property
    def is_full(self) -> bool:
        """Whether the free part is smaller than the mean sample so far."""
        mean = (self.tail - self._start) // max(1, self._head[_TAKEN])
        return self._end - self.tail < max(ALIGNMENT, mean)

    def rewind(self) -> None:
        """The whole arena is free."""
        self._head[_TAIL] = self._start
        self._head[_TAKEN] = 0

    def span(self, word: int) -> tuple[int, int] | None:
        """The half-open byte range of a word; None where that is not in the arena."""
        start = word >> LENGTH_BITS << 6
        stop = start + (word & LENGTH_MASK)
        return (start, stop) if self._start <= start and stop <= self._end else None

    def has_room(self, slot: int, length: int) -> bool:
        """A guess without the lock: whether a fill may find space."""
        return self.tail + padded(length) <= self._end or self.pending[slot] != 0

    def claim(self, slot: int, length: int, users: Users) -> int | None:
        """Where to write; None where the slot is taken or the arena has no room."""
        owner = self.owners[slot]
        if self.words[slot] or owner == SUSPECT or (owner and users.is_alive(owner)):
            return None
        start = self._reusable_room(slot, length)
        if start is None:
            start = self.tail
            if start + padded(length) > self._end:
                return None
            self._head[_TAIL] = start + padded(length)
            self._head[_TAKEN] += 1
        self.pending[slot] = word_of(start, length)
        self.owners[slot] = users.owner
        return start

    def publish(self, slot: int, word: int, crc: int, owner: int) -> bool:
        """Publish bytes that are in place, unless the claim has been lost."""
        if self.words[slot] or self.owners[slot] != owner or self.pending[slot] != word:
            return False
        self.crcs[slot] = crc
        self.words[slot] = word
        self.owners[slot] = 0
        self.pending[slot] = 0
        return True

    def abandon(self, slot: int, word: int, owner: int) -> None:
        """The fill failed: keep the room for the next one."""
        if self.owners[slot] == owner and self.pending[slot] == word:
            self.owners[slot] = 0

    def erase(self, slot: int) -> None:
        """Back to empty. The pending word goes first: it could name the same bytes, and those are never reused."""
        self.pending[slot] = 0
        self.owners[slot] = 0
        self.words[slot] = 0

    def settle(self, slot: int, word: int, right: bool) -> bool:
        """Publish a checked word, or leave its room to the next fill: no living process has seen the bytes."""
        if self.owners[slot] != SUSPECT or self.pending[slot] != word:
            return False
        if right:
            self.words[slot] = word
        self.owners[slot] = 0
        if right:
            self.pending[slot] = 0
        return True

    def present(self) -> npt.NDArray[np.bool_]:
        """Which slots are published or left by a crash, as a copy."""
        words, owners = np.frombuffer(self.words, np.uint64), np.frombuffer(self.owners, np.uint32)
        present: npt.NDArray[np.bool_] = np.logical_or(words != 0, owners == SUSPECT)
        return present

    def checksum(self) -> int:
        """CRC32C of tail and columns."""
        return int(crc32c(self._columns, crc32c(self._head[_TAIL : _TAIL + 1])))

    def suspect_all(self) -> None:
        """After a crash, alone: words must be checked before use, claims are void; an inconsistent table is emptied."""
        words, pending = np.frombuffer(self.words, np.uint64), np.frombuffer(self.pending, np.uint64)
        owners = np.frombuffer(self.owners, np.uint32)
        kept = np.where(words != 0, words, np.where(owners == SUSPECT, pending, np.uint64(0)))
        if not self._is_sound(kept[kept != 0]):
            kept[:] = 0
            self.rewind()
        pending[:] = kept
        owners[:] = np.where(kept != 0, np.uint32(SUSPECT), np.uint32(0))
        words[:] = 0

    def _reusable_room(self, slot: int, length: int) -> int | None:
        word = self.pending[slot]
        span = self.span(word) if word else None
        if span is None or padded(word & LENGTH_MASK) < padded(length):
            return None
        return span[0]

    def _is_sound(self, words: npt.NDArray[np.uint64]) -> bool:
        """Whether the samples are in the used part of the arena and do not overlap."""
        starts = (words >> np.uint64(LENGTH_BITS)) * np.uint64(ALIGNMENT)
        stops = starts + np.maximum(words & np.uint64(LENGTH_MASK), np.uint64(1))
        order = np.argsort(starts)
        tail = self._head[_TAIL]
        if tail % ALIGNMENT or not self._start <= tail <= self._end:
            return False
        apart = bool((stops[order][:-1] <= starts[order][1:]).all())
        return not len(words) or (apart and int(starts.min()) >= self._start and int(stops.max()) <= tail)


@dataclass(frozen=True)
class Spec:
    """The arguments of `SharedByteCache.open`."""

    identity: Identity
    capacity_bytes: int
    directory: Path
    persist: bool = False
    comm: Any = field(default=None, compare=False)
    title: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _ = self.layout  # raises before anything is created

    @property
    def layout(self) -> Layout:
        """Of a segment that is created for this."""
        return Layout(self.identity.slots, self.capacity_bytes)


class Backend(Protocol):
    """Where segments are. The lock that it returns has USE, shared; its last reference closes it."""

    name: str

    def attach(self, spec: Spec) -> tuple[Segment, ByteLocks]:
        """The live segment of the spec's identity, or a new one. Raises CacheError."""

    def leave_last(self, segment: Segment) -> None:
        """Remove the segment, whose last user leaves and has USE alone, unless it persists."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        """What `attach_again` needs in another process, picklable. Raises TypeError where that is impossible."""

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, ByteLocks]:
        """The segment that the ticket was made for, in another process."""


def _boot_id() -> bytes:
    """Of this boot: a file on a disk may say that it was closed in an earlier one, and lack its last pages."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(_BOOT_BYTES)


@dataclass
class Segment:
    """One mapped segment. `anchor` is never locked, so a fork may copy it; `arena` counts from the segment's start."""

    layout: Layout
    anchor: ByteLocks
    table: memoryview
    arena: memoryview
    window: memoryview | None = None  # memory to copy into, where there is no file behind it
    path: Path | None = None

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.layout, self.table)
        self._head = self.table[:HEADER_BYTES].cast("Q")

    def begin(self, spec: Spec) -> None:
        """Turn zeroed memory into a segment, the magic last."""
        header = make_header(spec.identity, self.layout, spec.title)
        self.table[: len(header)] = header
        self._head[_STATE] = _IN_USE
        self._head[_PERSIST] = int(spec.persist)
        self.slots.rewind()
        self.table[: len(MAGIC)] = MAGIC

    @property
    def persist(self) -> bool:
        """Whether the segment stays when no process uses it."""
        return bool(self._head[_PERSIST])

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes into the arena."""
        if self.window is not None:
            self.window[start : start + len(data)] = data
            return
        while len(data):
            done = os.pwrite(self.anchor.number, data, start)
            data, start = data[done:], start + done

    def seal(self) -> None:
        """Note, alone, that its last user closed it properly."""
        self.table[_BOOT_AT : _BOOT_AT + _BOOT_BYTES] = _boot_id()
        self._head[_TABLE_CRC] = self.slots.checksum()
        self._head[_STATE] = _CLOSED

    def unseal(self, persist: bool) -> None:
        """First use, alone: unless it was closed properly, everything in it is checked before use."""
        ordered = self._head[_STATE] == _CLOSED and self._head[_TABLE_CRC] == self.slots.checksum()
        if not ordered or bytes(self.table[_BOOT_AT : _BOOT_AT + _BOOT_BYTES]) != _boot_id():
            self.slots.suspect_all()
        self.resume(persist)

    def resume(self, persist: bool) -> None:
        """Note that it is in use. persist: from now on it stays when no process uses it."""
        self._head[_STATE] = _IN_USE
        self._head[_PERSIST] |= persist


def map_segment(lock: ByteLocks, layout: Layout, path: Path | None = None) -> Segment:
    """Map the file of `lock`, whose size has been checked, through a description of its own."""
    anchor = lock.reopen()
    try:
        table = mmap.mmap(anchor.number, layout.arena_at)
        arena = mmap.mmap(anchor.number, layout.total_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise CacheFullError(error.errno, f"cannot map {layout.total_bytes} bytes: {error.strerror}") from error
    return Segment(layout, anchor, memoryview(table), memoryview(arena), path=path)
