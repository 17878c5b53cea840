"""Packed sets in object stores and on web servers.

home      dataset.json and the indexes, fetched once into a directory of this machine
reader    the reader: ranged GETs for the shards, or a local copy of them where there is one
ahead     reads that were announced, on their way
errors    errors of `cache.remote` under our names
"""

from readers.remote.errors import remote_errors
from readers.remote.home import RemoteHome, index_cache_folder
from readers.remote.reader import RemoteReader

__all__ = ["RemoteHome", "RemoteReader", "index_cache_folder", "remote_errors"]
