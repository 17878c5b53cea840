"""Selecting samples: several sources in one set, `where`, classes, shares and strata.

`where` selects the same samples as a later `subset`, for any source and number of workers, and after an interruption.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert, files_of, make_jpeg, tree_of
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadNameError, BadSampleError, SourceError, UnknownNameError

PIXELS = (16, 16)


# --- several sources ---------------------------------------------------------------------------------------------
@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A tree with two splits; a tar with other classes and the same keys; a table with masks."""
    a = tree_of(tmp_path / "a" / "pets", {
        f"{split}/{name}/{i}.jpg": make_jpeg(len(name + split) * 100 + ord(name[0]) + i, PIXELS)
        for split in ("train", "val") for name in ("cat", "dog") for i in range(3)
    })  # fmt: skip
    files = {f"train/{name}/{i}.jpg": make_jpeg(50 + i, PIXELS) for name in ("dog", "ant") for i in (1, 2)}
    convert(tree_of(tmp_path / "b", files), tmp_path / "more")
    c = tree_of(tmp_path / "c", {"x.jpg": make_jpeg(70, PIXELS), "m.png": make_jpeg(71, PIXELS, "PNG")})
    (c / "list.csv").write_text("path,label,mask\nx.jpg,cat,m.png\n")
    return [a, tmp_path / "more", c / "list.csv"]


def test_several_sources_become_one_set(three: list[Path], tmp_path: Path) -> None:
    sources = [*three[:2], packer.open_source(three[2], fields={"mask": "mask"})]
    made = convert(sources, tmp_path / "all", "hdf5", samples=4, shuffle=1)
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
    with readers.open(tmp_path / "all", "val") as reader:  # only one source has this split, so keys stay unchanged
        assert sorted(reader.keys) == [f"{name}/{i}" for name in ("cat", "dog") for i in range(3)]
    assert convert(sources, tmp_path / "all", "hdf5", samples=4, shuffle=1).already_done
    convert(sources, tmp_path / "by 2", "hdf5", samples=4, shuffle=1, workers=2)
    assert files_of(tmp_path / "all") == files_of(tmp_path / "by 2")


def test_choices_by_the_command_line(three: list[Path], tmp_path: Path) -> None:
    ended = run_packer("convert", *three[:2], "--to", "tar", "-o", tmp_path / "out", "--split", "train",
                       "--classes", "dog,cat", "--split-fractions", "fit=0.5,test=0.5", "--stratify", "--seed", 3,
                       "--json")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["splits"] == {"fit": 4, "test": 4}
    for split in ("fit", "test"):
        with readers.open(tmp_path / "out", split) as reader:
            assert reader.classes == ("dog", "cat")
            names = [reader.classes[label] for label in reader.labels]
            assert all(f"/{name}/" in key for key, name in zip(reader.keys, names, strict=True))
            assert abs(Counter(reader.labels.tolist())[0] - 2.5) < 1


def test_a_class_that_another_source_has_in_train_causes_no_warning(tmp_path: Path) -> None:
    def tree(name: str, *paths: str) -> Path:
        return tree_of(tmp_path / name, {path: make_jpeg(i, PIXELS) for i, path in enumerate(paths)})

    a = tree("a", "train/cat/1.jpg", "train/dog/2.jpg", "val/eel/3.jpg", "val/fox/4.jpg", "val/cat/5.jpg")
    b = tree("b", "train/eel/5.jpg", "train/cat/6.jpg")
    c = tree("c", "train/fox/5.jpg", "train/cat/7.jpg")
    warning = f"folder {a}, folder {b}: classes of val that train lacks: 'fox'"
    assert convert([a, b], tmp_path / "two").warnings == (warning,)
    assert convert([a, b, c], tmp_path / "all").warnings == ()


