"""Making the changes that advice proposes, one at a time, and measuring what each brings.

The change with the best prediction comes first. One that makes a step at least 3 % faster is kept, and the next one is
made on top of it; its prediction is that of the model with all changes so far.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cache.errors import PackerError
from cache.messages import Silent, Watcher
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.findings import Advice, Applied, Change
from readers.diagnosis.model import Model
from readers.diagnosis.pipeline import Pipeline, ending, in_a_line
from readers.diagnosis.timing import time_steps
from readers.diagnosis.training import Training

__all__ = ["apply_advice"]

_BETTER = 0.97
_NEAR = 1.05  # of the step alone: nothing is left to gain
_MOST = 4  # changes


def apply_advice(
    pipeline: Pipeline,
    evidence: Evidence,
    advice: Sequence[Advice],
    training: Training,
    *,
    seconds: float,
    watcher: Watcher | None = None,
) -> tuple[Applied, ...]:
    """Make the changes of the advice. seconds: about how long to measure all of them.

    Nothing is changed if the data keep up, and nothing is left behind: the user's loader stays as it is.
    """
    if not evidence.diagnosis.culprit:
        return ()
    run = _Application(pipeline, evidence, training, seconds / _MOST, watcher or Silent())
    try:
        for each in _in_order(advice):
            if len(run.applied) >= _MOST or run.before <= _NEAR * evidence.diagnosis.step.seconds:
                break
            run.try_out(each)
    finally:
        for kept in run.kept:
            kept.close()
    return tuple(run.applied)


def _in_order(advice: Iterable[Advice]) -> list[Advice]:
    """Those with a change, each change once: the best prediction first, then those without one."""
    found: dict[tuple[str, int | str], Advice] = {}
    for each in advice:
        if each.change is not None:
            found.setdefault((each.change.kind, each.change.value), each)
    return sorted(found.values(), key=lambda each: -each.gain)


class _Application:
    """before: seconds of a step with the changes that were kept."""

    def __init__(
        self, pipeline: Pipeline, evidence: Evidence, training: Training, seconds: float, watcher: Watcher
    ) -> None:
        self._pipeline, self._training, self._seconds, self._watcher = pipeline, training, seconds, watcher
        self._model, self._batch_size = evidence.model, evidence.diagnosis.batch_size
        self.before = evidence.diagnosis.full.seconds
        self.kept: list[Pipeline] = []
        self.applied: list[Applied] = []

    def try_out(self, advice: Advice) -> None:
        change = advice.change
        assert change is not None
        changes = [each.change for each in self.applied if each.kept]
        if any(each.kind == change.kind for each in changes):
            return  # as of two forms of a cache: the better prediction came first
        predicted = advice.seconds
        if predicted is not None:
            predicted = predicted if self._model is None else predict(self._model, [*changes, change])
            if predicted > _BETTER * self.before:
                return  # what was changed so far has the same effect
        found = Applied(change, advice.id, self.before, predicted, None, False)
        try:
            changed = self._pipeline.changed(change)
            if changed is None:
                return
            try:
                measured = self._measure(changed, [*changes, change])
            except BaseException:
                changed.close()
                raise
        except (PackerError, OSError, ValueError) as error:
            self.applied.append(replace(found, problem=in_a_line(error)))
            return
        self._watcher.note(f"{change.what}: {1e3 * measured:.1f} ms a step")
        found = replace(found, measured=measured, kept=measured < _BETTER * self.before)
        self.applied.append(found)
        if not found.kept:
            changed.close()
            return
        self.kept.append(changed)
        self._pipeline, self.before = changed, measured

    def _measure(self, changed: Pipeline, changes: Sequence[Change]) -> float:
        """Seconds of a step, for as many samples as a batch had before all changes."""

        def use(batch: Any) -> None:
            on_device = self._training.on_device(batch)
            for each in (*self.kept, changed):
                on_device = on_device if each.convert is None else each.convert(on_device)
            self._training.step(on_device)

        with ending(changed.cached(0)) as batches, warnings.catch_warnings():
            # torch warns of more workers than CPUs, which are right for work that waits
            warnings.filterwarnings("ignore", "This DataLoader will create")
            seconds = time_steps(
                batches, use, warmup=changed.warmup, workers=changed.workers, seconds=self._seconds,
                synchronize=self._training.synchronize,
            ).seconds  # fmt: skip
        sizes = [int(each.value) for each in changes if each.kind == "batch_size"]
        return seconds * (self._batch_size or 1) / sizes[-1] if sizes else seconds


def predict(model: Model, changes: Iterable[Change]) -> float:
    """Seconds of a step with some changes together."""
    share, workers, saved = dict[str, float](), model.workers, 0.0
    for change in changes:
        if change.kind == "workers":
            workers = int(change.value)
        saved += change.saved
        for stage, left in change.share:
            share[stage] = share.get(stage, 1.0) * left
    return model.seconds(workers=workers, share=share, saved=saved)
