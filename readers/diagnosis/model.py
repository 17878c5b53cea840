"""What a step would take if the loader were another: a model with few parameters, fitted to one diagnosis.

    step = max(floor, slowdown × max(work of a batch / workers, CPU time of a batch / CPUs, serial work of a batch))
    step = floor + slowdown × work of a batch                                                 without workers

The floor is the step with the copy and the transfer, measured. The work of a batch is the sum of its stages, each timed
alone in one worker; slowdown is what the workers really took more or less, where the diagnosis could see it, that is
where they are the limit. What storage adds to the warm pipeline is work that waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from readers.diagnosis.ladder import Diagnosis, StageCost

__all__ = ["Model", "fit", "is_computing"]

_LIMITED = 1.05  # a step that takes so many times the floor waits for the workers
_SAME = 1.03
_SLOWEST = 3.0  # times the work alone; what takes longer is not the workers'
_COMPUTES, _COMPUTES_ON_BUSY = 0.5, 0.1  # of its time on the CPU
_BUSY = 0.95  # of the CPUs
_COMPUTING = ("decode", "augment")  # of our own loaders: they never wait
_MOST_WORKERS = 4  # for each CPU: for work that waits


@dataclass(frozen=True)
class Model:
    """work, cpu: seconds and CPU seconds of a batch in one worker, by stage. workers: 0 for none.

    serial: the stages that only one worker does at a time.
    """

    floor: float
    work: Mapping[str, float]
    cpu: Mapping[str, float]
    workers: int
    cpus: int
    slowdown: float = 1.0
    serial: tuple[str, ...] = ()

    def seconds(
        self, *, workers: int | None = None, share: Mapping[str, float] | None = None, saved: float = 0.0
    ) -> float:
        """Seconds of a step with so many workers, each stage at a share of its work, and a lower floor."""
        left = share or {}
        count = self.workers if workers is None else workers
        work = sum(seconds * left.get(stage, 1.0) for stage, seconds in self.work.items())
        serial = sum(self.work.get(stage, 0.0) * left.get(stage, 1.0) for stage in self.serial)
        cpu = sum(seconds * left.get(stage, 1.0) for stage, seconds in self.cpu.items())
        floor = max(0.0, self.floor - saved)
        if count < 1:
            return floor + self.slowdown * work
        return max(floor, self.slowdown * max(work / count, cpu / self.cpus, serial))

    @property
    def is_limited(self) -> bool:
        """Whether the step waits for the workers."""
        return self.seconds() > _LIMITED * self.floor

    def enough_workers(self) -> int:
        """The fewest workers with which a step takes as little as with any number of them."""
        most = max(self.workers, _MOST_WORKERS * self.cpus)
        best = self.seconds(workers=most)
        return next((n for n in range(1, most) if self.seconds(workers=n) <= _SAME * best), most)


def is_computing(cost: StageCost, cpu_busy: float | None) -> bool:
    """Whether a stage computes, rather than waits. On busy CPUs, what computes waits for them, too."""
    if cost.busy is None or cost.cpu is None:
        return False
    least = _COMPUTES_ON_BUSY if cpu_busy is not None and cpu_busy >= _BUSY else _COMPUTES
    return cost.stage in _COMPUTING or cost.cpu >= least * cost.busy


def fit(result: Diagnosis, workers: int | None = None, serial: tuple[str, ...] = ()) -> Model | None:
    """The model of a diagnosis; None where the times of the stages are not known. workers: 0 if there are none."""
    alone = {cost.stage: cost.busy for cost in result.costs if cost.busy is not None}
    computing = [cost for cost in result.costs if is_computing(cost, result.full.cpu_busy)]
    # What computes takes its CPU time; the rest is what other processes took.
    work = {**alone, **{cost.stage: min(cost.cpu or 0.0, cost.busy or 0.0) for cost in computing}}
    cpu = {cost.stage: min(cost.cpu, cost.busy) for cost in result.costs if cost.cpu is not None and cost.busy}
    if not work or not sum(work.values()):
        return None
    count = result.workers if workers is None else workers
    # From the step up: what runs in the training process, what runs in workers, and what only waits.
    first = next(number for number, rung in enumerate(result.rungs) if rung.stage in work)
    floor, full = result.rungs[first - 1].time.seconds, result.full.seconds
    warm = next(rung.time.seconds for rung in reversed(result.rungs) if rung.stage in work)
    model = Model(floor, work, cpu, count, result.cpus, 1.0, serial)
    if count < 1:
        slowdown = max(0.0, warm - floor) / sum(work.values())
        waited = max(0.0, full - max(warm, floor)) / (slowdown or 1.0)
    else:
        least = replace(model, floor=0.0).seconds()
        limited = _LIMITED * floor < warm < _SLOWEST * replace(model, floor=0.0, work=alone).seconds()
        slowdown = warm / least if limited and least else 1.0
        waited = 0.0
        if full > _LIMITED * max(floor, warm):
            # What makes the work of a batch what the whole loader shows.
            one_at_a_time = sum(work.get(stage, 0.0) for stage in serial)
            waits = [full * count / slowdown - sum(work.values())]
            waits += [full / slowdown - one_at_a_time] if serial else []
            waited = max(0.0, min(waits))
    storage = "storage" if any(rung.stage == "storage" for rung in result.rungs) else result.rungs[-1].stage
    return replace(model, work={storage: waited, **work}, slowdown=slowdown)
