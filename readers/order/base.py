"""What an order promises: which sample stands at which position of an epoch.

Positions 0 to len(order) - 1 are global: they know no ranks, workers or batches, which `readers.order.schedule` deals
out. An order is a function of (seed, epoch, position) and remembers nothing, so an epoch can be entered anywhere and
on any number of ranks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from cache.errors import ResumeError
from readers.order.permutation import MAX_SAMPLES, Permutation, check_counter

__all__ = ["Int64s", "Order", "PlainOrder", "Sequential", "Shuffled", "Spec", "Stepped", "check_samples", "digest_of"]

Int64s: TypeAlias = npt.NDArray[np.int64]
Spec: TypeAlias = dict[str, str | int | float]
_Self = TypeVar("_Self", bound="PlainOrder")


@runtime_checkable
class Order(Protocol):
    """Position -> sample. Orders are immutable, pickle, and may be shared between threads."""

    @property
    def seed(self) -> int:
        """What makes this run's order its own: 0 to 2^64 - 1."""

    @property
    def groups(self) -> int:
        """Nodes that own the positions p with the same p mod groups; 1 where any rank may have any position."""

    def __len__(self) -> int:
        """Positions in an epoch."""

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """The samples at `positions`, int64 of the same shape. Raises IndexError outside the epoch."""

    def spec(self) -> Spec:
        """What the order is, apart from the seed: "kind", "samples" (of the data set) and its parameters, for JSON."""

    def with_seed(self, seed: int) -> Order:
        """The same kind of order with another seed."""

    def resumed(self, spec: Mapping[str, Any], epoch: int = 0, cursor: int = 0) -> Order:
        """The order that continues an epoch, at `cursor`, that began with `spec`. Raises ResumeError."""


@runtime_checkable
class Stepped(Order, Protocol):
    """An order that cuts its epochs into steps itself, for as many ranks as it was made for."""

    @property
    def world_size(self) -> int | None:
        """The ranks that share a step equally; None before it is known."""

    @property
    def largest_batch(self) -> int:
        """Samples of one rank in a step at most."""

    def step_bounds(self, epoch: int) -> Int64s:
        """The position at which each step of an epoch begins, and the last ends: int64 [steps + 1]."""


class PlainOrder(ABC):
    """What orders share. Subclasses are frozen dataclasses with a field `seed`."""

    seed: int
    # Fields that may differ when an epoch is resumed: the epoch keeps those that it began with.
    _kept_by_epoch: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_counter("seed", self.seed)

    @property
    def groups(self) -> int:
        return 1

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def spec(self) -> Spec: ...

    @abstractmethod
    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        """The samples at positions of the epoch, int64 [k], one or more."""

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        given = np.asarray(positions, np.int64)
        if not given.size:
            return given
        flat = given.ravel()
        if int(flat.view(np.uint64).max()) >= len(self):  # negative values are huge as unsigned ones
            raise IndexError(f"positions {flat.min()} to {flat.max()} are not all inside the {len(self)} of an epoch")
        return self._samples_at(epoch, flat).reshape(given.shape)

    def with_seed(self: _Self, seed: int) -> _Self:
        return replace(self, seed=check_counter("seed", seed))  # type: ignore[type-var]

    def resumed(self: _Self, spec: Mapping[str, Any], epoch: int = 0, cursor: int = 0) -> _Self:
        began, mine = dict(spec), self.spec()
        if began == mine:
            return self
        kept = {name: began.get(name) for name in self._kept_by_epoch}
        if kept and all(isinstance(value, int) for value in kept.values()):
            try:
                order: _Self = replace(self, **kept)  # type: ignore[type-var]
            except ValueError:  # a state that no run has written
                order = self
            if order.spec() == began:
                return order
        raise ResumeError(
            f"the epoch began with the order {_describe(began)} and cannot continue with {_describe(mine)}; "
            f"make the order with the same parameters, or start a new epoch"
        )


def check_samples(samples: int) -> None:
    """Raise ValueError for a number of samples that is not an integer from 0 to 2^62 - 1."""
    if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or not 0 <= samples < MAX_SAMPLES:
        raise ValueError(f"the number of samples is {samples!r}, expected 0 to 2^62 - 1")


def digest_of(*arrays: npt.NDArray[Any]) -> str:
    """16 hex digits that distinguish arrays: BLAKE2b of their little-endian bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def _describe(spec: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in spec.items())


# --- the two plain ones -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _EachOnce(PlainOrder):
    samples: int
    seed: int = 0
    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_samples(self.samples)

    def __len__(self) -> int:
        return self.samples

    def spec(self) -> Spec:
        return {"kind": self._kind, "samples": self.samples}


@dataclass(frozen=True)
class Sequential(_EachOnce):
    """The samples as they are stored, in every epoch; the seed changes nothing."""

    _kind = "sequential"

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return positions


@dataclass(frozen=True)
class Shuffled(_EachOnce):
    """Every sample once an epoch, in an order of (seed, epoch). O(1) memory for any number of samples below 2^62."""

    _kind = "shuffled"

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return Permutation(self.samples, self.seed, epoch).forward(positions)

    def positions(self, epoch: int, samples: Int64s) -> Int64s:
        """Where in the epoch these samples come: the inverse of `indices`."""
        return Permutation(self.samples, self.seed, epoch).inverse(samples)
