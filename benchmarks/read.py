"""Read: the bytes of samples from the output of `pack.py --keep`, in one process, without decoding.

    python benchmarks/read.py --tree TREE --work DIR --mode random|sequential|batch [--cold] [--rounds 3] …

Every sample is consumed in the same way: one copy into an existing buffer. Warm runs make two passes: the first
includes page faults of rows that map files, the second does not. Cold runs empty the page cache first (as root;
otherwise only of the files they read) and make one pass.
"""

from __future__ import annotations

import argparse
import functools
import glob
import mmap
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, NotHere, contender, main, output_of
from machine import chill, fio, list_tree, memory_of_self, prime, reset_peak, warm
from report import Claim, Column

# A row is a function that opens its files in a `Place`, and returns a `Row`.

PREAD = "limit: os.pread loop"
MMAP = "limit: slices of one mmap"
FIO, DEVICE = "limit: fio", "limit: fio, O_DIRECT, 32 at once"


@dataclass(frozen=True)
class Place:
    """The folders of the samples: the tree, and the outputs of `pack.py --keep`."""

    tree: Path
    work: Path
    container: str

    def output(self, packer: str) -> str:
        """The output of one contender of `pack.py`."""
        return str(output_of(self.work, packer))

    def data(self, packer: str) -> str:
        """The files to load into the page cache, or to drop from it: the output of `packer`, "ours" or "tree"."""
        if packer == "tree":
            return str(self.tree)
        return self.output(f"ours: {self.container}" if packer == "ours" else packer)


@dataclass(frozen=True)
class Row:
    """n: number of samples. get: the bytes of sample i, in the type that the library returns. batch, random,
    sequential: the bytes of several samples, of all samples in an order, and of all samples; by default by `get`, one
    by one."""

    n: int
    get: Callable[[int], Any]
    batch: Callable[[Sequence[int]], Iterable[Any]] | None = None
    random: Callable[[Sequence[int]], Iterable[Any]] | None = None
    sequential: Callable[[], Iterable[Any]] | None = None

    def samples(self, mode: str, seed: int) -> Iterable[Any]:
        """The samples of an epoch."""
        if mode == "sequential":
            return self.sequential() if self.sequential else map(self.get, range(self.n))
        order = list(range(self.n))
        random.Random(seed).shuffle(order)
        if mode == "random":
            return self.random(order) if self.random else map(self.get, order)
        batch, get = self.batch, self.get
        parts = (order[start : start + BATCH_SAMPLES] for start in range(0, self.n, BATCH_SAMPLES))
        return (data for part in parts for data in (batch(part) if batch else [get(i) for i in part]))


def _shards(place: Place) -> list[tuple[int, int, int]]:
    """Descriptor, length and offset of each sample of our shards, from our index; not timed."""
    import readers

    with readers.open(place.data("ours")) as reader:
        ranges = [reader.byte_range(i) for i in range(len(reader))]
    files = {path: os.open(path, os.O_RDONLY) for path in {path for path, _, _ in ranges}}
    return [(files[path], length, offset) for path, offset, length in ranges]


@contender(PREAD, imports="readers", data="ours", note="our shards at our offsets, a new bytes object per sample")
def bare_pread(place: Place) -> Row:
    places = _shards(place)
    return Row(len(places), lambda i: os.pread(*places[i]))


@contender(MMAP, imports="readers", data="ours", note="memoryview slices of whole mapped shards, offsets in a list")
def bare_mmap(place: Place) -> Row:
    places = _shards(place)
    views = {file: memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ)) for file, _, _ in places}
    slices = [(views[file], start, start + length) for file, length, start in places]

    def get(i: int) -> memoryview:
        view, start, stop = slices[i]
        return view[start:stop]

    return Row(len(places), get)


