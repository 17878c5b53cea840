"""Flips, which come after the crops and before all other ops on pixels; and rotation about the centre, bilinear, as
Pillow's `Image.rotate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from readers.augment.geometry import Planner
from readers.augment.ops.base import Floats, Op, Rows, Stage, affine, check_probability, check_range

if TYPE_CHECKING:
    import torch

__all__ = ["RandomHorizontalFlip", "RandomRotation", "RandomVerticalFlip", "rotated"]


@dataclass(frozen=True, slots=True, repr=False)
class _Flip(Op):
    p: float = 0.5

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1
    on_dali: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.flip(self.flip_axis, u[:, 0] < self.p)


@dataclass(frozen=True, slots=True, repr=False)
class RandomHorizontalFlip(_Flip):
    """Left and right exchanged, with probability p."""

    flip_axis: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, repr=False)
class RandomVerticalFlip(_Flip):
    """Top and bottom exchanged, with probability p."""

    flip_axis: ClassVar[int] = 2


@dataclass(frozen=True, slots=True, repr=False)
class RandomRotation(Op):
    """Turned about its centre by -degrees to +degrees, counter-clockwise; what comes into view is black. Bilinear."""

    degrees: float

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_range(self, "degrees", (self.degrees, self.degrees), 0.0, 180.0)

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.step(self, -self.degrees + 2 * self.degrees * u)

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        return rotated(images, rows, "bilinear")


def rotated(images: torch.Tensor, degrees: Rows, mode: Literal["bilinear", "nearest"]) -> torch.Tensor:
    """Images turned about their centres, counter-clockwise."""
    turns = [math.radians(angle) for angle, *_ in degrees]
    return affine(images, [(math.cos(t), -math.sin(t), 0.0, math.sin(t), math.cos(t), 0.0) for t in turns], mode)
