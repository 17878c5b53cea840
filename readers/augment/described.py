"""The random draws of ops in words and numbers, and the parser of an op's repr.

The effect of an op is the difference between the plans with and without it, so nothing is drawn in a second way.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from readers.augment import ops as registry
from readers.augment.geometry import Plan
from readers.augment.ops import Op, Stage
from readers.augment.recipe import Recipe

_MOST_NUMBERS = 8
_Ints = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """The effect of an op on one image.

    values: for JSON. "box" and "crop" are [left, top, width, height] and "resized" is [width, height], in pixels of the
        input of the op; a box is of the image before its flips. "flip" is "left to right" or "top to bottom". Ops on
        pixels have their parameters by name. Empty if the op changed nothing, or works on whole batches.
    """

    op: Op
    values: dict[str, Any]

    @property
    def text(self) -> str:
        """The name of the op and its effect, in one line."""
        return f"{type(self.op).__name__}: {'; '.join(self._said()) or self._nothing()}"

    def _said(self) -> list[str]:
        values, texts = dict(self.values), []
        for name in ("box", "resized", "crop", "flip"):
            if (value := values.pop(name, None)) is not None:
                texts.append(_FORMATS[name].format(*value) if isinstance(value, list) else f"flipped {value}")
        shown = [f"{name} {value:.3g}" for name, value in list(values.items())[:_MOST_NUMBERS]]
        return texts + [", ".join(shown) + (", …" if len(values) > _MOST_NUMBERS else "")] * bool(shown)

    def _nothing(self) -> str:
        if self.op.stage is Stage.BATCH:
            return "of the whole batch"
        return "not flipped" if self.op.flip_axis else "unchanged"


_FORMATS = {"box": "box {},{} {}×{}", "resized": "resized to {}×{}", "crop": "crop {},{} {}×{}"}


def draws_of(
    ops: Sequence[Op], seed: int, epoch: int, positions: _Ints, heights: _Ints, widths: _Ints, view: int = 0
) -> tuple[list[list[Draw]], Plan]:
    """The draws of a list of ops for n upright images, and their plan: n lists with one draw for each op.

    positions, heights, widths: int64 [n], and view, as for `Recipe.plan`. Raises ValueError.
    """
    arguments = (seed, epoch, positions, heights, widths)
    plans = [Recipe(ops[:count], None).plan(*arguments, view=view) for count in range(len(ops) + 1)]
    return [
        [Draw(op, _drawn(op, plans[number], plans[number + 1], item)) for number, op in enumerate(ops)]
        for item in range(len(positions))
    ], plans[-1]


def op_of(text: str) -> Op:
    """The op with this repr. Raises ValueError for any other text."""
    try:
        made = _evaluated(ast.parse(text, mode="eval").body)
    except (AttributeError, SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r:.80} cannot be read as an op: {error}") from error
    if not isinstance(made, Op):
        raise ValueError(f"{text!r:.80} is not an op of readers.augment")
    return made


def _evaluated(node: ast.expr) -> Any:
    """The value of a literal, or of a call of an op or of `AspectBuckets` with arguments of these kinds."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    kind = getattr(registry, name) if name in registry.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, (Op, registry.AspectBuckets))):
        raise ValueError(f"{name or 'the called object'} is not an op of readers.augment")
    named = {str(keyword.arg): _evaluated(keyword.value) for keyword in node.keywords}
    return kind(*map(_evaluated, node.args), **named)


def _drawn(op: Op, before: Plan, after: Plan, item: int) -> dict[str, Any]:
    if op.stage is Stage.BATCH:
        return {}
    old, new = _parts(before)[-1], _parts(after)[-1]
    if len(_parts(after)) == len(_parts(before)):
        return _difference(op, old, item, new, item)
    sizes = old.boxes.out_height[item : item + 1], old.boxes.out_width[item : item + 1]
    values = _difference(op, Recipe(()).plan(0, 0, np.zeros(1, np.int64), *sizes), 0, new, item)
    return {name: value for name, value in values.items() if name != "flip" or op.flip_axis}  # else of an earlier flip


def _difference(op: Op, old: Plan, at: int, new: Plan, item: int) -> dict[str, Any]:
    a, b, values = old.boxes, new.boxes, dict[str, Any]()

    def both(*names: str) -> tuple[list[int], list[int]]:
        return [int(getattr(a, name)[at]) for name in names], [int(getattr(b, name)[item]) for name in names]

    before, box = both("left", "top", "width", "height")
    if box != before:
        values["box"] = box
    before, resized = both("resized_width", "resized_height")
    if resized not in (before, box[2:]):
        values["resized"] = resized
    before, crop = both("crop_left", "crop_top", "out_width", "out_height")
    if crop not in (before, [0, 0, *resized]):
        values["crop"] = crop
    for axis, words in (("hflip", "left to right"), ("vflip", "top to bottom")):
        if getattr(new, axis)[item] != getattr(old, axis)[at]:
            values["flip"] = words
    for changed, parameters in new.steps[len(old.steps) :]:
        if op.flip_axis and parameters[item][0]:
            values["flip"] = "left to right" if op.flip_axis == 3 else "top to bottom"
        elif isinstance(changed, Op):
            values |= changed.say(parameters[item].tolist())
    return values


def _parts(plan: Plan) -> list[Plan]:
    return [*plan.before, plan]


def box_of(plan: Plan, item: int) -> list[float]:
    """The part of the upright source image that a plan keeps, [x0, y0, x1, y1] in its pixels."""
    b = _parts(plan)[0].boxes
    left, top, width, height = (int(getattr(b, name)[item]) for name in ("left", "top", "width", "height"))
    across, down = width / max(1, int(b.resized_width[item])), height / max(1, int(b.resized_height[item]))
    x, y = left + int(b.crop_left[item]) * across, top + int(b.crop_top[item]) * down
    return [x, y, x + int(b.out_width[item]) * across, y + int(b.out_height[item]) * down]
