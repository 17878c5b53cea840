"""A diagnosis as a page: the verdict first, then what to change, then the evidence. Parts without data are left out."""

from __future__ import annotations

from collections.abc import Sequence

from cache.messages import human_bytes, plural
from packer.report import charts
from packer.report.charts import number
from packer.report.comparisons import add_batch_sizes, add_places, add_usage
from packer.report.page import Page
from readers.diagnosis import Diagnosis
from readers.diagnosis.findings import Applied, Payload

__all__ = ["diagnosis_page"]

_WORTH_SAYING = 0.01  # of the bytes of a step
_METHOD = (
    "Each line of the ladder is the time of a training step when one more stage of the loader runs for real, from the "
    "training step with batches in the memory of the device down to the loader as it is. Batches are a few that are "
    "replayed; the first of each line are not counted.",
    "Added: what a line adds to the one above it. Stages that hide behind the training step add nothing.",
    "If free: what a step gains if this stage alone costs nothing and everything else stays. It is measured for the "
    "stages that cost most and computed for the others. The verdict follows this reading.",
    "Times are medians over blocks of steps; the interval is that of order statistics, from the second to the seventh "
    "of eight blocks, which has the median in 93 % of all cases.",
    "The differential reading is that of J. Mohan et al., “Analyzing and Mitigating Data Stalls in DNN Training”, "
    "PVLDB 14(5), 2021.",
)


def diagnosis_page(result: Diagnosis, title: str, environment: Sequence[tuple[str, str]] = ()) -> Page:
    """The page of a diagnosis. environment: names and values, as versions and the machine. Raises MissingExtraError."""
    page = Page(title, lead=result.verdict)
    _add_figures(page, result)
    _add_advice(page, result)
    _add_applied(page, result.applied)
    _add_ladder(page, result)
    _add_costs(page, result)
    if result.payload is not None:
        _add_payload(page, result.payload)
    if result.batch_sizes is not None:
        add_batch_sizes(page, result.batch_sizes)
    if result.places is not None:
        add_places(page, result.places)
    if result.usage is not None:
        add_usage(page, result.usage)
    if result.notes:
        page.section("Notes")
        page.points(result.notes)
    page.section("How it was measured", collapsed=True)
    page.points(_METHOD)
    page.facts(environment)
    return page


def _add_figures(page: Page, result: Diagnosis) -> None:
    full, step = result.full, result.step
    rate = "" if result.batch_size is None else f"; {number(result.batch_size * full.per_second)} images/s"
    ideal = "" if result.batch_size is None else f"{number(result.batch_size * step.per_second)} images/s"
    page.figures([
        (number(1e3 * full.seconds, "ms"), "a step takes now", f"{_interval(full.low, full.high)} ms{rate}"),
        (number(1e3 * step.seconds, "ms"), "if it never waited for data", ideal),
        (f"{result.utilization:.0%}", "of the time the device has work", ""),
    ])  # fmt: skip


def _add_ladder(page: Page, result: Diagnosis) -> None:
    page.section("What a step takes, stage by stage")
    rungs = [(rung.stage if rung.measured else f"{rung.stage} (not measured)", rung.time) for rung in result.rungs]
    if result.pinned is not None:
        place = next((i for i, rung in enumerate(result.rungs, 1) if rung.stage == "copy"), len(rungs))
        rungs.insert(place, ("copy, if pinned", result.pinned))
    strong = [i for i, (name, _) in enumerate(rungs) if name == result.culprit]
    chart = charts.bars(
        [name for name, _ in rungs],
        {"": [1e3 * time.seconds for _, time in rungs]},
        unit="ms",
        low=[1e3 * time.low for _, time in rungs],
        high=[1e3 * time.high for _, time in rungs],
        strong=strong,
        line=(1e3 * result.step.seconds, "the step alone"),
    )
    page.chart(chart, "Each bar is a step with one more stage running for real, from the training step alone at the "
               "top to the loader as it is at the bottom. Thin lines: intervals of the medians.")  # fmt: skip
    what = {rung.stage: rung.what for rung in result.rungs}
    rate = result.batch_size or 0
    page.table(
        ["with", "what", "ms a step", "from – to", "steps/s", "images/s"],
        [
            [
                name, what.get(name.removesuffix(" (not measured)"), ""), number(1e3 * time.seconds),
                _interval(time.low, time.high), number(time.per_second),
                number(rate * time.per_second) if rate else "–",
            ]
            for name, time in rungs
        ],
        strong=strong,
    )  # fmt: skip


