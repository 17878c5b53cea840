"""Stores: bytes at extents. `cache.stores.base` defines what a store must do.

files     shards that are files, and loose files       copied    a copy over its source
remote    shards behind an address, by ranged GETs     ranges    merging ranges into larger reads
"""

from cache.stores.base import Buffer, Extents, Int64s, Shards, Store, StoreOver
from cache.stores.files import Files, LooseFiles

__all__ = ["Buffer", "Extents", "Files", "Int64s", "LooseFiles", "Shards", "Store", "StoreOver"]
