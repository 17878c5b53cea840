"""Copies of a directory's files on this node's own disk or memory: made once per node, checked, shared, removed.

    sources   what to stage, and from where: a directory      remote    an address as a source
    copies    the staging directory of a target, its copies   removal   quota and clean-up
    leader    one process copies, the others wait             transfer  one file, with its checksum
    session   one process: choose a target, use a copy

Nothing here knows what the files mean: `readers.staging` does. Neither obstore nor numpy is loaded.
"""

from cache.staging.copies import Copy, Removed, Store, find_store, remove_copies, sweep
from cache.staging.session import Arrivals, CopyCounts, Session, candidates, work_off
from cache.staging.sources import CopyOptions, FolderSource, Manifest, Request, Source, StagedFile, total_bytes

__all__ = [
    "Arrivals",
    "Copy",
    "CopyCounts",
    "CopyOptions",
    "FolderSource",
    "Manifest",
    "Removed",
    "Request",
    "Session",
    "Source",
    "StagedFile",
    "Store",
    "candidates",
    "find_store",
    "remove_copies",
    "sweep",
    "total_bytes",
    "work_off",
]
