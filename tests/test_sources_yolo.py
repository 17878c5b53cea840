"""YOLO's folders: boxes, outlines and poses as fields, and files that deceive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from PIL import Image
from suites.sources import Found, SourceSuite
from test_sources_coco import values
from test_sources_voc import PICTURES, SIZE

import packer
from cache.errors import BadSampleError, SourceError
from readers.fields import encode_field

YAML = b"path: ../elsewhere\ntrain: /nowhere\nnames:\n  0: cat\n  1: dog\n  2: owl\n"
BOXES = b"1 0.5 0.5 0.25 0.5\n2 0.1 0.25 0.05 0.125\n"


def yolo_of(root: Path, **more: bytes) -> Path:
    files = {f"images/train/{number}.jpg": PICTURES[number] for number in range(3)}
    files |= {f"images/val/{number}.jpg": PICTURES[number] for number in (3, 4)}
    files |= {"labels/train/0.txt": BOXES, "labels/train/1.txt": b"\n", "labels/val/3.txt": b"0 0.5 0.5 1 1\n"}
    return tree_of(root, files | {"data.yaml": YAML} | more)


def yolo_sample(number: int, boxes: Any, labels: Any) -> tuple[str, int, Any]:
    return str(number), -1, (
        PICTURES[number],
        encode_field("boxes", np.array(boxes, np.float32).reshape(-1, 4)),
        encode_field("array", np.array(labels, np.int64)),
    )  # fmt: skip


class TestYolo(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        pytest.importorskip("yaml", reason="PyYAML is not installed")
        return yolo_of(tmp_path / "set")

    @pytest.fixture
    def truth(self) -> Found:
        first = yolo_sample(0, [[15, 6, 25, 18], [3, 4.5, 5, 7.5]], [1, 2])
        splits = {
            "train": [first, yolo_sample(1, [], []), yolo_sample(2, [], [])],
            "val": [yolo_sample(3, [[0, 0, 40, 24]], [0]), yolo_sample(4, [], [])],
        }
        return Found(splits, ("cat", "dog", "owl"), ("image", "boxes", "box_labels"))

    def data_files(self, root: Path) -> set[Path]:
        return set(root.rglob("*.jpg"))

    def whole_files(self, root: Path) -> bool:
        return True


def test_yolo_in_splits_without_names(tmp_path: Path) -> None:
    files: dict[str, bytes] = {"test/images/9.jpg": PICTURES[4]}
    for split in ("train", "valid"):
        files |= {f"{split}/images/a/{split}.jpg": PICTURES[1], f"{split}/labels/a/{split}.txt": BOXES}
    files["train/labels/alone.txt"] = BOXES
    root = tree_of(tmp_path / "set", files)
    source = packer.open_source(root)
    listing = source.list(None)
    assert ([*listing.splits], listing.classes) == (["train", "valid", "test"], ())
    assert listing.left_out == [("train/labels/alone.txt", "labels without an image")]
    assert [text for text in listing.warnings if "no names of the classes" in text]
    assert values(source, "valid")["a/valid"]["box_labels"].tolist() == [1, 2]
    assert values(source, "test")["9"]["boxes"] is None, "a split without labels"
    tree_of(root, {"classes.txt": b"cat\ndog\n\nowl\n"})
    assert packer.open_source(root).list(None).classes == ("cat", "dog", "owl")


def test_yolo_counts_in_the_displayed_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    root = yolo_of(tmp_path / "set", **{"images/train/0.jpg": make_jpeg(3, SIZE, exif=exif)})
    assert values(packer.open_source(root), "train")["0"]["boxes"][0].tolist() == [9, 10, 15, 30]


def test_yolo_with_outlines(tmp_path: Path) -> None:
    text = b"1 0.25 0.25 0.5 0.25 0.5 0.75 0.25 0.75\n0 0.5 0.5 0.1 0.25\n"
    source = packer.open_source(yolo_of(tmp_path / "set", **{"labels/train/0.txt": text}))
    assert source.list(None).fields == {
        "image": "image", "boxes": "boxes", "box_labels": "array", "mask": "mask", "json": "json"
    }  # fmt: skip
    read = values(source, "train")["0"]
    assert read["boxes"].tolist() == [[10, 6, 20, 18], [18, 9, 22, 15]]
    assert read["json"] == {"outlines": [[[10, 6], [20, 6], [20, 18], [10, 18]], None]}
    assert (read["mask"][6:18, 10:20] == 2).all() and read["mask"].sum() == 2 * 12 * 10


@pytest.mark.parametrize("each", [2, 3])
def test_yolo_with_poses(tmp_path: Path, each: int) -> None:
    flags = ("2", "0") if each == 3 else ("", "")
    text = f"1 0.5 0.5 0.25 0.5 0.5 0.25 {flags[0]} {'0.75 0.5' if each == 3 else '0 0'} {flags[1]}\n".encode()
    yaml = YAML + b"kpt_shape: [2, %d]\n" % each
    source = packer.open_source(yolo_of(tmp_path / "set", **{"data.yaml": yaml, "labels/train/0.txt": text,
                                                             "labels/val/3.txt": b""}))  # fmt: skip
    points = values(source, "train")["0"]["points"]
    assert points.shape == (1, 2, 2) and points[0, 0].tolist() == [20, 6] and np.isnan(points[0, 1]).all()
    assert values(source, "train")["1"]["points"].shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"0 0.5 0.5 0.1\n", "4 numbers, for neither a box nor an outline"),
        (b"0 0.5 0.5 0.1 0.1 0.9\n", "as with a confidence"),
        (b"0 20 12 10 10\n", "in pixels?"),
        (b"0 nan 0.5 0.1 0.1\n", "not a part of the image"),
        (b"0 0.5 0.5 -0.1 0.1\n", "not a part of the image"),
        (b"9 0.5 0.5 0.1 0.1\n", "'9' is not the number of a class, 0 to 2"),
        (b"-1 0.5 0.5 0.1 0.1\n", "is not the number of a class"),
        (b"0.5 0.5 0.5 0.1 0.1\n", "is not the number of a class"),
        (b"inf 0.5 0.5 0.1 0.1\n", "is not the number of a class"),
        (b"cat 0.5 0.5 0.1 0.1\n", "could not convert"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_label_of_yolo_that_deceives_is_a_bad_sample(tmp_path: Path, text: bytes, message: str) -> None:
    root = yolo_of(tmp_path / "set", **{"labels/train/0.txt": text})
    with pytest.raises(BadSampleError) as refusal:
        packer.convert(root, "tar", tmp_path / "out", workers=1)
    assert "labels/train/0.txt" in str(refusal.value) and message in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"names: 3\n", "expected a list"),
        (b"- names\n", "holds no mapping"),
        (b"names: {0: cat, 2: dog}\n", "expected a list"),
        (b"names: [cat, cat]\n", "different texts"),
        (b"names: [cat, 3]\n", "different texts"),
        (b"names: !!python/object/apply:os.system ['true']\n", "cannot be read as YAML"),
        (b"names: [", "cannot be read as YAML"),
        (b"[" * 100_000, "cannot be read as YAML"),
        (b"a: &a [x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (i, i, i - 1, i - 1) for i in range(98, 122))
         + b"names: *y\n", "different texts"),
        (YAML + b"kpt_shape: [100000000, 3]\n", "kpt_shape is"),
        (YAML + b"kpt_shape: x\n", "kpt_shape is"),
    ],
)  # fmt: skip
def test_a_data_yaml_that_deceives_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    with pytest.raises(SourceError) as refusal:
        packer.open_source(yolo_of(tmp_path / "set", **{"data.yaml": text})).list(None)
    assert message in str(refusal.value) and len(str(refusal.value)) < 500
