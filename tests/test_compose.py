"""Composed geometry: one affine map and one sampling, on the CPU, on devices, for any dtype; or op by op."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augment_cases import Pixels, on_a_device, on_the_cpu, photo, plan_for
from conftest import tree_of
from image_cases import encoded
from loader_options import grouped
from PIL import Image

import readers
from cache.errors import ResumeError
from packer.testing.samples import turned_image
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Normalize,
    Op,
    RandomCrop,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)
from readers.augment.compose import Moved
from readers.coefficients import compiled
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.torch import ImageDataset

LOAD: list[Op] = [RandomHorizontalFlip(), RandomVerticalFlip(), RandomRotation(20)]
NEAREST: list[Op] = [*LOAD[:2], RandomRotation(20, "nearest")]
IMAGES = [photo(number, 90 + 7 * number, 130 - 9 * number) for number in range(5)]


def by_pillow(plan: Any, number: int, image: Pixels, size: int, mode: Image.Resampling) -> Pixels:
    """The moves of a plan's first part as one matrix about the middle, applied by Pillow; the middle of the result."""
    (part,) = plan.before or (plan,)
    height, width = image.shape[:2]
    to_middle = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]])
    total = np.linalg.inv(to_middle)
    flips = [(3, part.hflip[number]), (2, part.vflip[number])]
    steps = [(op.flip_axis, values[number, 0]) for op, values in part.steps]
    for axis, value in (*flips, *steps):
        turn = math.radians(value)
        matrix = np.array([[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]])
        if axis:
            matrix = np.diag([-1.0 if axis == 3 and value else 1.0, -1.0 if axis == 2 and value else 1.0, 1])
        total = total @ matrix
    moved = Image.fromarray(image).transform(
        (width, height), Image.Transform.AFFINE, (total @ to_middle)[:2].ravel(), mode
    )
    top, left = round((height - size) / 2), round((width - size) / 2)
    return np.asarray(moved)[top : top + size, left : left + size]


