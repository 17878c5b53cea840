"""A list of ops, checked once, and the plan it makes for the images of one batch, drawn by position.

A list is carried out in one or more parts. A part is crops and a resize (the box is known before anything is decoded),
flips, and ops on pixels in the order given, rounded to whole values. A crop or resize behind ops on pixels begins the
next part, which works on what the part before it made; so a list that begins with ops on pixels works on the whole
image first. A crop with padding behind a crop of a resized image begins one, too, as it is black beyond that crop. In
the last part flips come before all ops on pixels; in the others they stay in their place. Then come normalisation and
ops on batches.

Random numbers are drawn by position: they are the same for a sample of an epoch in any order and by any thread or rank.
A draw is a hash of (seed, epoch, position, view, stream, number): nothing is carried from one draw to the next, so
neither threads nor ranks nor a resume change it. Views of one sample (`ImageLoader(views=2)`) draw independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from readers.augment.geometry import Job, Plan, Planner
from readers.augment.ops.base import Interpolation, Op, Stage
from readers.augment.ops.color import Normalize
from readers.order.permutation import derive_keys, mix64

if TYPE_CHECKING:
    import torch

__all__ = ["Draws", "Job", "Part", "Plan", "Recipe", "recipes_of_views"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_11 = np.uint64(11)
_Ints = npt.NDArray[np.int64]
_OUT_OF_ORDER = {
    Stage.NORMALIZE: "{} comes after Normalize; put it last, before ops on batches alone",
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
        """Numbers in [0, 1), float64 [n, count]; the same stream gives the same numbers."""
        numbers = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 16)
        bits = mix64(self._base[:, None] + numbers[None, :] * _GOLDEN)
        return np.asarray((bits >> _11) * (1.0 / (1 << 53)))


@dataclass(frozen=True, slots=True)
class Part:
    """What is done at once: the ops, and their places in the list.

    last: whether it is the last part. interpolation: of its resize, None without one. boxed: whether its box may be
    less than its image. hangs_over: whether its crop may reach beyond the image. crops_result: whether it crops what it
    has resized, or beyond its image. flips: whether it may flip that. steps: the ops that change the pixels then, in
    their order, flips among them in parts before the last.
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
    """Ops in an order that can be executed. Raises ValueError, saying what to change, for others.

    images: their dtype and number of channels (`Op.refuses`), None where these are not known.
    out_size: (height, width) of every result, None where it depends on the image. parts: what is done one after the
    other, at least one. interpolation: of its resizes, None without one. batch_ops: the ops on batches. normalize: the
    normalisation, if there is one.
    """

    def __init__(self, ops: Sequence[Op], images: tuple[str, int] | None = ("uint8", 3)) -> None:
        if isinstance(ops, Op):
            raise ValueError(f"expected a list of ops, not one: write  [{ops!r}]")
        self.ops = tuple(ops)
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

    def refuses(self, dtype: str, channels: int) -> str:
        """Which op does not take images of this dtype and so many channels, and why; "" where all do."""
        for op in self.ops:
            reason = op.refuses(dtype, channels)
            if reason:
                found = f"{dtype} with {channels} channel{'' if channels == 1 else 's'}"
                return f"{op!r} {reason}, and the images are {found}: leave it out, or give another op"
        return ""

    def plan(self, seed: int, epoch: int, positions: _Ints, heights: _Ints, widths: _Ints, *, view: int = 0) -> Plan:
        """The plan for upright images of these sizes at these positions of an epoch; arrays int64 [n].

        view: which of several views of each sample; they draw independently.
        """
        draws = Draws(seed, epoch, positions, view)
        before: tuple[Plan, ...] = ()
        for part in self.parts:
            planner = Planner(heights, widths, before, flips_first=part.last)
            for stream, op in part.ops:
                op.plan(planner, draws.uniform(stream, op.draws))
            plan = planner.plan()
            before, heights, widths = (*before, plan), plan.boxes.out_height, plan.boxes.out_width
        return plan

    def mix(
        self, seed: int, epoch: int, position: int, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A finished batch after the ops on batches: (images, labels), the latter float32 [n, classes].

        position: of its first sample. images: [n, 3, height, width], may be changed in place; labels: float32.
        """
        draws = Draws(seed, epoch, np.array([position], np.int64))
        for stream, op in enumerate(self.ops):
            if op.stage is Stage.BATCH:
                images, labels = op.mix(images, labels, draws.uniform(stream, op.draws)[0])
        return images, labels


def recipes_of_views(
    augment: Sequence[Op], views: int | Sequence[Sequence[Op]], images: tuple[str, int] | None = ("uint8", 3)
) -> tuple[Recipe, ...]:
    """A recipe for each view of a sample. views: how many, all by `augment`; or the ops of each, without `augment`.
    images: as for `Recipe`.

    Raises ValueError for views that cannot be made together.
    """
    if isinstance(views, int):
        if views < 1:
            raise ValueError(f"views is 1 or more, or a list of ops for each view, not {views!r}")
        recipes = (Recipe(augment, images),) * views
    else:
        if augment or not views:
            raise ValueError("views names the ops of each of one or more views: leave augment out, or give a number")
        recipes = tuple(Recipe(ops, images) for ops in views)
    for name in ("normalize", "interpolation"):
        found = {getattr(recipe, name) for recipe in recipes}
        if len(found) > 1:
            raise ValueError(f"all views have one {name}, not {' and '.join(sorted(map(str, found)))}")
    if len(recipes) > 1 and any(recipe.batch_ops for recipe in recipes):
        raise ValueError(
            "MixUp and CutMix mix labels, which several views of a sample do not have: leave one of them out"
        )
    return recipes


def _check(ops: Sequence[Op]) -> None:
    """Whether they are ops, Normalize behind all ops on single images, and those on batches behind it."""
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
    """The parts of a list. A crop or resize behind ops on pixels begins another; so do the flips right before it."""
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
    """Whether an op cannot be carried out with those of the part before it."""
    if op.stage is not Stage.GEOMETRY:
        return False
    if any(other.stage is Stage.PIXELS and not other.flip_axis for other in part):
        return True
    # Black at the edges of a crop, not at those of what it was cut out of.
    made = [other for other in part if other.stage is Stage.GEOMETRY]
    resized = [i for i, other in enumerate(made) if other.resize_filter or other.hangs_over]
    return op.hangs_over and bool(resized) and (made[resized[0]].hangs_over or resized[0] < len(made) - 1)


def _filters(part: Part) -> list[Interpolation]:
    """The filter of its resize, if it has one. Raises ValueError for what is not one box, resize and crop."""
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
