"""Rotation, colour and blur of a whole batch at once, on any device: what `readers.augment.pixels` does to one image.

Every image has parameters of its own. float32 [n, 3, height, width] with values 0 to 255; the results of the two
modules are the same but for the order in which sums are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from readers.augment.ops import ColorJitter, GaussianBlur, Op, RandomRotation
from readers.augment.pixels import LUMA, REACH_SIGMAS

__all__ = ["apply_steps"]

_LEAST_SIGMA = 1e-3
_BLUR_VALUES = 1 << 24  # of the matrices of a few images at a time: 64 MiB


def apply_steps(steps: Sequence[tuple[Op, Sequence[Sequence[float]]]], images: torch.Tensor) -> torch.Tensor:
    """`images` changed by each of `steps`: an op and, for each image, its draws as in `readers.augment.recipe.Plan`.

    May work in place.
    """
    for op, rows in steps:
        parameters = torch.tensor(rows, dtype=torch.float32).to(images.device, non_blocking=True)
        if isinstance(op, RandomRotation):
            images = _rotate(images, parameters[:, 0])
        elif isinstance(op, ColorJitter):
            images = _jitter(images, *parameters.view(-1, 3, 1, 1, 1).unbind(1))
        else:
            assert isinstance(op, GaussianBlur)
            images = _blur(images, parameters[:, 0], max(row[0] for row in rows))
    return images


def _rotate(images: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    _, _, height, width = images.shape
    turn = torch.deg2rad(degrees)
    sin, cos, zero = torch.sin(turn), torch.cos(turn), torch.zeros_like(turn)
    # affine_grid works in units of half the image: x' and y' are scaled by what they are measured in.
    rows = (cos, -sin * height / width, zero), (sin * width / height, cos, zero)
    theta = torch.stack([torch.stack(row, 1) for row in rows], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _jitter(
    images: torch.Tensor, brightness: torch.Tensor, contrast: torch.Tensor, saturation: torch.Tensor
) -> torch.Tensor:
    """Factors [n, 1, 1, 1]; each step is clamped to 0..255."""
    images = images.mul_(brightness).clamp_(0, 255)
    mean = _grey(images).mean((2, 3), keepdim=True)
    images = images.mul_(contrast).add_((1.0 - contrast) * mean).clamp_(0, 255)
    grey = _grey(images)
    return images.mul_(saturation).add_((1.0 - saturation) * grey).clamp_(0, 255)


def _grey(images: torch.Tensor) -> torch.Tensor:
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]


def _blur(images: torch.Tensor, sigma: torch.Tensor, largest: float) -> torch.Tensor:
    """Two products with banded matrices, one of each kind for an image; a few images at a time."""
    _, _, height, width = images.shape
    if largest <= 0:
        return images
    # As in the other module, so that the same matrices come out.
    sigma = torch.where(sigma > 0, torch.round(sigma, decimals=3), 0.0)
    group = max(1, _BLUR_VALUES // (height * height + width * width))
    parts = []
    for some, part in zip(images.split(group), sigma.split(group), strict=True):
        rows, columns = _matrices(height, part, largest), _matrices(width, part, largest)
        parts.append(torch.matmul(rows[:, None], torch.matmul(some, columns.transpose(1, 2)[:, None])))
    return torch.cat(parts)


def _matrices(length: int, sigma: torch.Tensor, largest: float) -> torch.Tensor:
    """[n, length, length]: row i holds the weights of the pixels that make pixel i; the unit matrix for sigma 0."""
    reach = max(1, math.ceil(REACH_SIGMAS * largest))
    offsets = torch.arange(-reach, reach + 1, device=sigma.device)
    own = sigma.clamp(min=_LEAST_SIGMA)[:, None]
    weights = torch.exp(-0.5 * (offsets / own) ** 2)
    weights = torch.where(offsets.abs() <= torch.ceil(REACH_SIGMAS * own).clamp(min=1), weights, 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    # Mirrored about the edge pixels, again and again where the kernel is wider than the image.
    period = max(1, 2 * (length - 1))
    place = (torch.arange(length, device=sigma.device)[:, None] + offsets) % period
    place = torch.minimum(place, period - place) if length > 1 else torch.zeros_like(place)
    count = len(sigma)
    matrices = torch.zeros(count, length, length, device=sigma.device)
    index, values = place.expand(count, -1, -1), weights[:, None].expand(-1, length, -1)
    return matrices.scatter_add_(2, index, values)
