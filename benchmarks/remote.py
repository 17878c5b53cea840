"""Remote: samples and whole sets from a web server with latency, on loopback.

    python benchmarks/remote.py --set DIR --target DIR [--latency 20] [--samples 256] [--rounds 3] …
    python benchmarks/remote.py --set DIR --target DIR --long 60 --work DIR --python peers=PYTHON
    python benchmarks/remote.py --set DIR --target DIR --orders 8 [--mb-s 50]

A separate process serves the set and waits --latency milliseconds before each answer. Samples are drawn at random from
the whole split. Opening, the index and a first draw, which opens connections and starts threads, are not timed; `gets`
counts the requests of the timed part. Staging writes to a directory below --target, which is removed.

With --long each row reads encoded images in batches of 256 for the given seconds, epoch after epoch: packer's rows, and
rows of libraries that stream from object stores, over the same bytes in each library's format, made once in the bucket
--work/data. Fetches before the first batch count in the samples/s of the whole run, and not in `later`, which leaves
out the first fifth of the run. CPU time is measured for all processes of the row, and separately for the server, both
from before the set is opened.

With --orders each row reads encoded images in one order for the given seconds, after an estimate by `packer order`.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import itertools
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import Benchmark, Contender, contender, keep_rows, main, make_once
from machine import cpu_seconds_of, cpu_seconds_of_tree, prime, pss_of_tree
from remote_server import served
from report import PEERS, Claim, Column

__all__ = ["BENCHMARK"]

MANY, SINGLE, AHEAD, STAGE = "ours: read_many", "ours: one by one", "ours: one by one, announced", "ours: stage"
SHUFFLED, WOVEN, LOCAL = "ours: ImageLoader, Shuffled", "ours: ImageLoader, woven", "ours: ImageLoader, local files"
RANGES, PLAIN, WHOLE = "limit: obstore.get_ranges", "http.client, one by one", "limit: http.client, files in 8 threads"


@dataclass
class Job:
    """A contender's arguments. ranges: (shard, offset, length) of the requested samples."""

    url: str
    wanted: list[int]
    ranges: list[tuple[str, int, int]]
    files: list[tuple[str, int]]
    reader: Any
    to: Path
    samples: int = 0


@contender(MANY, imports="readers obstore")
def read_many(job: Job) -> int:
    return sum(len(data) for data in job.reader.read_many(job.wanted))


@contender(AHEAD, imports="readers obstore", note="prefetch of all samples, then read of each")
def read_ahead(job: Job) -> int:
    job.reader.prefetch(job.wanted)
    return sum(len(job.reader.read(i)) for i in job.wanted)


@contender(SINGLE, imports="readers obstore")
def read_single(job: Job) -> int:
    return sum(len(job.reader.read(i)) for i in job.wanted)


@contender(RANGES, imports="obstore", note="one call for each shard, in 16 threads; no checksum, no ETag")
def obstore_ranges(job: Job) -> int:
    import obstore

    store = _store(job.url)
    shards: dict[str, list[tuple[int, int]]] = {}
    for shard, offset, length in job.ranges:
        shards.setdefault(shard, []).append((offset, length))

    def one(item: tuple[str, list[tuple[int, int]]]) -> int:
        starts, lengths = zip(*sorted(item[1]), strict=True)
        return sum(map(len, obstore.get_ranges(store, item[0], starts=starts, lengths=lengths, coalesce=256 << 10)))

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, shards.items()))


@functools.cache
def _store(url: str) -> Any:
    from obstore.store import HTTPStore

    return HTTPStore(url, client_options={"allow_http": True})


