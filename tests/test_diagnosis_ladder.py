"""The ladder on a clock that the test advances: the meaning of each line, and the conditions of the notes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import packer
from packer.tools.diagnose import Diagnosis, Pipeline, Rung, Stage, StepTime
from packer.tools.diagnose.diagnose import climb
from packer.tools.diagnose.ladder import StageCost, caveats
from packer.tools.diagnose.pipeline import Training, random_batches


class Clock:
    """Time that passes only when a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.wait)
    monkeypatch.setattr("packer.tools.diagnose.ladder._cpu_times", lambda: (0.0, 0.0))
    return made


class Planted(Pipeline):
    """Stages with fixed seconds a batch, one after the other, in the process of the training job."""

    concurrent = False
    distinct = 2

    def __init__(self, clock: Clock, **seconds: float) -> None:
        self.clock, self.seconds, self.asked = clock, list(seconds.values()), list[int]()
        self.stages = tuple(Stage(name, "", each, each) for name, each in seconds.items())

    def cached(self, count: int) -> Iterator[Any]:
        self.asked.append(count)
        for number in itertools.count():
            self.clock.wait(sum(self.seconds[count:]))
            yield {"image": torch.full((4, 3), 0.5 + number % self.distinct), "name": ["a"] * 4}


def lines(result: Diagnosis) -> dict[str, float]:
    return {rung.stage: round(1e3 * rung.time.seconds, 6) for rung in result.rungs}


# --- lines ----------------------------------------------------------------------------------------------------------
def test_a_line_adds_its_stage(clock: Clock) -> None:
    pipeline = Planted(clock, storage=0.001, read=0.002, decode=0.003)
    result = climb(
        pipeline, Training(lambda batch: clock.wait(0.01), lambda batch: (clock.wait(0.004), batch)[1]), seconds=1
    )
    assert lines(result) == {"random": 10, "step": 10, "copy": 14, "decode": 17, "read": 19, "storage": 20}
    assert {cost.stage: round(1e3 * cost.added, 6) for cost in result.costs} == {
        "step": 10, "copy": 4, "decode": 3, "read": 2, "storage": 1,
    }  # fmt: skip
    assert result.culprit == "copy" and result.utilization == pytest.approx(0.5) and not result.notes


def test_a_slow_loader_is_measured_where_its_time_changes(clock: Clock) -> None:
    """Five seconds a batch: lines between equal lines are left out, and the culprit is the same."""
    pipeline = Planted(clock, storage=0.0, read=0.0, one=0.0, two=5.0, three=0.0, collate=0.0, transfer=0.0)
    result = climb(pipeline, Training(lambda batch: clock.wait(0.02), simulated=True), seconds=30)
    assert result.culprit == "two" and clock.now < 60
    assert [rung.stage for rung in result.rungs if not rung.measured] and "slow" in " ".join(result.notes)
    assert lines(result) == {
        "step": 20, "transfer": 20, "collate": 20, "three": 20, "two": 5020, "one": 5020, "read": 5020, "storage": 5020,
    }  # fmt: skip


def test_a_line_that_fails_is_part_of_the_next(clock: Clock) -> None:
    class Odd(Planted):
        def cached(self, count: int) -> Iterator[Any]:
            if count == 2:
                raise TypeError("not this one")
            return super().cached(count)

    pipeline = Odd(clock, storage=0.0, read=0.01, decode=0.01, collate=0.01)
    result = climb(pipeline, Training(lambda batch: clock.wait(0.01), simulated=True), seconds=1)
    assert lines(result) == {"step": 10, "collate": 20, "decode": 20, "read": 40, "storage": 40}
    assert "no time for 'decode', which is part of 'read': TypeError: not this one" in result.notes


def test_each_line_is_announced(clock: Clock) -> None:
    announced: list[str] = []

    class Listener:
        def note(self, text: str) -> None:
            announced.append(text)

        begin = end = note

    packer.diagnose(Planted(clock, loading=0.001), simulate_step=0.01, seconds=1, watcher=Listener())  # type: ignore[arg-type]
    assert announced == ["reading the first samples", "step: 10.0 ms a step", "loading: 11.0 ms a step"]


