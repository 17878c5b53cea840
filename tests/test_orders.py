"""Every order, the keyed permutation below them, and their costs: laws, random access, frozen numbers, figures."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from hypothesis import given
from hypothesis import strategies as st

import packer
import readers
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
    ShuffleReport,
    StagedFirst,
    Weighted,
    Woven,
    block_shuffled,
    describe,
    mixing,
    read_amplification,
    requests_per_sample,
    shuffle_quality,
    woven,
)
from readers.order.base import KEYS, counter_hash, derive_keys, mix64, permute_each, uniform
from readers.order.local import block_starts

N = 200
LABELS = np.array([0] * 120 + [1] * 50 + [3] * 20 + [-1] * 10)
ORDERS: dict[str, Callable[..., Order]] = {
    "sequential": lambda seed=0: Sequential(N, seed),
    "shuffled": lambda seed=0: Shuffled(N, seed),
    "block-shuffled": lambda seed=0: BlockShuffled(np.arange(0, N + 1, 8), 3, seed),
    "staged-first": lambda seed=0: StagedFirst(np.array([0, 50, 50, 51, 120, N]), 3, 2, 0, seed),
    "woven": lambda seed=0: Woven(N, 4, 12, seed),
    "node-local": lambda seed=0: NodeLocal(N, 3, 2, seed),
    "weighted": lambda seed=0: Weighted(np.arange(N), None, seed),
    "class-balanced": lambda seed=0: ClassBalanced(LABELS, 150, seed),
    "mixed": lambda seed=0: Mixed([120, 80], seed=seed),
    "bucketed": lambda seed=0: Bucketed(LABELS % 4, 5, 2, seed=seed),
}
ONCE_EACH = ("sequential", "shuffled", "block-shuffled", "staged-first", "woven", "node-local", "mixed", "bucketed")


SIZES: tuple[Any, ...] = (-1, 2**62, 1.5, True)


def staged(sizes: list[int], window: int = 4, **options: int) -> StagedFirst:
    return StagedFirst(np.append(0, np.cumsum(sizes)).astype(np.int64), window, **options)


def whole(order: Order, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch, np.arange(len(order), dtype=np.int64))


# --- promises of all orders ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ORDERS)
def test_the_promises_of_every_order(kind: str) -> None:
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
    (lambda: Bucketed([0], 1, 0), "world_size is at least 1"),
    (lambda: Bucketed([0], tail="exact"), "tail is pad or drop_last"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE)
def test_impossible_parameters(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        make()


# --- shuffled -----------------------------------------------------------------------------------------------------
def test_the_position_of_a_sample() -> None:
    order = Shuffled(10**12, 4)
    samples = np.array([0, 5, 10**12 - 1])
    assert np.array_equal(order.indices(3, order.positions(3, samples)), samples)


# --- blocks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("samples", "block", "opened", "nodes"),
    [
        (1003, 10, 30, 1),
        (997, 64, 8, 1),
        (5, 10, 10, 1),
        (1, 1, 1, 1),
        (100, 100, 1, 1),
        (7, 2, 2, 5),
        (2000, 16, 64, 3),
    ],
)
def test_woven_blocks_are_visited_completely_and_by_one_node(samples: int, block: int, opened: int, nodes: int) -> None:
    order, positions = Woven(samples, block, opened, 3, nodes), np.arange(samples)
    for epoch in range(3):
        drawn, visits = order.indices(epoch, positions), order.visits(epoch, positions)
        assert np.array_equal(np.sort(drawn), positions)
        known = np.unique(visits[visits >= 0])
        assert len(visits[visits < 0]) <= (2 * opened * nodes + 1) * block, "blocks are not complete"
        for visit, of_visit in zip(known, order.samples_of(epoch, known), strict=True):
            assert np.array_equal(np.sort(drawn[visits == visit]), of_visit)
        by_node = [set((visits[node::nodes][visits[node::nodes] >= 0] // 2).tolist()) for node in range(nodes)]
        assert sum(map(len, by_node)) == len(set().union(*by_node)), "two nodes share a block"
    assert samples < 50 or not np.array_equal(order.indices(0, positions), order.indices(1, positions))


@pytest.mark.parametrize(("samples", "nodes", "workers", "batch"), [(2000, 1, 3, 16), (1003, 2, 2, 5), (40, 2, 3, 7)])
def test_a_woven_block_is_read_by_one_worker(samples: int, nodes: int, workers: int, batch: int) -> None:
    order, positions = Woven(samples, 4, 24, 3, nodes, workers, batch), np.arange(samples)
    drawn, visits = order.indices(1, positions), order.visits(1, positions)
    assert np.array_equal(np.sort(drawn), positions)
    worker = positions // nodes // batch % workers * nodes + positions % nodes
    full = np.count_nonzero(visits >= 0) // (nodes * workers * batch) * nodes * workers * batch
    blocks = [set((visits[:full][worker[:full] == number] // 2).tolist()) for number in range(nodes * workers)]
    assert sum(map(len, blocks)) == len(set().union(*blocks)), "two workers share a block"
    other = Woven(samples, 4, 24, 3, nodes)
    assert other.resumed(order.spec()) == order and order.resumed(other.spec()) == other
    assert order.is_read_alone(nodes, workers, batch) and not order.is_read_alone(nodes, workers, batch + 1)


def test_blocks_of_a_block_shuffle_are_complete() -> None:
    order, positions = BlockShuffled(np.array([0, 3, 7, 8, 15, 20]), 2, 5), np.arange(20)
    visits = order.visits(2, positions)
    for visit, samples in enumerate(order.samples_of(2, np.arange(5))):
        assert set(order.indices(2, positions[visits == visit]).tolist()) == set(samples.tolist())


def test_a_batch_has_no_two_samples_of_a_woven_block() -> None:
    order = Woven(5000, 16, 64, 3)
    rounds = order.visits(0, np.arange(5000 // order.round_samples * order.round_samples)).reshape(
        -1, order.round_samples
    )
    whole = rounds[(rounds >= 0).all(axis=1)]
    assert order.round_samples == 64 and len(whole) > 70
    assert all(len(set((visited // 2).tolist())) == 64 for visited in whole)
    over = mixing(Woven(100_000, 16, 512))
    assert list(over) == [1, 4, 16, 64] and over[1] > 0.85 and over[64] < 0.5, "blocks are spread over many batches"
    assert mixing(Shuffled(100_000)) == dict.fromkeys(over, 1.0) and mixing(Shuffled(40)) == {1: 1.0}
    assert shuffle_quality(Woven(100_000, 16, 512)) > 2 * shuffle_quality(BlockShuffled(np.arange(0, 100_001, 1600), 5))


def test_a_woven_order_of_a_reader(tmp_path: Path) -> None:
    packer.convert(
        tree_of(tmp_path / "tree", {f"{n % 2}/{n:03d}.jpg": make_jpeg(n) for n in range(40)}), "tar", tmp_path / "set"
    )
    with readers.open(tmp_path / "set") as reader:
        order = woven(reader, 5, block_bytes=4 * int(reader.sizes().mean()), open=8)
        assert woven(reader, workers=2, batch_size=4).workers == 2
        assert order == Woven(40, 4, 8, 5) and read_amplification(order, reader, request_bytes=1) < 3
        assert requests_per_sample(order, reader) < 0.5 and requests_per_sample(Shuffled(40), reader) == 1
        with pytest.raises(ValueError, match="block_bytes is 0"):
            woven(reader, block_bytes=0)
    for name in ("block", "open", "nodes", "workers", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
            Woven(9, **{name: 0})


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
        assert sum(sizes[first : last - 1]) < block_bytes, "a full block was cut"
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
    """For each position: the rank of its sample's shard in the order of staging."""
    turn = np.empty(len(order.starts) - 1, np.int64)
    turn[order.shards(epoch)] = np.arange(len(turn))
    return turn[order.starts.searchsorted(whole(order, epoch), side="right") - 1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 2**64 - 1))
