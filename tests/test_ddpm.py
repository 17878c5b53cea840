"""The training script of the diffusion model learns, draws, and continues with the losses it would have had."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tree_of
from PIL import Image
from suites.programs import run_python

import packer
from packer.testing.samples import make_jpeg

EXAMPLES = Path(packer.__file__).resolve().parent.parent / "examples"
SIZE = 32


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_ddpm

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train_ddpm
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 images of CelebA's size, each of a colour that turns into another."""
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
def train(script: ModuleType, faces: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the script with further words; returns the lines of its losses so far, by the name of its checkpoint."""

    def run(*words: object, name: str = "run") -> list[str]:
        usual = ["--tiny", "--size", SIZE, "--batch-size", 16, "--samples", 0, "--grid", tmp_path / "grid.png"]
        files = ["--checkpoint", tmp_path / f"{name}.pt", "--losses", tmp_path / f"{name}.txt"]
        script.main([*map(str, [faces, *usual, *files, *words])])
        return (tmp_path / f"{name}.txt").read_text().splitlines()

    return run


def test_it_learns_and_draws(train: Callable[..., list[str]], tmp_path: Path, capsys: Any) -> None:
    losses = [float(line.split()[1]) for line in train("--epochs", 12, "--samples", 3)]
    assert len(losses) == 48 and abs(losses[0] - 1) < 0.1, "at first it finds no noise, and the error is its variance"
    assert sum(losses[-10:]) / 10 < 0.7
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 * SIZE, 2 * SIZE)
    printed = capsys.readouterr().out
    assert printed.count("epoch ") == 12 and printed.endswith(f"3 samples: {tmp_path / 'grid.png'}\n")


def test_a_continued_run_has_the_losses_of_an_uninterrupted_one(
    train: Callable[..., list[str]], tmp_path: Path, capsys: Any
) -> None:
    whole = train("--epochs", 3, name="whole")
    train("--epochs", 3, "--stop-after", 5)
    assert not (tmp_path / "run.txt").read_text().count("\n6 ")
    assert train("--epochs", 3) == whole and len(whole) == 12
    assert "resumed at epoch 1, step 5" in capsys.readouterr().out
    first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "run"))
    for part in ("model", "average"):
        assert all(torch.equal(first["learner"][part][name], value) for name, value in second["learner"][part].items())
    assert first["loader"] == second["loader"]


def test_two_ranks_begin_and_one_continues(faces: Path, train: Callable[..., list[str]], tmp_path: Path) -> None:
    options = ["--tiny", "--size", SIZE, "--batch-size", 16, "--epochs", 2, "--checkpoint", tmp_path / "run.pt"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = run_python(*launch, EXAMPLES / "train_ddpm.py", faces, *options, "--stop-after", 1, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.load(tmp_path / "run.pt", weights_only=True)["loader"]["cursor"] == 32
    assert [line.split()[0] for line in train("--epochs", 1)] == ["2", "3"], "the 32 images that are left"


def test_the_network_of_the_paper(script: ModuleType) -> None:
    """Appendix B gives 35.7 million parameters for these channels, levels and attention."""
    model = script.Learner.__init__.__globals__["UNet"](script.Settings(), 64)
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
def test_what_does_not_fit_is_said_before_the_training(
    words: list[str], message: str, train: Callable[..., list[str]], tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(*words)
    said = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert message in said and not list(tmp_path.glob("run.*"))


def test_images_of_other_sizes_need_another_crop(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree_of(tmp_path / "images", {f"a/{number}.jpg": make_jpeg(number) for number in range(8)})
    packer.convert(tmp_path / "images", "tar", tmp_path / "set", run=packer.Run(workers=1))
    words = [str(tmp_path / "set"), "--tiny", "--batch-size", "4", "--epochs", "1", "--samples", "0"]
    with pytest.raises(SystemExit, match=r"for images of 178 x 218 pixels, and a/0 has .*: take --crop middle"):
        script.main(words)
    script.main([*words, "--crop", "middle"])
    assert torch.load("ddpm.pt", weights_only=True)["learner"]["step"] == 2
    with pytest.raises(SystemExit, match=r"train_ddpm.py: .*no-such-set"):
        script.main(["no-such-set"])


def test_a_checkpoint_that_does_not_fit_is_refused(
    faces: Path, script: ModuleType, train: Callable[..., list[str]], tmp_path: Path
) -> None:
    train("--epochs", 1, "--stop-after", 1)
    checkpoint = tmp_path / "run.pt"
    with pytest.raises(SystemExit, match=r"run.pt cannot be continued: it has seed 0, and this run 1; remove it"):
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
