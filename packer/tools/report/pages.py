"""Report pages: of a diagnosis, of a record of utilisation, and of two records compared."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

from cache.messages import human_seconds
from cache.system import affinity
from packer.tools.diagnose.ladder import Advice, Diagnosis, facts_of, ladder_table
from packer.tools.monitor import Usage
from packer.tools.monitor.record import (
    Comparison,
    HeatRow,
    comparison_tables,
    format_value,
    percentiles_table,
    read_usage,
)
from packer.tools.report import Page, charts

__all__ = ["command_line", "comparison_page", "diagnosis_page", "usage_page"]

_METHOD = (
    "The ladder: each line is the time of a step when one more stage of the loader runs for real, from the training "
    "step back to storage; earlier stages have their results in memory.",
    "Added is the cost of a stage when all earlier stages are free. If free is the gain of a step if this stage "
    "alone cost nothing: measured for the costliest stages, computed for the others. The verdict follows the second.",
    "Times are medians of blocks of steps; the interval has the median in 93 % of all cases.",
)
_PACKAGES = ("packer-vision", "torch", "numpy", "nvidia-dali-cuda120", "simplejpeg", "pillow")


def diagnosis_page(result: Diagnosis, title: str, command: str) -> Page:
    """The report of a diagnosis. title: the subject of the diagnosis; command: the command that repeats it."""
    page = Page(title, lead=_sentence(result.verdict))
    step, full = result.step, result.full
    shares = [
        (_ms(full.seconds), "a step now", f"{_ms(full.low)} to {_ms(full.high)}"),
        (_ms(step.seconds), "if it never waited", "the training step alone"),
        (f"{result.utilization:.0%}", "of the time the device has work", "" if result.batch_size is None else
         f"{result.batch_size * full.per_second:,.0f} images/s of {result.batch_size * step.per_second:,.0f}"),
    ]  # fmt: skip
    page.figures(shares)
    _show_ladder(page, result)
    _show_costs(page, result)
    _show_advice(page, result.advice)
    if result.usage is not None and len(result.usage.times):
        page.section("The machine during the run")
        add_usage(page, result.usage)
    page.section("Method", collapsed=True)
    page.points(_METHOD)
    page.section("Environment", collapsed=True)
    page.facts(environment(command))
    return page


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The running command, quoted for a shell."""
    return shlex.join(["packer", *(sys.argv[1:] if arguments is None else arguments)])


def environment(command: str) -> list[tuple[str, str]]:
    """The conditions of a measurement: command, date, machine and versions."""
    facts = [("Command", command), ("Date", time.strftime("%Y-%m-%d %H:%M %z"))]
    facts.append(("Machine", f"{platform.node()}, {platform.system()} {platform.release()}, {_processor()}"))
    facts.append(("CPUs", f"{os.cpu_count()}, of which this process may use {len(affinity())}"))
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return [*facts, ("Versions", ", ".join(versions))]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _ms(seconds: float) -> str:
    return charts.number(1e3 * seconds, "ms")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _show_ladder(page: Page, result: Diagnosis) -> None:
    rungs = result.rungs
    culprit = [i for i, rung in enumerate(rungs) if rung.stage == result.culprit]
    page.section("The ladder")
    page.text(
        "The time of a step as one more stage of the loader runs for real, from the training step back to storage."
    )
    chart = charts.bars(
        [rung.stage for rung in rungs],
        {"ms a step": [1e3 * rung.time.seconds for rung in rungs]},
        unit="ms",
        low=[1e3 * rung.time.low for rung in rungs],
        high=[1e3 * rung.time.high for rung in rungs],
        strong=culprit,
        line=(1e3 * result.step.seconds, "the step alone"),
    )
    page.chart(chart, "Bars: median time of a step; lines at their ends: the interval of that median.")
    page.table(*ladder_table(result), strong=culprit)


def _show_costs(page: Page, result: Diagnosis) -> None:
    costs = [cost for cost in result.costs if cost.stage not in ("random", "step")]
    strong = [i for i, cost in enumerate(costs) if cost.stage == result.culprit]
    page.section("Two readings of each stage")
    if costs:
        readings = {
            "added by it": [1e3 * cost.added for cost in costs],
            "gained if it were free": [1e3 * cost.freed for cost in costs],
        }
        page.chart(charts.bars([cost.stage for cost in costs], readings, unit="ms", strong=strong), "ms a step")
        rows = []
        for cost in costs:
            alone = "–" if cost.busy is None else _ms(cost.busy)
            on_cpu = "–" if not cost.busy or cost.cpu is None else f"{min(1.0, cost.cpu / cost.busy):.0%}"
            how = "measured" if cost.measured else "computed"
            rows.append([cost.stage, _ms(cost.added), _ms(cost.freed), how, alone, on_cpu, cost.reason])
        headings = ["stage", "added", "if free", "that is", "a batch in one worker", "on the CPU", ""]
        page.table(headings, rows, strong=strong)
    page.facts([(f"{name[0].upper()}{name[1:]}", fact) for name, fact in facts_of(result)])
    if result.notes:
        page.points([f"Note: {note}" for note in result.notes])