def test_a_position_needs_no_shard_after_its_round(sizes: list[int], window: int, seed: int) -> None:
    """Against a direct count: rounds with parts of the shards of the last `window` turns, and each sample once."""
    order = staged(sizes, window, seed=seed)
    assert np.array_equal(np.sort(whole(order)), np.arange(len(order)))
    turns, window = turns_read(order), min(window, len(sizes))
    copied = [sizes[shard] for shard in order.shards()]
    position = 0
    for turn in range(len(sizes) + window - 1):
        share = {}
        for part in range(window):
            size = copied[turn - part] if 0 <= turn - part < len(copied) else 0
            share[turn - part] = -(-size * (part + 1) // window) + (-size * part // window)
        count = sum(share.values())
        in_round = turns[position : position + count]
        assert {t: int((in_round == t).sum()) for t in share} == share
        position += count
    assert position == len(order)


def test_shards_from_the_middle_of_an_epoch() -> None:
    order = staged([10] * 12, 3, seed=5)
    shard = order.starts.searchsorted(whole(order), side="right") - 1
    for cursor in range(len(order)):
        shards = order.shards(0, cursor)
        assert sorted(shards) == list(range(12))
        left = list(dict.fromkeys(shard[cursor:].tolist()))
        assert set(left) <= set(shards[: len(left) + 3].tolist())  # finished shards only where a round ends
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
        of_class = [sample for sample in drawn if labels[sample] == label]
        for first in range(0, len(of_class), count):
            cycle = of_class[first : first + count]
            assert len(set(cycle)) == len(cycle), "a sample repeats before its class is complete"


def test_rounds_have_different_orders() -> None:
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
    """Frozen: if this fails, running training jobs would resume in another order. Never write new numbers here."""
    assert ORDERS[kind](seed=7).indices(2, np.arange(0, 150, 19)).tolist() == GOLDEN[kind]


def test_numbers_of_staged_shards_that_never_change() -> None:
    order = staged([3, 5, 2, 4], 2, seed=1)
    assert order.shards().tolist() == [3, 1, 2, 0]
    assert whole(order).tolist() == [10, 11, 6, 13, 12, 3, 7, 5, 4, 9, 1, 8, 2, 0]


SEEDS = st.integers(0, 2**64 - 1)


def every(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int64)


# --- a permutation ------------------------------------------------------------------------------------------------
def test_every_small_n_exhaustively() -> None:
    for n in range(2001):
        permutation = Permutation(n, seed=n * 7919, epoch=n % 5)
        out = permutation.forward(every(n))
        assert out.dtype == np.int64 and np.array_equal(np.sort(out), every(n)), f"no permutation of {n}"
        assert np.array_equal(permutation.inverse(out), every(n)), f"the inverse for {n} is wrong"


@given(n=st.integers(1, 2**62 - 1) | st.integers(10**12 - 5, 10**12 + 5), seed=SEEDS, data=st.data())
def test_large_n_round_trip(n: int, seed: int, data: st.DataObject) -> None:
    edges = {0, n - 1, n // 2, max(0, n - 2)}
    positions = sorted(edges | set(data.draw(st.lists(st.integers(0, n - 1), max_size=20))))
    permutation = Permutation(n, seed, epoch=seed % 1000)
    samples = permutation.forward(np.array(positions, np.int64))
    assert len(set(samples.tolist())) == len(positions), "two positions have the same sample"
    assert samples.min() >= 0 and samples.max() < n
    assert permutation.inverse(samples).tolist() == positions
    assert [int(permutation.forward(np.int64(p))) for p in positions] == samples.tolist(), "a scalar differs"


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
    assert int(permute_each(positions[-1:], n[-1:], tweaks[-1:], keys)[0]) == out[-1], "a single permutation differs"


def test_sizes_where_float64_cannot_take_the_root() -> None:
    roots = np.array([2**31 - 1, 2**30 + 1, 94_906_267], np.int64)
    sizes = np.concatenate([roots * roots + d for d in (-1, 0, 1)])
    out = permute_each(sizes - 1, sizes, np.arange(9), derive_keys(0, 0, "test"))
    assert ((out >= 0) & (out < sizes)).all()


# --- statistics ---------------------------------------------------------------------------------------------------
def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def excess(counts: np.ndarray, expected: float) -> float:
    """The chi-square statistic, in standard deviations above its mean."""
    degrees = counts.size - 1
    return (chi_square(counts, expected) - degrees) / (2 * degrees) ** 0.5


def draws(n: int, seeds: int) -> np.ndarray:
    """[seeds, n]: one permutation of range(n) per seed, by the vectorised implementation."""
    tweaks = np.repeat(np.arange(seeds), n)
    positions = np.tile(np.arange(n), seeds)
    return permute_each(positions, np.full(len(positions), n), tweaks, derive_keys(3, 1, "test")).reshape(seeds, n)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12, 31, 64, 100])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    """For each position, and for pairs of neighbours: over seeds, every sample and every pair of samples."""
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
    """The same with separate keys for every (seed, epoch), as in training."""
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


