"""The parity report: its figures, and that it detects differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import make_jpeg
from gpu_doubles import hide, install
from suites.programs import run_packer
from test_device_decode import jpeg, png, turned

import packer
import readers
from packer.cli.group import cli
from packer.tools.parity import Parity, compare_with_pillow


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parity")
    (root / "images").mkdir()
    images = [
        jpeg(0, quality=90),
        jpeg(1, mode="L"),
        turned(2, 6),
        png(3),
        jpeg(4, mode="CMYK"),
        make_jpeg(5, (300, 400)),
    ]
    for i, data in enumerate(images):
        (root / f"images/{i}.jpg").write_bytes(data)
    packer.convert(root / "images", to="tar", output=root / "set")
    return root / "set"


def by_name(rows: list[Parity]) -> dict[tuple[str, str], Parity]:
    return {(row.what, row.name): row for row in rows}


def test_decoders_near_pillow_and_others(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double = install(monkeypatch, "torchcodec")
    decode_one = double.decode_one

    def off_by_two(data: bytes) -> Any:
        return (decode_one(data).to(torch.int16) + 2).clamp(0, 255).to(torch.uint8)

    monkeypatch.setattr(double, "decode_one", off_by_two)
    hide(monkeypatch, "torchvision")
    with readers.open(packed) as reader:
        rows = by_name(compare_with_pillow(reader, size=24, device="cpu"))
    cpu, codec = rows["decoder", "cpu"], rows["decoder", "torchcodec/cpu"]
    assert cpu.images == codec.images == 6 and cpu.largest == 0
    assert codec.by_device == 4 and codec.largest == 2 and 1.5 < codec.worst_image <= 2 and 0 < codec.mean < 2
    assert "packer-vision[torchvision]" in rows["decoder", "torchvision"].reason
    assert rows["resizer", "cpu"].largest <= 1 and rows["resizer", "torch"] == rows["resizer", "cpu"].__class__(
        "resizer", "torch", *list(rows["resizer", "cpu"].to_dict().values())[2:]
    )
    assert rows["resizer", "triton"].reason.startswith("Triton needs a GPU")
    assert rows["both", "cpu"].mean > rows["resizer", "cpu"].mean
    exact, coefficients = rows["both", "cpu, exact colours"], rows["both", "coefficients"]
    assert 0 < exact.mean < rows["both", "cpu"].mean
    assert coefficients.reason or replace(coefficients, name="cpu") == rows["both", "cpu"]


def test_the_command(packed: Path) -> None:
    command = ["parity", str(packed), "--samples", "3", "--size", "32"]
    rows = json.loads(CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False).stdout)
    assert {(row["what"], row["name"]) for row in rows} >= {("decoder", "cpu"), ("resizer", "torch"), ("both", "cpu")}
    assert all(row["reason"] or row["images"] == 3 for row in rows)
    shown = CliRunner().invoke(cli, command).stdout
    assert "resizer   cpu" in shown and "did not run: " in shown
    failed = run_packer(*command, "--device", "cuda:99")
    assert failed.returncode == 2 and failed.stderr.startswith("packer: ") and "Traceback" not in failed.stderr


def test_nothing_to_compare(packed: Path) -> None:
    with readers.open(packed) as reader, pytest.raises(ValueError, match="leave nothing to compare"):
        compare_with_pillow(reader, samples=0)
