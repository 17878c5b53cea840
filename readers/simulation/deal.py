"""Who reads which positions when: the schedules of all ranks that are simulated, a few steps at a time.

Whole steps differ by a constant, so the schedule of a rank is asked for its first step, and for the last one where that
is not whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from readers.order import Order, Schedule
from readers.order.base import Int64s
from readers.simulation.job import Job

__all__ = ["Deal", "Part"]

_PART_READS = 1 << 20


class Part(NamedTuple):
    """Consecutive steps of the ranks that are simulated.

    first, steps: the steps. positions: int64 [k], by batch. batches: to which batch each belongs, int64 [k]: step *
    ranks + rank, both counted from the first that is here.
    """

    first: int
    steps: int
    positions: Int64s
    batches: Int64s


class Deal:
    """The positions of an epoch, by step and rank.

    nodes: those that are simulated, rising. Raises ValueError where an epoch has no step.
    """

    def __init__(self, order: Order, job: Job, nodes: Int64s) -> None:
        ranks = (nodes[:, None] * job.ranks + np.arange(job.ranks)).ravel().tolist()
        schedules = [Schedule(order, job.batch_size, rank, job.world_size, job.tail) for rank in ranks]
        self.ranks = len(ranks)
        self.steps = schedules[0].steps()
        self._whole = len(order) // schedules[0].step_samples
        self._step_samples = schedules[0].step_samples
        self._part_reads = min(_PART_READS, job.most_reads)
        if not self.steps:
            raise ValueError(
                f"an epoch of {len(order):,} samples has no step of {job.world_size:,} ranks with {job.batch_size} "
                f"each (drop_last): take fewer ranks, a smaller batch_size, or tail='exact'"
            )
        self._first = np.stack([s.positions(0) for s in schedules]) if self._whole else np.zeros((0, 0), np.int64)
        self._last = [s.positions(self._whole) for s in schedules] if self.steps > self._whole else []
        self.samples = self._whole * self._first.size + sum(map(len, self._last))

    def parts(self) -> Iterator[Part]:
        """The whole epoch, about a million reads at a time."""
        at_once = max(1, self._part_reads // max(1, self._first.size))
        for first in range(0, self._whole, at_once):
            steps = min(at_once, self._whole - first)
            moved = self._step_samples * (first + np.arange(steps, dtype=np.int64))
            positions = self._first + moved[:, None, None]
            batches = np.repeat(np.arange(steps * self.ranks), self._first.shape[1])
            yield Part(first, steps, positions.ravel(), batches)
        if self._last:
            sizes = [len(positions) for positions in self._last]
            yield Part(self._whole, 1, np.concatenate(self._last), np.repeat(np.arange(self.ranks), sizes))
