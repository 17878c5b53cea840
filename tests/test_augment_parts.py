"""Ops on pixels anywhere in a list: what they make is what each op makes by itself, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from augment_cases import LOAD, Pixels, on_a_device, on_the_cpu, photo
from conftest import tree_of
from gpu_doubles import install
from hypothesis import given
from hypothesis import strategies as st
from loader_options import grouped
from torch.utils.data import DataLoader

import readers
from packer.testing.samples import make_image, turned_image
from readers import Decode, Ranks, Views
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    GaussianBlur,
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
)
from readers.augment.geometry import Planner
from readers.augment.recipe import Draws
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset

SEED = 7  # that of augment_cases
IMAGES = [photo(i, *shape) for i, shape in enumerate([(60, 80), (75, 50), (64, 64), (41, 97)])]
RECIPES: dict[str, list[Op]] = {
    "flips": [RandomHorizontalFlip(), RandomVerticalFlip(), RandomResizedCrop(40, scale=(0.5, 1.0))],
    "flips of crops": [
        Crop(3, 5, 33, 30),
        RandomHorizontalFlip(),
        RandomCrop(30),
        RandomVerticalFlip(),
        CenterCrop(21),
    ],
    "flips of padding": [RandomVerticalFlip(), RandomCrop(50, padding=12), RandomHorizontalFlip(), RandomCrop(40)],
    "padding of a crop": [Resize(50), CenterCrop(40), RandomVerticalFlip(), RandomCrop(42, padding=8), CenterCrop(41)],
    "load 1": [*LOAD, Resize(40), CenterCrop(32)],
    "load 4": [*LOAD * 4, Resize(40, "bicubic"), CenterCrop(32), RandomHorizontalFlip()],
    "load of crops": [RandomCrop(40), *LOAD * 2, Resize(31)],
    "three parts": [
        Resize(48),
        ColorJitter(0.4, 0.4, 0.4, 0.1),
        RandomVerticalFlip(),
        RandomCrop(40, padding=4),
        RandomErasing(0.9, value="random"),
        RandomHorizontalFlip(),
        RandAugment(),
        CenterCrop(33),
        RandomRotation(10),
        RandomVerticalFlip(),
    ],
    "two resizes": [Resize(50), GaussianBlur(), RandomResizedCrop(24)],
}


def step_by_step(ops: Sequence[Op], image: Pixels, position: int, epoch: int = 0, seed: int = SEED) -> Pixels:
    """Each op by itself on what the op before it made; whole values before each crop or resize, and at the end.

    Flips behind the last crop or resize come right after it.
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


def fixed(ops: Sequence[Op]) -> list[Op]:
    """The same list with results of one size."""
    return [*ops] if Recipe(ops).out_size else [*ops, CenterCrop(20)]


@pytest.mark.parametrize("render", [on_the_cpu, on_a_device])
@pytest.mark.parametrize("name", RECIPES)
def test_a_list_is_its_ops_one_after_another(
    name: str, render: Callable[[list[Op], list[Pixels]], torch.Tensor]
) -> None:
    ops = fixed(RECIPES[name])
    found = render(ops, IMAGES).permute(0, 2, 3, 1).numpy()
    for position, (image, ours) in enumerate(zip(IMAGES, found, strict=True)):
        assert np.array_equal(step_by_step(ops, image, position), ours), position


POOL: list[Op] = [
    *(RandomHorizontalFlip(), RandomVerticalFlip(), RandomRotation(25), ColorJitter(0.3, 0.3), RandomGrayscale(0.5)),
    *(RandomErasing(), GaussianBlur(), TrivialAugmentWide(), RandomCrop(30), CenterCrop((33, 31)), Crop(2, 3, 34, 35)),
    *(RandomCrop(40, padding=8), Resize((36, 38)), RandomResizedCrop(35, scale=(0.6, 1.0))),
]


@given(st.lists(st.sampled_from(POOL), min_size=1, max_size=7), st.integers(0, 3))
def test_any_list_that_is_taken_is_its_ops_one_after_another(ops: list[Op], number: int) -> None:
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
        ours = on_the_cpu(ops, [image])[0].permute(1, 2, 0).numpy()
        assert np.array_equal(step_by_step(ops, image, 0), ours)


