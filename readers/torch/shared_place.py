"""Where an `ImageStream` is in its epochs: in memory that all processes with a copy of it share.

    int64[6]   version     raised by each state that the stream was given, so that older copies notice
               iteration   which iteration of a DataLoader was begun last; 0 for none, RESTORED for one from a state
               epoch, cursor            where that one began
               next epoch, next cursor  where the next one begins

Worker 0 of an iteration begins it: it makes the next place the current one, names the iteration, and only then moves
the next place on. The other workers wait for the name; until they see it, the next place is theirs.
"""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["RESTORED", "SharedPlace"]

RESTORED = -1
_VERSION, _ITERATION, _CURRENT, _NEXT = 0, 1, slice(2, 4), slice(4, 6)
_PATIENCE_SECONDS = 120.0


class SharedPlace:
    """Pickles to the same memory where DataLoader starts workers."""

    def __init__(self, epoch: int, cursor: int) -> None:
        self._values = torch.zeros(6, dtype=torch.int64).share_memory_()
        self.put_next(epoch, cursor)

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
        self._values[_NEXT] = torch.tensor((epoch, cursor))
        self._values[_ITERATION] = 0

    def renew(self) -> int:
        """A new version."""
        self._values[_VERSION] += 1
        return self.version

    def begin(self, iteration: int, epoch: int, cursor: int) -> None:
        """The iteration of this number, not 0, begins there; the one after it is the next epoch."""
        self._values[_CURRENT] = torch.tensor((epoch, cursor))
        self._values[_ITERATION] = iteration
        self._values[_NEXT] = torch.tensor((epoch + 1, 0))

    def of(self, iteration: int) -> tuple[int, int]:
        """Where this iteration, the last or the next one, began or begins."""
        before = self.next
        return self.current if int(self._values[_ITERATION]) == iteration else before

    def join(self, iteration: int) -> tuple[int, int]:
        """Wait until worker 0 has begun the iteration; returns its place."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while int(self._values[_ITERATION]) != iteration:
            if time.monotonic() > deadline:
                raise RuntimeError(f"worker 0 of this DataLoader has not begun an epoch for {_PATIENCE_SECONDS:g} s")
            time.sleep(0.001)
        return self.current

    def __reduce__(self) -> tuple[Any, ...]:
        return _of, (self._values,)


def _of(values: torch.Tensor) -> SharedPlace:
    place = SharedPlace.__new__(SharedPlace)
    place._values = values
    return place
