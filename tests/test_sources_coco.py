"""COCO as a source: its layouts, what DALI and pycocotools read of the same files, and files that deceive."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer.sources.coco import json_parts
from packer.sources.objects import Grid, outline_pixels
from packer.testing.sources import Found, SourceSuite, found
from readers.fields import decode_field, encode_field

WIDTH, HEIGHT = 40, 24
SIZE = {"width": WIDTH, "height": HEIGHT}
CATEGORIES = [
    {"id": 18, "name": "dog", "supercategory": "animal"},
    {"id": 1, "name": "person", "supercategory": "person"},
    {"id": 7, "name": "train", "supercategory": "vehicle"},
]
CLASSES = ("person", "train", "dog")  # by rising id
SQUARE = [[4.0, 4.0, 12.0, 4.0, 12.0, 10.0, 4.0, 10.0]]
RUNS = {"size": [HEIGHT, WIDTH], "counts": [24 * 20, 48, 24 * 18]}  # two columns, from 20 on
RUNS_AS_TEXT = {"size": [HEIGHT, WIDTH], "counts": "P?`1`="}  # the same, as pycocotools writes it


def note(number: int, image: int, **more: Any) -> dict[str, Any]:
    usual = {"id": number, "image_id": image, "category_id": 18, "bbox": [4, 4, 8, 6], "area": 48, "iscrowd": 0}
    return {**usual, **more}


def instances(images: Mapping[int, str], *notes: dict[str, Any], **size: int) -> dict[str, Any]:
    listed = [{"id": number, "file_name": name, **SIZE, **size, "license": 4} for number, name in images.items()]
    return {"info": {"year": 2017}, "images": listed, "annotations": list(notes), "categories": CATEGORIES}


NOTES = (
    note(31, 2, segmentation=SQUARE),
    note(32, 2, category_id=1, bbox=[20, 0, 2, HEIGHT], iscrowd=1, segmentation=RUNS),
    note(33, 9, category_id=7, bbox=[1.5, 2.25, 10, 3], segmentation=[[1.5, 2.25, 11.5, 2.25, 11.5, 5.25]]),
)
PERSONS = (note(32, 2, category_id=1, bbox=[20, 0, 2, HEIGHT], num_keypoints=1, keypoints=[21, 3, 2, 0, 0, 0]),)
CAPTIONS = ({"id": 1, "image_id": 9, "caption": "a train\nin Zürich "}, {"id": 2, "image_id": 9, "caption": "rails"})
IMAGES = {9: "000009.jpg", 2: "000002.jpg", 5: "000005.jpg"}
PICTURES = {name: make_jpeg(number, (WIDTH, HEIGHT)) for number, name in IMAGES.items()}


def pack_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def coco_of(root: Path, **files: Any) -> Path:
    """annotations/<name>.json, and the pictures in val2017."""
    texts = {f"annotations/{name}.json": pack_json(value) for name, value in files.items()}
    return tree_of(root, {**texts, **{f"val2017/{name}": data for name, data in PICTURES.items()}})


def everything(root: Path) -> Path:
    persons = instances(IMAGES, *PERSONS)
    captions = {"images": instances(IMAGES)["images"], "annotations": list(CAPTIONS)}
    return coco_of(
        root, instances_val2017=instances(IMAGES, *NOTES), person_keypoints_val2017=persons, captions_val2017=captions
    )


def values(source: Any, split: str = "val") -> dict[str, dict[str, Any]]:
    """The decoded fields of each sample, by key."""
    listing = source.list(None)
    read = found(source).splits[split]
    kinds = listing.fields
    return {
        key: {
            name: None if data is None else decode_field(kind, data)
            for (name, kind), data in zip(kinds.items(), fields, strict=True)
            if name != "image"
        }
        for key, _, fields in read
    }


class TestContract(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return everything(tmp_path / "coco")

    @pytest.fixture
    def truth(self) -> Found:
        """In the order of the lists."""
        boxes = {
            "000009": ([[1.5, 2.25, 11.5, 5.25]], [1]),
            "000002": ([[4, 4, 12, 10], [20, 0, 22, HEIGHT]], [2, 0]),
            "000005": ([], []),
        }
        mask = {key: np.zeros((HEIGHT, WIDTH), np.uint8) for key in boxes}
        mask["000002"][4:10, 4:12] = 3
        mask["000002"][:, 20:22] = 1
        for row, first in ((2, 2), (3, 6), (4, 9)):  # centres of pixels below the diagonal
            mask["000009"][row, first:11] = 2
        nothing = [[np.nan, np.nan], [np.nan, np.nan]]
        points = {"000009": [nothing], "000002": [nothing, [[21, 3], [np.nan, np.nan]]], "000005": []}
        samples = []
        for key in boxes:
            image = next(item for item in instances(IMAGES)["images"] if item["file_name"] == f"{key}.jpg")
            kinds = {"instances": NOTES, "person_keypoints": PERSONS, "captions": CAPTIONS}
            record: dict[str, Any] = {"image": image}
            for kind, notes in kinds.items():
                if its := [its for its in notes if its["image_id"] == image["id"]]:
                    record[kind] = its
            caption = encode_field("text", ["a train in Zürich", "rails"]) if key == "000009" else None
            fields = (
                PICTURES[f"{key}.jpg"],
                encode_field("boxes", np.array(boxes[key][0], np.float32).reshape(-1, 4)),
                encode_field("array", np.array(boxes[key][1], np.int64)),
                encode_field("mask", mask[key]),
                encode_field("points", np.array(points[key], np.float32).reshape(-1, 2, 2)),
                caption,
                joined(record),
            )
            samples.append((key, -1, fields))
        names = ("image", "boxes", "box_labels", "mask", "points", "caption", "json")
        return Found({"val": samples}, CLASSES, names)

    def data_files(self, root: Path) -> set[Path]:
        return set(root.rglob("*.jpg"))

    def whole_files(self, root: Path) -> bool:
        return True


def joined(record: Mapping[str, Any]) -> bytes:
    """A record of the field json: the texts of the file in it are as they were."""
    parts = []
    for name, value in record.items():
        texts = value if isinstance(value, list) else [value]
        text = b",".join(pack_json(item) for item in texts)
        parts.append(b'"%s":' % name.encode() + (b"[%s]" % text if isinstance(value, list) else text))
    return b"{" + b",".join(parts) + b"}"


def test_a_packed_set_gives_boxes_masks_and_captions(tmp_path: Path) -> None:
    packer.convert(everything(tmp_path / "coco"), "hdf5", tmp_path / "out", run=packer.Run(workers=1))
    with readers.open(tmp_path / "out", "val", verify=True) as reader:
        assert reader.classes == CLASSES
        sample = next(sample for sample in reader if sample.key == "000002")
    assert decode_field("boxes", sample.fields["boxes"]).tolist() == [[4, 4, 12, 10], [20, 0, 22, HEIGHT]]
    assert json.loads(bytes(sample.fields["json"]))["instances"][1]["iscrowd"] == 1


def test_parts_are_splits_and_those_without_images_are_skipped(tmp_path: Path) -> None:
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
    assert values(packer.open_source(root), "test")["000005"]["boxes"] is None, "what is in it is not known"
    with pytest.raises(SourceError, match=r"no split 'train'; it has test, val"):
        packer.open_source(root).list("train")


@pytest.mark.parametrize("where", ["next to it", "above it", "a folder that is given"])
def test_a_file_by_itself(tmp_path: Path, where: str) -> None:
    names = {"next to it": "labels.json", "above it": "annotations/labels.json"}
    path = tmp_path / names.get(where, "elsewhere/labels.json")
    tree_of(tmp_path, {str(path.relative_to(tmp_path)): pack_json(instances(IMAGES, *NOTES))})
    tree_of(tmp_path / ("images" if where != "next to it" else ""), PICTURES)
    options = {"folder": tmp_path / "images"} if where.startswith("a folder") else {}
    source = packer.open_source(path, **options)
    assert list(values(source, "train")) == ["000009", "000002", "000005"]
    assert [*source.list("val").splits] == ["val"]


def test_as_roboflow_exports_it(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        tree_of(tmp_path / "set" / split, {"_annotations.coco.json": pack_json(instances(IMAGES, *NOTES)), **PICTURES})
    listing = packer.open_source(tmp_path / "set").list(None)
    assert [*listing.splits] == ["train", "valid"] and not listing.left_out
    assert [*packer.open_source(tmp_path / "set").list("val").splits] == ["valid"]


def test_images_that_no_list_names_are_left_out(tmp_path: Path) -> None:
    root = everything(tmp_path / "coco")
    (root / "val2017/000123.jpg").write_bytes(make_jpeg(123))
    (root / "annotations/panoptic_val2017.json").write_bytes(b"{}")
    result = packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    reasons = {"not in the annotations": 1, "annotations of a kind that is not read": 1}
    assert result.left_out_reasons == reasons and result.samples == 3


@pytest.mark.parametrize(
    ("orientation", "of"),
    [*((turn, "the stored image") for turn in range(1, 9)), *((turn, "the displayed image") for turn in range(5, 9))],
)
def test_boxes_turn_with_the_image(tmp_path: Path, orientation: int, of: str) -> None:
    """A box, its outline and a point, on the only bright square of an image, stay there when it is displayed.

    Where the size does not show which image is meant, it is the stored one.
    """
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[2:10, 30:38] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "PNG", exif=exif)
    bright = np.array(readers.decode.decode_image(memory.getvalue()))[:, :, 0] > 0
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    seen = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    if of == "the stored image":
        box, size = [30, 2, 38, 10], {"width": WIDTH, "height": HEIGHT}
    else:
        box, size = [int(side) for side in seen], {"width": HEIGHT, "height": WIDTH}
    x0, y0, x1, y1 = box
    annotation = note(1, 1, bbox=[x0, y0, x1 - x0, y1 - y0], segmentation=[[x0, y0, x1, y0, x1, y1, x0, y1]],
                      keypoints=[(x0 + x1) / 2, (y0 + y1) / 2, 2])  # fmt: skip
    root = tree_of(
        tmp_path / "set",
        {"val2017/1.png": memory.getvalue(),
         "annotations/instances_val2017.json": pack_json(instances({1: "1.png"}, annotation, **size))},
    )  # fmt: skip
    read = values(packer.open_source(root))["1"]
    assert read["boxes"].tolist() == [seen]
    assert ((read["mask"] > 0) == bright).all()
    assert read["points"][0, 0].tolist() == [(seen[0] + seen[2]) / 2, (seen[1] + seen[3]) / 2]


# --- oracles ------------------------------------------------------------------------------------------------------
def test_dali_reads_the_same_boxes_and_labels(tmp_path: Path) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    rng = np.random.default_rng(5)
    images = {number: f"{number:06d}.jpg" for number in range(1, 13)}
    notes = []
    for number in range(40):
        x, y = rng.integers(0, WIDTH - 8), rng.integers(0, HEIGHT - 8)
        box = [float(x), float(y), float(rng.integers(1, 80)) / 10, float(rng.integers(1, 80)) / 10]
        category = [1, 7, 18][number % 3]
        notes.append(note(number, 1 + int(rng.integers(0, 12)), category_id=category, bbox=box))
    files = {f"val2017/{name}": make_jpeg(number, (WIDTH, HEIGHT)) for number, name in images.items()}
    root = tree_of(
        tmp_path / "coco", {**files, "annotations/instances_val2017.json": pack_json(instances(images, *notes))}
    )

    @dali.pipeline_def(batch_size=12, num_threads=1, device_id=None)
    def pipeline() -> Any:
        _, boxes, labels, ids = dali.fn.readers.coco(
            file_root=str(root / "val2017"), annotations_file=str(root / "annotations/instances_val2017.json"),
            ltrb=True, ratio=False, image_ids=True, skip_empty=False,
        )  # fmt: skip
        return boxes, labels, ids

    built = pipeline()
    built.build()
    boxes, labels, ids = built.run()
    theirs = {int(np.array(ids.at(i)).item()): (boxes.at(i), labels.at(i).ravel()) for i in range(12)}
    ours = values(packer.open_source(root))
    assert len(ours) == 12
    for number, (their_boxes, their_labels) in theirs.items():
        read = ours[f"{number:06d}"]
        assert np.array_equal(read["boxes"], their_boxes.reshape(-1, 4)), number
        names = [CATEGORIES[label - 1]["name"] for label in their_labels]  # as they come in the file, from 1
        assert [CLASSES[label] for label in read["box_labels"]] == names


def test_pycocotools_reads_the_same_masks(tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    rng = np.random.default_rng(6)
    side = 96
    size = {"width": side, "height": side}
    outlines = [np.sort(rng.uniform(0, 2 * np.pi, 24)) for _ in range(6)]
    notes = []
    for number, angles in enumerate(outlines):
        outline = np.stack([48 + 30 * np.cos(angles), 48 + 40 * np.sin(angles)], 1)
        notes.append(note(number, number, bbox=[10, 2, 70, 90], segmentation=[outline.ravel().tolist()]))
    notes[5]["segmentation"] = {"size": [side, side], "counts": [side * 3 + 5, 40, side * side - side * 3 - 45]}
    images = {number: f"{number}.jpg" for number in range(6)}
    files = {f"val2017/{name}": make_jpeg(number, (side, side)) for number, name in images.items()}
    path = "annotations/instances_val2017.json"
    root = tree_of(tmp_path / "coco", {**files, path: pack_json(instances(images, *notes, **size))})
    theirs, ours = coco.COCO(str(root / path)), values(packer.open_source(root))
    for number in images:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of how it makes arrays
            expected = theirs.annToMask(theirs.anns[number]) > 0
        read = ours[str(number)]["mask"] > 0
        edge = expected ^ np.roll(expected, 1, 0) | expected ^ np.roll(expected, -1, 0)
        edge |= expected ^ np.roll(expected, 1, 1) | expected ^ np.roll(expected, -1, 1)
        assert not (expected ^ read)[~edge].any(), "they differ at the outline alone, where pycocotools rounds"
        assert number != 5 or (expected == read).all()


def test_runs_as_numbers_and_as_text_are_the_same_mask(tmp_path: Path) -> None:
    masks = []
    for number, runs in enumerate((RUNS, RUNS_AS_TEXT)):
        annotation = note(1, 2, bbox=[20, 0, 2, HEIGHT], segmentation=runs)
        root = coco_of(tmp_path / str(number), instances_val2017=instances(IMAGES, annotation))
        masks.append(values(packer.open_source(root))["000002"]["mask"])
    assert (masks[0] == masks[1]).all() and masks[0].sum() == 3 * 2 * HEIGHT and masks[0][:, 20:22].all()


# --- files that deceive -------------------------------------------------------------------------------------------
def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(pack_json(instances(IMAGES, *NOTES)))
    change(value)
    return pack_json(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(lambda v: v["images"][0].update(file_name="../../etc/passwd")), "leads outside"),
        (changed(lambda v: v["images"][0].update(file_name="/etc/passwd")), "leads outside"),
        (changed(lambda v: v["images"][0].update(file_name=7)), "file_name"),
        (changed(lambda v: v["images"][0].update(id=2)), "the image 2 for the second time"),
        (changed(lambda v: v["images"][0].update(id="2")), "id is '2', expected a whole number"),
        (changed(lambda v: v["images"][0].update(id=1 << 70)), "expected a whole number"),
        (
            changed(lambda v: v["images"][0].update(file_name="000002.jpg")),
            "two images have the file_name '000002.jpg'",
        ),
        (changed(lambda v: v["annotations"][0].update(id=32)), "has the id 32, as another one has"),
        (changed(lambda v: v["annotations"][0].update(image_id=4)), "is of the image 4, which is not listed"),
        (changed(lambda v: v["annotations"][0].update(category_id=4)), "is of the category 4, which is not listed"),
        (changed(lambda v: v["annotations"][0].pop("bbox")), "a segmentation without a bbox"),
        (changed(lambda v: v["categories"][0].update(name="person")), "two categories are called 'person'"),
        (changed(lambda v: v["categories"][0].update(id=1)), "the category 1 is 'person' here, 'dog' before"),
        (changed(lambda v: v["images"].clear()), "lists no images"),
        (changed(lambda v: v["annotations"].append(3)), "image_id is None"),
        (b"[]", "expected '{'"),
        (b"{}", "lists no images"),
        (b'{"images": [' + b"[" * 200_000, "not a JSON object, or cut short"),
        (b'{"images": [], "images": []}', "new name of a member"),
        (b'{"images": [{"id": 1, "file_name": "\xff.jpg"}]}', "not UTF-8"),
        (pack_json(instances(IMAGES, *NOTES))[:-40], "not a JSON object, or cut short"),
        (pack_json(instances(IMAGES, *NOTES)) + b"{}", "more than one value"),
    ],
)
def test_a_file_that_deceives_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    root = coco_of(tmp_path / "coco")
    tree_of(root, {"annotations/instances_val2017.json": text})
    with pytest.raises(SourceError) as refusal:
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert message in str(refusal.value) and not (tmp_path / "out").exists(), str(refusal.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bbox": [float("nan"), 1, 2, 3]}, "NaN is not JSON"),
        ({"bbox": [1e400, 1, 2, 3]}, "Infinity is not JSON"),
        ({"bbox": [1, 2, -3, 4]}, "negative width or height"),
        ({"bbox": [1, 2, 3]}, "expected 4 numbers"),
        ({"bbox": [1, 2, "3", 4]}, "expected 4 numbers"),
        ({"bbox": [10**400, 2, 3, 4]}, "beyond all images"),
        ({"bbox": [4000, 2, 3, 4]}, "outside of the image of 40 x 24"),
        ({"segmentation": [[1, 2, 3]]}, "an outline"),
        ({"segmentation": [[1, 2, 3, 4, 1e300, 5]]}, "far outside of the image"),
        ({"segmentation": ["x"]}, "an outline"),
        ({"segmentation": "x"}, "expected outlines, or runs"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": [1, 2]}}, "does not have the 960 pixels"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": [-960, 1920]}}, "does not have the 960 pixels"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": [1 << 62, 1 << 62]}}, "does not have the 960 pixels"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": "ooooooooooooooo0"}}, "damaged"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": "P"}}, "ends inside a number"),
        ({"segmentation": {"size": [1 << 40, 1 << 40], "counts": [1]}}, "the image has [24, 40]"),
        ({"keypoints": [1, 2]}, "x, y and v of each"),
    ],
)
def test_an_annotation_that_deceives_is_a_bad_sample(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    root = coco_of(tmp_path / "coco", instances_val2017=instances(IMAGES, note(31, 2, **more), *NOTES[2:]))
    with pytest.raises(BadSampleError) as refusal:
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert "000002.jpg" in str(refusal.value) and message in str(refusal.value), str(refusal.value)
    result = packer.convert(root, "tar", tmp_path / "rest", run=packer.Run(workers=1, on_error="skip"))
    assert (result.samples, result.left_out) == (2, {"skipped": 1})


@pytest.mark.parametrize(("width", "height"), [(80, 48), (HEIGHT, WIDTH), (0, 0), (1 << 40, 1 << 40)])
def test_a_size_that_is_not_the_image_s_is_a_bad_sample(tmp_path: Path, width: int, height: int) -> None:
    content = instances(IMAGES, *NOTES, width=width, height=height)
    with pytest.raises(BadSampleError, match="has 40 x 24 pixels, but its annotations are for"):
        packer.convert(
            coco_of(tmp_path / "coco", instances_val2017=content), "tar", tmp_path / "out", run=packer.Run(workers=1)
        )


def test_a_large_file_is_listed_part_by_part(tmp_path: Path) -> None:
    """Parts that lie across the pieces in which a file is read, with text that is not ASCII, are read right."""
    images = {number: f"{number:05d}.jpg" for number in range(300)}
    notes = [
        note(number, number % 300, bbox=[number % 7, 1, 2, 3], about="ü" * (number % 13) + "x" * 3000)
        for number in range(1500)
    ]
    data = make_jpeg(1, (WIDTH, HEIGHT))
    root = tree_of(
        tmp_path / "coco",
        {**{f"val2017/{name}": data for name in images.values()},
         "annotations/instances_val2017.json": pack_json(instances(images, *notes))},
    )  # fmt: skip
    read = values(packer.open_source(root))
    for number in range(300):
        its = [item for item in notes if item["image_id"] == number]
        assert read[f"{number:05d}"]["boxes"][:, 0].tolist() == [item["bbox"][0] for item in its]
        assert read[f"{number:05d}"]["json"]["instances"] == its


@pytest.mark.parametrize("before", range(0, 60, 7))
def test_numbers_across_the_pieces_of_a_file_are_whole(tmp_path: Path, before: int) -> None:
    head = b'{"pad": "'
    text = head + b"x" * ((1 << 20) - len(head) - before) + b'", "number": 123456789012345678, "list": [12345678, 2]}'
    (tmp_path / "large.json").write_bytes(text)
    parts = list(json_parts(tmp_path / "large.json"))
    assert [part.value for part in parts[1:]] == [123456789012345678, 12345678, 2]
    assert all(json.loads(text[part.offset : part.offset + part.length]) == part.value for part in parts)


def test_a_pixel_is_inside_an_outline_by_the_even_odd_rule() -> None:
    """Outlines that cross themselves and leave the image, against a count of crossings for each pixel."""
    rng = np.random.default_rng(7)
    columns, rows = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    for _ in range(20):
        outline = rng.uniform((-10, -10), (WIDTH + 10, HEIGHT + 10), (int(rng.integers(3, 9)), 2))
        inside = np.zeros((HEIGHT, WIDTH), np.bool_)
        for (x0, y0), (x1, y1) in zip(outline, np.roll(outline, -1, 0), strict=True):
            crosses = (y0 > rows) != (y1 > rows)
            inside ^= crosses & (columns >= x0 + (rows - y0) * (x1 - x0) / (y1 - y0))
        assert (outline_pixels(outline, Grid(HEIGHT, WIDTH, 1)) == inside).all()