PERMUTED = {
    (5, 0, 0): [4, 1, 2, 3, 0],
    (10, 7, 3): [5, 3, 9, 1, 4, 7, 2, 8],
    (1000, 7, 3): [472, 571, 663, 596, 477, 69, 344, 31],
    (1_281_167, 2**64 - 1, 90): [837284, 486822, 783117, 456055, 636189, 1230080, 977535, 232121],
    (10**12, 0, 0): [12096737188, 996825861629, 299674543623, 321046622785, 310312140136, 577895420963, 866932430458],
}


@pytest.mark.parametrize("case", PERMUTED, ids=str)
def test_permutations_that_never_change(case: tuple[int, int, int]) -> None:
    """Frozen: if this fails, running training jobs would resume in another order. Never write new numbers here."""
    assert Permutation(*case).forward(every(len(PERMUTED[case]))).tolist() == PERMUTED[case]


MANY = 100_000


def blocks(window: int, samples: int = 100) -> BlockShuffled:
    return BlockShuffled(np.arange(0, MANY + 1, samples), window)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quality")
    sizes = {i: (16 + i % 7 * 16, 32) for i in range(400)}
    tree_of(root / "tree", {f"class{i // 100}/{i:04d}.jpg": make_jpeg(i % 40, size) for i, size in sizes.items()})
    packer.convert(
        root / "tree", to="tar", output=root / "set", run=packer.Run(workers=1), shards=packer.Shards(samples=150)
    )
    return root


