"""The suite of engines: MPI, a Dask cluster, Ray, and an executor of the standard library as an example of any
executor.

Workers may die: no sample is lost or repeated, and the bytes are the same.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import convert
from suites.programs import Notes, run_packer
from suites.shared_caches import HAS_MPI, MPIEXEC

import packer
from cache.errors import MissingExtraError, WorkerError
from cache.messages import Silent
from packer.cli.group import cli
from packer.testing.engines import (
    DEADLINE,
    EngineSuite,
    Run,
    Slow,
    converted,
    data_of,
    die_once,
    double,
    parts,
    run_here,
    wait_for,
)
from packer.testing.samples import files_of
from packer.workers import Workers, run_shards

HAS_DASK = importlib.util.find_spec("distributed") is not None
HAS_RAY = importlib.util.find_spec("ray") is not None
TESTS = Path(__file__).resolve().parent
ON_PATH = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])}
ENVIRON = {**os.environ, **ON_PATH}
ON_DASK = """
import sys, packer
from packer.testing.engines import Slow
with packer.open_engine("dask", sys.argv[1]) as engine:
    run = packer.Run(engine=engine)
    packer.convert(Slow(sys.argv[2]), "tar", sys.argv[3], shards=packer.Shards(samples=4), run=run)
"""
ON_RANKS = """
import sys, packer
from packer.testing.engines import Slow
with packer.open_engine("mpi") as engine:
    if engine is not None:
        run = packer.Run(engine=engine)
        packer.convert(Slow(sys.argv[1]), "tar", sys.argv[2], shards=packer.Shards(samples=2), run=run)
"""
SHARDS = 23  # two samples each
needs_mpi = pytest.mark.skipif(not HAS_MPI or MPIEXEC is None, reason="mpi4py or mpiexec is not installed")


def on_three_ranks(script: str, *arguments: object) -> list[str]:
    return [str(MPIEXEC), "-n", "3", sys.executable, "-c", script, *map(str, arguments)]


class TestThreads(EngineSuite):
    """An executor of two threads, standing for one from another package."""

    @pytest.fixture
    def run(self) -> Iterator[Run]:
        with ThreadPoolExecutor(2) as engine:
            yield run_here(engine)


@pytest.fixture(scope="module")
def failed_on_ranks(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The messages of the failed checks on three MPI ranks, two of which work. One job runs all checks, as starting it
    is slow."""
    script = (
        "import sys, pathlib; from packer.testing import engines; "
        "engines.check_on_rank_0('mpi', *map(pathlib.Path, sys.argv[1:]))"
    )
    command = on_three_ranks(script, tree, tmp_path_factory.mktemp("mpi"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRON)
    assert done.returncode == 0 and "all checks" in done.stdout, done.stdout + done.stderr
    return dict(failure.split("\n", 1) for failure in done.stdout.split("FAILED ")[1:])


@needs_mpi
class TestMpi(EngineSuite):
    @pytest.fixture
    def run(self, failed_on_ranks: dict[str, str]) -> Run:
        def run(check: str, tree: Path, folder: Path) -> None:
            assert check not in failed_on_ranks, failed_on_ranks[check]

        return run


@pytest.fixture(scope="module")
def dask() -> Iterator[tuple[str, Executor]]:
    """The address of a Dask cluster of two processes, and the cluster as an engine."""
    if not HAS_DASK:
        pytest.skip("distributed is not installed")
    from distributed import LocalCluster

    with ExitStack() as opened:
        patch = opened.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", ON_PATH["PYTHONPATH"])
        address: dict[str, Any] = {"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"}
        cluster = opened.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, **address))
        engine = opened.enter_context(packer.open_engine("dask", cluster.scheduler_address))
        yield cluster.scheduler_address, engine


