"""Batches made on a device: a thread takes the batches that the crew has read, and decodes, uploads and augments them.

    crew: read, check headers, decode the CPU's images ──► batch ──► this thread: decode the rest, augment ──► queue
    ──► consumer
          (`prefetch` batches ahead)                         separate stream (`readers.decode.device`)     (prefetch)

The crew decodes a share of the images that the device could decode (`readers.decode.device`). Images that a cache keeps
as coefficients go to a separate decoder (`readers.coefficients.device`), which decodes only the box of each view.

The crew works on later batches meanwhile, so reading and decoding on the CPU, decoding on the device, and training
overlap. Images that the CPU decodes are cropped and resized there as well, by the same code as without a device, and
cross the bus as uint8 in the size of the batch; the device flips, applies pixel ops and normalises. An image that the
device cannot decode goes back to the crew, and is a bad sample if the crew fails, too; the loader warns of the first
such image, and its `stats()` count them. If the device itself fails, DeviceError is raised: the CPU does not take over.

At most one gibibyte of decoded pixels is on the device at once; a larger batch is decoded and augmented in parts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch

from cache.errors import BadSampleError, DeviceError
from readers.augment.cpu import Finish, Renderer
from readers.augment.fused import BatchRenderer, Engine, triton_fault
from readers.augment.geometry import Job, Pass
from readers.augment.recipe import Recipe
from readers.coefficients.device.decoder import CoefficientDecoder, Uploaded, places_of, vetted_shape
from readers.coefficients.layout import is_coefficients
from readers.decode.batch import CpuDecoder, Decoded, Decoder, DecoderName, open_decoder, routes, same_as_promised
from readers.decode.device import DecodeStream, Picture, Ready, Share, Spent
from readers.decode.region import Region
from readers.feed import Feed, for_decoding, read_samples
from readers.loader.crew import Crew
from readers.loader.stats import LoopTimers, ThreadClock
from readers.loader.work import Allocate, Batch, EpochWork, FieldWork
from readers.loop import Ahead
from readers.order.base import Int64s
from readers.reader import Reader
from readers.table import Buffer

# The crew decodes a share of the images that the device could decode (`readers.decode.device`), and all others. It
# leaves to the device JPEGs, and coefficients if the device has a decoder for them. For both it compares the header
# with the index; coefficients it checks completely, because the kernels trust them.


@dataclass(slots=True)
class DeviceWork(EpochWork):
    """The crew's part of a batch that a device finishes.

    decodes: whether the device decodes JPEGs. finishes: whether it decodes coefficients. pinned: whether their bytes
    are copied into pinned memory. share: the crew's share of both.
    """

    decodes: bool = True
    finishes: bool = False
    pinned: bool = False
    share: Share = field(default_factory=Share)
    _kept: Reader = field(init=False, repr=False)
    _routes: tuple[list[bool], dict[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        EpochWork.__post_init__(self)
        # The crew itself may decode from coefficients.
        self._kept = self._images if self.finishes else EpochWork.reader_of_images(self)

    def reader_of_images(self) -> Reader:
        if self.decodes and not self.finishes:
            return self.feed.reader  # the JPEGs below a cache of coefficients
        return EpochWork.reader_of_images(self)

    def tools(self) -> Renderer:
        return _BoxRenderer(self.recipes[0].interpolation, compiled=self.compiled)

    def plan(self, step: int, clock: ThreadClock) -> Batch:
        began = time.perf_counter_ns()
        batch = EpochWork.plan(self, step, clock)
        if self.decodes or self.finishes:
            batch.routed, batch.shared = self._routes
        if self.finishes:
            self._make_room(batch)
        batch.spent.append((time.perf_counter_ns() - began, 0, 0))
        return batch

    def _read_samples(self, positions: Int64s, indices: Int64s) -> Sequence[Buffer | Exception]:
        """The encoded images: for a device that decodes only JPEGs, JPEGs; for the crew, coefficients if cached."""
        if not self.decodes and not self.finishes:
            return EpochWork._read_samples(self, positions, indices)
        able = routes(self.feed.reader.image_info(indices)) if self.decodes else np.zeros(len(indices), np.bool_)
        chosen = self.share.choose(self.feed.seed, self._epoch, positions)
        if self._kept is self._images:
            data = EpochWork._read_samples(self, positions, indices)
            if self.finishes:
                able |= np.array(
                    [not isinstance(payload, Exception) and is_coefficients(payload) for payload in data], np.bool_
                )
            routed, rows = able & ~chosen, np.flatnonzero(able & chosen)
            samples = [data[row] for row in rows.tolist()]
            sizes = [0 if isinstance(sample, Exception) else len(sample) for sample in samples]
        else:
            routed, rows = able & ~chosen, np.flatnonzero(able & chosen)
            by_row: dict[int, Buffer | Exception] = {}
            for reader, some in ((self._images, np.flatnonzero(routed)), (self._kept, np.flatnonzero(~routed))):
                by_row.update(zip(some.tolist(), read_samples(reader, indices[some]), strict=True))
            data = [by_row[row] for row in range(len(indices))]
            sizes = self._images.table.extents(indices[rows]).length.tolist()
        self._routes = routed.tolist(), dict(zip(rows.tolist(), sizes, strict=True))
        return data

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the CPU's images, unflipped; for the others, check that the header agrees with the index."""
        if start not in batch.refused:  # refused rows come back from the device one by one
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
            is_routed = batch.routed and batch.routed[row] and row not in batch.bad_boxes and row not in batch.refused
            if is_routed and not isinstance(data, Exception) and self._accept(batch, row, data):
                continue
            row_began = time.perf_counter_ns()
            places = [images[row : row + 1] for images in batch.images]
            self.render_row(batch, row, places, places, tools)
            if row in batch.shared and not isinstance(data, Exception):
                shared_ns += time.perf_counter_ns() - row_began
                shared_bytes += batch.shared[row]
        batch.spent.append((time.perf_counter_ns() - began, shared_ns, shared_bytes))

    def _make_room(self, batch: Batch) -> None:
        """Allocate one buffer for the coefficients of a batch: threads copy into it, and it is uploaded at once."""
        sizes = {
            row: len(data)
            for row, (data, is_routed) in enumerate(zip(batch.data, batch.routed, strict=True))
            if is_routed and not isinstance(data, Exception) and is_coefficients(data)
        }
        offsets, total = places_of(list(sizes.values()))
        batch.places = dict(zip(sizes, offsets, strict=True))
        batch.staged = torch.empty(total, dtype=torch.uint8, pin_memory=self.pinned)

    def complete(self, batch: Batch) -> None:
        """Nothing: the device has not decoded yet; see `DeviceStage`."""

    def _accept(self, batch: Batch, row: int, data: Buffer) -> bool:
        """Leave an image to the device if it agrees with the index; otherwise the CPU decodes it or reports why not."""
        size = batch.sizes[row]
        if is_coefficients(data):
            try:
                shape = vetted_shape(data, size)
            except BadSampleError:
                return False
            assert batch.staged is not None  # `plan` allocates it if the device decodes coefficients
            at, bytes_ = batch.places[row], np.frombuffer(data, np.uint8, shape.total_bytes)
            batch.staged.numpy()[at : at + len(bytes_)] = bytes_
            batch.shapes[row] = shape
            return True
        header = same_as_promised(data, size)
        if header is not None:
            batch.headers[row] = header
        return header is not None


