"""How large an image is after its short or long side has been shrunk: what packing and caching agree on.

A side times a factor is rounded to the nearest pixel, halves to the even one, and is never 0; nothing is enlarged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["shrunk", "shrunk_sides"]


def shrunk(width: int, height: int, factor: float) -> tuple[int, int]:
    """(width, height) times `factor`; as they are for a factor of 1 or more."""
    if factor >= 1:
        return width, height
    return max(1, round(width * factor)), max(1, round(height * factor))


def shrunk_sides(sides: npt.NDArray[Any], factor: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """`shrunk` for one side of many images, int64 of the same shape."""
    whole = sides.astype(np.int64)
    return np.where(factor >= 1, whole, np.maximum(1, np.rint(whole * factor)).astype(np.int64))
