"""Make the trees that the benchmarks run on, from any folder of JPEG files.

    python benchmarks/make_data.py JPEGS --out DIR [--files 10000] [--tiny 50000]

DIR/full    the JPEGS, as they are, repeated until there are enough, in 10 class folders
DIR/tiny    the JPEGS scaled down to files of about 4 kB, repeated likewise

The same files give the same trees. Every file is a copy of its own, with its own pages and blocks.
"""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["make_full", "make_tiny"]

CLASSES = 10
TINY_BYTES = 4096
_SIDES = (64, 80, 96, 112, 128, 144, 160)


def make_full(jpegs: Sequence[Path], folder: Path, files: int) -> None:
    """Copy `files` JPEGS, the first again after the last."""
    for number in range(files):
        shutil.copyfile(jpegs[number % len(jpegs)], _place(folder, number))


def make_tiny(jpegs: Sequence[Path], folder: Path, files: int) -> None:
    """Write `files` small versions; each of the JPEGS is scaled once."""
    small = [_scaled(path) for path in jpegs[:files]]
    for number in range(files):
        _place(folder, number).write_bytes(small[number % len(small)])


def _scaled(path: Path) -> bytes:
    """The largest of a few square-ish sizes that fits into TINY_BYTES at quality 90, or the smallest size."""
    from PIL import Image

    data = b""
    with Image.open(path) as image:
        image.draft("RGB", (2 * _SIDES[-1], 2 * _SIDES[-1]))
        picture = image.convert("RGB")
    for side in _SIDES:
        copy = picture.copy()
        copy.thumbnail((side, side))
        memory = io.BytesIO()
        copy.save(memory, "JPEG", quality=90)
        if data and memory.tell() > TINY_BYTES * 5 // 4:
            break
        data = memory.getvalue()
    return data


def _place(folder: Path, number: int) -> Path:
    place = folder / f"class{number % CLASSES}" / f"{number:06d}.jpg"
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jpegs", type=Path, help="folder with .jpg or .jpeg files, at any depth")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--tiny", type=int, default=50_000)
    arguments = parser.parse_args()
    jpegs = sorted(path for path in arguments.jpegs.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not jpegs:
        parser.error(f"{arguments.jpegs}: no .jpg or .jpeg files")
    make_full(jpegs, arguments.out / "full", arguments.files)
    make_tiny(jpegs, arguments.out / "tiny", arguments.tiny)


if __name__ == "__main__":
    main()
