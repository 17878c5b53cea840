"""Workers of engines that are killed at random: no sample is lost or repeated, and the bytes are the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import by_subject
from suites.shared_caches import HAS_MPI, MPIEXEC
from test_engine_contract import HAS_DASK, environ

import packer
from packer.testing.engines import DEADLINE, Slow, data_of, parts, wait_for
from packer.testing.samples import files_of

OPTIONS: dict[str, Any] = {"to": "tar", "samples_per_shard": 2}
SHARDS = 23
RANKS = """
import sys, packer
from packer.testing.engines import Slow
with packer.open_engine("mpi") as engine:
    if engine is not None:
        run = packer.Run(engine=engine)
        packer.convert(Slow(sys.argv[1]), "tar", sys.argv[2], shards=packer.Shards(samples=2), run=run)
"""


@pytest.fixture(scope="module")
def expected(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    packer.convert(tree, output=out, **by_subject(OPTIONS, workers=1))
    return data_of(files_of(out))


def below(pid: int) -> list[int]:
    """The processes below a process."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(other for child in children for other in below(child))]


@pytest.mark.skipif(not HAS_DASK, reason="distributed is not installed")
@pytest.mark.faults
def test_workers_of_dask(
    tree: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers, two of which are killed in each conversion; Dask repeats their shards."""
    from distributed import LocalCluster

    monkeypatch.setenv("PYTHONPATH", environ()["PYTHONPATH"])
    out, draw, killed = tmp_path / "out", random.Random(4), 0
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"}
    while killed < 50:
        shutil.rmtree(out, ignore_errors=True)
        with (
            LocalCluster(**options) as cluster,
            packer.open_engine("dask", cluster.scheduler_address) as engine,
            ThreadPoolExecutor(1) as side,
        ):
            victims = draw.sample([nanny.pid for nanny in cluster.workers.values()], 2)
            converting = side.submit(packer.convert, Slow(tree), output=out, engine=engine, **OPTIONS)
            for after, victim in zip(sorted(draw.sample(range(SHARDS - 3), 2)), victims, strict=True):
                wait_for(lambda: parts(out) >= after or converting.done(), f"{after} shards")  # noqa: B023
                if not converting.done():
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
            assert converting.result(DEADLINE).samples == 45
            assert data_of(files_of(out)) == expected
        print(f"\r{killed} workers of Dask killed", end="", flush=True)


@pytest.mark.skipif(not HAS_MPI or MPIEXEC is None, reason="mpi4py or mpiexec is not installed")
@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.faults)])
def test_ranks_of_mpi(tree: Path, tmp_path: Path, expected: dict[str, bytes], kills: int) -> None:
    """A rank that dies ends the job; the same conversion continues, here without MPI."""
    out, draw = tmp_path / "out", random.Random(5)
    command = [str(MPIEXEC), "-n", "3", sys.executable, "-c", RANKS, str(tree), str(out)]
    for _ in range(kills):
        shutil.rmtree(out, ignore_errors=True)
        job = subprocess.Popen(command, env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = draw.randrange(1, SHARDS - 5)
        wait_for(lambda: parts(out) >= after, f"{after} shards")  # noqa: B023
        ranks = [pid for pid in below(job.pid) if RANKS.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        victim = draw.choice(ranks)
        os.kill(victim, signal.SIGKILL)
        assert job.wait(DEADLINE) != 0
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the ranks to end")  # noqa: B023
        result = packer.convert(Slow(tree), output=out, **by_subject(OPTIONS, workers=1))
        assert result.shards_resumed >= after and data_of(files_of(out)) == expected
    print(f"\n{kills} ranks killed")
