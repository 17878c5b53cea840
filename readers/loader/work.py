"""What the threads of a loader do: plan a batch from its positions, and fill its rows from the reader.

Everything follows from (seed, epoch, position), so it does not matter which thread does it, or when. Threads fill rows
of the same batch at the same time; each row belongs to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from cache.errors import BadSampleError
from readers.augment.cpu import Finish, Renderer
from readers.augment.recipe import Job, Plan, Recipe
from readers.batch import Payloads
from readers.feed import BadSample, Feed, drop_damaged, for_decoding, read_samples
from readers.headers import ImageHeader, first_deep
from readers.loader.fields import FieldWork
from readers.loader.timers import ThreadClock
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Reader
from readers.sample import Buffer, upright_sides

if TYPE_CHECKING:
    from readers.coefficients.layout import Shape
    from readers.decode.device import Ready

__all__ = ["Allocate", "Batch", "EpochWork", "IndexWork"]

Allocate: TypeAlias = Callable[[int, int, int], torch.Tensor]
# A read slower than this waits for a disk: from then on the kernel learns in advance which batches follow.
_SLOW_READ_SECONDS = 0.0004


@dataclass(slots=True)
class Batch:
    """One batch in preparation.

    positions, indices: int64 [n].
    sizes: (height, width) of the upright images.
    jobs: by view, what happens to each image.
    bad_boxes: images that a recipe does not fit, by row.
    data: the encoded images, or why the sample cannot be used.
    payloads, values: of the other fields, by row: their bytes, and what they hold; columns: the latter, of the batch.
    images: by view, [n, 3, height, width].
    labels: float32 [n, classes], where images have been mixed.
    finished: with decode="unchanged", images by row, for each view, until the batch is put together.
    deep: the number of a sample of more than 8 bits that 8 bits are made of, -1 where that is not known of any.
    routed: which images a device is to decode; headers: of those that it will decode, by row; shapes: of those of them
        that are coefficients; refused: rows that the device could not decode, after all.
    staged: the bytes of the coefficients for the device, which begin at `places`, by row.
    shared: the bytes of the images that the CPU decodes though the device could, as they are read or stored, by row.
    spent: nanoseconds by task of the threads, of them for images of `shared`, and the bytes of those.
    ready: on a device, what to wait for before the images are used.
    pending: tasks that are not done yet.
    """

    step: int
    positions: Int64s
    indices: Int64s
    sizes: list[tuple[int, int]]
    jobs: list[list[Job]]
    bad_boxes: Mapping[int, BadSampleError]
    data: list[Buffer | Exception]
    images: list[torch.Tensor]
    payloads: list[Payloads] = field(default_factory=list)
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    labels: torch.Tensor | None = None
    finished: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    deep: int = -1
    routed: list[bool] = field(default_factory=list)
    headers: dict[int, ImageHeader] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    staged: torch.Tensor | None = None
    places: dict[int, int] = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)
    spent: list[tuple[int, int, int]] = field(default_factory=list)
    ready: Ready = None
    pending: int = 0
    skipped: list[int] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    error: BaseException | None = None
    error_row: int = 0


@dataclass(slots=True)
class EpochWork:
    """The batches of a feed's first epoch. One thread plans at a time.

    recipes: one for each view of a sample; a sample is good or bad, and replaced by another, in all views at once.
    finish: how values are stored.
    allocate: gives the tensor of n images of a height and width, [n, 3, height, width].
    classes: of the labels, where images are mixed.
    fields: what to do for other fields, None where none is asked for.
    exact_colours: see `ImageLoader`.
    compiled: whether JPEGs are decoded by compiled functions.
    notes_depth: whether batches say which image has more than 8 bits.
    """

    feed: Feed
    recipes: tuple[Recipe, ...]
    finish: Finish
    allocate: Allocate
    classes: int = 0
    fields: FieldWork | None = None
    exact_colours: bool = False
    compiled: bool = False
    notes_depth: bool = False
    _read_seconds: float = 0.0
    _images: Reader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._images = self.reader_of_images()

    def reader_of_images(self) -> Reader:
        """Where images are read."""
        return for_decoding(self.feed.reader)

    @property
    def steps(self) -> int:
        return self.feed.steps()

    def tools(self) -> Renderer:
        return Renderer(self.recipes[0].interpolation, self.finish, compiled=self.compiled)

    def plan(self, step: int, clock: ThreadClock) -> Batch:
        """Which samples batch `step` holds, and what happens to each."""
        positions, indices = self.feed.rows(self._epoch, step)
        if self._read_seconds > _SLOW_READ_SECONDS and step + 1 < self.steps:
            self._announce(step + 1)
        plans, sizes = self._plan_samples(positions, indices)
        shapes = [self._choose_size(view, plan, sizes, positions, indices) for view, plan in enumerate(plans)]
        images = [self.allocate(len(indices), *shape) for shape in shapes]
        jobs = [plan.jobs() for plan in plans]
        bad = {row: error for plan in plans for row, error in plan.boxes.bad.items()}
        data = list(self._read(positions, indices, clock))
        # A copy: substitutes change it, and what a feed has computed ahead belongs to the feed.
        batch = Batch(step, positions, indices.copy(), sizes, jobs, bad, data, images)
        if self.notes_depth:
            place = first_deep(data)
            batch.deep = -1 if place < 0 else int(indices[place])
        if self.fields is not None:
            batch.payloads = self.fields.read(indices)
            clock.lap("read")
        return batch

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the images of rows [start, stop) into the batch. Raises BadSampleError under on_error="raise"."""
        self.fill_fields(batch, start, stop, tools)
        some = slice(start, stop)
        out = [images[some] for images in batch.images]
        pixels = out if self.finish.in_place else tools.chunks([images.shape for images in out])
        places = [images.unsafe_split(1) for images in pixels]  # unsafe for gradients only, and 50% faster
        left: Sequence[Sequence[Job | None]] = [jobs[some] for jobs in batch.jobs]
        if batch.bad_boxes or not all(
            tools.render_alike(batch.data[some], jobs[some], batch.sizes[some], images)
            for jobs, images in zip(batch.jobs, pixels, strict=True)
        ):
            results = places if self.finish.in_place else [images.unsafe_split(1) for images in out]
            rows = enumerate(zip(zip(*places, strict=True), zip(*results, strict=True), strict=True), start)
            left = list(zip(*(self.render_row(batch, row, *both, tools) for row, both in rows), strict=True))
        for view, jobs in enumerate(left):
            self.finish.store(pixels[view], places[view], jobs, out[view])
        if tools.lap is not None:
            tools.lap("augment")

    def fill_fields(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the other fields of rows [start, stop)."""
        if self.fields is not None:
            self.fields.fill(batch, start, stop)
            if tools.lap is not None:
                tools.lap("decode")

    def render_row(
        self,
        batch: Batch,
        row: int,
        places: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        tools: Renderer,
    ) -> list[Job | None]:
        """Decode one image into `places`, [1, 3, height, width] for each view, or treat it as on_error says. Returns
        what is left to do by view; None where it is in `results`, finished."""
        try:
            data = batch.data[row]
            if isinstance(data, Exception):
                raise data
            if row in batch.bad_boxes:
                raise batch.bad_boxes[row]
            given = zip(batch.jobs, places, results, strict=True)
            return [tools.render(data, jobs[row], batch.sizes[row], *where) for jobs, *where in given]
        except SAMPLE_ERRORS as error:
            return self._render_again(batch, row, error, tools, places)

    def complete(self, batch: Batch) -> None:
        """Finish a batch whose rows are filled. The memory of the encoded images is free for the next batches."""
        batch.data, batch.payloads = [], []
        self.combine(batch)

    def combine(self, batch: Batch) -> None:
        """Leave out what is skipped, and carry out the ops on batches."""
        if batch.error is not None:
            return
        rows: Sequence[int] = range(len(batch.indices))
        if batch.skipped:
            rows = sorted({*range(len(batch.indices))} - {*batch.skipped})
            batch.images, batch.indices = [images[rows] for images in batch.images], batch.indices[rows]
        if self.fields is not None:
            batch.columns = self.fields.collate([batch.values[row] for row in rows], len(self.recipes))
        recipe = self.recipes[0]
        if recipe.batch_ops:
            numbers = torch.from_numpy(np.array(self.feed.reader.labels[batch.indices], np.int64))[:, None]
            labels = (numbers == torch.arange(self.classes)).to(torch.float32)
            position = int(batch.positions[0]) if len(batch.positions) else 0
            images, labels = recipe.mix(self.feed.seed, self._epoch, position, batch.images[0], labels)
            batch.images, batch.labels = [images], labels

    # --- inside ---------------------------------------------------------------------------------------------------
    @property
    def _epoch(self) -> int:
        return self.feed.start.epoch

    def _plan_samples(self, positions: Int64s, indices: Int64s) -> tuple[list[Plan], list[tuple[int, int]]]:
        """What happens to these samples, by view, and the sizes of their upright images."""
        heights, widths = upright_sides(self._images.image_info(indices))
        # 0 is the size of an image whose header cannot be read; decoding it then raises the reason.
        given = (self.feed.seed, self._epoch, positions, np.maximum(heights, 1), np.maximum(widths, 1))
        plans = [recipe.plan(*given, view=view) for view, recipe in enumerate(self.recipes)]
        if self.exact_colours:
            for plan in plans:
                plan.interpolate_colours()
        return plans, list(zip(heights.tolist(), widths.tolist(), strict=True))

    def _announce(self, step: int) -> None:
        """Tell the store what the batch `step` will read."""
        self._images.prefetch(self.feed.rows(self._epoch, step)[1])

    def _read_samples(self, positions: Int64s, indices: Int64s) -> Sequence[Buffer | Exception]:
        """The images, or why one could not be read."""
        return read_samples(self._images, indices)

    def _read(self, positions: Int64s, indices: Int64s, clock: ThreadClock) -> Sequence[Buffer | Exception]:
        """The images of a batch."""
        clock.begin_read()
        data = self._read_samples(positions, indices)
        seconds = clock.end_read(data) / max(1, len(indices))
        self._read_seconds += (seconds - self._read_seconds) / 8
        return data

    def _choose_size(
        self, view: int, plan: Plan, sizes: Sequence[tuple[int, int]], positions: Int64s, indices: Int64s
    ) -> tuple[int, int]:
        """The common size of all images of a view of a batch. Raises BadSampleError where they differ."""
        size = self.recipes[view].out_size
        if size is not None:
            return size
        good = [i for i, size in enumerate(sizes) if all(size) and i not in plan.boxes.bad]
        heights, widths = plan.boxes.out_height[good], plan.boxes.out_width[good]
        if not good:
            return self._choose_size_of_substitute(view, positions[:1])
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

    def _choose_size_of_substitute(self, view: int, position: Int64s) -> tuple[int, int]:
        """The size of a batch without a good sample: of the one that replaces its first."""
        if self.feed.options.on_error != "substitute":
            return 1, 1
        try:
            error = BadSampleError("no sample of a batch is good")
            _, (_, _, sizes) = self.feed.substitute(
                self._epoch, int(position[0]), error, lambda row: self._plan_one(position, row)
            )
        except BadSampleError:
            return 1, 1
        return sizes[view]

    def _render_again(
        self, batch: Batch, row: int, error: Exception, tools: Renderer, places: Sequence[torch.Tensor]
    ) -> list[Job | None]:
        """Decode an image from below a cache where its copy there was damaged; otherwise it is bad. Returns what is
        left to do."""
        index = int(batch.indices[row])
        if drop_damaged(self._images, index):
            try:
                return self._render_another(batch, row, index, tools, places)
            except SAMPLE_ERRORS as again:
                error = again
        return self._treat_bad(batch, row, error, tools, places)

    def _render_another(
        self, batch: Batch, row: int, index: int, tools: Renderer, places: Sequence[torch.Tensor]
    ) -> list[Job | None]:
        """Decode a sample that was not read with the batch; returns what is left to do. Raises SAMPLE_ERRORS."""
        data, left = self._images.read(index), []
        planned, stored, sizes = self._plan_one(batch.positions[row : row + 1], index)
        values = {} if self.fields is None else self.fields.substitute(index, stored, planned, sizes)
        for job, size, place in zip(planned, sizes, places, strict=True):
            if size != place.shape[2:]:
                raise BadSampleError(f"the batch has another size than {size}")
            left.append(tools.render(data, job, stored, place))
        batch.values[row] = values
        for jobs, job in zip(batch.jobs, planned, strict=True):
            jobs[row] = job
        return left

    def _treat_bad(
        self, batch: Batch, row: int, error: Exception, tools: Renderer, places: Sequence[torch.Tensor]
    ) -> list[Job | None]:
        """What is left to do of another sample, which is in `places`; nothing where the row is skipped."""
        position = batch.positions[row : row + 1]
        batch.bad.append(self.feed.bad(int(batch.indices[row]), int(position[0]), error))
        if self.feed.options.on_error == "skip":
            batch.skipped.append(row)
            return [None] * len(places)

        def render(index: int) -> list[Job | None]:
            return self._render_another(batch, row, index, tools, places)

        batch.indices[row], left = self.feed.substitute(self._epoch, int(position[0]), error, render)
        return left

    def _plan_one(self, position: Int64s, index: int) -> tuple[list[Job], tuple[int, int], list[tuple[int, int]]]:
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
    """Replaces a crew where no image is asked for: which samples each batch holds, and their other fields."""

    ready = 0  # they are made when they are taken

    def __init__(self, feed: Feed, fields: FieldWork | None) -> None:
        self._feed, self._fields, self._step = feed, fields, 0

    def take(self) -> Batch:
        """The next batch, without images."""
        step, self._step = self._step, self._step + 1
        positions, indices = self._feed.rows(self._feed.start.epoch, step)
        batch = Batch(step, positions, indices.copy(), [], [], {}, [], [])
        if self._fields is not None:
            self._fields.fill_alone(batch, self._feed)
        return batch

    def stop(self) -> None:
        """Nothing runs."""
