"""Images with annotations: COCO, Pascal VOC, YOLO, ILSVRC and CelebA, in their layouts, compared with DALI and
pycocotools, and with malicious files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Hanging, make_jpeg, tree_of
from PIL import Image
from suites.containers import tar_of
from suites.layouts import PICTURES, SIZE, Layout, LayoutSuite, pack_error, refusal, values

import packer
from cache.errors import SourceError
from packer.sources.coco import json_parts
from packer.sources.objects import Grid, outline_pixels, parse_objects
from packer.testing.sources import Content, content_of
from readers.decode import decode_image
from readers.fields import encode_field

WIDTH, HEIGHT = SIZE


def boxes(*rows: list[float]) -> bytes:
    return bytes(encode_field("boxes", np.array(rows, np.float32).reshape(-1, 4)))


def numbers(*labels: int) -> bytes:
    return bytes(encode_field("array", np.array(labels, np.int64)))


def lit(orientation: int) -> tuple[bytes, np.ndarray, list[int]]:
    """A PNG, bright in columns 30 to 38 of rows 2 to 10 as stored; a mask of the bright part as displayed, and its
    box."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[2:10, 30:38] = 255
    exif, memory = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(memory, "PNG", exif=exif)
    bright = np.array(decode_image(memory.getvalue()))[:, :, 0] > 0
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    return memory.getvalue(), bright, [int(side) for side in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)]


def keys(source: Any) -> dict[str, list[str]]:
    return {name: [*part.keys] for name, part in source.list(None).splits.items()}


# --- COCO ---------------------------------------------------------------------------------------------------------
CATEGORIES = [
    {"id": 18, "name": "dog", "supercategory": "animal"},
    {"id": 1, "name": "person", "supercategory": "person"},
    {"id": 7, "name": "train", "supercategory": "vehicle"},
]
CLASSES = ("person", "train", "dog")  # by ascending id
RUNS = {"size": [HEIGHT, WIDTH], "counts": [24 * 20, 48, 24 * 18]}  # two columns, from 20 on
RUNS_AS_TEXT = {"size": [HEIGHT, WIDTH], "counts": "P?`1`="}  # the same, as pycocotools writes it


def note(number: int, image: int, **more: Any) -> dict[str, Any]:
    usual = {"id": number, "image_id": image, "category_id": 18, "bbox": [4, 4, 8, 6], "area": 48, "iscrowd": 0}
    return {**usual, **more}


def instances(images: Mapping[int, str], *notes: dict[str, Any], **size: int) -> dict[str, Any]:
    usual = {"width": WIDTH, "height": HEIGHT, **size, "license": 4}
    listed = [{"id": number, "file_name": name, **usual} for number, name in images.items()]
    return {"info": {"year": 2017}, "images": listed, "annotations": list(notes), "categories": CATEGORIES}


NOTES = (
    note(31, 2, segmentation=[[4.0, 4.0, 12.0, 4.0, 12.0, 10.0, 4.0, 10.0]]),
    note(32, 2, category_id=1, bbox=[20, 0, 2, HEIGHT], iscrowd=1, segmentation=RUNS),
    note(33, 9, category_id=7, bbox=[1.5, 2.25, 10, 3], segmentation=[[1.5, 2.25, 11.5, 2.25, 11.5, 5.25]]),
)
PERSONS = (note(32, 2, category_id=1, bbox=[20, 0, 2, HEIGHT], num_keypoints=1, keypoints=[21, 3, 2, 0, 0, 0]),)
CAPTIONS = ({"id": 1, "image_id": 9, "caption": "a train\nin Zürich "}, {"id": 2, "image_id": 9, "caption": "rails"})
IMAGES = {9: "000009.jpg", 2: "000002.jpg", 5: "000005.jpg"}
IN_COCO = {name: PICTURES[number] for number, name in IMAGES.items()}


def pack_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def coco_of(root: Path, **files: Any) -> Path:
    """A COCO folder: annotations/<name>.json, and the pictures in val2017."""
    texts = {f"annotations/{name}.json": pack_json(value) for name, value in files.items()}
    return tree_of(root, {**texts, **{f"val2017/{name}": data for name, data in IN_COCO.items()}})


def coco(root: Path) -> Path:
    captions = {"images": instances(IMAGES)["images"], "annotations": list(CAPTIONS)}
    kinds = {"instances": instances(IMAGES, *NOTES), "person_keypoints": instances(IMAGES, *PERSONS)}
    return coco_of(root, **{f"{kind}_val2017": value for kind, value in (kinds | {"captions": captions}).items()})


def coco_truth(root: Path) -> Content:
    """The content in the order of the lists; the texts in the field json are those of the files."""
    of_boxes = {
        "000009": (boxes([1.5, 2.25, 11.5, 5.25]), numbers(1)),
        "000002": (boxes([4, 4, 12, 10], [20, 0, 22, HEIGHT]), numbers(2, 0)),
        "000005": (boxes(), numbers()),
    }
    mask = {key: np.zeros((HEIGHT, WIDTH), np.uint8) for key in of_boxes}
    mask["000002"][4:10, 4:12] = 3
    mask["000002"][:, 20:22] = 1
    for row, first in ((2, 2), (3, 6), (4, 9)):  # centres of pixels below the diagonal
        mask["000009"][row, first:11] = 2
    nothing = [[np.nan, np.nan], [np.nan, np.nan]]
    points = {"000009": [nothing], "000002": [nothing, [[21, 3], [np.nan, np.nan]]], "000005": []}
    samples = []
    for key, (its_boxes, labels) in of_boxes.items():
        about = next(item for item in instances(IMAGES)["images"] if item["file_name"] == f"{key}.jpg")
        record = [b'{"image":' + pack_json(about)]
        for kind, notes in {"instances": NOTES, "person_keypoints": PERSONS, "captions": CAPTIONS}.items():
            if texts := [pack_json(item) for item in notes if item["image_id"] == about["id"]]:
                record.append(b'"%s":[%s]' % (kind.encode(), b",".join(texts)))
        fields = (
            IN_COCO[f"{key}.jpg"],
            its_boxes,
            labels,
            encode_field("mask", mask[key]),
            encode_field("points", np.array(points[key], np.float32).reshape(-1, 2, 2)),
            encode_field("text", ["a train in Zürich", "rails"]) if key == "000009" else None,
            b",".join(record) + b"}",
        )
        samples.append((key, -1, fields))
    return Content({"val": samples}, CLASSES, ("image", "boxes", "box_labels", "mask", "points", "caption", "json"))


# --- VOC ----------------------------------------------------------------------------------------------------------
def xml(*objects: tuple[str, float, float, float, float], size: tuple[int, int] = SIZE, more: str = "") -> bytes:
    text = "".join(
        f"<object><name>{name}</name><pose>Left</pose><difficult>{number % 2}</difficult><bndbox><xmin>{x0}</xmin>"
        f"<ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for number, (name, x0, y0, x1, y1) in enumerate(objects)
    )
    sizes = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><filename>x</filename>{sizes}{text}{more}</annotation>".encode()


def palette_png(pixels: np.ndarray) -> bytes:
    """Class numbers as in VOC: indices of a palette."""
    image, memory = Image.fromarray(pixels, "P"), io.BytesIO()
    image.putpalette([value for colour in range(256) for value in (colour * 7 % 256, colour, 0)])
    image.save(memory, "PNG")
    return memory.getvalue()


