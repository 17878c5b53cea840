"""A checked list of ops, and the plan that it makes for the images of a batch, drawn by position.

A list is applied in one or more parts. A part has crops and a resize (their box is known before decoding), flips, and
ops on pixels in list order, whose results are rounded to integers. A crop or resize after ops on pixels begins the next
part, which works on the result of the part before; so a list that begins with ops on pixels first works on the whole
image. A padded crop after a crop of a resized image also begins a part, because it is black beyond that crop. In the
last part flips come before all ops on pixels; in other parts they stay in place. Normalisation and ops on batches
follow.

Random numbers are drawn by position: a draw is a hash of (seed, epoch, position, view, stream, number). There is no
generator state, so threads, ranks and resumes do not change a draw. Views of one sample (`readers.Views`) draw
independently.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.augment.compose import compose
from readers.augment.geometry import Pass, Plan, Planner
from readers.augment.ops.base import Interpolation, Matrix, Op, Stage, after, mirror
from readers.augment.ops.color import Normalize
from readers.order.base import derive_keys, mix64
from readers.order.schedule import COMPOSED, OP_BY_OP

if TYPE_CHECKING:
    import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_11 = np.uint64(11)
_Ints = npt.NDArray[np.int64]
_OUT_OF_ORDER = {
    Stage.NORMALIZE: "{} comes after Normalize; put Normalize last, before only ops on batches",
    Stage.BATCH: "{} comes after an op on batches; put those last",
}


class Draws:
    """Draws for the samples at `positions` (int64 [n]) of one epoch."""

    def __init__(self, seed: int, epoch: int, positions: npt.NDArray[np.int64], view: int = 0) -> None:
        first, second, *_ = derive_keys(seed, epoch, f"augment view {view}" if view else "augment")
        self._base = mix64(mix64(positions.astype(np.uint64) + first) ^ second)

    def __len__(self) -> int:
        return len(self._base)

    def uniform(self, stream: int, count: int = 1) -> npt.NDArray[np.float64]:
        """Random numbers in [0, 1), float64 [n, count]; the same stream always has the same numbers."""
        numbers = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 16)
        bits = mix64(self._base[:, None] + numbers[None, :] * _GOLDEN)
        return np.asarray((bits >> _11) * (1.0 / (1 << 53)))


@dataclass(frozen=True, slots=True)
class Part:
    """Ops that are applied together, each with its place in the list.

    last: whether it is the last part. interpolation: of its resize, None without one. boxed: whether its box may be
    smaller than the image. hangs_over: whether its crop may reach beyond the image. crops_result: whether it crops
    after its resize, or beyond the image. flips: whether it may flip before `steps`. steps: its ops on pixels in their
    order, including flips in parts before the last.
    """

    ops: tuple[tuple[int, Op], ...]
    last: bool

    @property
    def interpolation(self) -> Interpolation | None:
        return next((op.resize_filter for _, op in self.ops if op.resize_filter), None)

    @property
    def boxed(self) -> bool:
        geometry = [op for _, op in self.ops if op.stage is Stage.GEOMETRY]
        return bool(geometry) and geometry[0].crops

    @property
    def crops_result(self) -> bool:
        geometry = [op for _, op in self.ops if op.stage is Stage.GEOMETRY]
        return self.hangs_over or any(op.resize_filter for op in geometry[:-1])

    @property
    def hangs_over(self) -> bool:
        return any(op.hangs_over for _, op in self.ops)

    @property
    def flips(self) -> bool:
        flips = sum(bool(op.flip_axis) for _, op in self.ops)
        return flips > sum(bool(op.flip_axis) for op in self.steps)

    @property
    def steps(self) -> tuple[Op, ...]:
        pixels = [op for _, op in self.ops if op.stage is Stage.PIXELS]
        first = next((i for i, op in enumerate(pixels) if not op.flip_axis), len(pixels))
        return tuple(op for op in pixels[first:] if not (op.flip_axis and self.last))


class Recipe:
    """A list of ops in an executable order. Raises ValueError, with the remedy, for other orders.

    images: (dtype, channels) of the images (`Op.refuses`), None if unknown.
    compose: whether consecutive moves are combined into one map (`readers.augment.compose`).
    out_size: (height, width) of all results, None if it depends on the image. parts: consecutive parts, at least one.
    interpolation: of the resizes, None without one. batch_ops: the ops on batches. normalize: the normalisation, if
    there is one.
    """

    def __init__(
        self, ops: Sequence[Op], images: tuple[str, int] | None = ("uint8", 3), *, compose: bool = False
    ) -> None:
        if isinstance(ops, Op):
            raise ValueError(f"expected a list of ops, found a single op: write  [{ops!r}]")
        self.ops, self.compose = tuple(ops), compose
        _check(self.ops)
        reason = self.refuses(*images) if images is not None else ""
        if reason:
            raise ValueError(reason)
        self.parts = _parts(self.ops)
        filters = [name for part in self.parts for name in _filters(part)]
        if len({*filters}) > 1:
            raise ValueError(f"all resizes of a list have one interpolation, not {' and '.join(filters)}")
        self.interpolation = filters[0] if filters else None
        size: tuple[int, int] | None = None
        for op in self.ops:
            size = op.size_after(size)
        self.out_size = size
        self.batch_ops = tuple(op for op in self.ops if op.stage is Stage.BATCH)
        self.normalize = next((op for op in self.ops if isinstance(op, Normalize)), None)

    def __repr__(self) -> str:
        return f"Recipe({list(self.ops)!r})"

    @property
    def geometry(self) -> str:
        """Its name in resume tokens; "" if composing the ops does not change pixels."""
        for part, then in zip(self.parts, (*self.parts[1:], None), strict=True):
            moves = sum(op.sampling is not None for _, op in part.ops)
            if moves > 1 or (moves and then is not None and then.interpolation):
                return COMPOSED if self.compose else OP_BY_OP
        return ""

    def refuses(self, dtype: str, channels: int) -> str:
        """A message on the first op that does not accept images of this dtype and channels; "" if all do."""
        for op in self.ops:
            reason = op.refuses(dtype, channels)
            if reason:
                kind = f"{dtype} with {channels} channel{'' if channels == 1 else 's'}"
                return f"{op!r} {reason}, but the images are {kind}: leave it out, or use another op"
        return ""

    def plan(self, seed: int, epoch: int, positions: _Ints, heights: _Ints, widths: _Ints, *, view: int = 0) -> Plan:
        """The plan for upright images of these sizes at these positions of an epoch; arrays int64 [n].

        view: which of several views of each sample; they draw independently.
        """
        draws = Draws(seed, epoch, positions, view)
        before: tuple[Plan, ...] = ()
        for part in self.parts:
            planner = Planner(heights, widths, before, flips_first=part.last, compose=compose if self.compose else None)
            for stream, op in part.ops:
                op.plan(planner, draws.uniform(stream, op.draws))
            plan = planner.plan()
            before, heights, widths = (*before, plan), plan.boxes.out_height, plan.boxes.out_width
        return plan

    def mix(
        self, seed: int, epoch: int, position: int, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the ops on batches to a finished batch; returns (images, labels), labels as float32 [n, classes].

        position: of the batch's first sample. images: [n, 3, height, width], may be changed in place.
        labels: float32 [n, classes].
        """
        draws = Draws(seed, epoch, np.array([position], np.int64))
        for stream, op in enumerate(self.ops):
            if op.stage is Stage.BATCH:
                images, labels = op.mix(images, labels, draws.uniform(stream, op.draws)[0])
        return images, labels


