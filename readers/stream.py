"""Read samples in a known order with the kernel asked ahead.

A disk is a queue: it is fast only while several reads are outstanding. The order of an epoch is known, so the
ranges of the next blocks are announced before the current block is read. A block is a run of samples in the asked
order; `AHEAD_BLOCKS` blocks are outstanding at any time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from readers.sample import Buffer

__all__ = ["AHEAD_BLOCKS", "BLOCK_SAMPLES", "stream_ahead"]

BLOCK_SAMPLES = 64
AHEAD_BLOCKS = 4


class _Readable(Protocol):
    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = ...) -> Sequence[Buffer]: ...


def stream_ahead(
    reader: _Readable,
    indices: Iterable[int],
    field: str,
    announce: Callable[[Sequence[int]], None],
    block_samples: int = BLOCK_SAMPLES,
    ahead_blocks: int = AHEAD_BLOCKS,
) -> Iterator[Buffer]:
    """Yield the bytes of `indices` one by one; memory holds one block, the page cache the announced ones.

    announce: tells the kernel that a block of indices will be read soon.
    """
    order = iter(indices)
    announced: deque[list[int]] = deque()
    while True:
        while len(announced) < ahead_blocks:
            block = list(itertools.islice(order, block_samples))
            if not block:
                break
            announce(block)
            announced.append(block)
        if not announced:
            return
        yield from reader.read_many(announced.popleft(), field)
