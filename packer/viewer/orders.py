"""Orders of the samples of a split, with runs, and histograms: from columns alone, by sorting.

An order is a list of sample numbers, uint32, and runs of it that have names: "by class" is sorted by label, with a run
for each class. A histogram and the order of the same name are one thing: its bar i is run i, so that a click on a bar
shows these samples. What is not known of a sample is in a last run, "unknown", which has no bar.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from readers.headers import MEDIA
from readers.sample import ImageInfo, upright_sides
from readers.strings import Strings

__all__ = [
    "BINNED",
    "UNKNOWN",
    "Histogram",
    "OrderColumn",
    "Run",
    "by_class",
    "by_key",
    "by_medium",
    "by_number",
    "histogram",
    "same_bytes",
    "values_of",
]

UNKNOWN = "unknown"
_MOST_BINS, _MOST_GROUPS = 32, 10_000
_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # of a decade, about as far from each other
_LINEAR_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_WIDE = 20.0  # the ratio from which bins grow with the value
Values = npt.NDArray[np.float64]
BINNED = {
    "bytes": ("bytes of the image", "bytes"),
    "size": ("pixels of the image", "pixels"),
    "side": ("shorter side", "pixels"),
    "aspect": ("width / height", ""),
}
"""Orders by a number: title and unit."""


class Run(NamedTuple):
    """Samples [first, first + samples) of an order."""

    name: str
    first: int
    samples: int


class OrderColumn(NamedTuple):
    """values: sample numbers, uint32 [count]."""

    values: npt.NDArray[np.uint32]
    runs: list[Run]


class Histogram(NamedTuple):
    """edges: float64 [k + 1], the last one included; counts: int64 [k]."""

    edges: Values
    counts: npt.NDArray[np.int64]


def values_of(name: str, info: ImageInfo | None, sizes: npt.NDArray[np.int64]) -> Values | None:
    """What one of BINNED sorts by, float64 [n], NaN where it is not known; None where nothing is known of it.

    sizes: bytes of the images, 0 where they are not known.
    """
    if name == "bytes":
        return np.where(sizes > 0, sizes, np.nan) if sizes.any() else None
    if info is None:
        return None
    heights, widths = (sides.astype(np.float64) for sides in upright_sides(info))
    heights[(heights == 0) | (widths == 0)] = np.nan
    if name == "aspect":
        return widths / heights
    return heights * widths if name == "size" else np.minimum(heights, widths)


# --- numbers --------------------------------------------------------------------------------------------------------
def histogram(values: Values) -> Histogram:
    """Bins with round edges over all values that are known; none where there are none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Histogram(np.zeros(0), np.zeros(0, np.int64))
    edges = _edges(float(known.min()), float(known.max()))
    return Histogram(edges, np.histogram(known, edges)[0].astype(np.int64))


def by_number(values: Values, edges: Values) -> OrderColumn:
    """Samples by a number that rises, in a run for each bin; those of equal numbers as stored, unknown ones last."""
    order = np.argsort(values, kind="stable").astype(np.uint32)
    known = len(values) - int(np.isnan(values).sum())
    rising = values[order[:known]]
    bounds = [*np.searchsorted(rising, edges[:-1]).tolist(), known]
    names = [f"{_edge_text(low)} – {_edge_text(high)}" for low, high in itertools.pairwise(edges.tolist())]
    runs = [Run(name, a, b - a) for name, (a, b) in zip(names, itertools.pairwise(bounds), strict=False)]
    return OrderColumn(order, _with_rest(runs, known, len(order)))


def _edges(low: float, high: float) -> Values:
    if high == low:
        return np.array([low, high if high > low else low + 1])
    if low > 0 and high / low > _WIDE:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = _STEPS if (last - first) * len(_STEPS) <= 2 * _MOST_BINS else _STEPS[:1]
        rising = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    else:
        rough = (high - low) / _MOST_BINS
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(base * factor for factor in _LINEAR_STEPS if base * factor >= rough)
        start = math.floor(low / step)
        rising = [step * number for number in range(start, start + 3 * _MOST_BINS)]
    begin = max(i for i, edge in enumerate(rising) if edge <= low or i == 0)
    end = next((i for i, edge in enumerate(rising) if edge >= high), len(rising) - 1)
    return np.array(rising[begin : max(end, begin + 1) + 1])


