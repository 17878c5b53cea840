"""The interface of a loader to a diagnosis: its batches, with the first stages of the work replaced by memory.

A pipeline is a list of stages, in the order in which a sample passes through them. `cached(n)` gives the batches of the
loader as if its first n stages cost nothing, because their results for a few samples are in memory. The other stages
run as in training, in the same workers. `cached(0)` is the unchanged loader.

    storage | read | decode | augment                              an ImageLoader
    storage | read | transform 1 | … | collate | transfer          a torch DataLoader
    loading                                                        any other iterable
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.errors import PipelineError
from readers.trace import Trace

__all__ = [
    "IterablePipeline",
    "Pipeline",
    "Stage",
    "Training",
    "ending",
    "endless",
    "in_a_line",
    "leaves",
    "map_tree",
    "module_for",
    "own_container",
    "pinning",
    "random_batches",
    "trace_calls",
    "tree_bytes",
]

# Loaders that can be cut and rebuilt: the module that defines the class, the class, and the module here that cuts it.
_KNOWN = (("readers.loader", "ImageLoader", "imageloader"), ("torch.utils.data", "DataLoader", "dataloader"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the work.

    seconds, cpu_seconds: times of one batch in one undisturbed worker; None if unknown.
    copying: seconds to copy the recorded values of a batch, when this stage is the first to run.
    kept_bytes: bytes of all values replayed before this stage.
    """

    name: str
    what: str = ""
    seconds: float | None = None
    cpu_seconds: float | None = None
    copying: float = 0.0
    kept_bytes: int = 0


class Pipeline(ABC):
    """A loader cut into stages. stages: storage first. workers: processes or threads that share the work."""

    stages: tuple[Stage, ...]
    workers: int = 1
    concurrent: bool = True  # whether workers run while the training step runs
    more_workers: bool = False  # whether the user can choose the number of workers
    distinct: int = 1  # number of different batches to replay
    warmup: int = 1  # batches in flight when a loop begins, whose times are meaningless
    notes: tuple[str, ...] = ()  # stages that could not be cut, and why
    size_error: float = 0.0  # relative error of the mean size of the replayed samples
    _kept: Sequence[Any] = ()
    fresh: bool = False  # whether training changes its batches in place, so that each replayed batch must be a copy

    @abstractmethod
    def cached(self, count: int) -> Iterator[Any]:
        """Endless batches for which the first `count` stages cost nothing; closing the iterator ends the workers."""

    def from_memory(self, keep: Callable[[Any], Any] = lambda leaf: leaf) -> Iterator[Any]:
        """Endless batches from memory: the first `distinct` ones, with all stages done. keep: applied to each leaf."""
        if not self._kept:
            with ending(self.cached(len(self.stages) - 1)) as batches:
                self._kept = [map_tree(batch, keep) for batch in itertools.islice(batches, self.distinct)]
        return map(own_container, itertools.cycle(self._kept))

    def without(self, number: int) -> Iterator[Any] | None:
        """Endless batches for which stage `number` alone costs nothing; None if it cannot be cut out alone."""
        return None

    def record(self, trace: Trace) -> AbstractContextManager[None]:
        """Inside the block, add the work of the loader's threads to the trace, if the loader supports it."""
        return nullcontext()


class IterablePipeline(Pipeline):
    """Any iterable of batches, as a single stage."""

    def __init__(self, loader: Iterable[Any], distinct: int = 4) -> None:
        self._loader = loader
        self.distinct = distinct
        self.stages = (Stage("loading"),)

    def cached(self, count: int) -> Iterator[Any]:
        return self.from_memory() if count else endless(self._loader)


def module_for(loader: Any) -> Any:
    """The module with `make_pipeline` for loaders of this class; None if there is none."""
    for module, kind, part in _KNOWN:
        defined = sys.modules.get(module)  # no loader is of this class if the module was never imported
        if defined is not None and isinstance(loader, getattr(defined, kind)):
            return importlib.import_module(f"packer.tools.diagnose.{part}")
    return None


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader or a sampler, epoch after epoch. Raises PipelineError for an epoch without any."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise PipelineError(f"{type(batches).__name__}: gave no batch; a diagnosis needs at least one")