def recipes_of_views(
    views: Sequence[Sequence[Op]], images: tuple[str, int] | None = ("uint8", 3), *, compose: bool = False
) -> tuple[Recipe, ...]:
    """A recipe for each view of a sample. images, compose: as for `Recipe`.

    Raises ValueError for views with different normalisations or interpolations, and for ops on batches.
    """
    recipes = tuple(Recipe(ops, images, compose=compose) for ops in views)
    for name in ("normalize", "interpolation"):
        values = {getattr(recipe, name) for recipe in recipes}
        if len(values) > 1:
            raise ValueError(f"all views must have the same {name}, found {' and '.join(sorted(map(str, values)))}")
    if len(recipes) > 1 and any(recipe.batch_ops for recipe in recipes):
        raise ValueError(
            "MixUp and CutMix do not work with several views of a sample: leave out either the ops or the views"
        )
    return recipes


def made_of(ops: Sequence[Sequence[Op]] | str, images: str | None, on_error: str) -> dict[str, Any]:
    """What a state says of how samples are made (`ResumeToken`). ops: of each view, or why there are none to name."""
    if not isinstance(ops, str):
        for op in itertools.chain(*ops):
            if not type(op).__module__.startswith("readers.augment.ops."):
                return made_of(f"{type(op).__name__} is not an op of readers.augment", images, on_error)
        return {"ops": [[repr(op) for op in of_view] for of_view in ops], "images": images or "", "on_error": on_error}
    return {"ops": ops, "images": images or "", "on_error": on_error}


