"""Arithmetic that the ops share as nodes of a DALI graph; images are float32 [height, width, 3], 0 to 255.

The functions do what those of `readers.augment.ops.base` do. DALI's own operators for colours are not used: its
contrast is about a fixed value, and its hue and saturation are those of another colour space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from readers.augment.ops.base import LUMA, Floats, Matrix

__all__ = ["affine_node", "blend_node", "centred", "grey_node", "rounded_node", "with_images"]


def with_images(images: Any, numbers: Any) -> Any:
    """Numbers of each image, where its pixels are: expressions do not mix devices."""
    return numbers.gpu() if images.device == "gpu" else numbers


def grey_node(images: Any) -> Any:
    """[height, width, 1]."""
    red, green, blue = (images[:, :, i : i + 1] * weight for i, weight in enumerate(LUMA))
    return red + green + blue


def rounded_node(dali: Any, images: Any) -> Any:
    """Whole values."""
    return dali.math.floor(images + 0.5)


def blend_node(dali: Any, images: Any, other: Any, factor: Any) -> Any:
    """factor * images + (1 - factor) * other, clamped to 0..255. factor: a node of one number, with the images."""
    return dali.math.clamp(images * factor + other * (1.0 - factor), 0.0, 255.0)


def centred(matrices: Sequence[Matrix], heights: Floats, widths: Floats) -> Floats:
    """The matrices of `affine_node` for n images of these sizes, [n, 6]: from pixels of the result to those of the
    image, counted from the upper left corner. matrices: as `readers.augment.ops.base.affine` takes them."""
    a, b, c, d, e, f = np.array(matrices, np.float64).reshape(-1, 6).T
    x, y = widths / 2, heights / 2
    return np.stack([a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y], axis=1)


def affine_node(dali: Any, images: Any, matrix: Any, mode: Literal["bilinear", "nearest"]) -> Any:
    """Images by their `centred` matrices, a node [6]. Black outside."""
    types = dali.types
    return dali.fn.warp_affine(
        images,
        matrix=dali.fn.reshape(matrix, shape=[2, 3]),
        interp_type=types.INTERP_LINEAR if mode == "bilinear" else types.INTERP_NN,
        fill_value=0,
    )
