"""Random numbers and plans are functions of (seed, epoch, position); executors of a plan give Pillow's pixels of its
boxes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from augment_cases import LOAD, Pixels, by_pillow, on_a_device, on_the_cpu, photo, plan_for
from conftest import tree_of
from gpu_doubles import install
from hypothesis import given
from hypothesis import strategies as st
from loader_options import grouped
from PIL import Image
from torch.utils.data import DataLoader

import readers
from packer.testing.samples import turned_image
from readers import Decode
from readers.augment import (
    CELEBA_CROP,
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    ColorJitter,
    Crop,
    CutMix,
    GaussianBlur,
    MixUp,
    Normalize,
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
    Stage,
    TrivialAugmentWide,
    celeba,
)
from readers.augment.cpu import Finish, Renderer
from readers.augment.geometry import Planner
from readers.augment.recipe import Draws
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset

GOLDEN_DRAWS = [
    [0.06129853269258523, 0.7862675594894247],
    [0.6905305514593247, 0.8003918444291133],
    [0.962136071366859, 0.6614079533884544],
]
SHAPES = [(375, 500), (500, 333), (64, 64), (40, 900), (601, 803), (1200, 1600)]
IMAGES = [photo(i, *shape) for i, shape in enumerate(SHAPES)]


# --- draws --------------------------------------------------------------------------------------------------------
def test_draws_are_frozen() -> None:
    """A change here would change every augmentation of every resumed run."""
    assert Draws(0, 0, np.array([0, 1, 10**12])).uniform(0, 2).tolist() == GOLDEN_DRAWS


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
def test_random_boxes_are_inside(shapes: list[tuple[int, int]], seed: int, scale: tuple[float, float]) -> None:
    sizes = np.array(shapes)
    recipe = Recipe([RandomResizedCrop(64, scale=scale)])
    boxes = recipe.plan(seed, 0, np.arange(len(shapes)), sizes[:, 0], sizes[:, 1]).boxes
    assert not boxes.bad
    for start, length, limit in ((boxes.top, boxes.height, sizes[:, 0]), (boxes.left, boxes.width, sizes[:, 1])):
        assert (start >= 0).all() and (length > 0).all() and (start + length <= limit).all()
        assert (start % boxes.reduce == 0).all()
        assert ((length % boxes.reduce == 0) | (start + length == limit)).all()
        assert (length >= boxes.reduce * 64).all() or (boxes.reduce == 1).any()


def test_random_boxes_follow_scale_and_ratio() -> None:
    n = 20_000
    side = np.full(n, 1000)
    boxes = Recipe([RandomResizedCrop(900, ratio=(0.5, 2.0))]).plan(3, 0, np.arange(n), side, side).boxes
    area, ratio = boxes.height * boxes.width / 1e6, boxes.width / boxes.height
    assert area.min() > 0.079 and area.max() <= 1.0 and ratio.min() > 0.49 and ratio.max() < 2.02
    small = area < 0.4  # for boxes that fit at any ratio the area is uniform, and so is the logarithm of the ratio
    counts = np.histogram(area[small], 8, (0.08, 0.4))[0]
    assert np.ptp(counts) < 6 * np.sqrt(counts.mean())
    assert abs(np.log(ratio[small]).mean()) < 0.02
    room = 1000 - boxes.height[small]
    assert abs((boxes.top[small] / room).mean() - 0.5) < 0.02 and boxes.top[small].min() == 0


def test_the_central_box_is_used_where_no_box_fits() -> None:
    boxes = plan_for([RandomResizedCrop(8, scale=(0.9, 1.0))], [np.zeros((10, 400, 3))]).boxes
    assert (boxes.height[0], boxes.width[0]) == (10, 13) and boxes.left[0] == (400 - 13) // 2


def test_random_crops_reach_every_position_of_the_padded_image() -> None:
    boxes = plan_for([RandomCrop((44, 50), padding=(2, 8))], [np.zeros((48, 40, 3))] * 400).boxes
    assert {*boxes.crop_top.tolist()} == {*range(-2, 7)} and {*boxes.crop_left.tolist()} == {*range(-8, -1)}


def test_resize_keeps_the_proportions() -> None:
    boxes = plan_for([Resize(100)], IMAGES).boxes
    for (height, width), h, w in zip(SHAPES, boxes.out_height, boxes.out_width, strict=True):
        assert min(h, w) == 100 and max(h, w) == 100 * max(height, width) // min(height, width)


def test_a_crop_that_does_not_fit_is_a_bad_sample_in_every_part() -> None:
    bad = plan_for([CenterCrop(200)], IMAGES).boxes.bad
    assert sorted(bad) == [2, 3] and "CenterCrop(size=200) does not fit into the 64 x 64 pixels" in str(bad[2])
    bad = plan_for([RandomCrop(80, padding=4)], IMAGES).boxes.bad
    assert "RandomCrop(size=80, padding=4) does not fit into the 64 x 64 pixels" in str(bad[2])
    for ops in ([CenterCrop(70), RandomRotation(5), Resize(8)], [RandomRotation(5), CenterCrop(70), Resize(8)]):
        bad = plan_for(ops, [np.zeros((60, 90, 3)), np.zeros((90, 90, 3))]).boxes.bad
        assert [*bad] == [0] and "CenterCrop(size=70) does not fit into the 60 x 90" in str(bad[0])


def test_probabilities() -> None:
    ops: list[Op] = [RandomHorizontalFlip(0.25), RandomVerticalFlip(0.75), GaussianBlur(p=0.1)]
    plan = plan_for(ops, [np.zeros((50, 50, 3))] * 4000)
    assert abs(plan.hflip.mean() - 0.25) < 0.03 and abs(plan.vflip.mean() - 0.75) < 0.03
    assert abs((plan.steps[0][1] > 0).mean() - 0.1) < 0.02
    assert abs(np.corrcoef(plan.hflip, plan.vflip)[0, 1]) < 0.05


# --- refused arguments --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe([RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD), Resize(8)]), "Normalize last"),
        (lambda: Recipe([Resize(9), GaussianBlur(), Resize(8, "bicubic")]), "one interpolation, not bilinear and bic"),
        (lambda: Recipe([Resize(8), RandomResizedCrop(8)]), "second resize"),
        (lambda: Recipe([MixUp(), RandomHorizontalFlip()]), "comes after an op on batches; put those last"),
        (lambda: Recipe([RandomCrop(32, padding=4), Resize(20)]), "after RandomCrop with padding; resize first"),
        (lambda: Recipe([lambda image: image]), "not an op of readers.augment"),  # type: ignore[list-item]
        (lambda: RandomResizedCrop(0), "RandomResizedCrop: a size"),
        (lambda: Resize((1, 2, 3)), "Resize: a size"),  # type: ignore[arg-type]
        (lambda: Resize(8, "lanczos"), "interpolation is one of bilinear, bicubic, not 'lanczos'"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "scale is"),
        (lambda: Crop(-1, 0, 4, 4), "a corner"),
        (lambda: RandomCrop(8, padding=-1), "RandomCrop: padding is"),
        (lambda: RandomHorizontalFlip(1.5), "p is"),
        (lambda: RandomRotation(-4), "degrees is"),
        (lambda: RandomRotation(4, "bicubic"), "interpolation is"),  # type: ignore[arg-type]
        (lambda: ColorJitter(contrast=-1), "contrast is"),
        (lambda: ColorJitter(hue=0.7), "hue is"),
        (lambda: GaussianBlur((0.0, 1.0)), "sigma is"),
        (lambda: GaussianBlur(9), "sigma is"),  # type: ignore[arg-type]  # torchvision's first argument
        (lambda: Normalize((0, 0, 0), (1, 0, 1)), "Normalize"),
        (lambda: RandomErasing(value=300), "RandomErasing: value is"),
        (lambda: RandAugment(num_ops=0), "RandAugment: num_ops is from 1 to 16, not 0"),
        (lambda: RandAugment(magnitude=31), "RandAugment: magnitude is from 0 to num_magnitude_bins - 1"),
        (lambda: TrivialAugmentWide(1), "num_magnitude_bins is 2 or more"),
        (lambda: MixUp(0.0), "MixUp: alpha is above 0"),
        (lambda: CutMix(p=2), "CutMix: p is a probability"),
    ],
)
def test_invalid_lists_and_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- pixels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("render", [on_the_cpu, on_a_device])
@pytest.mark.parametrize(
    "ops",
    [
        [RandomResizedCrop(224), RandomHorizontalFlip()],
        [RandomResizedCrop((50, 80)), RandomHorizontalFlip(), RandomVerticalFlip()],
        [RandomResizedCrop((24, 30), interpolation="bicubic")],
        [Resize(48), CenterCrop(40)],
        [Resize((100, 30)), RandomVerticalFlip(1.0)],
        [CenterCrop((38, 60)), Resize(64), RandomCrop(50), RandomHorizontalFlip()],
        [Crop(3, 5, 30, 40), Resize((30, 40))],
        [Resize((48, 40)), RandomCrop((44, 50), padding=(2, 8)), RandomHorizontalFlip()],
    ],
    ids=str,
)
def test_geometry_equals_pillow(ops: list[Op], render: Callable[[list[Op], list[Pixels]], torch.Tensor]) -> None:
    images, rendered, plan = IMAGES[:5], render(ops, IMAGES[:5]).permute(0, 2, 3, 1).numpy(), plan_for(ops, IMAGES[:5])
    bicubic = Recipe(ops).interpolation == "bicubic"
    for i, image in enumerate(images):
        how = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        expected = np.asarray(by_pillow(image, plan, i, how)).astype(int)
        assert np.abs(expected - rendered[i]).max() <= 1, SHAPES[i]


def test_reduced_decoding_stays_close_to_pillow() -> None:
    """Large JPEGs are decoded at 1/2, 1/4 or 1/8; the mean difference from a full decode is under 1.5 of 255."""
    ops: list[Op] = [RandomResizedCrop(64), RandomHorizontalFlip()]
    images = [photo(i, 1200, 1600, grain=40) for i in range(8)]
    plan = plan_for(ops, images)
    assert {4, 8} <= set(plan.boxes.reduce.tolist())
    renderer, finish = Renderer(), Finish(torch.uint8, False, None)
    out = renderer.chunk(1, 64, 64)
    for i, (image, job) in enumerate(zip(images, plan.jobs(), strict=True)):
        encoded = io.BytesIO()
        Image.fromarray(image).save(encoded, "JPEG", quality=95)
        left = renderer.render(encoded.getvalue(), job, (1200, 1600), out)
        finish.store(out, (out,), [left], out)
        expected = np.asarray(by_pillow(np.asarray(Image.open(encoded)), plan, i)).astype(int)
        assert np.abs(expected - out[0].permute(1, 2, 0).numpy()).mean() < 1.5


def test_celeba_is_the_box_of_the_reference_everywhere() -> None:
    """ddpm-torch: torchvision's crop(img, top=40, left=15, height=148, width=148), then Resize((64, 64))."""
    assert (CELEBA_CROP.top, CELEBA_CROP.left, CELEBA_CROP.height, CELEBA_CROP.width) == (40, 15, 148, 148)
    face = photo(5, 218, 178)
    shown = on_the_cpu(celeba(64, train=False), [face], torch.float32)[0].permute(1, 2, 0).numpy()
    reference = np.asarray(Image.fromarray(face).crop((15, 40, 163, 188)).resize((64, 64), Image.Resampling.BILINEAR))
    assert np.abs(shown * 127.5 + 127.5 - reference).max() < 2


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_normalised_values(dtype: torch.dtype, tolerance: float, planar: bool) -> None:
    geometry: list[Any] = [RandomResizedCrop(40), RandomHorizontalFlip()]
    raw = on_the_cpu(geometry, IMAGES).to(torch.float32) / 255
    normalised = on_the_cpu([*geometry, Normalize(IMAGENET_MEAN, IMAGENET_STD)], IMAGES, dtype, planar)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    assert normalised.dtype == dtype and (normalised.to(torch.float32) - (raw - mean) / std).abs().max() < tolerance
    assert (on_the_cpu(geometry, IMAGES, dtype, planar).to(torch.float32) - raw).abs().max() < 4e-3


