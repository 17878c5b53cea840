"""One batch on its way: what it will hold, the memory it is made in, and how far it has come.

Threads fill rows of the same batch at the same time; each row belongs to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cache.stores.blocks import BlockPool
from readers.augment.recipe import Job, Recipe
from readers.decode.streams import Ready
from readers.errors import BadSampleError
from readers.headers import ImageHeader
from readers.sample import Buffer

__all__ = ["BadSample", "Batch", "ImageMemory", "checked_dtype"]


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be had: its number in the set, its position in the epoch, and why."""

    index: int
    position: int
    key: str
    reason: str


@dataclass(slots=True)
class Batch:
    """positions, indices: int64 [n]. sizes: (height, width) of the upright images. jobs: what happens to
    each. bad_boxes: images that the recipe does not fit, by row. data: the encoded images, or why one
    could not be read. images: [n, 3, height, width]. routed: which images a device may
    decode; headers: of those that it is to, by row. ready: on a
    device, what the images are to be waited for."""

    step: int
    positions: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    sizes: list[tuple[int, int]]
    jobs: list[Job]
    bad_boxes: Mapping[int, BadSampleError]
    data: Sequence[Buffer | Exception]
    images: torch.Tensor
    routed: list[bool] = field(default_factory=list)
    headers: dict[int, ImageHeader] = field(default_factory=dict)
    ready: Ready = None
    pending: int = 0
    skipped: list[int] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    error: BaseException | None = None
    error_row: int = 0

    def kept(self) -> Sequence[int] | None:
        """The rows that are left when bad samples are skipped, None if all are."""
        if not self.skipped:
            return None
        gone = set(self.skipped)
        return [row for row in range(len(self.indices)) if row not in gone]


class ImageMemory:
    """Gives every batch its tensor, in memory that earlier batches have left.

    Memory is used again only when nothing refers to the earlier batch any more (see `cache.stores.blocks`), so a batch
    may be kept for as long as anybody likes. Pinned memory comes from torch's own pool, which waits for copies under
    way.
    """

    def __init__(self, dtype: torch.dtype, planar: bool, pinned: bool, kept: int) -> None:
        self._dtype, self._planar, self._pinned = dtype, planar, pinned
        self._blocks = BlockPool(kept)
        self._item_bytes = torch.empty(0, dtype=dtype).element_size()

    def images(self, count: int, height: int, width: int) -> torch.Tensor:
        """[count, 3, height, width], contiguous in this order (planar) or channels last."""
        shape = (count, 3, height, width) if self._planar else (count, height, width, 3)
        size = count * height * width * 3
        if self._pinned:
            images = torch.empty(shape, dtype=self._dtype, pin_memory=True)
        elif not size:
            images = torch.empty(shape, dtype=self._dtype)
        else:
            block: Any = self._blocks.take(size * self._item_bytes)
            images = torch.frombuffer(block, dtype=self._dtype).view(shape)
        return images if self._planar else images.permute(0, 3, 1, 2)


def checked_dtype(dtype: torch.dtype | None, recipe: Recipe) -> torch.dtype:
    """The dtype of the images, by default what the recipe makes. Raises ValueError."""
    if dtype is None:
        return torch.uint8 if recipe.normalize is None else torch.float32
    if dtype not in (torch.uint8, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is torch.uint8, float32, float16 or bfloat16, not {dtype}")
    if dtype == torch.uint8 and recipe.normalize is not None:
        raise ValueError("normalised values do not fit into uint8; leave Normalize out, or ask for a float dtype")
    return dtype
