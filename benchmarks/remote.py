"""Remote: samples and whole sets from a web server with latency, on loopback.

    python benchmarks/remote.py --set DIR --target DIR [--latency 20] [--samples 256] [--rounds 3] …

The set is served by a process of its own that waits so many milliseconds before each answer. Samples are drawn at
random from the whole split. Opening, the index and a first draw, which opens connections and starts threads, are not in
the clock; `gets` counts what the clock saw. Staging writes to a directory below --target, which is removed.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import os
import shutil
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Benchmark, Contender, contender, main
from machine import prime
from remote_server import served
from report import Claim, Column

__all__ = ["BENCHMARK"]

MANY, SINGLE, AHEAD, STAGE = "ours: read_many", "ours: one by one", "ours: one by one, announced", "ours: stage"
SHUFFLED, WOVEN = "ours: ImageLoader, Shuffled", "ours: ImageLoader, woven"
RANGES, PLAIN, WHOLE = "limit: obstore.get_ranges", "http.client, one by one", "limit: http.client, files in 8 threads"


@dataclass
class Job:
    """What a contender gets. ranges: (shard, offset, length) of the samples that are wanted."""

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


@contender(AHEAD, imports="readers obstore", note="prefetch of all, then read of each")
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


@contender(PLAIN, note="one connection that stays open")
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


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """One contender: seconds, samples/s, MB/s of what was wanted, GETs."""
    import readers

    target = Path(arguments.target) / "remote-benchmark"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    os.environ["PACKER_CACHE_DIR"] = str(target / "index")
    with served(arguments.set, arguments.latency) as (url, _), readers.open(arguments.set, arguments.split) as local:
        size = min(arguments.samples, len(local) // 2)
        draws = np.random.default_rng(7).choice(len(local), (2, size), replace=False).tolist()
        files = [(s.path, s.bytes) for split in local.dataset.splits.values() for s in split.shards]
        prime(2 * sum(size for _, size in files) + (1 << 28))
        ours = readers.open(url, arguments.split) if chosen.name not in (RANGES, PLAIN, STAGE, WHOLE) else None
        jobs = [Job(url, wanted, _ranges(local, wanted), files, ours, target) for wanted in draws]
        job = jobs.pop()
        if chosen.name not in (STAGE, WHOLE, SHUFFLED, WOVEN):
            chosen.function(*jobs)
        gets, started = _gets(url), time.perf_counter()
        moved = chosen.function(job)
        seconds, gets = time.perf_counter() - started, _gets(url) - gets
        if ours is not None:
            ours.close()
    shutil.rmtree(target)
    samples = {} if chosen.name in (STAGE, WHOLE) else {"samples_s": (job.samples or len(job.wanted)) / seconds}
    return {"s": seconds, "mb_s": moved / 1e6 / seconds, "gets": gets, **samples}


def _ranges(reader: Any, wanted: list[int]) -> list[tuple[str, int, int]]:
    places = [reader.byte_range(i) for i in wanted]
    return [(Path(path).relative_to(reader.path).as_posix(), offset, length) for path, offset, length in places]


def _gets(url: str) -> int:
    with urllib.request.urlopen(f"{url}/-/count", timeout=60) as answer:
        return int(answer.read())


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


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        set="a packed set on this machine, which is served",
        split=(None, "default: the only one, or train"),
        target="folder to stage to",
        latency=(20, "milliseconds before each answer"),
        samples=(256, "that are read"),
    )