# Ops on pixels at any place in a list: their result equals that of the single ops, one after another.


SEED = 7  # the plan of augment_cases
SMALL = [photo(i, *shape) for i, shape in enumerate([(60, 80), (75, 50), (64, 64), (41, 97)])]
RECIPES: dict[str, list[Op]] = {
    "padding of a crop": [Resize(50), CenterCrop(40), RandomVerticalFlip(), RandomCrop(42, padding=8), CenterCrop(41)],
    "load 4": [*LOAD * 4, Resize(40, "bicubic"), CenterCrop(32), RandomHorizontalFlip()],
    "load of crops": [RandomCrop(40), *LOAD * 2, Resize(31)],
    "three parts": [
        *(Resize(48), ColorJitter(0.4, 0.4, 0.4, 0.1), RandomVerticalFlip(), RandomCrop(40, padding=4)),
        *(RandomErasing(0.9, value="random"), RandomHorizontalFlip(), RandAugment(), CenterCrop(33)),
        *(RandomRotation(10), RandomVerticalFlip()),
    ],
    "two resizes": [Resize(50), GaussianBlur(), RandomResizedCrop(24)],
}


def step_by_step(ops: Sequence[Op], image: Pixels, position: int, epoch: int = 0, seed: int = SEED) -> Pixels:
    """Each op alone, on the result of the op before it; values are rounded before each crop or resize, and at the end.

    Flips after the last crop or resize are moved directly behind it.
    """
    numbered = list(enumerate(ops))
    last = max(i for i, op in numbered if op.stage is Stage.GEOMETRY) + 1
    numbered[last:] = sorted(numbered[last:], key=lambda pair: not pair[1].flip_axis)
    draws = Draws(seed, epoch, np.array([position]))
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float().contiguous()
    for stream, op in numbered:
        planner = Planner(np.array([values.shape[2]]), np.array([values.shape[3]]))
        op.plan(planner, draws.uniform(stream, op.draws))
        plan = planner.plan()
        (((top, left, height, width, reduce, _), resized, corner, flips, steps, _),) = plan.passes()
        assert reduce == 1, "the box would be moved to the grid of a smaller scale"
        if op.stage is Stage.GEOMETRY:
            box = values.round()[:, :, top : top + height, left : left + width].to(torch.uint8)
            if resized != (height, width):
                box = F.interpolate(box, resized, mode=op.resize_filter or "", antialias=True, align_corners=False)
            size = int(plan.boxes.out_height[0]), int(plan.boxes.out_width[0])
            wide = F.pad(box.float(), (64, 64, 64, 64))
            top, left = corner[0] + 64, corner[1] + 64
            values = wide[:, :, top : top + size[0], left : left + size[1]].contiguous()
        values = values.flip(flips)
        for step, parameters in steps:
            values = step.apply(values, (parameters,))
    return np.asarray(values.round()[0].permute(1, 2, 0).to(torch.uint8).numpy())


