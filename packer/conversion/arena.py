"""Memory that a worker reads samples into, used again and again.

Writers keep references to payloads until they are flushed, so the arena flushes them before it starts over.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ARENA_BYTES", "Arena"]

ARENA_BYTES = 2 << 20


class Arena:
    """A block of `size` bytes handed out from front to back; a sample larger than it makes it grow."""

    __slots__ = ("_block", "_flush", "_used")

    def __init__(self, flush: Callable[[], None], size: int = ARENA_BYTES) -> None:
        self._block = memoryview(bytearray(size))
        self._used = 0
        self._flush = flush

    def begin(self, size: int) -> None:
        """Make room for a sample of `size` bytes. Everything taken before may be overwritten from now on,
        unless there was room behind it."""
        if self._used + size > len(self._block):
            self._flush()
            self._used = 0
            if size > len(self._block):
                self._block = memoryview(bytearray(size))

    def rest(self) -> memoryview:
        """The free part, to read into; then `take` what was read."""
        return self._block[self._used :]

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        start = self._used
        self._used = start + size
        return self._block[start : start + size]
