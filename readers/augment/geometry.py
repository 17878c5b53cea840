"""What happens to each image of a batch, planned by the ops before any image is decoded.

Any list of crops and flips with one resize among them is: a box of the image, resized, then cropped again, then
flipped. That is all a decoder and a resizer need, on a CPU or a GPU. The ops on pixels follow with their parameters. A
list that crops or resizes what an op on pixels has changed is several such parts, one after another.
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
    """An op of `readers.augment.ops`, as far as plans and jobs use it."""

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
    """What one part does to an image. A named tuple, as each image of each batch has one.

    region: taken from the image.
    resized: what that is resized to, (height, width).
    corner: where `size` is cropped from that, (top, left); may be outside, where it is black.
    flips: along these axes of [1, 3, height, width]: 2 is top and bottom, 3 left and right.
    steps: the pixel ops, with their parameters; whole values come of them.
    size: (height, width) of the result.
    """

    region: Region
    resized: _Pair
    corner: _Pair
    flips: tuple[int, ...]
    steps: Steps
    size: _Pair


class Job(NamedTuple):
    """What happens to one image. before: the parts before the last one, in their order, each of which takes its region
    from what the one before it made."""

    last: Pass
    before: tuple[Pass, ...] = ()

    @property
    def first(self) -> Pass:
        """The part that takes its region from the image."""
        return self.before[0] if self.before else self.last


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
    coarse: _Bools
    bad: dict[int, BadSampleError]


@dataclass(slots=True)
class Plan:
    """What happens to n images. hflip, vflip: bool [n]. steps: the ops on pixels and their parameters, float64 [n, k],
    as `Op.plan` computes them. before: the parts before this one, whose results it takes. compose: what makes one map
    of the moves of a pass, or None (`readers.augment.compose`)."""

    boxes: Boxes
    hflip: _Bools
    vflip: _Bools
    steps: list[Step]
    before: tuple[Plan, ...] = ()
    compose: Callable[[Pass], Pass] | None = None

    def interpolate_colours(self) -> None:
        """Let no box be coarse, see `readers.decode.Region`."""
        for part in (*self.before, self):
            part.boxes.coarse[:] = False

    def jobs(self) -> list[Job]:
        """The plan by image, in Python's own numbers."""
        if not self.before:
            return list(map(Job, self.passes()))
        return list(map(Job, self.passes(), zip(*(part.passes() for part in self.before), strict=True)))

    def passes(self) -> list[Pass]:
        """This part by image, in Python's own numbers."""
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
    """The plan so far of n images, in one part of a list; `Op.plan` calls its methods.

    It keeps the box of each image until it is resized, and from then on the crop of the resized box. Both are of the
    image before its flips, which are made at the end: a crop of a mirrored image is a crop at the mirrored place, which
    is mirrored then, and the antialiased resize treats both sides alike. So that gives the same pixels, to the bit.

    before: the parts before this one. flips_first: flips come before the ops on pixels, wherever they are in the list.
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
        """Rows of the images as they are now, int64 [n]."""
        return self._current()[2]

    @property
    def width(self) -> _Ints:
        """Columns of the images as they are now, int64 [n]."""
        return self._current()[3]

    @staticmethod
    def inside(u: _Floats, room: _Ints) -> _Ints:
        """A whole number from 0 to `room`, both included, for `u` in [0, 1)."""
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
        """Crop the images at these places; those of which a crop does not fit are bad samples.

        over: rows and columns by which a crop may reach beyond the edges; the images are not resized after that.
        """
        if any(over) and self._resized is None:
            self.resize(self.height, self.width)
        box, zeros = self._current(), np.zeros(len(self._heights), np.int64)
        top, left, height, width = (zeros + value for value in (top, left, height, width))
        wrong = (top + height > box[2] + over[0]) | (left + width > box[3] + over[1])
        wrong |= (top < -over[0]) | (left < -over[1])
        for i in np.flatnonzero(wrong).tolist():
            found = f"{int(box[2][i])} x {int(box[3][i])}"
            self._bad.setdefault(i, BadSampleError(f"{op} does not fit into the {found} pixels it is given"))
        if self._flipped:
            top = np.where(self._flips[2], box[2] - top - height, top)
            left = np.where(self._flips[3], box[3] - left - width, left)
        box[:] = [box[0] + top, box[1] + left, height, width]

    def resize(self, height: _Ints | int, width: _Ints | int, *, align: bool = False) -> None:
        """Resize what the images are now. align: the box may grow by some pixels to be decoded at a smaller scale."""
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
        """Have `op.apply` change the pixels of the images, by these parameters, float64 [n, k]."""
        self._steps.append((op, parameters))

    def plan(self) -> Plan:
        return Plan(self._boxes(), self._flips[3], self._flips[2], self._steps, self._before, self._compose)

    def _current(self) -> list[_Ints]:
        return self._box if self._resized is None else self._window

    def _boxes(self) -> Boxes:
        if self._resized is None:
            self.resize(self._box[2], self._box[3])
        assert self._resized is not None
        # What a part before this one made is not decoded, so that nothing of it can be decoded at a smaller scale.
        reduce = np.ones(len(self._heights), np.int64) if self._before else self._reduce(self._resized)
        (top, left, height, width), (rows, columns) = self._box, self._resized
        # Where the box is made half as large or less, colours at half the size are still as fine as the result.
        # The mean difference is 0.3 of 255 or less.
        coarse = (height >= 2 * reduce * rows) & (width >= 2 * reduce * columns) & (not self._before)
        window = self._window[0], self._window[1], self._window[2], self._window[3]
        return Boxes(top, left, height, width, rows, columns, *window, reduce, coarse, self._bad)

    def _reduce(self, resized: tuple[_Ints, _Ints]) -> _Ints:
        """The largest scale that leaves the box well larger than what it is resized to, and ends on its edges.

        Scaling by DCT sees other neighbours than an antialiased resize of the full image does. The remaining resize
        hides that: with half as large again, the mean difference is 1.2 of 255; without a margin it is 3.
        """
        reduce = np.ones(len(self._heights), np.int64)
        for log2 in range(1, _MAX_REDUCE_LOG2 + 1):
            step = 1 << log2
            top, left, height, width = self._box
            fits = (2 * height >= 3 * step * resized[0]) & (2 * width >= 3 * step * resized[1])
            # Under 16 pixels a side, libjpeg's scales cannot be distinguished by the size of their results.
            fits &= (height >= 16 * step) & (width >= 16 * step)
            if self._align:
                self._align_boxes(fits, step)
            else:
                fits &= _on_grid(top, height, self._heights, step) & _on_grid(left, width, self._widths, step)
            reduce[fits] = step
        return reduce

    def _align_boxes(self, which: _Bools, step: int) -> None:
        """Move the edges of some boxes outwards to multiples of `step`, or to the edge of the image."""
        for start, length, limit in ((0, 2, self._heights), (1, 3, self._widths)):
            first = self._box[start] // step * step
            last = np.minimum(-(-(self._box[start] + self._box[length]) // step) * step, limit)
            self._box[start] = np.where(which, first, self._box[start])
            self._box[length] = np.where(which, last - first, self._box[length])


def _on_grid(start: _Ints, length: _Ints, limit: _Ints, step: int) -> _Bools:
    end = start + length
    return np.asarray((start % step == 0) & ((end % step == 0) | (end == limit)))
