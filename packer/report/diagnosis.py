"""A diagnosis as a page: the verdict first, then the evidence, then what to change, then the method."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import metadata

from cache.messages import human_bytes
from packer.report import charts
from packer.report.page import Page
from packer.report.usage import add_usage
from readers.diagnosis.batch_sizes import BatchSizes
from readers.diagnosis.findings import Advice, Applied, Payload
from readers.diagnosis.ladder import Diagnosis
from readers.diagnosis.places import Place, Places

__all__ = ["command_line", "diagnosis_page", "environment"]

_METHOD = (
    "The ladder: each line is the time of a step when one more stage of the loader runs for real, from the training "
    "step back to storage; all stages before it have their results in memory.",
    "Added is what a stage costs with everything before it for free. If free is what a step gains if that stage alone "
    "cost nothing and everything else ran as it does: measured for the stages that cost most, computed for the others. "
    "The verdict follows the second one.",
    "Times are medians of blocks of steps; the interval has the median in 93 % of all cases.",
)
_WORTH_SAYING = 0.01  # of the bytes of a step
_PACKAGES = ("packer-vision", "torch", "numpy", "nvidia-dali-cuda120", "simplejpeg", "pillow")


def diagnosis_page(result: Diagnosis, title: str, command: str) -> Page:
    """The report of a diagnosis. title: what was diagnosed; command: how to repeat it."""
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
    _show_applied(page, result.applied)
    if result.payload is not None:
        _show_payload(page, result.payload)
    if result.batch_sizes is not None:
        _show_batch_sizes(page, result.batch_sizes)
    if result.places is not None:
        _show_places(page, result.places)
    if result.usage is not None and len(result.usage.times):
        page.section("The machine meanwhile")
        add_usage(page, result.usage)
    page.section("Method", collapsed=True)
    page.points(_METHOD)
    page.section("Environment", collapsed=True)
    page.facts(environment(command))
    return page


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command that runs, as one would type it."""
    return shlex.join(["packer", *(sys.argv[1:] if arguments is None else arguments)])


