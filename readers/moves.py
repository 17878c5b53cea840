"""How the other fields of a sample follow its image where that is cropped, resized, flipped or turned.

mask            by the same geometry, each pixel from one pixel of the mask. Beyond the edges: `mask_fill`
boxes           what is visible of them; boxes that are not are left out, by `min_visible` and `keep_boxes`
rows of boxes   the arrays and points whose names say that they have a row for each box, "box_labels" for "boxes"
                and "face_box_ages" for "face_boxes": the rows of boxes that are left out are left out as well
points          moved, also beyond the edges, in which case they are outside of the result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.augment.placement import Placement

__all__ = ["MOVING", "FieldMoves", "FieldOptions"]

MOVING = ("mask", "boxes", "points")


@dataclass(frozen=True)
class FieldOptions:
    """How masks and boxes follow their image. Raises ValueError.

    min_visible: the share of its area, 0 to 1, of which a box is left out if less is visible; one that is not visible
        at all is left out in any case.
    keep_boxes: leave out none; nothing is left of the area of a box that would be.
    mask_fill: the number in a mask where the image has no pixels: 0, or what the loss ignores.
    """

    min_visible: float = 0.0
    keep_boxes: bool = False
    mask_fill: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_visible <= 1:
            raise ValueError(f"min_visible is a share from 0 to 1, not {self.min_visible!r}")
        if not 0 <= self.mask_fill <= 255:
            raise ValueError(f"mask_fill is a number from 0 to 255, not {self.mask_fill!r}")


class FieldMoves:
    """What happens to some fields of a sample.

    kinds: of all fields of the set. wanted: the fields that are asked for.
    names: those of them that follow the image. order: all that are needed, boxes before their rows.
    """

    def __init__(self, kinds: Mapping[str, str], wanted: Sequence[str], options: FieldOptions) -> None:
        self._kinds, self._options = kinds, options
        prefixes = {f"{_singular(name)}_": name for name, kind in kinds.items() if kind == "boxes"}
        self._boxes_of = {
            name: boxes
            for name in wanted
            for prefix, boxes in prefixes.items()
            if name.startswith(prefix) and kinds[name] in ("array", "points")
        }
        self.names = tuple(name for name in wanted if kinds[name] in MOVING or name in self._boxes_of)
        self.order = tuple(dict.fromkeys((*self._boxes_of.values(), *wanted)))

    def move(self, name: str, value: Any, placement: Placement, chosen: dict[str, npt.NDArray[np.bool_]]) -> Any:
        """The value of a field of the moved image; fields are moved in their `order`.

        chosen: of one sample, by boxes, those that are kept. Raises BadSampleError.
        """
        kind, options = self._kinds[name], self._options
        if kind == "mask":
            return placement.mask(value, options.mask_fill)
        if kind == "boxes":
            boxes, shares = placement.boxes(value)
            visible = (shares > 0) & (shares >= options.min_visible)
            if options.keep_boxes:
                boxes[~visible, 2:] = boxes[~visible, :2]
                return boxes
            chosen[name] = visible
            return boxes[visible]
        if kind == "points":
            value = placement.points(value)
        rows = chosen.get(self._boxes_of.get(name, ""))
        if rows is None:
            return value
        if not value.ndim or len(value) != len(rows):
            raise BadSampleError(
                f"is {list(value.shape)}, but there are {len(rows)} {self._boxes_of[name]}: expected a row for each"
            )
        return value[rows]


def _singular(name: str) -> str:
    return name[:-2] if name.endswith("boxes") else name
