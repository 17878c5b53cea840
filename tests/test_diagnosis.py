"""`packer.diagnose` and `packer diagnose`: planted culprits are found, and a loader that is cut into stages gives the
same batches."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diagnosis_loaders as planted
import pytest
import torch
from click.testing import CliRunner
from diagnosis_loaders import BATCH, FAST, SLOW, STEP, Images, Plain, loader
from suites.programs import run_packer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import packer
import readers
from packer.cli.group import cli
from packer.tools.diagnose.dataloader import DataLoaderPipeline
from packer.tools.diagnose.imageloader import ImageLoaderPipeline
from packer.tools.diagnose.ladder import diagnosis_lines, verdict_lines
from packer.tools.diagnose.pipeline import IterablePipeline, Pipeline, Stage
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader
from readers.torch import ImageDataset

SECONDS = 1.5
SCRIPT = Path(planted.__file__)


def slow_copy(batch: Any) -> Any:
    time.sleep(3 * STEP)
    return batch


class WorksAfterwards(Images):
    """The item has further work after the transform."""

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
    """A batch takes 36 ms in one of two workers, and a step 15 ms: three workers keep up."""

    stages = (Stage("storage"), Stage("read", "", 0.036, 0.001))
    workers, more_workers = 2, True

    def cached(self, count: int) -> Iterator[int]:
        for number in itertools.count():
            time.sleep(0.0 if count == 2 else 0.003)
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
    result = packer.diagnose(make(), seconds=SECONDS, **{"simulate_step": STEP, **options})
    assert result.culprit == culprit, "\n".join(diagnosis_lines(result))


def test_a_diagnosis_has_a_line_for_each_stage() -> None:
    result = packer.diagnose(loader(Images(0.0, (0.0, 0.0, 0.0))), simulate_step=0.002, copy=lambda x: x, seconds=0.5)
    names = ["step", "copy", "transfer", "collate", "transform 3", "transform 2", "transform 1", "read", "storage"]
    assert [rung.stage for rung in result.rungs] == names == [cost.stage for cost in result.costs]
    assert all(rung.time.low <= rung.time.seconds <= rung.time.high for rung in result.rungs)
    assert result.culprit in ("", "workers", *names) and result.bound <= result.full.seconds
    assert result.to_dict()["utilization"] == result.utilization and result.batch_size == BATCH
    assert verdict_lines(result, 1000)[-1] == result.verdict


# --- cuts ------------------------------------------------------------------------------------------------------------
def batches_of(pipeline: Pipeline, cut: int, count: int) -> list[Any]:
    batches = pipeline.cached(cut)
    try:
        return list(itertools.islice(batches, count))
    finally:
        getattr(batches, "close", lambda: None)()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_cut_gives_the_batches_of_the_loader(workers: int) -> None:
    """Recorded values are copies: members that work in place would add twice otherwise."""
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


class InDictionary(Images):
    """The transform takes and returns the whole sample, as in the torch tutorials."""

    def __init__(self) -> None:
        super().__init__(0.0, (0.0, 0.0, 0.0))
        self.transform = planted.Compose([dict, self.doubled])

    def doubled(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": sample["image"] * 2}

    def __getitem__(self, index: int) -> Any:
        return self.transform({"image": torch.full((3, 4, 4), index), "label": index})


class ByKeyword(Images):
    """The transform is called with keywords, as in albumentations."""

    def __init__(self) -> None:
        self.transform = self.doubled

    def doubled(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"image": image * 2}

    def __getitem__(self, index: int) -> Any:
        return self.transform(image=torch.full((3, 4, 4), index))["image"], index


class Chooses(Plain):
    def __init__(self, transform: Any) -> None:
        self.augment = transform

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.augment(image), label


class Locked(Chooses):
    """The input of the transform cannot be copied."""

    def __init__(self) -> None:
        super().__init__(planted.Compose([self.unlocked]))

    def unlocked(self, value: Any) -> torch.Tensor:
        image: torch.Tensor = value["image"]
        return image

    def __getitem__(self, index: int) -> Any:
        return self.augment({"image": torch.full((3, 4, 4), index), "lock": threading.Lock()}), index


class OneOf:
    """Has several members, of which one runs."""

    def __init__(self) -> None:
        self.transforms = [torch.neg, torch.zeros_like]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return self.transforms[0](image)


@pytest.mark.parametrize(
    ("data", "stages", "note"),
    [
        (Subset(Images(), range(100, 900)), 6, False),
        (TwoViews(), 6, False),
        (WorksAfterwards(), 3, True),
        (InDictionary(), 5, False),
        (ByKeyword(), 3, True),
        (Locked(), 3, True),
        (Chooses(OneOf()), 3, False),
        (Chooses(planted.Compose([torch.neg, OneOf()])), 5, False),
    ],
    ids=["subset", "two-views", "works-afterwards", "in-dictionary", "by-keyword", "locked", "one-of", "two"],
)
def test_data_sets_are_cut_where_possible(data: Dataset[Any], stages: int, note: bool) -> None:
    whole = loader(data, 0)
    pipeline = DataLoaderPipeline(whole)
    assert len(pipeline.stages) == stages and bool(pipeline.notes) == note
    epoch = iter(whole)
    first, *_, after = itertools.islice(epoch, pipeline.distinct + 1)
    for cut in range(stages + 1):
        batch = batches_of(pipeline, cut, 1)[0]
        expected = first if cut else after  # the whole loader continues after the recorded part
        flat, same = torch.utils._pytree.tree_leaves(batch), torch.utils._pytree.tree_leaves(expected)
        assert all(torch.equal(a, b) for a, b in zip(flat, same, strict=True)), f"cut {cut}"


@pytest.mark.parametrize("keep", [None, "coefficients"])
def test_our_loader_is_cut_by_tiers_of_the_cache(tree: Path, keep: str | None, tmp_path: Path) -> None:
    """The batches of each cut are those of the loader for the same samples in the same order."""
    reader = readers.open_folder(tree, "train")
    if keep:
        reader = readers.cached(reader, keep=keep, directory=tmp_path)
    whole = ImageLoader(
        reader, 4, augment=[Resize(16), CenterCrop(16)], shuffle=False, threads=2, fields=("image", "key")
    )
    pipeline = ImageLoaderPipeline(whole)
    assert [stage.name for stage in pipeline.stages] == ["storage", "read", "decode", "augment"]
    epoch = list(whole)
    for cut in range(5):  # the last batches are replayed, which the whole loader reaches last
        expected = epoch[-pipeline.distinct :] if cut else epoch[: pipeline.distinct]
        for (image, keys), (other, names) in zip(expected, batches_of(pipeline, cut, pipeline.distinct), strict=True):
            assert keys == names and torch.equal(image, other), f"cut {cut}"


def corner(image: torch.Tensor) -> torch.Tensor:
    return image[:, :8, :8]


@pytest.mark.parametrize(
    ("workers", "transform", "stages"),
    [
        (0, [Resize(16), CenterCrop(16)], ["decode", "augment"]),
        (2, planted.Compose([corner, torch.clone]), ["decode", "transform 1", "transform 2"]),
    ],
    ids=["ops", "callable"],
)
def test_our_data_set_is_cut_by_tiers_of_the_cache(tree: Path, transform: Any, stages: list[str], workers: int) -> None:
    whole = DataLoader(
        ImageDataset(readers.open_folder(tree, "train"), transform), batch_size=2, num_workers=workers, drop_last=True
    )
    epoch, pipeline = list(whole), DataLoaderPipeline(whole, distinct=2)
    names = ["storage", "read", *stages, "collate", *(["transfer"] if workers else [])]
    assert [stage.name for stage in pipeline.stages] == names and not pipeline.notes
    for cut in range(len(names) + 1):
        expected = epoch[:2] if cut else epoch[2:4]
        for (image, label), (other, same) in zip(expected, batches_of(pipeline, cut, 2), strict=True):
            assert torch.equal(label, same) and torch.equal(image, other), f"cut {cut}"
    for number, name in enumerate(names):
        assert (pipeline.without(number) is not None) == (name in ("collate", "transform 1", "transform 2"))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2), ["loading", "collate", "transfer"]),
        (lambda: DataLoader(Stream(), batch_size=None, num_workers=1), ["loading", "transfer"]),
        (lambda: DataLoader(Stream(), batch_size=None), ["loading"]),
    ],
)
def test_a_stream_is_cut_after_its_items(make: Callable[[], Any], names: list[str]) -> None:
    pipeline = DataLoaderPipeline(make())
    assert [stage.name for stage in pipeline.stages] == names and "IterableDataset" in pipeline.notes[0]
    first = next(iter(make()))
    for cut in range(len(names) + 1):
        for batch in batches_of(pipeline, cut, pipeline.distinct + 1):
            flat, same = torch.utils._pytree.tree_leaves(batch), torch.utils._pytree.tree_leaves(first)
            assert [getattr(leaf, "shape", ()) for leaf in flat] == [getattr(leaf, "shape", ()) for leaf in same]


def test_a_batch_sampler_as_sampler() -> None:
    """A sampler of lists: the data set makes the batches."""

    class Batches(Plain):
        def __getitem__(self, rows: Any) -> Any:
            return torch.tensor(rows)

    whole = DataLoader(Batches(), sampler=[[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], batch_size=None, num_workers=1)
    pipeline = DataLoaderPipeline(whole)
    assert [stage.name for stage in pipeline.stages] == ["storage", "read", "transfer"]
    for cut in range(4):
        batches = torch.stack(batches_of(pipeline, cut, 4)).tolist()
        assert batches == ([[1, 2], [3, 4], [5, 6], [7, 8]] if cut else [[9, 10], [1, 2], [3, 4], [5, 6]])


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_loaders_of_third_party_packages() -> None:
    """accelerate's loader is measured unchanged and its inner loader is cut; torchdata's is rebuilt as the same
    class."""
    accelerate = pytest.importorskip("accelerate.data_loader")
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    plain = ["storage", "read", "collate", "transfer"]
    prepared = accelerate.prepare_data_loader(loader(Plain()), num_processes=1, process_index=0)
    for whole, names in (
        (prepared, ["wrapper", *plain]),
        (torchdata.StatefulDataLoader(Plain(), batch_size=BATCH, num_workers=2), plain),
    ):
        pipeline = DataLoaderPipeline(whole)
        assert [stage.name for stage in pipeline.stages] == names
        first = next(iter(whole))[1].tolist()
        for cut in range(len(names) + 1):
            (_, labels), *_ = batches_of(pipeline, cut, 1)
            assert len(labels) == BATCH and (cut < len(names) - 3 or labels.tolist() == first), f"cut {cut}"


def test_files_of_a_data_set_are_not_opened_in_this_process(tmp_path: Path) -> None:
    """All workers would share a file that is opened by the first read here, including its position."""
    opened = tmp_path / "opened"

    class OpensLate(Plain):
        def __getitem__(self, index: int) -> Any:
            opened.open("a").write(f"{os.getpid()}\n")
            return super().__getitem__(index)

    pipeline = DataLoaderPipeline(loader(OpensLate()))
    for cut in range(len(pipeline.stages) + 1):
        batches_of(pipeline, cut, 1)
    assert str(os.getpid()) not in opened.read_text().split()


def test_epochs_repeat_without_end() -> None:
    """A set of two batches, and an iterable of three."""
    small = DataLoaderPipeline(DataLoader(Subset(Images(0.0, (0.0, 0.0, 0.0)), range(2 * BATCH)), batch_size=BATCH))
    assert [int(label[0]) for _, label in batches_of(small, 0, 5)] == [0, BATCH, 0, BATCH, 0]
    assert batches_of(IterablePipeline([1, 2, 3]), 0, 7) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("empty", [[], DataLoader(Subset(Images(), []), batch_size=4)], ids=["list", "DataLoader"])
def test_a_loader_without_batches_is_an_error(empty: Any) -> None:
    with pytest.raises(readers.PipelineError, match="gave no batch"):
        packer.diagnose(empty, simulate_step=0.001, seconds=1)


def test_a_loader_that_cannot_be_cut_is_measured_as_a_whole() -> None:
    """Batches of numbers that have no length and are consumed by one pass."""

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return (map(int, (row, row + 1)) for row in range(0, 100, 2))

    result = packer.diagnose(DataLoader(Plain(), batch_sampler=Batches()), simulate_step=0.001, seconds=0.1)  # type: ignore[arg-type]
    assert [rung.stage for rung in result.rungs] == ["step", "loading"]
    assert "could not be cut into stages (TypeError" in result.notes[0]


def test_a_loader_that_hangs_is_an_error() -> None:
    with pytest.raises(readers.PipelineError, match="gave no batch for 1 s"):
        packer.diagnose(loader(Images(read=0.8), 1, timeout=1), simulate_step=0.001, seconds=1)


@pytest.mark.parametrize("options", [{}, {"step": print, "simulate_step": 0.1}, {"simulate_step": -1}])
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="simulate_step"):
        packer.diagnose([1], **options)


# --- the command -----------------------------------------------------------------------------------------------------
def test_the_command_measures_the_loader_of_a_script() -> None:
    shown = run_packer("diagnose", f"{SCRIPT}:slow_second", "--step", f"{SCRIPT}:train_step", "--seconds", 0.4)
    assert shown.returncode == 0 and "transform 2" in shown.stdout and "the device has work" in shown.stdout
    options = ("--simulate-step", "20ms", "--seconds", 0.4, "--json")
    document = json.loads(run_packer("diagnose", f"{SCRIPT}:plain_loader", *options).stdout)
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
        ((f"{SCRIPT}:plain_loader", "--simulate-step", "20"), 2, ["'20' has no unit: 20ms or 20s?"]),
        (("nowhere.py:loader", "--simulate-step", "1ms"), 2, ["no such file"]),
        (("no-such-set", "--simulate-step", "1ms"), 2, ["no such file or directory", "FILE.py:NAME"]),
        ((f"{SCRIPT}:plain_loader", "--simulate-step", "1ms", "--batch-size", 4), 2, ["--batch-size", "a SET"]),
    ],
)
def test_a_broken_script_is_shown_by_its_traceback_and_a_message(arguments: Any, status: int, words: list[str]) -> None:
    done = CliRunner().invoke(cli, ["diagnose", *map(str, arguments), "--seconds", "1"])
    assert done.exit_code == status and all(word in done.output for word in words), done.output
    assert done.output.count("Traceback") == ("broken" in str(arguments)) and "packer/cli" not in done.output


def test_a_set_is_measured_with_our_loader(tree: Path) -> None:
    arguments = (tree, "--split", "train", "--batch-size", 4, "--image-size", 16, "--threads", 1)
    options = ("--simulate-step", "1ms", "--seconds", 1, "--json")
    document = json.loads(run_packer("diagnose", *arguments, *options).stdout)
    assert [rung["stage"] for rung in document["rungs"]] == ["step", "augment", "decode", "read", "storage"]
    assert document["batch_size"] == 4 and document["workers"] == 1


def test_importing_a_script_does_not_train(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loader = [1, 2, 3]\nif __name__ == '__main__':\n    raise SystemExit('it trained')\n")
    done = run_packer("diagnose", f"{script}:loader", "--simulate-step", "1ms", "--seconds", 1)
    assert done.returncode == 0, done.stderr


def test_steps_that_exceed_the_time_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"seconds=4: at least 4 steps of 20 s must be measured; give seconds=80"):
        packer.diagnose([1, 2], simulate_step=20, seconds=4)
