"""Raw pixels against JPEG and PNG: CPU time of the loader, and bytes, for the same images.

    python benchmarks/raw_pixels.py FOLDER [--count 500] [--side 256] [--crop 224] [--rounds 5]

The images of FOLDER, at any depth, are packed with `Resize(side), CenterCrop(side)` as JPEG (quality 90), PNG and raw
pixels. The three sets take turns in every round. The figure is the CPU time of the process with one thread, everything
in the page cache, for a random crop, a flip, and batches of float32: medians, and ratios to the JPEGs of the same
round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import packer
import readers
from packer import Reencode
from readers.augment import CenterCrop, Normalize, RandomCrop, RandomHorizontalFlip, Resize
from readers.augment.ops import IMAGENET_MEAN, IMAGENET_STD
from readers.loader import ImageLoader

SUFFIXES = (".jpg", ".jpeg", ".png")
CODECS = {"JPEG": Reencode("jpeg", quality=90), "PNG": Reencode("png"), "raw": Reencode("raw")}


def chosen(folder: Path, count: int, into: Path) -> Path:
    """Link the first `count` images of a folder, by name, in the folder `into`."""
    into.mkdir()
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)[:count]
    for number, path in enumerate(images):
        (into / f"{number:06d}{path.suffix}").symlink_to(path.resolve())
    return into


def seconds(reader: readers.Reader, crop: int) -> float:
    """CPU time of an epoch."""
    ops = [RandomCrop(crop), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    start = time.process_time()
    for images, _ in ImageLoader(reader, 64, augment=ops, seed=1, threads=1):
        assert images.shape[1:] == (3, crop, crop)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="raw-pixels-"))
    try:
        source = chosen(options.folder, options.count, work / "images")
        ops = [Resize(options.side), CenterCrop(options.side)]
        opened = {}
        for name, codec in CODECS.items():
            packer.convert(
                source, "hdf5", work / name, images=packer.Images(ops=ops, reencode=codec), run=packer.Run(workers=1)
            )
            opened[name] = readers.open(work / name)
            seconds(opened[name], options.crop)
        times: dict[str, list[float]] = {name: [] for name in CODECS}
        for _ in range(options.rounds):
            for name, reader in opened.items():
                times[name].append(seconds(reader, options.crop) / len(reader))
        print("| packed as | bytes an image | CPU time an image | speed |\n|---|---|---|---|")
        for name, cpu_s in times.items():
            ratio = statistics.median(jpeg / other for jpeg, other in zip(times["JPEG"], cpu_s, strict=True))
            size = float(opened[name].sizes().mean())
            print(f"| {name} | {size:,.0f} | {statistics.median(cpu_s) * 1e6:,.0f} µs | {ratio:.1f} |")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
