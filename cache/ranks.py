"""Which of the job's processes this is: rank, world size, and the same within the node.

The launcher says so, by variables of the environment. The innermost one counts, so they are asked in this order:

    torch.distributed   where it has been initialised already; it is never imported here
    torchrun            RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE
    Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE    (mpirun starts its daemons by srun)
    PMI                 PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS     (MPICH, Intel MPI; also set by Slurm,
    Slurm               SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, …      which is asked where both agree)

and without any of them this is rank 0 of 1. Where nothing tells about nodes, each process counts as a node of its own.

A node's number is its place in the node list of the job wherever Slurm started what runs there: torchrun deals numbers
anew at each rendezvous, by the names of hosts or as they come, and what a task of Slurm staged for node 3 must be node
3's in training too. So where each node's one task of a step is a torchrun, nodes have Slurm's numbers, and ranks have
those of torchrun.

Slurm sets most of its variables in the batch script and in a shell of `salloc` too, where one process runs however many
tasks the job has, and waiting for the others would be for ever. So its word counts only in a step of `srun`, where
SLURM_STEP_ID is a number below 0xFFFFFFF0 (those above name the batch script, the interactive step and their like) and
SLURM_PROCID is set. A shell of `srun --pty` is a step with one task, and says so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Ranks", "detect_ranks", "rank_and_world_size", "slurm_task"]

_Counts: TypeAlias = tuple[int, int, int, int, int, int]  # rank to nodes, as in Ranks
_RESERVED_STEPS = 0xFFFFFFF0  # slurm.h: SLURM_MAX_NORMAL_STEP_ID and above


@dataclass(frozen=True)
class Ranks:
    """rank of world_size in the job, local_rank of local_world_size in the node, node of nodes.

    launcher: who counts the local ranks: torchrun, mpi, slurm, or "" where nobody does. place: the rank when ranks are
    counted node by node, in the order of the nodes' numbers; None where this process cannot know, because nodes have
    unequal numbers of ranks. Raises ValueError where one is outside its range, or a part larger than the whole.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = field(default="", compare=False)
    place: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, of in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node", "nodes")):
            value, limit = getattr(self, name), getattr(self, of)
            if not 0 <= value < limit:
                raise ValueError(f"{name} {value} is outside the {of} of {limit}")
        for name in ("local_world_size", "nodes"):
            if getattr(self, name) > self.world_size:
                raise ValueError(f"{name} {getattr(self, name)} is more than the world_size of {self.world_size}")


def detect_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """What the launcher says; `environ` defaults to that of this process.

    torch.distributed is looked at only without an `environ`. Raises ValueError, naming the variables, for values that
    are no whole numbers or contradict each other.
    """
    env = os.environ if environ is None else environ
    group = _torch_group() if environ is None else None
    if group is not None:
        return _told(env, *group) or _lonely(*group)
    return _torchrun(env) or _open_mpi(env) or _pmi(env) or slurm_task(env) or Ranks(place=0)


def rank_and_world_size(rank: int | None, world_size: int | None, nodes: int = 1) -> tuple[int, int]:
    """The two as given, or as the launcher says where neither is.

    nodes: to how many nodes the samples belong; where the job has as many, ranks are counted node by node, so that each
    node gets its own. Raises ValueError for one without the other.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both rank and world_size or neither, not {rank} and {world_size}")
    if rank is not None and world_size is not None:
        return rank, world_size
    found = detect_ranks()
    if nodes == 1 or nodes != found.nodes:
        return found.rank, found.world_size
    if found.place is None:
        raise ValueError(
            f"node {found.node} has {found.local_world_size} of the {found.world_size} ranks, expected the same number "
            f"on each of the {nodes} nodes, because samples belong to nodes; start as many ranks on each"
        )
    return found.place, found.world_size


def _torch_group() -> tuple[int, int] | None:
    """Rank and world size of an initialised process group; it knows nothing of nodes."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _told(env: Mapping[str, str], rank: int, world_size: int) -> Ranks | None:
    """The first launcher that gives this rank and world size, for what else it knows."""
    found = (launcher(env) for launcher in (_torchrun, _open_mpi, _pmi, slurm_task))
    return next((ranks for ranks in found if ranks and (ranks.rank, ranks.world_size) == (rank, world_size)), None)


def _lonely(rank: int, world_size: int) -> Ranks:
    return Ranks(rank, world_size, 0, 1, rank, world_size, place=rank)


