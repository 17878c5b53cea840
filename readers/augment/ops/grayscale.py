"""Random greyscale: all three channels become the luma of ITU-R BT.601, as in torchvision and Pillow's mode "L"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from readers.augment.ops.base import Floats, Op, Rows, Stage, check_probability
from readers.augment.pixels import blend, column, grey

if TYPE_CHECKING:
    import torch

    from readers.augment.geometry import Planner

__all__ = ["RandomGrayscale"]


@dataclass(frozen=True, slots=True, repr=False)
class RandomGrayscale(Op):
    """Without colour, with probability p; the image keeps its three channels."""

    p: float = 0.1

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1
    on_dali: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameter: the saturation that is left, 0 or 1."""
        planner.step(self, np.where(u < self.p, 0.0, 1.0))

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        if all(row[0] for row in rows):
            return images
        return blend(images, grey(images), column(images, rows, 0))

    def dali(self, fn: Any, images: Any, parameters: Any) -> Any:
        return fn.saturation(images, saturation=parameters[0])
