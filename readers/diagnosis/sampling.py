"""What the machine does while a diagnosis runs: a record of utilisation, with a mark where each line begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cache.errors import SourceError
from readers.diagnosis.ladder import Diagnosis
from readers.usage.record import Usage
from readers.usage.sampler import INTERVAL, Sampler

__all__ = ["LineSampler", "sampling", "with_rates"]

_SAMPLES = 100  # of a whole diagnosis
_LEAST_SECONDS = 0.05


class LineSampler:
    """usage: at the end the record; None where this machine has nothing to sample."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self.usage: Usage | None = None

    def begin(self, name: str) -> None:
        """A line is about to be measured: what was sampled until now belongs to the one before it."""
        if self._sampler is not None:
            self._sampler.sample()
            self._sampler.mark(name)

    def end(self) -> None:
        if self._sampler is not None:
            self.usage = self._sampler.stop()


@contextmanager
def sampling(seconds: float) -> Iterator[LineSampler]:
    """Sample during a diagnosis of about so many seconds."""
    try:
        sampler = Sampler(interval=min(INTERVAL, max(_LEAST_SECONDS, seconds / _SAMPLES))).start()
    except SourceError:  # not on Linux
        sampler = None
    lines = LineSampler(sampler)
    try:
        yield lines
    finally:
        lines.end()


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
