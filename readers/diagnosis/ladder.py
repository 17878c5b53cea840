"""Which stage starves the training: the ladder of caches, read in both directions.

    step        batches in the memory of the device: what training itself takes
    copy        batches in the memory of the host, copied in each step
    …           one more stage at a time runs for real, from the consumer back to storage
    storage     the loader as it is

What a rung adds to the time of a step is what its stage costs *with everything behind it for free* (added). The other
reading leaves the loader as it is and replaces one stage alone by memory (freed). They differ where stages hide behind
one another: what a rung adds hides behind the training step until the workers are slower than it, and a stage that
only tips over a limit, as of CPUs that are all busy, gets the blame of those before it. Therefore the verdict follows
`freed`, and a stage whose two figures disagree carries the reason.

The differential reading is that of J. Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", PVLDB
14(5), 2021.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cache.node import usable_cpus
from readers.diagnosis.batch_sizes import BatchSizes
from readers.diagnosis.pipeline import Pipeline, Stage
from readers.diagnosis.places import Places
from readers.diagnosis.timing import StepTime, time_steps

__all__ = ["Diagnosis", "Rung", "StageCost", "climb"]

_SAME = 0.1  # times that differ by less are taken as equal
_BUSY = 0.95  # of the CPUs: no room for more work
_FEW_WORKERS = 1.5  # so many more are a better answer than the name of a stage
_MEASURED_ALONE = 2  # stages whose gain is measured and not computed


@dataclass(frozen=True, slots=True)
class Rung:
    """The time of a step when `stage` and all stages nearer to the training run for real."""

    stage: str
    what: str
    time: StepTime


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage costs, in seconds of a step.

    added: by the ladder, with all stages before it for free. freed: what a step gains if it alone is free; measured
    says whether that was seen or computed from `busy`, the seconds of one batch in one undisturbed worker, of which
    `cpu` are on the CPU. reason: why the two readings disagree, "" where they agree.
    """

    stage: str
    what: str
    added: float
    freed: float
    measured: bool = False
    busy: float | None = None
    cpu: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where the time of a training step goes.

    rungs: from the step alone to the loader as it is.
    costs: of each stage, in the same order.
    culprit: the name of the costliest stage; "workers" if a few more of them would be enough; "" if the data keep up.
    verdict: the same in a sentence.
    bound: seconds of a step if the culprit cost nothing.
    batch_size: samples in a batch, None if unknown.
    workers, workers_needed: that the loader has, and that would keep up; None if the times of the stages are unknown.
    cpus, cpus_needed: that this process may use, and that the stages of the loader need to keep up.
    notes: what limits the reading.
    places: how fast samples are read where the set is, and in other directories; None where that was not asked for.
    batch_sizes: the loop with batches of other sizes; None likewise.
    """

    rungs: tuple[Rung, ...]
    costs: tuple[StageCost, ...]
    culprit: str
    verdict: str
    bound: float
    batch_size: int | None
    workers: int
    workers_needed: float | None
    cpus: int
    cpus_needed: float | None
    notes: tuple[str, ...] = ()
    places: Places | None = None
    batch_sizes: BatchSizes | None = None

    @property
    def step(self) -> StepTime:
        """The training step with its batch in the memory of the device."""
        return self.rungs[0].time

    @property
    def full(self) -> StepTime:
        """The training step with the loader as it is."""
        return self.rungs[-1].time

    @property
    def utilization(self) -> float:
        """Share of the time in which the device has work, 0 to 1: that of the step alone, of the whole."""
        return min(1.0, self.step.seconds / self.full.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries."""
        return {**asdict(self), "utilization": self.utilization}


def climb(
    pipeline: Pipeline,
    step: Callable[[Any], object],
    copy: Callable[[Any], Any] | None,
    *,
    seconds: float,
    synchronize: Callable[[], object],
    batch_size: int | None,
) -> Diagnosis:
    """Measure all rungs in about `seconds`. copy: brings a batch to the device; None where there is nothing to copy."""
    stages = pipeline.stages
    share = seconds / (len(stages) + 2 + _MEASURED_ALONE)

    def measure(batches: Iterator[Any], use: Callable[[Any], object]) -> StepTime:
        try:
            return time_steps(
                batches, use, warmup=pipeline.warmup, seconds=share, workers=pipeline.workers, synchronize=synchronize
            )
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def both(batch: Any) -> None:
        step(batch if copy is None else copy(batch))

    replayed = pipeline.cached(len(stages))
    on_device = [next(replayed) if copy is None else copy(next(replayed)) for _ in range(pipeline.distinct)]
    rungs = [Rung("step", "batches in the memory of the device", measure(_cycle(on_device), step))]
    del on_device
    if copy is not None:
        rungs.append(Rung("copy", "host to device", measure(pipeline.cached(len(stages)), both)))
    for count in range(len(stages) - 1, -1, -1):
        stage = stages[count]
        rungs.append(Rung(stage.name, stage.what, measure(pipeline.cached(count), both)))
    costs = _costs(rungs, stages)
    for cost in sorted(costs, key=lambda cost: (cost.measured, -cost.freed))[:_MEASURED_ALONE]:
        number = next((i for i, stage in enumerate(stages) if stage.name == cost.stage), -1)
        batches = pipeline.without(number) if number >= 0 else None
        if batches is not None:
            freed = _warm(rungs) - measure(batches, both).seconds
            costs[costs.index(cost)] = replace(cost, freed=max(0.0, freed), measured=True)
    return _judge(pipeline, tuple(rungs), _explained(costs, rungs), batch_size)


