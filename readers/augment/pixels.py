"""What ops on pixels share: greyscale, blends and affine maps of float32 tensors [n, 3, height, width], 0 to 255.

The same arithmetic on any device. torch comes with the tensors: importing this module does not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["LUMA", "affine", "blend", "column", "grey", "window"]

# ITU-R BT.601, as Pillow's and torchvision's greyscale.
LUMA = (0.299, 0.587, 0.114)


def column(images: torch.Tensor, rows: Sequence[Sequence[float]], number: int) -> torch.Tensor:
    """Parameter `number` of each image, on the device of the images: float32 [n, 1, 1, 1]."""
    import torch

    values = torch.tensor([row[number] for row in rows], dtype=torch.float32)
    return values.to(images.device, non_blocking=True).view(-1, 1, 1, 1)


def grey(images: torch.Tensor) -> torch.Tensor:
    """[n, 1, height, width]."""
    return images[:, :1] * LUMA[0] + images[:, 1:2] * LUMA[1] + images[:, 2:] * LUMA[2]


def blend(images: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """factor * images + (1 - factor) * other, clamped to 0..255; in place."""
    return images.mul_(factor).add_((1.0 - factor) * other).clamp_(0, 255)


def affine(
    images: torch.Tensor,
    matrices: Sequence[tuple[float, float, float, float, float, float]],
    mode: Literal["bilinear", "nearest"] = "bilinear",
) -> torch.Tensor:
    """Pixel (x, y) of a result is that at (a x + b y + c, d x + e y + f), for the matrix (a, b, c, d, e, f) of each
    image; x, y in pixels from the centre of the image. Black outside."""
    import torch
    import torch.nn.functional as F

    _, _, height, width = images.shape
    # affine_grid works in units of half the image: x' and y' are scaled by what they are measured in.
    theta = [
        [[a, b * height / width, 2 * c / width], [d * width / height, e, 2 * f / height]]
        for a, b, c, d, e, f in matrices
    ]
    grid = F.affine_grid(
        torch.tensor(theta).to(images.device, non_blocking=True), list(images.shape), align_corners=False
    )
    return F.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)


def window(images: torch.Tensor, corner: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """The crop [n, 3, *size] at `corner`: a view, or a copy that is black where it reaches beyond the images."""
    (top, left), (height, width) = corner, size
    below, behind = top + height - images.shape[2], left + width - images.shape[3]
    if min(top, left) >= 0 and max(below, behind) <= 0:
        return images[:, :, top : top + height, left : left + width]
    import torch.nn.functional as F

    return F.pad(images, (-left, behind, -top, below))  # negative numbers crop
