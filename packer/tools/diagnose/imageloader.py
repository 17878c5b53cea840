"""`ImageLoader` cut into stages: storage, read, decode, augment.

The loader runs over the same few samples in the page cache, then over their encoded bytes in memory, then over their
pixels in memory (`tiers`). Its threads, decoder and recipe stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.errors import PipelineError
from packer.tools.diagnose.pipeline import IterablePipeline, Pipeline, Stage, ending, endless
from packer.tools.diagnose.tiers import Tiers
from readers.augment.ops import Stage as OpStage
from readers.loader import ImageLoader
from readers.order.base import Int64s, PlainOrder, Spec
from readers.trace import Trace

__all__ = ["ImageLoaderPipeline"]

_ENDLESS = 1 << 40
_ALONE_SECONDS, _ALONE_BATCHES, _ALONE_ROUNDS = 0.2, 4, 4  # for one thread over each tier, in turns
_LONG_ROUND_SECONDS = 2.0  # no further round begins after this time


@dataclass(frozen=True)
class Repeated(PlainOrder):
    """An order that repeats some samples in an endless epoch.

    rows: rows of the samples, int64 [n]. samples: number of samples in the reader.
    """

    rows: Int64s
    samples: int
    seed: int = 0

    def __len__(self) -> int:
        return _ENDLESS - _ENDLESS % len(self.rows)

    def spec(self) -> Spec:
        return {"kind": "repeated", "samples": self.samples}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return np.asarray(self.rows[positions % len(self.rows)], np.int64)


class ImageLoaderPipeline(Pipeline):
    """An `ImageLoader` cut into stages. distinct: number of different batches to replay."""

    def __init__(self, loader: ImageLoader, distinct: int = 4) -> None:
        self._loader, self.distinct = loader, distinct
        self.workers, self.more_workers, self.warmup = loader.threads, True, loader.prefetch + 1
        count = min(len(loader.reader), distinct * loader.batch_size, len(loader.order))
        if not count or count < loader.batch_size:
            raise PipelineError(f"the loader gives no batch: {count} samples, batches of {loader.batch_size}")
        last = np.arange(
            len(loader.order) - count, len(loader.order), dtype=np.int64
        )  # not read at the start of a loop
        tiers = Tiers.of(loader.reader, list(dict.fromkeys(loader.order.indices(0, last).tolist())))
        self.size_error, self._tiers = tiers.size_error, tiers.readers
        for reader in tiers.readers[1:]:
            reader.prefill(loader.threads)
        self._whole = loader.over(loader.reader, loader.order)
        self.stages = (
            Stage("storage", "the additional time of a cold read"),
            *tiers.stages(self._alone(), loader.decoder, loader.recipe.ops),
        )

    def cached(self, count: int) -> Iterator[Any]:
        if count == len(self.stages):
            return self.from_memory()
        if count:
            return endless(self._over(count, self._loader.threads))
        return endless(self._whole)  # a second call gives the next epoch

    def without(self, number: int) -> Iterator[Any] | None:
        """As in `Pipeline`, for "augment" only: without its ops on pixels. The resize stays, as a batch needs it."""
        ops = self._loader.recipe.ops
        others = [op for op in ops if op.stage is not OpStage.PIXELS]
        if self.stages[number].name != "augment" or len(others) == len(ops):
            return None
        loader, reader = self._loader.with_options(augment=others), self._tiers[0]
        return endless(loader.over(reader, Repeated(np.arange(len(reader)), len(reader))))

    def _over(self, cut: int, threads: int) -> ImageLoader:
        reader = self._tiers[cut - 1]
        return self._loader.over(reader, Repeated(np.arange(len(reader)), len(reader)), threads=threads)

    def record(self, trace: Trace) -> AbstractContextManager[None]:
        return self._loader.record(trace)

    def _alone(self) -> list[tuple[float, float]]:
        """Seconds and CPU seconds of a batch by one thread, over each tier, without a training step.

        The tiers take turns, and the shortest time of each counts, because other processes or a slower CPU can only
        make a time longer.
        """
        start, rounds = time.perf_counter(), list[list[tuple[float, float]]]()
        while len(rounds) < _ALONE_ROUNDS and (not rounds or time.perf_counter() - start < _LONG_ROUND_SECONDS):
            rounds.append([self._by_one_thread(cut) for cut in (1, 2, 3)])
        return [min(times) for times in zip(*rounds, strict=True)]

    def _by_one_thread(self, cut: int) -> tuple[float, float]:
        with ending(endless(self._over(cut, 1))) as batches:
            next(batches)
            start, cpu, steps = time.perf_counter(), time.process_time(), 0
            while steps < _ALONE_BATCHES * self.distinct:
                next(batches)
                steps += 1
                if time.perf_counter() - start > _ALONE_SECONDS:
                    break
            return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps


def make_pipeline(loader: ImageLoader) -> Pipeline:
    """The pipeline of a loader: one stage if it does not decode to RGB, as no cache holds the other pixels."""
    if loader.decode != "RGB":
        return IterablePipeline(loader)
    return ImageLoaderPipeline(loader)