def _check(ops: Sequence[Op]) -> None:
    """Raise ValueError for objects that are not ops, and for ops in a wrong order: Normalize comes after all ops on
    single images, ops on batches after it."""
    stage = Stage.GEOMETRY
    for op in ops:
        if not isinstance(op, Op):
            raise ValueError(
                f"{op!r} is not an op of readers.augment; plain functions go into ImageDataset(transform=…)"
            )
        if stage >= Stage.NORMALIZE and (op.stage < stage or op.stage is stage is Stage.NORMALIZE):
            raise ValueError(_OUT_OF_ORDER[stage].format(type(op).__name__))
        stage = max(stage, op.stage)


def _parts(ops: Sequence[Op]) -> tuple[Part, ...]:
    """Split a list into parts. A crop or resize after ops on pixels begins a part, with the flips right before it."""
    parts: list[list[tuple[int, Op]]] = [[]]
    for stream, op in enumerate(ops):
        if _begins_part(op, [other for _, other in parts[-1]]):
            flips: list[tuple[int, Op]] = []
            while parts[-1][-1][1].flip_axis:
                flips.insert(0, parts[-1].pop())
            parts.append(flips)
        parts[-1].append((stream, op))
    return tuple(Part(tuple(part), part is parts[-1]) for part in parts)


def _begins_part(op: Op, part: Sequence[Op]) -> bool:
    """Whether an op cannot be applied together with the ops of the part before it."""
    if op.stage is not Stage.GEOMETRY:
        return False
    if any(other.stage is Stage.PIXELS and not other.flip_axis for other in part):
        return True
    # Padding is black beyond the edges of the previous crop, not of the image that it was cut from.
    made = [other for other in part if other.stage is Stage.GEOMETRY]
    resized = [i for i, other in enumerate(made) if other.resize_filter or other.hangs_over]
    return op.hangs_over and bool(resized) and (made[resized[0]].hangs_over or resized[0] < len(made) - 1)


def _filters(part: Part) -> list[Interpolation]:
    """The filter of a part's resize, if any. Raises ValueError for a second resize, or a resize after padding."""
    filters: list[Interpolation] = []
    hanging = ""
    for _, op in part.ops:
        name = type(op).__name__
        if op.resize_filter is not None:
            if filters:
                raise ValueError(f"{name} is a second resize; resize once, and crop before or after it")
            if hanging:
                raise ValueError(f"{name} comes after {hanging} with padding; resize first")
            filters.append(op.resize_filter)
        hanging = name if op.hangs_over else hanging
    return filters


# Placement: moving masks, boxes and points with the pixels of their image.
#
# A placement is a sequence of affine maps, one for each crop with its resize, flip, and op that moves pixels
# (`Op.moves`), with the image size after each: pixels that leave the image at one step do not return, even if a later
# step moves them back inside. Coordinates are (x, y) in pixels from the upper left corner of the upright image; the
# centre of its first pixel is at (0.5, 0.5).
#
#     mask    nearest pixel through all maps at once, without interpolation
#     boxes   the smallest upright boxes around their visible parts
#     points  moved, also beyond the edges


_Floats: TypeAlias = npt.NDArray[np.float64]
_Point: TypeAlias = tuple[float, float]
_IDENTITY: Matrix = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


class _Step(NamedTuple):
    """A map of coordinates, its inverse, and the (height, width) of the image after it.

    (a, b, c, d, e, f) maps (x, y) to (a x + b y + c, d x + e y + f).
    """

    forward: Matrix
    backward: Matrix
    size: tuple[int, int]


