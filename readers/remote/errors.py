"""What an absent object means to a reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cache.errors import MissingError, StaleIndexError

__all__ = ["remote_errors"]


@contextmanager
def remote_errors(indexed: bool = False) -> Iterator[None]:
    """indexed: what is read is in the index, so its absence is a StaleIndexError. Other errors pass as they are."""
    try:
        yield
    except MissingError as error:
        if indexed:
            raise StaleIndexError(str(error)) from error
        raise
