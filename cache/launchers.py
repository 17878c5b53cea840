"""Batch systems and launchers, one entry each: the environment variables that they set for their processes.

No other module names these variables. An entry knows some of these: the rank of this process in the job, the CPUs of
the job on this node, a local directory of the node, the number of the job.

    starters        torchrun, Open MPI, jsrun, PMI (MPICH, Intel MPI, Cray PALS): start the ranks themselves
    batch systems   Flux, Slurm, PBS, LSF, Grid Engine, OAR: assign nodes and CPUs to a job, and may start ranks

The innermost launcher counts, so starters precede batch systems in the table: mpirun starts its daemons with srun, and
torchrun runs in a task of Slurm. To add another system:

    register(Launcher("mysys", batch=True, job=("MYSYS_JOB",), ranks=by_names("MYSYS_RANK", "MYSYS_SIZE")))

A batch script is one process, however many tasks its job has; with the ranks of the job it would wait for the others
forever. So an entry of a batch system returns ranks only for processes that the system started as tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

__all__ = [
    "Launcher",
    "Ranks",
    "batch_task",
    "by_names",
    "job_cpus",
    "job_name",
    "launched",
    "register",
    "registered",
    "scratch_variables",
    "splits_its_task",
    "unregister",
]


# Entries of the table, and functions to build them: ranks and CPUs from environment variables.

Environ: TypeAlias = Mapping[str, str]
_Counts: TypeAlias = tuple[int, int, int, int, int, int]  # the fields of Ranks, from rank to nodes


@dataclass(frozen=True)
class Ranks:
    """rank of world_size in the job, local_rank of local_world_size on the node, node of nodes.

    launcher: the name of the entry that the values are from; "" for none. place: the rank if ranks are counted node by
    node, in the order of node numbers; None if nodes have unequal numbers of ranks, since this process cannot know it
    then. Raises ValueError for values that contradict each other.
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


@dataclass(frozen=True)
class Cpus:
    """CPUs of a job. on_node: of all its tasks on this node. per_task: of each task. None: unknown."""

    on_node: int | None = None
    per_task: int | None = None


@dataclass(frozen=True)
class Launcher:
    """One entry of the table.

    name: as in `Ranks.launcher`.
    batch: whether it is a batch system, which assigns nodes and CPUs to jobs.
    ranks: the ranks of this process; None if the launcher has not started it. Raises ValueError.
    cpus: the CPUs of the job.
    job: variables with the number of the job; the first that is set counts.
    scratch: variables with a local directory of this node, for this job.
    splits_its_task: its ranks are parts of one task of the batch system, and share the CPUs of that task.
    """

    name: str
    batch: bool = False
    ranks: Callable[[Environ], Ranks | None] = lambda environ: None
    cpus: Callable[[Environ], Cpus] = lambda environ: Cpus()
    job: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    splits_its_task: bool = False


def by_names(
    rank: str, size: str, local_rank: Sequence[str] = (), local_size: Sequence[str] = ()
) -> Callable[[Environ], Ranks | None]:
    """Ranks from up to four variables; nodes are filled one after the other.

    local_rank, local_size: the first that is set counts; if none is set, each process counts as a node.
    """

    def ranks(environ: Environ) -> Ranks | None:
        if rank not in environ or size not in environ:
            return None
        names = [rank, size, *(_first(environ, options) for options in (local_rank, local_size) if options)]
        count, world_size = number_in(environ, rank), number_in(environ, size)
        local = number_in(environ, _first(environ, local_rank), 0) if local_rank else 0
        local_count = number_in(environ, _first(environ, local_size), 1) if local_size else 1
        return ranks_of(names, (count, world_size, local, local_count, *filled(count, world_size, local_count)), count)

    return ranks


def by_hosts(names: Sequence[str], task: int, hosts: Sequence[str]) -> Ranks:
    """Ranks of a task, from a list with the host name of each task."""
    if task >= len(hosts):
        raise ValueError(f"{', '.join(names)} contradict each other: task {task} of {len(hosts)}")
    host, order = hosts[task], list(dict.fromkeys(hosts))
    local, node = hosts[:task].count(host), order.index(host)
    place = sum(hosts.count(other) for other in order[:node]) + local
    return ranks_of(names, (task, len(hosts), local, hosts.count(host), node, len(order)), place)


