"""Ranks from the environment variables of launchers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cache.launchers import Launcher, by_names, job_name, register, registered, unregister
from cache.node import Ranks, detect_ranks, rank_and_world_size
from cache.staging.session import candidates
from readers.order import NodeLocal
from readers.torch import EpochSampler


def env(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = env("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2")
SRUN = env(
    "SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_NTASKS=11 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_NNODES=3 "
    "SLURM_STEP_TASKS_PER_NODE=4(x2),3"
)
_MPI = "OMPI_COMM_WORLD"
MPIRUN = env(f"{_MPI}_RANK=3 {_MPI}_SIZE=4 {_MPI}_LOCAL_RANK=1 {_MPI}_LOCAL_SIZE=2")
FLUX = env(
    "FLUX_JOB_ID=ƒuzzybunny FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 "
    "PMI_RANK=5 PMI_SIZE=8"
)
PBSDSH = env(
    "PBS_JOBID=1672.server PBS_TASKNUM=147 PBS_VNODENUM=12 PBS_NP=24 PBS_NODENUM=1 PBS_NUM_NODES=2 PBS_NUM_PPN=12"
)
JSRUN = env("JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2")
BLAUNCH = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostb 2 hosta 3", "LSF_PM_TASKID": "4"}
PMI = env("PMI_RANK=3 PMI_SIZE=4")


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, Ranks()),
        (TORCHRUN, Ranks(5, 8, 1, 4, 1, 2)),
        (without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"), Ranks(5, 8, 1, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2, 0, 1, 1, 2)),
        ({"WORLD_SIZE": "2"}, Ranks()),
        (SRUN, Ranks(9, 11, 1, 3, 2, 3)),
        (without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), Ranks(9, 11, 1, 3, 2, 3)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "nonsense"}, Ranks(9, 11, 1, 3, 2, 3)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"}, Ranks(9, 11, 1, 3, 2, 3)),
        ({**SRUN, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "11"}, Ranks(9, 11, 1, 3, 2, 3)),
        (without(SRUN, "SLURM_STEP_TASKS_PER_NODE") | env("SLURM_NTASKS=12 SLURM_NTASKS_PER_NODE=4"),
         Ranks(9, 12, 1, 4, 2, 3)),
        ({"SLURM_STEPID": "3", "SLURM_PROCID": "0"}, Ranks()),
        (MPIRUN, Ranks(3, 4, 1, 2, 1, 2)),
        (PMI, Ranks(3, 4, 0, 1, 3, 4)),
        (PMI | env("MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"), Ranks(3, 4, 1, 2, 1, 2)),
        (PMI | env("PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2"), Ranks(3, 4, 1, 2, 1, 2)),  # Cray PALS
        (JSRUN, Ranks(3, 4, 1, 2, 1, 2)),
        (FLUX, Ranks(5, 8, 1, 4, 1, 2)),
        ({**FLUX, "FLUX_TASK_LOCAL_ID": "2"}, Ranks(5, 8, 0, 1, 5, 8)),  # not mapped in blocks: nodes are unknown
        ({**FLUX, "FLUX_JOB_NNODES": "3"}, Ranks(5, 8, 0, 1, 5, 8)),
        (PBSDSH, Ranks(12, 24, 0, 12, 1, 2)),
        ({**PBSDSH, "PBS_NP": "18"}, Ranks(12, 18, 0, 1, 12, 18)),  # nodes of 12 and 6
        ({**PBSDSH, "PBS_TASKNUM": "1"}, Ranks()),  # the script
        ({"PBS_JOBID": "7.server", "PBS_TASKNUM": "5", "PBS_NODENUM": "1"}, Ranks()),  # PBS Pro does not report ranks
        ({**PBSDSH, **MPIRUN}, Ranks(3, 4, 1, 2, 1, 2)),
        (BLAUNCH, Ranks(3, 5, 1, 3, 1, 2)),
        (without(BLAUNCH, "LSF_PM_TASKID"), Ranks()),
        ({**BLAUNCH, **MPIRUN}, Ranks(3, 4, 1, 2, 1, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_of_launchers(environ: dict[str, str], expected: Ranks) -> None:
    assert detect_ranks(environ) == expected


@pytest.mark.parametrize("step", [None, "", "batch", "4294967291", "4294967290", "4294967292"])
def test_a_batch_script_or_a_shell_is_one_process(step: str | None) -> None:
    """Only one process runs in it, even if the job has more tasks."""
    environ = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": step or ""}
    assert detect_ranks(without(environ, "SLURM_STEP_ID") if step is None else environ) == Ranks()
    assert detect_ranks(without(SRUN, "SLURM_PROCID")) == Ranks()


def test_the_innermost_launcher_counts() -> None:
    """torchrun and mpirun put their processes into a step of srun with one task a node."""
    daemon = {**SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}
    assert detect_ranks({**daemon, **TORCHRUN}).rank == 5
    assert detect_ranks({**daemon, **MPIRUN}).rank == 3
    assert detect_ranks({**daemon, "PMI_RANK": "6", "PMI_SIZE": "8"}).rank == 6
    assert detect_ranks({**SRUN, "PMI_RANK": "9", "PMI_SIZE": "11"}) == Ranks(9, 11, 1, 3, 2, 3)
    by_hand = {**SRUN, "RANK": "9", "WORLD_SIZE": "11", "LOCAL_RANK": "1"}
    assert detect_ranks(by_hand) == Ranks(9, 11, 1, 3, 2, 3)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({**TORCHRUN, "RANK": "one"}, "variable RANK is 'one', expected a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "variable RANK is '-1'"),
        ({**TORCHRUN, "RANK": ""}, "variable RANK is ''"),
        ({**TORCHRUN, "WORLD_SIZE": "1" * 30}, "variable WORLD_SIZE is '111"),
        ({**TORCHRUN, "RANK": "8"}, "RANK, WORLD_SIZE.* contradict each other: rank 8 is outside the world_size of 8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local_rank 4 is outside the local_world_size of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "local_world_size 9 is more than the world_size of 8"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "local_rank 1 is outside the local_world_size of 0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK is set without LOCAL_WORLD_SIZE"),
        ({**SRUN, "SLURM_NTASKS": "4"}, "SLURM_PROCID, SLURM_NTASKS.* contradict each other: rank 9"),
        ({**SRUN, "SLURM_NNODES": "x"}, "variable SLURM_NNODES is 'x'"),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE.* contradict"),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, "PMI_RANK, PMI_SIZE.* contradict"),
        ({**FLUX, "FLUX_TASK_RANK": "8"}, "FLUX_TASK_RANK, FLUX_JOB_SIZE.* contradict each other: rank 8"),
        ({**PBSDSH, "PBS_NODENUM": "2"}, "PBS_VNODENUM, PBS_NP.* contradict each other: "),
        ({**BLAUNCH, "LSF_PM_TASKID": "6"}, "LSF_PM_TASKID, LSB_MCPU_HOSTS contradict each other: task 5 of 5"),
    ],
    ids=str,
)
def test_invalid_values(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect_ranks(environ)


def test_an_initialised_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 2, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert detect_ranks() == Ranks(2, 4, 0, 1, 2, 4)
    for name, value in {**TORCHRUN, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert detect_ranks() == Ranks(2, 4, 1, 2, 1, 2)
    monkeypatch.setenv("RANK", "3")
    assert detect_ranks() == Ranks(2, 4, 0, 1, 2, 4), "the rank of the variables was used"
    group.is_initialized = lambda: False
    assert detect_ranks().rank == 3


def test_a_launcher_is_registered() -> None:
    """One entry, asked before the others of its kind: every part of packer uses its ranks, job and scratch
    directory."""
    launcher = Launcher("ours", True, by_names("OURS_RANK", "OURS_SIZE"), job=("OURS_JOB",), scratch=("OURS_DISK",))
    environ = {"OURS_RANK": "1", "OURS_SIZE": "2", "OURS_JOB": "17", "OURS_DISK": "/ours", "SLURM_JOB_ID": "4"}
    assert detect_ranks(environ) == Ranks() and job_name(environ) == "4"
    before = registered()
    try:
        register(launcher)
        assert detect_ranks(environ) == Ranks(1, 2, 0, 1, 1, 2) and detect_ranks(environ).launcher == "ours"
        assert job_name(environ) == "17" and str(candidates(None, environ)[0].path) == "/ours"
        assert detect_ranks({**environ, **TORCHRUN}).rank == 5, "torchrun inside its tasks must win"
    finally:
        unregister("ours")
    assert registered() == before and detect_ranks(environ) == Ranks()


def test_jobs_have_numbers() -> None:
    numbers = [job_name(environ) for environ in ({}, FLUX, PBSDSH, BLAUNCH, {"JOB_ID": "3"}, {"OAR_JOB_ID": "9"})]
    assert numbers == ["0", "ƒuzzybunny", "1672.server", "7", "3", "9"]


def test_explicit_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size(None, None) == (2, 4) and rank_and_world_size(1, 3) == (1, 3)
    for incomplete in ((0, None), (None, 2)):
        with pytest.raises(ValueError, match="give both rank and world_size or neither"):
            rank_and_world_size(*incomplete)


def agents(group_of: list[int], local_size: int = 2) -> list[dict[str, str]]:
    """The ranks of one torchrun, with one task a node; group_of: the torchrun group number of Slurm's node i."""
    nodes = len(group_of)
    return [
        env(
            f"SLURM_STEP_ID=0 SLURM_PROCID={node} SLURM_NTASKS={nodes} SLURM_LOCALID=0 SLURM_NODEID={node} "
            f"SLURM_NNODES={nodes} RANK={group * local_size + local} WORLD_SIZE={nodes * local_size} "
            f"LOCAL_RANK={local} LOCAL_WORLD_SIZE={local_size} GROUP_RANK={group} GROUP_WORLD_SIZE={nodes}"
        )
        for node, group in enumerate(group_of)
        for local in range(local_size)
    ]