class TestDask(EngineSuite):
    """Two processes."""

    @pytest.fixture
    def run(self, dask: tuple[str, Executor]) -> Run:
        return run_here(dask[1])

    def test_a_worker_that_dies_is_replaced(self, dask: tuple[str, Executor], tmp_path: Path) -> None:
        marker = tmp_path / "died"
        assert run_shards(die_once, [marker], 1, Workers(engine=dask[1]), Silent(), (0, 0)) == [1]
        assert marker.exists()

    def test_from_the_command_line(self, dask: tuple[str, Executor], tree: Path, tmp_path: Path) -> None:
        """In a folder other than that of the workers, with relative paths."""
        (tmp_path / "images").symlink_to(tree)
        command = ["images", "--to", "tar", "-o", "out", "--samples-per-shard", 4]
        done = run_packer("convert", *command, "--engine", "dask", "--scheduler", dask[0], cwd=tmp_path, env=ENVIRON)
        assert done.returncode == 0, done.stderr
        converted(None, tree, tmp_path / "local")
        assert data_of(files_of(tmp_path / "out")) == data_of(files_of(tmp_path / "local"))

    def test_ctrl_c_stops_the_workers(self, dask: tuple[str, Executor], tree: Path, tmp_path: Path) -> None:
        """The same conversion continues afterwards."""
        out = tmp_path / "out"
        command = [sys.executable, "-c", ON_DASK, dask[0], str(tree), str(out)]
        process = subprocess.Popen(command, env=ENVIRON, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: parts(out) >= 2, "two shards")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300)[1].rstrip().endswith("KeyboardInterrupt")
        assert not list(out.glob(".packing/.run-*")) and parts(out) < 12
        assert run_shards(double, [4], 1, Workers(engine=dask[1]), Silent(), (0, 0)) == [8]  # the workers are free
        wait_for(lambda: not list(out.glob(".packing/*.tar.*.tmp")), "the other worker, which stops at its next sample")
        assert parts(out) < 12, "a worker is still busy"
        assert converted(dask[1], tree, out).shards_resumed >= 2
        assert packer.verify(out, against=tree, workers=1).ok


@pytest.fixture(scope="module")
def ray() -> Iterator[Executor]:
    """A Ray cluster on this machine."""
    if not HAS_RAY:
        pytest.skip("ray is not installed")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": ON_PATH})
    with packer.open_engine("ray") as engine:
        assert engine is not None
        yield engine
    ray.shutdown()


class TestRay(EngineSuite):
    @pytest.fixture
    def run(self, ray: Executor) -> Run:
        return run_here(ray)


class _Broken(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("no nodes left"))
        return future


def test_an_engine_that_loses_a_task(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"lost a shard \(RuntimeError: no nodes left\); run the same command again"):
        converted(_Broken(), tree, tmp_path / "out")


class _Empty(ThreadPoolExecutor):
    """Has no worker until the message about that was printed."""

    slots = 0

    def __init__(self, notes: Notes) -> None:
        super().__init__(1)
        self.submit(wait_for, lambda: bool(notes.lines), "a note")


def test_an_engine_without_workers(tmp_path: Path) -> None:
    notes = Notes()
    with _Empty(notes) as engine:
        assert run_shards(double, [3], 1, Workers(engine=engine), notes, (0, 0), folder=tmp_path) == [6]
    assert notes.lines == ["the engine has no workers; waiting for some to join it"]


def test_workers_of_another_version_are_refused(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer.workers.__version__", "0.0.1")
    with ThreadPoolExecutor(1) as engine, pytest.raises(WorkerError, match=r"has packer 0.0.1, the command runs"):
        converted(engine, tree, tmp_path / "out")


def test_invalid_engines(tree: Path, tmp_path: Path) -> None:
    wrong = {"slurm": "no engine 'slurm'; choose one of mpi, dask, ray", "dask": "needs a scheduler"}
    for name, message in wrong.items():
        refused = pytest.raises((ValueError, MissingExtraError), match=rf"{message}|pip install")
        with refused, packer.open_engine(name):
            pass
    with pytest.raises(TypeError, match=r"engine is an Executor, as returned by packer.open_engine, not 'dask'"):
        convert(tree, tmp_path / "out", engine="dask", workers=None)
    messages = [
        CliRunner().invoke(cli, ["verify", str(tree), *options]).output
        for options in (["--scheduler", "tcp://x:1"], ["--engine", "slurm"])
    ]
    assert "name its kind with --engine" in messages[0] and "'slurm' is not one of local, mpi, dask, ray" in messages[1]


def below(pid: int) -> list[int]:
    """The descendants of a process."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(other for child in children for other in below(child))]


@needs_mpi
@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.faults)])
def test_ranks_of_mpi_killed_at_random(tree: Path, tmp_path: Path, kills: int) -> None:
    """A rank that dies ends the job; the same conversion continues, this time without MPI."""
    out, draw = tmp_path / "out", random.Random(5)
    expected = data_of(files_of(convert(tree, tmp_path / "whole", samples=2).output))
    for _ in range(kills):
        shutil.rmtree(out, ignore_errors=True)
        command = on_three_ranks(ON_RANKS, tree, out)
        job = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = draw.randrange(1, SHARDS - 5)
        wait_for(lambda: parts(out) >= after, f"{after} shards")  # noqa: B023
        ranks = [pid for pid in below(job.pid) if ON_RANKS.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(draw.choice(ranks), signal.SIGKILL)
        assert job.wait(DEADLINE) != 0
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the ranks to end")  # noqa: B023
        assert convert(Slow(tree), out, samples=2).shards_resumed >= after
        assert data_of(files_of(out)) == expected
