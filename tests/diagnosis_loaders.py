"""Loaders with a planted culprit, written like a user's script. Delays sleep, so the number of CPUs does not matter."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

FAST, SLOW = 0.0005, 0.008
BATCH = 8
STEP = 0.015


class Compose:
    def __init__(self, members: list[Any]) -> None:
        self.transforms = members

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        for member in self.transforms:
            image = member(image)
        return image


class Wait:
    """A slow member of a transform; it changes the image in place, as some transforms do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return image.add_(1)


class First(Wait):
    pass


class Second(Wait):
    pass


class Third(Wait):
    pass


class Images(Dataset[Any]):
    """Item i is (an image of the value i + 3, i): each of the three members adds 1."""

    def __init__(self, read: float = FAST, members: tuple[float, float, float] = (FAST, FAST, FAST)) -> None:
        self.read = read
        self.transform = Compose([kind(seconds) for kind, seconds in zip((First, Second, Third), members, strict=True)])

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.read)
        return self.transform(torch.full((3, 16, 16), index, dtype=torch.int32)), index


class Plain(Dataset[Any]):
    """A data set without a transform."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 16, 16), index), index


def slow_collate(samples: Any) -> Any:
    time.sleep(6 * SLOW)
    return default_collate(samples)


def loader(data: Dataset[Any] | None = None, workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Images() if data is None else data, batch_size=BATCH, num_workers=workers, **options)


def plain_loader() -> DataLoader[Any]:
    return loader()


def slow_second() -> DataLoader[Any]:
    return loader(Images(members=(FAST, SLOW, FAST)))


def train_step(batch: Any) -> None:
    time.sleep(STEP)


def broken_loader() -> DataLoader[Any]:
    raise RuntimeError("the folder of images is not mounted")


def broken_step(batch: Any) -> None:
    raise ZeroDivisionError("in the model")
