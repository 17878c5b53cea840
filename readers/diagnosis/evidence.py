"""What advice is made from: a diagnosis, the facts of the loader, and the model that predicts other loaders."""

from __future__ import annotations

from dataclasses import dataclass

from readers.diagnosis.facts import Facts
from readers.diagnosis.ladder import Diagnosis
from readers.diagnosis.model import Model, fit, is_computing

__all__ = ["Evidence"]

_WORTHWHILE = 0.1  # of a step


@dataclass(frozen=True)
class Evidence:
    """A diagnosis with the facts, and the model that is fitted to it: None where the stages have no times."""

    diagnosis: Diagnosis
    facts: Facts
    model: Model | None

    @classmethod
    def of(cls, diagnosis: Diagnosis, facts: Facts) -> Evidence:
        """With the model of the diagnosis."""
        if facts.loader == "ImageLoader":  # whose threads decode together and read one after the other
            return cls(diagnosis, facts, fit(diagnosis, serial=("storage", "read")))
        return cls(diagnosis, facts, fit(diagnosis, facts.workers if facts.loader == "DataLoader" else None))

    def freed(self, stage: str) -> float:
        """Seconds of a step that are gained if a stage is free; 0 for one that there is not."""
        return next((cost.freed for cost in self.diagnosis.costs if cost.stage == stage), 0.0)

    def added(self, stage: str) -> float:
        """Seconds of a step that the line of a stage adds; 0 for one that there is not."""
        return next((cost.added for cost in self.diagnosis.costs if cost.stage == stage), 0.0)

    def costs(self, *stages: str) -> bool:
        """Whether a step gains a tenth if these stages are free, alone or together."""
        full = self.diagnosis.full.seconds
        gain = max(map(self.freed, stages), default=0.0)
        if (left := self.predict(*stages)) is not None:
            gain = max(gain, full - left)
        return any(map(self.freed, stages)) and gain > _WORTHWHILE * full

    def predict(self, *stages: str, left: float = 0.0) -> float | None:
        """Seconds of a step with so much left of the work of these stages; None if that cannot be said."""
        return None if self.model is None else self.model.seconds(share=dict.fromkeys(stages, left))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all stages, "step" first."""
        return tuple(cost.stage for cost in self.diagnosis.costs)

    @property
    def fetches(self) -> tuple[str, ...]:
        """The stages that take data from their files, and may do more."""
        return tuple(stage for stage in ("storage", "read") if stage in self.names)

    def stages_of(self, *prefixes: str) -> tuple[str, ...]:
        """The stages whose names begin so."""
        return tuple(stage for stage in self.names if stage.startswith(prefixes))

    def waits(self, stage: str) -> bool:
        """Whether a stage mostly waits and does not compute; also storage, of which only the wait is known."""
        busy = self.diagnosis.full.cpu_busy
        return any(cost.stage == stage and not is_computing(cost, busy) for cost in self.diagnosis.costs)