def filled(rank: int, world_size: int, local_size: int) -> tuple[int, int]:
    """(node, nodes) if nodes are filled one after the other."""
    size = max(1, local_size)
    return rank // size, -(-world_size // size)


def ranks_of(names: Iterable[str], counts: _Counts, place: int | None) -> Ranks:
    """Ranks with these values. Raises ValueError, naming the variables, if the values contradict each other."""
    try:
        return Ranks(*counts, place=place)
    except ValueError as error:
        raise ValueError(f"{', '.join(names)} contradict each other: {error}; correct or unset them") from error


def _first(environ: Environ, names: Sequence[str]) -> str:
    """The first of the variables that is set; if none is set, the first of the list."""
    return next((name for name in names if name in environ), names[0])


def number_in(environ: Environ, name: str, default: int | None = None) -> int:
    """The whole number in a variable; `default` if it is not set. Raises ValueError."""
    text = environ.get(name, "" if default is None else str(default)).strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ValueError(f"the environment variable {name} is {text!r}, expected a whole number from 0 up")
    return int(text)


def count_in(environ: Environ, *names: str) -> int | None:
    """The first positive number in one of the variables."""
    texts = (environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal() and int(text) > 0), None)


_RESERVED_STEPS = 0xFFFFFFF0  # slurm.h: SLURM_MAX_NORMAL_STEP_ID and above


# --- queries of the table -----------------------------------------------------------------------------------------
def register(launcher: Launcher) -> None:
    """Add an entry before the others of its kind (starters, batch systems). Replaces an entry of the same name."""
    unregister(launcher.name)
    first = next((place for place, other in enumerate(_table) if other.batch or not launcher.batch), len(_table))
    _table.insert(first, launcher)


def unregister(name: str) -> None:
    """Remove the entry of this name."""
    _table[:] = [other for other in _table if other.name != name]


def registered() -> list[str]:
    """The names of all launchers, in the order of the table."""
    return [launcher.name for launcher in _table]


def launched(environ: Environ, among: tuple[int, int] | None = None) -> Ranks | None:
    """The ranks of this process, by the innermost launcher that started it; None without a launcher.

    among: a known (rank, world size); launchers that disagree with it are ignored.
    Raises ValueError.
    """
    candidates = (_named(launcher, environ) for launcher in _table)
    return next((ranks for ranks in candidates if ranks and among in (None, (ranks.rank, ranks.world_size))), None)


def batch_task(environ: Environ) -> Ranks | None:
    """The task of a batch system that this process is, or is part of. Raises ValueError."""
    candidates = (_named(launcher, environ) for launcher in _table if launcher.batch)
    return next((ranks for ranks in candidates if ranks), None)


def job_cpus(environ: Environ) -> Cpus:
    """The CPUs of the job, from the first batch system that knows them."""
    candidates = (launcher.cpus(environ) for launcher in _table if launcher.batch)
    return next((cpus for cpus in candidates if cpus != Cpus()), Cpus())


def job_name(environ: Environ) -> str:
    """The number of the job, the same in all its processes; "0" without a batch system."""
    names = (name for launcher in _table for name in launcher.job)
    return next((environ[name] for name in names if environ.get(name)), "0")


def scratch_variables() -> list[str]:
    """The variables that may name a local directory of this node, in the order in which they are tried."""
    return [*(name for launcher in _table for name in launcher.scratch), "TMPDIR"]


def _named(launcher: Launcher, environ: Environ) -> Ranks | None:
    ranks = launcher.ranks(environ)
    return replace(ranks, launcher=ranks.launcher or launcher.name) if ranks else None


def splits_its_task(name: str) -> bool:
    """Whether the ranks of this launcher share the CPUs of one task of the batch system."""
    return any(launcher.splits_its_task for launcher in _table if launcher.name == name)


