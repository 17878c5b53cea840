"""The transforms of the benchmarks draw and do what torchvision's do. The draws below are those of torchvision 0.29.1,
by seed: its RandomResizedCrop(224), RandomCrop((33, 30)), RandomRotation(30), ColorJitter(0.4, 0.3, 0.2) and flips.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

_FILE = Path(__file__).parent.parent / "benchmarks" / "seeds" / "pillow_transforms.py"

# Height and width; box; corner of a crop; degrees; jitter in its order, as (what, factor); whether it is flipped.
DRAWS: list[tuple[tuple[int, int], tuple[int, ...], tuple[int, int], float, list[tuple[str, float]], bool]] = [
    (
        (375, 500), (17, 80, 294, 343), (256, 102), -0.22460460662841797,
        [("Brightness", 0.7056244015693665), ("Contrast", 0.8844536542892456), ("Color", 1.0536315441131592)], True,
    ),
    (
        (500, 333), (38, 39, 256, 293), (409, 107), 15.45789623260498,
        [("Contrast", 0.7175689339637756), ("Color", 1.1199434995651245), ("Brightness", 1.187747597694397)], False,
    ),
    (
        (64, 64), (5, 9, 53, 50), (8, 17), 6.881704330444336,
        [("Brightness", 0.9795688390731812), ("Contrast", 1.128156304359436), ("Color", 1.047614574432373)], False,
    ),
    (
        (40, 500), (0, 223, 40, 53), (2, 431), -29.74418830871582,
        [("Color", 0.8240465521812439), ("Contrast", 0.9829685688018799), ("Brightness", 0.6215639114379883)], True,
    ),
    (
        (500, 40), (308, 1, 48, 36), (58, 1), 3.578317165374756,
        [("Color", 0.8155847787857056), ("Contrast", 0.7043167352676392), ("Brightness", 0.7680025696754456)], False,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def transforms() -> Any:
    spec = importlib.util.spec_from_file_location("pillow_transforms", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8))


def same(found: Image.Image, expected: Image.Image) -> bool:
    return bool(np.array_equal(np.asarray(found), np.asarray(expected)))


@pytest.mark.parametrize("seed", range(len(DRAWS)))
def test_draws_are_torchvisions(transforms: Any, seed: int) -> None:
    (height, width), box, (top, left), degrees, jitter, flipped = DRAWS[seed]
    image = noise(height, width)

    def drawn(transform: Any) -> Image.Image:
        torch.manual_seed(seed)
        made: Image.Image = transform(image)
        return made

    y, x, rows, columns = box
    resized = image.crop((x, y, x + columns, y + rows)).resize((224, 224), Image.Resampling.BILINEAR)
    assert same(drawn(transforms.RandomResizedCrop(224)), resized)
    assert same(drawn(transforms.RandomCrop((33, 30))), image.crop((left, top, left + 30, top + 33)))
    assert same(drawn(transforms.RandomRotation(30)), image.rotate(degrees, Image.Resampling.NEAREST))
    assert same(drawn(transforms.RandomRotation(30, bilinear=True)), image.rotate(degrees, Image.Resampling.BILINEAR))
    expected = image
    for what, factor in jitter:
        expected = getattr(ImageEnhance, what)(expected).enhance(factor)
    assert same(drawn(transforms.ColorJitter(0.4, 0.3, 0.2)), expected)
    for name, how in (("Horizontal", Image.Transpose.FLIP_LEFT_RIGHT), ("Vertical", Image.Transpose.FLIP_TOP_BOTTOM)):
        flip = getattr(transforms, f"Random{name}Flip")()
        assert same(drawn(flip), image.transpose(how) if flipped else image)


def test_a_box_that_never_fits_is_the_middle(transforms: Any) -> None:
    crop = transforms.RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(0.75, 4 / 3))
    assert crop.draw(10, 100) == (0, 43, 10, 13)
    assert crop.draw(100, 10) == (43, 0, 13, 10)


@pytest.mark.parametrize(
    ("size", "of", "expected"),
    [(30, (60, 90), (45, 30)), (30, (90, 61), (30, 44)), (60, (60, 90), (90, 60)), ((20, 50), (60, 90), (50, 20))],
)
def test_resize_takes_the_short_side(transforms: Any, size: Any, of: tuple[int, int], expected: Any) -> None:
    assert transforms.Resize(size)(noise(*of)).size == expected


def test_a_crop_of_the_middle_pads_what_is_too_small(transforms: Any) -> None:
    image = noise(5, 40)
    made = np.asarray(transforms.CenterCrop((8, 10))(image))
    assert made.shape == (8, 10, 3) and not made[:1].any() and not made[6:].any()
    assert np.array_equal(made[1:6], np.asarray(image)[:, 15:25])


def test_values_are_scaled_then_normalised(transforms: Any) -> None:
    image, mean, std = noise(4, 6), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    planes = np.asarray(image).transpose(2, 0, 1)
    found = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])(image)
    assert found.dtype == torch.float32 and found.is_contiguous()
    scaled = (planes / 255 - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    assert np.abs(found.numpy() - scaled).max() < 1e-6
    assert np.array_equal(transforms.PILToTensor()(image), planes)


def test_a_folder_is_sorted_and_labelled_by_its_class_folders(transforms: Any, tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.PNG", "a/deep/3.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise(4, 4).save(tmp_path / name, "PNG")
    folder = transforms.Folder(tmp_path, transforms.PILToTensor())
    assert folder.classes == ["a", "b"]
    expected = [("a/deep/3.png", 0), ("b/1.PNG", 1), ("b/2.png", 1)]
    assert [(str(Path(path).relative_to(tmp_path)), label) for path, label in folder.samples] == expected
    image, label = folder[2]
    assert len(folder) == 3 and label == 1 and image.shape == (3, 4, 4)
