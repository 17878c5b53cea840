"""What a source promises: a quick listing of its samples, and their bytes, read in the worker.

`list` looks at names and sizes only and runs once. `open` gives, in each worker, something that reads the samples of
a slice of that listing into the worker's arena. A source object is small and picklable.
"""

from __future__ import annotations

import itertools
import os
import pickle
import posixpath
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from readers.sample import Buffer
from readers.strings import NamesBuilder, Strings
from readers.tree import Keys, TreeNames

__all__ = [
    "Arena",
    "FieldNames",
    "ListingBuilder",
    "Objects",
    "Places",
    "Slice",
    "SomeSamples",
    "Source",
    "SourceListing",
    "SourceReader",
    "SplitListing",
    "StrayReader",
    "check_names",
    "safe_name",
]


_ARENA_BYTES = 2 << 20
_BLOCK_SAMPLES = 1024
_PLAIN = 3  # the last protocol of pickle without frames, which are longer than a place


class Arena:
    """Memory of a worker for samples, `size` bytes used from front to back, again and again; a larger sample grows it.

    Writers keep references to payloads until they are flushed, so `flush` is called before the memory is used again.
    """

    __slots__ = ("_block", "_flush", "_used")

    def __init__(self, flush: Callable[[], None], size: int = _ARENA_BYTES) -> None:
        self._block = memoryview(bytearray(size))
        self._used = 0
        self._flush = flush

    def begin(self, size: int) -> None:
        """Make room for a sample of `size` bytes, which may overwrite everything taken before."""
        if self._used + size > len(self._block):
            self._flush()
            self._used = 0
            if size > len(self._block):
                self._block = memoryview(bytearray(size))

    def rest(self) -> memoryview:
        """The free part, to read into; then `take` what was read."""
        return self._block[self._used :]

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        start = self._used
        self._used = start + size
        return self._block[start : start + size]


class Places(Protocol):
    """Where each sample is; slices are lists."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def take(self, indices: npt.NDArray[np.int64]) -> Places:
        """The places at `indices`."""


class Slice(NamedTuple):
    """Some samples of a split, as a worker gets them: parallel lists.

    names[i]: original file name of each field, "" for none. bytes[i]: of all fields together, 0 if unknown.
    places[i]: whatever the source's reader needs to find the sample.
    """

    keys: Sequence[str]
    labels: Sequence[int]
    names: Sequence[tuple[str, ...]]
    bytes: Sequence[int]
    places: Sequence[Any]


class Objects(Sequence[Any]):
    """A column of small objects of any kind, each pickled: some 20 bytes, where a tuple of Python has 100."""

    __slots__ = ("pickles",)

    def __init__(self, pickles: Strings) -> None:
        self.pickles = pickles

    def __len__(self) -> int:
        return len(self.pickles)

    @classmethod
    def of(cls, values: Iterable[Any]) -> Objects:
        """A column of these."""
        builder = _Pickles()
        for value in values:
            builder.add(value)
        return builder.build()

    def __getitem__(self, index: Any) -> Any:
        n = len(self)
        first, stop, step = index.indices(n) if isinstance(index, slice) else (i := range(n)[index], i + 1, 1)
        bounds = self.pickles.offsets[first : max(first, stop) + 1].tolist()
        data = self.pickles.blob[bounds[0] : bounds[-1]].tobytes()
        found = [pickle.loads(data[a - bounds[0] : b - bounds[0]]) for a, b in itertools.pairwise(bounds)]
        return found[::step] if isinstance(index, slice) else found[0]

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), _BLOCK_SAMPLES):
            yield from self[first : first + _BLOCK_SAMPLES]

    def take(self, indices: npt.NDArray[np.int64]) -> Objects:
        return Objects(self.pickles.take(indices))


class _Pickles:
    """A column of objects that grows."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("Q", (0,))

    def add(self, value: Any) -> None:
        self._data += pickle.dumps(value, _PLAIN)
        self._ends.append(len(self._data))

    def build(self) -> Objects:
        return Objects(Strings(np.frombuffer(self._data, np.uint8), np.frombuffer(self._ends, np.uint64)))


class FieldNames(Sequence["tuple[str, ...]"]):
    """The file names of every sample, one for each field."""

    __slots__ = ("columns",)

    def __init__(self, *columns: Strings | TreeNames) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: Any) -> Any:
        found = [column[index] for column in self.columns]
        return list(zip(*found, strict=True)) if isinstance(index, slice) else tuple(found)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return zip(*self.columns, strict=True)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: npt.NDArray[np.int64]) -> FieldNames:
        return FieldNames(*(column.take(indices) for column in self.columns))