@pytest.mark.parametrize("render", [on_the_cpu, on_a_device])
@pytest.mark.parametrize("name", RECIPES)
def test_a_list_is_its_ops_one_after_another(
    name: str, render: Callable[[list[Op], list[Pixels]], torch.Tensor]
) -> None:
    ops = RECIPES[name]
    rendered = render(ops, SMALL).permute(0, 2, 3, 1).numpy()
    for position, (image, pixels) in enumerate(zip(SMALL, rendered, strict=True)):
        assert np.array_equal(step_by_step(ops, image, position), pixels), position


POOL: list[Op] = [
    *(RandomHorizontalFlip(), RandomVerticalFlip(), RandomRotation(25), ColorJitter(0.3, 0.3), RandomGrayscale(0.5)),
    *(RandomErasing(), GaussianBlur(), TrivialAugmentWide(), RandomCrop(30), CenterCrop((33, 31)), Crop(2, 3, 34, 35)),
    *(RandomCrop(40, padding=8), Resize((36, 38)), RandomResizedCrop(35, scale=(0.6, 1.0))),
]


@given(st.lists(st.sampled_from(POOL), min_size=1, max_size=7), st.integers(0, 3))
def test_any_valid_list_is_its_ops_one_after_another(ops: list[Op], number: int) -> None:
    ops = [*ops, CenterCrop(20)]
    try:
        Recipe(ops)
    except ValueError as error:
        assert "resize" in str(error)
        return
    image = photo(number, 60 + number, 80 - 4 * number)
    plan = Recipe(ops).plan(SEED, 0, np.array([0]), np.array([image.shape[0]]), np.array([image.shape[1]]))
    if plan.boxes.bad:
        assert "does not fit" in str(plan.boxes.bad[0])
    else:
        pixels = on_the_cpu(ops, [image])[0].permute(1, 2, 0).numpy()
        assert np.array_equal(step_by_step(ops, image, 0), pixels)


