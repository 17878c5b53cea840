"""Memory for batches, used again once nobody looks at it.

Fresh memory costs a page fault per 4 KiB at its first touch, about as much as the copy that follows. So blocks are kept
and handed out again, but only when no view of them is alive: a bytearray refuses to change its size while its buffer is
exported (PEP 3118), and that refusal is the test. Whoever holds a view, or anything made from one, keeps the block.
"""

from __future__ import annotations

from collections import deque

__all__ = ["BlockPool"]

_KEPT_BLOCKS = 5
_KEPT_BYTES = 256 << 20
_ROUND_BYTES = 1 << 20


class BlockPool:
    """Up to `kept` blocks of at most 256 MiB each. Threads may share it."""

    def __init__(self, kept: int = _KEPT_BLOCKS) -> None:
        self._kept = kept
        self._blocks: deque[bytearray] = deque()

    def take(self, size: int) -> memoryview:
        """A writable view of `size` bytes; what they hold is undefined."""
        for _ in range(len(self._blocks)):
            try:
                block = self._blocks.popleft()  # from here on no other thread sees it
            except IndexError:
                break
            if _in_use(block):
                self._blocks.append(block)
            elif len(block) >= size:
                view = memoryview(block)[:size]
                self._blocks.append(block)
                return view
        block = bytearray(-(-size // _ROUND_BYTES) * _ROUND_BYTES)
        view = memoryview(block)[:size]
        if len(self._blocks) < self._kept and len(block) <= _KEPT_BYTES:
            self._blocks.append(block)
        return view

    def clear(self) -> None:
        """Let go of all blocks; views of them stay valid."""
        self._blocks.clear()


def _in_use(block: bytearray) -> bool:
    if not block:
        return False
    try:
        # Shrinking by one and growing again moves nothing: the memory behind a bytearray stays as large as it was.
        block.append(block.pop())
    except BufferError:
        return True
    return False
