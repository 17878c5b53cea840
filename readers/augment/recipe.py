"""A list of ops, checked and taken apart once; and what it does to the images of one batch, drawn by position.

The parts run in this order: crops and the resize (the box is known before anything is decoded), flips, rotation, colour
and blur in the order given, normalisation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from readers.augment.draws import Draws
from readers.augment.geometry import GEOMETRIC, Boxes, fixed_size, plan_boxes
from readers.augment.ops import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    Op,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)

__all__ = ["Job", "Plan", "Recipe", "Step"]

_FLIPS = (RandomHorizontalFlip, RandomVerticalFlip)
_PIXEL_OPS = (RandomRotation, ColorJitter, GaussianBlur)
_FLIP_AXES = ((), (3,), (2,), (2, 3))
Step: TypeAlias = tuple[Op, npt.NDArray[np.float64]]


# What happens to one image: (region, resized, corner, flips, steps). Decode `region`, the values of a `Region`;
# resize it to `resized` (height, width), crop that at `corner`, flip it along `flips` (axes of [1, 3, height, width]: 2
# is top and bottom, 3 left and right), apply the pixel ops with these draws. A plain tuple, as each image has one.
Job: TypeAlias = tuple[
    tuple[int, int, int, int, int, bool],
    tuple[int, int],
    tuple[int, int],
    tuple[int, ...],
    tuple[tuple[Op, list[float]], ...],
]


@dataclass(slots=True)
class Plan:
    """What happens to n images. hflip, vflip: bool [n]. steps: the pixel ops and their draws, float64 [n, k]: degrees;
    the three factors of a jitter; sigma, 0 for no blur."""

    boxes: Boxes
    hflip: npt.NDArray[np.bool_]
    vflip: npt.NDArray[np.bool_]
    steps: list[Step]

    def jobs(self) -> list[Job]:
        """The plan by image, in Python's own numbers."""
        b = self.boxes
        columns = (b.top, b.left, b.height, b.width, b.reduce, b.coarse)
        regions = zip(*(column.tolist() for column in columns), strict=True)
        resized = zip(b.resized_height.tolist(), b.resized_width.tolist(), strict=True)
        corners = zip(b.crop_top.tolist(), b.crop_left.tolist(), strict=True)
        flips = [_FLIP_AXES[code] for code in (2 * self.vflip + self.hflip).tolist()]
        steps: Iterable[tuple[tuple[Op, list[float]], ...]] = itertools.repeat((), len(flips))
        if self.steps:
            ops = [op for op, _ in self.steps]
            draws = zip(*(parameters.tolist() for _, parameters in self.steps), strict=True)
            steps = [tuple(zip(ops, row, strict=True)) for row in draws]
        return list(zip(regions, resized, corners, flips, steps, strict=False))


class Recipe:
    """Ops in an order that can be executed in one pass. Raises ValueError, saying what to change, for others.

    out_size: (height, width) of every result, None where it depends on the image. normalize: the last op, if it is one.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = tuple(ops)
        _check(self.ops)
        self.out_size = fixed_size(self.ops)
        last = self.ops[-1] if self.ops else None
        self.normalize = last if isinstance(last, Normalize) else None

    def __repr__(self) -> str:
        return f"Recipe({list(self.ops)!r})"

    def plan(
        self,
        seed: int,
        epoch: int,
        positions: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        widths: npt.NDArray[np.int64],
    ) -> Plan:
        """The plan for upright images of these sizes at these positions of an epoch; arrays int64 [n]."""
        draws = Draws(seed, epoch, positions)
        n = len(positions)
        hflip, vflip = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        steps: list[Step] = []
        for stream, op in enumerate(self.ops):
            if isinstance(op, RandomHorizontalFlip):
                hflip ^= draws.uniform(stream)[:, 0] < op.p
            elif isinstance(op, RandomVerticalFlip):
                vflip ^= draws.uniform(stream)[:, 0] < op.p
            elif isinstance(op, _PIXEL_OPS):
                steps.append((op, _parameters(op, draws, stream)))
        return Plan(plan_boxes(self.ops, heights, widths, draws), hflip, vflip, steps)


def _parameters(op: Op, draws: Draws, stream: int) -> npt.NDArray[np.float64]:
    if isinstance(op, RandomRotation):
        return draws.between(stream, -op.degrees, op.degrees)[:, None]
    if isinstance(op, GaussianBlur):
        u = draws.uniform(stream, 2)
        sigma = op.sigma[0] + (op.sigma[1] - op.sigma[0]) * u[:, :1]
        return np.where(u[:, 1:] < op.p, sigma, 0.0)
    assert isinstance(op, ColorJitter)
    spread = np.array([op.brightness, op.contrast, op.saturation])
    low = np.maximum(0.0, 1.0 - spread)
    return low + (1.0 + spread - low) * draws.uniform(stream, 3)


def _check(ops: Sequence[Op]) -> None:
    resized = later = False
    for i, op in enumerate(ops):
        name = type(op).__name__
        if isinstance(op, GEOMETRIC):
            if later:
                raise ValueError(f"{name} comes after an op that is no crop or resize; put crops and the resize first")
            if isinstance(op, Resize | RandomResizedCrop):
                if resized:
                    raise ValueError(f"{name} is a second resize; resize once, and crop before or after it")
                resized = True
        elif isinstance(op, Normalize):
            if i != len(ops) - 1:
                raise ValueError("Normalize is not the last op; put it last")
        elif isinstance(op, (*_FLIPS, *_PIXEL_OPS)):
            later = True
        else:
            raise ValueError(f"{op!r} is no op of readers.augment; plain functions go into ImageDataset(transform=…)")
