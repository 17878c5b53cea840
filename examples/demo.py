"""The main job on a small set of images made on the spot: convert, verify, read back, extract.

Run it with  make demo  or  python examples/demo.py [folder]. It prints what it measures; on a set this small the
figures say that things work, not how fast they are (see benchmarks/ for that).
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import time
from collections.abc import Iterable, Sized
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


class PlainFiles:
    """What torchvision's ImageFolder does with RandomResizedCrop and RandomHorizontalFlip, for a DataLoader."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.JPEG"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        random = np.random.default_rng()
        image = Image.open(self.paths[index]).convert("RGB")
        side = np.sqrt(image.width * image.height * random.uniform(0.08, 1))
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)) / 2)
        width, height = min(image.width, side * ratio), min(image.height, side / ratio)
        left, top = random.uniform(0, image.width - width), random.uniform(0, image.height - height)
        image = image.resize((160, 160), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        pixels = np.asarray(image)[:, :: random.choice((-1, 1))].transpose(2, 0, 1)
        return np.ascontiguousarray(pixels), CLASSES.index(self.paths[index].parent.name)


def images_per_second(loader: Iterable[tuple[Sized, object]], epochs: int = 3) -> float:
    """Of the best epoch but the first, which starts workers and warms caches."""
    rates = []
    for _ in range(epochs):
        started, count = time.perf_counter(), 0
        for images, _ in loader:
            count += len(images)
        rates.append(count / (time.perf_counter() - started))
    return max(rates[1:])


def load(source: Path, packed: Path) -> None:
    """Batches for training, where torch is installed: the usual loader over files, and ours over the packed set."""
    try:
        from readers.loader import ImageLoader
    except readers.MissingExtraError as error:
        print(f"no batches for training, because torch, which is large, is not installed: {error}, or  make test")
        return
    from torch.utils.data import DataLoader

    from readers.augment import RandomHorizontalFlip, RandomResizedCrop

    cpus = cache.usable_cpus()
    print(f"batches of 50 for training, random crops of 160 x 160, on {cpus} CPUs, from the page cache:")
    options = {"num_workers": cpus, "persistent_workers": True, "shuffle": True, "drop_last": True}
    plain = images_per_second(DataLoader(PlainFiles(source / "train"), 50, **options))  # type: ignore[arg-type]
    print(f"  files, Pillow, DataLoader with {cpus} workers {plain:9,.0f} images/s")
    with readers.open(packed, "train") as reader:
        ours = images_per_second(ImageLoader(reader, 50, augment=[RandomResizedCrop(160), RandomHorizontalFlip()]))
    print(f"  packed set, ImageLoader with {cpus} threads   {ours:9,.0f} images/s: {ours / plain:.1f} times as many")


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
    places = [("files", source)] + [(to, out / f"images-{to}") for to in ("hdf5", "tfrecord", "tar")]
    for name, place in places:
        with readers.open_folder(place, "train") if place == source else readers.open(place, "train") as reader:
            drop_from_page_cache(place)
            print(f"  {name:8s} cold, one by one         {rate((reader.read(i) for i in order), len(order))}")
            drop_from_page_cache(place)
            print(f"  {name:8s} cold, order known ahead  {rate(reader.stream(order), len(order))}")
            print(f"  {name:8s} page cache               {rate((reader.read(i) for i in order), len(order))}")

    load(source, out / "images-hdf5")

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
