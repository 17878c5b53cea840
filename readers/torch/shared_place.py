"""Where an `ImageStream` is in its epochs: in memory that all processes with a copy of it share.

    int64[ranks, 6], one row a rank, since ranks that are forked or spawned with a stream share its memory, too:

               version     raised by each state that the stream was given, so that older copies notice
               iteration   which iteration of a DataLoader was begun last; 0 for none, RESTORED for one from a state
               epoch, cursor            where that one began
               next epoch, next cursor  where the next one begins

Worker 0 of an iteration begins it: it makes the next place the current one, names the iteration, and only then moves
the next place on. The other workers wait for the name; until they see it, the next place is theirs. The process that
made the stream may be none of the ranks, and puts all of them in a place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

__all__ = ["RESTORED", "SharedPlace"]

RESTORED = -1
_VERSION, _ITERATION, _CURRENT, _NEXT = 0, 1, slice(2, 4), slice(4, 6)
_PATIENCE_SECONDS = 120.0
_ROWS = 1024  # ranks that share memory are those of one node, and numbered one after the other


class SharedPlace:
    """Pickles to the same memory where DataLoader starts workers. rank: says which one this process is of."""

    def __init__(self, rank: Callable[[], int], epoch: int, cursor: int) -> None:
        self._rank, self._maker = rank, os.getpid()
        self._rows = torch.zeros((_ROWS, 6), dtype=torch.int64).share_memory_()
        self.put_next(epoch, cursor)

    @property
    def _values(self) -> torch.Tensor:
        row: torch.Tensor = self._rows[self._rank() % _ROWS]
        return row

    @property
    def version(self) -> int:
        return int(self._values[_VERSION])

    @property
    def begun(self) -> bool:
        """Whether an iteration was begun since the next place was put somewhere."""
        return bool(self._values[_ITERATION])

    @property
    def current(self) -> tuple[int, int]:
        """(epoch, cursor) where the iteration that was begun last began."""
        epoch, cursor = self._values[_CURRENT].tolist()
        return epoch, cursor

    @property
    def next(self) -> tuple[int, int]:
        """(epoch, cursor) where the next iteration begins."""
        epoch, cursor = self._values[_NEXT].tolist()
        return epoch, cursor

    def put_next(self, epoch: int, cursor: int) -> None:
        """Let the next iteration begin there."""
        rows = self._rows if os.getpid() == self._maker else self._values[None]
        rows[:, _NEXT] = torch.tensor((epoch, cursor))
        rows[:, _ITERATION] = 0

    def renew(self) -> int:
        """A new version."""
        rows = self._rows if os.getpid() == self._maker else self._values[None]
        rows[:, _VERSION] = self.version + 1
        return self.version

    def begin(self, iteration: int, epoch: int, cursor: int) -> None:
        """The iteration of this number, not 0, begins there; the one after it is the next epoch."""
        values = self._values
        values[_CURRENT] = torch.tensor((epoch, cursor))
        values[_ITERATION] = iteration
        values[_NEXT] = torch.tensor((epoch + 1, 0))

    def of(self, iteration: int) -> tuple[int, int]:
        """Where this iteration, the last or the next one, began or begins."""
        before = self.next
        return self.current if int(self._values[_ITERATION]) == iteration else before

    def join(self, iteration: int) -> tuple[int, int]:
        """Wait until worker 0 has begun the iteration; returns its place."""
        deadline, values = time.monotonic() + _PATIENCE_SECONDS, self._values
        while int(values[_ITERATION]) != iteration:
            if time.monotonic() > deadline:
                raise RuntimeError(f"worker 0 of this DataLoader has not begun an epoch for {_PATIENCE_SECONDS:g} s")
            time.sleep(0.001)
        return self.current
