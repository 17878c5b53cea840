"""A diagnosis as lines for a terminal of a given width: the ladder, both readings of each stage, and the verdict."""

from __future__ import annotations

import textwrap

from cache.messages import bar, shortened
from readers.diagnosis.ladder import Diagnosis, Rung, StageCost

__all__ = ["diagnosis_lines", "verdict_lines"]

_LEAST_WIDTH, _NAME, _LEAST_BAR, _MOST_BAR = 60, 12, 8, 40
_UNMEASURED = "*"


def diagnosis_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """The ladder with bars, the costs of the stages in both readings, what would keep up, and notes."""
    width = max(_LEAST_WIDTH, width)
    facts = [f"the device has work {result.utilization:.0%} of the time"]
    if result.workers_needed is not None:
        facts.append(f"workers: {result.workers}; {result.workers_needed:.1f} would keep up with the training")
    if result.cpus_needed is not None:
        facts.append(f"CPUs: {result.cpus} may be used; {result.cpus_needed:.1f} would keep up")
    if result.pinned is not None:
        facts.append(f"with batches in page-locked memory: {1e3 * result.pinned.seconds:.2f} ms a step")
    lines = [*_ladder_lines(result, width), "", *_cost_lines(result, width), ""]
    for text in (*facts, *(f"note: {note}" for note in result.notes)):
        lines += textwrap.wrap(text, width, subsequent_indent="  ")
    return lines


def verdict_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """What it would gain if the culprit were free, and the verdict, last."""
    lines = [f"bound: {1e3 * result.bound:.1f} ms a step, if {result.culprit} cost nothing"] if result.culprit else []
    return [*lines, *textwrap.wrap(result.verdict, max(_LEAST_WIDTH, width))]


def _ladder_lines(result: Diagnosis, width: int) -> list[str]:
    """A line for each rung: as many columns as there is room for, and a bar."""
    size, times = result.batch_size, [rung.time for rung in result.rungs]
    columns = [("ms/step", [f"{1e3 * time.seconds:.2f}" for time in times])]
    rates = [("steps/s", [f"{time.per_second:,.2f}" for time in times])]
    if size is not None:
        rates.insert(0, ("images/s", [f"{size * time.per_second:,.0f}" for time in times]))
    ends = [
        ("from", [f"{1e3 * time.low:.2f}" for time in times]),
        ("to", [f"{1e3 * time.high:.2f}" for time in times]),
    ]
    for more in (rates[:1], ends, rates[1:]):
        if _NAME + sum(map(_column_width, [*columns, *more])) + 2 + _LEAST_BAR > width:
            break
        columns += more
    room = width - _NAME - sum(map(_column_width, columns)) - 2
    longest = max(time.seconds for time in times)

    def line(name: str, cells: list[str], drawn: str) -> str:
        row = "".join(f"{cell:>{_column_width(column)}s}" for cell, column in zip(cells, columns, strict=True))
        return f"{name:{_NAME}s}{row}  {drawn}".rstrip()

    lines = [line("with", [heading for heading, _ in columns], "")]
    for number, rung in enumerate(result.rungs):
        drawn = bar(rung.time.seconds / longest, max(_LEAST_BAR, min(_MOST_BAR, room)))
        lines.append(line(_rung_name(rung), [cells[number] for _, cells in columns], drawn))
    if not all(rung.measured for rung in result.rungs):
        lines.append(f"{_UNMEASURED} not measured: as the line before")
    return lines


def _rung_name(rung: Rung) -> str:
    return shortened(rung.stage, _NAME) if rung.measured else f"{shortened(rung.stage, _NAME - 1)}{_UNMEASURED}"


def _column_width(column: tuple[str, list[str]]) -> int:
    heading, cells = column
    return 2 + max(map(len, [heading, *cells]))


def _cost_lines(result: Diagnosis, width: int) -> list[str]:
    """A line for each stage, with what is known of it below where it does not fit."""
    costs = [cost for cost in result.costs if cost.stage not in ("random", "step")]
    lines = [f"{'stage':{_NAME}s}{'added':>10s}{'if free':>10s}  ms a step"] if costs else []
    indent = " " * (_NAME + 22)
    for cost in costs:
        start = f"{shortened(cost.stage, _NAME):{_NAME}s}{1e3 * cost.added:10.2f}{1e3 * cost.freed:10.2f}  "
        lines += textwrap.wrap(
            start + _described(cost), width, subsequent_indent=indent if width > len(indent) + 30 else "    ",
            drop_whitespace=True, replace_whitespace=False,
        )  # fmt: skip
    return lines


def _described(cost: StageCost) -> str:
    parts = [cost.what + ("" if cost.measured else " (computed)")]
    if cost.busy and cost.cpu is not None:
        share = min(1.0, cost.cpu / cost.busy)
        parts.append(f"{1e3 * cost.busy:.1f} ms a batch in a worker, {share:.0%} of it on the CPU")
    return "; ".join(part for part in (*parts, cost.reason) if part)
