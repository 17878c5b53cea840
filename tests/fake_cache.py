"""A dictionary behind the interface of `cache.SharedByteCache`, in one process."""

from __future__ import annotations

import types
from typing import Any, ClassVar

import numpy as np
import pytest
from crc32c import crc32c

import cache

NAMES = ("hits", "misses", "hit_bytes", "puts", "put_bytes", "passed", "dropped", "users")


class FakeFullError(OSError):
    """No room."""


class FakeCache:
    opened: ClassVar[dict[tuple[Any, ...], FakeCache]] = {}
    room = 1 << 40

    def __init__(self, slots: int, capacity_bytes: int) -> None:
        self.slots, self.capacity_bytes, self.used_bytes = slots, capacity_bytes, 0
        self.data: dict[int, tuple[bytes, int]] = {}
        self.counts = dict.fromkeys(NAMES, 0)

    @classmethod
    def open(cls, *, fingerprint: str, kind: str, slots: int, capacity_bytes: int, **place: Any) -> FakeCache:
        if capacity_bytes > cls.room:
            raise FakeFullError("no room")
        key = (fingerprint, kind, slots, place["job"], str(place["directory"]))
        return cls.opened.setdefault(key, cls(slots, capacity_bytes))

    def get(self, slot: int) -> memoryview | None:
        found = self.data.get(slot)
        return None if found is None else memoryview(found[0])

    def put(self, slot: int, data: Any) -> bool:
        data = bytes(data)
        size = max(64, -(-len(data) // 64) * 64)
        if slot in self.data or self.used_bytes + size > self.capacity_bytes:
            return False
        self.used_bytes += size
        self.data[slot] = (data, crc32c(data))
        self.counts["puts"] += 1
        self.counts["put_bytes"] += len(data)
        return True

    def has(self, slot: int) -> bool:
        return slot in self.data

    def present(self) -> Any:
        here = np.zeros(self.slots, np.bool_)
        here[list(self.data)] = True
        return here

    def drop(self, slot: int) -> None:
        self.counts["dropped"] += self.data.pop(slot, None) is not None

    def check(self, slot: int) -> bool:
        return slot in self.data and crc32c(self.data[slot][0]) == self.data[slot][1]

    def stats(self) -> Any:
        return types.SimpleNamespace(**{**self.counts, "users": 1})

    def count(self, **more: int) -> None:
        for name, value in more.items():
            self.counts[name] += value

    def close(self) -> None:
        pass


@pytest.fixture
def fake_cache(monkeypatch: pytest.MonkeyPatch) -> type[FakeCache]:
    monkeypatch.setattr(FakeCache, "opened", {})
    monkeypatch.setattr(cache, "SharedByteCache", FakeCache, raising=False)
    monkeypatch.setattr(cache, "CacheFullError", FakeFullError, raising=False)
    monkeypatch.setattr(cache, "budget_bytes", lambda directory: FakeCache.room, raising=False)
    return FakeCache
