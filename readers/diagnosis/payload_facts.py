"""What the values of a field say of its bytes: pure functions of arrays.

An array holds samples along its first dimension. Savings are counted in millionths of the field's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.diagnosis.findings import PayloadFact

__all__ = ["KINDS", "find_facts", "grid_of"]

# Kinds of facts; `find_facts` gives all but the first two, which depend on more than a field's values.
KINDS = ("unused", "duplicate", "constant", "uint8", "cast", "narrow", "one-hot", "bits", "sparse", "padded")

Values: TypeAlias = npt.NDArray[Any]
_MILLION = 1_000_000
_MANY_VALUES = 256
_LEAST_CLASSES = 3
_LEAST_MASK = 32  # values of a sample that are worth being bits
_SPARSE_SHARE = 0.9  # zeros, from which on an index with each other value is less
_INDEX_BYTES = 4
_PADDED_SHARE = 0.1
_GRID_VALUES = 64  # fewer say nothing of a grid
_FEW_LEVELS = 8  # fewer may be on a grid by chance
_LEVELS = 255
_OFF_GRID = 0.05  # of a step of the grid: what rounding may do
_CHANNELS = (1, 3, 4)
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}


def find_facts(dtype: str, item_bytes: int, arrays: Sequence[Values], used_as: frozenset[str]) -> list[PayloadFact]:
    """Facts of a field. arrays: some of its values in each batch, not empty. used_as: the types the step uses it in."""
    if len({array.ndim for array in arrays}) != 1 or any(array.dtype.kind not in "fiub" for array in arrays):
        return []
    first = arrays[0].reshape(-1)[0]
    if all((array == first).all() for array in arrays):
        if sum(array.size for array in arrays) < _MANY_VALUES:
            return []  # as of labels, of which these batches may just have one
        return [PayloadFact("constant", f"always {first:g}: make it on the device", _MILLION)]
    found = list[PayloadFact]()
    one_hot = _one_hot(item_bytes, arrays)
    bits = _bits(item_bytes, arrays)
    grid = None if bits is not None else _uint8(item_bytes, arrays)
    padded = None if one_hot is not None else _padded(arrays)
    found += [fact for fact in (one_hot, bits, grid, _sparse(item_bytes, arrays), padded) if fact is not None]
    found += _cast(dtype, item_bytes, used_as)
    if grid is None and bits is None:
        found += _narrow(dtype, item_bytes, arrays)
    return found


def _uint8(item_bytes: int, arrays: Sequence[Values]) -> PayloadFact | None:
    """Floats that are one of 256 values, in each channel: 8-bit pixels, scaled and perhaps normalised."""
    if arrays[0].dtype.kind != "f" or item_bytes < 2:
        return None
    shape = arrays[0].shape
    axis = next((d for d in (1, len(shape) - 1) if len(shape) >= 3 and shape[d] in _CHANNELS), None)
    if axis is None:
        channels = [np.concatenate([array.reshape(-1) for array in arrays])]
    else:
        if any(array.shape[axis] != shape[axis] for array in arrays):
            return None
        channels = [
            np.concatenate([np.take(array, c, axis).reshape(-1) for array in arrays]) for c in range(shape[axis])
        ]
    grids = [grid_of(values) for values in channels]
    if any(grid is None for grid in grids):
        return None
    offsets, steps = zip(*(grid for grid in grids if grid is not None), strict=True)
    what = "normalised 8-bit values"
    for size, name in ((1 / 255, "k/255"), (1.0, "whole numbers from 0 to 255")):
        whole = [abs(offset / size - round(offset / size)) < _OFF_GRID for offset in offsets]
        # A grid of a multiple of the step is one of the step itself, as long as it begins at 0.
        if all(whole) and all(_is_multiple(step, size) for step in steps):
            largest = max(float(values.max()) for values in channels)
            if min(offsets) > -_OFF_GRID * size and largest < (_LEVELS + _OFF_GRID) * size:
                what, offsets, steps = name, tuple(0.0 for _ in offsets), tuple(size for _ in steps)
                break
    grid = tuple((float(offset), float(step)) for offset, step in zip(offsets, steps, strict=True))
    text = f"{what} as floats of {8 * item_bytes} bits: copy uint8, and convert on the device"
    return PayloadFact("uint8", text, round(_MILLION * (1 - 1 / item_bytes)), grid)


def _is_multiple(step: float, size: float) -> bool:
    return round(step / size) >= 1 and abs(step / size - round(step / size)) < _OFF_GRID


def grid_of(values: Values) -> tuple[float, float] | None:
    """(offset, step) of a grid of at most 256 points on which all values lie, None where there is none.

    values: floats, of one channel. The step is the smallest difference of two values, or a simple fraction of it.
    """
    if values.size < _GRID_VALUES or not np.isfinite(values).all():
        return None
    levels = np.unique(values.astype(np.float64))
    spread = float(levels[-1] - levels[0])
    # The same pixel value may come out with other last bits, as after a flip in another kernel.
    levels = levels[np.concatenate([[True], np.diff(levels) > 1e-4 * spread])]
    if not 2 < len(levels) <= _LEVELS + 1:
        return None
    smallest = float(np.diff(levels).min())
    for parts in (1, 2, 3, 4):
        step = smallest / parts
        if spread / step > _LEVELS + _OFF_GRID:
            return None
        step = spread / round(spread / step)  # the whole range gives the step most precisely
        off = (levels - levels[0]) / step
        if np.abs(off - np.round(off)).max() < _OFF_GRID:
            plain = _is_multiple(step, 1.0) or _is_multiple(step, 1 / 255)
            return (float(levels[0]), step) if len(levels) >= _FEW_LEVELS or plain else None
    return None


def _cast(dtype: str, item_bytes: int, used_as: frozenset[str]) -> Iterator[PayloadFact]:
    """The step uses it in a smaller type only, as with autocast."""
    sizes = {_ITEM_BYTES.get(name, item_bytes) for name in used_as if name.startswith(("float", "bfloat"))}
    if dtype.startswith("float") and used_as and len(sizes) == len(used_as) == 1 and max(sizes) < item_bytes:
        name = next(iter(used_as))
        text = f"the step uses it as {name} only: cast it on the host"
        yield PayloadFact("cast", text, round(_MILLION * (1 - max(sizes) / item_bytes)))


def _narrow(dtype: str, item_bytes: int, arrays: Sequence[Values]) -> Iterator[PayloadFact]:
    """64 bits that are not needed, and integers that fit into fewer."""
    if dtype == "float64":
        yield PayloadFact("narrow", "float64: models compute in float32 or less", _MILLION // 2)
    elif arrays[0].dtype.kind in "iu":
        low, high = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
        fits = next(kind for kind in (np.uint8, np.int16, np.int32, np.int64, np.uint64) if _fits(low, high, kind))
        size = np.dtype(fits).itemsize
        if size < item_bytes:
            text = f"whole numbers from {low} to {high}, which fit into {np.dtype(fits).name}"
            yield PayloadFact("narrow", text, round(_MILLION * (1 - size / item_bytes)))


def _fits(low: int, high: int, kind: Any) -> bool:
    limits = np.iinfo(kind)
    return bool(limits.min <= low and high <= limits.max)


def _one_hot(item_bytes: int, arrays: Sequence[Values]) -> PayloadFact | None:
    """Along the last dimension, or the second one of masks: a single 1, and 0 elsewhere."""
    for axis in dict.fromkeys((arrays[0].ndim - 1, 1)):
        if axis < 1 or any(array.ndim <= axis or array.shape[axis] < _LEAST_CLASSES for array in arrays):
            continue
        if all((array.sum(axis) == 1).all() and ((array == 0) | (array == 1)).all() for array in arrays):
            classes = arrays[0].shape[axis]
            label = 1 if classes <= 256 else 2 if classes <= 1 << 15 else 4
            text = f"one-hot of {classes} classes: copy the numbers of the classes"
            return PayloadFact("one-hot", text, round(_MILLION * (1 - label / (classes * item_bytes))))
    return None


def _bits(item_bytes: int, arrays: Sequence[Values]) -> PayloadFact | None:
    """Two values only."""
    if arrays[0].ndim < 2 or arrays[0][0].size < _LEAST_MASK:
        return None
    low, high = min(array.min() for array in arrays), max(array.max() for array in arrays)
    if not all(((array == low) | (array == high)).all() for array in arrays):
        return None
    text = f"only {low:g} and {high:g}: eight of them are a byte" if arrays[0].dtype != bool else "8 bool are a byte"
    return PayloadFact("bits", text, round(_MILLION * (1 - 1 / (8 * item_bytes))))


def _sparse(item_bytes: int, arrays: Sequence[Values]) -> PayloadFact | None:
    if arrays[0].ndim < 2:
        return None
    zeros = 1 - sum(int(np.count_nonzero(array)) for array in arrays) / sum(array.size for array in arrays)
    left = (1 - zeros) * (item_bytes + _INDEX_BYTES) / item_bytes
    if zeros < _SPARSE_SHARE or left >= 1:
        return None
    return PayloadFact("sparse", f"{zeros:.0%} of it are zeros", round(_MILLION * (1 - left)))


def _padded(arrays: Sequence[Values]) -> PayloadFact | None:
    """Samples that end in a constant along one dimension, all in the same one, and do not begin with it."""
    best: PayloadFact | None = None
    for axis in range(1, arrays[0].ndim):
        tails, heads, whole = 0, 0, 0
        fillings = set[float]()
        for array in arrays:
            for sample in array:
                rows = np.moveaxis(sample, axis - 1, 0).reshape(sample.shape[axis - 1], -1)
                filling = rows[-1, -1] if rows.size else 0
                other = np.flatnonzero((rows != filling).any(axis=1))
                last, first = (int(other[-1]), int(other[0])) if len(other) else (-1, 0)
                tail = len(rows) - 1 - last
                tails, heads, whole = tails + tail, heads + first, whole + len(rows)
                if tail > 1:
                    fillings.add(float(filling))
        share = tails / max(1, whole)
        if share >= _PADDED_SHARE and len(fillings) == 1 and heads < tails / 4:
            text = f"{share:.0%} of dimension {axis} is padding with {fillings.pop():g}"
            if best is None or share * _MILLION > best.saves:
                best = PayloadFact("padded", text, round(_MILLION * share))
    return best
