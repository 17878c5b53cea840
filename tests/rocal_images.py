"""Images that stay distinguishable after any crop, resize and flip: each has a colour, and its number as label."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from loader_options import grouped
from PIL import Image

import readers
from readers.augment import Crop
from readers.rocal import RocalLoader, celeba, external_source

SIZE = (48, 40)  # width, height
BATCH = 4
MIDDLE = Crop(4, 8, 32, 32)  # relative to SIZE


def colour(number: int) -> tuple[int, int, int]:
    return 10 + 40 * (number % 6), 10 + 40 * (number // 6 % 6), 200 - 3 * number


def solid(number: int, kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = SIZE, **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour(number)).convert(mode).save(out, kind, **options)
    return out.getvalue()


def mapped(number: int, size: tuple[int, int]) -> bytes:
    """An image whose pixels encode their position: red the column, green the row, blue the number of the image."""
    width, height = size
    columns, rows = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([columns, rows, np.full_like(rows, 6 * number + 8)], axis=2).round().astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


def box_of(pixels: npt.NDArray[Any], size: tuple[int, int]) -> tuple[int, tuple[float, ...]]:
    """(number, (left, top, right, bottom)) of the box of a mapped image of `size`, shown by values [height, width, 3]
    from 0 to 255; right is less than left where the box is mirrored. Fails where the values do not show an upright
    box."""
    sides = []
    for axis, (plane, side) in enumerate(zip((pixels[:, :, 0], pixels[:, :, 1].T), size, strict=True)):
        places = plane.astype(float) * (side - 1) / 255 + 0.5
        at = np.arange(places.shape[1]) + 0.5
        slope, start = np.polyfit(at, places.mean(axis=0), 1)
        off = np.abs(places - (start + slope * at)).max()
        assert off < 0.02 * side + 1, f"axis {axis} of the image is not evenly scaled: {off} of {side} pixels off"
        sides.append((start, start + slope * len(at)))
    blue = pixels[:, :, 2].astype(float)
    assert blue.max() - blue.min() < 10, f"pixels of several images: blue from {blue.min()} to {blue.max()}"
    (left, right), (top, bottom) = sides
    return round((float(blue.mean()) - 8) / 6), (left, top, right, bottom)


def folder_of(root: Path, images: dict[int, bytes]) -> readers.Reader:
    """A folder with a class for each image, so that label and number are the same."""
    for number, data in images.items():
        (root / f"{number:03d}").mkdir(parents=True)
        (root / f"{number:03d}" / f"image{number}.jpg").write_bytes(data)
    return readers.open_folder(root)


def numbers_of(images: npt.NDArray[np.float32], mean: float = 127.5, std: float = 127.5) -> list[int]:
    """The numbers of images, by the colour in their middle."""
    middle = images[:, :, images.shape[2] // 2, images.shape[3] // 2] * std + mean
    table = np.array([colour(number) for number in range(40)])
    distances = np.abs(middle[:, None, :] - table[None]).max(axis=2)
    assert (distances.min(axis=1) < 12).all(), f"colours of no image: {middle}"
    return [int(number) for number in distances.argmin(axis=1)]


def faces(reader: Any, **options: Any) -> RocalLoader:
    """A pipeline whose images keep their colours: its only random op is the flip."""
    fields = options.pop("fields", ("image", "label"))
    source = external_source(reader, BATCH, **grouped({"seed": 3, "world_size": 1, "rank": 0, **options}))
    return RocalLoader(celeba(source, size=16, crop=MIDDLE, threads=1), source, fields=fields)


def epoch_of(loader: RocalLoader) -> list[list[int]]:
    """The images of each batch, which must match the labels."""
    batches = []
    for images, labels in loader:
        assert images.dtype == np.float32 and images.shape == (len(labels), 3, 16, 16) and labels.dtype == np.int64
        assert numbers_of(images) == labels.tolist()
        batches.append(labels.tolist())
    return batches


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "packer-rocal-ahead"]
