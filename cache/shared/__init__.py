"""Bytes that all processes of a node share: one segment of memory, filled once, read without a lock or a copy."""

from cache.errors import (
    CacheBusyError,
    CacheDirectoryError,
    CacheError,
    CacheFullError,
    ClosedCacheError,
    ForeignCacheError,
)
from cache.shared.budget import Budget, budget, budget_bytes
from cache.shared.bytecache import Buffer, SharedByteCache
from cache.shared.census import CacheInfo, clean_caches, list_caches
from cache.shared.sigterm import remove_on_sigterm
from cache.shared.users import CacheStats

__all__ = [
    "Budget",
    "Buffer",
    "CacheBusyError",
    "CacheDirectoryError",
    "CacheError",
    "CacheFullError",
    "CacheInfo",
    "CacheStats",
    "ClosedCacheError",
    "ForeignCacheError",
    "SharedByteCache",
    "budget",
    "budget_bytes",
    "clean_caches",
    "list_caches",
    "remove_on_sigterm",
]
