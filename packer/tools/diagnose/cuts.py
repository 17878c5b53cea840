"""Data sets cut into stages: reading, and each member of the transform.

Samples are recorded at each stage. If the loader has workers, they are recorded in a worker like the loader's, so that
files opened by the data set are not open in processes forked later. A stage is then cut out by a data set that starts
from a recorded value. A value is copied at each use, because some transforms change their argument in place.

The transform is the attribute `transform` of the data set, or else its only attribute that is a `Compose`, including
inside `Subset` and similar wrappers. The members of a `Compose` or a `Sequential` run one after the other; any other
transform counts as one member. A transform cannot be cut if the data set does not call it with exactly one value, or
does more with the result than return it in tuples, lists or dictionaries. The whole of `__getitem__` is then one
stage, "read".
"""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from cache.errors import PipelineError
from packer.tools.diagnose.pipeline import Stage, leaves, map_tree, own_container, tree_bytes

__all__ = ["Cuts", "RecordedCuts", "StreamCuts", "batches_of", "duplicate", "name_of"]

RECORD_SECONDS = 5.0
RECORD_BYTES = 256 << 20
_LEAST_SAMPLES = 2


class Cuts(ABC):
    """A data set whose stages can be replaced by memory. Its items have numbers from 0, called slots.

    stages: their seconds are per sample, not per batch, in one undisturbed process. count: number of slots. notes,
    size_error: see `Pipeline`.
    """

    stages: tuple[Stage, ...]
    notes: tuple[str, ...] = ()
    size_error: float = 0.0
    count: int

    @abstractmethod
    def data(self, cut: int) -> Any:
        """The data set with its first `cut` stages in memory; with 0, only the choice of samples is fixed."""

    def without(self, number: int) -> Any | None:
        """The data set with stage `number` alone in memory; None if that is not possible."""
        return None


@dataclass
class _Sample:
    """A sample recorded at each stage. values[m]: the arguments of member m of the transform, one per call.

    seconds, cpu: times of reading and of each member. copying: seconds of copying values[m]. result: the result of
    `__getitem__`, with an `_Output` in place of each output of the transform. is_cut: whether each call of the
    transform has one, and all values could be copied.
    """

    index: Any
    values: list[list[Any]]
    seconds: list[float]
    cpu: list[float]
    copying: list[float]
    result: Any = None
    is_cut: bool = True


@dataclass(frozen=True)
class _Output:
    """A placeholder in a result for the output of a call of the transform."""

    call: int


