"""Where each sample of a listing is, as its source's reader needs it: numbers, or small objects of any kind."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from readers.strings import Strings

__all__ = ["NumberPlaces", "ObjectPlaces", "Places"]

_BLOCK_SAMPLES = 1024


class Places(Protocol):
    """Where each sample is, as the source's reader needs it; slices are lists."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def take(self, indices: npt.NDArray[np.int64]) -> Places:
        """The places at `indices`."""


class NumberPlaces(Sequence["tuple[int, ...]"]):
    """Places of k whole numbers each, int64 [n, k]."""

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        found = self._numbers[index].tolist()
        return list(map(tuple, found)) if isinstance(index, slice) else tuple(found)

    def take(self, indices: npt.NDArray[np.int64]) -> NumberPlaces:
        return NumberPlaces(self._numbers[indices])


class ObjectPlaces(Sequence[Any]):
    """Places that are small objects of any kind, each pickled: some 20 bytes, where a tuple of Python has 100."""

    def __init__(self, pickles: Strings) -> None:
        self._pickles = pickles

    def __len__(self) -> int:
        return len(self._pickles)

    def __getitem__(self, index: Any) -> Any:
        n = len(self)
        first, stop, step = index.indices(n) if isinstance(index, slice) else (i := range(n)[index], i + 1, 1)
        bounds = self._pickles.offsets[first : max(first, stop) + 1].tolist()
        data = self._pickles.blob[bounds[0] : bounds[-1]].tobytes()
        found = [pickle.loads(data[a - bounds[0] : b - bounds[0]]) for a, b in itertools.pairwise(bounds)]
        return found[::step] if isinstance(index, slice) else found[0]

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), _BLOCK_SAMPLES):
            yield from self[first : first + _BLOCK_SAMPLES]

    def take(self, indices: npt.NDArray[np.int64]) -> ObjectPlaces:
        return ObjectPlaces(self._pickles.take(indices))