def _add_costs(page: Page, result: Diagnosis) -> None:
    costs = result.costs[1:]
    if not costs:
        return
    page.section("What each stage costs, read in two ways")
    series = {"added": [1e3 * cost.added for cost in costs], "if free": [1e3 * cost.freed for cost in costs]}
    strong = [i for i, cost in enumerate(costs) if cost.stage == result.culprit]
    chart = charts.bars([cost.stage for cost in costs], series, unit="ms", strong=strong)
    page.chart(chart, "Added: what the stage adds when all nearer to the training run already. If free: what a step "
               "gains if this stage alone costs nothing.")  # fmt: skip
    if result.culprit:
        page.text(f"A step takes {number(1e3 * result.bound, 'ms')} at best if {result.culprit} costs nothing.")
    rows = []
    for cost in costs:
        share = f"{min(1.0, cost.cpu / cost.busy):.0%}" if cost.busy and cost.cpu is not None else "–"
        busy = number(None if cost.busy is None else 1e3 * cost.busy)
        freed = f"{'' if cost.measured else '~'}{number(1e3 * cost.freed)}"
        rows.append([cost.stage, cost.what, number(1e3 * cost.added), freed, busy, share, cost.reason])
    headings = ["stage", "what", "added, ms", "if free, ms", "a batch in a worker, ms", "on the CPU", "why they differ"]
    keep = [any(row[column] not in ("", "–") for row in rows) for column in range(len(headings))]
    caption = "" if all(cost.measured for cost in costs) else "~ computed from the times of the stages, not measured"
    page.table(_only(headings, keep), [_only(row, keep) for row in rows], strong=strong, caption=caption)
    facts = []
    if result.workers_needed is not None:
        facts.append(("workers", f"{result.workers}; {result.workers_needed:.1f} would keep up with the training"))
    if result.cpus_needed is not None:
        facts.append(("CPUs", f"{result.cpus} may be used; {result.cpus_needed:.1f} would keep up"))
    page.facts(facts)


def _add_advice(page: Page, result: Diagnosis) -> None:
    if not result.advice:
        return
    page.section("What to change")
    for one in result.advice:
        badge = f"−{number(1e3 * one.gain, 'ms')} a step" if one.gain > 0 else ""
        predicted = "" if one.seconds is None else f"Predicted: {number(1e3 * one.seconds, 'ms')} a step. "
        sources = f"From: {'; '.join(one.sources)}" if one.sources else ""
        page.card(one.title, badge=badge, why=one.why, code=one.how, note=predicted + sources)


def _add_applied(page: Page, applied: Sequence[Applied]) -> None:
    if not applied:
        return
    page.section("Changes that were tried")
    series: dict[str, list[float | None]] = {
        "before": [1e3 * one.before for one in applied],
        "predicted": [None if one.predicted is None else 1e3 * one.predicted for one in applied],
        "measured": [None if one.measured is None else 1e3 * one.measured for one in applied],
    }
    page.chart(charts.bars([one.change.what for one in applied], series, unit="ms"), "Time of a step, each change on "
               "top of those that were kept.")  # fmt: skip
    rows = [
        [
            one.change.what,
            *(number(values[i]) for values in series.values()),
            "–" if one.error is None else f"{100 * one.error:+.0f} %".replace("-", "−"),
            one.problem or ("kept" if one.kept else "undone"),
        ]
        for i, one in enumerate(applied)
    ]
    page.table(["change", "before, ms", "predicted, ms", "measured, ms", "prediction off by", ""], rows)


def _add_payload(page: Page, payload: Payload) -> None:
    page.section("What the batches carry")
    worth = payload.saves > _WORTH_SAYING * payload.bytes
    saves = f" {human_bytes(payload.saves)} of them need not be copied." if worth else ""
    page.text(f"{human_bytes(payload.bytes)} a step, the mean of {plural(payload.batches, 'batch')}.{saves}")
    used = {True: "yes", False: "no", None: "–"}
    rows = [
        [
            field.path or "the batch", field.dtype, "×".join("?" if n is None else str(n) for n in field.shape),
            human_bytes(field.bytes), used[field.used],
            "; ".join(f"{fact.text} (saves {human_bytes(fact.saves)})" for fact in field.facts),
        ]
        for field in payload.fields
    ]  # fmt: skip
    page.table(["field", "type", "shape", "a step", "used", "what stands out"], rows)
    if payload.notes:
        page.points(payload.notes)


def _only(cells: Sequence[str], keep: Sequence[bool]) -> list[str]:
    return [cell for cell, kept in zip(cells, keep, strict=True) if kept]


def _interval(low: float, high: float) -> str:
    return f"{number(1e3 * low, like=1e3 * high)} – {number(1e3 * high)}"
