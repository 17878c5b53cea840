"""Which positions of an epoch each rank takes in each step, counted from a global cursor.

    whole = batch_size * world_size        samples of a step
    base  = cursor + s * whole             step s takes the positions base to base + whole
    base + r * batch_size + i              the i-th of rank r, i < batch_size

An order whose positions belong to nodes (groups G > 1) is dealt so that node g = r // (world_size / G) sees the
positions p with p mod G = g alone:

    base + G * (l * batch_size + i) + g    the i-th of rank l of node g, l = r mod (world_size / G)

That needs world_size and cursor to be multiples of G; otherwise ranks take slices as above.

All ranks together have seen exactly the positions from the cursor to `cursor_after`, so a run may stop after any step
and go on with another world size and batch size: nothing is lost and nothing comes twice. What is left at the end,
m positions, fewer than one step:

    drop_last   is not seen in this epoch
    pad         every rank gets ceil(m / world_size) samples; those missing are repeats from the start of the epoch
    exact       every position once, as evenly as it goes; ranks may get fewer, or none: an empty array
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from readers.order.base import Int64s, Order

__all__ = ["TAILS", "Schedule", "Tail"]

Tail = Literal["drop_last", "pad", "exact"]
TAILS = ("drop_last", "pad", "exact")


@dataclass(frozen=True)
class Schedule:
    """The share of one rank in every step; steps are the same number on all ranks. Raises ValueError.

    batch_size: samples of one rank in a step.
    """

    order: Order
    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "drop_last"

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world_size < 1:
            raise ValueError(f"batch_size {self.batch_size} and world_size {self.world_size} must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside the world of {self.world_size}")
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {self.tail!r}")

    @property
    def step_samples(self) -> int:
        """Samples of a whole step, all ranks together."""
        return self.batch_size * self.world_size

    def steps(self, cursor: int = 0) -> int:
        """Steps from `cursor` to the end of the epoch."""
        rest = self._rest(cursor)
        return rest // self.step_samples if self.tail == "drop_last" else -(-rest // self.step_samples)

    def positions(self, step: int, cursor: int = 0) -> Int64s:
        """This rank's positions in a step counted from `cursor`: int64, batch_size of them except at the tail.

        Raises IndexError for a step that the rest of the epoch does not have.
        """
        self._check_step(step, cursor)
        groups = self._groups(cursor)
        group, local = divmod(self.rank, self.world_size // groups)
        base = cursor + step * self.step_samples
        rest = len(self.order) - base
        if rest >= self.step_samples:
            first, last = local * self.batch_size, (local + 1) * self.batch_size
        elif self.tail == "pad":
            share = -(-rest // self.world_size)
            first, last = local * share, (local + 1) * share
        else:
            mine, ranks = (rest - group + groups - 1) // groups, self.world_size // groups
            first, last = local * mine // ranks, (local + 1) * mine // ranks
        return self._wrapped(base + group + groups * np.arange(first, last, dtype=np.int64), group, groups)

    def cursor_after(self, step: int, cursor: int = 0) -> int:
        """The global cursor when all ranks have done a step counted from `cursor`."""
        self._check_step(step, cursor)
        return min(len(self.order), cursor + (step + 1) * self.step_samples)

    def samples(self, cursor: int = 0) -> int:
        """Samples of this rank from `cursor` to the end of the epoch, repeats included."""
        steps = self.steps(cursor)
        if not steps:
            return 0
        return (steps - 1) * self.batch_size + len(self.positions(steps - 1, cursor))

    def _rest(self, cursor: int) -> int:
        if not 0 <= cursor <= len(self.order):
            raise ValueError(f"the cursor {cursor} is outside the epoch of {len(self.order)} positions")
        return len(self.order) - cursor

    def _check_step(self, step: int, cursor: int) -> None:
        steps = self.steps(cursor)
        if not 0 <= step < steps:
            raise IndexError(f"step {step} is outside the {steps} steps from position {cursor} to the epoch's end")

    def _groups(self, cursor: int) -> int:
        groups = self.order.groups
        return groups if self.world_size % groups == 0 and cursor % groups == 0 else 1

    def _wrapped(self, positions: Int64s, group: int, groups: int) -> Int64s:
        """Positions past the end go on at the start of the epoch, with those of the same node."""
        length = len(self.order)
        if not positions.size or int(positions[-1]) < length:
            return positions
        own = (length - group + groups - 1) // groups
        if own == 0:  # an epoch with fewer samples than nodes: there is nothing of its own to repeat
            return positions % length
        return positions // groups % own * groups + group
