"""The slot table: who may fill which slot with which part of the arena, and what is out.

The life of a slot; each step is ordered so that a process killed after any store leaves a state of this list:

    word  pending  owner
    0     0        0         empty
    0     w        user      being filled, if the user is alive; else empty, with the room of w kept for this slot
    0     w        0         empty, with the room of w kept for this slot: the fill failed
    0     w        SUSPECT   left by a crash: to be checked before it is out
    w     any      any       out; until it is dropped

Words go out last and arena space is never given to two fills that both came to an end, so a reader that has seen a
word may slice at leisure. Dropped bytes are lost space until the segment goes, since somebody may still look at them;
room of a dead fill goes to the next fill of the same slot, which is nearly always of the same size. A user killed
between taking space and noting it down loses one sample's space.

Stores keep their order on x86. Elsewhere the lock's system calls between the bytes and the word are what orders them.
Numbers read here may come from a damaged file: `span` lets nothing through that is not in the arena.
"""

from __future__ import annotations

import crc32c
import numpy as np
import numpy.typing as npt

from cache.shared.layout import ALIGNMENT, LENGTH_BITS, LENGTH_MASK, Layout, padded, word_of
from cache.shared.users import SUSPECT, Users

__all__ = ["SlotTable"]

_TAIL, _TAKEN = 1032 // 8, 1080 // 8


class SlotTable:
    """The columns of a mapped segment. Methods that change something are called with the table's lock."""

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
        """Whether the free part is smaller than the mean of what was taken so far."""
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
        start = self._room_kept(slot, length)
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
        """Bytes are in place: let everybody see them, unless the claim has been taken away."""
        if self.words[slot] or self.owners[slot] != owner or self.pending[slot] != word:
            return False
        self.crcs[slot] = crc
        self.words[slot] = word
        self.owners[slot] = 0
        self.pending[slot] = 0
        return True

    def abandon(self, slot: int, word: int, owner: int) -> None:
        """The fill failed: the room stays for the next one."""
        if self.owners[slot] == owner and self.pending[slot] == word:
            self.owners[slot] = 0

    def erase(self, slot: int) -> None:
        """Back to empty. The pending word goes first: it could name the same bytes, and those are never reused."""
        self.pending[slot] = 0
        self.owners[slot] = 0
        self.words[slot] = 0

    def settle(self, slot: int, word: int, right: bool) -> bool:
        """A checked word goes out, or leaves its room to the next fill: nobody alive has seen the bytes."""
        if self.owners[slot] != SUSPECT or self.pending[slot] != word:
            return False
        if right:
            self.words[slot] = word
        self.owners[slot] = 0
        if right:
            self.pending[slot] = 0
        return True

    def present(self) -> npt.NDArray[np.bool_]:
        """Which slots are out or left by a crash, as a copy."""
        words, owners = np.frombuffer(self.words, np.uint64), np.frombuffer(self.owners, np.uint32)
        present: npt.NDArray[np.bool_] = np.logical_or(words != 0, owners == SUSPECT)
        return present

    def checksum(self) -> int:
        """CRC32C of tail and columns."""
        return int(crc32c.crc32c(self._columns, crc32c.crc32c(self._head[_TAIL : _TAIL + 1])))

    def suspect_all(self) -> None:
        """After a crash, alone: words must be checked before use, claims are void; a senseless table is emptied."""
        words, pending = np.frombuffer(self.words, np.uint64), np.frombuffer(self.pending, np.uint64)
        owners = np.frombuffer(self.owners, np.uint32)
        kept = np.where(words != 0, words, np.where(owners == SUSPECT, pending, np.uint64(0)))
        if not self._is_sound(kept[kept != 0]):
            kept[:] = 0
            self.rewind()
        pending[:] = kept
        owners[:] = np.where(kept != 0, np.uint32(SUSPECT), np.uint32(0))
        words[:] = 0

    def _room_kept(self, slot: int, length: int) -> int | None:
        word = self.pending[slot]
        span = self.span(word) if word else None
        if span is None or padded(word & LENGTH_MASK) < padded(length):
            return None
        return span[0]

    def _is_sound(self, words: npt.NDArray[np.uint64]) -> bool:
        """Whether the samples lie in the used part of the arena and apart from each other."""
        starts = (words >> np.uint64(LENGTH_BITS)) * np.uint64(ALIGNMENT)
        stops = starts + np.maximum(words & np.uint64(LENGTH_MASK), np.uint64(1))
        order = np.argsort(starts)
        tail = self._head[_TAIL]
        if tail % ALIGNMENT or not self._start <= tail <= self._end:
            return False
        apart = bool((stops[order][:-1] <= starts[order][1:]).all())
        return not len(words) or (apart and int(starts.min()) >= self._start and int(stops.max()) <= tail)
