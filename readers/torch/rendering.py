"""The ops of an `ImageDataset`, applied to single samples by their places in an epoch."""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from cache.errors import BadSampleError
from readers.augment.cpu import Finish, Renderer, UnchangedRenderer
from readers.augment.geometry import Job, Plan
from readers.augment.recipe import Recipe
from readers.headers import read_header
from readers.headers.base import upright_size
from readers.table import Buffer

_ASKERS = ("torch.utils.data", "readers.torch.iterable")  # whose functions ask for the samples of a batch


@contextmanager
def one_core() -> Iterator[None]:
    """Limit torch operations of this thread to one core, as in a DataLoader worker.

    One image is too little work to parallelise: synchronising threads costs several times what they save.
    """
    before = torch.get_num_threads()
    if before == 1:  # do not set it again: setting it also changes the default of new threads
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Place(int):
    """The number of a sample with its position in an epoch, which seeds its augmentation.

    others: samples that may replace it, in the order in which to try them (`readers.feed`); empty if the sampler knows
        that nothing will be replaced.
    ranks: number of ranks that share the epoch; 0 if unknown.

    Subtracting an offset keeps the place, because torch's ConcatDataset computes the numbers within its parts so.
    """

    seed: int
    epoch: int
    position: int
    others: Sequence[int]
    ranks: int

    def __new__(
        cls, index: int, seed: int, epoch: int, position: int, others: Sequence[int] = (), ranks: int = 0
    ) -> Place:
        place = super().__new__(cls, index)
        place.seed, place.epoch, place.position, place.others, place.ranks = seed, epoch, position, others, ranks
        return place

    def __sub__(self, first: int) -> Place:
        others = [other - first for other in self.others]
        return Place(int(self) - int(first), self.seed, self.epoch, self.position, others)

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (int(self), self.seed, self.epoch, self.position, self.others, self.ranks)


class PerThread(threading.local):
    """Thread-local attributes; pickles as empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PerThread, ()


class Task(NamedTuple):
    """The work on one sample. size: (height, width) of the upright image."""

    job: Job
    size: tuple[int, int]


class OpRenderer:
    """Renders encoded images to tensors [3, height, width]: uint8, or float32 if the ops end in Normalize.

    unchanged: keep the file's depth and channels (`readers.augment.cpu`). compiled: see `decode_image`.
    """

    def __init__(self, recipe: Recipe, exact_colours: bool, *, unchanged: bool = False, compiled: bool = True) -> None:
        for op in recipe.batch_ops:
            name = type(op).__name__
            raise ValueError(
                f"ImageDataset makes single samples, but {name} is for batches: use ImageLoader, or mix in the "
                f"collate_fn of the DataLoader"
            )
        self.recipe, self.out_size, self.exact_colours = recipe, recipe.out_size, exact_colours
        self._unchanged, self._compiled = unchanged, compiled
        self.draws = any(op.draws for op in recipe.ops)
        self._finish = Finish(torch.uint8 if recipe.normalize is None else torch.float32, True, recipe.normalize)
        self._local = PerThread()

    def tasks(self, indices: Sequence[int], data: Sequence[Buffer | Exception]) -> list[Task | Exception]:
        """One task for each sample, or the error that prevents it."""
        return self.plan(indices, data)[0]

    def plan(
        self, indices: Sequence[int], data: Sequence[Buffer | Exception]
    ) -> tuple[list[Task | Exception], list[tuple[list[int], Plan]]]:
        """The tasks, and the plans that they belong to, each with its rows."""
        sizes = [_upright_size(image) for image in data]
        known = [size if isinstance(size, tuple) else (1, 1) for size in sizes]
        tasks: dict[int, Task | Exception] = {
            row: size for row, size in enumerate(sizes) if isinstance(size, Exception)
        }
        places, epochs, plans = _with_positions(indices), defaultdict(list), []
        for row, place in enumerate(places):
            epochs[place.seed, place.epoch].append(row)
        for (seed, epoch), rows in epochs.items():  # one plan serves an epoch
            positions = np.array([places[row].position for row in rows], np.int64)
            heights, widths = np.array([known[row] for row in rows], np.int64).T
            plan = self.recipe.plan(seed, epoch, positions, heights, widths)
            if self.exact_colours:
                plan.interpolate_colours()
            for i, (row, job) in enumerate(zip(rows, plan.jobs(), strict=True)):
                tasks.setdefault(row, plan.boxes.bad.get(i) or Task(job, known[row]))
            plans.append((rows, plan))
        return [tasks[row] for row in range(len(sizes))], plans

    def render(self, data: Buffer, task: Task, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor of one sample, in `out` if given. Raises BadSampleError."""
        if self._unchanged:
            return self._render_unchanged(data, task)
        renderer = self._renderer()
        pixels = renderer.chunk(1, *task.job.last.size)
        if out is None:
            out = torch.empty((3, *task.job.last.size), dtype=self._finish.dtype)
        with one_core():
            left = renderer.render(data, task.job, task.size, pixels, out[None])
            self._finish.store(pixels, (pixels,), (left,), out[None])
        return out

    def batch(self, count: int) -> torch.Tensor | None:
        """Memory for the images of a batch, shared memory in a worker; None if their size is not known."""
        if self.out_size is None or self._unchanged:
            return None
        shape = (count, 3, *self.out_size)
        if get_worker_info() is None:
            return torch.empty(shape, dtype=self._finish.dtype)
        # Made as `default_collate` makes it, so that it is sent without a copy.
        empty: Any = torch.empty(0, dtype=self._finish.dtype)
        batch: torch.Tensor = empty.set_(torch.UntypedStorage._new_shared(math.prod(shape) * empty.itemsize), 0, shape)
        return batch

    def render_boxes(
        self,
        data: Sequence[Buffer | Exception],
        tasks: Sequence[Task | Exception],
        plans: Sequence[tuple[list[int], Plan]],
        batch: torch.Tensor,
    ) -> list[bool]:
        """Render as many images of a batch as the compiled codec can, in one call; returns which ones it rendered."""
        done = [False] * len(data)
        if self.recipe.interpolation == "bicubic" or not self._finish.by_codec:
            return done
        from readers.coefficients import tabulate_boxes  # loads crc32c

        sizes = [(1, 1) if isinstance(task, Exception) else task.size for task in tasks]
        for rows, plan in plans:
            table = tabulate_boxes(plan, np.array([sizes[row] for row in rows], np.int64).T)
            if table is not None:
                whole = np.zeros((len(data), table.shape[1]), np.int64)
                whole[rows] = table
                made, _ = self._renderer().render_boxes(data, whole, sizes, batch, batch)
                done = list(map(any, zip(done, made, strict=True)))
        return done

    def _renderer(self) -> Renderer:
        renderer: Renderer | None = getattr(self._local, "renderer", None)
        if renderer is None:
            renderer = self._local.renderer = Renderer(self.recipe.interpolation, self._finish, compiled=self._compiled)
        return renderer

    def _render_unchanged(self, data: Buffer, task: Task) -> torch.Tensor:
        renderer: UnchangedRenderer | None = getattr(self._local, "unchanged", None)
        if renderer is None:
            renderer = self._local.unchanged = UnchangedRenderer([self.recipe])
        with one_core():
            return renderer.render(data, task.job, task.size, torch.empty((1, 0, *task.job.last.size)))[0]


