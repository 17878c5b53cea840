"""Changes of a reader or a batch that any of our loaders may be given: a cache tier, a staged copy, 8-bit integers.

What they leave in memory or on a disk is temporary: `close` removes it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import readers
from cache.errors import PipelineError
from cache.filesystem import filesystem_type, free_space
from readers.caching import cached
from readers.diagnosis.findings import Change, PayloadField
from readers.diagnosis.pipeline import map_paths
from readers.reader import Reader
from readers.staging import stage
from readers.table import Table

__all__ = ["MEMORY_BYTES", "ChangedReader", "change_at", "change_reader", "grid_of_field", "rows_that_fit"]

MEMORY_BYTES = 1 << 30  # of a cache
_FILLED = 0.9
_COPIED_BYTES = 2 << 30
_ROOM = 0.5  # of the free space of a directory that a sample of a set may take


@dataclass(frozen=True)
class ChangedReader:
    """reader: the same samples under the same numbers. rows: those to measure with, None for all; of a cache they are
    in it."""

    reader: Reader
    rows: Sequence[int] | None
    close: Callable[[], None]


def change_reader(reader: Reader, change: Change, rows: Sequence[int]) -> ChangedReader | None:
    """A cache over a reader, or a copy of its set. rows: samples that a cache is filled with.

    None for another change. Raises PackerError and OSError.
    """
    if change.kind == "cache":
        return _cached(reader, str(change.value), rows)
    return _staged(reader, str(change.value)) if change.kind == "stage" else None


def rows_that_fit(reader: Reader, rows: Sequence[int]) -> Sequence[int]:
    """The first of these rows, at least one, whose pixels fit into `MEMORY_BYTES`."""
    info = reader.image_info(np.asarray(rows, np.int64))
    pixels = np.cumsum(3 * info.height.astype(np.int64) * info.width)
    return rows[: max(1, int(np.searchsorted(pixels, _FILLED * MEMORY_BYTES)))]


def _cached(reader: Reader, keep: str, rows: Sequence[int]) -> ChangedReader:
    rows = rows_that_fit(reader, rows)
    few = cached(reader.select(indices=list(rows)), MEMORY_BYTES, keep=keep, backend="memfd")
    few.prefill()
    # A cache finds samples by their rows in the columns, which a selection does not change.
    whole = Reader(Table(reader.table.columns, reader.table.rows, few.table.forms), few.store)
    # Only the cache itself is left: the store below it is that of the reader.
    return ChangedReader(whole, rows, lambda: None)


def _staged(reader: Reader, target: str) -> ChangedReader:
    """Copies whole shards, of a large set some of them."""
    place = Path(target)
    room = min(_COPIED_BYTES, int(_ROOM * free_space(place, filesystem_type(place)).bytes))
    shards = reader.split_info.shards
    size = sum(shard.bytes for shard in shards)
    if room < min(size, _COPIED_BYTES // 64):
        raise PipelineError(f"{target}: no room for a copy of some shards: {room} bytes")
    folder = tempfile.mkdtemp(prefix="packer-diagnose-", dir=place)
    try:
        fraction = min(1.0, room / max(1, size))
        with stage(reader.path, folder, splits=(reader.split,), fraction=fraction) as local:
            copy = readers.open(local, reader.split, fallback=reader.path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    there = [shard for shard, each in enumerate(shards) if (Path(local) / each.path).is_file()]
    rows = None
    if len(there) < len(shards):
        shard_of = np.asarray(reader.table.columns.column("shard"))
        shard_of = shard_of if reader.table.rows is None else shard_of[reader.table.rows]
        rows = np.flatnonzero(np.isin(shard_of, there)).tolist()
    whole = Reader(Table(reader.table.columns, reader.table.rows, reader.table.forms), copy.store)
    return ChangedReader(whole, rows, lambda: shutil.rmtree(folder, ignore_errors=True))


# --- 8-bit integers ---------------------------------------------------------------------------------------------------
def grid_of_field(field: PayloadField | None) -> tuple[tuple[float, float], ...]:
    """(offset, step) of the values of a field that could be uint8. Raises PipelineError for another field."""
    for fact in field.facts if field is not None else ():
        if fact.kind == "uint8" and fact.grid:
            return fact.grid
    raise PipelineError(f"{field.path if field else 'a field'}: its values are not 8-bit integers")


def change_at(batch: Any, path: str, function: Callable[[Any], Any]) -> Any:
    """A batch with `function` of the leaf at `path`, as `readers.diagnosis.pipeline.map_paths` names it."""
    return map_paths(batch, lambda found, leaf: function(leaf) if found == path else leaf)