class _BoxRenderer(Renderer):
    """Renders only the boxes; the device does the rest of a job."""

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


def _box_of(job: Job) -> Job:
    return job._replace(last=job.last._replace(flips=(), steps=()))


# Most decoded pixels on the device at once: 256 photographs of 12 megapixels would take 9 GB.
DECODED_BYTES = 1 << 30

# (nanoseconds of the host's clock, event in the device's stream)
_Moment: TypeAlias = tuple[int, Ready]
# For one view, by row: a picture on the device, and the job that remains.
_Made: TypeAlias = dict[int, tuple[Picture, Job]]


@dataclass
class _Failures:
    """Counts of images given to the device and of failures; first: name and reason of the first failure."""

    given: int = 0
    failed: int = 0
    first: str = ""
    is_known: bool = False

    def warn(self, device: torch.device, stacklevel: int) -> None:
        """Warn of the first failure."""
        if self.first and not self.is_known:
            self.is_known = True
            warnings.warn(
                f"the device {device} failed on {self.failed} of the first {self.given} images "
                f"({100 * self.failed / self.given:.1f} %), which the CPU decodes: {self.first}; the first line of "
                f"print(loader.stats()) shows the share in an epoch",
                stacklevel=stacklevel + 1,
            )


@dataclass(frozen=True)
class DevicePath:
    """How a loader makes batches on its device.

    stream: one for all epochs, because torch reserves memory for each stream.
    coefficients: the decoder of coefficients; None if the crew decodes them, or if the original JPEGs are decoded.
    """

    decoder: Decoder
    renderer: BatchRenderer
    stream: DecodeStream
    ahead: int
    share: Share = field(default_factory=Share)
    coefficients: CoefficientDecoder | None = None
    failures: _Failures = field(default_factory=_Failures)

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
        """The decoders' names in resume tokens."""
        names = [self.decoder.name]
        if self.coefficients is not None:
            names.append(self.coefficients.name)
        if (self.decodes or self.finishes) and self.share.wanted != 0:
            names.append(f"cpu_share={self.share.wanted}")
        return ", ".join(names)

    def unmeasured(self, threads: int) -> DevicePath:
        """The same path for another number of threads, without measurements."""
        return replace(self, share=Share(self.share.wanted, threads), failures=_Failures())

    def work(
        self,
        feed: Feed,
        recipes: tuple[Recipe, ...],
        finish: Finish,
        allocate: Allocate,
        classes: int,
        fields: FieldWork | None,
    ) -> DeviceWork:
        """The crew's work."""
        pinned = self.renderer.device.type == "cuda"
        options = {"decodes": self.decodes, "finishes": self.finishes, "pinned": pinned}
        return DeviceWork(feed, recipes, finish, allocate, classes, fields, share=self.share, **options)

    def stage(self, crew: Crew, work: EpochWork, timers: LoopTimers) -> DeviceStage:
        """The stage that finishes the crew's batches."""
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
    engine: Engine = "auto",
) -> DevicePath:
    """Choose how batches of a reader are made on a device.

    The chosen decoder and engine have been tried on a known JPEG and a one-pixel image. A warning says why another one
    was not chosen. Raises MissingExtraError and DeviceError if a named decoder or engine is not installed or does not
    work, and ValueError.
    """
    if engine == "triton" and (fault := triton_fault(device)):
        raise DeviceError(f"engine='triton' does not work on {device}: {fault}")
    renderer = BatchRenderer(
        device,
        dtype=dtype,
        planar=planar,
        normalize=recipe.normalize,
        engine=engine,
        interpolation=recipe.interpolation,
    )
    if renderer.fault and device.type == "cuda":
        warnings.warn(
            f"torch crops and resizes image by image, which is slower than one kernel: {renderer.fault}; "
            f"engine='torch' silences this warning",
            stacklevel=2,
        )
    stream = DecodeStream(device)
    if decoder == "cpu" or for_decoding(reader) is reader or triton_fault(device):
        return DevicePath(open_decoder(decoder, device), renderer, stream, ahead, share)
    opened = open_decoder(decoder, device, "images that the cache does not keep as coefficients")
    return DevicePath(opened, renderer, stream, ahead, share, CoefficientDecoder(device))


