"""Readers over shared memory: what was read once is there for every process of the node. See docs/cache.md."""

from readers.cached.keep import Decoded, Encoded, Recoded
from readers.cached.opening import Capacity, cached
from readers.cached.reader import CachedReader
from readers.cached.stats import CachedStats

__all__ = ["CachedReader", "CachedStats", "Capacity", "Decoded", "Encoded", "Recoded", "cached"]
