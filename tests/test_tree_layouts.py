"""Trees whose folders are not classes: refused with the correct command, or warned about."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from conftest import make_jpeg, tree_of

import packer
import readers
from cache.errors import SourceError
from packer.cli import main
from packer.formats.base import png_of

PICTURE = make_jpeg(1)


def layout_of(root: Path, *names: str) -> Path:
    return tree_of(root, {name: content_of(name) for name in names})


def content_of(name: str) -> bytes:
    """Content that fits the name: an image, a mask, labels, an annotation."""
    if "Segmentation" in name or name.startswith("labels/"):
        return TEXTS["mask"] if name.endswith(".png") else TEXTS[".txt"]
    if name.endswith((".jpg", ".JPEG", ".png")):
        return PICTURE
    return next((text for suffix, text in TEXTS.items() if name.endswith(suffix)), b"{}")


TEXTS = {
    "mask": png_of(np.zeros((24, 32), np.uint8)),
    "train.txt": b"1",
    ".txt": b"0 0.5 0.5 0.1 0.1",
    ".xml": b"<annotation><folder/></annotation>",
    "instances_val2017.json": b'{"images": [{"id": 2, "file_name": "2.jpg"}], "annotations": [], "categories": []}',
}
ILSVRC = (
    "Data/CLS-LOC/train/n01/n01_1.JPEG",
    "Data/CLS-LOC/train/n02/n02_1.JPEG",
    "Data/CLS-LOC/val/ILSVRC2012_val_1.JPEG",
    "Annotations/CLS-LOC/val/ILSVRC2012_val_1.xml",
    "ImageSets/CLS-LOC/train_cls.txt",
)
COCO = ("annotations/instances_val2017.json", "train2017/1.jpg", "val2017/2.jpg")
VOC = (
    *("JPEGImages/1.jpg", "Annotations/1.xml", "SegmentationClass/1.png", "ImageSets/Main/train.txt"),
    "SegmentationObject/1.png",
)
YOLO = ("images/train/1.jpg", "images/val/2.jpg", "labels/train/1.txt", "labels/val/2.txt")
TINY = ("train/n01/images/1.JPEG", "train/n02/images/2.JPEG", "val/images/3.JPEG", "val/val_annotations.txt")

CASES = {
    "ILSVRC with a folder around it": (tuple(f"x/{n}" for n in ILSVRC), "ILSVRC", "packer convert {root}/x;"),
    "COCO with a folder around it": (tuple(f"x/{n}" for n in COCO), "holds COCO", "packer convert {root}/x;"),
    "COCO, images alone": (("val2017/1.jpg",), "COCO", "packer convert {root}/val2017 --split val;"),
    "VOC in its kit": (tuple(f"VOCdevkit/VOC2012/{n}" for n in VOC), "VOC", "{root}/VOCdevkit/VOC2012;"),
    "YOLO with a folder around it": (tuple(f"x/{n}" for n in YOLO), "as for YOLO", "packer convert {root}/x;"),
    "labels that are images": (
        ("images/1.jpg", "labels/1.png"),
        "'images' is next to 'labels'",
        "packer convert {root}/images;",
    ),
    "masks": (("set/images/1.jpg", "set/masks/1.png"), "'images' is next to 'masks'", "{root}/set/images;"),
    "Tiny ImageNet": (TINY, "Tiny ImageNet", "packer convert {root}/train --split train;"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_tree_of_another_layout_is_refused_with_the_correct_command(tmp_path: Path, case: str) -> None:
    names, reason, command = CASES[case]
    root = layout_of(tmp_path / "in", *names)
    with pytest.raises(SourceError) as refusal:
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    message = str(refusal.value)
    assert reason in message and command.format(root=root) in message and "layout='tree'" in message, message
    assert not (tmp_path / "out").exists()

    right = message.partition("packer convert ")[2].partition(";")[0].split(" --split ")
    done = packer.convert(
        right[0], "tar", tmp_path / "out", choose=packer.Choose(split=[*right, None][1]), run=packer.Run(workers=1)
    )
    assert done.samples and not set(done.to_dict()["splits"]) & {"images", "labels"}, "the suggested command must work"

    source = packer.open_source(root, layout="tree")
    assert packer.convert(source, "tar", tmp_path / "all", run=packer.Run(workers=1)).warnings == ()
    assert packer.verify(tmp_path / "all", against=root, workers=1).ok


def test_the_correct_folder_of_imagenet_warns_that_val_has_no_labels(tmp_path: Path) -> None:
    root = layout_of(tmp_path / "in", *ILSVRC) / "Data/CLS-LOC"
    result = packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert (result.splits, result.classes) == ({"train": 2, "val": 1}, 2)
    assert [warning for warning in result.warnings if "no image of val has a label" in warning]


def test_archives_are_checked_like_folders(tmp_path: Path) -> None:
    root = layout_of(tmp_path / "coco", *COCO)
    with tarfile.open(tmp_path / "coco.tar", "w") as archive:
        archive.add(root, "coco")
    with pytest.raises(SourceError, match=r"coco\.tar: holds COCO .* unpack it, and run"):
        packer.convert(tmp_path / "coco.tar", "tar", tmp_path / "out", run=packer.Run(workers=1))


@pytest.mark.parametrize(
    ("names", "warning"),
    [
        (("img_align_celeba/1.jpg", "img_align_celeba/2.jpg", "list.txt"), "one class only, 'img_align_celeba'"),
        (("masks/1.jpg", "no_masks/2.jpg"), "folders taken as classes: 'masks'"),
        (("a/1.jpg", "b/2.jpg", "3.jpg"), "1 image of train directly in its folder without a label"),
        (("train/a/1.jpg", "train/b/1.jpg", "test/3.jpg"), "no image of test has a label"),
        (("a/1.jpg", "b/1.jpg", "meta/x.json"), "classes without a file named like an image: 'meta'"),
        (("train/a/1.jpg", "train/b/2.jpg", "val/c/3.jpg"), "classes of val that train lacks: 'c'"),
    ],
)
def test_suspicious_trees_are_a_warning(tmp_path: Path, names: tuple[str, ...], warning: str) -> None:
    root = layout_of(tmp_path / "in", *names)
    result = packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert [text for text in result.warnings if f"{root}: {warning}" in text], result.warnings


def test_warnings_are_on_stderr_or_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = layout_of(tmp_path / "in", "a/1.jpg", "b/2.jpg", "3.jpg")
    for name, more in (("out", []), ("json", ["--json"])):
        with pytest.raises(SystemExit) as stopped:
            main(["convert", str(root), "--to", "tar", "-o", str(tmp_path / name), "--workers", "1", *more])
        shown = capsys.readouterr()
        assert not stopped.value.code
        if more:
            assert len(json.loads(shown.out)["warnings"]) == 1 and not shown.err
        else:
            assert f"warning: {root}: 1 image of train directly in its folder" in shown.err


def test_an_ordinary_tree_has_no_warnings(tree: Path) -> None:
    for split in (None, "val"):
        listing = packer.open_source(tree).list(split)
        assert (listing.warnings, listing.classes) == ([], ("cat", "dog", "owl"))


def test_a_table_in_a_tree_is_named_with_its_command(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "my set", {"a/1.jpg": make_jpeg(1), "b/2.jpg": make_jpeg(2), "labels.csv": b"x"})
    (warning,) = packer.open_source(root).list(None).warnings
    assert "'labels.csv' is a table, which is not read" in warning
    assert f"packer convert '{root}/labels.csv' --folder '{root}'" in warning


def test_files_beside_images_of_their_names_are_named(tmp_path: Path) -> None:
    files = {f"{name}/{n}.{kind}": make_jpeg(n) for name in "ab" for n in range(2) for kind in ("jpg", "txt")}
    (warning,) = packer.open_source(tree_of(tmp_path / "set", files | {"a/README.txt": b""})).list(None).warnings
    assert "4 files left out, named like an image in the same folder, such as 'a/0.txt'" in warning
    assert not packer.open_source(tmp_path / "set", layout="tree").list(None).warnings


def test_links_in_a_folder_are_followed_as_documented(tmp_path: Path) -> None:
    tree_of(tmp_path / "scratch", {"owl/3.jpg": make_jpeg(3), "4.jpg": make_jpeg(4)})
    root = tree_of(tmp_path / "set", {"cat/1.jpg": make_jpeg(1)})
    (root / "owl").symlink_to(tmp_path / "scratch/owl")
    (root / "cat/2.jpg").symlink_to(tmp_path / "scratch/4.jpg")
    packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    with readers.open(tmp_path / "out") as reader:
        assert {key: bytes(reader[key].image) for key in reader.keys} == {
            "cat/1": make_jpeg(1), "cat/2": make_jpeg(4), "owl/3": make_jpeg(3)
        }  # fmt: skip
    security = (Path(__file__).parents[1] / "docs/SECURITY.md").read_text()
    assert "Symbolic links in a converted folder are followed, also out of it" in " ".join(security.split())
