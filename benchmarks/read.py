"""Read: the bytes of samples, one process, no decoding, from what `pack.py --keep` left.

    python benchmarks/read.py --tree TREE --work DIR --mode random|sequential|batch [--cold] [--rounds 3] …

Every sample is consumed in the same way: one copy into a buffer that is there already. Warm runs make two passes:
the first includes page faults of rows that map files, the second does not. Cold runs empty the page cache first
(as root; else only of the files they read) and make one pass.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import read_peers  # noqa: F401  (registers contenders)
from harness import Benchmark, Contender, NotHere, base_parser, main
from machine import chill, memory_of_self, prime, reset_peak, warm
from read_rows import MMAP, PREAD, Place, Row
from report import Claim, Column

__all__ = ["BATCH_SAMPLES", "measure"]

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
