"""The work of a loader's threads: plan a batch from its positions, and fill its rows from the reader.

All results are determined by (seed, epoch, position), regardless of which thread does the work and when. Threads fill
rows of the same batch at the same time; each row belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from cache.errors import BadSampleError
from readers.augment.cpu import Finish, Renderer, UnchangedRenderer, unflipped
from readers.augment.geometry import Job, Plan
from readers.augment.recipe import Recipe
from readers.batch import Fields, Payloads
from readers.collate import stack_masks, stack_targets, to_tensor
from readers.feed import BadSample, Feed, for_decoding, read_samples, substitute
from readers.headers import ImageHeader, first_deep
from readers.loader.stats import ThreadClock
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Announcer, Reader, joined
from readers.table import Buffer, upright_sides

if TYPE_CHECKING:
    from readers.coefficients.decode import Table
    from readers.coefficients.layout import Shape
    from readers.decode.device import Ready


class FieldWork:
    """Reads the fields of a batch other than the image, and decodes them, row by row, to tensors.

    With several views, fields that follow the image are tuples with a value for each view.
    """

    def __init__(self, fields: Fields, reader: Reader) -> None:
        self._fields, self._reader = fields, reader
        self._moving = frozenset(fields.moving)

    def read(self, indices: Int64s) -> list[Payloads]:
        """The bytes of some rows."""
        return self._fields.read(self._reader, indices)

    def fill(self, batch: Batch, start: int, stop: int) -> None:
        """Decode the fields of rows [start, stop). If that fails for a row, the error takes the place of its image, so
        that the sample is skipped or replaced."""
        for row in range(start, stop):
            if isinstance(batch.data[row], Exception) or row in batch.bad_boxes:
                continue
            jobs = [of_view[row] for of_view in batch.jobs]
            try:
                batch.values[row] = self.decode(int(batch.indices[row]), batch.payloads[row], batch.sizes[row], jobs)
            except SAMPLE_ERRORS as error:
                batch.data[row] = error

    def substitute(self, index: int, size: tuple[int, int], jobs: Sequence[Job]) -> dict[str, Any]:
        """The values of a sample that replaces another. Raises SAMPLE_ERRORS."""
        (payloads,) = self.read(np.array([index], np.int64))
        return self.decode(index, payloads, size, jobs)

    def decode(self, index: int, payloads: Payloads, size: tuple[int, int], jobs: Sequence[Job]) -> dict[str, Any]:
        """The values of one sample. size: (height, width) of its upright image as read. jobs: the image's, by view."""
        views = []
        for job in jobs:
            placement = self._fields.placement(self._reader, index, job, size)
            views.append(self._tensors(self._fields.decode(payloads, placement)))
        if len(views) == 1:
            return views[0]
        return {n: tuple(v[n] for v in views) if n in self._moving else views[0][n] for n in self._fields.stored}

    def fill_alone(self, batch: Batch, feed: Feed) -> None:
        """All fields of a batch without images: nothing is moved, and masks may differ in size."""
        values = map(self._alone, self.read(batch.indices))
        settled = feed.settle(feed.start.epoch, batch.positions, batch.indices, values, self._taken)
        batch.indices = settled.rows
        batch.bad += settled.bad
        columns = {name: [some[name] for some in settled.values] for name in self._fields.stored}
        batch.columns = {
            name: self._stacked(name, column) if name in self._fields.targets else column
            for name, column in columns.items()
        }

    def _alone(self, payloads: Payloads) -> dict[str, Any] | Exception:
        try:
            return self._tensors(self._fields.decode(payloads))
        except SAMPLE_ERRORS as error:
            return error

    def _taken(self, index: int, position: int) -> dict[str, Any]:
        (payloads,) = self.read(np.array([index], np.int64))
        return self._tensors(self._fields.decode(payloads))

    def collate(self, values: Sequence[dict[str, Any]], views: int) -> dict[str, Any]:
        """The fields of a batch."""
        columns: dict[str, Any] = {}
        for name in self._fields.stored:
            column = [some[name] for some in values]
            if views > 1 and name in self._moving:
                by_view = zip(*column, strict=True)
                columns[name] = tuple(self._stacked(name, list(of_view)) for of_view in by_view)
            else:
                columns[name] = self._stacked(name, column)
        return columns

    def _stacked(self, name: str, column: list[Any]) -> Any:
        if name in self._fields.targets:
            return stack_targets(column)
        return stack_masks(column) if name in self._fields.stacked and column else column

    def _tensors(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: to_tensor(self._fields.kind(name), values[name]) for name in self._fields.stored}


