"""`Job`, the arguments of the rows of `pipeline.py`, and the registration of rows.

A row is registered once for uint8 and once for float32 batches. Its function takes a `Job`, opens the set, and returns
a function that makes the loader: an iterable of (images, labels), for one epoch or without end. Images are
[n, 3, size, size] or [n, size, size, 3]; floats are normalised.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness import contender, output_of

__all__ = ["CELEB_BOX", "KINDS", "MANY_EPOCHS", "Box", "Job", "MakeLoader", "pipeline", "random_box", "scaled_decode"]

KINDS = ("u8", "f32")
# For samplers that start the next epoch themselves, so that small sets have no pauses between epochs.
MANY_EPOCHS = 1000
# Top, left, height, width: a copy of readers.augment.CELEBA_CROP, which environments of peers cannot import.
CELEB_BOX = (40, 15, 148, 148)

Box: TypeAlias = tuple[int, int, int, int]
MakeLoader: TypeAlias = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Job:
    """task: "imagenet" (random box to 224, flip) or "celeb" (CELEB_BOX of 178 x 218 to 64, flip)."""

    task: str
    kind: str
    tree: Path
    work: Path
    batch: int
    workers: int

    @property
    def celeb(self) -> bool:
        return self.task == "celeb"

    @property
    def floats(self) -> bool:
        return self.kind == "f32"

    @property
    def size(self) -> int:
        return 64 if self.celeb else 224

    @property
    def mean(self) -> list[float]:
        """Mean of values from 0 to 1, by channel."""
        return [0.5] * 3 if self.celeb else [0.485, 0.456, 0.406]

    @property
    def std(self) -> list[float]:
        return [0.5] * 3 if self.celeb else [0.229, 0.224, 0.225]

    @property
    def dali_crop(self) -> dict[str, Any]:
        """`CELEB_BOX` for DALI's decoders: positions are fractions of 178 x 218 less the box."""
        top, left, height, width = CELEB_BOX
        return {"crop": (height, width), "crop_pos_y": top / (218 - height), "crop_pos_x": left / (178 - width)}

    def output(self, name: str) -> str:
        """The folder of a set made by `pipeline_sets` or `pack.py --keep`."""
        return str(output_of(self.work, name))

    def box(self, height: int, width: int, chance: Any = random) -> Box:
        """(top, left, height, width) of the task's crop."""
        if self.celeb:
            return CELEB_BOX
        return random_box(height, width, chance)


def random_box(height: int, width: int, chance: Any = random) -> Box:
    """(top, left, height, width) as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = height * width * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return chance.randint(0, height - h), chance.randint(0, width - w), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def pipeline(
    name: str,
    *,
    kinds: Iterable[str] = KINDS,
    modes: Iterable[str] = ("imagenet", "celeb"),
    data: Iterable[str] = (),
    **more: Any,
) -> Callable[[Callable[[Job], MakeLoader]], Callable[[Job], MakeLoader]]:
    """Register a row per kind of batch; the first has the note.

    data: the sets that the row reads ("tree": the files). more: as for `contender`. apart: the row reads other bytes,
    so it is not compared with other rows.
    """

    def register(function: Callable[[Job], MakeLoader]) -> Callable[[Job], MakeLoader]:
        for kind in kinds:
            contender(f"{name} [{kind}]", like=kind, modes=tuple(modes), data=tuple(data), **more)(function)
            more["note"] = ""
        return function

    return register


def scaled_decode(
    data: bytes, shape: tuple[int, int], box: tuple[int, int, int, int], size: int
) -> tuple[Any, tuple[int, int, int, int]]:
    """simplejpeg's smallest scaled decode in which the box still has `size` pixels per side (0: full size), and the box
    in its coordinates, rounded to whole pixels."""
    import simplejpeg

    (height, width), (top, left, h, w) = shape, box
    least_height = -(-height * size // h) if size and h > size else height
    least_width = -(-width * size // w) if size and w > size else width
    image = simplejpeg.decode_jpeg(data, min_height=least_height, min_width=least_width)
    y, x = image.shape[0] / height, image.shape[1] / width
    return image, (int(top * y), int(left * x), max(1, int(h * y)), max(1, int(w * x)))
