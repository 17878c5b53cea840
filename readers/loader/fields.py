"""The other fields of the images of a batch: read with them, and decoded and moved row by row by the same threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from readers.augment.recipe import Job
from readers.batch import Fields, Payloads
from readers.collate import stack_masks, stack_targets, to_tensor
from readers.feed import Feed
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Reader

if TYPE_CHECKING:
    from readers.loader.work import Batch

__all__ = ["FieldWork"]


class FieldWork:
    """Reads and decodes the fields of `reader`, which are tensors then.

    Where there are several views, fields that follow the image are tuples, with a value for each view.
    """

    def __init__(self, fields: Fields, reader: Reader) -> None:
        self._fields, self._reader = fields, reader
        self._moving = frozenset(fields.moving)

    def read(self, indices: Int64s) -> list[Payloads]:
        """The bytes of some rows."""
        return self._fields.read(self._reader, indices)

    def fill(self, batch: Batch, start: int, stop: int) -> None:
        """Decode rows [start, stop). One of which that fails gets the error in place of its image, which is then
        skipped or replaced."""
        shapes = [(images.shape[2], images.shape[3]) for images in batch.images]
        for row in range(start, stop):
            if isinstance(batch.data[row], Exception) or row in batch.bad_boxes:
                continue
            jobs = [of_view[row] for of_view in batch.jobs]
            try:
                batch.values[row] = self.decode(
                    int(batch.indices[row]), batch.payloads[row], batch.sizes[row], jobs, shapes
                )
            except SAMPLE_ERRORS as error:
                batch.data[row] = error

    def substitute(
        self, index: int, size: tuple[int, int], jobs: Sequence[Job], shapes: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """The values of a sample that takes the place of another. Raises what reading or decoding it does."""
        (payloads,) = self.read(np.array([index], np.int64))
        return self.decode(index, payloads, size, jobs, shapes)

    def decode(
        self,
        index: int,
        payloads: Payloads,
        size: tuple[int, int],
        jobs: Sequence[Job],
        shapes: Sequence[tuple[int, int]],
    ) -> dict[str, Any]:
        """The values of one sample. size: (height, width) of its upright image as it is read. jobs, shapes: what
        happens to it and the (height, width) of the result, by view."""
        views = []
        for job, shape in zip(jobs, shapes, strict=True):
            placement = self._fields.placement(self._reader, index, job, size, shape)
            views.append(self._tensors(self._fields.decode(payloads, placement)))
        if len(views) == 1:
            return views[0]
        return {n: tuple(v[n] for v in views) if n in self._moving else views[0][n] for n in self._fields.stored}

    def fill_alone(self, batch: Batch, feed: Feed) -> None:
        """All of a batch without images: nothing moves, and masks differ in size."""
        values = []
        for row, payloads in enumerate(self.read(batch.indices)):
            try:
                values.append(self._tensors(self._fields.decode(payloads)))
            except SAMPLE_ERRORS as error:
                position = int(batch.positions[row])
                batch.bad.append(feed.bad(int(batch.indices[row]), position, error))
                if feed.options.on_error == "skip":
                    batch.skipped.append(row)
                    continue
                taken, other = feed.substitute(feed.start.epoch, position, error, self._alone)
                batch.indices[row] = taken
                values.append(other)
        batch.indices = np.delete(batch.indices, batch.skipped)
        columns = {name: [some[name] for some in values] for name in self._fields.stored}
        batch.columns = {
            name: self._stacked(name, column) if name in self._fields.targets else column
            for name, column in columns.items()
        }

    def _alone(self, index: int) -> dict[str, Any]:
        (payloads,) = self.read(np.array([index], np.int64))
        return self._tensors(self._fields.decode(payloads))

    def collate(self, values: Sequence[dict[str, Any]], views: int) -> dict[str, Any]:
        """What a batch has of each field."""
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
