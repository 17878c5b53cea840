"""Draws with replacement: a sample is as likely as its weight says, at every position."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from readers.order.base import Int64s, PlainOrder, Spec, check_samples, checked_positions, digest_of
from readers.order.keys import check_counter, derive_keys, uniform

__all__ = ["Weighted"]


@dataclass(frozen=True, eq=False)
class Weighted(PlainOrder):
    """P(sample i at a position) = weights[i] / sum(weights), independent of all other positions.

    weights: float [n], finite and not negative, not all 0. samples: positions in an epoch, n unless given. Memory:
    8 bytes a sample for the cumulative weights. Raises ValueError for weights that are none.
    """

    weights: npt.ArrayLike = field(repr=False)
    samples: int | None = None
    seed: int = 0
    _cumulative: npt.NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_counter("seed", self.seed)
        if self.samples is not None:
            check_samples(self.samples)
        weights = np.asarray(self.weights, np.float64)
        if weights.ndim != 1 or not weights.size:
            raise ValueError(f"weights must be one number for each sample, found an array of shape {weights.shape}")
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise ValueError(f"the weight of sample {bad[0]} is {weights[bad[0]]}, expected a finite one from 0 up")
        with np.errstate(over="ignore"):
            cumulative = np.cumsum(weights)
        if not 0 < cumulative[-1] < np.inf:
            raise ValueError(f"the weights add up to {cumulative[-1]}, expected a finite sum above 0")
        object.__setattr__(self, "_cumulative", cumulative)

    def __len__(self) -> int:
        return len(self._cumulative) if self.samples is None else self.samples

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        given = checked_positions(positions, len(self))
        key = derive_keys(self.seed, epoch, "weighted")[0]
        # u < 1 and rounding keep the product below the sum; right of equal ones lies a sample with weight
        place = uniform(key, given.ravel()) * self._cumulative[-1]
        found: Int64s = self._cumulative.searchsorted(place, side="right").astype(np.int64)
        return found.reshape(given.shape)

    @cached_property
    def _digest(self) -> str:
        return digest_of(self._cumulative)

    def spec(self) -> Spec:
        return {
            "kind": "weighted",
            "samples": len(self._cumulative),
            "length": len(self),
            "weights": self._digest,
        }
