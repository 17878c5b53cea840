"""Every error that this project raises on purpose: one tree with one root, each also the builtin that fits it.

Messages say what went wrong, where, what was expected and found, and what to run next. `except PackerError` catches
all of them.

    PackerError
    ├── DatasetError (ValueError)            dataset.json or an index is missing, malformed or of another version
    │   └── UnknownNameError (LookupError)   no such split, field or key
    ├── StaleIndexError (OSError)            a shard is missing, or is not the file that was indexed
    ├── DamagedSampleError (ValueError)      a sample's bytes do not have the checksum of the index
    ├── FormatError (ValueError)             a shard or an archive breaks the rules of its format
    │   └── NotFlatError                     its samples have no flat byte range
    ├── BadSampleError (ValueError)          one image of a source is unreadable or truncated
    ├── BadNameError (ValueError)            a name or a path from outside is not allowed for a file
    ├── SourceError (ValueError)             a source cannot be used as it is
    ├── OutputError (OSError)                the output cannot be written: in use, not written by packer, full
    ├── StagingError (OSError)               a set cannot be staged
    │   ├── NoTargetError                    no directory is writable, local and the user's own
    │   ├── NoRoomError                      bytes or inodes are missing, before or in the middle of copying
    │   ├── StagingSourceError               the source is gone, unreadable, or not what its manifest says
    │   └── StoppedError                     a caller asked to stop
    ├── ServingError (OSError)               a node cannot serve its bytes to others
    ├── RemoteError (OSError)                an object store or a web server fails
    │   ├── AddressError                     not an address: scheme, bucket or path are wrong
    │   ├── MissingError                     there is no such object or page
    │   │   └── NoBucketError                there is no such bucket or container
    │   ├── DeniedError                      credentials are missing, wrong, or not enough
    │   ├── CertificateError                 TLS: a certificate is not accepted, or TLS is not spoken
    │   ├── SlowError                        no answer, or not all of it, within the time allowed
    │   ├── ChangedError (StaleIndexError)   not the object that was read before: another ETag or size
    │   ├── TruncatedError                   fewer bytes than promised, on every attempt
    │   ├── ExistsError                      an object exists that should not
    │   └── UnsupportedError                 the server cannot do what is asked (ranges, conditions, lists)
    ├── CacheError                           a cache in shared memory
    │   ├── CacheFullError (OSError)         no room for a segment of this size; errno is ENOSPC, ENOMEM or EDQUOT
    │   ├── CacheDirectoryError (OSError)    the directory is missing, or files cannot be created in it
    │   ├── ForeignCacheError (OSError)      not a segment of this user: owner, kind of file, magic, version
    │   ├── CacheBusyError (TimeoutError)    the process that creates or checks the segment does not finish
    │   └── ClosedCacheError (ValueError)    used after `close`
    ├── ResumeError (ValueError)             a resume token is malformed, or of another data set or order
    ├── TrainerError (RuntimeError)          a training loop would lose or repeat samples
    ├── WorkerError (RuntimeError)           a worker process died
    ├── PipelineError (RuntimeError)         a pipeline of another library cannot be built, run or ended
    ├── DeviceError (RuntimeError)           a GPU or a library for it cannot be loaded, or does not work
    ├── PlatformError (RuntimeError)         the operating system lacks what is asked for
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
    """A split, a field or a key that the set does not have."""


class StaleIndexError(PackerError, OSError):
    """A shard is missing, or its size is not the size that was indexed."""


class DamagedSampleError(PackerError, ValueError):
    """The bytes that were read do not have the CRC32C of the index."""


class FormatError(PackerError, ValueError):
    """A shard or an archive breaks the rules of its format."""


class NotFlatError(FormatError):
    """The samples of this file are compressed, filtered or scattered: none is one byte range."""


class BadSampleError(PackerError, ValueError):
    """One image of a source has an unreadable header, is truncated or cannot be read at all."""


class BadNameError(PackerError, ValueError):
    """The name of a split or field, or a relative path, that is not allowed; it came from a user or from a file."""


class SourceError(PackerError, ValueError):
    """A source is missing, empty, ambiguous or of an unknown kind."""


class OutputError(PackerError, OSError):
    """The output cannot be written: not written by packer, in use by another conversion, or the disk is full."""


class StagingError(PackerError, OSError):
    """A set cannot be staged; the root of the errors of staging."""


class NoTargetError(StagingError):
    """No directory is fit for a copy; the message says why each was refused."""


class NoRoomError(StagingError):
    """Bytes or inodes are missing; the message says how many, and what would fit."""


class StagingSourceError(StagingError):
    """The source vanished, cannot be read, or changed."""


class StoppedError(StagingError):
    """A caller asked to stop copying: the set and the disk are not at fault."""


class ServingError(PackerError, OSError):
    """A node cannot serve its bytes to others: the address, the token, the certificate, or the folder they share."""


class RemoteError(PackerError, OSError):
    """Something in an object store or on a web server cannot be read or written; the root of these errors."""


class AddressError(RemoteError):
    """The text is not an address of a supported kind."""


class MissingError(RemoteError):
    """No such object or page."""


class NoBucketError(MissingError):
    """No such bucket or container."""


class DeniedError(RemoteError):
    """Credentials are missing, wrong or not enough."""


class CertificateError(RemoteError):
    """TLS fails: the server's certificate is not trusted, or the configured certificate cannot be used."""