class DeviceStage(Ahead[Batch]):
    """The thread behind a crew.

    Holds no reference to the loader or its iterator, so dropping those stops it.
    """

    def __init__(self, crew: Crew, work: EpochWork, path: DevicePath, timers: LoopTimers) -> None:
        self._crew, self._work, self._path, self._timers = crew, work, path, timers
        self._clock = timers.device_clock("packer-loader-device")
        self._uploads: list[tuple[Ready, Ready]] = []  # of the previous batch, on which the device may still work
        self._before: tuple[Spent, list[tuple[_Moment, _Moment]], _Moment, _Moment] | None = None
        self._stream = path.stream
        super().__init__(self._finish, work.steps, path.ahead, "packer-loader-device")

    def take(self) -> Batch:
        """The next batch; its images are on the device, ready for the current stream of the calling thread."""
        batch = super().take()
        if batch.error is None:  # otherwise some images are not on the device
            DecodeStream.hand_over(batch.images, batch.ready)
        self._path.failures.warn(self._path.renderer.device, stacklevel=4)
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
            self._make_images(batch)
        batch.data, batch.payloads, batch.staged = [], [], None
        self._clock.stop("augment", batch=step)
        self._timers.fill(True)
        return batch

    def _make_images(self, batch: Batch) -> None:
        """Decode and augment a batch, part by part."""
        views: list[list[torch.Tensor]] = [[] for _ in batch.images]
        decodes: list[tuple[_Moment, _Moment]] = []
        parts = _parts(batch)
        for rows in parts:
            with self._stream.decoding():  # waits until nothing queued reads the memory of the previous part
                if not decodes:
                    self._look_back()
                began = self._moment()
                made, failed = self._decode(batch, rows)
                decodes.append((began, self._moment()))
                if failed:
                    self._redo(batch, failed)
                if batch.error is not None:
                    return
                self._render(batch, rows, made, views)
                del made
                if rows is parts[-1]:
                    batch.images = [some[0] if len(some) == 1 else torch.cat(some) for some in views]
                    self._work.combine(batch)
                    batch.ready = self._stream.mark()
                    self._before = _spent(batch), decodes, decodes[0][0], self._moment()

    def _look_back(self) -> None:
        """Account for the previous batch, which the device has finished: time of its uploads and its decoding."""
        copied = sum(self._stream.elapsed(*upload) for upload in self._uploads)
        self._uploads.clear()
        self._clock.lap_device(copied)
        if self._before is not None:
            spent, decodes, began, ended = self._before
            took = {"device": _between(began, ended), "decoded": sum(_between(*both) for both in decodes)}
            self._path.share.add(spent._replace(**took))

    def _moment(self) -> _Moment:
        return time.perf_counter_ns(), self._stream.tick()

    def _decode(self, batch: Batch, rows: range) -> tuple[list[_Made], dict[int, BadSampleError]]:
        """The images of some rows that the device decodes, by view and row; and its errors by row."""
        pictures = self._decode_whole(batch, [row for row in rows if row in batch.headers])
        boxes = self._decode_boxes(batch, [row for row in rows if row in batch.shapes])
        self._clock.lap("decode")
        decoded = (pictures, *boxes)
        failed = {
            row: picture for some in decoded for row, picture in some.items() if isinstance(picture, BadSampleError)
        }
        made: list[_Made] = []
        for jobs, some in zip(batch.jobs, boxes, strict=True):
            whole = {row: (picture, jobs[row]) for row, picture in pictures.items() if isinstance(picture, Picture)}
            parts = {
                row: (picture, _job_of_box(jobs[row], picture))
                for row, picture in some.items()
                if isinstance(picture, Picture)
            }
            made.append({row: both for row, both in (whole | parts).items() if row not in failed})
        self._path.failures.given += len(pictures) + len(boxes[0])
        shared = sum(row in rows for row in batch.shared)
        self._timers.count_decoded(len(rows), len(made[0]), len(failed), shared)
        self._timers.cpu_share = self._path.share.value if self._path.decodes or self._path.finishes else None
        return made, failed

    def _decode_whole(self, batch: Batch, rows: Sequence[int]) -> dict[int, Decoded]:
        """JPEGs by row, the same for all views."""
        decoded = self._path.decoder.decode(
            [batch.data[row] for row in rows],  # type: ignore[misc]  # rows with a header have bytes
            [batch.headers[row] for row in rows],
        )
        return dict(zip(rows, decoded, strict=True))

    def _decode_boxes(self, batch: Batch, rows: Sequence[int]) -> list[dict[int, Decoded]]:
        """Boxes of coefficients, by view and row."""
        decoder = self._path.coefficients
        if decoder is None or not rows:
            return [{} for _ in batch.jobs]
        assert batch.staged is not None  # `rows` have shapes
        batch.staged = batch.staged.to(decoder.device, non_blocking=True)  # with the first part
        uploaded = Uploaded(batch.staged, [batch.places[row] for row in rows], [batch.shapes[row] for row in rows])
        views = (decoder.decode(uploaded, [jobs[row].first.region for row in rows]) for jobs in batch.jobs)
        return [dict(zip(rows, view, strict=True)) for view in views]

    def _redo(self, batch: Batch, failed: Mapping[int, BadSampleError]) -> None:
        """Have the crew decode the images on which the device failed."""
        failures, row = self._path.failures, min(failed)
        index = int(batch.indices[row])
        failures.failed += len(failed)
        failures.first = failures.first or f"sample {index} ({self._work.feed.reader.keys[index]}): {failed[row]}"
        for row in failed:
            batch.headers.pop(row, None)
            batch.shapes.pop(row, None)
        batch.refused.update(failed)
        self._clock.stop("decode", batch=batch.step)
        self._crew.redo(batch, sorted(failed))
        self._clock.start()

    def _render(self, batch: Batch, rows: range, made: Sequence[_Made], views: Sequence[list[torch.Tensor]]) -> None:
        """Add the images of some rows to each view, whether the device or the CPU decoded them."""
        for images, jobs, decoded, view in zip(batch.images, batch.jobs, made, views, strict=True):
            size = (images.shape[2], images.shape[3])
            self._clock.lap("augment")
            begun = self._stream.tick()
            uploaded = self._upload(images, batch, rows)
            self._uploads.append((begun, self._stream.tick()))
            self._clock.lap("copy")
            todo = [decoded.get(row) or (uploaded[row], _rest_of(jobs[row], size)) for row in rows]
            view.append(self._path.renderer.render([picture for picture, _ in todo], [job for _, job in todo], size))

    def _upload(self, images: torch.Tensor, batch: Batch, rows: range) -> dict[int, Picture]:
        """Upload the images of a view that the CPU decoded; in one copy if it decoded all rows."""
        device = self._path.renderer.device
        if not batch.headers and not batch.shapes:
            uploaded = images[rows.start : rows.stop].to(device, non_blocking=True)
            return {row: Picture(image) for row, image in zip(rows, uploaded, strict=True)}
        some = [row for row in rows if row not in batch.headers and row not in batch.shapes]
        return {row: Picture(images[row].to(device, non_blocking=True)) for row in some}


