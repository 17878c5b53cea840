"""Images for the tests of augmentation, their plan, and the results of the executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from readers.augment import Op, Plan, RandomHorizontalFlip, RandomRotation, RandomVerticalFlip, Recipe
from readers.augment.cpu import Finish, Renderer
from readers.augment.fused import BatchRenderer
from readers.decode.device import Picture
from readers.decode.region import with_header

__all__ = ["CPU", "LOAD", "Pixels", "by_pillow", "on_a_device", "on_the_cpu", "photo", "plan_for"]

CPU = torch.device("cpu")
Pixels = np.ndarray[Any, np.dtype[Any]]
LOAD: list[Op] = [RandomHorizontalFlip(), RandomVerticalFlip(), RandomRotation(30)]


def photo(seed: int, height: int, width: int, grain: int = 12) -> Pixels:
    """uint8 [height, width, 3], as smooth as a photograph: resizers differ most on noise, which no model trains on."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (height // grain + 2, width // grain + 2, 3), np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def plan_for(ops: Sequence[Op], images: Sequence[Pixels], epoch: int = 0, *, compose: bool = False) -> Plan:
    sizes = np.array([image.shape[:2] for image in images])
    return Recipe(ops, compose=compose).plan(7, epoch, np.arange(len(images)), sizes[:, 0], sizes[:, 1])


def on_the_cpu(
    ops: Sequence[Op],
    images: Sequence[Pixels],
    dtype: torch.dtype = torch.uint8,
    planar: bool = False,
    compose: bool = False,
) -> torch.Tensor:
    """float [n, 3, height, width], as ImageLoader makes the images without a device."""
    recipe, jobs = Recipe(ops), plan_for(ops, images, compose=compose).jobs()
    assert recipe.out_size is not None
    finish, renderer = Finish(dtype, planar, recipe.normalize), Renderer(recipe.interpolation)
    order = torch.contiguous_format if planar else torch.channels_last
    out = torch.empty((len(images), 3, *recipe.out_size), dtype=dtype, memory_format=order)
    pixels = out if finish.in_place else renderer.chunk(len(images), *recipe.out_size)
    rows = pixels.split(1)
    for image, job, row in zip(images, jobs, rows, strict=True):
        renderer.render(with_header(image), job, image.shape[:2], row)  # type: ignore[arg-type]
    finish.store(pixels, rows, jobs, out)
    return out


def on_a_device(
    ops: Sequence[Op], images: Sequence[Pixels], device: torch.device = CPU, compose: bool = False, **options: Any
) -> torch.Tensor:
    """The same batch, made by the renderer for devices."""
    recipe = Recipe(ops)
    assert recipe.out_size is not None
    pictures = [Picture(torch.from_numpy(image.copy()).to(device).permute(2, 0, 1)) for image in images]
    options = {"dtype": torch.uint8, "normalize": recipe.normalize, "interpolation": recipe.interpolation} | options
    return BatchRenderer(device, **options).render(
        pictures, plan_for(ops, images, compose=compose).jobs(), recipe.out_size
    )


def by_pillow(
    image: Pixels, plan: Plan, i: int, interpolation: Image.Resampling = Image.Resampling.BILINEAR
) -> Image.Image:
    """The boxes and flips of image number i of a plan, made with Pillow."""
    b = plan.boxes
    box = (b.left[i], b.top[i], b.left[i] + b.width[i], b.top[i] + b.height[i])
    made = Image.fromarray(image).crop(box).resize((b.resized_width[i], b.resized_height[i]), interpolation)
    top, left = b.crop_top[i], b.crop_left[i]
    made = made.crop((left, top, left + b.out_width[i], top + b.out_height[i]))  # Pillow fills the outside with black
    for flipped, how in (
        (plan.hflip[i], Image.Transpose.FLIP_LEFT_RIGHT),
        (plan.vflip[i], Image.Transpose.FLIP_TOP_BOTTOM),
    ):
        made = made.transpose(how) if flipped else made
    return made
