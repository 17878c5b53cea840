"""The resources of this process: its rank in the job, its GPU, and the CPUs and memory that it may use.

Ranks come from torch.distributed if it is initialised (it is never imported here), else from the launcher
(`cache.launchers`); without either this is rank 0 of 1. If nodes are unknown, each process counts as a node.

`os.cpu_count()` counts the CPUs of the node, not of the job: a batch job often owns 4 of 128 cores. The smallest of
three limits counts: the CPU affinity mask, the CPU quota of the control group (v2 `cpu.max`, v1 `cpu.cfs_quota_us`),
and the CPUs of the batch system (`cache.launchers`). Some belong to this process alone, some are shared by all ranks
of the node:

    a task (srun)                 its CPUs per task; a share of the job's CPUs on this node; its affinity mask, which
                                  is smaller if the batch system binds tasks
    a rank of torchrun or MPI     a share of the launcher's mask, of the quota, and of the task that it is part of; at
                                  most its own mask, which is smaller if the launcher binds ranks
    anything else                 everything; in a batch script, the CPUs of the job on this node
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cache.launchers import Ranks, batch_task, job_cpus, launched, splits_its_task
from cache.system import affinity

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def detect_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """The ranks of this process. `environ` defaults to the environment of this process.

    torch.distributed is asked only if no `environ` is passed. Raises ValueError, naming the variables, for values that
    are not whole numbers or contradict each other.
    """
    env = os.environ if environ is None else environ
    group = _torch_group() if environ is None else None
    if group is None:
        return launched(env) or Ranks(place=0)
    rank, world_size = group
    return launched(env, group) or Ranks(rank, world_size, 0, 1, rank, world_size, place=rank)


def own_gpu(visible: int | None) -> int:
    """The index of this process's GPU among those it sees, 0 to visible - 1. visible: None if their number is unknown.

    The device that torch.cuda.set_device chose, if not 0; otherwise the local rank, modulo `visible`: ranks that all
    see the GPUs of the node share them out, and a rank that sees one GPU gets 0.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.current_device():
        return int(torch.cuda.current_device())
    local_rank = detect_ranks().local_rank
    return local_rank if visible is None else local_rank % max(1, visible)


def rank_and_world_size(rank: int | None, world_size: int | None, nodes: int = 1) -> tuple[int, int]:
    """The two arguments, or the values of the launcher if both are None.

    nodes: how many nodes the samples are distributed over. If the job has as many nodes, ranks are counted node by
    node, so that each node gets its own samples. Raises ValueError if only one of the two is given.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both rank and world_size or neither, not {rank} and {world_size}")
    if rank is not None and world_size is not None:
        return rank, world_size
    ranks = detect_ranks()
    if nodes == 1 or nodes != ranks.nodes:
        return ranks.rank, ranks.world_size
    if ranks.place is None:
        raise ValueError(
            f"node {ranks.node} has {ranks.local_world_size} of the {ranks.world_size} ranks, expected the same number "
            f"on each of the {nodes} nodes, because samples belong to nodes; start the same number on each node"
        )
    return ranks.place, ranks.world_size


def _torch_group() -> tuple[int, int] | None:
    """Rank and world size of an initialised process group, which does not know about nodes."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def reading_processes() -> int:
    """How many processes of this node read a set at the same time, as far as this process knows: ranks, times the
    workers of a DataLoader if this is one of them."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    worker = torch_data.get_worker_info() if torch_data is not None else None
    try:
        ranks = detect_ranks().local_world_size
    except ValueError:  # reported by the code that needs the ranks
        ranks = 1
    return ranks * (worker.num_workers if worker is not None else 1)


def usable_cpus(
    environ: Mapping[str, str] | None = None, cgroup_root: Path = _CGROUP_ROOT, membership: str | None = None
) -> int:
    """How many CPUs (at least 1) this process may keep busy: its own, and its share of those that ranks share.

    `environ`, `cgroup_root` and `membership` (the text of /proc/self/cgroup) default to those of this process.
    """
    env = os.environ if environ is None else environ
    try:
        ranks, task = detect_ranks(environ), batch_task(env)
    except ValueError:  # contradictory variables are reported by the code that needs the rank
        ranks, task = Ranks(), None
    job = job_cpus(env)
    on_node = [job.on_node // (task.local_world_size if task else 1)] if job.on_node else []
    # A batch script may use all CPUs of its job on this node.
    per_task = [job.per_task] if job.per_task and (task is not None or not on_node) else []
    own, shared = [len(affinity())], [math.ceil(quota) for quota in _cgroup_cpu_quotas(cgroup_root, membership)]
    if task is not None and ranks.launcher == task.launcher and (on_node or per_task):
        return max(1, min(own + shared + on_node + per_task))
    shared += [len(affinity(os.getppid())), *on_node]
    (shared if splits_its_task(ranks.launcher) else own).extend(per_task)
    return max(1, min(*own, min(shared) // ranks.local_world_size))


def available_memory_bytes(cgroup_root: Path = _CGROUP_ROOT, membership: str | None = None) -> int:
    """Bytes of memory that this process can still take: the node's `MemAvailable` or its control group's headroom.

    The page cache of files counts as headroom, since the kernel drops it before it kills processes; memory used by a
    tmpfs does not.
    """
    limits = [_mem_available()]
    for folder in cgroup_folders(cgroup_root, membership):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            limits.append(min(limit, max(0, limit - used + _file_cache_bytes(folder))))
    return min(limits)


def _cgroup_cpu_quotas(root: Path, membership: str | None) -> Iterator[float]:
    for folder in cgroup_folders(root, membership):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period:
            yield quota / period


def cgroup_folders(
    root: Path = _CGROUP_ROOT, membership: str | None = None, controllers: Sequence[str] = ("cpu", "memory")
) -> Iterator[Path]:
    """The control group of this process and its ancestors, in v2 and in these controllers of v1."""
    text = _text(Path("/proc/self/cgroup")) if membership is None else membership
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, mounted, path = parts
        matching = [name for name in controllers if name in mounted.split(",")]
        if mounted == "":
            base = root
        elif matching:
            base = root / matching[0]
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def find_library(name: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The loaded libraries of this process whose file names begin with `name`."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line})


def _mem_available() -> int:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _file_cache_bytes(folder: Path) -> int:
    """Page cache of a control group and its descendants: the kernel's lists of file pages, which exclude a tmpfs.

    v1 counts only the group itself under these names, and descendants under "total_…"; v2 always includes them.
    """
    words = (line.split() for line in _text(folder / "memory.stat").splitlines())
    sizes = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in ("inactive_file", "active_file"))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The whole number in a control file; None if absent, "max", negative or v1's "no limit"."""
    text = _text(path).strip()
    if not text.isdecimal() or int(text) >= 1 << 60:
        return None
    return int(text)
