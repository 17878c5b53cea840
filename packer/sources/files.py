"""Read whole files into an arena: what the folder and the manifest source do in their workers."""

from __future__ import annotations

import os

from cache.errors import BadSampleError
from packer.conversion.arena import Arena

__all__ = ["read_file", "read_head"]


def read_head(path: str, count: int) -> bytes:
    """The first bytes of a file, up to `count`. Raises BadSampleError where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.pread(descriptor, count, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadSampleError(f"cannot be read: {error.strerror}") from error


def read_file(path: str, expected_bytes: int, arena: Arena) -> memoryview:
    """The content of a file that was listed with `expected_bytes` (-1: could not be examined).

    The arena must have room for expected_bytes + 1. Raises BadSampleError where the file cannot be read, or is of
    another size by now: somebody is writing to it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadSampleError(f"cannot be opened: {error.strerror}") from error
    try:
        window = arena.rest()
        if expected_bytes < 0 or len(window) <= expected_bytes:
            raise BadSampleError("appeared while the source was being listed; run the same command again")
        count = os.readv(descriptor, (window,))
        while 0 < count < expected_bytes:
            more = os.readv(descriptor, (window[count:],))
            if not more:
                break
            count += more
    except OSError as error:
        raise BadSampleError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if count != expected_bytes:
        raise BadSampleError(f"has changed: {expected_bytes} bytes when it was listed, {count} or more now")
    return arena.take(count)
