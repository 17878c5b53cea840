"""Packed sets in object stores and on web servers.

home      dataset.json and the indexes, fetched once into a directory of this machine
opening   the reader: ranged GETs for the shards, or a local copy of them where there is one
"""

from readers.remote.home import RemoteHome, index_cache_folder
from readers.remote.opening import open_remote

__all__ = ["RemoteHome", "index_cache_folder", "open_remote"]
