"""Parts of a diagnosis's page that are measured on demand: batch sizes, places, and the machine over time."""

from __future__ import annotations

from collections.abc import Sequence

from cache.messages import human_bytes
from packer.report import charts
from packer.report.charts import number
from packer.report.page import Page
from readers.diagnosis.batch_sizes import BatchSizes
from readers.diagnosis.places import Place, Places
from readers.usage.record import Usage

__all__ = ["add_batch_sizes", "add_places", "add_usage", "places_page"]

_COLUMNS = 120


def add_batch_sizes(page: Page, found: BatchSizes) -> None:
    """The loop at several batch sizes."""
    page.section("Batch sizes")
    page.text(_sentence(found.advice))
    rows = [row for row in found.rows if row.step is not None and row.full is not None]
    if len(rows) > 1:
        series = {"as it is": [row.images for row in rows], "if it never waited": [row.step_images for row in rows]}
        sizes = [float(row.batch_size) for row in rows]
        page.chart(charts.lines(sizes, series, x_label="batch size", y_label="images/s", log_x=True))
    page.table(
        ["batch size", "ms a step", "the step alone, ms", "images/s", "waits", "a batch", "on the device", ""],
        [
            [
                str(row.batch_size), number(None if row.full is None else 1e3 * row.full.seconds),
                number(None if row.step is None else 1e3 * row.step.seconds),
                number(row.images) if row.full else "–", f"{row.waiting:.0%}" if row.full else "–",
                human_bytes(row.bytes) if row.full else "–",
                "–" if row.device_bytes is None else human_bytes(row.device_bytes), row.error,
            ]
            for row in found.rows
        ],
        strong=[i for i, row in enumerate(found.rows) if row.batch_size == found.enough],
    )  # fmt: skip


def add_places(page: Page, found: Places) -> None:
    """How fast samples are read where the set is, and elsewhere."""
    page.section("Where the data lie")
    page.text(_sentence(found.advice))
    if found.commands:
        page.code("\n".join(found.commands))
    rows = [(_named(row, i), row) for i, row in enumerate(found.rows)]
    drawn = [(i, name, row) for i, (name, row) in enumerate(rows) if row.first is not None]
    if drawn:
        series = {
            "first time": [_milliseconds(row, "cold") for _, _, row in drawn],
            "again": [_milliseconds(row, "warm") for _, _, row in drawn],
        }
        strong = [place for place, (i, _, _) in enumerate(drawn) if i == found.best]
        page.chart(charts.bars([name for _, name, _ in drawn], series, unit="ms", strong=strong),
                   f"Median time to read a batch of {found.batch_size}: from the medium, and again from the page "
                   "cache.")  # fmt: skip
    cells, notes = [], []
    for name, row in rows:
        warm = "again" if row.cold is not None else "from memory"
        for what, reads in (("first", row.cold), (warm, row.warm)):
            if reads is not None:
                times = (reads.single.p50, reads.single.p99, reads.batch.p50, reads.batch.p99)
                room = "–" if row.holds is None else f"{row.holds:.0%}"
                cells.append([name, row.filesystem or "–", what, *(number(1e3 * seconds) for seconds in times),
                              f"{human_bytes(reads.single.bytes_per_second)}/s", room])  # fmt: skip
        opening = "" if row.opening is None else f"opening a file takes {number(1e6 * row.opening.p50, 'µs')}"
        notes += [f"{name}: {'; '.join(filter(None, (row.error, row.note, opening)))}"]
    page.table(["place", "file system", "read", "a sample, p50, ms", "p99", "a batch, p50, ms", "p99", "rate",
                "room for"], cells)  # fmt: skip
    page.points([note for note in notes if not note.endswith(": ")])


def places_page(found: Places, title: str, environment: Sequence[tuple[str, str]] = ()) -> Page:
    """The page of places alone."""
    page = Page(title, lead=found.advice)
    add_places(page, found)
    page.section("How it was measured", collapsed=True)
    page.facts(environment)
    return page


def add_usage(page: Page, usage: Usage) -> None:
    """The machine over time, as a heat map with a mark where each line of the ladder begins."""
    summary = usage.summary()
    rows = summary.heat_rows(_COLUMNS)
    if not rows:
        return
    page.section("What the machine did meanwhile")
    start = float(usage.times[0] - usage.durations[0])
    step = (usage.seconds - start) / _COLUMNS
    marks = [charts.Mark(mark.seconds, mark.name) for mark in usage.marks]
    chart = charts.heat_map(
        [row.name for row in rows],
        [start + step * i for i in range(_COLUMNS)],
        [row.values for row in rows],
        marks=marks,
    )
    page.chart(chart, "From nothing (dark) to all (bright); the table says what 100 % is: a limit, or the most it was.")
    found, full = summary.percentiles(), {row.name: row.full for row in rows}
    page.table(
        ["", "100 % is", "min", "p50", "p90", "p95", "p99", "max", "mean"],
        [
            [one.name, _amount(full[one.name], one.unit), *(_amount(value, one.unit) for value in found[one.name])]
            for one in summary.series
            if one.name in found
        ],
    )  # fmt: skip


def _named(row: Place, number_of_row: int) -> str:
    return f"{row.path} (now)" if number_of_row == 0 else f"{row.path}, {row.form}"


def _milliseconds(row: Place, which: str) -> float | None:
    reads = row.first if which == "cold" else row.warm
    return None if reads is None else 1e3 * reads.batch.p50


def _amount(value: float, unit: str) -> str:
    """A value of a series of usage."""
    if unit in ("bytes", "bytes/s"):
        return human_bytes(value) + unit.removeprefix("bytes")
    if unit == "share":
        return f"{value:.0%}"
    return number(value, "" if unit in ("1", "cores") else "W" if unit == "watts" else unit)


def _sentence(text: str) -> str:
    """With a capital and a full stop, unless it begins with a path."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
