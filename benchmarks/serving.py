"""Serving: samples from another node's server, on loopback: MB/s, and CPU time of client and server.

    python benchmarks/serving.py --set DIR --work DIR [--samples 2048] [--rounds 5]

All rows but the first use the same client: `cache.stores.remote`, with 24 requests at a time, and the CRC32C of each
sample. Samples are drawn at random, with repeats; all come from the page cache or shared memory. The limit is
`remote_server.py`, a minimal server in Python without tokens and without checks of requests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import Benchmark, Contender, contender, main
from machine import cpu_seconds_of, warm
from remote_server import served
from report import Claim, Column

__all__ = ["BENCHMARK"]

LOCAL, FLOOR = "pread of local files", "limit: asyncio, sendfile"
FILES, CACHE = "ours: a node's files", "ours: a node's cache"
_BATCH, _WARM = 64, 128


@contender(LOCAL, imports="readers crc32c")
@contextmanager
def local(arguments: argparse.Namespace, place: Path) -> Iterator[tuple[Any, int]]:
    import readers

    yield readers.open(arguments.set, "train", verify=True), 0


@contender(FLOOR, imports="readers obstore")
@contextmanager
def plain_server(arguments: argparse.Namespace, place: Path) -> Iterator[tuple[Any, int]]:
    import readers

    with served(arguments.set) as (url, process):
        yield readers.open(url, "train"), process


@contextmanager
def _from_node(own: Any, plain: Any, place: Path) -> Iterator[tuple[Any, int]]:
    """A reader of node 0, which has no samples and requests all from node 1, and the process of node 1's server, which
    serves the samples of `own`."""
    import readers
    from cache.serving import ServerProcess
    from cache.stores.copied import Neighbours, RowOwners

    options = {"nodes": 2, "host": "127.0.0.1", "serve": False}
    served = readers.share(own, place, node=1, **options)
    server = served.serve(ServerProcess)
    try:
        with readers.share(plain, place, node=0, wait_seconds=0, **options) as reader:
            all_there = RowOwners(np.array([0, 0, len(plain)], np.int64))
            yield readers.Reader(plain.table, Neighbours(plain.store, 0, all_there, reader.store.connect)), server.pid
    finally:
        served.close()


@contender(FILES, imports="readers obstore")
@contextmanager
def files(arguments: argparse.Namespace, place: Path) -> Iterator[tuple[Any, int]]:
    import readers

    plain = readers.open(arguments.set, "train")
    with _from_node(plain, plain, place) as pair:
        yield pair


@contender(CACHE, imports="readers obstore")
@contextmanager
def cache(arguments: argparse.Namespace, place: Path) -> Iterator[tuple[Any, int]]:
    import readers

    plain = readers.open(arguments.set, "train")
    with readers.cached(plain, 1.0, job=f"benchmark-{os.getpid()}") as kept:
        kept.prefill()
        with _from_node(kept, plain, place) as pair:
            yield pair


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """MB/s, and microseconds of CPU per sample of client and server."""
    place = Path(arguments.work) / "serving-benchmark"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    os.environ["PACKER_CACHE_DIR"] = str(place / "index")
    with chosen.function(arguments, place) as (reader, server):
        rng = np.random.default_rng(7)
        reader.read_many(rng.integers(0, len(reader), _WARM))
        batches = rng.integers(0, len(reader), (arguments.samples // _BATCH, _BATCH))
        started, own, server_s = time.perf_counter(), time.process_time(), cpu_seconds_of(server)
        moved = sum(len(data) for rows in batches for data in reader.read_many(rows))
        seconds = time.perf_counter() - started
        own, server_s = time.process_time() - own, cpu_seconds_of(server) - server_s
        near = getattr(reader.store.stats(), "near", None)
        assert near is None or near >= batches.size, "all of it came from the other node"
        reader.close()
    shutil.rmtree(place)
    figures = {"mb_s": moved / 1e6 / seconds, "samples_s": batches.size / seconds}
    return {**figures, "client_us": 1e6 * own / batches.size, "server_us": 1e6 * server_s / batches.size}


BENCHMARK = Benchmark(
    title="Samples from another node's server",
    columns=(
        Column("mb_s", "MB/s (min–max)"),
        Column("samples_s", "samples/s"),
        Column("client_us", "client, µs of CPU a sample", "{:.0f}"),
        Column("server_us", "server, µs of CPU a sample", "{:.0f}"),
    ),
    key="mb_s",
    limits=(("mb_s", FLOOR), ("server_us", FLOOR)),
    measure=measure,
    before=lambda chosen, arguments: warm([arguments.set]),
    claims=(Claim(FILES, "mb_s", 0.9, FLOOR), Claim(CACHE, "mb_s", 0.9, FLOOR)),
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        set="a local packed set",
        work="folder for the nodes' shared directory",
        samples=(2048, "samples to read"),
    )
