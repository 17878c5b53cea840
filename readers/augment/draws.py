"""Random numbers by position: the same for a sample of an epoch, in whatever order and by whichever thread or rank they
are computed.

A draw is a hash of (seed, epoch, position, view, stream, number): nothing is carried from one draw to the next, so
neither threads nor ranks nor a resume change it. Views of one sample (`ImageLoader(views=2)`) draw independently.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from readers.order.permutation import derive_keys, mix64

__all__ = ["Draws"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_11 = np.uint64(11)


class Draws:
    """Draws for the samples at `positions` (int64 [n]) of one epoch."""

    def __init__(self, seed: int, epoch: int, positions: npt.NDArray[np.int64], view: int = 0) -> None:
        first, second, *_ = derive_keys(seed, epoch, f"augment view {view}" if view else "augment")
        self._base = mix64(mix64(positions.astype(np.uint64) + first) ^ second)

    def __len__(self) -> int:
        return len(self._base)

    def uniform(self, stream: int, count: int = 1) -> npt.NDArray[np.float64]:
        """Numbers in [0, 1), float64 [n, count]; the same stream gives the same numbers."""
        numbers = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 16)
        bits = mix64(self._base[:, None] + numbers[None, :] * _GOLDEN)
        return np.asarray((bits >> _11) * (1.0 / (1 << 53)))
