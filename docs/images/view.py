"""Make the pictures of docs/images that show `packer view`: a drawn set, and a headless Chromium.

    PYTHONPATH=tests python docs/images/view.py            writes docs/images/view-*.webp
    PYTHONPATH=tests python docs/images/view.py --set DIR  only packs the set of drawn scenes

This script draws the scenes: hills under a sky with balloons, houses, trees and boats, each with its mask, boxes, the
corners of its boxes as points, and a caption.
"""

from __future__ import annotations

import argparse
import colorsys
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from suites.browser import Browser, find_chromium

import packer
import readers

CLASSES = ["balloon", "boat", "house", "tree"]
FIELDS = {
    "image": "image",
    "mask": "mask",
    "boxes": "boxes",
    "box_labels": "array",
    "points": "points",
    "caption": "text",
}
SIZES = [(500, 375), (500, 333), (375, 500), (480, 360), (640, 426), (400, 400), (612, 612), (800, 450)]
SCALE = 2  # drawn larger and reduced, so that edges are smooth
SCENES = 300


def colour(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, value)
    return int(255 * red), int(255 * green), int(255 * blue)


def landscape(draws: np.random.Generator, width: int, height: int, has_sea: bool) -> Image.Image:
    """A sky of two colours, and hills in three rows or the sea."""
    hue, dusk = draws.uniform(0.52, 0.62), draws.uniform(0, 1)
    top, low = (
        np.array(colour(hue, 0.55, 0.95 - 0.35 * dusk)),
        np.array(colour(0.08 if dusk > 0.6 else hue, 0.25 + 0.3 * dusk, 0.98)),
    )
    share = np.linspace(0, 1, height)[:, None, None]
    image = Image.fromarray((top * (1 - share) + low * share + np.zeros((height, width, 3))).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    x, y, size = draws.uniform(0.1, 0.9) * width, draws.uniform(0.08, 0.4) * height, height * 0.07
    draw.ellipse((x - size, y - size, x + size, y + size), fill=colour(0.13, 0.35, 1))
    ground = draws.uniform(0.26, 0.36)
    for row in range(3):
        base, steps = height * (0.55 + 0.15 * row), np.linspace(0, width, 60)
        waves = sum(
            draws.uniform(0.02, 0.05) * height * np.sin(steps / width * draws.uniform(2, 9) + draws.uniform(0, 7))
            for _ in range(3)
        )
        fill = (
            colour(0.56, 0.65, 0.75 - 0.12 * row)
            if has_sea and row
            else colour(ground, 0.45 + 0.1 * row, 0.7 - 0.13 * row)
        )
        points = [
            (float(x), float(y)) for x, y in zip(steps, base + waves * (0.15 if has_sea and row else 1), strict=True)
        ]
        draw.polygon([*points, (width, height), (0, height)], fill=fill)
    return image


Part = tuple[str, list[tuple[float, float]], Any]
WALL, WOOD, GLASS, SAIL = (237, 217, 178), (100, 72, 50), (120, 175, 215), (245, 245, 240)
# What things are made of: (how a part is drawn, points to the right of and above the foot in sizes, its colour: of
# the two that are drawn for each thing, or one of its own).
THINGS: dict[str, list[Part]] = {
    "balloon": [
        ("polygon", [(-0.16, 0.3), (0.16, 0.3), (0, 0.1)], (90, 70, 50)),
        ("ellipse", [(-0.4, 1), (0.4, 0.2)], 0),
        ("ellipse", [(-0.16, 1), (0.16, 0.2)], 1),
        ("rectangle", [(-0.08, 0.12), (0.08, 0)], (120, 80, 40)),
    ],
    "boat": [
        ("polygon", [(-0.05, 1), (-0.05, 0.25), (0.45, 0.25)], SAIL),
        ("polygon", [(-0.1, 0.85), (-0.1, 0.25), (-0.4, 0.25)], 1),
        ("polygon", [(-0.5, 0.2), (0.5, 0.2), (0.3, 0), (-0.35, 0)], 0),
    ],
    "house": [
        ("rectangle", [(-0.4, 0.55), (0.4, 0)], WALL),
        ("polygon", [(-0.5, 0.55), (0.5, 0.55), (0, 1)], 0),
        ("rectangle", [(-0.08, 0.3), (0.1, 0)], WOOD),
        ("rectangle", [(-0.3, 0.42), (-0.15, 0.25)], GLASS),
        ("rectangle", [(0.17, 0.42), (0.32, 0.25)], GLASS),
    ],
    "tree": [
        ("rectangle", [(-0.06, 0.5), (0.06, 0)], WOOD),
        *(
            ("ellipse", [(x - 0.22, y + 0.24), (x + 0.22, y - 0.2)], 2)
            for x, y in ((-0.16, 0.52), (0.16, 0.54), (0, 0.74))
        ),
    ],
}


def draw_thing(
    kind: str, draws: np.random.Generator, foot: tuple[float, float], size: float, *images: Image.Image
) -> None:
    """Draw an object in its colours into the first image, and in white into the second."""
    colours = [
        colour(draws.random(), 0.75, 0.9),
        colour(draws.random(), 0.5, 0.95),
        colour(draws.uniform(0.24, 0.36), 0.65, 0.5),
    ]
    for how, points, fill in THINGS[kind]:
        where = [(foot[0] + size * x, foot[1] - size * y) for x, y in points]
        for image, paint in zip(images, (colours[fill] if isinstance(fill, int) else fill, 255), strict=True):
            getattr(ImageDraw.Draw(image), how)(where, fill=paint)


def scene(number: int) -> tuple[str, dict[str, Any]]:
    """(class, fields) of a scene."""
    draws = np.random.default_rng(number)
    kind = CLASSES[int(draws.choice(4, p=[0.35, 0.15, 0.28, 0.22]))]
    others = [name for name in CLASSES if name != "boat" or kind == "boat"]
    wanted = [kind] * int(draws.integers(1, 3)) + draws.choice(others, draws.integers(0, 3)).tolist()
    small = SIZES[int(draws.integers(len(SIZES)))]
    width, height = (SCALE * side for side in small)
    image, mask = landscape(draws, width, height, kind == "boat"), Image.new("L", (width, height))
    boxes, labels = list[tuple[int, ...]](), list[int]()
    feet = np.linspace(0.18, 0.82, len(wanted)) + draws.uniform(-0.05, 0.05, len(wanted))
    for name, foot in zip(wanted, draws.permutation(feet), strict=True):
        size = height * draws.uniform(0.24, 0.45) * (1.25 if len(wanted) == 1 else 1)
        y = height * (draws.uniform(0.42, 0.62) if name == "balloon" else draws.uniform(0.76, 0.96))
        own = Image.new("L", (width, height))
        draw_thing(name, draws, (foot * width, y), size, image, own)
        mask.paste(1 + CLASSES.index(name), mask=own)
        if box := own.resize(small, Image.Resampling.NEAREST).getbbox():
            boxes.append(box)
            labels.append(CLASSES.index(name))
    return kind, {
        "image": photograph(draws, image.filter(ImageFilter.GaussianBlur(1)).resize(small, Image.Resampling.LANCZOS)),
        "mask": np.asarray(mask.resize(small, Image.Resampling.NEAREST)),
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "box_labels": np.array(labels, np.int64),
        "points": np.array(boxes, np.float32).reshape(-1, 2, 2),  # the upper left and lower right corner of each box
        "caption": f"{', '.join(CLASSES[label] for label in labels)}; {'at sea' if kind == 'boat' else 'in the hills'}",
    }


def photograph(draws: np.random.Generator, image: Image.Image) -> bytes:
    """The image with some grain as a JPEG; one in five is progressive."""
    grain = draws.normal(0, 4, (image.height, image.width, 1))
    pixels = np.clip(np.asarray(image, np.float32) + grain, 0, 255).astype(np.uint8)
    file, quality, is_progressive = io.BytesIO(), int(draws.integers(75, 95)), bool(draws.random() < 0.2)
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, progressive=is_progressive)
    return file.getvalue()


