"""Read: the bytes of samples, one process, no decoding, from what `pack.py --keep` left.

    python benchmarks/read.py --tree TREE --work DIR --mode random|sequential|batch [--cold] [--rounds 3] …

Every sample is consumed in the same way: one copy into a buffer that is there already. Warm runs make two passes:
the first includes page faults of rows that map files, the second does not. Cold runs empty the page cache first
(as root; else only of the files they read) and make one pass.
"""

from __future__ import annotations

import argparse
import glob
import mmap
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, NotHere, base_parser, contender, main, slug
from machine import chill, list_tree, memory_of_self, prime, reset_peak, warm
from report import Claim, Column

# Readers of packed samples: what a row of `read.py` is, the limits, and ours.
#
# A row is a class made from a `Place`. `get(i)` gives the bytes of sample i, in the type that the library returns;
# `batch(indices)`, `random(order)` and `sequential()` give many, and default to `get` one after the other. A row
# without `get` has only those it defines. `n` is the number of samples.


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


# Readers of other projects over what their own writers packed; bytes only, nothing is decoded.


class _SequentialOnly(Row):
    """A library that only reads from front to back."""

    def batch(self, indices: Sequence[int]) -> Iterable[Any]:
        raise NotHere("reads from front to back only")

    def random(self, order: Sequence[int]) -> Iterator[Any]:
        raise NotHere("reads from front to back only")


@contender("ImageFolder", data="tree", note="open and read of a listed path, as torchvision's loader does")
class ImageFolder(Row):
    def __init__(self, place: Place) -> None:
        self._items = list_tree(place.tree)
        self.n = len(self._items)

    def get(self, i: int) -> bytes:
        with open(self._items[i][0], "rb") as file:
            return file.read()


@contender("lmdb", imports="lmdb", data="lmdb", note="buffers=True: views of its map, no copy")
class Lmdb(Row):
    def __init__(self, place: Place) -> None:
        import lmdb

        path = os.path.join(place.output("lmdb"), "db")
        self._environment = lmdb.open(path, readonly=True, lock=False)
        self._transaction = self._environment.begin(buffers=True)
        self.n = self._environment.stat()["entries"]

    def get(self, i: int) -> Any:
        return self._transaction.get(b"%08d" % i)


@contender("array_record", imports="array_record.python.array_record_data_source", data="array_record")
class ArrayRecord(Row):
    def __init__(self, place: Place) -> None:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        self._source = ArrayRecordDataSource(os.path.join(place.output("array_record"), "a.array_record"))
        self.n = len(self._source)

    def get(self, i: int) -> bytes:
        return bytes(self._source[i])

    def batch(self, indices: Sequence[int]) -> Iterable[bytes]:
        found: Iterable[bytes] = self._source.__getitems__(indices)
        return found


@contender("litdata", imports="litdata", data="litdata optimize")
class Litdata(Row):
    def __init__(self, place: Place) -> None:
        import litdata

        self._set = litdata.StreamingDataset(os.path.join(place.output("litdata optimize"), "lit"), shuffle=False)
        self.n = len(self._set)

    def get(self, i: int) -> Any:
        return self._set[i]["image"]

    def sequential(self) -> Iterator[Any]:
        return (sample["image"] for sample in self._set)


@contender("webdataset", imports="webdataset", data="webdataset ShardWriter")
class WebDataset(_SequentialOnly):
    def __init__(self, place: Place) -> None:
        import webdataset

        shards = sorted(glob.glob(os.path.join(place.output("webdataset ShardWriter"), "*.tar")))
        self._set = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
        self.n = len(list_tree(place.tree))

    def sequential(self) -> Iterator[Any]:
        return (sample["jpg"] for sample in self._set)


@contender("h5py flat", imports="h5py numpy", data="h5py flat", note="slices of the data set, offsets in a list")
class H5pyFlat(Row):
    def __init__(self, place: Place) -> None:
        import h5py

        self._file = h5py.File(os.path.join(place.output("h5py flat"), "a.h5"), "r")
        self._data = self._file["data"]
        self._offsets = self._file["offsets"][:].tolist()
        self.n = len(self._offsets) - 1

    def get(self, i: int) -> Any:
        return self._data[self._offsets[i] : self._offsets[i + 1]]


@contender(
    "tfrecord indexed",
    imports="tfrecord tfrecord.example_pb2",
    data="tfrecord package",
    note="its index file, pread and its protobuf parser; it has no random access of its own",
)
class TfrecordIndexed(Row):
    def __init__(self, place: Place) -> None:
        from tfrecord import example_pb2

        folder = place.output("tfrecord package")
        with open(os.path.join(folder, "a.index")) as file:
            self._records = [tuple(map(int, line.split())) for line in file]
        self._descriptor = os.open(os.path.join(folder, "a.tfrecord"), os.O_RDONLY)
        self._example = example_pb2.Example
        self.n = len(self._records)

    def get(self, i: int) -> Any:
        start, size = self._records[i]  # of the record with its 12 bytes before and 4 behind
        example = self._example()
        example.ParseFromString(os.pread(self._descriptor, size - 16, start + 12))
        return example.features.feature["image"].bytes_list.value[0]


