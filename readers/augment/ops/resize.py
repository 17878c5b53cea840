"""Resizes: of all of an image, or of a random box. With antialiasing, by the filters of Pillow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, get_args

import numpy as np
import numpy.typing as npt

from readers.augment.ops.base import (
    Floats,
    Interpolation,
    Op,
    Size,
    Stage,
    check_choice,
    check_range,
    check_size,
    sides,
)

if TYPE_CHECKING:
    from readers.augment.geometry import Planner

__all__ = ["RandomResizedCrop", "Resize"]

_TRIES = 10
_Ints = npt.NDArray[np.int64]


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
        low, high = np.log(self.ratio[0]), np.log(self.ratio[1])
        area = (height * width)[:, None] * (self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, :_TRIES])
        ratio = np.exp(low + (high - low) * u[:, _TRIES : 2 * _TRIES])
        tried_width, tried_height = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
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
