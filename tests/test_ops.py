"""Every op keeps the contract of `readers.augment.ops.base`, and makes what its source says.

References are Pillow (`ImageOps`, `ImageEnhance`, `Image.transform`), colorsys, and the formulas of the papers, written
down here; torchvision is not needed.
"""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg
from PIL import Image

import readers
from readers import augment
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    GaussianBlur,
    Normalize,
    Op,
    Plan,
    RandomCrop,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Recipe,
    Resize,
    Stage,
)
from readers.loader import ImageLoader

Pixels = np.ndarray[Any, np.dtype[Any]]
HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
SIZE = (48, 40)
COUNT = 24
# One of each, so that something happens to most images.
EXAMPLES: list[Op] = [
    CenterCrop(30),
    ColorJitter(0.4, 0.4, 0.4),
    Crop(2, 3, 20, 30),
    GaussianBlur((0.5, 2.0), p=0.7),
    Normalize((0.5,) * 3, (0.2,) * 3),
    RandomCrop(30),
    RandomGrayscale(0.5),
    RandomHorizontalFlip(),
    RandomResizedCrop(32),
    RandomRotation(30),
    RandomVerticalFlip(),
    Resize((20, 30)),
]
ON_PIXELS = [op for op in EXAMPLES if op.stage is Stage.PIXELS and not op.flip_axis]


def example_name(op: Op) -> str:
    return type(op).__name__


def plan_for(ops: list[Op], count: int = COUNT, epoch: int = 0, size: tuple[int, int] = SIZE) -> Plan:
    heights, widths = np.full(count, size[0]), np.full(count, size[1])
    return Recipe(ops).plan(5, epoch, np.arange(count), heights, widths)


def photos(count: int = COUNT, size: tuple[int, int] = SIZE) -> Pixels:
    """uint8 [n, height, width, 3], as smooth as photographs."""
    rng = np.random.default_rng(2)
    small = rng.integers(0, 256, (count, size[0] // 6 + 2, size[1] // 6 + 2, 3), np.uint8)
    return np.stack([np.asarray(Image.fromarray(p).resize(size[::-1], Image.Resampling.BICUBIC)) for p in small])


def tensors(images: Pixels) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32).contiguous()


def arrays(images: torch.Tensor) -> Pixels:
    return np.asarray(images.permute(0, 2, 3, 1).numpy())


def changed(op: Op, images: Pixels) -> tuple[Pixels, Any]:
    """(what `op` makes of these images, its parameters)."""
    ((_, parameters),) = plan_for([op], len(images), size=images.shape[1:3]).steps
    return arrays(op.apply(tensors(images), parameters.tolist()).round()), parameters


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    for i in range(COUNT):
        folder = tmp_path / "images" / "abc"[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02d}.jpg").write_bytes(make_jpeg(i, (SIZE[1], SIZE[0])))
    return readers.open_folder(tmp_path / "images")


# --- the contract -----------------------------------------------------------------------------------------------------
def test_every_op_has_an_example_here() -> None:
    ops = {name for name in augment.ops.__all__ if isinstance(getattr(augment, name), type)} - {"Op", "Stage"}
    assert {type(op).__name__ for op in EXAMPLES} == ops


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_an_op_is_a_value(op: Op) -> None:
    assert pickle.loads(pickle.dumps(op)) == op and hash(op) == hash(pickle.loads(pickle.dumps(op)))
    assert eval(repr(op), vars(augment)) == op
    with pytest.raises(FrozenInstanceError):
        setattr(op, fields(op)[0].name, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_what_happens_to_an_image_depends_on_its_position_alone(op: Op) -> None:
    together = plan_for([op]).jobs()
    one = np.array([1])
    alone = [Recipe([op]).plan(5, 0, one * i, one * SIZE[0], one * SIZE[1]).jobs()[0] for i in reversed(range(COUNT))]
    assert together == alone[::-1] and plan_for([op]).jobs() == together
    if op.draws:
        assert plan_for([op], epoch=1).jobs() != together


@pytest.mark.parametrize("op", EXAMPLES, ids=example_name)
def test_the_size_it_promises(op: Op) -> None:
    boxes, size = plan_for([op]).boxes, Recipe([op]).out_size
    if op.stage is Stage.GEOMETRY:
        assert size is not None
        assert {*zip(boxes.out_height.tolist(), boxes.out_width.tolist(), strict=True)} == {size}
    else:
        assert size is None and Recipe([Resize((9, 8)), op]).out_size == (9, 8)


@pytest.mark.parametrize("op", ON_PIXELS, ids=example_name)
def test_a_batch_is_changed_as_its_images_are(op: Op) -> None:
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
def test_any_number_of_threads_and_a_resume_make_the_same(op: Op, reader: readers.Reader) -> None:
    ops = [op] if op.stage is Stage.GEOMETRY else [CenterCrop(32), op]

    def loader(threads: int) -> ImageLoader:
        return ImageLoader(reader, 5, augment=ops, seed=4, threads=threads, layout="NCHW", tail="exact")

    one = [images.clone() for images, _ in loader(1)]
    assert all(map(torch.equal, one, (images for images, _ in loader(3))))
    begun, resumed = loader(2), loader(2)
    under_way = iter(begun)
    next(under_way), next(under_way)
    resumed.load_state_dict(begun.state_dict())
    assert all(map(torch.equal, one[2:], (images for images, _ in resumed))) and len(one) == 5


@pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed")
@pytest.mark.parametrize("op", [op for op in EXAMPLES if op.stage is not Stage.GEOMETRY], ids=example_name)
def test_dali_makes_the_same_or_says_what_does(op: Op, reader: readers.Reader) -> None:
    from readers.dali import DaliLoader

    ops = [CenterCrop(32), op]
    if not op.on_dali:
        with pytest.raises(ValueError, match=rf"DALI .* {type(op).__name__}: use ImageLoader"):
            DaliLoader(reader, 8, augment=ops)
        return
    ours, theirs = (kind(reader, 8, augment=ops, shuffle=False) for kind in (ImageLoader, DaliLoader))
    unit = 255 * 0.2 if op.stage is Stage.NORMALIZE else 1.0
    for (mine, _), (other, _) in zip(ours, theirs, strict=True):
        apart = (mine.to(torch.float32) - other.to(torch.float32)).abs() * unit
        assert float(apart.mean()) < 1.0 and float(apart.max()) <= 6


# --- what each op makes -----------------------------------------------------------------------------------------------
def test_greyscale_is_pillows() -> None:
    found, parameters = changed(RandomGrayscale(0.5), photos())
    grey = parameters[:, 0] == 0
    assert 5 < grey.sum() < 19
    for image, result, without_colour in zip(photos(), found, grey, strict=True):
        expected = np.asarray(Image.fromarray(image).convert("L").convert("RGB")) if without_colour else image
        assert np.abs(result - expected).max() <= 1
