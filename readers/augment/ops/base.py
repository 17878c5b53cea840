"""The contract of ops, operations on images as frozen dataclasses of plain values; and arithmetic that ops share.

An op is a class in this folder plus one entry in `readers.augment.ops`; executors do not know its name. It defines

    values      its fields, checked on creation (ValueError that names the op and the argument)
    stage       its place in a list: geometry and pixels, then normalisation, then batches
    draws       the number of random numbers per image; `plan` gets them, uniform in [0, 1), float64 [n, draws]. They
                are hashes of (seed, epoch, position, view, place in the list), so threads, ranks and resumes do not
                change them
    plan        its effect on a batch of n images, before decoding, by calls of `Planner`

and, by its stage, its execution:

    GEOMETRY    `plan` alone: it changes the box, the resize, the final crop or the flips, which every executor takes
                from the plan: the CPU, torch and the Triton kernel on a GPU, DALI. `size_after` is the size of the
                results; `resize_filter` and `hangs_over` are properties that not every executor supports.
    PIXELS      `plan` turns draws into parameters by `planner.step(op, parameters)`, and `apply` changes pixels by
                them: float32 [n, 3, height, width], 0 to 255, of one image (CPU) or a whole batch (any device). The
                pixel ops of a list run after its geometry and flips, in list order; results are rounded to integers at
                the end, and before further geometry. `dali` is the op as a node of a DALI graph, if it has one. An op
                that moves pixels defines `moves`, so that masks, boxes and points follow (`augment.recipe`). With
                decode="unchanged" `apply` gets images of other depths and channels unless `refuses` rejects them:
                uint16 is scaled to 0..255 with fractions, float32 is not scaled.
    NORMALIZE   `Normalize`, the last op on single images; executors apply it when they store results.
    BATCH       `mix` combines the images and labels of a finished batch; `plan` does nothing. Its draws belong to the
                position of the first sample of the batch. Only loaders of batches execute it.

rocAL accepts no ops: it draws its own random numbers, and its pipelines are graphs of its own operators
(`readers.rocal`).

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
# ITU-R BT.601, as in Pillow's and torchvision's greyscale.
LUMA = (0.299, 0.587, 0.114)

# Dtypes with decode="unchanged": those with a range from black to white, and those that may be interpolated.
RANGED = ("uint8", "uint16")
SMOOTH = (*RANGED, "float32")

Size: TypeAlias = int | tuple[int, int]
Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Sampling: TypeAlias = Literal["bilinear", "nearest"]
Floats: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = tuple[float, float, float, float, float, float]
Rows: TypeAlias = Sequence[Sequence[float]]  # the parameters of n images


class Stage(IntEnum):
    """The kind of an op. GEOMETRY and PIXELS may be mixed; NORMALIZE comes after them, BATCH last."""

    GEOMETRY = 0
    PIXELS = 1
    NORMALIZE = 2
    BATCH = 3


class Op:
    """The base of all ops; see the top of this module.

    named: names of its parameters for a report; may be fewer than the parameters. crops: whether it cuts out a part of
    the image. flip_axis: the axis of images [n, 3, height, width] that it flips: 3 for left and right, 2 for top and
    bottom, 0 for none.
    """

    __slots__ = ()
    stage: ClassVar[Stage]
    draws: ClassVar[int] = 0
    named: ClassVar[tuple[str, ...]] = ()
    crops: ClassVar[bool] = False
    flip_axis: ClassVar[int] = 0

    @property
    def on_dali(self) -> bool:
        """Whether DALI can execute it: geometry, Normalize, and ops with a DALI node."""
        return self.stage in (Stage.GEOMETRY, Stage.NORMALIZE) or type(self).dali is not Op.dali

    @property
    def resize_filter(self) -> Interpolation | None:
        """The filter of its resize; None for an op that does not resize."""
        return None

    @property
    def hangs_over(self) -> bool:
        """Whether its crop may reach beyond the edge of the image, where the result is black."""
        return False

    @property
    def sampling(self) -> Sampling | None:
        """PIXELS: the sampling of an op that only moves pixels, so that it can be composed with neighbouring moves
        (`readers.augment.compose`); None for other ops. Flips can be composed with either sampling."""
        return None

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """(height, width) of its results from that of its images; None if it depends on the image."""
        return size

    def refuses(self, dtype: str, channels: int) -> str:
        """Why it rejects images of this dtype and number of channels with decode="unchanged"; "" if it accepts them.

        dtype: "uint8", "uint16", "int32" or "float32". The default rejects images for which an op is not defined.
        """
        if self.stage is not Stage.PIXELS or (dtype, channels) == ("uint8", 3):
            return ""
        return "is defined for 8-bit RGB"

    def plan(self, planner: Planner, u: Floats) -> None:
        """Plan the op for the images of `planner`, by the draws `u`, float64 [n, draws]."""

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        """PIXELS: apply the op to images, float32 [n, 3, height, width], by their parameters; may work in place."""
        raise NotImplementedError(f"{type(self).__name__} is not an op on pixels")

    def moves(self, parameters: Sequence[float], height: int, width: int) -> Sequence[Matrix]:
        """PIXELS: the maps of `affine` by which it moves the pixels of an image of this size, in order."""
        return ()

    def say(self, parameters: Sequence[float]) -> dict[str, Any]:
        """PIXELS: the parameters of one image by name, for JSON."""
        return dict(zip(self.named, parameters, strict=False))

    def mix(self, images: torch.Tensor, labels: torch.Tensor, u: Floats) -> tuple[torch.Tensor, torch.Tensor]:
        """BATCH: combine finished images [n, 3, height, width] and labels, float32 [n, classes], by the draws `u`,
        float64 [draws]; may work in place."""
        raise NotImplementedError(f"{type(self).__name__} is not an op on batches")

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        """PIXELS: the DALI node of the op.

        dali: the module nvidia.dali. images: a node of images [height, width, 3], float32, 0 to 255, on the CPU or a
        GPU. parameters: a node of `dali_parameters`, on the CPU.
        """
        raise NotImplementedError(f"{type(self).__name__} has no node of DALI")

    def dali_parameters(self, parameters: Floats, heights: Floats, widths: Floats) -> Floats:
        """The parameters of `dali` for n images of these sizes, [n, k], from those of `planner.step`, [n, j]."""
        return parameters

    def __repr__(self) -> str:
        """The op with its non-default values."""
        arguments = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]  # every op is a dataclass
            if field.default is MISSING or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


def sides(size: Size) -> tuple[int, int]:
    """(height, width)."""
    return (size, size) if isinstance(size, int) else size


def check_size(op: Op, size: Size) -> None:
    """Raise ValueError for an invalid size."""
    both: object = sides(size)
    is_pair = isinstance(both, tuple | list) and len(both) == 2
    if not is_pair or not all(isinstance(side, int) and 0 < side <= MAX_SIDE for side in sides(size)):
        raise ValueError(f"{type(op).__name__}: a size is one or two whole numbers from 1 to {MAX_SIDE}, not {size!r}")


def check_range(op: Op, name: str, bounds: Sequence[float], lowest: float, highest: float) -> None:
    """Raise ValueError for bounds that are not (low, high) within `lowest` to `highest`."""
    is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2
    if (
        not is_pair
        or not all(isinstance(bound, Real) for bound in bounds)
        or not lowest <= bounds[0] <= bounds[1] <= highest
    ):
        raise ValueError(f"{type(op).__name__}: {name} is (low, high) within {lowest} to {highest}, not {bounds!r}")


def check_probability(op: Op, p: float) -> None:
    """Raise ValueError for an invalid probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{type(op).__name__}: p is a probability from 0 to 1, not {p!r}")


