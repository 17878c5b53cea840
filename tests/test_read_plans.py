"""Read plans: which ranges of which shards are fetched together, carried out on random bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.stores.ranges import plan_reads

SIZE = 200
RANGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, SIZE), st.integers(0, 60)).map(
        lambda r: (r[0], r[1], min(r[2], SIZE - r[1]))
    ),
    max_size=25,
)


@given(wanted=RANGES, gap=st.integers(0, 40), limit=st.integers(1, 120), repeat=st.booleans())
def test_read_plans(wanted: list[tuple[int, int, int]], gap: int, limit: int, repeat: bool) -> None:
    """Carry a plan out on random bytes: every wanted range must be where the plan says."""
    wanted = wanted * 2 if repeat else wanted
    shards = [np.random.default_rng(number).bytes(SIZE) for number in range(3)]
    shard, offset, length = np.array(wanted, np.int64).reshape(-1, 3).T
    plan = plan_reads(shard.astype(np.uint32), offset, length, gap, limit)
    runs = list(zip(plan.run_shard.tolist(), plan.run_offset.tolist(), plan.run_length.tolist(), strict=True))
    buffer = bytearray(plan.total_bytes)
    for (s, o, n), place in zip(runs, plan.run_place.tolist(), strict=True):
        assert 0 <= o <= o + n <= SIZE and 0 <= place <= place + n <= len(buffer), (
            "a run leaves its shard or the buffer"
        )
        buffer[place : place + n] = shards[s][o : o + n]
    for (s, o, n), place in zip(wanted, plan.place.tolist(), strict=True):
        assert buffer[place : place + n] == shards[s][o : o + n], f"range {(s, o, n)} is not at {place}"
    assert len(buffer) == sum(n for _, _, n in runs), "the buffer is not filled exactly"
    assert runs == sorted(runs), "runs are not in the order of the disk"
    for (s, o, n), (t, p, _) in itertools.pairwise(runs):
        assert s < t or o + n <= p, "bytes are read twice"
    for s, o, n in runs:
        spare = widest_gap([(p, p + m) for t, p, m in wanted if t == s and o <= p <= p + m <= o + n])
        assert spare <= gap, f"a run bridges {spare} unwanted bytes"
        if n > limit:
            check_not_cuttable(s, o, n, wanted, limit)


def widest_gap(ranges: list[tuple[int, int]]) -> int:
    """Between neighbours, an empty range being one as well."""
    widest, reach = 0, min(start for start, _ in ranges)
    for start, stop in sorted(ranges):
        widest, reach = max(widest, start - reach), max(reach, stop)
    return widest


def check_not_cuttable(shard: int, begin: int, length: int, wanted: list[tuple[int, int, int]], limit: int) -> None:
    """A run over the limit may have no place to cut, beyond the limit, that splits no wanted range."""
    inside = sorted((o, o + n) for s, o, n in wanted if s == shard and begin <= o < begin + length)
    for o in {o for o, _ in inside if o > begin}:
        splits_none = all(end <= o for p, end in inside if p < o)
        beyond = all(end - begin > limit for p, end in inside if p == o)
        assert not (splits_none and beyond), f"[{begin}, {begin + length}) could be cut at {o}"


def test_a_plan_of_nothing() -> None:
    empty_column = np.zeros(0, np.int64)
    plan = plan_reads(empty_column, empty_column, empty_column)
    assert plan.total_bytes == 0 and all(len(part) == 0 for part in plan[:-1])


@pytest.mark.parametrize(("gap", "limit", "runs"), [(9, 100, 2), (10, 100, 1), (11, 100, 1), (10, 19, 2), (10, 20, 1)])
def test_the_widest_gap_and_the_longest_run(gap: int, limit: int, runs: int) -> None:
    """Two ranges of 5 bytes, 10 apart: one run of 20 bytes where both limits allow it."""
    plan = plan_reads(np.zeros(2, np.uint32), np.array([0, 15], np.int64), np.array([5, 5], np.int64), gap, limit)
    assert len(plan.run_offset) == runs


def test_plans_of_large_offsets() -> None:
    offset = np.array([1 << 45, 5, (1 << 45) + 100], np.int64)
    plan = plan_reads(np.zeros(3, np.uint32), offset, np.array([100, 7, 50], np.int64))
    assert plan.run_offset.tolist() == [5, 1 << 45] and plan.run_length.tolist() == [7, 150]
    assert plan.place.tolist() == [7, 0, 107]
