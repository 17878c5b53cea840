"""The main job on a small set of images made on the spot: convert, verify, read back, extract.

Run it with  make demo  or  python examples/demo.py [folder]. It prints what it measures; on a set this small the
figures say that things work, not how fast they are (see benchmarks/ for that).
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

import cache
import packer
import readers

CLASSES = ("n01440764", "n02102040", "n02979186")
SPLITS = {"train": 200, "val": 40}


def make_images(root: Path) -> None:
    """Photograph-like JPEGs of several sizes: smooth noise, so that they compress as photographs do."""
    random = np.random.default_rng(0)
    for split, count in SPLITS.items():
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = (int(x) for x in random.integers(200, 500, 2))
                coarse = random.integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8)
                image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
                grain = random.normal(0, 6, (height, width, 3))
                pixels = np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}_{number:04d}.JPEG", quality=90)


def rate(reads: Iterable[object], count: int) -> str:
    started = time.perf_counter()
    total = sum(len(data) for data in reads)  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    return f"{count / seconds:9,.0f} samples/s  {total / seconds / 1e6:7,.0f} MB/s"


def drop_from_page_cache(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            cache.drop(path)


def load(packed: Path) -> None:
    """Batches for training, where torch is installed."""
    try:
        from readers.loader import ImageLoader
    except readers.MissingExtraError as error:
        print(f"no batches for training: {error}")
        return
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop

    with readers.open(packed, "train") as reader:
        loader = ImageLoader(reader, 50, augment=[RandomResizedCrop(160), RandomHorizontalFlip()])
        started, count = time.perf_counter(), 0
        for images, _ in loader:
            count += len(images)
        images_per_second = count / (time.perf_counter() - started)
        print(f"  ImageLoader at 160 x 160, {loader.threads} threads {images_per_second:9,.0f} images/s")


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    source = out / "images"
    print(f"making {sum(SPLITS.values()) * len(CLASSES)} images in {source}")
    make_images(source)

    for to in ("hdf5", "tfrecord", "tar"):
        done = packer.convert(source, to=to, output=out / f"images-{to}")
        checked = packer.verify(done.output, deep=True, against=source)
        assert checked.ok, checked.problems
        print(
            f"{to:9s} {done.samples} samples in {done.shards} shards, {done.samples / done.seconds:,.0f} samples/s; "
            f"verified against the source"
        )

    order = np.random.default_rng(1).permutation(SPLITS["train"] * len(CLASSES)).tolist()
    print(f"reading train in random order, {cache.usable_cpus()} CPUs, one thread:")
    with readers.open_folder(source, "train") as folder:
        drop_from_page_cache(source)
        print(f"  plain files, cold                {rate((folder.read(i) for i in order), len(order))}")
        print(f"  plain files, page cache          {rate((folder.read(i) for i in order), len(order))}")
    for to in ("hdf5", "tfrecord", "tar"):
        packed = out / f"images-{to}"
        with readers.open(packed, "train") as reader:
            drop_from_page_cache(packed)
            print(f"  {to:8s} cold, order known ahead   {rate(reader.stream(order), len(order))}")
            print(f"  {to:8s} page cache, read          {rate((reader.read(i) for i in order), len(order))}")

    load(out / "images-hdf5")

    packer.extract(out / "images-tar", out / "back")
    same = filecmp.dircmp(source, out / "back")
    assert not (same.left_only or same.right_only or same.diff_files)
    for split in SPLITS:
        for name in CLASSES:
            names = [path.name for path in (source / split / name).iterdir()]
            _, mismatch, errors = filecmp.cmpfiles(source / split / name, out / "back" / split / name, names, False)
            assert not mismatch and not errors
    print(f"extracted {out / 'back'}: the original tree, byte for byte")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out"))
