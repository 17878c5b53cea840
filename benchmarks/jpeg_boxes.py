"""Boxes of JPEGs decoded without a cache: libjpeg-turbo, compiled functions, and strips for both.

    python benchmarks/jpeg_boxes.py FOLDER [--images 200] [--rounds 5]

FOLDER: JPEGs, at any depth. The boxes are those of RandomResizedCrop(224), at the scales and with the colours that
`ImageLoader` decodes them at. One thread, and its CPU time. A round is every way in turn, each over all images; ratios
are taken within a round, and medians over rounds. All pixels are compared first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from packer.jpeg_rows import row_entry
from readers.augment import RandomResizedCrop
from readers.augment.recipe import Recipe
from readers.decode import Region, Scratch, decode_image
from readers.headers import parse_header
from readers.rows.entries import RowEntry
from readers.rows.strips import Strip, StripRange, find_strip, make_strip


class Image(NamedTuple):
    data: bytes
    size: tuple[int, int]
    region: Region
    entry: RowEntry | None
    which: StripRange | None
    strip: Strip

    @property
    def in_strip(self) -> Region:
        return self.region._replace(top=self.region.top - self.strip.first_row)


def load(folder: Path, most: int) -> list[Image]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    files = [path.read_bytes() for path in paths[:: max(1, len(paths) // most)][:most]]
    headers = [parse_header(data) for data in files]
    files, headers = zip(*(pair for pair in zip(files, headers, strict=True) if pair[1].orientation == 1), strict=True)
    heights, widths = (np.array([getattr(one, name) for one in headers]) for name in ("height", "width"))
    plan = Recipe([RandomResizedCrop(224)]).plan(1, 0, np.arange(len(files)), heights, widths)
    images = []
    for data, header, job in zip(files, headers, plan.jobs(), strict=True):
        region, size = Region(*job[0]), (header.height, header.width)
        try:
            entry = row_entry(data)
            which = find_strip(entry, size, region.top, region.top + region.height)
            strip = make_strip(entry, data[which.start : which.stop], which, size)
        except ValueError:
            entry, which, strip = None, None, Strip(data)
        images.append(Image(data, size, region, entry, which, strip))
    noted = [image for image in images if image.entry is not None]
    part = sum(len(image.strip.data) for image in images) / sum(map(len, files))
    up_to = sum(image.which.stop if image.which else len(image.data) for image in images) / sum(map(len, files))
    size = sum(13 * len(image.entry.bits) for image in noted if image.entry) / sum(map(len, files))
    print(f"{len(noted)} of {len(images)} images have rows; strips: {part:.1%} of the bytes, up to the box {up_to:.1%}")
    print(f"the entries take {size:.2%} of the files")
    return images


def compare(images: list[Image]) -> None:
    for image in images:
        wanted = decode_image(image.data, image.region)
        others = (
            decode_image(image.data, image.region, compiled=True),
            decode_image(image.strip.data, image.in_strip),
            decode_image(image.strip.data, image.in_strip, compiled=True),
        )
        if not all(np.array_equal(wanted, other) for other in others):
            raise SystemExit(f"pixels differ: {[np.array_equal(wanted, other) for other in others]} {image.region}")
    print(f"{3 * len(images)} boxes: no difference")


def measure(images: list[Image], rounds: int) -> None:
    scratch = Scratch()

    def strip_of(image: Image) -> Strip:
        if image.entry is None or image.which is None:
            return image.strip
        return make_strip(image.entry, image.data[image.which.start : image.which.stop], image.which, image.size)

    ways: dict[str, Callable[[Image], object]] = {
        "libjpeg-turbo": lambda image: decode_image(image.data, image.region, scratch),
        "libjpeg-turbo, strip": lambda image: decode_image(strip_of(image).data, image.in_strip, scratch),
        "compiled": lambda image: decode_image(image.data, image.region, scratch, compiled=True),
        "compiled, strip": lambda image: decode_image(strip_of(image).data, image.in_strip, scratch, compiled=True),
        "making the strip": strip_of,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, function in ways.items():
            started = time.thread_time()
            for image in images:
                function(image)
            if number:
                times[name].append((time.thread_time() - started) / len(images) * 1e3)
    first = times["libjpeg-turbo"]
    for name, found in times.items():
        ratio = median(a / b for a, b in zip(first, found, strict=True))
        print(f"{name:24} {median(found):6.3f} ms  {ratio:5.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    images = load(arguments.folder, arguments.images)
    compare(images)
    measure(images, arguments.rounds)


if __name__ == "__main__":
    main()
