"""Plans are functions of (seed, epoch, position); what is rendered from them is what Pillow makes of the same boxes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from readers.augment import (
    CELEBA_CROP,
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    ColorJitter,
    Crop,
    GaussianBlur,
    Normalize,
    Op,
    Plan,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Recipe,
    Resize,
    celeba,
)
from readers.augment.cpu import Finish, Renderer
from readers.augment.recipe import Draws

Pixels = np.ndarray[Any, np.dtype[Any]]


def photo(seed: int, height: int, width: int, grain: int = 12) -> Image.Image:
    """Smooth enough to be like a photograph: resizers differ on noise more than on anything anybody trains on."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (height // grain + 2, width // grain + 2, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


GOLDEN_DRAWS = [
    [0.06129853269258523, 0.7862675594894247],
    [0.6905305514593247, 0.8003918444291133],
    [0.962136071366859, 0.6614079533884544],
]
SHAPES = [(375, 500), (500, 333), (64, 64), (40, 900), (601, 803), (1200, 1600)]
IMAGES = [photo(i, *shape) for i, shape in enumerate(SHAPES)]


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def plan_for(ops: list[Op], images: list[Image.Image] = IMAGES, epoch: int = 0) -> Plan:
    sizes = np.array([(image.height, image.width) for image in images])
    return Recipe(ops).plan(7, epoch, np.arange(len(images)), sizes[:, 0], sizes[:, 1])


def by_pillow(image: Image.Image, plan: Plan, i: int) -> Image.Image:
    b = plan.boxes
    box = (b.left[i], b.top[i], b.left[i] + b.width[i], b.top[i] + b.height[i])
    image = image.crop(box).resize((b.resized_width[i], b.resized_height[i]), Image.Resampling.BILINEAR)
    top, left = b.crop_top[i], b.crop_left[i]
    image = image.crop((left, top, left + b.out_width[i], top + b.out_height[i]))
    image = ImageOps.mirror(image) if plan.hflip[i] else image
    return ImageOps.flip(image) if plan.vflip[i] else image


def render(
    ops: list[Op], images: list[Image.Image], dtype: torch.dtype = torch.uint8, planar: bool = False
) -> torch.Tensor:
    recipe, plan = Recipe(ops), plan_for(ops, images)
    height, width = recipe.out_size or (int(plan.boxes.out_height[0]), int(plan.boxes.out_width[0]))
    shape = (len(images), 3, height, width) if planar else (len(images), height, width, 3)
    out = torch.empty(shape, dtype=dtype)
    out = out if planar else out.permute(0, 3, 1, 2)
    renderer, finish, jobs = Renderer(), Finish(dtype, planar, recipe.normalize), plan.jobs()
    pixels = renderer.chunk(len(images), height, width)
    rows = pixels.split(1)
    for image, job, row in zip(images, jobs, rows, strict=True):
        renderer.render(png(image), job, (image.height, image.width), row)
    finish.store(pixels, rows, jobs, out)
    return (pixels.clone() if finish.in_place else out).permute(0, 2, 3, 1)


# --- draws --------------------------------------------------------------------------------------------------------
def test_draws_do_not_depend_on_company_or_order() -> None:
    together = Draws(1, 2, np.arange(100)).uniform(3, 5)
    backwards = Draws(1, 2, np.arange(99, -1, -1)).uniform(3, 5)[::-1]
    alone = np.array([Draws(1, 2, np.array([p])).uniform(3, 5)[0] for p in range(100)])
    assert np.array_equal(together, backwards) and np.array_equal(together, alone)
    assert np.array_equal(Draws(1, 2, np.arange(100)).uniform(3, 2), together[:, :2])


def test_draws_are_frozen() -> None:
    """A change here would change every augmentation of every resumed run."""
    found = Draws(0, 0, np.array([0, 1, 10**12])).uniform(0, 2)
    assert found.tolist() == GOLDEN_DRAWS


