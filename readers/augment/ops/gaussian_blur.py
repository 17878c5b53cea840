"""Gaussian blur: two products with banded matrices, which hold the kernel and the mirrored edges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from readers.augment.geometry import Planner
from readers.augment.ops.base import SMOOTH, Floats, Op, Rows, Stage, check_probability, check_range, refuses_all_but

if TYPE_CHECKING:
    import torch

__all__ = ["GaussianBlur"]

_REACH_SIGMAS = 4.0
_LEAST_SIGMA = 1e-3
_BLOCKS_FROM, _BLOCK = 512, 64  # pixels of a side
_VALUES = 1 << 24  # of the matrices of a few images at a time: 64 MiB


@dataclass(frozen=True, slots=True, repr=False)
class GaussianBlur(Op):
    """Convolved with a Gaussian of a standard deviation from `sigma` (pixels), with probability p; edges mirrored."""

    sigma: tuple[float, float] = (0.1, 2.0)
    p: float = 1.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 2

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
        """The deviation, and the side of the kernel: 1 for images that stay as they are."""
        reach = np.maximum(1, np.ceil(_REACH_SIGMAS * parameters)) * (parameters > 0)
        return np.concatenate([np.where(parameters > 0, parameters, 1.0), 2 * reach + 1], axis=1)


def _reach(sigma: float) -> int:
    return max(1, math.ceil(_REACH_SIGMAS * sigma))


def _multiplied(matrices: torch.Tensor, images: torch.Tensor, largest: float) -> torch.Tensor:
    """The product over the rows of large images, without most of the zeros that are off the diagonal."""
    out, reach, length = images.clone(), _reach(largest), images.shape[2]
    for start in range(0, length, _BLOCK):
        rows, near = slice(start, start + _BLOCK), slice(max(0, start - reach), start + _BLOCK + reach)
        out[:, :, rows] = matrices[:, None, rows, near] @ images[:, :, near]
    return out


def _matrices(length: int, sigma: torch.Tensor, largest: float) -> torch.Tensor:
    """[n, length, length]: row i holds the weights of the pixels that make pixel i; the unit matrix for sigma 0."""
    import torch

    reach = _reach(largest)
    offsets, sources = _sources(length, reach, sigma.device)
    own = sigma.clamp(min=_LEAST_SIGMA)[:, None]
    weights = torch.exp(-0.5 * (offsets / own) ** 2)
    if len(sigma) > 1:  # whose kernels may be narrower than the widest
        weights = torch.where(offsets.abs() <= torch.ceil(_REACH_SIGMAS * own).clamp(min=1), weights, 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    count = len(sigma)
    matrices = torch.zeros(count, length, length, device=sigma.device)
    return matrices.scatter_add_(2, sources.expand(count, -1, -1), weights[:, None].expand(-1, length, -1))


@lru_cache(maxsize=16)
def _sources(length: int, reach: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets of a kernel, and the pixel at each of them from each pixel, [length, 2 * reach + 1]."""
    import torch

    offsets = torch.arange(-reach, reach + 1, device=device)
    # Mirrored about the edge pixels, again and again where the kernel is wider than the image.
    period = max(1, 2 * (length - 1))
    place = (torch.arange(length, device=device)[:, None] + offsets) % period
    return offsets, torch.minimum(place, period - place) if length > 1 else torch.zeros_like(place)
