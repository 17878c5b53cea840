"""`diagnose`: a loader and a training step in, a `Diagnosis` out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cache.errors import PipelineError, SourceError
from cache.messages import Silent, Watcher
from cache.node import usable_cpus
from packer.tools.diagnose.evidence import Evidence, gather
from packer.tools.diagnose.ladder import (
    BUSY,
    SAME,
    Diagnosis,
    Rung,
    StageCost,
    StepTime,
    caveats,
    costs_of,
    explained,
    judge,
    time_steps,
    warm_seconds,
)
from packer.tools.diagnose.pipeline import (
    IterablePipeline,
    Pipeline,
    Training,
    ending,
    in_a_line,
    leaves,
    map_tree,
    module_for,
    pinning,
    random_batches,
    trace_calls,
    tree_bytes,
)
from packer.tools.diagnose.tips import advise
from packer.tools.monitor.record import Usage
from packer.tools.monitor.sampler import INTERVAL, Sampler
from readers.trace import Trace

__all__ = ["climb", "diagnose"]

_OTHERS_BUSY = 0.3
_STEPS = 4  # that the shortest measurement takes, about


def diagnose(
    loader: Iterable[Any] | Pipeline,
    step: Callable[[Any], object] | None = None,
    *,
    device: Any = None,
    copy: Callable[[Any], Any] | None = None,
    simulate_step: float | None = None,
    seconds: float = 30.0,
    watcher: Watcher | None = None,
    trace: Trace | None = None,
) -> Diagnosis:
    """Measure which stage of a loader starves a training step.

    The step is called a few hundred times with real batches, so a model is trained by it; the sampler of the loader is
    used, too. Do this in a run of its own, not in the middle of one.

    loader: any iterable of batches; a torch DataLoader is rebuilt with its data set, samplers, workers and collate
        function, and cut into stages. For a loader of another kind, a `Pipeline` that says how to cut it.
    step: what the training does with a batch on its device.
    device: where batches go before the step, as "cuda"; None leaves them where they are.
    copy: how they get there, if not by `.to(device, non_blocking=True)` of all tensors in them.
    simulate_step: seconds that a step takes, in place of `step`: no model and no GPU is needed.
    seconds: about how long to measure; some seconds more are spent on starting workers.
    watcher: shows the time of each line as soon as it is known.
    trace: gets each line and its waits, copies and steps, and of an `ImageLoader` what its threads do.

    Raises PipelineError if the loader gives no batch, ValueError for arguments that contradict each other. What the
    loader or the step raises is passed on.
    """
    if seconds <= 0:
        raise ValueError(f"seconds={seconds}: expected more than 0")
    if simulate_step is not None and _STEPS * simulate_step > seconds:
        raise ValueError(
            f"seconds={seconds:g}: steps of {simulate_step:g} s cannot be measured in so short a time, which takes at "
            f"least {_STEPS} of them; give seconds={_STEPS * simulate_step:g} or more, or a shorter step"
        )
    training = Training.of(step, simulate_step, device, copy, trace)
    if watcher is not None:
        watcher.note("reading the first samples")
    pipeline, batches = _open(loader)
    training = replace(training, pin=pinning(device, batches[0]))
    sampler = start_sampler(seconds)
    with sampler or nullcontext(), nullcontext() if trace is None else pipeline.record(trace):
        lines = replace(training, begins=lambda name: mark_line(sampler, name))
        result = climb(pipeline, lines, seconds=seconds, watcher=watcher)
    result = replace(result, batch_size=_batch_size(batches[0]), batch_bytes=tree_bytes(batches[0]))
    result = replace(result, usage=with_rates(None if sampler is None else sampler.usage(), result))
    idle = result.step.cpu_busy if training.simulated else None  # of a step that only waits
    if idle is not None and idle > _OTHERS_BUSY:
        note = f"other processes kept the CPUs {idle:.0%} busy; repeat it on a quiet machine"
        result = replace(result, notes=(*result.notes, note))
    copies = training.copy is not None
    facts = gather(loader, result, batches[0], device=device, copies=copies, simulated=training.simulated)
    return replace(result, advice=advise(Evidence.of(result, facts)))


def _open(loader: Iterable[Any] | Pipeline) -> tuple[Pipeline, list[Any]]:
    """The pipeline of a loader, and the batches that it replays. What cannot be cut is a pipeline of one stage."""
    if isinstance(loader, Pipeline):
        return loader, _replayed(loader)
    known, whole = module_for(loader), IterablePipeline(loader)
    if known is not None:
        try:
            pipeline: Pipeline = known.make_pipeline(loader)
            return pipeline, _replayed(pipeline)
        except PipelineError:
            raise
        except Exception as error:  # of the user's classes; a data set that is broken fails below, too
            whole.notes = (f"the loader could not be cut into stages ({type(error).__name__}: {error})",)
    return whole, _replayed(whole)


def _replayed(pipeline: Pipeline) -> list[Any]:
    with ending(pipeline.cached(len(pipeline.stages))) as batches:
        return list(itertools.islice(batches, pipeline.distinct))


def _batch_size(batch: Any) -> int | None:
    sizes = [leaf.shape[0] for leaf in leaves(batch) if len(getattr(leaf, "shape", ())) > 0]
    return int(sizes[0]) if sizes else None


# --- Measuring the rungs of a ladder, within a budget of time.
# The step and the whole loader come first, the lines between them next. Where a loader is so slow that measuring all of
# them would take longer than the budget, a line between two others that take equally long is not measured: the times
# grow from the step to the storage, so its own cannot be another.
#
# Random data come last, since a step that fails on them may leave the device unusable.
_MEASURED_ALONE = 2  # stages whose gain is measured and not computed
_PATIENCE = 1.3  # budgets that all lines may take together before some are left out
_DRIFT = 0.15  # of the time of the whole loader: what may change while the ladder is measured
_ROUNDS, _COMPARED = 7, 4  # rounds in which so many of the cached batches are timed by themselves
_ROUND_SECONDS = 3.0
_CONFIRM_SECONDS = 5.0  # of warming up: lines of slower loaders are not measured twice

_Use = Callable[[Any], object]


@dataclass(frozen=True)
class _Level:
    """A rung to be measured. cached: the stages that come from memory; None for batches that are on the device."""

    stage: str
    what: str
    cached: int | None


def climb(pipeline: Pipeline, training: Training, *, seconds: float, watcher: Watcher | None = None) -> Diagnosis:
    """Measure all rungs, in about `seconds`."""
    return _Climb(pipeline, training, seconds, watcher or Silent()).run()


class _Climb:
    def __init__(self, pipeline: Pipeline, training: Training, seconds: float, watcher: Watcher) -> None:
        self._pipeline, self._training, self._watcher = pipeline, training, watcher
        stages = pipeline.stages
        self._levels = [_Level("step", "batches in the memory of the device", None)]
        if training.copy is not None:
            self._levels.append(_Level("copy", "host to device", len(stages)))
        for count in range(len(stages) - 1, -1, -1):
            self._levels.append(_Level(stages[count].name, stages[count].what, count))
        self._times: dict[int, StepTime] = {}
        self._end = time.perf_counter() + seconds
        self._share = seconds / (len(self._levels) + _MEASURED_ALONE + 1 + 2 * (not training.simulated))
        self._slow = False
        self._sizes: list[int] = []  # of the batches of the whole loader
        self._notes: list[str] = []

    def run(self) -> Diagnosis:
        pipeline, training = self._pipeline, self._training
        replayed = list(itertools.islice(pipeline.cached(len(pipeline.stages)), pipeline.distinct))
        sizes = [tree_bytes(batch) for batch in replayed]
        on_device = [training.on_device(batch) for batch in replayed]
        in_place = not training.simulated and _changes(training.step, on_device[0])
        pipeline.fresh = in_place
        batches = _again(on_device, copies=in_place)
        if in_place:
            self._notes.append("the step changes its batch in place, so every replayed batch is copied first")
        self._times[0] = self._measure("step", batches, training.step, count_wait=False)
        last = len(self._levels) - 1
        known = sum(stage.seconds or 0.0 for stage in pipeline.stages) / pipeline.workers
        self._slow = self._too_slow(known)  # without storage, of which nothing is known yet
        self._time(last)
        self._slow = self._slow or self._too_slow(self._times[last].seconds)
        if self._slow:
            self._notes.append("the loader is slow: lines between two that take equally long were not measured")
            self._bisect(0, last)
        else:
            for number in range(1, last):
                self._time_between(number)
        self._confirm(last)
        rungs = self._rungs()
        costs = costs_of(rungs, pipeline)
        self._free_alone(costs, rungs)
        pinned = None
        if training.copy is not None and training.pin is not None:
            pinned = self._measure("copy, pinned", _again([training.pin(each) for each in replayed]), training.run)
        dynamic, again = None, self._times[0]
        if not training.simulated:
            dynamic = self._uneven(on_device, in_place)
            again = self._measure("step again", _again(on_device, copies=in_place), training.step, count_wait=False)
            self._note_drift("the step", self._times[0], again)
            rungs[:0] = self._random(on_device)
        result = replace(judge(pipeline, tuple(rungs), explained(costs, rungs)), pinned=pinned)
        notes = caveats(result, pipeline, dynamic, again, self._sizes, sizes)
        return replace(result, notes=(*result.notes, *self._notes, *notes))

    # --- what is measured -------------------------------------------------------------------------------------------
    def _time(self, number: int) -> None:
        level = self._levels[number]
        assert level.cached is not None

        def observed(batch: Any) -> None:
            self._sizes.append(tree_bytes(batch))
            self._training.run(batch)

        use = self._training.run if level.cached else observed
        self._times[number] = self._measure(level.stage, self._pipeline.cached(level.cached), use)

    def _measure(self, name: str, batches: Iterator[Any], use: _Use, *, count_wait: bool = True) -> StepTime:
        self._training.begins(name)
        trace, start = self._training.trace, time.perf_counter_ns()
        pipeline = self._pipeline
        warmup, workers = (pipeline.warmup, pipeline.workers) if count_wait else (pipeline.distinct, 1)
        with ending(batches):
            waited = map(trace_calls(trace, "wait", next), itertools.repeat(batches))
            found = time_steps(
                waited, use, warmup=warmup, seconds=self._share, workers=workers,
                least_blocks=1 if self._slow else 2, count_wait=count_wait, synchronize=self._training.synchronize,
            )  # fmt: skip
        if trace is not None:
            trace.add("diagnosis: lines", name, start, time.perf_counter_ns())
        self._watcher.note(f"{name}: {1e3 * found.seconds:.1f} ms a step")
        return found

    def _too_slow(self, seconds: float) -> bool:
        """Whether measuring every line with steps of so many seconds would take more than the budget."""
        least = (self._pipeline.warmup + 2 * self._pipeline.workers) * max(seconds, self._times[0].seconds)
        lines = len(self._levels) - len(self._times) + _MEASURED_ALONE
        return lines * least > _PATIENCE * max(self._end - time.perf_counter(), lines * self._share)

    def _time_between(self, number: int) -> bool:
        """Measure a line between the step and the whole loader, or note why it cannot be."""
        try:
            self._time(number)
        except Exception as error:  # of the user's classes, which the whole loader does not raise
            stage, above = self._levels[number].stage, self._levels[number + 1].stage
            self._notes.append(f"no time for '{stage}', which is part of '{above}': {in_a_line(error)}")
            return False
        return True

    def _bisect(self, low: int, high: int) -> None:
        """Measure those lines between two measured ones where the time may change."""
        whole = self._times[len(self._levels) - 1].seconds
        if high - low < 2 or self._times[high].seconds - self._times[low].seconds <= SAME * whole:
            return
        middle = (low + high) // 2
        if self._time_between(middle):
            self._bisect(low, middle)
            self._bisect(middle, high)

    def _free_alone(self, costs: list[StageCost], rungs: list[Rung]) -> None:
        """Measure what is gained if one of the costliest stages alone is free, where that was computed so far."""
        numbers = {stage.name: number for number, stage in enumerate(self._pipeline.stages)}
        costliest = sorted(costs, key=lambda cost: (cost.measured, -cost.freed))
        for cost in costliest[: 0 if self._slow else _MEASURED_ALONE]:
            known = cost.measured or cost.stage not in numbers
            alone = None if known else self._pipeline.without(numbers[cost.stage])
            if alone is not None:
                with suppress(Exception):  # what fails here failed above, and there is a note
                    freed = (
                        warm_seconds(rungs) - self._measure(f"without {cost.stage}", alone, self._training.run).seconds
                    )
                    costs[costs.index(cost)] = replace(cost, freed=max(0.0, freed), measured=True)

    def _rungs(self) -> list[Rung]:
        rungs: list[Rung] = []
        for number, level in enumerate(self._levels):
            measured = self._times.get(number)
            rungs.append(Rung(level.stage, level.what, measured or rungs[-1].time, measured is not None))
        return rungs

    def _confirm(self, last: int) -> None:
        """Measure the whole loader once more, and the line below it where the two differ.

        What storage costs is the difference of two lines that were measured at different times, so that other
        processes or slower CPUs, which can only make a line longer, would be taken for storage. Of busy CPUs the
        shorter times count, as they do where the CPUs, and not a wait, took what the whole loader takes longer;
        elsewhere the first one of the whole loader does, since what was read is in memory now.
        """
        first, step = self._times[last], self._times[0]
        warmup = self._pipeline.warmup + 2 * self._pipeline.workers
        too_long = self._slow and warmup * first.seconds > _CONFIRM_SECONDS
        if too_long or first.seconds - step.seconds <= SAME * first.seconds:
            return
        below = self._times.get(last - 1)
        if last > 1 and below is not None and abs(first.seconds - below.seconds) > SAME * first.seconds:
            level = self._levels[last - 1]
            batches = self._pipeline.cached(level.cached or 0)
            again = self._measure(f"{level.stage} again", batches, self._training.run)
            self._times[last - 1] = min(below, again, key=lambda time: time.seconds)
        now = self._measure(f"{self._levels[last].stage} again", self._pipeline.cached(0), self._training.run)
        if (first.cpu_busy or 0.0) >= BUSY or (below is not None and _computes_longer(first, below)):
            self._times[last] = min(first, now, key=lambda time: time.seconds)
        self._note_drift("the whole loader", first, now)

    def _random(self, on_device: Sequence[Any]) -> list[Rung]:
        """The rung of random data, if there is one."""
        batches = random_batches(on_device)
        if batches is None:
            return []
        try:
            found = self._measure("random", batches, self._training.step, count_wait=False)
        except Exception as error:  # the user's step, on data that it was not made for
            self._notes.append(f"no line 'random': the step failed on random data ({in_a_line(error)})")
            return []
        return [Rung("random", "random data made on the device, new in each step", found)]

    def _note_drift(self, what: str, first: StepTime, now: StepTime) -> None:
        """A note if something takes another time than at first."""
        apart = now.low > first.high or now.high < first.low
        if apart and abs(now.seconds - first.seconds) > _DRIFT * first.seconds:
            self._notes.append(
                f"{what} took {1e3 * first.seconds:.1f} ms a step at first and {1e3 * now.seconds:.1f} ms at the end: "
                f"other processes took or left the CPUs, or what was read is in memory now"
            )

    def _uneven(self, on_device: Sequence[Any], in_place: bool) -> tuple[float, float] | None:
        """(shortest, longest) seconds of a step over different cached batches; None where they take equally long.

        They differ if the slowest is slower in each of seven rounds than the fastest in any, which chance brings about
        in less than 1 % of all cases with four batches.
        """
        step, synchronize = self._training.step, self._training.synchronize
        most = int(min(_ROUND_SECONDS, 2 * self._share) / _ROUNDS / self._times[0].seconds)
        some = on_device[: min(most, _COMPARED)]
        if len(some) < 2:
            return None
        times: list[list[float]] = [[] for _ in some]
        batches = _again(some, copies=in_place)
        for each in itertools.islice(itertools.cycle(times), _ROUNDS * len(some)):
            batch = next(batches)
            synchronize()
            start = time.perf_counter()
            step(batch)
            synchronize()
            each.append(time.perf_counter() - start)
        times.sort(key=median)
        low, high = median(times[0]), median(times[-1])
        return (low, high) if high > (1 + SAME) * low and min(times[-1]) > max(times[0]) else None


def _computes_longer(line: StepTime, below: StepTime) -> bool:
    """Whether most of what a step of `line` takes longer is time of a CPU."""
    if line.cpu_busy is None or below.cpu_busy is None:
        return False
    computed = usable_cpus() * (line.cpu_busy * line.seconds - below.cpu_busy * below.seconds)
    return computed > 0.5 * (line.seconds - below.seconds) > 0


def _again(batches: Sequence[Any], copies: bool = False) -> Iterator[Any]:
    """The batches again and again, in containers of their own; with `copies`, tensors of their own."""
    for batch in itertools.cycle(batches):
        yield map_tree(batch, _clone if copies else lambda leaf: leaf)


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if hasattr(leaf, "_version") else leaf


def _changes(step: _Use, batch: Any) -> bool:
    """Whether a step writes into tensors of its batch. The step is run on a copy."""
    versions: list[tuple[Any, int]] = []

    def watched(leaf: Any) -> Any:
        copied = _clone(leaf)
        if hasattr(copied, "_version"):
            versions.append((copied, copied._version))
        return copied

    step(map_tree(batch, watched))
    return any(leaf._version != version for leaf, version in versions)


# --- What the machine does while a diagnosis runs: a record of utilisation, with a mark where each line begins.
_SAMPLES = 100  # of a whole diagnosis
_LEAST_SECONDS = 0.05


def start_sampler(seconds: float) -> Sampler | None:
    """Sample during a diagnosis of about so many seconds; None where this machine has nothing to sample."""
    try:
        return Sampler(interval=min(INTERVAL, max(_LEAST_SECONDS, seconds / _SAMPLES)))
    except SourceError:  # not on Linux
        return None


def mark_line(sampler: Sampler | None, name: str) -> None:
    """A line is about to be measured: what was sampled until now belongs to the one before it."""
    if sampler is not None:
        sampler.sample()
        sampler.mark(name)


def with_rates(usage: Usage | None, result: Diagnosis) -> Usage | None:
    """The record, whose marks say how many steps and images a second their lines made."""
    if usage is None:
        return None
    rates = {rung.stage: rung.time.per_second for rung in result.rungs if rung.measured}
    marks = []
    for mark in usage.marks:
        steps = rates.get(mark.name)
        images = None if steps is None or result.batch_size is None else steps * result.batch_size
        marks.append(replace(mark, steps=steps, images=images))
    return replace(usage, marks=tuple(marks))
