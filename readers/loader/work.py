"""What the threads of a loader do: plan a batch from its positions, and fill its rows from the reader.

Everything here follows from (seed, epoch, position), so it does not matter which thread does it, or when. Threads fill
rows of the same batch at the same time; each row belongs to one of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cache.errors import BadSampleError
from cache.stores.ranges import BlockPool
from readers.augment.cpu import Finish, Renderer
from readers.augment.recipe import Job, Plan, Recipe
from readers.feed import SAMPLE_ERRORS, BadSample, Feed, upright_sides
from readers.headers import ImageHeader
from readers.order.base import Int64s
from readers.reader import Reader
from readers.sample import Buffer

if TYPE_CHECKING:
    from readers.decode.streams import Ready

__all__ = ["Batch", "EpochWork", "ImageMemory", "IndexWork", "checked_dtype", "class_count", "numbered"]

# A read slower than this waits for a disk: from then on the kernel is told which batches come next.
_SLOW_READ_SECONDS = 0.0004


@dataclass(slots=True)
class Batch:
    """One batch on its way: what it will hold, the memory it is made in, and how far it has come.

    positions, indices: int64 [n]. sizes: (height, width) of the upright images. jobs: by view, what happens to each.
    bad_boxes: images that a recipe does not fit, by row. data: the encoded images, or why one could not be read.
    images: by view, [n, 3, height, width]. labels: float32 [n, classes], where images have been mixed. routed: which
    images a device may decode; headers: of those that it is to, by row. ready: on a device, what the images are to be
    waited for.
    """

    step: int
    positions: Int64s
    indices: Int64s
    sizes: list[tuple[int, int]]
    jobs: list[list[Job]]
    bad_boxes: Mapping[int, BadSampleError]
    data: Sequence[Buffer | Exception]
    images: list[torch.Tensor]
    labels: torch.Tensor | None = None
    routed: list[bool] = field(default_factory=list)
    headers: dict[int, ImageHeader] = field(default_factory=dict)
    ready: Ready = None
    pending: int = 0
    skipped: list[int] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    error: BaseException | None = None
    error_row: int = 0

    def leave_out_skipped(self) -> None:
        """Keep only the rows that are left when bad samples are skipped."""
        if self.skipped:
            rows = sorted({*range(len(self.indices))} - {*self.skipped})
            self.images, self.indices = [images[rows] for images in self.images], self.indices[rows]
            self.skipped = []


@dataclass(slots=True)
class EpochWork:
    """The batches of a feed's first epoch. recipes: one for each view of a sample. finish: how values are stored.
    One thread plans at a time.

    A sample is good or bad, and replaced by another, in all its views at once.
    """

    feed: Feed
    recipes: tuple[Recipe, ...]
    finish: Finish
    memory: ImageMemory
    steps: int = field(init=False)
    _classes: int = field(init=False)
    _read_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.steps = self.feed.steps()
        self._classes = class_count(self.feed.reader) if self.recipes[0].batch_ops else 0

    def tools(self) -> Renderer:
        return Renderer(self.recipes[0].interpolation)

    def plan(self, step: int) -> Batch:
        """Which samples batch `step` holds, and what happens to each."""
        positions, indices = self.feed.rows(self._epoch, step)
        if self._read_seconds > _SLOW_READ_SECONDS and step + 1 < self.steps:
            self.feed.reader.prefetch(self.feed.rows(self._epoch, step + 1)[1])
        plans, sizes = self._plan_samples(positions, indices)
        shapes = [self._size(view, plan, sizes, positions, indices) for view, plan in enumerate(plans)]
        images = [self.memory.images(len(indices), *shape) for shape in shapes]
        jobs = [plan.jobs() for plan in plans]
        bad = {row: error for plan in plans for row, error in plan.boxes.bad.items()}
        # A copy: substitutes change it, and what a feed has computed ahead belongs to the feed.
        return Batch(step, positions, indices.copy(), sizes, jobs, bad, self._read(indices), images)

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the images of rows [start, stop) into their places. Raises what on_error="raise" lets through."""
        some = slice(start, stop)
        out = [images[some] for images in batch.images]
        pixels = out if self.finish.in_place else tools.chunks([images.shape for images in out])
        places = [images.unsafe_split(1) for images in pixels]  # unsafe for gradients only, and half as quick again
        if batch.bad_boxes or not all(
            tools.render_alike(batch.data[some], jobs[some], batch.sizes[some], images)
            for jobs, images in zip(batch.jobs, pixels, strict=True)
        ):
            for row, place in enumerate(zip(*places, strict=True), start):
                self.render_row(batch, row, place, tools)
        for view, jobs in enumerate(batch.jobs):
            self.finish.store(pixels[view], places[view], jobs[some], out[view])

    def render_row(self, batch: Batch, row: int, places: Sequence[torch.Tensor], tools: Renderer) -> None:
        """Decode one image into `places`, [1, 3, height, width] for each view, or do with it what on_error says."""
        try:
            data = batch.data[row]
            if isinstance(data, Exception):
                raise data
            if row in batch.bad_boxes:
                raise batch.bad_boxes[row]
            for jobs, place in zip(batch.jobs, places, strict=True):
                tools.render(data, jobs[row], batch.sizes[row], place)
        except SAMPLE_ERRORS as error:
            self._bad_sample(batch, row, error, tools, places)

    def complete(self, batch: Batch) -> None:
        """All rows are filled. The encoded images give their memory back for the batches that follow."""
        batch.data = ()
        self.combine(batch)

    def combine(self, batch: Batch) -> None:
        """Leave out what is skipped, and carry out the ops on batches."""
        if batch.error is not None:
            return
        batch.leave_out_skipped()
        recipe = self.recipes[0]
        if recipe.batch_ops:
            numbers = torch.from_numpy(np.array(self.feed.reader.labels[batch.indices], np.int64))[:, None]
            labels = (numbers == torch.arange(self._classes)).to(torch.float32)
            position = int(batch.positions[0]) if len(batch.positions) else 0
            images, labels = recipe.mix(self.feed.seed, self._epoch, position, batch.images[0], labels)
            batch.images, batch.labels = [images], labels

    # --- inside ---------------------------------------------------------------------------------------------------
    @property
    def _epoch(self) -> int:
        return self.feed.start.epoch

    def _plan_samples(self, positions: Int64s, indices: Int64s) -> tuple[list[Plan], list[tuple[int, int]]]:
        """What happens to these samples, by view, and the sizes of their upright images."""
        heights, widths = upright_sides(self.feed.reader.image_info(indices))
        # 0 stands for a header that cannot be read; decoding such a sample says what is wrong with it.
        given = (self.feed.seed, self._epoch, positions, np.maximum(heights, 1), np.maximum(widths, 1))
        plans = [recipe.plan(*given, view=view) for view, recipe in enumerate(self.recipes)]
        return plans, list(zip(heights.tolist(), widths.tolist(), strict=True))

    def _read(self, indices: Int64s) -> Sequence[Buffer | Exception]:
        start = time.perf_counter()
        data = self.feed.read(indices)
        seconds = (time.perf_counter() - start) / max(1, len(indices))
        self._read_seconds += (seconds - self._read_seconds) / 8
        return data

    def _size(
        self, view: int, plan: Plan, sizes: Sequence[tuple[int, int]], positions: Int64s, indices: Int64s
    ) -> tuple[int, int]:
        """The one size of all images of a view of a batch. Raises BadSampleError where they differ."""
        size = self.recipes[view].out_size
        if size is not None:
            return size
        good = [i for i, size in enumerate(sizes) if all(size) and i not in plan.boxes.bad]
        heights, widths = plan.boxes.out_height[good], plan.boxes.out_width[good]
        if not good:
            return self._size_of_substitute(view, positions[:1])
        differ = np.flatnonzero((heights != heights[0]) | (widths != widths[0]))
        if len(differ):
            other = int(differ[0])
            keys = self.feed.reader.keys
            raise BadSampleError(
                f"images of one batch differ in size: {keys[int(indices[good[0]])]} has {heights[0]} x {widths[0]} "
                f"pixels, {keys[int(indices[good[other]])]} has {heights[other]} x {widths[other]}; begin augment= "
                f"with RandomResizedCrop(224), or with Resize(256) and CenterCrop(224)"
            )
        return int(heights[0]), int(widths[0])

    def _size_of_substitute(self, view: int, position: Int64s) -> tuple[int, int]:
        """That of a batch without a good sample: of the one that replaces its first."""
        if self.feed.options.on_error != "substitute":
            return 1, 1
        try:
            error = BadSampleError("no sample of a batch is good")
            _, (_, _, sizes) = self.feed.substitute(
                self._epoch, int(position[0]), error, lambda row: self._jobs(position, row)
            )
        except BadSampleError:
            return 1, 1
        return sizes[view]

    def _bad_sample(
        self, batch: Batch, row: int, error: Exception, tools: Renderer, places: Sequence[torch.Tensor]
    ) -> None:
        position = batch.positions[row : row + 1]
        batch.bad.append(self.feed.bad(int(batch.indices[row]), int(position[0]), error))
        if self.feed.options.on_error == "skip":
            batch.skipped.append(row)
            return

        def render(index: int) -> list[Job]:
            jobs, stored, sizes = self._jobs(position, index)
            data = self.feed.reader.read(index)
            for job, size, place in zip(jobs, sizes, places, strict=True):
                if size != place.shape[2:]:
                    raise BadSampleError(f"the batch has another size than {size}")
                tools.render(data, job, stored, place)
            return jobs

        batch.indices[row], replaced = self.feed.substitute(self._epoch, int(position[0]), error, render)
        for jobs, job in zip(batch.jobs, replaced, strict=True):
            jobs[row] = job

    def _jobs(self, position: Int64s, index: int) -> tuple[list[Job], tuple[int, int], list[tuple[int, int]]]:
        """What happens to a sample at a position, int64 [1], by view; its size, and those of the results.

        Raises BadSampleError where a recipe does not fit, or its size is unknown.
        """
        plans, (stored,) = self._plan_samples(position, np.array([index], np.int64))
        bad = [error for plan in plans for error in plan.boxes.bad.values()]
        if bad or not all(stored):
            raise bad[0] if bad else BadSampleError("its header cannot be read")
        sizes = [(int(plan.boxes.out_height[0]), int(plan.boxes.out_width[0])) for plan in plans]
        return [plan.jobs()[0] for plan in plans], stored, sizes


