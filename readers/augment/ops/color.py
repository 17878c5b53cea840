"""Ops on colours: brightness, contrast and saturation, as Pillow's `ImageEnhance`; hue, in the HSV of Smith (1978);
greyscale, by the luma of ITU-R BT.601, as in torchvision and Pillow's mode "L"; and normalisation by channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    RANGED,
    Floats,
    Op,
    Rows,
    Stage,
    blend,
    check_probability,
    check_range,
    column,
    grey,
    refuses_all_but,
)
from readers.augment.ops.nodes import blend_node, grey_node, with_images

if TYPE_CHECKING:
    import torch

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ColorJitter", "Normalize", "RandomGrayscale", "channel_factors"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, repr=False)
class ColorJitter(Op):
    """Brightness, contrast and saturation, in this order, each times a factor from [max(0, 1-x), 1+x]; then hue.

    Blends with black, with the mean of the grey image, and with the grey image; each step is clamped to 0..255. The hue
    turns by -hue to +hue of the circle, at most 0.5.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            check_range(self, name, (value, value), 0.0, 100.0)
        check_range(self, "hue", (self.hue, self.hue), 0.0, 0.5)

    def plan(self, planner: Planner, u: Floats) -> None:
        spread = np.array([self.brightness, self.contrast, self.saturation])
        low = np.maximum(0.0, 1.0 - spread)
        factors = low + (1.0 + spread - low) * u[:, :3]
        turns = self.hue * (2 * u[:, 3:] - 1)
        planner.step(self, np.concatenate([factors, turns], axis=1) if self.hue else factors)

    def refuses(self, dtype: str, channels: int) -> str:
        return refuses_all_but(RANGED, dtype, channels, colours=True)

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        if self.brightness:
            images = images.mul_(column(images, rows, 0)).clamp_(0, 255)
        if self.contrast:
            images = blend(images, grey(images).mean((2, 3), keepdim=True), column(images, rows, 1))
        if self.saturation:
            images = blend(images, grey(images), column(images, rows, 2))
        return _turn_hue(images, column(images, rows, 3)) if self.hue and images.shape[1] == 3 else images

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        values = with_images(images, parameters)
        if self.brightness:
            images = dali.math.clamp(images * values[0], 0.0, 255.0)
        if self.contrast:
            images = blend_node(dali, images, dali.fn.reductions.mean(grey_node(images)), values[1])
        if self.saturation:
            images = blend_node(dali, images, grey_node(images), values[2])
        return _turned_hue_node(dali, images, values[3]) if self.hue else images


def _turn_hue(images: torch.Tensor, turns: Any) -> torch.Tensor:
    """Turn the hue of each pixel; the largest and the smallest value stay as they are.

    turns: a number, or float32 [n, 1, 1, 1].
    """
    import torch

    red, green, blue = images.split(1, 1)
    largest = torch.maximum(torch.maximum(red, green), blue)
    smallest = torch.minimum(torch.minimum(red, green), blue)
    chroma = largest - smallest
    sixth = chroma.clamp(min=1e-6).mul_(6).reciprocal_()
    hue = (red - green).mul_(sixth).add_(4 / 6)  # in turns
    hue = ((blue - red).mul_(sixth).add_(2 / 6)).where(largest == green, hue)
    hue = ((green - blue).mul_(sixth)).where(largest == red, hue)
    places = images.new_tensor([5 / 6, 3 / 6, 1 / 6]).view(3, 1, 1) + hue.add_(turns + 1)
    # How far each channel is from the smallest value: 0 for a third of the circle, 1 for a third, rising or falling.
    share = places.frac_().mul_(6).sub_(2).abs_().sub_(1).clamp_(0, 1)
    return torch.addcmul(smallest, chroma, share)


def _turned_hue_node(dali: Any, images: Any, turns: Any) -> Any:
    """The same as `_turn_hue`, as a node of DALI."""
    math = dali.math
    red, green, blue = (images[:, :, i : i + 1] for i in range(3))
    largest, smallest = math.max(red, math.max(green, blue)), math.min(red, math.min(green, blue))
    chroma = largest - smallest
    divisor = math.max(chroma, 1e-6)
    is_red = red == largest
    is_green = (green == largest) & (red != largest)
    is_blue = (red != largest) & (green != largest)
    hue = is_red * ((green - blue) / divisor)
    hue = hue + is_green * ((blue - red) / divisor + 2.0) + is_blue * ((red - green) / divisor + 4.0)
    parts = []
    for start in (5.0, 3.0, 1.0):
        place = hue + (turns * 6.0 + start)
        place = place - math.floor(place / 6.0) * 6.0
        parts.append(largest - chroma * math.clamp(math.min(place, 4.0 - place), 0.0, 1.0))
    return dali.fn.cat(*parts, axis=2)


@dataclass(frozen=True, slots=True, repr=False)
class RandomGrayscale(Op):
    """Without colour, with probability p; the image keeps its three channels."""

    p: float = 0.1

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameter: the saturation that is left, 0 or 1."""
        planner.step(self, np.where(u < self.p, 0.0, 1.0))

    def refuses(self, dtype: str, channels: int) -> str:
        return refuses_all_but(RANGED, dtype, channels, colours=True)

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        if all(row[0] for row in rows):
            return images
        return blend(images, grey(images), column(images, rows, 0))

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        return blend_node(dali, images, grey_node(images), with_images(images, parameters)[0])


@dataclass(frozen=True, slots=True, repr=False)
class Normalize(Op):
    """(x / 255 - mean) / std, by channel; the result is a float. The last op on single images of a list.

    With decode="unchanged" as many means and deviations as images have channels, and x / 65535 of uint16; float32 and
    int32 are not divided.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    stage: ClassVar[Stage] = Stage.NORMALIZE

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise ValueError(
                f"Normalize: a mean and a positive deviation for each channel, not {self.mean!r}, {self.std!r}"
            )

    def refuses(self, dtype: str, channels: int) -> str:
        count = len(self.mean)
        return "" if count == channels else f"is for {count} channel{'' if count == 1 else 's'}"


def channel_factors(normalize: Normalize | None, largest: float = 255.0, channels: int = 3) -> list[list[float]]:
    """By what to multiply each channel of values from 0 to `largest`, and what to add, for results that are normalised,
    or from 0 to 1 without `normalize`.
    """
    mean, std = (normalize.mean, normalize.std) if normalize else ((0.0,) * channels, (1.0,) * channels)
    return [[1.0 / (largest * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]]
