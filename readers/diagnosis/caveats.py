"""What may make a ladder mislead, said where it applies and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev

from cache.messages import parse_size
from readers.diagnosis.ladder import Diagnosis, Rung
from readers.diagnosis.pipeline import Pipeline
from readers.diagnosis.timing import StepTime
from readers.diagnosis.verdict import BUSY, SAME

__all__ = ["caveats", "cpu_cache_bytes"]

_NOTICEABLE = 0.2  # of the time of a stage
_COMPUTES = 0.5  # of the time of a stage that computes
_SMALL = 0.02  # of the time of a step, in a worker: too little to say anything about
_BANDWIDTH = 1e9  # bytes/s; what moves data faster than this depends on where they are


def caveats(
    result: Diagnosis,
    pipeline: Pipeline,
    uneven: tuple[float, float] | None,
    step: StepTime,
    sizes: Sequence[int] = (),
    replayed: Sequence[int] = (),
) -> Iterator[str]:
    """The notes that apply.

    uneven: (shortest, longest) seconds of a step over different cached batches, None where they do not differ.
    step: the time of the step next to that of random data.
    sizes, replayed: bytes of the batches of the whole loader, and of those that are replayed.
    """
    yield from _tipped_over(result)
    yield from _sizes_vary(pipeline, sizes, replayed)
    yield from _dynamic(result, uneven, step)
    yield from _memory(result, pipeline)


def _tipped_over(result: Diagnosis) -> Iterator[str]:
    """CPUs that are all busy where the time jumps."""
    if not result.culprit:
        return
    rungs = result.rungs[[rung.stage for rung in result.rungs].index("step") :]
    steps = [(rung.time.seconds - below.time.seconds, rung) for below, rung in itertools.pairwise(rungs)]
    jump, rung = max(steps, key=lambda step: step[0])
    busy = rung.time.cpu_busy
    cost = next(cost for cost in result.costs if cost.stage == rung.stage)
    if cost.busy and cost.cpu is not None and cost.cpu < _COMPUTES * cost.busy:
        return  # it waits, and needs no CPU
    if busy is not None and busy >= BUSY and jump > SAME * result.full.seconds:
        yield (
            f"the CPUs are {busy:.0%} busy on the line '{rung.stage}', where the time jumps: that stage may only have "
            f"tipped them over, so compare the stages by 'if free'"
        )


def _sizes_vary(pipeline: Pipeline, sizes: Sequence[int], replayed: Sequence[int]) -> Iterator[str]:
    mean = fmean(sizes) if sizes else 0.0
    few = fmean(replayed) if replayed else 0.0
    if mean > 0 and (pstdev(sizes) > SAME * mean or abs(few - mean) > SAME * mean):
        yield (
            f"batches vary in size, from {min(sizes) / 1e6:.3g} to {max(sizes) / 1e6:.3g} MB, and those that are "
            f"replayed have {few / 1e6:.3g} MB: only the last line is of all of them"
        )
    if pipeline.size_error > SAME:
        yield (
            f"samples vary in size: those that are replayed may be {pipeline.size_error:.0%} larger or smaller than "
            f"the average, and 'storage' has the difference"
        )


def _dynamic(result: Diagnosis, uneven: tuple[float, float] | None, step: StepTime) -> Iterator[str]:
    """A step whose time depends on what is in its batch."""
    if uneven is not None:
        low, high = uneven
        yield (
            f"the time of the step depends on its batch: {1e3 * low:.1f} to {1e3 * high:.1f} ms over the batches that "
            f"are replayed, so the lines above 'storage' are of these batches"
        )
    lowest = result.rungs[0]
    if lowest.stage == "random" and _differ(lowest, step.low, step.high):
        yield (
            f"the step takes {1e3 * lowest.time.seconds:.1f} ms with random data and "
            f"{1e3 * step.seconds:.1f} ms with cached batches: the model is dynamic, or caches help"
        )


def _differ(rung: Rung, low: float, high: float) -> bool:
    time = rung.time
    return (time.low > high and time.low > (1 + SAME) * low) or (time.high < low and time.high < (1 - SAME) * high)


def _memory(result: Diagnosis, pipeline: Pipeline) -> Iterator[str]:
    """Where the values that are replayed are: not where they are in training."""
    in_worker = result.full.seconds * pipeline.workers
    for stage in pipeline.stages:
        seconds = stage.seconds or 0.0
        if stage.copying > max(_NOTICEABLE * seconds, _SMALL * in_worker):
            yield (
                f"copying recorded values takes {1e3 * stage.copying:.1f} ms a batch before '{stage.name}', which "
                f"takes {1e3 * seconds:.1f} ms: its line is that much too long"
            )
        per_batch = stage.kept_bytes / pipeline.distinct
        small = seconds < _SMALL * in_worker or per_batch < _BANDWIDTH * seconds
        if not small and 0 < stage.kept_bytes <= cpu_cache_bytes():
            yield (
                f"the {stage.kept_bytes / 1e6:.3g} MB that are replayed before '{stage.name}' fit into the cache of "
                f"the CPU, those of a training do not: '{stage.name}' may take longer there"
            )
    copying = next((rung.time for rung in result.rungs if rung.stage == "copy"), None)
    if result.pinned is not None and copying is not None and result.pinned.high < copying.low:
        yield (
            f"batches are not in page-locked memory: with pin_memory=True in the loader, the line 'copy' takes "
            f"{1e3 * result.pinned.seconds:.1f} ms and not {1e3 * copying.seconds:.1f} ms"
        )


def cpu_cache_bytes() -> int:
    """Bytes of the largest cache of a CPU, 0 where the kernel does not say."""
    largest = 0
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            largest = max(largest, parse_size(size.read_text().strip().replace("K", "KiB")))
    return largest
