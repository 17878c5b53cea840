"""Readers over shared memory: what was read once is there for every process of the node. See docs/cache.md."""

from readers.cached.budget import Capacity
from readers.cached.form import Decoded, Encoded, Recoded
from readers.cached.opening import CachedReader, cached
from readers.cached.store import CachedStats

__all__ = ["CachedReader", "CachedStats", "Capacity", "Decoded", "Encoded", "Recoded", "cached"]