def in_a_line(error: BaseException) -> str:
    """The class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


@contextmanager
def ending(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Give the batches, and end their workers at the end of the block."""
    try:
        yield batches
    finally:
        getattr(batches, "close", lambda: None)()


def map_tree(value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """Replace each leaf in nested tuples, lists and mappings by `function` of it.

    is_leaf: whether a container counts as a leaf.
    """

    def below(item: Any) -> Any:
        return map_tree(item, function, is_leaf)

    if is_leaf(value):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: below(item) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        copied = copy.copy(value)  # keeps other attributes of its class
        try:
            copied.update(mapped)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return mapped
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(below, value))
    if type(value) in (list, tuple):
        return type(value)(map(below, value))
    return function(value)


def own_container(value: Any) -> Any:
    """The same leaves in new tuples, lists and mappings."""
    return map_tree(value, lambda leaf: leaf)


def leaves(value: Any) -> list[Any]:
    """The leaves of a tree, from left to right."""
    flat: list[Any] = []
    map_tree(value, flat.append)
    return flat


def to_device(batch: Any, device: Any) -> Any:
    """A batch with its tensors on a device; the copies may still be in progress."""
    return map_tree(batch, lambda leaf: leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf)


def tree_bytes(value: Any) -> int:
    """Bytes of the arrays, tensors, images and byte strings in a tree."""
    total = 0
    for leaf in leaves(value):
        if isinstance(leaf, bytes | bytearray):
            total += len(leaf)
        elif type(leaf).__module__.startswith("PIL."):
            total += leaf.width * leaf.height * len(leaf.getbands())
        else:
            total += int(getattr(leaf, "nbytes", 0))
    return total


# --- The use of batches in training: a copy to the device, then a step.
@dataclass(frozen=True)
class Training:
    """The use of a batch after the loader.

    step: a function of a batch on the device. copy: copies a batch to the device; None without a copy. pin: copies a
    batch to page-locked memory; None if the loader's batches are there already, or without a CUDA device.
    synchronize: waits for the device. simulated: whether the step only waits.
    begins: called with the name of each line before it is measured. trace: receives the copies and steps, and the lines
    and waits of the diagnosis.
    """

    step: Callable[[Any], object]
    copy: Callable[[Any], Any] | None = None
    pin: Callable[[Any], Any] | None = None
    synchronize: Callable[[], object] = lambda: None
    simulated: bool = False
    begins: Callable[[str], object] = lambda name: None
    trace: Trace | None = None

    @classmethod
    def of(
        cls,
        step: Callable[[Any], object] | None,
        simulate_step: float | None = None,
        device: Any = None,
        copy: Callable[[Any], Any] | None = None,
        trace: Trace | None = None,
    ) -> Training:
        """Make it from the arguments of `packer.diagnose`. Raises ValueError for contradictory arguments."""
        if (step is None) == (simulate_step is None):
            raise ValueError("give either step, a function of a batch, or simulate_step, in seconds")
        if simulate_step is not None and simulate_step < 0:
            raise ValueError(f"simulate_step={simulate_step}: a time is positive")
        if copy is None and device is not None and str(device) != "cpu":

            def copy(batch: Any) -> Any:
                return to_device(batch, device)

        cuda = cuda_of(device)
        return cls(
            trace_calls(trace, "step", step or (lambda batch: time.sleep(simulate_step or 0.0))),
            None if copy is None else trace_calls(trace, "copy", copy),
            synchronize=(lambda: None) if cuda is None else (lambda: cuda.synchronize(device)),
            simulated=step is None,
            trace=trace,
        )

    def on_device(self, batch: Any) -> Any:
        return batch if self.copy is None else self.copy(batch)

    def run(self, batch: Any) -> None:
        self.step(self.on_device(batch))


