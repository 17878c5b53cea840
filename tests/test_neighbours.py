"""When a node that fails is asked again, and what is said of it: `cache.stores.copied`, with a clock of its own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.errors import DamagedSampleError, SlowError
from cache.stores import Extents, Store
from cache.stores.copied import Neighbours, RowOwners


class Answers(Store):
    """The row as bytes, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate: threading.Event | None = None
        self.asked = threading.Event()

    def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
        self.asked.set()
        if self.gate is not None:
            assert self.gate.wait(300)
        if self.error is not None:
            raise self.error
        return b"%d" % row


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`now` is what the store takes for the time."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("cache.stores.copied.time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock


def rows(*numbers: int) -> Extents:
    column = np.array(numbers, np.int64)
    return Extents(column, column * 0, column, column * 0 + 2)


def neighbours(connect: Callable[[int], Store | None], nodes: int = 2) -> Any:
    """Node 0, of ten rows, and others with as many."""
    return Neighbours(Answers(), 0, RowOwners(np.arange(nodes + 1) * 10), connect, pause_seconds=5.0)


@pytest.mark.parametrize("error", [SlowError("slow"), DamagedSampleError("wrong"), ConnectionError("gone"), None])
def test_pauses_double_and_the_warning_comes_once(clock: Any, error: Exception | None) -> None:
    connected: list[float] = []

    def connect(node: int) -> Store | None:
        connected.append(clock.now - 100)
        return Answers(error) if error is not None else None

    store = neighbours(connect)
    with pytest.warns(UserWarning, match="node 1 is left out for 5 s, .* read from the source: ") as said:
        for _ in range(4000):
            store.prefetch(rows(12, 3))
            assert store.read(rows(11, 5)) == [b"11", b"5"] and store.stats().left_out == (1,)
            clock.now += 0.125
    assert connected == [0, 5, 15, 35, 75, 155, 235, 315, 395, 475]
    assert len(said) == 1 and store.stats().failures == len(connected)
    assert (store.stats().own, store.stats().near, store.stats().far) == (4000, 0, 4000)


def test_one_reader_asks_a_node_that_has_failed(clock: Any) -> None:
    """The others read the source until it has answered; then all ask it, and its next failure is a first one."""
    answers: list[Answers] = [Answers(SlowError("slow"))]
    store = neighbours(lambda node: answers[-1])
    with pytest.warns(UserWarning, match="left out for 5 s"):
        store.read_one(11, 0, 0, 2)
    answers.append(Answers())
    answers[-1].gate = threading.Event()
    clock.now += 5
    trial = threading.Thread(target=store.read_one, args=(12, 0, 0, 2))
    trial.start()
    assert answers[-1].asked.wait(300)
    assert store.read_one(13, 0, 0, 2) == b"13" and store.stats().far == 2, "the trial is under way"
    answers[-1].gate.set()
    trial.join()
    assert store.read_one(14, 0, 0, 2) == b"14" and store.stats().near == 2 and store.stats().left_out == ()
    answers[-1].error = SlowError("slow again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.read_one(15, 0, 0, 2)
        clock.now += 4.9
        store.read_one(15, 0, 0, 2)
        assert store.stats().far == 4 and store.stats().failures == 2
        answers.append(Answers())
        clock.now += 0.1
        store.read_one(15, 0, 0, 2)
    assert store.stats().near == 3


def test_many_nodes_that_fail_are_not_a_flood_of_warnings(clock: Any) -> None:
    store = neighbours(lambda node: None, nodes=100)
    with pytest.warns(UserWarning, match="left out") as said:
        assert store.read(rows(*range(0, 1000, 7))) == [b"%d" % row for row in range(0, 1000, 7)]
    assert len(said) == 8 and len(store.stats().left_out) == 99


def test_errors_of_this_node_are_raised(clock: Any) -> None:
    store = neighbours(lambda node: Answers())
    store.source.error = DamagedSampleError("here")
    with pytest.raises(DamagedSampleError, match="here"):
        store.read(rows(1, 11))
    assert store.read(rows(11)) == [b"11"] and store.stats().failures == 0
