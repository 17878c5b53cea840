"""Several sources in one conversion, and which of their samples go where: classes, shares, strata."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import by_subject, make_jpeg, tree_of
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadNameError, SourceError

PIXELS = (16, 16)


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A tree with two splits; a tar with other classes and the same keys; a table with masks."""
    a = tree_of(tmp_path / "a" / "pets", {
        f"{split}/{name}/{i}.jpg": make_jpeg(len(name + split) * 100 + ord(name[0]) + i, PIXELS)
        for split in ("train", "val") for name in ("cat", "dog") for i in range(3)
    })  # fmt: skip
    b = tree_of(
        tmp_path / "b", {f"train/{n}/{i}.jpg": make_jpeg(50 + i, PIXELS) for n in ("dog", "ant") for i in (1, 2)}
    )
    packer.convert(b, "tar", tmp_path / "more", run=packer.Run(workers=1))
    c = tree_of(tmp_path / "c", {"x.jpg": make_jpeg(70, PIXELS), "m.png": make_jpeg(71, PIXELS, "PNG")})
    (c / "list.csv").write_text("path,label,mask\nx.jpg,cat,m.png\n")
    return [a, tmp_path / "more", c / "list.csv"]


def sources(paths: list[Path]) -> list[Any]:
    return [*paths[:2], packer.open_source(paths[2], fields={"mask": "mask"})]


@pytest.mark.parametrize("workers", [1, 2])
def test_they_become_one_set(three: list[Path], tmp_path: Path, workers: int) -> None:
    made = packer.convert(
        sources(three),
        "hdf5",
        tmp_path / "all",
        shards=packer.Shards(samples=4, shuffle=1),
        run=packer.Run(workers=workers),
    )
    assert made.splits == {"train": 6 + 4 + 1, "val": 6} and made.classes == 3
    assert packer.verify(tmp_path / "all", deep=True).ok
    truth = {}
    for name in ("cat", "dog"):
        for i in range(3):
            truth[f"pets/{name}/{i}"] = ((three[0] / "train" / name / f"{i}.jpg").read_bytes(), name, None)
    for name in ("dog", "ant"):
        for i in (1, 2):
            truth[f"more/{name}/{i}"] = ((tmp_path / "b" / "train" / name / f"{i}.jpg").read_bytes(), name, None)
    truth["list/x"] = ((tmp_path / "c" / "x.jpg").read_bytes(), "cat", (tmp_path / "c" / "m.png").read_bytes())
    with readers.open(tmp_path / "all", "train") as reader:
        assert {*reader.keys} == {*truth} and {*reader.classes} == {"cat", "dog", "ant"}
        for row, key in enumerate(reader.keys):
            mask = bytes(reader.read(row, "mask")) if reader.has(row, "mask") else None
            assert (bytes(reader.read(row)), reader.classes[reader.labels[row]], mask) == truth[key]
    with readers.open(tmp_path / "all", "val") as reader:  # only one source has it: keys stay as they are
        assert sorted(reader.keys) == [f"{name}/{i}" for name in ("cat", "dog") for i in range(3)]
    assert packer.convert(
        sources(three),
        "hdf5",
        tmp_path / "all",
        shards=packer.Shards(samples=4, shuffle=1),
        run=packer.Run(workers=workers),
    ).already_done


def test_by_the_command_line(three: list[Path], tmp_path: Path) -> None:
    ended = run_packer("convert", *three[:2], "--to", "tar", "-o", tmp_path / "out", "--split", "train",
                       "--classes", "dog,cat", "--split-fractions", "fit=0.5,test=0.5", "--stratify", "--seed", 3,
                       "--json")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["splits"] == {"fit": 4, "test": 4}
    for split in ("fit", "test"):
        with readers.open(tmp_path / "out", split) as reader:
            assert reader.classes == ("dog", "cat")
            assert all(
                f"/{reader.classes[label]}/" in key for key, label in zip(reader.keys, reader.labels, strict=True)
            )
            assert abs(Counter(reader.labels.tolist())[0] - 2.5) < 1


