"""ILSVRC: as on Kaggle and as archives, and files that deceive."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tree_of
from suites.containers import tar_of
from test_sources_voc import PICTURES, xml

import packer
from cache.errors import SourceError
from packer.testing.sources import Found, SourceSuite, found
from readers.fields import encode_field

TRAIN = {f"{name}/{name}_{number}.JPEG": PICTURES[number] for number, name in enumerate(["n01", "n01", "n02", "n03"])}
VAL = {f"ILSVRC2012_val_{number:08d}.JPEG": PICTURES[3 + number] for number in (1, 2, 3)}
OF_VAL = {1: "n03", 2: "n01", 3: "n02"}
SOLUTION = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_{number:08d},{name} 1 2 3 4 {name} 5 6 7 8 \n" for number, name in OF_VAL.items()
)
CLASSES = ("n01", "n02", "n03")


def ilsvrc_truth() -> dict[str, list[tuple[str, int, tuple[bytes | None, ...]]]]:
    train = [(name[:-5], CLASSES.index(name[:3]), (data,)) for name, data in TRAIN.items()]
    val = [(name[:-5], CLASSES.index(OF_VAL[i]), (data,)) for i, (name, data) in enumerate(VAL.items(), 1)]
    return {"train": train, "val": val}


def kaggle_of(root: Path, **more: bytes) -> Path:
    files = {f"Data/CLS-LOC/train/{name}": data for name, data in TRAIN.items()}
    files |= {f"Data/CLS-LOC/val/{name}": data for name, data in VAL.items()}
    return tree_of(root, files | {"LOC_val_solution.csv": SOLUTION.encode()} | more)


class TestIlsvrc(SourceSuite):
    """With boxes of two images, one of them annotated at twice its size."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        annotations = {
            "train/n02/n02_2.xml": xml(("n02", 4, 2, 12, 10), ("n02", 39, 23, 41, 25)),
            "val/ILSVRC2012_val_00000001.xml": xml(("n03", 20, 8, 40, 24), size=(80, 48)),
        }
        return kaggle_of(tmp_path / "ILSVRC", **{f"Annotations/CLS-LOC/{name}": v for name, v in annotations.items()})

    @pytest.fixture
    def truth(self) -> Found:
        boxes = {"n02/n02_2": ([[4, 2, 12, 10], [39, 23, 40, 24]], [1, 1]),
                 "ILSVRC2012_val_00000001": ([[10, 4, 20, 12]], [2])}  # fmt: skip
        splits = {}
        for split, samples in ilsvrc_truth().items():
            splits[split] = [
                (key, label, (image,
                              encode_field("boxes", np.array(boxes[key][0], np.float32)) if key in boxes else None,
                              encode_field("array", np.array(boxes[key][1], np.int64)) if key in boxes else None))
                for key, label, (image,) in samples
            ]  # fmt: skip
        return Found(splits, CLASSES, ("image", "boxes", "box_labels"))

    def data_files(self, root: Path) -> set[Path]:
        return set(root.rglob("*.JPEG"))

    def whole_files(self, root: Path) -> bool:
        return True


def archives_of(root: Path, solution: bool = True) -> Path:
    inner = {name: tar_of(*((path.partition("/")[2], data) for path, data in TRAIN.items() if path.startswith(name)))
             for name in CLASSES}  # fmt: skip
    files = {
        "ILSVRC2012_img_train.tar": tar_of(*((f"{name}.tar", data) for name, data in inner.items())),
        "ILSVRC2012_img_val.tar": tar_of(*VAL.items()),
    }
    return tree_of(root, files | ({"LOC_val_solution.csv": SOLUTION.encode()} if solution else {}))


class TestIlsvrcArchives(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return archives_of(tmp_path / "ILSVRC")

    @pytest.fixture
    def truth(self) -> Found:
        return Found(ilsvrc_truth(), CLASSES)

    def data_files(self, root: Path) -> set[Path]:
        return set(root.rglob("*.tar"))


def test_an_archive_of_archives_by_itself_has_a_class_for_each(tmp_path: Path) -> None:
    root = archives_of(tmp_path)
    read = found(packer.open_source(root / "ILSVRC2012_img_train.tar"))
    assert (read.splits["train"], read.classes) == (ilsvrc_truth()["train"], CLASSES)
    packed = tmp_path / "train.tar.gz"
    packed.write_bytes(gzip.compress((root / "ILSVRC2012_img_train.tar").read_bytes()))
    assert found(packer.open_source(packed)).splits == read.splits


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.replace(b"n01_0.JPEG", b"n01_9.JPEG", 1),  # a checksum inside
        lambda data: data[:2048] + b"9" * 64 + data[2112:],
        lambda data: data[: len(data) // 2],
    ],
)
def test_a_damaged_archive_of_archives_is_refused(tmp_path: Path, spoil: Any) -> None:
    path = archives_of(tmp_path / "in") / "ILSVRC2012_img_train.tar"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(SourceError, match=r"ILSVRC2012_img_train\.tar"):
        packer.convert(tmp_path / "in", "tar", tmp_path / "out", run=packer.Run(workers=1))


