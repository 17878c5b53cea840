"""Random numbers by position: the same for a sample of an epoch whoever computes them, and in whatever order.

A draw is a hash of (seed, epoch, position, stream, number): nothing is carried from one draw to the next, so neither
threads nor ranks nor a resume change it.

Source of the mixing function: Stafford's variant 13 of the MurmurHash3 finaliser, as used by SplitMix64 (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["Draws"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_Floats = npt.NDArray[np.float64]


class Draws:
    """Draws for the samples at `positions` (int64 [n]) of one epoch."""

    def __init__(self, seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> None:
        digest = hashlib.blake2b(f"draws {seed} {epoch}".encode(), digest_size=8).digest()
        key = np.uint64(int.from_bytes(digest, "little"))
        self._base = _mix(_mix(positions.astype(np.uint64) + key) ^ key)

    def __len__(self) -> int:
        return len(self._base)

    def uniform(self, stream: int, count: int = 1) -> _Floats:
        """Numbers in [0, 1), float64 [n, count]; the same stream gives the same numbers."""
        numbers = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 16)
        bits = _mix(self._base[:, None] + numbers[None, :] * _GOLDEN)
        return np.asarray((bits >> _S11) * (1.0 / (1 << 53)))

    def between(self, stream: int, low: float, high: float) -> _Floats:
        """Numbers in [low, high), float64 [n]."""
        return low + (high - low) * self.uniform(stream)[:, 0]


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> _S30)) * _A
    x = (x ^ (x >> _S27)) * _B
    return np.asarray(x ^ (x >> _S31))
