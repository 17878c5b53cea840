"""Ops on pixel values: brightness, contrast and saturation, as in Pillow's `ImageEnhance`; hue, in the HSV of Smith
(1978); greyscale, by the luma of ITU-R BT.601, as in torchvision and Pillow's mode "L"; normalisation by channel; blur,
erasing, MixUp and CutMix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    RANGED,
    SMOOTH,
    Floats,
    Op,
    Rows,
    Stage,
    blend,
    blend_node,
    check_probability,
    check_range,
    column,
    grey,
    grey_node,
    refuses_all_but,
    tried_sides,
    with_images,
)
from readers.order.base import counter_hash

if TYPE_CHECKING:
    import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, repr=False)
class ColorJitter(Op):
    """Jitter brightness, contrast and saturation, in this order, by random factors from [max(0, 1-x), 1+x]; then hue.

    brightness, contrast, saturation: x, at least 0. These changes blend the image with black, with the mean of the grey
    image, and with the grey image; each result is clamped to 0..255.
    hue: the largest rotation of the hue in either direction, in turns, at most 0.5.

    Raises ValueError for parameters out of range.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 4
    named: ClassVar[tuple[str, ...]] = ("brightness", "contrast", "saturation", "hue")

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
    """Rotate the hue of each pixel; the largest and the smallest of its three values do not change.

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
    # Distance of each channel from the smallest value: 0 for a third of the circle, 1 for a third, linear between.
    share = places.frac_().mul_(6).sub_(2).abs_().sub_(1).clamp_(0, 1)
    return torch.addcmul(smallest, chroma, share)


def _turned_hue_node(dali: Any, images: Any, turns: Any) -> Any:
    """`_turn_hue` as a DALI node."""
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
    """Convert an image to greyscale with probability p; it keeps its three channels."""

    p: float = 0.1

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 1
    named: ClassVar[tuple[str, ...]] = ("saturation",)

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameter: the remaining saturation, 0 or 1."""
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
    """Normalise each channel to floats: (x / 255 - mean) / std. It must be the last op on single images in a list.

    mean, std: one number for each channel. With decode="unchanged", uint16 values are divided by 65535 and not by 255,
    and float32 and int32 values are not divided.
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
    """[factors, summands], one of each for each channel, that normalise values from 0 to `largest`; without `normalize`
    they scale values to 0..1.
    """
    mean, std = (normalize.mean, normalize.std) if normalize else ((0.0,) * channels, (1.0,) * channels)
    return [[1.0 / (largest * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]]


# Gaussian blur as two products with banded matrices, which contain the kernel and the mirrored edges.


_REACH_SIGMAS = 4.0
_LEAST_SIGMA = 1e-3
_BLOCKS_FROM, _BLOCK = 512, 64  # pixels per side
_VALUES = 1 << 24  # limit of values in the matrices of a group of images: 64 MiB


@dataclass(frozen=True, slots=True, repr=False)
class GaussianBlur(Op):
    """Gaussian blur with probability p. Edges are mirrored.

    sigma: the range of the random standard deviation, in pixels.
    """

    sigma: tuple[float, float] = (0.1, 2.0)
    p: float = 1.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 2
    named: ClassVar[tuple[str, ...]] = ("sigma",)

    def __post_init__(self) -> None:
        check_range(self, "sigma", self.sigma, 1e-3, 100.0)
        check_probability(self, self.p)

    def plan(self, planner: Planner, u: Floats) -> None:
        sigma = self.sigma[0] + (self.sigma[1] - self.sigma[0]) * u[:, :1]
        planner.step(self, np.where(u[:, 1:] < self.p, sigma, 0.0))

    def refuses(self, dtype: str, channels: int) -> str:
        return refuses_all_but(SMOOTH, dtype, channels)

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        import torch

        largest = max(row[0] for row in rows)
        if largest <= 0:
            return images
        _, _, height, width = images.shape
        sigma = torch.tensor([row[0] for row in rows]).to(images.device, non_blocking=True)
        group = max(1, _VALUES // (height * height + width * width))
        for some, part in zip(images.split(group), sigma.split(group), strict=True):
            down = _matrices(height, part, largest)
            across = down if height == width else _matrices(width, part, largest)
            if max(height, width) <= _BLOCKS_FROM:
                some.copy_(torch.matmul(down[:, None], torch.matmul(some, across.transpose(1, 2)[:, None])))
            else:
                blurred = _multiplied(across, some.transpose(2, 3), largest).transpose(2, 3)
                some.copy_(_multiplied(down, blurred, largest))
        return images

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        window = dali.fn.cast(parameters[1], dtype=dali.types.INT32)
        return dali.fn.gaussian_blur(images, sigma=parameters[0], window_size=window)

    def dali_parameters(self, parameters: Floats, heights: Floats, widths: Floats) -> Floats:
        """The standard deviation and the side of the kernel; both are 1 for images without blur."""
        reach = np.maximum(1, np.ceil(_REACH_SIGMAS * parameters)) * (parameters > 0)
        return np.concatenate([np.where(parameters > 0, parameters, 1.0), 2 * reach + 1], axis=1)


def _reach(sigma: float) -> int:
    return max(1, math.ceil(_REACH_SIGMAS * sigma))


def _multiplied(matrices: torch.Tensor, images: torch.Tensor, largest: float) -> torch.Tensor:
    """The product of banded matrices with large images along their rows, without most zeros off the diagonal."""
    out, reach, length = images.clone(), _reach(largest), images.shape[2]
    for start in range(0, length, _BLOCK):
        rows, near = slice(start, start + _BLOCK), slice(max(0, start - reach), start + _BLOCK + reach)
        out[:, :, rows] = matrices[:, None, rows, near] @ images[:, :, near]
    return out


def _matrices(length: int, sigma: torch.Tensor, largest: float) -> torch.Tensor:
    """The matrices of the blur, [n, length, length]: row i has the weights of the source pixels of pixel i. For sigma 0
    it is the identity matrix."""
    import torch

    reach = _reach(largest)
    offsets, sources = _sources(length, reach, sigma.device)
    own = sigma.clamp(min=_LEAST_SIGMA)[:, None]
    weights = torch.exp(-0.5 * (offsets / own) ** 2)
    if len(sigma) > 1:  # kernels may be narrower than the widest
        weights = torch.where(offsets.abs() <= torch.ceil(_REACH_SIGMAS * own).clamp(min=1), weights, 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    count = len(sigma)
    matrices = torch.zeros(count, length, length, device=sigma.device)
    return matrices.scatter_add_(2, sources.expand(count, -1, -1), weights[:, None].expand(-1, length, -1))


@lru_cache(maxsize=16)
def _sources(length: int, reach: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets of a kernel, and the source pixel at each offset from each pixel, [length, 2 * reach + 1]."""
    import torch

    offsets = torch.arange(-reach, reach + 1, device=device)
    # Mirrored about the edge pixels, repeatedly if the kernel is wider than the image.
    period = max(1, 2 * (length - 1))
    place = (torch.arange(length, device=device)[:, None] + offsets) % period
    return offsets, torch.minimum(place, period - place) if length > 1 else torch.zeros_like(place)


# Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896), with the names and tries of torchvision.


_ERASING_TRIES = 10


@dataclass(frozen=True, slots=True, repr=False)
class RandomErasing(Op):
    """Erase a random box, with probability p. If no box fits in ten tries, nothing is erased.

    scale: the range of its share of the area. ratio: the range of its height / width.
    value: one value for all channels, a tuple of three, or "random" for noise in each pixel. Values are 0 to 255,
    because pixel ops come before Normalize: the equivalent of torchvision's 0 after normalisation is 255 * mean.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, float, float] | Literal["random"] = 0.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 4 + 2 * _ERASING_TRIES
    named: ClassVar[tuple[str, ...]] = ("top", "left", "height", "width")

    def __post_init__(self) -> None:
        check_probability(self, self.p)
        check_range(self, "scale", self.scale, 1e-6, 1.0)
        check_range(self, "ratio", self.ratio, 1e-3, 1e3)
        if self.value != "random":
            colour = self._colour()
            if len(colour) != 3 or not all(isinstance(v, int | float) and 0 <= v <= 255 for v in colour):
                raise ValueError(
                    f"RandomErasing: value is a number from 0 to 255, three of them, or 'random', not {self.value!r}"
                )

    def _colour(self) -> tuple[float, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,) * 3  # type: ignore[return-value]

    def refuses(self, dtype: str, channels: int) -> str:
        if isinstance(self.value, tuple) and channels != 3:
            return "has a value for each of 3 channels"
        return refuses_all_but(SMOOTH if self.value == 0.0 else RANGED, dtype, channels)

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameters: top, left, height (0 for none) and width of the box, and a key for the noise."""
        height, width = planner.height, planner.width
        tried_height, tried_width = tried_sides(self.scale, self.ratio, height * width, u[:, 4:])
        fits = (tried_height < height[:, None]) & (tried_width < width[:, None])
        rows, first = np.arange(len(height)), fits.argmax(axis=1)
        erased = (u[:, 0] < self.p) & fits[rows, first]
        box_height = np.where(erased, tried_height[rows, first], 0).astype(np.int64)
        box_width = np.where(erased, tried_width[rows, first], 0).astype(np.int64)
        top, left = planner.inside(u[:, 1], height - box_height), planner.inside(u[:, 2], width - box_width)
        key = np.floor(u[:, 3] * (1 << 53))
        planner.step(self, np.stack([top, left, box_height, box_width, key], axis=1).astype(np.float64))

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        import torch

        for image, row in zip(images, rows, strict=True):
            top, left, height, width, key = (int(value) for value in row)
            if not height * width:
                continue
            if self.value == "random":
                noise = counter_hash(np.uint64(key), np.arange(len(image) * height * width)) >> np.uint64(56)
                pixels = torch.from_numpy(noise.astype(np.float32)).view(-1, height, width)
            else:
                colour = self.value if isinstance(self.value, tuple) else (self.value,)
                pixels = torch.tensor(colour, dtype=torch.float32).view(-1, 1, 1)
            image[:, top : top + height, left : left + width] = pixels.to(images.device, non_blocking=True)
        return images

    @property
    def on_dali(self) -> bool:
        """Whether DALI can execute the op; noise has no DALI node."""
        return self.value != "random"

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        return dali.fn.erase(
            images, anchor=parameters[0:2], shape=parameters[2:4], axis_names="HW", fill_value=list(self._colour())
        )


