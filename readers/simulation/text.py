"""A simulation as lines for a terminal: what was simulated, a table, the recommended row, what to mind."""

from __future__ import annotations

import math

from cache.messages import human_bytes, human_seconds, plural, table, wrapped
from readers.simulation.result import Epoch, Row, Simulation

__all__ = [
    "BYTES",
    "BYTES_REMARK",
    "COSTS",
    "COSTS_REMARK",
    "bytes_cells",
    "costs_cells",
    "described",
    "simulation_lines",
]

BYTES = ("order", "cache", "first epoch", "later", "a node", "requests", "of", "nodes", "steps", "peers")
COSTS = ("order", "cache", "memory", "disk", "a step mixes", "a rank", "first epoch", "later", "waiting", "waits for")
_BYTES_OPTIONAL, _COSTS_OPTIONAL = ("peers", "steps", "of"), ("disk", "waiting", "a rank")
BYTES_REMARK = (
    "Bytes from the filesystem, of all nodes and of a node in a later epoch; requests of a later epoch and their mean "
    "size; nodes, steps: the most over the mean in later epochs; peers: bytes from other nodes in a later epoch."
)
COSTS_REMARK = (
    "Of a node: memory of cache, orders and batches ahead, disk of a staged copy. How well a step of all ranks and a "
    "batch of one rank mix, where a global shuffle is 1. The time of an epoch, how much of a later one the GPUs wait, "
    "and what for."
)


def simulation_lines(found: Simulation, width: int = 120) -> list[str]:
    """The whole result."""
    result = [*described(found)]
    tables = (
        (BYTES, bytes_cells, _BYTES_OPTIONAL, BYTES_REMARK),
        (COSTS, costs_cells, _COSTS_OPTIONAL, COSTS_REMARK),
    )
    for headings, cells, optional, remark in tables:
        rows = [cells(row, found) for row in found.rows]
        first, *lines = table(headings, rows, width - 2, left=2, optional=optional)
        result += ["", f"  {first}"]
        result += [f"{'→' if number == found.best else ' '} {line}" for number, line in enumerate(lines)]
        result += wrapped(remark, width, "")
    result += ["", *(line for note in found.notes for line in wrapped(f"note: {note}", width, " " * 6))]
    best = found.rows[found.best]
    result += ["", *wrapped(f"→ {best.name}: {found.reason}", width, "  ")]
    return [*result, *(f"  >>> {line}" for line in best.code)]


def described(found: Simulation) -> list[str]:
    """The set, the job and the machine, in three lines."""
    job, machine = found.job, found.machine
    epochs = f"{job.epochs} epoch{'s' * (job.epochs > 1)}"
    size = human_bytes(found.payload_bytes)
    exact = "all simulated" if found.is_exact else f"of which {found.nodes_simulated:,} were simulated"
    limits = [
        f"{human_bytes(machine.filesystem)}/s filesystem",
        f"{human_bytes(machine.node)}/s a node",
        f"{human_bytes(machine.disk)}/s a disk",
        f"{1e3 * machine.latency_seconds:g} ms a request, {machine.outstanding} at a time",
    ]
    if math.isfinite(machine.filesystem_requests):
        limits.append(f"{machine.filesystem_requests:,.0f} requests/s")
    return [
        f"{found.title}: {plural(found.samples, 'sample')}, {size} in {plural(found.shards, 'shard')}",
        f"{plural(job.nodes, 'node')} x {plural(job.ranks, 'rank')}, {exact}; batches of {job.batch_size}, "
        f"{plural(found.steps, 'step')} of {1e3 * job.step_seconds:g} ms in an epoch, {epochs}"
        + (", nodes serve each other" if job.peers else ""),
        "given: " + ", ".join(limits),
    ]


def bytes_cells(row: Row, found: Simulation) -> tuple[str, ...]:
    """The cells of a row under BYTES."""
    requests = row.mean("requests")
    return (
        row.order,
        row.cache,
        human_bytes(row.first.source),
        human_bytes(row.mean("source")),
        human_bytes(row.mean("source") / found.job.nodes),
        f"{requests:,.0f}",
        human_bytes(row.mean("requested") / requests) if requests else "–",
        f"{row.imbalance('nodes'):.2f}",
        f"{row.imbalance('steps'):.2f}",
        human_bytes(row.mean("peers")) if found.job.peers else "–",
    )


def costs_cells(row: Row, found: Simulation) -> tuple[str, ...]:
    """The cells of a row under COSTS."""
    return (
        row.order,
        row.cache,
        human_bytes(row.memory.total),
        human_bytes(row.memory.disk) if row.memory.disk else "–",
        f"{row.mixes:.2f}",
        f"{row.rank_mixes:.2f}",
        human_seconds(row.first.seconds),
        human_seconds(row.mean("seconds")),
        f"{row.mean('waited') / row.mean('seconds'):.0%}",
        _waits(row.first, row.later),
    )


def _waits(first: Epoch, later: tuple[Epoch, ...]) -> str:
    """What the first epoch waits for, and the later ones most often."""
    names = [epoch.binds for epoch in later]
    common = max(dict.fromkeys(names), key=names.count)
    shown = {"GPU": "nothing"}
    both = dict.fromkeys([shown.get(first.binds, first.binds), shown.get(common, common)])
    return ", then ".join(both)
