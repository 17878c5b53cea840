"""The promises of every backend of the shared cache. A subclass opens the backend."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache import SharedByteCache
from cache.errors import ClosedCacheError
from packer.testing.children import in_child

HAS_MPI = importlib.util.find_spec("mpi4py") is not None
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
SLOTS = 40
CAPACITY = 1 << 20


def sample(slot: int, length: int | None = None) -> bytes:
    """Bytes that differ from those of every other slot."""
    length = 100 + 997 * slot % 5000 if length is None else length
    return np.random.default_rng(slot).bytes(length)


class SharedCacheSuite:
    def open(self, **options: Any) -> SharedByteCache:
        raise NotImplementedError

    @pytest.fixture
    def cache(self) -> Any:
        with self.open() as cache:
            yield cache

    def test_get_returns_the_bytes_that_were_put(self, cache: SharedByteCache) -> None:
        assert cache.slots == SLOTS and cache.capacity_bytes == CAPACITY and cache.used_bytes == 0 and not cache.full
        for slot in range(SLOTS):
            assert cache.get(slot) is None and not cache.has(slot) and not cache.check(slot)
            assert cache.put(slot, sample(slot))
            assert cache.get(slot) == sample(slot) and cache.has(slot) and cache.check(slot)
            assert not cache.put(slot, b"others") and cache.get(slot) == sample(slot)
        assert cache.present().all() and cache.stats().puts == SLOTS
        assert cache.stats().put_bytes == sum(len(sample(slot)) for slot in range(SLOTS)) <= cache.used_bytes

    def test_any_buffer(self, cache: SharedByteCache) -> None:
        pixels = np.arange(48, dtype=np.uint16).reshape(4, 4, 3)
        for slot, data in enumerate([b"", b"x", bytearray(b"abc"), memoryview(b"abcd")[1:3], pixels, pixels[:0]]):
            assert cache.put(slot, data)
            assert cache.get(slot) == memoryview(data).tobytes()
        with pytest.raises(TypeError):
            cache.put(7, pixels[:, ::2])
        assert cache.get(7) is None and cache.put(7, b"after all") and cache.get(np.int64(7)) == b"after all"

    def test_views_are_read_only_and_stay(self) -> None:
        cache = self.open()
        cache.put(1, b"stays")
        view = cache.get(1)
        assert view is not None and view.readonly and isinstance(view, memoryview)
        cache.drop(1)
        cache.put(1, b"other")
        cache.close()
        del cache
        gc.collect()
        assert view == b"stays"

    def test_slots_out_of_range(self, cache: SharedByteCache) -> None:
        cache.put(SLOTS - 1, b"last")
        for slot in (-1, -SLOTS, -SLOTS - 1, SLOTS, 1 << 70):
            for call in (cache.get, cache.has, cache.check, cache.drop, lambda slot: cache.put(slot, b"")):
                with pytest.raises(IndexError):
                    call(slot)

    def test_dropping_frees_the_slot_for_new_bytes(self, cache: SharedByteCache) -> None:
        cache.put(3, b"wrong")
        cache.drop(3)
        cache.drop(3)
        assert cache.get(3) is None and not cache.has(3) and not cache.present().any()
        assert cache.put(3, b"right") and cache.get(3) == b"right" and cache.stats().dropped == 1

    def test_bytes_that_do_not_fit_are_not_stored(self, cache: SharedByteCache) -> None:
        taken = [slot for slot in range(SLOTS) if cache.put(slot, sample(slot, 100_000))]
        assert taken == list(range(10)) and cache.full and cache.used_bytes <= CAPACITY
        assert cache.put(20, sample(20, 1000)), "a smaller sample does not fit any more"
        assert not cache.put(21, bytes(CAPACITY + 1))
        assert [slot for slot in range(SLOTS) if cache.get(slot) is not None] == [*taken, 20]

    def test_counts(self, cache: SharedByteCache) -> None:
        cache.count(hits=3, hit_bytes=300, misses=1)
        cache.count(passed=2, hits=1)
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.hit_bytes, stats.passed, stats.users) == (4, 1, 300, 2, 1)

    def test_after_close(self) -> None:
        cache = self.open()
        cache.put(0, b"x")
        cache.close()
        cache.close()
        for call in (cache.get, cache.has, cache.check, cache.drop, lambda slot: cache.put(slot, b"")):
            with pytest.raises(ClosedCacheError):
                call(0)
        for call in (cache.stats, cache.present, cache.count, lambda: cache.full, lambda: cache.used_bytes):
            with pytest.raises(ClosedCacheError):
                call()
        assert "closed" in repr(cache)

    def test_a_forked_child_is_a_user(self, cache: SharedByteCache) -> None:
        cache.put(0, b"of the parent")

        def child() -> None:
            assert cache.get(0) == b"of the parent" and cache.put(1, b"of the child")
            assert cache.stats().users == 2
            cache.count(hits=5)
            cache.close()

        in_child(child)
        assert cache.get(1) == b"of the child" and cache.put(2, b"and on") and cache.get(2) == b"and on"
        assert cache.stats().users == 1 and cache.stats().hits == 5

    def test_threads(self, cache: SharedByteCache) -> None:
        """Each slot is filled once."""
        won: list[int] = []
        begin = threading.Barrier(4)

        def work() -> None:
            begin.wait(300)
            for slot in range(SLOTS):
                if cache.put(slot, sample(slot)):
                    won.append(slot)
                cache.count(misses=1)

        crew = [threading.Thread(target=work) for _ in range(4)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(300)
        assert sorted(won) == list(range(SLOTS)) and cache.stats().misses == 4 * SLOTS
        assert all(cache.get(slot) == sample(slot) for slot in range(SLOTS))