def _cycle(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _costs(rungs: list[Rung], stages: tuple[Stage, ...]) -> list[StageCost]:
    """The costs as the ladder and the clocks of the stages give them; the first of both readings is the step itself."""
    known = {stage.name: stage for stage in stages}
    warm = _warm(rungs)
    floor = _floor(rungs, stages)
    costs = [StageCost("step", rungs[0].what, rungs[0].time.seconds, 0.0, True)]
    work = sum(map(_work, stages))
    for below, rung in itertools.pairwise(rungs):
        added = max(0.0, rung.time.seconds - below.time.seconds)
        stage = known.get(rung.stage, Stage(rung.stage))
        freed, measured = added, stage.seconds is None
        if rung.stage == "read":  # nothing is before it but what it waits for
            freed, measured = max(0.0, warm - below.time.seconds), True
        elif work > 0 and not measured:
            freed = max(0.0, warm - max(floor, warm - warm * _work(stage) / work))
        costs.append(StageCost(rung.stage, rung.what, added, freed, measured, stage.seconds, stage.cpu_seconds))
    return costs


def _in_workers(stages: tuple[Stage, ...]) -> set[str]:
    return {stage.name for stage in stages if stage.seconds is not None} | {stages[0].name}


def _floor(rungs: Sequence[Rung], stages: tuple[Stage, ...]) -> float:
    """Seconds of a step if the workers cost nothing."""
    return [rung.time.seconds for rung in rungs if rung.stage not in _in_workers(stages)][-1]


def _warm(rungs: list[Rung]) -> float:
    """Seconds of a step of the whole pipeline over the few samples that are replayed: what a freed stage is compared
    with, so that its gain is not that of a warm page cache."""
    return next((rung.time.seconds for rung in rungs if rung.stage == "read"), rungs[-1].time.seconds)


def _work(stage: Stage) -> float:
    """Seconds of a batch in a worker: on the CPU if that is most of it, since the rest is then other processes'."""
    wall, cpu = stage.seconds or 0.0, stage.cpu_seconds or 0.0
    return cpu if cpu > 0.5 * wall else wall


def _explained(costs: list[StageCost], rungs: list[Rung]) -> tuple[StageCost, ...]:
    """The costs, each with the reason why its two readings disagree."""
    full, step = rungs[-1].time, rungs[0].time.seconds
    found = [costs[0]]
    for cost in costs[1:]:
        reason = ""
        if abs(cost.added - cost.freed) > 0.2 * full.seconds:
            if full.cpu_busy is not None and full.cpu_busy >= _BUSY:
                reason = f"the CPUs are {full.cpu_busy:.0%} busy, so the stage that comes last tips them over"
            elif cost.added < cost.freed:
                reason = f"the rungs below it hide behind the step of {1e3 * step:.0f} ms"
            else:
                reason = "with it free, another stage is the limit"
        found.append(replace(cost, reason=reason))
    return tuple(found)


def _judge(
    pipeline: Pipeline, rungs: tuple[Rung, ...], costs: tuple[StageCost, ...], batch_size: int | None
) -> Diagnosis:
    step, full = rungs[0].time, rungs[-1].time
    cpus, workers = usable_cpus(), pipeline.workers
    floor = _floor(rungs, pipeline.stages)
    busy = [stage.seconds for stage in pipeline.stages if stage.seconds is not None]
    cpu = [stage.cpu_seconds for stage in pipeline.stages if stage.cpu_seconds is not None]
    worst = max(costs[1:], key=lambda cost: cost.freed)
    limited = worst.stage in _in_workers(pipeline.stages)  # then the workers are busy all the time
    needed = max(sum(busy), full.seconds * workers if limited else 0.0) / floor if busy else None
    cpus_needed = sum(cpu) / floor if cpu else None
    result = Diagnosis(
        rungs, costs, "", "", step.seconds, batch_size, workers, needed, cpus, cpus_needed, pipeline.notes
    )
    if full.seconds - step.seconds <= _SAME * full.seconds:
        return replace(result, verdict="the data keep up: the training step itself is the limit", bound=full.seconds)
    if full.low < step.high:
        note = "the times vary so much that the verdict may be wrong: measure longer (seconds=), on a quiet machine"
        result = replace(result, notes=(*result.notes, note))
    gain = f"a step takes {1e3 * full.seconds:.1f} ms, and {1e3 * step.seconds:.1f} ms if it never waits"
    enough = limited and needed is not None and workers < needed <= max(workers + _FEW_WORKERS, 1.25 * workers)
    if enough and needed is not None and (cpus_needed or 0.0) < cpus and pipeline.more_workers:
        verdict = f"too few workers: {workers}, and {math.ceil(needed)} would keep up; {gain}"
        return replace(
            result,
            culprit="workers",
            verdict=verdict,
            bound=min(full.seconds, max(floor, full.seconds * workers / needed)),
        )
    waits = ""
    room = full.cpu_busy is None or full.cpu_busy < _BUSY  # otherwise it may just wait for a CPU
    if room and worst.busy and worst.cpu is not None and worst.cpu < 0.5 * worst.busy:
        waits = f", which waits {1 - worst.cpu / worst.busy:.0%} of its time and does not compute"
    verdict = f"{worst.stage} ({worst.what}) starves the training{waits}; {gain}"
    return replace(result, culprit=worst.stage, verdict=verdict, bound=max(step.seconds, full.seconds - worst.freed))
