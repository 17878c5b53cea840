"""A sample's number that knows its place in an epoch."""

from __future__ import annotations

from typing import Any

__all__ = ["Place"]


class Place(int):
    """The number of a sample, which knows where in which epoch it was asked for: what seeds its augmentation."""

    seed: int
    epoch: int
    position: int

    def __new__(cls, index: int, seed: int, epoch: int, position: int) -> Place:
        place = super().__new__(cls, index)
        place.seed, place.epoch, place.position = seed, epoch, position
        return place

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (int(self), self.seed, self.epoch, self.position)
