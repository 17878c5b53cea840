"""The bytes of a segment. All numbers are in the byte order of the machine; sizes and offsets are in bytes.

    at        size        what
    0         8           magic, stored last when a segment is created: a file without it is incomplete
    8         4           version of this layout
    12        4           0x01020304, which shows the byte order
    16        8           slots
    24        8           capacity: bytes of the arena
    32        8           bytes of the whole segment
    40        8           time of creation, ns since 1970
    48        32          SHA-256 of (version, uid, job, fingerprint, kind, slots)
    80        4           length of the text below
    84        4           CRC32C of bytes 8 to 84 and of the text
    128       896         text: uid, job, fingerprint, kind and title as a JSON object, for listings
    1024      8           state: 1 in use or left by a crash, 2 closed by its last user
    1032      8           tail: start of the free part of the arena; it only grows
    1040      8           1 if the segment persists without users
    1048      8           unused
    1056      8           CRC32C of tail and slot table when the segment was closed
    1064      16          boot id of the kernel when state 2 was written
    1080      8           number of samples that were given space in the arena
    4096      64 · 1024   users, see below
    69632     8 · slots   words:   offset / 64 << 30 | length; 0 is empty. Stored last, after the bytes
    …         8 · slots   pending: a word that is not published: being filled, to be checked, or room of a failed fill
    …         4 · slots   CRC32C of the bytes
    …         4 · slots   owner:   the user that fills it; 0: none; 0xFFFFFFFF: the bytes must be checked before use
    …         capacity    arena: samples, each at a multiple of 64, in order of arrival; never moved or reused

Each column begins at a multiple of 64, the arena at a multiple of the page size, at which it also ends. A sample has
fewer than 2^30 bytes, a segment at most 2^40. Offsets count from the start of the segment.

User n (1 to 1022) is a row of eight 8-byte numbers at 4096 + 64 · n:

    tenure << 32 | process id      the tenure grows each time the number is assigned
    hits, misses, hit bytes, puts, put bytes, passed, dropped

A user is alive as long as its lock is held. Each row is written by its user alone, so counting needs no lock; the
counts of earlier users stay in the row. A claim on a slot contains number and tenure (10 and 22 bits), so a process
that gets the number of a dead user does not inherit its claims. A process beyond 1022 users has no number: it reads,
but neither fills nor counts.

Locked bytes (`cache.locks.ByteLocks`), all beyond the end of the file:

    2^62            USE     shared by every user of the segment; exclusive while it is created, checked or removed
    2^62 + 1        TABLE   exclusive, for microseconds, while slots are claimed and words published
    2^62 + 2 + n    user n  exclusive, as long as user n lives
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cache.checksums import crc32c
from cache.errors import CacheFullError, ForeignCacheError
from cache.locks import ByteLocks

MAGIC = b"\x89PKSEG\r\n"
VERSION = 1
HEADER_BYTES = 4096
USE = 1 << 62
TABLE = USE + 1
SUSPECT = 0xFFFFFFFF  # instead of an owner: the bytes must be checked before use
_USERS_AT = HEADER_BYTES
_USERS = 1024
_USER_BYTES = 64
ALIGNMENT = 64
LENGTH_BITS = 30
LENGTH_MASK = MAX_LENGTH = (1 << LENGTH_BITS) - 1
_MAX_BYTES = 1 << 40
_ORDER_MARK = 0x01020304
_NUMBER_BITS = 10
_WORDS = _USER_BYTES // 8
_LOW = 0xFFFFFFFF
_FIXED = struct.Struct("=8sIIQQQQ32sII")
_TEXT_AT, _TEXT_BYTES = 128, 896


def padded(length: int) -> int:
    """Bytes in the arena for a sample; an empty sample takes some too, so that offsets are unique."""
    return max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)


def word_of(offset: int, length: int) -> int:
    """Pack offset (a multiple of 64) and length (below 2^30) into one word."""
    return (offset // ALIGNMENT) << LENGTH_BITS | length


@dataclass(frozen=True)
class Identity:
    """The identity of a segment: processes with equal identities share it."""

    uid: int
    job: str
    fingerprint: str
    kind: str
    slots: int

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise ValueError(f"slots must not be negative, not {self.slots}")
        if len(self.text) > _TEXT_BYTES:
            raise ValueError(f"job, fingerprint and kind take {len(self.text)} bytes, more than {_TEXT_BYTES}")

    @property
    def text(self) -> bytes:
        """The JSON text of the header."""
        content = {"uid": self.uid, "job": self.job, "fingerprint": self.fingerprint, "kind": self.kind}
        return json.dumps(content, separators=(",", ":")).encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the identity and the version of the layout."""
        content = [VERSION, self.uid, self.job, self.fingerprint, self.kind, self.slots]
        return hashlib.sha256(json.dumps(content).encode()).digest()