def test_a_batch_that_the_step_changes_is_made_new_each_time(clock: Clock) -> None:
    seen: list[float] = []

    def step(batch: dict[str, Any]) -> None:
        batch.pop("name")
        seen.append(float(batch["image"].max()))
        batch["image"] *= 0
        clock.wait(0.01)

    result = climb(Planted(clock, loading=0.0), Training(step), seconds=1)
    assert min(seen) == 0.5 and any("in place" in note for note in result.notes)


# --- random data ----------------------------------------------------------------------------------------------------
def test_random_batches_look_like_the_real_ones() -> None:
    image = torch.rand(8, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    label, flag = torch.tensor([3, 5, 9, 4]), torch.tensor([True, False])
    array, small = np.array([[7, 200]], np.uint8), np.array([0.5, 1.5], np.float16)
    batches = [({"image": image, "label": label}, [flag, "text", array, small, None, torch.zeros(0)])] * 2
    made = random_batches(batches)
    assert made is not None
    first, second = next(made), next(made)
    assert first[0]["image"].stride() == image.stride() and first[0]["image"].dtype == image.dtype
    assert image.min() <= first[0]["image"].min() and first[0]["image"].max() <= image.max()
    assert not torch.equal(first[0]["image"], second[0]["image"]) and not torch.equal(first[0]["image"], image)
    labels = torch.cat([next(made)[0]["label"] for _ in range(50)])
    assert set(labels.tolist()) == set(range(3, 10)) and labels.dtype == torch.int64
    assert first[1][0] is flag and first[1][1] == "text" and first[1][4] is None
    arrays = np.concatenate([next(made)[1][2] for _ in range(50)])
    assert arrays.dtype == np.uint8 and arrays.min() >= 7 and arrays.max() <= 200 and len(np.unique(arrays)) > 9
    assert first[1][3].dtype == np.float16 and first[1][3].min() >= 0.5 and first[1][3].max() <= 1.5


@pytest.mark.parametrize("leaf", ["text", torch.tensor([True]), torch.tensor([float("nan")]), torch.eye(2).to_sparse()])
def test_values_that_cannot_be_random_are_kept(leaf: Any) -> None:
    assert random_batches([[leaf]]) is None


def test_random_data_are_made_outside_the_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, low, high: (clock.wait(0.1), tensor.fill_(low))[1])
    assert (
        lines(climb(Planted(clock, loading=0.0), Training(lambda batch: clock.wait(0.01)), seconds=1))["random"] == 10
    )


def test_a_step_that_fails_on_random_data_is_measured_on_real_data(clock: Clock) -> None:
    def step(batch: dict[str, torch.Tensor]) -> None:
        clock.wait(0.01)
        if batch["image"][0, 0] not in (0.5, 1.5):
            raise IndexError("no such row\nin the table")

    result = climb(Planted(clock, loading=0.0), Training(step), seconds=1)
    assert list(lines(result)) == ["step", "loading"]
    assert result.notes == ("no line 'random': the step failed on random data (IndexError: no such row)",)


# --- notes ----------------------------------------------------------------------------------------------------------
def by_rows(batch: dict[str, torch.Tensor]) -> bool:
    return bool(batch["image"][0, 0] == 1.5)


def by_value(batch: dict[str, torch.Tensor]) -> bool:
    return float(batch["image"].min()) not in (0.5, 1.5)


@pytest.mark.parametrize(("slow", "note"), [(by_rows, "10.0 to 30.0 ms"), (by_value, "30.0 ms with random data")])
def test_a_dynamic_model_is_noted(clock: Clock, slow: Callable[[Any], bool], note: str) -> None:
    training = Training(lambda batch: clock.wait(0.03 if slow(batch) else 0.01))
    assert any(note in each for each in climb(Planted(clock, loading=0.0), training, seconds=1).notes)


