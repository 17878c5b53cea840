"""The scripts of examples/trainers on the real trainers: a continued run has the samples of an uninterrupted run.

Each trainer has a separate environment: `make test-trainers`. They run without conftest.py, whose packages these lack.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.testing.samples import make_jpeg

pytestmark = pytest.mark.trainers
SCRIPTS = Path(__file__).parent.parent / "examples/trainers"
# The end of a killed run: after this method of this class, as soon as the condition holds.
KILLS = {
    "rfdetr": "pytorch_lightning Trainer save_checkpoint trainer.global_step==8",
    "torchgeo": "lightning.pytorch Trainer save_checkpoint trainer.global_step==8",
    "ultralytics": "ultralytics.engine.trainer BaseTrainer save_model trainer.epoch==1",
}
KILLED = """
import importlib, os, runpy, sys
module, kind, method, condition = sys.argv[1].split()
owner = getattr(importlib.import_module(module), kind)
save = getattr(owner, method)
def save_and_die(trainer, *given, **named):
    save(trainer, *given, **named)
    if eval(condition): os._exit(0)
setattr(owner, method, save_and_die)
del sys.argv[:2]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name: str, folder: Path, *words: str, killed: bool = False) -> list[str]:
    """The record of a script: samples, and the loss or the mean of their pixels."""
    script = [*(["-c", KILLED, KILLS[name]] if killed else []), str(SCRIPTS / f"train_{name}.py")]
    place = {"YOLO_CONFIG_DIR": str(folder), "YOLO_OFFLINE": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    place["PYTHONUNBUFFERED"] = "1"
    done = subprocess.run(
        [sys.executable, *script, *words], cwd=folder, env={**os.environ, **place}, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return re.findall(r"trained on [^\r\n]*", done.stdout.decode())


def pack(name: str, folder: Path) -> str:
    """A set for the script: 24 samples to train on, and for some scripts 8 to validate on."""
    if name == "rfdetr":
        with packer.writer(folder / "set", to="hdf5") as out:
            for i in range(24):
                boxes = np.array([[4, 4, 20 + i % 3, 30], [10, 2, 40, 24]], np.float32)[: 1 + i % 2]
                out.write(str(i), image=make_jpeg(i, (40, 48)), boxes=boxes, box_labels=np.arange(len(boxes)))
        return str(folder / "set")
    for split, count in {"train": 24, "val": 8}.items():
        for i in range(count):
            path = folder / "images" / split / f"class{i % 3}" / f"{split}{i}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "torchgeo":
                np.save(path, np.random.default_rng(i).integers(0, 10_000, (13, 32, 32), np.uint16))
            else:
                path.with_suffix(".jpg").write_bytes(make_jpeg(i, (40, 48)))
    source = folder / "images" if name in KILLS else folder / "images/train"
    packer.convert(source, to="hdf5", output=folder / "set", run=packer.Run(workers=1))
    return str(folder / "set")


@pytest.mark.parametrize("name", ["monai", "torchtitan", *KILLS])
def test_a_continued_run_trains_on_the_samples_of_an_uninterrupted_run(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        assert os.environ.get("PACKER_TEST_TRAINERS") != "required", f"{name} is not installed"
        pytest.skip(f"needs {name}")
    packed = pack(name, tmp_path)
    if name in KILLS:
        epochs = 3 if name == "ultralytics" else 2  # one is killed at the end of an epoch, the others in the second
        options, steps = [packed, "--epochs", str(epochs), "--output"], 6 * epochs
        whole = run(name, tmp_path, *options, "whole")
        parts = run(name, tmp_path, *options, "parts", killed=True) + run(name, tmp_path, *options, "parts")
    else:
        options, steps = [packed, "--checkpoint"], 8
        whole = run(name, tmp_path, *options, "whole", "--steps", "8")
        parts = [line for words in "35" for line in run(name, tmp_path, *options, "parts", "--steps", words)]
    assert len(whole) == steps and parts == whole
