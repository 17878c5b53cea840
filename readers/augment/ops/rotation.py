"""Rotation about the centre, bilinear, as Pillow's `Image.rotate`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from readers.augment.ops.base import Floats, Op, Rows, Stage, check_range
from readers.augment.pixels import affine

if TYPE_CHECKING:
    import torch

    from readers.augment.geometry import Planner

__all__ = ["RandomRotation"]


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
        turns = [math.radians(degrees) for degrees, *_ in rows]
        return affine(images, [(math.cos(t), -math.sin(t), 0.0, math.sin(t), math.cos(t), 0.0) for t in turns])
