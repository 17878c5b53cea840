"""An order over several sets in fixed shares: `Mixed`, for the reader that `readers.concat` makes of them.

    reader = readers.concat([photos, drawings])
    order = Mixed([len(photos), len(drawings)], weights=[0.9, 0.1], seed=7)
    loader = ImageLoader(reader, 256, order=order)

An epoch has a fixed number of positions for each set, so its share is exact in every epoch and on any number of ranks.
Position p of the epoch is draw q = P(p), where P permutes all positions; the first quota of draws is the first set's,
and so on. A set gives its samples in cycles that go on from epoch to epoch: all of them once in an order of their own,
then all of them again in another. So no sample of a set comes twice before all of the others have come once, also where
an epoch has room for a part of a set only, and a small set that fills half of every epoch repeats evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from readers.order.base import Int64s, PlainOrder, Spec, check_samples, digest_of
from readers.order.permutation import MAX_SAMPLES, Permutation, derive_keys, permute_each

__all__ = ["Mixed"]


@dataclass(frozen=True, eq=False)
class Mixed(PlainOrder):
    """sizes: samples of each set, in the order in which they were concatenated.

    weights: the share of each set, any finite numbers from 0 up, by default the sizes.
    samples: positions in an epoch, by default as many as there are samples.

    The shares are rounded to whole positions, the largest remainders up. Memory: 24 bytes a set. Raises ValueError.
    """

    sizes: Sequence[int]
    weights: Sequence[float] | None = None
    samples: int | None = None
    seed: int = 0
    _starts: Int64s = field(init=False, repr=False)  # of the sets among the samples
    _quotas: Int64s = field(init=False, repr=False)  # positions of each set in an epoch
    _ends: Int64s = field(init=False, repr=False)  # of the quotas

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            check_samples(size)
        sizes = np.array(self.sizes, np.int64)
        if not len(sizes):
            raise ValueError("a mixture has at least one set, and sizes is empty")
        length = int(sizes.sum()) if self.samples is None else self.samples
        check_samples(length)
        quotas = _quotas(sizes.astype(np.float64) if self.weights is None else self.weights, sizes, length)
        object.__setattr__(self, "_starts", np.cumsum(sizes) - sizes)
        object.__setattr__(self, "_quotas", quotas)
        object.__setattr__(self, "_ends", np.cumsum(quotas))

    @property
    def quotas(self) -> tuple[int, ...]:
        """Positions of each set in an epoch."""
        return tuple(self._quotas.tolist())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def spec(self) -> Spec:
        sizes = np.array(self.sizes, np.int64)
        spec: Spec = {"kind": "mixed", "samples": int(sizes.sum()), "length": len(self), "sets": len(sizes)}
        return {**spec, "quotas": digest_of(sizes, self._quotas)}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        draws = Permutation(len(self), self.seed, epoch, "mixed").forward(positions)
        number = self._ends.searchsorted(draws, side="right")
        # What the epochs before this one took of each set: cycles are counted from epoch 0 on, with keys of no epoch.
        before = [divmod(epoch * quota, size or 1) for quota, size in zip(self.quotas, self.sizes, strict=True)]
        cycles, first = (np.array([pair[i] % MAX_SAMPLES for pair in before], np.int64)[number] for i in (0, 1))
        size = np.array(self.sizes, np.int64)[number]
        more, inside = np.divmod(first + draws - (self._ends - self._quotas)[number], size)
        tweak = (cycles + more) % (MAX_SAMPLES // len(self.sizes)) * len(self.sizes) + number
        keys = derive_keys(self.seed, 0, "mixed samples")
        samples: Int64s = self._starts[number] + permute_each(inside, size, tweak, keys)
        return samples


def _quotas(weights: npt.ArrayLike, sizes: Int64s, length: int) -> Int64s:
    """Whole positions by the largest remainders. Raises ValueError for weights that are none."""
    shares = np.asarray(weights, np.float64)
    if shares.shape != sizes.shape or not (np.isfinite(shares) & (shares >= 0)).all():
        raise ValueError(f"weights are {len(sizes)} finite numbers from 0 up, one for each set, not {weights!r:.200}")
    total = float(shares.sum())
    if not np.isfinite(total) or (total == 0 and length):
        raise ValueError(f"the weights add up to {total}, expected a finite sum above 0")
    if not length:
        return np.zeros(len(sizes), np.int64)
    exact = shares / total * length
    quotas = np.floor(exact).astype(np.int64)
    left = length - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:left]] += 1
    empty = np.flatnonzero((sizes == 0) & (quotas > 0))
    if len(empty):
        raise ValueError(f"set {empty[0]} has a weight, {shares[empty[0]]}, but no samples; leave it out")
    return quotas
