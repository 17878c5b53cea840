"""The codec of DCT coefficients against libjpeg-turbo: bytes, encoding, decoding of whole images and of boxes, and
boxes resized to 224 x 224.

    python benchmarks/coefficients.py FOLDER [--images 200] [--rounds 5]

FOLDER: JPEGs, at any depth. Figures are CPU time of one thread. A round runs every way in turn over all images, so that
no way profits from data that another left in the CPU's cache. Ratios are taken within a round; medians over rounds. All
pixels are compared first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from pipeline_job import random_box

sys.path.append(str(Path(__file__).resolve().parent.parent))

from readers.coefficients import Refused, decode, decode_resized, encode_strictly, parse_coefficients
from readers.decode import Region, Scratch, decode_image

SEED = 1
SIDE = 224  # of resized boxes


class Image(NamedTuple):
    jpeg: bytes
    kept: bytes
    height: int
    width: int
    sampling: str
    box: Region


def load(folder: Path, most: int) -> list[Image]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    chance, images, reasons = random.Random(SEED), [], []
    for path in paths[:: max(1, len(paths) // most)][:most]:
        jpeg = path.read_bytes()
        try:
            kept = encode_strictly(jpeg)
        except Refused as error:
            reasons.append(f"{path.name}: {error}")
            continue
        shape = parse_coefficients(kept)
        height, width = shape.header.upright_size
        sampling = f"{shape.across}x{shape.down}" if shape.components == 3 else "grey"
        images.append(Image(jpeg, kept, height, width, sampling, Region(*random_box(height, width, chance))))
    print(f"{len(images)} images kept, {len(reasons)} not", *reasons, sep="\n  ")
    return images


def resize(pixels: Any, out: Any) -> Any:
    """Resize as the loader does without coefficients."""
    source, made = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, out))
    torch.ops.aten._upsample_bilinear2d_aa.out(source, out.shape[:2], False, None, None, out=made)
    return out


def compare(images: list[Image]) -> None:
    """Exit if a pixel differs."""
    resized = 0
    for image in images:
        whole = decode_image(image.jpeg)
        regions = [image.box, *(Region(0, 0, image.height, image.width, n) for n in (2, 4, 8))]
        same = np.array_equal(decode(image.kept), whole)
        same &= all(np.array_equal(decode(image.kept, region), decode_image(image.jpeg, region)) for region in regions)
        made = np.empty((SIDE, SIDE, 3), np.uint8)
        if decode_resized(image.kept, image.box, (SIDE, SIDE), made):
            resized += 1
            same &= np.array_equal(made, resize(decode_image(image.jpeg, image.box), np.empty_like(made)))
        if not same:
            raise SystemExit("pixels differ")
    print(f"{5 * len(images)} decodes (whole, a box, 1/2, 1/4, 1/8) and {resized} resized boxes: no difference")


def measure(images: list[Image], rounds: int) -> None:
    scratch, memory = Scratch(), bytearray(3 * max(image.height * image.width for image in images))
    out, small = np.frombuffer(memory, np.uint8), np.empty((SIDE, SIDE, 3), np.uint8)

    def place(height: int, width: int) -> Any:
        return out[: 3 * height * width].reshape(height, width, 3)

    def exactly(image: Image) -> None:
        simplejpeg.decode_jpeg(image.jpeg, "RGB", fastdct=False, fastupsample=False, buffer=memory)

    def half(image: Image) -> Region:
        return Region(0, 0, image.height, image.width, 2)

    def own(image: Image, region: Region | None, is_checked: bool) -> None:
        size = (image.height, image.width) if region is None else tuple(-(-n // region.reduce) for n in region[2:4])
        decode(image.kept, region, place(*size), is_checked=is_checked)

    def resized(image: Image) -> None:
        if not decode_resized(image.kept, image.box, (SIDE, SIDE), small):
            apart(image)

    def apart(image: Image) -> None:
        resize(decode(image.kept, image.box, place(*image.box[2:4])), small)

    ways: dict[str, Callable[[Image], object]] = {
        "simplejpeg, whole": exactly,
        "whole": lambda image: own(image, None, False),
        "whole, checksum compared before": lambda image: own(image, None, True),
        "encode": lambda image: encode_strictly(image.jpeg),
        "decode_image, box": lambda image: decode_image(image.jpeg, image.box, scratch),
        "box": lambda image: own(image, image.box, False),
        "box, checksum compared before": lambda image: own(image, image.box, True),
        "decode_image, box, resize": lambda image: resize(decode_image(image.jpeg, image.box, scratch), small),
        "resized box, a resize by itself": apart,
        "resized box": resized,
        "decode_image, 1/2": lambda image: decode_image(image.jpeg, half(image), scratch),
        "1/2": lambda image: own(image, half(image), False),
    }
    against = {
        "whole": "simplejpeg, whole",
        "encode": "simplejpeg, whole",
        "box": "decode_image, box",
        "resized box": "decode_image, box, resize",
        "1/2": "decode_image, 1/2",
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, function in ways.items():
            started = time.thread_time()
            for image in images:
                function(image)
            if number:  # the first round warms up
                times[name].append(1000 * (time.thread_time() - started) / len(images))
    for name, milliseconds in times.items():
        base = against.get(name.partition(",")[0])
        ratio = f"  {np.median(np.divide(times[base], milliseconds)):5.2f} x as fast" if base else ""
        print(f"  {name:32} {np.median(milliseconds):7.3f} ms{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = load(arguments.folder, arguments.images)
    compare(images)
    for sampling in (None, *sorted({image.sampling for image in images})):
        chosen = [image for image in images if sampling in (None, image.sampling)]
        ratios = [len(image.kept) / len(image.jpeg) for image in chosen]
        total = sum(len(image.kept) for image in chosen) / sum(len(image.jpeg) for image in chosen)
        low, middle, high = np.percentile(ratios, (5, 50, 95))
        title = f"{sampling or 'all'}: {len(chosen)} images"
        print(f"{title}; {total:.3f} x the JPEGs (p5 {low:.2f}, {middle:.2f}, p95 {high:.2f})")
        if len(chosen) >= 10:
            measure(chosen, arguments.rounds)


if __name__ == "__main__":
    main()
