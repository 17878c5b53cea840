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

__all__ = ["StepTime", "time_steps"]

_BLOCKS = 8


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
    synchronize: Callable[[], object] = lambda: None,
) -> StepTime:
    """Run `warmup` steps, then steps for about `seconds`, in blocks whose means give the interval.

    workers: steps that a block has at least, because workers deliver in turns. synchronize: waits for the device at the
    end of a block, so that its work is part of the time.
    """
    for _ in range(warmup):
        step(next(batches))
    synchronize()
    busy, waits, means = _cpu_times(), 0.0, list[float]()
    start = begin = time.perf_counter()
    steps = in_block = 0
    while len(means) < _BLOCKS:
        before = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - before
        step(batch)
        in_block += 1
        if time.perf_counter() - begin < seconds / _BLOCKS or in_block < workers:
            continue
        synchronize()
        end = time.perf_counter()
        means.append((end - begin) / in_block)
        steps, in_block, begin = steps + in_block, 0, end
        if end - start > 2 * seconds and len(means) > 1:  # too slow for all blocks
            break
    means.sort()
    inner = means[1:-1] if len(means) == _BLOCKS else means
    return StepTime(median(means), inner[0], inner[-1], waits / steps, steps, _busy_share(busy, _cpu_times()))


def _cpu_times() -> tuple[float, float]:
    """(busy, all) clock ticks of the CPUs that this process may use, since boot (proc(5), /proc/stat)."""
    busy = total = 0.0
    with suppress(OSError, ValueError):
        allowed = os.sched_getaffinity(0)
        for line in Path("/proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in allowed:
                ticks = [float(number) for number in numbers[:8]]  # user nice system idle iowait irq softirq steal
                total += sum(ticks)
                busy += sum(ticks) - ticks[3] - ticks[4]
    return busy, total


def _busy_share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else None