def check_choice(op: Op, name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError for a value that is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{type(op).__name__}: {name} is one of {', '.join(allowed)}, not {value!r}")


def tried_sides(
    scale: tuple[float, float], ratio: tuple[float, float], areas: npt.NDArray[np.int64], u: Floats
) -> tuple[Floats, Floats]:
    """Rounded sides, [n, tries] each, of random boxes: their share of `areas` is from `scale`, and the ratio of the
    first to the second side from `ratio`. u: [n, 2 * tries], draws for the shares, then for the ratios.
    """
    tries = u.shape[1] // 2
    low, high = np.log(ratio[0]), np.log(ratio[1])
    area = areas[:, None] * (scale[0] + (scale[1] - scale[0]) * u[:, :tries])
    quotient = np.exp(low + (high - low) * u[:, tries:])
    return np.rint(np.sqrt(area * quotient)), np.rint(np.sqrt(area / quotient))


def column(images: torch.Tensor, rows: Rows, number: int, plus: float = 0.0) -> Any:
    """Parameter `number` of each image plus `plus`: float32 [n, 1, 1, 1] on the device of the images.

    For a single image a float, which is faster; it is rounded to float32 so that results are the same.
    """
    import torch

    if len(rows) == 1:
        return float(np.float32(rows[0][number]) + np.float32(plus))
    values = torch.tensor([row[number] for row in rows], dtype=torch.float32) + plus
    return values.to(images.device, non_blocking=True).view(-1, 1, 1, 1)


def refuses_all_but(dtypes: Sequence[str], dtype: str, channels: int, *, colours: bool = False) -> str:
    """`Op.refuses` of an op that accepts these dtypes. colours: whether it accepts only grey and RGB images."""
    if dtype not in dtypes:
        return f"is defined for {' and '.join(dtypes)}"
    return "is defined for 1 or 3 channels" if colours and channels not in (1, 3) else ""


def grey(images: torch.Tensor) -> torch.Tensor:
    """Greyscale images, [n, 1, height, width], in separate memory."""
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
    """Warp images by affine maps: pixel (x, y) of a result is the source pixel (a x + b y + c, d x + e y + f), for the
    matrix (a, b, c, d, e, f) of each image; x, y in pixels from the centre of the image. Black outside.

    box: (top, left, height, width, …), the part of the results to compute. fit: (height, width) to which the box is
    resized by the same map.
    """
    import torch
    import torch.nn.functional as F

    maps = [map_of_halves(matrix, (images.shape[2], images.shape[3]), box, fit) for matrix in matrices]
    rows, columns, top, left, height, width = maps[0][1]
    theta = torch.tensor([by for by, _ in maps]).view(-1, 2, 3).to(images.device, non_blocking=True)
    x, y = (
        torch.arange(2 * start + 1 - side, 2 * (start + count) + 1 - side, 2, device=images.device) / side
        for start, count, side in ((left, width, columns), (top, height, rows))
    )
    # Adding a row and a column takes a third of the time of affine_grid, which multiplies matrices.
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
    """A matrix of `affine` in the units of grid_sample, half sides from the centre; and the grid of the result, (rows,
    columns, top, left, height, width), of which height x width pixels are computed.

    size: (height, width) of the image; box, fit: as for `affine`.
    """
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
    """The map of `affine` that flips left and right (axis 3), or top and bottom (axis 2)."""
    return (-1.0 if axis == 3 else 1.0), 0.0, 0.0, 0.0, (-1.0 if axis == 2 else 1.0), 0.0


def after(first: Matrix, second: Matrix) -> Matrix:
    """The composition: `first`, then `second`."""
    a, b, c, d, e, f = first
    k, m, n, p, q, r = second
    return k * a + m * d, k * b + m * e, k * c + m * f + n, p * a + q * d, p * b + q * e, p * c + q * f + r


def window(images: torch.Tensor, corner: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """The crop [n, 3, *size] at `corner`: a view, or a copy with black pixels beyond the images."""
    (top, left), (height, width) = corner, size
    below, behind = top + height - images.shape[2], left + width - images.shape[3]
    if min(top, left) >= 0 and max(below, behind) <= 0:
        return images[:, :, top : top + height, left : left + width]
    import torch.nn.functional as F

    return F.pad(images, (-left, behind, -top, below))  # negative numbers crop


# The functions above as nodes of a DALI graph; images are float32 [height, width, 3], 0 to 255.
#
# DALI's colour operators are not used: its contrast has a fixed centre, and its hue and saturation are in another
# colour space.


def with_images(images: Any, numbers: Any) -> Any:
    """Numbers on the device of the images, because DALI expressions cannot mix devices."""
    return numbers.gpu() if images.device == "gpu" else numbers


def grey_node(images: Any) -> Any:
    """Greyscale images, [height, width, 1]."""
    red, green, blue = (images[:, :, i : i + 1] * weight for i, weight in enumerate(LUMA))
    return red + green + blue


def rounded_node(dali: Any, images: Any) -> Any:
    """Values rounded to integers."""
    return dali.math.floor(images + 0.5)


def blend_node(dali: Any, images: Any, other: Any, factor: Any) -> Any:
    """factor * images + (1 - factor) * other, clamped to 0..255. factor: a node of one number on their device."""
    return dali.math.clamp(images * factor + other * (1.0 - factor), 0.0, 255.0)


def centred(matrices: Sequence[Matrix], heights: Floats, widths: Floats) -> Floats:
    """The matrices of `affine_node` for n images of these sizes, [n, 6]: from pixels of the result to pixels of the
    image, relative to the upper left corner. matrices: as for `affine`."""
    a, b, c, d, e, f = np.array(matrices, np.float64).reshape(-1, 6).T
    x, y = widths / 2, heights / 2
    return np.stack([a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y], axis=1)


def affine_node(dali: Any, images: Any, matrix: Any, mode: Literal["bilinear", "nearest"]) -> Any:
    """Images warped by a node [6] of `centred` matrices. Black outside."""
    types = dali.types
    return dali.fn.warp_affine(
        images,
        matrix=dali.fn.reshape(matrix, shape=[2, 3]),
        interp_type=types.INTERP_LINEAR if mode == "bilinear" else types.INTERP_NN,
        fill_value=0,
    )