class Placement:
    """Maps coordinates of one image to coordinates of the result.

    size: (height, width) of the upright image.
    passes: the passes applied to it, in order (`readers.augment.geometry`).
    """

    def __init__(self, size: tuple[int, int], passes: Iterable[Pass]) -> None:
        self.size = self._result = size
        self._steps: list[_Step] = []
        for step in (step for some in passes for step in _steps(some)):
            if step.forward != _IDENTITY or step.size != self._result:
                self._steps.append(step)
            self._result = step.size
        self._is_upright = not any(step.forward[1] or step.forward[3] for step in self._steps)

    @property
    def moves(self) -> bool:
        """Whether any pixel moves."""
        return bool(self._steps)

    def points(self, points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The moved points, float32 [..., 2]; they may be outside the result."""
        a, b, c, d, e, f = self._forward()
        x, y = points[..., 0].astype(np.float64), points[..., 1].astype(np.float64)
        return np.stack((a * x + b * y + c, d * x + e * y + f), axis=-1).astype(np.float32)

    def boxes(self, boxes: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], _Floats]:
        """(boxes, shares): boxes [k, 4] around the visible parts, and the visible share of each box's area, 0 to 1.

        A box with a share of 0 is invisible and has no area.
        """
        exact = boxes.astype(np.float64)
        if not self._steps or not len(boxes):
            return boxes, np.ones(len(boxes))
        moved, shares = self._upright_boxes(exact) if self._is_upright else self._turned_boxes(exact)
        return moved.astype(np.float32), shares

    def mask(self, mask: npt.NDArray[Any], fill: int = 0) -> npt.NDArray[Any]:
        """The mask of the result.

        mask: [h, w], with the image's size or proportions. fill: value beyond the edges of the image. Raises
        BadSampleError for a mask of other proportions.
        """
        self._check(mask.shape)
        if not self._steps and mask.shape == self._result:
            return mask
        ys, xs = (np.arange(side, dtype=np.float64) + 0.5 for side in self._result)
        ys, xs = ys[:, None], xs[None]
        inside: npt.NDArray[np.bool_] | None = None
        x, y = xs, ys
        for matrix, (height, width) in self._frames():
            x, y = _sources(matrix, xs, ys)
            if min(x.min(), y.min()) < 0 or x.max() >= width or y.max() >= height:
                in_frame = (x >= 0) & (x < width) & (y >= 0) & (y < height)
                inside = in_frame if inside is None else inside & in_frame
        rows, columns = (
            np.clip((places * (length / side)).astype(np.intp), 0, length - 1)
            for places, length, side in zip((y, x), mask.shape, self.size, strict=True)
        )
        taken = mask[rows, columns]
        return taken if inside is None else np.where(inside, taken, np.asarray(fill, mask.dtype))

    def _forward(self) -> Matrix:
        """The map from the image to the result."""
        return functools.reduce(after, (step.forward for step in self._steps), _IDENTITY)

    def _frames(self) -> Iterator[tuple[Matrix, tuple[int, int]]]:
        """The maps from the result to the image before each step, with its (height, width); the original comes last."""
        matrix = _IDENTITY
        sizes = [self.size, *(step.size for step in self._steps)]
        for step, size in zip(reversed(self._steps), reversed(sizes[:-1]), strict=True):
            matrix = after(matrix, step.backward)
            yield matrix, size
        if not self._steps:
            yield matrix, self.size

    def _check(self, shape: tuple[int, ...]) -> None:
        (rows, columns), (height, width) = shape, self.size
        slack = max(1, columns / width, rows / height)  # sizes are rounded to a pixel of either
        if abs(columns * height / width - rows) > slack and abs(rows * width / height - columns) > slack:
            raise BadSampleError(
                f"has {rows} x {columns} pixels, expected the proportions of the upright image, {height} x {width}"
            )

    def _upright_boxes(self, boxes: _Floats) -> tuple[_Floats, _Floats]:
        """`boxes` without turns: clip to the visible window of the original, then map."""
        left, top, right, bottom = self._window()
        window = np.array((left, top)), np.array((right, bottom))
        low, high = boxes[:, :2], boxes[:, 2:]
        cut_low, cut_high = (np.minimum(np.maximum(ends, window[0]), window[1]) for ends in (low, high))
        length, is_out = high - low, (high < window[0]) | (low > window[1])
        shares = np.where(length > 0, (cut_high - cut_low) / np.where(length > 0, length, 1), ~is_out)
        a, _, c, _, e, f = self._forward()
        scale, shift = np.array((a, e)), np.array((c, f))
        ends = cut_low * scale + shift, cut_high * scale + shift
        moved = np.concatenate((np.minimum(*ends), np.maximum(*ends)), axis=1)
        return np.clip(moved, 0, np.tile(self._result[::-1], 2)), shares.prod(axis=1)

    def _window(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the visible window of the original; empty if right == left."""
        left, top, right, bottom = 0.0, 0.0, float(self.size[1]), float(self.size[0])
        backward = _IDENTITY
        for step in self._steps:
            backward = after(step.backward, backward)
            a, _, c, _, e, f = backward
            xs, ys = sorted((c, a * step.size[1] + c)), sorted((f, e * step.size[0] + f))
            left, right = max(left, xs[0]), min(right, xs[1])
            top, bottom = max(top, ys[0]), min(bottom, ys[1])
        return left, top, max(left, right), max(top, bottom)

    def _turned_boxes(self, boxes: _Floats) -> tuple[_Floats, _Floats]:
        """`boxes` with turns: clip polygons, which gives tighter bounds than clipping bounding boxes at each step."""
        moved, shares = np.zeros_like(boxes), np.zeros(len(boxes))
        a, b, _, d, e, _ = self._forward()
        growth = abs(a * e - b * d)
        for row, (x0, y0, x1, y1) in enumerate(boxes.tolist()):
            polygon = _inside([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], self.size)
            for step in self._steps:
                polygon = _inside([_mapped(step.forward, *corner) for corner in polygon], step.size)
            if polygon:
                area, xs, ys = (x1 - x0) * (y1 - y0) * growth, *zip(*polygon, strict=True)
                bounds = (min(xs), min(ys), max(xs), max(ys))
                moved[row] = np.clip(bounds, 0, np.tile(self._result[::-1], 2))
                shares[row] = min(1.0, _area(polygon) / area) if area else 1.0
        return moved, shares


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
    """The step that moves an image of this size.

    source: map from a pixel of the result to its source, about the centre, as for `readers.augment.ops.base.affine`.
    """
    a, b, c, d, e, f = map(float, source)
    y, x = size[0] / 2, size[1] / 2
    backward = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    return _Step(_inverse(backward), backward, size)


def _inverse(matrix: Matrix) -> Matrix:
    a, b, c, d, e, f = matrix
    size = a * e - b * d
    if not size:
        raise ValueError(f"the map {matrix} of an op cannot be inverted")
    return e / size, -b / size, (b * f - c * e) / size, -d / size, a / size, (c * d - a * f) / size


def _mapped(matrix: Matrix, x: float, y: float) -> _Point:
    a, b, c, d, e, f = matrix
    return a * x + b * y + c, d * x + e * y + f


def _sources(matrix: Matrix, xs: _Floats, ys: _Floats) -> tuple[_Floats, _Floats]:
    """Source coordinates (x, y) of the pixels at columns xs [1, w] and rows ys [h, 1], not broadcast if possible."""
    a, b, c, d, e, f = matrix
    x = a * xs + c
    y = e * ys + f
    return (x + b * ys if b else x), (y + d * xs if d else y)


def _inside(polygon: list[_Point], size: tuple[int, int]) -> list[_Point]:
    """The part of a convex polygon that is in the image: cut by one edge after the other (Sutherland and Hodgman,
    1974)."""
    for axis, edge, sign in ((0, 0.0, 1.0), (0, float(size[1]), -1.0), (1, 0.0, 1.0), (1, float(size[0]), -1.0)):
        depth = [sign * (corner[axis] - edge) for corner in polygon]
        if not polygon or min(depth) >= 0:
            continue
        corners: list[_Point] = []
        for i, corner in enumerate(polygon):
            if (depth[i - 1] >= 0) != (depth[i] >= 0):
                share = depth[i - 1] / (depth[i - 1] - depth[i])
                (x, y), (to_x, to_y) = polygon[i - 1], corner
                corners.append((x + share * (to_x - x), y + share * (to_y - y)))
            if depth[i] >= 0:
                corners.append(corner)
        polygon = corners
    return polygon


def _area(polygon: list[_Point]) -> float:
    pairs = zip(polygon, (*polygon[1:], polygon[0]), strict=True)
    return abs(sum(x * to_y - to_x * y for (x, y), (to_x, to_y) in pairs)) / 2
