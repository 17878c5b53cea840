"""Samples in and out of shared memory: which slot, in what form, whether the bytes are right, and the counting.

Everything above a store of opaque bytes and below a reader. A shelf never reads from the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.cached.choice import Choice
from readers.cached.keep import Decoded, Encoded, Recoded
from readers.cached.packing import Packing
from readers.cached.store import Slots, Store, Terms
from readers.headers.pixels import HEADER_BYTES
from readers.sample import Buffer, ImageInfo

__all__ = ["CHECKS", "Check", "Shelf", "form_bytes"]

Check: TypeAlias = Literal["never", "first", "always"]
CHECKS = ("never", "first", "always")
_COUNTED_TOGETHER = 64
_LEAST_BYTES = 64  # what the shortest payload takes
_Ints = npt.NDArray[np.int64]


@dataclass
class Shelf:
    """store: None keeps nothing, and images still take the form that `keep` gives them.

    checksums: CRC32C of the encoded payloads by field, where an index has them; without, the store's own are used.
    is_current: whether a sample's file is still the one that was listed, for readers of plain files: what is not is
    never stored, and where `check` looks at a payload it is dropped.
    """

    store: Store | None
    slots: Slots
    terms: Terms
    keep: Encoded | Recoded | Decoded
    check: Check = "never"
    checksums: dict[str, npt.NDArray[np.uint32]] = field(default_factory=dict)
    is_current: Callable[[int], bool] | None = None
    _checked: bytearray = field(default_factory=bytearray, repr=False)

    def __post_init__(self) -> None:
        self.choice = Choice(self.slots.start, self.slots.stop, self.terms.threshold)
        self._firsts = {name: self.slots.first(name) for name in self.slots.fields}
        self._plain: dict[str, int] = {}  # fields whose bytes are handed out as they lie there
        if self.store is not None and self.check == "never":
            self._fetch = self.store.get
            self._plain = {n: at for n, at in self._firsts.items() if at is not None and n not in self.terms.packings}
        self._hit_bytes: deque[int] = deque()

    # --- out ----------------------------------------------------------------------------------------------------
    def found(self, index: int, name: str) -> Buffer | None:
        """A payload that is here, as it is handed out; None otherwise, and for an index below 0."""
        first = self._plain.get(name)
        if first is None:
            data = self._get(index, name)
        else:
            data = self._fetch(first + index) if self.slots.start <= index < self.slots.stop else None
        if data is not None:
            self._hit_bytes.append(len(data))
            if len(self._hit_bytes) >= _COUNTED_TOGETHER:
                self.count_hits()
        return data

    def count_hits(self) -> None:
        """Tell the store of hits that have not been counted yet: each costs it a lock."""
        hits = size = 0
        try:
            while True:  # each is taken by one thread only
                size += self._hit_bytes.popleft()
                hits += 1
        except IndexError:
            if hits and self.store is not None:
                self.store.count(hits=hits, hit_bytes=size)

    def found_many(self, indices: _Ints, name: str) -> list[Buffer | None]:
        """The same for many samples, counted once."""
        if self.store is None or name not in self._firsts:
            return [None] * len(indices)
        found = [self._get(index, name) for index in indices.tolist()]
        sizes = [len(data) for data in found if data is not None]
        if sizes:
            self.store.count(hits=len(sizes), hit_bytes=sum(sizes))
        return found

    def missing(self, indices: _Ints, name: str) -> _Ints:
        """Those that are not here."""
        store, first = self.store, self._firsts.get(name)
        if store is None or first is None:
            return indices
        start, stop = self.slots.start, self.slots.stop
        here = [start <= index < stop and store.has(first + index) for index in indices.tolist()]
        return indices[~np.array(here, np.bool_)]

    def _get(self, index: int, name: str) -> Buffer | None:
        first = self._firsts.get(name)
        if self.store is None or first is None or not self.slots.start <= index < self.slots.stop:
            return None
        slot = first + index
        stored = self.store.get(slot)
        if stored is None:
            return None
        packing = self.terms.packings.get(name)
        if packing is None and self.check == "never":
            return stored
        return self._checked_payload(self.store, slot, stored, index, name, packing)

    def _checked_payload(
        self, store: Store, slot: int, stored: Buffer, index: int, name: str, packing: Packing | None
    ) -> Buffer | None:
        """The payload, None where it is wrong: then it is dropped, so that it is read again."""
        try:
            data = stored if packing is None else packing.unpacked(stored)
        except ValueError:
            store.drop(slot)
            return None
        if self.check == "never" or (self.check == "first" and self._seen(slot)):
            return data
        if not (self._right(store, slot, data, index, name) and self._is_fresh(index)):
            store.drop(slot)
            return None
        if self._checked:
            self._checked[slot] = 1
        return data

    def _seen(self, slot: int) -> bool:
        if not self._checked:
            self._checked = bytearray(len(self.slots))
        return bool(self._checked[slot])

    def _right(self, store: Store, slot: int, data: Buffer, index: int, name: str) -> bool:
        expected = self.checksums.get(name)
        if expected is None or (name == "image" and not isinstance(self.keep, Encoded)):
            return store.check(slot)
        from crc32c import crc32c

        return crc32c(data) == int(expected[index])

    def _is_fresh(self, index: int) -> bool:
        return self.is_current is None or self.is_current(index)

    # --- in -----------------------------------------------------------------------------------------------------
    def stored(self, index: int, name: str, data: Buffer) -> Buffer:
        """Take a payload as it was read, keep it if it has a place, and give it as it is handed out."""
        form = self.form(name, data)
        if self.store is None or name not in self._firsts:
            return form
        if not (self.choice.keeps(index) and (self.put(index, name, form) or self._has(self.store, index, name))):
            self.store.count(passed=1)
            return form
        self.store.count(misses=1)
        if name in self._plain:  # what lies in the cache already need not lie in this process too
            return self._fetch(self._plain[name] + index) or form
        return form

    @property
    def has_room(self) -> bool:
        """Whether anything at all can still be stored."""
        return self.store is not None and self.store.capacity_bytes - self.store.used_bytes >= _LEAST_BYTES

    def _has(self, store: Store, index: int, name: str) -> bool:
        first = self._firsts[name]
        return first is not None and store.has(first + index)

    def form(self, name: str, data: Buffer) -> Buffer:
        """What is handed out for a payload. Raises BadSampleError."""
        return self.keep.made(data) if name == "image" else data

    def put(self, index: int, name: str, form: Buffer) -> bool:
        """Keep what is handed out; False where it is there already, is being written, does not fit, or is of a file
        that was rewritten: this is asked after reading, so whatever came from a new file is seen."""
        first = self._firsts[name]
        if self.store is None or first is None or not self._is_fresh(index):
            return False
        packing = self.terms.packings.get(name)
        return self.store.put(first + index, form if packing is None else packing.packed(form))

    def close(self) -> None:
        if self.store is not None:
            self.count_hits()
            self.store.close()

    # --- sizes --------------------------------------------------------------------------------------------------
    def form_bytes(self, info: ImageInfo, original: _Ints) -> _Ints:
        """Bytes of images as they are handed out, from their headers (`info`) and original sizes, int64 [n]."""
        return form_bytes(self.keep, self.terms.rate, info, original)


def form_bytes(keep: Encoded | Recoded | Decoded, rate: float, info: ImageInfo, original: _Ints) -> _Ints:
    """See `Shelf.form_bytes`. rate: bytes per pixel of a recoded image."""
    if isinstance(keep, Encoded):
        return original
    pixels = info.height.astype(np.int64) * info.width
    if isinstance(keep, Decoded):
        return np.where(pixels > 0, HEADER_BYTES + 3 * pixels, 0)
    short = np.minimum(info.height, info.width)
    return np.where(short < keep.short_side, original, np.ceil(pixels * rate).astype(np.int64))
