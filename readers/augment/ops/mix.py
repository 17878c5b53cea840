"""MixUp (Zhang et al., 2018, https://arxiv.org/abs/1710.09412) and CutMix (Yun et al., 2019,
https://arxiv.org/abs/1905.04899), as torchvision.transforms.v2 has them.

Each image of a finished batch is combined with the one before it, the first with the last, by one share for the whole
batch, which is drawn from a Beta distribution. Labels become shares of classes, float32 [n, classes].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from readers.augment.ops.base import Floats, Op, Stage, check_probability

if TYPE_CHECKING:
    import torch

__all__ = ["CutMix", "MixUp"]

_TRIES = 8  # each fails once in twenty times at most
_GAMMA_DRAWS = 3 * _TRIES + 1


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
        """Combine the images in place, with `share` of their own; the share of their own that they have then."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, repr=False)
class MixUp(_Mix):
    """A weighted sum of each image and the one before it. alpha: of the Beta(alpha, alpha) that the weight is from;
    p: how many of the batches are mixed."""

    def _combine(self, images: torch.Tensor, share: float, u: Floats) -> float:
        if images.is_floating_point():
            images.copy_(images.roll(1, 0).mul_(1 - share).add_(images, alpha=share))
        else:
            whole = images.float()
            images.copy_(whole.roll(1, 0).mul_(1 - share).add_(whole, alpha=share).round_())
        return share


@dataclass(frozen=True, slots=True, repr=False)
class CutMix(_Mix):
    """A box of the image before it in each image. alpha: of the Beta(alpha, alpha) that the share of the rest is from;
    p: how many of the batches are mixed."""

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
    """A number of Beta(alpha, alpha), from uniform ones: X / (X + Y) for X and Y of Gamma(alpha)."""
    x, y = _log_gamma_variate(alpha, u[:_GAMMA_DRAWS]), _log_gamma_variate(alpha, u[_GAMMA_DRAWS:])
    return float(1 / (1 + np.exp(np.clip(y - x, -700, 700))))


def _log_gamma_variate(alpha: float, u: Floats) -> float:
    """The logarithm of a number of Gamma(alpha), from uniform ones [25].

    Marsaglia and Tsang (2000), "A simple method for generating gamma variables", for alpha + 1, and a power of one more
    uniform number; normal numbers by Box and Muller.
    """
    d = alpha + 1 - 1 / 3
    boost = np.log(1 - u[-1]) / alpha
    radius, turn, test = 1 - u[:_TRIES], u[_TRIES : 2 * _TRIES], 1 - u[2 * _TRIES : 3 * _TRIES]
    normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * turn)
    cube = np.maximum(1 + normal / np.sqrt(9 * d), 1e-12) ** 3
    accepted = np.log(test) < 0.5 * normal**2 + d - d * cube + d * np.log(cube)
    accepted &= 1 + normal / np.sqrt(9 * d) > 0
    return float(np.log(d * cube[int(accepted.argmax())]) + boost)