@pytest.mark.parametrize("count", [1, 4, 12])
@pytest.mark.parametrize("load", [LOAD, NEAREST], ids=["bilinear", "nearest"])
def test_a_run_of_moves_is_one_affine_map_of_pillows(
    load: list[Op], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by torch where the extension is missing, and on a device."""
    ops: list[Op] = [*load * count, CenterCrop(80)]
    mode = Image.Resampling.BILINEAR if load is LOAD else Image.Resampling.NEAREST
    plan = plan_for(ops, IMAGES)
    made = on_the_cpu(ops, IMAGES, compose=True)
    for number, (image, pixels) in enumerate(zip(IMAGES, made.permute(0, 2, 3, 1).numpy(), strict=True)):
        expected = by_pillow(plan, number, image, 80, mode)
        assert np.abs(pixels.astype(int) - expected).mean() < 1.0  # Pillow truncates bilinear values
    on_device = on_a_device(ops, IMAGES, compose=True, engine="torch")
    monkeypatch.setattr("readers.coefficients.unsupported_reason", lambda: "missing")
    by_torch = on_the_cpu(ops, IMAGES, compose=True)
    for other in (on_device, by_torch):
        apart = (made.int() - other.int()).abs()
        assert (apart > (load is LOAD)).float().mean() < 1e-3 and apart.float().mean() < 0.05


SAME: dict[str, list[Op]] = {
    "flips and crops": [*LOAD[:2], CenterCrop(70), *LOAD[:2]],
    "a resized crop": [RandomResizedCrop(64), RandomHorizontalFlip()],
    "a resize and a crop": [Resize(80), CenterCrop(64), RandomHorizontalFlip()],
    "one turn": [*LOAD, RandomVerticalFlip(), CenterCrop(70)],
    "one turn to the nearest": [*NEAREST, RandomHorizontalFlip(), CenterCrop(70)],
    "a turn, then smaller": [*LOAD, RandomVerticalFlip(), CenterCrop(70), Resize(33)],
    "a turn of what is resized": [RandomResizedCrop(64), *LOAD],
    "a turn, then colours": [*NEAREST, ColorJitter(0.4), RandomCrop(60), RandomRotation(9)],
    "beyond the edges": [*LOAD, RandomCrop(90, padding=20)],
}


@pytest.mark.parametrize("name", SAME)
def test_one_move_gives_the_pixels_of_op_by_op(name: str) -> None:
    """To the bit, where a CPU fuses multiplication and addition as torch does."""
    ops = SAME[name]
    apart = (on_the_cpu(ops, IMAGES, compose=True).int() - on_the_cpu(ops, IMAGES).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-4


def test_a_resize_that_enlarges_is_part_of_the_map() -> None:
    ops: list[Op] = [*LOAD * 2, CenterCrop(50), Resize(120)]
    composed, exact = (on_the_cpu(ops, IMAGES, compose=compose).float() for compose in (True, False))
    apart = (composed - exact)[:, :, 8:-8, 8:-8].abs().mean()
    assert 0 < apart < 4
    device = on_a_device(ops, IMAGES, compose=True, engine="torch").float()
    assert (composed - device).abs().max() <= 1
    bicubic: list[Op] = [*LOAD, CenterCrop(50), Resize(120, "bicubic")]
    apart = (on_the_cpu(bicubic, IMAGES, compose=True).int() - on_the_cpu(bicubic, IMAGES).int()).abs()
    assert apart.float().mean() < 0.01


def test_the_ops_decide_what_becomes_one_step() -> None:
    """Runs of one sampling mode, not across other ops; flips alone stay flips."""
    ops = [*LOAD * 2, *NEAREST, ColorJitter(0.2), RandomHorizontalFlip(), RandomGrayscale(0.5), *LOAD, CenterCrop(60)]
    job = plan_for(ops, IMAGES, compose=True).jobs()[0]
    names = [type(op).__name__ for op, _ in job.first.steps]
    assert names == ["Moved", "Moved", "ColorJitter", "RandomHorizontalFlip", "RandomGrayscale", "Moved"]
    first, second = (op for op, _ in job.first.steps[:2])
    assert isinstance(first, Moved) and isinstance(second, Moved) and (first.by, second.by) == ("bilinear", "nearest")


# --- through the loaders ----------------------------------------------------------------------------------------------
OPS: list[Op] = [*LOAD * 3, RandomResizedCrop(40, scale=(0.6, 1.0)), Normalize((0.5,) * 3, (0.2,) * 3)]


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    files = {f"{number:02d}.jpg": turned_image(number, (72 + 4 * (number % 5), 64)) for number in range(11)}
    return readers.open_folder(tree_of(tmp_path, files))


def loader(reader: Any, **options: Any) -> ImageLoader:
    return ImageLoader(reader, 4, **grouped({"augment": OPS, "threads": 2, "tail": "exact", "seed": 7, **options}))


def test_exact_is_op_by_op_and_the_default_is_composed(reader: readers.Reader) -> None:
    (exact, _), *_ = loader(reader, compose="exact", shuffle=False)
    (composed, _), *_ = loader(reader, shuffle=False)
    images = [decode_image(reader.read(row)) for row in range(4)]
    for made, compose in ((exact, False), (composed, True)):
        assert torch.allclose(made, on_the_cpu(OPS, images, torch.float32, compose=compose), atol=1e-5)
    assert (exact - composed).abs().mean() > 0.01
    items = ImageDataset(reader, transform=OPS, compose="exact")
    assert items.decoder == loader(reader, compose="exact").decoder != ImageDataset(reader, transform=OPS).decoder
    with pytest.raises(ValueError, match="compose"):
        loader(reader, compose="never")


def test_a_state_is_not_resumed_with_other_geometry(reader: readers.Reader, recwarn: pytest.WarningsRecorder) -> None:
    for began, now in (("auto", "exact"), ("exact", "auto")):
        state = loader(reader, compose=began).state_dict()
        with pytest.raises(ResumeError, match=rf"Decode\(compose='{began}'\)"):
            loader(reader, compose=now).load_state_dict(state)
        loader(reader, compose=began).load_state_dict(state)
    plain = [RandomResizedCrop(40), RandomHorizontalFlip()]
    loader(reader, augment=plain).load_state_dict(loader(reader, augment=plain, compose="exact").state_dict())
    assert not recwarn.list


@pytest.mark.parametrize("values", ["uint8", "uint16", "float32"])
def test_unchanged_images_are_composed_alike(values: str, tmp_path: Path) -> None:
    image = IMAGES[0][..., 0]
    if values == "float32":
        made = Image.fromarray(image.astype(np.float32) / 255)
    else:
        made = Image.fromarray(image.astype(np.uint16) * 257 if values == "uint16" else image)
    reader = readers.open_folder(tree_of(tmp_path, {"0.tiff": encoded(made, "TIFF")}))
    ops: list[Op] = [*LOAD * 3, CenterCrop(50), Resize(70)]
    ((images, _),) = ImageLoader(
        reader, 1, **grouped({"augment": ops, "decode": "unchanged", "shuffle": False, "seed": 7})
    )
    expected = on_the_cpu(ops, [np.repeat(image[..., None], 3, 2)], compose=True)
    scale = {"uint8": 1, "uint16": 1 / 257, "float32": 255}[values]
    assert (images[:, 0].double() * scale - expected[:, 0].double()).abs().max() <= 1


# --- the extension ----------------------------------------------------------------------------------------------------
@pytest.mark.skipif(bool(compiled.unsupported_reason()), reason="the extension is missing")
@pytest.mark.parametrize(
    ("source", "out", "by", "grid"),
    [
        ((4, 4, 4), (4, 4, 3), (1.0, 0, 0, 0, 1, 0), (4, 4, 0, 0)),
        ((4, 4, 3), (4, 4, 3), (1.0, 0, 0, 0, 1, 0), (4, 4, 1, 0)),
        ((4, 4, 3), (4, 4, 3), (1.0, 0, 0, 0, 1, 0), (4, 3, 0, 0)),
        ((4, 4, 3), (4, 4, 3), (math.nan, 0, 0, 0, 1, 0), (4, 4, 0, 0)),
        ((4, 4, 3), (4, 4, 3), (1.0, 0, 0, 0, 1, 1e9), (4, 4, 0, 0)),
        ((0, 4, 3), (4, 4, 3), (1.0, 0, 0, 0, 1, 0), (4, 4, 0, 0)),
        ((4, 4, 3), (4, 0, 3), (1.0, 0, 0, 0, 1, 0), (4, 4, 0, 0)),
    ],
)
def test_the_extension_refuses_accesses_outside_its_memory(source: Any, out: Any, by: Any, grid: Any) -> None:
    codec = compiled.load_codec()
    with pytest.raises(ValueError, match="affine"):
        codec.affine(np.zeros(source, np.uint8), np.zeros(out, np.uint8), by, grid, False)
