"""Readers over shared memory: what was read once is there for every process of the node. See docs/cache.md."""

from readers.caching.budget import Capacity
from readers.caching.form import Decoded, Encoded, Recoded
from readers.caching.opening import CachedReader, cached
from readers.caching.store import CachedStats

__all__ = ["CachedReader", "CachedStats", "Capacity", "Decoded", "Encoded", "Recoded", "cached"]
