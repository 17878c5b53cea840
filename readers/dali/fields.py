"""The other fields of the batches of a DALI pipeline: decoded by threads beside it, and moved as it moves the images.

DALI gets images alone: it decodes neither palettes nor masks of 16 or 32 bits, and has no operator for boxes that are
left out with the labels that belong to them. So the values are those of `ImageLoader` to the bit, made from the plan
whose numbers the pipeline gets with the images. They are made ahead, as batches are.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from readers.augment.geometry import Job
from readers.batch import Fields
from readers.dali.backend import Output
from readers.dali.source import Source
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS
from readers.sample import upright_sides

__all__ = ["BadField", "FieldBatches", "collated"]

_ROWS_AT_ONCE = 8
_Values = dict[str, Any]


class BadField(Exception):
    """A field of a sample is bad: of this row, at this position of its epoch."""

    def __init__(self, row: int, position: int, error: Exception) -> None:
        super().__init__(str(error))
        self.row, self.position, self.error = row, position, error


class FieldBatches:
    """The values of the stored fields of batches that a pipeline makes one after the other.

    ahead: batches that are made before they are asked for.
    """

    def __init__(self, fields: Fields, threads: int, ahead: int) -> None:
        self._fields, self._ahead = fields, ahead
        self._threads = ThreadPoolExecutor(threads, "packer-fields")
        self._source: Source | None = None
        self._asked: dict[tuple[int, int], list[Future[list[_Values | Exception]]]] = {}

    def take(self, source: Source, epoch: int, step: int, returned: Int64s | None) -> list[_Values]:
        """The values of a batch by sample. returned: its rows as the pipeline returned them, None where it returned
        those that were planned. Raises BadField, and what reading raises that is no error of a sample."""
        if source is not self._source:
            self._source, self._asked = source, {}
        for number in range(step, min(step + 1 + self._ahead, source.batches(epoch))):
            if (epoch, number) not in self._asked:
                self._asked[epoch, number] = self._ask(source, epoch, *source.samples_of(epoch, number))
        positions, rows = source.samples_of(epoch, step)
        values = [one for part in self._asked.pop((epoch, step)) for one in part.result()]
        if returned is not None:
            kept = source.kept(epoch, step, returned)
            positions, rows, values = positions[kept], rows[kept], [values[i] for i in kept.tolist()]
            for i in np.flatnonzero(rows != returned).tolist():
                (values[i],) = self._make(source, epoch, positions[i : i + 1], returned[i : i + 1])
            rows = returned
        good: list[_Values] = []
        for value, row, position in zip(values, rows.tolist(), positions.tolist(), strict=True):
            if isinstance(value, Exception):
                raise BadField(row, position, value)
            good.append(value)
        return good

    def stop(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self, source: Source, epoch: int, positions: Int64s, rows: Int64s
    ) -> list[Future[list[_Values | Exception]]]:
        parts = [slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(rows), _ROWS_AT_ONCE)]
        return [self._threads.submit(self._make, source, epoch, positions[part], rows[part]) for part in parts]

    def _make(self, source: Source, epoch: int, positions: Int64s, rows: Int64s) -> list[_Values | Exception]:
        """The values of some samples, or why one has none."""
        reader, fields = source.feed.reader, self._fields
        moved: list[tuple[Job, tuple[int, int], tuple[int, int]] | tuple[()]] = [()] * len(rows)
        if fields.moving:
            info, plan = source.plan(epoch, positions, rows)
            if info is not None and plan is not None:
                sizes, boxes = zip(*(some.tolist() for some in upright_sides(info)), strict=True), plan.boxes
                results = zip(boxes.out_height.tolist(), boxes.out_width.tolist(), strict=True)
                moved = list(zip(plan.jobs(), sizes, results, strict=True))
        made: list[_Values | Exception] = []
        for row, payloads, how in zip(rows.tolist(), fields.read(reader, rows), moved, strict=True):
            try:
                made.append(fields.decode(payloads, fields.placement(reader, row, *how)))
            except SAMPLE_ERRORS as error:
                made.append(error)
        return made


def collated(fields: Fields, values: Sequence[_Values], output: Output) -> dict[str, Any]:
    """What a batch has of each field: masks in one array where every sample of the set has one; otherwise lists."""
    columns = {name: [some[name] for some in values] for name in fields.stored}
    if output == "torch":
        from readers.collate import stack_masks, to_tensor

        columns = {name: [to_tensor(fields.kind(name), value) for value in columns[name]] for name in columns}
        return {n: stack_masks(some) if n in fields.stacked and some else some for n, some in columns.items()}
    return {n: np.stack(_alike(some)) if n in fields.stacked and some else some for n, some in columns.items()}


def _alike(masks: Sequence[Any]) -> Sequence[Any]:
    """Masks in one type that holds them all, as `readers.collate` has them: uint8 or int32."""
    return masks if all(mask.dtype == np.uint8 for mask in masks) else [mask.astype(np.int32) for mask in masks]
