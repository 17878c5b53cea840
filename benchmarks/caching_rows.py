"""Rows of `caching.py`: data sets and readers with no cache, with ours, with one per worker, and with stocaching's.

A row is a function of a `Job`. All of them give RandomResizedCrop(224) and a flip; those that keep decoded images keep
256 x 256 pixels, because stocaching wants one shape for all.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import contender

__all__ = [
    "CROP",
    "KEPT",
    "NONE",
    "PER_WORKER",
    "STOCACHING",
    "CountingSource",
    "DictReader",
    "Job",
    "SourceInMemory",
    "SourceWithDelay",
]

NONE = "no cache"
PER_WORKER = "a dictionary in each worker"
STOCACHING = "stocaching, decoded"
CROP, KEPT = 224, 256
_LOG_RATIO = math.log(4 / 3)


@dataclass(frozen=True)
class Job:
    """What a row gets: the packed set, and for whom to make the data set."""

    path: Path
    split: str | None
    name: str

    def base(self) -> Any:
        import readers

        return readers.open(self.path, self.split)

    def cached(self, base: Any = None, capacity: Any = 1.0, keep: Any = "encoded") -> Any:
        import readers

        return readers.cached(base or self.base(), capacity, keep, job=f"benchmark-{os.getpid()}-{self.name}")


class DictReader:
    """What many write: a dictionary in the data set, which every worker fills for itself."""

    def __init__(self, base: Any) -> None:
        self.base, self.kept = base, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("base", "kept"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def read(self, index: int, field: str = "image") -> Any:
        return self.read_many([index], field)[0]

    def read_many(self, indices: Any, field: str = "image") -> list[Any]:
        missing = [int(i) for i in indices if int(i) not in self.kept]
        for index, data in zip(missing, self.base.read_many(missing, field), strict=True):
            self.kept[index] = bytes(data)
        return [self.kept[int(i)] for i in indices]


class SourceWithDelay(DictReader):
    """A source that takes `seconds` for each sample it is asked for: a far file system with one request at a time."""

    def __init__(self, base: Any, seconds: float) -> None:
        super().__init__(base)
        self.seconds = seconds

    def read_many(self, indices: Any, field: str = "image") -> list[Any]:
        import time

        time.sleep(self.seconds * len(indices))
        return self.base.read_many(indices, field)


class CountingSource(SourceWithDelay):
    """The same, counting the samples that all processes have asked for."""

    def __init__(self, base: Any, seconds: float) -> None:
        super().__init__(base, seconds)
        self.reads = multiprocessing.get_context("fork").Value("q", 0)

    def __getattr__(self, name: str) -> Any:
        if name in ("reads", "seconds"):
            raise AttributeError(name)
        return super().__getattr__(name)

    def read_many(self, indices: Any, field: str = "image") -> list[Any]:
        with self.reads.get_lock():
            self.reads.value += len(indices)
        return super().read_many(indices, field)


class SourceInMemory(DictReader):
    """A source that costs next to nothing, to see what a cache adds to it."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.kept = {i: bytes(data) for i, data in enumerate(base.read_many(range(len(base))))}

    def read(self, index: int, field: str = "image") -> Any:
        return self.kept[index]

    def read_many(self, indices: Any, field: str = "image") -> list[Any]:
        return [self.kept[int(i)] for i in indices]


def augmented(reader: Any) -> Any:
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.torch import ImageDataset

    return ImageDataset(reader, [RandomResizedCrop(CROP), RandomHorizontalFlip()])


@contender(NONE, imports="torch")
def no_cache(job: Job) -> Any:
    return augmented(job.base())


@contender("ours: encoded", imports="torch")
def encoded(job: Job) -> Any:
    return augmented(job.cached())


@contender("ours: coefficients", imports="torch", note="of the JPEGs, for the same pixels")
def coefficients(job: Job) -> Any:
    return augmented(job.cached(keep="coefficients"))


@contender("ours: recoded", imports="torch", note="short side 256, JPEG quality 90")
def recoded(job: Job) -> Any:
    return augmented(job.cached(keep=f"recoded:{KEPT}@90"))


@contender("ours: decoded", imports="torch", note="short side 256")
def decoded(job: Job) -> Any:
    return augmented(job.cached(keep=f"decoded:{KEPT}"))


@contender("ours: decoded, square", imports="torch", note="256 x 256, as stocaching's")
def square(job: Job) -> Any:
    import readers
    from readers.augment import Resize

    return augmented(job.cached(keep=readers.Decoded([Resize((KEPT, KEPT))])))


@contender(PER_WORKER, imports="torch", note="encoded bytes, filled by every worker for itself")
def per_worker(job: Job) -> Any:
    return augmented(DictReader(job.base()))


@contender(STOCACHING, imports="torch stocaching", note="our decoder, its cache, torchvision's arithmetic")
def stochastic(job: Job) -> Any:
    import torch
    from stocaching import SharedCache

    from readers.decode import decode_image

    base = job.base()
    cache = SharedCache(size_limit_gib=64, dataset_len=len(base), data_dims=(3, KEPT, KEPT), dtype=torch.uint8)

    class Stochastic(torch.utils.data.Dataset):  # type: ignore[type-arg]
        reader = base

        def __len__(self) -> int:
            return len(base)

        def __getitem__(self, index: int) -> Any:
            image = cache.get_slot(index)
            if image is None:
                whole = torch.from_numpy(decode_image(base.read(index)).copy()).permute(2, 0, 1)
                image = resized(whole, KEPT)
                cache.set_slot(index, image, allow_overwrite=True)  # two may decode the same image at a time
            return changed(image), int(base.labels[index])

    return Stochastic()


def resized(image: Any, side: int) -> Any:
    """uint8 [3, h, w] to a square, bilinear with antialiasing: what torchvision.transforms.v2 calls."""
    import torch

    options = {"mode": "bilinear", "antialias": True, "align_corners": False}
    return torch.nn.functional.interpolate(image[None], (side, side), **options)[0]


def changed(image: Any) -> Any:
    """RandomResizedCrop and a flip, as torchvision.transforms.v2 has them."""
    _, height, width = image.shape
    for _ in range(10):
        area, ratio = height * width * random.uniform(0.08, 1.0), math.exp(random.uniform(-_LOG_RATIO, _LOG_RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w, h = width, height
    top, left = random.randint(0, height - h), random.randint(0, width - w)
    image = resized(image[:, top : top + h, left : left + w], CROP)
    return image.flip(-1) if random.random() < 0.5 else image
