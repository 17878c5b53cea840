"""Every store keeps the contract of `suites.stores`; so does the smallest one that somebody may write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_servers import FileServer
from suites.stores import NAMES, SIZES, StoreSuite

from cache.remote.url import parse_url
from cache.stores import Files, Shards, Store
from cache.stores.copied import Copied
from cache.stores.remote import RemoteFiles
from readers.errors import RemoteError, StaleIndexError

SHARDS = Shards(NAMES, SIZES)


class Smallest(Store):
    """A whole file for each extent."""

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
    def open(self, root: Path) -> Store:
        return Smallest(root)


class TestFiles(StoreSuite):
    def open(self, root: Path) -> Store:
        return Files(root, SHARDS)


class TestMappedFiles(StoreSuite):
    def open(self, root: Path) -> Store:
        return Files(root, SHARDS, mapped=True)


class TestFilesOfWhichOneIsOpen(StoreSuite):
    def open(self, root: Path) -> Store:
        return Files(root, SHARDS, open_shards=1)


class TestCopied(StoreSuite):
    """A copy of some shards over its source."""

    def open(self, root: Path) -> Store:
        copy = root.parent / "copy"
        copy.mkdir(exist_ok=True)
        shutil.copy(root / NAMES[0], copy)
        return Copied(Files(copy, SHARDS), Files(root, SHARDS))


class TestCopiedOverSomebodysOwn(StoreSuite):
    def open(self, root: Path) -> Store:
        return Copied(Files(root.parent / "nothing", SHARDS), Smallest(root))


class TestRemote(StoreSuite):
    """From a web server."""

    beyond = (StaleIndexError, RemoteError)  # fewer bytes than were asked for may be a cut connection

    @pytest.fixture(autouse=True)
    def served(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("PACKER_REMOTE_RETRIES", "1")
        server = FileServer(root)
        self.url = parse_url("http://{}:{}".format(*server.address))
        yield
        server.close()

    def open(self, root: Path) -> Store:
        return RemoteFiles(self.url, SHARDS)