def test_sources_that_cannot_be_joined(three: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(three[0])
    for other in (three[0], f"{three[0]}/", link):
        with pytest.raises(SourceError, match=r"folder .* is given twice"):
            convert([three[0], three[1], other], tmp_path / "out")
    numbers = tmp_path / "numbers.csv"
    numbers.write_text(f"path,label\n{three[0]}/train/cat/0.jpg,4\n")
    with pytest.raises(SourceError, match="its labels are numbers, but those of another source have names"):
        convert([three[0], numbers], tmp_path / "out")
    with pytest.raises(ValueError, match="give output="):
        packer.convert(three[:2], "tar")
    with pytest.raises(SourceError, match="no such file or directory"):
        convert([three[0], tmp_path / "none"], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": ["cat", "dgo"]}, SourceError, "no class 'dgo'; did you mean dog"),
        ({"classes": []}, ValueError, "one or more names"),
        ({"classes": ["cat", "cat"]}, ValueError, "each once"),
        ({"fractions": {"a": 0.5, "b": 0.5}}, SourceError, "has the splits train, val"),
        ({"split": "train", "fractions": {"a": 0.5}}, ValueError, "fractions sum to 0.5"),
        ({"split": "train", "fractions": {"a": 0.999, "b": 0.001}}, SourceError, "no sample of 6 would be in 'b'"),
        ({"fractions": {"a/b": 1.0}}, BadNameError, "a/b"),
        ({"stratify": True}, ValueError, "give fractions"),
        ({"fields": {"image": "image"}}, ValueError, "for samples of a program"),
        ({"where": "min_side >"}, ValueError, "cannot be read"),
        ({"where": "label == 'cow' and width > 3"}, UnknownNameError, "no class 'cow'; there are 2: cat, dog"),
        ({"where": "has('mask')"}, UnknownNameError, "no field 'mask'; there are image"),
        ({"where": "label == 'cat' and label == 'dog'"}, SourceError, "is false for all 12 samples"),
        ({"where": "width > 1000"}, SourceError, "no sample is left, so no set is made: 12 for which `where` is false"),
        ({"where": "split == 'val'", "split": "val", "fractions": {"a": 1.0}}, ValueError, "leave one out"),
    ],
)
def test_impossible_choices(three: list[Path], tmp_path: Path, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        convert(three[0], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_choice_of_classes_keeps_labels_and_is_part_of_the_plan(three: list[Path], tmp_path: Path) -> None:
    first = convert(three[0], tmp_path / "out", classes=["dog"])
    assert first.splits == {"train": 3, "val": 3} and first.classes == 1
    assert convert(three[0], tmp_path / "out", classes=["dog"]).already_done
    with readers.open(tmp_path / "out", "train") as reader:
        assert np.array_equal(reader.labels, [0, 0, 0]) and all(key.startswith("dog/") for key in reader.keys)


# --- where -------------------------------------------------------------------------------------------------------
@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two splits of two classes, with images of 8 to 32 pixels a side; one image is a PNG."""
    files = {
        f"{split}/{name}/{i}.jpg": make_jpeg(i, (8 + 8 * i, 16))
        for split in ("train", "val") for name in ("cat", "dog") for i in range(4)
    }  # fmt: skip
    return tree_of(tmp_path / "pets", files | {"train/dog/9.png": make_jpeg(9, (40, 40), "PNG")})


def keys_of(path: Path) -> dict[str, list[str]]:
    by_split = {}
    for split in json.loads((path / "dataset.json").read_text())["splits"]:
        with readers.open(path, split) as reader:
            by_split[split] = [f"{reader.classes[reader.labels[i]]}:{key}" for i, key in enumerate(reader.keys)]
    return {split: keys for split, keys in by_split.items() if keys}


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        ("min_side >= 16 and label == 'dog'", 2),
        ("class_name == 'cat' or width > 30", 1),
        ("medium == 'png' and bytes > 10", 1),
        ("not matches(key, 'dog/*') and split == 'val'", 1),
        ("label in (0, 'dog') and (16 <= height <= 24 and has('image'))", 1),
    ],
)
def test_where_selects_the_samples_of_subset(pets: Path, tmp_path: Path, where: str, workers: int) -> None:
    out = tmp_path / "out"
    convert(pets, tmp_path / "whole", "hdf5")
    packer.subset(tmp_path / "whole", tmp_path / "expected", lambda table: table.where(where))
    made = convert(pets, out, "hdf5", where=where, samples=3)
    assert keys_of(out) == keys_of(tmp_path / "expected")
    assert made.left_out == {"not chosen": 17 - made.samples} and packer.verify(out, deep=True).ok
    assert json.loads((out / "dataset.json").read_text())["made"]["options"]["where"] == where
    again = convert(pets, out, "hdf5", where=where, samples=3)
    assert again.already_done and again.left_out == made.left_out
    if workers > 1:
        convert(pets, tmp_path / "by 2", "hdf5", where=where, samples=3, workers=workers)
        assert files_of(out) == files_of(tmp_path / "by 2")


def test_expressions_on_listed_columns_are_decided_by_the_plan(pets: Path, tmp_path: Path) -> None:
    where = "label == 'dog' and (min_side > 8 and split == 'train')"
    planned = convert(pets, tmp_path / "out", where=where, dry_run=True)
    assert planned.splits == {"train": 5} and planned.undecided == "(min_side > 8)"
    assert convert(pets, tmp_path / "none", where="label == 'cat'", dry_run=True).undecided == ""
    command = ("convert", pets, "--to", "tar", "-o", tmp_path / "out", "--where", where)
    ended = run_packer(*command, "--dry-run")
    assert "would hold at most 5 samples" in ended.stdout and "(min_side > 8) is not known before" in ended.stdout
    ended = run_packer(*command)
    assert ended.returncode == 0 and "left out: 13 not chosen\n" in ended.stdout


def test_a_bad_image_is_not_ignored(pets: Path, tmp_path: Path) -> None:
    (pets / "train" / "cat" / "5.jpg").write_bytes(b"\xff\xd8\xff no image")
    with pytest.raises(BadSampleError, match=r"cat/5\.jpg"):
        convert(pets, tmp_path / "out", where="min_side > 8")
    made = convert(pets, tmp_path / "out", where="min_side > 8", on_error="skip")
    assert made.left_out == {"not chosen": 4, "skipped": 1}
    assert made.left_out_reasons["for which `where` is false"] == 4


class Pictures:
    """A data set of a program, whose labels become known with its samples."""

    classes = ("even", "odd")

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.full((8, 8 + number, 3), number, np.uint8), "label": number % 2}


@pytest.mark.parametrize("indexed", [True, False])
def test_where_over_samples_of_a_program(tmp_path: Path, indexed: bool) -> None:
    pictures: Any = Pictures() if indexed else iter(Pictures()[i] for i in range(9))
    classes = None if indexed else Pictures.classes
    where = "label == 'odd' and width > 10"
    choose, run = packer.Choose(where=where), packer.Run(workers=1)
    made = packer.convert(pictures, "hdf5", tmp_path / "out", choose=choose, classes=classes, run=run)
    assert made.samples == 3 and made.left_out == {"not chosen": 6}
    with readers.open(tmp_path / "out") as reader:
        assert [int(key) for key in reader.keys] == [3, 5, 7] and reader.labels.tolist() == [1, 1, 1]
    if indexed:
        with pytest.raises(SourceError, match="leave stratify out"):
            convert(Pictures(), tmp_path / "no", fractions={"a": 1.0}, stratify=True)
