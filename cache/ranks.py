"""Which of the job's processes this is: rank, world size, and the same within the node.

torch.distributed is asked first, where it has been initialised already; it is never imported here. Otherwise the
launcher says so, see `cache.launchers`; without one this is rank 0 of 1. Where nothing tells about nodes, each process
counts as a node of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from cache.launchers import Ranks, launched

__all__ = ["Ranks", "detect_ranks", "rank_and_world_size"]


def detect_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """What the launcher says; `environ` defaults to that of this process.

    torch.distributed is looked at only without an `environ`. Raises ValueError, naming the variables, for values that
    are not whole numbers or contradict each other.
    """
    env = os.environ if environ is None else environ
    group = _torch_group() if environ is None else None
    if group is None:
        return launched(env) or Ranks(place=0)
    rank, world_size = group
    return launched(env, group) or Ranks(rank, world_size, 0, 1, rank, world_size, place=rank)


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