def test_ops_of_one_kind_draw_apart_and_others_as_ever() -> None:
    """The draws of an op belong to its place in the list, and to nothing that comes before or behind it."""
    n, sides = 2000, np.full(2000, 100)
    ops = [RandomRotation(30), RandomRotation(30), RandomCrop(40), RandomRotation(30)]
    plan = Recipe(ops).plan(1, 0, np.arange(n), sides, sides)
    turns = [values[:, 0] for part in (*plan.before, plan) for _, values in part.steps]
    assert len(turns) == 3 and np.abs(np.corrcoef(turns) - np.eye(3)).max() < 0.08
    alone = Recipe([*[CenterCrop(100)] * 3, RandomRotation(30)]).plan(1, 0, np.arange(n), sides, sides)
    assert np.array_equal(alone.steps[0][1][:, 0], turns[2])


def test_what_is_decoded_smaller_and_what_is_not() -> None:
    """Flips leave that as it is; ops on pixels work on the whole image, at its full size."""
    size = np.array([800]), np.array([1000])
    plain, flipped, turned = (
        Recipe([*first, Resize((90, 100))]).plan(0, 0, np.array([0]), *size)
        for first in ([], [RandomHorizontalFlip(1.0)], [RandomRotation(5)])
    )
    assert plain.boxes.reduce.item() == flipped.boxes.reduce.item() == 4 and flipped.hflip.all() and not flipped.before
    (first,) = turned.before
    assert first.boxes.reduce.item() == turned.boxes.reduce.item() == 1 and not first.boxes.coarse.any()
    assert (first.boxes.out_height.item(), first.boxes.out_width.item()) == (800, 1000)


def test_a_crop_that_does_not_fit_is_a_bad_sample_in_every_part() -> None:
    for ops in ([CenterCrop(70), RandomRotation(5), Resize(8)], [RandomRotation(5), CenterCrop(70), Resize(8)]):
        plan = Recipe(ops).plan(0, 0, np.arange(2), np.array([60, 90]), np.array([90, 90]))
        assert [*plan.boxes.bad] == [0] and "CenterCrop(size=70) does not fit into the 60 x 90" in str(
            plan.boxes.bad[0]
        )


# --- through the loaders ----------------------------------------------------------------------------------------------
OPS: list[Op] = [*LOAD, ColorJitter(0.4, 0.4, 0.4, 0.1), RandomResizedCrop(40, scale=(0.6, 1.0)), *LOAD]


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    """13 images of several sizes, upright and turned."""
    files = {f"{number:02d}.jpg": turned_image(number, (72 + 4 * (number % 5), 64)) for number in range(13)}
    return readers.open_folder(tree_of(tmp_path, files))


def batches(loader: ImageLoader) -> list[torch.Tensor]:
    return [images.clone() for images, _ in loader]


def test_loaders_make_the_same_of_any_file(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"augment": OPS, "shuffle": False, "seed": 3, "tail": "exact"}
    made = torch.cat(batches(ImageLoader(reader, 5, **grouped({"threads": 1, **options}))))
    for position, image in enumerate(made):
        expected = step_by_step(OPS, decode_image(reader.read(position)), position, seed=3)
        assert np.array_equal(expected, image.permute(1, 2, 0).numpy())
    assert torch.equal(torch.cat(batches(ImageLoader(reader, 3, **grouped({"threads": 3, **options})))), made)
    install(monkeypatch, "torchcodec")  # a double: whole pictures, which the renderer for devices continues with
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


def test_views_and_values(reader: readers.Reader) -> None:
    small: list[Op] = [RandomRotation(20), RandomResizedCrop(16), Normalize((0.5,) * 3, (0.5,) * 3)]
    loader = ImageLoader(reader, 13, augment=Views([[*OPS, small[2]], small]), shuffle=False, seed=3)
    ((first, second), _) = next(iter(loader))
    alone = next(iter(ImageLoader(reader, 13, augment=[*OPS, small[2]], shuffle=False, seed=3)))[0]
    assert torch.equal(first, alone) and second.shape == (13, 3, 16, 16) and second.dtype == torch.float32


def test_a_resume_and_replaced_samples(reader: readers.Reader, tmp_path: Path) -> None:
    (tmp_path / "04.jpg").write_bytes(make_image(4, (80, 64))[:300])
    damaged = readers.open_folder(tmp_path)

    def loader() -> ImageLoader:
        return ImageLoader(damaged, 4, augment=OPS, seed=5, ranks=Ranks(tail="exact"), on_error="substitute", threads=2)

    with pytest.warns(UserWarning, match="1 bad samples were replaced"):
        whole = batches(loader())
    begun, resumed = loader(), loader()
    under_way = iter(begun)
    next(under_way)
    resumed.load_state_dict(begun.state_dict())
    rest = [images.clone() for images, _ in resumed]
    assert len(rest) == 3 and all(map(torch.equal, whole[1:], rest))
    assert len({*(sample.key for sample in (*begun.bad_samples, *resumed.bad_samples))}) == 1
