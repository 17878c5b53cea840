"""The order that staging follows: which shards it needs by when, how it mixes, and how an epoch of it is resumed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ResumeError
from readers.order import Schedule, Shuffled, StagedFirst, shuffle_quality


def made(sizes: list[int], window: int = 4, **options: int) -> StagedFirst:
    return StagedFirst(np.append(0, np.cumsum(sizes)).astype(np.int64), window, **options)


def whole(order: StagedFirst, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch, np.arange(len(order), dtype=np.int64))


def turns_wanted(order: StagedFirst, epoch: int = 0) -> np.ndarray:
    """By position: the place of its sample's shard in the order of staging."""
    turn = np.empty(len(order.starts) - 1, np.int64)
    turn[order.shards(epoch)] = np.arange(len(turn))
    return turn[order.starts.searchsorted(whole(order, epoch), side="right") - 1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_a_position_needs_no_shard_that_comes_later_than_its_round(sizes: list[int], window: int, seed: int) -> None:
    """Against a plain count: rounds with parts of the shards of the last `window` turns, and the samples once each."""
    order = made(sizes, window, seed=seed)
    assert np.array_equal(np.sort(whole(order)), np.arange(len(order)))
    wanted, window = turns_wanted(order), min(window, len(sizes))
    staged = [sizes[shard] for shard in order.shards()]
    position = 0
    for turn in range(len(sizes) + window - 1):
        share = {}
        for part in range(window):
            size = staged[turn - part] if 0 <= turn - part < len(staged) else 0
            share[turn - part] = -(-size * (part + 1) // window) + (-size * part // window)
        count = sum(share.values())
        found = wanted[position : position + count]
        assert {t: int((found == t).sum()) for t in share} == share
        position += count
    assert position == len(order)


def test_where_an_epoch_goes_on_its_shards_come_first() -> None:
    order = made([10] * 12, 3, seed=5)
    shard = order.starts.searchsorted(whole(order), side="right") - 1
    for cursor in range(len(order)):
        shards = order.shards(0, cursor)
        assert sorted(shards) == list(range(12))
        left = list(dict.fromkeys(shard[cursor:].tolist()))
        assert set(left) <= set(shards[: len(left) + 3].tolist())  # done ones only where a round ends
    assert np.array_equal(order.shards(7, 40), order.shards())  # a global epoch


def test_epochs() -> None:
    order, plain = made([30] * 6, 2, epochs=2, begin=3, seed=8), Shuffled(180, 8)
    for epoch in range(7):
        assert order.follows(epoch) == (epoch in (3, 4))
        assert np.array_equal(whole(order, epoch), plain.indices(epoch, np.arange(180))) == (epoch not in (3, 4))
    assert order.shards().tolist() == order.shards(3).tolist() != order.shards(4).tolist()


def test_how_well_it_mixes() -> None:
    """Better than shard by shard, the better the more shards are in the window."""
    quality = [shuffle_quality(made([500] * 64, window), batch_size=64) for window in (1, 8, 32)]
    assert quality[0] < 0.1 and quality[0] < quality[1] < quality[2]


def test_any_number_of_ranks_goes_on_anywhere() -> None:
    order = made([7, 30, 0, 19, 44], 3, seed=1)
    for first, then in ((1, 3), (4, 2)):
        begun = Schedule(order, 5, 0, first)
        cursor = begun.cursor_after(2)
        seen = order.indices(0, np.arange(cursor)).tolist()
        for rank in range(then):
            schedule = Schedule(order, 5, rank, then, "exact")
            for step in range(schedule.steps(cursor)):
                seen += order.indices(0, schedule.positions(step, cursor)).tolist()
        assert sorted(seen) == list(range(100))


def test_an_epoch_goes_on_as_it_began() -> None:
    began = made([20] * 9, 4, seed=2)
    for now in (made([20] * 9, 2, seed=2), made([20] * 9, 4, begin=5, epochs=3, seed=2)):
        again = now.resumed(began.spec())
        assert np.array_equal(whole(again), whole(began)) and not np.array_equal(whole(now), whole(began))
    for spec in ({**began.spec(), "window": 0}, {**began.spec(), "window": "4"}, made([30] * 6).spec()):
        with pytest.raises(ResumeError, match="the epoch began with"):
            began.resumed(spec)


def test_its_numbers_are_frozen() -> None:
    """Running trainings depend on them."""
    order = made([3, 5, 2, 4], 2, seed=1)
    assert order.shards().tolist() == [3, 1, 2, 0]
    assert whole(order).tolist() == [10, 11, 6, 13, 12, 3, 7, 5, 4, 9, 1, 8, 2, 0]


@pytest.mark.parametrize("options", [{"window": 0}, {"epochs": 0}, {"begin": -1}, {"seed": -1}])
def test_impossible_parameters(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        made([3, 4], **{"window": 2, **options})
    for starts in ([1, 2], [0, 3, 2], []):
        with pytest.raises(ValueError, match="must rise from 0"):
            StagedFirst(np.array(starts))
