"""The loop at several batch sizes: the loader is rebuilt, a size that fails is a row, and a verdict follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diagnosis_loaders as planted
import pytest
import torch
from click.testing import CliRunner
from diagnosis_loaders import Images, Plain, loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler

import readers
from packer.cli.group import cli
from readers.augment import CenterCrop, Resize
from readers.diagnosis import measure_batch_sizes
from readers.diagnosis.batch_sizes import resized
from readers.diagnosis.timing import StepTime
from readers.loader import ImageLoader


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((3, 4, 4), index) for index in range(1000))


class Own(BatchSampler):
    """Batches by rules of its own."""


def image_loader(tree: Path) -> ImageLoader:
    reader = readers.open_folder(tree, "train")
    return ImageLoader(reader, 4, augment=[Resize(16), CenterCrop(16)], seed=3, threads=1)


def size_of(batch: Any) -> int:
    return len(batch[0] if isinstance(batch, (list, tuple)) else batch)


@pytest.mark.parametrize(
    "make",
    [
        image_loader,
        lambda tree: loader(Plain(), 0),
        lambda tree: loader(Plain(), 1),
        lambda tree: loader(Plain(), 0, sampler=WeightedRandomSampler([1.0] * 64, 64)),
        lambda tree: DataLoader(Stream(), batch_size=8),
    ],
    ids=["ImageLoader", "DataLoader", "workers", "sampler", "stream"],
)
def test_a_step_gets_batches_of_each_size(make: Any, tree: Path) -> None:
    seen: list[int] = []
    result = measure_batch_sizes(make(tree), [12, 2, 5, 2], lambda batch: seen.append(size_of(batch)), seconds=0.3)
    assert [row.batch_size for row in result.rows] == [2, 5, 12]
    assert set(seen) == {2, 5, 12} and seen == sorted(seen)
    for row in result.rows:
        assert row.step and row.full and row.images == row.batch_size / row.full.seconds
        assert 0 <= row.waiting < 1 and row.device_bytes is None
    assert result.rows[2].bytes == 6 * result.rows[0].bytes and result.scaled_from is None


def test_a_rebuilt_loader_has_the_samples_of_the_old_one(tree: Path) -> None:
    for old in (image_loader(tree), loader(Images(0.0, (0.0, 0.0, 0.0)), 0)):
        few, many = next(iter(resized(old, 2))), next(iter(old))
        assert torch.equal(few[0], many[0][:2]) and torch.equal(few[1], many[1][:2])


def test_a_size_that_fails_is_a_row(tree: Path) -> None:
    def step(batch: Any) -> None:
        if size_of(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    result = measure_batch_sizes(image_loader(tree), [2, 4, 8, 1000], step, seconds=0.3)
    assert [bool(row.error) for row in result.rows] == [False, False, True, True]
    assert result.rows[2].error == "OutOfMemoryError: CUDA out of memory."
    assert "1000" in result.rows[3].error and "failed: 8, 1000" in result.advice
    with pytest.raises(torch.OutOfMemoryError):
        measure_batch_sizes(image_loader(tree), [8], step, seconds=0.3)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([1, 2], "list"),
        (DataLoader(Plain(), batch_sampler=Own(SequentialSampler(Plain()), 4, False)), "batches by Own"),
        (DataLoader(Plain(), batch_size=None), "no batches"),
    ],
    ids=["list", "batch-sampler", "no-batches"],
)
def test_a_loader_that_cannot_be_rebuilt_is_an_error(made: Any, words: str) -> None:
    with pytest.raises(readers.PipelineError, match=words):
        measure_batch_sizes(made, [2, 4], simulate_step=0.001, seconds=0.3)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [([], {"step": print}), ([0], {"step": print}), ([1], {}), ([1], {"step": print, "simulate_step": 1})],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(sizes: list[int], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sizes|simulate_step"):
        measure_batch_sizes([1], sizes, **options)


@pytest.mark.parametrize(
    ("step_ms", "load_ms", "enough", "flat", "words"),
    [
        ({2: 4, 4: 8, 8: 16}, {2: 8, 4: 8.2, 8: 8}, 4, 4, "from batches of 4 on"),
        ({2: 4, 4: 4, 8: 4}, {2: 1, 4: 1, 8: 1}, 2, 8, "images/s still rise at 8"),
        ({2: 1, 4: 1, 8: 1}, {2: 10, 4: 20, 8: 40}, None, 2, "waits for the loader at every size"),
    ],
    ids=["once-starved", "never", "always"],
)
def test_the_verdict_follows_from_the_times(
    step_ms: Any, load_ms: Any, enough: int, flat: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are given: those of the loop are the longer of both."""
    calls: list[int] = []

    def time_steps(batches: Iterator[Any], step: Any, **options: Any) -> StepTime:
        size = size_of(next(batches))
        calls.append(size)
        alone = calls.count(size) == 2
        seconds = (step_ms[size] if alone else max(step_ms[size], load_ms[size])) / 1000
        return StepTime(seconds, seconds, seconds, 0.0, 8, None)

    monkeypatch.setattr("readers.diagnosis.batch_sizes.time_steps", time_steps)
    result = measure_batch_sizes(loader(Plain(), 0), [2, 4, 8], print)
    assert (result.enough, result.flat) == (enough, flat) and words in result.advice


def test_the_command_has_a_line_for_each_size(source: Path) -> None:
    script = f"{planted.__file__}:plain_loader"
    given = ("diagnose", script, "--simulate-step", "2ms", "--seconds", "0.5", "--batch-sizes", "4,16,5000")
    shown = CliRunner().invoke(cli, given)
    assert shown.exit_code == 0 and "of a batch of 8" in shown.stdout, shown.stderr
    lines = shown.stdout[shown.stdout.index("step images/s") :].splitlines()
    rows = {int(words[0]): words for words in map(str.split, lines) if len(words) > 4 and words[0].isdecimal()}
    assert set(rows) == {4, 16, 5000} and "full" in rows[5000] and float(rows[16][1]) >= 4
    result = CliRunner().invoke(cli, (*given, "--json"))
    document = json.loads(result.stdout)["batch_sizes"]
    assert [bool(row["error"]) for row in document["rows"]] == [False, False, True] and document["scaled_from"] == 8
