"""What happens to a sample at its place in an epoch: a list of ops, with one plan for all samples of a batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.errors import BadSampleError
from readers.augment.cpu import Finish, Renderer
from readers.augment.recipe import Job, Recipe
from readers.headers import read_header
from readers.headers.base import upright_size
from readers.sample import Buffer

__all__ = ["OpRenderer", "Place", "Task"]


class Place(int):
    """The number of a sample, which knows where in which epoch it was asked for: what seeds its augmentation."""

    seed: int
    epoch: int
    position: int

    def __new__(cls, index: int, seed: int, epoch: int, position: int) -> Place:
        place = super().__new__(cls, index)
        place.seed, place.epoch, place.position = seed, epoch, position
        return place

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (int(self), self.seed, self.epoch, self.position)


class Task(NamedTuple):
    """What happens to one sample. size: of the upright image; shape: of the result; both (height, width)."""

    job: Job
    size: tuple[int, int]
    shape: tuple[int, int]


class OpRenderer:
    """Encoded images to tensors [3, height, width]: uint8, or float32 where the ops end in Normalize."""

    def __init__(self, recipe: Recipe) -> None:
        for op in recipe.batch_ops:
            name = type(op).__name__
            raise ValueError(
                f"ImageDataset makes single samples, and {name} is for batches: use ImageLoader, or mix in the "
                f"collate_fn of the DataLoader"
            )
        self._recipe = recipe
        self._finish = Finish(torch.uint8 if recipe.normalize is None else torch.float32, True, recipe.normalize)
        self._local = threading.local()

    def tasks(self, indices: Sequence[int], data: Sequence[Buffer | Exception]) -> list[Task | Exception]:
        """One for each sample, or why there is none."""
        sizes = [_upright_size(image) for image in data]
        known = [size if isinstance(size, tuple) else (1, 1) for size in sizes]
        tasks: dict[int, Task | Exception] = {
            row: size for row, size in enumerate(sizes) if isinstance(size, Exception)
        }
        for (seed, epoch), rows, positions in _groups(indices):
            heights, widths = np.array([known[row] for row in rows], np.int64).T
            plan = self._recipe.plan(seed, epoch, positions, heights, widths)
            shapes = zip(plan.boxes.out_height.tolist(), plan.boxes.out_width.tolist(), strict=True)
            for i, (row, job, shape) in enumerate(zip(rows, plan.jobs(), shapes, strict=True)):
                tasks.setdefault(row, plan.boxes.bad.get(i) or Task(job, known[row], shape))
        return [tasks[row] for row in range(len(sizes))]

    def render(self, data: Buffer, task: Task) -> torch.Tensor:
        """Raises BadSampleError."""
        renderer: Renderer | None = getattr(self._local, "renderer", None)
        if renderer is None:
            renderer = self._local.renderer = Renderer(self._recipe.interpolation)
        pixels = renderer.chunk(1, *task.shape)
        renderer.render(data, task.job, task.size, pixels)
        out = torch.empty((1, 3, *task.shape), dtype=self._finish.dtype)
        self._finish.store(pixels, (pixels,), (task.job,), out)
        return out[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return OpRenderer, (self._recipe,)


def _upright_size(data: Buffer | Exception) -> tuple[int, int] | Exception:
    if isinstance(data, Exception):
        return data
    try:
        header = read_header(data)
    except BadSampleError as error:
        return error
    return upright_size(header.height, header.width, header.orientation)


def _groups(indices: Sequence[int]) -> list[tuple[tuple[int, int], list[int], Any]]:
    """((seed, epoch), rows, positions int64) of the samples that one plan can serve.

    Places say theirs. Plain numbers get an epoch from torch's generator, which is what seeds other transforms.
    """
    rows: dict[tuple[int, int], list[int]] = {}
    drawn = (0, int(torch.randint(1 << 62, ()))) if any(not isinstance(index, Place) for index in indices) else (0, 0)
    for row, index in enumerate(indices):
        rows.setdefault((index.seed, index.epoch) if isinstance(index, Place) else drawn, []).append(row)
    groups = []
    for key, some in rows.items():
        places = [(indices[row], row) for row in some]
        positions = [index.position if isinstance(index, Place) else row for index, row in places]
        groups.append((key, some, np.array(positions, np.int64)))
    return groups
