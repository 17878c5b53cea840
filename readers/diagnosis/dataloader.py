"""A torch DataLoader cut into stages: storage, read, each member of the transform, collate, transfer.

Samples of the first batches are recorded once, in this process: the value that enters each member of the transform, and
what `__getitem__` makes of the last one. A stage is then cut out by a data set that starts from a recorded value. The
members of a `Compose` (`.transforms`) are found in the attribute `transform` of the data set, also below `Subset` and
similar wrappers. If a data set does more with the result of its transform than return it, in tuples, lists or
dictionaries, the transform cannot be cut, and the whole of `__getitem__` is one stage, "read".

The loader is rebuilt with its own workers, collate function and options, so that everything that is not cut runs as it
does in training.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from cache.errors import PipelineError
from readers.diagnosis.changed_dataloader import change_dataloader
from readers.diagnosis.findings import Change
from readers.diagnosis.pipeline import Pipeline, Stage, leaves, map_tree, tree_bytes

__all__ = ["DataLoaderPipeline"]

_RECORD_SECONDS = 5.0
_RECORD_BYTES = 256 << 20
_LEAST_SAMPLES = 2
_COLLATE_TIMES = 3
_FORWARDED = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "pin_memory_device",
)  # fmt: skip


@dataclass
class _Recorded:
    """A sample at each stage. values[m]: what enters member m of the transform, for each call of it.

    result: what `__getitem__` returned. seconds, cpu: of reading and of each member.
    """

    index: Any
    values: list[list[Any]] = field(default_factory=list)
    result: Any = None
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class _Tap:
    """Stands in for a transform: runs its members, and records or replaces what passes between them."""

    def __init__(self, members: Sequence[Callable[[Any], Any]]) -> None:
        self.members = members
        self.recording: _Recorded | None = None
        self.replace: tuple[int, _Recorded] | None = None  # (member, sample): that member's result comes from memory
        self.outputs: list[Any] = []
        self.calls = 0
        self.copying = [0.0, 0.0]  # seconds and CPU seconds of recording itself

    def __call__(self, value: Any) -> Any:
        call, self.calls = self.calls, self.calls + 1
        for number, member in enumerate(self.members):
            if self.recording is not None:
                self._record(number, call, value)
            if (
                self.replace is not None
                and self.replace[0] == number
                and call < len(self.replace[1].values[number + 1])
            ):
                value = _duplicate(self.replace[1].values[number + 1][call])
                continue
            start, cpu = time.perf_counter(), time.thread_time()
            value = member(value)
            if self.recording is not None:
                self.recording.seconds[number + 1] += time.perf_counter() - start
                self.recording.cpu[number + 1] += time.thread_time() - cpu
        if self.recording is not None:
            self._record(len(self.members), call, value)
            self.outputs.append(value)
        return value

    def _record(self, number: int, call: int, value: Any) -> None:
        assert self.recording is not None
        start, cpu = time.perf_counter(), time.thread_time()
        if len(values := self.recording.values[number]) == call:
            values.append(_duplicate(value))
        self.copying[0] += time.perf_counter() - start
        self.copying[1] += time.thread_time() - cpu


class _Replay:
    """A data set of recorded samples: `cut` stages of it are in memory (0: none, only the choice of samples is fixed).

    Numbers are slots of the recording. whole: the data set itself with a tap in it, for what is not in memory.
    """

    def __init__(self, whole: Any, tap: _Tap | None, recorded: Sequence[_Recorded], cut: int, alone: int = -1) -> None:
        self.whole, self.tap, self.recorded, self.cut, self.alone = whole, tap, recorded, cut, alone

    def __len__(self) -> int:
        return len(self.recorded)

    def __getitem__(self, slot: int) -> Any:
        sample = self.recorded[slot]
        if self.cut == 0:
            if self.tap is not None:
                self.tap.calls = 0
                self.tap.replace = (self.alone, sample) if self.alone >= 0 else None
            return self.whole[sample.index]
        if self.tap is None:
            return sample.result
        outputs = []
        for value in sample.values[self.cut - 1]:
            value = _duplicate(value)
            for member in self.tap.members[self.cut - 1 :]:
                value = member(value)
            outputs.append(value)
        filling = iter(outputs)
        return map_tree(sample.result, lambda leaf: next(filling) if isinstance(leaf, _Output) else leaf)

    def __getitems__(self, slots: Sequence[int]) -> list[Any]:
        many = getattr(self.whole, "__getitems__", None)
        if self.cut == 0 and self.alone < 0 and callable(many):
            return list(many([self.recorded[slot].index for slot in slots]))
        return [self[slot] for slot in slots]


class _Output:
    """The place in a result where an output of the transform was."""


_OUTPUT = _Output()


class _CollateOnce:
    """A collate function that computes each batch once in each worker and then gives it from memory."""

    def __init__(self, collate: Callable[[Any], Any], batches: int) -> None:
        self._collate, self._batches = collate, batches
        self._made: dict[int, Any] = {}
        self._calls = 0

    def __call__(self, samples: Any) -> Any:
        number, self._calls = self._calls % self._batches, self._calls + 1
        if number not in self._made:
            self._made[number] = self._collate(samples)
        # What default_collate makes in a worker is in shared memory and is sent as it is; anything else is copied.
        return map_tree(self._made[number], lambda leaf: leaf if _is_shared(leaf) else _duplicate(leaf))


class _Slots(Sequence[list[int]]):
    """Batches of slots, the same few again and again."""

    def __init__(self, slots: int, batch_size: int, batches: int) -> None:
        rows = itertools.cycle(range(slots))
        self._batches = [list(itertools.islice(rows, batch_size)) for _ in range(batches)]

    def __len__(self) -> int:
        return 1 << 31

    def __getitem__(self, number: Any) -> Any:
        return self._batches[number % len(self._batches)]

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(self._batches)


class _Endless:
    """The batches of a sampler, epoch after epoch, without an end, so that workers are started once."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for batch in self._sampler:
                empty = False
                yield batch
            if empty:
                raise PipelineError("the batch sampler gave no batch; a diagnosis needs at least one")


