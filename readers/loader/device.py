"""Batches made on a device: a thread takes what the crew has read, and decodes, uploads and augments it.

    crew: read, check headers, decode the CPU's images ──► batch ──► this thread: decode the rest, augment ──► queue
    ──► consumer
          (`prefetch` batches ahead)                         stream of its own (`readers.decode.device`)   (prefetch)

Of the images that the device could decode the crew decodes a share (`readers.decode.share`). What a cache keeps as
coefficients goes to a decoder of its own (`readers.coefficients.device`), which makes the box of each view alone.

The crew works on later batches meanwhile, so reading and decoding on the CPU, decoding on the device, and training
overlap. Images that the CPU decodes are cropped and resized there as well, by the same code as without a device, and
cross the bus as uint8 in the size of the batch; the device flips, applies pixel ops and normalises. An image that
the device cannot decode is tried on the CPU, and is a bad sample if that fails too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from readers.augment.cpu import Finish
from readers.augment.fused import BatchRenderer, triton_runs
from readers.augment.recipe import Job, Recipe
from readers.coefficients.device.decoder import CoefficientDecoder
from readers.decode.batch import CpuDecoder, Decoder, DecoderName, open_decoder
from readers.decode.device import DecodeStream, Picture, Ready
from readers.decode.region import Region
from readers.decode.share import Share, Spent
from readers.feed import Feed, for_decoding
from readers.loader.crew import Crew
from readers.loader.device_work import DeviceWork
from readers.loader.fields import FieldWork
from readers.loader.timers import LoopTimers
from readers.loader.work import Allocate, Batch, EpochWork
from readers.loop import Ahead
from readers.reader import Reader

__all__ = ["DevicePath", "DeviceStage", "open_path"]

# By the host's clock, in nanoseconds, and in the stream of the device.
_Moment: TypeAlias = tuple[int, Ready]
# Of a view, by row: a picture on the device, and what is to be done to it.
_Made: TypeAlias = dict[int, tuple[Picture, Job]]


@dataclass(frozen=True)
class DevicePath:
    """How a loader makes batches on its device. coefficients: what decodes those; None where the crew does, or where
    the JPEGs they were made from are decoded."""

    decoder: Decoder
    renderer: BatchRenderer
    ahead: int
    share: Share = field(default_factory=Share)
    coefficients: CoefficientDecoder | None = None

    @property
    def decodes(self) -> bool:
        """Whether the device decodes JPEGs."""
        return not isinstance(self.decoder, CpuDecoder)

    @property
    def finishes(self) -> bool:
        """Whether the device decodes coefficients."""
        return self.coefficients is not None

    @property
    def name(self) -> str:
        """What decodes the images, as resume tokens name it."""
        names = [self.decoder.name]
        if self.coefficients is not None:
            names.append(self.coefficients.name)
        if (self.decodes or self.finishes) and self.share.wanted != 0:
            names.append(f"cpu_share={self.share.wanted}")
        return ", ".join(names)

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
        options = {"decodes": self.decodes, "finishes": self.finishes}
        return DeviceWork(feed, recipes, finish, allocate, classes, fields, share=self.share, **options)

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
    reader: Reader,
) -> DevicePath:
    """How batches of a reader are made on this device. Raises MissingExtraError where the decoder is not installed,
    ValueError."""
    renderer = BatchRenderer(
        device, dtype=dtype, planar=planar, normalize=recipe.normalize, interpolation=recipe.interpolation
    )
    if decoder == "cpu" or for_decoding(reader) is reader or not triton_runs(device):
        return DevicePath(open_decoder(decoder, device), renderer, ahead, share)
    opened = open_decoder(decoder, device, "images that the cache does not keep as coefficients")
    return DevicePath(opened, renderer, ahead, share, CoefficientDecoder(device))


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
                made = self._decode(batch)
                decoded = self._moment()
                self._render(batch, made)
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

    def _decode(self, batch: Batch) -> list[_Made]:
        """The images that the device decodes, by view and row, except those that it cannot."""
        whole = self._decode_whole(batch)
        boxes = self._decode_boxes(batch)
        self._clock.lap("decode")
        if self._path.decodes or self._path.finishes:
            self._timers.count_decoded(len(whole) + len(boxes[0]), len(batch.shared), self._path.share.value)
        return [
            {row: (picture, jobs[row]) for row, picture in whole.items()}
            | {row: (picture, _job_of_box(jobs[row], picture)) for row, picture in some.items()}
            for jobs, some in zip(batch.jobs, boxes, strict=True)
        ]

    def _decode_whole(self, batch: Batch) -> dict[int, Picture]:
        """JPEGs by row, the same for all views."""
        rows = sorted(batch.headers)
        decoded = self._path.decoder.decode(
            [batch.data[row] for row in rows],  # type: ignore[misc]  # those with a header are bytes
            [batch.headers[row] for row in rows],
        )
        return {row: found for row, found in zip(rows, decoded, strict=True) if isinstance(found, Picture)}

    def _decode_boxes(self, batch: Batch) -> list[dict[int, Picture]]:
        """Boxes of coefficients, by view and row: of the images that have one in every view."""
        decoder, rows = self._path.coefficients, sorted(batch.shapes)
        if decoder is None or not rows:
            return [{} for _ in batch.jobs]
        uploaded = decoder.upload(
            [batch.data[row] for row in rows],  # type: ignore[misc]  # as above
            [batch.shapes[row] for row in rows],
        )
        views = [decoder.decode(uploaded, [_region_of(jobs[row]) for row in rows]) for jobs in batch.jobs]
        good = [k for k in range(len(rows)) if all(isinstance(view[k], Picture) for view in views)]
        return [{rows[k]: view[k] for k in good} for view in views]  # type: ignore[misc]  # they are pictures

    def _render(self, batch: Batch, made: list[_Made]) -> None:
        """Turn the rows that the CPU decoded and those that it did not into the images of the batch."""
        rows, device = sorted({*batch.headers, *batch.shapes}), self._path.renderer.device
        boxes: dict[int, list[torch.Tensor]] = {}  # of what the device could not decode, by view
        for row in rows:
            if row in made[0]:
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
            pictures = uploaded | {row: Picture(some[view]) for row, some in boxes.items()}
            todo = [made[view].get(row) or (pictures[row], _rest_of(job, size)) for row, job in enumerate(jobs)]
            batch.images[view] = self._path.renderer.render(
                [picture for picture, _ in todo], [job for _, job in todo], size
            )

    def _upload(self, images: torch.Tensor, batch: Batch) -> dict[int, Picture]:
        """The rows of a view that the CPU decoded, on the device; in one copy if those are all rows."""
        device = self._path.renderer.device
        if not batch.headers and not batch.shapes:
            return {row: Picture(image) for row, image in enumerate(images.to(device, non_blocking=True))}
        rows = [row for row in range(len(images)) if row not in batch.headers and row not in batch.shapes]
        return {row: Picture(images[row].to(device, non_blocking=True)) for row in rows}


def _spent(batch: Batch) -> Spent:
    """What the threads have spent on a batch, and nothing yet on the device."""
    cpu, shared, shared_bytes = (sum(column) for column in zip(*batch.spent, strict=True))
    rows = (*batch.headers, *batch.shapes)
    device_bytes = sum(len(batch.data[row]) for row in rows)  # type: ignore[arg-type, misc]  # see _decode_whole
    return Spent(len(batch.positions), cpu, shared, shared_bytes, 0, 0, device_bytes)


def _between(start: _Moment, end: _Moment) -> int:
    """Nanoseconds by the clock that saw more: a call may return before the device is done, or only wait for it."""
    return max(end[0] - start[0], DecodeStream.elapsed(start[1], end[1]))


def _region_of(job: Job) -> Region:
    """What is decoded for a job: the region of its first part."""
    return Region(*(job[5][0][0] if job[5] else job[0]))


def _job_of_box(job: Job, box: Picture) -> Job:
    """What is to be done to the region of the first part, when nothing else was decoded."""
    whole = (0, 0, *box.size, 1, False)
    earlier = job[5]
    return (*job[:5], ((whole, *earlier[0][1:]), *earlier[1:])) if earlier else (whole, *job[1:])


def _rest_of(job: Job, size: tuple[int, int]) -> Job:
    """What remains to do for an image that has its box, crop and size."""
    return (0, 0, *size, 1, False), size, (0, 0), job[3], job[4], ()
