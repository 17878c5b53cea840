"""The example programs that train with fields learn from a few drawn images."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_fields import image_bytes, table

import packer

EXAMPLES = Path(packer.__file__).resolve().parent.parent / "examples"
EPOCHS = 3
COLOURS = {"red": (220, 40, 40), "green": (40, 220, 40), "blue": (40, 40, 220)}
FIELDS = {"mask:mask": "seg", "boxes:boxes": "bbox", "box_labels:array": "ids", "caption:text": "title"}
ARGUMENTS = {
    "segmentation": ["--classes", "4", "--size", "32"],
    "detection": ["--classes", "3"],
    "clip": [],
    "multilabel": [],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 grey images with one or two coloured rectangles each."""
    root, rows = tmp_path_factory.mktemp("drawn"), list[dict[str, Any]]()
    draw = np.random.default_rng(1)
    for n in range(32):
        pixels, mask = np.full((64, 64, 3), 120, np.uint8), np.zeros((64, 64), np.uint8)
        names = draw.permutation(list(COLOURS))[: 1 + n % 2].tolist()
        boxes = []
        for i, name in enumerate(names):
            x, y = (int(value) for value in draw.integers(2, 20, 2) + 24 * i)
            pixels[y : y + 18, x : x + 18], mask[y : y + 18, x : x + 18] = COLOURS[name], 1 + [*COLOURS].index(name)
            boxes.append([x, y, x + 18, y + 18])
        (root / f"{n}.jpg").write_bytes(image_bytes(pixels, "JPEG"))
        (root / f"{n}.png").write_bytes(image_bytes(mask))
        row = {"path": f"{n}.jpg", "seg": f"{n}.png", "bbox": boxes, "ids": [[*COLOURS].index(name) for name in names]}
        rows.append(row | {"title": " and ".join(names), "tags": names, "split": "train"})
    packer.convert(
        packer.open_source(table(root, rows), fields=FIELDS, label_column="tags"),
        "tar",
        root / "set",
        run=packer.Run(workers=1),
    )
    return root / "set"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_learns(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / f"train_{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(place), *ARGUMENTS[name], "--epochs", str(EPOCHS)])
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for models this small, and it leaves the cores to other tests
    runpy.run_path(str(script), run_name="__main__")
    torch.set_num_threads(threads)
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60, "the example is too long"
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == EPOCHS and losses[-1] < losses[0]
