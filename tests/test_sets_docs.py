"""The commands and the code of docs/sets.md, run on small sets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from set_cases import content, wrong

import packer
import readers
from packer.cli import main
from readers.fields import encode_field

PAGE = (Path(__file__).parent.parent / "docs" / "sets.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for kind in ("bash", "python")}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sets and folders that the page names."""
    monkeypatch.chdir(tmp_path)
    names = [f"train/{name}/{i}{name[0]}" for name in ("crane bird", "crane", "owl") for i in range(8)]
    names[0] = "train/n01440764/bad"
    tree_of(Path("images"), {f"{name}.jpg": make_jpeg(n, (300, 280)) for n, name in enumerate(names)})
    tree_of(Path("blooms"), {f"train/daisy/{i}d.jpg": make_jpeg(100 + i, (300, 260)) for i in range(8)})
    tree_of(Path("new-photos"), {"train/owl/new.jpg": make_jpeg(200, (20, 90))})
    tree_of(Path("masks"), {"owl/1o.png": bytes(encode_field("mask", np.ones((4, 4), np.uint8)))})
    for source, output in (("images", "imagenet"), ("blooms", "flowers")):
        packer.convert(source, "tar", output, workers=1, samples_per_shard=5)
    return tmp_path


def test_commands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = BLOCKS["bash"]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(lines) == 10
    for line in lines:
        assert line[0] == "packer"
        with pytest.raises(SystemExit) as ended:
            main(line[1:])
        assert not ended.value.code, (line, capsys.readouterr().err)
    assert all(wrong(place / name) == [] for name in ("imagenet", "flowers", "both", "large", "both-hdf5"))
    assert "merge: sets imagenet, flowers; 25 samples, then 33" in capsys.readouterr().out
    assert content(place / "both") == content(place / "both-hdf5")


def test_code(place: Path) -> None:
    block, _ = BLOCKS["python"]
    exec(compile(block, "docs/sets.md", "exec"), {})
    assert wrong(place / "parts") == [] and len(content(place / "parts")) == 31


def test_code_without_packer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(place / "cache"))
    found: dict[str, Any] = {}
    exec(compile(BLOCKS["python"][1], "docs/sets.md", "exec"), found)
    with readers.open(place / "imagenet") as reader:
        assert found["images"]["cls"] == reader.labels.tolist()
        assert tuple(found["images"].features["cls"].names) == reader.classes
