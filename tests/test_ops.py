"""Every op keeps the contract of `readers.augment.ops.base`, and computes the function defined in its source.

References are Pillow (`ImageOps`, `ImageEnhance`, `Image.transform`), colorsys, and formulas of the papers;
torchvision is not needed.
"""

from __future__ import annotations

import colorsys
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from augment_cases import Pixels, photo
from conftest import make_jpeg, tree_of
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

import readers
from readers import Decode, Ranks, augment
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    CutMix,
    GaussianBlur,
    MixUp,
    Normalize,
    Op,
    Plan,
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
    ResizeToBucket,
    Stage,
    TrivialAugmentWide,
)
from readers.augment.recipe import Draws
from readers.loader import ImageLoader

SIZE = (48, 40)
COUNT = 24
# One op of each kind, with parameters that change most images.
EXAMPLES: list[Op] = [
    CenterCrop(30),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    Crop(2, 3, 20, 30),
    CutMix(),
    GaussianBlur((0.5, 2.0), p=0.7),
    MixUp(0.2),
    Normalize((0.5,) * 3, (0.2,) * 3),
    RandAugment(),
    RandomCrop(38, padding=4),
    ResizeToBucket(((24, 48), (40, 40), (48, 24)), "random"),
    RandomErasing(value="random"),
    RandomGrayscale(0.5),
    RandomHorizontalFlip(),
    RandomResizedCrop(32),
    RandomRotation(30),
    RandomVerticalFlip(),
    Resize((20, 30), interpolation="bicubic"),
    TrivialAugmentWide(),
]
ON_PIXELS = [op for op in EXAMPLES if op.stage is Stage.PIXELS and not op.flip_axis]


def example_name(op: Op) -> str:
    return type(op).__name__


def plan_for(ops: list[Op], count: int = COUNT, epoch: int = 0, size: tuple[int, int] = SIZE) -> Plan:
    heights, widths = np.full(count, size[0]), np.full(count, size[1])
    return Recipe(ops).plan(5, epoch, np.arange(count), heights, widths)


def photos(count: int = COUNT, size: tuple[int, int] = SIZE) -> Pixels:
    """uint8 [n, height, width, 3]."""
    return np.stack([photo(i, *size, grain=6) for i in range(count)])


def tensors(images: Pixels) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32).contiguous()


def arrays(images: torch.Tensor) -> Pixels:
    return np.asarray(images.permute(0, 2, 3, 1).numpy())


def changed(op: Op, images: Pixels) -> tuple[Pixels, Pixels]:
    """(the result of `op` for these images, its parameters)."""
    ((_, parameters),) = plan_for([op], len(images), size=images.shape[1:3]).steps
    return arrays(op.apply(tensors(images), parameters.tolist()).round()), parameters


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    files = {f"{'abc'[i % 3]}/{i:02d}.jpg": make_jpeg(i, (SIZE[1], SIZE[0])) for i in range(COUNT)}
    return readers.open_folder(tree_of(tmp_path / "images", files))


