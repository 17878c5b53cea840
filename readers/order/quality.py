"""Read amplification and shuffle quality of an order: the bytes fetched per byte used, and how well it mixes.

Read amplification. A disk, a page cache and a network file system fetch whole units (pages of 4 KiB, or the size of a
request), so a single sample costs every unit that it overlaps. A block is read once for all of its samples, in the runs
that `cache.stores.ranges` plans: small gaps, such as headers of the container, are read as well, large gaps are not.

Shuffle quality. Let x be the number of a sample, scaled to (0, 1). The mean of x over a batch of b drawn without
replacement from n has the variance (1 - 1/n^2) / 12 / b * (n - b) / (n - 1) around 1/2; batches of a stored order that
is sorted by class or time are far from it. Quality is that variance divided by the observed mean square deviation, at
most 1: an order of quality 1 mixes as well as a global shuffle, and stored order is near 0. Quality depends on
positions only, so orders that draw samples unequally (weighted, class-balanced) mix better than their quality says.

The mean square deviation of k batches is an estimate with a relative standard error of sqrt(2 / k). An order within
three standard errors of a global shuffle cannot be distinguished from one, and has quality 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.stores.ranges import plan_reads
from readers.order.base import Int64s, Order, Sequential, derive_keys, permute_each
from readers.order.local import BlockShuffled
from readers.order.woven import Woven
from readers.reader import Reader
from readers.table import ABSENT

PAGE_BYTES = 4096
_MOST_EPOCHS = 64
_RUNS = 32
_SAMPLED = 2048  # samples in an estimate


@dataclass(frozen=True)
class ShuffleReport:
    """Both figures of an order. read_amplification: bytes fetched per byte used, 1 or more. shuffle_quality: 0 to 1."""

    read_amplification: float
    shuffle_quality: float

    def __str__(self) -> str:
        mixes = f"mixes {self.shuffle_quality:.2f} as well as a global shuffle"
        return f"reads {self.read_amplification:.2f} bytes per byte used; {mixes}"


def describe(order: Order, reader: Reader, *, field: str = "", request_bytes: int = PAGE_BYTES) -> ShuffleReport:
    """Both figures for an order over a reader, from index columns only; no payload is read."""
    return ShuffleReport(
        read_amplification(order, reader, field=field, request_bytes=request_bytes), shuffle_quality(order)
    )


def shuffle_quality(order: Order, epoch: int = 0, batch_size: int = 256, batches: int = 1800) -> float:
    """How well batches of consecutive positions mix the set, 0 to 1; the module describes the formula.

    batches: number of batches, spread over `epoch` and, in a small set, over the epochs after it. With 1,800 batches,
        an order within a tenth of a global shuffle has quality 1.
    batch_size: reduced to a quarter of an epoch in a small set.

    A set of fewer than 2 samples has quality 1.
    """
    n = int(order.spec()["samples"])
    size = min(batch_size, len(order) // 4, n // 4) or 1
    starts = np.unique(np.linspace(0, len(order) - size, min(batches, len(order) // size)).astype(np.int64))
    if n < 2 or not starts.size:
        return 1.0
    positions = (starts[:, None] + np.arange(size)).reshape(-1)
    epochs = range(epoch, epoch + min(_MOST_EPOCHS, -(-batches // starts.size)))
    means = np.concatenate([order.indices(e, positions).reshape(-1, size).mean(axis=1) for e in epochs])
    return quality_of(means, size, n)


def mixing(order: Order, batches: tuple[int, ...] = (1, 4, 16, 64), batch_size: int = 256) -> dict[int, float]:
    """The quality of runs of consecutive batches, by the number of batches in a run. Long runs show samples that stay
    together, such as those of a block, even if single batches do not.

    batches: run lengths, ascending, each a multiple of the one before; those of more than half an epoch are left out.
    """
    n = int(order.spec()["samples"])
    size = min(batch_size, len(order) // 4, n // 4) or 1
    counts = [count for count in batches if count * size <= max(size, len(order) // 2)]
    longest = counts[-1] * size
    runs = max(1, min(_RUNS, len(order) // longest))
    starts = np.linspace(0, max(0, len(order) - longest), runs).astype(np.int64)
    positions = (starts[:, None] + np.arange(longest)).reshape(-1)
    if n < 2 or longest > len(order):
        return dict.fromkeys(counts, 1.0)
    epochs = range(min(_MOST_EPOCHS, -(-_RUNS // runs)))
    means = np.concatenate([order.indices(epoch, positions).reshape(-1, size).mean(axis=1) for epoch in epochs])
    return {count: quality_of(means.reshape(-1, count).mean(axis=1), count * size, n) for count in counts}


def step_quality(order: Order, step_samples: int, epoch: int = 0, batch_size: int = 256, batches: int = 1800) -> float:
    """How well the steps of all ranks together mix the set, 0 to 1: `shuffle_quality` for batches drawn at random from
    whole steps of `step_samples` consecutive positions.
    """
    n, steps = int(order.spec()["samples"]), len(order) // step_samples
    size = min(batch_size, step_samples, n // 4) or 1
    if n < 2 or not steps:
        return 1.0
    step, batch = np.arange(batches) % steps, np.repeat(np.arange(batches), size)
    within = np.tile(np.arange(size), batches)
    keys = derive_keys(0, 0, "step quality")
    drawn = permute_each(within, np.full(len(batch), step_samples), batch, keys)
    samples = order.indices(epoch, step[batch] * step_samples + drawn)
    return quality_of(samples.reshape(-1, size).mean(axis=1), size, n)


def quality_of(means: npt.NDArray[np.float64], size: int, n: int) -> float:
    """The quality of k batches of `size` samples out of n. means: of the sample numbers of each batch, float64 [k]."""
    if n < 2 or not len(means) or size >= n:
        return 1.0
    observed = float(np.mean(((means + 0.5) / n - 0.5) ** 2))
    expected = (1 - 1 / n**2) / 12 / size * (n - size) / (n - 1)
    return 1.0 if observed <= expected * (1 + 3 * math.sqrt(2 / len(means))) else expected / observed


def read_amplification(order: Order, reader: Reader, *, field: str = "", request_bytes: int = PAGE_BYTES) -> float:
    """Bytes fetched per payload byte used, in units of `request_bytes`; estimated from about 2,048 samples.

    Each block of `BlockShuffled` and `Woven` counts as one read, and so does stored order; in any other order each
    sample is a read. A reader without byte positions counts as one file per sample. The result is 1 for a set without
    bytes. Raises ValueError if request_bytes is less than 1.
    """
    if request_bytes < 1:
        raise ValueError(f"request_bytes is {request_bytes}, expected at least 1")
    fetched = used = 0
    for samples in _reads(order):
        shard, offset, length = _extents(samples, reader, field)
        plan = plan_reads(shard, offset, length)
        first = plan.run_offset // request_bytes
        last = -(-(plan.run_offset + plan.run_length) // request_bytes)
        fetched += int((last - first)[plan.run_length > 0].sum()) * request_bytes
        used += int(length.sum())
    return max(1.0, fetched / used) if used else 1.0


def requests_per_sample(order: Order, reader: Reader, *, field: str = "", gap_bytes: int = 64 << 10) -> float:
    """GET requests per sample of a remote set; samples of a read with gaps of at most `gap_bytes` share a request.
    Estimated as in `read_amplification`."""
    requests = samples = 0
    for read in _reads(order):
        plan = plan_reads(*_extents(read, reader, field), gap_bytes)
        requests += int((plan.run_length > 0).sum())
        samples += len(read)
    return requests / samples if samples else 0.0


def _reads(order: Order) -> Iterator[Int64s]:
    """The samples of each read, int64 [k], for reads spread over the set."""
    if isinstance(order, Sequential):
        yield np.arange(min(len(order), _SAMPLED), dtype=np.int64)
    elif isinstance(order, BlockShuffled):
        sampled = _spread(order.blocks, max(1, _SAMPLED * order.blocks // max(1, len(order))))
        for block in sampled.tolist():
            yield np.arange(order.starts[block], order.starts[block + 1])
    elif isinstance(order, Woven):
        visits = order.visits(0, _spread(len(order), max(1, _SAMPLED // order.block)))
        yield from order.samples_of(0, np.unique(visits[visits >= 0]))
    else:
        yield from order.indices(0, _spread(len(order), _SAMPLED)).reshape(-1, 1)


def _spread(count: int, number: int) -> Int64s:
    return np.unique(np.linspace(0, count - 1, min(count, number)).astype(np.int64))


def _extents(samples: Int64s, reader: Reader, field: str) -> tuple[Int64s, Int64s, Int64s]:
    """(shard, offset, length) of the field, int64 [k] each, for the samples that have it."""
    field = field or reader.table.main
    offsets = reader.table.field_column(field, "offset")[samples]
    extents = reader.table.extents(samples[offsets != ABSENT], field)
    return extents.shard, extents.offset, extents.length
