"""Batches made on a device: a thread takes what the crew has read, and decodes, uploads and augments it.

    crew: read, check headers, decode the CPU's images ──► batch ──► this thread: decode the rest, augment ──► queue
    ──► consumer
          (`prefetch` batches ahead)                         stream of its own (`readers.decode.device`)   (prefetch)

Of the images that the device could decode the crew decodes a share (`readers.decode.share`).

The crew works on later batches meanwhile, so reading and decoding on the CPU, decoding on the device, and training
overlap. Images that the CPU decodes are cropped and resized there as well, by the same code as without a device, and
cross the bus as uint8 in the size of the batch; the device flips, applies pixel ops and normalises. An image that
the device cannot decode is tried on the CPU, and is a bad sample if that fails too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch

from readers.augment.cpu import Finish, Renderer
from readers.augment.fused import BatchRenderer
from readers.augment.recipe import Job, Recipe
from readers.decode.batch import CpuDecoder, Decoder, DecoderName, open_decoder, routes, same_as_promised
from readers.decode.device import DecodeStream, Picture, Ready
from readers.decode.share import Share, Spent
from readers.feed import Feed, read_samples
from readers.loader.crew import Crew
from readers.loader.fields import FieldWork
from readers.loader.strips import StripReader
from readers.loader.timers import LoopTimers, ThreadClock
from readers.loader.work import Allocate, Batch, EpochWork
from readers.loop import Ahead
from readers.order.base import Int64s
from readers.reader import Reader
from readers.sample import Buffer

__all__ = ["DevicePath", "DeviceStage", "DeviceWork", "open_path"]

# By the host's clock, in nanoseconds, and in the stream of the device.
_Moment: TypeAlias = tuple[int, Ready]


@dataclass(slots=True)
class DeviceWork(EpochWork):
    """The crew's part of a batch that a device finishes.

    decodes: whether the device decodes at all. share: what the crew decodes of that.
    """

    decodes: bool = True
    share: Share = field(default_factory=Share)
    _kept: Reader = field(init=False, repr=False)
    _routes: tuple[list[bool], dict[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        EpochWork.__post_init__(self)
        self._kept = EpochWork.reader_of_images(self)  # what the crew decodes itself may be coefficients

    def reader_of_images(self) -> Reader:
        return self.feed.reader if self.decodes else EpochWork.reader_of_images(self)  # devices decode JPEGs

    def tools(self) -> Renderer:
        return _BoxRenderer(self.recipes[0].interpolation, compiled=self.compiled)

    def reader_of_strips(self) -> StripReader | None:
        """None where a device decodes whole images."""
        return None if self.decodes else EpochWork.reader_of_strips(self)

    def plan(self, step: int, clock: ThreadClock) -> Batch:
        began = time.perf_counter_ns()
        batch = EpochWork.plan(self, step, clock)
        if self.decodes:
            batch.routed, batch.shared = self._routes
        batch.spent.append((time.perf_counter_ns() - began, 0, 0))
        return batch

    def _read_samples(self, positions: Int64s, indices: Int64s) -> Sequence[Buffer | Exception]:
        """JPEGs for the device; for the crew what a cache keeps of them."""
        if not self.decodes:
            return EpochWork._read_samples(self, positions, indices)
        able = routes(self.feed.reader.image_info(indices))
        shared = able & self.share.choose(self.feed.seed, self._epoch, positions)
        routed, rows = able & ~shared, np.flatnonzero(shared)
        if self._kept is self._images:
            data = EpochWork._read_samples(self, positions, indices)
            samples = [data[row] for row in rows.tolist()]
            sizes = [0 if isinstance(sample, Exception) else len(sample) for sample in samples]
        else:
            found: dict[int, Buffer | Exception] = {}
            for reader, chosen in ((self._images, routed), (self._kept, ~routed)):
                some = np.flatnonzero(chosen)
                found.update(zip(some.tolist(), read_samples(reader, indices[some]), strict=True))
            data = [found[row] for row in range(len(indices))]
            sizes = self._images.table.extents(indices[rows]).length.tolist()
        self._routes = routed.tolist(), dict(zip(rows.tolist(), sizes, strict=True))
        return data

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the CPU's images, unflipped; of the others, check that the header is what the index says."""
        self.fill_fields(batch, start, stop, tools)
        some = slice(start, stop)
        alone = not batch.routed and not batch.bad_boxes
        if alone and all(
            tools.render_alike(batch.data[some], jobs[some], batch.sizes[some], images[some])
            for jobs, images in zip(batch.jobs, batch.images, strict=True)
        ):
            return
        began, shared_ns, shared_bytes = time.perf_counter_ns(), 0, 0
        for row in range(start, stop):
            data = batch.data[row]
            if batch.routed and batch.routed[row] and row not in batch.bad_boxes and not isinstance(data, Exception):
                header = same_as_promised(data, batch.sizes[row])
                if header is not None:
                    batch.headers[row] = header
                    continue
            row_began = time.perf_counter_ns()
            places = [images[row : row + 1] for images in batch.images]
            self.render_row(batch, row, places, places, tools)
            if row in batch.shared and not isinstance(data, Exception):
                shared_ns += time.perf_counter_ns() - row_began
                shared_bytes += batch.shared[row]
        batch.spent.append((time.perf_counter_ns() - began, shared_ns, shared_bytes))

    def complete(self, batch: Batch) -> None:
        """The device has still to decode: see `DeviceStage`."""


