"""The rungs of a ladder as costs, and the costs as a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from cache.node import usable_cpus
from readers.diagnosis.ladder import Diagnosis, Rung, StageCost
from readers.diagnosis.pipeline import Pipeline, Stage
from readers.diagnosis.timing import StepTime

__all__ = ["BUSY", "SAME", "costs_of", "explained", "judge", "warm_seconds"]

SAME = 0.1  # times that differ by less are taken as equal
_KEEPS_UP = 0.15  # of the time of a step: a training that waits less is not starved
BUSY = 0.95  # of the CPUs: no room for more work
_UNTIMED = ("storage", "loading")  # stages of the workers whose time in one of them is not known
_FEW_WORKERS = 1.1  # so many more are a better answer than the name of a stage
_UNSURE = 0.2  # times that differ by less are taken as equal where their intervals overlap


def costs_of(rungs: list[Rung], pipeline: Pipeline) -> list[StageCost]:
    """The costs as the ladder and the clocks of the stages give them; the first of both readings is the step itself."""
    stages = pipeline.stages
    known = {stage.name: stage for stage in stages}
    warm = warm_seconds(rungs)
    floor = _floor(rungs, stages)
    costs = [StageCost("step", rungs[0].what, rungs[0].time.seconds, 0.0, True)]
    work = sum(map(_work, stages))
    for below, rung in itertools.pairwise(rungs):
        added = max(0.0, rung.time.seconds - below.time.seconds)
        stage = known.get(rung.stage, Stage(rung.stage))
        freed, measured = added, stage.seconds is None or not pipeline.concurrent
        if rung.stage == "read" and (measured or not work):  # nothing is before it but what it waits for
            freed, measured = max(0.0, warm - below.time.seconds), True
        elif work > 0 and not measured:
            freed = max(0.0, warm - max(floor, warm - warm * _work(stage) / work))
        elif rung.time.low <= below.time.high:  # a difference that may be chance
            freed = 0.0
        costs.append(StageCost(rung.stage, rung.what, added, freed, measured, stage.seconds, stage.cpu_seconds))
    return costs


def _in_workers(stages: tuple[Stage, ...]) -> set[str]:
    return {stage.name for stage in stages if stage.seconds is not None or stage.name in _UNTIMED}


def _floor(rungs: Sequence[Rung], stages: tuple[Stage, ...]) -> float:
    """Seconds of a step if the workers cost nothing."""
    in_workers = _in_workers(stages)
    return list(itertools.takewhile(lambda rung: rung.stage not in in_workers, rungs))[-1].time.seconds


def warm_seconds(rungs: list[Rung]) -> float:
    """Seconds of a step of the whole pipeline over the few samples that are replayed: what a freed stage is compared
    with, so that its gain is not that of a warm page cache."""
    return _warm(rungs).seconds


def _warm(rungs: Sequence[Rung]) -> StepTime:
    return next((rung.time for rung in rungs if rung.stage == "read"), rungs[-1].time)


def _work(stage: Stage) -> float:
    """Seconds of a batch in a worker: on the CPU if that is most of it, since the rest is then other processes'."""
    wall, cpu = stage.seconds or 0.0, stage.cpu_seconds or 0.0
    return cpu if cpu > 0.5 * wall else wall


def explained(costs: list[StageCost], rungs: list[Rung]) -> tuple[StageCost, ...]:
    """The costs, each with the reason why its two readings disagree."""
    full, step = rungs[-1].time, costs[0].added
    found = [costs[0]]
    for cost in costs[1:]:
        reason = ""
        if abs(cost.added - cost.freed) > 0.2 * full.seconds:
            if full.cpu_busy is not None and full.cpu_busy >= BUSY:
                reason = f"the CPUs are {full.cpu_busy:.0%} busy, so the stage that comes last tips them over"
            elif cost.added < cost.freed:
                reason = f"the rungs below it hide behind the step of {1e3 * step:.0f} ms"
            else:
                reason = "with it free, another stage is the limit"
        found.append(replace(cost, reason=reason))
    return tuple(found)


def judge(pipeline: Pipeline, rungs: tuple[Rung, ...], costs: tuple[StageCost, ...]) -> Diagnosis:
    """What the costs say."""
    step, full = next(rung.time for rung in rungs if rung.stage == "step"), rungs[-1].time
    cpus, workers = usable_cpus(), pipeline.workers
    floor = _floor(rungs, pipeline.stages)
    busy = [stage.seconds for stage in pipeline.stages if stage.seconds is not None]
    cpu = [stage.cpu_seconds for stage in pipeline.stages if stage.cpu_seconds is not None]
    worst = max(costs[1:], key=lambda cost: cost.freed)
    limited = worst.stage in _in_workers(pipeline.stages)  # then the workers are busy all the time
    needed = max(sum(busy), full.seconds * workers if limited else 0.0) / floor if busy else None
    cpus_needed = sum(cpu) / floor if cpu else None
    result = Diagnosis(rungs, costs, "", "", step.seconds, None, workers, needed, cpus, cpus_needed, pipeline.notes)
    gap = (full.seconds - step.seconds) / full.seconds
    if gap <= _KEEPS_UP or (gap <= _UNSURE and full.low < step.high):
        verdict = "the data keep up: the training step itself is the limit"
        if gap > SAME:
            verdict += f", but for {1e3 * (full.seconds - step.seconds):.1f} ms of {1e3 * full.seconds:.1f} ms"
        return replace(result, verdict=verdict, bound=full.seconds)
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
    room = full.cpu_busy is None or full.cpu_busy < BUSY  # otherwise it may just wait for a CPU
    if room and worst.busy and worst.cpu is not None and worst.cpu < 0.5 * worst.busy:
        waits = f", which waits {1 - worst.cpu / worst.busy:.0%} of its time and does not compute"
    verdict = f"{worst.stage} ({worst.what}) starves the training{waits}; {gain}"
    return replace(result, culprit=worst.stage, verdict=verdict, bound=max(step.seconds, _bound(worst, rungs)))


def _bound(cost: StageCost, rungs: tuple[Rung, ...]) -> float:
    """Seconds of a step of the whole loader if a stage cost nothing.

    What storage adds is added to the rest where a worker waits for it. On busy CPUs all work takes so much longer; so
    it does where the two lines differ by chance.
    """
    full, warm = rungs[-1].time, _warm(rungs)
    waits = full.low > warm.high and (full.cpu_busy is None or full.cpu_busy < BUSY)
    if cost.stage in _UNTIMED or waits:
        return full.seconds - cost.freed
    return (warm.seconds - cost.freed) * full.seconds / warm.seconds
