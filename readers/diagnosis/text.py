"""A diagnosis for people: lines for a terminal of a given width, and the tables that reports show, too.

A table is its headings and its rows of texts. Where the last heading is "", the last cells are remarks; see
`cache.messages.table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from cache.messages import human_bytes, shortened, table, wrapped
from readers.diagnosis.batch_sizes import BatchSizes
from readers.diagnosis.findings import Advice, Applied, Payload
from readers.diagnosis.ladder import Diagnosis, StageCost
from readers.diagnosis.places import Place, Places

__all__ = [
    "advice_lines",
    "applied_lines",
    "batch_sizes_lines",
    "batch_sizes_table",
    "diagnosis_lines",
    "facts_of",
    "findings_lines",
    "ladder_table",
    "payload_lines",
    "payload_summary",
    "payload_table",
    "places_lines",
    "places_table",
    "verdict_lines",
]

_LEAST_WIDTH, _NAME, _PATH = 60, 12, 24
_WORTH_SAYING = 0.01  # of the bytes of a step
_SCALED = (
    "the simulated step is that of a batch of {}, and longer or shorter in proportion to the batch; a real one often "
    "gains from larger batches"
)
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


def findings_lines(result: Diagnosis, width: int = 80) -> list[str]:
    """What a diagnosis has besides: payload, advice, changes, batch sizes, places; each after an empty line."""
    width = max(_LEAST_WIDTH, width)
    parts = [
        payload_lines(result.payload, width) if result.payload is not None else [],
        advice_lines(result.advice, width),
        applied_lines(result.applied, width),
        batch_sizes_lines(result.batch_sizes, width) if result.batch_sizes is not None else [],
        places_lines(result.places, width) if result.places is not None else [],
    ]
    return [line for part in parts if part for line in ("", *part)]


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
def payload_table(payload: Payload) -> Table:
    """A row for each field, with what of it could be saved."""
    rows = []
    for field in payload.fields:
        shape = "×".join("?" if n is None else str(n) for n in field.shape) or "a number"
        used = {None: "?", True: "yes", False: "no"}[field.used]
        worth = [fact for fact in field.facts if fact.saves > _WORTH_SAYING * payload.bytes]
        facts = "; ".join(f"{fact.text} (saves {human_bytes(fact.saves)})" for fact in worth)
        rows.append([field.path or "the batch", field.dtype, shape, human_bytes(field.bytes), used, facts])
    return ["field", "dtype", "shape", "bytes", "used", ""], rows


def payload_summary(payload: Payload) -> str:
    """Bytes of a step, and how many of them need not be copied."""
    worth = payload.saves > _WORTH_SAYING * payload.bytes
    saved = f", {human_bytes(payload.saves)} of which need not be copied" if worth else ""
    return f"{human_bytes(payload.bytes)} a step{saved}"


def payload_lines(payload: Payload, width: int = 80) -> list[str]:
    """The payload for a terminal."""
    notes = [line for note in payload.notes for line in wrapped(f"note: {note}", width)]
    fields = table(*payload_table(payload), width, left=3) if payload.fields else []
    return [f"payload: {payload_summary(payload)}", *fields, *notes]


def advice_lines(advice: Iterable[Advice], width: int = 80) -> list[str]:
    """Advice for a terminal: what, why, how, and what it should bring. Commands and code are not wrapped."""
    lines = list[str]()
    for number, each in enumerate(advice, 1):
        gain = f" (to {1e3 * each.seconds:.1f} ms a step)" if each.seconds is not None and each.gain else ""
        how = [f"   {'how:' if not n else '    '} {line}" for n, line in enumerate(each.how.split("\n"))]
        lines += [f"{number}. {each.title}{gain}", *wrapped(f"   why: {each.why}", width, " " * 8), *how]
    return ["advice, the largest predicted gain first:", *lines] if lines else []


def applied_lines(applied: Iterable[Applied], width: int = 80) -> list[str]:
    """The changes for a terminal: predicted and measured."""
    lines = list[str]()
    for each in applied:
        found = f"not possible here: {each.problem}"
        if each.measured is not None:
            found = f"{1e3 * each.before:.1f} ms a step before, {1e3 * each.measured:.1f} ms measured"
            if each.predicted is not None and each.error is not None:
                found += f", {1e3 * each.predicted:.1f} ms predicted ({each.error:+.0%})"
            found += "; kept" if each.kept else "; not kept"
        lines += wrapped(f"{each.change.what}: {found}", width)
    return ["applied, each on top of those that were kept:", *lines] if lines else []


def batch_sizes_table(sizes: BatchSizes) -> Table:
    """A row for each size."""
    on_device = any(row.device_bytes is not None for row in sizes.rows)
    headings = ["batch", "step ms", "step images/s", "loop ms", "images/s", "waits", "bytes"]
    rows = []
    for row in sizes.rows:
        cells = [""] * (len(headings) - 1)
        if row.step is not None and row.full is not None:
            cells = [f"{1e3 * row.step.seconds:.2f}", f"{row.step_images:,.0f}", f"{1e3 * row.full.seconds:.2f}"]
            cells += [f"{row.images:,.0f}", f"{row.waiting:.0%}", human_bytes(row.bytes)]
        device = [human_bytes(row.device_bytes) if row.device_bytes is not None else ""] if on_device else []
        rows.append([str(row.batch_size), *cells, *device, row.error])
    return [*headings, *(["on device"] if on_device else []), ""], rows


def batch_sizes_lines(sizes: BatchSizes, width: int = 80) -> list[str]:
    """Batch sizes for a terminal, then what follows from them."""
    most = max(row.images for row in sizes.rows) or 1.0
    bars = [row.images / most for row in sizes.rows]
    lines = table(*batch_sizes_table(sizes), width, bars=bars, optional=("step ms", "loop ms", "bytes"))
    note = wrapped(_SCALED.format(sizes.scaled_from), width) if sizes.scaled_from is not None else []
    return [*lines, *note, *wrapped(sizes.advice, width)]


def places_table(places: Places) -> Table:
    """Rows for the first read and for the second one in each place, and one with what is known of it."""
    rows = list[list[str]]()
    for number, row in enumerate(places.rows):
        name = shortened(row.path, _PATH) if number else "here"
        for cells in _reads_of(row):
            rows.append([name, *cells, ""])
            name = ""
        rows.append([name, *[""] * 7, row.error or _remark(row)])
    return ["place", "read", "p50 ms", "p90", "p99", "MB/s", "batch p50", "batch p99", ""], rows


def _reads_of(row: Place) -> Iterator[list[str]]:
    warm = "warm" if row.cold or row.filesystem not in ("tmpfs", "ramfs") else "memory"
    for pages, reads in (("cold", row.cold), (warm, row.warm)):
        if reads is not None:
            single, batch = reads.single, reads.batch
            times = [f"{1e3 * seconds:.3f}" for seconds in (single.p50, single.p90, single.p99)]
            rate = f"{single.bytes_per_second / 1e6:,.0f}"
            yield [f"{row.form} {pages}", *times, rate, f"{1e3 * batch.p50:.2f}", f"{1e3 * batch.p99:.2f}"]


def _remark(row: Place) -> str:
    opening = f"opening a file takes {1e6 * row.opening.p50:.0f} µs" if row.opening else ""
    room = f"room for {row.holds:.0%} of the set" if row.holds is not None and row.holds < 1 else ""
    return ", ".join(filter(None, (row.filesystem, opening, row.note, room)))


def places_lines(places: Places, width: int = 80) -> list[str]:
    """Places for a terminal, then what to do."""
    first = places.rows[0]
    size = human_bytes(first.bytes / max(1, first.samples))
    start = f"places: reads of {size}, and of batches of {places.batch_size}, in ms; here is {first.path}"
    lines = table(*places_table(places), width, left=2, optional=("p90", "batch p99", "p99"))
    return [*wrapped(start, width), *lines, *wrapped(places.advice, width), *(f"  {c}" for c in places.commands)]
