"""`diagnose`: measure a loader with a training step, and return a `Diagnosis`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
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
    in_ms,
    judge,
    time_steps,
    warm_time,
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
    own_container,
    pinning,
    random_batches,
    trace_calls,
    tree_bytes,
)
from packer.tools.diagnose.tips import advise
from packer.tools.monitor.record import Mark
from packer.tools.monitor.sampler import INTERVAL, Sampler
from readers.trace import Trace

__all__ = ["climb", "diagnose"]

_OTHERS_BUSY = 0.3
_STEPS = 4  # approximate steps of the shortest measurement
_SAMPLES, _LEAST_SECONDS = 100, 0.05  # samples of the machine's utilisation in a diagnosis; least time between two


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
    """Measure which stage of a loader makes training wait.

    The step is called a few hundred times with real batches, which trains the model and advances the loader's sampler.
    Do this outside the training job.

    loader: any iterable of batches; a torch DataLoader is rebuilt with its data set, samplers, workers and collate
        function, and cut into stages, as is an `ImageLoader`. For a loader of another kind, pass a `Pipeline` that
        implements the cuts.
    step: the training step, a function of a batch on the device.
    device: device of the batches before the step, as "cuda"; None does not move them.
    copy: function that copies a batch to the device; by default `.to(device, non_blocking=True)` of all tensors.
    simulate_step: seconds of a step, in place of `step`, without a model or a GPU.
    seconds: approximate time of the measurement; starting workers takes some seconds more.
    watcher: shows the time of each line as soon as it is known.
    trace: records each line with its waits, copies and steps, and the threads of an `ImageLoader`.

    Raises PipelineError if the loader gives no batch, ValueError for contradictory arguments. Errors of the loader or
    the step are passed on.
    """
    if seconds <= 0:
        raise ValueError(f"seconds={seconds}: expected more than 0")
    if simulate_step is not None and _STEPS * simulate_step > seconds:
        raise ValueError(
            f"seconds={seconds:g}: at least {_STEPS} steps of {simulate_step:g} s must be measured; give "
            f"seconds={_STEPS * simulate_step:g} or more, or a shorter step"
        )
    training, watcher = Training.of(step, simulate_step, device, copy, trace), watcher or Silent()
    watcher.note("reading the first samples")
    pipeline, batches = _open(loader)
    sampler = None
    with suppress(SourceError):  # not on Linux
        sampler = Sampler(interval=min(INTERVAL, max(_LEAST_SECONDS, seconds / _SAMPLES)))

    def begins(line: str) -> None:  # samples before the mark belong to the previous line
        if sampler is not None:
            sampler.sample()
            sampler.mark(line)

    training = replace(training, pin=pinning(device, batches[0]), begins=begins)
    with sampler or nullcontext(), nullcontext() if trace is None else pipeline.record(trace):
        result = climb(pipeline, training, seconds=seconds, watcher=watcher)
    sizes = [leaf.shape[0] for leaf in leaves(batches[0]) if len(getattr(leaf, "shape", ())) > 0]
    result = replace(result, batch_size=int(sizes[0]) if sizes else None, batch_bytes=tree_bytes(batches[0]))
    if sampler is not None:
        usage = sampler.usage()
        result = replace(result, usage=replace(usage, marks=tuple(_with_rates(usage.marks, result))))
    idle = result.step.cpu_busy if training.simulated else None  # a simulated step only waits
    if idle is not None and idle > _OTHERS_BUSY:
        note = f"other processes kept the CPUs {idle:.0%} busy; repeat it on a quiet machine"
        result = replace(result, notes=(*result.notes, note))
    copies = training.copy is not None
    facts = gather(loader, result, batches[0], device=device, copies=copies, simulated=training.simulated)
    return replace(result, advice=advise(Evidence.of(result, facts)))


def _open(loader: Iterable[Any] | Pipeline) -> tuple[Pipeline, list[Any]]:
    """The pipeline of a loader, and the batches that it replays; one stage if the loader cannot be cut."""
    if isinstance(loader, Pipeline):
        return loader, _replayed(loader)
    known, whole = module_for(loader), IterablePipeline(loader)
    if known is not None:
        try:
            pipeline: Pipeline = known.make_pipeline(loader)
            return pipeline, _replayed(pipeline)
        except PipelineError:
            raise
        except Exception as error:  # from the user's classes; a broken data set also fails below
            whole.notes = (f"the loader could not be cut into stages ({type(error).__name__}: {error})",)
    return whole, _replayed(whole)


def _replayed(pipeline: Pipeline) -> list[Any]:
    with ending(pipeline.cached(len(pipeline.stages))) as batches:
        return list(itertools.islice(batches, pipeline.distinct))


def _with_rates(marks: Iterable[Mark], result: Diagnosis) -> Iterator[Mark]:
    """The marks, with steps and images per second of their lines."""
    rates = {rung.stage: rung.time.per_second for rung in result.rungs if rung.measured}
    for mark in marks:
        steps = rates.get(mark.name)
        yield replace(mark, steps=steps, images=steps and result.batch_size and steps * result.batch_size)


# --- Measuring the rungs of a ladder, within a time budget.
# The step and the whole loader are measured first, then the lines between them. If the loader is too slow for all lines
# to fit the budget, a line between two equally long lines is not measured: times increase from the step to storage, so
# its time must be the same.
#
# Random data are measured last, because a step that fails on them may leave the device unusable.
_MEASURED_ALONE = 2  # stages whose gain is measured rather than computed
_PATIENCE = 1.3  # budgets that all lines may take together before some are left out
_DRIFT = 0.15  # tolerated change of a time while the ladder is measured
_ROUNDS, _COMPARED = 7, 4  # rounds, and cached batches that are timed one by one in each round
_ROUND_SECONDS = 3.0
_CONFIRM_SECONDS = 5.0  # of warm-up: lines of slower loaders are not measured twice

_Use = Callable[[Any], object]


def climb(pipeline: Pipeline, training: Training, *, seconds: float, watcher: Watcher | None = None) -> Diagnosis:
    """Measure all rungs of a pipeline in about `seconds`, and judge them."""
    return _Climb(pipeline, training, seconds, watcher or Silent()).run()


class _Climb:
    def __init__(self, pipeline: Pipeline, training: Training, seconds: float, watcher: Watcher) -> None:
        self._pipeline, self._training, self._watcher = pipeline, training, watcher
        stages = pipeline.stages
        # Name, description, and number of stages from memory; the batches of line 0 are on the device.
        self._lines = [("step", "batches in the memory of the device", -1)]
        self._lines += [("copy", "host to device", len(stages))] if training.copy is not None else []
        self._lines += [(stages[n].name, stages[n].what, n) for n in reversed(range(len(stages)))]
        self._last = len(self._lines) - 1
        self._times: dict[int, StepTime] = {}
        self._end = time.perf_counter() + seconds
        self._share = seconds / (len(self._lines) + _MEASURED_ALONE + 1 + 2 * (not training.simulated))
        self._slow = False
        self._sizes: list[int] = []  # of the batches of the whole loader
        self._notes: list[str] = []

    def run(self) -> Diagnosis:
        pipeline, training, last = self._pipeline, self._training, self._last
        replayed = _replayed(pipeline)
        on_device = list(map(training.on_device, replayed))
        pipeline.fresh = not training.simulated and _changes(training.step, on_device[0])
        if pipeline.fresh:
            self._notes.append("the step changes its batch in place, so every replayed batch is copied first")
        self._times[0] = self._of_step("step", on_device)
        known = sum(stage.seconds or 0.0 for stage in pipeline.stages) / pipeline.workers
        self._slow = self._too_slow(known)  # without storage, whose time is still unknown
        self._times[last] = self._of_line(last)
        self._slow = self._slow or self._too_slow(self._times[last].seconds)
        if self._slow:
            self._notes.append("the loader is slow: lines between two that take equally long were not measured")
            self._bisect(0, last)
        else:
            for number in range(1, last):
                self._time_between(number)
        self._confirm()
        rungs = list[Rung]()
        for number, (name, description, _) in enumerate(self._lines):
            measured = self._times.get(number)
            rungs.append(Rung(name, description, measured or rungs[-1].time, measured is not None))
        costs = costs_of(rungs, pipeline)
        self._free_alone(costs, rungs)
        pinned, dynamic, again = None, None, self._times[0]
        if training.copy is not None and training.pin is not None:
            batches = itertools.cycle([training.pin(batch) for batch in replayed])
            pinned = self._measure("copy, pinned", map(own_container, batches), training.run)
        if not training.simulated:
            dynamic, again = self._uneven(on_device), self._of_step("step again", on_device)
            self._note_drift("the step", self._times[0], again)
            rungs[:0] = self._random(on_device)
        result = replace(judge(pipeline, tuple(rungs), explained(costs, rungs)), pinned=pinned)
        notes = caveats(result, pipeline, dynamic, again, self._sizes, list(map(tree_bytes, replayed)))
        return replace(result, notes=(*result.notes, *self._notes, *notes))

    # --- measurements -----------------------------------------------------------------------------------------------
    def _measure(self, name: str, batches: Iterator[Any], use: _Use, *, count_wait: bool = True) -> StepTime:
        self._training.begins(name)
        trace, pipeline, start = self._training.trace, self._pipeline, time.perf_counter_ns()
        warmup, workers = (pipeline.warmup, pipeline.workers) if count_wait else (pipeline.distinct, 1)
        with ending(batches):
            waited = map(trace_calls(trace, "wait", next), itertools.repeat(batches))
            measured = time_steps(
                waited, use, warmup=warmup, seconds=self._share, workers=workers,
                least_blocks=1 if self._slow else 2, count_wait=count_wait, synchronize=self._training.synchronize,
            )  # fmt: skip
        if trace is not None:
            trace.add("diagnosis: lines", name, start, time.perf_counter_ns())
        self._watcher.note(f"{name}: {in_ms(measured.seconds)} a step")
        return measured

    def _of_step(self, name: str, on_device: Sequence[Any]) -> StepTime:
        return self._measure(name, self._again(on_device), self._training.step, count_wait=False)

    def _of_line(self, number: int, again: bool = False) -> StepTime:
        name, _, cached = self._lines[number]

        def use(batch: Any) -> None:
            if cached == 0 and not again:
                self._sizes.append(tree_bytes(batch))
            self._training.run(batch)

        return self._measure(f"{name} again" if again else name, self._pipeline.cached(cached), use)

    def _again(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Repeat the batches, in new containers; tensors are copied if the step changes them."""
        for batch in itertools.cycle(batches):
            yield map_tree(batch, _clone) if self._pipeline.fresh else own_container(batch)

    def _too_slow(self, seconds: float) -> bool:
        """Whether measuring every line would exceed the budget if steps take this many seconds."""
        least = (self._pipeline.warmup + 2 * self._pipeline.workers) * max(seconds, self._times[0].seconds)
        lines = len(self._lines) - len(self._times) + _MEASURED_ALONE
        return lines * least > _PATIENCE * max(self._end - time.perf_counter(), lines * self._share)

    def _time_between(self, number: int) -> bool:
        """Measure a line between the step and the whole loader, or note why that fails."""
        try:
            self._times[number] = self._of_line(number)
        except Exception as error:  # from the user's classes, although the whole loader works
            stage, above = self._lines[number][0], self._lines[number + 1][0]
            self._notes.append(f"no time for '{stage}', which is part of '{above}': {in_a_line(error)}")
        return number in self._times

    def _bisect(self, low: int, high: int) -> None:
        """Measure the lines between two measured ones, if their times differ."""
        apart = self._times[high].seconds - self._times[low].seconds
        middle = (low + high) // 2
        if low < middle and apart > SAME * self._times[self._last].seconds and self._time_between(middle):
            self._bisect(low, middle)
            self._bisect(middle, high)

    def _free_alone(self, costs: list[StageCost], rungs: Sequence[Rung]) -> None:
        """Measure the gain if only one stage is free, for the costliest stages whose gain was computed so far."""
        numbers = {stage.name: number for number, stage in enumerate(self._pipeline.stages)}
        computed = [cost for cost in costs if not cost.measured and cost.stage in numbers and not self._slow]
        for cost in sorted(computed, key=lambda cost: -cost.freed)[:_MEASURED_ALONE]:
            with suppress(Exception):  # a stage that fails here failed above, with a note
                if (alone := self._pipeline.without(numbers[cost.stage])) is not None:
                    left = self._measure(f"without {cost.stage}", alone, self._training.run)
                    freed = max(0.0, warm_time(rungs).seconds - left.seconds)
                    costs[costs.index(cost)] = replace(cost, freed=freed, measured=True)

    def _confirm(self) -> None:
        """Measure the whole loader once more, and the line below it if the two differ.

        The cost of storage is the difference of these two lines, measured at different times, so a slowdown by other
        processes or slower CPUs between them would look like storage. The line below keeps its shorter time. The whole
        loader keeps its shorter time if the CPUs are busy, or if its additional time is CPU time and not a wait;
        otherwise it keeps the first time, because the data are in memory by the second.
        """
        last, times = self._last, self._times
        first, below = times[last], times.get(last - 1)
        warmup = self._pipeline.warmup + 2 * self._pipeline.workers
        too_long = self._slow and warmup * first.seconds > _CONFIRM_SECONDS
        if too_long or first.seconds - times[0].seconds <= SAME * first.seconds:
            return
        if last > 1 and below is not None and abs(first.seconds - below.seconds) > SAME * first.seconds:
            times[last - 1] = min(below, self._of_line(last - 1, again=True), key=lambda time: time.seconds)
        now = self._of_line(last, again=True)
        if (first.cpu_busy or 0.0) >= BUSY or _computes_longer(first, below):
            times[last] = min(first, now, key=lambda time: time.seconds)
        self._note_drift("the whole loader", first, now)

    def _random(self, on_device: Sequence[Any]) -> list[Rung]:
        """The rung of random data, if there is one."""
        batches = random_batches(on_device)
        if batches is None:
            return []
        try:
            measured = self._measure("random", batches, self._training.step, count_wait=False)
        except Exception as error:  # from the user's step, which may not support random data
            self._notes.append(f"no line 'random': the step failed on random data ({in_a_line(error)})")
            return []
        return [Rung("random", "random data made on the device, new in each step", measured)]

    def _note_drift(self, subject: str, first: StepTime, now: StepTime) -> None:
        """Add a note if the second time of something differs from the first."""
        apart = now.low > first.high or now.high < first.low
        if apart and abs(now.seconds - first.seconds) > _DRIFT * first.seconds:
            self._notes.append(
                f"{subject} took {in_ms(first.seconds)} a step at first and {in_ms(now.seconds)} at the end: "
                f"the load of other processes changed, or the data are in memory now"
            )

    def _uneven(self, on_device: Sequence[Any]) -> tuple[float, float] | None:
        """(shortest, longest) seconds of a step over different cached batches; None if the times are equal.

        Times differ if their medians differ by more than a tenth, and the slowest batch is slower in each of seven
        rounds than the fastest batch in any. With four batches, chance does that in less than 1 % of cases.
        """
        step, synchronize = self._training.step, self._training.synchronize
        most = int(min(_ROUND_SECONDS, 2 * self._share) / _ROUNDS / self._times[0].seconds)
        times: list[list[float]] = [[] for _ in on_device[: min(most, _COMPARED)]]
        if len(times) < 2:
            return None
        batches = self._again(on_device[: len(times)])
        for each in itertools.islice(itertools.cycle(times), _ROUNDS * len(times)):
            batch = next(batches)
            synchronize()
            start = time.perf_counter()
            step(batch)
            synchronize()
            each.append(time.perf_counter() - start)
        fast, *_, slow = sorted(times, key=median)
        low, high = median(fast), median(slow)
        return (low, high) if high > (1 + SAME) * low and min(slow) > max(fast) else None


def _computes_longer(line: StepTime, below: StepTime | None) -> bool:
    """Whether most of the additional time of a step of `line` is CPU time."""
    if below is None or line.cpu_busy is None or below.cpu_busy is None:
        return False
    computed = usable_cpus() * (line.cpu_busy * line.seconds - below.cpu_busy * below.seconds)
    return computed > 0.5 * (line.seconds - below.seconds) > 0


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if hasattr(leaf, "_version") else leaf


def _changes(step: _Use, batch: Any) -> bool:
    """Run a step on a copy of a batch: whether it changes tensors in place."""
    copied = map_tree(batch, _clone)
    tensors = [leaf for leaf in leaves(copied) if hasattr(leaf, "_version")]
    versions = [leaf._version for leaf in tensors]
    step(copied)
    return [leaf._version for leaf in tensors] != versions
