"""Services of one node: usable CPUs and memory, files and locks, local copies of data sets, and a cache in memory that
all processes of the node share.

This is the lowest of the three packages: it imports neither readers nor packer, nor click, h5py or torch. Modules that
need numpy or crc32c import them on first use.
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
