"""The contract of an op: one thing that may be done to an image, as a frozen dataclass of plain values; and the
arithmetic that ops share.

An op is a class in this folder plus one entry in `readers.augment.ops`; no executor knows its name. It states

    values      its fields, checked when it is created (ValueError that names the op and the argument)
    stage       where in a list it may stand: geometry and pixels, then normalisation, then batches
    draws       how many random numbers an image takes; `plan` gets them, uniform in [0, 1), float64 [n, draws]. They
                are hashes of (seed, epoch, position, view, place in the list), so nothing is carried from one image to
                the next: threads, ranks and a resume change nothing
    plan        what it does to a batch of n images, before anything is decoded, by calls of `Planner`

and, by its stage, how it is carried out:

    GEOMETRY    `plan` alone: it changes the box, the resize, the final crop or the flips. Every executor takes those
                from the plan: the CPU, torch and the Triton kernel on a GPU, DALI. `size_after` says the size of the
                results, `resize_filter` and `hangs_over` what not every executor can do.
    PIXELS      `plan` turns its draws into parameters, `planner.step(op, parameters)`, and `apply` changes pixels by
                them: float32 [n, 3, height, width], 0 to 255, of one image (CPU) or a whole batch (any device). The
                steps of a list come after its geometry and flips, in the order given, rounded to whole values at the
                end, or where geometry follows. `dali` is the same as a node of a DALI graph, for ops that have one.
                An op that moves pixels says how in `moves`: masks, boxes and points follow (`augment.recipe`).
                With decode="unchanged" `apply` gets images of other depths and channels, if `refuses` lets it: those of
                uint16 are scaled to 0 to 255, with fractions, and those of float32 are as they are.
    NORMALIZE   `Normalize`, which ends the pixels' list and is part of how executors store their results.
    BATCH       `mix` combines the images of a finished batch, and their labels; `plan` does nothing. Its draws belong
                to the position of the first sample of the batch. Loaders of batches alone execute it.

rocAL has no part of an op: it draws by itself, and its pipelines are graphs of its own operators (`readers.rocal`), so
it takes no list of ops at all.

Names and meanings are those of torchvision.transforms. Sizes are pixels of the upright image, one number for a square,
or (height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from enum import IntEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.augment.geometry import Planner

if TYPE_CHECKING:
    import torch

MAX_SIDE = 1 << 15
# ITU-R BT.601, as Pillow's and torchvision's greyscale.
LUMA = (0.299, 0.587, 0.114)

# Of what decode="unchanged" gives: what has a range, from black to white; and what ops without one may interpolate.
RANGED = ("uint8", "uint16")
SMOOTH = (*RANGED, "float32")

Size: TypeAlias = int | tuple[int, int]
Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Sampling: TypeAlias = Literal["bilinear", "nearest"]
Floats: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = tuple[float, float, float, float, float, float]
Rows: TypeAlias = Sequence[Sequence[float]]  # the parameters of n images


class Stage(IntEnum):
    """What an op works on. NORMALIZE comes behind the first two, which may be mixed; BATCH is last."""

    GEOMETRY = 0
    PIXELS = 1
    NORMALIZE = 2
    BATCH = 3


class Op:
    """The base of all ops; see the top of this module.

    named: the names of its parameters, as far as they say something. crops: whether it takes a part of its image.
    flip_axis: 3 where it exchanges left and right, 2 top and bottom, of
    images [n, 3, height, width].
    """

    __slots__ = ()
    stage: ClassVar[Stage]
    draws: ClassVar[int] = 0
    named: ClassVar[tuple[str, ...]] = ()
    crops: ClassVar[bool] = False
    flip_axis: ClassVar[int] = 0

    @property
    def on_dali(self) -> bool:
        """Whether DALI executes it: boxes, Normalize, and what has a node of DALI."""
        return self.stage in (Stage.GEOMETRY, Stage.NORMALIZE) or type(self).dali is not Op.dali

    @property
    def resize_filter(self) -> Interpolation | None:
        """The filter by which it resizes; None for an op that does not."""
        return None

    @property
    def hangs_over(self) -> bool:
        """Whether its crop may reach beyond the edge of the image, where the result is black."""
        return False

    @property
    def sampling(self) -> Sampling | None:
        """PIXELS: how it samples where `moves` is all that it does, so that it becomes one map with the moves next to
        it (`readers.augment.compose`); None for an op that does more. Flips fit with either."""
        return None

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """(height, width) of its results from that of its images; None where it depends on the image."""
        return size

    def refuses(self, dtype: str, channels: int) -> str:
        """Why it does not take images of this dtype and so many channels, which decode="unchanged" gives: "uint8",
        "uint16", "int32" or "float32"; "" where it does. What this does not know to be right is refused."""
        if self.stage is not Stage.PIXELS or (dtype, channels) == ("uint8", 3):
            return ""
        return "is defined for 8-bit RGB"

    def plan(self, planner: Planner, u: Floats) -> None:
        """Say what happens to the images of `planner`, by the draws `u`, float64 [n, draws]."""

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        """PIXELS: `images`, float32 [n, 3, height, width], changed by the parameters of each; may be done in place."""
        raise NotImplementedError(f"{type(self).__name__} is not an op on pixels")

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        """PIXELS: the maps, as `affine` takes them, by which it moves the pixels of an image of this size, in turn."""
        return ()

    def say(self, parameters: Sequence[float]) -> dict[str, Any]:
        """PIXELS: its parameters for one image by name, for JSON."""
        return dict(zip(self.named, parameters, strict=False))

    def mix(self, images: torch.Tensor, labels: torch.Tensor, u: Floats) -> tuple[torch.Tensor, torch.Tensor]:
        """BATCH: finished images [n, 3, height, width] and labels, float32 [n, classes], combined by the draws `u`,
        float64 [draws]; may be done in place."""
        raise NotImplementedError(f"{type(self).__name__} is not an op on batches")

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        """PIXELS: the node of the changed images. dali: the module nvidia.dali. images: the node of images [height,
        width, 3], float32, 0 to 255, on the CPU or a GPU. parameters: that of `dali_parameters`, on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} has no node of DALI")

    def dali_parameters(self, parameters: Floats, heights: Floats, widths: Floats) -> Floats:
        """What `dali` takes for n images of these sizes, [n, k], by the parameters of `planner.step`, [n, j]."""
        return parameters

    def __repr__(self) -> str:
        """With the values that are not the defaults."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]  # every op is a dataclass
            if field.default is MISSING or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"


def sides(size: Size) -> tuple[int, int]:
    """(height, width)."""
    return (size, size) if isinstance(size, int) else size


def check_size(op: Op, size: Size) -> None:
    """Raise ValueError for what is not a size."""
    both: object = sides(size)
    is_pair = isinstance(both, tuple | list) and len(both) == 2
    if not is_pair or not all(isinstance(side, int) and 0 < side <= MAX_SIDE for side in sides(size)):
        raise ValueError(f"{type(op).__name__}: a size is one or two whole numbers from 1 to {MAX_SIDE}, not {size!r}")


def check_range(op: Op, name: str, bounds: Sequence[float], lowest: float, highest: float) -> None:
    """Raise ValueError for what is not (low, high) within these bounds."""
    is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2
    if (
        not is_pair
        or not all(isinstance(bound, Real) for bound in bounds)
        or not lowest <= bounds[0] <= bounds[1] <= highest
    ):
        raise ValueError(f"{type(op).__name__}: {name} is (low, high) within {lowest} to {highest}, not {bounds!r}")


def check_probability(op: Op, p: float) -> None:
    """Raise ValueError for what is not a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{type(op).__name__}: p is a probability from 0 to 1, not {p!r}")


