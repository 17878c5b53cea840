"""Engines: the same conversion with one worker and with two, by each installed engine in turn.

    python benchmarks/engines.py --tree TREE --work DIR [--rounds 5] [--only local,mpi] [--options "--check decode"]

The time is the command's own, from the listing to the commit, without the start of Python, ranks or a cluster. All
outputs must be byte-identical, except for the metadata that names the source.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, NotHere, contender, main
from machine import cpu_seconds, sync_below, warm
from report import Column

WORKERS = (1, 2)
SHARDS = (".tar", ".h5", ".tfrecord")
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
Command = Callable[[Sequence[str]], list[str]]


@contextmanager
def local(workers: int) -> Iterator[Command]:
    yield lambda convert: [*convert, "--workers", str(workers)]


@contextmanager
def mpi(workers: int) -> Iterator[Command]:
    if MPIEXEC is None:
        raise NotHere("no mpiexec")
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


for _engine, _imports in ((local, ""), (mpi, "mpi4py"), (dask, "distributed"), (ray, "ray")):
    for _workers in WORKERS:
        _name = f"{_engine.__name__}, {_workers} worker{'s' * (_workers > 1)}"
        contender(_name, imports=_imports, workers=_workers)(_engine)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Convert once. Raises RuntimeError if shards and indexes differ from the first conversion's."""
    from cache.checksums import file_checksum

    out, sums = arguments.work / "set", arguments.work / "sums.json"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "packer", "convert", str(arguments.tree), "-o", str(out), "--json"]
    command += ["--to", arguments.to, *shlex.split(arguments.options)]
    cpu = cpu_seconds()
    with chosen.function(chosen.options["workers"]) as complete:
        sync_below(arguments.work)
        done = subprocess.run(complete(command), check=True, capture_output=True, text=True)
    cpu = cpu_seconds() - cpu  # includes the start of a cluster
    result = json.loads(done.stdout)
    files = [path for path in out.rglob("*") if path.is_file() and (path.parent != out or path.suffix in SHARDS)]
    made = {str(path.relative_to(out)): file_checksum(path) for path in files}
    if not sums.exists():
        sums.write_text(json.dumps(made))
    if json.loads(sums.read_text()) != made:
        raise RuntimeError("the bytes differ from the first conversion's")
    return {"samples_s": result["samples"] / result["seconds"], "cpu_s": cpu, "files": len(made)}


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    arguments.work.mkdir(parents=True, exist_ok=True)
    if not arguments.one:
        (arguments.work / "sums.json").unlink(missing_ok=True)
    return Benchmark(
        title="One conversion by each engine, the same bytes in all files",
        columns=(
            Column("samples_s", "samples/s (min–max)"),
            Column("cpu_s", "CPU s", "{:.1f}"),
            Column("files", "identical files"),
        ),
        key="samples_s",
        limits=[("samples_s", f"{engine}, 1 worker") for engine in ("local", "mpi", "dask", "ray")],
        measure=measure,
        before=lambda chosen, given: warm([given.tree]),
    )


if __name__ == "__main__":
    main(
        _benchmark,
        __doc__,
        tree="the source to convert",
        work="folder for the output",
        to=("tar", "the format", ("tar", "hdf5", "tfrecord")),
        options=("", "further options of packer convert"),
        rounds=5,
    )
