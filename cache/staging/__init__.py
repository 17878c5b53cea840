"""Copies of a directory's files on this node's own disk or memory: made once per node, checked, shared, removed.

    sources   what is to be staged, and from where: a directory   remote    or an address
    copies    the staging directory of a target, its copies       removal   quota and clean-up, never of anything else
    leader    one process copies, the others wait                 transfer  one file, checksum on the way
    session   choose a target and use a copy, for one process

Nothing here knows what the files mean: `readers.staging` does. Its modules load no obstore and no numpy.
"""

from cache.staging.copies import Copy, Store, find_store
from cache.staging.leader import Arrivals, CopyCounts, How
from cache.staging.removal import Removed, remove_copies, sweep
from cache.staging.session import CLEANUPS, Request, Session, candidates
from cache.staging.sources import FolderSource, Manifest, Source, StagedFile, total_bytes
from cache.staging.transfer import work_off

__all__ = [
    "CLEANUPS",
    "Arrivals",
    "Copy",
    "CopyCounts",
    "FolderSource",
    "How",
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
