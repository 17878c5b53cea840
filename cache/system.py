"""POSIX calls that Windows or macOS lack: replaced, so that local sets can be read there, or refused.

Windows has no fcntl, no files relative to an open folder (dir_fd), no pread, no fork; macOS has no locks of open file
descriptions and no memfd. Constants of `os.open` are 0 where they are missing. On Linux every name is the system's.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cache.errors import PlatformError

CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe by mistake must not block
READ = os.O_RDONLY | CLOEXEC | NONBLOCK | getattr(os, "O_BINARY", 0)
_position = threading.Lock()


def require(feature: str, is_there: bool) -> None:
    """Raise PlatformError unless the system supports `feature`."""
    if not is_there:
        raise PlatformError(
            f"{feature} needs Linux, and this system is {sys.platform}: use WSL 2 on Windows, a container on macOS; "
            f"reading a local set works here"
        )


class _Refused:
    """Replaces a missing module; any use raises PlatformError."""

    def __init__(self, use: str) -> None:
        self._use = use

    def __getattr__(self, name: str) -> Any:
        require(self._use, False)


try:
    import fcntl as fcntl
    import resource as resource
except ImportError:
    fcntl, resource = _Refused("locking files"), _Refused("limiting processes")  # type: ignore[assignment]


def require_shared_memory() -> None:
    """Raise PlatformError if the system has no caches in shared memory."""
    require("a cache in shared memory", sys.platform == "linux")


def _pread(descriptor: int, length: int, offset: int, /) -> bytes:
    with _position:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def _preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, /) -> int:
    count = 0
    for buffer in buffers:
        data = pread(descriptor, len(buffer), offset + count)
        buffer[: len(data)] = data
        count += len(data)
        if len(data) < len(buffer):
            break
    return count


pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _pread)
preadv: Callable[[int, Sequence[memoryview], int], int] = getattr(os, "preadv", _preadv)


def at_fork(**calls: Callable[[], object]) -> None:
    """`os.register_at_fork`; does nothing on a system without fork."""
    if register := getattr(os, "register_at_fork", None):
        register(**calls)


def affinity(process: int = 0) -> set[int]:
    """The CPUs that a process may use; all of them if the system does not say."""
    try:
        return os.sched_getaffinity(process)
    except (AttributeError, OSError):
        return set(range(os.cpu_count() or 1))
