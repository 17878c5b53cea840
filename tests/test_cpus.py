"""How many CPUs one process may keep busy: what is its own is not divided, what ranks of a node share is, once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import readers
from cache.node import usable_cpus
from readers.loader import ImageLoader

NODE = 32  # CPUs of the node, or what a container or a user left of it
HERE = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}


def step(tasks: int, on_node: int, per_task: int | None = None) -> dict[str, str]:
    """What srun tells its first task, of some on one node."""
    told = {**HERE, "SLURM_NTASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks)}
    told["SLURM_CPUS_ON_NODE"] = str(on_node)
    return told if per_task is None else {**told, "SLURM_CPUS_PER_TASK": str(per_task)}


def batch(tasks: int, on_node: int, per_task: int) -> dict[str, str]:
    """What a batch script is told: no step."""
    env = step(tasks, on_node, per_task)
    return {name: value for name, value in env.items() if name not in ("SLURM_STEP_ID", "SLURM_PROCID")}


def torchrun(ranks: int) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(names, ("0", str(ranks), "0", str(ranks)), strict=True))


def mpirun(ranks: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, ("0", str(ranks)) * 2, strict=True)}


CASES = [
    # name, environment, CPUs of its own mask, expected
    ("a workstation", {}, 32, 32),
    ("torchrun on a workstation", torchrun(4), 32, 8),
    ("torchrun with more ranks than CPUs", torchrun(64), 32, 1),
    ("torchrun that binds its ranks", torchrun(4), 8, 8),
    ("mpirun that binds to cores", mpirun(4), 1, 1),
    ("mpirun that binds to sockets", mpirun(8), 16, 4),
    ("srun -n4 -c8, bound", step(4, 32, 8), 8, 8),
    ("srun -n4 -c8, not bound", step(4, 32, 8), 32, 8),
    ("srun -n4 -c2 on a node of our own", step(4, 32, 2), 32, 2),
    ("srun -n4, not bound", step(4, 4), 32, 1),
    ("srun -n4 on a node of our own", step(4, 32), 32, 8),
    ("srun -n4 of a job with -c8, on 4 CPUs", step(4, 4, 8), 32, 1),
    ("srun -n1 -c32 torchrun", {**step(1, 32, 32), **torchrun(4)}, 32, 8),
    ("srun -n1 torchrun on a node of our own", {**step(1, 32), **torchrun(4)}, 32, 8),
    ("srun -n2 -c16, two torchruns", {**step(2, 32, 16), **torchrun(2)}, 32, 8),
    ("sbatch -n1 -c32, torchrun", {**batch(1, 32, 32), **torchrun(4)}, 32, 8),
    ("sbatch -n4 -c8, torchrun", {**batch(4, 32, 8), **torchrun(4)}, 32, 8),
    ("sbatch -n4 -c8, mpirun by a step of one task", {**step(1, 32, 8), **mpirun(4)}, 32, 8),
    ("sbatch -n4 -c8, one process", batch(4, 16, 8), 32, 16),
    ("qsub -l select=2:ncpus=8, the script", {"PBS_JOBID": "7", "NCPUS": "8"}, 32, 8),
    ("qsub -l select=1:ncpus=8, mpiexec", {"PBS_JOBID": "7", "NCPUS": "8", **mpirun(4)}, 32, 2),
    ("qsub -l nodes=2:ppn=6 of Torque", {"PBS_JOBID": "7", "PBS_NUM_PPN": "6"}, 32, 6),
    ("NCPUS without PBS", {"NCPUS": "8"}, 32, 32),
    ("bsub -n8 on two hosts, the script", {"LSB_MCPU_HOSTS": "a 4 b 4"}, 32, 4),
    ("bsub -n8 on two hosts, blaunch", {"LSB_MCPU_HOSTS": "a 6 b 2", "LSF_PM_TASKID": "7"}, 32, 1),
    ("bsub -n2 with 16 CPUs a slot, bound", {"LSB_MCPU_HOSTS": "a 1 b 1", "LSB_AFFINITY_HOSTFILE": "/f"}, 16, 16),
    ("bsub -n8, mpirun", {"LSB_MCPU_HOSTS": "a 8", **mpirun(4)}, 32, 2),
    ("qsub -pe smp 4 of Grid Engine", {"NSLOTS": "4", "JOB_ID": "1"}, 32, 4),
    ("qsub -pe mpi 64 of Grid Engine", {"NSLOTS": "64", "NHOSTS": "2", "JOB_ID": "1"}, 32, 32),
    ("a step whose variables contradict each other", {**step(4, 32, 8), "SLURM_PROCID": "9"}, 32, 32),
]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """CPUs of this process's mask; that of its parent is the whole node."""
    sizes = {"own": NODE}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(NODE if pid else sizes["own"])))
    return sizes


@pytest.mark.parametrize(("environ", "own", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_its_own_is_not_divided_again(
    masks: dict[str, int], tmp_path: Path, environ: dict[str, str], own: int, expected: int
) -> None:
    masks["own"] = own
    assert usable_cpus(environ, tmp_path, "0::/\n") == expected


def test_a_quota_is_shared_by_the_ranks_in_it(masks: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("800000 100000")
    assert usable_cpus({}, tmp_path, "0::/\n") == 8
    assert usable_cpus(torchrun(4), tmp_path, "0::/\n") == 2


def test_a_mask_that_the_launcher_has_too_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under taskset, or in the cpuset of a container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cpus(torchrun(4), tmp_path, "0::/\n") == 2


def test_a_loader_in_a_task_has_the_threads_of_the_task(
    masks: dict[str, int], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in step(4, 32, 8).items():
        monkeypatch.setenv(name, value)
    with readers.open_folder(tree / "train") as reader:
        assert ImageLoader(reader, 2).threads == 8
