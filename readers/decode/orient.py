"""EXIF orientation: from pixels as stored to pixels as seen, and a region of the one in terms of the other.

Source: EXIF 2.32, tag 0x0112. The numbers 2 to 4 mirror or turn by 180 degrees; 5 to 8 exchange rows and
columns as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["upright", "upright_size"]


def upright_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """(height, width) as seen, of an image stored with these."""
    return (width, height) if orientation >= 5 else (height, width)


def upright(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Pixels [height, width, channels], or [height, width], as seen: a view, perhaps with negative strides."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows = slice(None, None, -1) if orientation in (3, 4, 7, 8) else slice(None)
    columns = slice(None, None, -1) if orientation in (2, 3, 6, 7) else slice(None)
    return np.asarray(pixels[rows, columns])
