"""Write JPEGs of random text, 224 x 224 pixels and about 16 kB each: a set of any size with two classes.

    python examples/make_text.py text --count 8000 && packer convert text --to hdf5

An image has 7 lines of 8 letters, with the letter frequencies of English, random colours of paper and ink, and noise.
Images with the word in a line are in the folder `with`, the others in `without`. The seed and the number of an image
determine it. `text_images` works on arrays of NumPy and of JAX: `generate_jax.py` draws the same images on a device.
Needs Pillow 10.1 or later, with FreeType.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL, GRID, WORD = (32, 28), (7, 8), "he"
QUALITY = 88
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
# The frequency of each letter of ALPHABET in 256 letters of English text.
_OFTEN = (40, 17, 3, 6, 9, 26, 5, 4, 13, 15, 1, 2, 9, 5, 15, 16, 4, 1, 13, 14, 19, 6, 2, 5, 1, 4, 1)
# The letter of each byte value.
LETTERS = np.repeat(np.arange(len(ALPHABET), dtype=np.uint8), _OFTEN)
_AT_ONCE = 64


@lru_cache
def glyphs(height: int, width: int) -> np.ndarray[Any, Any]:
    """Images of the letters, float32 [27, height, width]: ink from 0 to 1."""
    font = ImageFont.load_default(0.8 * height)
    cells = [Image.new("L", (width, height)) for _ in ALPHABET]
    for cell, letter in zip(cells, ALPHABET, strict=True):
        ImageDraw.Draw(cell).text((width / 2, 0.75 * height), letter, fill=255, font=font, anchor="ms")
    return np.stack([np.asarray(cell, np.float32) / 255 for cell in cells])


def text_images(
    random_bytes: Callable[[tuple[int, ...]], Any], count: int, letters: Any, ink: Any, grid: tuple[int, int]
) -> tuple[Any, Any]:
    """Images uint8 [count, height, width, 3], and their text, uint8 [count, lines, columns], as indices into ALPHABET.

    random_bytes: makes a random uint8 array of a shape.
    letters, ink: `LETTERS` and `glyphs(…)`, as arrays of the same library.
    grid: lines, letters per line.
    """
    text = letters[random_bytes((count, *grid))]
    _, height, width = ink.shape
    page = ink[text].swapaxes(2, 3).reshape(count, grid[0] * height, grid[1] * width, 1)
    paper = (random_bytes((count, 1, 1, 3)) & 63).astype("float32") + 192
    dark = (random_bytes((count, 1, 1, 3)) & 127).astype("float32")
    noise = (random_bytes(page.shape) & 15).astype("float32") - 8
    return (paper + page * (dark - paper) + noise).clip(0, 255).astype("uint8"), text


def contains(text: Any, word: str) -> Any:
    """Whether a line of each text contains the word: bool [count]."""
    starts = text.shape[-1] - len(word) + 1
    matches = text[..., :starts] == ALPHABET.index(word[0])
    for place, letter in enumerate(word[1:], 1):
        matches = matches & (text[..., place : place + starts] == ALPHABET.index(letter))
    return matches.any((-2, -1))


def write_text(root: Path, count: int, *, seed: int = 0, word: str = WORD, workers: int | None = None) -> int:
    """Write root/<with or without>/<number>.jpg; returns the bytes of all files.

    workers: processes; default: one per CPU. Raises FileExistsError if `root` exists.
    """
    if root.exists():
        raise FileExistsError(f"{root} exists: name a new folder")
    partial_root = root.with_name(root.name + ".partial")
    for name in ("with", "without"):
        (partial_root / name).mkdir(parents=True, exist_ok=True)
    starts = range(0, count, _AT_ONCE)
    write = partial(_write_some, partial_root, count, seed, word)
    with ProcessPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        written = sum(pool.map(write, starts))
    partial_root.rename(root)
    return written


def _write_some(root: Path, count: int, seed: int, word: str, start: int) -> int:
    size = 0
    for number in range(start, min(start + _AT_ONCE, count)):
        draw = np.random.default_rng((seed, number))
        images, text = text_images(
            lambda shape, draw=draw: draw.integers(0, 256, shape, np.uint8), 1, LETTERS, glyphs(*CELL), GRID
        )
        path = root / ("with" if contains(text, word)[0] else "without") / f"{number:06d}.jpg"
        Image.fromarray(images[0]).save(path, "JPEG", quality=QUALITY)
        size += path.stat().st_size
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--word", default=WORD, help=f"lower-case word that decides the class; default {WORD!r}")
    arguments = parser.parse_args()
    if arguments.root.exists():
        parser.error(f"{arguments.root} exists: name a new folder")
    if not arguments.word or set(arguments.word) - set(ALPHABET) or len(arguments.word) > GRID[1]:
        parser.error(f"--word has 1 to {GRID[1]} letters of {ALPHABET.strip()!r}")
    size = write_text(arguments.root, arguments.count, seed=arguments.seed, word=arguments.word)
    print(f"wrote {arguments.count:,} images of {size / arguments.count / 1e3:.1f} kB to {arguments.root}")


if __name__ == "__main__":
    main()
