"""Images of one size, decoded side by side: boxes at the same place of each are one array, resized by one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from readers.augment.geometry import Job
from readers.decode import Scratch

__all__ = ["MAX_STACK_BYTES", "Stack", "alike"]

MAX_STACK_BYTES = 4 << 20  # larger images gain nothing: decoding takes far longer than a call


def alike(jobs: Sequence[Job], sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether two or more images have one size and the same job, apart from flips, and nothing to do with pixels."""
    if len(jobs) < 2 or jobs[0][0] != jobs[1][0] or jobs[0][5]:
        return False
    first, size = jobs[0][:3], sizes[0]
    return all(job[:3] == first and not job[4] for job in jobs) and all(other == size for other in sizes)


class _Slot(Scratch):
    __slots__ = ("_slot",)

    def __init__(self, slot: memoryview) -> None:
        super().__init__()
        self._slot = slot

    def pixels(self, size: int) -> bytearray | memoryview:
        return self._slot if size <= len(self._slot) else super().pixels(size)


class Stack:
    """`count` slots for images of `size` (height, width), each of height * width * 3 bytes.

    A JPEG is decoded to the beginning of its slot, and boxes at the same place of each slot are one tensor without a
    copy.
    """

    def __init__(self, count: int, size: tuple[int, int]) -> None:
        self.count, self.size = count, size
        self._memory = np.empty((count, size[0] * size[1] * 3), np.uint8)
        self.slots: list[Scratch] = [_Slot(slot.data) for slot in self._memory]

    def together(self, images: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8] | None:
        """One array [n, height, width, 3] over images at the same place of the first n slots, else None."""
        first, step = images[0], self._memory.shape[1]
        start = _address(first)
        if not 0 <= start - _address(self._memory) < step or min(first.strides) < 0:
            return None
        for number, image in enumerate(images):
            if image.shape != first.shape or image.strides != first.strides or _address(image) != start + number * step:
                return None
        return as_strided(first, (len(images), *first.shape), (step, *first.strides))


def _address(image: npt.NDArray[np.uint8]) -> int:
    address: int = image.__array_interface__["data"][0]
    return address