# MixUp (Zhang et al., 2018, https://arxiv.org/abs/1710.09412) and CutMix (Yun et al., 2019,
# https://arxiv.org/abs/1905.04899), as in torchvision.transforms.v2.
#
# Each image of a finished batch is combined with the image before it (the first with the last), with one share for the
# whole batch, drawn from a Beta distribution. Labels become soft, float32 [n, classes].


_MIX_TRIES = 8  # each try fails with a probability of at most 1/20
_GAMMA_DRAWS = 3 * _MIX_TRIES + 1


@dataclass(frozen=True, slots=True, repr=False)
class _Mix(Op):
    alpha: float = 1.0
    p: float = 1.0

    stage: ClassVar[Stage] = Stage.BATCH
    draws: ClassVar[int] = 3 + 2 * _GAMMA_DRAWS

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1000:
            raise ValueError(f"{type(self).__name__}: alpha is above 0 and at most 1000, not {self.alpha!r}")
        check_probability(self, self.p)

    def mix(self, images: torch.Tensor, labels: torch.Tensor, u: Floats) -> tuple[torch.Tensor, torch.Tensor]:
        if u[0] >= self.p or len(images) < 2:
            return images, labels
        share = self._combine(images, _beta(self.alpha, u[3:]), u[1:3])
        return images, share * labels + (1 - share) * labels.roll(1, 0)

    def _combine(self, images: torch.Tensor, share: float, u: Floats) -> float:
        """Combine the images in place, keeping about `share` of each; returns the exact share that is kept."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, repr=False)
class MixUp(_Mix):
    """Mix each image with the image before it, by a weighted sum.

    alpha: parameter of the Beta(alpha, alpha) distribution of the weight. p: probability that a batch is mixed.
    """

    def _combine(self, images: torch.Tensor, share: float, u: Floats) -> float:
        if images.is_floating_point():
            images.copy_(images.roll(1, 0).mul_(1 - share).add_(images, alpha=share))
        else:
            whole = images.float()
            images.copy_(whole.roll(1, 0).mul_(1 - share).add_(whole, alpha=share).round_())
        return share


@dataclass(frozen=True, slots=True, repr=False)
class CutMix(_Mix):
    """Replace a box of each image by the same box of the image before it.

    alpha: parameter of the Beta(alpha, alpha) distribution of the share that is kept. p: probability that a batch is
    mixed.
    """

    def _combine(self, images: torch.Tensor, share: float, u: Floats) -> float:
        height, width = images.shape[2:]
        middle_x, middle_y = int(u[0] * width), int(u[1] * height)
        half = 0.5 * (1 - share) ** 0.5
        half_x, half_y = int(half * width), int(half * height)
        left, right = max(0, middle_x - half_x), min(width, middle_x + half_x)
        top, bottom = max(0, middle_y - half_y), min(height, middle_y + half_y)
        box = images[:, :, top:bottom, left:right]
        box.copy_(box.roll(1, 0))
        return 1 - (right - left) * (bottom - top) / (height * width)


def _beta(alpha: float, u: Floats) -> float:
    """A Beta(alpha, alpha) variate from uniform numbers: X / (X + Y) for X and Y from Gamma(alpha)."""
    x, y = _log_gamma_variate(alpha, u[:_GAMMA_DRAWS]), _log_gamma_variate(alpha, u[_GAMMA_DRAWS:])
    return float(1 / (1 + np.exp(np.clip(y - x, -700, 700))))


def _log_gamma_variate(alpha: float, u: Floats) -> float:
    """The logarithm of a Gamma(alpha) variate, from uniform numbers [25].

    By Marsaglia and Tsang (2000), "A simple method for generating gamma variables", for alpha + 1, and a power of one
    more uniform number; normal variates by Box and Muller.
    """
    d = alpha + 1 - 1 / 3
    boost = np.log(1 - u[-1]) / alpha
    radius, turn, test = 1 - u[:_MIX_TRIES], u[_MIX_TRIES : 2 * _MIX_TRIES], 1 - u[2 * _MIX_TRIES : 3 * _MIX_TRIES]
    normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * turn)
    cube = np.maximum(1 + normal / np.sqrt(9 * d), 1e-12) ** 3
    accepted = np.log(test) < 0.5 * normal**2 + d - d * cube + d * np.log(cube)
    accepted &= 1 + normal / np.sqrt(9 * d) > 0
    return float(np.log(d * cube[int(accepted.argmax())]) + boost)
