"""What an entry of `cache.launchers` is, and what entries are built of: ranks and CPUs from environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "Cpus",
    "Environ",
    "Launcher",
    "Ranks",
    "by_hosts",
    "by_names",
    "count_in",
    "filled",
    "number_in",
    "ranks_of",
]

Environ: TypeAlias = Mapping[str, str]
_Counts: TypeAlias = tuple[int, int, int, int, int, int]  # rank to nodes, as in Ranks


@dataclass(frozen=True)
class Ranks:
    """rank of world_size in the job, local_rank of local_world_size in the node, node of nodes.

    launcher: the name of the entry that these are from, "" for none. place: the rank when ranks are counted node by
    node, in the order of the nodes' numbers; None where nodes have unequal numbers of ranks, so that this process
    cannot know it. Raises ValueError for values that contradict each other.
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
    """CPUs of a job. on_node: for all its tasks on this node. per_task: for each task. None: not known."""

    on_node: int | None = None
    per_task: int | None = None


@dataclass(frozen=True)
class Launcher:
    """One entry of the table.

    name: as in `Ranks.launcher`.
    batch: whether it is a batch system, which gives nodes and CPUs to jobs.
    ranks: which process of the job this is; None where the launcher has not started it. Raises ValueError.
    cpus: the CPUs of the job.
    job: variables with the number of the job; the first that is set counts.
    scratch: variables with a directory of this node, for this job.
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
    """Ranks from four variables, of nodes that are filled one after the other.

    local_rank, local_size: the first that is set counts; without any each process counts as a node of its own.
    """

    def ranks(environ: Environ) -> Ranks | None:
        if rank not in environ or size not in environ:
            return None
        names = [rank, size, *(_first(environ, options) for options in (local_rank, local_size) if options)]
        count, world_size = number_in(environ, rank), number_in(environ, size)
        local = number_in(environ, _first(environ, local_rank), 0) if local_rank else 0
        here = number_in(environ, _first(environ, local_size), 1) if local_size else 1
        return ranks_of(names, (count, world_size, local, here, *filled(count, world_size, here)), count)

    return ranks


def by_hosts(names: Sequence[str], task: int, hosts: Sequence[str]) -> Ranks:
    """Ranks where a task has its host's name in a list with one entry for each task."""
    if task >= len(hosts):
        raise ValueError(f"{', '.join(names)} contradict each other: task {task} of {len(hosts)}")
    host, order = hosts[task], list(dict.fromkeys(hosts))
    local, node = hosts[:task].count(host), order.index(host)
    place = sum(hosts.count(other) for other in order[:node]) + local
    return ranks_of(names, (task, len(hosts), local, hosts.count(host), node, len(order)), place)


def filled(rank: int, world_size: int, local_size: int) -> tuple[int, int]:
    """(node, nodes) where nodes are filled one after the other."""
    size = max(1, local_size)
    return rank // size, -(-world_size // size)


def ranks_of(names: Iterable[str], counts: _Counts, place: int | None) -> Ranks:
    """Ranks by the values of these variables. Raises ValueError that names them where they contradict each other."""
    try:
        return Ranks(*counts, place=place)
    except ValueError as error:
        raise ValueError(f"{', '.join(names)} contradict each other: {error}; correct or unset them") from error


def _first(environ: Environ, names: Sequence[str]) -> str:
    """The first of the variables that is set, or the first of all."""
    return next((name for name in names if name in environ), names[0])


def number_in(environ: Environ, name: str, default: int | None = None) -> int:
    """The whole number in a variable; `default` where it is not set. Raises ValueError."""
    text = environ.get(name, "" if default is None else str(default)).strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ValueError(f"the environment variable {name} is {text!r}, expected a whole number from 0 up")
    return int(text)


def count_in(environ: Environ, *names: str) -> int | None:
    """The number above 0 in the first of the variables that has one."""
    texts = (environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal() and int(text) > 0), None)
