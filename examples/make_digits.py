"""Write small images of digits as a tree of PNG files: a small set that a model can learn.

    python examples/make_digits.py digits && packer convert digits --to hdf5
    python examples/train_imagenette.py digits-hdf5 --model small --size 16 --no-flip --min-scale 0.7 --epochs 4

1,800 images of 16 x 16 pixels, three quarters of them in train/, the others in val/. Each shows a digit in Pillow's
default font, slightly rotated and shifted, with random shades of ink and paper, and with noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def draw_digit(digit: int, random: np.random.Generator) -> Image.Image:
    image = Image.new("L", (16, 16))
    place = tuple(8 + random.uniform(-1.5, 1.5, 2))
    ImageDraw.Draw(image).text(place, str(digit), 255, ImageFont.load_default(random.uniform(11, 15)), anchor="mm")
    shape = np.asarray(image.rotate(random.uniform(-15, 15), Image.Resampling.BILINEAR)) / 255
    paper, ink = random.uniform(0, 80), random.uniform(150, 255)
    pixels = paper + (ink - paper) * shape + random.normal(0, 12, shape.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert("RGB")


def write_digits(root: Path) -> None:
    """Write root/<train or val>/<digit>/<number>.png; every fourth image of a digit is for validation."""
    random = np.random.default_rng(0)
    for number in range(1800):
        folder = root / ("val" if number // 10 % 4 == 3 else "train") / str(number % 10)
        folder.mkdir(parents=True, exist_ok=True)
        draw_digit(number % 10, random).save(folder / f"{number:04d}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    write_digits(Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}: train/ and val/ with ten classes each")
