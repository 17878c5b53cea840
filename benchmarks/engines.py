"""Engines: the same conversion with one worker and with two, by each engine that is here, in turn.

    python benchmarks/engines.py --tree TREE --work DIR [--rounds 5] [--only local,mpi] [--options "--check decode"]

The clock is that of the command, from the listing to the commit, without starting Python, ranks or a cluster. The ratio
is taken within each round. All outputs must have the same bytes in the same files, but for what names the source.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import cpu_seconds, sync_below, warm

from cache.checksums import file_checksum

__all__ = ["main"]

WORKERS = (1, 2)
SHARDS = (".tar", ".h5", ".tfrecord")
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
Command = Callable[[Sequence[str]], list[str]]


@contextmanager
def local(workers: int) -> Iterator[Command]:
    yield lambda convert: [*convert, "--workers", str(workers)]


@contextmanager
def mpi(workers: int) -> Iterator[Command]:
    yield lambda convert: [str(MPIEXEC), "-n", str(workers + 1), *convert, "--engine", "mpi"]


@contextmanager
def dask(workers: int) -> Iterator[Command]:
    from distributed import LocalCluster

    with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        address = cluster.scheduler_address
        yield lambda convert: [*convert, "--engine", "dask", "--scheduler", address]


@contextmanager
def ray(workers: int) -> Iterator[Command]:
    import ray

    address = ray.init(num_cpus=workers, include_dashboard=False).address_info["address"]
    try:
        yield lambda convert: [*convert, "--engine", "ray", "--scheduler", address]
    finally:
        ray.shutdown()


ENGINES = {"local": local, "mpi": mpi, "dask": dask, "ray": ray}


def missing(engine: str) -> str:
    """Why an engine cannot run here; "" where it can."""
    package = {"mpi": "mpi4py", "dask": "distributed", "ray": "ray"}.get(engine)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return "no mpiexec" if engine == "mpi" and MPIEXEC is None else ""


def convert(engine: str, workers: int, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int]]:
    """Run one conversion: its figures, and the checksum of each file of its shards and indexes."""
    out = arguments.work / f"{engine}-{workers}"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "packer", "convert", str(arguments.tree), "-o", str(out), "--json"]
    command += ["--to", arguments.to, *shlex.split(arguments.options)]
    cpu = cpu_seconds()
    with ENGINES[engine](workers) as complete:
        sync_below(arguments.work)
        done = subprocess.run(complete(command), check=True, capture_output=True, text=True)
    cpu = cpu_seconds() - cpu  # with that of starting a cluster
    result = json.loads(done.stdout)
    files = [path for path in out.rglob("*") if path.is_file() and (path.parent != out or path.suffix in SHARDS)]
    sums = {str(path.relative_to(out)): file_checksum(path) for path in files}
    return {"s": result["seconds"], "samples_s": result["samples"] / result["seconds"], "cpu_s": cpu}, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to", default="tar", choices=("tar", "hdf5", "tfrecord"))
    parser.add_argument("--only", help="engines, separated by commas")
    parser.add_argument("--options", default="", help="of packer convert")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(ENGINES)
    for engine in [engine for engine in chosen if missing(engine)]:
        print(f"{engine}: did not run: {missing(engine)}")
        chosen.remove(engine)
    arguments.work.mkdir(parents=True, exist_ok=True)
    warm([arguments.tree])
    figures: dict[tuple[str, int], list[dict[str, Any]]] = {}
    expected = None
    for _ in range(arguments.rounds):
        for engine in chosen:
            for workers in WORKERS:
                found, sums = convert(engine, workers, arguments)
                expected = expected or sums
                if sums != expected:
                    raise SystemExit(f"{engine} with {workers} workers made other bytes than {chosen[0]} with one")
                figures.setdefault((engine, workers), []).append(found)
    print(
        f"{os.cpu_count()} CPUs, {arguments.rounds} rounds, medians; the same bytes in all {len(expected or ())} files"
    )
    print(f"{'engine':8}{'samples/s, 1':>14}{'samples/s, 2':>14}{'2 over 1':>10}{'range':>14}{'CPU s, 1':>10}{'2':>8}")
    for engine in chosen:
        one, two = (figures[engine, workers] for workers in WORKERS)
        ratios = [a["s"] / b["s"] for a, b in zip(one, two, strict=True)]
        rates = [statistics.median(row["samples_s"] for row in rows) for rows in (one, two)]
        cpu = [statistics.median(row["cpu_s"] for row in rows) for rows in (one, two)]
        span = f"{min(ratios):.2f}-{max(ratios):.2f}"
        print(
            f"{engine:8}{rates[0]:>14,.0f}{rates[1]:>14,.0f}{statistics.median(ratios):>10.2f}{span:>14}"
            f"{cpu[0]:>10.1f}{cpu[1]:>8.1f}"
        )


if __name__ == "__main__":
    main()
