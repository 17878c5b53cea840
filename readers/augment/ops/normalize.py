"""Normalisation by channel, and the figures of ImageNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from readers.augment.ops.base import Op, Stage

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Normalize"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, repr=False)
class Normalize(Op):
    """(x / 255 - mean) / std, by channel; the result is a float. The last op on single images of a list."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    stage: ClassVar[Stage] = Stage.NORMALIZE
    on_dali: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or not all(value > 0 for value in self.std):
            raise ValueError(f"Normalize: three means and three positive deviations, not {self.mean!r}, {self.std!r}")
