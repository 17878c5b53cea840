"""Which row to take, why, how to set it up, and what to mind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cache.messages import human_bytes, human_seconds, plural
from readers.caching.budget import Capacity
from readers.order import BlockShuffled, NodeLocal, Order, StagedFirst
from readers.simulation.holding import share_of
from readers.simulation.job import Job, Shuffles
from readers.simulation.result import Row, Simulation
from readers.simulation.subject import Subject

__all__ = ["code_of", "notes_of", "recommend"]

_LIKE = 1.05  # times and bytes that differ by less count as equal
_MIXES = 0.5


def recommend(rows: Sequence[Row]) -> tuple[int, str]:
    """(number, reason) of the row to take: the quickest; of several the one that reads least, then the one whose
    ranks mix best, then the one that keeps least.

    Rows that mix less than half as well as a global shuffle are taken only where all do.
    """
    good = [row for row in rows if row.mixes >= _MIXES] or list(rows)
    quick = [row for row in good if row.seconds <= _LIKE * min(row.seconds for row in good)]
    little = [row for row in quick if row.source <= _LIKE * min(row.source for row in quick)]
    best = min(little, key=lambda row: (-round(row.rank_mixes, 1), row.memory.total + row.memory.disk))
    reason = f"{human_seconds(best.seconds)} for {len(best.epochs)} epochs"
    slowest = max(good, key=lambda row: row.seconds)
    if len(quick) < len(good):
        reason += f", of up to {human_seconds(slowest.seconds)}"
    most = max(quick, key=lambda row: row.source)
    reason += f"; {human_bytes(best.source)} from the filesystem"
    if len(little) < len(quick):
        reason += f", where {most.name} takes as long and reads {human_bytes(most.source)}"
    waited = sum(epoch.waited for epoch in best.epochs) / best.seconds
    binds = [epoch.binds for epoch in best.epochs if epoch.binds != "GPU"]
    if binds:
        reason += f"; the GPUs wait {waited:.0%} of it, for: {', '.join(dict.fromkeys(binds))}"
    else:
        reason += "; the GPUs hardly wait"
    return list(rows).index(best), reason


def code_of(order: Order, capacity: Capacity, subject: Subject, job: Job, shuffles: Shuffles) -> tuple[str, ...]:
    """Lines of Python that set it up in the training."""
    place, split = _place(subject)
    code = ["import cache.node, readers", f"reader = readers.open({place!r}, {split!r})", _order_code(order, shuffles)]
    share = share_of(capacity)
    if not (capacity if share is None else share):
        return tuple(code)
    if isinstance(order, StagedFirst) and not job.peers:
        part = "" if share is None or share >= 1 else f", fraction={share:g}"
        return (
            *code,
            f"with readers.stage({place!r}, background=True, order=order{part}) as local:",
            f"    reader = readers.open(local, {split!r}, fallback={place!r}, patience_seconds=600)",
        )
    if not isinstance(order, NodeLocal) and not job.peers:
        return (*code, f"reader = readers.cached(reader, {capacity if share is None else share!r})")
    kept = repr(capacity) if share is None else repr(min(1.0, share * job.nodes))
    code.append(f"part = (cache.node.detect_ranks().node, {job.nodes})")
    code.append(f"reader = readers.cached(reader, {kept}, partition=part)")
    if job.peers:
        code += ["with readers.share(reader, FOLDER) as shared:  # a folder that all nodes see", "    reader = shared"]
    return tuple(code)


def _order_code(order: Order, shuffles: Shuffles) -> str:
    seed = f"seed={order.seed}"
    if isinstance(order, BlockShuffled):
        blocks = f"block_bytes={shuffles.block_bytes}, window={order.window}"
        return f"order = readers.order.block_shuffled(reader, {seed}, {blocks})"
    if isinstance(order, NodeLocal):
        return f"order = readers.order.NodeLocal(len(reader), {order.nodes}, {order.exchange_every}, {seed})"
    if isinstance(order, StagedFirst):
        return f"order = readers.order.staged_first(reader.split_info, {seed}, window={order.window})"
    return f"order = readers.order.{type(order).__name__}(len(reader), {seed})"


def notes_of(found: Simulation, shuffles: Shuffles, skipped: Sequence[str]) -> Simulation:
    """The simulation with what its reader should know."""
    job, notes = found.job, []
    if found.is_planned:
        notes.append(
            f"the set is planned: {found.samples:,} samples of {human_bytes(found.payload_bytes / found.samples)} on "
            f"average, between half and one and a half of that, in {found.shards:,} shards"
        )
    if not found.is_exact:
        error = max(epoch.error for row in found.rows for epoch in row.epochs)
        notes.append(
            f"{found.nodes_simulated} of {job.nodes:,} nodes were simulated, drawn at random; bytes of an epoch are "
            f"within {human_bytes(error)} of what all read, 95 times of 100; the slowest node of all may read more"
        )
    if found.unread > 0.01 * found.samples:
        notes.append(
            f"a step takes {job.world_size * job.batch_size:,} samples, so {found.unread:,} of {found.samples:,} are "
            f"left out of every epoch (drop_last), other ones each time; smaller batches, or tail='exact', leave less"
        )
    notes += [*_note_on_caches(found), *_note_on_parts(found, shuffles)]
    notes += [
        f"{row.name}: the first step begins after {human_seconds(row.first.first_step)}, all is staged after "
        f"{human_seconds(row.staged_after)}, {human_bytes(row.memory.disk)} on each node"
        for row in found.rows
        if row.memory.disk
    ]
    notes += [f"{name} was left out: the set has no list of shards" for name in skipped]
    for row in found.rows:
        if row.order == "block":
            notes.append(_note_on_blocks(found, row, shuffles))
            break
    notes.append("what the page cache of a node may save is not counted, nor is reading the index")
    return replace(found, notes=tuple(notes))


def _note_on_caches(found: Simulation) -> list[str]:
    """A cache of a global shuffle on many nodes meets few samples twice."""
    if found.job.nodes < 4 or found.job.peers:
        return []
    for row in found.rows:
        last = row.epochs[-1]
        if row.order == "global" and row.memory.cache:
            return [
                f"under a global shuffle a node meets a sample again after {found.job.nodes:,} epochs on average: "
                f"{row.name} served {100 * last.local / max(1, last.payload):.2g} % of epoch {last.epoch}"
            ]
    return []


def _note_on_parts(found: Simulation, shuffles: Shuffles) -> list[str]:
    """Where samples of one part stay together."""
    notes, best = [], found.rows[found.best]
    parts = [row for row in found.rows if row.order == "node-local" and row.memory.cache and not found.job.peers]
    exchanges = range(shuffles.exchange_every - 1, found.job.epochs, shuffles.exchange_every)
    if parts and found.job.nodes > 1:
        often = f"every {shuffles.exchange_every} epochs nodes exchange parts and read the set again"
        shown = f": epoch {exchanges[0]} here" if len(exchanges) else ", which no epoch here does"
        notes.append(f"node-local: {often}{shown}")
    if best.rank_mixes < _MIXES:
        notes.append(
            f"{best.order}: a batch of one rank mixes {best.rank_mixes:.2f} as well as a global shuffle, since its "
            f"samples are from few places; gradients are averaged over all ranks, batch normalisation is not"
        )
    return notes


def _note_on_blocks(found: Simulation, row: Row, shuffles: Shuffles) -> str:
    blocks = min(shuffles.window, int(row.spec["blocks"]))
    window = round(blocks * found.samples / int(row.spec["blocks"]))
    ranks = max(1, round(window / found.job.batch_size))
    size = human_bytes(row.first.requested / max(1, row.first.requests))
    return (
        f"block: a window of {plural(blocks, 'block')} has about {window:,} samples, the batches of "
        f"{plural(ranks, 'rank')}; a request has {size} on average"
    )


def _place(subject: Subject) -> tuple[str, str]:
    columns = subject.reader.table.columns
    return (columns.place or "SET") if not subject.is_planned else "SET", str(getattr(columns, "split", "train"))
