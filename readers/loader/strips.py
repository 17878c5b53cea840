"""Read only the rows of JPEGs that the boxes of a batch need, where the index says where rows begin (`readers.rows`).

A strip is a JPEG of some rows, so its box lies higher and its image is less high than planned; its pixels are the same.
Images that are turned by their EXIF orientation are read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from readers.augment.recipe import Job
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Reader
from readers.sample import Buffer

if TYPE_CHECKING:
    from readers.rows.reading import Span

__all__ = ["Jobs", "StripReader", "open_strips"]

Jobs = list[list[Job]]  # by view, of each sample


def open_strips(reader: Reader) -> StripReader | None:
    """What reads strips; None where whole images are read."""
    table = reader.table
    has_rows = table.columns.jpeg_rows() is not None and not table.forms and table.has_headers
    return StripReader(reader) if has_rows and reader.store.of_parts() is not None else None


class StripReader:
    """Reads strips of the images of a reader; threads may share it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, indices: Int64s, jobs: Jobs, sizes: list[tuple[int, int]]) -> list[Buffer | Exception]:
        """A strip or an image of each sample, or why there is none; `jobs` and `sizes` are changed to fit."""
        try:
            return self._read(indices, jobs, sizes, range(len(indices)))
        except SAMPLE_ERRORS:
            found: list[Buffer | Exception] = []
            for row in range(len(indices)):
                try:
                    found += self._read(indices, jobs, sizes, [row])
                except SAMPLE_ERRORS as error:
                    found.append(error)
            return found

    def announce(self, indices: Int64s, jobs: Jobs) -> None:
        """Announce what `read` will read."""
        from readers.rows.reading import announce_strips

        spans = self._spans(indices, jobs, range(len(indices)))
        announce_strips(self._reader.table, self._reader.store, indices[[*spans]], list(spans.values()))
        self._reader.prefetch(indices[[row for row in range(len(indices)) if row not in spans]])

    def _read(
        self, indices: Int64s, jobs: Jobs, sizes: list[tuple[int, int]], rows: Sequence[int]
    ) -> list[Buffer | Exception]:
        from readers.rows.reading import read_strips

        reader, found = self._reader, dict[int, Buffer | Exception]()
        spans = self._spans(indices, jobs, rows)
        strips = read_strips(reader.table, reader.store, indices[[*spans]], list(spans.values()), reader.read_many)
        for row, strip in zip(spans, strips, strict=True):
            found[row] = strip.data
            if strip.height:
                sizes[row] = (strip.height, sizes[row][1])
                for view in jobs:
                    view[row] = _moved(view[row], strip.first_row)
        others = [row for row in rows if row not in found]
        found |= zip(others, reader.read_many(indices[others]), strict=True)
        return [found[row] for row in rows]

    def _spans(self, indices: Int64s, jobs: Jobs, rows: Sequence[int]) -> dict[int, Span]:
        """What all views of a sample need of it, for those of some rows whose images are upright as they are stored."""
        from readers.rows.reading import Span

        upright, found = (self._reader.image_info(indices).orientation == 1).tolist(), {}
        for row in rows:
            boxes = [view[row][5][0][0] if view[row][5] else view[row][0] for view in jobs]
            span = Span(min(box[0] for box in boxes), max(box[0] + box[2] for box in boxes))
            if upright[row] and 0 <= span.top < span.bottom:
                found[row] = span
        return found


def _moved(job: Job, rows: int) -> Job:
    """A job on an image that lacks its first rows."""
    region, resized, corner, flips, steps, earlier = job
    if not earlier:
        return (_above(region, rows), resized, corner, flips, steps, earlier)
    first, *rest = earlier
    return (region, resized, corner, flips, steps, ((_above(first[0], rows), *first[1:]), *rest))


def _above(region: tuple[int, int, int, int, int, bool], rows: int) -> tuple[int, int, int, int, int, bool]:
    top, *others = region
    return (top - rows, *others)  # type: ignore[return-value]
