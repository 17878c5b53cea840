"""The Triton kernel against torch's resize and the CPU's renderer. Not collected: `test_fused.py` runs this file in a
separate process under Triton's interpreter, which has to be chosen before triton is imported."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from augment_cases import on_a_device, on_the_cpu, photo
from conftest import make_jpeg
from gpu_doubles import install
from loader_options import grouped

import readers
from readers import Decode
from readers.augment import (
    CenterCrop,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Recipe,
    Resize,
    kernel,
)
from readers.augment.fused import BatchRenderer
from readers.augment.geometry import Job, Pass
from readers.decode import Region
from readers.decode.device import Picture, upright_tensor
from readers.loader import ImageLoader

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
SHAPES = [(40, 32), (33, 57), (20, 24), (90, 70), (7, 150)]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"


def pictures(shapes: list[tuple[int, int]] = SHAPES) -> list[Picture]:
    """Planar and interleaved images in turn, filled with noise, on which resizers differ most."""
    torch.manual_seed(3)
    made = []
    for i, (height, width) in enumerate(shapes):
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).permute(2, 0, 1)
        made.append(Picture(pixels.contiguous() if i % 2 else pixels))
    return made


def job(box: tuple[int, int, int, int], resized: tuple[int, int], corner: tuple[int, int], *flips: int) -> Job:
    return Job(Pass(Region(*box), resized, corner, flips, (), resized))


def render(engine: Any, images: list[Picture], jobs: list[Job], size: tuple[int, int], **options: Any) -> torch.Tensor:
    return BatchRenderer(CPU, engine=engine, **{"dtype": torch.uint8, **options}).render(images, jobs, size)


def difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    apart = (a.to(torch.float64) - b.to(torch.float64)).abs()
    return float(apart.max()), float(apart.mean())


def test_moves_of_a_batch_are_one_launch_and_equal_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of moves before a crop, one that enlarges, and one of the nearest pixel with flips."""
    load = [RandomHorizontalFlip(), RandomVerticalFlip(), RandomRotation(30)]
    nearest = [*load[:2], RandomRotation(30, "nearest")]
    launches: list[Any] = []
    original = type(kernel.move_tiles).__getitem__
    monkeypatch.setattr(
        type(kernel.move_tiles), "__getitem__", lambda self, grid: launches.append(self) or original(self, grid)
    )
    images = [photo(number, 40 + 3 * number, 52 - 4 * number) for number in range(3)]
    for moves, then in ((load * 3, []), (load, [Resize(33)]), (nearest * 2, [Resize(9)])):
        ops: list[Any] = [*moves, CenterCrop(24), *then]
        pixels = on_a_device(ops, images, compose=True, engine="triton")
        most, mean = difference(pixels, on_the_cpu(ops, images, compose=True))
        assert mean < 0.05 and (most <= 1 or moves[2].interpolation == "nearest"), (ops, most, mean)
    assert launches.count(kernel.move_tiles) == 3


def plan_jobs(images: list[Picture], ops: list[Any], epoch: int = 0) -> list[Job]:
    sizes = np.array([image.size for image in images])
    recipe = Recipe(ops)
    return recipe.plan(7, epoch, np.arange(len(images)), sizes[:, 0], sizes[:, 1]).jobs()


@pytest.mark.parametrize("size", [(24, 24), (17, 40), (1, 1), (70, 33)])
def test_boxes_are_resized_as_by_torch(size: tuple[int, int]) -> None:
    images = pictures()
    jobs = plan_jobs(images, [RandomResizedCrop(size, (0.1, 1.0)), RandomHorizontalFlip(), RandomVerticalFlip()])
    assert {job.last.flips for job in jobs} > {()}, "no image is flipped"
    pixels, torchs = (render(engine, images, jobs, size) for engine in ("triton", "torch"))
    largest, mean = difference(pixels, torchs)
    assert largest <= 1 and mean < 0.04, (largest, mean)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crops_that_reach_beyond_their_image_are_black_there(dtype: torch.dtype) -> None:
    images = pictures()
    ops = [Resize(20), RandomCrop((30, 26), padding=(9, 12)), RandomHorizontalFlip(), RandomVerticalFlip()]
    options = {"dtype": dtype, "normalize": None if dtype == torch.uint8 else Normalize(MEAN, STD)}
    jobs = [*plan_jobs(images, ops), *plan_jobs(images, ops, epoch=1)]
    assert min(min(job.last.corner) for job in jobs) < 0
    pixels, torchs = (render(engine, images * 2, jobs, (30, 26), **options) for engine in ("triton", "torch"))
    largest, mean = difference(pixels, torchs)
    step = 1 if dtype == torch.uint8 else 1 / 255 / min(STD) + 1e-5
    assert largest <= step and mean < 0.04 * step, (largest, mean)


