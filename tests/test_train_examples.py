"""The training scripts of the examples learn and draw, and a continued run has the losses of an uninterrupted run.

`training_kill_cases` runs them on two ranks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tree_of
from PIL import Image

import packer
from packer.testing.samples import make_jpeg

EXAMPLES = Path(packer.__file__).resolve().parent.parent / "examples"
SIZE = 16


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of the examples."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)


# --- a classifier -------------------------------------------------------------------------------------------------
def test_a_classifier_learns_digits(script: Callable[[str], Any], tmp_path: Path, capsys: Any) -> None:
    script("make_digits").write_digits(tmp_path / "digits")
    packer.convert(tmp_path / "digits", "hdf5", tmp_path / "set", run=packer.Run(workers=1))
    options = [
        "--model",
        "small",
        "--size",
        "16",
        "--no-flip",
        "--min-scale",
        "0.7",
        "--epochs",
        "2",
        "--batch-size",
        "32",
    ]
    script("train_imagenette").main([str(tmp_path / "set"), *options, "--checkpoint", str(tmp_path / "run.pt")])
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)%", capsys.readouterr().out)]
    assert len(accuracies) == 2 and accuracies[-1] > 80.0


def test_resnet18_trains_a_step_on_photographs(script: Callable[[str], Any], source: Path, tmp_path: Path) -> None:
    options = ["--size", "48", "--batch-size", "8", "--stop-after", "1", "--checkpoint", str(tmp_path / "run.pt")]
    script("train_imagenette").main([str(source), *options])
    assert torch.load(tmp_path / "run.pt", weights_only=True)["loader"]["cursor"] == 8


# --- a diffusion model --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 images of CelebA's size, each a gradient between two colours."""
    root, draw = tmp_path_factory.mktemp("faces"), np.random.default_rng(1)
    down = np.linspace(0, 1, 218)[:, None, None]
    (root / "images" / "face").mkdir(parents=True)
    for number in range(64):
        first, last = draw.uniform(0, 255, (2, 1, 1, 3))
        pixels = np.broadcast_to(first + (last - first) * down, (218, 178, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(root / "images" / "face" / f"{number}.jpg")
    packer.convert(root / "images", "hdf5", root / "set", run=packer.Run(workers=1))
    return root / "set"


@pytest.fixture
def train(script: Callable[[str], Any], faces: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the script with further arguments; returns the loss lines so far, from the checkpoint of that name."""

    def run(*words: object, name: str = "run") -> list[str]:
        usual = ["--tiny", "--size", SIZE, "--batch-size", 16, "--samples", 0, "--grid", tmp_path / "grid.png"]
        files = ["--checkpoint", tmp_path / f"{name}.pt", "--losses", tmp_path / f"{name}.txt"]
        script("train_ddpm").main([*map(str, [faces, *usual, *files, *words])])
        return (tmp_path / f"{name}.txt").read_text().splitlines()

    return run


def test_the_diffusion_model_learns_and_draws_and_a_continued_run_has_the_same_losses(
    train: Callable[..., list[str]], tmp_path: Path, capsys: Any
) -> None:
    whole = train("--epochs", 8, "--samples", 3, name="whole")
    losses = [float(line.split()[1]) for line in whole]
    assert len(losses) == 32 and abs(losses[0] - 1) < 0.1, "untrained: the error is the variance of the noise"
    assert sum(losses[-8:]) / 8 < 0.75
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 * SIZE, 2 * SIZE)
    printed = capsys.readouterr().out
    assert printed.count("epoch ") == 8 and printed.endswith(f"3 samples: {tmp_path / 'grid.png'}\n")
    train("--epochs", 8, "--stop-after", 25)
    assert train("--epochs", 8) == whole and "resumed at epoch 6, step 25" in capsys.readouterr().out
    first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "run"))
    for part in ("model", "average"):
        assert all(torch.equal(first["learner"][part][name], value) for name, value in second["learner"][part].items())
    assert first["loader"] == second["loader"]


def test_the_network_of_the_paper(script: Callable[[str], Any]) -> None:
    """Appendix B gives 35.7 million parameters for these channels, levels and attention."""
    with torch.device("meta"):
        model = script("ddpm_model").UNet(script("ddpm_model").Settings(), 64)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 35.7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "50"], "--size is 50, expected a multiple of 4"),
        (["--samples", "-1"], "--samples are 0 or more"),
        (["--grid", "nowhere/grid.png"], "--grid: there is no folder nowhere"),
        (["--split", "test"], "test"),
        (["--batch-size", "65"], "tail='exact', or a smaller batch_size"),
    ],
)
def test_invalid_arguments_are_reported_before_training(
    words: list[str], message: str, train: Callable[..., list[str]], tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(*words)
    error = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert message in error and not list(tmp_path.glob("run.*"))


def test_images_of_other_sizes_need_another_crop(
    script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree_of(tmp_path / "images", {f"a/{number}.jpg": make_jpeg(number) for number in range(8)})
    packer.convert(tmp_path / "images", "tar", tmp_path / "set", run=packer.Run(workers=1))
    words = [str(tmp_path / "set"), "--tiny", "--size", "8", "--batch-size", "4", "--epochs", "1", "--samples", "0"]
    main = script("train_ddpm").main
    with pytest.raises(SystemExit, match=r"for images of 178 x 218 pixels, and a/0 has .*: use --crop middle"):
        main(words)
    main([*words, "--crop", "middle"])
    assert torch.load("ddpm.pt", weights_only=True)["learner"]["step"] == 2
    with pytest.raises(SystemExit, match=r"train_ddpm.py: .*no-such-set"):
        main(["no-such-set"])


def test_a_checkpoint_that_does_not_fit_is_refused(train: Callable[..., list[str]], tmp_path: Path) -> None:
    train("--epochs", 1, "--stop-after", 1)
    checkpoint = tmp_path / "run.pt"
    with pytest.raises(SystemExit, match=r"run.pt cannot be continued: its seed is 0, expected 1; remove it"):
        train("--seed", 1)
    whole = torch.load(checkpoint, weights_only=True)
    whole["loader"]["fingerprint"] = "other"
    torch.save(whole, checkpoint)
    with pytest.raises(SystemExit, match=r"run.pt cannot be continued: .* is of the data set other"):
        train()
    for content in (b"not a checkpoint", b"", checkpoint.read_bytes()[:5000]):
        checkpoint.write_bytes(content)
        with pytest.raises(SystemExit, match=r"run.pt is not a checkpoint of train_ddpm.py; remove it"):
            train()