def test_a_class_that_another_source_has_in_train_is_no_warning(tmp_path: Path) -> None:
    def tree(name: str, *paths: str) -> Path:
        return tree_of(tmp_path / name, {path: make_jpeg(i, PIXELS) for i, path in enumerate(paths)})

    a = tree("a", "train/cat/1.jpg", "train/dog/2.jpg", "val/eel/3.jpg", "val/fox/4.jpg", "val/cat/5.jpg")
    b = tree("b", "train/eel/5.jpg", "train/cat/6.jpg")
    c = tree("c", "train/fox/5.jpg", "train/cat/7.jpg")
    two = packer.convert([a, b], "tar", tmp_path / "two", run=packer.Run(workers=1))
    assert two.warnings == (f"image folder {a}, image folder {b}: classes of val that train lacks: 'fox'",)
    assert packer.convert([a, b, c], "tar", tmp_path / "all", run=packer.Run(workers=1)).warnings == ()


def test_the_same_source_twice_is_refused(three: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(three[0])
    for other in (three[0], f"{three[0]}/", link):
        with pytest.raises(SourceError, match=r"image folder .* is given twice"):
            packer.convert([three[0], three[1], other], "tar", tmp_path / "out")
    ended = run_packer("convert", three[2], three[2], "--to", "tar", "-o", tmp_path / "out")
    assert ended.returncode == 1 and "is given twice" in ended.stderr


def test_sources_that_cannot_be_joined(tmp_path: Path, three: list[Path]) -> None:
    numbers = tmp_path / "numbers.csv"
    numbers.write_text(f"path,label\n{three[0]}/train/cat/0.jpg,4\n")
    with pytest.raises(SourceError, match="its labels are numbers, those of another source have names"):
        packer.convert([three[0], numbers], "tar", tmp_path / "out")
    with pytest.raises(ValueError, match="give output="):
        packer.convert(three[:2], "tar")
    with pytest.raises(SourceError, match="no such file or directory"):
        packer.convert([three[0], tmp_path / "none"], "tar", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": ["cat", "dgo"]}, SourceError, "no class 'dgo'; did you mean dog"),
        ({"classes": []}, ValueError, "one or more names"),
        ({"classes": ["cat", "cat"]}, ValueError, "each once"),
        ({"split_fractions": {"a": 0.5, "b": 0.5}}, SourceError, "has the splits train, val"),
        ({"split": "train", "split_fractions": {"a": 0.5}}, ValueError, "fractions sum to 0.5"),
        (
            {"split": "train", "split_fractions": {"a": 0.999, "b": 0.001}},
            SourceError,
            "no sample of 6 would be in 'b'",
        ),
        ({"split_fractions": {"a/b": 1.0}}, BadNameError, "a/b"),
        ({"stratify": True}, ValueError, "give fractions"),
        ({"fields": {"image": "image"}}, ValueError, "for samples of a program"),
    ],
)
def test_choices_that_cannot_be_made(three: list[Path], tmp_path: Path, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        packer.convert(three[0], "tar", tmp_path / "out", **by_subject(options))
    assert not (tmp_path / "out").exists()


def test_a_choice_keeps_labels_and_is_part_of_the_plan(three: list[Path], tmp_path: Path) -> None:
    first = packer.convert(
        three[0], "tar", tmp_path / "out", choose=packer.Choose(classes=["dog"]), run=packer.Run(workers=1)
    )
    assert first.splits == {"train": 3, "val": 3} and first.classes == 1
    assert packer.convert(
        three[0], "tar", tmp_path / "out", choose=packer.Choose(classes=["dog"]), run=packer.Run(workers=1)
    ).already_done
    with readers.open(tmp_path / "out", "train") as reader:
        assert np.array_equal(reader.labels, [0, 0, 0]) and all(key.startswith("dog/") for key in reader.keys)
