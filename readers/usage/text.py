"""A record, and a comparison of two: lines for a terminal, and the tables that reports show, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cache.messages import human_seconds, table, wrapped
from readers.usage.compare import Comparison
from readers.usage.reading import format_value, read_usage
from readers.usage.record import HeatRow, Percentiles, Usage

__all__ = ["comparison_lines", "comparison_tables", "heat_strip", "percentiles_table", "usage_lines"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STRIP, _LEAST_STRIP, _NAME = 24, 12, 23
_NAMES = tuple(name for name in Percentiles._fields if name != "mean")
_COMPARED = ("p50", "p95", "max")
_CORES = 8
_MARKS, _SPANS = 12, 40
Table: TypeAlias = tuple[Sequence[str], list[list[str]]]


def percentiles_table(usage: Usage, names: Sequence[str] = Percentiles._fields) -> Table:
    """A row for each series that has a value."""
    found = usage.percentiles()
    series = [one for one in usage.series if one.name in found]
    rows = [[one.name, *(format_value(getattr(found[one.name], name), one.unit) for name in names)] for one in series]
    return ["", *names], rows


def usage_lines(usage: Usage, columns: int = 110) -> list[str]:
    """Percentiles of each series, with a strip of its values over time; marks; and what that says.

    columns: of the terminal; with less than 110 some percentiles are left out, and the strip is shorter.
    """
    summary = usage.summary(_CORES)
    names = [name for name in _NAMES if columns >= 110 or name not in ("p90", "p99")]
    strip = max(_LEAST_STRIP, min(_STRIP, columns - _NAME - 4 - 10 * len(names)))
    headings, rows = percentiles_table(summary, names)
    strips = {row.name: heat_strip(row) for row in summary.heat_rows(strip)}
    rows = [[name[:_NAME], *cells, strips[name]] for name, *cells in rows]
    heading = f"0 s to {human_seconds(usage.seconds)}"
    lines = table([*headings, heading.ljust(strip)], rows, columns)
    marks = [f"{mark.name} at {human_seconds(mark.seconds)}" for mark in usage.marks[:_MARKS]]
    if marks:
        more = f", and {len(usage.marks) - _MARKS} more" if len(usage.marks) > _MARKS else ""
        lines += ["", f"marks: {', '.join(marks)}{more}"]
    return [*lines, "", read_usage(usage)]


def heat_strip(row: HeatRow) -> str:
    """A character for each value: from empty to full blocks, a dot where nothing is known."""
    return "".join("·" if value is None else _BLOCKS[round(value * (len(_BLOCKS) - 1))] for value in row.values)


def comparison_tables(result: Comparison) -> list[Table]:
    """p50, p95 and the largest value of each series in both, and the ratio of the means; then what is between marks."""
    rows = []
    for row in result.rows:
        values = [getattr(one, name, None) for name in _COMPARED for one in (row.a, row.b)]
        rows.append([row.name, *(format_value(value, row.unit) for value in values), format_value(row.ratio, "1")])
    tables: list[Table] = [(["", *_of_both(_COMPARED), "mean B/A"], rows)]
    if result.spans:
        spans = [
            [span.name, *(format_value(number, "1") for number in (*span.seconds, *span.steps, *span.images))]
            for span in result.spans[:_SPANS]
        ]
        tables.append((["from mark", *_of_both(("seconds", "steps/s", "images/s"))], spans))
    return tables


def comparison_lines(result: Comparison, width: int = 100) -> list[str]:
    """Two records side by side, and what that says."""
    series, *spans = comparison_tables(result)
    lines = table(*series, width, optional=_of_both(("max", "p95")))
    for headings, rows in spans:
        lines += ["", *table(headings, rows[:_MARKS], width, optional=_of_both(("steps/s",)))]
    return [*lines, "", *wrapped(result.verdict, width, "")]


def _of_both(names: Sequence[str]) -> list[str]:
    return [f"{name} {which}" for name in names for which in "AB"]
