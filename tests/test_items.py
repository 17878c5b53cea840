"""Fields in training: decoded, aligned with their image, the same in every loader; requesting them changes no image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_doubles import install
from loader_options import grouped
from PIL import Image
from test_fields import image_bytes, table
from test_placement import image_of, painted, shown
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import BadSampleError, UnknownNameError
from readers import Decode, Ranks, Views
from readers.augment import (
    ColorJitter,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)
from readers.decode import decode_image
from readers.loader import FieldOptions, ImageLoader
from readers.order import Shuffled
from readers.rocal.pipelines import RocalLoader
from readers.torch import EpochSampler, ImageDataset, ImageStream

COUNT = 24
KINDS = {
    "mask:mask": "seg",
    "boxes:boxes": "bbox",
    "box_labels:array": "ids",
    "points:points": "keypoints",
    "caption:text": "title",
    "vector:array": "embedding",
}
NAMES = ("image", "mask", "boxes", "box_labels", "points", "caption", "vector", "json", "index", "label", "key")
OPS = [RandomResizedCrop(48, scale=(0.3, 1.0)), RandomHorizontalFlip(), RandomVerticalFlip()]
TURNED = [RandomResizedCrop(48, scale=(0.5, 1.0)), RandomRotation(20)]

STORED = {  # the operation that undoes an EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def rows_of(root: Path, missing: bool = False) -> Iterator[dict[str, Any]]:
    """Images whose masks equal their content, and whose boxes are their first two rectangles; all orientations."""
    for n in range(COUNT):
        height, width = ((90, 120), (120, 90), (100, 100))[n % 3]
        mask = np.ones((height, width), np.uint8)
        boxes = [[8, 10, 40, 44], [50, 30, 86, 80], [0, 60, 20, 88]][: 1 + n % 3]
        for number, (x0, y0, x1, y1) in enumerate(boxes):
            mask[y0:y1, x0:x1] = 2 + number
        orientation = 1 + n % 8
        exif = Image.Exif()
        exif[0x0112] = orientation
        upright = Image.fromarray(image_of(mask))
        stored = upright if orientation == 1 else upright.transpose(STORED[orientation])
        options: dict[str, Any] = {"exif": exif, "quality": 98, "subsampling": 0}
        (root / f"{n:02d}.jpg").write_bytes(image_bytes(stored, "JPEG", **options))
        (root / f"{n:02d}.png").write_bytes(image_bytes(mask))
        centres = [[(x0 + x1) / 2, (y0 + y1) / 2] for x0, y0, x1, y1 in boxes]
        row = {"path": f"{n:02d}.jpg", "label": n % 4, "seg": f"{n:02d}.png", "bbox": boxes, "keypoints": centres}
        row |= {"ids": [2 + i for i in range(len(boxes))], "title": f"{n} is shown", "embedding": [n, n / 2]}
        row["tags"] = [f"tag {n % 3}"]
        lacks = missing and n % 4 == 1
        yield row | ({"seg": None, "bbox": None, "ids": None, "title": None, "keypoints": None} if lacks else {})


def pack(root: Path, rows: list[dict[str, Any]], **columns: str) -> Path:
    fields = {**{name: column for name, column in KINDS.items() if column not in columns.values()}, **columns}
    source = packer.open_source(table(root, rows), fields=fields)
    packer.convert(source, "tar", root / "set", run=packer.Run(workers=1))
    return root / "set"


def packed_in(root: Path, missing: bool = False) -> Path:
    return pack(root, list(rows_of(root, missing)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_in(tmp_path_factory.mktemp("fields"))


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set with some samples that lack most fields."""
    return packed_in(tmp_path_factory.mktemp("gaps"), missing=True)


@pytest.fixture
def reader(place: Path) -> Iterator[readers.Reader]:
    with readers.open(place) as opened:
        yield opened


def by_index(batches: Any, names: tuple[str, ...] = NAMES) -> dict[int, dict[str, Any]]:
    """The samples of batches, separately."""
    samples = {}
    for batch in batches:
        for row, index in enumerate(batch[names.index("index")].tolist()):
            samples[index] = {name: column[row] for name, column in zip(names, batch, strict=True)}
    return samples


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)