def test_the_formula_equals_torchs_interpolate() -> None:
    """In float64 and without rounding between the passes, so that the reference shares no code with the kernel."""
    image = pictures([(61, 83)])[0]
    pixels = render("triton", [image], [job((5, 9, 50, 70), (20, 31), (0, 0))], (20, 31))[0]
    box = image.pixels[:, 5:55, 9:79].to(torch.float64)[None]
    exact = F.interpolate(box, (20, 31), mode="bilinear", antialias=True, align_corners=False)[0]
    assert difference(pixels, exact)[0] < 1.01


def test_a_box_that_is_not_resized_is_a_copy() -> None:
    images = pictures([(40, 50), (64, 64)])
    jobs = [job((3, 4, 30, 30), (30, 30), (0, 0)), job((0, 34, 30, 30), (30, 30), (0, 0), 2, 3)]
    out = render("triton", images, jobs, (30, 30))
    assert torch.equal(out[0], images[0].pixels[:, 3:33, 4:34])
    assert torch.equal(out[1], images[1].pixels[:, 0:30, 34:64].flip((1, 2)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_moves_no_pixel(orientation: int) -> None:
    for image in pictures([(20, 31), (31, 20)]):
        turned = Picture(image.pixels, orientation)
        upright = Picture(upright_tensor(turned).contiguous())
        jobs = [job((2, 3, 15, 14), (9, 12), (0, 0), 3)]
        assert torch.equal(render("triton", [turned], jobs, (9, 12)), render("triton", [upright], jobs, (9, 12)))


def test_dtypes_layouts_and_normalisation() -> None:
    images = pictures()
    jobs = plan_jobs(images, [RandomResizedCrop(24), RandomHorizontalFlip()])
    raw = render("triton", images, jobs, (24, 24)).to(torch.float32)
    assert raw.is_contiguous(memory_format=torch.channels_last)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    kinds = ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3))
    for (dtype, close), planar in itertools.product(kinds, (False, True)):
        options = {"dtype": dtype, "planar": planar}
        unit = render("triton", images, jobs, (24, 24), **options)
        assert unit.dtype == dtype and unit.is_contiguous(
            memory_format=torch.contiguous_format if planar else torch.channels_last
        )
        assert torch.allclose(unit.to(torch.float32), raw / 255, rtol=close, atol=1e-6)
        normal = render("triton", images, jobs, (24, 24), normalize=Normalize(MEAN, STD), **options)
        assert torch.allclose(normal.to(torch.float32), (raw / 255 - mean) / std, rtol=close, atol=4 * close)
    assert torch.equal(render("triton", images, jobs, (24, 24), planar=True).to(torch.float32), raw)


def test_large_reductions_and_large_enlargements() -> None:
    images = pictures([(300, 400), (2, 3), (1, 1)])
    jobs = [job((0, 0, 300, 400), (5, 6), (0, 0)), job((0, 0, 2, 3), (5, 6), (0, 0)), job((0, 0, 1, 1), (5, 6), (0, 0))]
    largest, _ = difference(render("triton", images, jobs, (5, 6)), render("torch", images, jobs, (5, 6)))
    assert largest <= 1


def test_a_loader_that_uses_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From files to batches, behind the double of a decoder: equal to a loader without a device, up to one step of
    255."""
    for i in range(9):
        (tmp_path / f"{i}.jpg").write_bytes(make_jpeg(i, (64 + i, 72)))
    install(monkeypatch, "torchcodec")
    reader = readers.open_folder(tmp_path)
    options: dict[str, Any] = {"augment": [RandomResizedCrop(40, (0.5, 1.0)), RandomHorizontalFlip()], "seed": 2}
    on_device = ImageLoader(reader, 4, **grouped({"decode": Decode(decoder="torchcodec"), **options}))
    for (images, labels), (expected, others) in zip(on_device, ImageLoader(reader, 4, **grouped(options)), strict=True):
        assert torch.equal(labels, others) and images.stride() == expected.stride()
        assert difference(images, expected)[0] <= 1
