"""What one node has: CPUs and memory as this process may use them, files and locks, copies of data sets, and bytes in
memory that all processes of the node share.

This is the lowest of the three packages: it imports nothing of readers or packer, and neither click, h5py nor torch.
What needs numpy and crc32c is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cache.filesystem import drop
from cache.node import available_memory_bytes, usable_cpus

if TYPE_CHECKING:
    from cache.shared.bytecache import SharedByteCache
    from cache.shared.layout import CacheStats
    from cache.shared.membership import CacheInfo, clean_caches, list_caches, remove_on_sigterm

__all__ = [
    "CacheInfo",
    "CacheStats",
    "SharedByteCache",
    "available_memory_bytes",
    "clean_caches",
    "drop",
    "list_caches",
    "remove_on_sigterm",
    "usable_cpus",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cache' has no attribute {name!r}")
    module = {"SharedByteCache": "bytecache", "CacheStats": "layout"}.get(name, "membership")
    return getattr(importlib.import_module(f"cache.shared.{module}"), name)