def check_aligned(sample: dict[str, Any], margin: int = 60, fill: int = 0) -> None:
    """Check that mask, boxes and points are where the image shows them."""
    image = sample["image"].permute(1, 2, 0).numpy()
    classes, clear = shown(image, margin)
    mask = sample["mask"].numpy()
    assert mask.shape == image.shape[:2] and clear.mean() > 0.5
    assert (mask[clear] != classes[clear]).mean() < 0.01, "more pixels differ than JPEG blurs"
    assert len(sample["boxes"]) == len(sample["box_labels"])
    for box, number in zip(sample["boxes"].numpy(), sample["box_labels"].tolist(), strict=True):
        rows, columns = np.nonzero(mask == number)
        if len(rows) > 30:
            seen = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            np.testing.assert_allclose(box, seen, atol=1.6)
    assert sample["box_labels"].dtype == torch.int64 and sample["boxes"].dtype == torch.float32


# --- the content of a batch ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("ops", [OPS, TURNED, [Resize((60, 50))], [RandomRotation(30), *OPS, ColorJitter()]], ids=repr)
def test_fields_are_aligned_with_their_images(reader: readers.Reader, ops: list[Any]) -> None:
    loader = ImageLoader(reader, 7, augment=ops, fields=NAMES, seed=3, ranks=Ranks(tail="exact"), threads=2)
    samples = by_index(loader)
    assert sorted(samples) == list(range(COUNT))
    for index, sample in samples.items():
        check_aligned(sample)
        assert (sample["caption"], sample["json"]) == (f"{index} is shown", {"tags": [f"tag {index % 3}"]})
        assert (sample["label"], sample["key"]) == (index % 4, f"{index:02d}")
        assert sample["vector"].tolist() == [index, index / 2]
    left_out = sum(1 + index % 3 - len(sample["boxes"]) for index, sample in samples.items())
    assert bool(left_out) == any(op.crops for op in ops), "wrong boxes were left out"


def test_types_and_shapes_of_a_batch(reader: readers.Reader) -> None:
    names = {"pixel_values": "image", "labels": "mask", "boxes": "boxes", "text": "caption"}
    ops = [*OPS, Normalize((0.5,) * 3, (0.5,) * 3)]
    batch = next(iter(ImageLoader(reader, 8, augment=ops, fields=names, decode=Decode(layout="NCHW"))))
    assert list(batch) == list(names) and batch["pixel_values"].dtype == torch.float32
    assert batch["labels"].dtype == torch.uint8 and batch["labels"].shape == (8, 48, 48)
    assert isinstance(batch["boxes"], list) and batch["boxes"][0].shape[1:] == (4,)
    assert all(isinstance(text, str) for text in batch["text"])


def test_without_the_image_fields_are_as_packed(reader: readers.Reader) -> None:
    names = ("boxes", "points", "mask", "index", "json")
    ((boxes, points, masks, indices, tags),) = ImageLoader(reader, COUNT, fields=names, shuffle=False)
    assert indices.tolist() == list(range(COUNT)) and boxes[4].tolist() == [[8, 10, 40, 44], [50, 30, 86, 80]]
    assert points[0].tolist() == [[24, 27]] and tags[5] == {"tags": ["tag 2"]}
    assert [tuple(mask.shape) for mask in masks[:3]] == [(90, 120), (120, 90), (100, 100)]


def test_each_view_has_its_masks_and_boxes(reader: readers.Reader) -> None:
    names = ("image", "mask", "boxes", "box_labels", "caption")
    loader = ImageLoader(reader, 6, augment=Views([OPS, TURNED]), fields=names, seed=1)
    images, masks, boxes, labels, captions = next(iter(loader))
    assert len(images) == len(masks) == len(boxes) == len(labels) == 2 and len(captions) == 6
    assert not torch.equal(masks[0], masks[1])
    for view in range(2):
        for row in range(6):
            values = images[view][row], masks[view][row], boxes[view][row], labels[view][row]
            check_aligned(dict(zip(("image", "mask", "boxes", "box_labels"), values, strict=True)))