def kit(root: Path, numbers: str = "3\n1\n2\n", names: tuple[str, ...] = CLASSES) -> None:
    """The development kit: synsets in the order of their numbers, and the numbers of val."""
    io_of_scipy = pytest.importorskip("scipy.io", reason="scipy, which reads meta.mat, is not installed")
    rows = np.zeros((len(names), 1), [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)])
    for number, name in enumerate(names, 1):
        rows[number - 1, 0] = (np.array([[number]], np.uint16), np.array([name]), np.array(["a thing"]))
    memory = io.BytesIO()
    io_of_scipy.savemat(memory, {"synsets": rows}, do_compression=True)
    folder = "ILSVRC2012_devkit_t12/data/"
    data = tar_of((f"{folder}meta.mat", memory.getvalue()),
                  (f"{folder}ILSVRC2012_validation_ground_truth.txt", numbers.encode()))  # fmt: skip
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(data))


def test_the_development_kit_gives_the_labels_of_val(tmp_path: Path) -> None:
    root = archives_of(tmp_path / "ILSVRC", solution=False)
    kit(root)
    assert found(packer.open_source(root)).splits == ilsvrc_truth()
    kit(root, numbers="3\n1\n9\n")
    with pytest.raises(SourceError, match=r"image 3 is of the class '9'"):
        packer.open_source(root).list(None)
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar_of(("x/data/meta.mat", b"MATLAB 5.0"))))
    with pytest.raises(SourceError, match="holds no data/ILSVRC2012_validation_ground_truth"):
        packer.open_source(root).list(None)


def test_archives_without_labels_of_val_are_a_warning(tmp_path: Path) -> None:
    listing = packer.open_source(archives_of(tmp_path / "ILSVRC", solution=False)).list(None)
    assert listing.splits["val"].labels.tolist() == [-1, -1, -1]
    assert [text for text in listing.warnings if "3 images of val without a label: put LOC_val_solution.csv" in text]


@pytest.mark.parametrize("where", ["next to the images", "above val", "next to train and val", "above CLS-LOC"])
def test_val_with_its_table_wherever_that_is(tmp_path: Path, where: str) -> None:
    root = kaggle_of(tmp_path / "ILSVRC")
    source = {
        "next to the images": root / "Data/CLS-LOC/val",
        "above val": root / "Data/CLS-LOC/val",
        "next to train and val": root / "Data/CLS-LOC",
        "above CLS-LOC": root / "Data/CLS-LOC",
    }[where]
    if where.startswith("next"):
        (root / "LOC_val_solution.csv").rename(source / "LOC_val_solution.csv")
    read = found(packer.open_source(source))
    assert (read.splits["val"], read.classes) == (ilsvrc_truth()["val"], CLASSES)
    assert where in ("next to the images", "above val") or read.splits["train"] == ilsvrc_truth()["train"]


def test_images_that_the_table_lacks_have_no_label(tmp_path: Path) -> None:
    root = kaggle_of(tmp_path / "ILSVRC", **{"LOC_val_solution.csv": "\n".join(SOLUTION.splitlines()[:2]).encode()})
    listing = packer.open_source(root).list(None)
    assert listing.splits["val"].labels.tolist() == [2, -1, -1]
    assert [text for text in listing.warnings if "2 images of val without a label" in text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a,b\n1,2\n", "expected ImageId and PredictionString"),
        (b"ImageId,PredictionString\nx,\n", "line 2: '' does not begin with a synset"),
        (b"ImageId,PredictionString\nx,../n01 1\n", "does not begin with a synset"),
        (b"ImageId,PredictionString\nx,n01 1\nx,n02 1\n", "line 3: 'x' for the second time"),
    ],
)
def test_a_table_that_deceives_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    root = kaggle_of(tmp_path / "ILSVRC", **{"LOC_val_solution.csv": text})
    with pytest.raises(SourceError) as refusal:
        packer.open_source(root).list(None)
    assert message in str(refusal.value)


def test_an_archive_of_a_class_unpacked_is_the_same(tmp_path: Path) -> None:
    """GNU tar's own archives, with links inside."""
    root = tree_of(tmp_path / "in", TRAIN)
    for name in CLASSES:
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for path in sorted((root / name).iterdir()):
                archive.add(path, path.name)
            linked = tarfile.TarInfo("again.JPEG")
            linked.type, linked.linkname = tarfile.LNKTYPE, sorted((root / name).iterdir())[0].name
            archive.addfile(linked)
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name in CLASSES:
            archive.add(tmp_path / f"{name}.tar", f"{name}.tar")
    read = found(packer.open_source(tmp_path / "train.tar")).splits["train"]
    assert {key: (label, data) for key, label, data in read if "again" not in key} == {
        key: (label, data) for key, label, data in ilsvrc_truth()["train"]
    }
    assert {key: data for key, _, data in read if "again" in key}["n02/again"] == (TRAIN["n02/n02_2.JPEG"],)


def test_a_class_that_train_lacks_leaves_the_labels_of_train_as_they_are(tmp_path: Path) -> None:
    """As torchvision numbers them: by the folders of train."""
    solution = SOLUTION.replace(OF_VAL[1], "n00").encode()
    for root in (
        kaggle_of(tmp_path / "kaggle", **{"LOC_val_solution.csv": solution}),
        tree_of(archives_of(tmp_path / "archives"), {"LOC_val_solution.csv": solution}),
    ):
        listing = packer.open_source(root).list(None)
        train = [*zip(listing.splits["train"].keys, listing.splits["train"].labels.tolist(), strict=True)]
        assert train == [(key, label) for key, label, _ in ilsvrc_truth()["train"]]
        assert listing.classes == (*CLASSES, "n00") and listing.splits["val"].labels[0] == 3
        assert any("1 class of val that train lacks: n00" in warning for warning in listing.warnings)
