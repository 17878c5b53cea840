"""The scripts of examples/trainers on the trainers themselves: a continued run has the samples of a whole run.

Each trainer has an environment of its own: `make test-trainers`. Without conftest.py, whose packages these lack.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import packer
from packer.testing.samples import make_jpeg

pytestmark = pytest.mark.trainers
SCRIPTS = Path(__file__).parent.parent / "examples/trainers"
KILLED = """
import runpy, sys
from ultralytics.engine.trainer import BaseTrainer
save = BaseTrainer.save_model
def save_and_die(trainer):
    save(trainer)
    if trainer.epoch == 1: raise SystemExit(0)
BaseTrainer.save_model = save_and_die
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name: str, folder: Path, *words: str, killed: bool = False) -> list[str]:
    """The record of a script: samples, and the loss or the mean of their pixels."""
    script = [*(["-c", KILLED] if killed else []), str(SCRIPTS / f"train_{name}.py")]
    place = {"YOLO_CONFIG_DIR": str(folder), "YOLO_OFFLINE": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *script, *words], cwd=folder, env={**os.environ, **place}, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return re.findall(r"trained on [^\r\n]*", done.stdout.decode())


@pytest.mark.parametrize("name", ["monai", "torchtitan", "ultralytics"])
def test_a_continued_run_trains_on_what_a_whole_run_does(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        assert os.environ.get("PACKER_TEST_TRAINERS") != "required", f"{name} is not installed"
        pytest.skip(f"needs {name}")
    for split, count in {"train": 24, "val": 8}.items():
        for i in range(count):
            path = tmp_path / "images" / split / f"class{i % 3}" / f"{split}{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_jpeg(i, (40, 48)))
    source = tmp_path / "images" if name == "ultralytics" else tmp_path / "images/train"
    packer.convert(source, to="hdf5", output=tmp_path / "set", run=packer.Run(workers=1))
    if name == "ultralytics":  # saves between epochs
        options = [str(tmp_path / "set"), "--epochs", "3", "--output"]
        whole = run(name, tmp_path, *options, "whole")
        parts = run(name, tmp_path, *options, "parts", killed=True) + run(name, tmp_path, *options, "parts")
        assert len(whole) == 18
    else:
        options = [str(tmp_path / "set"), "--checkpoint"]
        whole = run(name, tmp_path, *options, "whole", "--steps", "8")
        parts = [line for steps in "35" for line in run(name, tmp_path, *options, "parts", "--steps", steps)]
        assert len(whole) == 8
    assert parts == whole
