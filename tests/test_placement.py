"""Masks, boxes and points move with the pixels of their image, in every op that moves pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from augment_cases import plan_for

from cache.errors import BadSampleError
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    GaussianBlur,
    Op,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Recipe,
    Resize,
    TrivialAugmentWide,
)
from readers.augment.cpu import Finish, Renderer
from readers.augment.geometry import Job, Pass
from readers.augment.recipe import Placement
from readers.decode import Region
from readers.decode.region import with_header

Pixels = np.ndarray[Any, np.dtype[Any]]
FLIPS = [RandomHorizontalFlip(1.0), RandomVerticalFlip(1.0)]
GREY = ColorJitter()  # a pixel op that changes no pixel: the following ops begin another part
OUTSIDE = 0


class Made(NamedTuple):
    image: Pixels
    placement: Placement


def painted(seed: int, height: int, width: int, grain: int = 12) -> Pixels:
    """A mask of blocks, int32 [height, width] from 1 to 7."""
    small = np.random.default_rng(seed).integers(1, 8, (height // grain + 1, width // grain + 1))
    return np.kron(small, np.ones((grain, grain), np.int64))[:height, :width].astype(np.int32)


def image_of(mask: Pixels) -> Pixels:
    """Classes as the corners of the RGB cube: no corner is near a mixture of two others."""
    return np.stack([(mask >> bit & 1) * 255 for bit in range(3)], axis=-1).astype(np.uint8)


def shown(image: Pixels, margin: int = 8) -> tuple[Pixels, Pixels]:
    """The classes that an image shows, and where pixels do not mix neighbouring classes."""
    values = image.astype(int)
    clear = ((values <= margin) | (values >= 255 - margin)).all(axis=-1)
    return ((values > 127) * (1, 2, 4)).sum(axis=-1), clear


def made(ops: Sequence[Op], image: Pixels, seed: int = 0, *, compose: bool = False) -> Made:
    recipe, plan = Recipe(ops), plan_for(ops, [image], seed, compose=compose)
    return rendered(image, plan.jobs()[0], recipe.interpolation)


def rendered(image: Pixels, job: Job, interpolation: Any = None) -> Made:
    size = job.last.size
    finish, renderer = Finish(torch.uint8, True, None), Renderer(interpolation)
    pixels, out = renderer.chunk(1, *size), torch.empty((1, 3, *size), dtype=torch.uint8)
    left = renderer.render(with_header(image), job, image.shape[:2], pixels)  # type: ignore[arg-type]
    finish.store(pixels, (pixels,), (left,), out)
    placement = Placement(image.shape[:2], (*job.before, job.last))  # type: ignore[arg-type]
    return Made(out[0].permute(1, 2, 0).numpy(), placement)


GEOMETRY: dict[str, list[Op]] = {
    "nothing": [],
    "flips": FLIPS,
    "crop": [Crop(7, 11, 60, 50)],
    "central crop": [CenterCrop(61)],
    "random crop": [RandomCrop((50, 70))],
    "crop beyond the edges": [RandomCrop((120, 150), padding=20)],
    "resize": [Resize((64, 200))],
    "bicubic": [Resize((150, 90), interpolation="bicubic")],
    "larger": [Resize(240), RandomCrop(128)],
    "resized crop": [RandomResizedCrop(64), RandomHorizontalFlip()],
    "bicubic resized crop": [RandomResizedCrop((40, 90), interpolation="bicubic"), RandomVerticalFlip()],
    "resized, then cropped beyond the edges": [Resize(60), RandomCrop((70, 90), padding=16), RandomHorizontalFlip()],
    "rotation": [RandomRotation(40)],
    "rotated, then cropped": [RandomRotation(30), RandomResizedCrop(64), RandomHorizontalFlip()],
    "cropped, then rotated": [RandomResizedCrop(80), RandomHorizontalFlip(), RandomRotation(45)],
    "turned back": [RandomRotation(90), GREY, RandomCrop(60), RandomRotation(90), Resize((90, 70))],
    "flips between": [*FLIPS, RandomRotation(20), *FLIPS, Resize(100), GREY, *FLIPS, CenterCrop(70)],
    "a run, then enlarged": [RandomRotation(30), *FLIPS, RandomRotation(25), CenterCrop(80), Resize(100)],
    "two resizes": [Resize(100), GREY, RandomResizedCrop(64), RandomHorizontalFlip()],
}


@pytest.mark.parametrize("compose", [False, True], ids=["op by op", "composed"])
@pytest.mark.parametrize("name", GEOMETRY)
def test_a_mask_stays_on_its_image(name: str, compose: bool, seed: int = 1) -> None:
    mask = painted(seed, 110, 133)
    image, placement = made(GEOMETRY[name], image_of(mask), seed, compose=compose)
    placed = placement.mask(mask, OUTSIDE)
    classes, clear = shown(image)
    assert placed.shape == image.shape[:2] and placed.dtype == mask.dtype
    assert clear.mean() > 0.2, "the images are too small to compare"
    wrong = (placed != classes) & clear
    assert not wrong.any(), f"{wrong.sum()} of {clear.sum()} clear pixels"


@pytest.mark.parametrize("name", ["nothing", "flips", "crop", "random crop", "central crop"])
def test_masks_are_exact_without_a_resize(name: str) -> None:
    mask = np.random.default_rng(1).integers(1, 8, (110, 133)).astype(np.int32)
    image, placement = made(GEOMETRY[name], image_of(mask), 5)
    np.testing.assert_array_equal(placement.mask(mask), shown(image)[0])


@pytest.mark.parametrize("op", [RandAugment(), TrivialAugmentWide()], ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("change", [(1, 0.3), (3, 17.3), (5, 33.0)])
def test_changes_that_move_pixels_move_masks(op: Op, change: tuple[int, float]) -> None:
    mask = painted(4, 100, 120)
    job = Job(Pass(Region(0, 0, 100, 120), (100, 120), (0, 0), (3,), ((op, [*change]),), (100, 120)))
    image, placement = rendered(image_of(mask), job)
    placed, (classes, _) = placement.mask(mask, OUTSIDE), shown(image)
    assert (placed == classes).mean() > 0.985, "more than ties at the edges of blocks"
    assert (placement.mask(mask, OUTSIDE) != mask[:, ::-1]).any()


@pytest.mark.parametrize(
    "op", [ColorJitter(0.9, hue=0.5), GaussianBlur((0.5, 2.0)), RandomErasing(1.0), RandomGrayscale(1.0)], ids=repr
)
def test_ops_that_change_colours_move_no_pixels(op: Op) -> None:
    mask = painted(5, 100, 120)
    _, placement = made([RandomHorizontalFlip(1.0), op], image_of(mask))
    np.testing.assert_array_equal(placement.mask(mask), mask[:, ::-1])


@pytest.mark.parametrize("ops", [[], GEOMETRY["resized crop"], GEOMETRY["rotated, then cropped"]], ids=repr)
def test_a_mask_of_half_the_size_covers_its_image(ops: list[Op]) -> None:
    small = painted(6, 55, 66)
    whole = np.kron(small, np.ones((2, 2), np.int32)).astype(np.int32)
    _, placement = made(ops, image_of(whole))
    np.testing.assert_array_equal(placement.mask(small, OUTSIDE), placement.mask(whole, OUTSIDE))


@pytest.mark.parametrize("shape", [(120, 100), (100, 100), (10, 133)])
def test_a_mask_of_other_proportions_is_refused(shape: tuple[int, int]) -> None:
    _, placement = made([RandomHorizontalFlip(1.0)], image_of(painted(1, 100, 120)))
    with pytest.raises(
        BadSampleError,
        match=f"has {shape[0]} x {shape[1]} pixels, expected the proportions of the upright image, 100 x 120",
    ):
        placement.mask(np.zeros(shape, np.uint8))


# --- boxes and points -----------------------------------------------------------------------------------------------
BOXES = np.float32([[10, 20, 40, 50], [60, 5, 130, 60], [0, 0, 133, 110], [90, 80, 100, 108]])


@pytest.mark.parametrize("name", GEOMETRY)
def test_boxes_enclose_their_visible_part(name: str, seed: int = 1) -> None:
    """Each box is painted on a separate mask, whose pixels show where the box must be."""
    image = image_of(painted(seed, 110, 133))
    placement = made(GEOMETRY[name], image, seed).placement
    boxes, shares = placement.boxes(BOXES)
    ones = placement.mask(np.ones((110, 133), np.uint8))
    assert boxes.dtype == np.float32 and boxes.shape == BOXES.shape
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= ones.shape[::-1]).all()
    for (x0, y0, x1, y1), box, share in zip(BOXES.astype(int).tolist(), boxes, shares, strict=True):
        mask = np.zeros((110, 133), np.uint8)
        mask[y0:y1, x0:x1] = 1
        rows, columns = np.nonzero(placement.mask(mask))
        assert 0 <= share <= 1
        if not len(rows):
            assert share < 0.02
            continue
        seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(box, seen, atol=1.6)
        grown = len(rows) / max(1, share * (x1 - x0) * (y1 - y0))
        assert share > 0.99 or grown == pytest.approx(growth(placement), rel=0.25, abs=60 / len(rows))


def growth(placement: Placement) -> float:
    """The factor by which areas grow, from any triangle."""
    moved = placement.points(np.float32([[50, 50], [51, 50], [50, 51]])).astype(float)
    return float(abs(np.linalg.det(moved[1:] - moved[0])))


def test_a_rotated_and_cut_box_is_smaller_than_the_bounds_of_the_rotated_box() -> None:
    op = RandomRotation(45)
    turned = Pass(Region(0, 0, 100, 100), (100, 100), (0, 0), (), ((op, [45.0]),), (100, 100))
    placement = Placement((100, 100), [turned])
    (whole,), (share,) = placement.boxes(np.float32([[0, 0, 100, 100]]))
    assert whole.tolist() == [0, 0, 100, 100] and share == pytest.approx(2 * (2**0.5 - 1), abs=1e-6)
    (corner,), (share,) = placement.boxes(np.float32([[0, 0, 14, 14]]))
    assert share == 0 and corner.tolist() == [0, 0, 0, 0]


def test_boxes_without_an_area_are_visible_inside_the_image() -> None:
    placement = made([Crop(10, 10, 50, 50)], image_of(painted(1, 100, 100))).placement
    boxes, shares = placement.boxes(np.float32([[20, 20, 20, 20], [5, 20, 5, 30], [20, 15, 30, 15]]))
    assert shares.tolist() == [1, 0, 1] and boxes[[0, 2]].tolist() == [[10, 10, 10, 10], [10, 5, 20, 5]]


@pytest.mark.parametrize("name", GEOMETRY)
def test_points_stay_on_their_features(name: str) -> None:
    mask = np.ones((110, 133), np.uint8)
    points = np.float32([[30, 30], [90, 50], [60, 90]])
    for number, (x, y) in enumerate(points.astype(int).tolist()):
        mask[y - 5 : y + 5, x - 5 : x + 5] = 2 + number
    placement = made(GEOMETRY[name], image_of(mask), 2).placement
    moved, placed = placement.points(points[None])[0], placement.mask(mask)
    _, visible = placement.boxes(np.concatenate((points - 5, points + 5), axis=1))
    for number in np.flatnonzero(visible > 0.999).tolist():
        rows, columns = np.nonzero(placed == 2 + number)
        assert (columns.mean() + 0.5, rows.mean() + 0.5) == pytest.approx(moved[number], abs=0.8)
    assert (visible > 0.999).any() or name in ("crop beyond the edges", "turned back")


def test_missing_points_stay_missing_and_others_may_leave_the_image() -> None:
    placement = made([Crop(10, 10, 20, 20)], image_of(painted(1, 100, 100))).placement
    moved = placement.points(np.float32([[np.nan, np.nan], [5, 60]]))
    assert np.isnan(moved[0]).all() and moved[1].tolist() == [-5, 50]
