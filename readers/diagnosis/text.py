"""A diagnosis for people: lines for a terminal of a given width, and the tables that reports show, too.

A table is its headings and its rows of texts. Where the last heading is "", the last cells are remarks; see
`cache.messages.table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from cache.messages import shortened, table, wrapped
from readers.diagnosis.ladder import Advice, Diagnosis, StageCost

__all__ = ["advice_lines", "diagnosis_lines", "facts_of", "ladder_table", "verdict_lines"]

_LEAST_WIDTH, _NAME = 60, 12
Table: TypeAlias = tuple[Sequence[str], list[list[str]]]


def verdict_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """The verdict."""
    return wrapped(result.verdict, max(_LEAST_WIDTH, width), "")


def diagnosis_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """The ladder with bars, the costs of the stages in both readings, what would keep up, and notes."""
    width = max(_LEAST_WIDTH, width)
    facts = [f"the device has work {result.utilization:.0%} of the time"]
    facts += [f"{name}: {fact}" for name, fact in facts_of(result)]
    facts += [f"note: {note}" for note in result.notes]
    below = [line for fact in facts for line in wrapped(fact, width)]
    return [*_ladder_lines(result, width), "", *_cost_lines(result, width), "", *below]


# --- the ladder -------------------------------------------------------------------------------------------------------
def ladder_table(result: Diagnosis) -> Table:
    """A row for each rung, with what it is."""
    size, rows = result.batch_size, []
    for rung in result.rungs:
        time = rung.time
        rates = [] if size is None else [f"{size * time.per_second:,.0f}"]
        interval = f"{1e3 * time.low:.2f}–{1e3 * time.high:.2f}"
        busy = "–" if time.cpu_busy is None else f"{time.cpu_busy:.0%}"
        what = rung.what if rung.measured else f"{rung.what} (not measured: as the line before)"
        rows.append([rung.stage, f"{1e3 * time.seconds:.2f}", *rates, interval, f"{time.per_second:,.2f}", busy, what])
    return ["with", "ms/step", *([] if size is None else ["images/s"]), "from–to", "steps/s", "CPUs busy", ""], rows


def _ladder_lines(result: Diagnosis, width: int) -> list[str]:
    headings, rows = ladder_table(result)
    names = [shortened(rung.stage, _NAME) if rung.measured else f"{shortened(rung.stage, _NAME - 1)}*"
             for rung in result.rungs]  # fmt: skip
    rows = [[name, *row[1:-1]] for name, row in zip(names, rows, strict=True)]
    longest = max(rung.time.seconds for rung in result.rungs)
    bars = [rung.time.seconds / longest for rung in result.rungs]
    optional = ["CPUs busy", "from–to", "steps/s", "images/s"]
    if result.batch_size is not None:  # steps/s say the same as images/s
        optional[1:3] = ["steps/s", "from–to"]
    lines = table(headings[:-1], rows, width, bars=bars, optional=optional)
    return lines if all(rung.measured for rung in result.rungs) else [*lines, "* not measured: as the line before"]


def _cost_lines(result: Diagnosis, width: int) -> list[str]:
    costs = [cost for cost in result.costs if cost.stage not in ("random", "step")]
    rows = [
        [shortened(cost.stage, _NAME), f"{1e3 * cost.added:.2f}", f"{1e3 * cost.freed:.2f}", _described(cost)]
        for cost in costs
    ]
    return table(["stage", "added ms", "if free", ""], rows, width) if rows else []


def _described(cost: StageCost) -> str:
    parts = [cost.what + ("" if cost.measured else " (computed)")]
    if cost.busy and cost.cpu is not None:
        share = min(1.0, cost.cpu / cost.busy)
        parts.append(f"{1e3 * cost.busy:.1f} ms a batch in a worker, {share:.0%} of it on the CPU")
    return "; ".join(part for part in (*parts, cost.reason) if part)


def facts_of(result: Diagnosis) -> list[tuple[str, str]]:
    """(name, fact): the bound, and the workers and CPUs that would keep up."""
    facts = []
    if result.workers_needed is not None:
        facts.append(("workers", f"{result.workers}; {result.workers_needed:.1f} would keep up with the training"))
    if result.cpus_needed is not None:
        facts.append(("CPUs", f"{result.cpus} may be used; {result.cpus_needed:.1f} would keep up"))
    if result.pinned is not None:
        facts.append(("pinned", f"{1e3 * result.pinned.seconds:.2f} ms a step with batches in page-locked memory"))
    if result.culprit:
        free = "there were enough workers" if result.culprit == "workers" else f"{result.culprit} cost nothing"
        facts.append(("bound", f"{1e3 * result.bound:.1f} ms a step if {free}"))
    return facts


# --- findings ---------------------------------------------------------------------------------------------------------
def advice_lines(advice: Iterable[Advice], width: int = 80) -> list[str]:
    """Advice for a terminal, after an empty line: what, why, how, and what it should bring.

    Commands and code are not wrapped.
    """
    width = max(_LEAST_WIDTH, width)
    lines = list[str]()
    for number, each in enumerate(advice, 1):
        gain = f" (to {1e3 * each.seconds:.1f} ms a step)" if each.seconds is not None and each.gain else ""
        how = [f"   {'how:' if not n else '    '} {line}" for n, line in enumerate(each.how.split("\n"))]
        lines += [f"{number}. {each.title}{gain}", *wrapped(f"   why: {each.why}", width, " " * 8), *how]
    return ["", "advice, the largest predicted gain first:", *lines] if lines else []