# --- mixing -------------------------------------------------------------------------------------------------------
def test_better_mixing_rates_higher() -> None:
    ladder: list[Order] = [Sequential(MANY), blocks(1), blocks(4), blocks(16), blocks(64), Shuffled(MANY)]
    rated = [shuffle_quality(order) for order in ladder]
    assert rated[0] < 0.01 < rated[1] and rated == sorted(rated), rated
    assert rated[-1] > 0.85 and 0.05 < rated[3] < 0.6
    assert shuffle_quality(NodeLocal(MANY, 4)) > 0.8, "nodes take turns, so they mix together"
    assert shuffle_quality(Weighted(np.arange(MANY) ** 4.0)) < 0.1


@pytest.mark.parametrize("window", [8, 128])
def test_the_rating_of_a_block_shuffle_follows_from_its_window(window: int) -> None:
    """window / (window + batch): a batch is drawn from the blocks of one window."""
    rated = np.mean([shuffle_quality(blocks(window), epoch, batch_size=64) for epoch in range(5)])
    assert rated == pytest.approx(window / (window + 64), rel=0.3)


def test_a_global_shuffle_rates_one_on_average() -> None:
    """Uncapped, over seeds: the formula equals the observed variance."""
    n, size = 1000, 100
    means = [Shuffled(n, seed).indices(0, np.arange(size)).mean() for seed in range(1500)]
    observed = np.mean(((np.array(means) + 0.5) / n - 0.5) ** 2)
    expected = (1 - 1 / n**2) / 12 / size * (n - size) / (n - 1)
    assert abs(observed / expected - 1) < 0.1


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 17])
def test_small_sets_have_figures_too(n: int) -> None:
    for order in (Sequential(n), Shuffled(n)):
        assert 0 <= shuffle_quality(order) <= 1