Allocate: TypeAlias = Callable[[int, int, int], torch.Tensor]


@dataclass(slots=True)
class Batch:
    """One batch in preparation.

    positions, indices: int64 [n].
    sizes: (height, width) of the upright images.
    jobs: by view, the job of each image. tables: by view, the jobs as a table if the compiled codec may do all of them.
    bad_boxes: errors of images that a recipe does not fit, by row.
    data: the encoded images, or the error that makes a sample unusable.
    payloads, values: the other fields by row, encoded and decoded; columns: the decoded fields of the batch.
    images: by view, [n, 3, height, width].
    labels: float32 [n, classes], if images were mixed.
    finished: with decode="unchanged", images by row and view, until the batch is put together.
    deep: number of a sample with more than 8 bits a channel that is reduced to 8; -1 if none is known.
    routed: whether the device should decode each image; headers: of the images that it will decode, by row; shapes: of
        those that are coefficients; refused: rows on which the device failed.
    staged: the coefficients for the device; places: their offsets in `staged`, by row.
    shared: stored bytes of the images that the CPU decodes as its share of the device's, by row.
    spent: for each task of the threads: nanoseconds, nanoseconds for images of `shared`, bytes of these.
    ready: on a device, the event to wait for before the images are used.
    pending: number of unfinished tasks.
    """

    step: int
    positions: Int64s
    indices: Int64s
    sizes: list[tuple[int, int]]
    jobs: list[list[Job]]
    bad_boxes: Mapping[int, BadSampleError]
    data: list[Buffer | Exception]
    images: list[torch.Tensor]
    tables: list[Table | None] = field(default_factory=list)
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

    recipes: one for each view; a bad sample is skipped or replaced in all views.
    finish: how values are stored.
    allocate: makes the tensor [n, 3, height, width] of n images.
    classes: number of classes, if images are mixed.
    fields: the work for other fields; None if there are none.
    exact_colours: see `Decode`.
    compiled: whether the compiled codec decodes JPEGs, if it was built.
    notes_depth: whether batches note an image of more than 8 bits.
    """

    feed: Feed
    recipes: tuple[Recipe, ...]
    finish: Finish
    allocate: Allocate
    classes: int = 0
    fields: FieldWork | None = None
    exact_colours: bool = False
    compiled: bool = True
    notes_depth: bool = False
    _images: Reader = field(init=False, repr=False)
    _announcer: Announcer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._images = self.reader_of_images()
        order = self.feed.schedule()[0].order
        self._announcer = Announcer(self._images, order, self._epoch, self.feed.ranks[1])

    def reader_of_images(self) -> Reader:
        """The reader of the encoded images."""
        return for_decoding(self.feed.reader)

    @property
    def steps(self) -> int:
        return self.feed.steps()

    def tools(self) -> Renderer:
        return Renderer(self.recipes[0].interpolation, self.finish, compiled=self.compiled)

    def plan(self, step: int, clock: ThreadClock) -> Batch:
        """Batch `step` with its samples read and the job of each planned."""
        positions, indices = self.feed.rows(self._epoch, step)
        self._announcer.announce(step, self.steps, len(indices), joined(partial(self.feed.rows, self._epoch)))
        plans, sizes = self._plan_samples(positions, indices)
        shapes = [self._choose_size(view, plan, sizes, positions, indices) for view, plan in enumerate(plans)]
        images = [self.allocate(len(indices), *shape) for shape in shapes]
        jobs = [plan.jobs() for plan in plans]
        bad = {row: error for plan in plans for row, error in plan.boxes.bad.items()}
        data = list(self._read(positions, indices, clock))
        # Indices are copied: substitutes change them, and the feed keeps the array that it computed ahead.
        batch = Batch(step, positions, indices.copy(), sizes, jobs, bad, data, images)
        if self.recipes[0].interpolation != "bicubic":
            from readers.coefficients import tabulate_boxes  # loads crc32c

            sides = np.array(sizes, np.int64).reshape(-1, 2).T
            batch.tables = [tabulate_boxes(plan, sides) for plan in plans]
        if self.notes_depth:
            place = first_deep(data)
            batch.deep = -1 if place < 0 else int(indices[place])
        if self.fields is not None:
            batch.payloads = self.fields.read(indices)
            clock.lap("read")
        return batch

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the images of rows [start, stop) into the batch. Raises BadSampleError with on_error="raise"."""
        self.fill_fields(batch, start, stop, tools)
        some = slice(start, stop)
        out = [images[some] for images in batch.images]
        pixels = out if self.finish.in_place else tools.chunks([images.shape for images in out])
        done, left = self._fill_boxes(batch, some, pixels, out, tools)
        if all(done) and not any(map(any, left)):
            return
        places = [images.unsafe_split(1) for images in pixels]  # unsafe only for gradients; takes a third less time
        alone = not any(done) and not batch.bad_boxes
        if not alone or not all(
            tools.render_alike(batch.data[some], jobs[some], batch.sizes[some], images)
            for jobs, images in zip(batch.jobs, pixels, strict=True)
        ):
            results = places if self.finish.in_place else [images.unsafe_split(1) for images in out]
            for row, both in enumerate(zip(zip(*places, strict=True), zip(*results, strict=True), strict=True)):
                if not done[row]:
                    for jobs, job in zip(left, self.render_row(batch, start + row, *both, tools), strict=True):
                        jobs[row] = job
        for view, jobs in enumerate(left):
            self.finish.store(pixels[view], places[view], jobs, out[view])
        if tools.lap is not None:
            tools.lap("augment")

    def _fill_boxes(
        self, batch: Batch, some: slice, pixels: Sequence[torch.Tensor], out: Sequence[torch.Tensor], tools: Renderer
    ) -> tuple[list[bool], list[list[Job | None]]]:
        """Render as many rows as the compiled codec can, in one call; returns which rows it rendered in all views, and
        the jobs that remain by view."""
        data, sizes = batch.data[some], batch.sizes[some]
        done, left = [False] * len(data), [list[Job | None](jobs[some]) for jobs in batch.jobs]
        tables = [table[some] for table in batch.tables if table is not None]
        if len(tables) < len(left):
            return done, left
        tasks = zip(tables, pixels, out, strict=True)
        made = [tools.render_boxes(data, table, sizes, *both) for table, *both in tasks]
        done = list(map(all, zip(*(rows for rows, _ in made), strict=True)))
        for jobs, (_, is_finished) in zip(left, made, strict=True):
            for row, job in enumerate(jobs):
                if done[row] and job is not None:
                    jobs[row] = None if is_finished else unflipped(job)
        return done, left

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
        """Decode one image into `places`, [1, 3, height, width] for each view, or treat it by on_error.

        Returns the job that remains by view; None if the finished image is in `results`.
        """
        try:
            data = batch.data[row]
            if isinstance(data, Exception):
                raise data
            if row in batch.bad_boxes:
                raise batch.bad_boxes[row]
            tasks = zip(batch.jobs, places, results, strict=True)
            return [tools.render(data, jobs[row], batch.sizes[row], *where) for jobs, *where in tasks]
        except SAMPLE_ERRORS as error:
            return self._render_again(batch, row, error, tools, places)

    def complete(self, batch: Batch) -> None:
        """Finish a batch whose rows are filled, and free the memory of its encoded images."""
        batch.data, batch.payloads = [], []
        self.combine(batch)

    def combine(self, batch: Batch) -> None:
        """Leave out skipped samples, and apply the ops on batches."""
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
        """The plans of some samples by view, and the sizes of their upright images."""
        heights, widths = upright_sides(self._images.image_info(indices))
        # An unreadable header gives size 0; decoding the image then raises the reason.
        arguments = (self.feed.seed, self._epoch, positions, np.maximum(heights, 1), np.maximum(widths, 1))
        plans = [recipe.plan(*arguments, view=view) for view, recipe in enumerate(self.recipes)]
        if self.exact_colours:
            for plan in plans:
                plan.interpolate_colours()
        return plans, list(zip(heights.tolist(), widths.tolist(), strict=True))

    def _read_samples(self, positions: Int64s, indices: Int64s) -> Sequence[Buffer | Exception]:
        """The encoded images, or the error of a sample that could not be read."""
        return read_samples(self._images, indices)

    def _read(self, positions: Int64s, indices: Int64s, clock: ThreadClock) -> Sequence[Buffer | Exception]:
        """The encoded images of a batch, with the time that reading takes."""
        clock.begin_read()
        data = self._announcer.read(partial(self._read_samples, positions), indices)
        clock.end_read(data)
        return data

    def _choose_size(
        self, view: int, plan: Plan, sizes: Sequence[tuple[int, int]], positions: Int64s, indices: Int64s
    ) -> tuple[int, int]:
        """The common size of all images of a view of a batch. Raises BadSampleError if they differ."""
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
        """The size of a batch without a good sample: that of its first substitute."""
        if self.feed.options.on_error != "substitute":
            return 1, 1
        try:
            others = self.feed.others(self._epoch, position)[0].tolist()
            error = BadSampleError("all samples of a batch are bad")
            _, (jobs, _) = substitute(others, error, lambda row: self._plan_one(position, row))
        except BadSampleError:
            return 1, 1
        return jobs[view].last.size

    def _render_again(
        self, batch: Batch, row: int, error: Exception, tools: Renderer, places: Sequence[torch.Tensor]
    ) -> list[Job | None]:
        """Decode an image again if only its cached copy was damaged, or else a substitute.

        Returns the jobs that remain; None for each view if the row is skipped.
        """
        treated = self.feed.treat(
            self._epoch,
            int(batch.indices[row]),
            int(batch.positions[row]),
            error,
            lambda index: self._render_another(batch, row, index, tools, places),
            self._images,
        )
        batch.bad += treated.bad
        if treated.value is None:
            batch.skipped.append(row)
            return [None] * len(places)
        batch.indices[row] = treated.row
        return treated.value

    def _render_another(
        self, batch: Batch, row: int, index: int, tools: Renderer, places: Sequence[torch.Tensor]
    ) -> list[Job | None]:
        """Decode a sample that was not read with the batch; returns the jobs that remain. Raises SAMPLE_ERRORS."""
        data, left = self._images.read(index), []
        planned, stored = self._plan_one(batch.positions[row : row + 1], index)
        values = {} if self.fields is None else self.fields.substitute(index, stored, planned)
        for job, place in zip(planned, places, strict=True):
            if job.last.size != place.shape[2:]:
                raise BadSampleError(f"its size is {job.last.size}, but the batch's is {tuple(place.shape[2:])}")
            left.append(tools.render(data, job, stored, place))
        batch.values[row] = values
        for jobs, job in zip(batch.jobs, planned, strict=True):
            jobs[row] = job
        return left

    def _plan_one(self, position: Int64s, index: int) -> tuple[list[Job], tuple[int, int]]:
        """The jobs by view of a sample at a position, int64 [1]; and its size.

        Raises BadSampleError if a recipe does not fit the image, or if its size is unknown.
        """
        plans, (stored,) = self._plan_samples(position, np.array([index], np.int64))
        bad = [error for plan in plans for error in plan.boxes.bad.values()]
        if bad or not all(stored):
            raise bad[0] if bad else BadSampleError("its header cannot be read")
        return [plan.jobs()[0] for plan in plans], stored