class _BoxRenderer(Renderer):
    """Makes the boxes only; the device does the rest of a job."""

    def render(
        self, data: Buffer, job: Job, size: tuple[int, int], out: torch.Tensor, whole: torch.Tensor | None = None
    ) -> Job | None:
        return Renderer.render(self, data, _box_of(job), size, out)

    def render_alike(
        self,
        data: Sequence[Buffer | Exception],
        jobs: Sequence[Job],
        sizes: Sequence[tuple[int, int]],
        out: torch.Tensor,
    ) -> bool:
        return Renderer.render_alike(self, data, [_box_of(job) for job in jobs], sizes, out)


@dataclass(frozen=True)
class DevicePath:
    """How a loader makes batches on its device."""

    decoder: Decoder
    renderer: BatchRenderer
    ahead: int
    share: Share = field(default_factory=Share)

    @property
    def decodes(self) -> bool:
        return not isinstance(self.decoder, CpuDecoder)

    @property
    def name(self) -> str:
        """What decodes the images, as resume tokens name it."""
        shares = self.decodes and self.share.wanted != 0
        return f"{self.decoder.name}, cpu_share={self.share.wanted}" if shares else self.decoder.name

    def unmeasured(self, threads: int) -> DevicePath:
        """The same for so many threads, with nothing measured yet."""
        return replace(self, share=Share(self.share.wanted, threads))

    def work(
        self,
        feed: Feed,
        recipes: tuple[Recipe, ...],
        finish: Finish,
        allocate: Allocate,
        classes: int,
        fields: FieldWork | None,
    ) -> DeviceWork:
        """What the crew does."""
        return DeviceWork(feed, recipes, finish, allocate, classes, fields, decodes=self.decodes, share=self.share)

    def stage(self, crew: Crew, work: EpochWork, timers: LoopTimers) -> DeviceStage:
        """What takes the crew's batches and finishes them."""
        return DeviceStage(crew, work, self, timers)


def open_path(
    device: torch.device,
    decoder: DecoderName,
    *,
    dtype: torch.dtype,
    planar: bool,
    recipe: Recipe,
    ahead: int,
    share: Share,
) -> DevicePath:
    """How batches are made on this device. Raises MissingExtraError where the decoder is not installed, ValueError."""
    renderer = BatchRenderer(
        device, dtype=dtype, planar=planar, normalize=recipe.normalize, interpolation=recipe.interpolation
    )
    return DevicePath(open_decoder(decoder, device), renderer, ahead, share)