def test_boxes_that_are_hardly_visible_are_left_out_with_their_rows(reader: readers.Reader) -> None:
    names = ("image", "boxes", "box_labels", "index")
    kept, few, all_of_them = (
        by_index(ImageLoader(reader, 8, augment=OPS, fields=replace(options, names=names), seed=2), names)
        for options in (FieldOptions(), FieldOptions(min_visible=0.6), FieldOptions(keep_boxes=True))
    )
    counts = [sum(len(sample["boxes"]) for sample in some.values()) for some in (few, kept, all_of_them)]
    assert counts[0] < counts[1] < counts[2] == 2 * COUNT
    for index, sample in all_of_them.items():
        assert sample["box_labels"].tolist() == [2, 3, 4][: 1 + index % 3]
        areas = (sample["boxes"][:, 2:] - sample["boxes"][:, :2]).prod(1)
        assert torch.equal(sample["boxes"][areas > 0], kept[index]["boxes"])
        assert sample["box_labels"][areas > 0].tolist() == kept[index]["box_labels"].tolist()
        assert set(few[index]["box_labels"].tolist()) <= set(kept[index]["box_labels"].tolist())


def test_box_labels_alone_equal_those_with_boxes(reader: readers.Reader) -> None:
    options: dict[str, Any] = {"augment": OPS, "seed": 2}
    names = ("image", "box_labels", "index")
    alone = by_index(ImageLoader(reader, 8, fields=names, **grouped(options)), names)
    together = by_index(ImageLoader(reader, 8, fields=NAMES, **grouped(options)))
    assert all(same(sample["box_labels"], together[index]["box_labels"]) for index, sample in alone.items())


def test_masks_are_filled_with_mask_fill_outside_the_image(reader: readers.Reader) -> None:
    fields = FieldOptions(names=("image", "mask"), mask_fill=255)
    loader = ImageLoader(reader, COUNT, augment=TURNED, fields=fields)
    ((images, masks),) = loader
    dark = (images < 140).all(dim=1)  # outside the image, up to half of an edge pixel
    assert (masks == 255).any() and dark[masks == 255].float().mean() > 0.99


