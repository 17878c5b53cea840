"""A torch DataLoader cut into stages.

    storage | read | transform 1 | … | collate | transfer       samples with numbers: `cuts.RecordedCuts`
    storage | read | decode | augment | collate | transfer      our own data sets: `tiers.TierCuts`
    loading | collate | transfer                                a stream: `cuts.StreamCuts`

The loader is rebuilt with its samplers, workers, collate function and options, so that all stages that are not cut run
as in training. A subclass of DataLoader may do more with its batches: the additional time is the stage "wrapper",
before all others.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert

from packer.tools.diagnose.cuts import Cuts, RecordedCuts, StreamCuts, batches_of, duplicate, name_of
from packer.tools.diagnose.pipeline import Pipeline, Stage, endless, map_tree, own_container
from packer.tools.diagnose.tiers import TierCuts
from readers.torch import ImageDataset

__all__ = ["DataLoaderPipeline"]

_FORWARDED = (
    "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "pin_memory_device",
    "in_order",
)  # fmt: skip
_COLLATE_TIMES = 3
_COLLATE_SECONDS = 1.0
_SLOW_BATCH = 1.0  # seconds in a worker; if batches are slower, only one per worker is replayed


class DataLoaderPipeline(Pipeline):
    """A torch DataLoader cut into stages.

    distinct: number of different batches to replay, rounded up to a multiple of the workers.
    """

    def __init__(self, loader: DataLoader[Any], distinct: int = 4) -> None:
        self._loader = loader
        self._stream = isinstance(loader.dataset, IterableDataset)
        self.workers = max(1, loader.num_workers)
        self.more_workers, self.concurrent = loader.num_workers > 0, loader.num_workers > 0
        self.distinct = -(-distinct // self.workers) * self.workers
        # A shared position, so that a second loop continues with samples that the first one did not read.
        self._epochs = endless(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._cuts = self._cut()
        self.notes, self.size_error = self._cuts.notes, self._cuts.size_error
        stages = list(map(self._of_batch, self._cuts.stages))
        if not self._stream:
            stages.insert(0, Stage("storage", "the additional time of a cold read"))
        stateful = sys.modules.get("torchdata.stateful_dataloader")
        known = (DataLoader, *([stateful.StatefulDataLoader] if stateful else []))  # can be rebuilt with other data
        self._wrapped = type(loader) not in known
        if self._wrapped:
            stages.insert(0, Stage("wrapper", f"what {type(loader).__name__} adds to a DataLoader"))
        self._before = len(stages)  # the stages before collate
        self._collates = loader.batch_size is not None or loader.batch_sampler is not None
        self._collates |= loader.collate_fn is not default_convert
        if self._collates:
            stages.append(Stage("collate", name_of(loader.collate_fn), *self._time_collate()))
        if loader.num_workers:
            stages.append(Stage("transfer", "from the worker to this process"))
        self.stages = tuple(stages)
        if sum(stage.seconds or 0.0 for stage in stages) > _SLOW_BATCH:
            self.distinct = self.workers
        prefetch = (loader.prefetch_factor or 2) * loader.num_workers if loader.num_workers else 0
        self.warmup = max(prefetch, self.distinct) + self.workers

    def cached(self, count: int) -> Iterator[Any]:
        count -= self._wrapped
        if count < 0 or (count == 0 and self._stream):
            return endless(self._loader)
        if count == 0:
            return self._batches(self._loader.dataset, self._epochs, self._loader.collate_fn)
        if count + self._wrapped == len(self.stages):
            return self.from_memory(_own)
        free = min(count, self._before - self._wrapped)
        return self._over(self._cuts.data(free - (not self._stream)), count > free)

    def without(self, number: int) -> Iterator[Any] | None:
        if self._stream:
            return None
        if number == self._before and self._collates:
            return self._over(self._cuts.data(0), True)
        data = self._cuts.without(number - self._wrapped - 1) if self._wrapped + 1 < number < self._before else None
        return None if data is None else self._over(data)

    # --- inside -----------------------------------------------------------------------------------------------------
    def _cut(self) -> Cuts:
        """Cut the data set of the loader into stages, over the samples of its first batches."""
        loader = self._loader
        if self._stream:
            self._batch_size, self._sizes = loader.batch_size or 1, [0]
            return StreamCuts(loader, self.distinct * self._batch_size)
        first = list(itertools.islice(self._epochs, self.distinct))
        if loader.batch_sampler is None:
            self._sizes, indices = [0] * len(first), first
        else:
            self._sizes, indices = list(map(len, first)), list(itertools.chain.from_iterable(first))
        self._batch_size = max(1, round(fmean(self._sizes)))
        data = loader.dataset
        if isinstance(data, ImageDataset) and loader.batch_sampler is not None and TierCuts.can_cut(data):
            return TierCuts(loader, data, indices)
        return RecordedCuts(loader, data, indices)

    def _of_batch(self, stage: Stage) -> Stage:
        """Convert the times of a stage from a sample to a batch."""
        seconds, cpu = (stage.seconds or 0.0) * self._batch_size, (stage.cpu_seconds or 0.0) * self._batch_size
        return replace(stage, seconds=seconds, cpu_seconds=cpu, copying=stage.copying * self._batch_size)

    def _over(self, data: Any, collated: bool = False) -> Iterator[Any]:
        """The batches of a data set of slots, or of a stream. collated: whether collating costs nothing."""
        collate = self._loader.collate_fn
        if collated:
            collate = _CollateOnce(collate, self.distinct // self.workers, self.fresh)
        rows = itertools.cycle(range(self._cuts.count))
        slots = [list(itertools.islice(rows, size)) if size else next(rows) for size in self._sizes[: self.distinct]]
        return self._batches(data, itertools.cycle(slots), collate)

    def _batches(self, data: Any, sampler: Any, collate: Any) -> Iterator[Any]:
        loader = self._loader
        options = {name: getattr(loader, name) for name in _FORWARDED if hasattr(loader, name)}
        if self._stream:
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is None:
            options |= {"batch_size": None, "sampler": sampler}
        else:
            options["batch_sampler"] = sampler
        kind = DataLoader if self._wrapped else type(loader)
        return batches_of(kind, loader, data, collate_fn=collate, **options)

    def _time_collate(self) -> tuple[float, float]:
        """Seconds and CPU seconds of collating a batch."""
        data = self._cuts.data(len(self._cuts.stages))
        samples: Any = [own_container(data[number % self._cuts.count]) for number in range(self._batch_size)]
        if not self._sizes[0] and self._loader.batch_size is None:
            samples = samples[0]
        times, end = list[tuple[float, float]](), time.perf_counter() + _COLLATE_SECONDS
        while len(times) < _COLLATE_TIMES and (not times or time.perf_counter() < end):
            start, cpu = time.perf_counter(), time.thread_time()
            self._loader.collate_fn(samples)
            times.append((time.perf_counter() - start, time.thread_time() - cpu))
        return min(times)  # the first call also allocates memory


class _CollateOnce:
    """A collate function that computes each batch once per worker, then gives it from memory."""

    def __init__(self, collate: Callable[[Any], Any], batches: int, fresh: bool) -> None:
        self._collate, self._batches, self._fresh = collate, batches, fresh
        self._made: dict[int, Any] = {}
        self._calls = 0

    def __call__(self, samples: Any) -> Any:
        number, self._calls = self._calls % self._batches, self._calls + 1
        if number not in self._made:
            self._made[number] = self._collate(samples)
        # Tensors of default_collate in a worker are in shared memory and are sent as they are; others are copied.
        return map_tree(
            self._made[number], lambda leaf: leaf if not self._fresh and _is_shared(leaf) else duplicate(leaf)
        )


make_pipeline = DataLoaderPipeline


def _own(leaf: Any) -> Any:
    """A copy of a leaf of a batch, pinned if the leaf is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone().pin_memory() if leaf.is_pinned() else leaf.clone()
    return copy.deepcopy(leaf)


def _is_shared(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or bool(leaf.is_shared())  # type: ignore[no-untyped-call]