def _show_advice(page: Page, advice: Sequence[Advice]) -> None:
    if not advice:
        return
    page.section("What to change")
    for each in advice:
        gain = f"−{_ms(each.gain)} a step" if each.gain > 0 else ""
        note = "" if each.seconds is None else f"Predicted: {_ms(each.seconds)} a step."
        page.card(
            each.title[:1].upper() + each.title[1:], badge=gain, why=_sentence(each.why), code=each.how, note=note
        )


# --- Utilisation over time as parts of a page: heat maps, percentiles, and the values between marks.
_COLUMNS = 120
_MARKS = 60
_SPANS = 40
_SPAN_SERIES = 6
_LEAST_SHARE = 0.05
_HEAT = "Each row is a series, from dark (0) to bright (its limit, or its largest value). Open cells: nothing is known."


def usage_page(usage: Usage, title: str, facts: Sequence[tuple[str, str]] = (), notes: Sequence[str] = ()) -> Page:
    """The report of a record of utilisation."""
    page = Page(title, lead=read_usage(usage))
    page.facts([("host", usage.host), ("time", human_seconds(usage.seconds)), *facts])
    if notes:
        page.points(notes)
    page.section("Over time")
    add_usage(page, usage)
    return page


def add_usage(page: Page, usage: Usage) -> None:
    """Add the heat map, the percentiles and, with marks, the values between marks to the current section."""
    summary = usage.summary()
    if not summary.heat_rows(1):
        page.text("Nothing was sampled.")
        return
    bright = {row.name: format_value(row.full, row.unit) for row in _add_heat_map(page, summary, usage.seconds, _HEAT)}
    headings, rows = percentiles_table(summary)
    rows = [[*row, bright[row[0]]] for row in rows]
    page.table([*headings, "bright is"], rows, caption="Percentiles by time")
    if usage.marks:
        _add_spans(page, summary)


def comparison_page(result: Comparison, names: tuple[str, str]) -> Page:
    """The report of two records: their heat maps on the same scales, one above the other, and their differences."""
    page = Page("Two runs compared", lead=result.verdict)
    page.facts([(f"{which}, {name}", f"{run.host}, {human_seconds(run.seconds)}")
                for which, name, run in zip("AB", names, (result.a, result.b), strict=True)])  # fmt: skip
    page.section("Over time")
    runs = (result.a.summary(), result.b.summary())
    largest: dict[str, float] = {}
    for run in runs:
        for name, spread in run.percentiles().items():
            largest[name] = max(largest.get(name, 0.0), spread.max)
    seconds = max(run.seconds for run in runs)
    for which, run in zip("AB", runs, strict=True):
        series = tuple(entry._replace(full=entry.full or largest.get(entry.name) or None) for entry in run.series)
        if run.heat_rows(1):
            _add_heat_map(page, replace(run, series=series), seconds, f"Run {which}. {_HEAT}")
    page.section("Side by side")
    for headings, rows in comparison_tables(result):
        page.table(headings, rows)
    return page


def _add_heat_map(page: Page, usage: Usage, seconds: float, caption: str) -> list[HeatRow]:
    rows = usage.heat_rows(_COLUMNS, seconds)
    times = [seconds * column / _COLUMNS for column in range(_COLUMNS)]
    marks = [charts.Mark(mark.seconds, mark.name) for mark in usage.marks[:_MARKS]]
    page.chart(charts.heat_map([row.name for row in rows], times, [row.values for row in rows], marks=marks), caption)
    return rows


def _add_spans(page: Page, usage: Usage) -> None:
    """Add a table of minimum, median and maximum between marks, of the most important series."""
    percentiles = usage.percentiles()
    shown = [entry for entry in usage.summary(0).series if entry.unit != "bytes" and "pressure" not in entry.name]
    shown = [entry for entry in shown if entry.unit != "share" or percentiles[entry.name].max >= _LEAST_SHARE][
        :_SPAN_SERIES
    ]
    rows = []
    for mark, span in usage.spans()[:_SPANS]:
        of_span = span.percentiles()
        cells = []
        for entry in shown:
            values = of_span.get(entry.name)
            three = () if values is None else (values.min, values.p50, values.max)
            text = " … ".join(format_value(value, entry.unit) for value in three) or "–"
            cells.append(text.replace(" ", "\u00a0"))
        rows.append([mark.name, *cells])
    page.table(["from mark", *(entry.name for entry in shown)], rows, caption="Smallest … median … largest value")
