"""The test suite of stores.

A store returns the bytes at extents (row, shard, offset, length); row is a number that caches use as a key. `read`
returns several in the requested order, `read_one` a single one. `prefetch` announces extents that will be read, and has
no other effect. Returned views are read-only and never change.

A shard that is missing, or whose size has changed since the store was opened, raises StaleIndexError, and so does an
extent beyond the end of its shard; a store never returns wrong or fewer bytes, or raises another error. Other shards
stay readable. Negative offsets and lengths are not part of the contract.

Stores pickle as the arguments with which they were opened. They can be shared by threads and used in forked children,
and a closed store opens again at the next read.
"""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.errors import StaleIndexError
from cache.stores import Extents, Store
from packer.testing.children import forked

__all__ = ["NAMES", "SHARDS", "SIZES", "StoreSuite", "extents"]

# Shards of a few pages, many pages, one byte, and none; one is in a folder.
SHARDS = {"a.bin": 10_000, "folder/b.bin": 300_000, "c.bin": 1, "d.bin": 0}
NAMES, SIZES = tuple(SHARDS), tuple(SHARDS.values())


def extents(places: Iterable[tuple[int, int, int]]) -> Extents:
    """Extents of (shard, offset, length). Rows are derived from these, so that repeated places have equal rows."""
    columns = np.array([*places], np.int64).reshape(-1, 3).T
    row = columns[0] * 1_000_003 + columns[1] * 1009 + columns[2]
    return Extents(row, *columns)


def some(seed: int, count: int) -> list[tuple[int, int, int]]:
    """Random places in the shards: adjacent and distant, overlapping, empty, and up to the ends of shards."""
    rng = random.Random(seed)
    places = []
    for _ in range(count):
        shard = rng.choice((0, 1, 1, 1, 2, 3))
        offset = rng.choice((0, SIZES[shard], rng.randint(0, SIZES[shard])))
        length = min(SIZES[shard] - offset, rng.choice((0, 1, 100, 5000, 300_000)))
        places.append((shard, offset, length))
    return places


def digests(store: Store, places: list[tuple[int, int, int]]) -> list[bytes]:
    """The bytes at some places, read all at once; reading them one by one must give the same."""
    payloads = [bytes(data) for data in store.read(extents(places))]
    assert payloads == [
        bytes(store.read_one(*extent)) for extent in zip(*(c.tolist() for c in extents(places)), strict=True)
    ]
    return payloads


