"""Strips of samples: only the bytes that hold them are read, where an index and the store allow that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cache.errors import DamagedSampleError
from cache.messages import quoted
from cache.stores import Buffer, Extents, Store
from readers.order.base import Int64s
from readers.rows.entries import RowEntry
from readers.rows.strips import Strip, StripRange, find_strip, make_strip, rows_of
from readers.table import Table

__all__ = ["Span", "announce_strips", "read_rows", "read_strips"]

_FIELD = "image"


class Span(NamedTuple):
    """Rows of pixels of an image, as stored: those from top to before bottom."""

    top: int
    bottom: int


class _Plan(NamedTuple):
    """Strips of some samples. which: their positions in what was asked for; parts: the bytes they are made of."""

    which: list[int]
    entries: list[RowEntry]
    ranges: list[StripRange]
    sizes: list[tuple[int, int]]
    parts: Extents


def read_rows(
    table: Table, store: Store, index: Int64s, span: tuple[int, int], read_whole: Callable[[Int64s], list[Buffer]]
) -> Strip:
    """A JPEG with the rows of pixels from top to before bottom of an image, as stored; they have the same pixels there.

    Fewer bytes are read where the index says where rows begin (`packer index --jpeg-rows`) and the store is no cache;
    else it is the whole image. Raises ValueError where there are no such rows, and what `read_strips` raises.
    """
    if not 0 <= span[0] < span[1]:
        raise ValueError(f"rows from {span[0]} to {span[1]} are not rows of an image")
    return read_strips(table, store, index, [Span(*span)], read_whole)[0]


def read_strips(
    table: Table, store: Store, indices: Int64s, spans: Sequence[Span], read_whole: Callable[[Int64s], list[Buffer]]
) -> list[Strip]:
    """A strip of each sample; all of the image where there is no less to be had.

    indices: int64 [k], from 0. read_whole: reads images. Raises DatasetError for damaged entries, DamagedSampleError
    for bytes that do not have their checksum, and what the store and `read_whole` raise.
    """
    found: dict[int, Strip] = {}
    parts, plan = store.of_parts(), _plan(table, indices, spans)
    if parts is not None and plan is not None:
        for k, part in enumerate(parts.read(plan.parts)):
            try:
                found[plan.which[k]] = make_strip(plan.entries[k], part, plan.ranges[k], plan.sizes[k])
            except DamagedSampleError as error:
                raise _named(table, plan, k, error) from error
            except ValueError:
                pass  # its Huffman codes have none for what a strip begins with
    others = [i for i in range(len(indices)) if i not in found]
    if others:
        found |= zip(others, map(Strip, read_whole(indices[others])), strict=True)
    return [found[i] for i in range(len(indices))]


def announce_strips(table: Table, store: Store, indices: Int64s, spans: Sequence[Span]) -> None:
    """Announce strips that will be read soon; returns at once. Raises DatasetError."""
    parts, plan = store.of_parts(), _plan(table, indices, spans)
    which = [] if parts is None or plan is None else plan.which
    if parts is not None and plan is not None:
        parts.prefetch(plan.parts)
    others = [i for i in range(len(indices)) if i not in which]
    if others:
        store.prefetch(table.extents(indices[others], _FIELD))


def _plan(table: Table, indices: Int64s, spans: Sequence[Span]) -> _Plan | None:
    """The strips of those samples that have an entry in the index of rows; None where no sample has."""
    columns = table.columns.jpeg_rows()
    if columns is None or table.forms:
        return None
    rows = table.at(indices)
    which = [i for i, row in enumerate(rows.tolist()) if columns.has(row)]
    if not which:
        return None
    chosen = rows[which]
    extents = table.extents(indices[which], _FIELD)
    checksums = table.columns.field_column(_FIELD, "crc32c")[chosen].tolist()
    heights, widths = (table.columns.column(name)[chosen].tolist() for name in ("height", "width"))
    sizes = list(zip(heights, widths, strict=True))
    entries, ranges = [], []
    for k, i in enumerate(which):
        length, height = int(extents.length[k]), sizes[k][0]
        entry = columns.entry(int(chosen[k]), checksums[k], length, partial(rows_of, height=height))
        entries.append(entry)
        ranges.append(find_strip(entry, sizes[k], *spans[i]))
    starts, stops = (np.array(side, np.int64) for side in zip(*(one[:2] for one in ranges), strict=True))
    return _Plan(which, entries, ranges, sizes, extents._replace(offset=extents.offset + starts, length=stops - starts))


def _named(table: Table, plan: _Plan, k: int, error: DamagedSampleError) -> DamagedSampleError:
    row, shard = int(plan.parts.row[k]) // len(table.columns.fields), int(plan.parts.shard[k])
    return DamagedSampleError(
        f"sample {row} (key {table.columns.keys()[row]!r}) in {table.columns.shard_place(shard)}: {error}; run  "
        f"packer verify {quoted(table.columns.place)}"
    )
