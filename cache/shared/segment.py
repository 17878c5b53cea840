"""A segment as one process has it mapped, and what provides such segments.

A backend makes or finds the memory; everything above works on `Segment` and does not know which one it came from. The
table is mapped for writing, the arena for reading only: nobody scribbles over samples through a view. Samples go in by
`pwrite`, which is several times cheaper than faulting in the pages of a mapping; memory without a file is copied into.

Nobody closes a segment. Views keep its mapping, `put` keeps its descriptor, and each goes with its last reference.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cache.errors import CacheFullError
from cache.shared.layout import HEADER_BYTES, MAGIC, Identity, Layout, make_header
from cache.shared.locks import Descriptor
from cache.shared.slots import SlotTable

__all__ = ["PERSIST_AT", "Backend", "Segment", "Spec", "map_segment"]

PERSIST_AT = 1040
_STATE, _PERSIST, _CRASHES, _TABLE_CRC = 1024 // 8, PERSIST_AT // 8, 1048 // 8, 1056 // 8
_BOOT_AT, _BOOT_BYTES = 1064, 16
_IN_USE, _CLOSED = 1, 2


@dataclass(frozen=True)
class Spec:
    """What `SharedByteCache.open` was asked for."""

    identity: Identity
    capacity_bytes: int
    directory: Path
    persist: bool = False
    comm: Any = field(default=None, compare=False)
    title: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        Layout(self.identity.slots, self.capacity_bytes)  # says what is wrong before anything is made

    @property
    def layout(self) -> Layout:
        """Of a segment that is made to this spec."""
        return Layout(self.identity.slots, self.capacity_bytes)


class Backend(Protocol):
    """Where segments live. `lock` of what it gives has USE, shared; the caller closes it by letting it go."""

    name: str

    def attach(self, spec: Spec) -> tuple[Segment, Descriptor]:
        """The live segment of the spec's identity, or a new one. Raises CacheError."""

    def leave_last(self, segment: Segment) -> None:
        """Its last user goes, and has USE alone: leave nothing behind, unless it persists."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        """What `attach_again` needs in another process, picklable. Raises TypeError where that is impossible."""

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, Descriptor]:
        """The segment that the ticket was made for, in another process."""


def _boot_id() -> bytes:
    """Memory of another boot is gone; a file on a disk may say that it was closed and lack its last pages."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(_BOOT_BYTES)


@dataclass
class Segment:
    """One mapped segment. `anchor` is never locked, so a fork may copy it; `arena` counts from the segment's start."""

    layout: Layout
    anchor: Descriptor
    table: memoryview
    arena: memoryview
    window: memoryview | None = None  # memory to copy into, where there is no file behind it
    path: Path | None = None

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.layout, self.table)
        self._head = self.table[:HEADER_BYTES].cast("Q")

    def begin(self, spec: Spec) -> None:
        """Make zeroed memory a segment, the magic last."""
        header = make_header(spec.identity, self.layout, spec.title)
        self.table[: len(header)] = header
        self._head[_STATE] = _IN_USE
        self._head[_PERSIST] = int(spec.persist)
        self.slots.rewind()
        self.table[: len(MAGIC)] = MAGIC

    @property
    def persist(self) -> bool:
        """Whether the segment stays when nobody uses it."""
        return bool(self._head[_PERSIST])

    def keep(self) -> None:
        """Make it stay."""
        self._head[_PERSIST] = 1

    @property
    def is_doubtful(self) -> bool:
        """Whether it was ever found after a crash, so that slots may have to be checked."""
        return bool(self._head[_CRASHES])

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes into the arena."""
        if self.window is not None:
            self.window[start : start + len(data)] = data
            return
        while len(data):
            done = os.pwrite(self.anchor.number, data, start)
            data, start = data[done:], start + done

    def seal(self) -> None:
        """Note, alone, that the last user closed it in order."""
        self.table[_BOOT_AT : _BOOT_AT + _BOOT_BYTES] = _boot_id()
        self._head[_TABLE_CRC] = self.slots.checksum()
        self._head[_STATE] = _CLOSED

    def unseal(self) -> None:
        """First use, alone: unless it was closed in order, nothing in it is believed unchecked."""
        ordered = self._head[_STATE] == _CLOSED and self._head[_TABLE_CRC] == self.slots.checksum()
        if not ordered or bytes(self.table[_BOOT_AT : _BOOT_AT + _BOOT_BYTES]) != _boot_id():
            self._head[_CRASHES] += 1  # before the table changes, so that who comes next looks for suspects
            self.slots.suspect_all()
        self.resume()

    def resume(self) -> None:
        """Somebody is here: a mark that says it was closed is of the past."""
        self._head[_STATE] = _IN_USE


def map_segment(lock: Descriptor, layout: Layout, path: Path | None = None) -> Segment:
    """Map the file of `lock`, whose size has been checked, through a description of its own."""
    anchor = lock.reopened()
    try:
        table = mmap.mmap(anchor.number, layout.arena_at)
        arena = mmap.mmap(anchor.number, layout.total_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise CacheFullError(error.errno, f"cannot map {layout.total_bytes} bytes: {error.strerror}") from error
    return Segment(layout, anchor, memoryview(table), memoryview(arena), path=path)
