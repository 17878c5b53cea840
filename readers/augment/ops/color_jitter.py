"""Brightness, contrast and saturation, as Pillow's `ImageEnhance`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from readers.augment.ops.base import Floats, Op, Rows, Stage, check_range
from readers.augment.pixels import blend, column, grey

if TYPE_CHECKING:
    import torch

    from readers.augment.geometry import Planner

__all__ = ["ColorJitter"]


@dataclass(frozen=True, slots=True, repr=False)
class ColorJitter(Op):
    """Brightness, contrast and saturation, in this order, each times a factor from [max(0, 1-x), 1+x].

    Blends with black, with the mean of the grey image, and with the grey image; each step is clamped to 0..255.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            check_range(self, name, (value, value), 0.0, 100.0)

    def plan(self, planner: Planner, u: Floats) -> None:
        spread = np.array([self.brightness, self.contrast, self.saturation])
        low = np.maximum(0.0, 1.0 - spread)
        planner.step(self, low + (1.0 + spread - low) * u)

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        if self.brightness:
            images = images.mul_(column(images, rows, 0)).clamp_(0, 255)
        if self.contrast:
            images = blend(images, grey(images).mean((2, 3), keepdim=True), column(images, rows, 1))
        if self.saturation:
            images = blend(images, grey(images), column(images, rows, 2))
        return images