@contender(PLAIN, note="one persistent connection")
def plain(job: Job) -> int:
    connection, total = _connect(job.url), 0
    for shard, offset, length in job.ranges:
        connection.request("GET", f"/{shard}", headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        total += len(connection.getresponse().read())
    return total


def an_epoch(job: Job, order: Any) -> int:
    from readers.augment import RandomResizedCrop
    from readers.loader import ImageLoader

    loader = ImageLoader(job.reader, 128, order=order, augment=[RandomResizedCrop(64)])
    job.samples = sum(len(labels) for _, labels in loader)
    return int(job.reader.sizes().sum())


@contender(LOCAL, imports="readers torch", note="the same epoch in the order Shuffled, without a server")
@contender(SHUFFLED, imports="readers obstore torch", note="an epoch of the whole set, decoded to 64 x 64")
def loader_shuffled(job: Job) -> int:
    from readers.order import Shuffled

    return an_epoch(job, Shuffled(len(job.reader), 1))


@contender(WOVEN, imports="readers obstore torch", note="the same; blocks of 256 KiB, 256 open")
def loader_woven(job: Job) -> int:
    from readers.order import woven

    return an_epoch(job, woven(job.reader, 1))


@contender(STAGE, imports="readers obstore crc32c", note="CRC32C of every shard, fsync of every file, indexes too")
def stage(job: Job) -> int:
    import readers

    with (staging := readers.stage(job.url, job.to)):
        return staging.counts.copied_bytes


@contender(WHOLE, note="shards only, each in one GET; no checksum, no fsync")
def whole_files(job: Job) -> int:
    def one(file: tuple[str, int]) -> int:
        connection = _connect(job.url)
        connection.request("GET", f"/{file[0]}")
        with connection.getresponse() as answer, open(job.to / Path(file[0]).name, "wb") as target:
            shutil.copyfileobj(answer, target, 1 << 20)
        return file[1]

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(one, job.files))


def _connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)


# --- long runs ----------------------------------------------------------------------------------------------------
_S3 = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_BATCH = 256
LONG = functools.partial(contender, long=True, python="peers")


@dataclass
class Long:
    """set: the packed set. work: folder of the peers' sets. endpoint: of the bucket `data`; server: its process.
    cache: an empty folder."""

    set: Path
    work: Path
    endpoint: str
    server: int
    cache: Path
    before: dict[str, float] = field(default_factory=dict)
    started: float = 0.0

    def samples(self) -> Iterator[tuple[bytes, int]]:
        import readers

        reader = readers.open(self.set)
        for data, label in zip(reader.stream(), reader.labels.tolist(), strict=True):
            yield bytes(data), label

    def begin(self) -> None:
        self.before, self.started = self.now(), time.perf_counter()

    def now(self) -> dict[str, float]:
        gets, sent = _counts(self.endpoint)
        server = cpu_seconds_of(self.server)
        return {"gets": gets, "bytes": sent, "server": server, "cpu": cpu_seconds_of_tree() - server}

    def open(self) -> Any:
        import readers

        self.begin()
        return readers.open(f"{self.endpoint}/data/set")


def as_they_come(items: Sequence[Any]) -> list[Any]:
    return list(items)


@LONG("ours: stream, woven of 768", imports="readers obstore", note="blocks of 256 KiB, 768 open", open=768)
@LONG("ours: stream, woven", imports="readers obstore", note="one process; blocks of 256 KiB, 256 open", open=256)
def stream_woven(job: Long, open: int) -> Iterator[int]:
    from readers.order import woven

    reader = job.open()
    order = woven(reader, 1, open=open)
    return _batched(row for epoch in itertools.count() for row in reader.stream(order, epoch=epoch))


@LONG("ours: stream, Shuffled", imports="readers obstore", note="one process; a GET a sample")
def stream_shuffled(job: Long) -> Iterator[int]:
    from readers.order import Shuffled

    reader = job.open()
    return _batched(reader.stream(Shuffled(len(reader), 1)))


@LONG("ours: ImageStream, woven", imports="readers obstore torch", note="DataLoader, 2 workers")
def data_set_woven(job: Long) -> Iterator[int]:
    from torch.utils.data import DataLoader

    from readers.order import woven
    from readers.torch import EpochSampler, ImageDataset, ImageStream

    dataset = ImageDataset(reader := job.open(), decode=None)
    order = woven(reader, 1, workers=2, batch_size=_BATCH)
    stream = ImageStream(dataset, EpochSampler(order, dataset), _BATCH, collate=as_they_come)
    loader = DataLoader(stream, None, num_workers=2)
    return (len(batch) for _ in itertools.count() for batch in loader)


