"""Pascal VOC, YOLO and ILSVRC as sources: boxes, masks and labels as their own readers give them, and hostile files."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from PIL import Image
from suites.containers import tar_of
from suites.sources import Found, SourceSuite, found
from test_sources_coco import values

import packer
from cache.errors import BadSampleError, SourceError
from packer.sources.xml_objects import parse_objects
from readers.fields import decode_field, encode_field

SIZE = (40, 24)
PICTURES = {number: make_jpeg(number, SIZE) for number in range(8)}


def xml(*objects: tuple[str, float, float, float, float], size: tuple[int, int] | None = SIZE, more: str = "") -> bytes:
    sizes = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    text = "".join(
        f"<object><name>{name}</name><pose>Left</pose><difficult>{number % 2}</difficult><bndbox><xmin>{x0}</xmin>"
        f"<ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for number, (name, x0, y0, x1, y1) in enumerate(objects)
    )
    return f"<annotation><filename>x</filename>{sizes}{text}{more}</annotation>".encode()


def palette_png(pixels: Any) -> bytes:
    """Class numbers as VOC has them: indices of a palette."""
    image = Image.fromarray(pixels, "P")
    image.putpalette([value for colour in range(256) for value in (colour * 7 % 256, colour, 0)])
    memory = io.BytesIO()
    image.save(memory, "PNG")
    return memory.getvalue()


MASK = np.zeros(SIZE[::-1], np.uint8)
MASK[2:9, 3:11] = 12  # dog
MASK[9, 3:11] = 255


def voc_of(root: Path, **more: bytes) -> Path:
    files = {f"JPEGImages/2007_{number:06d}.jpg": PICTURES[number] for number in range(5)}
    files |= {
        "Annotations/2007_000000.xml": xml(("dog", 4, 3, 11, 9), ("person", 1, 1, 40, 24)),
        "Annotations/2007_000001.xml": xml(("cat", 5.5, 6.25, 20, 21)),
        "Annotations/2007_000002.xml": xml(),
        "SegmentationClass/2007_000000.png": palette_png(MASK),
        "SegmentationObject/2007_000000.png": palette_png((MASK > 0).astype(np.uint8)),
        "ImageSets/Main/train.txt": b"2007_000000\n2007_000002\n",
        "ImageSets/Main/val.txt": b"2007_000001\n2007_000003\n",
        "ImageSets/Main/trainval.txt": b"2007_000000\n2007_000002\n2007_000001\n2007_000003\n",
        "ImageSets/Main/dog_train.txt": b"2007_000000  1\n2007_000002 -1\n",
        "ImageSets/Segmentation/train.txt": b"2007_000000\n",
    }
    return tree_of(root, files | more)


class TestVoc(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return voc_of(tmp_path / "VOC2007")

    @pytest.fixture
    def truth(self, root: Path) -> Found:
        def sample(number: int, boxes: Any, labels: Any, *masks: bytes | None) -> tuple[str, int, Any]:
            known = boxes is not None
            path = root / f"Annotations/2007_{number:06d}.xml"
            record = parse_objects(path.read_bytes()).record if known else None
            return f"2007_{number:06d}", -1, (
                PICTURES[number],
                encode_field("boxes", np.array(boxes, np.float32).reshape(-1, 4)) if known else None,
                encode_field("array", np.array(labels, np.int64)) if known else None,
                *(masks or (None, None)),
                encode_field("json", record) if known else None,
            )  # fmt: skip

        masks = [(root / f"Segmentation{kind}/2007_000000.png").read_bytes() for kind in ("Class", "Object")]
        first = sample(0, [[3, 2, 11, 9], [0, 0, 40, 24]], [11, 14], *masks)
        splits = {
            "train": [first, sample(2, [], [])],
            "val": [sample(1, [[4.5, 5.25, 20, 21]], [7]), sample(3, None, None)],
        }
        fields = ("image", "boxes", "box_labels", "mask", "instance_mask", "json")
        return Found(splits, packer.open_source(root).list(None).classes, fields)

    def files(self, root: Path) -> set[Path]:
        used = {path for path in root.rglob("*") if path.is_file()}
        return {path for path in used if "Segmentation/" not in str(path) and "000004" not in path.name}

    def data_files(self, root: Path) -> set[Path]:
        return set(root.rglob("*.jpg"))

    def whole_files(self, root: Path) -> bool:
        return True


def test_voc_s_classes_are_the_twenty_and_a_mask_has_the_class_and_one(tmp_path: Path) -> None:
    source = packer.open_source(voc_of(tmp_path / "VOC"))
    read = values(source, "train")["2007_000000"]
    classes = source.list(None).classes
    assert len(classes) == 20 and [classes[label] for label in read["box_labels"]] == ["dog", "person"]
    assert (read["mask"] == MASK).all() and classes[read["mask"][2, 3] - 1] == "dog"
    assert [item["difficult"] for item in read["json"]["object"]] == ["0", "1"]
    assert values(source, "train")["2007_000002"]["boxes"].shape == (0, 4)
    assert values(source, "val")["2007_000003"]["boxes"] is None, "without an annotation nothing is known"


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_voc_s_images_and_masks_come_back_as_they_were(tmp_path: Path, to: str) -> None:
    root = voc_of(tmp_path / "VOC")
    packer.convert(root, to, tmp_path / "set", workers=1)
    packer.extract(tmp_path / "set", tmp_path / "out")
    for name in (
        "JPEGImages/2007_000000.jpg",
        "SegmentationClass/2007_000000.png",
        "SegmentationObject/2007_000000.png",
    ):
        back = tmp_path / "out" / name.removeprefix("JPEGImages/")
        assert back.read_bytes() == (root / name).read_bytes()


def test_voc_of_other_classes_and_lists(tmp_path: Path) -> None:
    root = voc_of(tmp_path / "VOC", **{"Annotations/2007_000003.xml": xml(("zebra", 1, 1, 2, 2))})
    listing = packer.open_source(root).list(None)
    assert listing.classes == ("cat", "dog", "person", "zebra")
    assert listing.left_out == [("2007_000004.jpg", "in no list of the splits")]
    segmented = packer.open_source(root, image_sets="Segmentation").list(None)
    assert {name: list(part.keys) for name, part in segmented.splits.items()} == {"train": ["2007_000000"]}
    with pytest.raises(SourceError, match="no lists in ImageSets/Action"):
        packer.open_source(root, image_sets="Action").list(None)
    with pytest.raises(SourceError, match="leads outside"):
        packer.open_source(root, image_sets="../Main").list(None)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_voc_s_boxes_and_masks_turn_with_the_image(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[2:9, 3:11] = 255
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "PNG", exif=exif)
    mask = (pixels[:, :, 0] > 0).astype(np.uint8)
    root = tree_of(
        tmp_path / "VOC",
        {"JPEGImages/1.png": memory.getvalue(), "Annotations/1.xml": xml(("dog", 4, 3, 11, 9)),
         "SegmentationClass/1.png": palette_png(mask)},
    )  # fmt: skip
    read = values(packer.open_source(root), "train")["1"]
    bright = np.array(decode_field("image", memory.getvalue()))[:, :, 0] > 0
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    assert read["boxes"].tolist() == [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]]
    assert ((read["mask"] > 0) == bright).all()


BOMB = b"".join(b'<!ENTITY l%d "%s">' % (i, b"&l%d;" % (i - 1) * 10 if i else b"lol" * 100) for i in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"<!DOCTYPE annotation [" + BOMB + b"]><annotation><object>&l11;</object></annotation>", "a document type"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a><b/></a>', "a document type"),
        (b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a><b>&x;</b></a>', "a document type"),
        (b"<annotation><object>", "is not XML"),
        (b"", "is not XML"),
        (b"<annotation>text</annotation>", "its root holds no elements"),
        (b'<?xml version="1.0" encoding="nonsense"?><annotation/>', "is not XML"),
        (b"<a>" * 100 + b"</a>" * 100, "inside each other"),
        (b"<a>" + b"<b/>" * 300_000 + b"</a>", "more than 262,144 elements"),
        (xml(("dog", float("nan"), 1, 2, 3)), "xmin is 'nan'"),
        (xml(("dog", 1e300, 1, 2, 3)), "xmin is '1e+300'"),
        (xml(("dog", 20, 1, 2, 3)), "not a box"),
        (xml(("dog", 100, 100, 200, 200)), "outside of the image of 40 x 24"),
        (xml(("dog", 1, 1, 2, 2), size=(400, 300)), "its annotations are for 400 x 300"),
        (xml(("dog", 1, 1, 2, 2), more="<object><name>x</name></object>"), "not one bndbox"),
        (xml(more="<object>dog</object>"), "not one bndbox"),
    ],
)
def test_a_voc_annotation_that_deceives_is_a_bad_sample(tmp_path: Path, text: bytes, message: str) -> None:
    root = voc_of(tmp_path / "VOC", **{"Annotations/2007_000000.xml": text})
    with pytest.raises(BadSampleError) as refusal:
        packer.convert(root, "tar", tmp_path / "out", workers=1)
    assert "Annotations/2007_000000.xml" in str(refusal.value) and message in str(refusal.value), str(refusal.value)
    result = packer.convert(root, "tar", tmp_path / "rest", workers=1, on_error="skip")
    assert (result.samples, result.left_out.get("skipped")) == (3, 1)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("ImageSets/Main/train.txt", b"../../etc/passwd\n", SourceError, "leads outside"),
        (
            "ImageSets/Main/train.txt",
            b"2007_000000\n2007_000000\n",
            SourceError,
            "line 2: '2007_000000' for the second",
        ),
        ("ImageSets/Main/train.txt", b"2007_000000 1\n", SourceError, "is not the name of an image"),
        ("ImageSets/Main/train.txt", b"\xff\n", SourceError, "not UTF-8"),
        ("ImageSets/Main/train.txt", b"2007_999999\n", BadSampleError, "2007_999999.jpg' cannot be opened"),
        ("SegmentationClass/2007_000000.png", palette_png(MASK[:9]), BadSampleError, "its mask has 40 x 9 pixels"),
        ("SegmentationClass/2007_000000.png", PICTURES[1], BadSampleError, "a mask is encoded without loss"),
    ],
)
def test_other_files_of_voc_that_deceive(tmp_path: Path, name: str, text: bytes, error: Any, message: str) -> None:
    with pytest.raises(error) as refusal:
        packer.convert(voc_of(tmp_path / "VOC", **{name: text}), "tar", tmp_path / "out", workers=1)
    assert message in str(refusal.value), str(refusal.value)


# --- YOLO ---------------------------------------------------------------------------------------------------------
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


# --- ILSVRC -------------------------------------------------------------------------------------------------------
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
        packer.convert(tmp_path / "in", "tar", tmp_path / "out", workers=1)


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
