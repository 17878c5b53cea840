"""The ladder of caches, which shows the stage that limits training.

    random      new random data in each step, made on the device: does the time of a step depend on the data?
    step        batches in the memory of the device: the training step alone
    copy        batches in the memory of the host, copied in each step
    …           one more stage runs for real on each line, from the training step back to storage
    storage     the unchanged loader

Each stage has two costs. `added` is the time that its rung adds to a step, with all earlier stages of the loader for
free. `freed` is the time that a step gains if this stage alone is replaced by memory. They differ if stages overlap:
the time of a rung hides behind the training step until the workers are slower than the step, and a stage that only
exhausts the CPUs is blamed for the stages below it. Therefore the verdict is based on `freed`, and a stage whose two
costs disagree has a reason.

The differential method is from J. Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", PVLDB 14(5),
2021.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, TypeAlias

from cache.messages import parse_size, shortened, table, wrapped
from cache.node import usable_cpus
from cache.system import affinity
from packer.tools.diagnose.pipeline import Pipeline, Stage
from packer.tools.monitor.machine import CpuSeconds, cpu_seconds
from packer.tools.monitor.record import Usage

__all__ = [
    "BUSY",
    "SAME",
    "Advice",
    "Diagnosis",
    "Rung",
    "StageCost",
    "StepTime",
    "advice_lines",
    "caveats",
    "costs_of",
    "diagnosis_lines",
    "explained",
    "facts_of",
    "in_ms",
    "judge",
    "ladder_table",
    "time_steps",
    "verdict_lines",
    "warm_time",
]

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Rung:
    """The time of a step when `stage` and all stages nearer to training run for real.

    measured: False if the loader is too slow to measure all rungs, and the rungs on both sides take equally long, or if
    the measurement failed; the time is then that of the previous rung.
    """

    stage: str
    what: str
    time: StepTime
    measured: bool = True


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage, in seconds of a step.

    added: the time that its rung adds, with all earlier stages of the loader for free. freed: the gain if this stage
    alone is free. measured: whether `freed` was measured; otherwise it is computed from `busy`. busy, cpu: seconds and
    CPU seconds of one batch in one undisturbed worker. reason: the reason why `added` and `freed` disagree, else "".
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
class Advice:
    """A tip that fits the evidence. id: id of the row in the table of tips.

    why: the evidence, with figures. how: a command, an option or a line of code. seconds: predicted time of a step;
        None without a prediction. gain: predicted seconds saved per step; 0.0 if `seconds` is None.
    """

    id: str
    title: str
    why: str
    how: str
    seconds: float | None = None
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `diagnose`: the parts of the time of a training step, and the bottleneck.

    rungs: from the step alone to the unchanged loader; with a model, "random" comes before the step.
    costs: of each stage from the step on, in the same order.
    culprit: the name of the costliest stage; "workers" if a few more workers would be enough; "" if the data keep up.
    verdict: the culprit as a sentence.
    bound: seconds of a step if the culprit cost nothing.
    batch_size: samples in a batch, None if unknown.
    workers, workers_needed: the present number, and the number that would keep up; None if the times of the stages are
        unknown.
    cpus, cpus_needed: usable CPUs of this process, and CPUs that the stages of the loader need to keep up.
    notes: limits of the measurement.
    pinned: the line "copy" with batches in page-locked memory; None if they already are, or without a GPU.
    batch_bytes: bytes of the arrays in a batch.
    advice: recommended changes, the largest gain first.
    usage: utilisation of the machine during the diagnosis, with a mark where each line begins; None if it could not be
        sampled.
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
    pinned: StepTime | None = None
    batch_bytes: int = 0
    advice: tuple[Advice, ...] = ()
    usage: Usage | None = None

    @property
    def step(self) -> StepTime:
        """The training step with its batch in the memory of the device."""
        return next(rung.time for rung in self.rungs if rung.stage == "step")

    @property
    def full(self) -> StepTime:
        """The training step with the unchanged loader."""
        return self.rungs[-1].time

    @property
    def utilization(self) -> float:
        """Share of the time in which the device has work, 0 to 1: time of the step alone over time of the full step."""
        return min(1.0, self.step.seconds / self.full.seconds)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as numbers, strings, lists and dictionaries. "version" is the version of this format."""
        usage = None if self.usage is None else self.usage.to_dict()
        values = asdict(replace(self, usage=None))
        return {"version": _VERSION, **values, "utilization": self.utilization, "usage": usage}