def test_ops_of_one_kind_draw_independently() -> None:
    """The random numbers of an op depend on its place in the list, and not on the ops before or after it."""
    n, sides = 2000, np.full(2000, 100)
    ops = [RandomRotation(30), RandomRotation(30), RandomCrop(40), RandomRotation(30)]
    plan = Recipe(ops).plan(1, 0, np.arange(n), sides, sides)
    turns = [values[:, 0] for part in (*plan.before, plan) for _, values in part.steps]
    assert len(turns) == 3 and np.abs(np.corrcoef(turns) - np.eye(3)).max() < 0.08
    alone = Recipe([*[CenterCrop(100)] * 3, RandomRotation(30)]).plan(1, 0, np.arange(n), sides, sides)
    assert np.array_equal(alone.steps[0][1][:, 0], turns[2])


def test_images_are_decoded_reduced_where_ops_allow_it() -> None:
    """Flips keep the reduced scale; ops on pixels work on the whole image at full size."""
    size = np.array([800]), np.array([1000])
    plain, flipped, turned = (
        Recipe([*first, Resize((90, 100))]).plan(0, 0, np.array([0]), *size)
        for first in ([], [RandomHorizontalFlip(1.0)], [RandomRotation(5)])
    )
    assert plain.boxes.reduce.item() == flipped.boxes.reduce.item() == 4 and flipped.hflip.all() and not flipped.before
    (first,) = turned.before
    assert first.boxes.reduce.item() == turned.boxes.reduce.item() == 1 and not first.boxes.coarse.any()
    assert (first.boxes.out_height.item(), first.boxes.out_width.item()) == (800, 1000)


