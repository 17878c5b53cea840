"""A keyed permutation of range(n), computed and never stored: any position of any epoch costs the same.

The domain is Z_a x Z_b with a = ceil(sqrt n) and b = ceil(n / a); x stands for (x mod a, x // a). Each of ROUNDS turns
of a generalised Feistel network adds a keyed hash of one half to the other, which is undone by subtracting it
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). a * b is less than n + a, so few results fall outside
range(n); those go through the network again until they are inside, which keeps it a permutation.

The hash is the finaliser of MurmurHash3 over half XOR key; its upper 32 bits are scaled to the modulus by a
multiplication. Eight turns leave no trace in the position of an element or of a pair of neighbours from about 20
samples on; below SMALL, where a turn has little to add, three such networks follow each other. Shuffling asks for even
statistics, which the tests measure, and not for secrecy, which this has not. The numbers are pinned by tests: what
runs today must resume tomorrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.order.keys import KEYS, UInt64s, derive_keys, mix64

__all__ = ["MAX_SAMPLES", "Permutation", "permute_each"]

MAX_SAMPLES = 1 << 62
ROUNDS = 8
SMALL = 64
_MURMUR_1, _MURMUR_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_32, _33 = np.uint64(32), np.uint64(33)
_Word: TypeAlias = Any  # np.uint64, or an array of them: one for all elements, or one for each
_Keys: TypeAlias = tuple[np.uint64, ...]


class _Domain(NamedTuple):
    """The size n and its factors a and b, for all elements or one for each; tweak is None or one for each."""

    n: _Word
    a: _Word
    b: _Word
    tweak: UInt64s | None = None

    def at(self, where: npt.NDArray[np.intp]) -> _Domain:
        """The domains of some of the elements."""
        return _Domain(*(part[where] if isinstance(part, np.ndarray) else part for part in self))


_Network: TypeAlias = Callable[[UInt64s, _Domain, _Keys], UInt64s]


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(n), 0 <= n < 2^62, that (seed, epoch, purpose) chooses. Raises ValueError.

    Both directions take and give int64 arrays of any shape, and raise IndexError for values outside range(n).
    """

    n: int
    seed: int
    epoch: int = 0
    purpose: str = "global"
    _domain: _Domain = field(init=False, repr=False, compare=False)
    _keys: _Keys = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.n < MAX_SAMPLES:
            raise ValueError(f"a permutation of {self.n} samples: expected 0 to 2^62 - 1")
        a = max(1, math.isqrt(max(0, self.n - 1)) + (self.n > 1))
        b = -(-self.n // a)
        object.__setattr__(self, "_domain", _Domain(np.uint64(self.n), np.uint64(a), np.uint64(b)))
        object.__setattr__(self, "_keys", derive_keys(self.seed, self.epoch, self.purpose))

    def forward(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at `positions`."""
        return self._apply(positions, backward=False)

    def inverse(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The positions of `samples`."""
        return self._apply(samples, backward=True)

    def _apply(self, values: npt.NDArray[np.int64], *, backward: bool) -> npt.NDArray[np.int64]:
        given = np.asarray(values, np.int64)
        flat = given.reshape(-1).view(np.uint64) if given.flags.c_contiguous else given.ravel().view(np.uint64)
        if flat.size and int(flat.max()) >= self.n:  # negative values are huge as unsigned ones
            raise IndexError(f"{given.min()} to {given.max()} are not all inside the {self.n} of this permutation")
        return _permute(flat, self._domain, self._keys, backward=backward).view(np.int64).reshape(given.shape)


def permute_each(
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    tweaks: npt.NDArray[np.int64],
    keys: _Keys,
) -> npt.NDArray[np.int64]:
    """Many small permutations at once: element i is position i of the permutation of range(sizes[i]) that tweaks[i]
    chooses. All int64 [k]; positions[i] in range(sizes[i]) is for the caller to see to. keys: from `derive_keys`.
    """
    n = np.asarray(sizes, np.int64).astype(np.uint64)
    root = np.sqrt(n.astype(np.float64)).astype(np.uint64)
    root -= root * root > n  # exact where float64 cannot tell n from its neighbours
    a = root + (root * root < n)
    b = (n + a - np.uint64(1)) // a
    domain = _Domain(n, a, b, mix64(np.asarray(tweaks, np.int64).astype(np.uint64)))
    return _permute(np.asarray(positions, np.int64).astype(np.uint64), domain, keys).view(np.int64)


def _permute(values: UInt64s, domain: _Domain, keys: _Keys, *, backward: bool = False) -> UInt64s:
    """One network, and two more where n is below SMALL; backward: their inverses, last one first."""
    small = np.flatnonzero(np.broadcast_to(domain.n < SMALL, values.shape))
    if not small.size:
        return _walk(values, domain, keys[:ROUNDS], _backward if backward else _forward)
    few = domain.at(small)
    parts = [keys[first : first + ROUNDS] for first in range(0, KEYS, ROUNDS)]
    if backward:
        values = values.copy()
        for part in parts[:0:-1]:
            values[small] = _walk(values[small], few, part, _backward)
        return _walk(values, domain, parts[0], _backward)
    values = _walk(values, domain, parts[0], _forward)
    for part in parts[1:]:
        values[small] = _walk(values[small], few, part, _forward)
    return values


def _walk(values: UInt64s, domain: _Domain, keys: _Keys, network: _Network) -> UInt64s:
    out = network(values, domain, keys)
    outside = np.flatnonzero(out >= domain.n)
    while outside.size:
        part = domain.at(outside)
        out[outside] = again = network(out[outside], part, keys)
        outside = outside[again >= part.n]
    return out


def _forward(values: UInt64s, domain: _Domain, keys: _Keys) -> UInt64s:
    _, a, b, tweak = domain
    right: UInt64s = values // a
    left: UInt64s = values - right * a
    for turn in range(0, ROUNDS, 2):
        left = _add(left, _hash(right, keys[turn], a, tweak), a)
        right = _add(right, _hash(left, keys[turn + 1], b, tweak), b)
    right *= a
    right += left
    return right


def _backward(values: UInt64s, domain: _Domain, keys: _Keys) -> UInt64s:
    _, a, b, tweak = domain
    right: UInt64s = values // a
    left: UInt64s = values - right * a
    for turn in range(ROUNDS - 2, -1, -2):
        right = _add(right, b - _hash(left, keys[turn + 1], b, tweak), b)
        left = _add(left, a - _hash(right, keys[turn], a, tweak), a)
    right *= a
    right += left
    return right


def _hash(half: UInt64s, key: np.uint64, modulus: _Word, tweak: UInt64s | None) -> UInt64s:
    """A keyed hash of each half, in range(modulus); modulus is at most 2^31."""
    word: UInt64s = half ^ (key if tweak is None else tweak + key)
    word *= _MURMUR_1
    word ^= word >> _33
    word *= _MURMUR_2
    word >>= _32
    word *= modulus
    word >>= _32
    return word


def _add(half: UInt64s, hashed: UInt64s, modulus: _Word) -> UInt64s:
    """half + hashed modulo modulus: of the sum and the sum less modulus, which wraps to a huge number if negative."""
    hashed += half
    least: UInt64s = np.minimum(hashed, hashed - modulus)
    return least