def _torchrun(env: Mapping[str, str]) -> Ranks | None:
    names: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "LOCAL_WORLD_SIZE" not in env:  # set by hand, often from Slurm's
        slurm = slurm_task(env)
        if slurm is not None and (slurm.rank, slurm.world_size) == (rank, world_size):
            return slurm
        if "LOCAL_RANK" in env and _number(env, "LOCAL_RANK") > 0:
            raise ValueError("LOCAL_RANK is set without LOCAL_WORLD_SIZE: set that to the processes of this node")
        return _made("", names, (rank, world_size, 0, 1, rank, world_size), rank)
    local, local_size = _number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE")
    node, nodes = _filled(rank, world_size, local_size)
    node = _number(env, "GROUP_RANK", node)
    nodes = _number(env, "GROUP_WORLD_SIZE", max(nodes, node + 1))
    place: int | None = rank
    task = slurm_task(env)
    if task is not None and 1 < nodes == task.nodes == task.world_size:  # the same on all ranks, so all do as one
        node = task.node
        place = node * local_size + local if nodes * local_size == world_size else None
    names = (*names, "GROUP_RANK", "GROUP_WORLD_SIZE")
    return _made("torchrun", names, (rank, world_size, local, local_size, node, nodes), place)


def _open_mpi(env: Mapping[str, str]) -> Ranks | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _mpi(env, names)


def _pmi(env: Mapping[str, str]) -> Ranks | None:
    found = _mpi(env, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"])
    slurm = slurm_task(env) if found else None
    agree = found and slurm and (found.rank, found.world_size) == (slurm.rank, slurm.world_size)
    return slurm if agree else found


def _mpi(env: Mapping[str, str], names: list[str]) -> Ranks | None:
    if names[0] not in env or names[1] not in env:
        return None
    rank, world_size = _number(env, names[0]), _number(env, names[1])
    local, local_size = _number(env, names[2], 0), _number(env, names[3], 1)
    node, nodes = _filled(rank, world_size, local_size)
    return _made("mpi", names, (rank, world_size, local, local_size, node, nodes), rank)


def slurm_task(env: Mapping[str, str]) -> Ranks | None:
    """Which task of a step of Slurm this process is, or is a part of; None outside of steps. Raises ValueError."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= _RESERVED_STEPS or "SLURM_PROCID" not in env:
        return None
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    rank, tasks = _number(env, "SLURM_PROCID"), _number(env, tasks_name, 1)
    node, nodes = _number(env, "SLURM_NODEID", 0), _number(env, nodes_name, 1)
    local, counts = _number(env, "SLURM_LOCALID", 0), _slurm_tasks(env, tasks, nodes)
    here = counts[node] if node < len(counts) else _slurm_tasks_here(env, node, tasks, nodes)
    place = sum(counts[:node]) + local if node < len(counts) else rank
    names = ("SLURM_PROCID", tasks_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", nodes_name)
    return _made("slurm", names, (rank, tasks, local, here, node, nodes), place)


def _slurm_tasks(env: Mapping[str, str], tasks: int, nodes: int) -> list[int]:
    """Tasks of each node from "4(x2),3", of the step or else of the job; empty where that is not told."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        runs = re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?(?:,|$)", env.get(name, ""))
        counts = [int(count) for count, times in runs for _ in range(min(nodes, int(times or 1)))]
        if len(counts) == nodes and sum(counts) == tasks:
            return counts
    return []


def _slurm_tasks_here(env: Mapping[str, str], node: int, tasks: int, nodes: int) -> int:
    """Tasks of this node where the number for each is not told: as even as it goes."""
    if "SLURM_NTASKS_PER_NODE" in env:
        return min(tasks, _number(env, "SLURM_NTASKS_PER_NODE"))
    return tasks // max(1, nodes) + (node < tasks % max(1, nodes))


def _filled(rank: int, world_size: int, local_size: int) -> tuple[int, int]:
    """(node, nodes) where nodes are filled one after the other."""
    size = max(1, local_size)
    return rank // size, -(-world_size // size)


def _made(launcher: str, names: Sequence[str], counts: _Counts, place: int | None) -> Ranks:
    try:
        return Ranks(*counts, launcher=launcher, place=place)
    except ValueError as error:
        raise ValueError(f"{', '.join(names)} contradict each other: {error}") from error


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default)).strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ValueError(f"the environment variable {name} is {text!r}, expected a whole number from 0 up")
    return int(text)
