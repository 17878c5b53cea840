"""The toy pipeline of the examples: its bottlenecks are named one after another, and the repairs change no result."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import packer

SCRIPT = Path(packer.__file__).resolve().parent.parent / "examples" / "toy_pipeline.py"


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(toy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
    """The output of the script."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        toy.main()
        return str(capsys.readouterr().out)

    return run


def test_three_diagnoses_and_the_figures_of_the_article(run: Callable[..., str]) -> None:
    printed = run("--seconds", 0.2, "--batch-size", 2, "--workers", 1)
    assert printed.count("the device has work") == 3 and len(printed.splitlines()[-1].split(",")) == 3
    lines = re.findall(r"^(.+?) +([\d.]+) +([\d.]+) +\d+% +\d+%$", printed, re.MULTILINE)
    assert [(name, article) for name, article, _ in lines][:5:4] == [("the step alone", "3.45"), ("as it is", "0.89")]
    assert len(lines) == 8 and all(float(figure) > 0 for _, _, figure in lines)


@pytest.mark.timing
def test_both_bottlenecks_are_named_and_then_none(run: Callable[..., str]) -> None:
    assert run().splitlines()[-1] == "culprits: transform 3, read, none"


def test_a_network_can_be_trained_instead(toy: ModuleType) -> None:
    toy.make_step("cpu")((torch.rand(2, 3, toy.SIDE, toy.SIDE), torch.tensor([0, 9])))


def test_the_repairs_change_no_result(toy: ModuleType) -> None:
    mask = np.random.default_rng(1).random((40, 30)) < 0.1
    assert np.array_equal(toy.RandomMask().dilate(mask), toy.QuickMask().dilate(mask))
    image = torch.randint(0, 256, (3, 40, 30), dtype=torch.uint8)
    slow = toy.Scale()(toy.ConvertColor()(image))
    torch.testing.assert_close(toy.ScaledColor()(image), slow, atol=1e-5, rtol=1e-5)
    raw = np.random.default_rng(2).integers(0, 256, (300, 280, 3), np.uint8)
    crops = []
    for transforms in ((toy.ToTensor(), toy.RandomCrop()), (toy.CropToTensor(),)):
        torch.manual_seed(4)
        crops.append(toy.Compose(*transforms)(raw))
    assert torch.equal(*crops) and crops[0].shape == (3, toy.SIDE, toy.SIDE)
    shares = [
        (toy.Compose(kind())(torch.ones(3, 256, 256)) == 0).float().mean() for kind in (toy.RandomMask, toy.QuickMask)
    ]
    reached = 1 + 2 * toy.RADIUS * (toy.RADIUS + 1)  # pixels at most RADIUS steps away
    assert all(abs(share - (1 - (63 / 64) ** reached)) < 0.03 for share in shares)
