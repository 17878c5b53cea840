"""Batches of images in their own depth and channels: what the threads of a loader do with decode="unchanged".

What an image is shows when it is decoded, so each is finished by itself, and a batch is put together at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from cache.errors import BadSampleError
from readers.augment.unchanged import UnchangedRenderer
from readers.loader.work import Batch, EpochWork

__all__ = ["UnchangedWork", "without_memory"]

_Memory: TypeAlias = Callable[[int, int, int, int, torch.dtype], torch.Tensor]


def without_memory(count: int, height: int, width: int) -> torch.Tensor:
    """A batch that has the sides of its images, and no channels yet."""
    return torch.empty((count, 0, height, width), dtype=torch.uint8)


@dataclass(slots=True)
class UnchangedWork(EpochWork):
    """The same for images as they are stored. `allocate` is `without_memory`.

    memory: gives the tensor of n images of a height, a width, a number of channels and a dtype, [n, channels, height,
        width]. dtype: of the images, None for their own.
    """

    memory: _Memory = without_memory  # type: ignore[assignment]  # replaced by the loader
    dtype: torch.dtype | None = None

    def tools(self) -> Any:
        return UnchangedRenderer(self.recipes, self.dtype)

    def fill(self, batch: Batch, start: int, stop: int, tools: Any) -> None:
        """Decode and finish the images of rows [start, stop)."""
        self.fill_fields(batch, start, stop, tools)
        for row in range(start, stop):
            places = [images[row : row + 1] for images in batch.images]
            made: list[Any] = self.render_row(batch, row, places, places, tools)
            if made[0] is not None:  # which a row that is skipped has not
                batch.finished[row] = made

    def complete(self, batch: Batch) -> None:
        if batch.error is None and batch.finished:
            batch.images = [self._joined(batch, view) for view in range(len(batch.images))]
        batch.finished = {}
        EpochWork.complete(self, batch)

    def _joined(self, batch: Batch, view: int) -> torch.Tensor:
        """The images of a view. Raises BadSampleError where they differ in dtype or channels."""
        rows = sorted(batch.finished)
        first = batch.finished[rows[0]][view]
        count, (channels, height, width) = len(batch.indices), first.shape[1:]
        images = self.memory(count, height, width, channels, first.dtype)
        for row in rows:
            image = batch.finished[row][view]
            if (image.dtype, image.shape) != (first.dtype, first.shape):
                keys = self.feed.reader.keys
                raise BadSampleError(
                    f"images of one batch differ: {keys[int(batch.indices[rows[0]])]} has {_kind(first)}, "
                    f"{keys[int(batch.indices[row])]} has {_kind(image)}; leave decode='unchanged' out for 8-bit RGB, "
                    f"take those that are alike (reader.select), or have a step take images of one kind "
                    f"(readers.order.Bucketed)"
                )
            images[row].copy_(image[0])
        return images


def _kind(image: torch.Tensor) -> str:
    channels = image.shape[1]
    return f"{channels} channel{'' if channels == 1 else 's'} of {str(image.dtype).removeprefix('torch.')}"
