"""Every reader keeps the contract of `packer.testing.readers`: packed sets, folders, and readers on top of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import readers
from cache.stores import Store
from packer.testing.readers import ReaderSuite
from packer.testing.samples import Samples, Truth
from readers.augment import Resize
from readers.opening.packed import open_packed

INDICES = [20, 2, 2, -1, 17, 0, 5, 23, 8, 9, 11, 13]


class OfThePackedSet(ReaderSuite):
    """A reader with the samples of the packed set."""

    @pytest.fixture
    def truth(self, samples: Samples) -> Truth:
        return samples.truth


@pytest.mark.parametrize(("to", "backend"), [("hdf5", "pread"), ("tfrecord", "mmap"), ("tar", "pread")])
class TestPackedSets(OfThePackedSet):
    @pytest.fixture
    def reader(self, samples: Samples, to: str, backend: Any) -> Iterator[Any]:
        with readers.open(samples.packed(to), backend=backend, verify=True) as reader:
            yield reader


class TestFewOpenShards(OfThePackedSet):
    @pytest.fixture
    def reader(self, samples: Samples) -> Iterator[Any]:
        with open_packed(samples.packed(), backend="mmap", open_shards=1) as reader:
            yield reader


class TestFolder(ReaderSuite):
    @pytest.fixture
    def reader(self, samples: Samples) -> Iterator[Any]:
        with readers.open_folder(samples.images) as reader:
            yield reader

    @pytest.fixture
    def truth(self, samples: Samples) -> Truth:
        return samples.of_folder


@pytest.mark.parametrize(("base", "how"), [("hdf5", "once"), ("folder", "twice"), ("tar", "mapped")])
class TestSelections(ReaderSuite):
    """With repeats, in another order; a selection of a selection, and a selection whose indices are in a file."""

    @pytest.fixture
    def reader(self, samples: Samples, base: str, how: str, tmp_path: Path) -> Iterator[Any]:
        opened: Any = readers.open_folder(samples.images) if base == "folder" else readers.open(samples.packed(base))
        with opened:
            if how == "once":
                yield opened.select(indices=INDICES)
            elif how == "twice":
                turned = opened.select(indices=range(len(opened) - 1, -1, -1))
                yield turned.select(indices=[len(opened) - 1 - i % len(opened) for i in INDICES])
            else:
                np.save(tmp_path / "indices.npy", np.array(INDICES) % 24)
                rows = np.load(tmp_path / "indices.npy", mmap_mode="r")
                yield readers.Reader(opened.table.take(rows), opened.store)

    @pytest.fixture
    def truth(self, samples: Samples, base: str, how: str) -> Truth:
        return (samples.of_folder if base == "folder" else samples.truth).take(INDICES)


@pytest.mark.parametrize(
    ("keep", "where"),
    [
        ("encoded", "file"),
        ("decoded:16", "memfd"),
        ("recoded:16@80", "half"),
        ("encoded", "folder"),
        ("recoded:16@80", "selection"),
        ("decoded:16", "nothing"),
    ],
)
class TestCached(ReaderSuite):
    """In a file and in unnamed memory; of half of the set, a folder, a selection, and where no sample fits."""

    closed_while_read = False  # closing a cache releases its memory

    @pytest.fixture
    def reader(self, samples: Samples, keep: str, where: str, place: dict[str, Any]) -> Iterator[Any]:
        base: Any = readers.open_folder(samples.images) if where == "folder" else readers.open(samples.packed())
        base = base.select(indices=INDICES) if where == "selection" else base
        capacity = {"half": 0.5, "nothing": 0}.get(where, "auto")
        options = {"backend": "memfd"} if where == "memfd" else place
        with readers.cached(base, capacity, keep, check="first", **options) as reader:
            yield reader

    @pytest.fixture
    def truth(self, samples: Samples, keep: str, where: str) -> Truth:
        truth = samples.of_folder if where == "folder" else samples.truth
        truth = truth.take(INDICES) if where == "selection" else truth
        if keep == "encoded":
            return truth
        form = readers.Recoded(16, 80) if keep.startswith("recoded") else readers.Decoded([Resize(16)])
        return truth.recoded(lambda image: bytes(form.convert(image)), estimated=keep.startswith("recoded"))


class TestFallback(OfThePackedSet):
    """A copy that lacks shards."""

    @pytest.fixture
    def reader(self, samples: Samples, tmp_path: Path) -> Iterator[Any]:
        source, local = samples.packed(), tmp_path / "local"
        shutil.copytree(source, local, ignore=shutil.ignore_patterns("*-000001.tar", "*-000003.tar"))
        assert len(list(local.glob("*.tar"))) == 2
        with readers.open(local, fallback=source) as reader:
            yield reader


class TestRemote(OfThePackedSet):
    """From a web server."""

    @pytest.fixture
    def packed(self, samples: Samples) -> Path:
        return samples.packed()

    @pytest.fixture
    def reader(self, packed: Path, web: Any) -> Iterator[Any]:
        with readers.open(f"{web.url}/{packed.name}") as reader:
            yield reader


class InMemory(Store):
    """A user-defined store: payloads by row, pickled unchanged."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.payloads = payloads

    def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
        return self.payloads[row]


def reader_of_payloads(truth: Truth) -> readers.Reader:
    sizes = {name: [-1 if data is None else len(data) for data in column] for name, column in truth.fields.items()}
    payloads = [data or b"" for row in zip(*truth.fields.values(), strict=True) for data in row]
    table = readers.Table.of(truth.keys, truth.labels, truth.classes, sizes, title="a custom set")
    return readers.Reader(table, InMemory(payloads))


@pytest.mark.parametrize("wrapped", ["itself", "cached"])
class TestOwnStores(ReaderSuite):
    """A reader over a user-defined store keeps the contract, and so do readers on top of it."""

    closed_while_read = False  # as in TestCached

    @pytest.fixture
    def reader(self, samples: Samples, wrapped: str, place: dict[str, Any]) -> Iterator[Any]:
        base = reader_of_payloads(samples.truth)
        with base if wrapped == "itself" else readers.cached(base, **place) as reader:
            yield reader

    @pytest.fixture
    def truth(self, samples: Samples, wrapped: str) -> Truth:
        return samples.truth
