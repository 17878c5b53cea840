"""A diagnosis as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cache.messages import bar, printable, shortened
from readers.diagnosis.ladder import Diagnosis, Rung, StageCost

__all__ = ["diagnosis_lines", "verdict_lines"]

_COLUMNS, _NARROW = 80, 76  # below the second, intervals and steps/s are left out
_LEAST_COLUMNS = 40
_NAME, _LONGEST_BAR = 14, 40


def diagnosis_lines(result: Diagnosis, columns: int | None = None, more: Sequence[str] = ()) -> list[str]:
    """The verdict, the ladder with bars, the costs of the stages in both readings, and the verdict again.

    columns: of the terminal; lines stay within them. None: tables for 80, sentences in one line each.
    more: lines that come before the verdict at the end.
    """
    width = max(_LEAST_COLUMNS, columns or _COLUMNS)
    verdict = verdict_lines(result, columns)
    facts = [f"the device has work {result.utilization:.0%} of the time"]
    if result.workers_needed is not None:
        facts.append(f"workers: {result.workers}, {result.workers_needed:.1f} would keep up with the training")
    if result.cpus_needed is not None:
        facts.append(f"CPUs: {result.cpus} may be used, {result.cpus_needed:.1f} would keep up")
    if result.culprit:
        facts.append(f"bound: {1e3 * result.bound:.1f} ms a step, if {result.culprit} cost nothing")
    facts += [f"note: {note}" for note in result.notes]
    if columns is not None:
        facts = [line for fact in facts for line in _wrapped(fact, width, "  ")]
    return [*verdict, "", *_ladder(result, width), "", *_costs(result, width), "", *facts, *more, "", *verdict]


def verdict_lines(result: Diagnosis, columns: int | None = None) -> list[str]:
    """The verdict, in lines of so many columns; in one where the number is None."""
    return [result.verdict] if columns is None else _wrapped(result.verdict, max(_LEAST_COLUMNS, columns))


def _ladder(result: Diagnosis, width: int) -> list[str]:
    """A line for each rung: what a step takes, and a bar of it in the room that is left."""
    narrow, images = width < _NARROW, result.batch_size is not None
    longest = max(rung.time.seconds for rung in result.rungs)
    head = f"{'with':{_NAME}s} {'ms/step':>9s}"
    if not narrow:
        head += f" {'from':>9s} {'to':>9s} {'steps/s':>8s}"
    if images:
        head += f" {'images/s':>9s}"
    room = min(_LONGEST_BAR, width - len(head) - 2)
    lines = [head]
    for rung in result.rungs:
        lines.append(f"{_rung(rung, result.batch_size, narrow)}  {bar(rung.time.seconds / longest, room)}")
        if rung.stage == "copy" and result.pinned is not None:
            pinned = Rung("  if pinned", "", result.pinned)
            lines.append(f"{_rung(pinned, result.batch_size, narrow)}  {bar(result.pinned.seconds / longest, room)}")
    if not all(rung.measured for rung in result.rungs):
        lines += _wrapped("~ not measured: the lines on both sides of it take equally long", width, "  ")
    return lines


def _rung(rung: Rung, batch_size: int | None, narrow: bool) -> str:
    time = rung.time
    taken = f"{'' if rung.measured else '~'}{1e3 * time.seconds:.2f}"
    shown = f"{_name(rung.stage)} {taken:>9s}"
    if not narrow:
        shown += f" {1e3 * time.low:9.2f} {1e3 * time.high:9.2f} {time.per_second:8.2f}"
    return shown if batch_size is None else f"{shown} {batch_size * time.per_second:9,.0f}"


def _costs(result: Diagnosis, width: int) -> list[str]:
    """A line for each stage: both readings, its time in a worker, what it is; and why the readings disagree."""
    costs = result.costs[1:]
    lines = _wrapped("what a stage costs, in ms a step; worker: ms that a batch takes in one worker", width)
    lines.append(f"{'stage':{_NAME}s} {'added':>9s} {'if free':>9s} {'worker':>9s} {'on CPU':>7s}")
    for cost in costs:
        free = f"{'' if cost.measured else '~'}{1e3 * cost.freed:.2f}"
        busy = "" if cost.busy is None else f"{1e3 * cost.busy:.2f}"
        cpu = f"{min(1.0, cost.cpu / cost.busy):.0%}" if cost.busy and cost.cpu is not None else ""
        shown = f"{_name(cost.stage)} {1e3 * cost.added:9.2f} {free:>9s} {busy:>9s} {cpu:>7s}"
        lines.append(f"{shown}  {shortened(printable(cost.what), max(3, width - len(shown) - 2))}".rstrip())
        lines += _reason(cost, width)
    if not all(cost.measured for cost in costs):
        lines += _wrapped("~ computed from the times of the stages, not measured", width, "  ")
    return lines


def _reason(cost: StageCost, width: int) -> list[str]:
    return _wrapped(f"  {cost.reason}", width, "  ") if cost.reason else []


def _name(stage: str) -> str:
    return f"{shortened(printable(stage), _NAME):{_NAME}s}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(printable(text), width, subsequent_indent=indent, break_on_hyphens=False)
