"""Every reader keeps the contract of `suites.readers`: packed sets, folders, and whatever wraps one of them."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites.readers import DTYPES, ReaderSuite
from suites.samples import Samples, Truth

import readers
from readers.augment import Resize
from readers.errors import UnknownNameError
from readers.headers import MEDIA, parse_header, parse_held
from readers.selection import Selectable

FORMATS = ("hdf5", "tfrecord", "tar")
INDICES = [20, 2, 2, -1, 17, 0, 5, 23, 8, 9, 11, 13]


def shape(image: bytes) -> tuple[int, int]:
    _, height, width, *_ = parse_held(image)
    return height, width


class OfThePackedSet(ReaderSuite):
    """Whose samples are those of the packed set."""

    @pytest.fixture
    def truth(self, samples: Samples) -> Truth:
        return samples.truth


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("backend", ["pread", "mmap"])
class TestPackedSets(OfThePackedSet):
    @pytest.fixture
    def reader(self, samples: Samples, to: str, backend: Any) -> Iterator[Any]:
        with readers.open(samples.packed(to), backend=backend, verify=True) as reader:
            yield reader


class TestFewOpenShards(OfThePackedSet):
    @pytest.fixture
    def reader(self, samples: Samples) -> Iterator[Any]:
        with readers.ShardReader(samples.packed(), open_shards=1) as reader:
            yield reader


class TestFolder(ReaderSuite):
    @pytest.fixture
    def reader(self, samples: Samples) -> Iterator[Any]:
        with readers.open_folder(samples.images) as reader:
            yield reader

    @pytest.fixture
    def truth(self, samples: Samples) -> Truth:
        return samples.of_folder


@pytest.mark.parametrize(("base", "nested"), [("hdf5", False), ("tar", True), ("folder", True)])
class TestSelections(ReaderSuite):
    """With repeats, in an order of its own; also a selection of a selection."""

    @pytest.fixture
    def reader(self, samples: Samples, base: str, nested: bool) -> Iterator[Any]:
        opened: Any = readers.open_folder(samples.images) if base == "folder" else readers.open(samples.packed(base))
        with opened:
            if nested:
                turned = opened.select(indices=range(len(opened) - 1, -1, -1))
                yield turned.select(indices=[len(opened) - 1 - i % len(opened) for i in INDICES])
            else:
                yield opened.select(indices=INDICES)

    @pytest.fixture
    def truth(self, samples: Samples, base: str) -> Truth:
        return (samples.of_folder if base == "folder" else samples.truth).take(INDICES)


class TestMappedSelection(ReaderSuite):
    """Whose indices are in a file."""

    @pytest.fixture
    def reader(self, samples: Samples, tmp_path: Path) -> Iterator[Any]:
        np.save(tmp_path / "indices.npy", np.array(INDICES) % 24)
        with readers.open(samples.packed()) as base:
            yield readers.SelectedReader(base, np.load(tmp_path / "indices.npy", mmap_mode="r"))

    @pytest.fixture
    def truth(self, samples: Samples) -> Truth:
        return samples.truth.take(INDICES)


@pytest.mark.parametrize(
    ("keep", "where"),
    [
        ("encoded", "file"),
        ("recoded:16@80", "file"),
        ("decoded:16", "file"),
        ("decoded:16", "memfd"),
        ("recoded:16@80", "half"),
        ("encoded", "half"),
        ("encoded", "folder"),
        ("recoded:16@80", "folder"),
        ("decoded:16", "nothing"),
    ],
)
class TestCached(ReaderSuite):
    """In a file and in memory without a name; of a half of the set, of a folder, and where nothing fits."""

    closed_while_read = False  # who closes a cache lets go of its memory

    @pytest.fixture
    def reader(self, samples: Samples, keep: str, where: str, place: dict[str, Any]) -> Iterator[Any]:
        base: Any = readers.open_folder(samples.images) if where == "folder" else readers.open(samples.packed())
        capacity = {"half": 0.5, "nothing": 0}.get(where, "auto")
        options = {"backend": "memfd"} if where == "memfd" else place
        with readers.cached(base, capacity, keep, check="first", **options) as reader:
            yield reader

    @pytest.fixture
    def truth(self, samples: Samples, keep: str, where: str) -> Truth:
        truth = samples.of_folder if where == "folder" else samples.truth
        if keep == "encoded":
            return truth
        form = readers.Recoded(16, 80) if keep.startswith("recoded") else readers.Decoded([Resize(16)])
        made = truth.recoded(lambda image: bytes(form.made(image)), shape)
        return Truth(**{**vars(made), "estimated": keep.startswith("recoded")})


@pytest.mark.parametrize("staged", ["partly", "not at all"])
class TestFallback(OfThePackedSet):
    """A copy that lacks shards, or has nothing yet."""

    @pytest.fixture
    def reader(self, samples: Samples, tmp_path: Path, staged: str) -> Iterator[Any]:
        source, local = samples.packed(), tmp_path / "local"
        local.mkdir()
        if staged == "partly":
            gone = shutil.ignore_patterns("*-000001.tar", "*-000003.tar")
            shutil.copytree(source, local, dirs_exist_ok=True, ignore=gone)
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


class Minimal(Selectable):
    """What somebody may write: everything in memory, pickled as it is."""

    def __init__(self, truth: Truth) -> None:
        self._columns = truth.fields
        self.fields, self.classes, self.keys = tuple(truth.fields), truth.classes, tuple(truth.keys)
        self.labels = np.array(truth.labels, np.int64)
        self.fingerprint = "a set of somebody's own"

    @property
    def info(self) -> readers.ImageInfo:
        return self.image_info(range(len(self)))

    def sizes(self, field: str = "image") -> Any:
        return np.array([len(data or b"") for data in self._column(field)], np.int64)

    def image_info(self, indices: Any) -> readers.ImageInfo:
        found = [(*parse_header(data)[1:], MEDIA.index("jpeg")) for data in self.read_many(indices)]
        columns = np.array(found, np.uint32).reshape(-1, len(DTYPES)).T
        return readers.ImageInfo(*(column.astype(kind) for column, kind in zip(columns, DTYPES, strict=True)))

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"Minimal({len(self)} samples)"

    def sample(self, index: int) -> readers.Sample:
        fields = {name: data for name in self.fields if (data := self._columns[name][self._checked(index)]) is not None}
        return readers.Sample(self.keys[index], None if self.labels[index] < 0 else int(self.labels[index]), fields)

    def read(self, index: int, field: str = "image") -> bytes:
        data = self._column(field)[self._checked(index)]
        if data is None:
            raise UnknownNameError(f"sample {index} has no field {field!r}")
        return data

    def read_many(self, indices: Any, field: str = "image") -> list[bytes]:
        return [self.read(i, field) for i in indices]

    def prefetch(self, indices: Any, field: str = "image") -> None:
        for i in indices:
            self._checked(i)

    def stream(self, indices: Any = None, field: str = "image") -> Iterator[bytes]:
        return (self.read(i, field) for i in (range(len(self)) if indices is None else indices))

    def close(self) -> None:
        pass

    def __enter__(self) -> Minimal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _column(self, field: str) -> list[bytes | None]:
        if field not in self.fields:
            raise UnknownNameError(f"no field {field!r}")
        return self._columns[field]

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} is outside the {len(self)}")
        return operator.index(index)


@pytest.mark.parametrize("wrapped", ["itself", "selected", "cached"])
class TestSomebodysOwn(ReaderSuite):
    """A reader from elsewhere is as good as ours, and so is what wraps it."""

    @pytest.fixture
    def reader(self, samples: Samples, wrapped: str, place: dict[str, Any]) -> Iterator[Any]:
        base = Minimal(samples.truth)
        made: Any = {"selected": lambda: base.select(indices=INDICES), "cached": lambda: readers.cached(base, **place)}
        with made.get(wrapped, lambda: base)() as reader:
            yield reader

    @pytest.fixture
    def truth(self, samples: Samples, wrapped: str) -> Truth:
        return samples.truth.take(INDICES) if wrapped == "selected" else samples.truth
