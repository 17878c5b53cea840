"""Composition of consecutive moves into one map: rotations and flips, and the crop and resize of their result.

    flip, turn, flip, turn, box, resize   ──►   one map: an image is sampled once, and only within the box

A run consists of moves by ops with the same `Op.sampling`, and of flips among them. Pixels that one move of a run takes
out of the image can come back by a later one; without composition they stay black. The crop of the next part limits the
result of the run, without a step for it. The resize of the next part becomes part of the map if it shrinks neither side
and both are bilinear, because both then use the same four neighbours. A resize that shrinks a side uses more pixels and
remains a separate step, as do crops and resizes before a run.

A list with a single move gives the same pixels with and without composition, and so does a list of flips, crops and
resizes only. The composed maps replace the steps of a pass, so masks and boxes follow them
(`readers.augment.recipe.Placement`).
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
    """A composed run of moves; parameters: the matrix for `affine`."""

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
    """A pass with each run of moves replaced by a single step. The runs depend only on the ops, not on their
    parameters, so all passes of a batch have the same steps."""
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
    """A run as a single step; a run of flips only remains unchanged."""
    if by is None:
        return run
    matrix: Matrix | None = None
    for op, parameters in run:
        for source in op.moves(parameters, *size):
            matrix = source if matrix is None else after(source, matrix)
    return [(_MOVED[by], list(matrix or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))]


def fit_of(made: Pass, then: Pass, interpolation: Interpolation | None) -> tuple[int, int] | None:
    """The size (height, width) to which the run at the end of a pass resizes the box of the next pass; None if the
    resize is not part of the run."""
    box = then.region.height, then.region.width
    is_run = bool(made.steps) and isinstance(made.steps[-1][0], Moved) and made.steps[-1][0].sampling == "bilinear"
    if not is_run or interpolation == "bicubic" or then.resized[0] < box[0] or then.resized[1] < box[1]:
        return None
    return then.resized