def _batched(stream: Iterator[Any]) -> Iterator[int]:
    while batch := [bytes(data) for data in itertools.islice(stream, _BATCH)]:
        yield len(batch)


@LONG("LanceDB streaming, clumps of 44", imports="lancedb", note="its defaults; 44 rows are 256 KiB", clump=44)
@LONG("LanceDB streaming", imports="lancedb", note="its defaults, rows one by one", clump=None)
def lance(job: Long, clump: int | None) -> Iterator[int]:
    import lancedb
    import pyarrow as pa
    from lancedb.streaming import StreamingDataset

    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])

    def batches() -> Iterator[Any]:
        rows = job.samples()
        while some := list(itertools.islice(rows, 1000)):
            images, labels = zip(*some, strict=True)
            yield pa.record_batch([pa.array(images, pa.binary()), pa.array(labels, pa.int64())], schema)

    where = job.work / "data" / "lance"

    def make(to: Path) -> None:
        lancedb.connect(to).create_table("t", pa.RecordBatchReader.from_batches(schema, batches()))

    make_once(where, make)
    job.begin()
    options = {"endpoint": job.endpoint, "allow_http": "true", "region": "us-east-1"}
    table = lancedb.connect("s3://data/lance", storage_options=options).open_table("t")

    def rows(epoch: int) -> Any:
        order = {"shuffle_seed": 1, "shuffle_clump_size": clump, "epoch": epoch}
        return StreamingDataset(table, num_splits=8, transform=lambda batch: batch.to_pylist(), **order)

    return _batched(row["image"] for epoch in itertools.count() for row in rows(epoch))


@LONG("MosaicML Streaming, 32k", imports="streaming torch", note="the same, shuffle_block_size=32768", block=1 << 15)
@LONG("MosaicML Streaming", imports="streaming torch", note="shards of 64 MiB, 2 workers, kept locally", block=None)
def mosaic(job: Long, block: int | None) -> Iterator[int]:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    def make(to: Path) -> None:
        with MDSWriter(out=str(to), columns={"image": "bytes", "label": "int"}) as out:
            for data, label in job.samples():
                out.write({"image": data, "label": label})

    make_once(job.work / "data" / "mds", make)
    clean_stale_shared_memory()
    job.begin()
    dataset = StreamingDataset(
        remote="s3://data/mds",
        local=str(job.cache),
        shuffle=True,
        batch_size=_BATCH,
        num_canonical_nodes=1,
        shuffle_block_size=block,
    )
    for stream in dataset.streams:  # forked workers would share its connection, and mix up its responses
        stream._downloader.clean_up()
    return map(len, DataLoader(dataset, _BATCH, num_workers=2, collate_fn=as_they_come))


@LONG("LitData", imports="litdata torch", note="chunks of 64 MiB, 1 worker, kept on a local disk")
def lit(job: Long) -> Iterator[int]:
    import litdata
    from litdata.streaming import downloader
    from litdata.streaming.cache import Cache

    def make(to: Path) -> None:
        cache = Cache(str(to), chunk_bytes=64 << 20)
        for number, (data, label) in enumerate(job.samples()):
            cache[number] = {"image": data, "label": label}
        cache.done()
        cache.merge()

    make_once(job.work / "data" / "lit", make)
    job.begin()
    client_options = getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", None) or {}
    downloader._OBSTORE_CLIENT_OPTIONS = {**client_options, "allow_http": True}
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
    dataset = litdata.StreamingDataset(
        input_dir="s3://data/lit",
        cache_dir=str(job.cache),
        shuffle=True,
        storage_options={"endpoint_url": job.endpoint, **keys},
    )
    # LitData 0.2.76 reads the whole chunk for each item if two workers share it (`_load_batched_item`): 124 samples/s.
    return map(len, litdata.StreamingDataLoader(dataset, batch_size=_BATCH, num_workers=1, collate_fn=as_they_come))