# --- reading ------------------------------------------------------------------------------------------------------
def by_hand(reader: Any, order: list[list[int]], unit: int) -> float:
    """The units that are touched, counted one by one."""
    fetched = used = 0
    for samples in order:
        units = set()
        for i in samples:
            path, offset, length = reader.byte_range(i)
            units |= {(path, unit_number) for unit_number in range(offset // unit, (offset + length - 1) // unit + 1)}
            used += length
        fetched += len(units) * unit
    return fetched / used


@pytest.mark.parametrize("unit", [1, 4096])
def test_costs_of_single_samples(packed: Path, unit: int) -> None:
    with readers.open(packed / "set") as reader:
        amplification = read_amplification(Shuffled(400), reader, request_bytes=unit)
        assert amplification == pytest.approx(by_hand(reader, [[i] for i in range(400)], unit))


def test_each_block_is_read_once_and_completely(packed: Path) -> None:
    with readers.open(packed / "set") as reader:
        order = block_shuffled(reader, block_bytes=64 << 10, window=2)
        parts = [list(range(a, b)) for a, b in zip(order.starts, order.starts[1:], strict=False)]
        assert sorted(i for part in parts for i in part) == list(range(400)) and len(parts) > 4
        assert max(int(reader.sizes()[part[:-1]].sum()) for part in parts) < 64 << 10
        whole = read_amplification(order, reader)
        assert whole >= by_hand(reader, parts, 512), "headers between the samples are not counted"
        singly = read_amplification(Shuffled(400), reader)
        assert 1 <= read_amplification(Sequential(400), reader) <= whole < singly


def test_folders_and_selections(packed: Path) -> None:
    with readers.open_folder(packed / "tree") as plain:
        sizes = plain.sizes()
        expected = (-(-sizes // 4096) * 4096).sum() / sizes.sum()
        assert read_amplification(Shuffled(400), plain) == pytest.approx(expected)
        assert read_amplification(Shuffled(100), plain.select(labels=0)) > 1
    with readers.open(packed / "set") as reader:
        few = reader.select(indices=range(0, 400, 40))
        apart, singly = read_amplification(BlockShuffled(np.array([0, 10])), few), read_amplification(Shuffled(10), few)
        assert apart == pytest.approx(singly), "samples far apart are read together"
        assert read_amplification(Shuffled(10), few) > read_amplification(Shuffled(10), few, request_bytes=512)


def test_the_report_for_users(packed: Path) -> None:
    assert (
        str(ShuffleReport(1.0249, 0.9301)) == "reads 1.02 bytes per byte used; mixes 0.93 as well as a global shuffle"
    )
    with readers.open(packed / "set") as reader:
        report = describe(Shuffled(400), reader)
        assert report.read_amplification == read_amplification(Shuffled(400), reader)
        assert report.shuffle_quality == shuffle_quality(Shuffled(400)) and "bytes per byte used" in str(report)
        assert read_amplification(Shuffled(0), reader) == 1
        with pytest.raises(ValueError, match="request_bytes is 0"):
            read_amplification(Shuffled(400), reader, request_bytes=0)
