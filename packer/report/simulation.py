"""A simulation as a page: the recommendation first, then bytes by epoch, nodes, steps, times, and the whole table."""

from __future__ import annotations

import numpy as np

from cache.messages import human_bytes, human_seconds
from packer.report import charts
from packer.report.diagnosis import environment
from packer.report.page import Page
from readers.simulation import Row, Simulation
from readers.simulation.text import BYTES, BYTES_REMARK, COSTS, COSTS_REMARK, bytes_cells, costs_cells, described

__all__ = ["simulation_page"]

_METHOD = (
    "Positions come from the schedules of all ranks, samples from the orders, extents from the index, requests from "
    "the rule that merges reads, what caches keep and what is staged from the code that a training runs.",
    "Times are a model: the slowest of filesystem, network, latency and disk decides when a step's batches are there; "
    "reading continues while the step before is computed, as far as the batches ahead allow.",
)
_LINES = 7  # as many as there are colours


def simulation_page(found: Simulation, command: str) -> Page:
    """The report. command: how to repeat it."""
    best = found.rows[found.best]
    page = Page(f"Reading {found.title} on {found.job.nodes:,} nodes", lead=f"Take {best.name}: {found.reason}.")
    page.figures(
        [
            (human_bytes(best.first.source), "from the filesystem in the first epoch", "of all nodes"),
            (human_bytes(best.mean("source")), "in a later one", f"{human_bytes(found.payload_bytes)} in the set"),
            (
                human_seconds(best.mean("seconds")),
                "a later epoch",
                f"{human_seconds(best.mean('waited'))} of it waiting",
            ),
            (human_bytes(best.memory.total), "of memory on a node", _disk(best)),
        ]
    )
    page.card("How to set it up", badge=best.name, code="\n".join(best.code))
    if found.notes:
        page.points([note[:1].upper() + note[1:] for note in found.notes])
    _show_bytes(page, found)
    _show_times(page, found)
    _show_nodes(page, found)
    _show_steps(page, found)
    page.section("All orders and caches")
    page.table(BYTES, [bytes_cells(row, found) for row in found.rows], strong=[found.best], caption=BYTES_REMARK)
    page.table(COSTS, [costs_cells(row, found) for row in found.rows], strong=[found.best], caption=COSTS_REMARK)
    page.section("Method", collapsed=True)
    page.points(_METHOD)
    page.section("Environment", collapsed=True)
    lines = described(found)
    names = ("Set", "Job", "Machine simulated")
    page.facts([*zip(names, lines, strict=True), *environment(command)])
    return page


def _disk(row: Row) -> str:
    return f"and {human_bytes(row.memory.disk)} of disk" if row.memory.disk else ""


def _show_bytes(page: Page, found: Simulation) -> None:
    page.section("Bytes from the parallel filesystem")
    whole = human_bytes(found.payload_bytes)
    first = [float(row.first.source) for row in found.rows]
    later = [row.mean("source") for row in found.rows]
    for values, caption in ((first, f"The first epoch, all nodes; the set has {whole}."), (later, "A later epoch.")):
        unit, scale = _unit(float(np.median(values)))
        chart = charts.bars(_names(found), {unit: [value / scale for value in values]}, unit=unit, strong=[found.best])
        page.chart(chart, caption)
    if found.job.epochs > 2:
        shown = _chosen(found)
        unit, scale = _unit(max(float(epoch.source) for row in shown for epoch in row.later))
        epochs = [float(epoch.epoch) for epoch in shown[0].later]
        series: dict[str, list[float | None]] = {
            row.name: [epoch.source / scale for epoch in row.later] for row in shown
        }
        page.chart(charts.lines(epochs, series, x_label="epoch", y_label=unit), "Each epoch after the first.")


def _show_times(page: Page, found: Simulation) -> None:
    page.section("Time of an epoch")
    first, later = [row.first.seconds for row in found.rows], [row.mean("seconds") for row in found.rows]
    for values, caption in ((first, "The first epoch."), (later, "A later epoch.")):
        unit, scale = ("min", 60.0) if float(np.median(values)) > 600 else ("s", 1.0)
        line = (found.steps * found.job.step_seconds / scale, "without waiting")
        series = {unit: [value / scale for value in values]}
        page.chart(charts.bars(_names(found), series, unit=unit, strong=[found.best], line=line), caption)


def _names(found: Simulation) -> list[str]:
    return [row.name for row in found.rows]


def _show_nodes(page: Page, found: Simulation) -> None:
    if found.nodes_simulated < 2:
        return
    page.section("Nodes")
    page.text("Bytes that each node reads from the filesystem in all epochs, from the node that reads least to the one "
              "that reads most.")  # fmt: skip
    shown = _chosen(found)
    unit, scale = _unit(max(max(row.node_source) for row in shown))
    shares = np.linspace(0, 100, 21)
    series: dict[str, list[float | None]] = {
        row.name: [float(value) / scale for value in np.percentile(row.node_source, shares)] for row in shown
    }
    page.chart(charts.lines(shares.tolist(), series, x_label="% of the nodes", y_label=f"{unit} a node"))


def _show_steps(page: Page, found: Simulation) -> None:
    shown = [row for row in _chosen(found) if len(row.step_source["first"]) > 2]
    if not shown:
        return
    page.section("Over the first epoch")
    unit, scale = _unit(max(max(row.step_source["first"]) for row in shown))
    count = len(shown[0].step_source["first"])
    steps = np.linspace(0, found.steps - 1, count)
    series: dict[str, list[float | None]] = {
        row.name: [value / scale for value in row.step_source["first"]] for row in shown
    }
    chart = charts.lines(steps.tolist(), series, x_label="step", y_label=f"{unit} a step")
    page.chart(chart, "Bytes of all nodes from the filesystem, without copies to nodes.")


def _chosen(found: Simulation) -> list[Row]:
    """The recommended row, and the one of each other order that keeps as much, or nearly."""
    best = found.rows[found.best]
    rows = {row.order: row for row in found.rows}
    rows |= {row.order: row for row in found.rows if row.cache == best.cache}
    return [best, *(row for name, row in rows.items() if name != best.order)][:_LINES]


def _unit(most: float) -> tuple[str, float]:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if most >= scale:
            return unit, scale
    return "kB", 1e3