# --- the contract -----------------------------------------------------------------------------------------------------
def test_every_op_has_an_example() -> None:
    ops = {name for name in augment.ops.__all__ if isinstance(getattr(augment, name), type)}
    ops -= {"AspectBuckets", "Op", "Stage"}
    assert {type(op).__name__ for op in EXAMPLES} == ops


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_an_op_is_a_value(op: Op) -> None:
    assert pickle.loads(pickle.dumps(op)) == op and hash(op) == hash(pickle.loads(pickle.dumps(op)))
    assert eval(repr(op), vars(augment)) == op
    with pytest.raises(FrozenInstanceError):
        setattr(op, fields(op)[0].name, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_the_change_of_an_image_depends_on_its_position_alone(op: Op) -> None:
    together = plan_for([op]).jobs()
    row = np.array([1])
    alone = [Recipe([op]).plan(5, 0, row * i, row * SIZE[0], row * SIZE[1]).jobs()[0] for i in reversed(range(COUNT))]
    assert together == alone[::-1] and plan_for([op]).jobs() == together
    if op.draws and op.stage is not Stage.BATCH:
        assert plan_for([op], epoch=1).jobs() != together


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_the_promised_size(op: Op) -> None:
    boxes, size = plan_for([op]).boxes, Recipe([op]).out_size
    if op.stage is Stage.GEOMETRY:
        if isinstance(op, ResizeToBucket):  # no size is promised for images of unknown size
            assert size is None
            size = op.size_after(SIZE)
        assert size is not None
        assert {*zip(boxes.out_height.tolist(), boxes.out_width.tolist(), strict=True)} == {size}
    else:
        assert size is None and Recipe([Resize((9, 8)), op]).out_size == (9, 8)


@pytest.mark.parametrize("op", ON_PIXELS, ids=example_name)
def test_a_batch_is_changed_like_its_single_images(op: Op) -> None:
    images = tensors(photos())
    ((_, parameters),) = plan_for([op]).steps
    rows = parameters.tolist()
    together = op.apply(images.clone(), rows)
    alone = torch.cat([op.apply(images[i : i + 1].clone(), rows[i : i + 1]) for i in range(COUNT)])
    assert together.shape == images.shape and together.dtype == torch.float32
    assert torch.allclose(together, alone, atol=2e-3)
    assert not torch.allclose(together, images, atol=1.0)
    assert float(together.min()) >= -0.01 and float(together.max()) <= 255.01


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_threads_and_a_resume_change_no_result(op: Op, reader: readers.Reader) -> None:
    ops = [op] if op.stage is Stage.GEOMETRY else [CenterCrop(32), op]

    def loader(threads: int) -> ImageLoader:
        return ImageLoader(
            reader, 5, augment=ops, seed=4, threads=threads, decode=Decode(layout="NCHW"), ranks=Ranks(tail="exact")
        )

    expected = [images.clone() for images, _ in loader(1)]
    assert all(map(torch.equal, expected, (images for images, _ in loader(3))))
    begun, resumed = loader(2), loader(2)
    under_way = iter(begun)
    next(under_way), next(under_way)
    resumed.load_state_dict(begun.state_dict())
    assert all(map(torch.equal, expected[2:], (images for images, _ in resumed))) and len(expected) == 5


# --- the result of each op --------------------------------------------------------------------------------------------
def test_greyscale_equals_pillow() -> None:
    results, parameters = changed(RandomGrayscale(0.5), photos())
    grey = parameters[:, 0] == 0
    assert 5 < grey.sum() < 19
    for image, result, without_colour in zip(photos(), results, grey, strict=True):
        expected = np.asarray(Image.fromarray(image).convert("L").convert("RGB")) if without_colour else image
        assert np.abs(result - expected).max() <= 1


def test_hue_rotation_equals_colorsys() -> None:
    images = np.random.default_rng(3).integers(0, 256, (6, 5, 4, 3), np.uint8)
    images[0, 0] = 77  # grey has no hue
    results, parameters = changed(ColorJitter(hue=0.5), images)
    assert np.ptp(parameters[:, 3]) > 0.3 and np.abs(parameters[:, 3]).max() <= 0.5
    for place in np.ndindex(images.shape[:3]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(images[place] / 255))
        expected = colorsys.hsv_to_rgb((hue + parameters[place[0], 3]) % 1, saturation, value)
        assert np.abs(results[place] - 255 * np.array(expected)).max() <= 0.51


def test_rotation_equals_pillow() -> None:
    images = photos(size=(120, 90))
    white = Image.new("RGB", (90, 120), "white")
    (results, parameters), (nearest, same) = (changed(RandomRotation(40, *how), images) for how in ((), ("nearest",)))
    assert np.array_equal(parameters, same) and (np.abs(parameters) <= 40).all()
    for image, result, other, (degrees,) in zip(images, results, nearest, parameters.tolist(), strict=True):
        turned, inside = (
            picture.rotate(degrees, Image.Resampling.BILINEAR) for picture in (Image.fromarray(image), white)
        )
        # Pillow leaves out pixels that are half outside; away from the edge all pixels are equal.
        sure = np.asarray(inside.convert("L").filter(ImageFilter.MinFilter(5)))[3:-3, 3:-3] == 255
        apart = np.abs(np.asarray(turned).astype(int) - result).max(axis=2)[3:-3, 3:-3]
        assert sure.mean() > 0.3 and apart[sure].max() <= 2
        # Pillow counts in 1/65536 of a pixel: where two pixels are equally near, either may be chosen.
        turned = Image.fromarray(image).rotate(degrees, Image.Resampling.NEAREST)
        assert (np.asarray(turned) != other).any(axis=2).mean() < 0.005


def test_jitter_equals_pillow() -> None:
    results, parameters = changed(ColorJitter(0.4, 0.3, 0.6), photos())
    for image, result, (brightness, contrast, saturation) in zip(photos(), results, parameters, strict=True):
        assert 0.6 <= brightness < 1.4 and 0.7 <= contrast < 1.3 and 0.4 <= saturation < 1.6
        expected = ImageEnhance.Brightness(Image.fromarray(image)).enhance(brightness)
        expected = ImageEnhance.Color(ImageEnhance.Contrast(expected).enhance(contrast)).enhance(saturation)
        # Pillow rounds down after each of the three steps, and the next step multiplies the error.
        assert np.abs(np.asarray(expected).astype(int) - result).max() <= 6


@pytest.mark.parametrize("size", [(30, 44), (530, 20), (8, 700)])
def test_blur_is_a_gaussian_with_mirrored_edges(size: tuple[int, int]) -> None:
    images = photos(6, size)
    results, parameters = changed(GaussianBlur((0.5, 3.0)), images)
    reach = 20
    for image, result, (sigma,) in zip(images, results, parameters.tolist(), strict=True):
        weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
        values = image.astype(float)
        for axis in (0, 1):
            pad = [(reach, reach) if a == axis else (0, 0) for a in range(3)]
            padded = np.pad(values, pad, mode="reflect")
            values = np.apply_along_axis(np.convolve, axis, padded, weights / weights.sum(), "valid")
        assert np.abs(values - result).max() < 1.0


def test_erasing_fills_boxes_of_the_given_area_and_ratio() -> None:
    n, op = 4000, RandomErasing(0.75, value=(10, 20, 30))
    ((_, parameters),) = plan_for([op], n, size=(100, 80)).steps
    top, left, height, width, _ = parameters.T
    erased = height > 0
    assert abs(erased.mean() - 0.75) < 0.03
    area, ratio = (height * width / 8000)[erased], (height / np.maximum(width, 1))[erased]
    assert area.min() > 0.015 and area.max() < 0.34 and abs(area.mean() - (0.02 + 0.33) / 2) < 0.02
    assert ratio.min() > 0.25 and ratio.max() < 3.8
    assert (top >= 0).all() and (top + height <= 100).all() and (left >= 0).all() and (left + width <= 80).all()
    images = photos()
    results, parameters = changed(op, images)
    for image, result, row in zip(images, results, parameters.astype(int), strict=True):
        expected = image.copy()
        expected[row[0] : row[0] + row[2], row[1] : row[1] + row[3]] = (10, 20, 30)
        assert np.array_equal(expected, result)
    # Noise is uniform, and independent for each image.
    images = np.zeros((COUNT, *SIZE, 3), np.uint8)
    results, parameters = changed(RandomErasing(1.0, value="random"), images)
    values = results[results.sum(3) > 0]
    assert abs(values.mean() - 127.5) < 4 and values.min() < 3 and values.max() > 252
    assert len({row[4] for row in parameters}) == COUNT and np.array_equal(results, results.round())


def shifted(a: float, b: float, c: float, d: float, e: float, f: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(
        image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.NEAREST
    )


BY_PILLOW: dict[tuple[int, float], Callable[[Image.Image], Image.Image]] = {
    (0, 0.0): lambda image: image,
    (1, 0.3): shifted(1, 0.3, 0, 0, 1, 0),
    (2, -0.23): shifted(1, 0, 0, -0.23, 1, 0),
    (3, 7.6): shifted(1, 0, -7, 0, 1, 0),
    (4, -5.2): shifted(1, 0, 0, 0, 1, 5),
    (5, 21.0): lambda image: image.rotate(21.0),
    (6, -0.4): lambda image: ImageEnhance.Brightness(image).enhance(0.6),
    (7, 0.8): lambda image: ImageEnhance.Color(image).enhance(1.8),
    (8, 0.5): lambda image: ImageEnhance.Contrast(image).enhance(1.5),
    (9, 0.9): lambda image: ImageEnhance.Sharpness(image).enhance(1.9),
    (10, 3.0): lambda image: ImageOps.posterize(image, 3),
    (11, 100.0): lambda image: ImageOps.solarize(image, 100),
    (12, 0.0): ImageOps.autocontrast,
    (13, 0.0): ImageOps.equalize,
}


@pytest.mark.parametrize(("change", "strength"), BY_PILLOW)
def test_the_changes_of_randaugment_equal_pillow(change: int, strength: float) -> None:
    images = photos(6) // 2 + 40  # images whose contrast can be stretched
    rows = [[float(change), strength]] * 6
    results = arrays(TrivialAugmentWide().apply(tensors(images), rows))
    for image, result in zip(images, results, strict=True):
        expected = np.asarray(BY_PILLOW[change, strength](Image.fromarray(image))).astype(int)
        apart = np.abs(expected - result).max(axis=2)
        # Where two pixels are equally near, nearest-neighbour sampling may choose either; blends differ by two rounding
        # steps.
        assert (apart > 3).mean() < 0.01 if 1 <= change <= 5 else apart.max() <= 3


def test_randaugment_picks_changes_of_its_magnitude() -> None:
    n, (height, width) = 14_000, (331, 662)
    ((_, parameters),) = plan_for([RandAugment(2, 9)], n, size=(height, width)).steps
    assert parameters.shape == (n, 4)
    most = [0, 0.3, 0.3, 300, 150, 30, 0.9, 0.9, 0.9, 0.9, 0, 0, 0, 0]
    for numbers, strengths in (parameters[:, :2].T, parameters[:, 2:].T):
        counts = np.bincount(numbers.astype(int), minlength=14)
        assert len(counts) == 14 and np.abs(counts - n / 14).max() < 5 * np.sqrt(n / 14)
        for number in range(14):
            some = strengths[numbers == number]
            if 1 <= number <= 9:
                assert np.allclose(np.abs(some), 9 / 30 * most[number]) and abs((some > 0).mean() - 0.5) < 0.1
            elif number in (10, 11):
                assert np.allclose(some, 8 - 1 if number == 10 else 255 * 21 / 30)
    assert abs(np.corrcoef(parameters[:, 0], parameters[:, 2])[0, 1]) < 0.05


def test_trivial_augment_picks_any_strength() -> None:
    ((_, parameters),) = plan_for([TrivialAugmentWide()], 14_000).steps
    assert sorted({*parameters[:, 0]}) == list(range(14))
    rotations = np.abs(parameters[parameters[:, 0] == 5, 1])
    assert np.allclose(np.unique(rotations.round(6)), 135 * np.arange(31) / 30)
    assert sorted({*parameters[parameters[:, 0] == 10, 1]}) == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_mixing_shares_follow_a_beta_distribution(alpha: float) -> None:
    n = 20_000
    images, labels = torch.zeros(2, 3, 1, 1), torch.eye(2)
    draws = Draws(1, 0, np.arange(n)).uniform(0, MixUp.draws)
    shares = np.sort([float(MixUp(alpha).mix(images, labels, u)[1][0, 0]) for u in draws[:4000]])
    expected = np.sort(np.random.default_rng(0).beta(alpha, alpha, 100_000))
    at = np.quantile(expected, np.arange(0.05, 1, 0.05))
    below = np.searchsorted(shares, at) / len(shares)
    assert np.abs(below - np.arange(0.05, 1, 0.05)).max() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_mixup_and_cutmix_combine_each_image_with_the_one_before(dtype: torch.dtype) -> None:
    batch = torch.from_numpy(photos(6)).permute(0, 3, 1, 2).to(dtype)
    labels = torch.eye(6)
    for position in range(20):
        for op in (MixUp(0.8), CutMix(1.0)):
            mixed, shares = Recipe([op]).mix(3, 0, position, batch.clone(), labels.clone())
            own = float(shares[0, 0])
            assert torch.allclose(shares, own * labels + (1 - own) * labels.roll(1, 0))
            assert mixed.dtype == dtype and mixed.stride() == batch.stride()
            before = batch.roll(1, 0)
            if isinstance(op, MixUp):
                expected = own * batch.float() + (1 - own) * before.float()
                assert float((expected - mixed.float()).abs().max()) <= (0.51 if dtype == torch.uint8 else 0.26)
                continue
            pasted = (mixed != batch).any(1).any(0)
            rows, columns = pasted.any(1), pasted.any(0)
            box = torch.outer(rows, columns)
            assert torch.equal(mixed, torch.where(box, before, batch))
            assert abs(float(box.float().mean()) - (1 - own)) < 1e-6


def test_a_batch_of_one_and_batches_not_drawn_are_unchanged() -> None:
    batch, labels = torch.rand(4, 3, 8, 8), torch.eye(4)
    assert torch.equal(Recipe([MixUp()]).mix(0, 0, 0, batch[:1].clone(), labels[:1])[0], batch[:1])
    mixed = [Recipe([CutMix(p=0.3)]).mix(0, 0, p, batch.clone(), labels)[1] for p in range(300)]
    assert abs(np.mean([not torch.equal(shares, labels) for shares in mixed]) - 0.3) < 0.1
