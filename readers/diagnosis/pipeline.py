"""What a diagnosis asks of a loader: its batches with the first stages of the work replaced by memory.

A pipeline is a list of stages, in the order in which a sample passes through them. `cached(n)` gives the batches that
the loader would give if its first n stages cost nothing, because their results for a few samples are in memory; what
follows runs as in training, in the same workers. `cached(0)` is the loader as it is.

    storage | read | transform 1 | … | collate | transfer          a torch DataLoader
    loading                                                        any other iterable
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from cache.errors import PipelineError
from readers.trace import Trace

__all__ = [
    "IterablePipeline",
    "Pipeline",
    "Stage",
    "ending",
    "endless",
    "in_a_line",
    "leaves",
    "map_tree",
    "module_for",
    "to_device",
    "tree_bytes",
]

# Loaders that can be cut and rebuilt: the module that defines the class, the class, and the module here that does it.
_KNOWN = (("readers.loader", "ImageLoader", "imageloader"), ("torch.utils.data", "DataLoader", "dataloader"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the work.

    seconds, cpu_seconds: of one batch in one worker that nothing disturbs, None if unknown.
    copying: seconds of a batch that handing out recorded values takes, where this stage is the first to run.
    kept_bytes: of all values that are replayed there.
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
    concurrent: bool = True  # whether they work while the training step runs
    more_workers: bool = False  # whether their number is the user's to choose
    distinct: int = 1  # different batches that are replayed
    warmup: int = 1  # batches that are in flight when a loop begins: of these the time says nothing
    notes: tuple[str, ...] = ()  # what could not be cut, and why
    size_error: float = 0.0  # share by which the samples that are replayed may be larger or smaller than all
    fresh: bool = False  # whether the training changes its batches, so that each replayed one must be a copy

    @abstractmethod
    def cached(self, count: int) -> Iterator[Any]:
        """Endless batches for which the first `count` stages cost nothing; closing the iterator ends the workers."""

    def without(self, number: int) -> Iterator[Any] | None:
        """Endless batches for which stage `number` alone costs nothing; None if it cannot be cut out alone."""
        return None

    def record(self, trace: Trace) -> AbstractContextManager[None]:
        """Inside the block, what the loader's own threads do is added to the trace, where it can say."""
        return nullcontext()


class IterablePipeline(Pipeline):
    """Any iterable of batches: a single stage, since nothing is known of what is inside."""

    def __init__(self, loader: Iterable[Any], distinct: int = 4) -> None:
        self._loader = loader
        self.distinct = distinct
        self.stages = (Stage("loading"),)
        self._batches: list[Any] = []

    def cached(self, count: int) -> Iterator[Any]:
        if count == 0:
            return endless(self._loader)
        if not self._batches:
            self._batches = list(itertools.islice(endless(self._loader), self.distinct))
        return itertools.cycle(self._batches)


def module_for(loader: Any) -> Any:
    """The module with `make_pipeline` for loaders of this class; None if there is none."""
    for module, kind, here in _KNOWN:
        defined = sys.modules.get(module)  # where it was never imported, no loader is of this class
        if defined is not None and isinstance(loader, getattr(defined, kind)):
            return importlib.import_module(f"readers.diagnosis.{here}")
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
    """The class of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


@contextmanager
def ending(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """The batches, whose workers end with the block."""
    try:
        yield batches
    finally:
        getattr(batches, "close", lambda: None)()


def map_tree(value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """Tuples, lists and mappings with `function` of each leaf in its place.

    is_leaf: says of a container whether it is taken as a whole.
    """

    def below(item: Any) -> Any:
        return map_tree(item, function, is_leaf)

    if is_leaf(value):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: below(item) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        copied = copy.copy(value)  # which keeps what its class has besides items
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


def leaves(value: Any) -> list[Any]:
    """The leaves of a tree, from left to right."""
    found: list[Any] = []
    map_tree(value, found.append)
    return found


def to_device(batch: Any, device: Any) -> Any:
    """A batch with its tensors on a device; their copies may still be under way."""
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