def loser_of_places(indices: Sequence[int]) -> str:
    """Name of the wrapping data set that got places and passes on plain numbers, such as torch's Subset; "" if none.

    Inspects the frames of torch.utils.data on the call stack.
    """
    if any(isinstance(index, Place) for index in indices):
        return ""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.utils.data"):
            values = dict(frame.f_locals)
            for value in values.values():
                if isinstance(next(iter(value), None) if isinstance(value, list) else value, Place):
                    owner = values.get("self")  # a data set, or a fetcher of one
                    return type(owner if isinstance(owner, Dataset) else getattr(owner, "dataset", owner)).__name__
        frame = frame.f_back
    return ""


class Made:
    """A finished batch, handed to a collate function as its only sample; `default_collate` unwraps it."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


default_collate_fn_map[Made] = lambda samples, **_: samples[0].batch


def collate_of_caller() -> Any:
    """The collate_fn of the DataLoader that asks for the caller's samples, directly or through `Subset`, which passes
    them on unchanged; else None, as for `StackDataset`, which pairs them with other samples."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_ASKERS):
        owner: Any = frame.f_locals.get("self")
        if hasattr(owner, "collate_fn"):
            return owner.collate_fn
        if frame.f_code is not Subset.__getitems__.__code__:
            return None
        frame = frame.f_back
    return None


def _upright_size(data: Buffer | Exception) -> tuple[int, int] | Exception:
    if isinstance(data, Exception):
        return data
    try:
        header = read_header(data)
    except BadSampleError as error:
        return error
    return upright_size(header.height, header.width, header.orientation)


def _with_positions(indices: Sequence[int]) -> list[Place]:
    """The indices as places; plain numbers get an epoch from torch's generator, which seeds other transforms, too."""
    epoch = 0 if all(isinstance(index, Place) for index in indices) else int(torch.randint(1 << 62, ()))
    return [index if isinstance(index, Place) else Place(index, 0, epoch, row) for row, index in enumerate(indices)]
