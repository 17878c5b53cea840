"""Errors of `cache.remote` under the names that readers raise, at one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cache.remote import ChangedError, MissingError
from cache.remote import RemoteError as CacheRemoteError
from readers.errors import MissingExtraError, RemoteError, StaleIndexError

__all__ = ["remote_errors"]


@contextmanager
def remote_errors(indexed: bool = False) -> Iterator[None]:
    """Around calls of `cache.remote`. indexed: what is read is in the index, so its absence is a StaleIndexError."""
    try:
        yield
    except ChangedError as error:
        raise StaleIndexError(str(error)) from error
    except MissingError as error:
        raise (StaleIndexError if indexed else RemoteError)(str(error)) from error
    except CacheRemoteError as error:
        raise RemoteError(str(error)) from error
    except ImportError as error:
        if "obstore" not in str(error):
            raise
        raise MissingExtraError("obstore", "remote", "reading and writing s3://, gs://, az:// and https://") from error
