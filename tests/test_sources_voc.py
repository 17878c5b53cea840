"""Pascal VOC: what is in its files, and files that deceive."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from PIL import Image
from test_sources_coco import values

import packer
from cache.errors import BadSampleError, SourceError
from packer.sources.objects import parse_objects
from packer.testing.sources import Found, SourceSuite
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
        unused = ("Segmentation/", "000004", "trainval.txt", "dog_train.txt")
        return {path for path in used if not any(name in str(path) for name in unused)}

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
    packer.convert(root, to, tmp_path / "set", run=packer.Run(workers=1))
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
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert "Annotations/2007_000000.xml" in str(refusal.value) and message in str(refusal.value), str(refusal.value)
    result = packer.convert(root, "tar", tmp_path / "rest", run=packer.Run(workers=1, on_error="skip"))
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
        packer.convert(voc_of(tmp_path / "VOC", **{name: text}), "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert message in str(refusal.value), str(refusal.value)