def environment(command: str) -> list[tuple[str, str]]:
    """What figures depend on: command, date, machine, versions."""
    found = [("Command", command), ("Date", time.strftime("%Y-%m-%d %H:%M %z"))]
    found.append(("Machine", f"{platform.node()}, {platform.system()} {platform.release()}, {_processor()}"))
    found.append(("CPUs", f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}"))
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return [*found, ("Versions", ", ".join(versions))]


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
    rungs, size = result.rungs, result.batch_size
    culprit = [i for i, rung in enumerate(rungs) if rung.stage == result.culprit]
    page.section("The ladder")
    page.text("The time of a step as one more stage of the loader runs for real, from the training back to storage.")
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
    rows = []
    for rung in rungs:
        rates = [f"{rung.time.per_second:,.2f}"]
        rates += [] if size is None else [f"{size * rung.time.per_second:,.0f}"]
        busy = "–" if rung.time.cpu_busy is None else f"{rung.time.cpu_busy:.0%}"
        what = rung.what if rung.measured else f"{rung.what} (not measured: as the line before)"
        rows.append([rung.stage, _ms(rung.time.seconds), *rates, busy, what])
    images = [] if size is None else ["images/s"]
    page.table(["with", "a step", "steps/s", *images, "CPUs busy", "what it is"], rows, strong=culprit)


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
        headings = ["stage", "added", "if free", "that is", "a batch in one worker", "on the CPU", "why they differ"]
        if not any(cost.reason for cost in costs):
            headings, rows = headings[:-1], [row[:-1] for row in rows]
        page.table(headings, rows, strong=strong)
    facts = []
    if result.culprit:
        free = "there are enough workers" if result.culprit == "workers" else f"{result.culprit} cost nothing"
        facts.append(("Bound", f"{_ms(result.bound)} a step, if {free}"))
    if result.workers_needed is not None:
        facts.append(("Workers", f"{result.workers}; {result.workers_needed:.1f} would keep up with the training"))
    if result.cpus_needed is not None:
        facts.append(("CPUs", f"{result.cpus} may be used; {result.cpus_needed:.1f} would keep up"))
    if result.pinned is not None:
        facts.append(("Page-locked", f"{_ms(result.pinned.seconds)} a step with batches in page-locked memory"))
    page.facts(facts)
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


def _show_applied(page: Page, applied: Sequence[Applied]) -> None:
    if not applied:
        return
    page.section("What was changed, predicted and measured")
    made = [each for each in applied if each.measured is not None]
    if made:
        times: dict[str, list[float | None]] = {
            "before": [1e3 * each.before for each in made],
            "predicted": [None if each.predicted is None else 1e3 * each.predicted for each in made],
            "measured": [1e3 * (each.measured or 0.0) for each in made],
        }
        page.chart(charts.bars([each.change.what for each in made], times, unit="ms"), "ms a step")
    rows = []
    for each in applied:
        error = "–" if each.error is None else f"{each.error:+.0%}".replace("-", "−")
        predicted, measured = ("–" if s is None else _ms(s) for s in (each.predicted, each.measured))
        came = each.problem or ("kept" if each.kept else "not kept")
        rows.append([each.change.what, _ms(each.before), predicted, measured, error, came])
    page.table(["change", "before", "predicted", "measured", "off by", ""], rows)


def _show_payload(page: Page, payload: Payload) -> None:
    page.section("What a batch carries")
    worth = payload.saves > _WORTH_SAYING * payload.bytes
    saved = f", of which {human_bytes(payload.saves)} need not be copied" if worth else ""
    page.text(f"{human_bytes(payload.bytes)} a step{saved}; {payload.batches} batches were looked at.")
    rows = []
    for field in payload.fields:
        shape = "×".join("?" if n is None else str(n) for n in field.shape) or "a number"
        used = {None: "unknown", True: "yes", False: "no"}[field.used]
        facts = "; ".join(f"{fact.text} (saves {human_bytes(fact.saves)})" for fact in field.facts)
        rows.append([field.path or "the batch", field.dtype, shape, human_bytes(field.bytes), used, facts])
    page.table(["field", "dtype", "shape", "bytes", "used by the step", "what was found"], rows)
    if payload.notes:
        page.points([f"Note: {note}" for note in payload.notes])


def _show_batch_sizes(page: Page, found: BatchSizes) -> None:
    page.section("Batch sizes")
    page.text(_sentence(found.advice))
    good = [row for row in found.rows if row.full is not None and row.step is not None]
    if len(good) > 1:
        series = {
            "with the loader": [row.images for row in good],
            "the step alone": [row.step_images for row in good],
        }
        sizes = [row.batch_size for row in good]
        page.chart(charts.lines(sizes, series, x_label="batch size", y_label="images/s", log_x=True))
    rows = []
    for row in found.rows:
        if row.full is None or row.step is None:
            rows.append([f"{row.batch_size:,}", "–", "–", "–", "–", "–", row.error])
            continue
        device = "" if row.device_bytes is None else f"{human_bytes(row.device_bytes)} on the device"
        times = [_ms(row.step.seconds), _ms(row.full.seconds), f"{row.images:,.0f}", f"{row.waiting:.0%}"]
        rows.append([f"{row.batch_size:,}", *times, human_bytes(row.bytes), device])
    page.table(["batch size", "the step alone", "with the loader", "images/s", "waits", "a batch", ""], rows)
    if found.scaled_from is not None:
        page.text(f"The simulated step is for {found.scaled_from} samples, and in proportion for other sizes.")


def _show_places(page: Page, found: Places) -> None:
    page.section("Where the data are")
    page.text(_sentence(found.advice))
    for command in found.commands:
        page.code(command)
    good = [row for row in found.rows if row.first is not None]
    if good:
        names = [f"{row.path} ({row.form})" for row in good]
        batches = {
            "p50": [1e3 * row.first.batch.p50 for row in good if row.first],
            "p99": [1e3 * row.first.batch.p99 for row in good if row.first],
        }
        caption = f"ms for the reads of a batch of {found.batch_size}, the first time they are read"
        page.chart(charts.bars(names, batches, unit="ms", strong=[found.best] if found.best else []), caption)
    rows = [line for row in found.rows for line in _place_rows(row)]
    page.table(["place", "", "pages", "a read: p50", "p99", "a batch: p50", "p99", "bytes/s"], rows)
    remarks = [(row, row.error or row.note) for row in found.rows]
    remarks += [(row, f"room for {row.holds:.0%} of the set") for row in found.rows if (row.holds or 1.0) < 1]
    page.points([f"{row.path}: {remark}" for row, remark in remarks if remark])


def _place_rows(row: Place) -> list[list[str]]:
    kind = ", ".join(part for part in (row.filesystem, row.form) if part)
    lines = []
    for pages, reads in (("cold", row.cold), ("warm", row.warm)):
        if reads is not None:
            times = [reads.single.p50, reads.single.p99, reads.batch.p50, reads.batch.p99]
            rate = f"{human_bytes(reads.batch.bytes_per_second)}/s"
            lines.append([row.path, kind, pages, *map(_ms, times), rate])
    return lines