def _parts(batch: Batch) -> list[range]:
    """Split the rows of a batch into parts of at most `DECODED_BYTES` of pixels that the device decodes."""
    parts, start, taken = [], 0, 0
    for row, (height, width) in enumerate(batch.sizes):
        decoded = 3 * height * width if row in batch.headers or row in batch.shapes else 0
        if taken and taken + decoded > DECODED_BYTES:
            parts.append(range(start, row))
            start = row
            taken = 0
        taken += decoded
    return [*parts, range(start, len(batch.sizes))]


def _spent(batch: Batch) -> Spent:
    """The time that the threads spent on a batch; the device's part is not known yet."""
    cpu, shared, shared_bytes = (sum(column) for column in zip(*batch.spent, strict=True))
    rows = (*batch.headers, *batch.shapes)
    device_bytes = sum(len(batch.data[row]) for row in rows)  # type: ignore[arg-type, misc]  # see _decode_whole
    return Spent(len(batch.positions), cpu, shared, shared_bytes, 0, 0, device_bytes)


def _between(start: _Moment, end: _Moment) -> int:
    """Nanoseconds, by the host's or the device's clock, whichever is longer: a call may return before the device is
    done, or only wait for it."""
    return max(end[0] - start[0], DecodeStream.elapsed(start[1], end[1]))


def _job_of_box(job: Job, box: Picture) -> Job:
    """The job on a picture that holds only the region of the first pass."""
    first = job.first._replace(region=Region(0, 0, *box.size))
    return Job(job.last, (first, *job.before[1:])) if job.before else Job(first)


def _rest_of(job: Job, size: tuple[int, int]) -> Job:
    """The job that remains for an image that is cropped and resized."""
    return Job(Pass(Region(0, 0, *size), size, (0, 0), job.last.flips, job.last.steps, size))
