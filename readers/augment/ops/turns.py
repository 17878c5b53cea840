"""Flips, rotation about the centre as in Pillow's `Image.rotate`, RandAugment and TrivialAugmentWide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, get_args

import numpy as np

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    SMOOTH,
    Floats,
    Matrix,
    Op,
    Rows,
    Sampling,
    Stage,
    affine,
    affine_node,
    blend,
    blend_node,
    centred,
    check_choice,
    check_probability,
    check_range,
    column,
    grey,
    grey_node,
    mirror,
    refuses_all_but,
    rounded_node,
    with_images,
)

if TYPE_CHECKING:
    import torch

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
        """Flip some of the images; only used between other pixel ops, in a part before a crop or resize. Parameter: 1
        to flip."""
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
    """Flip left and right, with probability p."""

    flip_axis: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, repr=False)
class RandomVerticalFlip(_Flip):
    """Flip top and bottom, with probability p."""

    flip_axis: ClassVar[int] = 2


@dataclass(frozen=True, slots=True, repr=False)
class RandomRotation(Op):
    """Rotate about the centre by a random angle from -degrees to +degrees, counter-clockwise; black outside the image.

    interpolation: "bilinear", or "nearest" (torchvision's default).
    """

    degrees: float
    interpolation: Sampling = "bilinear"

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1
    named: ClassVar[tuple[str, ...]] = ("degrees",)

    def __post_init__(self) -> None:
        check_range(self, "degrees", (self.degrees, self.degrees), 0.0, 180.0)
        check_choice(self, "interpolation", self.interpolation, get_args(Sampling))

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.step(self, -self.degrees + 2 * self.degrees * u)

    def refuses(self, dtype: str, channels: int) -> str:
        return refuses_all_but(SMOOTH, dtype, channels)

    @property
    def sampling(self) -> Sampling:
        return self.interpolation

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        return affine(images, [rotation(degrees) for (degrees,) in rows], self.interpolation)

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        return (rotation(parameters[0]),)

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        return affine_node(dali, images, parameters, self.interpolation)

    def dali_parameters(self, parameters: Floats, heights: Floats, widths: Floats) -> Floats:
        return centred([rotation(degrees) for (degrees,) in parameters.tolist()], heights, widths)


def rotation(degrees: float) -> Matrix:
    """The matrix for `affine` that rotates images counter-clockwise about their centres."""
    turn = math.radians(degrees)
    return math.cos(turn), -math.sin(turn), 0.0, math.sin(turn), math.cos(turn), 0.0


# RandAugment (Cubuk et al., 2020, https://arxiv.org/abs/1909.13719) and TrivialAugment (Müller and Hutter, 2021,
# https://arxiv.org/abs/2103.10158): random operations from one list, with torchvision's ranges.
#
#     i    change         RandAugment, at most            TrivialAugmentWide, at most
#     0    identity
#     1-2  shear x, y     0.3, either way                 0.99
#     3-4  translate x,y  150/331 of the side             32 pixels
#     5    rotate         30 degrees                      135 degrees
#     6-9  brightness, colour, contrast, sharpness:
#                         1 plus or minus 0.9             0.99
#     10   posterize      8 to 4 bits                     8 to 2 bits
#     11   solarize       from 255 down to 0
#     12   autocontrast
#     13   equalize
#
# Pixels from outside the image are black, sampling is nearest, and each operation rounds to integers.


_Change: TypeAlias = "Callable[[torch.Tensor, Rows], torch.Tensor]"
_MOST_CHANGES = 16
_NAMES = (
    *("identity", "shear x", "shear y", "translate x", "translate y", "rotate", "brightness", "colour", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
_CHANGES, _SIGNED = 14, slice(1, 10)
_BRIGHTNESS, _COLOUR, _CONTRAST, _SHARPNESS, _POSTERIZE, _SOLARIZE, _AUTOCONTRAST, _EQUALIZE = range(6, _CHANGES)
_NODE_NUMBERS = 30


class _Changes(Op):
    """Base class of RandAugment and TrivialAugmentWide: `num_ops` operations in sequence; parameters: number and
    strength of each."""

    __slots__ = ()
    stage: ClassVar[Stage] = Stage.PIXELS
    num_ops: int

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        return _changed(images, rows)

    def say(self, parameters: Sequence[float]) -> dict[str, Any]:
        """The strength of each operation, by its position and name."""
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        return {f"{i} {_NAMES[int(number)]}": strength for i, (number, strength) in enumerate(pairs, 1)}

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        return _moves(parameters, height, width)

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        return _changed_node(dali, images, parameters, self.num_ops)

    def dali_parameters(self, parameters: Floats, heights: Floats, widths: Floats) -> Floats:
        return _node_numbers(parameters, heights, widths)


@dataclass(frozen=True, slots=True, repr=False)
class RandAugment(_Changes):
    """Apply `num_ops` random operations in sequence, each with strength `magnitude` of `num_magnitude_bins` - 1."""

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31

    draws: ClassVar[int] = 2 * _MOST_CHANGES

    def __post_init__(self) -> None:
        if not 1 <= self.num_ops <= _MOST_CHANGES:
            raise ValueError(f"RandAugment: num_ops is from 1 to {_MOST_CHANGES}, not {self.num_ops!r}")
        if self.num_magnitude_bins < 2 or not 0 <= self.magnitude < self.num_magnitude_bins:
            raise ValueError(
                f"RandAugment: magnitude is from 0 to num_magnitude_bins - 1, not {self.magnitude!r} of "
                f"{self.num_magnitude_bins!r}"
            )

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameters: number and strength of each operation."""
        ones = np.ones(len(u))
        across, down = 150 / 331 * planner.width, 150 / 331 * planner.height
        most: list[Any] = [0, 0.3, 0.3, across, down, 30, 0.9, 0.9, 0.9, 0.9, 4, 0, 0, 0]
        share = ones * self.magnitude / (self.num_magnitude_bins - 1)
        parts = [_picked(u[:, 2 * k], u[:, 2 * k + 1], share, most) for k in range(self.num_ops)]
        planner.step(self, np.concatenate(parts, axis=1))


@dataclass(frozen=True, slots=True, repr=False)
class TrivialAugmentWide(_Changes):
    """Apply one random operation with one of `num_magnitude_bins` random strengths."""

    num_magnitude_bins: int = 31

    draws: ClassVar[int] = 3
    num_ops: ClassVar[int] = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.num_magnitude_bins < 2:
            raise ValueError(f"TrivialAugmentWide: num_magnitude_bins is 2 or more, not {self.num_magnitude_bins!r}")

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameters: number and strength of the operation."""
        share = np.floor(u[:, 2] * self.num_magnitude_bins) / (self.num_magnitude_bins - 1)
        most = [0, 0.99, 0.99, 32, 32, 135, 0.99, 0.99, 0.99, 0.99, 6, 0, 0, 0]
        planner.step(self, _picked(u[:, 0], u[:, 1], share, most))


def _picked(which: Floats, sign: Floats, share: Floats, most: Sequence[Any]) -> Floats:
    """The number and the strength of an operation for each image, [n, 2].

    which, sign: uniform draws, [n]. share: strength relative to the largest, [n]. most: the largest strength of each
    operation, a number or float64 [n].
    """
    strengths = np.stack([share * value for value in most], axis=1)
    strengths[:, _SIGNED] *= np.where(sign < 0.5, -1.0, 1.0)[:, None]
    strengths[:, _POSTERIZE] = 8 - np.rint(strengths[:, _POSTERIZE])
    strengths[:, _SOLARIZE] = 255 * (1 - share)
    number = np.floor(which * _CHANGES).astype(np.int64)
    return np.stack([number, strengths[np.arange(len(number)), number]], axis=1)


def _changed(images: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Apply the operations; images with the same operation are processed together."""
    images = images.round_()
    for k in range(0, len(rows[0]), 2):
        numbers = [int(row[k]) for row in rows]
        for number in sorted(set(numbers) - {0}):
            some = [i for i, other in enumerate(numbers) if other == number]
            strengths = [[rows[i][k + 1]] for i in some]
            if len(some) == len(rows):
                images = _FUNCTIONS[number](images, strengths).round_()
            else:
                images[some] = _FUNCTIONS[number](images[some], strengths).round_()
    return images


# Shears about the upper left corner, translations and rotation, from the strength and half the height and width.
_MATRICES: dict[int, Callable[[float, float, float], Matrix]] = {
    1: lambda s, height, width: (1, s, s * height, 0, 1, 0),
    2: lambda s, height, width: (1, 0, 0, s, 1, s * width),
    3: lambda s, height, width: (1, 0, -int(s), 0, 1, 0),
    4: lambda s, height, width: (1, 0, 0, 0, 1, -int(s)),
    5: lambda s, height, width: rotation(s),
}


def _moves(parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
    picked = zip(map(int, parameters[::2]), parameters[1::2], strict=True)
    return [_MATRICES[number](strength, height / 2, width / 2) for number, strength in picked if number in _MATRICES]


def _mapped(number: int) -> _Change:
    """The function of an operation that moves pixels, with nearest sampling."""

    def change(images: torch.Tensor, by: Rows) -> torch.Tensor:
        height, width = images.shape[2:]
        return affine(images, [_MATRICES[number](strength, height / 2, width / 2) for (strength,) in by], "nearest")

    return change


def _brightness(images: torch.Tensor, by: Rows) -> torch.Tensor:
    return images.mul_(column(images, by, 0, 1.0)).clamp_(0, 255)


def _colour(images: torch.Tensor, by: Rows) -> torch.Tensor:
    return blend(images, grey(images).round_(), column(images, by, 0, 1.0))


def _contrast(images: torch.Tensor, by: Rows) -> torch.Tensor:
    return blend(images, grey(images).round_().mean((2, 3), keepdim=True), column(images, by, 0, 1.0))


def _sharpness(images: torch.Tensor, by: Rows) -> torch.Tensor:
    """Sharpness by the smooth filter of Pillow: weights 1/13 for each neighbour, 5/13 for the pixel; edges remain."""
    import torch.nn.functional as F

    kernel = images.new_full((3, 1, 3, 3), 1 / 13)
    kernel[:, :, 1, 1] = 5 / 13
    smooth = images.clone()
    if min(images.shape[2:]) > 2:
        smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=3).round_()
    return blend(images, smooth, column(images, by, 0, 1.0))


def _posterize(images: torch.Tensor, by: Rows) -> torch.Tensor:
    step = 2.0 ** (8 - column(images, by, 0))
    rounded: torch.Tensor = (images / step).floor_() * step
    return rounded


def _solarize(images: torch.Tensor, by: Rows) -> torch.Tensor:
    return images.where(images < column(images, by, 0), 255 - images)


def _autocontrast(images: torch.Tensor, by: Rows) -> torch.Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return images.where(low == high, (images - low) * (255 / (high - low).clamp(min=1)))


def _equalize(images: torch.Tensor, by: Rows) -> torch.Tensor:
    """Equalize each channel as Pillow's `ImageOps.equalize`: in integers, and the count of the largest value present
    does not enter the step."""
    import torch

    count, channels, height, width = images.shape
    planes = count * channels
    values = images.long().view(planes, -1)
    levels = torch.arange(256, device=images.device)
    plane = torch.arange(planes, device=images.device)[:, None]
    counts = torch.bincount((values + 256 * plane).view(-1), minlength=256 * planes).view(planes, 256)
    last = ((counts > 0) * levels).amax(1, keepdim=True)
    step = (height * width - counts.gather(1, last)) // 255
    table = (counts.cumsum(1) - counts + step // 2) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), levels)
    return table.gather(1, values).to(torch.float32).view_as(images)


_FUNCTIONS: tuple[_Change, ...] = (
    lambda images, by: images,
    *(_mapped(number) for number in _MATRICES),
    _brightness,
    _colour,
    _contrast,
    _sharpness,
    _posterize,
    _solarize,
    _autocontrast,
    _equalize,
)


# --- as nodes of DALI -------------------------------------------------------------------------------------------------
# A graph is the same for all images, so each image passes through all operations; all but one have no effect.
def _node_numbers(parameters: Floats, heights: Floats, widths: Floats) -> Floats:
    """The parameters of the nodes, [n, 30] for each of k operations on n images, from number and strength, [n, 2 k]:

    0-5    the matrix from `centred`
    6-9    the factor of the blend; 1 to blend with the grey image, its mean, or the smooth image; black if all are 0
    10-11  the step of posterize; the first value that solarize inverts
    12-13  autocontrast, equalize: 1 or 0
    14-29  the edges, which are never smoothed: upper left corners of four boxes, then their heights and widths
    """
    parts = []
    for number, strength in zip(parameters[:, ::2].T, parameters[:, 1::2].T, strict=True):
        maps = [
            _MATRICES[int(which)](by, height / 2, width / 2) if which in _MATRICES else (1, 0, 0, 0, 1, 0)
            for which, by, height, width in zip(number, strength, heights, widths, strict=True)
        ]
        blended = (number >= _BRIGHTNESS) & (number <= _SHARPNESS)
        zeros, ones = np.zeros(len(number)), np.ones(len(number))
        columns = [
            np.where(blended, 1 + strength, 1.0),
            *(number == which for which in (_COLOUR, _CONTRAST, _SHARPNESS)),
            np.where(number == _POSTERIZE, 2.0 ** (8 - strength), 1.0),
            np.where(number == _SOLARIZE, strength, 256.0),
            *(number == which for which in (_AUTOCONTRAST, _EQUALIZE)),
            *(zeros, zeros, heights - 1, zeros, zeros, zeros, zeros, widths - 1),
            *(ones, widths, ones, widths, heights, ones, heights, ones),
        ]
        parts += [centred(maps, heights, widths), np.stack(columns, axis=1)]
    return np.concatenate(parts, axis=1)


def _changed_node(dali: Any, images: Any, parameters: Any, count: int) -> Any:
    math, fn = dali.math, dali.fn
    images = rounded_node(dali, images)
    for k in range(0, count * _NODE_NUMBERS, _NODE_NUMBERS):
        images = affine_node(dali, images, parameters[k : k + 6], "nearest")
        values = with_images(images, parameters[k + 6 : k + 14])
        grey = rounded_node(dali, grey_node(images))
        other = grey * values[1] + fn.reductions.mean(grey) * values[2]
        other = other + _smooth_node(dali, images, parameters[k + 14 : k + 30]) * values[3]
        images = rounded_node(dali, blend_node(dali, images, other, values[0]))
        images = math.floor(images / values[4]) * values[4]
        images = (images < values[5]) * images + (images >= values[5]) * (255.0 - images)
        low, high = (reduced(images, axes=[0, 1], keep_dims=True) for reduced in (fn.reductions.min, fn.reductions.max))
        stretched = (images - low) * (255.0 / math.max(high - low, 1.0))
        images = rounded_node(dali, images + (stretched - images) * (values[6] * (low != high)))
        equalized = fn.cast(fn.equalize(fn.cast(images, dtype=dali.types.UINT8)), dtype=dali.types.FLOAT)
        images = images + (equalized - images) * values[7]
    return images


def _smooth_node(dali: Any, images: Any, edges: Any) -> Any:
    """Pillow's smooth filter, as in `_sharpness`. edges: the last sixteen of `_node_numbers`."""
    fn = dali.fn

    def with_neighbours(values: Any, axis: int) -> Any:
        neighbours = (
            fn.slice(values, start=[by], rel_shape=[1.0], axes=[axis], out_of_bounds_policy="pad") for by in (-1, 1)
        )
        return values + next(neighbours) + next(neighbours)

    smooth = (with_neighbours(with_neighbours(images, 0), 1) + images * 4.0) * (1 / 13)
    change = rounded_node(dali, smooth) - images
    return images + fn.erase(change, anchor=edges[:8], shape=edges[8:], axis_names="HW", fill_value=0.0)
