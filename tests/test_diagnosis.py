"""`readers.diagnose` and `packer diagnose`: planted culprits are found, and what is cut is otherwise what it was."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diagnosis_loaders as planted
import pytest
import torch
from diagnosis_loaders import BATCH, FAST, SLOW, STEP, Images, Plain, loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import readers
from readers.augment import CenterCrop, Resize
from readers.diagnosis.dataloader import DataLoaderPipeline
from readers.diagnosis.imageloader import ImageLoaderPipeline
from readers.diagnosis.pipeline import IterablePipeline, Pipeline, Stage
from readers.diagnosis.text import diagnosis_lines
from readers.loader import ImageLoader

SECONDS = 1.5
SCRIPT = Path(planted.__file__)


def slow_copy(batch: Any) -> Any:
    time.sleep(3 * STEP)
    return batch


class WorksAfterwards(Images):
    """What comes out of the transform is not what it returns."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        return image.double(), label


class TwoViews(Images):
    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 16, 16), index, dtype=torch.int32)
        return {"views": [self.transform(image.clone()), self.transform(image.clone())], "label": index}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((3, 4, 4), index), index) for index in range(1000))


class Steady(Pipeline):
    """Takes 50 ms a batch in one of two workers, where a step takes 15 ms: four workers keep up."""

    stages = (Stage("storage"), Stage("read", "", 0.05, 0.001))
    workers, more_workers = 2, True

    def cached(self, count: int) -> Iterator[int]:
        for number in itertools.count():
            time.sleep(0.0 if count == 2 else 0.01)
            yield number


# --- the verdict -----------------------------------------------------------------------------------------------------
@pytest.mark.timing
@pytest.mark.parametrize(
    ("make", "options", "culprit"),
    [
        (lambda: loader(Images(read=SLOW)), {}, "read"),
        (lambda: loader(Images(members=(FAST, SLOW, FAST))), {}, "transform 2"),
        (lambda: loader(collate_fn=planted.slow_collate), {}, "collate"),
        (lambda: loader(Plain()), {"copy": slow_copy}, "copy"),
        (Steady, {}, "workers"),
        (lambda: [torch.zeros(BATCH)] * 4, {}, ""),
        (lambda: loader(Images(read=SLOW), workers=0), {}, "read"),
        (lambda: (time.sleep(0.05) or torch.zeros(BATCH) for _ in range(10**6)), {}, "loading"),
    ],
    ids=["read", "transform", "collate", "copy", "workers", "training", "no-workers", "any-iterable"],
)  # fmt: skip
def test_the_planted_culprit_is_named(make: Callable[[], Any], options: dict[str, Any], culprit: str) -> None:
    result = readers.diagnose(make(), seconds=SECONDS, **{"simulate_step": STEP, **options})
    assert result.culprit == culprit, "\n".join(diagnosis_lines(result))


def test_a_diagnosis_has_a_line_for_each_stage() -> None:
    result = readers.diagnose(loader(Images(0.0, (0.0, 0.0, 0.0))), simulate_step=0.002, copy=lambda x: x, seconds=1)
    names = ["step", "copy", "transfer", "collate", "transform 3", "transform 2", "transform 1", "read", "storage"]
    assert [rung.stage for rung in result.rungs] == names == [cost.stage for cost in result.costs]
    assert all(rung.time.low <= rung.time.seconds <= rung.time.high for rung in result.rungs)
    assert result.culprit in ("", "workers", *names) and result.bound <= result.full.seconds
    assert result.to_dict()["utilization"] == result.utilization and result.batch_size == BATCH
    assert diagnosis_lines(result)[-1] == result.verdict


# --- what is cut -----------------------------------------------------------------------------------------------------
def batches_of(pipeline: Pipeline, cut: int, count: int) -> list[Any]:
    batches = pipeline.cached(cut)
    try:
        return list(itertools.islice(batches, count))
    finally:
        getattr(batches, "close", lambda: None)()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_cut_gives_the_batches_of_the_loader(workers: int) -> None:
    """Recorded values are copies: members that work in place would add again each time."""
    pipeline = DataLoaderPipeline(loader(Images(0.0, (0.0, 0.0, 0.0)), workers))
    names = [stage.name for stage in pipeline.stages]
    members = ["transform 1", "transform 2", "transform 3"]
    assert names == ["storage", "read", *members, "collate", *(["transfer"] if workers else [])]
    for cut in range(len(pipeline.stages) + 1):
        for image, label in batches_of(pipeline, cut, 2 * pipeline.distinct):
            assert len(label) == BATCH and (image == label[:, None, None, None] + 3).all(), f"cut {cut}"
    for number, name in enumerate(names):
        batches = pipeline.without(number)
        assert (batches is not None) == (name in (*members, "collate"))
        for image, label in itertools.islice(batches or (), 10):
            assert (image == label[:, None, None, None] + 3).all(), f"without {name}"


def test_a_free_stage_is_not_run() -> None:
    data = Images(0.0, (0.0, 0.0, 0.0))
    pipeline = DataLoaderPipeline(loader(data, 0))
    seen: list[str] = []
    for member in data.transform.transforms:
        member.__class__ = type("Counted", (type(member),), {"__call__": lambda self, x: (seen.append(self), x)[1]})
    for cut, runs in ((0, 3), (1, 3), (2, 3), (3, 2), (4, 1), (5, 0), (6, 0)):
        seen.clear()
        batches_of(pipeline, cut, 1)
        assert len(seen) == runs * BATCH * (pipeline.distinct if cut == 6 else 1), f"cut {cut}"
    seen.clear()
    next(iter(pipeline.without(3) or ()))
    assert len(seen) == 2 * BATCH


