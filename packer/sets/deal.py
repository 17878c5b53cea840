"""Deal samples to splits: exact shares, of every class, drawn by a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["deal", "shares"]

Int64s = npt.NDArray[np.int64]
_TOLERANCE = 1e-6


def shares(count: int, fractions: Sequence[float]) -> list[int]:
    """How many of `count` samples each split gets, by the method of the largest remainder. Raises ValueError."""
    if not fractions or any(not 0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions are {list(fractions)}, expected numbers above 0 and at most 1")
    total = math.fsum(fractions)
    if abs(total - 1) > _TOLERANCE:
        advice = "that is more samples than there are" if total > 1 else "give the rest a split of its own, too"
        raise ValueError(f"fractions sum to {total:g}, expected 1; {advice}")
    exact = [count * fraction for fraction in fractions]
    found = [math.floor(share + _TOLERANCE) for share in exact]
    order = sorted(range(len(exact)), key=lambda number: found[number] - exact[number])
    for number in order[: count - sum(found)]:
        found[number] += 1
    return found


def deal(classes: Int64s, fractions: Sequence[float], seed: int) -> Int64s:
    """The split of each sample, int64 [n]: numbers into `fractions`. Raises ValueError.

    classes: int64 [n]. Samples are lined up class by class, at random inside a class, and the places of each split are
    spread evenly over the line. So every split has its share of all, to within one, and of every class, to within about
    one.
    """
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"the seed must be from 0 to 2^32 - 1, not {seed}")
    count = len(classes)
    counts = shares(count, fractions)
    random = np.random.RandomState(seed)  # its stream is frozen, that of Generator is not (NEP 19)
    shuffled = random.permutation(count)
    _, of_class = np.unique(classes, return_inverse=True)
    turn = random.permutation(int(of_class.max(initial=0)) + 1)  # or the same small classes would always lose
    line = shuffled[np.argsort(turn[of_class.reshape(-1)[shuffled]], kind="stable")]
    places = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in counts])
    split = np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]
    found = np.empty(count, np.int64)
    found[line] = split
    return found