def cuda_of(device: Any) -> Any:
    """The module `torch.cuda` for a CUDA device, else None."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and str(device or "").startswith("cuda") else None


def pinning(device: Any, batch: Any) -> Callable[[Any], Any] | None:
    """A function that copies a batch to page-locked memory; None if it is there already, or without a CUDA device."""
    torch: Any = sys.modules.get("torch")
    if cuda_of(device) is None:
        return None

    def is_pageable(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not leaf.is_pinned()

    if not any(is_pageable(leaf) for leaf in leaves(batch)):
        return None
    return lambda batch: map_tree(batch, lambda leaf: leaf.pin_memory() if is_pageable(leaf) else leaf)


def trace_calls(trace: Trace | None, name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that also adds each call to the trace's track of this name; the function itself without a trace."""
    if trace is None:
        return function

    def traced(argument: Any) -> Any:
        with trace.span(f"diagnosis: {name}", name):
            return function(argument)

    return traced


# --- Batches of random data with the shapes, dtypes and devices of real batches.
_Make = Callable[[], Any]


def random_batches(batches: Sequence[Any]) -> Iterator[Any] | None:
    """Endless random batches like `batches`, which have one structure; None if no leaf can be random.

    The values of numeric tensors and arrays are uniform between the smallest and the largest value in `batches`,
    including integers, so that labels stay valid. Booleans, text, and leaves that are empty, not dense or without a
    finite value stay unchanged. Tensors are made on the device of the originals.
    """
    columns = list(zip(*(leaves(batch) for batch in batches), strict=False))
    makers = [_maker(column) for column in columns]
    if not any(makers):
        return None
    return _generate(batches[0], makers)


def _generate(like: Any, makers: Sequence[_Make | None]) -> Iterator[Any]:
    while True:
        remaining = iter(makers)

        def leaf_of(leaf: Any, remaining: Iterator[_Make | None] = remaining) -> Any:
            make = next(remaining)
            return leaf if make is None else make()

        yield map_tree(like, leaf_of)


def _maker(column: Sequence[Any]) -> _Make | None:
    """A function that makes a random leaf like those at one place of several batches; None if that is impossible."""
    like, torch = column[0], sys.modules.get("torch")
    alike = [leaf for leaf in column if type(leaf) is type(like)]
    try:
        if torch is not None and isinstance(like, torch.Tensor):
            make = _tensor_maker(torch, like, alike)
        elif isinstance(like, np.ndarray) and like.dtype.kind in "iuf":
            make = _array_maker(like, alike)
        else:
            return None
        make()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a dtype without random numbers, or minimum
        return None
    return make


def _array_maker(like: Any, alike: Sequence[Any]) -> _Make:
    values = np.concatenate([leaf.ravel() for leaf in alike])
    values = values[np.isfinite(values)]
    low, high, draw = values.min(), values.max(), np.random.default_rng()
    if like.dtype.kind == "f":
        return lambda: (draw.random(like.shape, np.float32) * float(high - low) + float(low)).astype(like.dtype)
    return lambda: draw.integers(low, high, like.shape, like.dtype, endpoint=True)


def _tensor_maker(torch: Any, like: Any, alike: Sequence[Any]) -> _Make:
    if like.layout != torch.strided or like.is_quantized or like.is_complex() or like.dtype == torch.bool:
        raise TypeError("no numbers")
    floating = like.is_floating_point()
    values = [leaf.detach().reshape(-1) for leaf in alike]
    values = [leaf[torch.isfinite(leaf)] for leaf in values] if floating else values
    ends = [(leaf.min().item(), leaf.max().item()) for leaf in values if len(leaf)]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    above = high if floating else min(high + 1, torch.iinfo(like.dtype).max if high > 1 << 62 else high + 1)

    def make() -> Any:
        with torch.no_grad():
            made = torch.empty_like(like, requires_grad=False)  # with the same strides
            made = made.uniform_(low, above) if floating else made.random_(low, above)
            return made.requires_grad_(like.requires_grad)

    return make
