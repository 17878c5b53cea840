"""Where the pixels of an image end up: what moves with it, by the job that its pixels go through.

A placement is a row of affine maps, one for each crop with its resize, flip, and op that moves pixels
(`Op.moves`), and the size of the image behind each of them: what leaves an image on the way does not come back, also
where a later step turns back to where it was. Coordinates are (x, y) in pixels from the upper left corner of the
upright image; the centre of its first pixel is at (0.5, 0.5).

    mask    each pixel of the result takes the value of the one pixel of the mask that it comes from: all maps are
            applied at once, and nothing is interpolated
    boxes   the smallest upright boxes around what is still visible of them
    points  moved, also beyond the edges
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.augment.geometry import Job, Pass
from readers.augment.ops.base import Matrix, mirror

__all__ = ["Placement"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_IDENTITY: Matrix = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


class _Step(NamedTuple):
    """A map of coordinates, its inverse, and the (height, width) of the image after it.

    (a, b, c, d, e, f) maps (x, y) to (a x + b y + c, d x + e y + f).
    """

    forward: Matrix
    backward: Matrix
    size: tuple[int, int]

    @property
    def is_upright(self) -> bool:
        """Whether rows stay rows."""
        return not self.forward[1] and not self.forward[3]


class Placement:
    """What happens to where things are in one image.

    size: (height, width) of the upright image.
    passes: what is done to it, in turn (`readers.augment.geometry`).
    """

    def __init__(self, size: tuple[int, int], passes: Iterable[Pass]) -> None:
        self.size = size
        sides, steps = size, list[_Step]()
        for step in (step for some in passes for step in _steps(some)):
            if step.forward != _IDENTITY or step.size != sides:
                steps.append(step)
            sides = step.size
        self._steps, self._result = tuple(steps), sides
        self._is_upright = all(step.is_upright for step in self._steps)

    @classmethod
    def of_job(cls, size: tuple[int, int], job: Job, result: tuple[int, int], before: Sequence[Pass] = ()) -> Placement:
        """What a job does. result: (height, width) of what it makes. before: what was done to the image before it."""
        return cls(size, (*before, *job[5], (*job[:5], result)))

    def points(self, points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Points, [..., 2], at their new places, which may be outside."""
        moved = points.astype(np.float64)
        for step in self._steps:
            moved = _map(step.forward, moved)
        return moved.astype(np.float32)

    def boxes(self, boxes: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], _Floats]:
        """(boxes, shares): boxes [k, 4] around what can be seen of the given ones, and which share of its area that is.

        A share of 0 says that nothing is visible; such a box has no area.
        """
        exact = boxes.astype(np.float64)
        if not self._steps or not len(boxes):
            return boxes, np.ones(len(boxes))
        moved, shares = self._upright_boxes(exact) if self._is_upright else self._turned_boxes(exact)
        return moved.astype(np.float32), shares

    def mask(self, mask: npt.NDArray[Any], fill: int = 0) -> npt.NDArray[Any]:
        """The mask of the result. mask: [h, w], of the size of the image or of its proportions. fill: what is beyond
        the edges of the image. Raises BadSampleError for a mask of other proportions."""
        self._check(mask.shape)
        if not self._steps and mask.shape == self._result:
            return mask
        ys, xs = (np.arange(side) + 0.5 for side in self._result)
        if not self._is_upright:
            ys, xs = np.meshgrid(ys, xs, indexing="ij")
        inside_y, inside_x = np.ones(ys.shape, np.bool_), np.ones(xs.shape, np.bool_)
        sizes = [self.size, *(step.size for step in self._steps)]
        for step, (height, width) in zip(reversed(self._steps), reversed(sizes[:-1]), strict=True):
            a, b, c, d, e, f = step.backward
            xs, ys = (a * xs + c, e * ys + f) if self._is_upright else (a * xs + b * ys + c, d * xs + e * ys + f)
            inside_x &= (xs >= 0) & (xs < width)
            inside_y &= (ys >= 0) & (ys < height)
        rows, columns = (
            np.clip(np.floor(places * (held / side)), 0, held - 1).astype(np.intp)
            for places, held, side in zip((ys, xs), mask.shape, self.size, strict=True)
        )
        if self._is_upright:
            taken = mask[rows[:, None], columns]
            inside = True if inside_x.all() and inside_y.all() else inside_y[:, None] & inside_x
        else:
            taken, inside = mask[rows, columns], inside_x & inside_y
        return taken if inside is True else np.where(inside, taken, np.asarray(fill, mask.dtype))

    def _check(self, shape: tuple[int, ...]) -> None:
        (rows, columns), (height, width) = shape, self.size
        slack = max(1, columns / width, rows / height)  # a pixel of either: sizes are rounded
        if abs(columns * height / width - rows) > slack and abs(rows * width / height - columns) > slack:
            raise BadSampleError(
                f"has {rows} x {columns} pixels, the upright image {height} x {width}: a mask covers its image"
            )

    def _upright_boxes(self, boxes: _Floats) -> tuple[_Floats, _Floats]:
        """The two sides apart: each is an interval, mapped and cut."""
        low, high = boxes[:, :2].copy(), boxes[:, 2:].copy()
        length, shares = high - low, np.ones_like(low)
        _cut(low, high, shares, self.size)
        for step in self._steps:
            scale, shift = np.array(step.forward)[[0, 4]], np.array(step.forward)[[2, 5]]
            ends = low * scale + shift, high * scale + shift
            low, high, length = np.minimum(*ends), np.maximum(*ends), length * np.abs(scale)
            _cut(low, high, shares, step.size)
        shares *= np.where(length > 0, (high - low) / np.where(length > 0, length, 1), 1)
        return np.concatenate((low, high), axis=1), np.minimum(shares, 1).prod(axis=1)

    def _turned_boxes(self, boxes: _Floats) -> tuple[_Floats, _Floats]:
        """As polygons: the bounds of a box that was turned and cut are less than those of its bounds."""
        found, shares = np.zeros_like(boxes), np.zeros(len(boxes))
        maps = (step.forward for step in self._steps)
        growth = math.prod(abs(a * e - b * d) for a, b, _, d, e, _ in maps)
        for row, (x0, y0, x1, y1) in enumerate(boxes.tolist()):
            polygon = _inside(np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)]), self.size)
            for step in self._steps:
                polygon = _inside(_map(step.forward, polygon), step.size)
            if len(polygon):
                area = (x1 - x0) * (y1 - y0) * growth
                found[row] = np.clip((polygon.min(axis=0), polygon.max(axis=0)), 0, self._result[::-1]).ravel()
                shares[row] = min(1.0, _area(polygon) / area) if area else 1.0
        return found, shares


