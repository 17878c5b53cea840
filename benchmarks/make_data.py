"""Make the benchmarks' trees from any folder of JPEG files.

    python benchmarks/make_data.py JPEGS --out DIR [--files 10000] [--tiny 50000] [--420 2000] [--faces 10000]

DIR/full    unchanged copies of JPEGS, repeated up to the number of files, in 10 class folders
DIR/tiny    JPEGS scaled down to files of about 4 kB, repeated likewise
DIR/420     the colour images of JPEGS, encoded again with 4:2:0 and the quantisation tables of each file
DIR/faces   178 x 218 pixels from the middle of JPEGS, scaled down, 4:2:0, quality 80: like CelebA's aligned faces

0 files leave a tree out. The same files give the same trees. Every file is a real copy, not a link, with separate pages
and blocks.
"""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["make_420", "make_faces", "make_full", "make_tiny"]

CLASSES = 10
TINY_BYTES = 4096
FACE, FACE_QUALITY = (178, 218), 80
_SIDES = (64, 80, 96, 112, 128, 144, 160)


def make_full(jpegs: Sequence[Path], folder: Path, files: int) -> None:
    """Write `files` copies of the JPEGs, starting again at the first after the last."""
    for number in range(files):
        shutil.copyfile(jpegs[number % len(jpegs)], _place(folder, number))


def make_tiny(jpegs: Sequence[Path], folder: Path, files: int) -> None:
    """Write `files` small versions; each JPEG is scaled once."""
    _make(jpegs, folder, files, _scaled)


def make_420(jpegs: Sequence[Path], folder: Path, files: int) -> None:
    """Write `files` JPEGs with 4:2:0."""
    _make(jpegs, folder, files, _subsampled)


def make_faces(jpegs: Sequence[Path], folder: Path, files: int) -> None:
    """Write `files` JPEGs of the size of CelebA's faces."""
    _make(jpegs, folder, files, _face)


def _make(jpegs: Sequence[Path], folder: Path, files: int, encode: Callable[[Path], bytes]) -> None:
    """Write `files` results of `encode`, repeating them if needed; an empty result leaves that JPEG out."""
    made = [data for path in jpegs[:files] if (data := encode(path))]
    if files and not made:
        raise SystemExit(f"{folder}: no JPEG is suitable")
    for number in range(files):
        _place(folder, number).write_bytes(made[number % len(made)])


def _subsampled(path: Path) -> bytes:
    from PIL import Image

    memory = io.BytesIO()
    with Image.open(path) as image:
        if image.mode != "RGB":
            return b""
        image.save(memory, "JPEG", qtables=image.quantization, subsampling="4:2:0")
    return memory.getvalue()


def _face(path: Path) -> bytes:
    from PIL import Image, ImageOps

    memory = io.BytesIO()
    with Image.open(path) as image:
        face = ImageOps.fit(image.convert("RGB"), FACE, Image.Resampling.BICUBIC)
    face.save(memory, "JPEG", quality=FACE_QUALITY, subsampling="4:2:0")
    return memory.getvalue()


def _scaled(path: Path) -> bytes:
    """The largest of a few sizes that fits into TINY_BYTES at quality 90, or else the smallest size."""
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
    parser.add_argument("--420", type=int, default=2_000, dest="subsampled")
    parser.add_argument("--faces", type=int, default=10_000)
    arguments = parser.parse_args()
    jpegs = sorted(path for path in arguments.jpegs.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not jpegs:
        parser.error(f"{arguments.jpegs}: no .jpg or .jpeg files")
    make_full(jpegs, arguments.out / "full", arguments.files)
    make_tiny(jpegs, arguments.out / "tiny", arguments.tiny)
    make_420(jpegs, arguments.out / "420", arguments.subsampled)
    make_faces(jpegs, arguments.out / "faces", arguments.faces)


if __name__ == "__main__":
    main()