def test_draws_look_random() -> None:
    u = Draws(5, 0, np.arange(20_000)).uniform(0, 4)
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.002
    assert np.abs(np.corrcoef(u.T) - np.eye(4)).max() < 0.03
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.03
    for other in (Draws(5, 1, np.arange(20_000)), Draws(6, 0, np.arange(20_000))):
        assert abs(np.corrcoef(u[:, 0], other.uniform(0)[:, 0])[0, 1]) < 0.03
    counts = np.histogram(u[:, 1], 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 100


# --- boxes --------------------------------------------------------------------------------------------------------
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=20),
    st.integers(0, 2**40),
    st.sampled_from([(0.08, 1.0), (0.5, 0.5), (1.0, 1.0)]),
)
def test_random_boxes_lie_inside(shapes: list[tuple[int, int]], seed: int, scale: tuple[float, float]) -> None:
    sizes = np.array(shapes)
    recipe = Recipe([RandomResizedCrop(64, scale=scale)])
    boxes = recipe.plan(seed, 0, np.arange(len(shapes)), sizes[:, 0], sizes[:, 1]).boxes
    assert not boxes.bad
    assert (boxes.top >= 0).all() and (boxes.left >= 0).all() and (boxes.height > 0).all() and (boxes.width > 0).all()
    assert (boxes.top + boxes.height <= sizes[:, 0]).all() and (boxes.left + boxes.width <= sizes[:, 1]).all()
    for start, length, limit in ((boxes.top, boxes.height, sizes[:, 0]), (boxes.left, boxes.width, sizes[:, 1])):
        assert (start % boxes.reduce == 0).all()
        assert ((length % boxes.reduce == 0) | (start + length == limit)).all()
        assert (length >= boxes.reduce * 64).all() or (boxes.reduce == 1).any()


def test_random_boxes_are_distributed_as_asked() -> None:
    n = 20_000
    side = np.full(n, 1000)
    boxes = Recipe([RandomResizedCrop(900, ratio=(0.5, 2.0))]).plan(3, 0, np.arange(n), side, side).boxes
    area, ratio = boxes.height * boxes.width / 1e6, boxes.width / boxes.height
    assert area.min() > 0.079 and area.max() <= 1.0 and ratio.min() > 0.49 and ratio.max() < 2.02
    small = area < 0.4  # boxes that fit whatever their ratio: area is uniform, the ratio's logarithm too
    counts = np.histogram(area[small], 8, (0.08, 0.4))[0]
    assert np.ptp(counts) < 6 * np.sqrt(counts.mean())
    assert abs(np.log(ratio[small]).mean()) < 0.02
    room = 1000 - boxes.height[small]
    assert abs((boxes.top[small] / room).mean() - 0.5) < 0.02 and boxes.top[small].min() == 0


def test_where_no_box_fits_the_middle_is_taken() -> None:
    boxes = (
        Recipe([RandomResizedCrop(8, scale=(0.9, 1.0))]).plan(0, 0, np.arange(1), np.array([10]), np.array([400])).boxes
    )
    assert (boxes.height[0], boxes.width[0]) == (10, 13) and boxes.left[0] == (400 - 13) // 2


@pytest.mark.parametrize(
    ("ops", "size"),
    [
        ([RandomResizedCrop(224)], (224, 224)),
        ([Resize(256), CenterCrop(224)], (224, 224)),
        ([Resize((64, 96))], (64, 96)),
        ([CenterCrop(40), Resize(32)], (32, 32)),
        ([Crop(0, 0, 30, 40), Resize(32)], None),
        ([Resize(32)], None),
        ([Resize(40), RandomCrop((20, 30))], (20, 30)),
        ([], None),
    ],
)
def test_the_size_of_results(ops: list[Op], size: tuple[int, int] | None) -> None:
    assert Recipe(ops).out_size == size
    boxes = plan_for(ops).boxes
    if size is not None:
        assert {*zip(boxes.out_height.tolist(), boxes.out_width.tolist(), strict=True)} == {size}


def test_resize_keeps_the_proportions() -> None:
    boxes = plan_for([Resize(100)]).boxes
    for (height, width), h, w in zip(SHAPES, boxes.out_height, boxes.out_width, strict=True):
        assert min(h, w) == 100 and max(h, w) == 100 * max(height, width) // min(height, width)