def pack(folder: Path, scenes: int) -> None:
    with packer.writer(folder, "hdf5", fields=FIELDS, classes=CLASSES, shards=packer.Shards(size="16MiB")) as out:
        for number in range(scenes):
            kind, fields = scene(number)
            out.write(f"{kind}/{number:05d}", label=kind if number % 41 else None, **fields)


SHOWN = "$$('.cell img.shown').length > 11"
DRAWN = "$$('.stage .layer').length === 3 && $('.caption-text') && $$('.panel .good').length > 5"
STILL = "[...document.images].every(image => image.complete) && !document.getAnimations().length"
VIEWS = [  # name, fragment of the address, width, dark, when it is complete
    ("grid", "order=class", 1280, False, SHOWN),
    ("sample", "order=class&run=house&at=3&sample={}", 1280, False, f"{SHOWN} && {DRAWN}"),
    ("predictions", "order=mistakes&run=wrong", 1280, False, SHOWN),
    ("histograms", "view=histograms", 1280, True, "$$('.columns').length > 2"),
    ("batch", "view=batches&seed=1&batch_size=24", 1280, False, "$$('.batch img.shown').length > 11"),
    ("phone", "order=class&run=house&at=3&sample={}", 420, True, DRAWN),
]


def predictions(place: Path, table: Path) -> Path:
    """A table of a model's predictions for the scenes: one in nine is wrong."""
    draws, rows = np.random.default_rng(1), ["key,predicted,score"]
    with readers.open(place) as reader:
        for key, label in zip(reader.keys, reader.labels, strict=True):
            wrong = draws.random() < 0.11
            rows.append(f"{key},{CLASSES[(label + wrong) % 4]},{draws.uniform(0.4 + 0.2 * (not wrong), 1):.2f}")
    table.write_text("\n".join(rows))
    return table


def take_pictures(place: Path, output: Path, scratch: Path) -> None:
    browser = Browser(find_chromium(), scratch / "profile")
    try:
        table = predictions(place, scratch / "predictions.csv")
        with packer.view(place) as viewing, packer.view(place, predictions=table) as predicted:
            page = browser.open(f"{viewing.url}#order=class&run=house")
            page.wait(SHOWN)
            page.click("#cell-3")
            number = page.wait("new URLSearchParams(location.hash.slice(1)).get('sample')")
            for name, fragment, width, is_dark, ready in VIEWS:
                url = predicted.url if name == "predictions" else viewing.url
                page = browser.open(f"{url}#{fragment.format(number)}", width=width, dark=is_dark)
                page.wait(f"{ready} && {STILL}")
                page.screenshot(scratch / "page.png")
                with Image.open(scratch / "page.png") as image:
                    image.save(output / f"view-{name}.webp", quality=78, method=6)
    finally:
        browser.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--set", type=Path, help="only pack the set, into this directory")
    options.add_argument("--scenes", type=int, default=SCENES)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = given.set or Path(scratch) / "scenes"
        pack(place, given.scenes)
        if given.set is None:
            take_pictures(place, Path(__file__).parent, Path(scratch))


if __name__ == "__main__":
    main()
