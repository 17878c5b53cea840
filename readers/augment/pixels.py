"""Rotation, colour and blur of one image on the CPU: float32 tensors [3, height, width] with values 0 to 255.

torch is the only thing this needs; the same arithmetic runs on any device.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F

from readers.augment.ops import ColorJitter, GaussianBlur, Op, RandomRotation

__all__ = ["LUMA", "REACH_SIGMAS", "apply_pixel_op"]

# ITU-R BT.601, as Pillow's and torchvision's greyscale.
LUMA = (0.299, 0.587, 0.114)
REACH_SIGMAS = 4.0


def apply_pixel_op(op: Op, parameters: list[float], image: torch.Tensor) -> torch.Tensor:
    """`image` changed by `op`; may be done in place."""
    if isinstance(op, RandomRotation):
        return _rotate(image, parameters[0])
    if isinstance(op, ColorJitter):
        return _jitter(image, *parameters)
    assert isinstance(op, GaussianBlur)
    return _blur(image, parameters[0]) if parameters[0] > 0 else image


def _rotate(image: torch.Tensor, degrees: float) -> torch.Tensor:
    """Counter-clockwise about the centre, bilinear, black outside."""
    _, height, width = image.shape
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    # affine_grid works in units of half the image: x' and y' are scaled by what they are measured in.
    theta = torch.tensor([[[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]], device=image.device)
    grid = F.affine_grid(theta, [1, 3, height, width], align_corners=False)
    return F.grid_sample(image[None], grid, mode="bilinear", padding_mode="zeros", align_corners=False)[0]


def _jitter(image: torch.Tensor, brightness: float, contrast: float, saturation: float) -> torch.Tensor:
    """Blends with black, with the mean grey, and with the grey image; each step is clamped to 0..255."""
    if brightness != 1.0:
        image = image.mul_(brightness).clamp_(0, 255)
    if contrast != 1.0:
        mean = float(_grey(image).mean())
        image = image.mul_(contrast).add_((1.0 - contrast) * mean).clamp_(0, 255)
    if saturation != 1.0:
        grey = _grey(image)
        image = image.mul_(saturation).add_(grey, alpha=1.0 - saturation).clamp_(0, 255)
    return image


def _grey(image: torch.Tensor) -> torch.Tensor:
    return image[0] * LUMA[0] + image[1] * LUMA[1] + image[2] * LUMA[2]


def _blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    """Two products with banded matrices, which hold the kernel and the mirrored edges."""
    rows, columns = _kernel_matrix(image.shape[1], round(sigma, 3)), _kernel_matrix(image.shape[2], round(sigma, 3))
    rows, columns = rows.to(image.device), columns.to(image.device)
    return torch.matmul(rows, torch.matmul(image, columns.T))


@lru_cache(maxsize=64)
def _kernel_matrix(length: int, sigma: float) -> torch.Tensor:
    """[length, length]: row i holds the weights of the pixels that make pixel i."""
    reach = max(1, math.ceil(REACH_SIGMAS * sigma))
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    # Mirrored about the edge pixels, again and again where the kernel is wider than the image.
    period = max(1, 2 * (length - 1))
    place = (torch.arange(length)[:, None] + offsets[None, :]) % period
    place = torch.minimum(place, period - place) if length > 1 else torch.zeros_like(place)
    matrix = torch.zeros(length, length)
    return matrix.scatter_add_(1, place, weights.expand(length, -1).contiguous())
