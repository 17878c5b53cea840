"""Where the pixels of the result come from, for a batch of images at once and before any is decoded.

Any list of crops with one resize among them is: a box of the image, resized, then cropped again. That is all a decoder
and a resizer need, on a CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from readers.augment.draws import Draws
from readers.augment.ops import CenterCrop, Crop, Op, RandomCrop, RandomResizedCrop, Resize, Size
from readers.errors import BadSampleError

__all__ = ["GEOMETRIC", "Boxes", "fixed_size", "plan_boxes"]

GEOMETRIC = (RandomResizedCrop, Resize, CenterCrop, RandomCrop, Crop)
_TRIES = 10
_MAX_REDUCE_LOG2 = 3
_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Boxes:
    """For n images, int64 [n] each: the box (top, left, height, width) of the upright image; what it is resized to
    (resized_height, resized_width); the final crop of that (crop_top, crop_left, out_height, out_width); and reduce,
    the scale 1/reduce at which the box may be decoded. coarse: bool [n], whether its colours may be coarse.

    bad: positions of images that the list cannot be applied to, and why.
    """

    top: _Ints
    left: _Ints
    height: _Ints
    width: _Ints
    resized_height: _Ints
    resized_width: _Ints
    crop_top: _Ints
    crop_left: _Ints
    out_height: _Ints
    out_width: _Ints
    reduce: _Ints
    coarse: npt.NDArray[np.bool_]
    bad: dict[int, BadSampleError]


def fixed_size(ops: Sequence[Op]) -> tuple[int, int] | None:
    """The (height, width) of every result, None where it depends on the image."""
    size: tuple[int, int] | None = None
    for op in ops:
        if isinstance(op, RandomResizedCrop | CenterCrop | RandomCrop):
            size = _sides(op.size)
        elif isinstance(op, Crop):
            size = (op.height, op.width)
        elif isinstance(op, Resize):
            size = None if isinstance(op.size, int) and (size is None or size[0] != size[1]) else _sides(op.size)
    return size


def plan_boxes(ops: Sequence[Op], heights: _Ints, widths: _Ints, draws: Draws) -> Boxes:
    """Apply the geometric ones of `ops` to images of these sizes (int64 [n]). The stream of an op is its number."""
    planner = _Planner(heights, widths, draws)
    for stream, op in enumerate(ops):
        if isinstance(op, RandomResizedCrop):
            planner.random_resized_crop(op, stream)
        elif isinstance(op, Resize):
            planner.resize(op)
        elif isinstance(op, CenterCrop):
            planner.center_crop(op)
        elif isinstance(op, RandomCrop):
            planner.random_crop(op, stream)
        elif isinstance(op, Crop):
            planner.crop(op, *(np.full(len(heights), v) for v in (op.top, op.left, op.height, op.width)))
    return planner.boxes()


class _Planner:
    """Keeps the box so far; crops after the resize gather in `post`."""

    def __init__(self, heights: _Ints, widths: _Ints, draws: Draws) -> None:
        self._heights, self._widths, self._draws = heights, widths, draws
        zeros = np.zeros(len(heights), np.int64)
        self._box = [zeros, zeros, heights, widths]
        self._resized: tuple[_Ints, _Ints] | None = None
        self._post = [zeros, zeros, heights, widths]
        self._aligned = False
        self._bad: dict[int, BadSampleError] = {}

    def _current(self) -> list[_Ints]:
        return self._box if self._resized is None else self._post

    def crop(self, op: Op, top: _Ints, left: _Ints, height: _Ints, width: _Ints) -> None:
        box = self._current()
        for i in np.flatnonzero((top + height > box[2]) | (left + width > box[3]) | (top < 0) | (left < 0)).tolist():
            found = f"{int(box[2][i])} x {int(box[3][i])}"
            self._bad.setdefault(i, BadSampleError(f"{op} does not fit into the {found} pixels it is given"))
        box[:] = [box[0] + top, box[1] + left, height, width]

    def center_crop(self, op: CenterCrop) -> None:
        box, (height, width) = self._current(), _sides(op.size)
        # Halves go to the even neighbour, as in torchvision.
        top, left = np.rint((box[2] - height) / 2), np.rint((box[3] - width) / 2)
        ones = np.ones(len(top), np.int64)
        self.crop(op, top.astype(np.int64), left.astype(np.int64), height * ones, width * ones)

    def random_crop(self, op: RandomCrop, stream: int) -> None:
        box, (height, width) = self._current(), _sides(op.size)
        u = self._draws.uniform(stream, 2)
        top, left = _inside(u[:, 0], box[2] - height), _inside(u[:, 1], box[3] - width)
        ones = np.ones(len(top), np.int64)
        self.crop(op, top, left, height * ones, width * ones)

    def resize(self, op: Resize) -> None:
        _, _, height, width = self._box
        if isinstance(op.size, int):
            short = np.minimum(height, width)
            # Truncated, as torchvision does.
            out_height, out_width = op.size * height // short, op.size * width // short
        else:
            out_height, out_width = (np.full(len(height), side, np.int64) for side in op.size)
        self._resize_to(out_height, out_width)

    def random_resized_crop(self, op: RandomResizedCrop, stream: int) -> None:
        _, _, height, width = self._box
        top, left, box_height, box_width = _random_boxes(op, height, width, self._draws.uniform(stream, 4 * _TRIES))
        self.crop(op, top, left, box_height, box_width)
        self._aligned = True
        out_height, out_width = _sides(op.size)
        ones = np.ones(len(height), np.int64)
        self._resize_to(out_height * ones, out_width * ones)

    def _resize_to(self, height: _Ints, width: _Ints) -> None:
        self._resized = (height, width)
        zeros = np.zeros(len(height), np.int64)
        self._post = [zeros, zeros, height, width]

    def boxes(self) -> Boxes:
        if self._resized is None:
            self._resize_to(self._box[2], self._box[3])
        assert self._resized is not None
        reduce = self._reduce()
        top, left, height, width = self._box
        crop_top, crop_left, out_height, out_width = self._post
        resized_height, resized_width = self._resized
        return Boxes(
            top=top,
            left=left,
            height=height,
            width=width,
            resized_height=resized_height,
            resized_width=resized_width,
            crop_top=crop_top,
            crop_left=crop_left,
            out_height=out_height,
            out_width=out_width,
            reduce=reduce,
            coarse=self._coarse(reduce),
            bad=self._bad,
        )

    def _reduce(self) -> _Ints:
        """The largest scale that leaves the box well larger than what it is resized to, and ends on its edges.

        Scaling by DCT sees other neighbours than an antialiased resize of the full image does. The resize that is left
        hides that: with half as large again, the mean difference is 1.2 of 255; with nothing to spare it is 3.
        """
        assert self._resized is not None
        reduce = np.ones(len(self._heights), np.int64)
        for log2 in range(1, _MAX_REDUCE_LOG2 + 1):
            step = 1 << log2
            top, left, height, width = self._box
            fits = (2 * height >= 3 * step * self._resized[0]) & (2 * width >= 3 * step * self._resized[1])
            # Under 16 pixels a side, libjpeg's scales cannot be told apart by the size of their results.
            fits &= (height >= 16 * step) & (width >= 16 * step)
            if self._aligned:
                self._align(fits, step)
            else:
                fits &= _on_grid(top, height, self._heights, step) & _on_grid(left, width, self._widths, step)
            reduce[fits] = step
        return reduce

    def _coarse(self, reduce: _Ints) -> npt.NDArray[np.bool_]:
        """Where the box is made half as large or less: colours at half the size are still as fine as the result. The
        mean difference is 0.3 of 255 or less."""
        assert self._resized is not None
        _, _, height, width = self._box
        return np.asarray((height >= 2 * reduce * self._resized[0]) & (width >= 2 * reduce * self._resized[1]))

    def _align(self, which: npt.NDArray[np.bool_], step: int) -> None:
        """Move the edges of some boxes outwards to multiples of `step`, or to the edge of the image."""
        for start, length, limit in ((0, 2, self._heights), (1, 3, self._widths)):
            first = self._box[start] // step * step
            last = np.minimum(-(-(self._box[start] + self._box[length]) // step) * step, limit)
            self._box[start] = np.where(which, first, self._box[start])
            self._box[length] = np.where(which, last - first, self._box[length])


def _random_boxes(
    op: RandomResizedCrop, height: _Ints, width: _Ints, u: npt.NDArray[np.float64]
) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Boxes by `u`, uniform [n, 40]: area, ratio, top and left of ten tries; the first that fits counts."""
    low, high = np.log(op.ratio[0]), np.log(op.ratio[1])
    area = (height * width)[:, None] * (op.scale[0] + (op.scale[1] - op.scale[0]) * u[:, :_TRIES])
    ratio = np.exp(low + (high - low) * u[:, _TRIES : 2 * _TRIES])
    tried_width, tried_height = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (tried_width > 0) & (tried_height > 0) & (tried_width <= width[:, None]) & (tried_height <= height[:, None])
    rows, first = np.arange(len(height)), fits.argmax(axis=1)
    found = fits[rows, first]
    box_height, box_width = _largest_boxes(op, height, width)
    box_height = np.where(found, tried_height[rows, first], box_height).astype(np.int64)
    box_width = np.where(found, tried_width[rows, first], box_width).astype(np.int64)
    top = _inside(u[rows, 2 * _TRIES + first], height - box_height)
    left = _inside(u[rows, 3 * _TRIES + first], width - box_width)
    top = np.where(found, top, (height - box_height) // 2)
    left = np.where(found, left, (width - box_width) // 2)
    return top, left, box_height, box_width


def _largest_boxes(op: RandomResizedCrop, height: _Ints, width: _Ints) -> tuple[_Ints, _Ints]:
    """The whole image, less what keeps its ratio within bounds."""
    ratio = width / height
    box_height = np.where(ratio < op.ratio[0], np.rint(width / op.ratio[0]), height)
    box_width = np.where(ratio > op.ratio[1], np.rint(height * op.ratio[1]), width)
    return np.clip(box_height, 1, height).astype(np.int64), np.clip(box_width, 1, width).astype(np.int64)


def _inside(u: npt.NDArray[np.float64], room: _Ints) -> _Ints:
    """A whole number from 0 to `room`, both included."""
    return np.floor(u * (room + 1)).astype(np.int64)


def _on_grid(start: _Ints, length: _Ints, limit: _Ints, step: int) -> npt.NDArray[np.bool_]:
    end = start + length
    return np.asarray((start % step == 0) & ((end % step == 0) | (end == limit)))


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