class IndexWork:
    """Replaces a crew if the fields have no image: makes batches of labels, keys, indices and stored fields."""

    ready = 0  # batches are made when they are taken

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
        """Nothing to stop."""


# decode="unchanged". The dtype and channels of an image are known only once it is decoded, so each image is finished
# separately, and the batch is put together at the end.


_Memory: TypeAlias = Callable[[int, int, int, int, torch.dtype], torch.Tensor]


def without_memory(count: int, height: int, width: int) -> torch.Tensor:
    """A placeholder for a batch: [count, 0, height, width], without memory."""
    return torch.empty((count, 0, height, width), dtype=torch.uint8)


@dataclass(slots=True)
class UnchangedWork(EpochWork):
    """`EpochWork` for images in their own depth and channels. `allocate` is `without_memory`.

    memory: makes the tensor [n, channels, height, width] from n, height, width, channels and dtype.
    dtype: dtype of the images; None for their own.
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
            if made[0] is not None:  # None: the row is skipped
                batch.finished[row] = made

    def complete(self, batch: Batch) -> None:
        if batch.error is None and batch.finished:
            batch.images = [self._joined(batch, view) for view in range(len(batch.images))]
        batch.finished = {}
        EpochWork.complete(self, batch)

    def _joined(self, batch: Batch, view: int) -> torch.Tensor:
        """The images of a view as one tensor. Raises BadSampleError if they differ in dtype or channels."""
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
                    f"{keys[int(batch.indices[row])]} has {_kind(image)}; leave out decode='unchanged' for 8-bit RGB, "
                    f"select images of one kind (reader.select), or batch them by kind (readers.order.Bucketed)"
                )
            images[row].copy_(image[0])
        return images


def _kind(image: torch.Tensor) -> str:
    channels = image.shape[1]
    return f"{channels} channel{'' if channels == 1 else 's'} of {str(image.dtype).removeprefix('torch.')}"
