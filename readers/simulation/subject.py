"""The set that is simulated: the index of one that exists, or columns made for one that does not exist yet.

A set that is only planned has `shards` shards of equally many samples. Sizes are uniform between half and one and a
half of the mean, drawn by the number of the sample, in pairs that add up to twice the mean; between two payloads are
1,024 bytes of headers. Memory: 28 bytes a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from cache.errors import DatasetError
from cache.stores import Store
from readers.index import MemoryColumns
from readers.order.base import Int64s
from readers.order.local import shard_starts
from readers.order.permutation import derive_keys, uniform
from readers.reader import Reader
from readers.strings import Strings
from readers.table import Table

__all__ = ["HEADER_BYTES", "Subject", "planned_set", "subject_of"]

HEADER_BYTES = 1024
_MOST_SAMPLES = 1 << 28


@dataclass(frozen=True, eq=False)
class Subject:
    """reader: whose table is simulated; no payload is read.

    field: the one that training reads.
    starts: the first sample of each shard and the number of all, int64 [shards + 1]; None where shards are not known.
    shard_bytes: sizes of the shards, int64 [shards].
    is_planned: whether the sizes are made up.
    """

    reader: Reader
    field: str
    starts: Int64s | None
    shard_bytes: Int64s
    is_planned: bool = False

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def payload_bytes(self) -> int:
        """Of all samples."""
        return int(self.reader.sizes(self.field).sum())


def subject_of(reader: Reader, field: str = "image") -> Subject:
    """A set that exists. Raises UnknownNameError for a field that it lacks, ValueError where it has no samples."""
    reader.table.number(field)
    if not len(reader):
        raise ValueError(f"{reader.table.title}: no samples, so there is nothing to simulate")
    sizes = np.asarray(reader.table.columns.shard_bytes, np.int64)
    starts = None
    if reader.table.rows is None:
        try:
            starts = shard_starts(reader.split_info)
        except DatasetError:  # a folder, or anything else that is not a packed set
            pass
        if starts is not None and int(starts[-1]) != len(reader):
            starts = None
    return Subject(reader, field, starts, sizes)


def planned_set(samples: int, mean_bytes: int, shards: int) -> Subject:
    """A set that is not packed yet. Raises ValueError."""
    if not 1 <= samples <= _MOST_SAMPLES or mean_bytes < 2 or not 1 <= shards <= samples:
        raise ValueError(
            f"samples={samples}, mean_bytes={mean_bytes}, shards={shards}: expected 1 to {_MOST_SAMPLES:,} samples of "
            f"at least 2 bytes, in 1 to as many shards"
        )
    drawn = uniform(derive_keys(0, 0, "planned sizes")[0], np.arange(samples // 2, dtype=np.int64))
    change: Int64s = ((drawn - 0.5) * mean_bytes).astype(np.int64)
    length = np.full(samples, mean_bytes, np.int64)
    length[: 2 * len(change) : 2] += change
    length[1 : 2 * len(change) : 2] -= change
    size, longer = divmod(samples, shards)
    starts = np.append(0, np.cumsum(size + (np.arange(shards) < longer)))
    shard = np.repeat(np.arange(shards, dtype=np.uint32), np.diff(starts))
    ends = np.cumsum(length + HEADER_BYTES)
    begins = np.append(0, ends)[starts]
    columns = MemoryColumns(
        Strings(np.zeros(0, np.uint8), np.zeros(samples + 1, np.uint64)),
        {"shard": shard, "image.offset": ends - length - begins[shard], "image.length": length},
        shard_bytes=np.diff(begins),
        title="a planned set",
    )
    return Subject(Reader(Table(columns), _NoBytes()), "image", starts, np.diff(begins), is_planned=True)


class _NoBytes(Store):
    """In place of the bytes of a set that does not exist."""

    def read_one(self, row: int, shard: int, offset: int, length: int) -> NoReturn:
        raise DatasetError("a planned set has no bytes to read")