class StoreSuite:
    """The tests of a store. Subclasses define `open`, for the shards NAMES of SIZES bytes below a folder.

    beyond: the exception for an extent beyond the end of its shard.
    """

    beyond: type[Exception] | tuple[type[Exception], ...] = StaleIndexError

    def open(self, root: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        """The folder of the shards, which tests may damage."""
        root = tmp_path / "shards"
        for number, (name, size) in enumerate(SHARDS.items()):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(np.random.default_rng(number).bytes(size))
        return root

    @pytest.fixture
    def store(self, root: Path) -> Any:
        with self.open(root) as store:
            yield store

    @pytest.fixture
    def bytes_at(self, root: Path) -> Callable[..., list[bytes]]:
        """A function that returns the expected bytes at some places."""
        whole = [(root / name).read_bytes() for name in NAMES]
        return lambda places: [whole[shard][offset : offset + length] for shard, offset, length in places]

    # --- bytes ----------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("seed", range(2))
    def test_results_are_in_the_requested_order(self, store: Any, bytes_at: Any, seed: int) -> None:
        places = some(seed, 60)
        for _ in range(2):  # the second time, some stores have a cache
            assert [bytes(data) for data in store.read(extents(places))] == bytes_at(places)
            assert digests(store, places[:9] * 2) == bytes_at(places[:9] * 2)

    def test_no_samples_and_all_samples(self, store: Any, bytes_at: Any) -> None:
        assert list(store.read(extents([]))) == [] and store.prefetch(extents([])) is None
        whole = [(shard, 0, size) for shard, size in enumerate(SIZES)]
        assert digests(store, whole) == bytes_at(whole)
        ends = [(shard, size, 0) for shard, size in enumerate(SIZES)]
        assert digests(store, ends) == [b""] * len(ends)

    def test_announced_reads(self, store: Any, bytes_at: Any) -> None:
        places = some(5, 40)
        assert store.prefetch(extents(places + places[:3])) is None
        assert digests(store, places[::-1]) == bytes_at(places[::-1])
        store.prefetch(extents(places))
        store.close()
        store.prefetch(extents(places))
        assert digests(store, places) == bytes_at(places)

    def test_views_are_stable_and_read_only(self, store: Any, bytes_at: Any) -> None:
        places = some(6, 30)
        views = [*store.read(extents(places)), store.read_one(1, 0, 100, 50)]
        for seed in range(4):
            store.read(extents(some(seed, 30)))
        store.close()
        gc.collect(1)
        assert [bytes(view) for view in views] == bytes_at([*places, (0, 100, 50)])
        assert all(memoryview(view).readonly for view in views)

    # --- processes and threads ------------------------------------------------------------------------------------
    def test_in_a_spawned_process(self, store: Any, bytes_at: Any, elsewhere: Callable[..., Any]) -> None:
        places = some(7, 20)
        store.read(extents(places[:3]))
        assert elsewhere(digests, store, places) == bytes_at(places) == digests(store, places)

    def test_in_a_forked_child(self, store: Any, bytes_at: Any) -> None:
        places = some(8, 20)
        expected = bytes_at(places)
        store.read(extents(places[:3]))
        store.prefetch(extents(places))

        def child() -> None:
            assert digests(store, places) == expected
            store.close()

        with forked(child):
            assert digests(store, places) == expected

    def test_threads(self, store: Any, bytes_at: Any) -> None:
        def work(seed: int) -> bool:
            places = some(seed, 20)
            store.prefetch(extents(places[::2]))
            return bool(digests(store, places) == bytes_at(places))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8), timeout=300))

    def test_closed_and_read_again(self, store: Any, bytes_at: Any) -> None:
        places = some(9, 10)
        for again in (store, store, pickle.loads(pickle.dumps(store))):
            again.close()
            again.close()
            assert digests(again, places) == bytes_at(places)
        again.close()

    # --- errors ---------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize(("offset", "length"), [(9_999, 2), (10_000, 1), (0, 10_001), (1 << 62, 1)])
    def test_beyond_the_end_of_a_shard(self, store: Any, bytes_at: Any, offset: int, length: int) -> None:
        for call in (
            lambda: store.read_one(1, 0, offset, length),
            lambda: store.read(extents([(1, 5, 5), (0, offset, length)])),
        ):
            with pytest.raises(self.beyond):
                call()
        assert digests(store, [(0, 0, 9)]) == bytes_at([(0, 0, 9)])

    @pytest.mark.parametrize("damage", ["cut", "empty", "longer", "gone", "a folder"])
    def test_a_replaced_shard(self, root: Path, bytes_at: Any, damage: str) -> None:
        path = root / NAMES[1]
        data = path.read_bytes()
        store = self.open(root)
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes({"cut": data[:-1], "empty": b"", "longer": data + b"x"}[damage])
        calls: list[Callable[[], object]] = [
            lambda: store.read_one(1, 1, 0, 10),
            lambda: store.read(extents([(0, 0, 5), (1, 299_000, 1000)])),
            lambda: pickle.loads(pickle.dumps(store)).read_one(2, 1, 5, 10),
        ]
        for call in calls:
            with pytest.raises(StaleIndexError, match=r"b\.bin"):
                call()
        assert digests(store, [(0, 3, 9), (2, 0, 1)]) == bytes_at([(0, 3, 9), (2, 0, 1)]), "other shards are whole"
        store.close()
