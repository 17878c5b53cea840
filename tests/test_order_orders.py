"""Every order: its law (each sample once, each class equally often, …), random access, pickling, frozen numbers."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ResumeError
from readers.order import (
    BlockShuffled,
    Bucketed,
    ClassBalanced,
    Mixed,
    NodeLocal,
    Order,
    Permutation,
    Sequential,
    Shuffled,
    StagedFirst,
    Weighted,
)
from readers.order.local import block_starts

N = 200
LABELS = np.array([0] * 120 + [1] * 50 + [3] * 20 + [-1] * 10)
ORDERS: dict[str, Callable[..., Order]] = {
    "sequential": lambda seed=0: Sequential(N, seed),
    "shuffled": lambda seed=0: Shuffled(N, seed),
    "block-shuffled": lambda seed=0: BlockShuffled(np.arange(0, N + 1, 8), 3, seed),
    "staged-first": lambda seed=0: StagedFirst(np.array([0, 50, 50, 51, 120, N]), 3, 2, 0, seed),
    "node-local": lambda seed=0: NodeLocal(N, 3, 2, seed),
    "weighted": lambda seed=0: Weighted(np.arange(N), None, seed),
    "class-balanced": lambda seed=0: ClassBalanced(LABELS, 150, seed),
    "mixed": lambda seed=0: Mixed([120, 80], seed=seed),
    "bucketed": lambda seed=0: Bucketed(LABELS % 4, 5, 2, seed=seed),
}
ONCE_EACH = ("sequential", "shuffled", "block-shuffled", "staged-first", "node-local", "mixed", "bucketed")


SIZES: tuple[Any, ...] = (-1, 2**62, 1.5, True)


def staged(sizes: list[int], window: int = 4, **options: int) -> StagedFirst:
    return StagedFirst(np.append(0, np.cumsum(sizes)).astype(np.int64), window, **options)


def whole(order: Order, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch, np.arange(len(order), dtype=np.int64))


# --- what all of them promise -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ORDERS)
def test_the_promises_of_an_order(kind: str) -> None:
    order = ORDERS[kind]()
    assert isinstance(order, Order) and order.seed == 0 and order.groups == (3 if kind == "node-local" else 1)
    spec = order.spec()
    assert spec["kind"] == kind and spec["samples"] == N
    assert all(type(name) is str and type(value) in (str, int, float) for name, value in spec.items())
    for epoch in (0, 1, 7):
        epoch_order = whole(order, epoch)
        assert epoch_order.dtype == np.int64 and epoch_order.min() >= 0 and epoch_order.max() < N
        if kind in ONCE_EACH:
            assert np.array_equal(np.sort(epoch_order), np.arange(N)), f"epoch {epoch} loses or repeats samples"
        some = np.random.default_rng(epoch).integers(0, len(order), (4, 9))
        assert np.array_equal(order.indices(epoch, some), epoch_order[some]), "random access gives another order"
        for wrong in (-1, 10**6):
            with pytest.raises(IndexError, match="not all inside the"):
                order.indices(epoch, np.array([0, wrong]))
    assert order.indices(0, np.zeros(0, np.int64)).shape == (0,)
    assert order.resumed(spec) is order
    for other in ({**spec, "samples": N + 1}, {**spec, "kind": "other"}, {}, {"nodes": "3"}):
        with pytest.raises(ResumeError, match=r"the epoch began with .* cannot continue with kind="):
            order.resumed(other)


@pytest.mark.parametrize("kind", ORDERS)
def test_seeds_epochs_and_copies(kind: str) -> None:
    order = ORDERS[kind]()
    other, used = order.with_seed(5), whole(order, 2)
    copy = pickle.loads(pickle.dumps(order))
    assert np.array_equal(whole(copy, 2), used) and copy.spec() == order.spec()
    assert other.seed == 5 and order.seed == 0 and other.spec() == order.spec() and type(other) is type(order)
    assert np.array_equal(whole(other, 1), whole(ORDERS[kind](seed=5), 1))
    if kind != "sequential":
        assert len({tuple(whole(o, e)) for o in (order, other) for e in range(4)}) == 8
    with pytest.raises(ValueError, match="seed is -1"):
        order.with_seed(-1)
    with pytest.raises(FrozenInstanceError):
        order.seed = 3  # type: ignore[misc]


def test_empty_orders() -> None:
    none = np.array([0])
    for order in (Sequential(0), Shuffled(0), NodeLocal(0, 4), BlockShuffled(none), StagedFirst(none)):
        assert len(order) == 0 and whole(order).shape == (0,)
        with pytest.raises(IndexError):
            order.indices(0, np.array([0]))


IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    *((partial(make, samples), "the number of samples is") for make in (Sequential, Shuffled) for samples in SIZES),
    *((partial(NodeLocal, samples, 2), "the number of samples is") for samples in SIZES),
    *((partial(Weighted, [1.0], samples), "the number of samples is") for samples in SIZES),
    *(
        (partial(BlockShuffled, np.array(starts)), "block starts must rise")
        for starts in ([], [1, 2], [0, 3, 3], [0, 3, 2], [[0, 1]])
    ),
    (lambda: BlockShuffled(np.array([0, 1]), window=0), "window is 0"),
    (lambda: block_starts(np.array([1]), 0), "block_bytes is 0"),
    *((partial(StagedFirst, np.array(starts)), "must rise from 0") for starts in ([1, 2], [0, 3, 2], [])),
    (lambda: staged([3, 4], 0), "window .0. and epochs .1. must be"),
    (lambda: staged([3, 4], epochs=0), "must be at least 1"),
    (lambda: staged([3, 4], begin=-1), "begin is -1"),
    (lambda: staged([3, 4], seed=-1), "seed is -1"),
    (lambda: NodeLocal(10, 0), "must be at least 1"),
    (lambda: NodeLocal(10, 1, 0), "must be at least 1"),
    (lambda: NodeLocal(10, 2).local_part(2), "node 2 is outside the 2"),
    (lambda: Weighted([]), "one number for each sample"),
    (lambda: Weighted([[1.0]]), r"found an array of shape \(1, 1\)"),
    (lambda: Weighted([1, -1]), "the weight of sample 1 is -1.0"),
    (lambda: Weighted([1, 2, float("nan")]), "the weight of sample 2 is nan"),
    (lambda: Weighted([float("inf")]), "the weight of sample 0 is inf"),
    (lambda: Weighted([0, 0]), "add up to 0.0"),
    (lambda: Weighted([1e308, 1e308]), "add up to inf"),
    (lambda: ClassBalanced([0.5]), "labels must be integers"),
    (lambda: ClassBalanced([]), "none of the 0"),
    *((partial(Mixed, [5, samples]), "the number of samples is") for samples in SIZES),
    (lambda: Mixed([]), "at least one set"),
    *((partial(Mixed, [5, 5], weights), "weights are 2 finite numbers") for weights in ([1], [1, -1], [1, np.inf])),
    (lambda: Mixed([5, 5], [0, 0]), "add up to 0.0"),
    (lambda: Mixed([5, 0], [1, 1]), "set 1 has a weight, 1.0, but no samples"),
    (lambda: Bucketed([0.5]), "buckets are integers"),
    (lambda: Bucketed([0, -1]), "found -1 to 0"),
    (lambda: Bucketed([0, 1 << 15]), "found 0 to 32768"),
    *((partial(Bucketed, [0, 1, 2], size), "one for each of the 3 buckets") for size in (0, [4, 4], [4, 0, 4], [])),
    (lambda: Bucketed([0], 1, 0), "world_size is 1 or more"),
    (lambda: Bucketed([0], tail="exact"), "tail is pad or drop_last"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE)
def test_impossible_parameters(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        make()


# --- shuffled -----------------------------------------------------------------------------------------------------
def test_where_a_sample_comes() -> None:
    order = Shuffled(10**12, 4)
    samples = np.array([0, 5, 10**12 - 1])
    assert np.array_equal(order.indices(3, order.positions(3, samples)), samples)


# --- blocks -------------------------------------------------------------------------------------------------------
@given(
    sizes=st.lists(st.integers(0, 40), max_size=60),
    block_bytes=st.integers(1, 60),
    window=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_sizes(sizes: list[int], block_bytes: int, window: int, seed: int) -> None:
    starts = block_starts(np.array(sizes, np.int64), block_bytes)
    assert starts[0] == 0 and starts[-1] == len(sizes) and (np.diff(starts) > 0).all()
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert sum(sizes[first : last - 1]) < block_bytes, "a full block continues"
    order = BlockShuffled(starts, window, seed)
    assert np.array_equal(np.sort(whole(order, 3)), np.arange(len(sizes)))


def test_blocks_over_chunks_of_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(0).integers(0, 500, 5000)
    expected = block_starts(sizes, 3000)
    for chunk in (1, 7, 4999):
        monkeypatch.setattr("readers.order.local._CHUNK_SAMPLES", chunk)
        assert np.array_equal(block_starts(sizes, 3000), expected)


def test_a_window_is_a_few_whole_blocks() -> None:
    order = BlockShuffled(np.arange(0, 1001, 10), window=4, seed=3)
    epoch = whole(order, 1)
    for first in range(0, 1000, 40):
        window = epoch[first : first + 40]
        blocks = set((window // 10).tolist())
        assert len(blocks) == 4, "a window reads more blocks than it has"
        assert sorted(window.tolist()) == sorted(s for b in blocks for s in range(b * 10, b * 10 + 10))
        assert len(set((window[:12] // 10).tolist())) > 1, "samples of a window are not mixed"


# --- staging ------------------------------------------------------------------------------------------------------
def turns_read(order: StagedFirst, epoch: int = 0) -> np.ndarray:
    """By position: the place of its sample's shard in the order of staging."""
    turn = np.empty(len(order.starts) - 1, np.int64)
    turn[order.shards(epoch)] = np.arange(len(turn))
    return turn[order.starts.searchsorted(whole(order, epoch), side="right") - 1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 2**64 - 1))
