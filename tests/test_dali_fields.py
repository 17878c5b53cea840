"""Fields next to a DALI pipeline: aligned with its images and equal to those of ImageLoader; mixtures and buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from dali_cases import MEAN_DIFFERENCE, WITH_PROCESSES
from loader_options import grouped
from test_items import COUNT, NAMES, OPS, TURNED, by_index, check_aligned, packed_in, same

import readers
from cache.errors import BadSampleError, UnknownNameError
from readers import Decode, Ranks
from readers.augment import (
    AspectBuckets,
    CenterCrop,
    ColorJitter,
    Normalize,
    RandomHorizontalFlip,
    RandomRotation,
    RandomVerticalFlip,
    ResizeToBucket,
)
from readers.dali import DaliLoader, PipelineOptions
from readers.loader import FieldOptions, ImageLoader
from readers.order import Bucketed, Mixed

pytestmark = WITH_PROCESSES
FIELDS = NAMES[1:]
TWO = PipelineOptions(threads=2, layout="NHWC")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_in(tmp_path_factory.mktemp("fields"))


@pytest.fixture
def reader(place: Path) -> Iterator[readers.Reader]:
    with readers.open(place) as opened:
        yield opened


# --- fields -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ops", [OPS, TURNED, [RandomRotation(30), *OPS, ColorJitter(0.2)]], ids=repr)
def test_fields_equal_those_of_our_loader_and_match_their_images(reader: readers.Reader, ops: list[Any]) -> None:
    fields = FieldOptions(names=NAMES, min_visible=0.2)
    options: dict[str, Any] = {"augment": ops, "fields": fields, "seed": 3, "tail": "exact"}
    loader = ImageLoader(reader, 7, **grouped({"threads": 1, "decode": Decode(layout="NCHW"), **options}))
    dali_loader = DaliLoader(reader, 7, options=PipelineOptions(threads=2), **grouped(options))
    for epoch in range(2):
        expected, samples = by_index(loader), by_index(dali_loader)
        assert list(samples) == list(expected) and sorted(samples) == list(range(COUNT)), epoch
        for index, sample in samples.items():
            check_aligned(sample)
            assert all(same(sample[name], expected[index][name]) for name in FIELDS), index


def test_asking_for_fields_changes_no_image_and_resumes(reader: readers.Reader) -> None:
    def loader(fields: Any) -> DaliLoader:
        options = PipelineOptions(threads=1, workers=1, start_method="fork")
        return DaliLoader(reader, 5, augment=OPS, fields=fields, seed=9, options=options)

    plain = [images for images, _ in loader(("image", "label"))]
    first, second = loader(NAMES), loader(NAMES)
    loop = iter(first)
    whole = [next(loop), next(loop)]
    second.load_state_dict(first.state_dict())
    whole += list(second)
    assert len(plain) == len(whole) and all(map(torch.equal, plain, (batch[0] for batch in whole)))
    assert {*by_index(whole)} == {*by_index(ImageLoader(reader, 5, fields=("index",), seed=9), ("index",))}


def test_arrays_and_dictionaries(tmp_path: Path) -> None:
    """Without torch tensors, from a set with missing fields, and on a rank that has no sample left in the last step."""
    names = {"pixels": "image", "classes": "mask", "text": "caption", "ids": "box_labels", "number": "index"}
    with readers.open(packed_in(tmp_path, missing=True)) as reader:
        some = reader.select(indices=[0, 1, 2, 4, 6])
        options: dict[str, Any] = {"augment": OPS, "fields": names, "output": "numpy", "shuffle": False}
        ranks = [
            DaliLoader(some, 2, options=TWO, **grouped({"ranks": Ranks(rank=rank, world_size=2), **options}))
            for rank in range(2)
        ]
        batches = [list(rank) for rank in ranks]
        assert [list(batch) for batch in batches[0]] == [list(names)] * 2
        assert [len(batch["pixels"]) for rank in batches for batch in rank] == [2, 0, 2, 1]
        first, empty, middle, last = (batch for rank in batches for batch in rank)
        assert first["classes"][0].dtype == np.uint8 and first["classes"][1] is None and first["text"][1] is None
        assert {**empty, "pixels": 0, "number": 0} == {"pixels": 0, "classes": [], "text": [], "ids": [], "number": 0}
        assert empty["pixels"].shape == (0, 48, 48, 3) and middle["number"].tolist() == [2, 3]
        assert isinstance(last["ids"][0], np.ndarray) and last["text"] == ["6 is shown"]
        whole = DaliLoader(some.select(indices=[0, 2, 3]), 3, **grouped({**options, "shuffle": True}))
        assert next(iter(whole))["number"].dtype == np.int64


@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
def test_a_bad_field_makes_a_bad_sample(
    reader: readers.Reader, tmp_path: Path, on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is cut off, which only decoding detects, and boxes with invalid values."""
    read_fields = type(reader).read_fields

    def damaged(self: Any, rows: Any) -> Any:
        fields = read_fields(self, rows)
        for index, field in ((5, "mask"), (9, "boxes")):
            if index in (places := list(rows.get(field, ()))):
                fields[field][places.index(index)] = bytes(fields[field][places.index(index)])[:-30]
        return fields

    monkeypatch.setattr(type(reader), "read_fields", damaged)
    options: dict[str, Any] = {"augment": OPS, "fields": NAMES, "shuffle": False, "on_error": on_error}
    loader = DaliLoader(reader, 6, options=PipelineOptions(threads=2), **grouped(options))
    if on_error == "raise":
        with pytest.raises(BadSampleError, match=r"sample 5 \(05\): field mask: .*packer verify --deep"):
            list(loader)
        return
    with pytest.warns(UserWarning, match="2 bad samples were"):
        batches = list(loader)
    assert [(bad.index, bad.reason.partition(":")[0]) for bad in loader.bad_samples] == [
        (5, "field mask"),
        (9, "field boxes"),
    ]
    rows = [row for batch in batches for row in batch[NAMES.index("index")].tolist()]
    with pytest.warns(UserWarning, match="2 bad samples were"):
        plain = list(ImageLoader(reader, 6, **grouped({"threads": 1, **options})))
    assert rows == [row for batch in plain for row in batch[NAMES.index("index")].tolist()] and not {5, 9} & {*rows}
    for name in FIELDS:
        column, expected = ([v for batch in some for v in batch[NAMES.index(name)]] for some in (batches, plain))
        assert len(column) == len(expected) and all(map(same, column, expected)), name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fields": ("mask",)}, ValueError, "name 'image' in fields, or take ImageLoader"),
        ({"fields": ("image", "masks")}, UnknownNameError, "no field 'masks'"),
        (
            {"augment": None, "graph": lambda node: node, "fields": ("image", "boxes")},
            ValueError,
            "boxes would not",
        ),
        (
            {"augment": [ResizeToBucket([(8, 8)])]},
            ValueError,
            "ResizeToBucket in batches of one",
        ),
    ],
)
def test_options_that_are_refused(reader: readers.Reader, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DaliLoader(reader, 4, **grouped({"augment": OPS, **options}))


# --- orders -------------------------------------------------------------------------------------------------------
def check_images(images: torch.Tensor, others: torch.Tensor, scale: float = 1.0) -> None:
    """Equal up to the rounding of DALI and libjpeg, which differs at the edges of drawn shapes."""
    difference = (images.double() - others.double()).abs() * scale
    assert images.shape == others.shape and difference.mean() <= MEAN_DIFFERENCE and difference.max() < 12


def test_a_mixture(reader: readers.Reader) -> None:
    both = readers.concat([reader, reader.select(indices=range(5))])
    order = Mixed([COUNT, 5], [0.5, 0.5], samples=20, seed=2)
    options: dict[str, Any] = {"augment": OPS, "order": order, "fields": ("image", "index", "mask")}
    loader = ImageLoader(
        both, 5, **grouped({"decode": Decode(layout="NHWC", exact_colours=True), "threads": 1, **options})
    )
    for _ in range(2):
        for first, second in zip(loader, DaliLoader(both, 5, options=TWO, **grouped(options)), strict=True):
            assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])
            check_images(first[0], second[0])
        loader.set_epoch(0)