class IndexWork:
    """In place of a crew where no image is asked for: which samples each batch holds, and nothing is read."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._step = feed, 0

    def take(self) -> Batch:
        """The next batch, without images."""
        step, self._step = self._step, self._step + 1
        positions, indices = self._feed.rows(self._feed.start.epoch, step)
        return Batch(step, positions, indices.copy(), [], [], {}, (), [])

    def stop(self) -> None:
        """There is nothing to stop."""


class ImageMemory:
    """Gives every batch its tensor, in memory that earlier batches have left.

    Memory is used again only when nothing refers to the earlier batch any more (see `cache.stores.ranges`), so a batch
    may be kept for as long as it is wanted. Pinned memory comes from torch's own pool, which waits for copies under
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


def class_count(reader: Reader) -> int:
    """Classes of a set: those that have names, or else by the largest label. Raises ValueError where there is none."""
    labels = reader.labels
    count = max(len(reader.classes), int(labels.max()) + 1 if len(labels) else 0)
    if not count:
        raise ValueError("MixUp and CutMix mix labels, and no sample of this set has one: leave them out of augment")
    return count


def checked_dtype(dtype: torch.dtype | None, recipe: Recipe) -> torch.dtype:
    """The dtype of the images, by default what the recipe makes. Raises ValueError."""
    if dtype is None:
        return torch.uint8 if recipe.normalize is None else torch.float32
    if dtype not in (torch.uint8, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is torch.uint8, float32, float16 or bfloat16, not {dtype}")
    if dtype == torch.uint8 and recipe.normalize is not None:
        raise ValueError("normalised values do not fit into uint8; leave Normalize out, or ask for a float dtype")
    return dtype


def numbered(device: torch.device | str) -> torch.device:
    """The device; a CUDA device with its number. Raises ValueError where there is none."""
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch {torch.__version__} finds no GPU here; leave device= out")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
