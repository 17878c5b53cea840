"""Errors of the shared cache, each also the builtin that fits it.

    CacheError (PackerError)
    ├── CacheFullError (OSError)       no room for a segment of this size; errno is set (ENOSPC, ENOMEM, EDQUOT)
    ├── CacheDirectoryError (OSError)  the directory is missing, or no files can be made in it
    ├── ForeignCacheError (OSError)    what stands there is not a segment of ours: owner, kind of file, magic, version
    ├── CacheBusyError (TimeoutError)  whoever makes or checks the segment does not come to an end
    └── ClosedCacheError (ValueError)  used after `close`

A full cache is no error once it is open: `put` says False.
"""

from __future__ import annotations

from cache.errors import PackerError

__all__ = [
    "CacheBusyError",
    "CacheDirectoryError",
    "CacheError",
    "CacheFullError",
    "ClosedCacheError",
    "ForeignCacheError",
]


class CacheError(PackerError):
    """The root of what the shared cache raises on purpose."""


class CacheFullError(CacheError, OSError):
    """There is no room for the segment: ask for a smaller capacity, or go without."""


class CacheDirectoryError(CacheError, OSError):
    """The directory for segments is missing, or segments cannot be made in it."""


class ForeignCacheError(CacheError, OSError):
    """The file is not a segment of this user, layout and data set; it is left alone."""


class CacheBusyError(CacheError, TimeoutError):
    """Another process holds the segment for itself and does not let go."""


class ClosedCacheError(CacheError, ValueError):
    """The cache has been closed."""
