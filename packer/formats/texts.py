"""Many short strings on their way into an HDF5 table: kept as bytes, not as Python objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Texts"]

_BLOCK_TEXTS = 4096


class Texts:
    """A list that only grows."""

    def __init__(self) -> None:
        self._width = 1
        self._blocks: list[npt.NDArray[np.bytes_]] = []
        self._recent: list[bytes] = []

    def append(self, text: str) -> None:
        self._recent.append(text.encode())
        if len(self._recent) == _BLOCK_TEXTS:
            self._compact()

    def __bool__(self) -> bool:
        """Whether any text is not empty."""
        self._compact()
        return any(bool(block.any()) for block in self._blocks)

    @property
    def width(self) -> int:
        """Bytes of the longest text, at least 1."""
        self._compact()
        return self._width

    def array(self, dtype: Any) -> npt.NDArray[Any]:
        """All texts in one array of `dtype`, a fixed-length string type of at least `width` bytes."""
        self._compact()
        out = np.zeros(sum(map(len, self._blocks)), dtype)
        position = 0
        for block in self._blocks:
            out[position : position + len(block)] = block
            position += len(block)
        return out

    def _compact(self) -> None:
        if self._recent:
            block = np.array(self._recent, np.bytes_)
            self._width = max(self._width, block.dtype.itemsize)
            self._blocks.append(block)
            self._recent = []
