"""A list of ops, checked once, and the plan it makes for the images of one batch, drawn by position.

The parts run in this order: crops and the resize (the box is known before anything is decoded), flips, ops on pixels in
the order given, normalisation, ops on batches.

Random numbers are drawn by position: they are the same for a sample of an epoch in any order and by any thread or rank.
A draw is a hash of (seed, epoch, position, view, stream, number): nothing is carried from one draw to the next, so
neither threads nor ranks nor a resume change it. Views of one sample (`ImageLoader(views=2)`) draw independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from readers.augment.geometry import Job, Plan, Planner
from readers.augment.ops.base import Op, Stage
from readers.augment.ops.color import Normalize
from readers.order.permutation import derive_keys, mix64

if TYPE_CHECKING:
    import torch

__all__ = ["Draws", "Job", "Plan", "Recipe", "recipes_of_views"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_11 = np.uint64(11)
_Ints = npt.NDArray[np.int64]
_OUT_OF_ORDER = {
    Stage.PIXELS: "{} comes after an op that is not a crop or resize; put crops and the resize first",
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


class Recipe:
    """Ops in an order that can be executed in one pass. Raises ValueError, saying what to change, for others.

    out_size: (height, width) of every result, None where it depends on the image. interpolation: of the resize, None
    without one. boxed: whether what is resized is less than the image. hangs_over: whether a crop may reach beyond the
    image. pixel_ops, batch_ops: those ops, flips not among the former. normalize: the normalisation, if there is one.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = tuple(ops)
        _check(self.ops)
        size: tuple[int, int] | None = None
        for op in self.ops:
            size = op.size_after(size)
        self.out_size = size
        self.interpolation = next((op.resize_filter for op in self.ops if op.resize_filter), None)
        self.boxed = bool(self.ops) and self.ops[0].crops
        self.hangs_over = any(op.hangs_over for op in self.ops)
        self.pixel_ops = tuple(op for op in self.ops if op.stage is Stage.PIXELS and not op.flip_axis)
        self.batch_ops = tuple(op for op in self.ops if op.stage is Stage.BATCH)
        self.normalize = next((op for op in self.ops if isinstance(op, Normalize)), None)

    def __repr__(self) -> str:
        return f"Recipe({list(self.ops)!r})"

    def plan(self, seed: int, epoch: int, positions: _Ints, heights: _Ints, widths: _Ints, *, view: int = 0) -> Plan:
        """The plan for upright images of these sizes at these positions of an epoch; arrays int64 [n].

        view: which of several views of each sample; they draw independently.
        """
        planner, draws = Planner(heights, widths), Draws(seed, epoch, positions, view)
        for stream, op in enumerate(self.ops):
            op.plan(planner, draws.uniform(stream, op.draws))
        return planner.plan()

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


def recipes_of_views(augment: Sequence[Op], views: int | Sequence[Sequence[Op]]) -> tuple[Recipe, ...]:
    """A recipe for each view of a sample. views: how many, all by `augment`; or the ops of each, without `augment`.

    Raises ValueError for views that cannot be made together.
    """
    if isinstance(views, int):
        if views < 1:
            raise ValueError(f"views is 1 or more, or a list of ops for each view, not {views!r}")
        recipes = (Recipe(augment),) * views
    else:
        if augment or not views:
            raise ValueError("views names the ops of each of one or more views: leave augment out, or give a number")
        recipes = tuple(Recipe(ops) for ops in views)
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
    stage, resized, hanging = Stage.GEOMETRY, False, ""
    for op in ops:
        if not isinstance(op, Op):
            raise ValueError(
                f"{op!r} is not an op of readers.augment; plain functions go into ImageDataset(transform=…)"
            )
        name = type(op).__name__
        if op.stage < stage or op.stage is stage is Stage.NORMALIZE:
            raise ValueError(_OUT_OF_ORDER[stage].format(name))
        if op.resize_filter is not None:
            if resized:
                raise ValueError(f"{name} is a second resize; resize once, and crop before or after it")
            if hanging:
                raise ValueError(f"{name} comes after {hanging} with padding; resize first")
            resized = True
        stage, hanging = op.stage, name if op.hangs_over else hanging