class SlowError(RemoteError):
    """No whole answer within the time allowed, retries included."""


class ChangedError(RemoteError, StaleIndexError):
    """Not the object that was read before, or that was indexed."""


class TruncatedError(RemoteError):
    """Fewer bytes than were promised."""


class ExistsError(RemoteError):
    """An object exists that should not."""


class UnsupportedError(RemoteError):
    """The server does not do what was asked for."""


class CacheError(PackerError):
    """The root of the errors of caches in shared memory. A cache that fills up later raises none: `put` is False."""


class CacheFullError(CacheError, OSError):
    """There is no room for the segment: request a smaller capacity, or continue without a cache."""


class CacheDirectoryError(CacheError, OSError):
    """The directory for segments is missing, or segments cannot be created in it."""


class ForeignCacheError(CacheError, OSError):
    """The file is not a segment of this user, layout and data set; it stays as it is."""


class CacheBusyError(CacheError, TimeoutError):
    """Another process has locked the segment and does not release it."""


class ClosedCacheError(CacheError, ValueError):
    """The cache has been closed."""


class ResumeError(PackerError, ValueError):
    """A resume token is malformed, of another version, or belongs to another data set or another order."""


class TrainerError(PackerError, RuntimeError):
    """A training loop or a framework would lose or repeat samples with this; the message has the line to write."""


class WorkerError(PackerError, RuntimeError):
    """A worker process died without saying why (killed, out of memory)."""


class PipelineError(PackerError, RuntimeError):
    """A pipeline of another library cannot be built, does not give what it was fed, or does not end."""


class DeviceError(PackerError, RuntimeError):
    """A GPU, or a library that works on one, cannot be loaded, fails a known image, or has failed since."""


class UnsupportedCpuError(PackerError, RuntimeError):
    """The CPU lacks instructions that are needed; the message names them."""


class PlatformError(PackerError, RuntimeError):
    """The operating system lacks what was asked for."""


class MissingExtraError(PackerError, ImportError):
    """An optional package is needed; the message has the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: run  {install_command(extra)}")
        self._given = (package, extra, purpose)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


def install_command(*extras: str) -> str:
    """The command that installs these extras: pip install 'packer-vision[remote]'.

    pip takes an installed distribution as it is, from a checkout too, and adds what the extra needs. Where nothing
    is installed, because a checkout is on the path, the command names that checkout and no package index is asked.
    """
    wanted = f"[{','.join(extras)}]"
    checkout = Path(__file__).resolve().parent.parent
    if not _is_installed(checkout) and (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quoted(f'{checkout}{wanted}')}"
    return f"pip install '{DISTRIBUTION}{wanted}'"


def _is_installed(checkout: Path) -> bool:
    """Metadata that a build left in the checkout itself is not an installation."""
    from importlib.metadata import distributions  # 20 ms, and only messages need it

    places = [Path(str(found.locate_file(""))).resolve() for found in distributions(name=DISTRIBUTION)]
    return any(place != checkout for place in places)