MASK = np.zeros((HEIGHT, WIDTH), np.uint8)
MASK[2:9, 3:11] = 12  # dog
MASK[9, 3:11] = 255
VOC_FILES = {
    **{f"JPEGImages/2007_{number:06d}.jpg": PICTURES[number] for number in range(5)},
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


def voc(root: Path, **more: bytes) -> Path:
    return tree_of(root, VOC_FILES | more)


def voc_truth(root: Path) -> Content:
    def sample(number: int, *fields: bytes | None) -> tuple[str, int, Any]:
        name = f"2007_{number:06d}"
        text = VOC_FILES.get(f"Annotations/{name}.xml")
        record = None if text is None else bytes(encode_field("json", parse_objects(text).record))
        return name, -1, (PICTURES[number], *fields, record)

    masks = [VOC_FILES[f"Segmentation{kind}/2007_000000.png"] for kind in ("Class", "Object")]
    splits = {
        "train": [
            sample(0, boxes([3, 2, 11, 9], [0, 0, 40, 24]), numbers(11, 14), *masks),
            sample(2, boxes(), numbers(), None, None),
        ],
        "val": [sample(1, boxes([4.5, 5.25, 20, 21]), numbers(7), None, None), sample(3, None, None, None, None)],
    }
    names = ("image", "boxes", "box_labels", "mask", "instance_mask", "json")
    return Content(splits, packer.open_source(root).list(None).classes, names)


# --- YOLO ---------------------------------------------------------------------------------------------------------
YAML = b"path: ../elsewhere\ntrain: /nowhere\nnames:\n  0: cat\n  1: dog\n  2: owl\n"
BOXES = b"1 0.5 0.5 0.25 0.5\n2 0.1 0.25 0.05 0.125\n"
OWLS = b"cat\ndog\nowl\n"


def yolo(root: Path, **more: bytes) -> Path:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    files = {f"images/train/{number}.jpg": PICTURES[number] for number in range(3)}
    files |= {f"images/val/{number}.jpg": PICTURES[number] for number in (3, 4)}
    files |= {"labels/train/0.txt": BOXES, "labels/train/1.txt": b"\n", "labels/val/3.txt": b"0 0.5 0.5 1 1\n"}
    return tree_of(root, files | {"data.yaml": YAML} | more)


def yolo_truth(root: Path) -> Content:
    of_boxes = {0: (boxes([15, 6, 25, 18], [3, 4.5, 5, 7.5]), numbers(1, 2)), 3: (boxes([0, 0, 40, 24]), numbers(0))}
    samples = [(str(i), -1, (PICTURES[i], *of_boxes.get(i, (boxes(), numbers())))) for i in range(5)]
    return Content({"train": samples[:3], "val": samples[3:]}, ("cat", "dog", "owl"), ("image", "boxes", "box_labels"))


# --- ILSVRC -------------------------------------------------------------------------------------------------------
TRAIN = {f"{name}/{name}_{i}.JPEG": PICTURES[i] for i, name in enumerate(["n01", "n01", "n02", "n03"])}
VAL = {f"ILSVRC2012_val_{i:08d}.JPEG": PICTURES[3 + i] for i in (1, 2, 3)}
OF_VAL = {1: "n03", 2: "n01", 3: "n02"}
SYNSETS = ("n01", "n02", "n03")
SOLUTION = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_{number:08d},{name} 1 2 3 4 {name} 5 6 7 8 \n" for number, name in OF_VAL.items()
)


def ilsvrc_content(root: Path | None = None) -> Content:
    train = [(name[:-5], SYNSETS.index(name[:3]), (data,)) for name, data in TRAIN.items()]
    val = [(name[:-5], SYNSETS.index(OF_VAL[i]), (data,)) for i, (name, data) in enumerate(VAL.items(), 1)]
    return Content({"train": train, "val": val}, SYNSETS)


def kaggle(root: Path, **more: bytes) -> Path:
    files = {f"Data/CLS-LOC/train/{name}": data for name, data in TRAIN.items()}
    files |= {f"Data/CLS-LOC/val/{name}": data for name, data in VAL.items()}
    return tree_of(root, files | {"LOC_val_solution.csv": SOLUTION.encode()} | more)


def kaggle_with_boxes(root: Path) -> Path:
    """Boxes of two images, one of which is annotated at twice its size."""
    annotations = {
        "train/n02/n02_2.xml": xml(("n02", 4, 2, 12, 10), ("n02", 39, 23, 41, 25)),
        "val/ILSVRC2012_val_00000001.xml": xml(("n03", 20, 8, 40, 24), size=(80, 48)),
    }
    return kaggle(root, **{f"Annotations/CLS-LOC/{name}": text for name, text in annotations.items()})


def kaggle_truth(root: Path) -> Content:
    known = {
        "n02/n02_2": (boxes([4, 2, 12, 10], [39, 23, 40, 24]), numbers(1, 1)),
        "ILSVRC2012_val_00000001": (boxes([10, 4, 20, 12]), numbers(2)),
    }
    splits = {
        split: [(key, label, (*fields, *known.get(key, (None, None)))) for key, label, fields in samples]
        for split, samples in ilsvrc_content().splits.items()
    }
    return Content(splits, SYNSETS, ("image", "boxes", "box_labels"))


def archives(root: Path, solution: str = SOLUTION) -> Path:
    inner = [
        (f"{name}.tar", tar_of(*((path[4:], data) for path, data in TRAIN.items() if path.startswith(name))))
        for name in SYNSETS
    ]
    files = {"ILSVRC2012_img_train.tar": tar_of(*inner), "ILSVRC2012_img_val.tar": tar_of(*VAL.items())}
    return tree_of(root, files | ({"LOC_val_solution.csv": solution.encode()} if solution else {}))


# --- CelebA -------------------------------------------------------------------------------------------------------
FACES = [f"{number:06d}.jpg" for number in range(1, 7)]
ATTRIBUTES = ("5_o_Clock_Shadow", "Bald", "Smiling", "Young")
SMILES = [1, -1, 1, 1, -1, -1]
PARTS = [0, 0, 0, 1, 2, 2]
SPLITS = ("train", "val", "test")


def attributes(number: int) -> list[int]:
    return [-1, 1 if number == 3 else -1, SMILES[number], 1]


PARTITION = "".join(f"{name} {part}\n" for name, part in zip(FACES, PARTS, strict=True))
# The original list pads -1 and 1 to two characters, and ends lines with or without a space.
LIST = f"{len(FACES)}\n{' '.join(ATTRIBUTES)} \n" + "".join(
    f"{name} {' '.join(f'{value:2d}' for value in attributes(number))}\n" for number, name in enumerate(FACES)
)
IDENTITIES = "".join(f"{name} {2880 + number // 2}\n" for number, name in enumerate(FACES))
LISTS = {"list_eval_partition.txt": PARTITION, "list_attr_celeba.txt": LIST, "identity_CelebA.txt": IDENTITIES}


def celeba(root: Path, published: bool = False) -> Path:
    folders = ("Img/", "Eval/", "Anno/", "Anno/") if published else ("",) * 4
    files = {f"{folders[0]}img_align_celeba/{name}": PICTURES[i] for i, name in enumerate(FACES)}
    lists = {f"{folder}{name}": text.encode() for folder, (name, text) in zip(folders[1:], LISTS.items(), strict=True)}
    return tree_of(root, files | lists)


def celeba_truth(root: Path) -> Content:
    splits: dict[str, Any] = {name: [] for name in SPLITS}
    for number, name in enumerate(FACES):
        facts = json.dumps(dict(zip(ATTRIBUTES, attributes(number), strict=True)), separators=(",", ":")).encode()
        splits[SPLITS[PARTS[number]]].append((name[:-4], -1, (PICTURES[number], facts)))
    return Content(splits, (), ("image", "json"))


