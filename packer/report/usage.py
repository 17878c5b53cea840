"""Utilisation over time as parts of a page: heat maps, percentiles, and what is between marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cache.messages import human_seconds
from packer.report import charts
from packer.report.page import Page
from packer.tools.monitor import Usage
from packer.tools.monitor.record import (
    Comparison,
    HeatRow,
    comparison_tables,
    format_value,
    percentiles_table,
    read_usage,
)

__all__ = ["add_usage", "comparison_page", "usage_page"]

_COLUMNS = 120
_MARKS = 60
_SPANS = 40
_SPAN_SERIES = 6
_LEAST_SHARE = 0.05
_HEAT = "Each row is a series, from dark (0) to bright (its limit, or its largest value). Open cells: nothing is known."


def usage_page(usage: Usage, title: str, facts: Sequence[tuple[str, str]] = (), notes: Sequence[str] = ()) -> Page:
    """The report of a record."""
    page = Page(title, lead=read_usage(usage))
    page.facts([("host", usage.host), ("time", human_seconds(usage.seconds)), *facts])
    if notes:
        page.points(notes)
    page.section("Over time")
    add_usage(page, usage)
    return page


def add_usage(page: Page, usage: Usage) -> None:
    """To the section that is open: the heat map, the percentiles and, where there are marks, what is between them."""
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
    """The report of two records: their heat maps on the same scales, one over the other, and what differs."""
    page = Page("Two runs compared", lead=result.verdict)
    page.facts([(f"{which}, {name}", f"{run.host}, {human_seconds(run.seconds)}")
                for which, name, run in zip("AB", names, (result.a, result.b), strict=True)])  # fmt: skip
    page.section("Over time")
    runs = (result.a.summary(), result.b.summary())
    largest: dict[str, float] = {}
    for run in runs:
        for name, found in run.percentiles().items():
            largest[name] = max(largest.get(name, 0.0), found.max)
    seconds = max(run.seconds for run in runs)
    for which, run in zip("AB", runs, strict=True):
        series = tuple(replace(one, full=one.full or largest.get(one.name) or None) for one in run.series)
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
    """From min over p50 to max, between marks, of the first series that matter."""
    found = usage.percentiles()
    shown = [one for one in usage.summary(0).series if one.unit != "bytes" and "pressure" not in one.name]
    shown = [one for one in shown if one.unit != "share" or found[one.name].max >= _LEAST_SHARE][:_SPAN_SERIES]
    rows = []
    for mark, span in usage.spans()[:_SPANS]:
        of_span = span.percentiles()
        cells = []
        for one in shown:
            values = of_span.get(one.name)
            three = () if values is None else (values.min, values.p50, values.max)
            text = " … ".join(format_value(value, one.unit) for value in three) or "–"
            cells.append(text.replace(" ", "\u00a0"))
        rows.append([mark.name, *cells])
    page.table(["from mark", *(one.name for one in shown)], rows, caption="Smallest … median … largest value")
