"""Two records side by side: what differs, series by series and between marks of the same name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cache.messages import human_seconds
from readers.usage.reading import format_value, read_usage
from readers.usage.record import Percentiles, Usage, importance

__all__ = ["Comparison", "Difference", "SpanDifference", "compare"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A series in both records; None in the one that lacks it."""

    name: str
    unit: str
    a: Percentiles | None
    b: Percentiles | None

    @property
    def ratio(self) -> float | None:
        """The mean in B for 1 in A; None where one is not known or A's is 0."""
        return self.b.mean / self.a.mean if self.a and self.b and self.a.mean else None


@dataclass(frozen=True, slots=True)
class SpanDifference:
    """What is between a mark and the next one, in both records: seconds, steps and images a second, None if unknown."""

    name: str
    seconds: tuple[float, float]
    steps: tuple[float | None, float | None]
    images: tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison:
    """rows: the series of both, what matters most first. spans: between marks that both have, in the order of A."""

    a: Usage
    b: Usage
    rows: tuple[Difference, ...]
    spans: tuple[SpanDifference, ...]

    @property
    def verdict(self) -> str:
        """How much faster B is, or longer it ran, and what each of them waits for."""
        first = f"A ran for {human_seconds(self.a.seconds)}, B for {human_seconds(self.b.seconds)}"
        if (rates := self._rates()) is not None:
            what, one, other = rates
            shown = [format_value(rate, "1") for rate in (other, one)]
            first = f"B makes {shown[0]} {what}, A {shown[1]}: {other / one - 1:+.0%}"
        return f"{first}. A: {read_usage(self.a)}. B: {read_usage(self.b)}."

    def _rates(self) -> tuple[str, float, float] | None:
        """What is counted, and how many of it A and B made: of the whole run, or of the slowest part of both."""
        rows = {row.name: row for row in self.rows if row.ratio is not None}
        for name in ("images", "steps"):
            row = rows.get(name)
            if row is not None and row.a is not None and row.b is not None:
                return f"{name} a second", row.a.mean, row.b.mean
        slowest = min((span for span in self.spans if all(span.steps)), key=lambda span: span.steps, default=None)
        if slowest is None:
            return None
        name, (one, other) = ("images", slowest.images) if all(slowest.images) else ("steps", slowest.steps)
        return f"{name} a second in {slowest.name!r}", one or 0.0, other or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries, but for the values over time."""

        def plain(found: Percentiles | None) -> dict[str, float] | None:
            return None if found is None else found._asdict()

        rows = [
            {"name": row.name, "unit": row.unit, "a": plain(row.a), "b": plain(row.b), "ratio": row.ratio}
            for row in self.rows
        ]
        spans = [asdict(span) for span in self.spans]
        runs = [{"host": run.host, "started": run.started, "seconds": run.seconds} for run in (self.a, self.b)]
        return {"a": runs[0], "b": runs[1], "series": rows, "spans": spans, "verdict": self.verdict}


def compare(a: Usage, b: Usage) -> Comparison:
    """Compare two records, of the same host or of two. Single cores are left out: hosts may have unlike numbers."""
    series = {one.name: one for run in (a, b) for one in run.summary(0).series}
    both = a.percentiles(), b.percentiles()
    rows = [
        Difference(one.name, one.unit, *(found.get(one.name) for found in both))
        for one in sorted(series.values(), key=importance)
    ]
    return Comparison(a, b, tuple(rows), _spans(a, b))


def _spans(a: Usage, b: Usage) -> tuple[SpanDifference, ...]:
    """Of the first marks of each name."""
    rest = {mark.name: (mark, span) for mark, span in reversed(b.spans())}
    spans = []
    for mark, span in a.spans():
        if mark.name in rest:
            other, there = rest.pop(mark.name)
            seconds = float(span.durations.sum()), float(there.durations.sum())
            steps = _rate(mark.steps, span, "steps"), _rate(other.steps, there, "steps")
            images = _rate(mark.images, span, "images"), _rate(other.images, there, "images")
            spans.append(SpanDifference(mark.name, seconds, steps, images))
    return tuple(spans)


def _rate(measured: float | None, usage: Usage, name: str) -> float | None:
    """What a mark says, or the mean of the series."""
    found = usage.percentiles().get(name)
    return measured if measured is not None or found is None else found.mean