@dataclass(slots=True, eq=False)
class SplitListing:
    """All samples of one split, in the order they will be packed, as columns; `ListingBuilder` fills them.

    root: the folder the split came from. keys, names, bytes, places: as in `Slice`. labels: -1 for none. stamps:
    modification times or other marks of change, part of what makes two listings the same.
    """

    root: str
    keys: Strings | Keys
    labels: npt.NDArray[np.integer[Any]]
    names: FieldNames
    bytes: npt.NDArray[np.int64]
    places: Places
    stamps: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SplitListing):
            return NotImplemented
        same = (self.root, len(self)) == (other.root, len(other)) and np.array_equal(self.stamps, other.stamps)
        return same and all(mine == its for mine, its in zip(self.slices(), other.slices(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: npt.NDArray[np.int64]) -> SplitListing:
        """Some of the samples, in the order of `indices`."""
        return SplitListing(
            self.root,
            self.keys.take(indices),
            self.labels[indices],
            self.names.take(indices),
            self.bytes[indices],
            self.places.take(indices),
            self.stamps[indices],
        )

    def slices(self) -> Iterator[Slice]:
        """All samples as Python objects, a thousand at a time, so that millions take little memory."""
        for first in range(0, len(self), _BLOCK_SAMPLES):
            part = slice(first, first + _BLOCK_SAMPLES)
            labels, sizes = self.labels[part].tolist(), self.bytes[part].tolist()
            yield Slice(self.keys[part], labels, self.names[part], sizes, self.places[part])


class SomeSamples:
    """The samples of a listing that a worker packs. They are picked when they are sent to it, or looked at."""

    def __init__(self, listing: SplitListing, indices: npt.NDArray[np.int64] | range | None = None) -> None:
        self._listing, self._indices = listing, indices

    def slices(self) -> Iterator[Slice]:
        """All of them, a thousand at a time."""
        return self._picked().slices()

    def _picked(self) -> SplitListing:
        indices = self._indices
        if indices is None:
            return self._listing
        if isinstance(indices, range):
            indices = np.arange(indices.start, indices.stop, indices.step)
        return self._listing.take(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return SomeSamples, (self._picked(),)


class ListingBuilder:
    """Fills the columns of a split by appending, in no more memory than they take."""

    def __init__(self, fields: int = 1) -> None:
        """fields: how many file names a sample has."""
        self._keys = NamesBuilder()
        self._names = [NamesBuilder() for _ in range(fields)]
        self._places = _Pickles()
        self._labels, self._bytes, self._stamps = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._labels)

    def add(
        self, names: Sequence[str], place: Any, size: int, stamp: int = 0, *, key: str = "", label: int = -1
    ) -> None:
        """One sample. place: a small object that can be pickled; size: its bytes, 0 if unknown."""
        for column, name in zip(self._names, names, strict=True):
            column.append(name)
        self._keys.append(key)
        self._places.add(place)
        self._bytes.append(size)
        self._labels.append(label)
        self._stamps.append(stamp)

    def build(self, root: str = "") -> SplitListing:
        """The listing, over the memory of this builder, which can be filled no further."""
        return SplitListing(
            root,
            self._keys.build(),
            np.frombuffer(self._labels, np.int64),
            FieldNames(*(names.build() for names in self._names)),
            np.frombuffer(self._bytes, np.int64),
            self._places.build(),
            np.frombuffer(self._stamps, np.int64),
        )


@dataclass(slots=True)
class SourceListing:
    """What a source holds.

    left_out: (path, reason) of files that are not samples. skip_strays: a file that turns out to be no image, and is
    not named like one, is left out rather than an error; the source's reader is a `StrayReader`. shuffles: samples can
    be read in any order at no great cost.
    """

    splits: dict[str, SplitListing]
    fields: Mapping[str, str]
    classes: tuple[str, ...] = ()
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skip_strays: bool = False
    shuffles: bool = True


class SourceReader(Protocol):
    """Reads samples in a worker."""

    def read(self, place: Any, arena: Arena) -> Sequence[Buffer | None]:
        """The payload of every field, None where absent; in the arena or in memory of its own.

        Raises BadSampleError (this sample cannot be had) or SourceError (nothing can).
        """

    def __enter__(self) -> SourceReader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StrayReader(SourceReader, Protocol):
    """A reader of files of which some may be no image: with `skip_strays`, they are looked at before they are read."""

    def head(self, place: Any) -> bytes:
        """The first bytes of a file, up to HEAD_BYTES of `packer.sources.contents`. Raises as `read` does."""


class Source(Protocol):
    """Where samples come from."""

    @property
    def title(self) -> str:
        """What it is, for people and for dataset.json."""

    def list(self, split: str | None) -> SourceListing:
        """Every sample of every split, or of the one split named. Raises SourceError."""

    def open(self) -> SourceReader: ...

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        """Every file that its samples are read from, so that none of them is overwritten by what is made of them."""


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that no container can keep: not UTF-8, NUL, absolute, or with a `..` in them."""
    waiting = iter(names)
    while block := list(itertools.islice(waiting, _BLOCK_SAMPLES)):
        text = "\0".join(["", *block, ""])
        doubtful = not text.isascii() or ".." in text or "\0/" in text or "\0\0" in text
        if doubtful or text.count("\0") != len(block) + 1:
            for name in block:
                _check_name(name, where)


def _check_name(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{where}: the name {name!r} is not UTF-8; rename it (see convmv)") from error
    if not name or "\0" in name or name[0] == "/" or (".." in name and ".." in PurePosixPath(name).parts):
        raise SourceError(
            f"{where}: {name!r} cannot be the name of a sample: empty, absolute, or leads out of its folder"
        )


def safe_name(path: str) -> str:
    """`path` without `.`, `//` and inner `..`, a leading "/" and leading `..`; "" where nothing is left.

    "./a//b.jpg" -> "a/b.jpg", "/data/b.jpg" -> "data/b.jpg", "../../b.jpg" -> "b.jpg", "a/../b.jpg" ->
    "b.jpg".
    """
    parts = posixpath.normpath(path).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))
