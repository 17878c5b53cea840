"""Every error of ours: one tree, each also the builtin that fits it.

Messages say what went wrong, where, what was expected and found, and what to run next.

    PackerError
    ├── DatasetError (ValueError)            dataset.json or an index is missing, malformed or of another version
    │   └── UnknownNameError (LookupError)   no such split, field or key
    ├── StaleIndexError (OSError)            a shard is missing, or not the file that was indexed
    ├── DamagedSampleError (ValueError)      a sample's bytes do not have the checksum of the index
    ├── FormatError (ValueError)             a shard or an archive breaks the rules of its format
    │   └── NotFlatError                     its samples have no flat byte range
    ├── BadSampleError (ValueError)          one image of a source is unreadable or truncated
    ├── BadNameError (ValueError)            a name or a path from outside is not one that files can have
    ├── SourceError (ValueError)             a source cannot be used as it is
    ├── OutputError (OSError)                the target cannot be written: in use, not ours, full
    ├── StagingError (OSError)               a set cannot be staged: no place, no room, the source is gone or changed
    ├── RemoteError (OSError)                an object store or a web server: not there, denied, too slow, broken off
    ├── ResumeError (ValueError)             a resume token is malformed, or of another data set or order
    ├── TrainerError (RuntimeError)          a training loop would lose or repeat samples; says what to write instead
    ├── WorkerError (RuntimeError)           a worker process died
    ├── PipelineError (RuntimeError)         a pipeline of another library cannot be built, run or ended
    ├── MissingExtraError (ImportError)      an optional package is not installed
    └── errors of `cache`, see `cache.errors`: what its own functions raise; readers raise those above
"""

from __future__ import annotations

from cache.distribution import install_command

__all__ = [
    "BadNameError",
    "BadSampleError",
    "DamagedSampleError",
    "DatasetError",
    "FormatError",
    "MissingExtraError",
    "NotFlatError",
    "OutputError",
    "PackerError",
    "PipelineError",
    "RemoteError",
    "ResumeError",
    "SourceError",
    "StagingError",
    "StaleIndexError",
    "TrainerError",
    "UnknownNameError",
    "WorkerError",
]


class PackerError(Exception):
    """The root of all errors that this project raises on purpose."""


class DatasetError(PackerError, ValueError):
    """`dataset.json` or an index column is missing, malformed, inconsistent or of another version."""


class UnknownNameError(DatasetError, LookupError):
    """A split, a field or a key that the set does not have."""

    def __str__(
        self,
    ) -> str:  # LookupError subclasses such as KeyError quote their argument; this one must not
        return str(self.args[0]) if self.args else ""


class StaleIndexError(PackerError, OSError):
    """A shard is missing, or its size is not the size that was indexed."""


class DamagedSampleError(PackerError, ValueError):
    """The bytes that were read do not have the CRC32C that the index holds."""


class FormatError(PackerError, ValueError):
    """A shard or an archive breaks the rules of its format."""


class NotFlatError(FormatError):
    """The samples of this file are compressed, filtered or scattered: none is one byte range."""


class BadSampleError(PackerError, ValueError):
    """One image of a source has an unreadable header, is truncated or cannot be read at all."""


class BadNameError(PackerError, ValueError):
    """The name of a split or field, or a relative path, that is not allowed; it came from a user or from a file."""


class SourceError(PackerError, ValueError):
    """A source is missing, empty, ambiguous or not of a kind we know."""


class OutputError(PackerError, OSError):
    """The output cannot be written: not ours, in use by another conversion, or the disk is full."""


class StagingError(PackerError, OSError):
    """A set cannot be staged: no fit target, no room, a source that is gone, damaged or changed."""


class RemoteError(PackerError, OSError):
    """Something in an object store or on a web server cannot be read or written: missing, denied, slow, broken off."""


class ResumeError(PackerError, ValueError):
    """A resume token is malformed, of another version, or belongs to another data set or another order."""


class TrainerError(PackerError, RuntimeError):
    """A training loop or a framework would lose or repeat samples with this; the message holds the line to write."""


class WorkerError(PackerError, RuntimeError):
    """A worker process died without saying why (killed, out of memory)."""


class PipelineError(PackerError, RuntimeError):
    """A pipeline of another library cannot be built, does not give what it was fed, or does not end."""


class MissingExtraError(PackerError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: run  {install_command(extra)}")
