"""A record, and a comparison of two, as lines for a terminal."""

from __future__ import annotations

from cache.messages import human_seconds
from readers.usage.compare import Comparison
from readers.usage.reading import format_value, read_usage
from readers.usage.record import HeatRow, Percentiles, Usage

__all__ = ["comparison_lines", "heat_strip", "usage_lines"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STRIP, _LEAST_STRIP = 24, 12
_LESS = ("p90", "p99")  # left out on a narrow terminal
_CORES = 8
_MARKS = 12


def usage_lines(usage: Usage, columns: int = 110) -> list[str]:
    """Percentiles of each series, with a strip of its values over time; marks; and what that says.

    columns: of the terminal; with less than 110 some percentiles are left out, and the strip is shorter.
    """
    found, summary = usage.percentiles(), usage.summary(_CORES)
    found = {**found, **summary.percentiles()}
    names = [name for name in Percentiles._fields[:-1] if columns >= 110 or name not in _LESS]
    strip = max(_LEAST_STRIP, min(_STRIP, columns - 27 - 10 * len(names)))
    heads = "".join(f"{name:>10s}" for name in names)
    lines = [f"{'':24s}{heads}  0 s to {human_seconds(usage.seconds)}"]
    for row in summary.heat_rows(strip):
        values = found[row.name]._asdict()
        cells = "".join(f"{format_value(values[name], row.unit):>10s}" for name in names)
        lines.append(f"{row.name[:23]:24s}{cells}  {heat_strip(row)}")
    marks = [f"{mark.name} at {human_seconds(mark.seconds)}" for mark in usage.marks[:_MARKS]]
    if marks:
        more = f", and {len(usage.marks) - _MARKS} more" if len(usage.marks) > _MARKS else ""
        lines += ["", f"marks: {', '.join(marks)}{more}"]
    return [*lines, "", read_usage(usage)]


def heat_strip(row: HeatRow) -> str:
    """A character for each value: from empty to full blocks, a dot where nothing is known."""
    return "".join("·" if value is None else _BLOCKS[round(value * (len(_BLOCKS) - 1))] for value in row.values)


def comparison_lines(result: Comparison) -> list[str]:
    """Two records side by side: of each series p50, p95 and the largest value of both, and the ratio of the means."""
    heads = [f"{name} {which}" for name in ("p50", "p95", "max") for which in "AB"]
    lines = [f"{'':24s}" + "".join(f"{head:>11s}" for head in heads) + f"{'mean B/A':>10s}"]
    for row in result.rows:
        found = [None if one is None else one._asdict() for one in (row.a, row.b)]
        values = [None if one is None else one[name] for name in ("p50", "p95", "max") for one in found]
        cells = "".join(f"{format_value(value, row.unit):>11s}" for value in values)
        lines.append(f"{row.name[:23]:24s}{cells}{format_value(row.ratio, '1'):>10s}")
    if result.spans:
        heads = [f"{name} {which}" for name in ("seconds", "steps/s", "images/s") for which in "AB"]
        lines += ["", f"{'from mark':24s}" + "".join(f"{head:>11s}" for head in heads)]
    for span in result.spans[:_MARKS]:
        numbers = (*span.seconds, *span.steps, *span.images)
        lines.append(f"{span.name[:23]:24s}" + "".join(f"{format_value(number, '1'):>11s}" for number in numbers))
    return [*lines, "", result.verdict]