@pytest.mark.parametrize(
    ("data", "stages", "note"),
    [
        (Subset(Images(), range(100, 900)), 6, False),
        (TwoViews(), 6, False),
        (WorksAfterwards(), 3, True),
    ],
    ids=["subset", "two-views", "works-afterwards"],
)  # fmt: skip
def test_data_sets_are_cut_where_they_can_be(data: Dataset[Any], stages: int, note: bool) -> None:
    whole = loader(data, 0)
    pipeline = DataLoaderPipeline(whole)
    assert len(pipeline.stages) == stages and bool(pipeline.notes) == note
    first = next(iter(whole))
    for cut in range(stages + 1):
        found = batches_of(pipeline, cut, 1)[0]
        flat, expected = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(first)
        assert all(torch.equal(a, b) for a, b in zip(flat, expected, strict=True)), f"cut {cut}"


def test_our_loader_is_cut_by_tiers_of_the_cache(tree: Path) -> None:
    """The batches of each cut are those that the loader makes of the same samples in the same order."""
    reader = readers.open_folder(tree, "train")
    whole = ImageLoader(
        reader, 4, augment=[Resize(16), CenterCrop(16)], shuffle=False, threads=2, fields=("image", "key")
    )
    pipeline = ImageLoaderPipeline(whole)
    assert [stage.name for stage in pipeline.stages] == ["storage", "read", "decode", "augment"]
    expected = list(itertools.islice(whole, pipeline.distinct))
    for cut in range(5):
        for (image, keys), (other, names) in zip(expected, batches_of(pipeline, cut, pipeline.distinct), strict=True):
            assert keys == names and torch.equal(image, other), f"cut {cut}"


def test_a_stream_is_measured_as_a_whole() -> None:
    result = readers.diagnose(DataLoader(Stream(), batch_size=BATCH), simulate_step=0.001, seconds=1)
    assert [rung.stage for rung in result.rungs] == ["step", "loading"] and "IterableDataset" in result.notes[0]


def test_epochs_follow_one_another_without_an_end() -> None:
    """A set of two batches, and an iterable of three."""
    small = DataLoaderPipeline(DataLoader(Subset(Images(0.0, (0.0, 0.0, 0.0)), range(2 * BATCH)), batch_size=BATCH))
    assert [int(label[0]) for _, label in batches_of(small, 0, 5)] == [0, BATCH, 0, BATCH, 0]
    assert batches_of(IterablePipeline([1, 2, 3]), 0, 7) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("empty", [[], DataLoader(Subset(Images(), []), batch_size=4)], ids=["list", "DataLoader"])
def test_a_loader_without_batches_is_an_error(empty: Any) -> None:
    with pytest.raises(readers.PipelineError, match="gave no batch"):
        readers.diagnose(empty, simulate_step=0.001, seconds=1)


@pytest.mark.parametrize("options", [{}, {"step": print, "simulate_step": 0.1}, {"simulate_step": -1}])
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="simulate_step"):
        readers.diagnose([1], **options)


# --- the command -----------------------------------------------------------------------------------------------------
def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packer", "diagnose", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_measures_what_a_script_has() -> None:
    shown = run(f"{SCRIPT}:slow_second", "--step", f"{SCRIPT}:train_step", "--seconds", 1)
    assert shown.returncode == 0 and "transform 2" in shown.stdout and "the device has work" in shown.stdout
    document = json.loads(run(f"{SCRIPT}:plain_loader", "--simulate-step", "20ms", "--seconds", 1, "--json").stdout)
    assert document["rungs"][0]["time"]["seconds"] >= 0.02 and document["batch_size"] == BATCH


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((f"{SCRIPT}:broken_loader", "--simulate-step", "1ms"), 1, ["not mounted", "broken_loader() failed"]),
        ((f"{SCRIPT}:plain_loader", "--step", f"{SCRIPT}:broken_step"), 1, ["in the model", "failed while"]),
        ((f"{SCRIPT}:no_such", "--simulate-step", "1ms"), 1, ["no 'no_such'", "plain_loader"]),
        ((f"{SCRIPT}:BATCH", "--simulate-step", "1ms"), 1, ["expected an iterable"]),
        ((f"{SCRIPT}:plain_loader",), 2, ["--step", "--simulate-step"]),
        ((f"{SCRIPT}:plain_loader", "--simulate-step", "fast"), 2, ["not a valid time"]),
        (("nowhere.py:loader", "--simulate-step", "1ms"), 2, ["no such file"]),
        (("no-such-set", "--simulate-step", "1ms"), 2, ["no such file or directory", "FILE.py:NAME"]),
        ((f"{SCRIPT}:plain_loader", "--simulate-step", "1ms", "--batch-size", 4), 2, ["--batch-size", "DATASET"]),
    ],
)
def test_a_broken_script_gets_its_traceback_and_a_line(arguments: Any, status: int, words: list[str]) -> None:
    done = run(*arguments, "--seconds", 1)
    assert done.returncode == status and all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("Traceback") == ("broken" in str(arguments)) and "packer/cli" not in done.stderr


def test_a_set_is_measured_with_our_loader(tree: Path) -> None:
    arguments = (tree, "--split", "train", "--batch-size", 4, "--image-size", 16, "--threads", 1)
    document = json.loads(run(*arguments, "--simulate-step", "1ms", "--seconds", 1, "--json").stdout)
    assert [rung["stage"] for rung in document["rungs"]] == ["step", "augment", "decode", "read", "storage"]
    assert document["batch_size"] == 4 and document["workers"] == 1


def test_importing_a_script_does_not_train(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loader = [1, 2, 3]\nif __name__ == '__main__':\n    raise SystemExit('it trained')\n")
    assert run(f"{script}:loader", "--simulate-step", "1ms", "--seconds", 1).returncode == 0