@dataclass(frozen=True)
class Layout:
    """Offsets in a segment with this number of slots and this capacity."""

    slots: int
    capacity_bytes: int

    words_at: int = field(init=False)
    pending_at: int = field(init=False)
    crcs_at: int = field(init=False)
    owners_at: int = field(init=False)
    arena_at: int = field(init=False)
    arena_end: int = field(init=False)  # of the space for samples, without the padding of its last page
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.slots < 0 or self.capacity_bytes < 0:
            raise ValueError(f"slots and capacity must not be negative: {self.slots}, {self.capacity_bytes}")
        wide, narrow = padded(8 * self.slots), padded(4 * self.slots)
        places = [*accumulate((_USERS_AT, _USERS * _USER_BYTES, wide, wide, narrow))][1:]
        arena = _whole_pages(places[-1] + narrow)
        places += [arena, arena + self.capacity_bytes // ALIGNMENT * ALIGNMENT]
        places += [arena + max(mmap.PAGESIZE, _whole_pages(self.capacity_bytes))]
        for name, place in zip([column.name for column in fields(self)][2:], places, strict=True):
            object.__setattr__(self, name, place)
        if self.total_bytes > _MAX_BYTES:
            raise ValueError(f"a segment has at most {_MAX_BYTES} bytes, not {self.total_bytes}")


def make_header(identity: Identity, layout: Layout, title: str = "") -> bytes:
    """The fixed part of the header, without the magic, which is stored last.

    title: the name of the data set for users; cut at the front if it is too long.
    """
    text, sizes = _titled(identity, title), (layout.slots, layout.capacity_bytes, layout.total_bytes)
    fixed = _FIXED.pack(MAGIC, VERSION, _ORDER_MARK, *sizes, time.time_ns(), identity.digest, len(text), 0)
    fixed = fixed[:-4] + struct.pack("=I", _checksum(fixed, text))
    return bytes(len(MAGIC)) + fixed[len(MAGIC) :].ljust(_TEXT_AT - len(MAGIC), b"\0") + text


def _titled(identity: Identity, title: str) -> bytes:
    text = json.dumps({**json.loads(identity.text), "title": title}, separators=(",", ":")).encode()
    if len(text) <= _TEXT_BYTES:
        return text
    return _titled(identity, title[len(title) // 4 + 1 :]) if title else identity.text


def begins_like_ours(descriptor: int) -> bool:
    """Whether a file begins with the magic or a part of it, or with zeros."""
    head = os.pread(descriptor, len(MAGIC), 0)
    return MAGIC.startswith(head) or head == bytes(len(head))


def read_header(descriptor: int, name: str) -> tuple[Layout, dict[str, Any], bytes] | None:
    """(layout, the text plus "created_ns", digest); None for a segment whose creation was not finished.

    Raises ForeignCacheError if the file is not a segment, is damaged, or has another version, byte order or size.
    """
    head = os.pread(descriptor, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")
    magic, version, mark, slots, capacity, total, created, digest, length, checksum = _FIXED.unpack_from(head)
    if magic == bytes(len(MAGIC)):
        return None
    if (magic, version, mark) != (MAGIC, VERSION, _ORDER_MARK):
        raise ForeignCacheError(f"{name} is not a cache segment of version {VERSION}: it begins with {head[:16]!r}")
    text = head[_TEXT_AT : _TEXT_AT + min(length, _TEXT_BYTES)]
    if _checksum(head[: _FIXED.size], text) != checksum:
        raise ForeignCacheError(f"{name}: the header is damaged (CRC32C); run  packer cache clean")
    try:
        layout, content = Layout(slots, capacity), dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ForeignCacheError(f"{name}: the header is invalid ({error})") from error
    size = os.fstat(descriptor).st_size
    if layout.total_bytes != total or size != total:
        raise ForeignCacheError(f"{name} has {size} bytes, expected {layout.total_bytes}; run  packer cache clean")
    return layout, {**content, "created_ns": created}, digest


def _checksum(fixed: bytes, text: bytes) -> int:
    return int(crc32c(text, crc32c(fixed[len(MAGIC) : _FIXED.size - 4])))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def user_byte(number: int) -> int:
    """The byte that user `number` locks."""
    return TABLE + 1 + number


@dataclass(frozen=True)
class CacheStats:
    """Statistics of all users of a segment since its creation, including dead ones; `users` counts the living."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    puts: int = 0
    put_bytes: int = 0
    passed: int = 0
    dropped: int = 0
    users: int = 0


class Users:
    """The rows of the users of a segment; `lock` belongs to this user."""

    def __init__(self, table: memoryview, lock: ByteLocks) -> None:
        self._rows = table[_USERS_AT : _USERS_AT + _USERS * _USER_BYTES].cast("Q")
        self._lock = lock
        self.number = 0
        self.owner = 0  # marks its claims; 0 without a number

    def join(self) -> None:
        """Take the first free number, if there is one."""
        for number in range(1, _USERS - 1):
            if self._lock.try_exclusive(user_byte(number)):
                tenure = (self._rows[number * _WORDS] >> 32) + 1 & _LOW
                self._rows[number * _WORDS] = tenure << 32 | os.getpid() & _LOW
                self.number, self.owner = number, _owner(tenure, number)
                return

    def is_alive(self, owner: int) -> bool:
        """Whether the user with the claims of `owner` is alive."""
        number = owner & (1 << _NUMBER_BITS) - 1
        if not 0 < number < _USERS - 1 or owner != _owner(self._rows[number * _WORDS] >> 32, number):
            return False
        return number == self.number or self._lock.is_locked(user_byte(number))

    def add(self, column: int, count: int) -> None:
        """Add to a counter: column 1 hits, 2 misses, 3 hit bytes, 4 puts, 5 put bytes, 6 passed, 7 dropped."""
        if self.number:
            self._rows[self.number * _WORDS + column] += count

    def pids(self) -> Iterator[int]:
        """Process ids of living users, each in its own namespace (containers have their own)."""
        for number in range(1, _USERS - 1):
            pid = self._rows[number * _WORDS] & _LOW
            if pid and (number == self.number or self._lock.is_locked(user_byte(number))):
                yield pid

    def stats(self) -> CacheStats:
        """The sums over all rows."""
        names = ("hits", "misses", "hit_bytes", "puts", "put_bytes", "passed", "dropped")
        sums = {name: sum(self._rows[column::_WORDS].tolist()) for column, name in enumerate(names, 1)}
        return CacheStats(**sums, users=sum(1 for _ in self.pids()))


def _owner(tenure: int, number: int) -> int:
    return (tenure << _NUMBER_BITS | number) & _LOW


# A segment as mapped by one process, and the backends that provide segments.
#
# A backend creates or finds the memory; everything above it works on `Segment` alone. The table is mapped
# for writing, the arena for reading only: no view can overwrite samples. Samples are written by `pwrite`, which is
# several times cheaper than faulting in the pages of a mapping; memory without a file is copied into.
#
# A segment is never closed. Views keep its mapping alive, `put` its descriptor, until their last reference is gone.
#
# The slot table records which user may fill which slot with which part of the arena, and what is published. A slot has
# one of these states; the order of stores guarantees that a process killed at any point leaves one of them:
#
#     word  pending  owner
#     0     0        0         empty
#     0     w        user      being filled, if the user is alive; else empty, with the room of w kept for this slot
#     0     w        0         empty, with the room of w kept for this slot: the fill failed
#     0     w        SUSPECT   left by a crash: to be checked before it is published
#     w     any      any       published, until it is dropped
#
# Words are stored last, and arena space is never given to two fills that both completed, so the bytes of a published
# word never change. The space of dropped bytes is lost, since a process may still read them; the space of a dead
# fill goes to the next fill of the same slot, which nearly always has the same size. A user killed between
# reserving space and recording it loses the space of one sample.
#
# On x86, stores keep their order. Elsewhere the lock's system calls between the bytes and the word order them. Numbers
# read here may come from a damaged file: `span` accepts nothing outside the arena.


PERSIST_AT = 1040
_STATE, _PERSIST, _TABLE_CRC = 1024 // 8, PERSIST_AT // 8, 1056 // 8
_BOOT_AT, _BOOT_BYTES = 1064, 16
_IN_USE, _CLOSED = 1, 2
_TAIL, _TAKEN = 1032 // 8, 1080 // 8


class SlotTable:
    """The columns of a mapped segment. Methods that change them need the table's lock."""

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
        """The start of the free part of the arena."""
        return min(max(self._head[_TAIL], self._start), self._end)

    @property
    def is_full(self) -> bool:
        """Whether the free part is smaller than the mean size of the samples so far."""
        mean = (self.tail - self._start) // max(1, self._head[_TAKEN])
        return self._end - self.tail < max(ALIGNMENT, mean)

    def rewind(self) -> None:
        """Mark the whole arena as free."""
        self._head[_TAIL] = self._start
        self._head[_TAKEN] = 0

    def span(self, word: int) -> tuple[int, int] | None:
        """The half-open byte range of a word; None if it is not in the arena."""
        start = word >> LENGTH_BITS << 6
        stop = start + (word & LENGTH_MASK)
        return (start, stop) if self._start <= start and stop <= self._end else None

    def has_room(self, slot: int, length: int) -> bool:
        """Whether a fill may find space; an estimate without the lock."""
        return self.tail + padded(length) <= self._end or self.pending[slot] != 0

    def claim(self, slot: int, length: int, users: Users) -> int | None:
        """The offset to write to; None if the slot is taken or the arena has no room."""
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
        """Publish bytes that have been written, unless the claim was lost; returns whether it did."""
        if self.words[slot] or self.owners[slot] != owner or self.pending[slot] != word:
            return False
        self.crcs[slot] = crc
        self.words[slot] = word
        self.owners[slot] = 0
        self.pending[slot] = 0
        return True

    def abandon(self, slot: int, word: int, owner: int) -> None:
        """After a failed fill: keep the room for the next one."""
        if self.owners[slot] == owner and self.pending[slot] == word:
            self.owners[slot] = 0

    def erase(self, slot: int) -> None:
        """Empty the slot. The pending word is cleared first: it may name the same bytes, which are never reused."""
        self.pending[slot] = 0
        self.owners[slot] = 0
        self.words[slot] = 0

    def settle(self, slot: int, word: int, right: bool) -> bool:
        """Publish a checked word, or leave its room to the next fill, since no living process has seen the bytes."""
        if self.owners[slot] != SUSPECT or self.pending[slot] != word:
            return False
        if right:
            self.words[slot] = word
        self.owners[slot] = 0
        if right:
            self.pending[slot] = 0
        return True

    def present(self) -> npt.NDArray[np.bool_]:
        """A copy of the mask of slots that are published or left by a crash, bool [slots]."""
        words, owners = np.frombuffer(self.words, np.uint64), np.frombuffer(self.owners, np.uint32)
        present: npt.NDArray[np.bool_] = np.logical_or(words != 0, owners == SUSPECT)
        return present

    def checksum(self) -> int:
        """CRC32C of tail and columns."""
        return int(crc32c(self._columns, crc32c(self._head[_TAIL : _TAIL + 1])))

    def suspect_all(self) -> None:
        """After a crash, as the only user: require checks of all words, void claims, empty an inconsistent table."""
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
        """Whether all samples are in the used part of the arena and do not overlap."""
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
        """The layout of a segment that is created with these arguments."""
        return Layout(self.identity.slots, self.capacity_bytes)


class Backend(Protocol):
    """Provides segments. The lock that it returns holds USE, shared; its last reference closes it."""

    name: str

    def attach(self, spec: Spec) -> tuple[Segment, ByteLocks]:
        """The live segment with the identity of `spec`, or a new one. Raises CacheError."""

    def leave_last(self, segment: Segment) -> None:
        """Remove the segment unless it persists; its last user is leaving and holds USE exclusively."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        """Picklable arguments of `attach_again` for another process. Raises TypeError if that is impossible."""

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, ByteLocks]:
        """The segment of a ticket, in another process."""


def _boot_id() -> bytes:
    """Id of this boot: a file on a disk that was closed in an earlier boot may lack its last pages."""
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
    window: memoryview | None = None  # memory to copy into if there is no file
    path: Path | None = None

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.layout, self.table)
        self._head = self.table[:HEADER_BYTES].cast("Q")

    def begin(self, spec: Spec) -> None:
        """Turn zeroed memory into a segment; the magic is written last."""
        header = make_header(spec.identity, self.layout, spec.title)
        self.table[: len(header)] = header
        self._head[_STATE] = _IN_USE
        self._head[_PERSIST] = int(spec.persist)
        self.slots.rewind()
        self.table[: len(MAGIC)] = MAGIC

    @property
    def persist(self) -> bool:
        """Whether the segment stays without users."""
        return bool(self._head[_PERSIST])

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes to the arena."""
        if self.window is not None:
            self.window[start : start + len(data)] = data
            return
        while len(data):
            done = os.pwrite(self.anchor.number, data, start)
            data, start = data[done:], start + done

    def seal(self) -> None:
        """Record, as the only user, that the segment was closed properly."""
        self.table[_BOOT_AT : _BOOT_AT + _BOOT_BYTES] = _boot_id()
        self._head[_TABLE_CRC] = self.slots.checksum()
        self._head[_STATE] = _CLOSED

    def unseal(self, persist: bool) -> None:
        """First use, as the only user: unless it was closed properly, all samples are checked before use."""
        ordered = self._head[_STATE] == _CLOSED and self._head[_TABLE_CRC] == self.slots.checksum()
        if not ordered or bytes(self.table[_BOOT_AT : _BOOT_AT + _BOOT_BYTES]) != _boot_id():
            self.slots.suspect_all()
        self.resume(persist)

    def resume(self, persist: bool) -> None:
        """Record that the segment is in use. persist: from now on it stays without users."""
        self._head[_STATE] = _IN_USE
        self._head[_PERSIST] |= persist


def map_segment(lock: ByteLocks, layout: Layout, path: Path | None = None) -> Segment:
    """Map the file of `lock`, whose size has been checked, through a separate open file description."""
    anchor = lock.reopen()
    try:
        table = mmap.mmap(anchor.number, layout.arena_at)
        arena = mmap.mmap(anchor.number, layout.total_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise CacheFullError(error.errno, f"cannot map {layout.total_bytes} bytes: {error.strerror}") from error
    return Segment(layout, anchor, memoryview(table), memoryview(arena), path=path)
