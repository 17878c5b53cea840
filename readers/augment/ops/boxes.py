"""Crops and resizes: boxes of a fixed size at a fixed place, in the middle, or anywhere; resizes of a whole image or of
a random box, with antialiasing, by the filters of Pillow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np
import numpy.typing as npt

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    MAX_SIDE,
    Floats,
    Interpolation,
    Op,
    Size,
    Stage,
    check_choice,
    check_range,
    check_size,
    sides,
    tried_sides,
)

__all__ = ["CenterCrop", "Crop", "RandomCrop", "RandomResizedCrop", "Resize"]

_TRIES = 10
_Ints = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True, repr=False)
class Resize(Op):
    """To `size`; one number is the short side, and the other side keeps the proportions."""

    size: Size
    interpolation: Interpolation = "bilinear"

    stage: ClassVar[Stage] = Stage.GEOMETRY

    def __post_init__(self) -> None:
        check_size(self, self.size)
        check_choice(self, "interpolation", self.interpolation, get_args(Interpolation))

    @property
    def resize_filter(self) -> Interpolation:
        return self.interpolation

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        if isinstance(self.size, int) and (size is None or size[0] != size[1]):
            return None
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        height, width = planner.height, planner.width
        if isinstance(self.size, int):
            short = np.minimum(height, width)
            # Truncated, as torchvision does.
            planner.resize(self.size * height // short, self.size * width // short)
        else:
            planner.resize(*self.size)


@dataclass(frozen=True, slots=True, repr=False)
class RandomResizedCrop(Op):
    """A box with `scale` of the area and `ratio` of width to height, resized to `size`.

    Ten tries, then the largest central box within the ratio (Szegedy et al., 2015, as torchvision does it). Where the
    box is so large that the image can be decoded at 1/2, 1/4 or 1/8, its edges are multiples of 2, 4 or 8 pixels.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    stage: ClassVar[Stage] = Stage.GEOMETRY
    draws: ClassVar[int] = 4 * _TRIES
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, self.size)
        check_range(self, "scale", self.scale, 1e-6, 1.0)
        check_range(self, "ratio", self.ratio, 1e-3, 1e3)
        check_choice(self, "interpolation", self.interpolation, get_args(Interpolation))

    @property
    def resize_filter(self) -> Interpolation:
        return self.interpolation

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        """u: area, ratio, top and left of ten tries; the first that fits counts."""
        height, width = planner.height, planner.width
        tried_width, tried_height = tried_sides(self.scale, self.ratio, height * width, u[:, : 2 * _TRIES])
        fits = (tried_width > 0) & (tried_width <= width[:, None])
        fits &= (tried_height > 0) & (tried_height <= height[:, None])
        rows, first = np.arange(len(height)), fits.argmax(axis=1)
        found = fits[rows, first]
        box_height, box_width = self._largest(height, width)
        box_height = np.where(found, tried_height[rows, first], box_height).astype(np.int64)
        box_width = np.where(found, tried_width[rows, first], box_width).astype(np.int64)
        top = planner.inside(u[rows, 2 * _TRIES + first], height - box_height)
        left = planner.inside(u[rows, 3 * _TRIES + first], width - box_width)
        top = np.where(found, top, (height - box_height) // 2)
        left = np.where(found, left, (width - box_width) // 2)
        planner.crop(self, top, left, box_height, box_width)
        planner.resize(*sides(self.size), align=True)

    def _largest(self, height: _Ints, width: _Ints) -> tuple[_Ints, _Ints]:
        """The whole image, less what keeps its ratio within bounds."""
        ratio = width / height
        box_height = np.where(ratio < self.ratio[0], np.rint(width / self.ratio[0]), height)
        box_width = np.where(ratio > self.ratio[1], np.rint(height * self.ratio[1]), width)
        return np.clip(box_height, 1, height).astype(np.int64), np.clip(box_width, 1, width).astype(np.int64)