class DeviceStage(Ahead[Batch]):
    """The thread behind a crew.

    Holds no reference to the loader or its iterator, so dropping those stops it.
    """

    def __init__(self, crew: Crew, work: EpochWork, path: DevicePath, timers: LoopTimers) -> None:
        self._crew, self._work, self._path, self._timers = crew, work, path, timers
        self._clock = timers.device_clock("packer-loader-device")
        self._uploads: list[tuple[Ready, Ready]] = []  # of the batch before, in which the device may still be
        self._before: tuple[Spent, _Moment, _Moment, _Moment] | None = None
        self._stream, self._tools = DecodeStream(path.renderer.device), work.tools()
        super().__init__(self._finish, work.steps, path.ahead, "packer-loader-device")

    def take(self) -> Batch:
        """The next batch, its images on the device, for the current stream of the calling thread to use."""
        batch = super().take()
        DecodeStream.hand_over(batch.images, batch.ready)
        return batch

    def stop(self) -> None:
        """End the threads; a decode under way is finished first."""
        self._crew.stop()
        super().stop()

    def _finish(self, step: int) -> Batch:
        self._timers.fill(False)
        start = time.perf_counter_ns()
        batch = self._crew.take()
        self._clock.wait(start)
        self._clock.start()
        if batch.error is None:
            with self._stream.decoding():
                self._look_back()
                began = self._moment()
                whole = self._decode(batch)
                decoded = self._moment()
                self._render(batch, whole)
                self._work.combine(batch)
                batch.ready = self._stream.mark()
                self._before = _spent(batch), began, decoded, self._moment()
        batch.data, batch.payloads = [], []
        self._clock.stop("augment", batch=step)
        self._timers.fill(True)
        return batch

    def _look_back(self) -> None:
        """The device is done with the batch before: of the time until then, its uploads took what it says."""
        copied = sum(self._stream.elapsed(*upload) for upload in self._uploads)
        self._uploads.clear()
        self._clock.lap_device(copied)
        if self._before is not None:
            spent, began, decoded, ended = self._before
            took = {"device": _between(began, ended), "decoded": _between(began, decoded)}
            self._path.share.add(spent._replace(**took))

    def _moment(self) -> _Moment:
        return time.perf_counter_ns(), self._stream.tick()

    def _decode(self, batch: Batch) -> dict[int, Picture]:
        """The images that the device decodes, by row, except those that it cannot."""
        rows = sorted(batch.headers)
        decoded = self._path.decoder.decode(
            [batch.data[row] for row in rows],  # type: ignore[misc]  # those with a header are bytes
            [batch.headers[row] for row in rows],
        )
        self._clock.lap("decode")
        whole = {row: found for row, found in zip(rows, decoded, strict=True) if isinstance(found, Picture)}
        if self._path.decodes:
            self._timers.count_decoded(len(whole), len(batch.shared), self._path.share.value)
        return whole

    def _render(self, batch: Batch, whole: dict[int, Picture]) -> None:
        """Turn the rows that the CPU decoded and those that it did not into the images of the batch."""
        rows, device = sorted(batch.headers), self._path.renderer.device
        boxes: dict[int, list[torch.Tensor]] = {}  # of what the device could not decode, by view
        for row in rows:
            if row in whole:
                continue
            shapes = [(1, *images.shape[2:], 3) for images in batch.images]
            places = [torch.zeros(shape, dtype=torch.uint8).permute(0, 3, 1, 2) for shape in shapes]
            try:
                self._work.render_row(batch, row, places, places, self._tools)
            except Exception as error:
                batch.error = error
                return
            self._clock.lap("decode")
            boxes[row] = [place[0].to(device) for place in places]
            self._clock.lap("copy")
        for view, (images, jobs) in enumerate(zip(batch.images, batch.jobs, strict=True)):
            size = (images.shape[2], images.shape[3])
            self._clock.lap("augment")
            begun = self._stream.tick()
            uploaded = self._upload(images, batch)
            self._uploads.append((begun, self._stream.tick()))
            self._clock.lap("copy")
            pictures = uploaded | {row: Picture(some[view]) for row, some in boxes.items()} | whole
            jobs = [job if row in whole else _rest_of(job, size) for row, job in enumerate(jobs)]
            batch.images[view] = self._path.renderer.render([pictures[row] for row in range(len(jobs))], jobs, size)

    def _upload(self, images: torch.Tensor, batch: Batch) -> dict[int, Picture]:
        """The rows of a view that the CPU decoded, on the device; in one copy if those are all rows."""
        device = self._path.renderer.device
        if not batch.headers:
            return {row: Picture(image) for row, image in enumerate(images.to(device, non_blocking=True))}
        rows = [row for row in range(len(images)) if row not in batch.headers]
        return {row: Picture(images[row].to(device, non_blocking=True)) for row in rows}


def _spent(batch: Batch) -> Spent:
    """What the threads have spent on a batch, and nothing yet on the device."""
    cpu, shared, shared_bytes = (sum(column) for column in zip(*batch.spent, strict=True))
    device_bytes = sum(len(batch.data[row]) for row in batch.headers)  # type: ignore[arg-type, misc]  # see _decode
    return Spent(len(batch.positions), cpu, shared, shared_bytes, 0, 0, device_bytes)


def _between(start: _Moment, end: _Moment) -> int:
    """Nanoseconds by the clock that saw more: a call may return before the device is done, or only wait for it."""
    return max(end[0] - start[0], DecodeStream.elapsed(start[1], end[1]))


def _box_of(job: Job) -> Job:
    return *job[:3], (), (), job[5]


def _rest_of(job: Job, size: tuple[int, int]) -> Job:
    """What remains to do for an image that has its box, crop and size."""
    return (0, 0, *size, 1, False), size, (0, 0), job[3], job[4], ()