def test_a_crop_that_does_not_fit_is_a_bad_sample() -> None:
    plan = plan_for([CenterCrop(200)])
    assert sorted(plan.boxes.bad) == [2, 3]
    assert "CenterCrop(size=200) does not fit into the 64 x 64 pixels" in str(plan.boxes.bad[2])


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([RandomHorizontalFlip(), RandomResizedCrop(8)], "put crops and the resize first"),
        ([Resize(8), RandomResizedCrop(8)], "second resize"),
        ([Normalize(IMAGENET_MEAN, IMAGENET_STD), RandomHorizontalFlip()], "put it last"),
        ([lambda image: image], "not an op of readers.augment"),
    ],
)
def test_lists_that_cannot_be_executed(ops: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(ops)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(0), "RandomResizedCrop: a size"),
        (lambda: Resize((1, 2, 3)), "Resize: a size"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "scale is"),
        (lambda: Crop(-1, 0, 4, 4), "a corner"),
        (lambda: RandomHorizontalFlip(1.5), "p is"),
        (lambda: RandomRotation(-4), "degrees is"),
        (lambda: ColorJitter(contrast=-1), "contrast is"),
        (lambda: GaussianBlur((0.0, 1.0)), "sigma is"),
        (lambda: Normalize((0, 0, 0), (1, 0, 1)), "Normalize"),
    ],
)
def test_values_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- pixels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "ops",
    [
        [RandomResizedCrop(224), RandomHorizontalFlip()],
        [RandomResizedCrop((50, 80)), RandomHorizontalFlip(), RandomVerticalFlip()],
        [Resize(48), CenterCrop(40)],
        [Resize((100, 30)), RandomVerticalFlip(1.0)],
        [CenterCrop((38, 60)), Resize(64), RandomCrop(50), RandomHorizontalFlip()],
        [Crop(3, 5, 30, 40), Resize((30, 40))],
    ],
    ids=str,
)
def test_geometry_is_pillows(ops: list[Op]) -> None:
    found, plan = render(ops, IMAGES), plan_for(ops)
    for i, image in enumerate(IMAGES):
        expected = np.asarray(by_pillow(image, plan, i)).astype(int)
        assert np.abs(expected - found[i].numpy()).max() <= 1, SHAPES[i]


def test_reduced_decoding_stays_close_to_pillow() -> None:
    """Large JPEGs are decoded at 1/2, 1/4 or 1/8; the mean difference to a full decode is under 1.5 of 255."""
    ops: list[Op] = [RandomResizedCrop(64), RandomHorizontalFlip()]
    images = [photo(i, 1200, 1600, grain=40) for i in range(8)]
    plan, recipe = plan_for(ops, images), Recipe(ops)
    assert {4, 8} <= set(plan.boxes.reduce.tolist())
    renderer, finish = Renderer(), Finish(torch.uint8, False, None)
    out = renderer.chunk(1, 64, 64)
    assert recipe.out_size == (64, 64)
    for i, image in enumerate(images):
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=95)
        renderer.render(encoded.getvalue(), plan.jobs()[i], (1200, 1600), out)
        finish.store(out, (out,), plan.jobs()[i : i + 1], out)
        expected = np.asarray(by_pillow(Image.open(encoded), plan, i)).astype(int)
        assert np.abs(expected - out[0].permute(1, 2, 0).numpy()).mean() < 1.5