def test_node_numbers_are_those_of_slurm_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of torchrun on a node read the part that a Slurm task staged for that node."""
    order, seen = NodeLocal(90, nodes=3), []
    for number, environ in enumerate(agents([2, 0, 1])):
        node = number // 2
        ranks = detect_ranks(environ)
        assert (ranks.node, ranks.nodes, ranks.rank) == (node, 3, int(environ["RANK"])), "not the ranks of torchrun"
        with monkeypatch.context() as context:
            for name, value in environ.items():
                context.setenv(name, value)
            place = rank_and_world_size(None, None, nodes=3)
            assert rank_and_world_size(None, None) == (ranks.rank, 6), "node-independent orders are not split by node"
            samples = list(EpochSampler(order))
        assert place == (number, 6)
        assert set(samples) <= set(order.local_part(node)), f"rank {ranks.rank} reads the part of another node"
        seen += samples
    assert sorted(seen) == list(range(90))
    for name, value in {**agents([1, 0])[0], "WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="node 0 has 2 of the 5 ranks, expected the same number on each of"):
        rank_and_world_size(None, None, nodes=2)
    lost = {**agents([1, 0])[0], "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    assert detect_ranks(lost) == Ranks(0, 2, 0, 2, 0, 1), "after a node was lost"
    assert detect_ranks({**agents([1, 0])[0], "SLURM_NTASKS": "4"}).node == 1, "a node has several torchruns"
    pbs = {**PBSDSH, "PBS_NP": "2", "PBS_NUM_PPN": "1", "PBS_VNODENUM": "1", **TORCHRUN, "RANK": "1", "GROUP_RANK": "0"}
    assert detect_ranks(pbs) == Ranks(1, 8, 1, 4, 1, 2) and detect_ranks(pbs).place == 5


def test_cyclic_tasks_read_the_parts_of_their_nodes() -> None:
    """srun --distribution=cyclic numbers tasks across the nodes."""
    tasks = [{**SRUN, "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"} for _ in range(4)]
    for rank, task in enumerate(tasks):
        task |= {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank % 2), "SLURM_LOCALID": str(rank // 2)}
    assert [detect_ranks(task).place for task in tasks] == [0, 2, 1, 3]
