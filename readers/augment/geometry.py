"""Plans: the geometry and the pixel ops for each image of a batch, computed before any image is decoded.

Any list of crops and flips with one resize among them reduces to: a box of the image, resized, then cropped again, then
flipped. A decoder and a resizer need no more than that, on a CPU or a GPU. The ops on pixels follow, with their
parameters. A list with a crop or resize after an op on pixels is several of these parts, one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.decode.region import Region

_MAX_REDUCE_LOG2 = 3
_FLIP_AXES = ((), (3,), (2,), (2, 3))
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Floats = npt.NDArray[np.float64]


class Change(Protocol):
    """The interface of an op of `readers.augment.ops` that plans and jobs use."""

    flip_axis: ClassVar[int]

    def apply(self, images: Any, rows: Any) -> Any: ...

    @property
    def sampling(self) -> Any: ...

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Any]: ...

    def dali_parameters(self, parameters: _Floats, heights: _Floats, widths: _Floats) -> _Floats: ...


Step: TypeAlias = tuple[Change, _Floats]


_Pair: TypeAlias = tuple[int, int]
Steps: TypeAlias = tuple[tuple[Change, list[float]], ...]


class Pass(NamedTuple):
    """One part of a plan, for one image. A named tuple for speed, because each image of each batch has one.

    region: the box taken from the image.
    resized: (height, width) to which the box is resized.
    corner: (top, left) of the crop of `size` from the resized box; pixels outside the box are black.
    flips: the flipped axes of [1, 3, height, width]: 2 is top and bottom, 3 left and right.
    steps: the pixel ops, with their parameters; their result is rounded to whole values.
    size: (height, width) of the result.
    """

    region: Region
    resized: _Pair
    corner: _Pair
    flips: tuple[int, ...]
    steps: Steps
    size: _Pair


class Job(NamedTuple):
    """The whole plan for one image: `before`, then `last`. before: the earlier parts in order; each part takes its
    region from the result of the one before it."""

    last: Pass
    before: tuple[Pass, ...] = ()

    @property
    def first(self) -> Pass:
        """The first part, which takes its region from the image."""
        return self.before[0] if self.before else self.last


@dataclass(slots=True)
class Boxes:
    """The boxes of n images, int64 [n] each.

    top, left, height, width: the box of the upright image. resized_height, resized_width: the size to which the box is
    resized. crop_top, crop_left, out_height, out_width: the final crop of the resized box. reduce: the box may be
    decoded at the scale 1/reduce. coarse: bool [n], whether chroma may be decoded without interpolation.

    bad: for each position of an image that the ops cannot be applied to, the error.
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
    coarse: _Bools
    bad: dict[int, BadSampleError]


@dataclass(slots=True)
class Plan:
    """One part of the plan for n images, with the parts before it.

    hflip, vflip: bool [n], left and right flipped, top and bottom flipped. steps: the ops on pixels and the parameters,
    float64 [n, k], that `Op.plan` computed. before: the earlier parts; this one takes the result of the last of them.
    compose: the function that merges the moves of a pass into one map (`readers.augment.compose`), or None.
    """

    boxes: Boxes
    hflip: _Bools
    vflip: _Bools
    steps: list[Step]
    before: tuple[Plan, ...] = ()
    compose: Callable[[Pass], Pass] | None = None

    def interpolate_colours(self) -> None:
        """Set `coarse` to False for all boxes; see `readers.decode.Region`."""
        for part in (*self.before, self):
            part.boxes.coarse[:] = False

    def jobs(self) -> list[Job]:
        """The plan as one job per image, with Python's int and float instead of arrays."""
        if not self.before:
            return list(map(Job, self.passes()))
        return list(map(Job, self.passes(), zip(*(part.passes() for part in self.before), strict=True)))

    def passes(self) -> list[Pass]:
        """This part as one pass per image, with Python's int and float instead of arrays."""
        b = self.boxes
        columns = (b.top, b.left, b.height, b.width, b.reduce, b.coarse)
        regions = map(Region, *(column.tolist() for column in columns))
        resized = zip(b.resized_height.tolist(), b.resized_width.tolist(), strict=True)
        corners = zip(b.crop_top.tolist(), b.crop_left.tolist(), strict=True)
        flips = [_FLIP_AXES[code] for code in (2 * self.vflip + self.hflip).tolist()]
        steps: Iterable[Steps] = itertools.repeat(())
        if self.steps:
            ops = [op for op, _ in self.steps]
            parameters = zip(*(values.tolist() for _, values in self.steps), strict=True)
            steps = [tuple(zip(ops, row, strict=True)) for row in parameters]
        sizes = zip(b.out_height.tolist(), b.out_width.tolist(), strict=True)
        made = map(Pass, regions, resized, corners, flips, steps, sizes)
        return list(made if self.compose is None or not self.steps else map(self.compose, made))