@contender(FIO, imports="readers", data="ours", note="our shards in blocks of the mean size, from the page cache")
@contender(DEVICE, imports="readers", data="ours", note="the device without the page cache", depth=32)
def of_fio(place: Place, chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    import readers

    depth = chosen.options.get("depth", 1)
    if not shutil.which("fio") or (depth > 1 and not arguments.cold):
        raise NotHere("needs fio, and --cold for the device")
    with readers.open(place.data("ours")) as reader:
        files, block = sorted({reader.byte_range(i)[0] for i in range(len(reader))}), int(reader.sizes().mean())
    mode = "read" if arguments.mode == "sequential" else "randread"
    rate = fio(files, block, depth, direct=depth > 1, mode=mode)
    return dict.fromkeys(("samples_s", "again_samples_s")[: 2 - arguments.cold], rate)


def _ours(place: Place, batch: bool = False, **options: Any) -> Row:
    import readers

    reader = readers.open(place.data("ours"), **options)
    return Row(len(reader), reader.read, batch=reader.read_many if batch else None)


def _stream(place: Place) -> Row:
    import readers

    def batch(indices: Sequence[int]) -> Any:
        raise NotHere("is a stream, which has no separate read of batches")

    reader = readers.open(place.data("ours"))
    return Row(len(reader), reader.read, batch, random=reader.stream, sequential=reader.stream)


for _name, _make, _options in (
    ("ours: read", _ours, {}),
    ("ours: read mmap", functools.partial(_ours, backend="mmap"), {}),
    ("ours: read_many", functools.partial(_ours, batch=True), {"batches_only": True}),
    ("ours: stream", _stream, {"note": "the order is known, so the kernel is asked ahead"}),
):
    contender(_name, imports="readers", data="ours", **_options)(_make)


# Readers of other projects over the output of their own writers; bytes only, nothing is decoded.


@contender("ImageFolder", data="tree", note="open and read of a listed path, as torchvision's loader does")
def image_folder(place: Place) -> Row:
    items = list_tree(place.tree)

    def get(i: int) -> bytes:
        with open(items[i][0], "rb") as file:
            return file.read()

    return Row(len(items), get)


@contender("lmdb", imports="lmdb", data="lmdb", note="buffers=True: views of its map, no copy")
def lmdb_views(place: Place) -> Row:
    import lmdb

    environment = lmdb.open(os.path.join(place.output("lmdb"), "db"), readonly=True, lock=False)
    transaction = environment.begin(buffers=True)
    return Row(environment.stat()["entries"], lambda i: transaction.get(b"%08d" % i))


@contender("array_record", imports="array_record.python.array_record_data_source", data="array_record")
def array_record(place: Place) -> Row:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    source = ArrayRecordDataSource(os.path.join(place.output("array_record"), "a.array_record"))
    return Row(len(source), lambda i: bytes(source[i]), batch=source.__getitems__)


@contender("litdata", imports="litdata", data="litdata optimize")
def litdata_stream(place: Place) -> Row:
    import litdata

    samples = litdata.StreamingDataset(os.path.join(place.output("litdata optimize"), "lit"), shuffle=False)
    sequential = functools.partial(map, lambda sample: sample["image"], samples)
    return Row(len(samples), lambda i: samples[i]["image"], sequential=sequential)


@contender("webdataset", imports="webdataset", data="webdataset ShardWriter")
def web_dataset(place: Place) -> Row:
    import webdataset

    def get(i: int) -> Any:
        raise NotHere("reads from front to back only")

    shards = sorted(glob.glob(os.path.join(place.output("webdataset ShardWriter"), "*.tar")))
    samples = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    return Row(len(list_tree(place.tree)), get, sequential=lambda: (sample["jpg"] for sample in samples))


@contender("h5py flat", imports="h5py numpy", data="h5py flat", note="slices of the data set, offsets in a list")
def h5py_flat(place: Place) -> Row:
    import h5py

    file = h5py.File(os.path.join(place.output("h5py flat"), "a.h5"), "r")
    data, offsets = file["data"], file["offsets"][:].tolist()
    return Row(len(offsets) - 1, lambda i: data[offsets[i] : offsets[i + 1]])


@contender(
    "tfrecord indexed",
    imports="tfrecord tfrecord.example_pb2",
    data="tfrecord package",
    note="its index file, pread and its protobuf parser; the package has no random access",
)
def tfrecord_indexed(place: Place) -> Row:
    from tfrecord import example_pb2

    folder, make = place.output("tfrecord package"), example_pb2.Example
    with open(os.path.join(folder, "a.index")) as file:
        records = [tuple(map(int, line.split())) for line in file]
    descriptor = os.open(os.path.join(folder, "a.tfrecord"), os.O_RDONLY)

    def get(i: int) -> Any:
        start, size = records[i]  # of the record with its header of 12 bytes and its footer of 4
        example = make()
        example.ParseFromString(os.pread(descriptor, size - 16, start + 12))
        return example.features.feature["image"].bytes_list.value[0]

    return Row(len(records), get)


BATCH_SAMPLES = 256
_PASS_SECONDS = 4.0
_TARGET_BYTES = 1 << 26
_PRIME_BYTES = {False: 1 << 30, True: 5 << 29}  # by --cold; cold runs also fill the page cache again


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one row in one mode: samples/s and MB/s of both passes, seconds to open, memory at the end."""
    if chosen.options.get("batches_only") and arguments.mode != "batch":
        raise NotHere("differs only in the mode batch")
    place = _place(arguments)
    how = chill([place.data(chosen.options["data"])]) if arguments.cold else "warm"
    prime(_PRIME_BYTES[arguments.cold])
    if chosen.name in (FIO, DEVICE):
        return {**chosen.function(place, chosen, arguments), "cache": how}
    reset_peak()
    started = time.perf_counter()
    row: Row = chosen.function(place)
    opened = time.perf_counter() - started
    rate, size = _timed(row.samples(arguments.mode, seed=1))
    figures = {"samples_s": rate, "mb_s": size, "open_ms": 1e3 * opened, "cache": how}
    if not arguments.cold:
        figures["again_samples_s"], figures["again_mb_s"] = _timed(row.samples(arguments.mode, seed=2))
    return {**figures, **memory_of_self()}


def _timed(samples: Iterable[Any]) -> tuple[float, float]:
    """Samples/s and MB/s over an epoch, or over its first seconds."""
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
    """For warm runs: bring the row's files into the page cache."""
    try:
        if not arguments.cold:
            warm([_place(arguments).data(chosen.options["data"])])
    except NotHere:
        pass  # the contender's process reports it


def _claims(arguments: argparse.Namespace) -> tuple[Claim, ...]:
    """The project's claims for this mode."""
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
        limits=((key, PREAD), (key, MMAP), (key, FIO), (key, DEVICE)),
        measure=measure,
        before=before,
        claims=_claims(arguments),
    )


if __name__ == "__main__":
    main(
        _benchmark,
        __doc__,
        tree="the tree that was packed",
        work="the folder given to pack.py --keep",
        mode=(str, "the kind of reads", ("random", "sequential", "batch")),
        cold=(False, "empty the page cache before every run"),
        format=("hdf5", "format of our set", ("hdf5", "tfrecord", "tar")),
    )
