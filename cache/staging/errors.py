"""What can go wrong while staging. `readers` gives these errors its own names at one place.

StagingError (PackerError, OSError)
├── NoTargetError      no directory is writable, local and ours
├── NoRoomError        the target lacks bytes or inodes, before or in the middle of copying
├── SourceError        the source is gone, cannot be read, or is not what its manifest says
└── StoppedError       somebody asked to stop: not an error of the set or the disk
"""

from __future__ import annotations

from cache.errors import PackerError

__all__ = ["NoRoomError", "NoTargetError", "SourceError", "StagingError", "StoppedError"]


class StagingError(PackerError, OSError):
    """A set cannot be staged; the root of these errors."""


class NoTargetError(StagingError):
    """No directory is fit to hold a copy; the message says why each was refused."""


class NoRoomError(StagingError):
    """Bytes or inodes are missing; the message says how many, and what would fit."""


class SourceError(StagingError):
    """The source vanished, cannot be read, or changed."""


class StoppedError(StagingError):
    """Copying was told to stop."""