class DataLoaderPipeline(Pipeline):
    """See the head of the module. distinct: how many different batches are replayed."""

    def __init__(self, loader: DataLoader[Any], distinct: int = 4) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise PipelineError(
                "a DataLoader of an IterableDataset, or without batches, cannot be cut: it has no numbers of samples"
            )
        self._loader = loader
        self.workers = max(1, loader.num_workers)
        self.more_workers = True
        self.concurrent = loader.num_workers > 0
        prefetch = (loader.prefetch_factor or 2) * loader.num_workers if loader.num_workers else 0
        self.warmup = prefetch + self.workers
        self.distinct = max(self.workers, -(-distinct // self.workers) * self.workers)
        self._first = list(itertools.islice(iter(loader.batch_sampler), self.distinct))
        if not self._first:
            raise PipelineError("the batch sampler gave no batch; a diagnosis needs at least one")
        self._batch_size = len(self._first[0])
        self._whole, self._tap = _tapped(loader.dataset)
        self._recorded, self.notes = self._record()
        names = [_name_of(member) for member in self._tap.members] if self._tap is not None else []
        stages = [Stage("storage", "what a cold read adds")]
        for number, name in enumerate(["read", *(f"transform {i}" for i in range(1, len(names) + 1))]):
            what = type(loader.dataset).__name__ + ".__getitem__" if number == 0 else names[number - 1]
            stages.append(Stage(name, what, *self._means(number)))
        stages.append(Stage("collate", _name_of(loader.collate_fn), *self._time_collate()))
        if loader.num_workers:
            stages.append(Stage("transfer", "from the worker to this process"))
        self.stages = tuple(stages)

    def cached(self, count: int) -> Iterator[Any]:
        if count == 0:
            return self._batches(self._loader.dataset, _Endless(self._loader.batch_sampler), self._loader.collate_fn)
        if count == len(self.stages):
            return self._replayed()
        collate: Any = self._loader.collate_fn
        members = len(self._tap.members) if self._tap is not None else 0
        # Stage 0 is the choice of the samples, stage 1 reading them, and each member of the transform one more.
        if count > 2 + members:
            collate = _CollateOnce(collate, self.distinct // self.workers)
        cut = min(count - 1, 1 + members)
        data = _Replay(self._whole, self._tap, self._recorded, cut)
        return self._batches(data, _Slots(len(self._recorded), self._batch_size, self.distinct), collate)

    def without(self, number: int) -> Iterator[Any] | None:
        members = len(self._tap.members) if self._tap is not None else 0
        if number < 2 or number > 2 + members:
            return None
        collate: Any = self._loader.collate_fn
        if number == 2 + members:
            collate, number = _CollateOnce(collate, self.distinct // self.workers), 1
        data = _Replay(self._whole, self._tap, self._recorded, 0, number - 2)
        return self._batches(data, _Slots(len(self._recorded), self._batch_size, self.distinct), collate)

    def changed(self, change: Change) -> Pipeline | None:
        made = change_dataloader(self._loader, change)
        if made is None:
            return None
        other = copy.copy(self)  # of which only the loader as it is has a meaning
        other._loader, other.convert, other.close = made.loader, made.convert, made.close  # type: ignore[method-assign]
        workers = made.loader.num_workers
        other.workers, other.concurrent = max(1, workers), workers > 0
        other.warmup = (made.loader.prefetch_factor or 2) * workers + other.workers
        return other

    # --- inside -----------------------------------------------------------------------------------------------------
    def _batches(self, data: Any, sampler: Any, collate: Any) -> Iterator[Any]:
        options = {name: getattr(self._loader, name) for name in _FORWARDED if hasattr(self._loader, name)}
        if not self._loader.num_workers:
            options.pop("prefetch_factor", None)
        options["persistent_workers"] = False
        loader: DataLoader[Any] = DataLoader(data, batch_sampler=sampler, collate_fn=collate, **options)
        iterator = iter(loader)
        try:
            yield from iterator
        finally:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()

    def _replayed(self) -> Iterator[Any]:
        batches = self.cached(len(self.stages) - 1)
        try:
            kept = [copy.deepcopy(batch) for batch in itertools.islice(batches, self.distinct)]
        finally:
            batches.close()  # type: ignore[attr-defined]
        return itertools.cycle(kept)

    def _record(self) -> tuple[list[_Recorded], tuple[str, ...]]:
        """Samples of the first batches at each stage, until time or memory is used up; and what could not be cut."""
        recorded, end, left = list[_Recorded](), time.perf_counter() + _RECORD_SECONDS, _RECORD_BYTES
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        try:
            for index in itertools.chain.from_iterable(self._first):
                sample = self._record_one(index)
                if sample is None:  # the transform's result is not found again in what __getitem__ returns
                    what = type(self._loader.dataset).__name__
                    self._whole, self._tap = self._loader.dataset, None
                    recorded, _ = self._record()
                    return recorded, (f"{what}.__getitem__ works on after its transform, which is a part of 'read'",)
                recorded.append(sample)
                left -= sum(tree_bytes(value) for value in (*sample.values, sample.result))
                if len(recorded) >= _LEAST_SAMPLES and (left < 0 or time.perf_counter() > end):
                    break
        finally:
            torch.set_num_threads(threads)
        return recorded, ()

    def _record_one(self, index: Any) -> _Recorded | None:
        stages = 1 + (len(self._tap.members) if self._tap is not None else 0)
        sample = _Recorded(index, [[] for _ in range(stages)], None, [0.0] * stages, [0.0] * stages)
        tap = self._tap
        self._whole[index]  # so that the clocks below are those of a read from the page cache
        if tap is not None:
            tap.recording, tap.calls, tap.outputs, tap.copying = sample, 0, [], [0.0, 0.0]
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            result = self._whole[index]
        finally:
            if tap is not None:
                tap.recording = None
        sample.seconds[0] = time.perf_counter() - start - sum(sample.seconds)
        sample.cpu[0] = time.thread_time() - cpu - sum(sample.cpu)
        sample.result = result
        if tap is not None:
            sample.seconds[0] -= tap.copying[0]
            sample.cpu[0] -= tap.copying[1]
            outputs = {id(output) for output in tap.outputs}
            sample.result = map_tree(result, lambda leaf: _OUTPUT if id(leaf) in outputs else leaf)
            if sum(isinstance(leaf, _Output) for leaf in leaves(sample.result)) != len(tap.outputs) or not outputs:
                return None
        return sample

    def _means(self, number: int) -> tuple[float, float]:
        count = len(self._recorded)
        return (
            self._batch_size * sum(sample.seconds[number] for sample in self._recorded) / count,
            self._batch_size * sum(sample.cpu[number] for sample in self._recorded) / count,
        )

    def _time_collate(self) -> tuple[float, float]:
        members = len(self._tap.members) if self._tap is not None else 0
        data = _Replay(self._whole, self._tap, self._recorded, 1 + members)
        samples = [data[i % len(data)] for i in range(self._batch_size)]
        times = []
        for _ in range(_COLLATE_TIMES):  # the first one also takes memory from the kernel
            start, cpu = time.perf_counter(), time.thread_time()
            self._loader.collate_fn(samples)
            times.append((time.perf_counter() - start, time.thread_time() - cpu))
        return min(times)


def _tapped(data: Any) -> tuple[Any, _Tap | None]:
    """A copy of a data set with a tap in place of its transform; the data set itself and None where there is none."""
    transform = getattr(data, "transform", None)
    if callable(transform):
        members = getattr(transform, "transforms", None)
        tap = _Tap(tuple(members) if isinstance(members, list | tuple | torch.nn.ModuleList) else (transform,))
        found = copy.copy(data)
        found.transform = tap
        both = getattr(data, "transforms", None)  # torchvision's pair of transforms, of image and target
        if getattr(both, "transform", None) is transform:
            found.transforms = copy.copy(both)
            found.transforms.transform = tap
        return found, tap
    inner = getattr(data, "dataset", None)  # Subset, and wrappers like it
    if inner is not None and hasattr(inner, "__getitem__"):
        below, inner_tap = _tapped(inner)
        if inner_tap is not None:
            found = copy.copy(data)
            found.dataset = below
            return found, inner_tap
    return data, None


def _duplicate(value: Any) -> Any:
    """A copy that a transform may change in place."""
    if type(value).__module__.startswith("PIL."):
        return value.copy()
    return copy.deepcopy(value)


def _is_shared(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or bool(leaf.is_shared())  # type: ignore[no-untyped-call]


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