def test_celeba_is_the_box_of_the_reference_everywhere() -> None:
    """ddpm-torch: torchvision's crop(img, top=40, left=15, height=148, width=148), then Resize((64, 64))."""
    assert (CELEBA_CROP.top, CELEBA_CROP.left, CELEBA_CROP.height, CELEBA_CROP.width) == (40, 15, 148, 148)
    face = photo(5, 218, 178)
    (shown,) = render(celeba(64, train=False), [face], torch.float32).numpy()
    wanted = np.asarray(face.crop((15, 40, 163, 188)).resize((64, 64), Image.Resampling.BILINEAR))
    assert np.abs(shown * 127.5 + 127.5 - wanted).max() < 2
    benchmarks = (Path(__file__).parent.parent / "benchmarks" / "pipeline_job.py").read_text(encoding="utf-8")
    assert "CELEB_BOX = (40, 15, 148, 148)" in benchmarks, "the benchmarks crop another box"


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalised_values(dtype: torch.dtype, planar: bool) -> None:
    geometry: list[Op] = [RandomResizedCrop(40), RandomHorizontalFlip()]
    raw = render(geometry, IMAGES).to(torch.float32) / 255
    found = render([*geometry, Normalize(IMAGENET_MEAN, IMAGENET_STD)], IMAGES, dtype, planar)
    expected = (raw - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert found.dtype == dtype and (found.to(torch.float32) - expected).abs().max() < tolerance
    assert (render(geometry, IMAGES, dtype, planar).to(torch.float32) - raw).abs().max() < 4e-3


def test_rotation_is_pillows() -> None:
    ops: list[Op] = [Resize((120, 90)), RandomRotation(40)]
    found, plan = render(ops, IMAGES), plan_for(ops)
    for i, image in enumerate(IMAGES):
        degrees = float(plan.steps[0][1][i, 0])
        assert -40 <= degrees < 40
        turned = by_pillow(image, plan, i).rotate(degrees, Image.Resampling.BILINEAR)
        inside = by_pillow(Image.new("RGB", image.size, "white"), plan, i).rotate(degrees, Image.Resampling.BILINEAR)
        # Pillow leaves out the pixels that lie half outside; away from the edge nothing differs.
        sure = np.asarray(inside.convert("L").filter(ImageFilter.MinFilter(5))) == 255
        difference = np.abs(np.asarray(turned).astype(int) - found[i].numpy()).max(axis=2)
        inner = np.s_[3:-3, 3:-3]
        assert sure.mean() > 0.3 and difference[inner][sure[inner]].max() <= 2, SHAPES[i]


def test_jitter_is_pillows() -> None:
    ops: list[Op] = [Resize((60, 60)), ColorJitter(0.4, 0.3, 0.6)]
    found, plan = render(ops, IMAGES), plan_for(ops)
    for i, image in enumerate(IMAGES):
        brightness, contrast, saturation = plan.steps[0][1][i]
        assert 0.6 <= brightness < 1.4 and 0.7 <= contrast < 1.3 and 0.4 <= saturation < 1.6
        expected = ImageEnhance.Brightness(by_pillow(image, plan, i)).enhance(brightness)
        expected = ImageEnhance.Color(ImageEnhance.Contrast(expected).enhance(contrast)).enhance(saturation)
        # Pillow rounds down after each of the three steps, and what is lost is multiplied by the next.
        assert np.abs(np.asarray(expected).astype(int) - found[i].numpy()).max() <= 6


def test_blur_is_a_gaussian_with_mirrored_edges() -> None:
    ops: list[Op] = [Resize((30, 44)), GaussianBlur((0.5, 3.0))]
    found, plan = render(ops, IMAGES), plan_for(ops)
    for i, image in enumerate(IMAGES):
        sigma = float(plan.steps[0][1][i, 0])
        values = np.asarray(by_pillow(image, plan, i)).astype(float)
        for axis in (0, 1):
            reach = 20
            weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
            pad = [(reach, reach) if a == axis else (0, 0) for a in range(3)]
            padded = np.pad(values, pad, mode="reflect")
            values = np.apply_along_axis(np.convolve, axis, padded, weights / weights.sum(), "valid")
        assert np.abs(values - found[i].numpy()).max() < 1.0


def test_probabilities() -> None:
    n = 4000
    side = np.full(n, 50)
    ops: list[Op] = [RandomHorizontalFlip(0.25), RandomVerticalFlip(0.75), GaussianBlur(p=0.1)]
    plan = Recipe(ops).plan(1, 0, np.arange(n), side, side)
    assert abs(plan.hflip.mean() - 0.25) < 0.03 and abs(plan.vflip.mean() - 0.75) < 0.03
    assert abs((plan.steps[0][1] > 0).mean() - 0.1) < 0.02
    assert abs(np.corrcoef(plan.hflip, plan.vflip)[0, 1]) < 0.05


def test_epochs_differ_and_repeat() -> None:
    ops: list[Op] = [RandomResizedCrop(32)]
    first, again, other = plan_for(ops), plan_for(ops), plan_for(ops, epoch=1)
    assert np.array_equal(first.boxes.top, again.boxes.top) and np.array_equal(first.boxes.width, again.boxes.width)
    assert not np.array_equal(first.boxes.width, other.boxes.width)
