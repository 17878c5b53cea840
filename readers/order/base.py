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
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from cache.errors import ResumeError
from readers.order.keys import check_counter
from readers.order.permutation import Permutation

__all__ = [
    "Int64s",
    "Order",
    "PlainOrder",
    "Sequential",
    "Shuffled",
    "Spec",
    "check_samples",
    "checked_positions",
    "digest_of",
]

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

    def resumed(self, spec: Mapping[str, Any]) -> Order:
        """The order with which an epoch that began with `spec` goes on. Raises ResumeError where there is none."""


class PlainOrder(ABC):
    """What orders share. Subclasses are frozen dataclasses with a field `seed`."""

    seed: int

    @property
    def groups(self) -> int:
        return 1

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def indices(self, epoch: int, positions: Int64s) -> Int64s: ...

    @abstractmethod
    def spec(self) -> Spec: ...

    def with_seed(self: _Self, seed: int) -> _Self:
        return replace(self, seed=check_counter("seed", seed))  # type: ignore[type-var]

    def resumed(self, spec: Mapping[str, Any]) -> Order:
        mine = self.spec()
        if dict(spec) != mine:
            raise ResumeError(
                f"the epoch began with the order {_shown(spec)} and cannot go on with {_shown(mine)}; "
                f"make the order with the same parameters, or start a new epoch"
            )
        return self


def check_samples(samples: int) -> int:
    """A number of samples: 0 to 2^62 - 1. Raises ValueError."""
    if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or not 0 <= samples < 1 << 62:
        raise ValueError(f"the number of samples is {samples!r}, expected 0 to 2^62 - 1")
    return int(samples)


def checked_positions(positions: npt.ArrayLike, length: int) -> Int64s:
    """Positions as an int64 array; raises IndexError for one outside range(length)."""
    wanted = np.asarray(positions, np.int64)
    if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= length):
        raise IndexError(f"positions {wanted.min()} to {wanted.max()} are not all inside the {length} of an epoch")
    return wanted


def digest_of(*arrays: npt.NDArray[Any]) -> str:
    """16 hex digits that tell arrays apart: BLAKE2b of their little-endian bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def _shown(spec: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in spec.items())


# --- the two plain ones -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sequential(PlainOrder):
    """The samples as they are stored, in every epoch; the seed changes nothing."""

    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_counter("seed", self.seed)

    def __len__(self) -> int:
        return self.samples

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        return checked_positions(positions, self.samples)

    def spec(self) -> Spec:
        return {"kind": "sequential", "samples": self.samples}


@dataclass(frozen=True)
class Shuffled(PlainOrder):
    """Every sample once an epoch, in an order of (seed, epoch). O(1) memory for any number of samples below 2^62."""

    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_counter("seed", self.seed)

    def __len__(self) -> int:
        return self.samples

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        return Permutation(self.samples, self.seed, epoch).forward(positions)

    def positions(self, epoch: int, samples: Int64s) -> Int64s:
        """Where in the epoch these samples come: the inverse of `indices`."""
        return Permutation(self.samples, self.seed, epoch).inverse(samples)

    def spec(self) -> Spec:
        return {"kind": "shuffled", "samples": self.samples}