# --- through the loaders ----------------------------------------------------------------------------------------------
OPS: list[Op] = [*LOAD, ColorJitter(0.4, 0.4, 0.4, 0.1), RandomResizedCrop(40, scale=(0.6, 1.0)), *LOAD]


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    """13 images of various sizes, upright and rotated."""
    files = {f"{number:02d}.jpg": turned_image(number, (72 + 4 * (number % 5), 64)) for number in range(13)}
    return readers.open_folder(tree_of(tmp_path, files))


def batches(loader: ImageLoader) -> list[torch.Tensor]:
    return [images.clone() for images, _ in loader]


def test_all_loaders_give_the_same_pixels(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"augment": OPS, "shuffle": False, "seed": 3, "tail": "exact"}
    made = torch.cat(batches(ImageLoader(reader, 5, **grouped({"threads": 1, **options}))))
    for position, image in enumerate(made):
        expected = step_by_step(OPS, decode_image(reader.read(position)), position, seed=3)
        assert np.array_equal(expected, image.permute(1, 2, 0).numpy())
    assert torch.equal(torch.cat(batches(ImageLoader(reader, 3, **grouped({"threads": 3, **options})))), made)
    install(monkeypatch, "torchcodec")  # a double: whole images, which the renderer for devices continues with
    assert torch.equal(
        torch.cat(batches(ImageLoader(reader, 5, **grouped({"decode": Decode(decoder="torchcodec"), **options})))), made
    )
    order = Shuffled(len(reader), 3)
    dataset = ImageDataset(reader, transform=OPS)
    rows = order.indices(0, np.arange(len(reader))).tolist()
    items = [image for image, _ in DataLoader(dataset, None, sampler=EpochSampler(order, dataset))]
    for position, (row, image) in enumerate(zip(rows, items, strict=False)):
        expected = step_by_step(OPS, decode_image(reader.read(row)), position, seed=3)
        assert np.array_equal(expected, image.permute(1, 2, 0).numpy())
    assert len(items) == len(reader)
