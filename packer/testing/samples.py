"""Samples for the suites: a tree of images, a manifest with masks, packed sets, and their expected content."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

import packer
import readers
from readers.headers import MEDIA, parse_any

__all__ = [
    "CLASSES",
    "SAMPLES",
    "Samples",
    "Truth",
    "files_of",
    "header",
    "make_image",
    "make_jpeg",
    "overwrite",
    "turned_image",
]

CLASSES = ("cat", "dog", "owl")
SAMPLES = 24
_TURNED = Image.Exif()
_TURNED[0x0112] = 6  # orientation
_SIZES = ((32, 24), (24, 36), (40, 32))


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def make_image(seed: int, size: tuple[int, int] = (32, 24), format: str = "JPEG", **options: object) -> bytes:
    """A small image of random pixels, different for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(out, format, **options)
    return out.getvalue()


make_jpeg = make_image


def turned_image(number: int, size: tuple[int, int]) -> bytes:
    """An image with one of the eight EXIF orientations."""
    exif = Image.Exif()
    exif[0x0112] = 1 + number % 8
    return make_image(number, size, exif=exif)


def header(image: bytes) -> tuple[int, ...]:
    """The values of `ImageInfo` for an image."""
    media, height, width, components, process, orientation = parse_any(image)
    return height, width, components, process, orientation, MEDIA.index(media)


def overwrite(reader: readers.Reader, index: int, data: bytes) -> None:
    """Overwrite the bytes of a sample in its shard; `data` are cut or padded with zeros to its length."""
    extent = reader.byte_range(index)
    assert extent is not None
    shard, offset, length = extent
    with open(shard, "r+b") as file:
        file.seek(offset)
        file.write(data.ljust(length, b"\0")[:length])


@dataclass(frozen=True)
class Truth:
    """The expected content of n samples.

    fields: the bytes of each field by sample, None if a sample lacks it. estimated: whether image sizes are estimates.
    """

    keys: list[str]
    labels: list[int]
    classes: tuple[str, ...]
    fields: dict[str, list[bytes | None]]
    estimated: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def images(self) -> list[bytes]:
        return [image for image in self.fields["image"] if image is not None]

    @property
    def headers(self) -> list[tuple[int, ...]]:
        return [header(image) for image in self.images]

    def take(self, indices: Sequence[int]) -> Truth:
        """The expected content of some of the samples."""
        fields = {name: [column[i] for i in indices] for name, column in self.fields.items()}
        keys, labels = [self.keys[i] for i in indices], [self.labels[i] for i in indices]
        return Truth(keys, labels, self.classes, fields, self.estimated)

    def recoded(self, image: Callable[[bytes], bytes], estimated: bool) -> Truth:
        """The expected content if images are returned in another encoding, made by `image`."""
        fields = {**self.fields, "image": [image(data) for data in self.images]}
        return replace(self, fields=fields, estimated=estimated)


class Samples:
    """The samples on disk; tests must not write to these files.

    images: a folder of 24 images in three classes, all but one of them JPEGs.
    manifest: a table of these images, with masks for two thirds of them and no label for the last.
    packed(format): the manifest packed, seven samples per shard.
    of_folder, truth: the expected content of `images` and of `manifest`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = root / "images"
        self.manifest = self.images / "samples.csv"
        self._packed: dict[str, Path] = {}
        keys, labels, images, masks, rows = [], [], [], [], []
        for number in range(SAMPLES):
            name = CLASSES[number // (SAMPLES // len(CLASSES))]
            path = self.images / name / f"{number:02d}.{'png' if number == 7 else 'jpg'}"
            mask = root / "masks" / f"{number:02d}.png"
            for folder in (path.parent, mask.parent):
                folder.mkdir(parents=True, exist_ok=True)
            kind = {"format": "PNG"} if number == 7 else {"exif": _TURNED} if number == 5 else {}
            path.write_bytes(make_image(number, _SIZES[number % 3], **kind))
            if number % 3 != 1:
                mask.write_bytes(b"mask %d" % number)
            keys.append(f"{name}/{number:02d}")
            labels.append(CLASSES.index(name))
            images.append(path.read_bytes())
            masks.append(mask.read_bytes() if mask.exists() else None)
            rows.append(
                (path.relative_to(self.images), name if number < SAMPLES - 1 else "", mask if mask.exists() else "")
            )
        with open(self.manifest, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("path", "label", "mask"), *rows])
        self.of_folder = Truth(keys, labels, CLASSES, {"image": [*images]})
        self.truth = Truth(keys, [*labels[:-1], -1], CLASSES, {"image": [*images], "mask": masks})

    def packed(self, to: str = "tar") -> Path:
        """The directory of the set packed to a format, which is made at the first call."""
        if to not in self._packed:
            packer.convert(
                self.manifest, to=to, output=self.root / to, run=packer.Run(workers=1), shards=packer.Shards(samples=7)
            )
            self._packed[to] = self.root / to
        return self._packed[to]
