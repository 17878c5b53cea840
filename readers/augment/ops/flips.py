"""Flips: left and right, top and bottom. They come after the crops and before all other ops on pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from readers.augment.ops.base import Floats, Op, Stage, check_probability

if TYPE_CHECKING:
    from readers.augment.geometry import Planner

__all__ = ["RandomHorizontalFlip", "RandomVerticalFlip"]


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
