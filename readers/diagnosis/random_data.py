"""Batches of random data with the shapes and dtypes of real ones, made where those are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from readers.diagnosis.pipeline import leaves, map_tree

__all__ = ["random_batches"]

_Make = Callable[[], Any]


def random_batches(batches: Sequence[Any]) -> Iterator[Any] | None:
    """Endless new batches like `batches`, which have one structure; None if nothing in them can be made at random.

    Tensors and arrays of numbers are uniform between the least and the largest value that they have there, integers
    included, so that labels stay labels. Everything else is kept: truth values, text, what is empty, has no finite
    value or is not dense. A tensor is made on its own device.
    """
    columns = list(zip(*(leaves(batch) for batch in batches), strict=False))
    makers = [_maker(column) for column in columns]
    if not any(makers):
        return None
    return _generate(batches[0], makers)


def _generate(like: Any, makers: Sequence[_Make | None]) -> Iterator[Any]:
    while True:
        remaining = iter(makers)

        def leaf_of(leaf: Any, remaining: Iterator[_Make | None] = remaining) -> Any:
            make = next(remaining)
            return leaf if make is None else make()

        yield map_tree(like, leaf_of)


def _maker(leaves_there: Sequence[Any]) -> _Make | None:
    """What makes a leaf like the first of these, which are at one place of several batches."""
    like, torch = leaves_there[0], sys.modules.get("torch")
    alike = [leaf for leaf in leaves_there if type(leaf) is type(like)]
    make: _Make | None = None
    try:
        if torch is not None and isinstance(like, torch.Tensor):
            make = _tensor_maker(torch, like, alike)
        elif isinstance(like, np.ndarray) and like.dtype.kind in "iuf":
            make = _array_maker(like, alike)
        if make is not None:
            make()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a dtype without random numbers, or minimum
        return None
    return make


def _array_maker(like: Any, alike: Sequence[Any]) -> _Make | None:
    values = np.concatenate([leaf.ravel() for leaf in alike])
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    low, high, draw = values.min(), values.max(), np.random.default_rng()
    if like.dtype.kind == "f":
        return lambda: (draw.random(like.shape, np.float32) * float(high - low) + float(low)).astype(like.dtype)
    return lambda: draw.integers(low, high, like.shape, like.dtype, endpoint=True)


def _tensor_maker(torch: Any, like: Any, alike: Sequence[Any]) -> _Make | None:
    if like.layout != torch.strided or like.is_quantized or like.is_complex() or like.dtype == torch.bool:
        return None
    floating = like.is_floating_point()
    values = [leaf.detach().reshape(-1) for leaf in alike]
    values = [leaf[torch.isfinite(leaf)] for leaf in values] if floating else values
    ends = [(leaf.min().item(), leaf.max().item()) for leaf in values if len(leaf)]
    if not ends:
        return None
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    above = high if floating else min(high + 1, torch.iinfo(like.dtype).max if high > 1 << 62 else high + 1)

    def make() -> Any:
        with torch.no_grad():
            made = torch.empty_like(like, requires_grad=False)  # of the same strides, too
            made = made.uniform_(low, above) if floating else made.random_(low, above)
            return made.requires_grad_(like.requires_grad)

    return make
