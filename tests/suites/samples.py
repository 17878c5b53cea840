"""The samples that the suites read: a tree of images, a manifest with masks, packed sets, and what is true of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

import packer

__all__ = ["CLASSES", "SAMPLES", "Samples", "Truth", "make_jpeg"]

CLASSES = ("cat", "dog", "owl")
SAMPLES = 24
_SIZES = ((32, 24), (24, 36), (40, 32))


def make_jpeg(seed: int, size: tuple[int, int] = (32, 24), **options: object) -> bytes:
    """A small JPEG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(out, "JPEG", **options)
    return out.getvalue()


@dataclass(frozen=True)
class Truth:
    """What is true of n samples. fields: the bytes of each field by sample, None where a sample lacks it; shapes:
    (height, width) of the images; estimated: the sizes of the images are an estimate."""

    keys: list[str]
    labels: list[int]
    classes: tuple[str, ...]
    fields: dict[str, list[bytes | None]]
    shapes: list[tuple[int, int]]
    estimated: bool = field(default=False)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def images(self) -> list[bytes]:
        return [image for image in self.fields["image"] if image is not None]

    def take(self, indices: Sequence[int]) -> Truth:
        """The same of some of them."""
        return Truth(
            [self.keys[i] for i in indices],
            [self.labels[i] for i in indices],
            self.classes,
            {name: [column[i] for i in indices] for name, column in self.fields.items()},
            [self.shapes[i] for i in indices],
            self.estimated,
        )

    def recoded(self, image: Callable[[bytes], bytes], shape: Callable[[bytes], tuple[int, int]]) -> Truth:
        """The same of samples whose images are handed out in another form."""
        images = [image(data) for data in self.images]
        fields = {**self.fields, "image": [*images]}
        return replace(self, fields=fields, shapes=[shape(data) for data in images])


class Samples:
    """The files on disk, made when they are asked for first; nobody may write to them.

    images: a folder of 24 JPEGs in three classes. manifest: a table of these images, with a mask for two of three and
    without a label for the last. packed(format): that table packed, seven samples a shard.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = root / "images"
        self.manifest = self.images / "samples.csv"
        self._packed: dict[str, Path] = {}
        keys, labels, images, masks, rows = [], [], [], [], []
        for number in range(SAMPLES):
            name = CLASSES[number // (SAMPLES // len(CLASSES))]
            path = self.images / name / f"{number:02d}.jpg"
            mask = root / "masks" / f"{number:02d}.png"
            for folder in (path.parent, mask.parent):
                folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_jpeg(number, _SIZES[number % 3]))
            if number % 3 != 1:
                mask.write_bytes(b"mask %d" % number)
            keys.append(f"{name}/{number:02d}")
            labels.append(CLASSES.index(name))
            images.append(path.read_bytes())
            masks.append(mask.read_bytes() if mask.exists() else None)
            rows.append((f"{keys[-1]}.jpg", name if number < SAMPLES - 1 else "", mask if mask.exists() else ""))
        with open(self.manifest, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("path", "label", "mask"), *rows])
        shapes = [_SIZES[number % 3][::-1] for number in range(SAMPLES)]
        self.of_folder = Truth(keys, labels, CLASSES, {"image": [*images]}, shapes)
        self.truth = Truth(keys, [*labels[:-1], -1], CLASSES, {"image": [*images], "mask": masks}, shapes)

    def packed(self, to: str = "tar") -> Path:
        """The directory of the packed set."""
        if to not in self._packed:
            packer.convert(self.manifest, to=to, output=self.root / to, workers=1, samples_per_shard=7)
            self._packed[to] = self.root / to
        return self._packed[to]
