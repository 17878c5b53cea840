"""What the machine does while a diagnosis runs: a record of utilisation, with a mark where each line begins."""

from __future__ import annotations

from dataclasses import replace

from cache.errors import SourceError
from readers.diagnosis.ladder import Diagnosis
from readers.usage.record import Usage
from readers.usage.sampler import INTERVAL, Sampler

__all__ = ["mark_line", "start_sampler", "with_rates"]

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
