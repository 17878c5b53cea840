"""Flips, and rotation about the centre, as Pillow's `Image.rotate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    SMOOTH,
    Floats,
    Matrix,
    Op,
    Rows,
    Stage,
    affine,
    check_choice,
    check_probability,
    check_range,
    mirror,
    refuses_all_but,
)
from readers.augment.ops.nodes import affine_node, centred

if TYPE_CHECKING:
    import torch

__all__ = ["RandomHorizontalFlip", "RandomRotation", "RandomVerticalFlip", "rotation"]

_Pixels: TypeAlias = Literal["bilinear", "nearest"]
_DIRECTIONS = {2: "vertical", 3: "horizontal"}


@dataclass(frozen=True, slots=True, repr=False)
class _Flip(Op):
    p: float = 0.5

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.flip(self, u[:, 0] < self.p)

    def refuses(self, dtype: str, channels: int) -> str:
        return ""

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Between other ops on pixels, in a part that is cropped or resized afterwards. Parameter: 1 to flip."""
        some = [i for i, (flipped,) in enumerate(rows) if flipped]
        if len(some) == len(rows):
            return images.flip(self.flip_axis)
        if some:
            images[some] = images[some].flip(self.flip_axis)
        return images

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        return (mirror(self.flip_axis),) if parameters[0] else ()

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        flipped = dali.fn.cast(parameters[0], dtype=dali.types.INT32)
        return dali.fn.flip(images, **{"horizontal": 0, "vertical": 0, _DIRECTIONS[self.flip_axis]: flipped})


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
    """Turned about its centre by -degrees to +degrees, counter-clockwise; what comes into view is black.

    interpolation: "bilinear", or "nearest", which is torchvision's default.
    """

    degrees: float
    interpolation: _Pixels = "bilinear"

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_range(self, "degrees", (self.degrees, self.degrees), 0.0, 180.0)
        check_choice(self, "interpolation", self.interpolation, get_args(_Pixels))

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.step(self, -self.degrees + 2 * self.degrees * u)

    def refuses(self, dtype: str, channels: int) -> str:
        return refuses_all_but(SMOOTH, dtype, channels)

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        return affine(images, [rotation(degrees) for (degrees,) in rows], self.interpolation)

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        return (rotation(parameters[0]),)

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        return affine_node(dali, images, parameters, self.interpolation)

    def dali_parameters(self, parameters: Floats, heights: Floats, widths: Floats) -> Floats:
        return centred([rotation(degrees) for (degrees,) in parameters.tolist()], heights, widths)


def rotation(degrees: float) -> Matrix:
    """The map of `affine` that turns images about their centres, counter-clockwise."""
    turn = math.radians(degrees)
    return math.cos(turn), -math.sin(turn), 0.0, math.sin(turn), math.cos(turn), 0.0
