"""Pack: a tree of image files into shards, by packer and by its peers, with a warm page cache.

    python benchmarks/pack.py --tree TREE --work DIR [--keep] [--rounds 3] [--python ffcv=PATH] …

Two times: until the writer returns, and until all its output is on the disk (fsync of every file). packer calls fsync
within both times, except in the rows "not synced", which return like `cat` and the peers with their output in the page
cache. `--keep` leaves each contender's output under DIR for `read.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import CONTENDERS, Benchmark, Contender, contender, main, slug
from machine import cpu_seconds, folder_bytes, list_tree, peak_memory, prime, reset_peak, sync_below, warm
from pipeline_sets import IndexedFiles
from report import Claim, Column

# The limit of all packers: copying the same bytes.


CAT = "limit: cat to one file"
LOOP = "limit: two processes, read and write"
_BUFFER_BYTES = 1 << 24


@contender(CAT, note="find, sort, xargs and one cat process")
def cat(tree: str, output: str) -> None:
    script = 'find "$1" -type f -print0 | sort -z | xargs -0 cat > "$2/all.bin"'
    subprocess.run(["sh", "-c", script, "sh", tree, output], check=True)


@contender(LOOP, imports="multiprocessing", note="2 forked processes: open, read, close, write each file; listing")
def loop(tree: str, output: str) -> None:
    paths = [path for path, _ in list_tree(tree)]
    half = len(paths) // 2
    fork = multiprocessing.get_context("fork")
    parts = {"0.bin": paths[:half], "1.bin": paths[half:]}
    processes = [fork.Process(target=_copy, args=(parts[name], os.path.join(output, name))) for name in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _copy(paths: Sequence[str], target: str) -> None:
    block = memoryview(bytearray(_BUFFER_BYTES))
    out = os.open(target, os.O_CREAT | os.O_WRONLY)
    for path in paths:
        source = os.open(path, os.O_RDONLY)
        count = os.readv(source, [block])
        os.close(source)
        os.write(out, block[:count])
    os.close(out)


# Writers of other projects, each used as in its documentation; each stores the bytes of the files and the label.
#
# Every time includes `machine.list_tree`. Unless the note says otherwise, a writer runs in one process, leaves the
# fsync to the kernel, and stores neither checksums of samples nor facts parsed from the images.


ROWS_PER_GROUP = 500


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


@contender("GNU tar", note="tar cf of the folder; names only, no labels, no index")
def gnu_tar(tree: str, output: str) -> None:
    subprocess.run(["tar", "cf", os.path.join(output, "a.tar"), "-C", tree, "."], check=True)


@contender("lmdb", imports="lmdb", note="append=True, 1,000 puts a transaction, sync=False; no label stored")
def lmdb_writer(tree: str, output: str) -> None:
    import lmdb

    items = list_tree(tree)
    environment = lmdb.open(os.path.join(output, "db"), map_size=1 << 36, sync=False)
    for start in range(0, len(items), 1000):
        with environment.begin(write=True) as transaction:
            for number, (path, _) in enumerate(items[start : start + 1000], start):
                transaction.put(b"%08d" % number, _content(path), append=True)
    environment.close()


@contender("array_record", imports="array_record.python.array_record_module", note="group_size:1,uncompressed")
def array_record(tree: str, output: str) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(os.path.join(output, "a.array_record"), "group_size:1,uncompressed")
    for path, label in list_tree(tree):
        writer.write(_content(path) + label.to_bytes(4, "little"))
    writer.close()


def _array(path: str) -> Any:
    import numpy as np

    return np.frombuffer(_content(path), np.uint8)


@contender(
    "FFCV BytesField",
    python="ffcv",
    imports="ffcv.writer ffcv.fields numpy",
    note="2 worker processes, whose memory and CPU time are not counted",
)
def ffcv_bytes(tree: str, output: str) -> None:
    from ffcv.fields import BytesField, IntField
    from ffcv.writer import DatasetWriter

    fields = {"image": BytesField(), "label": IntField()}
    writer = DatasetWriter(os.path.join(output, "a.beton"), fields, num_workers=2)
    writer.from_indexed_dataset(IndexedFiles(tree, _array))


@contender("Parquet (pyarrow)", imports="pyarrow.parquet", note="uncompressed, no dictionary, groups of 500 rows")
def parquet(tree: str, output: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    items = list_tree(tree)
    schema = pa.schema([("image", pa.binary()), ("label", pa.int32())])
    path = os.path.join(output, "a.parquet")
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, len(items), ROWS_PER_GROUP):
            part = items[start : start + ROWS_PER_GROUP]
            images = pa.array([_content(path) for path, _ in part], pa.binary())
            labels = pa.array([label for _, label in part], pa.int32())
            writer.write_table(pa.table({"image": images, "label": labels}, schema=schema))


@contender(
    "h5py flat",
    imports="h5py numpy",
    note="one uint8 data set of known size, offsets, labels; files examined twice",
)
def h5py_flat(tree: str, output: str) -> None:
    import h5py
    import numpy as np

    items = list_tree(tree)
    ends = np.cumsum([os.path.getsize(path) for path, _ in items])
    offsets = np.concatenate(([0], ends)).astype(np.int64)
    with h5py.File(os.path.join(output, "a.h5"), "w") as file:
        data = file.create_dataset("data", (int(offsets[-1]),), np.uint8)
        file.create_dataset("offsets", data=offsets)
        file.create_dataset("labels", data=np.array([label for _, label in items]))
        for number, (path, _) in enumerate(items):
            data[offsets[number] : offsets[number + 1]] = _array(path)


@contender("h5py vlen", imports="h5py numpy", note="one variable-length uint8 data set, labels")
def h5py_vlen(tree: str, output: str) -> None:
    import h5py
    import numpy as np

    items = list_tree(tree)
    with h5py.File(os.path.join(output, "a.h5"), "w") as file:
        data = file.create_dataset("images", (len(items),), dtype=h5py.vlen_dtype(np.uint8))
        file.create_dataset("labels", data=np.array([label for _, label in items]))
        for number, (path, _) in enumerate(items):
            data[number] = _array(path)


@contender(
    "tfrecord package",
    imports="tfrecord tfrecord.tools.tfrecord2idx",
    note="features image and label; record CRCs; index",
)
def tfrecord_package(tree: str, output: str) -> None:
    import tfrecord
    from tfrecord.tools import tfrecord2idx

    path = os.path.join(output, "a.tfrecord")
    writer = tfrecord.TFRecordWriter(path)
    for name, label in list_tree(tree):
        writer.write({"image": (_content(name), "byte"), "label": (label, "int")})
    writer.close()
    tfrecord2idx.create_index(path, os.path.join(output, "a.index"))


@contender("MosaicML MDS", imports="streaming", note="columns bytes and int, no hashes, no compression")
def mds(tree: str, output: str) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=os.path.join(output, "mds"), columns={"image": "bytes", "label": "int"}) as writer:
        for path, label in list_tree(tree):
            writer.write({"image": _content(path), "label": label})


@contender("webdataset ShardWriter", imports="webdataset", note="members jpg and cls, 1,000 samples a shard")
def webdataset_writer(tree: str, output: str) -> None:
    import webdataset

    pattern = os.path.join(output, "a-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=1000, maxsize=1 << 40, verbose=0) as writer:
        for number, (path, label) in enumerate(list_tree(tree)):
            writer.write({"__key__": f"{number:08d}", "jpg": _content(path), "cls": label})


def _litdata_sample(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": _content(item[0]), "label": item[1]}


@contender("litdata optimize", imports="litdata", note="2 worker processes, chunks of 64 MB")
def litdata_optimize(tree: str, output: str) -> None:
    import litdata

    # LitData empties these folders before it starts; without the variables, it empties two folders in TMPDIR.
    for variable, name in {"CACHE": "chunks", "DATA_CACHE": "data"}.items():
        folder = os.environ[f"DATA_OPTIMIZER_{variable}_FOLDER"] = os.path.join(output, "cache", name)
        os.makedirs(folder)
    options = {"num_workers": 2, "chunk_bytes": "64MB", "verbose": False}
    litdata.optimize(_litdata_sample, list_tree(tree), output_dir=os.path.join(output, "lit"), **options)


FORMATS = ("hdf5", "tfrecord", "tar")
OURS = "2 processes; listing, header of every image parsed, CRC32C of samples and shards, index, fsync, commit"
LIKE = "the same work without fsync: like cat and the peers, it returns with its output in the page cache"
_SPARE_BYTES = 1 << 30


@contextlib.contextmanager
def _unsynced() -> Iterator[None]:
    """A context in which fsync does nothing, in this process and in its forks."""
    import packer.formats.base as files

    fsync, write_behind = os.fsync, files.write_behind
    os.fsync, files.write_behind = (lambda descriptor: None), (lambda *region: None)
    try:
        yield
    finally:
        os.fsync, files.write_behind = fsync, write_behind


def _register_ours(container: str) -> None:
    @contender(f"ours: {container}", imports=f"packer.conversion.run packer.formats.{container}", note=OURS)
    def pack(tree: str, output: str) -> dict[str, float]:
        import packer

        result = packer.convert(tree, container, output, run=packer.Run(workers=2))
        return {"shard_bytes": result.shard_bytes}

    @contender(f"ours: {container}, not synced", imports=f"packer.conversion.run packer.formats.{container}", note=LIKE)
    def pack_unsynced(tree: str, output: str) -> dict[str, float]:
        with _unsynced():
            return pack(tree, output)


for _container in FORMATS:
    _register_ours(_container)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one writer once. Rates count the files and bytes of the tree, outputs the bytes on the disk."""
    output = Path(arguments.work) / slug(chosen.name)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    files = len(list_tree(arguments.tree))
    size = folder_bytes(arguments.tree)
    prime(int(size * arguments.prime) + _SPARE_BYTES)
    reset_peak()
    cpu, started = cpu_seconds(), time.perf_counter()
    more = chosen.function(str(arguments.tree), str(output)) or {}
    returned = time.perf_counter() - started
    sync_below(output)
    synced, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    figures = {
        "files_s": files / returned,
        "mb_s": size / 1e6 / returned,
        "synced_files_s": files / synced,
        "s": returned,
        "cpu_us": 1e6 * cpu / files,
        "synced_s": synced,
        "overhead_percent": 100 * (folder_bytes(output) / size - 1),
        **peak_memory(),
    }
    if "shard_bytes" in more:
        figures["shard_overhead_percent"] = 100 * (more["shard_bytes"] / size - 1)
    return figures


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Bring the source files into the page cache, sync pending writes, and remove the output of earlier runs."""
    if not arguments.keep:
        for name in CONTENDERS:
            shutil.rmtree(arguments.work / slug(name), ignore_errors=True)
    os.sync()
    warm([arguments.tree])


BENCHMARK = Benchmark(
    title="Pack, warm page cache",
    columns=(
        Column("files_s", "files/s (min–max)"),
        Column("mb_s", "MB/s"),
        Column("synced_files_s", "files/s to disk"),
        Column("synced_s", "s to disk", "{:.2f}"),
        Column("cpu_us", "CPU µs/file"),
        Column("overhead_percent", "overhead %", "{:.2f}"),
        Column("shard_overhead_percent", "overhead of shards %", "{:.2f}"),
        Column("peak_mb", "peak RSS MB"),
    ),
    key="files_s",
    limits=(("files_s", CAT), ("synced_files_s", CAT), ("files_s", LOOP)),
    measure=measure,
    before=before,
    claims=(
        *(Claim(f"ours: {name}, not synced", "files_s", 1.0, CAT) for name in FORMATS),
        *(Claim(f"ours: {name}", "synced_files_s", 1.0, CAT) for name in FORMATS),
        *(Claim(f"ours: {name}", "files_s", 1.0) for name in FORMATS),
        *(Claim(f"ours: {name}", "synced_files_s", 1.0) for name in FORMATS),
        *(Claim(f"ours: {name}", "peak_mb", at_most=300) for name in FORMATS),
        Claim("ours: hdf5", "shard_overhead_percent", at_most=3),
        Claim("ours: tfrecord", "shard_overhead_percent", at_most=8),
    ),
)

FASTER_WHEN_TINY = ("GNU tar", "lmdb", "array_record", "FFCV")
TINY_CLAIMS = (
    *(Claim(f"ours: {name}", "files_s", 0.4, CAT) for name in FORMATS),
    *(Claim(f"ours: {name}, not synced", "files_s", 1.0, but=FASTER_WHEN_TINY) for name in FORMATS),
    *(claim for claim in BENCHMARK.claims if claim.at_most is not None),
)


if __name__ == "__main__":
    chosen = dataclasses.replace(BENCHMARK, claims=TINY_CLAIMS) if "--tiny" in sys.argv else BENCHMARK
    main(
        chosen,
        __doc__,
        tree="folder of class folders of image files",
        work="folder for the outputs, one folder per contender",
        keep=(False, "keep the outputs, for read.py"),
        tiny=(False, "check the claims for files of about 4 kB"),
        prime=(2.0, "free memory to touch first, as a multiple of the tree's bytes"),
    )
