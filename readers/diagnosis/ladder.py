"""Which stage starves the training: the ladder of caches, read in both directions.

    random      random data made on the device, new in each step: does the time of a step depend on the data?
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

from dataclasses import asdict, dataclass, replace
from typing import Any

from readers.diagnosis.timing import StepTime
from readers.usage.record import Usage

__all__ = ["Advice", "Diagnosis", "Rung", "StageCost"]

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Rung:
    """The time of a step when `stage` and all stages nearer to the training run for real.

    measured: False where the lines on both sides of it take equally long, so that its time is that of the one before;
    done where the loader is too slow to measure all.
    """

    stage: str
    what: str
    time: StepTime
    measured: bool = True


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
class Advice:
    """A tip that the evidence calls for. id: of the row in the table of tips.

    why: what was found, with its figures. how: a command, an option or a line of code. seconds: what a step would
    take, predicted; None if that cannot be said. gain: seconds of a step that are gained, 0.0 where seconds is None.
    """

    id: str
    title: str
    why: str
    how: str
    seconds: float | None = None
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where the time of a training step goes.

    rungs: from the step alone to the loader as it is; where there is a model, "random" is before the step.
    costs: of each stage from the step on, in the same order.
    culprit: the name of the costliest stage; "workers" if a few more of them would be enough; "" if the data keep up.
    verdict: the same in a sentence.
    bound: seconds of a step if the culprit cost nothing.
    batch_size: samples in a batch, None if unknown.
    workers, workers_needed: that the loader has, and that would keep up; None if the times of the stages are unknown.
    cpus, cpus_needed: that this process may use, and that the stages of the loader need to keep up.
    notes: what limits the reading.
    pinned: the line "copy" with batches in page-locked memory; None where the loader's are, or there is no GPU.
    batch_bytes: bytes of the arrays in a batch.
    advice: what to change, the largest gain first.
    usage: of the machine meanwhile, with a mark where each line begins; None where it could not be sampled.
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
        """The training step with the loader as it is."""
        return self.rungs[-1].time

    @property
    def utilization(self) -> float:
        """Share of the time in which the device has work, 0 to 1: that of the step alone, of the whole."""
        return min(1.0, self.step.seconds / self.full.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries. version: of this form, for programs that read it."""
        usage = None if self.usage is None else self.usage.to_dict()
        values = asdict(replace(self, usage=None))
        return {"version": _VERSION, **values, "utilization": self.utilization, "usage": usage}