# --- the contract -------------------------------------------------------------------------------------------------
VOC_UNUSED = ("*/Segmentation/*", "*000004*", "*trainval.txt", "*dog_train.txt")
LAYOUTS = {
    "coco": Layout(lambda folder: coco(folder / "coco"), coco_truth, "*.jpg", whole=True),
    "voc": Layout(lambda folder: voc(folder / "VOC"), voc_truth, "*.jpg", VOC_UNUSED, whole=True),
    "yolo": Layout(lambda folder: yolo(folder / "set"), yolo_truth, "*.jpg", whole=True),
    "ilsvrc": Layout(lambda folder: kaggle_with_boxes(folder / "set"), kaggle_truth, "*.JPEG", whole=True),
    "ilsvrc archives": Layout(lambda folder: archives(folder / "set"), ilsvrc_content, "*.tar"),
    "celeba": Layout(lambda folder: celeba(folder / "celeba", True), celeba_truth, "*.jpg", whole=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
class TestAnnotated(LayoutSuite):
    pass


# --- files that deceive -------------------------------------------------------------------------------------------
def coco_with(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(pack_json(instances(IMAGES, *NOTES)))
    change(value)
    return pack_json(value)


WHOLE = pack_json(instances(IMAGES, *NOTES))
MERGES = ["a0: &a0 {x: y}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)), "names: *a39"]
OF_COCO = "annotations/instances_val2017.json"
OF_VOC = "ImageSets/Main/train.txt"
SOLVED = "LOC_val_solution.csv"
PART, ATTR, IDENTITY = LISTS
REFUSED: list[tuple[Callable[..., Path], str, bytes, str]] = [
    (coco_of, OF_COCO, coco_with(lambda v: v["images"][0].update(file_name="../../etc/passwd")), "leads outside"),
    (coco_of, OF_COCO, coco_with(lambda v: v["images"][0].update(file_name=7)), "file_name"),
    (coco_of, OF_COCO, coco_with(lambda v: v["images"][0].update(id=2)), "the image 2 for the second time"),
    (coco_of, OF_COCO, coco_with(lambda v: v["images"][0].update(id="2")), "id is '2', expected a whole number"),
    (coco_of, OF_COCO, coco_with(lambda v: v["images"][0].update(file_name="000002.jpg")), "two images have"),
    (coco_of, OF_COCO, coco_with(lambda v: v["annotations"][0].update(id=32)), "has the id 32, as another one has"),
    (coco_of, OF_COCO, coco_with(lambda v: v["annotations"][0].update(image_id=4)), "of the image 4, which is"),
    (coco_of, OF_COCO, coco_with(lambda v: v["annotations"][0].update(category_id=4)), "the category 4, which"),
    (coco_of, OF_COCO, coco_with(lambda v: v["annotations"][0].pop("bbox")), "a segmentation without a bbox"),
    (coco_of, OF_COCO, coco_with(lambda v: v["categories"][0].update(name="person")), "two categories are called"),
    (coco_of, OF_COCO, coco_with(lambda v: v["categories"][0].update(id=1)), "'person' here, 'dog' before"),
    (coco_of, OF_COCO, coco_with(lambda v: v["annotations"].append(3)), "image_id is None"),
    (coco_of, OF_COCO, b"[]", "expected '{'"),
    (coco_of, OF_COCO, b"{}", "lists no images"),
    (coco_of, OF_COCO, b'{"images": [' + b"[" * 200_000, "not a JSON object, or cut short"),
    (coco_of, OF_COCO, b'{"images": [], "images": []}', "new name of a member"),
    (coco_of, OF_COCO, b'{"images": [{"id": 1, "file_name": "\xff.jpg"}]}', "not UTF-8"),
    (coco_of, OF_COCO, WHOLE[:-40], "not a JSON object, or cut short"),
    (coco_of, OF_COCO, WHOLE + b"{}", "more than one value"),
    (voc, OF_VOC, b"../../etc/passwd\n", "leads outside"),
    (voc, OF_VOC, b"2007_000000\n2007_000000\n", "line 2: '2007_000000' for the second"),
    (voc, OF_VOC, b"2007_000000 1\n", "is not the name of an image"),
    (voc, OF_VOC, b"\xff\n", "not UTF-8"),
    (yolo, "data.yaml", b"- names\n", "holds no mapping"),
    (yolo, "data.yaml", b"names: {0: cat, 2: dog}\n", "expected a list"),
    (yolo, "data.yaml", b"names: [cat, cat]\n", "different texts"),
    (yolo, "data.yaml", b"names: !!python/object/apply:os.system ['true']\n", "cannot be read as YAML"),
    (yolo, "data.yaml", b"[" * 100_000, "cannot be read as YAML"),
    (yolo, "data.yaml", "\n".join(MERGES).encode(), "has aliases"),  # 360 bytes that stand for a million names
    (yolo, "data.yaml", YAML + b"kpt_shape: [100000000, 3]\n", "kpt_shape is"),
    (kaggle, SOLVED, b"a,b\n1,2\n", "expected ImageId and PredictionString"),
    (kaggle, SOLVED, b"ImageId,PredictionString\nx,\n", "line 2: '' does not begin with a synset"),
    (kaggle, SOLVED, b"ImageId,PredictionString\nx,n01 1\nx,n02 1\n", "line 3: 'x' for the second time"),
    (celeba, PART, PARTITION.encode() + b"../secret.jpg 0\n", "line 7: '../secret.jpg' is not the name"),
    (celeba, PART, PARTITION.encode() + b"000001.jpg 1\n", "line 7: '000001.jpg' for the second time"),
    (celeba, PART, PARTITION.replace(" 2", " 3", 1).encode(), "line 5: '3' is not a part"),
    (celeba, PART, PARTITION.replace(" 1\n", "\n").encode(), "line 4: 1 words"),
    (celeba, PART, b"", "no rows"),
    (celeba, PART, b"x" * 100_000, "line 1: longer than"),
    (celeba, PART, PARTITION.encode() + b"\xff", "not UTF-8"),
    (celeba, ATTR, LIST.encode() + b"000009.jpg  1 1 1 1\n", "line 9: '000009.jpg' is not in the partition"),
    (celeba, ATTR, LIST.replace(FACES[5], FACES[4]).encode(), "line 8: '000005.jpg' for the second time"),
    (celeba, ATTR, "\n".join(LIST.splitlines()[:-2]).encode(), "no line for '000005.jpg'; 2 images"),
    (celeba, ATTR, LIST.replace(" 1\n", "\n", 1).encode(), "line 3: 4 words, expected a name and 4"),
    (celeba, ATTR, LIST.replace(" 1\n", " 7\n", 1).encode(), "line 3: attributes are -1 or 1"),
    (celeba, ATTR, b"6\nBald Bald\n", "line 2: expected"),
    (celeba, IDENTITY, IDENTITIES.replace("2881", "-4").encode(), "line 3: '-4' is not the number"),
]


@pytest.mark.parametrize(("write", "name", "text", "message"), REFUSED)
def test_malicious_lists_are_refused(tmp_path: Path, write: Any, name: str, text: bytes, message: str) -> None:
    root = tree_of(write(tmp_path / "set"), {name: text})
    error = refusal(root, **({"label_column": "identity"} if write is celeba else {}))
    assert message in error and len(error) < 700, error
    assert write is not yolo or error.count(name) == 1, f"does not name the file once: {error}"


def of_two(**more: Any) -> bytes:
    return pack_json(instances(IMAGES, note(31, 2, **more), *NOTES[2:]))


def runs(counts: Any, height: int = HEIGHT, width: int = WIDTH) -> bytes:
    return of_two(segmentation={"size": [height, width], "counts": counts})


NOTED = "Annotations/2007_000000.xml"
DRAWN = "SegmentationClass/2007_000000.png"
LABELS = "labels/train/0.txt"
BOMB = b"".join(b'<!ENTITY l%d "%s">' % (i, b"&l%d;" % (i - 1) * 10 if i else b"lol" * 100) for i in range(12))
BAD: list[tuple[Callable[..., Path], str, bytes, str]] = [
    (coco_of, OF_COCO, of_two(bbox=[float("nan"), 1, 2, 3]), "NaN is not JSON"),
    (coco_of, OF_COCO, of_two(bbox=[1e400, 1, 2, 3]), "Infinity is not JSON"),
    (coco_of, OF_COCO, of_two(bbox=[1, 2, -3, 4]), "negative width or height"),
    (coco_of, OF_COCO, of_two(bbox=[1, 2, 3]), "expected 4 numbers"),
    (coco_of, OF_COCO, of_two(bbox=[10**400, 2, 3, 4]), "beyond all images"),
    (coco_of, OF_COCO, of_two(bbox=[4000, 2, 3, 4]), "outside of the image of 40 x 24"),
    (coco_of, OF_COCO, of_two(segmentation=[[1, 2, 3]]), "an outline"),
    (coco_of, OF_COCO, of_two(segmentation=[[1, 2, 3, 4, 1e300, 5]]), "far outside the image"),
    (coco_of, OF_COCO, of_two(segmentation=["x"]), "an outline"),
    (coco_of, OF_COCO, of_two(segmentation="x"), "expected outlines, or runs"),
    (coco_of, OF_COCO, runs([1, 2]), "does not have the 960 pixels"),
    (coco_of, OF_COCO, runs([1 << 62, 1 << 62]), "does not have the 960 pixels"),
    (coco_of, OF_COCO, runs("ooooooooooooooo0"), "damaged"),
    (coco_of, OF_COCO, runs("P"), "ends inside a number"),
    (coco_of, OF_COCO, runs([1], 1 << 40, 1 << 40), "the image has [24, 40]"),
    (coco_of, OF_COCO, of_two(keypoints=[1, 2]), "x, y and v of each"),
    (voc, NOTED, b"<!DOCTYPE annotation [" + BOMB + b"]><annotation><a>&l11;</a></annotation>", "a document type"),
    (voc, NOTED, b"<annotation><object>", "is not XML"),
    (voc, NOTED, b"<annotation>text</annotation>", "its root holds no elements"),
    (voc, NOTED, b'<?xml version="1.0" encoding="nonsense"?><annotation/>', "is not XML"),
    (voc, NOTED, xml(("dog", float("nan"), 1, 2, 3)), "xmin is 'nan'"),
    (voc, NOTED, xml(("dog", 20, 1, 2, 3)), "not a box"),
    (voc, NOTED, xml(("dog", 100, 100, 200, 200)), "outside of the image of 40 x 24"),
    (voc, NOTED, xml(("dog", 1, 1, 2, 2), size=(400, 300)), "its annotations are for 400 x 300"),
    (voc, NOTED, xml(more="<object><name>x</name></object>"), "not exactly one bndbox"),
    (voc, DRAWN, palette_png(MASK[:9]), "its mask has 40 x 9 pixels"),
    (voc, DRAWN, PICTURES[1], "a mask is losslessly encoded"),
    (yolo, LABELS, b"0 0.5 0.5 0.1\n", "4 numbers, for neither a box nor an outline"),
    (yolo, LABELS, b"0 0.5 0.5 0.1 0.1 0.9\n", "as with a confidence"),
    (yolo, LABELS, b"0 20 12 10 10\n", "in pixels?"),
    (yolo, LABELS, b"0 nan 0.5 0.1 0.1\n", "outside 0 to 1"),
    (yolo, LABELS, b"9 0.5 0.5 0.1 0.1\n", "'9' is not a class number, expected 0 to 2"),
    (yolo, LABELS, b"0.5 0.5 0.5 0.1 0.1\n", "is not a class number"),
    (yolo, LABELS, b"cat 0.5 0.5 0.1 0.1\n", "could not convert"),
    (yolo, LABELS, b"\xff\xfe", "not UTF-8"),
]
OF_SAMPLE = {coco_of: "000002.jpg", voc: "2007_000000", yolo: LABELS}


@pytest.mark.parametrize(("write", "name", "text", "message"), BAD)
def test_a_malicious_annotation_is_a_bad_sample(
    tmp_path: Path, write: Any, name: str, text: bytes, message: str
) -> None:
    root = tree_of(write(tmp_path / "set"), {name: text})
    error = pack_error(root, tmp_path / "out")
    assert OF_SAMPLE[write] in error and message in error, error
    result = packer.convert(root, "tar", tmp_path / "rest", run=packer.Run(workers=1, on_error="skip"))
    assert (result.samples, result.left_out["skipped"]) == ({coco_of: 2, voc: 3, yolo: 4}[write], 1)


def test_a_listed_image_that_is_missing_is_a_bad_sample(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", **{OF_VOC: b"2007_999999\n"})
    assert "2007_999999.jpg' cannot be opened" in pack_error(root, tmp_path / "out")
    root = celeba(tmp_path / "celeba")
    (root / "img_align_celeba" / FACES[1]).unlink()
    assert FACES[1] in pack_error(root, tmp_path / "out")


@pytest.mark.parametrize(("width", "height"), [(80, 48), (HEIGHT, WIDTH), (0, 0), (1 << 40, 1 << 40)])
def test_a_wrong_image_size_is_a_bad_sample(tmp_path: Path, width: int, height: int) -> None:
    root = coco_of(tmp_path / "coco", instances_val2017=instances(IMAGES, *NOTES, width=width, height=height))
    assert "has 40 x 24 pixels, but its annotations are for" in pack_error(root, tmp_path / "out")


# --- positions of annotations -------------------------------------------------------------------------------------
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_turn_with_the_image(tmp_path: Path, orientation: int) -> None:
    """A box, an outline, a point and a mask on the only bright part of an image stay there when the image is displayed.

    Where the size does not decide which image COCO refers to, it is the stored one; YOLO refers to the displayed image.
    """
    png, bright, seen = lit(orientation)
    for of, box, size in (("stored", [30, 2, 38, 10], SIZE), ("displayed", seen, SIZE[::-1])):
        if of == "displayed" and orientation < 5:
            continue
        x0, y0, x1, y1 = box
        annotation = note(1, 1, bbox=[x0, y0, x1 - x0, y1 - y0], segmentation=[[x0, y0, x1, y0, x1, y1, x0, y1]],
                          keypoints=[(x0 + x1) / 2, (y0 + y1) / 2, 2])  # fmt: skip
        text = pack_json(instances({1: "1.png"}, annotation, width=size[0], height=size[1]))
        read = values(packer.open_source(tree_of(tmp_path / of, {"val2017/1.png": png, OF_COCO: text})), "val")["1"]
        assert read["boxes"].tolist() == [seen] and ((read["mask"] > 0) == bright).all()
        assert read["points"][0, 0].tolist() == [(seen[0] + seen[2]) / 2, (seen[1] + seen[3]) / 2]
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[2:10, 30:38] = 1
    files = {"JPEGImages/1.png": png, "Annotations/1.xml": xml(("dog", 31, 3, 38, 10))}
    root = tree_of(tmp_path / "VOC", files | {"SegmentationClass/1.png": palette_png(mask)})
    read = values(packer.open_source(root))["1"]
    assert read["boxes"].tolist() == [seen] and ((read["mask"] > 0) == bright).all()
    high, wide = bright.shape
    x0, y0, x1, y1 = seen
    line = f"1 {(x0 + x1) / 2 / wide} {(y0 + y1) / 2 / high} {(x1 - x0) / wide} {(y1 - y0) / high}\n"
    root = yolo(tmp_path / "yolo", **{"images/train/7.png": png, "labels/train/7.txt": line.encode()})
    np.testing.assert_allclose(values(packer.open_source(root))["7"]["boxes"], [seen], atol=1e-3)


def test_coco_parts_are_splits_and_parts_without_images_are_skipped(tmp_path: Path) -> None:
    root = coco_of(
        tmp_path / "coco",
        instances_val2017=instances(IMAGES, *NOTES),
        instances_train2017=instances({77: "000077.jpg"}),
        image_info_test2017=instances({5: "000005.jpg"}),
    )
    (root / "test2017").mkdir()
    shutil.copy(root / "val2017/000005.jpg", root / "test2017/000005.jpg")
    listing = packer.open_source(root).list(None)
    assert {name: len(part) for name, part in listing.splits.items()} == {"test": 1, "val": 3}
    assert [text for text in listing.warnings if "train2017 is skipped: its images (such as '000077.jpg')" in text]
    assert values(packer.open_source(root), "test")["000005"]["boxes"] is None, "annotations of an unannotated split"
    with pytest.raises(SourceError, match=r"no split 'train'; it has test, val"):
        packer.open_source(root).list("train")


@pytest.mark.parametrize("where", ["next to it", "above it", "a folder that is given"])
def test_a_coco_file_by_itself(tmp_path: Path, where: str) -> None:
    names = {"next to it": "labels.json", "above it": "annotations/labels.json"}
    name = names.get(where, "elsewhere/labels.json")
    tree_of(
        tmp_path, {name: WHOLE, **{f"{'' if where == 'next to it' else 'images/'}{n}": d for n, d in IN_COCO.items()}}
    )
    options = {"folder": tmp_path / "images"} if where.startswith("a folder") else {}
    source = packer.open_source(tmp_path / name, **options)
    assert list(values(source)) == ["000009", "000002", "000005"]
    assert [*source.list("val").splits] == ["val"]


def test_coco_exports_of_roboflow(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        tree_of(tmp_path / "set" / split, {"_annotations.coco.json": WHOLE, **IN_COCO})
    listing = packer.open_source(tmp_path / "set").list(None)
    assert [*listing.splits] == ["train", "valid"] and not listing.left_out
    assert [*packer.open_source(tmp_path / "set").list("val").splits] == ["valid"]


def test_images_that_no_list_names_are_left_out(tmp_path: Path) -> None:
    root = coco(tmp_path / "coco")
    (root / "val2017/000123.jpg").write_bytes(make_jpeg(123))
    (root / "annotations/panoptic_val2017.json").write_bytes(b"{}")
    result = packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    reasons = {"not in the annotations": 1, "unsupported kind of annotations": 1}
    assert result.left_out_reasons == reasons and result.samples == 3
    root = celeba(tmp_path / "celeba")
    (root / "img_align_celeba" / "999999.jpg").write_bytes(b"")
    assert packer.open_source(root).list(None).left_out == [("999999.jpg", "not in list_eval_partition.txt")]


# --- COCO against other programs, and in detail -------------------------------------------------------------------
def test_dali_reads_the_same_boxes_and_labels(tmp_path: Path) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    rng = np.random.default_rng(5)
    images = {number: f"{number:06d}.jpg" for number in range(1, 13)}
    notes = []
    for number in range(40):
        place = [float(rng.integers(0, side - 8)) for side in SIZE]
        box = [*place, float(rng.integers(1, 80)) / 10, float(rng.integers(1, 80)) / 10]
        notes.append(note(number, 1 + int(rng.integers(0, 12)), category_id=[1, 7, 18][number % 3], bbox=box))
    files = {f"val2017/{name}": PICTURES[number] for number, name in images.items()}
    root = tree_of(tmp_path / "coco", {**files, OF_COCO: pack_json(instances(images, *notes))})

    @dali.pipeline_def(batch_size=12, num_threads=1, device_id=None)
    def pipeline() -> Any:
        _, boxes, labels, ids = dali.fn.readers.coco(
            file_root=str(root / "val2017"), annotations_file=str(root / OF_COCO),
            ltrb=True, ratio=False, image_ids=True, skip_empty=False,
        )  # fmt: skip
        return boxes, labels, ids

    built = pipeline()
    built.build()
    their_boxes, labels, ids = built.run()
    samples = values(packer.open_source(root), "val")
    assert len(samples) == 12
    for i in range(12):
        read = samples[f"{int(np.array(ids.at(i)).item()):06d}"]
        assert np.array_equal(read["boxes"], their_boxes.at(i).reshape(-1, 4))
        names = [CATEGORIES[label - 1]["name"] for label in labels.at(i).ravel()]  # as in the file, from 1
        assert [CLASSES[label] for label in read["box_labels"]] == names


def test_pycocotools_reads_the_same_masks(tmp_path: Path) -> None:
    cocotools = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    rng, side = np.random.default_rng(6), 96
    notes = []
    for number in range(6):
        angles = np.sort(rng.uniform(0, 2 * np.pi, 24))
        outline = np.stack([48 + 30 * np.cos(angles), 48 + 40 * np.sin(angles)], 1)
        notes.append(note(number, number, bbox=[10, 2, 70, 90], segmentation=[outline.ravel().tolist()]))
    notes[5]["segmentation"] = {"size": [side, side], "counts": [side * 3 + 5, 40, side * side - side * 3 - 45]}
    images = {number: f"{number}.jpg" for number in range(6)}
    files = {f"val2017/{name}": make_jpeg(number, (side, side)) for number, name in images.items()}
    root = tree_of(tmp_path / "coco", {**files, OF_COCO: pack_json(instances(images, *notes, width=side, height=side))})
    reference, samples = cocotools.COCO(str(root / OF_COCO)), values(packer.open_source(root), "val")
    for number in images:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from the way it makes arrays
            expected = reference.annToMask(reference.anns[number]) > 0
        read = samples[str(number)]["mask"] > 0
        edge = expected ^ np.roll(expected, 1, 0) | expected ^ np.roll(expected, -1, 0)
        edge |= expected ^ np.roll(expected, 1, 1) | expected ^ np.roll(expected, -1, 1)
        assert not (expected ^ read)[~edge].any(), "they may differ only at the outline, where pycocotools rounds"
        assert number != 5 or (expected == read).all()


def test_runs_as_numbers_and_as_text_are_the_same_mask(tmp_path: Path) -> None:
    masks = []
    for number, segmentation in enumerate((RUNS, RUNS_AS_TEXT)):
        annotation = note(1, 2, bbox=[20, 0, 2, HEIGHT], segmentation=segmentation)
        root = coco_of(tmp_path / str(number), instances_val2017=instances(IMAGES, annotation))
        masks.append(values(packer.open_source(root), "val")["000002"]["mask"])
    assert (masks[0] == masks[1]).all() and masks[0].sum() == 3 * 2 * HEIGHT and masks[0][:, 20:22].all()


def test_a_large_coco_file_is_listed_part_by_part(tmp_path: Path) -> None:
    """Objects that cross the chunks in which a file is read, with non-ASCII text, are read correctly."""
    images = {number: f"{number:05d}.jpg" for number in range(100)}
    notes = [
        note(number, number % 100, bbox=[number % 7, 1, 2, 3], about="ü" * (number % 13) + "x" * 3000)
        for number in range(800)
    ]
    files = {f"val2017/{name}": PICTURES[0] for name in images.values()}
    read = values(
        packer.open_source(tree_of(tmp_path, {**files, OF_COCO: pack_json(instances(images, *notes))})), "val"
    )
    for number in range(100):
        of_image = [item for item in notes if item["image_id"] == number]
        assert read[f"{number:05d}"]["boxes"][:, 0].tolist() == [item["bbox"][0] for item in of_image]
        assert read[f"{number:05d}"]["json"]["instances"] == of_image


def test_numbers_across_the_chunks_of_a_coco_file_are_complete(tmp_path: Path) -> None:
    head, path = b'{"pad": "', tmp_path / "large.json"
    for before in range(0, 60, 7):
        pad = b"x" * ((1 << 20) - len(head) - before)
        text = head + pad + b'", "number": 123456789012345678, "list": [12345678, 2]}'
        path.write_bytes(text)
        parts = list(json_parts(path))
        assert [part.value for part in parts[1:]] == [123456789012345678, 12345678, 2]
        assert all(json.loads(text[part.offset : part.offset + part.length]) == part.value for part in parts)


def test_a_pixel_is_inside_an_outline_by_the_even_odd_rule() -> None:
    """Outlines that cross themselves and leave the image, compared with a count of crossings for each pixel."""
    rng = np.random.default_rng(7)
    columns, rows = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    for _ in range(20):
        outline = rng.uniform((-10, -10), (WIDTH + 10, HEIGHT + 10), (int(rng.integers(3, 9)), 2))
        inside = np.zeros((HEIGHT, WIDTH), np.bool_)
        for (x0, y0), (x1, y1) in zip(outline, np.roll(outline, -1, 0), strict=True):
            inside ^= ((y0 > rows) != (y1 > rows)) & (columns >= x0 + (rows - y0) * (x1 - x0) / (y1 - y0))
        assert (outline_pixels(outline, Grid(HEIGHT, WIDTH, 1)) == inside).all()


# --- VOC in detail ------------------------------------------------------------------------------------------------
def test_voc_has_twenty_classes_and_masks_count_from_one(tmp_path: Path) -> None:
    source = packer.open_source(voc(tmp_path / "VOC"))
    read, classes = values(source)["2007_000000"], source.list(None).classes
    assert len(classes) == 20 and [classes[label] for label in read["box_labels"]] == ["dog", "person"]
    assert (read["mask"] == MASK).all() and classes[read["mask"][2, 3] - 1] == "dog"
    assert [item["difficult"] for item in read["json"]["object"]] == ["0", "1"]


def test_images_and_masks_of_voc_come_back_unchanged(tmp_path: Path) -> None:
    packer.convert(voc(tmp_path / "VOC"), "hdf5", tmp_path / "set", run=packer.Run(workers=1))
    packer.extract(tmp_path / "set", tmp_path / "out")
    for name in ("JPEGImages/2007_000000.jpg", DRAWN, DRAWN.replace("Class", "Object")):
        assert (tmp_path / "out" / name.removeprefix("JPEGImages/")).read_bytes() == VOC_FILES[name]


def test_voc_of_other_classes_and_lists(tmp_path: Path) -> None:
    root = voc(tmp_path / "VOC", **{"Annotations/2007_000003.xml": xml(("zebra", 1, 1, 2, 2))})
    listing = packer.open_source(root).list(None)
    assert listing.classes == ("cat", "dog", "person", "zebra")
    assert listing.left_out == [("2007_000004.jpg", "in no list of the splits")]
    assert keys(packer.open_source(root, image_sets="Segmentation")) == {"train": ["2007_000000"]}
    assert "no lists in ImageSets/Action" in refusal(root, image_sets="Action")
    assert "leads outside" in refusal(root, image_sets="../Main")


# --- YOLO in detail -----------------------------------------------------------------------------------------------
def test_yolo_in_splits_without_names(tmp_path: Path) -> None:
    files: dict[str, bytes] = {"test/images/9.jpg": PICTURES[4], "train/labels/alone.txt": BOXES}
    for split in ("train", "valid"):
        files |= {f"{split}/images/a/{split}.jpg": PICTURES[1], f"{split}/labels/a/{split}.txt": BOXES}
    root = tree_of(tmp_path / "set", files)
    source = packer.open_source(root)
    listing = source.list(None)
    assert ([*listing.splits], listing.classes) == (["train", "valid", "test"], ())
    assert listing.left_out == [("train/labels/alone.txt", "labels without an image")]
    assert [text for text in listing.warnings if "no names of the classes" in text]
    assert values(source, "valid")["a/valid"]["box_labels"].tolist() == [1, 2]
    assert values(source, "test")["9"]["boxes"] is None, "the split has labels"
    tree_of(root, {"classes.txt": b"cat\ndog\n\nowl\n"})
    assert packer.open_source(root).list(None).classes == ("cat", "dog", "owl")


def test_yolo_with_outlines(tmp_path: Path) -> None:
    text = b"1 0.25 0.25 0.5 0.25 0.5 0.75 0.25 0.75\n0 0.5 0.5 0.1 0.25\n"
    source = packer.open_source(yolo(tmp_path / "set", **{LABELS: text}))
    kinds = {"image": "image", "boxes": "boxes", "box_labels": "array", "mask": "mask", "json": "json"}
    assert source.list(None).fields == kinds
    read = values(source)["0"]
    assert read["boxes"].tolist() == [[10, 6, 20, 18], [18, 9, 22, 15]]
    assert read["json"] == {"outlines": [[[10, 6], [20, 6], [20, 18], [10, 18]], None]}
    assert (read["mask"][6:18, 10:20] == 2).all() and read["mask"].sum() == 2 * 12 * 10


@pytest.mark.parametrize(("each", "seen", "unseen"), [(2, b"", b"0 0"), (3, b"2", b"0.75 0.5 0")])
def test_yolo_with_poses(tmp_path: Path, each: int, seen: bytes, unseen: bytes) -> None:
    text = b"1 0.5 0.5 0.25 0.5 0.5 0.25 %s %s\n" % (seen, unseen)
    more = {"data.yaml": YAML + b"kpt_shape: [2, %d]\n" % each, LABELS: text, "labels/val/3.txt": b""}
    read = values(packer.open_source(yolo(tmp_path / "set", **more)))
    points = read["0"]["points"]
    assert points.shape == (1, 2, 2) and points[0, 0].tolist() == [20, 6] and np.isnan(points[0, 1]).all()
    assert read["1"]["points"].shape == (0, 2, 2)


def flat_set(root: Path, yaml: str, **more: bytes) -> Path:
    """Four images of one folder, which data.yaml distributes over splits."""
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    files = {f"images/{number}.jpg": PICTURES[number] for number in range(4)}
    files |= {f"labels/{number}.txt": b"%d 0.5 0.5 1 1\n" % (number % 3) for number in range(4)}
    return tree_of(root, files | {"data.yaml": yaml.encode() + b"names: [cat, dog, owl]\n"} | more)


ALL = ["0", "1", "2", "3"]
SPLITS_OF_YAML: dict[str, tuple[str, dict[str, bytes], dict[str, list[str]], list[str]]] = {
    "lists": (
        "train: train.txt\nval: val.txt\n",
        {"train.txt": b"images/0.jpg\n./images/1.jpg\r\n\n", "val.txt": b"data/images/2.jpg\n../images/3.jpg"},
        {"train": ["0", "1"], "val": ["2", "3"]},
        [],
    ),
    "a list of absolute paths": (
        "train: one.txt\n", {"one.txt": b"{root}/images/1.jpg\n"}, {"train": ["1"]}, ["3 label files without an image"],
    ),
    "folders": (
        "path: .\ntrain: [a/images, b/images]\nvalidation: c/images\n",
        {f"{part}/images/{part}.jpg": PICTURES[4 + number] for number, part in enumerate("abc")},
        {"train": ["a/images/a", "b/images/b"], "validation": ["c"]},
        ["4 label files without an image"],
    ),
    "as roboflow writes them": (
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 3\n",
        {f"{part}/images/{part}.jpg": PICTURES[5] for part in ("train", "valid")},
        {"train": ["train"], "val": ["valid"]},
        ["test: '../test/images'", "4 label files without an image"],
    ),
    "an image in two": (
        "train: images\nval: one.txt\n", {"one.txt": b"images/1.jpg\n" * 3}, {"train": ALL, "val": ["1"]},
        ["2 lines that repeat an image", "1 image in both train and val"],
    ),
    "another folder": ("path: {tmp}/other\ntrain: images\n", {}, {"train": ALL}, ["/other' is another folder"]),
    "a folder behind a link": ("train: images\nval: more/images\n", {}, {"train": ALL, "val": ["7"]}, []),
    "other names": ("train: images\n", {"classes.txt": b"dog\ncat\n"}, {"train": ALL}, ["has other classes than data"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS_OF_YAML)
def test_splits_of_data_yaml(tmp_path: Path, case: str) -> None:
    yaml, files, expected, warned = SPLITS_OF_YAML[case]
    root = tmp_path / "set"
    tree_of(tmp_path / "outside/images", {"7.jpg": PICTURES[0]})
    (tmp_path / "other/images").mkdir(parents=True)
    files = {name: data.replace(b"{root}", str(root).encode()) for name, data in files.items()}
    flat_set(root, yaml.format(tmp=tmp_path), **files)
    if "link" in case:
        (root / "more").symlink_to(tmp_path / "outside")
    source = packer.open_source(root)
    listing = source.list(None)
    assert keys(source) == expected
    assert len(listing.warnings) == len(warned), listing.warnings
    assert all(part in text for part, text in zip(warned, listing.warnings, strict=True)), listing.warnings
    texts = {root / name for name in files if name.endswith(".txt") and "classes" not in name}
    assert texts | {root / "data.yaml"} <= {*source.paths(listing)}
    for split, names in expected.items():
        for key in set(names) & set(ALL):
            assert values(source, split)[key]["box_labels"].tolist() == [int(key) % 3]


def test_images_that_data_yaml_does_not_name_are_left_out_and_listed(tmp_path: Path) -> None:
    source = packer.open_source(flat_set(tmp_path / "set", "train: one.txt\n", **{"one.txt": b"images/1.jpg\n"}))
    (tmp_path / "set/notes.md").write_bytes(b"x")
    left_out = dict(source.list(None).left_out)
    unnamed = [f"images/{number}.jpg" for number in (0, 2, 3)]
    assert [path for path, reason in left_out.items() if reason == "in no split"] == unnamed and "notes.md" in left_out


def test_missing_paths_of_data_yaml_are_a_warning(tmp_path: Path) -> None:
    (warning,) = packer.open_source(yolo(tmp_path / "set")).list(None).warnings
    assert "train: '/nowhere'" in warning and "splits are those of the folders: train, val" in warning


@pytest.mark.parametrize(
    ("yaml", "line", "message"),
    [
        ("train: ../outside\n", b"", "'../outside' leads out of"),
        ("train: /etc\n", b"", "'/etc' leads out of"),
        ("path: ..\ntrain: [images, /etc/passwd]\n", b"", "'/etc/passwd' leads out of"),
        ("train: one.txt\n", b"images/1.jpg\n../outside/0.jpg\n", "one.txt: line 2: '../outside/0.jpg'"),
        ("train: one.txt\n", b"/etc/passwd\n", "line 1: '/etc/passwd' is not the path of an image"),
        ("train: one.txt\n", b"images/9.jpg\n", "line 1: 'images/9.jpg' is not the path of an image"),
        ("train: one.txt\n", b"\xff\xfe", "cannot be read as UTF-8"),
        ("train: {a: b}\n", b"", "expected a path, or a list of paths"),
        ("train: [images, 3]\n", b"", "expected a path, or a list of paths"),
        ("path: [3]\ntrain: images\n", b"", "expected a path, or a list of paths"),
        ("nc: 4\ntrain: images\n", b"", "nc is 4, but there are 3 names"),
    ],
)
def test_splits_that_cannot_be_followed_are_refused(tmp_path: Path, yaml: str, line: bytes, message: str) -> None:
    tree_of(tmp_path / "outside", {"0.jpg": PICTURES[0]})
    error = refusal(flat_set(tmp_path / "set", yaml, **({"one.txt": line} if line else {})))
    assert message in error and len(error) < 700, error


def test_labels_beside_their_images_are_read_like_those_of_labelimg(tmp_path: Path) -> None:
    files = {"a/0.jpg": PICTURES[0], "a/0.txt": BOXES, "1.png": PICTURES[1], "classes.txt": OWLS}
    source = packer.open_source(tree_of(tmp_path / "set", files))
    listing = source.list(None)
    assert (listing.classes, listing.left_out, listing.warnings) == (("cat", "dog", "owl"), [], [])
    read = values(source)
    assert read["a/0"]["box_labels"].tolist() == [1, 2] and read["1"]["boxes"].shape == (0, 4)
    tree_of(tmp_path / "set", {"classes.txt": b"cat\n\x1b]0;x\x07dog\nowl\n"})
    assert r"'\x1b]0;x\x07dog' is not the name of a class" in refusal(tmp_path / "set")


def test_labels_beside_their_images_in_splits(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        tree_of(tmp_path / split, {"0.jpg": PICTURES[0], "0.txt": BOXES, "_darknet.labels": OWLS})
    source = packer.open_source(tmp_path)
    assert keys(source) == {"train": ["0"], "valid": ["0"]} and source.list(None).classes == ("cat", "dog", "owl")
    tree_of(tmp_path, {"valid/_darknet.labels": b"dog\ncat\nowl\n"})
    assert "have different classes" in refusal(tmp_path)


def test_the_lists_of_darknet_are_splits(tmp_path: Path) -> None:
    files = {f"obj_train_data/{number}.jpg": PICTURES[number] for number in range(3)}
    files |= {f"obj_train_data/{number}.txt": BOXES for number in range(3)}
    files |= {"obj.names": OWLS, "train.txt": b"data/obj_train_data/0.jpg\ndata/obj_train_data/2.jpg\n"}
    files["obj.data"] = b"classes = 3\ntrain = data/train.txt\nvalid = data/valid.txt\nnames = data/obj.names\n"
    files["valid.txt"] = b"data/obj_train_data/1.jpg\n"
    source = packer.open_source(tree_of(tmp_path / "set", files))
    assert keys(source) == {"train": ["0", "2"], "val": ["1"]}
    assert values(source, "val")["1"]["box_labels"].tolist() == [1, 2]


# --- ILSVRC in detail ---------------------------------------------------------------------------------------------
def test_an_archive_of_archives_has_a_class_for_each(tmp_path: Path) -> None:
    """Including archives by GNU tar, with links inside."""
    expected = ilsvrc_content().splits["train"]
    whole = archives(tmp_path / "in") / "ILSVRC2012_img_train.tar"
    packed = tmp_path / "train.tar.gz"
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    for path in (whole, packed):
        read = content_of(packer.open_source(path))
        assert (read.splits["train"], read.classes) == (expected, SYNSETS)
    root = tree_of(tmp_path / "files", TRAIN)
    with tarfile.open(tmp_path / "train.tar", "w") as outer:
        for name in SYNSETS:
            with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
                for path in sorted((root / name).iterdir()):
                    archive.add(path, path.name)
                linked = tarfile.TarInfo("again.JPEG")
                linked.type, linked.linkname = tarfile.LNKTYPE, sorted((root / name).iterdir())[0].name
                archive.addfile(linked)
            outer.add(tmp_path / f"{name}.tar", f"{name}.tar")
    samples = content_of(packer.open_source(tmp_path / "train.tar")).splits["train"]
    assert sorted(sample for sample in samples if "again" not in sample[0]) == sorted(expected)
    assert ("n02/again", 1, (TRAIN["n02/n02_2.JPEG"],)) in samples


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.replace(b"n01_0.JPEG", b"n01_9.JPEG", 1),  # a checksum inside
        lambda data: data[:2048] + b"9" * 64 + data[2112:],
        lambda data: data[: len(data) // 2],
    ],
)
def test_a_damaged_archive_of_archives_is_refused(tmp_path: Path, spoil: Any) -> None:
    path = archives(tmp_path / "in") / "ILSVRC2012_img_train.tar"
    path.write_bytes(spoil(path.read_bytes()))
    assert "ILSVRC2012_img_train.tar" in pack_error(tmp_path / "in", tmp_path / "out", SourceError)


def kit(root: Path, numbers: str) -> None:
    """The development kit: synsets in the order of their numbers, and the class numbers of val."""
    io_of_scipy = pytest.importorskip("scipy.io", reason="scipy, which reads meta.mat, is not installed")
    rows = np.zeros((len(SYNSETS), 1), [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)])
    for number, name in enumerate(SYNSETS, 1):
        rows[number - 1, 0] = (np.array([[number]], np.uint16), np.array([name]), np.array(["a thing"]))
    memory = io.BytesIO()
    io_of_scipy.savemat(memory, {"synsets": rows}, do_compression=True)
    folder = "ILSVRC2012_devkit_t12/data/"
    texts = ((f"{folder}ILSVRC2012_validation_ground_truth.txt", numbers.encode()),) if numbers else ()
    data = tar_of((f"{folder}meta.mat", memory.getvalue()), *texts)
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(data))


def test_the_development_kit_gives_the_labels_of_val(tmp_path: Path) -> None:
    root = archives(tmp_path / "ILSVRC", solution="")
    kit(root, "3\n1\n2\n")
    assert content_of(packer.open_source(root)).splits == ilsvrc_content().splits
    kit(root, "3\n1\n9\n")
    assert "image 3 is of the class '9'" in refusal(root)
    kit(root, "")
    assert "has no data/ILSVRC2012_validation_ground_truth" in refusal(root)


@pytest.mark.parametrize("where", ["next to the images", "above val", "next to train and val", "above CLS-LOC"])
def test_val_with_its_table_in_any_place(tmp_path: Path, where: str) -> None:
    root = kaggle(tmp_path / "ILSVRC")
    source = root / "Data/CLS-LOC" / ("val" if where in ("next to the images", "above val") else "")
    if where.startswith("next"):
        (root / SOLVED).rename(source / SOLVED)
    read, expected = content_of(packer.open_source(source)), ilsvrc_content()
    assert (read.splits["val"], read.classes) == (expected.splits["val"], SYNSETS)
    assert source.name == "val" or read.splits["train"] == expected.splits["train"]


def test_images_of_val_without_a_label_are_a_warning(tmp_path: Path) -> None:
    short = "\n".join(SOLUTION.splitlines()[:2]).encode()
    for root, labels in (
        (archives(tmp_path / "archives", solution=""), [-1, -1, -1]),
        (kaggle(tmp_path / "kaggle", **{SOLVED: short}), [2, -1, -1]),
    ):
        listing = packer.open_source(root).list(None)
        assert listing.splits["val"].labels.tolist() == labels
        assert any(f"{labels.count(-1)} images of val without a label" in text for text in listing.warnings)


def test_a_class_that_train_lacks_does_not_change_the_labels_of_train(tmp_path: Path) -> None:
    """Numbered as by torchvision: by the folders of train."""
    solution = SOLUTION.replace(OF_VAL[1], "n00")
    for root in (kaggle(tmp_path / "kaggle", **{SOLVED: solution.encode()}), archives(tmp_path / "tars", solution)):
        listing = packer.open_source(root).list(None)
        train = [*zip(listing.splits["train"].keys, listing.splits["train"].labels.tolist(), strict=True)]
        assert train == [(key, label) for key, label, _ in ilsvrc_content().splits["train"]]
        assert listing.classes == (*SYNSETS, "n00") and listing.splits["val"].labels[0] == 3
        assert any("1 class of val that train lacks: n00" in warning for warning in listing.warnings)


# --- CelebA in detail, and imagenette's noisy labels --------------------------------------------------------------
@pytest.mark.parametrize(
    ("column", "expected"),
    [(None, [-1] * 6), ("identity", [2880, 2880, 2881, 2881, 2882, 2882]), ("Smiling", [1, 0, 1, 1, 0, 0])],
)
def test_labels_of_celeba_are_optional(tmp_path: Path, column: str | None, expected: list[int]) -> None:
    listing = packer.open_source(celeba(tmp_path), label_column=column).list(None)
    assert [label for split in SPLITS for label in listing.splits[split].labels.tolist()] == expected


def test_only_the_partition_of_celeba_is_needed(tmp_path: Path) -> None:
    for name in (ATTR, IDENTITY):
        (celeba(tmp_path) / name).unlink()
    (tmp_path / ATTR).unlink()
    assert packer.open_source(tmp_path).list(None).fields == {"image": "image"}
    assert "no labels called 'Smiling'" in refusal(tmp_path, label_column="Smiling")


def test_the_folders_of_celeba_can_be_taken_for_classes(tmp_path: Path) -> None:
    root = celeba(tmp_path)
    assert packer.open_source(root, layout="tree").list(None).classes == ("img_align_celeba",)
    assert "label_column can be given for CelebA's folder" in refusal(root, layout="tree", label_column="identity")


def test_a_pipe_in_place_of_a_list_is_not_waited_for(tmp_path: Path, hanging: Hanging) -> None:
    (celeba(tmp_path) / ATTR).unlink()
    os.mkfifo(tmp_path / ATTR)

    def work() -> None:
        assert ATTR in refusal(tmp_path)

    hanging(work, 20)


def imagenette(root: Path, valid: str = "True") -> Path:
    """noisy_imagenette.csv next to train and val: half of the labels of train are wrong in two columns."""
    cat, dog = "n02979186", "n03417042"
    rows = [f"{part}/{own}/{own}_{part}.JPEG" for part in ("train", "val") for own in (cat, dog)]
    text = "path,noisy_labels_0,noisy_labels_1,noisy_labels_5,noisy_labels_25,noisy_labels_50,is_valid\n"
    for number, path in enumerate(rows):
        own = path.split("/")[1]
        wrong = dog if number == 0 else own
        text += f"{path},{own},{own},{own},{wrong},{wrong},{valid if number > 1 else 'False'}\n"
    tree_of(root, {path: PICTURES[number] for number, path in enumerate(rows)} | {"noisy.csv": text.encode()})
    return (root / "noisy.csv").rename(root / "noisy_imagenette.csv")


@pytest.mark.parametrize(
    ("column", "labels"), [(None, [0, 1]), ("noisy_labels_0", [0, 1]), ("noisy_labels_25", [1, 1])]
)
def test_the_noisy_labels_of_imagenette(tmp_path: Path, column: str | None, labels: list[int]) -> None:
    read = content_of(packer.open_source(imagenette(tmp_path), label_column=column))
    assert {name: len(samples) for name, samples in read.splits.items()} == {"train": 2, "val": 2}
    assert read.classes == ("n02979186", "n03417042")
    assert [label for _, label, _ in read.splits["train"]] == labels
    facts = json.loads(read.splits["train"][0][2][1] or b"")
    assert facts["noisy_labels_50"] == "n03417042" and "is_valid" not in facts


def test_is_valid_is_true_or_false(tmp_path: Path) -> None:
    assert "line 4: 'is_valid' is 'maybe', expected True or False" in refusal(imagenette(tmp_path, "maybe"))
    plain = tmp_path / "plain.csv"
    plain.write_text("path,is_valid\ntrain/n02979186/n02979186_train.JPEG,True\n")
    assert list(packer.open_source(plain).list(None).splits) == ["train"], "elsewhere is_valid has another meaning"
