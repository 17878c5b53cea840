"""A tour of packer in a minute: make images, pack and verify them, read samples and batches, view them on a page.

    make demo        or        python examples/demo.py [FOLDER] [IMAGES]

It makes IMAGES pictures (400) with the statistics of photographs, and prints its measurements. Both sides of a
comparison have the same images, CPUs and state of the page cache; on other images and disks the figures differ.
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

import cache
import packer
import readers
from cache.messages import human_bytes, human_seconds, plural, table

CLASSES = ("coast", "forest", "town")
SIDE, BATCH, EPOCHS = 224, 50, 2
WIDTH = 100
FORMATS = ("hdf5", "tfrecord", "tar")


# --- images ---------------------------------------------------------------------------------------------------------
def texture(draw: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    """Noise whose amplitude falls as 1/frequency, like that of photographs (Field 1987); most values are in -1 to 1."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
    frequency[0, 0] = 1
    phases = np.exp(2j * np.pi * draw.random(frequency.shape))
    noise = np.fft.irfft2(phases / frequency, (size, size))
    return np.asarray(noise / (3 * noise.std()), np.float32)


def make_images(root: Path, split: str, numbers: Iterable[int]) -> int:
    """Write scenes of about 500 x 375 pixels: a sky, a ground, objects. Returns the bytes of all files."""
    draw = np.random.default_rng([len(split), *list(numbers)[:1]])
    light, *colours = (texture(draw, 1024) for _ in range(3))
    grain = draw.standard_normal((1024, 1024), np.float32)
    total = 0
    for number in numbers:
        kind = number % len(CLASSES)
        height, width = int(draw.integers(330, 420)), int(draw.integers(440, 560))

        def part(field: npt.NDArray[np.float32], height: int = height, width: int = width) -> npt.NDArray[np.float32]:
            top, left = draw.integers(0, 1024 - height), draw.integers(0, 1024 - width)
            return field[top : top + height, left : left + width]

        horizon = int(height * draw.uniform(0.3, 0.6))
        sky = (np.arange(height) < horizon)[:, None]
        base = np.where(sky[..., None], (165, 195, 225), ((190, 175, 130), (60, 95, 45), (120, 115, 110))[kind])
        contrast = np.where(sky, 30, (45, 70, 50)[kind]).astype(np.float32)
        shine, red, blue = contrast * part(light) + 3 * part(grain), 14 * part(colours[0]), 14 * part(colours[1])
        pixels = base.astype(np.float32) + np.stack([shine + red, shine + 0.3 * red, shine + blue], axis=-1)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        pen = ImageDraw.Draw(image)
        for _ in range(int(draw.integers(3, 9))):
            x, tall = int(draw.integers(0, width)), int(draw.integers(20, 120))
            shade = tuple(int(value) for value in draw.integers(40, 200, 3))
            if kind == 2:
                pen.rectangle((x, horizon - tall, x + tall // 2, horizon + 10), shade)
            else:
                pen.ellipse((x, horizon - tall // 2, x + tall, horizon + tall // 2), shade)
        path = root / split / CLASSES[kind] / f"{CLASSES[kind]}-{number:05d}.jpg"
        image.save(path, quality=92)
        total += path.stat().st_size
    return total


def make_tree(root: Path, images: int) -> int:
    """Write `images` pictures for training and a fifth as many for validation; returns the bytes of all files."""
    splits = {"train": images, "val": max(len(CLASSES), images // 5)}
    for split in splits:
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
    jobs = [(split, range(first, min(first + 60, count))) for split, count in splits.items()
            for first in range(0, count, 60)]  # fmt: skip
    with ProcessPoolExecutor(cache.usable_cpus()) as pool:
        return sum(pool.map(partial(make_images, root), *zip(*jobs, strict=True)))


# --- reading --------------------------------------------------------------------------------------------------------
def drop_from_page_cache(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            cache.drop(path)


def rate(reads: Callable[[], Iterable[object]]) -> str:
    """The rate of the reads in samples/s, as text."""
    started = time.perf_counter()
    count = sum(1 for _ in reads())
    return f"{count / (time.perf_counter() - started):,.0f}"


def compare_reads(places: dict[str, Path]) -> None:
    rows = []
    for name, place in places.items():
        with readers.open_folder(place, "train") if name == "files" else readers.open(place, "train") as reader:
            order = np.random.default_rng(1).permutation(len(reader)).tolist()
            rates = []
            for reads, is_cold in (
                (lambda: map(reader.read, order), True),  # noqa: B023
                (lambda: reader.stream(order), True),  # noqa: B023
                (lambda: map(reader.read, order), False),  # noqa: B023
            ):
                if is_cold:
                    drop_from_page_cache(place)
                rates.append(rate(reads))
            rows.append((name, *rates))
    show(table(("samples a second", "cold", "cold, order known ahead", "page cache"), rows, WIDTH))


class Files:
    """A data set like torchvision's ImageFolder with RandomResizedCrop and RandomHorizontalFlip, in Pillow."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        draw = np.random.default_rng()
        image = Image.open(self.paths[index]).convert("RGB")
        side = np.sqrt(image.width * image.height * draw.uniform(0.08, 1))
        ratio = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)) / 2)
        width, height = min(image.width, side * ratio), min(image.height, side / ratio)
        left, top = draw.uniform(0, image.width - width), draw.uniform(0, image.height - height)
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        pixels = np.asarray(image)[:, :: draw.choice((-1, 1))].transpose(2, 0, 1)
        return np.ascontiguousarray(pixels), CLASSES.index(self.paths[index].parent.name)


def batches_per_second(loader: Iterable[object], place: Path, is_cold: bool) -> float:
    """Images/s of one epoch."""
    if is_cold:
        drop_from_page_cache(place)
    started, batches = time.perf_counter(), sum(1 for _ in loader)
    return batches / (time.perf_counter() - started)


def compare_batches(source: Path, packed: Path) -> None:
    """Compare loaders of training batches, if torch is installed."""
    try:
        from readers.loader import ImageLoader
    except readers.MissingExtraError:
        print("not measured: PyTorch, a large package, is not installed. To install it:  make demo TORCH=1")
        return
    from torch.utils.data import DataLoader

    from readers.augment import RandomHorizontalFlip, RandomResizedCrop

    cpus = cache.usable_cpus()
    options = {"num_workers": cpus, "persistent_workers": True, "shuffle": True, "drop_last": True}
    with readers.open(packed, "train") as reader:
        size = min(BATCH, len(reader))
        loaders = {
            f"files: ImageFolder and DataLoader, {plural(cpus, 'worker')}": (
                source,
                DataLoader(Files(source / "train"), size, **options),  # type: ignore[arg-type]
            ),
            f"packed set: ImageLoader, {plural(cpus, 'thread')}": (
                packed,
                ImageLoader(reader, size, augment=[RandomResizedCrop(SIDE), RandomHorizontalFlip()], threads=cpus),
            ),
        }
        best = {name: [0.0, 0.0] for name in loaders}
        for epoch in range(1 + EPOCHS):  # in turn, so that other processes slow down both loaders
            for number, is_cold in enumerate((True, False)):
                for name, (place, loader) in loaders.items():
                    speed = size * batches_per_second(loader, place, is_cold)
                    if epoch:  # the first epoch starts workers
                        best[name][number] = max(best[name][number], speed)
    first = next(iter(best.values()))
    rows = [
        (name, *(f"{value:,.0f}  {value / base:3.1f} x" for value, base in zip(values, first, strict=True)))
        for name, values in best.items()
    ]
    show(table((f"images a second, crops of {SIDE}", "cold", "page cache"), rows, WIDTH))


# --- the demo -------------------------------------------------------------------------------------------------------
def show(lines: Iterable[str]) -> None:
    print(*lines, sep="\n", flush=True)


def headline(text: str) -> None:
    print(f"\n{text}", flush=True)


def main(out: Path, images: int) -> None:
    began = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    source = out / "images"
    total = make_tree(source, images)
    took = human_seconds(time.perf_counter() - began)
    print(f"{source}: {human_bytes(total)} of JPEGs made, {images} of them for training, in {took}")

    headline("1. Pack them, and compare every byte with the originals  (packer convert, packer verify)")
    rows = []
    for to in FORMATS:
        done = packer.convert(source, to=to, output=out / f"images-{to}")
        checked = packer.verify(done.output, deep=True, against=source)
        assert checked.ok, checked.problems
        more = f"{(done.shard_bytes / done.payload_bytes - 1) * 100:+.1f} %"
        pace = f"{done.samples / done.seconds:,.0f}"
        rows.append((str(done.output), plural(done.shards, "shard"), more, pace, "every byte"))
    show(table(("set", "files", "size", "samples/s", "verified"), rows, WIDTH))

    headline("2. Read them in random order, one thread  (readers.open; cold: dropped from the page cache before)")
    compare_reads({"files": source} | {to: out / f"images-{to}" for to in FORMATS})

    headline(f"3. Batches of {BATCH} for training, random crops and flips  (readers.loader.ImageLoader)")
    compare_batches(source, out / "images-hdf5")

    headline("4. Get the originals back  (packer extract)")
    packer.extract(out / "images-tar", out / "back")
    check_same(source, out / "back")
    print(f"{out / 'back'}: the same names and bytes")

    headline("5. Look at them")
    page = export_page(out)
    print(f"packer view {page}      # opens the page in your browser; web servers can serve it, too")
    print(f"packer inspect {out / 'images-hdf5'}")
    print(f"\ntotal time: {human_seconds(time.perf_counter() - began)}; remove the files with  rm -r {out}")


def export_page(out: Path) -> Path:
    from packer.tools.view import export_view

    export_view(out / "images-hdf5", out / "page")
    return out / "page"


def check_same(first: Path, second: Path) -> None:
    names = [str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()]
    assert len(names) == sum(path.is_file() for path in second.rglob("*"))
    assert filecmp.cmpfiles(first, second, names, shallow=False) == (names, [], [])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out"), int(sys.argv[2]) if len(sys.argv) > 2 else 400)
