"""Orders that do not have every sample once: drawn by weight, and every class equally often.

`Weighted` draws with replacement. An epoch of `ClassBalanced` is a sequence of rounds; a round has each class once, in
an order of its own. A class gives its samples in a permuted cycle: all of them once, then all of them again in another
order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from readers.order.base import Int64s, PlainOrder, Spec, check_samples, digest_of
from readers.order.permutation import derive_keys, permute_each, uniform

__all__ = ["ClassBalanced", "Weighted"]


@dataclass(frozen=True, eq=False)
class Weighted(PlainOrder):
    """P(sample i at a position) = weights[i] / sum(weights), independent of all other positions.

    weights: float [n], finite and not negative, not all 0. samples: positions in an epoch, n unless given. Memory:
    8 bytes a sample for the cumulative weights. Raises ValueError for anything else.
    """

    weights: npt.ArrayLike = field(repr=False)
    samples: int | None = None
    seed: int = 0
    _cumulative: npt.NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def spec(self) -> Spec:
        return {"kind": "weighted", "samples": len(self._cumulative), "length": len(self), "weights": self._digest}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        key = derive_keys(self.seed, epoch, "weighted")[0]
        # u < 1 and rounding keep the product below the sum; "right" of equal sums is a sample with weight
        drawn = uniform(key, positions) * self._cumulative[-1]
        samples: Int64s = self._cumulative.searchsorted(drawn, side="right").astype(np.int64)
        return samples

    @cached_property
    def _digest(self) -> str:
        return digest_of(self._cumulative)


@dataclass(frozen=True, eq=False)
class ClassBalanced(PlainOrder):
    """Each class with samples is drawn len / classes times an epoch, give or take one.

    labels: int [n]; samples with a negative one (NO_LABEL) are never drawn. samples: positions in an epoch, by
    default as many as there are labelled samples. Memory: 8 bytes a sample. Raises ValueError where no sample has a
    label.
    """

    labels: npt.ArrayLike = field(repr=False)
    samples: int | None = None
    seed: int = 0
    _members: Int64s = field(init=False, repr=False)  # samples by class
    _starts: Int64s = field(init=False, repr=False)  # of each class in _members, and their number

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            check_samples(self.samples)
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "iu"):
            raise ValueError(f"labels must be integers, one for each sample; found {labels.dtype} {labels.shape}")
        members = np.argsort(labels, kind="stable").astype(np.int64)
        ranked = labels[members]
        members, ranked = members[ranked >= 0], ranked[ranked >= 0]
        if not members.size:
            raise ValueError(f"no sample to balance: none of the {labels.size} has a label")
        starts = np.flatnonzero(np.diff(ranked, prepend=-1, append=-1)).astype(np.int64)
        object.__setattr__(self, "_members", members)
        object.__setattr__(self, "_starts", starts)

    def __len__(self) -> int:
        return len(self._members) if self.samples is None else self.samples

    @property
    def classes(self) -> int:
        """Classes that have samples."""
        return len(self._starts) - 1

    def spec(self) -> Spec:
        spec: Spec = {"kind": "class-balanced", "samples": int(np.size(self.labels))}
        return {**spec, "length": len(self), "labels": self._digest}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        turn, slot = np.divmod(positions, self.classes)
        order_keys = derive_keys(self.seed, epoch, "balanced classes")
        number = permute_each(slot, np.full(slot.shape, self.classes), turn, order_keys)
        start = self._starts[number]
        size = self._starts[number + 1] - start
        cycle, inside = np.divmod(turn, size)
        cycle_keys = derive_keys(self.seed, epoch, "balanced samples")
        chosen = permute_each(inside, size, cycle * self.classes + number, cycle_keys)
        samples: Int64s = self._members[start + chosen]
        return samples

    @cached_property
    def _digest(self) -> str:
        return digest_of(self._members, self._starts)