@pytest.mark.parametrize("options", [{"min_visible": 2}, {"min_visible": -0.1}, {"mask_fill": 300}, {"mask_fill": -1}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is a"):
        FieldOptions(**options)


# --- every loader ----------------------------------------------------------------------------------------------------
def test_requesting_fields_changes_no_image_and_no_order(reader: readers.Reader) -> None:
    names = ("image", "label", "index")
    plain = ImageLoader(reader, 7, augment=TURNED, fields=names, seed=5, threads=1)
    with_fields = ImageLoader(reader, 7, augment=TURNED, fields=NAMES, seed=5, threads=3)
    for epoch in range(2):
        for first, second in zip(plain, with_fields, strict=True):
            chosen = [second[NAMES.index(name)] for name in names]
            assert all(torch.equal(a, b) for a, b in zip(first, chosen, strict=True)), epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_gives_the_items_of_a_loader(reader: readers.Reader, workers: int) -> None:
    order = Shuffled(COUNT, seed=4)
    expected = by_index(ImageLoader(reader, 6, augment=TURNED, order=order, fields=NAMES))
    dataset = ImageDataset(reader, TURNED, fields=NAMES)
    sampler = EpochSampler(order, dataset)
    loader = DataLoader(dataset, 6, sampler=sampler, num_workers=workers, collate_fn=dataset.collate)
    loaded = by_index(loader)
    streamed = by_index(DataLoader(ImageStream(dataset, EpochSampler(order, dataset), 6), batch_size=None))
    assert expected.keys() == loaded.keys() == streamed.keys()
    for index, sample in expected.items():
        for other in (loaded[index], streamed[index]):
            assert all(same(sample[name], other[name]) for name in NAMES), index


def test_a_resumed_loop_has_the_same_fields(reader: readers.Reader) -> None:
    def loader() -> ImageLoader:
        return ImageLoader(reader, 5, augment=OPS, fields=NAMES, seed=9)

    whole = list(loader())
    first, second = loader(), loader()
    for _, _ in zip(range(2), first, strict=False):
        state = first.state_dict()
    second.load_state_dict(state)
    rest = list(second)
    assert same(by_index(whole[-len(rest) :]), by_index(rest)) and len(rest) == len(whole) - 2


@pytest.mark.parametrize("keep", ["encoded", "recoded:40@95", "decoded:45", "decoded"])
def test_fields_match_images_that_a_cache_has_converted(reader: readers.Reader, keep: str, tmp_path: Path) -> None:
    with readers.cached(reader, keep=keep, directory=tmp_path) as over:
        for again in range(2):
            for sample in by_index(ImageLoader(over, 6, augment=TURNED, fields=NAMES, seed=again)).values():
                check_aligned(sample, 90)
        whole = ImageDataset(over, fields=NAMES)[6]
        check_aligned(dict(zip(NAMES, whole, strict=True)), 90)


def test_selections_copies_and_joined_sets_have_fields(reader: readers.Reader, place: Path) -> None:
    with readers.open(place, backend="mmap", verify=True) as mapped:
        for other in (reader.select(indices=[20, 3, 11]), mapped.select(labels=[1]), readers.concat([reader, mapped])):
            for sample in by_index(ImageLoader(other, 3, augment=OPS, fields=NAMES)).values():
                check_aligned(sample)


def test_a_decoder_of_batches_has_the_same_fields(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the decoder refuses images, which the CPU then decodes."""
    double = install(monkeypatch, "torchvision")
    double.refuse = {bytes(reader.read(i)) for i in (0, 8)}
    options: dict[str, Any] = {"augment": TURNED, "fields": NAMES, "seed": 7}
    expected = by_index(ImageLoader(reader, 6, **grouped(options)))
    with pytest.warns(UserWarning, match="which the CPU decodes"):
        decoded = by_index(ImageLoader(reader, 6, **grouped({"decode": Decode(decoder="torchvision"), **options})))
    assert sum(double.calls) and expected.keys() == decoded.keys()
    for index, sample in decoded.items():
        check_aligned(sample)
        assert all(same(sample[name], expected[index][name]) for name in NAMES if name != "image")


# --- samples without a field, bad ones ------------------------------------------------------------------------------
def test_a_sample_without_a_field_has_none(gaps: Path) -> None:
    with readers.open(gaps) as reader:
        samples = by_index(ImageLoader(reader, 6, augment=OPS, fields=NAMES))
        dataset = ImageDataset(reader, OPS, fields=NAMES)
        batch = dict(zip(NAMES, next(iter(DataLoader(dataset, 6, collate_fn=dataset.collate))), strict=True))
    assert isinstance(batch["mask"], list) and batch["mask"][1] is None and batch["mask"][0].shape == (48, 48)
    for index, sample in samples.items():
        if index % 4 == 1:
            assert [sample[name] for name in ("mask", "boxes", "box_labels", "points", "caption")] == [None] * 5
            assert sample["vector"].tolist() == [index, index / 2]
        else:
            check_aligned(sample)


BAD = (3, 10, 17)


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[readers.Reader]:
    """The set with three invalid masks."""
    rows = list(rows_of(tmp_path))
    for n in BAD:
        rows[n]["seg"] = f"{n:02d}.txt"
        (tmp_path / f"{n:02d}.txt").write_text("no mask")
    with readers.open(pack(tmp_path, rows, mask="seg")) as reader:
        yield reader.with_kinds({"mask": "mask"})


@pytest.mark.parametrize(
    ("names", "decoder"), [(NAMES, "cpu"), (NAMES, "torchvision"), (("mask", "index", "caption"), "cpu")]
)
def test_a_bad_field_makes_a_bad_sample(
    broken: readers.Reader, names: tuple[str, ...], decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "torchvision")
    options: dict[str, Any] = {"augment": OPS, "fields": names, "shuffle": False, "decoder": decoder}
    with pytest.raises(BadSampleError, match=r"sample 3 \(03\): field mask: .*; find all such"):
        list(ImageLoader(broken, 6, **grouped(options)))
    skipping = ImageLoader(broken, 6, on_error="skip", **grouped(options))
    with pytest.warns(UserWarning, match=r"3 bad samples were skipped, the first is sample 3 \(03\): field mask"):
        left = by_index(skipping, names)
    assert sorted(left) == [n for n in range(COUNT) if n not in BAD]
    replacing = ImageLoader(broken, 6, on_error="substitute", **grouped(options))
    with pytest.warns(UserWarning, match="3 bad samples were replaced"):
        batches = list(replacing)
    assert sum(len(batch[names.index("index")]) for batch in batches) == COUNT
    assert {bad.index for bad in replacing.bad_samples} == {*BAD} and not {*BAD} & {*by_index(batches, names)}
    for batch in batches:
        for row, index in enumerate(batch[names.index("index")].tolist()):
            sample = {name: column[row] for name, column in zip(names, batch, strict=True)}
            assert sample["caption"] == f"{index} is shown", "not of the substitute sample"
            if "image" in names:
                check_aligned(sample)


@pytest.mark.parametrize("names", [NAMES, ("mask", "index", "caption")], ids=["with the image", "without"])
def test_a_data_set_treats_bad_fields_as_bad_images(broken: readers.Reader, names: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"transform": OPS, "fields": names}
    with pytest.raises(BadSampleError, match=r"sample 10 \(10\): field mask"):
        ImageDataset(broken, **options)[10]
    skipping = ImageDataset(broken, on_error="skip", **options)
    assert len(skipping.__getitems__(range(COUNT))) == COUNT - len(BAD) and skipping.bad_samples == len(BAD)
    item = dict(zip(names, ImageDataset(broken, on_error="substitute", **options)[10], strict=True))
    assert item["index"] not in BAD and item["caption"] == f"{item['index']} is shown"


def test_rows_that_do_not_belong_to_boxes_are_named(tmp_path: Path) -> None:
    rows = list(rows_of(tmp_path))
    rows[5]["ids"] = [1]
    pack(tmp_path, rows)
    with readers.open(tmp_path / "set") as reader:
        dataset = ImageDataset(reader, OPS, fields=("image", "box_labels"))
        with pytest.raises(BadSampleError, match=r"box_labels: has shape \[1\], expected a row for each of 3 boxes"):
            dataset[5]


def test_a_mask_of_another_image_is_a_bad_sample(tmp_path: Path) -> None:
    rows = list(rows_of(tmp_path))
    rows[0]["seg"] = rows[1]["seg"]
    pack(tmp_path, rows)
    with readers.open(tmp_path / "set") as reader:
        dataset = ImageDataset(reader, OPS, fields=("image", "mask"))
        with pytest.raises(BadSampleError, match="field mask: has 120 x 90 pixels, expected the proportions"):
            dataset[0]


# --- items --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("output", "kind"), [("tensor", torch.Tensor), ("numpy", np.ndarray), ("pil", np.ndarray)])
def test_items_without_ops_are_the_packed_samples(reader: readers.Reader, output: Any, kind: type) -> None:
    dataset = ImageDataset(reader, output=output, fields={name: name for name in NAMES})
    item = dataset[5]
    assert list(item) == list(NAMES) and isinstance(item["mask"], kind) and isinstance(item["boxes"], kind)
    assert np.asarray(item["boxes"]).tolist() == [[8, 10, 40, 44], [50, 30, 86, 80], [0, 60, 20, 88]]
    pixels = decode_image(reader.read(5))
    classes, clear = shown(pixels, 40)
    assert (classes[clear] == np.asarray(item["mask"])[clear]).all()


def test_a_data_set_reads_all_fields_of_a_batch_at_once(
    reader: readers.Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    kind = type(reader.store)
    read = kind.read
    monkeypatch.setattr(kind, "read", lambda store, extents: calls.append(len(extents.row)) or read(store, extents))
    items = ImageDataset(reader, decode=None, fields=("image", "mask", "vector")).__getitems__([3, 1, 2])
    assert calls == [9] and [bytes(item[0]) for item in items] == [bytes(reader.read(row)) for row in (3, 1, 2)]


def by_caption(label: int, sample: dict[str, Any]) -> tuple[int, str]:
    return label, sample["caption"] + f" at {len(sample['boxes'])}"


def test_target_transform_sees_the_sample_if_it_takes_two(reader: readers.Reader) -> None:
    seen = ImageDataset(reader, OPS, target_transform=by_caption, fields=("label", "caption", "boxes"))[6]
    assert seen[0] == (2, "6 is shown at 1")
    alone = ImageDataset(reader, OPS, target_transform=lambda label: -label, fields=("label", "caption"))[6]
    assert alone == (-2, "6 is shown")
    optional = ImageDataset(reader, target_transform=lambda label, by=3: label * by, fields=("label",))[6]
    assert optional == (6,)
    with pytest.raises(ValueError, match="target_transform computes the label, but fields has no 'label': add it"):
        ImageDataset(reader, target_transform=by_caption, fields=("image", "caption", "boxes"))


def test_targets_of_workers_are_those_of_this_process(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, target_transform=by_caption, fields=("index", "label", "caption", "boxes"))
    loader = DataLoader(dataset, 6, num_workers=2, collate_fn=dataset.collate)
    assert [text for batch in loader for text in batch[1][1]] == [dataset[n][1][1] for n in range(COUNT)]


# --- refused --------------------------------------------------------------------------------------------------------
def test_options_that_would_misalign_a_field_are_refused(reader: readers.Reader) -> None:
    with pytest.raises(ValueError, match="a function as transform sees only the image, and mask would not follow it"):
        ImageDataset(reader, lambda image: image, fields=("image", "mask"))
    with pytest.raises(ValueError, match=r"MixUp\(.*mixes images, which boxes does not follow: leave one of them out"):
        ImageLoader(reader, 4, augment=[*OPS, MixUp()], fields=("image", "label", "boxes"))
    other = reader.with_kinds({"mask": "image"})
    with pytest.raises(ValueError, match=r"mask is another image of the sample: .*with_kinds\({'mask': 'file'}\)"):
        ImageLoader(other, 4, augment=OPS, fields=("image", "mask"))
    assert ImageDataset(other, fields=("image", "mask"))[0][1].shape == (3, 90, 120)
    assert ImageDataset(reader, lambda image: image, fields=("image", "caption"))[3][1] == "3 is shown"
    ImageLoader(reader, 4, augment=[*OPS, MixUp()], fields=("image", "label", "caption"))
    with pytest.raises(UnknownNameError, match="no field 'depth'; a batch can have image, label, key, index, mask"):
        ImageLoader(reader, 4, fields=("depth",))


def test_fields_of_the_kind_file_are_bytes(reader: readers.Reader) -> None:
    plain = reader.with_kinds(dict.fromkeys(("mask", "json"), "file"))
    mask, text = ImageDataset(plain, lambda image: image, fields=("mask", "json"))[3]
    assert (mask, text) == (bytes(reader.read(3, "mask")), bytes(reader.read(3, "json")))


def test_arrays_of_any_type_become_tensors(tmp_path: Path) -> None:
    dtypes = ("uint16", "uint32", "uint64", "int8", "bool", "float16", "complex64")
    arrays = {dtype: np.array([0, 1, 100]).astype(dtype) for dtype in dtypes}
    for dtype, value in arrays.items():
        np.save(tmp_path / f"{dtype}.npy", value)
    (tmp_path / "0.png").write_bytes(image_bytes(painted(0, 8, 8).astype(np.uint8)))
    rows = table(tmp_path, [{"path": "0.png"} | {dtype: f"{dtype}.npy" for dtype in dtypes}])
    source = packer.open_source(rows, fields={f"{dtype}:array": dtype for dtype in dtypes})
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        item = ImageDataset(reader, fields=dtypes)[0]
    assert all(isinstance(value, torch.Tensor) for value in item)
    assert [value.tolist() for value in item] == [value.tolist() for value in arrays.values()]


def test_rocal_refuses_fields_that_could_not_follow_its_random_ops(reader: readers.Reader) -> None:
    source: Any = SimpleNamespace(reader=reader)
    with pytest.raises(ValueError, match="rocAL draws the random ops of images itself, and boxes would not follow"):
        RocalLoader(None, source, fields=("image", "boxes"))
