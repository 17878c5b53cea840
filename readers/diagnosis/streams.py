"""A stream cut into stages: making its items is one of them, since they have no numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from cache.errors import PipelineError
from readers.diagnosis.pipeline import Stage, tree_bytes
from readers.diagnosis.recording import RECORD_BYTES, RECORD_SECONDS, Cuts, own_container
from readers.diagnosis.workers import first_of

__all__ = ["StreamCuts"]


class StreamCuts(Cuts):
    """The first items of the stream of a loader: samples, or batches where the stream makes them itself."""

    def __init__(self, loader: DataLoader[Any], most: int) -> None:
        self._stream = loader.dataset
        name = type(self._stream).__name__
        timed, left, end = list[tuple[Any, float, float]](), RECORD_BYTES, time.perf_counter() + RECORD_SECONDS
        for each in first_of(loader, _Timed(self._stream), None):
            timed.append(each)
            left -= tree_bytes(each[0])
            if len(timed) == most or left < 0 or time.perf_counter() > end:
                break
        if not timed:
            raise PipelineError(f"{name}: gave no sample; a diagnosis needs at least one")
        self._items = [item for item, _, _ in timed]
        self.count = len(timed)
        later = timed[1:] or timed  # the first one also opens files
        means = fmean(seconds for _, seconds, _ in later), fmean(cpu for _, _, cpu in later)
        self.stages = (Stage("loading", name, *means),)
        self.notes = (f"{name} is an IterableDataset, whose samples have no numbers: its work is one stage, 'loading'",)

    def data(self, cut: int) -> Any:
        return _Again(self._items) if cut else self._stream


class _Timed(IterableDataset[Any]):
    """(item, seconds, CPU seconds) of a stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[Any, float, float]]:
        start, cpu = time.perf_counter(), time.thread_time()
        for item in self.stream:
            yield item, time.perf_counter() - start, time.thread_time() - cpu
            start, cpu = time.perf_counter(), time.thread_time()


class _Again(IterableDataset[Any]):
    """The same items without an end; each worker has all of them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return map(own_container, itertools.cycle(self.items))

    def __getitem__(self, number: int) -> Any:
        return self.items[number]
