"""A torch DataLoader with one option changed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from cache.errors import PipelineError
from readers.diagnosis.changes import change_at, change_reader, grid_of_field
from readers.diagnosis.findings import Change
from readers.diagnosis.recording import name_of
from readers.reader import Reader

__all__ = ["ChangedLoader", "change_dataloader", "expand", "forwarded", "resized"]

_BATCHES = 4  # at least, that a cache is filled with
_FORWARDED = (
    "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "pin_memory_device",
    "in_order",
)  # fmt: skip


@dataclass(frozen=True)
class ChangedLoader:
    """loader: the new one. convert: what the step needs of a batch on its device. close: ends what was made for it."""

    loader: Any
    convert: Callable[[Any], Any] | None = None
    close: Callable[[], None] = lambda: None


def change_dataloader(loader: DataLoader[Any], change: Change) -> ChangedLoader | None:
    """The loader with one change; None if it has no such option. Raises PackerError and OSError."""
    if change.kind == "workers":
        ahead = (loader.prefetch_factor or 2) if change.value else None
        return _with(loader, num_workers=int(change.value), prefetch_factor=ahead)
    if change.kind == "prefetch":
        return _with(loader, prefetch_factor=int(change.value)) if loader.num_workers else None
    if change.kind == "pin_memory":
        return _with(loader, pin_memory=bool(change.value))
    if change.kind == "batch_size":
        return ChangedLoader(resized(loader, int(change.value)))
    if change.kind == "uint8":
        grid, path = grid_of_field(change.field), str(change.value)
        made = _with(loader, collate_fn=_Quantized(loader.collate_fn, path, grid))
        return ChangedLoader(made.loader, lambda batch: change_at(batch, path, lambda leaf: expand(leaf, grid)))
    return _change_data(loader, change)


def forwarded(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a loader that one with other batches has, too."""
    return {name: getattr(loader, name) for name in _FORWARDED if hasattr(loader, name)}


def resized(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """The same loader with batches of another size, all full; its workers live as long as it does.

    Raises PipelineError for a batch sampler of its own, for a loader that makes no batches, and for too few samples.
    """
    options = forwarded(loader)
    options["persistent_workers"] = loader.num_workers > 0  # so that short epochs do not count their start
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        how: dict[str, Any] = {"batch_size": batch_size, "drop_last": True}
    elif type(loader.batch_sampler) is BatchSampler:
        batches = BatchSampler(loader.batch_sampler.sampler, batch_size, drop_last=True)
        if hasattr(batches.sampler, "__len__") and not len(batches):
            raise PipelineError(f"an epoch has no full batch of {batch_size}")
        how = {"batch_sampler": batches}
    else:
        what = f"batches by {name_of(loader.batch_sampler)}" if loader.batch_sampler is not None else "no batches"
        raise PipelineError(f"a DataLoader with {what} cannot be rebuilt with another batch size")
    return DataLoader(loader.dataset, collate_fn=loader.collate_fn, **how, **options)


def _with(loader: DataLoader[Any], **options: Any) -> ChangedLoader:
    """A copy with other options; DataLoader itself refuses most of them after it was made."""
    other = copy.copy(loader)
    vars(other).update(options, _iterator=None)
    return ChangedLoader(other)


def _change_data(loader: DataLoader[Any], change: Change) -> ChangedLoader | None:
    """Another reader below an `ImageDataset`."""
    data: Any = loader.dataset
    reader = getattr(data, "reader", None)
    if not isinstance(reader, Reader) or loader.batch_sampler is None or not hasattr(data, "__getitem__"):
        return None
    count = max(_BATCHES, loader.num_workers)
    first = [list(batch) for batch in itertools.islice(iter(loader.batch_sampler), count)]
    changed = change_reader(reader, change, sorted({int(i) for batch in first for i in batch}))
    if changed is None:
        return None
    other = copy.copy(data)
    other.reader = changed.reader
    sampler: Any = loader.batch_sampler
    if changed.rows is not None:
        sampler = _Again(loader.batch_sampler, frozenset(changed.rows))
    return ChangedLoader(_with(loader, dataset=other, batch_sampler=sampler).loader, close=changed.close)


class _Again:
    """The first batches of a sampler that have some of the samples, again and again, with only these samples."""

    def __init__(self, sampler: Any, rows: frozenset[int]) -> None:
        self._batches = list(itertools.islice(self._filled(sampler, rows), 2 * _BATCHES))
        if not self._batches:
            raise PipelineError("none of the first batches has samples that were copied")

    @staticmethod
    def _filled(sampler: Any, rows: frozenset[int]) -> Iterator[list[Any]]:
        """Batches as large as those of the sampler."""
        found, size = list[Any](), 0
        for number, batch in enumerate(sampler):
            if number >= 64 * _BATCHES:
                return
            size = max(size, len(batch))
            found += [index for index in batch if int(index) in rows]
            while len(found) >= size:
                yield found[:size]
                del found[:size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._batches)


class _Quantized:
    """A collate function whose result has a field as uint8."""

    def __init__(self, collate: Any, path: str, grid: Sequence[tuple[float, float]]) -> None:
        self._collate, self._path, self._grid = collate, path, grid

    def __call__(self, samples: Any) -> Any:
        return change_at(self._collate(samples), self._path, self._shrink)

    def _shrink(self, values: torch.Tensor) -> torch.Tensor:
        offset, step = _spread(self._grid, values)
        return ((values - offset) / step).round_().clamp_(0, 255).to(torch.uint8)


def expand(values: torch.Tensor, grid: Sequence[tuple[float, float]]) -> torch.Tensor:
    """uint8 as the floats that they stand for."""
    offset, step = _spread(grid, values)
    return values * step + offset


def _spread(grid: Sequence[tuple[float, float]], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and steps in the shape that fits values of [n, channels, …] or [n, …, channels]."""
    shape = [1] * values.ndim
    if len(grid) > 1:
        shape[1 if values.shape[1] == len(grid) else -1] = len(grid)
    offset, step = (torch.tensor(numbers, device=values.device).reshape(shape) for numbers in zip(*grid, strict=True))
    return offset, step
