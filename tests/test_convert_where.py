"""`where` at conversion: the same samples as `subset` takes afterwards, whatever the source, the workers or a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import by_subject, files_of, make_jpeg, tree_of
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadSampleError, SourceError, UnknownNameError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two splits of two classes, with images of 8 to 32 pixels a side, one of them a PNG."""
    files = {
        f"{split}/{name}/{i}.jpg": make_jpeg(i, (8 + 8 * i, 16))
        for split in ("train", "val") for name in ("cat", "dog") for i in range(4)
    }  # fmt: skip
    return tree_of(tmp_path / "pets", files | {"train/dog/9.png": make_jpeg(9, (40, 40), "PNG")})


def keys_of(path: Path) -> dict[str, list[str]]:
    found = {}
    for split in json.loads((path / "dataset.json").read_text())["splits"]:
        with readers.open(path, split) as reader:
            found[split] = [f"{reader.classes[reader.labels[i]]}:{key}" for i, key in enumerate(reader.keys)]
    return {split: keys for split, keys in found.items() if keys}


@pytest.mark.parametrize(
    "where",
    [
        "min_side >= 16",
        "min_side >= 16 and label == 'dog'",
        "class_name == 'cat' or width > 30",
        "medium == 'png' and bytes > 10",
        "not matches(key, 'dog/*') and split == 'val'",
        "label in (0, 'dog') and (16 <= height <= 24 and has('image'))",
    ],
)
def test_it_takes_what_subset_takes_and_depends_on_no_worker(source: Path, tmp_path: Path, where: str) -> None:
    packer.convert(source, "hdf5", tmp_path / "whole", run=packer.Run(workers=1))
    packer.subset(tmp_path / "whole", tmp_path / "expected", lambda table: table.where(where))
    for workers in (1, 2):
        out = tmp_path / f"by-{workers}"
        made = packer.convert(
            source,
            "hdf5",
            out,
            choose=packer.Choose(where=where),
            shards=packer.Shards(samples=3),
            run=packer.Run(workers=workers),
        )
        assert keys_of(out) == keys_of(tmp_path / "expected")
        assert made.left_out == {"not chosen": 17 - made.samples} and packer.verify(out, deep=True).ok
        assert json.loads((out / "dataset.json").read_text())["made"]["options"]["where"] == where
        again = packer.convert(
            source,
            "hdf5",
            out,
            choose=packer.Choose(where=where),
            shards=packer.Shards(samples=3),
            run=packer.Run(workers=workers),
        )
        assert again.already_done and again.left_out == made.left_out
    one, other = (files_of(tmp_path / f"by-{workers}") for workers in (1, 2))
    assert one == other


def test_only_what_the_listing_says_is_planned(source: Path, tmp_path: Path) -> None:
    where = "label == 'dog' and (min_side > 8 and split == 'train')"
    planned = packer.convert(source, "tar", tmp_path / "out", choose=packer.Choose(where=where), dry_run=True)
    assert planned.splits == {"train": 5} and planned.undecided == "(min_side > 8)"
    ended = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "out", "--where", where, "--dry-run")
    assert "would hold at most 5 samples" in ended.stdout and "(min_side > 8) is not known before" in ended.stdout
    ended = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "out", "--where", where)
    assert ended.returncode == 0 and "left out: 13 not chosen\n" in ended.stdout
    assert (
        packer.convert(
            source, "tar", tmp_path / "none", choose=packer.Choose(where="label == 'cat'"), dry_run=True
        ).undecided
        == ""
    )


def test_a_bad_image_is_not_passed_over(source: Path, tmp_path: Path) -> None:
    (source / "train" / "cat" / "5.jpg").write_bytes(b"\xff\xd8\xff no image")
    with pytest.raises(BadSampleError, match=r"cat/5\.jpg"):
        packer.convert(
            source, "tar", tmp_path / "out", choose=packer.Choose(where="min_side > 8"), run=packer.Run(workers=1)
        )
    made = packer.convert(
        source,
        "tar",
        tmp_path / "out",
        choose=packer.Choose(where="min_side > 8"),
        run=packer.Run(on_error="skip", workers=1),
    )
    assert made.left_out == {"not chosen": 4, "skipped": 1}
    assert made.left_out_reasons["for which `where` is false"] == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"where": "min_side >"}, ValueError, "cannot be read"),
        ({"where": "label == 'cow' and width > 3"}, UnknownNameError, "no class 'cow'; there are 2: cat, dog"),
        ({"where": "has('mask')"}, UnknownNameError, "no field 'mask'; there are image"),
        ({"where": "label == 'cat' and label == 'dog'"}, SourceError, "is false for all 17 samples"),
        ({"where": "width > 1000"}, SourceError, "no sample is left, so no set is made: 17 for which `where` is false"),
        ({"where": "split == 'val'", "split": "val", "split_fractions": {"a": 1.0}}, ValueError, "leave one out"),
    ],
)
def test_what_cannot_be_chosen(source: Path, tmp_path: Path, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        packer.convert(source, "tar", tmp_path / "out", **by_subject(options, workers=1))
    assert not (tmp_path / "out").exists()


class Pictures:
    """A data set of a program, whose labels are known with its samples."""

    classes = ("even", "odd")

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.full((8, 8 + number, 3), number, np.uint8), "label": number % 2}


@pytest.mark.parametrize("indexed", [True, False])
def test_samples_of_a_program(tmp_path: Path, indexed: bool) -> None:
    pictures: Any = Pictures() if indexed else iter(Pictures()[i] for i in range(9))
    classes = None if indexed else Pictures.classes
    where = "label == 'odd' and width > 10"
    made = packer.convert(
        pictures,
        "hdf5",
        tmp_path / "out",
        choose=packer.Choose(where=where),
        classes=classes,
        run=packer.Run(workers=1),
    )
    assert made.samples == 3 and made.left_out == {"not chosen": 6}
    with readers.open(tmp_path / "out") as reader:
        assert [int(key) for key in reader.keys] == [3, 5, 7] and reader.labels.tolist() == [1, 1, 1]
    if indexed:
        with pytest.raises(SourceError, match="leave stratify out"):
            packer.convert(
                Pictures(), "tar", tmp_path / "no", choose=packer.Choose(fractions={"a": 1.0}, stratify=True)
            )
