"""A list of ops, checked once; and what it does to the images of one batch, drawn by position.

The parts run in this order: crops and the resize (the box is known before anything is decoded), flips, ops on pixels in
the order given, normalisation, ops on batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from readers.augment.draws import Draws
from readers.augment.geometry import Job, Plan, Step, plan_ops
from readers.augment.ops.base import Op, Stage

if TYPE_CHECKING:
    import torch

    from readers.augment.ops.normalize import Normalize

__all__ = ["Job", "Plan", "Recipe", "Step", "recipes_of_views"]

_Ints = npt.NDArray[np.int64]
_OUT_OF_ORDER = {
    Stage.PIXELS: "{} comes after an op that is no crop or resize; put crops and the resize first",
    Stage.NORMALIZE: "{} comes after Normalize; put it last, before ops on batches alone",
    Stage.BATCH: "{} comes after an op on batches; put those last",
}


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
        last = next((op for op in self.ops if op.stage is Stage.NORMALIZE), None)
        self.normalize = cast("Normalize | None", last)

    def __repr__(self) -> str:
        return f"Recipe({list(self.ops)!r})"

    def plan(self, seed: int, epoch: int, positions: _Ints, heights: _Ints, widths: _Ints, *, view: int = 0) -> Plan:
        """The plan for upright images of these sizes at these positions of an epoch; arrays int64 [n].

        view: which of several views of each sample; they draw independently.
        """
        return plan_ops(self.ops, heights, widths, Draws(seed, epoch, positions, view))

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
            raise ValueError(f"{op!r} is no op of readers.augment; plain functions go into ImageDataset(transform=…)")
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