# --- the entries -----------------------------------------------------------------------------------------------------
def _torchrun(environ: Environ) -> Ranks | None:
    """Ranks from RANK and WORLD_SIZE, which users also set by hand, often to the values of a batch system.

    Under a batch system, a node's number is its position in the job's node list. torchrun renumbers nodes at each
    rendezvous, by host name or order of arrival, but node 3 in training must be the node that staged the data of
    node 3. So if each node runs one torchrun as its only task, nodes have the numbers of the batch system, and ranks
    those of torchrun.
    """
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, world_size = number_in(environ, "RANK"), number_in(environ, "WORLD_SIZE")
    task = batch_task(environ)
    if "LOCAL_WORLD_SIZE" not in environ:
        if task is not None and (task.rank, task.world_size) == (rank, world_size):
            return task
        if "LOCAL_RANK" in environ and number_in(environ, "LOCAL_RANK") > 0:
            raise ValueError("LOCAL_RANK is set without LOCAL_WORLD_SIZE: set that to the processes of this node")
        return ranks_of(names, (rank, world_size, 0, 1, rank, world_size), rank)
    local, local_size = number_in(environ, "LOCAL_RANK", 0), number_in(environ, "LOCAL_WORLD_SIZE")
    node, nodes = filled(rank, world_size, local_size)
    node = number_in(environ, "GROUP_RANK", node)
    nodes = number_in(environ, "GROUP_WORLD_SIZE", max(nodes, node + 1))
    place: int | None = rank
    if task is not None and 1 < nodes == task.nodes == task.world_size:  # the same on all ranks, so all agree
        node = task.node
        place = node * local_size + local if nodes * local_size == world_size else None
    names += ["GROUP_RANK", "GROUP_WORLD_SIZE"]
    return ranks_of(names, (rank, world_size, local, local_size, node, nodes), place)


_pmi_names = by_names(
    "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
)


def _pmi(environ: Environ) -> Ranks | None:
    """Ranks of PMI. Slurm and Flux set its variables too and know more, so theirs are used if the ranks agree."""
    ranks = _pmi_names(environ)
    task = batch_task(environ) if ranks else None
    agree = ranks and task and (ranks.rank, ranks.world_size) == (task.rank, task.world_size)
    return task if agree else ranks


