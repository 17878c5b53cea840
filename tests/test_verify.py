"""Verification names all damage, and no intact part; inspection describes a set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import make_jpeg
from PIL import Image
from set_cases import FORMATS, convert, damage

import packer
from packer.cli.group import cli


@pytest.fixture(params=FORMATS)
def packed(request: pytest.FixtureRequest, tree: Path, pack: Callable[..., Path], tmp_path: Path) -> Path:
    """A set that tests may change."""
    return Path(shutil.copytree(pack(tree, request.param, samples_per_shard=12), tmp_path / "set"))


def test_an_intact_set(packed: Path, tree: Path) -> None:
    for deep in (False, True):
        result = packer.verify(packed, deep=deep, against=tree, workers=2)
        assert result.ok and result.problems == () and (result.samples, result.shards) == (45, 4)


def test_a_damaged_sample_is_named(packed: Path) -> None:
    path, _ = damage(packed, 17)
    result = packer.verify(packed, workers=1)
    named = [(p.split, p.shard, p.index, p.key) for p in result.problems if p.index is not None]
    assert named == [("train", path.name, 17, "dog/dog_005")]
    assert "is damaged: CRC32C" in result.problems[-1].what and not result.ok
    assert any("whole file" in p.what for p in packer.verify(packed, deep=True, workers=1).problems)


def test_missing_truncated_and_grown_shards(packed: Path) -> None:
    shards = sorted(path for path in packed.iterdir() if path.name.startswith("train-"))
    size = shards[1].stat().st_size
    shards[0].unlink()
    with open(shards[1], "r+b") as file:
        file.truncate(size - 1)
    with open(shards[2], "ab") as file:
        file.write(b"x")
    whats = {p.shard: p.what for p in packer.verify(packed, workers=1).problems}
    assert "cannot be opened: No such file" in whats[shards[0].name]
    assert f"has {size - 1} bytes, expected {size} as indexed" in whats[shards[1].name]
    assert "bytes, " in whats[shards[2].name] and len(whats) == 3


def test_a_damaged_index_column_is_named(packed: Path) -> None:
    for column in ("label", "image.offset", "image.length", "image.crc32c", "key", "shard"):
        path = packed / "train.index" / f"{column}.npy"
        data, values = path.read_bytes(), np.load(path)
        values[5] += 1
        np.save(path, values)
        (first, *others) = packer.verify(packed, workers=1).problems
        assert first.shard == f"train.index/{column}.npy", "the damaged file is not named"
        if column != "shard":
            assert {problem.index for problem in others} == ({5} if column != "key" else {0})
        path.write_bytes(data)
    (packed / "val.index" / "width.npy").unlink()
    (problem, *others) = packer.verify(packed, workers=1).problems
    assert problem.split == "val" and others == []
    assert "missing index column; rebuild it with  packer index" in problem.what


def test_against_another_source(packed: Path, tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tree, other)
    (other / "train/cat/cat_000.JPEG").write_bytes(make_jpeg(999))
    (other / "train/cat/cat_001.JPEG").unlink()
    (other / "train/dog/new.jpg").write_bytes(make_jpeg(998))
    (other / "val/owl/owl_000.JPEG").rename(other / "val/cat/owl_000.JPEG")
    problems = packer.verify(packed, against=other, workers=1).problems
    assert sorted(p.what for p in problems) == [
        "cat/owl_000.JPEG is in the source, but not in the set",
        "differs from the source",
        "dog/new.jpg is in the source, but not in the set",
        "is not in the source",
        "is not in the source",
    ]
    assert {p.key for p in problems} == {None, "cat/cat_000", "cat/cat_001.JPEG", "owl/owl_000.JPEG"}


def test_inspect_does_not_take_counts_for_bits(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(8):
        Image.fromarray(np.full((6, 5), 5000 * number, np.uint16)).save(tmp_path / "in" / f"{number}.png")
    convert(tmp_path / "in", tmp_path / "out", "hdf5")
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "out")]).output
    assert "  coding  1 component: 8 images\n" in shown
    assert "  remark  8 images with more than 8 bits per channel (the first: 0.png)" in shown


def test_inspect(packed: Path, tree: Path, tmp_path: Path) -> None:
    result = packer.inspect(packed)
    train = result.splits["train"]
    assert (train.samples, train.shards, train.label_counts) == (36, 3, {0: 12, 1: 12, 2: 12})
    assert train.media == {"jpeg": 36}
    assert train.coding == {"jpeg baseline": 36, "3 components": 36}
    assert train.dimensions["width"] == dict.fromkeys((0, 5, 25, 50, 75, 95, 100), 32)
    sizes = sorted(path.stat().st_size for path in (tree / "train").rglob("*.JPEG"))
    assert (train.size_percentiles[0], train.size_percentiles[100]) == (sizes[0], sizes[-1])
    assert result.duplicates == 0 and result.classes == ("cat", "dog", "owl")
    assert json.loads(json.dumps(result.to_dict(), default=list))["format"] == result.format

    source = tmp_path / "twins"
    shutil.copytree(tree, source)
    shutil.copy(source / "train/cat/cat_000.JPEG", source / "val/dog/twin.JPEG")
    twins = packer.inspect(convert(source, tmp_path / "twins-tar").output)
    assert twins.duplicates == 1
    assert twins.duplicate_examples == (("train/cat/cat_000", "val/dog/twin"),)
