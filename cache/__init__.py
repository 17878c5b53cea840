"""What one node has and keeps: its CPUs and memory as this process may use them, its page cache, its ranks, and bytes
in memory that all its processes share.

This is the bottom of the house: it imports nothing of readers or packer, and neither click, h5py nor torch. What needs
numpy is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cache.errors import (
    CacheBusyError,
    CacheDirectoryError,
    CacheError,
    CacheFullError,
    ClosedCacheError,
    ForeignCacheError,
    PackerError,
)
from cache.node import available_memory_bytes, usable_cpus
from cache.page import drop, prefetch, resident_bytes, write_behind
from cache.ranks import Ranks, detect_ranks, rank_and_world_size
from cache.space import Budget, budget, budget_bytes

if TYPE_CHECKING:
    from cache.shared import CacheInfo, CacheStats, SharedByteCache, clean_caches, list_caches, remove_on_sigterm

__all__ = [
    "Budget",
    "CacheBusyError",
    "CacheDirectoryError",
    "CacheError",
    "CacheFullError",
    "CacheInfo",
    "CacheStats",
    "ClosedCacheError",
    "ForeignCacheError",
    "PackerError",
    "Ranks",
    "SharedByteCache",
    "available_memory_bytes",
    "budget",
    "budget_bytes",
    "clean_caches",
    "detect_ranks",
    "drop",
    "list_caches",
    "prefetch",
    "rank_and_world_size",
    "remove_on_sigterm",
    "resident_bytes",
    "usable_cpus",
    "write_behind",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cache' has no attribute {name!r}")
    return getattr(importlib.import_module("cache.shared"), name)
