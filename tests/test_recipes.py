"""The recipe scripts keep their promises, and docs/howto.md shows lines of them."""

from __future__ import annotations

import csv
import importlib
import multiprocessing
import os
import re
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from suites.training_runs import check_that_models_end_first

import packer

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8").partition("\n## Training scripts\n")[2]
RECIPES = re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sets "shapes" (the drawings of docs/start.md), "few" (some of them) and "sides" (various
    shapes)."""
    root = tmp_path_factory.mktemp("recipes")
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    drawing = re.search(r"```python file=make_shapes.py\n(.*?)```", start, re.DOTALL)
    assert drawing is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        exec(compile(drawing[1], "start.md", "exec"), {})
    packer.convert(root / "shapes", "hdf5", root / "set", run=packer.Run(workers=1))
    packer.table(root / "set").drop(keys=[f"circle/{number:03d}" for number in range(30, 120)]).save(root / "few")
    for number, path in enumerate(sorted((root / "shapes/train").rglob("0[0-2]*.jpg"))):
        target = root / "sides" / "train" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).resize(((128, 64), (96, 96), (64, 128))[number % 3]).save(target)
    packer.convert(root / "sides", "tar", root / "sides-tar", run=packer.Run(workers=1))
    return root


@pytest.fixture
def run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs an example in a separate folder, with the paths of sets in place of their names; returns its output."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for models this small, and it leaves the cores to other tests

    def run(script: str, *arguments: str) -> str:
        words = [str(place / word) if (place / word).is_dir() else word for word in arguments]
        monkeypatch.setattr(sys, "argv", [script, *words])
        torch.manual_seed(1)
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def numbers(pattern: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, output)]


def test_a_classifier_learns_and_continues_from_its_checkpoint(run: Run) -> None:
    first = run("train_classifier.py", "set", "--epochs", "1")
    rest = run("train_classifier.py", "set", "--epochs", "3")
    assert numbers(r"epoch (\d+)", first + rest) == [0, 1, 2]
    right = numbers(r"(\d+) of 90", first + rest)
    assert len(right) == 3 and right[-1] > 45


def rank_of_two(rank: int, port: int, output: Path, words: list[str]) -> None:
    """One of two ranks, as torchrun starts it."""
    torch.set_num_threads(1)
    check_that_models_end_first()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = words
    with open(output / f"rank{rank}.txt", "w", encoding="utf-8") as file, redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / words[0]), run_name="__main__")


def run_on_two_ranks(output: Path, *words: str) -> str:
    """The output of an example on two ranks, which are forked, so that they need not import PyTorch again."""
    importlib.import_module("torch._dynamo")  # by optimizers, once, and not in each rank
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=rank_of_two, args=(rank, port, output, list(words))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    ends = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert ends == [0, 0]
    return "".join((output / f"rank{rank}.txt").read_text(encoding="utf-8") for rank in range(2))


def test_two_ranks_train_and_validate_every_sample_once(place: Path, tmp_path: Path) -> None:
    checkpoint = ["--epochs", "1", "--checkpoint", str(tmp_path / "run.pt")]
    output = run_on_two_ranks(tmp_path, "train_ddp.py", str(place / "set"), *checkpoint)
    assert re.fullmatch(r"epoch 0: \d+ of 90 right on 2 ranks\n", output)
    assert torch.load(tmp_path / "run.pt", weights_only=True)["loader"]["epoch"] == 1


def test_predictions_of_two_ranks_equal_those_of_one(run: Run, place: Path, tmp_path: Path) -> None:
    alone = run("evaluate.py", "set")
    assert alone.startswith("90 samples, 0 without a guess")
    both = run_on_two_ranks(tmp_path, "evaluate.py", str(place / "set"), "--output", str(tmp_path / "both.csv"))
    assert both.split(":")[0] == alone.split(":")[0]
    assert (tmp_path / "both.csv").read_text() == (tmp_path / "predictions.csv").read_text()
    with open(tmp_path / "both.csv", newline="", encoding="utf-8") as file:
        assert len({row["key"] for row in csv.DictReader(file)}) == 90


def test_views_of_an_image_are_nearest_neighbours(run: Run) -> None:
    losses = numbers(r"loss ([\d.]+)", run("train_simclr.py", "set", "--epochs", "2", "--size", "32"))
    assert len(losses) == 2 and losses[-1] < losses[0]


def test_every_step_of_buckets_has_one_shape(run: Run) -> None:
    output = run("train_buckets.py", "sides-tar", "--area", "1024", "--multiple", "8", "--epochs", "2")
    assert len(re.findall(r"\((\d+, \d+)\)", output.splitlines()[0])) >= 3
    losses = numbers(r"loss ([\d.]+)", output)
    assert len(losses) == 2 and losses[-1] < losses[0]


def test_volumes_are_staged_cached_and_continued(run: Run, tmp_path: Path) -> None:
    for number in range(16):
        (tmp_path / "in" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        volume = np.random.default_rng(number).normal(size=(8, 8, 8)).cumsum(number % 2).astype(np.float32)
        np.save(tmp_path / "in" / "ab"[number % 2] / f"{number}.npy", volume)
    packer.convert(tmp_path / "in", "tar", tmp_path / "volumes", run=packer.Run(workers=1))
    lines = ["train_volumes.py", "volumes", "--stage", str(tmp_path / "disk"), "--epochs"]
    first = run(*lines, "1")
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert (state["sampler"]["epoch"], state["sampler"]["cursor"]) in ((0, 16), (1, 0))
    assert re.findall(r"epoch (\d): (\d+) volumes", first + run(*lines, "3")) == [("0", "16"), ("1", "16"), ("2", "16")]


def test_row_i_of_the_features_belongs_to_sample_i(run: Run, tmp_path: Path) -> None:
    output = run("extract_features.py", "set", "--size", "32")
    assert np.load(tmp_path / "features" / "train.npy").shape == (360, 64)
    assert numbers(r"(\d+)% right", output)[0] > 50  # a third, if the rows were those of other samples


def test_sets_have_their_shares(run: Run) -> None:
    output = run("train_mixed.py", "set", "sides-tar", "--weights", "0.7", "0.3", "--samples", "100", "--epochs", "2")
    assert re.findall(r"samples per set: (.*)", output) == ["[70, 30]"] * 2


def test_classes_are_drawn_equally_often_or_by_a_power_of_their_sizes(run: Run) -> None:
    output = run("train_balanced.py", "few", "--epochs", "1")
    assert "samples per class: [30, 120, 120]" in output
    drawn = [int(count) for count in re.findall(r"drawn per class: \[(.*)\]", output)[0].split(", ")]
    assert sum(drawn) == 256 and max(drawn) - min(drawn) <= 3
    output = run("train_balanced.py", "few", "--epochs", "1", "--power", "1")
    drawn = [int(count) for count in re.findall(r"drawn per class: \[(.*)\]", output)[0].split(", ")]
    assert drawn[0] < 60 < min(drawn[1:])


@pytest.mark.parametrize(("title", "text"), RECIPES, ids=[title for title, _ in RECIPES])
def test_lines_of_a_recipe_come_from_its_script(title: str, text: str) -> None:
    named = {
        name for block in re.findall(r"^```bash[^\n]*\n(.*?)^```", text, re.M | re.S) for name in scripts_in(block)
    }
    assert len(named) == 1, title
    script = (EXAMPLES / named.pop()).read_text(encoding="utf-8")
    assert len(script.splitlines()) < 66
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = {line.strip() for block in blocks for line in block.splitlines()} - {"..."}
    assert shown and shown <= {line.strip() for line in script.splitlines()}


def test_the_list_of_recipes_is_complete() -> None:
    head = PAGE.partition("\n### ")[0]
    assert set(re.findall(r"\]\(#([\w-]+)\)", head)) == {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title, _ in RECIPES
    }
    assert set(scripts_in(PAGE)) <= {path.name for path in EXAMPLES.iterdir()}


def scripts_in(text: str) -> list[str]:
    return re.findall(r"examples/(\w+\.py)", text)