@dataclass
class _Tap:
    """A stand-in for a transform that runs its members, and records or replaces the values between them.

    replace: (member, values): the results of that member come from memory, one per call.
    """

    transform: Callable[..., Any]
    members: Sequence[Callable[[Any], Any]]
    recording: _Sample | None = None
    replace: tuple[int, Sequence[Any]] | None = None
    outputs: list[Any] = field(default_factory=list)
    calls: int = 0

    def __call__(self, *values: Any, **named: Any) -> Any:
        if len(values) != 1 or named:
            if self.recording is not None:
                self.recording.is_cut = False
            return self.transform(*values, **named)
        value, call, sample = values[0], self.calls, self.recording
        self.calls += 1
        for number, member in enumerate(self.members):
            if sample is not None:
                self._record(sample, number, value)
            if self.replace is not None and self.replace[0] == number and call < len(self.replace[1]):
                value = duplicate(self.replace[1][call])
                continue
            start, cpu = time.perf_counter(), time.thread_time()
            value = member(value)
            if sample is not None:
                sample.seconds[number + 1] += time.perf_counter() - start
                sample.cpu[number + 1] += time.thread_time() - cpu
        if sample is not None:
            self._record(sample, len(self.members), value)
            self.outputs.append(value)
        return value

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the transform, for data sets that use them."""
        if name.startswith("__") or "transform" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.transform, name)

    @staticmethod
    def _record(sample: _Sample, number: int, value: Any) -> None:
        if hasattr(value, "load") and type(value).__module__.startswith("PIL."):
            value.load()  # decodes an image that was only opened, so that copying does not include decoding
        start = time.perf_counter()
        try:
            sample.values[number].append(duplicate(value))
        except Exception:  # from the user's classes
            sample.is_cut = False
        sample.copying[number] += time.perf_counter() - start


_NO_TAP = _Tap(copy.copy, ())  # for a data set without a transform; never called


class RecordedCuts(Cuts):
    """The cuts of any data set with numbered samples.

    loader: the loader of the data set. indices: indices of the samples to record, in order; recording ends early if it
    takes more than 5 s, or 256 MiB at one stage.
    """

    def __init__(self, loader: DataLoader[Any], data: Any, indices: Sequence[Any]) -> None:
        self._whole, tap = _tapped(data)
        self._tap = tap or _NO_TAP
        self._samples = self._record(loader, indices)
        if not all(sample.is_cut for sample in self._samples):
            self._whole, self._tap = data, _NO_TAP
            self._samples = self._record(loader, indices)
            self.notes = (
                f"the transform of {type(data).__name__} is part of 'read': it is not called with a single value that "
                f"can be copied, or __getitem__ does not return its result",
            )
        self.count = len(self._samples)
        names = [f"{type(data).__name__}.__getitem__", *map(name_of, self._tap.members)]
        self.stages = tuple(self._stage(number, name) for number, name in enumerate(names))
        sizes = [tree_bytes(sample.values[0] or sample.result) for sample in self._samples]
        mean = fmean(sizes)
        self.size_error = pstdev(sizes) / mean / len(sizes) ** 0.5 if mean else 0.0

    def data(self, cut: int) -> Any:
        return _Replay(self._whole, self._tap, self._samples, cut)

    def without(self, number: int, data: Any = None) -> Any | None:
        """As in `Cuts`. data: another data set of the same items, cut in place of the recorded one."""
        whole, tap = (self._whole, self._tap) if data is None else _tapped(data)
        return _Replay(whole, tap or _NO_TAP, self._samples, 0, number - 1) if number else None

    def _record(self, loader: DataLoader[Any], indices: Sequence[Any]) -> list[_Sample]:
        recorder, samples = _Recorder(self._whole, self._tap), list[_Sample]()
        left, end = [RECORD_BYTES] * (len(self._tap.members) + 2), time.perf_counter() + RECORD_SECONDS
        for sample in first_of(loader, recorder, indices):
            samples.append(sample)
            for stage, value in enumerate((*sample.values, sample.result)):
                left[stage] -= tree_bytes(value)
            if len(samples) >= _LEAST_SAMPLES and (min(left) < 0 or time.perf_counter() > end):
                break
        return samples

    def _stage(self, number: int, work: str) -> Stage:
        samples = self._samples
        seconds, cpu = (
            fmean(sample.seconds[number] for sample in samples),
            fmean(sample.cpu[number] for sample in samples),
        )
        if not number:
            return Stage("read", work, seconds, cpu)
        copying = fmean(sample.copying[number - 1] for sample in samples)
        kept_bytes = sum(tree_bytes(sample.values[number - 1]) for sample in samples)
        return Stage(f"transform {number}", work, seconds, cpu, copying, kept_bytes)


class _Recorder:
    """A data set whose items are recorded samples of another data set."""

    def __init__(self, whole: Any, tap: _Tap) -> None:
        self.whole, self.tap = whole, tap

    def __getitem__(self, index: Any) -> _Sample:
        tap, zeros = self.tap, [0.0] * (len(self.tap.members) + 1)
        sample = _Sample(index, [[] for _ in zeros], zeros[:], zeros[:], zeros[:])
        self.whole[index]  # so that the times below are those of a read from the page cache
        tap.recording, tap.calls, tap.outputs = sample, 0, []
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            result = self.whole[index]
        finally:
            tap.recording = None
        others = sum(sample.copying)
        sample.seconds[0] = max(0.0, time.perf_counter() - start - sum(sample.seconds) - others)
        sample.cpu[0] = max(0.0, time.thread_time() - cpu - sum(sample.cpu) - others)
        calls = {id(output): call for call, output in enumerate(tap.outputs)}
        sample.result = map_tree(
            result,
            lambda leaf: _Output(calls[id(leaf)]) if id(leaf) in calls else leaf,
            lambda leaf: id(leaf) in calls,
        )
        placed = sorted(leaf.call for leaf in leaves(sample.result) if isinstance(leaf, _Output))
        sample.is_cut &= placed == list(range(len(tap.outputs))) and (bool(placed) or not tap.members)
        tap.outputs = []
        return sample


class _Replay:
    """A data set of recorded samples: the first `cut` stages, or member `alone` of the transform, are in memory.

    whole: the tapped data set, for the stages that are not in memory.
    """

    def __init__(self, whole: Any, tap: _Tap, samples: Sequence[_Sample], cut: int, alone: int = -1) -> None:
        self.whole, self.tap, self.samples, self.cut, self.alone = whole, tap, samples, cut, alone

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, slot: int) -> Any:
        if self.cut == 0:
            self._replace([slot])
            return self.whole[self.samples[slot].index]
        sample = self.samples[slot]
        outputs = []
        for value in sample.values[self.cut - 1]:
            value = duplicate(value)
            for member in self.tap.members[self.cut - 1 :]:
                value = member(value)
            outputs.append(value)
        return map_tree(sample.result, lambda leaf: outputs[leaf.call] if isinstance(leaf, _Output) else leaf)

    def __getitems__(self, slots: Sequence[int]) -> list[Any]:
        many = getattr(self.whole, "__getitems__", None)
        if self.cut == 0 and callable(many):
            self._replace(slots)
            return list(many([self.samples[slot].index for slot in slots]))
        return [self[slot] for slot in slots]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle tensors as bytes: a tensor sent to a spawned process would otherwise need a file descriptor."""
        return {**self.__dict__, "samples": pickle.dumps(self.samples, pickle.HIGHEST_PROTOCOL)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, samples=pickle.loads(state["samples"]))

    def _replace(self, slots: Sequence[int]) -> None:
        self.tap.calls, self.tap.replace = 0, None
        if self.alone >= 0:
            values = [self.samples[slot].values[self.alone + 1] for slot in slots]
            self.tap.replace = self.alone, list(itertools.chain.from_iterable(values))


