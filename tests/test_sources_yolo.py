"""YOLO's folders: boxes, outlines and poses as fields, and files that deceive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from PIL import Image
from test_sources_coco import values
from test_sources_voc import PICTURES, SIZE

import packer
from cache.errors import BadSampleError, SourceError
from packer.testing.sources import Found, SourceSuite
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
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
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
         + b"names: *y\n", "has aliases"),
        (YAML + b"kpt_shape: [100000000, 3]\n", "kpt_shape is"),
        (YAML + b"kpt_shape: x\n", "kpt_shape is"),
    ],
)  # fmt: skip
def test_a_data_yaml_that_deceives_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    with pytest.raises(SourceError) as refusal:
        packer.open_source(yolo_of(tmp_path / "set", **{"data.yaml": text})).list(None)
    assert message in str(refusal.value) and len(str(refusal.value)) < 500
    assert str(refusal.value).count("data.yaml") == 1, "names the file once"


def test_yaml_merges_are_refused_before_they_multiply(tmp_path: Path) -> None:
    """Each line is as large as two of the one before it: 360 bytes stand for a million names."""
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    lines = ["a0: &a0 {x: y}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)), "names: *a39"]
    root = yolo_of(tmp_path / "set", **{"data.yaml": "\n".join(lines).encode()})
    with pytest.raises(SourceError, match="has aliases"):
        packer.open_source(root).list(None)


# --- the splits that data.yaml names ------------------------------------------------------------------------------
NAMES = b"names: [cat, dog, owl]\n"


def flat_set(root: Path, yaml: bytes, **more: bytes) -> Any:
    """Four images of one folder, which data.yaml deals to splits, opened."""
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    files = {f"images/{number}.jpg": PICTURES[number] for number in range(4)}
    files |= {f"labels/{number}.txt": b"%d 0.5 0.5 1 1\n" % (number % 3) for number in range(4)}
    return packer.open_source(tree_of(root, files | {"data.yaml": yaml + NAMES} | more))


def keys(source: Any) -> dict[str, list[str]]:
    return {name: [*part.keys] for name, part in source.list(None).splits.items()}


@pytest.mark.parametrize(
    "lines",
    [
        b"images/0.jpg\nimages/1.jpg\n\n",
        b"./images/0.jpg\r\n./images/1.jpg\r\n",
        b"data/images/0.jpg\ndata/images/1.jpg",
        b"../images/0.jpg\n../images/1.jpg",
    ],
)
def test_a_list_of_images_in_data_yaml_is_a_split(tmp_path: Path, lines: bytes) -> None:
    source = flat_set(
        tmp_path / "set",
        b"train: train.txt\nval: val.txt\n",
        **{"train.txt": lines, "val.txt": b"images/2.jpg\nimages/3.jpg\n"},
    )
    assert keys(source) == {"train": ["0", "1"], "val": ["2", "3"]}
    assert values(source, "val")["2"]["box_labels"].tolist() == [2]
    listing = source.list(None)
    assert (listing.warnings, listing.left_out) == ([], [])
    assert {tmp_path / "set" / name for name in ("train.txt", "val.txt", "data.yaml")} <= {*source.paths(listing)}


def test_absolute_paths_of_a_list_count_where_they_are_in_the_set(tmp_path: Path) -> None:
    root = tmp_path / "set"
    source = flat_set(root, b"train: one.txt\n", **{"one.txt": f"{root}/images/1.jpg\n".encode()})
    assert keys(source) == {"train": ["1"]}


def test_folders_and_lists_of_folders_in_data_yaml_are_splits(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    files = {f"{part}/images/{part}.jpg": PICTURES[number] for number, part in enumerate("abc")}
    files |= {f"{part}/labels/{part}.txt": b"1 0.5 0.5 1 1\n" for part in "ab"}
    files["data.yaml"] = b"path: .\ntrain: [a/images, b/images]\nvalidation: c/images\n" + NAMES
    source = packer.open_source(tree_of(tmp_path / "set", files))
    assert keys(source) == {"train": ["a/images/a", "b/images/b"], "validation": ["c"]}
    assert values(source, "train")["b/images/b"]["box_labels"].tolist() == [1]
    assert values(source, "validation")["c"]["boxes"] is None, "a split without labels"


def test_paths_as_roboflow_writes_them(tmp_path: Path) -> None:
    files = {f"{part}/images/{part}.jpg": PICTURES[0] for part in ("train", "valid")}
    files |= {f"{part}/labels/{part}.txt": b"0 0.5 0.5 1 1\n" for part in ("train", "valid")}
    files["data.yaml"] = b"train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 3\n" + NAMES
    source = packer.open_source(tree_of(tmp_path / "set", files))
    assert keys(source) == {"train": ["train"], "val": ["valid"]}
    (warning,) = source.list(None).warnings
    assert "test: '../test/images'" in warning and "not below its folder" in warning


def test_images_that_data_yaml_does_not_name_are_left_out_and_listed(tmp_path: Path) -> None:
    source = flat_set(tmp_path / "set", b"train: one.txt\n", **{"one.txt": b"images/1.jpg\n", "notes.md": b"x"})
    left_out = dict(source.list(None).left_out)
    assert [path for path, reason in left_out.items() if reason == "in no split"] == [
        f"images/{number}.jpg" for number in (0, 2, 3)
    ]
    assert "notes.md" in left_out
    result = packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert result.samples == 1 and any("in no split" in warning for warning in result.warnings)


def test_an_image_of_two_splits_is_in_both_with_a_warning(tmp_path: Path) -> None:
    source = flat_set(tmp_path / "set", b"train: images\nval: one.txt\n", **{"one.txt": b"images/1.jpg\n" * 3})
    assert keys(source) == {"train": ["0", "1", "2", "3"], "val": ["1"]}
    twice, shared = source.list(None).warnings
    assert "2 lines that repeat an image" in twice and "1 image in both train and val" in shared


def test_paths_of_data_yaml_that_are_nowhere_are_a_warning(tmp_path: Path) -> None:
    source = packer.open_source(yolo_of(tmp_path / "set"))
    (warning,) = source.list(None).warnings
    assert "train: '/nowhere'" in warning and "splits are those of the folders: train, val" in warning


@pytest.mark.parametrize(
    ("yaml", "files", "message"),
    [
        (b"train: ../outside\n", {}, "'../outside' leads out of"),
        (b"train: /etc\n", {}, "'/etc' leads out of"),
        (b"path: ..\ntrain: [images, /etc/passwd]\n", {}, "'/etc/passwd' leads out of"),
        (b"train: one.txt\n", {"one.txt": b"images/1.jpg\n../outside/0.jpg\n"}, "one.txt: line 2: '../outside/0.jpg'"),
        (b"train: one.txt\n", {"one.txt": b"/etc/passwd\n"}, "line 1: '/etc/passwd' is not the path of an image"),
        (b"train: one.txt\n", {"one.txt": b"images/9.jpg\n"}, "line 1: 'images/9.jpg' is not the path of an image"),
        (b"train: one.txt\n", {"one.txt": b"\xff\xfe"}, "cannot be read as UTF-8"),
        (b"train: images/1.jpg\n", {}, "cannot be read as UTF-8"),
        (b"train: {a: b}\n", {}, "expected a path, or a list of paths"),
        (b"train: [images, 3]\n", {}, "expected a path, or a list of paths"),
        (b"path: [3]\ntrain: images\n", {}, "expected a path, or a list of paths"),
        (b"nc: 4\ntrain: images\n", {}, "nc is 4, but there are 3 names"),
    ],
)
def test_splits_of_data_yaml_that_cannot_be_followed_are_refused(
    tmp_path: Path, yaml: bytes, files: dict[str, bytes], message: str
) -> None:
    tree_of(tmp_path / "outside", {"0.jpg": PICTURES[0]})
    with pytest.raises(SourceError) as refusal:
        flat_set(tmp_path / "set", yaml, **files).list(None)
    assert message in str(refusal.value) and len(str(refusal.value)) < 700, str(refusal.value)


def test_a_link_in_the_set_may_lead_out_of_it(tmp_path: Path) -> None:
    tree_of(tmp_path / "outside/images", {"7.jpg": PICTURES[0]})
    (tmp_path / "set").mkdir()
    (tmp_path / "set/more").symlink_to(tmp_path / "outside")
    source = flat_set(tmp_path / "set", b"train: images\nval: more/images\n")
    assert keys(source)["val"] == ["7"]


def test_a_path_that_is_another_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "other/images").mkdir(parents=True)
    source = flat_set(tmp_path / "set", f"path: {tmp_path}/other\ntrain: images\n".encode())
    (warning,) = source.list(None).warnings
    assert f"'{tmp_path}/other' is another folder" in warning and len(keys(source)["train"]) == 4


# --- labels beside their images -----------------------------------------------------------------------------------
def test_labels_beside_their_images_are_read_as_labelimg_has_them(tmp_path: Path) -> None:
    files = {"a/0.jpg": PICTURES[0], "a/0.txt": BOXES, "1.png": PICTURES[1], "classes.txt": b"cat\ndog\nowl\n"}
    source = packer.open_source(tree_of(tmp_path / "set", files))
    listing = source.list(None)
    assert (listing.classes, listing.left_out, listing.warnings) == (("cat", "dog", "owl"), [], [])
    found = values(source, "train")
    assert found["a/0"]["box_labels"].tolist() == [1, 2] and found["1"]["boxes"].shape == (0, 4)


def test_labels_beside_their_images_in_splits(tmp_path: Path) -> None:
    files = {f"{split}/0.jpg": PICTURES[0] for split in ("train", "valid")}
    files |= {f"{split}/0.txt": BOXES for split in ("train", "valid")}
    files |= {f"{split}/_darknet.labels": b"cat\ndog\nowl\n" for split in ("train", "valid")}
    root = tree_of(tmp_path / "set", files)
    source = packer.open_source(root)
    assert keys(source) == {"train": ["0"], "valid": ["0"]} and source.list(None).classes == ("cat", "dog", "owl")
    tree_of(root, {"valid/_darknet.labels": b"dog\ncat\nowl\n"})
    with pytest.raises(SourceError, match="have different classes"):
        source.list(None)


def test_the_lists_of_darknet_are_splits(tmp_path: Path) -> None:
    files = {f"obj_train_data/{number}.jpg": PICTURES[number] for number in range(3)}
    files |= {f"obj_train_data/{number}.txt": BOXES for number in range(3)}
    files |= {"obj.names": b"cat\ndog\nowl\n", "train.txt": b"data/obj_train_data/0.jpg\ndata/obj_train_data/2.jpg\n"}
    files["obj.data"] = b"classes = 3\ntrain = data/train.txt\nvalid = data/valid.txt\nnames = data/obj.names\n"
    files["valid.txt"] = b"data/obj_train_data/1.jpg\n"
    source = packer.open_source(tree_of(tmp_path / "set", files))
    assert keys(source) == {"train": ["0", "2"], "val": ["1"]}
    assert values(source, "val")["1"]["box_labels"].tolist() == [1, 2]


def test_other_names_beside_data_yaml_are_a_warning(tmp_path: Path) -> None:
    source = flat_set(tmp_path / "set", b"train: images\n", **{"classes.txt": b"dog\ncat\n"})
    (warning,) = source.list(None).warnings
    assert "classes.txt: has other classes than data.yaml" in warning


def test_a_class_with_control_characters_is_refused_with_its_escapes(tmp_path: Path) -> None:
    root = tree_of(
        tmp_path / "set", {"0.jpg": PICTURES[0], "0.txt": BOXES, "classes.txt": b"cat\n\x1b]0;x\x07dog\nowl\n"}
    )
    with pytest.raises(SourceError) as refusal:
        packer.open_source(root).list(None)
    assert r"'\x1b]0;x\x07dog' is not the name of a class" in str(refusal.value)
