"""What a conversion will take: a few of its samples are packed, in a temporary directory, and the clock is read."""

from __future__ import annotations

import math
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cache.errors import PackerError
from packer.conversion.pack import ShardTask, pack_shard
from packer.conversion.plan import ConvertOptions
from packer.conversion.saved import Prepared
from packer.sources import Source
from packer.sources.base import SomeSamples
from readers.layout import WORK_FOLDER

__all__ = ["Trial", "try_out"]

_FIRST, _MOST = 8, 128
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found of `tried` samples. seconds: of one process, for all samples. shard_bytes: of all shards."""

    tried: int
    seconds: float
    shard_bytes: int


def try_out(source: Source, options: ConvertOptions, prepared: Prepared) -> Trial | None:
    """Pack up to 128 samples of the largest split, for about two seconds; None where that fails.

    They are spread over the split, or its first ones where a source is read from front to back.
    """
    splits = prepared.listing.splits
    largest = max(splits, key=lambda name: len(splits[name]), default=None)
    if largest is None or not len(splits[largest]):
        return None
    count, found = min(_FIRST, len(splits[largest])), None
    with suppress(PackerError, OSError):
        while True:
            spent, size = _pack(source, options, prepared, largest, count)
            share = prepared.plan.samples / count
            found = Trial(count, spent * share, math.ceil(size * share))
            more = min(_MOST, len(splits[largest]), int(count * _SECONDS / max(spent, 1e-9)))
            if more < 2 * count:
                break
            count = more
    return found


def _pack(source: Source, options: ConvertOptions, prepared: Prepared, split: str, count: int) -> tuple[float, int]:
    """(seconds, bytes of the shard) of packing some samples."""
    listing = prepared.listing
    rows = np.arange(count) * (len(listing.splits[split]) // count if listing.shuffles else 1)
    with tempfile.TemporaryDirectory(prefix="packer-dry-run-") as folder:
        Path(folder, WORK_FOLDER).mkdir()
        task = ShardTask(
            source=source,
            spec=prepared.plan.specs[split],
            samples=SomeSamples(listing.splits[split], rows),
            options=replace(options, on_error="skip"),
            skip_strays=listing.skip_strays,
            out=Path(folder),
            shard=prepared.plan.shards[0].name,
            where=listing.where,
        )
        started = time.perf_counter()
        meta = pack_shard(task, _Uncounted())
        return time.perf_counter() - started, meta.shard.bytes


class _Uncounted:
    def report(self, samples: int, payload_bytes: int, left_out: int = 0) -> None: ...

    def stopped(self) -> bool:
        return False
