"""Crops at a fixed place, in the centre or at random, and resizes of a whole image or a random box, with Pillow's
antialiased filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    MAX_SIDE,
    Floats,
    Interpolation,
    Op,
    Size,
    Stage,
    check_choice,
    check_range,
    check_size,
    sides,
    tried_sides,
)
from readers.table import ImageInfo, upright_sides

_TRIES = 10
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, repr=False)
class Crop(Op):
    """Crop a fixed box. The image must contain it. All values in pixels."""

    top: int
    left: int
    height: int
    width: int

    stage: ClassVar[Stage] = Stage.GEOMETRY
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, (self.height, self.width))
        if not (0 <= self.top <= MAX_SIDE and 0 <= self.left <= MAX_SIDE):
            raise ValueError(f"Crop: a corner is at 0 to {MAX_SIDE}, not {(self.top, self.left)}")

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.height, self.width

    def plan(self, planner: Planner, u: Floats) -> None:
        planner.crop(self, self.top, self.left, self.height, self.width)


@dataclass(frozen=True, slots=True, repr=False)
class CenterCrop(Op):
    """Crop `size` pixels at the centre. The image must be at least that large."""

    size: Size

    stage: ClassVar[Stage] = Stage.GEOMETRY
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, self.size)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        height, width = sides(self.size)
        # Halves go to the even neighbour, as in torchvision.
        top, left = np.rint((planner.height - height) / 2), np.rint((planner.width - width) / 2)
        planner.crop(self, top.astype(np.int64), left.astype(np.int64), height, width)


@dataclass(frozen=True, slots=True, repr=False)
class RandomCrop(Op):
    """Crop `size` pixels at a random place.

    padding: black pixels added at each edge: one number, or (top and bottom, left and right). The padded image must be
    at least as large as the crop. A padded crop comes after the resize.
    """

    size: Size
    padding: int | tuple[int, int] = 0

    stage: ClassVar[Stage] = Stage.GEOMETRY
    draws: ClassVar[int] = 2
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, self.size)
        both = sides(self.padding)
        if len(both) != 2 or not all(isinstance(side, int) and 0 <= side <= MAX_SIDE for side in both):
            raise ValueError(
                f"RandomCrop: padding is one or two whole numbers from 0 to {MAX_SIDE}, not {self.padding!r}"
            )

    @property
    def hangs_over(self) -> bool:
        return any(sides(self.padding))

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        (height, width), (above, before) = sides(self.size), sides(self.padding)
        top = planner.inside(u[:, 0], planner.height + 2 * above - height) - above
        left = planner.inside(u[:, 1], planner.width + 2 * before - width) - before
        planner.crop(self, top, left, height, width, over=(above, before))


@dataclass(frozen=True, slots=True, repr=False)
class Resize(Op):
    """Resize to `size`; a single number is the short side, and the proportions are kept."""

    size: Size
    interpolation: Interpolation = "bilinear"

    stage: ClassVar[Stage] = Stage.GEOMETRY

    def __post_init__(self) -> None:
        check_size(self, self.size)
        check_choice(self, "interpolation", self.interpolation, get_args(Interpolation))

    @property
    def resize_filter(self) -> Interpolation:
        return self.interpolation

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        if isinstance(self.size, int) and (size is None or size[0] != size[1]):
            return None
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        height, width = planner.height, planner.width
        if isinstance(self.size, int):
            short = np.minimum(height, width)
            # Truncated, as torchvision does.
            planner.resize(self.size * height // short, self.size * width // short)
        else:
            planner.resize(*self.size)


@dataclass(frozen=True, slots=True, repr=False)
class RandomResizedCrop(Op):
    """Crop a random box with a share of the area from `scale` and a width / height from `ratio`; resize to `size`.

    After ten failed tries, takes the largest central box within the ratio (Szegedy et al., 2015; as torchvision). If
    the box is so large that the image can be decoded at 1/2, 1/4 or 1/8, its edges are multiples of 2, 4 or 8 pixels.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    stage: ClassVar[Stage] = Stage.GEOMETRY
    draws: ClassVar[int] = 4 * _TRIES
    crops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, self.size)
        check_range(self, "scale", self.scale, 1e-6, 1.0)
        check_range(self, "ratio", self.ratio, 1e-3, 1e3)
        check_choice(self, "interpolation", self.interpolation, get_args(Interpolation))

    @property
    def resize_filter(self) -> Interpolation:
        return self.interpolation

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        return sides(self.size)

    def plan(self, planner: Planner, u: Floats) -> None:
        """u: areas, ratios, tops and lefts of ten tries; the first try that fits is used."""
        height, width = planner.height, planner.width
        tried_width, tried_height = tried_sides(self.scale, self.ratio, height * width, u[:, : 2 * _TRIES])
        fits = (tried_width > 0) & (tried_width <= width[:, None])
        fits &= (tried_height > 0) & (tried_height <= height[:, None])
        rows, first = np.arange(len(height)), fits.argmax(axis=1)
        any_fits = fits[rows, first]
        box_height, box_width = self._largest(height, width)
        box_height = np.where(any_fits, tried_height[rows, first], box_height).astype(np.int64)
        box_width = np.where(any_fits, tried_width[rows, first], box_width).astype(np.int64)
        top = planner.inside(u[rows, 2 * _TRIES + first], height - box_height)
        left = planner.inside(u[rows, 3 * _TRIES + first], width - box_width)
        top = np.where(any_fits, top, (height - box_height) // 2)
        left = np.where(any_fits, left, (width - box_width) // 2)
        planner.crop(self, top, left, box_height, box_width)
        planner.resize(*sides(self.size), align=True)

    def _largest(self, height: _Ints, width: _Ints) -> tuple[_Ints, _Ints]:
        """The sides of the largest box within the bounds of the ratio."""
        ratio = width / height
        box_height = np.where(ratio < self.ratio[0], np.rint(width / self.ratio[0]), height)
        box_width = np.where(ratio > self.ratio[1], np.rint(height * self.ratio[1]), width)
        return np.clip(box_height, 1, height).astype(np.int64), np.clip(box_width, 1, width).astype(np.int64)


# Aspect buckets: each image gets the shape with the nearest proportions, so that little is cut off. All images of a
# batch need one size, so `readers.order.Bucketed` makes each step from one bucket.


@dataclass(frozen=True)
class AspectBuckets:
    """Shapes, (height, width) in pixels, of different proportions. Raises ValueError."""

    shapes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        shapes = tuple((int(height), int(width)) for height, width in self.shapes)
        if not shapes or not all(0 < side <= MAX_SIDE for shape in shapes for side in shape):
            raise ValueError(f"shapes are one or more (height, width) from 1 to {MAX_SIDE}, not {self.shapes!r:.200}")
        shapes = tuple(sorted(shapes, key=lambda shape: shape[1] / shape[0]))
        if len({width / height for height, width in shapes}) < len(shapes):
            raise ValueError(f"two shapes have the same proportions, so one would get no image: {shapes!r:.200}")
        object.__setattr__(self, "shapes", shapes)

    @classmethod
    def of_area(cls, area: int, *, multiple: int = 64, max_aspect: float = 2.0) -> AspectBuckets:
        """Shapes with sides that are multiples of `multiple`: for each width the largest height within `area` pixels.

        max_aspect: largest ratio of the longer to the shorter side. The largest square is always included.
        """
        if multiple < 1 or area < multiple * multiple or not max_aspect >= 1:
            raise ValueError(
                f"expected an area of at least multiple x multiple pixels and max_aspect of at least 1, found "
                f"area={area}, multiple={multiple}, max_aspect={max_aspect}"
            )
        side = int((area**0.5) // multiple) * multiple
        shapes = {(side, side)}
        for width in range(multiple, min(area // multiple, MAX_SIDE) + 1, multiple):
            height = area // width // multiple * multiple
            if max(width / height, height / width) <= max_aspect and height <= MAX_SIDE:
                shapes |= {(height, width), (width, height)}
        # Keep the largest of shapes with the same proportions.
        largest = {width / height: (height, width) for height, width in sorted(shapes)}
        return cls(tuple(largest.values()))

    def of(self, info: ImageInfo) -> _Ints:
        """The bucket of each image, int64 [n], by the proportions of the upright image (`reader.info`)."""
        return self.of_sides(*upright_sides(info))

    def of_sides(self, heights: npt.ArrayLike, widths: npt.ArrayLike) -> _Ints:
        """The bucket of images with these sides in pixels: the one with the nearest logarithm of width / height.

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
