"""The crew's part of batches that a device finishes: which images it decodes itself, and what it checks of the others.

Of the images that the device could decode the crew decodes a share (`readers.decode.device`), and all others. Those
that it leaves are JPEGs, or coefficients where the device has a decoder for these; of both it compares the header with
the index, and of coefficients all that lets a kernel trust them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cache.errors import BadSampleError
from readers.augment.cpu import Renderer
from readers.augment.recipe import Job
from readers.coefficients.device.decoder import places_of, vetted_shape
from readers.coefficients.layout import is_coefficients
from readers.decode.batch import routes, same_as_promised
from readers.decode.device import Share
from readers.feed import read_samples
from readers.loader.timers import ThreadClock
from readers.loader.work import Batch, EpochWork
from readers.order.base import Int64s
from readers.reader import Reader
from readers.sample import Buffer

__all__ = ["DeviceWork"]


@dataclass(slots=True)
class DeviceWork(EpochWork):
    """The crew's part of a batch that a device finishes.

    decodes: whether the device decodes JPEGs. finishes: whether it decodes coefficients. pinned: whether their bytes
    are copied into pinned memory. share: what the crew decodes of both.
    """

    decodes: bool = True
    finishes: bool = False
    pinned: bool = False
    share: Share = field(default_factory=Share)
    _kept: Reader = field(init=False, repr=False)
    _routes: tuple[list[bool], dict[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        EpochWork.__post_init__(self)
        # What the crew decodes itself may be coefficients.
        self._kept = self._images if self.finishes else EpochWork.reader_of_images(self)

    def reader_of_images(self) -> Reader:
        if self.decodes and not self.finishes:
            return self.feed.reader  # JPEGs, from below a cache of coefficients
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
        """For a device that decodes JPEGs alone, JPEGs, and for the crew what a cache keeps of them."""
        if not self.decodes and not self.finishes:
            return EpochWork._read_samples(self, positions, indices)
        able = routes(self.feed.reader.image_info(indices)) if self.decodes else np.zeros(len(indices), np.bool_)
        chosen = self.share.choose(self.feed.seed, self._epoch, positions)
        if self._kept is self._images:
            data = EpochWork._read_samples(self, positions, indices)
            if self.finishes:
                able |= np.array([not isinstance(one, Exception) and is_coefficients(one) for one in data], np.bool_)
            routed, rows = able & ~chosen, np.flatnonzero(able & chosen)
            samples = [data[row] for row in rows.tolist()]
            sizes = [0 if isinstance(sample, Exception) else len(sample) for sample in samples]
        else:
            routed, rows = able & ~chosen, np.flatnonzero(able & chosen)
            found: dict[int, Buffer | Exception] = {}
            for reader, some in ((self._images, np.flatnonzero(routed)), (self._kept, np.flatnonzero(~routed))):
                found.update(zip(some.tolist(), read_samples(reader, indices[some]), strict=True))
            data = [found[row] for row in range(len(indices))]
            sizes = self._images.table.extents(indices[rows]).length.tolist()
        self._routes = routed.tolist(), dict(zip(rows.tolist(), sizes, strict=True))
        return data

    def fill(self, batch: Batch, start: int, stop: int, tools: Renderer) -> None:
        """Decode the CPU's images, unflipped; of the others, check that the header is what the index says."""
        if start not in batch.refused:  # else the rows come back from the device, one by one
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
        """For coefficients that the device decodes: the threads copy them here, and the device takes all at once."""
        sizes = {
            row: len(data)
            for row, (data, is_routed) in enumerate(zip(batch.data, batch.routed, strict=True))
            if is_routed and not isinstance(data, Exception) and is_coefficients(data)
        }
        offsets, total = places_of(list(sizes.values()))
        batch.places = dict(zip(sizes, offsets, strict=True))
        batch.staged = torch.empty(total, dtype=torch.uint8, pin_memory=self.pinned)

    def complete(self, batch: Batch) -> None:
        """The device has still to decode: see `DeviceStage`."""

    def _accept(self, batch: Batch, row: int, data: Buffer) -> bool:
        """Have the device decode an image, if it is what the index says. What is wrong with others the CPU reports."""
        size = batch.sizes[row]
        if is_coefficients(data):
            try:
                shape = vetted_shape(data, size)
            except BadSampleError:
                return False
            assert batch.staged is not None  # as `decodes` and `finishes` are those of the plan
            at, bytes_ = batch.places[row], np.frombuffer(data, np.uint8, shape.total_bytes)
            batch.staged.numpy()[at : at + len(bytes_)] = bytes_
            batch.shapes[row] = shape
            return True
        header = same_as_promised(data, size)
        if header is not None:
            batch.headers[row] = header
        return header is not None


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


def _box_of(job: Job) -> Job:
    return *job[:3], (), (), job[5]