BATCH_SAMPLES = 256
_PASS_SECONDS = 4.0
_TARGET_BYTES = 1 << 26
_PRIME_BYTES = {False: 1 << 30, True: 5 << 29}  # by --cold: the page cache itself is filled again


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row in one mode: samples/s and MB/s of the first and the second pass, seconds to open, memory at the end."""
    if chosen.options.get("batches_only") and arguments.mode != "batch":
        raise NotHere("differs only in batches")
    place = _place(arguments)
    how = chill([place.data(chosen.options["data"])]) if arguments.cold else "warm"
    prime(_PRIME_BYTES[arguments.cold])
    reset_peak()
    started = time.perf_counter()
    row: Row = chosen.function(place)
    opened = time.perf_counter() - started
    rate, size = _timed(_samples(row, arguments.mode, seed=1))
    figures = {"samples_s": rate, "mb_s": size, "open_ms": 1e3 * opened, "cache": how}
    if not arguments.cold:
        figures["again_samples_s"], figures["again_mb_s"] = _timed(_samples(row, arguments.mode, seed=2))
    return {**figures, **memory_of_self()}


def _samples(row: Row, mode: str, seed: int) -> Iterable[Any]:
    if mode == "sequential":
        return row.sequential()
    order = list(range(row.n))
    random.Random(seed).shuffle(order)
    if mode == "random":
        return row.random(order)
    return (
        data for start in range(0, row.n, BATCH_SAMPLES) for data in row.batch(order[start : start + BATCH_SAMPLES])
    )


def _timed(samples: Iterable[Any]) -> tuple[float, float]:
    """Samples/s and MB/s of consuming an epoch, or its first seconds."""
    target = memoryview(bytearray(_TARGET_BYTES))
    count = total = 0
    started = time.perf_counter()
    for data in samples:
        size = len(data)
        target[:size] = data
        total += size
        count += 1
        if not count & 63 and time.perf_counter() - started > _PASS_SECONDS:
            break
    seconds = time.perf_counter() - started
    return count / seconds, total / 1e6 / seconds


def _place(arguments: argparse.Namespace) -> Place:
    return Place(arguments.tree, arguments.work, arguments.format)


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """For warm runs: what the row reads is in the page cache."""
    try:
        if not arguments.cold:
            warm([_place(arguments).data(chosen.options["data"])])
    except NotHere:
        pass  # the contender's process finds out too, and says so


def _claims(arguments: argparse.Namespace) -> tuple[Claim, ...]:
    """What we promise for this mode."""
    if arguments.cold and arguments.mode == "sequential":
        return tuple(Claim("ours: stream", "samples_s", 2.0, peer) for peer in ("ImageFolder", "webdataset", "litdata"))
    if arguments.cold:
        return (Claim("ours: stream", "samples_s", 1.3),)
    column = "again_samples_s"
    if arguments.mode == "batch":
        return (Claim("ours: read_many", column, 0.9, PREAD),)
    if arguments.mode == "sequential":
        return ()
    mapped = "ours: read mmap"
    return (
        Claim("ours: read", column, 0.8, PREAD),
        Claim(mapped, column, 0.7, MMAP),
        Claim(mapped, "samples_s", 0.7, MMAP),
        Claim("ours: read", column, 1.0, but=("lmdb",)),
        Claim(mapped, column, 1.0, but=("lmdb",)),
        Claim(mapped, column, 0.8, "lmdb"),
    )


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    key = "samples_s" if arguments.cold else "again_samples_s"
    return Benchmark(
        title=f"Read, {arguments.mode}, {'cold' if arguments.cold else 'warm'} page cache",
        columns=(
            Column("samples_s", "samples/s, first pass"),
            Column("mb_s", "MB/s"),
            Column("again_samples_s", "samples/s, second pass"),
            Column("again_mb_s", "MB/s"),
            Column("open_ms", "open ms", "{:,.1f}"),
            Column("private_mb", "private MB"),
            Column("file_mb", "mapped file MB"),
        ),
        key=key,
        limits=((key, PREAD), (key, MMAP)),
        measure=measure,
        before=before,
        claims=_claims(arguments),
    )


def parser() -> argparse.ArgumentParser:
    options = base_parser(__doc__)
    options.add_argument("--tree", required=True, type=Path, help="the tree that was packed")
    options.add_argument("--work", required=True, type=Path, help="the folder given to pack.py --keep")
    options.add_argument("--mode", required=True, choices=("random", "sequential", "batch"))
    options.add_argument("--cold", action="store_true", help="empty the page cache before every run")
    options.add_argument("--format", default="hdf5", choices=("hdf5", "tfrecord", "tar"), help="of our set")
    return options


if __name__ == "__main__":
    main(_benchmark(parser().parse_args()), parser())
