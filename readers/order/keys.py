"""Random numbers that are a function of (seed, epoch, counter): nothing is drawn, so nothing has to be remembered.

Keys come from BLAKE2b over (seed, epoch, purpose), numbers from the SplitMix64 finaliser (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators") over a key and a counter. Integer arithmetic modulo 2^64 only, so
every machine and every NumPy gives the same. What is pinned here may never change: orders of running trainings and
their resume tokens depend on it.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["KEYS", "SEED_LIMIT", "UInt64s", "check_counter", "counter_hash", "derive_keys", "mix64", "uniform"]

UInt64s = npt.NDArray[np.uint64]
KEYS = 24  # three BLAKE2b digests of 64 bytes
SEED_LIMIT = 1 << 64
_PERSON = b"packer order 1"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _11 = (np.uint64(bits) for bits in (27, 30, 31, 11))


def check_counter(name: str, value: int) -> int:
    """A seed or epoch: an integer from 0 to 2^64 - 1. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not 0 <= value < SEED_LIMIT:
        raise ValueError(f"{name} is {value}, expected 0 to 2^64 - 1")
    return int(value)


@lru_cache(maxsize=64)
def derive_keys(seed: int, epoch: int, purpose: str) -> tuple[np.uint64, ...]:
    """KEYS independent 64-bit keys for one use of (seed, epoch)."""
    numbers = (check_counter("seed", seed), check_counter("epoch", epoch))
    digest = b"".join(
        hashlib.blake2b(struct.pack("<QQQ", *numbers, part) + purpose.encode(), person=_PERSON).digest()
        for part in range(KEYS // 8)
    )
    return tuple(np.uint64(key) for key in struct.unpack(f"<{KEYS}Q", digest))


def mix64(values: UInt64s) -> UInt64s:
    """The SplitMix64 finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    mixed: UInt64s = values ^ (values >> _30)
    mixed *= _MIX_1
    mixed ^= mixed >> _27
    mixed *= _MIX_2
    mixed ^= mixed >> _31
    return mixed


def counter_hash(key: np.uint64, counters: npt.NDArray[np.int64]) -> UInt64s:
    """The numbers that SplitMix64 started at `key` gives after `counters` (int64 [k], not negative) steps."""
    state = counters.astype(np.uint64)
    state *= _GOLDEN
    state += key
    return mix64(state)


def uniform(key: np.uint64, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 [k] in [0, 1): the upper 53 bits of `counter_hash`."""
    upper: npt.NDArray[np.float64] = (counter_hash(key, counters) >> _11).astype(np.float64)
    upper *= 2.0**-53
    return upper