def test_pageable_batches_are_compared_with_pinned_ones(clock: Clock) -> None:
    def copy(batch: dict[str, Any]) -> Any:
        clock.wait(0.001 if "pinned" in batch else 0.005)
        return batch

    pipeline, step = Planted(clock, loading=0.0), lambda batch: clock.wait(0.01)
    result = climb(pipeline, Training(step, copy, lambda batch: {**batch, "pinned": True}), seconds=1)
    assert lines(result)["copy"] == 15 and result.pinned is not None and result.pinned.seconds == pytest.approx(0.011)
    assert "pin_memory=True" in result.notes[0] and result.to_dict()["pinned"]["steps"] > 0
    assert climb(pipeline, Training(step, copy), seconds=1).pinned is None


def test_a_loader_that_becomes_faster_is_noted(clock: Clock) -> None:
    class Warming(Planted):
        def cached(self, count: int) -> Iterator[Any]:
            self.seconds[0] = 0.01 if self.asked.count(0) == 0 else 0.001
            return super().cached(count)

    training = Training(lambda batch: clock.wait(0.01), simulated=True)
    notes = climb(Warming(clock, storage=0.01, read=0.001), training, seconds=1).notes
    assert len(notes) == 1 and "21.0 ms a step at first and 12.0 ms at the end" in notes[0]


def taking(*milliseconds: float, busy: float = 0.5, cpu: float = 0.01) -> Diagnosis:
    """A diagnosis whose lines take these times: the step, then the stages a, b, …"""
    times = [StepTime(each / 1e3, each / 1e3, each / 1e3, 0.0, 10, busy) for each in milliseconds]
    rungs = tuple(Rung(name, "", each) for name, each in zip(("step", "a", "b", "c"), times, strict=False))
    costs = tuple(StageCost(rung.stage, "", 0.0, 0.0, busy=0.01, cpu=cpu) for rung in rungs)
    return Diagnosis(rungs, costs, "b", "", 0.0, 4, 1, None, 2, None)


class Quiet(Pipeline):
    stages = (Stage("b", "", 0.005), Stage("a", "", 0.001))

    def cached(self, count: int) -> Iterator[Any]:
        raise NotImplementedError


def with_stage(error: float = 0.0, **values: Any) -> Quiet:
    made = Quiet()
    made.size_error = error
    made.stages = (replace(Quiet.stages[0], **values), Quiet.stages[1])
    return made


@pytest.mark.parametrize(
    ("result", "pipeline", "sizes", "replayed", "note"),
    [
        (taking(10, 11, 30, 31, busy=0.97), Quiet(), [], [], "97% busy on the line 'b'"),
        (taking(10, 11, 30, 31, busy=0.9), Quiet(), [], [], ""),
        (taking(10, 11, 30, 31, busy=1.0, cpu=0.001), Quiet(), [], [], ""),
        (replace(taking(10, 11, 11, 11, busy=1.0), culprit=""), Quiet(), [], [], ""),
        (taking(10, 20), Quiet(), [10**6, 3 * 10**6], [2 * 10**6], "from 1 to 3 MB"),
        (taking(10, 20), Quiet(), [10**6] * 5, [2 * 10**6], "replayed have 2 MB"),
        (taking(10, 20), Quiet(), [10**6] * 20 + [990000], [10**6], ""),
        (taking(10, 20), with_stage(0.3), [], [], "30% larger or smaller"),
        (taking(10, 20), with_stage(0.05), [], [], ""),
        (taking(10, 20), with_stage(copying=0.002), [], [], "copying recorded values takes 2.0 ms"),
        (taking(10, 20), with_stage(copying=0.0009), [], [], ""),
        (taking(10, 20), with_stage(kept_bytes=30_000), [], [], ""),
        (taking(10, 20), with_stage(seconds=0.005, kept_bytes=10**7), [], [], "10 MB that are replayed before 'b' fit"),
        (taking(10, 20), with_stage(seconds=0.005, kept_bytes=10**12), [], [], ""),
    ],
)  # fmt: skip
def test_notes_appear_where_they_apply(
    result: Diagnosis, pipeline: Pipeline, sizes: list[int], replayed: list[int], note: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("packer.tools.diagnose.ladder._cpu_cache_bytes", lambda: 32 << 20)
    notes = list(caveats(result, pipeline, None, result.step, sizes, replayed))
    assert len(notes) == bool(note) and note in "".join(notes), notes
