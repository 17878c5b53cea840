"""Which sample, and which way round, each image of a loader is; and how far its pixels are from Pillow's.

A loader need not say which sample an image is: the nearest of Pillow's images, flipped or not, says it. Files with the
same bytes are one image here. Images are uint8 [n, 3, 64, 64] or float32 from -1 to 1.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import list_tree

__all__ = ["Compared", "Reference", "compare"]

_COARSE = 8  # pixels a side of what is searched in
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Reference:
    """images: Pillow's, of the different files, [m, 3, 64, 64]. image_of, labels: of the files of a tree, in order."""

    images: npt.NDArray[np.uint8]
    image_of: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tree: Path, box: tuple[int, int, int, int], size: int) -> Reference:
        """Decode a tree of class folders. box: top, left, height, width."""
        from pillow_transforms import crop, read_image, resize

        numbers: dict[bytes, int] = {}
        images, image_of, labels = [], [], []
        for path, label in list_tree(tree):
            data = Path(path).read_bytes()
            digest = hashlib.sha256(data).digest()
            if digest not in numbers:
                numbers[digest] = len(images)
                images.append(np.asarray(resize(crop(read_image(data), *box), (size, size))).transpose(2, 0, 1))
            image_of.append(numbers[digest])
            labels.append(label)
        return cls(np.stack(images), np.array(image_of), np.array(labels))

    def save(self, path: Path) -> None:
        np.savez(path, images=self.images, image_of=self.image_of, labels=self.labels)

    @classmethod
    def load(cls, path: Path) -> Reference:
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in ("images", "image_of", "labels")})


@dataclass(frozen=True)
class Compared:
    """images: those of an epoch. whole: of them, those that are a sample, with its label, that was due once.

    mean, worst: difference to Pillow's image, the mean over the values, of 255: over all images, and the largest of an
    image. largest: of a single value. flipped: share of the images. order, flips: a text that is the same for the same
    images in the same order, and for the same flips.
    """

    images: int
    whole: int
    mean: float
    worst: float
    largest: float
    flipped: float
    order: str
    flips: str


def compare(batches: Iterable[tuple[Any, Any]], reference: Reference) -> Compared:
    """Compare the first epoch of the batches (images, labels)."""
    count = len(reference.labels)
    both = np.concatenate([_coarse(reference.images), _coarse(reference.images[..., ::-1])])
    found: list[npt.NDArray[np.int64]] = []
    labels: list[int] = []
    means: list[float] = []
    largest = 0.0
    for images, some in batches:
        pixels = (_on_host(images).astype(np.float32) + 1) * 127.5
        near = _nearest(_coarse(pixels), both)
        found.append(near)
        labels += _on_host(some).reshape(-1).astype(int).tolist()
        for image, number in zip(pixels, near.tolist(), strict=True):
            flipped, number = divmod(number, len(reference.images))
            difference = np.abs(image - (reference.images[number][..., ::-1] if flipped else reference.images[number]))
            means.append(float(difference.mean()))
            largest = max(largest, float(difference.max()))
        if len(labels) >= count:
            break
    near = np.concatenate(found)
    flips, images_found = near >= len(reference.images), near % len(reference.images)
    due = Counter(zip(reference.image_of.tolist(), reference.labels.tolist(), strict=True))
    got = Counter(zip(images_found.tolist(), labels, strict=True))
    return Compared(
        images=len(near),
        whole=(due & got).total(),
        mean=float(np.mean(means)),
        worst=max(means),
        largest=largest,
        flipped=float(flips.mean()),
        order=hashlib.sha256(images_found.tobytes()).hexdigest(),
        flips=hashlib.sha256(flips.tobytes()).hexdigest(),
    )


def _on_host(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _coarse(images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Means over squares, [n, 3 * 8 * 8]."""
    n, planes, height, width = images.shape
    squares = images.reshape(n, planes, _COARSE, height // _COARSE, _COARSE, width // _COARSE)
    return squares.mean(axis=(3, 5), dtype=np.float32).reshape(n, -1)


def _nearest(images: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The number of the nearest of the others, by the sum of squares; the square of the image itself is the same for
    all."""
    squares = (others**2).sum(axis=1)
    parts = [images[start : start + _ROWS_AT_ONCE] for start in range(0, len(images), _ROWS_AT_ONCE)]
    return np.concatenate([(squares - 2 * part @ others.T).argmin(axis=1) for part in parts])
