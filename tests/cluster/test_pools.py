"""Dask and Ray clusters on two nodes: conversions give the files of the local engine while workers are killed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from conversions import Conversion, kill, processes_of
from nodes import Nodes
from services import answers, free_port, need, service

from packer.testing.samples import files_of

pytestmark = pytest.mark.cluster

RAY = (sys.executable, "-m", "ray.scripts.scripts")
KILLS, CONVERSIONS = 25, 5  # for each kind of cluster


@dataclass(frozen=True)
class Pool:
    """A running cluster. options: packer's options to use it. workers: the pids of its processes that are packing
    now."""

    options: tuple[str, ...]
    nodes: Nodes
    workers: Callable[[], list[int]]


@contextlib.contextmanager
def _dask(folder: Path, nodes: Nodes) -> Iterator[Pool]:
    port = free_port()
    address, plain = f"tcp://10.0.0.1:{port}", ("--no-dashboard", "--protocol", "tcp")
    with contextlib.ExitStack() as stack:
        command = (sys.executable, "-m", "dask", "scheduler", "--host", "10.0.0.1", "--port", port, *plain)
        stack.enter_context(service(command, partial(answers, port, "10.0.0.1"), folder / "scheduler.log"))
        for node in nodes:
            words = (
                sys.executable,
                "-m",
                "dask",
                "worker",
                address,
                "--nworkers",
                2,
                "--nthreads",
                1,
                "--local-directory",
                nodes.local,
            )
            log = folder / f"{node.name}.log"
            up = partial(_said, log, "Registered to", 2)
            stack.enter_context(service(node.command(*words, "--no-dashboard"), up, log))
        yield Pool(("--engine", "dask", "--scheduler", address), nodes, partial(processes_of, "spawn_main", "--multi"))


@contextlib.contextmanager
def _ray(folder: Path, nodes: Nodes) -> Iterator[Pool]:
    port = free_port()
    address, plain = f"10.0.0.1:{port}", ("--block", "--disable-usage-stats", "--object-store-memory", 100 << 20)
    with contextlib.ExitStack() as stack:
        command = [*RAY, "start", "--head", "--node-ip-address=10.0.0.1", f"--port={port}", "--num-cpus=0", *plain]
        command += ["--include-dashboard=false", "--temp-dir=/tmp/ray-of-tests"]
        stack.callback(subprocess.run, ["rm", "-rf", "/tmp/ray-of-tests"], check=False)
        log = folder / "head.log"
        stack.enter_context(service(command, partial(_said, log, "Ray runtime started", 1), log))
        for node in nodes:
            words = (*RAY, "start", f"--address={address}", f"--node-ip-address={node.address}", "--num-cpus=2")
            log = folder / f"{node.name}.log"
            up = partial(_said, log, "Ray runtime started", 1)
            stack.enter_context(service(node.command(*words, *plain), up, log))
        yield Pool(("--engine", "ray", "--scheduler", address), nodes, partial(processes_of, "ray::_call"))


POOLS = {"dask": (_dask, "distributed"), "ray": (_ray, "ray")}


def _said(log: Path, words: str, times: int) -> bool:
    return log.exists() and log.read_text(errors="replace").count(words) >= times


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    need()
    return Conversion(tmp_path_factory.mktemp("conversion"))


@pytest.fixture(params=sorted(POOLS))
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pool]:
    need()
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(16).hex()}.items():
        monkeypatch.setenv(name, value)
    start, package = POOLS[request.param]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (PyPI)")
    folder = tmp_path_factory.mktemp(request.param)
    with Nodes(folder, 2) as nodes, start(folder, nodes) as pool:
        yield pool


def ended(job: subprocess.Popen[str], seconds: float = 240) -> str:
    """Wait for a conversion; returns its output."""
    out, _ = job.communicate(timeout=seconds)
    assert job.returncode == 0, out
    return out


def test_convert_as_the_local_engine_does(pool: Pool, conversion: Conversion, tmp_path: Path) -> None:
    for number in range(2):
        out = tmp_path / str(number)
        ended(conversion.start(out, *pool.options))
        assert files_of(out) == conversion.files


def test_workers_killed_at_random_moments(pool: Pool, conversion: Conversion, tmp_path: Path) -> None:
    draws = random.Random(1)
    for number in range(CONVERSIONS):
        out = tmp_path / str(number)
        job, killed = conversion.start(out, *pool.options), 0
        while job.poll() is None and killed < KILLS // CONVERSIONS:
            time.sleep(draws.uniform(0.1, 1.0))
            workers = pool.workers()
            if workers and conversion.shards(out) and kill(draws.choice(workers)):
                killed += 1
        ended(job)
        assert files_of(out) == conversion.files
        assert killed, "the conversion was over before any worker was killed"


def test_a_node_fails(pool: Pool, conversion: Conversion, tmp_path: Path) -> None:
    """The node's plug is pulled. With Ray only the processes end and the network stays, since Ray waits for minutes
    otherwise."""
    out = tmp_path / "out"
    job = conversion.start(out, *pool.options)
    while job.poll() is None and conversion.shards(out) < 5:
        time.sleep(0.1)
    if "ray" in pool.options:
        pool.nodes["n2"].kill_processes()
    else:
        pool.nodes["n2"].switch_off()
    assert job.poll() is None, "the conversion was not in the middle when the node failed"
    ended(job)
    assert files_of(out) == conversion.files
