"""The training script learns, and what two ranks began one rank finishes: no sample lost, none twice."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from suites.programs import run_python

import packer
import readers
from readers.order import Shuffled

ROOT = Path(packer.__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_imagenette.py"
COMMON = ["--model", "small", "--size", "16", "--no-flip", "--min-scale", "0.7"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    run([str(ROOT / "examples" / "make_digits.py"), str(root / "digits")])
    packer.convert(root / "digits", to="hdf5", output=root / "set")
    return root / "set"


def run(arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = run_python(*arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def traced(path: Path) -> list[tuple[int, int]]:
    """(epoch, sample) of every line of the traces of all ranks."""
    files = sorted(path.parent.glob(f"{path.name}.*"))
    return [tuple(map(int, line.split())) for file in files for line in file.read_text().splitlines()]  # type: ignore[misc]


def test_it_learns_digits(digits: Path, tmp_path: Path) -> None:
    output = run([str(SCRIPT), str(digits), *COMMON, "--epochs", "3", "--checkpoint", str(tmp_path / "run.pt")])
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)%", output)]
    assert len(accuracies) == 3 and accuracies[-1] > 90.0, output


def test_resnet18_takes_a_few_steps_on_photographs(tree: Path, tmp_path: Path) -> None:
    packer.convert(tree, to="tar", output=tmp_path / "set")
    options = ["--size", "48", "--batch-size", "8", "--stop-after", "2", "--checkpoint", str(tmp_path / "run.pt")]
    run([str(SCRIPT), str(tmp_path / "set"), *options])
    assert torch.load(tmp_path / "run.pt", weights_only=True)["loader"]["cursor"] == 16


def test_two_ranks_begin_and_one_finishes(digits: Path, tmp_path: Path) -> None:
    checkpoint, first, second = tmp_path / "run.pt", tmp_path / "first", tmp_path / "second"
    options = [str(digits), *COMMON, "--batch-size", "32", "--epochs", "1", "--checkpoint", str(checkpoint)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launch, str(SCRIPT), *options, "--stop-after", "5", "--trace", str(first)])
    state = torch.load(checkpoint, weights_only=True)
    assert state["step"] == 5 and (state["loader"]["epoch"], state["loader"]["cursor"]) == (0, 320)
    output = run([str(SCRIPT), *options, "--trace", str(second)])
    assert "resumed at epoch 0, step 5, 32 batches to go in it" in output

    with readers.open(digits, "train") as reader:
        samples = Shuffled(len(reader), 0).indices(0, np.arange(320 + 32 * 32)).tolist()
    begun, finished = traced(first), traced(second)
    assert len(list(tmp_path.glob("first.*"))) == 2 and len(begun) == 320
    assert sorted(begun) == [(0, sample) for sample in sorted(samples[:320])]
    assert finished == [(0, sample) for sample in samples[320:]]
