"""Every error that this project raises on purpose: one tree; each class is also a builtin error.

Messages say what went wrong, where, what was expected and found, and what to do next. `except PackerError` catches all
of them.

    PackerError
    ├── DatasetError (ValueError)            dataset.json or an index is missing, malformed or of another version
    │   └── UnknownNameError (LookupError)   no such split, field or key
    ├── StaleIndexError (OSError)            a shard is missing, or differs from the file that was indexed
    ├── DamagedSampleError (ValueError)      a sample's bytes do not match the checksum in the index
    ├── FormatError (ValueError)             a shard or an archive breaks the rules of its format
    │   └── NotFlatError                     its samples are not flat byte ranges
    ├── BadSampleError (ValueError)          one image of a source is unreadable or truncated
    ├── BadNameError (ValueError)            a name or path from a user or a file is not allowed
    ├── SourceError (ValueError)             a source cannot be used as it is
    ├── OutputError (OSError)                the output cannot be written: in use, not written by packer, disk full
    ├── StagingError (OSError)               a set cannot be staged
    │   ├── NoTargetError                    no directory is writable, local and owned by the user
    │   ├── NoRoomError                      too few free bytes or inodes, before or during the copy
    │   ├── StagingSourceError               the source is gone, unreadable, or does not match its manifest
    │   └── StoppedError                     a caller stopped the copy
    ├── ServingError (OSError)               a node cannot serve its bytes to other nodes
    ├── RemoteError (OSError)                an object store or a web server fails
    │   ├── AddressError                     not a valid address: scheme, bucket or path is wrong
    │   ├── MissingError                     there is no such object or page
    │   │   └── NoBucketError                there is no such bucket or container
    │   ├── DeniedError                      credentials are missing, wrong or insufficient
    │   ├── CertificateError                 TLS: a certificate is not accepted, or the server does not speak TLS
    │   ├── SlowError                        no complete answer within the time allowed
    │   ├── ChangedError (StaleIndexError)   the object has changed since it was read: another ETag or size
    │   ├── TruncatedError                   fewer bytes than promised, on every attempt
    │   ├── ExistsError                      an object to be created exists already
    │   └── UnsupportedError                 the server does not support the request (ranges, conditions, lists)
    ├── CacheError                           a cache in shared memory
    │   ├── CacheFullError (OSError)         no room for a segment of this size; errno is ENOSPC, ENOMEM or EDQUOT
    │   ├── CacheDirectoryError (OSError)    the directory is missing, or files cannot be created in it
    │   ├── ForeignCacheError (OSError)      not a segment of this user: wrong owner, kind of file, magic or version
    │   ├── CacheBusyError (TimeoutError)    the process that creates or checks the segment does not finish
    │   └── ClosedCacheError (ValueError)    used after `close`
    ├── ResumeError (ValueError)             a resume token is malformed, or belongs to another data set or order
    ├── TrainerError (RuntimeError)          a training loop would lose or repeat samples
    ├── WorkerError (RuntimeError)           a worker process died
    ├── PipelineError (RuntimeError)         a pipeline of another library cannot be built, run or ended
    ├── DeviceError (RuntimeError)           a GPU, or a library for it, cannot be loaded or does not work
    ├── PlatformError (RuntimeError)         the operating system lacks a required feature
    └── MissingExtraError (ImportError)      an optional package is not installed

The import names `packer`, `readers` and `cache` belong to other projects on the public package index; this
distribution is called `packer-vision`. Every message with an installation command uses `install_command`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache.messages import quoted

DISTRIBUTION = "packer-vision"


class PackerError(Exception):
    """The root of all errors that this project raises on purpose."""


class DatasetError(PackerError, ValueError):
    """`dataset.json` or an index column is missing, malformed, inconsistent or of another version."""


class UnknownNameError(DatasetError, LookupError):
    """The set has no split, field or key of this name."""


class StaleIndexError(PackerError, OSError):
    """A shard is missing, or its size is not the size that was indexed."""


class DamagedSampleError(PackerError, ValueError):
    """The bytes that were read do not match the CRC32C in the index."""


class FormatError(PackerError, ValueError):
    """A shard or an archive breaks the rules of its format."""


class NotFlatError(FormatError):
    """The samples of this file are compressed, filtered or scattered, so they are not single byte ranges."""


class BadSampleError(PackerError, ValueError):
    """An image of a source has an unreadable header, is truncated, or cannot be read at all."""


class BadNameError(PackerError, ValueError):
    """The name of a split or field, or a relative path, from a user or a file, is not allowed."""


class SourceError(PackerError, ValueError):
    """A source is missing, empty, ambiguous or of an unknown kind."""


class OutputError(PackerError, OSError):
    """The output cannot be written: not written by packer, in use by another conversion, or the disk is full."""


class StagingError(PackerError, OSError):
    """A set cannot be staged; the root of all staging errors."""


class NoTargetError(StagingError):
    """No directory is suitable for a copy; the message says why each was refused."""


class NoRoomError(StagingError):
    """Too few free bytes or inodes; the message says how many are missing, and what would fit."""


class StagingSourceError(StagingError):
    """The source vanished, changed, or cannot be read."""


class StoppedError(StagingError):
    """A caller stopped the copy; neither the set nor the disk is at fault."""


class ServingError(PackerError, OSError):
    """A node cannot serve its bytes to other nodes, because of the address, token, certificate or shared folder."""


class RemoteError(PackerError, OSError):
    """An object store or a web server cannot be read or written; the root of all such errors."""


class AddressError(RemoteError):
    """The text is not an address of a supported kind."""


class MissingError(RemoteError):
    """No such object or page."""


class NoBucketError(MissingError):
    """No such bucket or container."""


class DeniedError(RemoteError):
    """Credentials are missing, wrong or insufficient."""


class CertificateError(RemoteError):
    """TLS fails: the server's certificate is not trusted, or the configured certificate cannot be used."""