def _flux(environ: Environ) -> Ranks | None:
    """Ranks of Flux, which maps tasks to nodes in blocks; no variable tells of another --taskmap."""
    if "FLUX_TASK_RANK" not in environ or "FLUX_JOB_SIZE" not in environ:
        return None
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    rank, size, local = (number_in(environ, name, 0) for name in names[:3])
    nodes = number_in(environ, "FLUX_JOB_NNODES", 1)
    local_size = size // max(1, nodes)
    if local_size * nodes != size or (local_size and rank % local_size != local):
        return ranks_of(names, (rank, size, 0, 1, rank, size), rank)
    return ranks_of(names, (rank, size, local, local_size, rank // local_size, nodes), rank)


def _slurm(environ: Environ) -> Ranks | None:
    """Ranks of a task of a job step.

    Slurm sets most of its variables in the batch script and in a shell of `salloc`, too, so they count only if
    SLURM_PROCID is set and SLURM_STEP_ID is a number below 0xFFFFFFF0 (higher numbers are the batch script, the
    interactive step and the like). A shell of `srun --pty` is a step with one task.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= _RESERVED_STEPS or "SLURM_PROCID" not in environ:
        return None
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    rank, tasks = number_in(environ, "SLURM_PROCID"), number_in(environ, tasks_name, 1)
    node, nodes = number_in(environ, "SLURM_NODEID", 0), number_in(environ, nodes_name, 1)
    local, counts = number_in(environ, "SLURM_LOCALID", 0), _slurm_tasks(environ, tasks, nodes)
    if node < len(counts):
        local_size, place = counts[node], sum(counts[:node]) + local
    else:  # the tasks of each node are unknown: assume an even distribution
        local_size, place = tasks // max(1, nodes) + (node < tasks % max(1, nodes)), rank
        if "SLURM_NTASKS_PER_NODE" in environ:
            local_size = min(tasks, number_in(environ, "SLURM_NTASKS_PER_NODE"))
    names = ("SLURM_PROCID", tasks_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", nodes_name)
    return ranks_of(names, (rank, tasks, local, local_size, node, nodes), place)


def _slurm_tasks(environ: Environ, tasks: int, nodes: int) -> list[int]:
    """Tasks of each node from "4(x2),3", of the step or else of the job; empty if neither is set."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        runs = re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?(?:,|$)", environ.get(name, ""))
        counts = [int(count) for count, times in runs for _ in range(min(nodes, int(times or 1)))]
        if len(counts) == nodes and sum(counts) == tasks:
            return counts
    return []


def _slurm_cpus(environ: Environ) -> Cpus:
    return Cpus(count_in(environ, "SLURM_CPUS_ON_NODE"), count_in(environ, "SLURM_CPUS_PER_TASK"))


def _pbs(environ: Environ) -> Ranks | None:
    """Ranks of a task of pbsdsh, where the batch script is task 1. Torque counts slots node by node.

    PBS Pro sets neither rank nor size for its tasks: mpiexec or torchrun starts the ranks.
    """
    names = ("PBS_VNODENUM", "PBS_NP", "PBS_NODENUM", "PBS_NUM_NODES", "PBS_NUM_PPN")
    if environ.get("PBS_TASKNUM", "1") == "1" or not all(name in environ for name in names):
        return None
    rank, size, node, nodes, local_size = (number_in(environ, name) for name in names)
    if nodes * local_size != size:  # for example with -l nodes=1:ppn=4+1:ppn=2
        return ranks_of(names, (rank, size, 0, 1, rank, size), rank)
    return ranks_of(names, (rank, size, rank - node * local_size, local_size, node, nodes), rank)


def _pbs_cpus(environ: Environ) -> Cpus:
    """CPUs of the first chunk (PBS Pro) or of each node (Torque)."""
    return Cpus(count_in(environ, "NCPUS", "PBS_NUM_PPN") if "PBS_JOBID" in environ else None)


def _lsf_hosts(environ: Environ) -> list[str]:
    """The host of each slot, from LSB_MCPU_HOSTS: "host slots host slots …"."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    return [host for host, slots in zip(words[::2], words[1::2], strict=False) if slots.isdecimal() and len(slots) < 7
            for _ in range(int(slots))]  # fmt: skip


def _lsf(environ: Environ) -> Ranks | None:
    """Ranks of a task of blaunch, which counts from 1 and starts one task for each slot of the job."""
    hosts = _lsf_hosts(environ)
    if "LSF_PM_TASKID" not in environ or not hosts:
        return None
    task = number_in(environ, "LSF_PM_TASKID")
    return by_hosts(("LSF_PM_TASKID", "LSB_MCPU_HOSTS"), task - 1, hosts) if task else None


def _lsf_cpus(environ: Environ) -> Cpus:
    """Slots are CPUs, unless the job asked for several CPUs per slot (affinity[…]): LSF then sets the affinity mask.

    A batch script runs on the first host.
    """
    hosts = _lsf_hosts(environ)
    if not hosts or "LSB_AFFINITY_HOSTFILE" in environ or "LSB_BIND_CPU_LIST" in environ:
        return Cpus()
    task = count_in(environ, "LSF_PM_TASKID") or 1
    return Cpus(hosts.count(hosts[min(task, len(hosts)) - 1]))


def _grid_engine_cpus(environ: Environ) -> Cpus:
    return Cpus(count_in(environ, "NSLOTS") if environ.get("NHOSTS", "1") == "1" else None)


_MPI = "OMPI_COMM_WORLD"
_table: list[Launcher] = [
    Launcher("torchrun", ranks=_torchrun, splits_its_task=True),
    Launcher(
        "openmpi",
        ranks=by_names(f"{_MPI}_RANK", f"{_MPI}_SIZE", (f"{_MPI}_LOCAL_RANK",), (f"{_MPI}_LOCAL_SIZE",)),
    ),
    Launcher(
        "jsrun",
        ranks=by_names(
            "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_LOCAL_RANK",), ("JSM_NAMESPACE_LOCAL_SIZE",)
        ),
    ),
    Launcher("pmi", ranks=_pmi),
    Launcher("flux", batch=True, ranks=_flux, job=("FLUX_JOB_ID",), scratch=("FLUX_JOB_TMPDIR",)),
    Launcher("slurm", batch=True, ranks=_slurm, cpus=_slurm_cpus, job=("SLURM_JOB_ID",), scratch=("SLURM_TMPDIR",)),
    Launcher("pbs", batch=True, ranks=_pbs, cpus=_pbs_cpus, job=("PBS_JOBID",), scratch=("PBS_JOBFS",)),
    Launcher("lsf", batch=True, ranks=_lsf, cpus=_lsf_cpus, job=("LSB_JOBID",)),
    Launcher("oar", batch=True, job=("OAR_JOB_ID",)),
    Launcher("grid-engine", batch=True, cpus=_grid_engine_cpus, job=("JOB_ID",)),  # last: any script may set JOB_ID
]