def test_a_position_needs_no_shard_after_its_round(sizes: list[int], window: int, seed: int) -> None:
    """Against a plain count: rounds with parts of the shards of the last `window` turns, and the samples once each."""
    order = staged(sizes, window, seed=seed)
    assert np.array_equal(np.sort(whole(order)), np.arange(len(order)))
    wanted, window = turns_read(order), min(window, len(sizes))
    copied = [sizes[shard] for shard in order.shards()]
    position = 0
    for turn in range(len(sizes) + window - 1):
        share = {}
        for part in range(window):
            size = copied[turn - part] if 0 <= turn - part < len(copied) else 0
            share[turn - part] = -(-size * (part + 1) // window) + (-size * part // window)
        count = sum(share.values())
        found = wanted[position : position + count]
        assert {t: int((found == t).sum()) for t in share} == share
        position += count
    assert position == len(order)


def test_shards_from_the_middle_of_an_epoch() -> None:
    order = staged([10] * 12, 3, seed=5)
    shard = order.starts.searchsorted(whole(order), side="right") - 1
    for cursor in range(len(order)):
        shards = order.shards(0, cursor)
        assert sorted(shards) == list(range(12))
        left = list(dict.fromkeys(shard[cursor:].tolist()))
        assert set(left) <= set(shards[: len(left) + 3].tolist())  # done ones only where a round ends
    assert np.array_equal(order.shards(7, 40), order.shards())  # a global epoch


def test_epochs_that_follow_the_staging() -> None:
    order, plain = staged([30] * 6, 2, epochs=2, begin=3, seed=8), Shuffled(180, 8)
    for epoch in range(7):
        assert order.follows(epoch) == (epoch in (3, 4))
        assert np.array_equal(whole(order, epoch), plain.indices(epoch, np.arange(180))) == (epoch not in (3, 4))
    assert order.shards().tolist() == order.shards(3).tolist() != order.shards(4).tolist()


# --- nodes --------------------------------------------------------------------------------------------------------
@given(n=st.integers(0, 90), nodes=st.integers(1, 12), every=st.integers(1, 4), epoch=st.integers(0, 9))
def test_nodes_keep_to_their_parts(n: int, nodes: int, every: int, epoch: int) -> None:
    order = NodeLocal(n, nodes, every, seed=n)
    parts = [order.local_part(node) for node in range(nodes)]
    assert [s for part in parts for s in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    out = whole(order, epoch)
    assert sorted(out.tolist()) == list(range(n))
    if epoch % every == every - 1:
        assert order.exchanges(epoch) and np.array_equal(out, Permutation(n, n, epoch).forward(np.arange(n)))
    else:
        assert all(sample in parts[position % nodes] for position, sample in enumerate(out.tolist()))


NODES, SHARDS = NodeLocal(50, 3, 4, seed=1), staged([20] * 9, 4, seed=2)


@pytest.mark.parametrize(
    ("began", "now", "wrong"),
    [
        (NODES, NodeLocal(50, 2, 8, seed=1), [{"nodes": 0}, {"nodes": "3"}, {"samples": 49}]),
        (SHARDS, staged([20] * 9, 2, seed=2), [{"window": 0}, {"window": "4"}, staged([30] * 6).spec()]),
        (SHARDS, staged([20] * 9, 4, begin=5, epochs=3, seed=2), []),
    ],
)
def test_an_epoch_continues_with_the_parts_it_began_with(began: Order, now: Order, wrong: list[Any]) -> None:
    again = now.resumed(began.spec())
    assert again.spec() == began.spec() and np.array_equal(whole(again), whole(began))
    assert not np.array_equal(whole(now), whole(began))
    for spec in wrong:
        with pytest.raises(ResumeError, match="the epoch began with"):
            now.resumed({**began.spec(), **spec})


# --- weights ------------------------------------------------------------------------------------------------------
def test_draws_follow_the_weights() -> None:
    weights = np.array([0, 1, 0, 2, 5, 0, 0.5, 0])
    order = Weighted(weights, samples=200_000, seed=1)
    counts = np.bincount(whole(order), minlength=8)
    expected = 200_000 * weights / weights.sum()
    assert (counts[weights == 0] == 0).all(), "a sample without weight was drawn"
    drawn = weights > 0
    assert ((counts[drawn] - expected[drawn]) ** 2 / expected[drawn]).sum() < 20
    assert len(Weighted(weights)) == 8
    assert set(whole(Weighted([0, 0, 3], samples=1000)).tolist()) == {2}


# --- classes ------------------------------------------------------------------------------------------------------
@given(labels=st.lists(st.integers(-1, 5), min_size=1, max_size=60), length=st.integers(0, 200))
def test_classes_equally_often_and_samples_in_cycles(labels: list[int], length: int) -> None:
    members = Counter(label for label in labels if label >= 0)
    if not members:
        with pytest.raises(ValueError, match=f"none of the {len(labels)} has a label"):
            ClassBalanced(labels)
        return
    order = ClassBalanced(labels, length, seed=2)
    assert order.classes == len(members) and len(ClassBalanced(labels)) == members.total()
    drawn = whole(order, 1).tolist()
    for first in range(0, length, len(members)):
        classes = [labels[sample] for sample in drawn[first : first + len(members)]]
        assert len(set(classes)) == len(classes) and -1 not in classes, "a round repeats a class"
    for label, count in members.items():
        mine = [sample for sample in drawn if labels[sample] == label]
        for first in range(0, len(mine), count):
            cycle = mine[first : first + count]
            assert len(set(cycle)) == len(cycle), "a sample repeats before its class is through"


def test_rounds_have_orders_of_their_own() -> None:
    drawn = whole(ClassBalanced(np.arange(12) % 4, 400)) % 4
    assert len({tuple(turn) for turn in drawn.reshape(-1, 4).tolist()}) > 15


# --- frozen -------------------------------------------------------------------------------------------------------
GOLDEN = {
    "sequential": [0, 19, 38, 57, 76, 95, 114, 133],
    "shuffled": [71, 193, 77, 151, 10, 198, 40, 191],
    "block-shuffled": [130, 161, 19, 150, 88, 136, 8, 159],
    "node-local": [36, 88, 191, 44, 81, 139, 24, 91],
    "weighted": [66, 34, 178, 102, 139, 164, 153, 51],
    "class-balanced": [157, 135, 10, 177, 176, 98, 178, 172],
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_numbers_that_never_change(kind: str) -> None:
    """Frozen: if this fails, running trainings would resume in another order. Never write new numbers here."""
    assert ORDERS[kind](seed=7).indices(2, np.arange(0, 150, 19)).tolist() == GOLDEN[kind]


def test_numbers_of_staged_shards_that_never_change() -> None:
    order = staged([3, 5, 2, 4], 2, seed=1)
    assert order.shards().tolist() == [3, 1, 2, 0]
    assert whole(order).tolist() == [10, 11, 6, 13, 12, 3, 7, 5, 4, 9, 1, 8, 2, 0]
