"""Reading many byte ranges: merging them into larger reads, and the memory that they are read into.

A plan sorts the ranges by shard and offset and merges neighbours with small gaps, because one larger read is cheaper
than two system calls, and the disk gets one sequential run. Planning is pure arithmetic; the caller reads.

New memory costs a page fault per 4 KiB on first use, about as much as the copy that follows. So blocks are reused, but
only if no view of them exists: a bytearray refuses to change its size while its buffer is exported (PEP 3118), which
serves as the test. A view, or anything made from one, keeps the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

GAP_BYTES = 16 << 10
RUN_BYTES = 8 << 20


class ReadPlan(NamedTuple):
    """Runs to read into one buffer, and the place of each requested range in that buffer.

    Run r is [run_offset[r], run_offset[r] + run_length[r]) of shard run_shard[r], read to buffer position run_place[r].
    Requested range i is in run run_of[i], at buffer[place[i] : place[i] + length[i]]. All arrays are int64.
    """

    run_shard: npt.NDArray[np.int64]
    run_offset: npt.NDArray[np.int64]
    run_length: npt.NDArray[np.int64]
    run_place: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    run_of: npt.NDArray[np.int64]
    total_bytes: int

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(shard, offset, length, place) of each run."""
        columns = (self.run_shard, self.run_offset, self.run_length, self.run_place)
        return zip(*(column.tolist() for column in columns), strict=True)

    def views(self, block: memoryview, length: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """The requested ranges as views of a buffer that the runs were read into."""
        stops = (self.place + length).tolist()
        return [block[start:stop] for start, stop in zip(self.place.tolist(), stops, strict=True)]


def plan_reads(
    shard: npt.NDArray[Any],
    offset: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    gap_bytes: int = GAP_BYTES,
    run_bytes: int = RUN_BYTES,
) -> ReadPlan:
    """Merge k ranges (arrays [k]) into runs with gaps of at most `gap_bytes`, cut near `run_bytes`.

    Ranges may overlap or repeat: a repeated range is read once.
    """
    k = len(offset)
    if k == 0:
        empty = np.zeros(0, np.int64)
        return ReadPlan(empty, empty, empty, empty, empty, empty, 0)
    order = np.lexsort((offset, shard))
    s, o = shard[order], offset[order]
    end = o + length[order]
    if k > 1:
        # The largest end so far in the same shard, since ranges may be inside earlier ones.
        reach = _running_end(s, end)
        joins = (s[1:] == s[:-1]) & (o[1:] <= reach[:-1] + gap_bytes)
        starts = np.flatnonzero(np.concatenate(([True], ~joins))).astype(np.int64)
        starts = _cut_long_runs(starts, o, reach, run_bytes)
    else:
        reach, starts = end, np.zeros(1, np.int64)
    last = np.append(starts[1:], k) - 1
    run_offset = o[starts]
    run_length = reach[last] - run_offset
    run_place = np.zeros(len(starts), np.int64)
    np.cumsum(run_length[:-1], out=run_place[1:])
    run_of, place = np.empty(k, np.int64), np.empty(k, np.int64)
    run_of[order] = sorted_run_of = np.repeat(np.arange(len(starts)), last - starts + 1)
    place[order] = run_place[sorted_run_of] + (o - run_offset[sorted_run_of])
    total_bytes = int(run_length.sum())
    return ReadPlan(s[starts].astype(np.int64), run_offset, run_length, run_place, place, run_of, total_bytes)


def _running_end(shard: npt.NDArray[Any], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    reach: npt.NDArray[np.int64] = end.copy()
    firsts = np.flatnonzero(np.concatenate(([True], shard[1:] != shard[:-1])))
    for first, stop in zip(firsts, np.append(firsts[1:], len(end)), strict=True):
        np.maximum.accumulate(end[first:stop], out=reach[first:stop])
    return reach


def _cut_long_runs(
    starts: npt.NDArray[np.int64], offset: npt.NDArray[np.int64], reach: npt.NDArray[np.int64], run_bytes: int
) -> npt.NDArray[np.int64]:
    """Split runs longer than `run_bytes` where a range starts after all earlier ranges have ended."""
    stops = np.append(starts[1:], len(offset))
    if int((reach[stops - 1] - offset[starts]).max()) <= run_bytes:
        return starts.astype(np.int64)
    cuts: list[int] = []
    for first, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        cuts.append(first)
        begin = int(offset[first])
        for i in range(first + 1, stop):
            if int(reach[i]) - begin > run_bytes and int(offset[i]) >= int(reach[i - 1]):
                cuts.append(i)
                begin = int(offset[i])
    return np.array(cuts, np.int64)


_KEPT_BLOCKS = 5
_KEPT_BYTES = 256 << 20
_ROUND_BYTES = 1 << 20


class BlockPool:
    """Up to `kept` blocks of at most 256 MiB each. Thread-safe."""

    def __init__(self, kept: int = _KEPT_BLOCKS) -> None:
        self._kept = kept
        self._blocks: deque[bytearray] = deque()

    def take(self, size: int) -> memoryview:
        """A writable view of `size` bytes with undefined content."""
        for _ in range(len(self._blocks)):
            try:
                block = self._blocks.popleft()  # invisible to other threads from now on
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
        """Drop all blocks; existing views stay valid."""
        self._blocks.clear()


def _in_use(block: bytearray) -> bool:
    if not block:
        return False
    try:
        # Shrinking by one and growing again does not move the memory: a bytearray keeps its allocation.
        block.append(block.pop())
    except BufferError:
        return True
    return False
