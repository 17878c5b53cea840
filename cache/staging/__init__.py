"""Copies of a directory's files on this node's own disk or memory: made once per node, checked, shared, taken away.

    target    where to: writable, local, ours, large enough        mounts    what a filesystem is, what is free
    store     the marked directory of ours in a target             copies    one staged copy and its records
    leader    one process copies, the others wait                  transfer  one file, checksum on the way
    arrival   waiting for a file on its way
    removal   quota and clean-up, never of anything else           session   all of that for one process
    sources   where files come from: a directory                   remote    or an address

Nothing here knows what the files mean: see `files` for what callers hand in, and `readers.staging` for the one that
does.
"""

from cache.errors import NoRoomError, NoTargetError, StagingError, StagingSourceError, StoppedError
from cache.staging.arrival import Arrivals
from cache.staging.copies import Copy
from cache.staging.files import Manifest, total_bytes
from cache.staging.leader import Brought, How
from cache.staging.removal import Removed, remove_copies, sweep
from cache.staging.session import CLEANUPS, Request, Session
from cache.staging.sources import FolderSource, Source, StagedFile
from cache.staging.store import Store, find_store
from cache.staging.target import candidates
from cache.staging.watch import SilentStaging, StagingWatcher

__all__ = [
    "CLEANUPS",
    "Arrivals",
    "Brought",
    "Copy",
    "FolderSource",
    "How",
    "Manifest",
    "NoRoomError",
    "NoTargetError",
    "Removed",
    "Request",
    "Session",
    "SilentStaging",
    "Source",
    "StagedFile",
    "StagingError",
    "StagingSourceError",
    "StagingWatcher",
    "StoppedError",
    "Store",
    "candidates",
    "find_store",
    "remove_copies",
    "sweep",
    "total_bytes",
]
