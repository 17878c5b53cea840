"""The time of a training step, with an interval, and how busy the CPUs were meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from readers.usage.proc import cpu_times as read_cpus

__all__ = ["StepTime", "cpu_times", "time_steps"]

_BLOCKS = 8
_LEAST = 1e-9  # seconds: no step takes no time


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: the median over blocks of steps, and the interval from `low` to `high` that it is in.

    The interval is that of order statistics, which assumes nothing of the distribution: with 8 blocks from the second
    to the seventh, which has the median in 93 % of all cases; with fewer from the smallest to the largest.
    wait: seconds of it in which the loop waited for its batch. cpu_busy: share of the CPUs that were busy, of all
    processes, 0 to 1, None where the kernel does not say.
    """

    seconds: float
    low: float
    high: float
    wait: float
    steps: int
    cpu_busy: float | None

    @property
    def per_second(self) -> float:
        return 1 / self.seconds


def time_steps(
    batches: Iterator[Any],
    step: Callable[[Any], object],
    *,
    warmup: int,
    seconds: float,
    workers: int = 1,
    least_blocks: int = 2,
    count_wait: bool = True,
    synchronize: Callable[[], object] = lambda: None,
) -> StepTime:
    """Run `warmup` steps, then steps for about `seconds`, in blocks whose means give the interval.

    Slow batches end both earlier: the warm-up after one batch of each worker, the measurement after `least_blocks`.
    workers: steps that a block has at least, because workers deliver in turns. count_wait: whether the wait for batches
    is part of the time. synchronize: waits for the device at the end of a block, so that its work is part of the time.
    """
    start = time.perf_counter()
    for number in range(warmup):
        if number >= workers and time.perf_counter() - start > seconds:
            break
        step(next(batches))
    synchronize()
    busy, waits, means = cpu_times(), 0.0, list[float]()
    start = begin = time.perf_counter()
    steps = in_block = 0
    waited = 0.0  # in this block
    while len(means) < _BLOCKS:
        before = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - before
        step(batch)
        in_block += 1
        if time.perf_counter() - begin < seconds / _BLOCKS or in_block < workers:
            continue
        synchronize()
        end = time.perf_counter()
        means.append(max(_LEAST, end - begin - (0.0 if count_wait else waited)) / in_block)
        steps, waits, in_block, waited, begin = steps + in_block, waits + waited, 0, 0.0, end
        if end - start > 1.5 * seconds and len(means) >= least_blocks:  # too slow for all blocks
            break
    means.sort()
    inner = means[1:-1] if len(means) == _BLOCKS else means
    return StepTime(median(means), inner[0], inner[-1], waits / steps, steps, _busy_share(busy, cpu_times()))


def cpu_times() -> tuple[int, int]:
    """(busy, all) clock ticks of the CPUs that this process may use, since boot; (0, 0) where the kernel does not say.

    Busy is also what a hypervisor took.
    """
    with suppress(OSError):
        found = read_cpus(Path("/proc/stat").read_text())
        mine = [found[number] for number in os.sched_getaffinity(0) if number in found]
        return sum(cpu.busy + cpu.steal for cpu in mine), sum(cpu.total for cpu in mine)
    return 0, 0


def _busy_share(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else None
