"""Composition of consecutive moves into one map: rotations and flips, and the crop and resize of their result.

    flip, turn, flip, turn, box, resize   ──►   one map: an image is sampled once, and only within the box

A run is moves by ops with the same `Op.sampling`, and flips among them. What left the image between two moves of a run
comes back if a later one turns back to it; op by op it stays black. The box of the next part is a part of what the run
makes, and costs no step. Its resize is one with the run where it enlarges both sides and both are bilinear: then each
sees the same four neighbours. A resize that shrinks looks at more pixels than those, and stays a step of its own, as do
crops and resizes before a run.

A list with one move gives the pixels that it gives op by op; so do flips, crops and resizes alone. Fields follow the
composed maps, as these are the steps of a pass then (`readers.augment.recipe.Placement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from readers.augment.geometry import Change, Pass
from readers.augment.ops.base import Interpolation, Matrix, Op, Rows, Sampling, Stage, affine, after

if TYPE_CHECKING:
    import torch

_Steps: TypeAlias = list[tuple[Change, list[float]]]


@dataclass(frozen=True, slots=True, repr=False)
class Moved(Op):
    """A run of moves; parameters: the matrix of `affine`."""

    by: Sampling

    stage: ClassVar[Stage] = Stage.PIXELS

    @property
    def sampling(self) -> Sampling:
        return self.by

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        return affine(images, rows, self.by)

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        a, b, c, d, e, f = parameters
        return ((a, b, c, d, e, f),)


_MOVED: dict[Sampling, Moved] = {"bilinear": Moved("bilinear"), "nearest": Moved("nearest")}


def compose(made: Pass) -> Pass:
    """A pass with one step for each run of moves. The runs depend only on the ops, not on their parameters, so all
    passes of a batch have the same runs."""
    steps: _Steps = []
    run: _Steps = []
    by: Sampling | None = None
    for op, parameters in made.steps:
        sampling = op.sampling
        if (sampling is None and not op.flip_axis) or (by and sampling and sampling != by):
            steps += _as_one(run, by, made.size)
            run, by = [], None
        if sampling is None and not op.flip_axis:
            steps.append((op, parameters))
        else:
            run.append((op, parameters))
            by = by or sampling
    return made._replace(steps=(*steps, *_as_one(run, by, made.size)))


def _as_one(run: _Steps, by: Sampling | None, size: tuple[int, int]) -> _Steps:
    """A run as one step; a run of only flips is not changed."""
    if by is None:
        return run
    matrix: Matrix | None = None
    for op, parameters in run:
        for source in op.moves(parameters, *size):
            matrix = source if matrix is None else after(source, matrix)
    return [(_MOVED[by], list(matrix or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))]


def fit_of(made: Pass, then: Pass, interpolation: Interpolation | None) -> tuple[int, int] | None:
    """What the box of the next pass is resized to by the run at the end of a pass; None where it stays as large."""
    box = then.region.height, then.region.width
    is_run = bool(made.steps) and isinstance(made.steps[-1][0], Moved) and made.steps[-1][0].sampling == "bilinear"
    if not is_run or interpolation == "bicubic" or then.resized[0] < box[0] or then.resized[1] < box[1]:
        return None
    return then.resized
