"""The contract of an order, which maps positions of an epoch to samples; and keyed permutations.

Positions 0 to len(order) - 1 are global, independent of ranks, workers and batches, to which `readers.order.schedule`
assigns them. An order is a function of (seed, epoch, position) without state, so an epoch can be resumed anywhere and
on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from cache.errors import ResumeError

# A keyed permutation of range(n), computed and never stored: any position of any epoch costs the same.
#
# Random numbers are functions of (seed, epoch, counter), so there is no generator state to save. Keys come from BLAKE2b
# over (seed, epoch, purpose), numbers from the SplitMix64 finaliser (Steele, Lea and Flood 2014, "Fast splittable
# pseudorandom number generators") over a key and a counter. Integer arithmetic modulo 2^64 gives the same results on
# every machine and with every version of NumPy.
#
# The domain of the permutation is Z_a x Z_b with a = ceil(sqrt n) and b = ceil(n / a); x stands for (x mod a, x // a).
# Each of the ROUNDS rounds of a generalised Feistel network adds a keyed hash of one half to the other; the inverse
# subtracts it (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). a * b is less than n + a, so few
# results fall outside range(n); those pass through the network again until they are inside, which keeps it a
# permutation.
#
# The hash is the finaliser of MurmurHash3 over half XOR key; its upper 32 bits are scaled to the modulus by a
# multiplication. From about 20 samples on, eight rounds leave no measurable pattern in the positions of elements and
# of pairs of neighbours; below SMALL, where a round adds little, three networks are applied in sequence. Shuffling
# needs even statistics, which the tests measure, but no secrecy, which this does not provide. All numbers are pinned by
# tests and must never change: the orders of running training jobs and their resume tokens depend on them.


UInt64s = npt.NDArray[np.uint64]
MAX_SAMPLES = 1 << 62
KEYS = 24  # three BLAKE2b digests of 64 bytes
ROUNDS = 8
SMALL = 64
_PERSON = b"packer order 1"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MURMUR_1, _MURMUR_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_11, _27, _30, _31, _32, _33 = (np.uint64(bits) for bits in (11, 27, 30, 31, 32, 33))
_Word: TypeAlias = Any  # np.uint64 for all elements, or an array with one for each
_Keys: TypeAlias = tuple[np.uint64, ...]


# --- keys and random numbers --------------------------------------------------------------------------------------
def check_counter(name: str, value: int) -> int:
    """A seed or epoch: an integer from 0 to 2^64 - 1. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not 0 <= value < 1 << 64:
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
    """The outputs of SplitMix64 with the state `key` after `counters` steps (int64 [k], non-negative)."""
    state = counters.astype(np.uint64)
    state *= _GOLDEN
    state += key
    return mix64(state)


