"""Crops: boxes of a fixed size, at a fixed place, in the middle, or anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from readers.augment.ops.base import MAX_SIDE, Floats, Op, Size, Stage, check_size, sides

if TYPE_CHECKING:
    from readers.augment.geometry import Planner

__all__ = ["CenterCrop", "Crop", "RandomCrop"]


@dataclass(frozen=True, slots=True, repr=False)
class Crop(Op):
    """The box with this upper left corner, height and width. The image must hold it."""

    top: int
    left: int
    height: int
    width: int

    stage: ClassVar[Stage] = Stage.GEOMETRY
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, (self.height, self.width))
        if not (0 <= self.top <= MAX_SIDE and 0 <= self.left <= MAX_SIDE):
            raise ValueError(f"Crop: a corner is at 0 to {MAX_SIDE}, not {(self.top, self.left)}")

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.height, self.width

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.crop(self, self.top, self.left, self.height, self.width)


@dataclass(frozen=True, slots=True, repr=False)
class CenterCrop(Op):
    """The middle `size` pixels. The image must be that large."""

    size: Size

    stage: ClassVar[Stage] = Stage.GEOMETRY
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, self.size)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        height, width = sides(self.size)
        # Halves go to the even neighbour, as in torchvision.
        top, left = np.rint((planner.height - height) / 2), np.rint((planner.width - width) / 2)
        planner.crop(self, top.astype(np.int64), left.astype(np.int64), height, width)


@dataclass(frozen=True, slots=True, repr=False)
class RandomCrop(Op):
    """`size` pixels somewhere, of the image with `padding` black pixels at each edge: one number, or (top and bottom,
    left and right). The padded image must be as large as the crop. With padding it comes after the resize.
    """

    size: Size
    padding: int | tuple[int, int] = 0

    stage: ClassVar[Stage] = Stage.GEOMETRY
    draws: ClassVar[int] = 2
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, self.size)
        both = sides(self.padding)
        if len(both) != 2 or not all(isinstance(side, int) and 0 <= side <= MAX_SIDE for side in both):
            raise ValueError(
                f"RandomCrop: padding is one or two whole numbers from 0 to {MAX_SIDE}, not {self.padding!r}"
            )

    @property
    def hangs_over(self) -> bool:
        return any(sides(self.padding))

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        (height, width), (above, before) = sides(self.size), sides(self.padding)
        top = planner.inside(u[:, 0], planner.height + 2 * above - height) - above
        left = planner.inside(u[:, 1], planner.width + 2 * before - width) - before
        planner.crop(self, top, left, height, width, over=(above, before))