def _steps(some: Pass) -> list[_Step]:
    """The maps of a pass."""
    (top, left, height, width, *_), resized, corner, flips, changes, size = some
    scale_y, scale_x = resized[0] / height, resized[1] / width
    steps = [_upright(scale_x, scale_y, -left * scale_x, -top * scale_y, resized)]
    steps.append(_upright(1.0, 1.0, -float(corner[1]), -float(corner[0]), size))
    steps += [_about_centre(mirror(axis), size) for axis in flips]
    for op, parameters in changes:
        steps += [_about_centre(matrix, size) for matrix in op.moves(parameters, *size)]
    return steps


def _upright(scale_x: float, scale_y: float, shift_x: float, shift_y: float, size: tuple[int, int]) -> _Step:
    backward = (1 / scale_x, 0.0, -shift_x / scale_x, 0.0, 1 / scale_y, -shift_y / scale_y)
    return _Step((scale_x, 0.0, shift_x, 0.0, scale_y, shift_y), backward, size)


def _about_centre(source: Matrix, size: tuple[int, int]) -> _Step:
    """The map by which an image of this size is moved. source: as `readers.augment.ops.base.affine` takes it: from a
    pixel of the result to where it comes from, about the centre."""
    a, b, c, d, e, f = map(float, source)
    y, x = size[0] / 2, size[1] / 2
    backward = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    return _Step(_inverse(backward), backward, size)


def _inverse(matrix: Matrix) -> Matrix:
    a, b, c, d, e, f = matrix
    size = a * e - b * d
    if not size:
        raise ValueError(f"the map {matrix} of an op leaves nothing of an image")
    return e / size, -b / size, (b * f - c * e) / size, -d / size, a / size, (c * d - a * f) / size


def _map(matrix: Matrix, points: _Floats) -> _Floats:
    """points: [..., 2]."""
    a, b, c, d, e, f = matrix
    x, y = points[..., 0], points[..., 1]
    return np.stack((a * x + b * y + c, d * x + e * y + f), axis=-1)


def _cut(low: _Floats, high: _Floats, shares: _Floats, size: tuple[int, int]) -> None:
    """Cut intervals, [k, 2] for x and y, to the image; those that are outside have a share of 0 from then on."""
    sides = np.array((size[1], size[0]), np.float64)
    shares[(high < 0) | (low > sides)] = 0
    np.clip(low, 0, sides, out=low)
    np.clip(high, 0, sides, out=high)


def _inside(polygon: _Floats, size: tuple[int, int]) -> _Floats:
    """The part of a convex polygon, [k, 2], that is in the image: cut by one edge after the other (Sutherland and
    Hodgman, 1974)."""
    for axis, edge, sign in ((0, 0.0, 1.0), (0, float(size[1]), -1.0), (1, 0.0, 1.0), (1, float(size[0]), -1.0)):
        depth = sign * (polygon[:, axis] - edge)
        if not len(polygon) or (depth >= 0).all():
            continue
        corners: list[_Floats] = []
        for i in range(len(polygon)):
            if (depth[i - 1] >= 0) != (depth[i] >= 0):
                share = depth[i - 1] / (depth[i - 1] - depth[i])
                corners.append(polygon[i - 1] + share * (polygon[i] - polygon[i - 1]))
            if depth[i] >= 0:
                corners.append(polygon[i])
        polygon = np.array(corners).reshape(-1, 2)
    return polygon


def _area(polygon: _Floats) -> float:
    x, y = polygon.T
    return float(abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2)