def measure_long(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one contender: samples/s of the whole run and without its first fifth, seconds to the first batch,
    memory."""
    work, target = Path(arguments.work), Path(arguments.target) / "remote-benchmark"
    make_once(work / "data" / "set", lambda to: shutil.copytree(arguments.set, to, dirs_exist_ok=True))
    shutil.rmtree(target, ignore_errors=True)
    (target / "cache").mkdir(parents=True)
    os.environ |= {**_S3, "PACKER_CACHE_DIR": str(target / "index")}
    with served(work, arguments.latency) as (url, server):
        os.environ |= {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url}
        job = Long(arguments.set, work, url, server, target / "cache")
        more = {name: chosen.options[name] for name in ("clump", "block", "open") if name in chosen.options}
        times, memory = [(0.0, 0)], 0.0
        for size in chosen.function(job, **more):
            times.append((time.perf_counter() - job.started, times[-1][1] + size))
            if len(times) % 64 == 2:
                memory = max(memory, pss_of_tree(server))
            if times[-1][0] > arguments.long:
                break
        seconds, samples = times[-1]
        used = {name: (value - job.before[name]) / samples for name, value in job.now().items()}
    shutil.rmtree(target, ignore_errors=True)
    fifth = next(entry for entry in times if entry[0] >= seconds / 5)
    return {
        "samples_s": samples / seconds,
        "later": (samples - fifth[1]) / max(1e-9, seconds - fifth[0]),
        "first_s": times[1][0],
        "s": seconds,
        "gets_sample": used["gets"],
        "kb_sample": used["bytes"] / 1e3,
        "cpu_us": used["cpu"] * 1e6,
        "server_us": used["server"] * 1e6,
        "mb": memory,
    }


# --- estimates for orders -----------------------------------------------------------------------------------------
@contender("global shuffle", orders=True)
@contender("16 blocks", orders=True)
@contender("woven, 256 open", orders=True)
def in_order() -> None:
    """A row of `measure_orders`."""


def measure_orders(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one order: samples/s after the first thousand, and the estimate."""
    os.environ["PACKER_CACHE_DIR"] = str(Path(arguments.target) / "remote-benchmark-index")
    import packer
    import readers

    with served(arguments.set, arguments.latency, arguments.mb_s) as (url, server):
        advice = packer.recommend_order(url, arguments.split, block_bytes=4 << 20)  # 16 blocks fit in memory
        estimated = next(report for report in advice.orders if report.name == chosen.name)
        with readers.open(url, arguments.split) as reader:
            order = eval(estimated.use, {"readers": readers, "reader": reader, "ranks": 1})
            stream = (row for epoch in itertools.count() for row in reader.stream(order, epoch=epoch))
            for _ in itertools.islice(stream, 1000):
                pass
            count, cpu, started = 0, cpu_seconds_of_tree() - cpu_seconds_of(server), time.perf_counter()
            while (seconds := time.perf_counter() - started) < arguments.orders:
                count += sum(1 for _ in itertools.islice(stream, _BATCH))
            cpu = cpu_seconds_of_tree() - cpu_seconds_of(server) - cpu
    return {
        "samples_s": count / seconds,
        "estimated": estimated.samples_s,
        "off": 100 * (estimated.samples_s * seconds / count - 1),
        "ms": 1e3 * advice.latency_s,
        "line": advice.bandwidth / 1e6,
        "cpu_us": 1e6 * cpu / count,
    }


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one contender: seconds, samples/s, MB/s of the requested samples, GETs."""
    import readers

    target = Path(arguments.target) / "remote-benchmark"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    os.environ["PACKER_CACHE_DIR"] = str(target / "index")
    with served(arguments.set, arguments.latency) as (url, _), readers.open(arguments.set, arguments.split) as local:
        size = min(arguments.samples, len(local) // 2)
        generator = np.random.default_rng(7)
        draws = [generator.choice(len(local), size, replace=False).tolist() for _ in range(arguments.draws + 1)]
        files = [(s.path, s.bytes) for split in local.dataset.splits.values() for s in split.shards]
        prime(2 * sum(size for _, size in files) + (1 << 28))
        place = arguments.set if chosen.name == LOCAL else url
        reader = readers.open(place, arguments.split) if chosen.name not in (RANGES, PLAIN, STAGE, WHOLE) else None
        jobs = [Job(url, indices, _ranges(local, indices), files, reader, target) for indices in draws]
        if chosen.name in (STAGE, WHOLE, SHUFFLED, WOVEN, LOCAL):
            jobs = jobs[:1]
        else:
            chosen.function(jobs.pop())
        gets, started = _gets(url), time.perf_counter()
        moved = sum(chosen.function(job) for job in jobs)
        seconds, gets = time.perf_counter() - started, _gets(url) - gets
        if reader is not None:
            reader.close()
    shutil.rmtree(target)
    samples = {} if chosen.name in (STAGE, WHOLE) else {"samples_s": sum(job.samples or size for job in jobs) / seconds}
    return {"s": seconds, "mb_s": moved / 1e6 / seconds, "gets": gets / len(jobs), **samples}


def _ranges(reader: Any, indices: list[int]) -> list[tuple[str, int, int]]:
    places = [reader.byte_range(i) for i in indices]
    return [(Path(path).relative_to(reader.path).as_posix(), offset, length) for path, offset, length in places]


def _gets(url: str) -> int:
    return _counts(url)[0]


def _counts(url: str) -> list[int]:
    """The server's GETs and bytes up to now."""
    with urllib.request.urlopen(f"{url}/-/count", timeout=60) as answer:
        return [int(word) for word in answer.read().split()[:2]]


BENCHMARK = Benchmark(
    title="Samples and sets from a web server with latency",
    columns=(
        Column("s", "s", "{:.2f}"),
        Column("samples_s", "samples/s"),
        Column("mb_s", "MB/s (min–max)"),
        Column("gets", "GETs", "{:.0f}"),
    ),
    key="mb_s",
    limits=(("mb_s", RANGES), ("mb_s", WHOLE)),
    measure=measure,
    claims=(Claim(MANY, "mb_s", 0.9, RANGES), Claim(STAGE, "mb_s", 0.9, WHOLE)),
)


LONG_RUNS = Benchmark(
    title="Encoded images from an object store with latency, long runs",
    columns=(
        Column("samples_s", "samples/s (min–max)"),
        Column("later", "after the first fifth"),
        Column("first_s", "first batch, s", "{:.2f}"),
        Column("s", "s", "{:.0f}"),
        Column("gets_sample", "GETs a sample", "{:.3f}"),
        Column("kb_sample", "kB a sample", "{:.1f}"),
        Column("cpu_us", "CPU µs a sample"),
        Column("server_us", "server's"),
        Column("mb", "MB of memory"),
    ),
    key="samples_s",
    limits=(("samples_s", PEERS), ("later", PEERS)),
    measure=measure_long,
)


ORDERS = Benchmark(
    title="Orders, and what `packer order` estimates",
    columns=(
        Column("samples_s", "samples/s (min–max)"),
        Column("estimated", "estimated"),
        Column("off", "error, %", "{:+.0f}"),
        Column("ms", "ms of a read, measured", "{:.1f}"),
        Column("line", "MB/s, measured"),
        Column("cpu_us", "CPU µs a sample"),
    ),
    key="samples_s",
    limits=(),
    measure=measure_orders,
)


def chosen_benchmark(arguments: argparse.Namespace) -> Benchmark:
    kind = "long" if arguments.long else "orders" if arguments.orders else ""
    keep_rows(lambda row: bool(row.options.get(kind)) if kind else not {"long", "orders"} & {*row.options})
    return {"long": LONG_RUNS, "orders": ORDERS, "": BENCHMARK}[kind]


if __name__ == "__main__":
    main(
        chosen_benchmark,
        __doc__,
        set="a local packed set, which is served",
        split=(None, "default: the only one, or train"),
        target="folder to stage to",
        latency=(20, "milliseconds before each answer"),
        samples=(256, "samples of a draw"),
        draws=(1, "number of draws"),
        mb_s=(0.0, "bandwidth of the server that --orders reads from; 0: no limit"),
        long=(0.0, "run only the long runs, this many seconds per row"),
        orders=(0.0, "run only the orders, this many seconds per row"),
        work=("", "folder of the long runs' bucket"),
    )