class SlowError(RemoteError):
    """No complete answer within the time allowed, including retries."""


class ChangedError(RemoteError, StaleIndexError):
    """The object differs from the one that was read before or indexed."""


class TruncatedError(RemoteError):
    """Fewer bytes than were promised."""


class ExistsError(RemoteError):
    """An object to be created exists already."""


class UnsupportedError(RemoteError):
    """The server does not support the request."""


class CacheError(PackerError):
    """The root of all errors of caches in shared memory. Filling a cache up raises none: `put` returns False."""


class CacheFullError(CacheError, OSError):
    """There is no room for the segment: ask for a smaller capacity, or continue without a cache."""


class CacheDirectoryError(CacheError, OSError):
    """The directory for segments is missing, or segments cannot be created in it."""


class ForeignCacheError(CacheError, OSError):
    """The file is not a segment of this user, layout and data set; it is left unchanged."""


class CacheBusyError(CacheError, TimeoutError):
    """Another process has locked the segment and does not release it."""


class ClosedCacheError(CacheError, ValueError):
    """The cache has been closed."""


class ResumeError(PackerError, ValueError):
    """A resume token is malformed, of another version, or belongs to another data set or another order."""


class TrainerError(PackerError, RuntimeError):
    """A training loop or a framework would lose or repeat samples; the message contains the line to write instead."""


class WorkerError(PackerError, RuntimeError):
    """A worker process died without an error message (killed, out of memory)."""


class PipelineError(PackerError, RuntimeError):
    """A pipeline of another library cannot be built, returns something else than it was fed, or does not end."""


class DeviceError(PackerError, RuntimeError):
    """A GPU, or a library that uses it, cannot be loaded, fails on a known image, or has stopped working."""


class UnsupportedCpuError(PackerError, RuntimeError):
    """The CPU lacks required instructions; the message names them."""


class PlatformError(PackerError, RuntimeError):
    """The operating system lacks a required feature."""


class MissingExtraError(PackerError, ImportError):
    """An optional package is not installed; the message contains the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: run  {install_command(extra)}")
        self._given = (package, extra, purpose)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


def install_command(*extras: str) -> str:
    """The command that installs these extras: pip install 'packer-vision[remote]'.

    If the distribution is installed (from a checkout, too), pip keeps it and adds the packages of the extras. If a
    checkout is only on the import path, the command names the checkout, so that no package index is asked.
    """
    extras_text = f"[{','.join(extras)}]"
    checkout = Path(__file__).resolve().parent.parent
    if not _is_installed(checkout) and (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quoted(f'{checkout}{extras_text}')}"
    return f"pip install '{DISTRIBUTION}{extras_text}'"


def _is_installed(checkout: Path) -> bool:
    """Whether a distribution is installed; metadata that a build left in the checkout does not count."""
    from importlib.metadata import distributions  # takes 20 ms; only messages need it

    places = [Path(str(package.locate_file(""))).resolve() for package in distributions(name=DISTRIBUTION)]
    return any(place != checkout for place in places)
