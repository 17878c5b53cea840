"""All stores keep the contract of `packer.testing.stores`, and so does a minimal store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache.errors import StaleIndexError
from cache.remote import Patience, RemoteUrl, parse_url
from cache.serving import Server, ServeSettings
from cache.stores import Buffer, Files, Shards, Store
from cache.stores.base import Joined, Part, Payloads
from cache.stores.copied import Copied, Neighbours, ShardOwners
from cache.stores.remote import RemoteFiles
from packer.testing.stores import NAMES, SIZES, StoreSuite
from readers.caching.form import Encoded
from readers.caching.store import EVERYTHING, Cached, CacheSettings, Slots, Subset
from readers.table import MemoryColumns

LISTED = Shards(NAMES, SIZES)


class Smallest(Store):
    """A store with the only required method."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
        try:
            data = (self.root / NAMES[shard]).read_bytes()
        except OSError as error:
            raise StaleIndexError(f"{NAMES[shard]}: {error.strerror}") from error
        if len(data) != SIZES[shard] or not 0 <= offset <= offset + length <= len(data):
            raise StaleIndexError(f"{NAMES[shard]}: {length} bytes at {offset} are not in its {len(data)}")
        return data[offset : offset + length]


class TestSmallest(StoreSuite):
    def open(self, root: Path) -> Any:
        return Smallest(root)


@pytest.mark.parametrize("options", [{"open_shards": 1}, {"mapped": True, "open_shards": 2}])
class TestFiles(StoreSuite):
    @pytest.fixture(autouse=True)
    def _options(self, options: dict[str, Any]) -> None:
        self.options = options

    def open(self, root: Path) -> Any:
        return Files(root, LISTED, **self.options)


@pytest.mark.parametrize("there", [[], [0, 1]])
class TestCopied(StoreSuite):
    """A copy with none, some or all of the shards; a shard that the copy lacks is read from the source."""

    @pytest.fixture(autouse=True)
    def _copy(self, there: list[int], tmp_path: Path, root: Path) -> None:
        self.copy = tmp_path / "copy"
        for name in (NAMES[number] for number in there):
            (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
            (self.copy / name).write_bytes((root / name).read_bytes())

    def open(self, root: Path) -> Any:
        return Copied(Files(self.copy, LISTED), Files(root, LISTED))

    @pytest.mark.parametrize("damage", ["gone"])
    def test_a_replaced_shard(self, root: Path, bytes_at: Any, damage: str, there: list[int]) -> None:
        if 1 not in there:
            super().test_a_replaced_shard(root, bytes_at, damage)
            return
        expected = bytes_at([(1, 5, 10)])
        (root / NAMES[1]).unlink()
        with self.open(root) as store:
            assert [bytes(store.read_one(1, 1, 5, 10))] == expected, "the copy has the shard"


class TestRemoteFiles(StoreSuite):
    @pytest.fixture(autouse=True)
    def _server(self, web: Any, root: Path, tmp_path: Path) -> None:
        self.url = web.url
        assert (tmp_path / "shards").is_dir()

    @pytest.fixture
    def packed(self, root: Path) -> Path:
        return root

    def open(self, root: Path) -> Any:
        return RemoteFiles(parse_url(f"{self.url}/{root.name}"), LISTED)


class _Shards:
    """The shards by number, as `cache.serving` serves them."""

    def __init__(self, root: Path) -> None:
        self.store = Files(root, LISTED)

    def size(self, name: str) -> int | None:
        return SIZES[int(name)] if name in ("0", "1", "2", "3") else None

    def read(self, name: str, start: int, stop: int) -> list[Buffer]:
        return [self.store.read_one(0, int(name), start, stop - start)]

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True)
class _Connect:
    """Connects to the nodes that serve the shards; the first node does not answer."""

    ports: tuple[int, ...]

    def __call__(self, node: int) -> Store | None:
        url = RemoteUrl("http", f"127.0.0.1:{self.ports[node]}", f"set-3-{node}", bearer="0" * 16)
        return RemoteFiles(url, Shards("0123", SIZES), patience=Patience(2.0, 0), gap_bytes=0) if node else None


@pytest.mark.filterwarnings("ignore:node . is not asked")
class TestNeighbours(StoreSuite):
    """Three nodes: this node, a node that answers for half of the shards, and a node that does not answer."""

    @pytest.fixture(autouse=True)
    def _nodes(self, root: Path) -> Iterator[None]:
        servers = [Server(_Shards(root), ServeSettings(f"set-3-{node}", "0" * 16, "127.0.0.1")) for node in range(3)]
        self.ports = tuple(server.port for server in servers)
        yield
        for server in servers:
            server.close()

    def open(self, root: Path) -> Any:
        owners = ShardOwners(np.array([1, 1, 0, 2]))
        return Neighbours(Files(root, LISTED), 2, owners, _Connect(self.ports))


class TestJoined(StoreSuite):
    """The first two shards in one store, the others in another."""

    def open(self, root: Path) -> Any:
        parts = [Files(root, Shards(NAMES[:2], SIZES[:2])), Files(root, Shards(NAMES[2:], SIZES[2:]))]
        return Joined([Part(store, 2, 1 << 40) for store in parts])


@pytest.mark.parametrize("check", ["never", "always"])
class TestCached(StoreSuite):
    """A cache with slots for some of the rows."""

    @pytest.fixture(autouse=True)
    def _check(self, check: Any) -> None:
        self.check: Any = check

    def open(self, root: Path) -> Any:
        slots = Slots(("image",), (0,), Payloads(), Subset(range(1_200_000)))
        shared = cache.SharedByteCache.open(
            fingerprint=str(root), kind="contract", slots=len(slots), capacity_bytes=1 << 20, directory=root.parent
        )
        columns = MemoryColumns([], {})
        return Cached(Files(root, LISTED), shared, slots, CacheSettings(EVERYTHING), Encoded(), columns, self.check)


def test_numbers_of_payloads_are_distinct_and_reversible() -> None:
    payloads, samples = Payloads(3), np.arange(4)
    numbers = np.stack([payloads.number(samples, field) for field in range(3)], 1).ravel()
    assert numbers.tolist() == list(range(12))
    assert payloads.sample(numbers).tolist() == np.repeat(samples, 3).tolist()
    assert payloads.field(numbers).tolist() == [0, 1, 2] * 4
    assert (payloads.number(2, 1), payloads.sample(7), payloads.field(7)) == (7, 2, 1)
