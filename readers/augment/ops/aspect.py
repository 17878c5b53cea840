"""Shapes for images of different proportions: each image goes to the one nearest to its own, so that little is cut off.

`readers.order.Bucketed` keeps a step to one of them, as batches have images of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from readers.augment.geometry import Planner
from readers.augment.ops.base import MAX_SIDE, Floats, Interpolation, Op, Stage, check_choice
from readers.sample import ImageInfo, upright_sides

__all__ = ["AspectBuckets", "ResizeToBucket"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AspectBuckets:
    """Shapes, (height, width) in pixels, each of other proportions. Raises ValueError."""

    shapes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        shapes = tuple((int(height), int(width)) for height, width in self.shapes)
        if not shapes or not all(0 < side <= MAX_SIDE for shape in shapes for side in shape):
            raise ValueError(f"shapes are one or more (height, width) from 1 to {MAX_SIDE}, not {self.shapes!r:.200}")
        shapes = tuple(sorted(shapes, key=lambda shape: shape[1] / shape[0]))
        if len({width / height for height, width in shapes}) < len(shapes):
            raise ValueError(f"two shapes have the same proportions, so no image would go to one: {shapes!r:.200}")
        object.__setattr__(self, "shapes", shapes)

    @classmethod
    def of_area(cls, area: int, *, multiple: int = 64, max_aspect: float = 2.0) -> AspectBuckets:
        """For each width that is a multiple of `multiple`, the height that is one and makes at most `area` pixels.

        max_aspect: of the longer side to the shorter one. The square, or what is nearest to it, is always among them.
        """
        if multiple < 1 or area < multiple * multiple or not max_aspect >= 1:
            raise ValueError(
                f"area ({area}) has at least multiple x multiple pixels ({multiple}), max_aspect is 1 or more "
                f"({max_aspect})"
            )
        side = int((area**0.5) // multiple) * multiple
        found = {(side, side)}
        for width in range(multiple, min(area // multiple, MAX_SIDE) + 1, multiple):
            height = area // width // multiple * multiple
            if max(width / height, height / width) <= max_aspect and height <= MAX_SIDE:
                found |= {(height, width), (width, height)}
        # Of shapes with the same proportions the largest remains.
        largest = {width / height: (height, width) for height, width in sorted(found)}
        return cls(tuple(largest.values()))

    def of(self, info: ImageInfo) -> _Ints:
        """The bucket of each image, int64 [n], by the proportions of the upright image (`reader.info`)."""
        return self.of_sides(*upright_sides(info))

    def of_sides(self, heights: npt.ArrayLike, widths: npt.ArrayLike) -> _Ints:
        """The bucket of images with these sides in pixels: that whose logarithm of width / height is nearest.

        A side of 0, of an image whose header cannot be read, counts as 1.
        """
        aspects = np.array([width / height for height, width in self.shapes])
        between = np.sqrt(aspects[1:] * aspects[:-1])  # in the middle of two logarithms
        buckets: _Ints = between.searchsorted(np.maximum(widths, 1) / np.maximum(heights, 1)).astype(np.int64)
        return buckets

    def batch_sizes(self, pixels: int, *, multiple: int = 1) -> tuple[int, ...]:
        """Samples of each bucket that together have at most `pixels` pixels: a multiple of `multiple`, at least one."""
        if pixels < 1 or multiple < 1:
            raise ValueError(f"pixels ({pixels}) and multiple ({multiple}) are 1 or more")
        return tuple(max(pixels // (height * width) // multiple, 1) * multiple for height, width in self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True, slots=True, repr=False)
class ResizeToBucket(Op):
    """The largest box with the proportions of the image's bucket, resized to its shape. Small images are enlarged.

    buckets: an `AspectBuckets`, or its shapes.
    crop: where the box is, in the "center" or "random".

    Where the image can be decoded at 1/2, 1/4 or 1/8, the edges of the box are multiples of 2, 4 or 8 pixels.
    """

    buckets: AspectBuckets | Sequence[tuple[int, int]]
    crop: Literal["center", "random"] = "center"
    interpolation: Interpolation = "bilinear"

    stage: ClassVar[Stage] = Stage.GEOMETRY
    draws: ClassVar[int] = 2
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.buckets, AspectBuckets):
            object.__setattr__(self, "buckets", AspectBuckets(tuple(self.buckets)))
        check_choice(self, "crop", self.crop, ("center", "random"))
        check_choice(self, "interpolation", self.interpolation, get_args(Interpolation))

    @property
    def resize_filter(self) -> Interpolation:
        return self.interpolation

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        assert isinstance(self.buckets, AspectBuckets)
        return None if size is None else self.buckets.shapes[int(self.buckets.of_sides(*size))]

    def plan(self, planner: Planner, u: Floats) -> None:
        assert isinstance(self.buckets, AspectBuckets)
        height, width = planner.height, planner.width
        shapes = np.array(self.buckets.shapes, np.int64)
        rows, columns = shapes[self.buckets.of_sides(height, width)].T
        # Too wide: all rows, and as many columns as the proportions allow; or the other way round.
        box_height = np.minimum(height, np.maximum(1, np.rint(width * rows / columns))).astype(np.int64)
        box_width = np.minimum(width, np.maximum(1, np.rint(height * columns / rows))).astype(np.int64)
        room = height - box_height, width - box_width
        if self.crop == "random":
            top, left = planner.inside(u[:, 0], room[0]), planner.inside(u[:, 1], room[1])
        else:
            top, left = room[0] // 2, room[1] // 2
        planner.crop(self, top, left, box_height, box_width)
        planner.resize(rows, columns, align=True)
