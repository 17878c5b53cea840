"""What the threads of a loader do: plan a batch from its positions, and fill its rows from the reader.

Everything here follows from (seed, epoch, position), so it does not matter which thread does it, or when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch

from readers.augment.cpu import Finish, Renderer
from readers.augment.draws import Draws
from readers.augment.recipe import Job, Plan, Recipe
from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.loader.batch import BadSample, Batch, ImageMemory
from readers.order import Order
from readers.order.base import Int64s
from readers.sample import Buffer, Reader

__all__ = ["EpochWork", "IndexWork", "OnError"]

OnError: TypeAlias = Literal["raise", "skip", "substitute"]
# What is wrong with one sample only. Anything else is wrong with the set, and ends the epoch.
_SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_SUBSTITUTES = 16
_SUBSTITUTE_STREAM = 1 << 20
# A read slower than this waits for a disk: from then on the kernel is told which batches come next.
_SLOW_READ_SECONDS = 0.0004
_ORDER_AT_ONCE = 1024


@dataclass(slots=True)
class EpochWork:
    """One epoch of one rank. positions: of step s, int64 [k]. finish: how values are stored. One thread plans at a
    time."""

    reader: Reader
    order: Order
    recipe: Recipe
    positions: Callable[[int], Int64s]
    steps: int
    finish: Finish
    memory: ImageMemory
    seed: int
    epoch: int
    on_error: OnError
    _read_seconds: float = 0.0
    _samples: dict[int, tuple[Int64s, Int64s]] = field(default_factory=dict)

    def tools(self) -> Renderer:
        return Renderer(self.recipe.interpolation)

    def plan(self, step: int) -> Batch:
        """Which samples batch `step` holds, and what happens to each."""
        positions, indices = self._samples_of(step)
        if self._read_seconds > _SLOW_READ_SECONDS and step + 1 < self.steps:
            self.reader.prefetch(self._samples_of(step + 1)[1])
        plan, sizes = self._plan_samples(positions, indices)
        height, width = self._size(plan, sizes, positions, indices)
        images = self.memory.images(len(indices), height, width)
        self._samples.pop(step)
        return Batch(step, positions, indices, sizes, plan.jobs(), plan.boxes.bad, self._read(indices), images)

    def _samples_of(self, step: int) -> tuple[Int64s, Int64s]:
        """(positions, samples) of a step. An order computes a thousand at once nearly as quickly as a batch."""
        if step not in self._samples:
            some = [self.positions(step)]
            while sum(map(len, some)) < _ORDER_AT_ONCE and step + len(some) < self.steps:
                some.append(self.positions(step + len(some)))
            indices = self.order.indices(self.epoch, np.concatenate(some))
            parts = np.split(indices, np.cumsum([len(part) for part in some[:-1]]))
            self._samples |= {step + i: pair for i, pair in enumerate(zip(some, parts, strict=True))}
        return self._samples[step]

    def _plan_samples(self, positions: Int64s, indices: Int64s) -> tuple[Plan, list[tuple[int, int]]]:
        """What happens to these samples, and the sizes of their upright images."""
        info = self.reader.image_info(indices)
        stored = np.array([info.height, info.width], np.int64)
        heights, widths = np.where(info.orientation >= 5, stored[::-1], stored)
        # 0 stands for a header that nobody could read; decoding such a sample says what is wrong with it.
        plan = self.recipe.plan(self.seed, self.epoch, positions, np.maximum(heights, 1), np.maximum(widths, 1))
        return plan, list(zip(heights.tolist(), widths.tolist(), strict=True))

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the images of rows [start, stop) into their places. Raises what on_error="raise" lets through."""
        out = batch.images[start:stop]
        pixels = out if self.finish.in_place else tools.chunk(stop - start, out.shape[2], out.shape[3])
        places = pixels.unsafe_split(1)  # unsafe for gradients only, and half as quick again
        if batch.bad_boxes or not tools.render_alike(
            batch.data[start:stop], batch.jobs[start:stop], batch.sizes[start:stop], pixels
        ):
            for row, place in enumerate(places, start):
                self.render_row(batch, row, place, tools)
        self.finish.store(pixels, places, batch.jobs[start:stop], out)

    def render_row(self, batch: Batch, row: int, place: torch.Tensor, tools: Renderer) -> None:
        """Decode one image into `place`, [1, 3, height, width], or do with it what on_error says."""
        try:
            data = batch.data[row]
            if isinstance(data, Exception):
                raise data
            if row in batch.bad_boxes:
                raise batch.bad_boxes[row]
            tools.render(data, batch.jobs[row], batch.sizes[row], place)
        except _SAMPLE_ERRORS as error:
            self._bad_sample(batch, row, error, tools, place)

    def release(self, batch: Batch) -> None:
        """All rows are filled: the encoded images give their memory back for the batches that follow."""
        batch.data = ()

    def _read(self, indices: Int64s) -> Sequence[Buffer | Exception]:
        start = time.perf_counter()
        try:
            data: Sequence[Buffer | Exception] = self.reader.read_many(indices)
        except _SAMPLE_ERRORS:
            data = [self._read_one(int(index)) for index in indices]
        seconds = (time.perf_counter() - start) / max(1, len(indices))
        self._read_seconds += (seconds - self._read_seconds) / 8
        return data

    def _read_one(self, index: int) -> Buffer | Exception:
        try:
            return self.reader.read(index)
        except _SAMPLE_ERRORS as error:
            return error

    def _size(
        self, plan: Plan, sizes: Sequence[tuple[int, int]], positions: Int64s, indices: Int64s
    ) -> tuple[int, int]:
        """The one size of all images of a batch. Raises BadSampleError where they differ."""
        if self.recipe.out_size is not None:
            return self.recipe.out_size
        good = [i for i, size in enumerate(sizes) if all(size) and i not in plan.boxes.bad]
        heights, widths = plan.boxes.out_height[good], plan.boxes.out_width[good]
        if not good:
            others = self._others(positions[:1]) if self.on_error == "substitute" else iter(())
            return next((size for _, job, _, size in others if job is not None), (1, 1))
        differ = np.flatnonzero((heights != heights[0]) | (widths != widths[0]))
        if len(differ):
            other = int(differ[0])
            keys = self.reader.keys
            raise BadSampleError(
                f"images of one batch differ in size: {keys[int(indices[good[0]])]} has {heights[0]} x {widths[0]} "
                f"pixels, {keys[int(indices[good[other]])]} has {heights[other]} x {widths[other]}; begin augment= "
                f"with RandomResizedCrop(224), or with Resize(256) and CenterCrop(224)"
            )
        return int(heights[0]), int(widths[0])

    def _bad_sample(self, batch: Batch, row: int, error: Exception, tools: Renderer, place: torch.Tensor) -> None:
        index = int(batch.indices[row])
        key = self.reader.keys[index]
        if self.on_error == "raise":
            raise BadSampleError(
                f"sample {index} ({key}): {error}; find all such samples with `packer verify --deep`, or read on with "
                f"on_error='skip' or 'substitute'"
            ) from error
        batch.bad.append(BadSample(index, int(batch.positions[row]), key, str(error)))
        if self.on_error == "skip":
            batch.skipped.append(row)
        else:
            self._substitute(batch, row, error, tools, place)

    def _substitute(self, batch: Batch, row: int, error: Exception, tools: Renderer, place: torch.Tensor) -> None:
        """Put another sample of the epoch into a row; which one follows from the position alone."""
        for index, job, stored, size in self._others(batch.positions[row : row + 1]):
            if job is None or size != place.shape[2:]:
                continue
            try:
                tools.render(self.reader.read(index), job, stored, place)
            except _SAMPLE_ERRORS:
                continue
            batch.jobs[row] = job
            batch.indices[row] = index
            return
        raise BadSampleError(f"{_SUBSTITUTES} samples in place of a bad one were bad as well, the first: {error}")

    def _others(self, position: Int64s) -> Iterator[tuple[int, Job | None, tuple[int, int], tuple[int, int]]]:
        """Samples that may stand in at a position (int64 [1]): (sample, job, size of the image, size of the result).

        The job is None where the recipe does not fit, or nobody knows the size.
        """
        draws = Draws(self.seed, self.epoch, position).uniform(_SUBSTITUTE_STREAM, _SUBSTITUTES)[0]
        for other in (draws * len(self.order)).astype(np.int64):
            index = self.order.indices(self.epoch, other[None])
            plan, sizes = self._plan_samples(position, index)
            fits = all(sizes[0]) and not plan.boxes.bad
            size = (int(plan.boxes.out_height[0]), int(plan.boxes.out_width[0]))
            yield int(index[0]), plan.jobs()[0] if fits else None, sizes[0], size


class IndexWork:
    """In place of a crew where no image is asked for: which samples each batch holds, and nothing is read."""

    def __init__(self, order: Order, epoch: int, positions: Callable[[int], Int64s]) -> None:
        self._order, self._epoch, self._positions, self._step = order, epoch, positions, 0

    def take(self) -> Batch:
        """The next batch, without images."""
        step, self._step = self._step, self._step + 1
        positions = self._positions(step)
        indices = self._order.indices(self._epoch, positions)
        return Batch(step, positions, indices, [], [], {}, (), torch.empty((len(indices), 0)))

    def stop(self) -> None:
        """There is nothing to stop."""
