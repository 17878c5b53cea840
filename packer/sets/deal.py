"""Divide samples into splits at random: in exact shares, of every class, or in whole groups."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import plural

__all__ = ["as_groups", "deal", "deal_groups", "shares", "shares_text"]

Int64s = npt.NDArray[np.int64]
_TOLERANCE = 1e-6


def shares(count: int, fractions: Sequence[float]) -> list[int]:
    """How many of `count` samples each split gets, by the method of largest remainders. Raises ValueError."""
    if not fractions or any(not 0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions are {list(fractions)}, expected shares of 1, such as 0.9")
    total = math.fsum(fractions)
    if abs(total - 1) > _TOLERANCE:
        advice = "add a split for the rest" if total < 1 else "make them smaller"
        raise ValueError(f"fractions sum to {total:.9g}, expected 1; {advice}")
    exact = [count * fraction / total for fraction in fractions]
    counts = [math.floor(share + _TOLERANCE) for share in exact]
    order = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in order[: count - sum(counts)]:
        counts[number] += 1
    return counts


def deal(classes: Int64s, fractions: Sequence[float], seed: int) -> Int64s:
    """The split of each sample, int64 [n]: numbers into `fractions`. Raises ValueError.

    classes: int64 [n]. Samples are lined up class by class, shuffled within each class, and the places of each split
    are spread evenly over the line. So every split has its share of all samples to within one, and of every class to
    within about one.
    """
    count = len(classes)
    counts = shares(count, fractions)
    random = _random(seed)
    shuffled = random.permutation(count)
    _, of_class = np.unique(classes, return_inverse=True)
    turn = random.permutation(int(of_class.max(initial=0)) + 1)  # else the same small classes would always lose
    line = shuffled[np.argsort(turn[of_class.reshape(-1)[shuffled]], kind="stable")]
    places = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in counts])
    split = np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]
    splits = np.empty(count, np.int64)
    splits[line] = split
    return splits


def as_groups(values: Sequence[Any], keys: Sequence[str], name: str, title: object) -> Int64s:
    """The group number of each sample, by the values of a column. Raises SourceError if a sample has no value."""
    missing = [number for number, value in enumerate(values) if value is None]
    if missing:
        raise SourceError(
            f"{title}: {plural(len(missing), 'sample')} of {len(values):,} without a value in the column {name!r}, "
            f"such as {keys[missing[0]]!r}, belong to no known group; select the others by where: has({name!r})"
        )
    numbers: dict[str, int] = {}  # by JSON text, since values may be lists and objects, and 1 is not "1"
    texts = (json.dumps(value, sort_keys=True) for value in values)
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(values))


def shares_text(counts: Mapping[str, int], fractions: Mapping[str, float], group: str) -> str:
    """How close the splits of whole groups are to the requested shares."""
    total = max(1, sum(counts.get(name, 0) for name in fractions))
    shares = [f"{name} {counts.get(name, 0) / total:.1%} (asked {share:.1%})" for name, share in fractions.items()]
    return f"every {group} is in one split: {', '.join(shares)}"


def deal_groups(groups: Int64s, classes: Int64s, fractions: Sequence[float], seed: int) -> Int64s:
    """Like `deal`, but groups stay together; shares are as close as groups allow. Raises ValueError.

    groups, classes: int64 [n]; groups count from 0.

    The largest group is dealt first, groups of equal size in random order, each to the split that is then the least
    full of the classes in the group. No split stays empty if there are as many groups as splits.
    """
    shares(len(groups), fractions)
    sizes = np.bincount(groups)
    turn = _random(seed).permutation(len(sizes))
    _, of_class = np.unique(classes, return_inverse=True)
    totals = np.bincount(of_class.reshape(-1), minlength=1)
    pairs, counts = np.unique(groups * len(totals) + of_class.reshape(-1), return_counts=True)
    starts = np.searchsorted(pairs, np.arange(len(sizes) + 1) * len(totals)).tolist()
    dealt, targets = np.zeros((len(fractions), len(totals))), np.array(fractions)
    splits = np.empty(len(sizes), np.int64)
    for group in turn[np.argsort(-sizes[turn], kind="stable")].tolist():
        part = slice(starts[group], starts[group + 1])
        of, more = pairs[part] % len(totals), counts[part]
        fill = ((dealt[:, of] + more) * (more / totals[of])).sum(axis=1) / targets
        splits[group] = chosen = int(fill.argmin())
        dealt[chosen, of] += more
    for split in range(len(fractions)):
        group_counts = np.bincount(splits, minlength=len(fractions))
        if not group_counts[split] and group_counts.max(initial=0) > 1:
            candidates = np.flatnonzero(splits == group_counts.argmax())
            splits[candidates[sizes[candidates].argmin()]] = split
    return splits[groups]


def _random(seed: int) -> np.random.RandomState:
    """A generator with a frozen stream, unlike Generator (NEP 19)."""
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"the seed must be from 0 to 2^32 - 1, not {seed}")
    return np.random.RandomState(seed)