def uniform(key: np.uint64, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 [k] in [0, 1): the upper 53 bits of `counter_hash`."""
    upper: npt.NDArray[np.float64] = (counter_hash(key, counters) >> _11).astype(np.float64)
    upper *= 2.0**-53
    return upper


# --- permutations -------------------------------------------------------------------------------------------------
class _Domain(NamedTuple):
    """The size n and its factors a and b, each for all elements or per element; tweak: None, or per element."""

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
    """The permutation of range(n), 0 <= n < 2^62, keyed by (seed, epoch, purpose). Raises ValueError.

    Both directions take and return int64 arrays of any shape, and raise IndexError for values outside range(n).
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
        numbers = np.asarray(values, np.int64)
        flat = numbers.reshape(-1).view(np.uint64) if numbers.flags.c_contiguous else numbers.ravel().view(np.uint64)
        if flat.size and int(flat.max()) >= self.n:  # negative values are huge as unsigned ones
            raise IndexError(f"{numbers.min()} to {numbers.max()} are not all inside the {self.n} of this permutation")
        return _permute(flat, self._domain, self._keys, backward=backward).view(np.int64).reshape(numbers.shape)


def permute_each(
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    tweaks: npt.NDArray[np.int64],
    keys: _Keys,
) -> npt.NDArray[np.int64]:
    """Many small permutations at once: element i is the value at positions[i] of the permutation of range(sizes[i])
    keyed by tweaks[i].

    All arrays are int64 [k]; positions[i] must be in range(sizes[i]), which is not checked. keys: from `derive_keys`.
    """
    n = np.asarray(sizes, np.int64).astype(np.uint64)
    root = np.sqrt(n.astype(np.float64)).astype(np.uint64)
    root -= root * root > n  # exact where float64 rounds n to a neighbour
    a = root + (root * root < n)
    b = (n + a - np.uint64(1)) // a
    domain = _Domain(n, a, b, mix64(np.asarray(tweaks, np.int64).astype(np.uint64)))
    return _permute(np.asarray(positions, np.int64).astype(np.uint64), domain, keys).view(np.int64)


def _permute(values: UInt64s, domain: _Domain, keys: _Keys, *, backward: bool = False) -> UInt64s:
    """Apply one network, and two more if n is below SMALL; backward: their inverses in reverse order."""
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
    """half + hashed modulo modulus: the lesser of the sum and the sum - modulus, which wraps around if negative."""
    hashed += half
    least: UInt64s = np.minimum(hashed, hashed - modulus)
    return least


Int64s: TypeAlias = npt.NDArray[np.int64]
Spec: TypeAlias = dict[str, str | int | float]
_Self = TypeVar("_Self", bound="PlainOrder")


@runtime_checkable
class Order(Protocol):
    """Position -> sample. Orders are immutable, pickle, and may be shared between threads."""

    @property
    def seed(self) -> int:
        """The seed, 0 to 2^64 - 1."""

    @property
    def groups(self) -> int:
        """Number of nodes G if node g owns the positions p with p mod G = g; 1 if any rank may have any position."""

    def __len__(self) -> int:
        """Positions in an epoch."""

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """The samples at `positions`, int64 of the same shape. Raises IndexError outside the epoch."""

    def spec(self) -> Spec:
        """The order without its seed, for JSON: "kind", "samples" (of the data set) and its parameters."""

    def with_seed(self, seed: int) -> Order:
        """The same kind of order with another seed."""

    def resumed(self, spec: Mapping[str, Any], epoch: int = 0, cursor: int = 0) -> Order:
        """The order that continues an epoch, at `cursor`, that began with `spec`. Raises ResumeError."""


@runtime_checkable
class Stepped(Order, Protocol):
    """An order that divides its epochs into steps itself, for a fixed number of ranks."""

    @property
    def world_size(self) -> int | None:
        """The ranks that share a step equally; None before it is known."""

    @property
    def largest_batch(self) -> int:
        """Largest number of samples of one rank in a step."""

    def step_bounds(self, epoch: int) -> Int64s:
        """The first position of each step of an epoch, and the end of the last: int64 [steps + 1]."""


class PlainOrder(ABC):
    """The base of orders. Subclasses are frozen dataclasses with a field `seed`."""

    seed: int
    # Fields that may differ on a resume: the current epoch keeps the values that it began with.
    _kept_by_epoch: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_counter("seed", self.seed)

    @property
    def groups(self) -> int:
        return 1

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def spec(self) -> Spec: ...

    @abstractmethod
    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        """The samples at positions of the epoch, int64 [k], k >= 1."""

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        array = np.asarray(positions, np.int64)
        if not array.size:
            return array
        flat = array.ravel()
        if int(flat.view(np.uint64).max()) >= len(self):  # negative values are huge as unsigned ones
            raise IndexError(f"positions {flat.min()} to {flat.max()} are not all inside the {len(self)} of an epoch")
        return self._samples_at(epoch, flat).reshape(array.shape)

    def with_seed(self: _Self, seed: int) -> _Self:
        return replace(self, seed=check_counter("seed", seed))  # type: ignore[type-var]

    def resumed(self: _Self, spec: Mapping[str, Any], epoch: int = 0, cursor: int = 0) -> _Self:
        began, current = dict(spec), self.spec()
        if began == current:
            return self
        kept = {name: began.get(name) for name in self._kept_by_epoch}
        if kept and all(isinstance(value, int) for value in kept.values()):
            try:
                order: _Self = replace(self, **kept)  # type: ignore[type-var]
            except ValueError:  # not a valid state
                order = self
            if order.spec() == began:
                return order
        raise ResumeError(
            f"the epoch began with the order {_describe(began)} and cannot continue with {_describe(current)}; "
            f"make the order with the same parameters, or start a new epoch"
        )


def recorded(order: Order, spec: Mapping[str, Any], epoch: int, cursor: int) -> Order:
    """The order with which a run went on at `cursor` of `epoch`, also on other ranks or with other batches than those
    of `order`. Raises ResumeError for a spec of another order."""
    made: Order = getattr(order, "recorded", order.resumed)(spec, epoch, cursor)
    return made


def check_samples(samples: int) -> None:
    """Raise ValueError for a number of samples that is not an integer from 0 to 2^62 - 1."""
    if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or not 0 <= samples < MAX_SAMPLES:
        raise ValueError(f"the number of samples is {samples!r}, expected 0 to 2^62 - 1")


def digest_of(*arrays: npt.NDArray[Any]) -> str:
    """16 hex digits that distinguish arrays: BLAKE2b of their little-endian bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def _describe(spec: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in spec.items())


# --- plain orders -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _EachOnce(PlainOrder):
    samples: int
    seed: int = 0
    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_samples(self.samples)

    def __len__(self) -> int:
        return self.samples

    def spec(self) -> Spec:
        return {"kind": self._kind, "samples": self.samples}


@dataclass(frozen=True)
class Sequential(_EachOnce):
    """The samples in stored order, in every epoch; the seed has no effect on the order."""

    _kind = "sequential"

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return positions


@dataclass(frozen=True)
class Shuffled(_EachOnce):
    """Every sample once an epoch, permuted by (seed, epoch). O(1) memory for any number of samples below 2^62."""

    _kind = "shuffled"

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return Permutation(self.samples, self.seed, epoch).forward(positions)

    def positions(self, epoch: int, samples: Int64s) -> Int64s:
        """The positions of samples in the epoch: the inverse of `indices`."""
        return Permutation(self.samples, self.seed, epoch).inverse(samples)