SHAPES = AspectBuckets(((48, 24), (32, 32), (24, 48)))
FLIPS = [RandomHorizontalFlip(), RandomVerticalFlip()]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    sizes = [(64, 64), (40, 90), (90, 40), (20, 30), (100, 77)]
    root = tmp_path_factory.mktemp("shapes") / "images"
    return pack(tree_of(root, {f"a/{i:02}.jpg": make_jpeg(i, sizes[i % 5]) for i in range(29)}))


@pytest.mark.parametrize(
    "ops",
    [
        [ResizeToBucket(SHAPES, "random"), *FLIPS, ColorJitter(0.4), Normalize((0.5,) * 3, (0.5,) * 3)],
        [ResizeToBucket(SHAPES), CenterCrop((20, 22))],
    ],
    ids=lambda ops: "-".join(type(op).__name__ for op in ops),
)
def test_buckets(shapes: Path, ops: list[Any]) -> None:
    """Each batch has one shape and the number of samples of its bucket."""
    with readers.open(shapes) as reader:
        order = Bucketed(SHAPES.of(reader.info), (2, 4, 3), 1, seed=5)
        options: dict[str, Any] = {"augment": ops, "order": order, "fields": ("image", "index")}
        scale = 127.5 if any(isinstance(op, Normalize) for op in ops) else 1.0
        loader = ImageLoader(
            reader, 4, **grouped({"threads": 1, "decode": Decode(layout="NHWC", exact_colours=True), **options})
        )
        dali_loader = DaliLoader(reader, 4, options=TWO, **grouped(options))
        seen, batch_shapes = [], set()
        for _ in range(2):
            for (images, rows), (others, same_rows) in zip(loader, dali_loader, strict=True):
                check_images(images, others, scale)
                assert rows.tolist() == same_rows.tolist()
                seen, batch_shapes = seen + rows.tolist(), batch_shapes | {tuple(images.shape)}
        assert {*seen} == {*range(29)} and len(batch_shapes) == 3


def test_buckets_by_other_columns_are_refused(shapes: Path) -> None:
    with readers.open(shapes) as reader:
        loader = DaliLoader(reader, 4, augment=[ResizeToBucket(SHAPES)], order=Bucketed([0] * 29, 4, 1), options=TWO)
        with pytest.raises(BadSampleError, match=r"in a batch of images of \d+ x \d+ pixels: make the order of"):
            list(loader)
