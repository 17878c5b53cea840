"""Pack: a tree of image files into shards, ours and everybody's, warm page cache.

    python benchmarks/pack.py --tree TREE --work DIR [--keep] [--rounds 3] [--python ffcv=PATH] …

Two clocks: until the writer returns, and until everything it wrote is on the disk (fsync of every file). Ours has
its own fsync within both, except in the rows "not synced", which return as `cat` and the peers do: with their output in
the page cache. `--keep` leaves each contender's output under DIR, which is what `read.py` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pack_limits
import pack_peers  # noqa: F401  (registers contenders)
from harness import CONTENDERS, REPOSITORY, Benchmark, Contender, NotHere, base_parser, contender, main, slug
from machine import cpu_seconds, folder_bytes, list_tree, peak_memory, prime, reset_peak, sync_below, warm
from report import Claim, Column

__all__ = ["BENCHMARK"]

FORMATS = ("hdf5", "tfrecord", "tar")
OURS = "2 processes; listing, header of every image parsed, CRC32C of samples and shards, index, fsync, commit"
LIKE = "the same work without fsync: returns, as cat and the peers do, with its output in the page cache"
_SPARE_BYTES = 1 << 30


@contextlib.contextmanager
def _unsynced() -> Iterator[None]:
    """Nothing is forced to the disk meanwhile, in this process and in those it forks."""
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

    @contender(f"ours: {container} command line", note="as above, and starting Python and the imports")
    def pack_command(tree: str, output: str) -> None:
        if importlib.util.find_spec("packer.__main__") is None:
            raise NotHere("packer/__main__.py is missing")
        command = [sys.executable, "-m", "packer", "convert", tree, "--to", container, "-o", output]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY))))
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([*command, "--workers", "2", "--json"], check=True, env=environment)


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
    cpu = cpu_seconds()
    more, returned, synced = _clock(chosen.function, str(arguments.tree), str(output))
    cpu = cpu_seconds() - cpu
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


def _clock(function: Callable[..., Any], tree: str, output: str) -> tuple[dict[str, Any], float, float]:
    started = time.perf_counter()
    more = function(tree, output)
    returned = time.perf_counter() - started
    sync_below(output)
    return more or {}, returned, time.perf_counter() - started


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Source files in the page cache, nothing of others on its way to the disk, no output of earlier runs."""
    if not arguments.keep:
        for name in CONTENDERS:
            shutil.rmtree(arguments.work / slug(name), ignore_errors=True)
    os.sync()
    warm([arguments.tree])


CAT, LOOP = pack_limits.CAT, pack_limits.LOOP
BENCHMARK = Benchmark(
    title="Pack, warm page cache",
    columns=(
        Column("files_s", "files/s (min–max)"),
        Column("mb_s", "MB/s"),
        Column("synced_files_s", "files/s to disk"),
        Column("synced_s", "s to disk", "{:.2f}"),
        Column("cpu_us", "CPU µs/file"),
        Column("overhead_percent", "overhead %", "{:.2f}"),
        Column("shard_overhead_percent", "of shards %", "{:.2f}"),
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


def parser() -> argparse.ArgumentParser:
    options = base_parser(__doc__)
    options.add_argument("--tree", required=True, type=Path, help="folder of class folders of image files")
    options.add_argument("--work", required=True, type=Path, help="folder for the outputs, one folder a contender")
    options.add_argument("--keep", action="store_true", help="keep the outputs, for read.py")
    options.add_argument("--tiny", action="store_true", help="judge by the claims for files of about 4 kB")
    options.add_argument("--prime", type=float, default=2.0, help="free memory to touch first, times the tree's bytes")
    return options


if __name__ == "__main__":
    chosen = dataclasses.replace(BENCHMARK, claims=TINY_CLAIMS) if "--tiny" in sys.argv else BENCHMARK
    main(chosen, parser())
