"""What a cached reader asks of shared memory, and how slots are numbered.

0                      what all users agree on (`Terms`), as JSON
1 .. fields            the dictionary of each field that has one
then, field by field   one slot for each sample of the part that this node keeps
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from readers.cached.packing import Packing
from readers.sample import Buffer

__all__ = ["Slots", "Store", "Terms", "agreed"]

_AGREE_SECONDS = 2.0


class Store(Protocol):
    """Opaque bytes by slot, shared by the processes of a node: `cache.SharedByteCache`."""

    @property
    def capacity_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...

    def get(self, slot: int) -> memoryview | None: ...
    def put(self, slot: int, data: Buffer) -> bool: ...
    def has(self, slot: int) -> bool: ...
    def present(self) -> npt.NDArray[np.bool_]: ...
    def drop(self, slot: int) -> Any: ...
    def check(self, slot: int) -> bool: ...
    def stats(self) -> Any: ...
    def count(self, *, hits: int = 0, misses: int = 0, hit_bytes: int = 0, passed: int = 0) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the fields of the samples of range(start, stop) are."""

    fields: tuple[str, ...]
    start: int
    stop: int

    def __len__(self) -> int:
        return 1 + len(self.fields) * (1 + self.stop - self.start)

    def first(self, field: str) -> int | None:
        """What to add to a sample's number; None for a field that is not kept."""
        if field not in self.fields:
            return None
        samples = self.stop - self.start
        return 1 + len(self.fields) + self.fields.index(field) * samples - self.start

    def of_field(self, field: str) -> slice:
        """All slots of a field."""
        base = self.first(field)
        assert base is not None
        return slice(base + self.start, base + self.stop)

    def dictionary(self, field: str) -> int:
        return 1 + self.fields.index(field)


@dataclass(frozen=True)
class Terms:
    """What the users of a cache must agree on. threshold: see `choice`. packings: of the fields that are compressed.

    rate: bytes per pixel of a recoded image, as measured; 0 for other ways of keeping.
    """

    threshold: int
    packings: Mapping[str, Packing]
    rate: float = 0.0

    def to_json(self) -> bytes:
        fields = {name: bool(packing.dictionary) for name, packing in self.packings.items()}
        return json.dumps({"threshold": self.threshold, "packed": fields, "rate": self.rate}).encode()


def agreed(store: Store, slots: Slots, mine: Terms) -> Terms | None:
    """The terms that the cache holds: those of whoever came first. None where they cannot be had."""
    for field, packing in mine.packings.items():
        if packing.dictionary and store.get(0) is None:
            store.put(slots.dictionary(field), packing.dictionary)
    until = time.monotonic() + _AGREE_SECONDS
    while True:
        text = store.get(0)
        if text is not None:
            return _read(store, slots, bytes(text))
        # Refused while somebody else is writing: then theirs will be there in a moment.
        if not store.put(0, mine.to_json()) and time.monotonic() > until:
            return None
        time.sleep(0.001)


def _read(store: Store, slots: Slots, text: bytes) -> Terms | None:
    try:
        found = json.loads(text)
        packings = {}
        for field, has_dictionary in found["packed"].items():
            stored = store.get(slots.dictionary(field)) if has_dictionary else b""
            if stored is None:
                return None
            packings[field] = Packing(bytes(stored))
        return Terms(int(found["threshold"]), packings, float(found["rate"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
