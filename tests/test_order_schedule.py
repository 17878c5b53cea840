"""The schedule: every position once for any ranks, steps, tails and restarts; and the resume token."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import PackerError, ResumeError
from readers.order import NodeLocal, Order, ResumeToken, Schedule, Sequential, Shuffled
from readers.order.schedule import TAILS

TAIL = st.sampled_from(TAILS)


def orders(n: int, groups: int) -> Order:
    return Shuffled(n, 1) if groups == 1 else NodeLocal(n, groups, 4, seed=1)


def world(order: Order, batch: int, size: int, tail: Any) -> list[Schedule]:
    return [Schedule(order, batch, rank, size, tail) for rank in range(size)]


def dealt(ranks: list[Schedule], step: int, cursor: int) -> list[list[int]]:
    return [rank.positions(step, cursor).tolist() for rank in ranks]


# --- one world ----------------------------------------------------------------------------------------------------
@given(
    n=st.integers(0, 120),
    groups=st.integers(1, 4),
    batch=st.integers(1, 7),
    size=st.integers(1, 12),
    tail=TAIL,
    data=st.data(),
)
def test_all_ranks_together_see_every_position(
    n: int, groups: int, batch: int, size: int, tail: Any, data: st.DataObject
) -> None:
    cursor = data.draw(st.integers(0, n))
    ranks = world(orders(n, groups), batch, size, tail)
    steps = {rank.steps(cursor) for rank in ranks}
    assert len(steps) == 1, "ranks have different numbers of steps and would wait for each other forever"
    seen, repeats, before = [], [], cursor
    for step in range(steps.pop()):
        after = {rank.cursor_after(step, cursor) for rank in ranks}
        assert len(after) == 1
        parts = dealt(ranks, step, cursor)
        new = range(before, before := after.pop())
        flat = [p for part in parts for p in part]
        first_time = [p for p in flat if p in new]
        assert sorted(set(first_time)) == list(new), f"step {step} does not distribute the positions {new}"
        seen += list(new)
        extra = len(flat) - len(new)
        repeats.append(extra)
        assert all(0 <= p < n for p in flat)
        if before < n or tail != "pad":
            assert extra == 0, "a position is repeated"
        if tail == "exact":
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1, f"uneven shares {sizes}"
        else:
            assert len({len(part) for part in parts}) == 1
        assert all(len(part) <= batch for part in parts)
    assert seen == list(range(cursor, before)) and all(0 <= extra < size for extra in repeats)
    assert before == n if tail != "drop_last" else n - before < batch * size
    counted = [sum(len(rank.positions(s, cursor)) for s in range(rank.steps(cursor))) for rank in ranks]
    assert [rank.samples(cursor) for rank in ranks] == counted


def test_tails() -> None:
    def last(tail: str, n: int = 17) -> list[list[int]]:
        ranks = world(Sequential(n), 4, 3, tail)
        return dealt(ranks, ranks[0].steps() - 1, 0)

    assert last("drop_last") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert last("pad") == [[12, 13], [14, 15], [16, 0]]
    assert last("exact") == [[12], [13, 14], [15, 16]]
    assert last("exact", 13) == [[], [], [12]]
    assert last("pad", 1) == [[0], [0], [0]]
    assert last("pad", 2) == [[0], [1], [0]]
    ranks = world(Sequential(100), 4, 3, "drop_last")
    assert dealt(ranks, 2, 5) == [[29, 30, 31, 32], [33, 34, 35, 36], [37, 38, 39, 40]]
    assert ranks[0].steps() == 8 and ranks[0].cursor_after(7) == 96 and ranks[1].positions(0).dtype == np.int64
    assert world(Sequential(11), 4, 3, "drop_last")[0].steps() == 0


@given(n=st.integers(1, 150), nodes=st.integers(2, 4), local=st.integers(1, 3), batch=st.integers(1, 5), tail=TAIL)
def test_nodes_see_only_their_positions(n: int, nodes: int, local: int, batch: int, tail: Any) -> None:
    """Each node sees only its part of the samples, to the last step, repeats included."""
    order = NodeLocal(n, nodes, exchange_every=4, seed=3)
    for rank in world(order, batch, nodes * local, tail):
        node = rank.rank // local
        part = order.local_part(node)
        for step in range(rank.steps()):
            positions = rank.positions(step)
            if n >= nodes:
                assert (positions % nodes == node).all()
                assert all(sample in part for sample in order.indices(0, positions).tolist())


def test_worlds_that_do_not_fit_the_nodes() -> None:
    """For a world size or a cursor that is not a multiple of the nodes, positions are sliced as for any order."""
    order = NodeLocal(100, 4)
    assert dealt(world(order, 2, 3, "exact"), 0, 0) == [[0, 1], [2, 3], [4, 5]]
    assert dealt(world(order, 2, 4, "exact"), 0, 3) == [[3, 4], [5, 6], [7, 8], [9, 10]]
    assert dealt(world(order, 2, 4, "exact"), 0, 4) == [[4, 8], [5, 9], [6, 10], [7, 11]]
    assert dealt(world(order, 1, 8, "exact"), 0, 0) == [[0], [4], [1], [5], [2], [6], [3], [7]]


# --- many worlds --------------------------------------------------------------------------------------------------
@given(
    n=st.integers(1, 200),
    groups=st.integers(1, 3),
    runs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 5), TAIL), min_size=1, max_size=5),
)
def test_stopping_anywhere_and_resuming_in_another_world(
    n: int, groups: int, runs: list[tuple[int, int, int, Any]]
) -> None:
    """Runs of (world size, batch size, steps until the stop, tail) in turn; the last run goes to the end."""
    order = orders(n, groups)
    seen: list[int] = []
    cursor = 0
    for number, (size, batch, stop, tail) in enumerate([*runs, (3, 2, n, "exact")]):
        ranks = world(order, batch, size, "drop_last" if tail == "pad" else tail)
        steps = min(stop, ranks[0].steps(cursor))
        for step in range(steps):
            parts = dealt(ranks, step, cursor)
            seen += [int(s) for part in parts for s in order.indices(2, np.array(part, np.int64))]
        if steps:
            cursor = ranks[0].cursor_after(steps - 1, cursor)
        token = ResumeToken(order.seed, 2, cursor, "print", "", order.spec(), n)
        token = ResumeToken.from_dict(json.loads(json.dumps(token.to_dict())))
        order, cursor = order.with_seed(token.seed).resumed(token.order), token.cursor
        assert cursor == len(seen), f"run {number} lost or repeated samples"
    assert sorted(seen) == list(range(n)), "over all runs, samples were lost or repeated"


# --- misuse -------------------------------------------------------------------------------------------------------
def test_faulty_schedules() -> None:
    order = Sequential(10)
    for wrong, message in [
        ({"batch_size": 0}, "must be at least 1"),
        ({"batch_size": 1, "world_size": 0}, "must be at least 1"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank 2 is outside the world of 2"),
        ({"batch_size": 1, "rank": -1}, "rank -1 is outside"),
        ({"batch_size": 1, "tail": "drop"}, "tail must be one of drop_last, pad, exact, not 'drop'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Schedule(order, **wrong)  # type: ignore[arg-type]
    schedule = Schedule(order, 4)
    for cursor in (-1, 11):
        with pytest.raises(ValueError, match=f"the cursor {cursor} is outside the epoch of 10"):
            schedule.steps(cursor)
    for step in (-1, 2):
        for call in (schedule.positions, schedule.cursor_after):
            with pytest.raises(IndexError, match=f"step {step} is outside the 2 steps from position 0"):
                call(step)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


MISSING = object()


# --- tokens -------------------------------------------------------------------------------------------------------
def token(**changes: Any) -> ResumeToken:
    order = NodeLocal(1000, 4, seed=7)
    values = {"seed": 7, "epoch": 3, "cursor": 640, "fingerprint": "ab12", "decoder": "turbo 3.0", "samples": 1000}
    return ResumeToken(**{**values, "order": order.spec(), **changes})


def test_a_token_round_trip() -> None:
    saved = json.loads(json.dumps(token().to_dict()))
    assert ResumeToken.from_dict(saved) == token()
    assert ResumeToken.from_dict({**saved, "later": "member"}) == token()
    assert (saved["kind"], saved["version"]) == ("packer-resume", 1)
    big = token(seed=2**64 - 1, epoch=2**64 - 1, cursor=2**62 - 1)
    assert ResumeToken.from_dict(json.loads(json.dumps(big.to_dict()))) == big


MEMBERS = ("seed", "epoch", "cursor", "samples", "fingerprint", "decoder", "order")


@pytest.mark.parametrize("content", [None, 3, "text", [], {}, {"kind": "packer-resume"}, {"version": 1}])
def test_other_values_are_not_tokens(content: Any) -> None:
    with pytest.raises(ResumeError, match="resume token"):
        ResumeToken.from_dict(content)


@pytest.mark.parametrize(
    "change, message",
    [
        *(({name: MISSING}, f"without {name}") for name in MEMBERS),
        ({"kind": "other"}, "not a resume token"),
        ({"version": 2}, "version 2, this packer reads version 1; upgrade packer"),
        ({"version": True}, "version True"),
        ({"seed": -1}, "seed is -1, expected an integer below"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"epoch": "3"}, "epoch is '3'"),
        ({"cursor": 1.0}, "cursor is 1.0"),
        ({"cursor": True}, "cursor is True"),
        ({"samples": None}, "samples is None"),
        ({"fingerprint": 5}, "fingerprint is 5, expected a string"),
        ({"decoder": "x" * 2000}, "decoder is 'xxx"),
        ({"order": []}, "expected the spec of an order"),
        ({"order": {}}, "expected the spec of an order"),
        ({"order": {"kind": 3}}, "expected the spec of an order"),
        ({"order": {"kind": "a", "n": [1]}}, "expected a text or a number"),
        ({"order": {"kind": "a", "n": math.nan}}, "expected a text or a number"),
        ({"order": {"kind": "a", 3: 1}}, "expected a text or a number"),
        ({"order": {"kind": "a", **{str(i): i for i in range(70)}}}, "expected the spec of an order"),
    ],
)
def test_malformed_tokens(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=message) as caught:
        content = {**token().to_dict(), **change}
        ResumeToken.from_dict({name: value for name, value in content.items() if value is not MISSING})
    assert isinstance(caught.value, PackerError) and isinstance(caught.value, ValueError)


def test_a_token_fits_only_its_order() -> None:
    spec = NodeLocal(1000, 2).spec()
    token().check(fingerprint="ab12", order_spec=spec, decoder="turbo 3.0")
    with pytest.raises(ResumeError, match="data set ab12 with 1000 samples, this one is cd34 with 1000"):
        token().check(fingerprint="cd34", order_spec=spec, decoder="turbo 3.0")
    with pytest.raises(ResumeError, match="this one is ab12 with 999"):
        token().check(fingerprint="ab12", order_spec=spec, decoder="turbo 3.0", samples=999)
    with pytest.raises(ResumeError, match="this one is ab12 with 10"):
        token().check(fingerprint="ab12", order_spec=NodeLocal(10, 2).spec(), decoder="turbo 3.0")
    with pytest.raises(ResumeError, match="began with the order 'node-local', this run has 'shuffled'"):
        token().check(fingerprint="ab12", order_spec=Shuffled(1000).spec(), decoder="turbo 3.0")
    with pytest.warns(UserWarning, match="'turbo 3.0' and continues with 'nv 12'.*differ slightly"):
        token().check(fingerprint="ab12", order_spec=spec, decoder="nv 12")


def test_a_forged_cursor() -> None:
    """A cursor beyond the end of the epoch; at the end itself no samples are left."""
    order = Shuffled(10, seed=3)
    for cursor in (0, 9, 10):
        assert ResumeToken(3, 0, cursor, "", "", order.spec(), 10).resumed(order) == order
    with pytest.raises(ResumeError, match="cursor 11 is beyond the 10 positions of an epoch"):
        ResumeToken(3, 0, 11, "", "", order.spec(), 10).resumed(order)
