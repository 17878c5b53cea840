"""What a step would take if the loader were another: a model with few parameters, fitted to one diagnosis.

    step = max(floor, slowdown × max(work of a batch / workers, CPU time of a batch / CPUs))
    step = floor + slowdown × work of a batch                                                 without workers

The floor is the step with the copy and the transfer, measured. The work of a batch is the sum of its stages, each timed
alone in one worker; slowdown is what the workers really took more or less, where the diagnosis could see it, that is
where they are the limit. What storage adds to the warm pipeline is work that waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from readers.diagnosis.ladder import Diagnosis, StageCost

__all__ = ["COMPUTING", "Model", "fit"]

_LIMITED = 1.05  # a step that takes so many times the floor waits for the workers
_SAME = 1.03
_COMPUTES = 0.5  # of its time on the CPU
COMPUTING = ("decode", "augment")  # of our own loaders: they never wait
_MOST_WORKERS = 4  # for each CPU: for work that waits


@dataclass(frozen=True)
class Model:
    """work, cpu: seconds and CPU seconds of a batch in one worker, by stage. workers: 0 for none."""

    floor: float
    work: Mapping[str, float]
    cpu: Mapping[str, float]
    workers: int
    cpus: int
    slowdown: float = 1.0

    def seconds(
        self, *, workers: int | None = None, share: Mapping[str, float] | None = None, saved: float = 0.0
    ) -> float:
        """Seconds of a step with so many workers, each stage at a share of its work, and a lower floor."""
        left = share or {}
        count = self.workers if workers is None else workers
        work = sum(seconds * left.get(stage, 1.0) for stage, seconds in self.work.items())
        cpu = sum(seconds * left.get(stage, 1.0) for stage, seconds in self.cpu.items())
        floor = max(0.0, self.floor - saved)
        if count < 1:
            return floor + self.slowdown * work
        return max(floor, self.slowdown * max(work / count, cpu / self.cpus))

    @property
    def is_limited(self) -> bool:
        """Whether the step waits for the workers."""
        return self.seconds() > _LIMITED * self.floor

    def enough_workers(self) -> int:
        """The fewest workers with which a step takes as little as with any number of them."""
        most = max(self.workers, _MOST_WORKERS * self.cpus)
        best = self.seconds(workers=most)
        return next((n for n in range(1, most) if self.seconds(workers=n) <= _SAME * best), most)


def _work(cost: StageCost) -> float:
    """Seconds of a stage in a worker. What computes takes its CPU time; the rest is what other processes took."""
    wall, cpu = cost.busy or 0.0, cost.cpu
    return cpu if cpu is not None and (cpu > _COMPUTES * wall or cost.stage in COMPUTING) else wall


def fit(result: Diagnosis, workers: int | None = None) -> Model | None:
    """The model of a diagnosis; None where the times of the stages are not known. workers: 0 if there are none."""
    work = {cost.stage: _work(cost) for cost in result.costs if cost.busy is not None}
    cpu = {cost.stage: min(cost.cpu, cost.busy) for cost in result.costs if cost.cpu is not None and cost.busy}
    if not work or not sum(work.values()):
        return None
    count = result.workers if workers is None else workers
    # From the step up: what runs in the training process, what runs in workers, and what only waits.
    first = next(number for number, rung in enumerate(result.rungs) if rung.stage in work)
    floor, full = result.rungs[first - 1].time.seconds, result.full.seconds
    warm = next(rung.time.seconds for rung in reversed(result.rungs) if rung.stage in work)
    storage = "storage" if any(rung.stage == "storage" for rung in result.rungs) else result.rungs[-1].stage
    model = Model(floor, work, cpu, count, result.cpus)
    if count < 1:
        model = Model(floor, work, cpu, count, result.cpus, max(0.0, warm - floor) / sum(work.values()))
        waited = max(0.0, full - max(warm, floor)) / (model.slowdown or 1.0)
    else:
        if warm > _LIMITED * floor:
            alone = Model(0.0, work, cpu, count, result.cpus).seconds()
            model = Model(floor, work, cpu, count, result.cpus, warm / alone)
        # Storage makes the work of a batch what the whole pipeline shows, if that is more than the work that is known.
        waited = 0.0
        if full > _LIMITED * max(floor, warm):
            waited = max(0.0, full * count / model.slowdown - sum(work.values()))
    return Model(floor, {storage: waited, **work}, cpu, count, result.cpus, model.slowdown)