def check_choice(op: Op, name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError for a word that is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{type(op).__name__}: {name} is one of {', '.join(allowed)}, not {value!r}")


def tried_sides(
    scale: tuple[float, float], ratio: tuple[float, float], areas: npt.NDArray[np.int64], u: Floats
) -> tuple[Floats, Floats]:
    """Whole sides, [n, tries] each, of boxes with a share of `areas` from `scale` and a ratio of the first side to the
    second from `ratio`. u: [n, 2 * tries], for the shares and then for the ratios.
    """
    tries = u.shape[1] // 2
    low, high = np.log(ratio[0]), np.log(ratio[1])
    area = areas[:, None] * (scale[0] + (scale[1] - scale[0]) * u[:, :tries])
    quotient = np.exp(low + (high - low) * u[:, tries:])
    return np.rint(np.sqrt(area * quotient)), np.rint(np.sqrt(area / quotient))


def column(images: torch.Tensor, rows: Rows, number: int, plus: float = 0.0) -> Any:
    """Parameter `number` of each image, and `plus`: float32 [n, 1, 1, 1] on the device of the images; for a single
    image a number, which is quicker, and which is rounded to float32 so that results are the same.
    """
    import torch

    if len(rows) == 1:
        return float(np.float32(rows[0][number]) + np.float32(plus))
    values = torch.tensor([row[number] for row in rows], dtype=torch.float32) + plus
    return values.to(images.device, non_blocking=True).view(-1, 1, 1, 1)


def refuses_all_but(dtypes: Sequence[str], dtype: str, channels: int, *, colours: bool = False) -> str:
    """What `Op.refuses` says for an op that takes these dtypes. colours: whether only grey and RGB have a meaning."""
    if dtype not in dtypes:
        return f"is defined for {' and '.join(dtypes)}"
    return "is defined for 1 or 3 channels" if colours and channels not in (1, 3) else ""


def grey(images: torch.Tensor) -> torch.Tensor:
    """[n, 1, height, width], in separate memory."""
    if images.shape[1] == 1:
        return images.clone()
    weighted = [images[:, i : i + 1] * weight for i, weight in enumerate(LUMA)]
    return weighted[0].add_(weighted[1]).add_(weighted[2])


def blend(images: torch.Tensor, other: torch.Tensor, factor: Any) -> torch.Tensor:
    """factor * images + (1 - factor) * other, clamped to 0..255; in place."""
    return images.mul_(factor).add_((1.0 - factor) * other).clamp_(0, 255)


def affine(
    images: torch.Tensor,
    matrices: Sequence[Matrix] | Rows,
    mode: Sampling,
    box: Sequence[int] | None = None,
    fit: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Pixel (x, y) of a result is that at (a x + b y + c, d x + e y + f), for the matrix (a, b, c, d, e, f) of each
    image; x, y in pixels from the centre of the image. Black outside.

    box: (top, left, height, width, …), the part of the results that is wanted; fit: (height, width) that it is resized
    to by the same map."""
    import torch
    import torch.nn.functional as F

    maps = [map_of_halves(matrix, (images.shape[2], images.shape[3]), box, fit) for matrix in matrices]
    rows, columns, top, left, height, width = maps[0][1]
    theta = torch.tensor([by for by, _ in maps]).view(-1, 2, 3).to(images.device, non_blocking=True)
    x, y = (
        torch.arange(2 * start + 1 - side, 2 * (start + count) + 1 - side, 2, device=images.device) / side
        for start, count, side in ((left, width, columns), (top, height, rows))
    )
    # Sums of a row and a column: a third of the time of affine_grid, which multiplies matrices.
    grid = images.new_empty((len(images), height, width, 2))
    for axis in (0, 1):
        by_x, by_y, shift = theta[:, axis, :, None].unbind(1)
        torch.add((by_x * x)[:, None, :], (by_y * y + shift)[:, :, None], out=grid[..., axis])
    return F.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)


def map_of_halves(
    matrix: Sequence[float],
    size: tuple[int, int],
    box: Sequence[int] | None = None,
    fit: tuple[int, int] | None = None,
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """A matrix of `affine` as grid_sample counts, in halves of a side from the centre; and the pixels of the result:
    (rows, columns, top, left, height, width), of which height x width are wanted. size: of the image; box, fit: as for
    `affine`."""
    (height, width), (a, b, c, d, e, f) = size, matrix
    by = (a, b * height / width, 2 * c / width, d * width / height, e, 2 * f / height)
    top, left, rows, columns = (0, 0, *size) if box is None else box[:4]
    if fit is None or fit == (rows, columns):
        return by, (height, width, top, left, rows, columns)
    scales, shifts = (columns / width, rows / height), ((2 * left + columns) / width - 1, (2 * top + rows) / height - 1)
    made: list[float] = []
    for x, y, shift in (by[:3], by[3:]):
        made += (x * scales[0], y * scales[1], x * shifts[0] + y * shifts[1] + shift)
    return tuple(made), (*fit, 0, 0, *fit)


def mirror(axis: int) -> Matrix:
    """The map of `affine` that exchanges left and right (axis 3), or top and bottom (2)."""
    return (-1.0 if axis == 3 else 1.0), 0.0, 0.0, 0.0, (-1.0 if axis == 2 else 1.0), 0.0


def after(first: Matrix, second: Matrix) -> Matrix:
    """The map that does `first`, and then `second`."""
    a, b, c, d, e, f = first
    k, m, n, p, q, r = second
    return k * a + m * d, k * b + m * e, k * c + m * f + n, p * a + q * d, p * b + q * e, p * c + q * f + r


def window(images: torch.Tensor, corner: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """The crop [n, 3, *size] at `corner`: a view, or a copy that is black where it reaches beyond the images."""
    (top, left), (height, width) = corner, size
    below, behind = top + height - images.shape[2], left + width - images.shape[3]
    if min(top, left) >= 0 and max(below, behind) <= 0:
        return images[:, :, top : top + height, left : left + width]
    import torch.nn.functional as F

    return F.pad(images, (-left, behind, -top, below))  # negative numbers crop


# Arithmetic that the ops share as nodes of a DALI graph; images are float32 [height, width, 3], 0 to 255.
#
# The functions do what those above do. DALI's own operators for colours are not used: its
# contrast is about a fixed value, and its hue and saturation are those of another colour space.


def with_images(images: Any, numbers: Any) -> Any:
    """Numbers of each image, where its pixels are: expressions do not mix devices."""
    return numbers.gpu() if images.device == "gpu" else numbers


def grey_node(images: Any) -> Any:
    """[height, width, 1]."""
    red, green, blue = (images[:, :, i : i + 1] * weight for i, weight in enumerate(LUMA))
    return red + green + blue


def rounded_node(dali: Any, images: Any) -> Any:
    """Whole values."""
    return dali.math.floor(images + 0.5)


def blend_node(dali: Any, images: Any, other: Any, factor: Any) -> Any:
    """factor * images + (1 - factor) * other, clamped to 0..255. factor: a node of one number, with the images."""
    return dali.math.clamp(images * factor + other * (1.0 - factor), 0.0, 255.0)


def centred(matrices: Sequence[Matrix], heights: Floats, widths: Floats) -> Floats:
    """The matrices of `affine_node` for n images of these sizes, [n, 6]: from pixels of the result to those of the
    image, counted from the upper left corner. matrices: as `readers.augment.ops.base.affine` takes them."""
    a, b, c, d, e, f = np.array(matrices, np.float64).reshape(-1, 6).T
    x, y = widths / 2, heights / 2
    return np.stack([a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y], axis=1)


def affine_node(dali: Any, images: Any, matrix: Any, mode: Literal["bilinear", "nearest"]) -> Any:
    """Images by their `centred` matrices, a node [6]. Black outside."""
    types = dali.types
    return dali.fn.warp_affine(
        images,
        matrix=dali.fn.reshape(matrix, shape=[2, 3]),
        interp_type=types.INTERP_LINEAR if mode == "bilinear" else types.INTERP_NN,
        fill_value=0,
    )
