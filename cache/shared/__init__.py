"""Bytes that all processes of a node share: one segment of memory, filled once, read without a lock or a copy."""

from cache.shared.bytecache import Buffer, SharedByteCache
from cache.shared.layout import CacheStats
from cache.shared.membership import CacheInfo, clean_caches, list_caches, remove_on_sigterm

__all__ = [
    "Buffer",
    "CacheInfo",
    "CacheStats",
    "SharedByteCache",
    "clean_caches",
    "list_caches",
    "remove_on_sigterm",
]