# --- transforms and values ------------------------------------------------------------------------------------------
def _tapped(data: Any) -> tuple[Any, _Tap | None]:
    """A copy of a data set with a tap in place of its transform; the data set itself and None without a transform."""
    name = _transform_of(data)
    if name is not None:
        transform = getattr(data, name)
        tap = _Tap(transform, _members(transform))
        copied = copy.copy(data)
        setattr(copied, name, tap)
        both = getattr(data, "transforms", None)  # torchvision's pair of image and target transforms
        if getattr(both, "transform", None) is transform:
            copied.transforms = copy.copy(both)
            copied.transforms.transform = tap
        return copied, tap
    inner = getattr(data, "dataset", None)  # Subset and similar wrappers
    if inner is not None and hasattr(inner, "__getitem__"):
        below, inner_tap = _tapped(inner)
        if inner_tap is not None:
            copied = copy.copy(data)
            copied.dataset = below
            return copied, inner_tap
    return data, None


def _transform_of(data: Any) -> str | None:
    """The name of the attribute with the transform of a data set; None if there is none."""
    if callable(getattr(data, "transform", None)):
        return "transform"
    names = [name for name, value in getattr(data, "__dict__", {}).items() if callable(value) and _is_compose(value)]
    return names[0] if len(names) == 1 and "target" not in names[0] else None


