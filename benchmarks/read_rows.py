"""Readers of packed samples: what a row of `read.py` is, the limits, and ours.

A row is a class made from a `Place`. `get(i)` gives the bytes of sample i, in the type that the library returns;
`batch(indices)`, `random(order)` and `sequential()` give many, and default to `get` one after the other. A row
without `get` has only those it defines. `n` is the number of samples.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import NotHere, contender, slug

__all__ = ["MMAP", "PREAD", "Place", "Row"]

PREAD = "limit: os.pread loop"
PREADV = "limit: os.preadv into one buffer"
MMAP = "limit: slices of one mmap"
_BUFFER_BYTES = 1 << 24


@dataclass(frozen=True)
class Place:
    """Where the samples are: the tree, and the outputs of `pack.py --keep`."""

    tree: Path
    work: Path
    container: str

    def output(self, packer: str) -> str:
        """The output of one contender of `pack.py`."""
        folder = self.work / slug(packer)
        if not folder.is_dir():
            raise NotHere(f"no {folder}; make it with pack.py --keep")
        return str(folder)

    def data(self, packer: str) -> str:
        """What must be in the page cache, or out of it: the output of `packer`, "ours" or "tree"."""
        if packer == "tree":
            return str(self.tree)
        return self.output(f"ours: {self.container}" if packer == "ours" else packer)


class Row:
    """Base of the rows: everything by `get`."""

    n = 0

    def __init__(self, place: Place) -> None:
        raise NotImplementedError

    def batch(self, indices: Sequence[int]) -> Iterable[Any]:
        get = self.get  # type: ignore[attr-defined]
        return [get(i) for i in indices]

    def random(self, order: Sequence[int]) -> Iterator[Any]:
        return map(self.get, order)  # type: ignore[attr-defined]

    def sequential(self) -> Iterator[Any]:
        return map(self.get, range(self.n))  # type: ignore[attr-defined]


class _Bare(Row):
    """Descriptors and offsets of our shards in plain lists, taken from our index before the clock."""

    def __init__(self, place: Place) -> None:
        import readers

        with readers.open(place.data("ours")) as reader:
            self.n = len(reader)
            ranges = [reader.byte_range(i) for i in range(self.n)]
        self._open: dict[Path, int] = {}
        self.places: list[tuple[int, int, int]] = []
        for found in ranges:
            assert found is not None, "the tree's samples all have an image"
            path, offset, length = found
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            self.places.append((self._open[path], length, offset))


@contender(PREAD, imports="readers", data="ours", note="our shards at our offsets, a new bytes object each")
class Pread(_Bare):
    def get(self, i: int) -> bytes:
        return os.pread(*self.places[i])


@contender(
    PREADV,
    imports="readers",
    data="ours",
    note="our shards at our offsets, one buffer; a batch is never held whole",
)
class Preadv(_Bare):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._block = memoryview(bytearray(_BUFFER_BYTES))

    def get(self, i: int) -> memoryview:
        descriptor, length, offset = self.places[i]
        window = self._block[:length]
        os.preadv(descriptor, (window,), offset)
        return window

    def batch(self, indices: Sequence[int]) -> Iterable[memoryview]:
        return map(self.get, indices)


@contender(MMAP, imports="readers", data="ours", note="memoryview slices of whole mapped shards, offsets in a list")
class Mapped(_Bare):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        views = {
            descriptor: memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)) for descriptor in self._open.values()
        }
        self._slices = [(views[descriptor], start, start + length) for descriptor, length, start in self.places]

    def get(self, i: int) -> memoryview:
        view, start, stop = self._slices[i]
        return view[start:stop]


class _Ours(Row):
    backend = "pread"

    def __init__(self, place: Place) -> None:
        import readers

        self.reader: Any = readers.open(place.data("ours"), backend=self.backend)
        self.n = len(self.reader)
        self.get = self.reader.read


@contender("ours: read", imports="readers", data="ours")
class Read(_Ours):
    pass


@contender("ours: read mmap", imports="readers", data="ours")
class ReadMapped(_Ours):
    backend = "mmap"


@contender("ours: read_many", imports="readers", data="ours", batches_only=True)
class ReadMany(_Ours):
    def batch(self, indices: Sequence[int]) -> Iterable[Any]:
        return self.reader.read_many(indices)


class _Streaming:
    """Orders are handed over whole: `stream` knows what comes next."""

    def batch(self, indices: Sequence[int]) -> Iterable[Any]:
        raise NotHere("streams, so batches are not a case of their own")

    def random(self, order: Sequence[int]) -> Iterator[Any]:
        return self.reader.stream(order)

    def sequential(self) -> Iterator[Any]:
        return self.reader.stream()


@contender("ours: stream", imports="readers", data="ours", note="the order is known, so the kernel is asked ahead")
class Stream(_Streaming, _Ours):
    pass


class _Folder(Row):
    def __init__(self, place: Place) -> None:
        import readers

        self.reader: Any = readers.open_folder(place.tree)
        self.n = len(self.reader)
        self.get = self.reader.read


@contender(
    "ours: folder read",
    imports="readers",
    data="tree",
    note="plain files; the tree is listed at opening",
)
class FolderRead(_Folder):
    pass


@contender("ours: folder stream", imports="readers", data="tree")
class FolderStream(_Streaming, _Folder):
    pass
