"""Slurm array jobs: examples/slurm/convert_array.sbatch unchanged, requeued, on nodes that fail, and twice at once; and
staging by array tasks and by eight ranks. See two_nodes.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import OPTIONS, Conversion
from jobs import running
from services import need
from two_nodes import Cluster

from packer.testing.samples import files_of

pytestmark = pytest.mark.cluster

TASKS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need()
    with running("linuxproc") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    need()
    return Conversion(tmp_path_factory.mktemp("conversion"))


def array(cluster: Cluster, conversion: Conversion, out: Path, tasks: str = f"0-{TASKS - 1}", *more: object) -> str:
    """Submit the example; returns the job id."""
    options = f"{' '.join(OPTIONS)} --workers 1"
    environ = {"SOURCE": conversion.tree, "OUT": out, "TASKS": TASKS, "CONVERT_OPTIONS": options}
    plain = ("--cpus-per-task=8", f"--array={tasks}", *more)  # four tasks a node at a time
    variables = {name: str(value) for name, value in environ.items()}
    return cluster.submit(*plain, "examples/slurm/convert_array.sbatch", environ=variables)


def committed(cluster: Cluster, out: Path, *jobs: str) -> str:
    """Submit the last step after these jobs, wait for it, and return its state."""
    after = "--dependency=" + ",".join(f"afterok:{job}" for job in jobs)
    job = cluster.submit(after, "--kill-on-invalid-dep=yes", f"--wrap=packer commit {out}")
    state = cluster.ended(job, 600)
    assert state == "COMPLETED", "\n".join(cluster.output(job) for job in (*jobs, job))
    return state


def shards(cluster: Cluster, conversion: Conversion, out: Path, count: int, job: str) -> None:
    """Wait until at least this many shards exist."""
    cluster.wait(lambda: conversion.shards(out) >= count, 200, f"{count} shards", lambda: cluster.output(job))


def test_two_jobs_convert_to_one_folder_at_once(cluster: Cluster, conversion: Conversion, tmp_path: Path) -> None:
    """Each task runs twice, mostly at the same time."""
    for number in range(2):
        out = tmp_path / str(number)
        jobs = [array(cluster, conversion, out) for _ in range(2)]
        committed(cluster, out, *jobs)
        assert files_of(out) == conversion.files


def test_tasks_are_requeued(cluster: Cluster, conversion: Conversion, tmp_path: Path) -> None:
    """Four tasks are requeued in the middle."""
    out, draws = tmp_path / "out", random.Random(2)
    job = array(cluster, conversion, out)
    shards(cluster, conversion, out, 4, job)
    lost = draws.sample(range(TASKS), 4)
    for task in lost:
        cluster.run("scontrol", "requeue", f"{job}_{task}")
    committed(cluster, out, job)
    for task in lost:
        assert "Restarts=1" in cluster.run("scontrol", "show", "job", f"{job}_{task}")
        assert files_of(out) == conversion.files


def test_a_node_fails(cluster: Cluster, conversion: Conversion, tmp_path: Path) -> None:
    """The tasks of the failed node run again."""
    out = tmp_path / "out"
    job = array(cluster, conversion, out)
    shards(cluster, conversion, out, 6, job)
    cluster.switch_off("n10")
    try:
        committed(cluster, out, job)
    finally:
        cluster.switch_on("n10")
        cluster.wait(lambda: "n10 idle" in cluster.run("sinfo", "-hNo", "%N %T"), 90, "the node")
    assert files_of(out) == conversion.files


def test_a_commit_without_all_tasks_names_them(cluster: Cluster, conversion: Conversion, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = array(cluster, conversion, out, "0,1,3-7")
    states = [cluster.ended(f"{job}_{task}", 300) for task in (0, 1, 3, 4, 5, 6, 7)]
    assert states == ["COMPLETED"] * 7, cluster.output(job)
    output = cluster.run("packer", "commit", out, check=False)
    assert "Traceback" not in output and "2" in output and not (out / "dataset.json").exists(), output
    committed(cluster, out, array(cluster, conversion, out, "2"))
    assert files_of(out) == conversion.files