def _is_compose(transform: Any) -> bool:
    named = any(kind.__name__ == "Compose" for kind in type(transform).__mro__)
    return named and isinstance(getattr(transform, "transforms", None), list | tuple | torch.nn.ModuleList)


def _members(transform: Any) -> tuple[Callable[[Any], Any], ...]:
    if isinstance(transform, torch.nn.Sequential):
        return tuple(transform)
    return tuple(transform.transforms) if _is_compose(transform) else (transform,)


def duplicate(value: Any) -> Any:
    """Copy a value, so that a transform may change it in place."""
    if type(value).__module__.startswith("PIL."):
        return value.copy()
    return copy.deepcopy(value)


def name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


# --- A stream cut into stages: its items have no numbers, so loading them is one stage.
class StreamCuts(Cuts):
    """The cuts of a stream, with its first items: samples, or batches if the stream makes the batches."""

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
        later = timed[1:] or timed  # the first item also opens files
        means = fmean(seconds for _, seconds, _ in later), fmean(cpu for _, _, cpu in later)
        self.stages = (Stage("loading", name, *means),)
        self.notes = (f"{name} is an IterableDataset, whose samples have no numbers: its work is one stage, 'loading'",)

    def data(self, cut: int) -> Any:
        return _Again(self._items) if cut else self._stream


class _Timed(IterableDataset[Any]):
    """A stream of (item, seconds, CPU seconds) of another stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[Any, float, float]]:
        start, cpu = time.perf_counter(), time.thread_time()
        for item in self.stream:
            yield item, time.perf_counter() - start, time.thread_time() - cpu
            start, cpu = time.perf_counter(), time.thread_time()


class _Again(IterableDataset[Any]):
    """An endless stream of the same items; each worker has all of them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return map(own_container, itertools.cycle(self.items))

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


# --- Items and batches of data sets, made in workers as by a DataLoader.
_TIMEOUT = 120.0  # seconds until a worker without output counts as hung, unless the loader has a timeout
_WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context")


def first_of(loader: DataLoader[Any], data: Any, indices: Sequence[Any] | None) -> Iterator[Any]:
    """The items of `data` with these indices, or all items of a stream.

    If the loader has workers, one worker like them makes the items, one after the other. Without workers, or from the
    first item that cannot be pickled, this process makes them.
    """
    done = 0
    if loader.num_workers:
        options = {name: getattr(loader, name) for name in _WORKER_OPTIONS}
        items = batches_of(
            DataLoader, loader, data, batch_size=None, sampler=indices, num_workers=1, prefetch_factor=1,
            collate_fn=_sealed, **options,
        )  # fmt: skip
        try:
            for sealed in items:
                if sealed is None:
                    break
                yield pickle.loads(sealed)
                done += 1
            else:
                return
        finally:
            items.close()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        yield from itertools.islice(data, done, None) if indices is None else (data[index] for index in indices[done:])
    finally:
        torch.set_num_threads(threads)


def batches_of(kind: Any, loader: DataLoader[Any], data: Any, **options: Any) -> Generator[Any, None, None]:
    """The batches of a loader of class `kind` with these options and the timeout of `loader`; closing ends its workers.

    Raises PipelineError if its workers give no batch within the timeout.
    """
    timeout = (loader.timeout or _TIMEOUT) if loader.num_workers else 0
    iterator = iter(kind(data, timeout=timeout, **options))
    try:
        yield from iterator
    except RuntimeError as error:
        if "timed out after" in str(error):
            raise PipelineError(
                f"the workers of the DataLoader gave no batch for {timeout:g} s: they hang, or the loader needs a "
                f"longer timeout="
            ) from error
        raise
    finally:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def _sealed(item: Any) -> bytes | None:
    """Pickle an item, so that its tensors need no file descriptors; None if it cannot be pickled."""
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception:  # from the user's classes
        return None
