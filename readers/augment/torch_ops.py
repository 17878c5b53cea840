"""The same boxes by torch's own operations, one image after another: where there is no Triton, and to check it against.

On the CPU this is the arithmetic of `readers.augment.cpu`. On other devices torch resizes floats only, so it rounds
once instead of after each pass, which is within 1 of 255.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from readers.augment.recipe import Job
from readers.decode.picture import Picture, upright_tensor

__all__ = ["render_boxes"]


def render_boxes(pictures: Sequence[Picture], jobs: Sequence[Job], out: torch.Tensor) -> None:
    """Crop, resize and flip each picture by its job into out, uint8 [n, 3, height, width]."""
    for picture, job, place in zip(pictures, jobs, out, strict=True):
        (top, left, height, width, _, _), resized, corner, flips, _ = job
        image = upright_tensor(picture)[None, :, top : top + height, left : left + width]
        if resized != (height, width):
            image = _resize(image, resized)
        if resized != place.shape[1:]:
            image = image[:, :, corner[0] : corner[0] + place.shape[1], corner[1] : corner[1] + place.shape[2]]
        place.copy_(torch.flip(image, flips)[0] if flips else image[0])


def _resize(image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    exact = image.device.type == "cpu"
    values = image if exact else image.to(torch.float32)
    values = F.interpolate(values, size, mode="bilinear", antialias=True, align_corners=False)
    return values if exact else values.round_().clamp_(0, 255)
