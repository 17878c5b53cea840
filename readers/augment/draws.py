"""Random numbers by position: the same for a sample of an epoch whoever computes them, and in whatever order.

A draw is a hash of (seed, epoch, position, stream, number): nothing is carried from one draw to the next, so neither
threads nor ranks nor a resume change it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from readers.order.keys import derive_keys, mix64

__all__ = ["Draws"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_11 = np.uint64(11)
_Floats = npt.NDArray[np.float64]


class Draws:
    """Draws for the samples at `positions` (int64 [n]) of one epoch."""

    def __init__(self, seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> None:
        first, second, *_ = derive_keys(seed, epoch, "augment")
        self._base = mix64(mix64(positions.astype(np.uint64) + first) ^ second)

    def __len__(self) -> int:
        return len(self._base)

    def uniform(self, stream: int, count: int = 1) -> _Floats:
        """Numbers in [0, 1), float64 [n, count]; the same stream gives the same numbers."""
        numbers = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 16)
        bits = mix64(self._base[:, None] + numbers[None, :] * _GOLDEN)
        return np.asarray((bits >> _11) * (1.0 / (1 << 53)))

    def between(self, stream: int, low: float, high: float) -> _Floats:
        """Numbers in [low, high), float64 [n]."""
        return low + (high - low) * self.uniform(stream)[:, 0]