class Planner:
    """Builds one part of the plan of n images; `Op.plan` calls its methods.

    The planner has the box of each image until the resize, and after it the crop of the resized box. Both are in
    coordinates before the flips, which come last. The pixels are the same, to the bit: a crop of a flipped image equals
    the flip of a crop at the mirrored place, and the antialiased resize is symmetric.

    before: the earlier parts. flips_first: put flips before all ops on pixels, wherever they are in the list.
    compose: as for `Plan`.
    """

    def __init__(
        self,
        heights: _Ints,
        widths: _Ints,
        before: tuple[Plan, ...] = (),
        *,
        flips_first: bool = True,
        compose: Callable[[Pass], Pass] | None = None,
    ) -> None:
        self._compose = compose
        self._heights, self._widths = heights, widths
        self._before, self._flips_first = before, flips_first
        zeros = np.zeros(len(heights), np.int64)
        self._box = [zeros, zeros, heights, widths]
        self._resized: tuple[_Ints, _Ints] | None = None
        self._window = [zeros, zeros, heights, widths]
        self._align = False
        self._bad: dict[int, BadSampleError] = dict(before[-1].boxes.bad) if before else {}
        self._flipped = False
        self._flips = {axis: np.zeros(len(heights), np.bool_) for axis in (2, 3)}
        self._steps: list[Step] = []

    @property
    def height(self) -> _Ints:
        """Heights of the images after the ops so far, int64 [n]."""
        return self._current()[2]

    @property
    def width(self) -> _Ints:
        """Widths of the images after the ops so far, int64 [n]."""
        return self._current()[3]

    @staticmethod
    def inside(u: _Floats, room: _Ints) -> _Ints:
        """Integers from 0 to `room`, inclusive, for uniform numbers `u` in [0, 1)."""
        return np.floor(u * (room + 1)).astype(np.int64)

    def crop(
        self,
        op: Change,
        top: _Ints | int,
        left: _Ints | int,
        height: _Ints | int,
        width: _Ints | int,
        over: tuple[int, int] = (0, 0),
    ) -> None:
        """Crop the images; an image that is too small for its crop becomes a bad sample.

        over: rows and columns by which a crop may extend beyond the edges; then no resize may follow in this part.
        """
        if any(over) and self._resized is None:
            self.resize(self.height, self.width)
        box, zeros = self._current(), np.zeros(len(self._heights), np.int64)
        top, left, height, width = (zeros + value for value in (top, left, height, width))
        wrong = (top + height > box[2] + over[0]) | (left + width > box[3] + over[1])
        wrong |= (top < -over[0]) | (left < -over[1])
        for i in np.flatnonzero(wrong).tolist():
            size = f"{int(box[2][i])} x {int(box[3][i])}"
            self._bad.setdefault(i, BadSampleError(f"{op} does not fit into the {size} pixels it is given"))
        if self._flipped:
            top = np.where(self._flips[2], box[2] - top - height, top)
            left = np.where(self._flips[3], box[3] - left - width, left)
        box[:] = [box[0] + top, box[1] + left, height, width]

    def resize(self, height: _Ints | int, width: _Ints | int, *, align: bool = False) -> None:
        """Resize the images, after the ops so far. align: let a box grow by a few pixels if it can then be decoded at
        a smaller scale."""
        zeros = np.zeros(len(self._heights), np.int64)
        self._resized = (zeros + height, zeros + width)
        self._window = [zeros, zeros, *self._resized]
        self._align = align

    def flip(self, op: Change, which: _Bools) -> None:
        """Flip some of the images (bool [n]) along the axis of `op`."""
        if self._steps and not self._flips_first:
            self.step(op, which[:, None].astype(np.float64))
        else:
            self._flips[op.flip_axis] = self._flips[op.flip_axis] ^ which
            self._flipped = True

    def step(self, op: Change, parameters: _Floats) -> None:
        """Append an op on pixels. parameters: for `op.apply`, float64 [n, k]."""
        self._steps.append((op, parameters))

    def plan(self) -> Plan:
        return Plan(self._boxes(), self._flips[3], self._flips[2], self._steps, self._before, self._compose)

    def _current(self) -> list[_Ints]:
        return self._box if self._resized is None else self._window

    def _boxes(self) -> Boxes:
        if self._resized is None:
            self.resize(self._box[2], self._box[3])
        assert self._resized is not None
        # The result of an earlier part is not decoded, so the scale of decoding does not apply to it.
        reduce = np.ones(len(self._heights), np.int64) if self._before else self._reduce(self._resized)
        (top, left, height, width), (rows, columns) = self._box, self._resized
        # If the resize halves the box or more, chroma of half the resolution is still as fine as the result. The mean
        # difference is at most 0.3 of 255.
        coarse = (height >= 2 * reduce * rows) & (width >= 2 * reduce * columns) & (not self._before)
        window = self._window[0], self._window[1], self._window[2], self._window[3]
        return Boxes(top, left, height, width, rows, columns, *window, reduce, coarse, self._bad)

    def _reduce(self, resized: tuple[_Ints, _Ints]) -> _Ints:
        """The largest reduction, 1 to 8, that leaves the box at least 1.5 times as large as its resized size, with its
        edges on multiples of the reduction or at the edge of the image.

        Scaling by DCT uses other neighbours than an antialiased resize of the full image. The remaining resize hides
        most of the difference: with the margin of 1.5 the mean difference is 1.2 of 255, without a margin it is 3.
        """
        reduce = np.ones(len(self._heights), np.int64)
        for log2 in range(1, _MAX_REDUCE_LOG2 + 1):
            step = 1 << log2
            top, left, height, width = self._box
            fits = (2 * height >= 3 * step * resized[0]) & (2 * width >= 3 * step * resized[1])
            # Below 16 pixels per side, different scales of libjpeg can give results of the same size.
            fits &= (height >= 16 * step) & (width >= 16 * step)
            if self._align:
                self._align_boxes(fits, step)
            else:
                fits &= _on_grid(top, height, self._heights, step) & _on_grid(left, width, self._widths, step)
            reduce[fits] = step
        return reduce

    def _align_boxes(self, which: _Bools, step: int) -> None:
        """Move the edges of the chosen boxes outwards to multiples of `step`, or to the edge of the image."""
        for start, length, limit in ((0, 2, self._heights), (1, 3, self._widths)):
            first = self._box[start] // step * step
            last = np.minimum(-(-(self._box[start] + self._box[length]) // step) * step, limit)
            self._box[start] = np.where(which, first, self._box[start])
            self._box[length] = np.where(which, last - first, self._box[length])


def _on_grid(start: _Ints, length: _Ints, limit: _Ints, step: int) -> _Bools:
    end = start + length
    return np.asarray((start % step == 0) & ((end % step == 0) | (end == limit)))
