"""Write scikit-learn's handwritten digits as a tree of PNG files: a small set that a model really learns.

    python examples/make_digits.py digits && packer convert digits --to hdf5
    python examples/train_imagenette.py digits-hdf5 --model small --size 16 --no-flip --min-scale 0.7 --epochs 4

1,797 images of 8 x 8 pixels (Alpaydin and Kaynak, 1998), three quarters of them in train/, the others in val/.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_digits(root: Path) -> None:
    """root/<train or val>/<digit>/<number>.png; every fourth image is for validation."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = root / ("val" if number % 4 == 3 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        grey = np.round(pixels * (255 / 16)).astype(np.uint8)
        Image.fromarray(grey).convert("RGB").save(folder / f"{number:04d}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    write_digits(Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}: train/ and val/ with ten classes each")