# --- The time of a training step, with an interval, and the CPU utilisation during the step.
_BLOCKS = 8
_LEAST = 1e-9  # seconds, so that no time is 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: the median over blocks of steps, and its interval from `low` to `high`.

    The interval is from order statistics, without assumptions on the distribution: with 8 blocks, from the second to
    the seventh, which contains the median with 93 % probability; with fewer, from the smallest to the largest.
    wait: seconds per step in which the loop waited for its batch. cpu_busy: utilisation of the CPUs by all processes, 0
    to 1; None if unknown.
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

    If batches are slow, the warm-up may end after one batch per worker, and the measurement after `least_blocks`.
    workers: least number of steps in a block, because workers deliver in turns. count_wait: whether the time includes
    the wait for batches. synchronize: waits for the device at the end of a block, so that the time includes its work.
    """
    start = time.perf_counter()
    for number in range(warmup):
        if number >= workers and time.perf_counter() - start > seconds:
            break
        step(next(batches))
    synchronize()
    cpus, waits, means = _cpu_times(), 0.0, list[float]()
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
    busy, total = (now - before for now, before in zip(_cpu_times(), cpus, strict=True))
    cpu_busy = busy / total if total > 0 else None
    return StepTime(median(means), inner[0], inner[-1], waits / steps, steps, cpu_busy)


def _cpu_times() -> tuple[float, float]:
    """(busy, total) seconds of the CPUs that this process may use, since boot; (0, 0) if unknown.

    Busy includes the time that a hypervisor took (steal).
    """
    own, usable = affinity(), list[CpuSeconds]()
    with suppress(OSError):
        usable = [cpu for number, cpu in cpu_seconds().items() if number in own]
    return sum(cpu.busy + cpu.steal for cpu in usable), sum(cpu.total for cpu in usable)


def in_ms(seconds: float) -> str:
    """Seconds as text in milliseconds: "12.3 ms"."""
    return f"{1e3 * seconds:.1f} ms"


# --- Notes on reasons why a ladder may mislead, each given only if it applies.
_NOTICEABLE = 0.2  # of the time of a stage
_COMPUTES = 0.5  # least share of CPU time in a stage that computes
_SMALL = 0.02  # of the time of a step, in a worker: too little for a note
_BANDWIDTH = 1e9  # bytes/s: the speed of faster stages depends on whether the data are in a CPU cache


def caveats(
    result: Diagnosis,
    pipeline: Pipeline,
    uneven: tuple[float, float] | None,
    step: StepTime,
    sizes: Sequence[int] = (),
    replayed: Sequence[int] = (),
) -> Iterator[str]:
    """The notes that apply to a ladder.

    uneven: (shortest, longest) seconds of a step over different cached batches; None if they do not differ.
    step: the time of the step, measured just before that of random data.
    sizes, replayed: bytes of each batch of the whole loader, and of each replayed batch.
    """
    full, rungs = result.full.seconds, result.rungs[[rung.stage for rung in result.rungs].index("step") :]
    jump, rung = max(
        ((rung.time.seconds - below.time.seconds, rung) for below, rung in itertools.pairwise(rungs)),
        key=lambda one: one[0],
    )
    cost, busy = next(cost for cost in result.costs if cost.stage == rung.stage), rung.time.cpu_busy or 0.0
    waits = cost.busy and cost.cpu is not None and cost.cpu < _COMPUTES * cost.busy  # so it needs no CPU
    if result.culprit and not waits and busy >= BUSY and jump > SAME * full:
        yield (
            f"the CPUs are {busy:.0%} busy on the line '{rung.stage}', where the time jumps: they may have been nearly "
            f"exhausted before, so compare the stages by 'if free'"
        )
    mean, few = (fmean(each) if each else 0.0 for each in (sizes, replayed))
    if mean > 0 and (pstdev(sizes) > SAME * mean or abs(few - mean) > SAME * mean):
        yield (
            f"batches vary in size, from {min(sizes) / 1e6:.3g} to {max(sizes) / 1e6:.3g} MB, and those that are "
            f"replayed have {few / 1e6:.3g} MB: only the last line covers all of them"
        )
    if pipeline.size_error > SAME:
        yield (
            f"samples vary in size: those that are replayed may be {pipeline.size_error:.0%} larger or smaller than "
            f"the average, and 'storage' has the difference"
        )
    if uneven is not None:
        yield (
            f"the time of the step depends on its batch: {1e3 * uneven[0]:.1f} to {in_ms(uneven[1])} over the batches "
            f"that are replayed, so the lines above 'storage' are of these batches"
        )
    lowest, other = result.rungs[0], result.rungs[0].time
    longer = other.low > step.high and other.low > (1 + SAME) * step.low
    if lowest.stage == "random" and (longer or (other.high < step.low and other.high < (1 - SAME) * step.high)):
        yield (
            f"the step takes {in_ms(other.seconds)} with random data and {in_ms(step.seconds)} with cached batches: "
            f"the model is dynamic, or caches help"
        )
    in_worker = full * pipeline.workers
    for stage in pipeline.stages:
        seconds = stage.seconds or 0.0
        if stage.copying > max(_NOTICEABLE * seconds, _SMALL * in_worker):
            yield (
                f"copying recorded values takes {in_ms(stage.copying)} a batch before '{stage.name}', which takes "
                f"{in_ms(seconds)}: subtract that from its line"
            )
        fast = seconds >= _SMALL * in_worker and stage.kept_bytes / pipeline.distinct >= _BANDWIDTH * seconds
        if fast and 0 < stage.kept_bytes <= _cpu_cache_bytes():
            yield (
                f"the {stage.kept_bytes / 1e6:.3g} MB that are replayed before '{stage.name}' fit into the cache of "
                f"the CPU, the batches of a training job do not: '{stage.name}' may take longer there"
            )
    copying = next((rung.time for rung in rungs if rung.stage == "copy"), None)
    if result.pinned is not None and copying is not None and result.pinned.high < copying.low:
        yield (
            f"batches are not in page-locked memory: with pin_memory=True in the loader, the line 'copy' takes "
            f"{in_ms(result.pinned.seconds)} and not {in_ms(copying.seconds)}"
        )


def _cpu_cache_bytes() -> int:
    """Bytes of the largest cache of a CPU; 0 if unknown."""
    largest = 0
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            largest = max(largest, parse_size(size.read_text().strip().replace("K", "KiB")))
    return largest


# --- The rungs of a ladder as costs, and the costs as a verdict.
SAME = 0.1  # times that differ by less are taken as equal
_KEEPS_UP = 0.15  # of the time of a step: if training waits less, the loader is fast enough
BUSY = 0.95  # of the CPUs: no room for more work
_UNTIMED = ("storage", "loading")  # stages in workers whose time in one worker may be unknown
_FEW_WORKERS = 1.1  # if this many more workers are enough, they are the verdict rather than a stage
_UNSURE = 0.2  # times that differ by less are taken as equal if their intervals overlap


def costs_of(rungs: list[Rung], pipeline: Pipeline) -> list[StageCost]:
    """The costs of the stages, from the rungs and the timed stages; the first one is the step itself."""
    stages = pipeline.stages
    known = {stage.name: stage for stage in stages}
    warm = warm_time(rungs).seconds
    floor = _floor(rungs, stages)
    costs = [StageCost("step", rungs[0].what, rungs[0].time.seconds, 0.0, True)]
    work = sum(map(_work, stages))
    for below, rung in itertools.pairwise(rungs):
        added = max(0.0, rung.time.seconds - below.time.seconds)
        stage = known.get(rung.stage, Stage(rung.stage))
        freed, measured = added, stage.seconds is None or not pipeline.concurrent
        if rung.stage == "read" and (measured or not work):  # it is the first stage except for storage
            freed, measured = max(0.0, warm - below.time.seconds), True
        elif work > 0 and not measured:
            freed = max(0.0, warm - max(floor, warm - warm * _work(stage) / work))
        elif rung.time.low <= below.time.high:  # the difference may be chance
            freed = 0.0
        costs.append(StageCost(rung.stage, rung.what, added, freed, measured, stage.seconds, stage.cpu_seconds))
    return costs


def _in_workers(stages: tuple[Stage, ...]) -> set[str]:
    return {stage.name for stage in stages if stage.seconds is not None or stage.name in _UNTIMED}


def _floor(rungs: Sequence[Rung], stages: tuple[Stage, ...]) -> float:
    """Seconds of a step if the workers cost nothing."""
    in_workers = _in_workers(stages)
    return list(itertools.takewhile(lambda rung: rung.stage not in in_workers, rungs))[-1].time.seconds


def warm_time(rungs: Sequence[Rung]) -> StepTime:
    """The time of a step of the whole pipeline over the replayed samples.

    A freed stage is compared with it, so that its gain does not include that of a warm page cache.
    """
    return next((rung.time for rung in rungs if rung.stage == "read"), rungs[-1].time)


def _work(stage: Stage) -> float:
    """Seconds of a batch in a worker: CPU time if that is most of it, as other processes then took the rest."""
    wall, cpu = stage.seconds or 0.0, stage.cpu_seconds or 0.0
    return cpu if cpu > 0.5 * wall else wall


def explained(costs: list[StageCost], rungs: list[Rung]) -> tuple[StageCost, ...]:
    """The costs, each with the reason if `added` and `freed` disagree."""
    full, step = rungs[-1].time, costs[0].added
    reasoned = [costs[0]]
    for cost in costs[1:]:
        reason = ""
        if abs(cost.added - cost.freed) > 0.2 * full.seconds:
            if full.cpu_busy is not None and full.cpu_busy >= BUSY:
                reason = f"the CPUs are {full.cpu_busy:.0%} busy, so the last stage seems slow"
            elif cost.added < cost.freed:
                reason = f"earlier stages hide behind the step of {1e3 * step:.0f} ms"
            else:
                reason = "with it free, another stage is the limit"
        reasoned.append(replace(cost, reason=reason))
    return tuple(reasoned)


def judge(pipeline: Pipeline, rungs: tuple[Rung, ...], costs: tuple[StageCost, ...]) -> Diagnosis:
    """The diagnosis that follows from the costs."""
    step, full = next(rung.time for rung in rungs if rung.stage == "step"), rungs[-1].time
    cpus, workers = usable_cpus(), pipeline.workers
    floor = _floor(rungs, pipeline.stages)
    busy = [stage.seconds for stage in pipeline.stages if stage.seconds is not None]
    cpu = [stage.cpu_seconds for stage in pipeline.stages if stage.cpu_seconds is not None]
    worst = max(costs[1:], key=lambda cost: cost.freed)
    limited = worst.stage in _in_workers(pipeline.stages)  # if so, the workers are always busy
    needed = max(sum(busy), full.seconds * workers if limited else 0.0) / floor if busy else None
    cpus_needed = sum(cpu) / floor if cpu else None
    result = Diagnosis(rungs, costs, "", "", step.seconds, None, workers, needed, cpus, cpus_needed, pipeline.notes)
    gap, room = (full.seconds - step.seconds) / full.seconds, full.cpu_busy is None or full.cpu_busy < BUSY
    unsure = full.low < step.high
    if gap <= _KEEPS_UP or (gap <= _UNSURE and unsure):
        verdict = "the data keep up: the training step itself is the limit"
        if gap > SAME:
            verdict += f", but for {in_ms(full.seconds - step.seconds)} of {in_ms(full.seconds)}"
        return replace(result, verdict=verdict, bound=full.seconds)
    if unsure:
        note = "the times vary so much that the verdict may be wrong: measure longer (seconds=), on a quiet machine"
        result = replace(result, notes=(*result.notes, note))
    gain = f"a step takes {in_ms(full.seconds)}, and {in_ms(step.seconds)} if it never waits"
    enough = limited and needed and workers < needed <= max(workers + _FEW_WORKERS, 1.25 * workers)
    if enough and needed and (cpus_needed or 0.0) < cpus and pipeline.more_workers:
        verdict = f"too few workers: {workers}, and {math.ceil(needed)} would keep up; {gain}"
        bound = min(full.seconds, max(floor, full.seconds * workers / needed))
        return replace(result, culprit="workers", verdict=verdict, bound=bound)
    waits = ""  # on busy CPUs, the stage may only be waiting for a CPU
    if room and worst.busy and worst.cpu is not None and worst.cpu < 0.5 * worst.busy:
        waits = f", which waits {1 - worst.cpu / worst.busy:.0%} of its time and does not compute,"
    verdict = f"{worst.stage} ({worst.what}){waits} limits training; {gain}"
    return replace(result, culprit=worst.stage, verdict=verdict, bound=max(step.seconds, _bound(worst, rungs)))


def _bound(cost: StageCost, rungs: tuple[Rung, ...]) -> float:
    """Seconds of a step of the whole loader if a stage cost nothing.

    The time that storage adds stays the same if workers wait for it. Otherwise, on busy CPUs or if the whole loader and
    the warm pipeline differ by chance, it scales with the remaining work.
    """
    full, warm = rungs[-1].time, warm_time(rungs)
    waits = full.low > warm.high and (full.cpu_busy is None or full.cpu_busy < BUSY)
    if cost.stage in _UNTIMED or waits:
        return full.seconds - cost.freed
    return (warm.seconds - cost.freed) * full.seconds / warm.seconds


# --- A diagnosis as lines for a terminal of a given width, and as tables, also used in reports.
# A table has headings and rows of texts. If the last heading is "", the last cells are remarks; see
# `cache.messages.table`.
_LEAST_WIDTH, _NAME = 60, 12
Table: TypeAlias = tuple[Sequence[str], list[list[str]]]


def verdict_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """The verdict as lines."""
    return wrapped(result.verdict, max(_LEAST_WIDTH, width), "")


def diagnosis_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """The ladder with bars, the costs of the stages, the workers and CPUs needed, and notes, as lines."""
    width = max(_LEAST_WIDTH, width)
    facts = [f"the device has work {result.utilization:.0%} of the time"]
    facts += [f"{name}: {fact}" for name, fact in facts_of(result)]
    facts += [f"note: {note}" for note in result.notes]
    below = [line for fact in facts for line in wrapped(fact, width)]
    return [*_ladder_lines(result, width), "", *_cost_lines(result, width), "", *below]


# --- the ladder -------------------------------------------------------------------------------------------------------
def ladder_table(result: Diagnosis) -> Table:
    """A row for each rung, with its description."""
    size, rows = result.batch_size, []
    for rung in result.rungs:
        time = rung.time
        rates = [] if size is None else [f"{size * time.per_second:,.0f}"]
        interval = f"{1e3 * time.low:.2f}–{1e3 * time.high:.2f}"
        busy = "–" if time.cpu_busy is None else f"{time.cpu_busy:.0%}"
        work = rung.what if rung.measured else f"{rung.what} (not measured: as the line before)"
        rows.append([rung.stage, f"{1e3 * time.seconds:.2f}", *rates, interval, f"{time.per_second:,.2f}", busy, work])
    return ["with", "ms/step", *([] if size is None else ["images/s"]), "from–to", "steps/s", "CPUs busy", ""], rows


def _ladder_lines(result: Diagnosis, width: int) -> list[str]:
    headings, rows = ladder_table(result)
    names = [shortened(rung.stage, _NAME) if rung.measured else f"{shortened(rung.stage, _NAME - 1)}*"
             for rung in result.rungs]  # fmt: skip
    rows = [[name, *row[1:-1]] for name, row in zip(names, rows, strict=True)]
    longest = max(rung.time.seconds for rung in result.rungs)
    bars = [rung.time.seconds / longest for rung in result.rungs]
    optional = ["CPUs busy", "from–to", "steps/s", "images/s"]
    if result.batch_size is not None:  # images/s make steps/s redundant
        optional[1:3] = ["steps/s", "from–to"]
    lines = table(headings[:-1], rows, width, bars=bars, optional=optional)
    return lines if all(rung.measured for rung in result.rungs) else [*lines, "* not measured: as the line before"]


def _cost_lines(result: Diagnosis, width: int) -> list[str]:
    costs = [cost for cost in result.costs if cost.stage not in ("random", "step")]
    rows = [
        [shortened(cost.stage, _NAME), f"{1e3 * cost.added:.2f}", f"{1e3 * cost.freed:.2f}", _described(cost)]
        for cost in costs
    ]
    return table(["stage", "added ms", "if free", ""], rows, width) if rows else []


def _described(cost: StageCost) -> str:
    parts = [cost.what + ("" if cost.measured else " (computed)")]
    if cost.busy and cost.cpu is not None:
        share = min(1.0, cost.cpu / cost.busy)
        parts.append(f"{1e3 * cost.busy:.1f} ms a batch in a worker, {share:.0%} of it on the CPU")
    return "; ".join(part for part in (*parts, cost.reason) if part)


def facts_of(result: Diagnosis) -> list[tuple[str, str]]:
    """(name, fact) of the workers and CPUs needed, the step with pinned batches, and the bound."""
    facts = []
    if result.workers_needed is not None:
        facts.append(("workers", f"{result.workers}; {result.workers_needed:.1f} would keep up with training"))
    if result.cpus_needed is not None:
        facts.append(("CPUs", f"{result.cpus} may be used; {result.cpus_needed:.1f} would keep up"))
    if result.pinned is not None:
        facts.append(("pinned", f"{1e3 * result.pinned.seconds:.2f} ms a step with batches in page-locked memory"))
    if result.culprit:
        free = "there were enough workers" if result.culprit == "workers" else f"{result.culprit} cost nothing"
        facts.append(("bound", f"{1e3 * result.bound:.1f} ms a step if {free}"))
    return facts


# --- findings ---------------------------------------------------------------------------------------------------------
def advice_lines(advice: Iterable[Advice], width: int = 80) -> list[str]:
    """Advice as lines for a terminal: title with the predicted time, reason, and the change to make.

    Commands and code are not wrapped.
    """
    width = max(_LEAST_WIDTH, width)
    lines = list[str]()
    for number, each in enumerate(advice, 1):
        gain = f" (to {1e3 * each.seconds:.1f} ms a step)" if each.seconds is not None and each.gain else ""
        how = [f"   {'how:' if not n else '    '} {line}" for n, line in enumerate(each.how.split("\n"))]
        lines += [f"{number}. {each.title}{gain}", *wrapped(f"   why: {each.why}", width, " " * 8), *how]
    return ["", "advice, the largest predicted gain first:", *lines] if lines else []