def _edge_text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


# --- names ----------------------------------------------------------------------------------------------------------
def by_class(labels: npt.NDArray[np.int64], classes: Sequence[str]) -> OrderColumn:
    """Samples by label, in a run for each class that has some, and those without a label last, in a run called ""."""
    if not len(labels):
        return OrderColumn(np.zeros(0, np.uint32), [])
    known = labels >= 0
    last = int(labels.max()) + 1 if known.any() else 0
    marks = np.where(known, labels, last)
    order = np.argsort(marks, kind="stable").astype(np.uint32)
    found, first, counts = np.unique(marks[order], return_index=True, return_counts=True)

    def name(label: int) -> str:
        return "" if label == last else classes[label] if label < len(classes) else str(label)

    runs = zip(map(name, found.tolist()), first.tolist(), counts.tolist(), strict=True)
    return OrderColumn(order, [Run(*run) for run in runs])


def by_medium(media: npt.NDArray[np.uint8]) -> OrderColumn:
    """Samples by what their images are, in a run for each medium; those whose header cannot be read last."""
    marks = np.where(media == 0, 255, media)
    order = np.argsort(marks, kind="stable").astype(np.uint32)
    found, first, counts = np.unique(marks[order], return_index=True, return_counts=True)
    names = [MEDIA[code] if code < len(MEDIA) else UNKNOWN for code in found.tolist()]
    return OrderColumn(order, [Run(*run) for run in zip(names, first.tolist(), counts.tolist(), strict=True)])


def by_key(keys: Strings) -> OrderColumn:
    """Samples by the UTF-8 of their keys."""
    blob, bounds = keys.blob.tobytes(), keys.offsets.tolist()
    texts = [blob[a:b] for a, b in itertools.pairwise(bounds)]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    return OrderColumn(np.array(order, np.uint32), [])


def same_bytes(sizes: npt.NDArray[Any], checksums: npt.NDArray[Any], keys: Sequence[str]) -> OrderColumn:
    """The samples of which others have the same size and CRC32C, in a run for each group, called by its first key.

    sizes: 0 for a sample that is left out. From ten thousand groups on, the rest is one run, so that a browser can take
    the list.
    """
    there = np.flatnonzero(sizes)
    marks = (sizes.astype(np.uint64) << np.uint64(32)) ^ checksums.astype(np.uint64)
    order = there[np.argsort(marks[there], kind="stable")]
    new = np.flatnonzero(np.diff(marks[order], prepend=~marks[order[:1]]) != 0)
    counts = np.diff([*new.tolist(), len(order)])
    groups = [order[first : first + count] for first, count in zip(new[counts > 1], counts[counts > 1], strict=True)]
    groups.sort(key=lambda group: int(group[0]))
    firsts = np.cumsum([0, *map(len, groups)]).tolist()
    named = (keys[int(group[0])] if i < _MOST_GROUPS else "" for i, group in enumerate(groups))
    runs = [Run(name, first, len(group)) for name, first, group in zip(named, firsts, groups, strict=False)]
    joined = np.concatenate([np.zeros(0, np.int64), *groups])
    if len(runs) > _MOST_GROUPS:
        first = runs[_MOST_GROUPS].first
        runs = [*runs[:_MOST_GROUPS], Run(f"{len(runs) - _MOST_GROUPS:,} more groups", first, len(joined) - first)]
    return OrderColumn(joined.astype(np.uint32), runs)


def _with_rest(runs: list[Run], known: int, total: int) -> list[Run]:
    return [*runs, Run(UNKNOWN, known, total - known)] if total > known else runs
