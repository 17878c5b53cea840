"""The keyed permutation: a bijection for every n, even statistics, and numbers that never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from readers.order.base import KEYS, Permutation, counter_hash, derive_keys, mix64, permute_each, uniform

SEEDS = st.integers(0, 2**64 - 1)


def every(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int64)


# --- a permutation ------------------------------------------------------------------------------------------------
def test_every_small_n_exhaustively() -> None:
    for n in range(2001):
        permutation = Permutation(n, seed=n * 7919, epoch=n % 5)
        out = permutation.forward(every(n))
        assert out.dtype == np.int64 and np.array_equal(np.sort(out), every(n)), f"no permutation of {n}"
        assert np.array_equal(permutation.inverse(out), every(n)), f"the inverse for {n} is not one"


@given(n=st.integers(1, 2**62 - 1) | st.integers(10**12 - 5, 10**12 + 5), seed=SEEDS, data=st.data())
def test_large_n_there_and_back(n: int, seed: int, data: st.DataObject) -> None:
    edges = {0, n - 1, n // 2, max(0, n - 2)}
    positions = sorted(edges | set(data.draw(st.lists(st.integers(0, n - 1), max_size=20))))
    permutation = Permutation(n, seed, epoch=seed % 1000)
    samples = permutation.forward(np.array(positions, np.int64))
    assert len(set(samples.tolist())) == len(positions), "two positions have the same sample"
    assert samples.min() >= 0 and samples.max() < n
    assert permutation.inverse(samples).tolist() == positions
    assert [int(permutation.forward(np.int64(p))) for p in positions] == samples.tolist(), "alone it is another"


def test_impossible_permutations() -> None:
    for n in (-1, 2**62):
        with pytest.raises(ValueError, match=r"expected 0 to 2\^62 - 1"):
            Permutation(n, 0)
    for seed in (-1, 2**64, 0.5, True):
        with pytest.raises(ValueError, match="seed"):
            Permutation(10, seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch is -1, expected 0"):
        Permutation(10, 0, -1)
    for permutation, wrong in ((Permutation(0, 0), 0), *((Permutation(10, 0), wrong) for wrong in (-1, 10, -(2**63)))):
        for method in (permutation.forward, permutation.inverse):
            with pytest.raises(IndexError, match="not all inside the"):
                method(np.array([wrong]))


# --- many small ones at once --------------------------------------------------------------------------------------
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), seed=SEEDS)
def test_permutations_of_many_sizes_at_once(sizes: list[int], seed: int) -> None:
    keys = derive_keys(seed, 0, "test")
    n = np.repeat(sizes, sizes)
    tweaks = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    shuffled = np.random.default_rng(0).permutation(len(n))
    out = np.empty(len(n), np.int64)
    out[shuffled] = permute_each(positions[shuffled], n[shuffled], tweaks[shuffled], keys)
    for number, size in enumerate(sizes):
        assert sorted(out[tweaks == number].tolist()) == list(range(size))
    assert int(permute_each(positions[-1:], n[-1:], tweaks[-1:], keys)[0]) == out[-1], "alone it is another"


def test_sizes_where_float64_cannot_take_the_root() -> None:
    roots = np.array([2**31 - 1, 2**30 + 1, 94_906_267], np.int64)
    sizes = np.concatenate([roots * roots + d for d in (-1, 0, 1)])
    out = permute_each(sizes - 1, sizes, np.arange(9), derive_keys(0, 0, "test"))
    assert ((out >= 0) & (out < sizes)).all()


# --- statistics ---------------------------------------------------------------------------------------------------
def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def excess(counts: np.ndarray, expected: float) -> float:
    """Chi-square in standard deviations above its mean."""
    degrees = counts.size - 1
    return (chi_square(counts, expected) - degrees) / (2 * degrees) ** 0.5


def draws(n: int, seeds: int) -> np.ndarray:
    """[seeds, n]: one permutation of range(n) per seed, by the vectorised form."""
    tweaks = np.repeat(np.arange(seeds), n)
    positions = np.tile(np.arange(n), seeds)
    return permute_each(positions, np.full(len(positions), n), tweaks, derive_keys(3, 1, "test")).reshape(seeds, n)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12, 31, 64, 100])
def test_every_sample_is_equally_likely_everywhere(n: int) -> None:
    """For each element, and for neighbours together: over seeds, every sample, and every pair of samples."""
    seeds = 20_000 if n < 40 else 6_000
    out = draws(n, seeds)
    for i in {0, 1, n // 2, n - 1}:
        counts = np.bincount(out[:, i], minlength=n)
        assert excess(counts, seeds / n) < 5, f"position {i} of {n} prefers some samples"
    if n > 2:
        for i in {0, n // 2 - 1, n - 2}:
            pairs = np.bincount(out[:, i] * n + out[:, i + 1], minlength=n * n).reshape(n, n)
            assert not pairs.diagonal().any()
            counts = pairs[~np.eye(n, dtype=bool)]
            assert excess(counts, seeds / (n * (n - 1))) < 5, f"positions {i} and {i + 1} of {n} prefer some pairs"


@pytest.mark.parametrize("n", [5, 40])
def test_samples_over_seeds_and_epochs(n: int) -> None:
    """The same with keys of their own for every (seed, epoch), as a training has them."""
    seeds = 1500
    out = np.array([Permutation(n, s // 3, s % 3).forward(every(n)) for s in range(seeds)])
    for i in (0, n - 1):
        assert excess(np.bincount(out[:, i], minlength=n), seeds / n) < 5
    followers = np.bincount((out[:, 1] - out[:, 0]) % n, minlength=n)[1:]
    assert excess(followers, seeds / (n - 1)) < 5, "the distance of neighbours is not even"


def test_no_runs_and_no_drift(n: int = 1_281_167) -> None:
    out = Permutation(n, 5, 0).forward(every(min(n, 100_000)))
    steps = np.diff(out)
    assert abs((steps > 0).mean() - 0.5) < 5 / len(steps) ** 0.5, "ascents and descents are not even"
    correlation = np.corrcoef(out[:-1], out[1:])[0, 1]
    assert abs(correlation) < 5 / len(steps) ** 0.5, "neighbours are correlated"
    other = Permutation(n, 5, 1).forward(every(min(n, 100_000)))
    assert abs(np.corrcoef(out, other)[0, 1]) < 5 / len(steps) ** 0.5, "epochs are correlated"


# --- keys ---------------------------------------------------------------------------------------------------------
def test_counter_hashes_are_splitmix64() -> None:
    """The first numbers of SplitMix64 from state 1234567, as published with the generator."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert counter_hash(np.uint64(1234567), np.arange(1, 5)).tolist() == published
    assert mix64(np.array([0], np.uint64)).tolist() == [0]
    numbers = uniform(np.uint64(9), np.arange(100_000))
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.005
    assert len(derive_keys(1, 2, "x")) == len({int(key) for key in derive_keys(1, 2, "x")}) == KEYS


GOLDEN = {
    (5, 0, 0): [4, 1, 2, 3, 0],
    (10, 7, 3): [5, 3, 9, 1, 4, 7, 2, 8],
    (1000, 7, 3): [472, 571, 663, 596, 477, 69, 344, 31],
    (1_281_167, 2**64 - 1, 90): [837284, 486822, 783117, 456055, 636189, 1230080, 977535, 232121],
    (10**12, 0, 0): [12096737188, 996825861629, 299674543623, 321046622785, 310312140136, 577895420963, 866932430458],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_numbers_that_never_change(case: tuple[int, int, int]) -> None:
    """Frozen: if this fails, running trainings would resume in another order. Never write new numbers here."""
    assert Permutation(*case).forward(every(len(GOLDEN[case]))).tolist() == GOLDEN[case]
