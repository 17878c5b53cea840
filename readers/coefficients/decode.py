"""Decode any box of an image kept as coefficients, at 1/1, 1/2, 1/4 or 1/8 of its size, to libjpeg-turbo's pixels.

Also decodes boxes of most JPEGs without their surroundings. `decode_resized` computes torch's antialiased resize of
these pixels, bit for bit, without storing them all: a separate resize takes about as long as decoding the
box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.coefficients.compiled import load_codec, unsupported_reason
from readers.coefficients.layout import MEDIUM, Shape, check_sum, is_coefficients, parse_coefficients
from readers.decode.region import Region, Scratch, check_header, readable_frame, upright
from readers.headers import ImageHeader
from readers.headers.base import Buffer

if TYPE_CHECKING:
    from readers.augment.geometry import Plan

MAX_SHRINK = 4
_MAX_SIDE = 4096
_JPEG = b"\xff\xd8\xff"
_BYTES = (None, False)
Table: TypeAlias = npt.NDArray[np.int64]
_LEAST_SIDE = 64  # least side of a JPEG: for smaller ones TurboJPEG uses other scales, and nothing is gained


class Scaling(NamedTuple):
    """The conversion of bytes to floats: value * factor + summand, by colour. both: float32 [2, 3], factors, summands.

    is_fused: whether results are rounded once, as by a fused multiply-add, for pixels [height, width, 3] in memory;
    results in [3, height, width] are rounded twice.
    """

    both: npt.NDArray[np.float32]
    is_fused: bool


def decode(
    data: Buffer,
    region: Region | None = None,
    out: npt.NDArray[np.uint8] | None = None,
    *,
    is_checked: bool = False,
) -> npt.NDArray[np.uint8]:
    """RGB pixels of a box, upright, uint8 [height, width, 3], as `decode_image` returns for the JPEG and region.

    data: the result of `encode`.
    region: the part that is needed, inside the image (None: all of it).
    out: where to put the pixels, of the shape of the result, with the bytes of a line next to each other. Otherwise
        the result may be a view with negative strides.
    is_checked: this process made these bytes, or has compared their checksum before, so it is not compared again.

    Bytes that are damaged raise BadSampleError; with `is_checked` they may also give wrong pixels, but no other memory
    is read or written. Raises ValueError for a region or `out` that does not fit, UnsupportedCpuError.
    """
    shape = parse_coefficients(data)
    if not is_checked:
        check_sum(data, shape)
    reduce, box = stored_box(shape, region)
    size = box[2:] if shape.orientation < 5 else (box[3], box[2])
    if out is not None and (out.shape != (*size, 3) or out.dtype != np.uint8 or not out.flags.writeable):
        raise ValueError(f"out: expected writable uint8 {(*size, 3)}, found {out.dtype} {out.shape}")
    in_place = out is not None and shape.orientation == 1 and out.strides[1:] == (3, 1)
    pixels = out if out is not None and in_place else np.empty((*box[2:], 3), np.uint8)
    is_coarse = region is not None and region.coarse
    if load_codec().decode(data, shape[:5], _part(reduce, box, is_coarse), pixels):
        raise _damaged(shape)
    turned: npt.NDArray[np.uint8] = upright(pixels, shape.orientation)
    if out is None or in_place:
        return turned if out is None else out
    out[:] = turned
    return out


def decode_jpeg(
    data: Buffer, header: ImageHeader, region: Region, scratch: Scratch | None = None
) -> npt.NDArray[np.uint8] | None:
    """RGB pixels of a box of a JPEG, upright, uint8 [height, width, 3]; None if libjpeg should decode it.

    header: the header of `data`. The result may be a view of `scratch`. Raises ValueError for a region outside the
    image, and UnsupportedCpuError.
    """
    if min(header.height, header.width) < _LEAST_SIDE:
        return None
    reduce, box = stored_box(_shape_of(header), region)
    size = (box[2], box[3], 3)
    count = math.prod(size)
    memory = np.empty(count, np.uint8) if scratch is None else np.frombuffer(scratch.pixels(count), np.uint8, count)
    pixels = memory.reshape(size)
    part = _part(reduce, box, region.coarse)
    if load_codec().decode_jpeg(data, (header.height, header.width), part, pixels):
        return None
    turned: npt.NDArray[np.uint8] = upright(pixels, header.orientation)
    return turned


def decode_resized(
    data: Buffer,
    region: Region,
    resized: tuple[int, int],
    out: npt.NDArray[Any],
    *,
    corner: tuple[int, int] = (0, 0),
    flips: tuple[bool, bool] = (False, False),
    scaling: Scaling | None = None,
    size: tuple[int, int] | None = None,
) -> bool:
    """Resize a box as torch's antialiased bilinear resize does; then crop and flip it into `out`.

    data: coefficients, or a JPEG.
    resized: the (height, width) of the whole box when it is resized.
    out: [height, width, 3], the part of the resized box from `corner` (top, left) on. uint8, or float32 with `scaling`;
        contiguous in each row, or in each row of a colour.
    flips: whether it is mirrored (upside down, left to right).
    size: the (height, width) that the index promises for the upright image.

    False, with undefined contents of `out`, if the caller has to decode and resize: a side of the box is more than
    MAX_SHRINK times its resized length, the result has more than 4096 pixels a side, the image is stored turned or
    mirrored, or `decode_jpeg` leaves the JPEG to libjpeg. Raises the errors of `decode`.
    """
    shape = _shape_for_boxes(data, size)
    if shape is None:
        return False
    reduce, box = stored_box(shape, region)
    height, width, _ = out.shape
    top, left = corner
    if min(top, left) < 0 or min(height, width) < 1 or top + height > resized[0] or left + width > resized[1]:
        raise ValueError(f"corner: {height} x {width} pixels at {corner} are not within the {resized} of the result")
    _check_target(out, scaling)
    if shape.orientation != 1 or max(resized) > _MAX_SIDE:
        return False
    if box[2] > MAX_SHRINK * resized[0] or box[3] > MAX_SHRINK * resized[1]:
        return False
    is_jpeg = _check_bytes(data, shape)
    to = *resized, top, left, 2 * flips[0] + flips[1]
    numbers = np.array([(0, is_jpeg, *shape[:5], *_part(reduce, box, region.coarse), *to)], np.int64)
    if load_codec().resize((data,), numbers, out[None], *(scaling or _BYTES))[0]:
        if not is_jpeg:
            raise _damaged(shape)
        return False
    return True


def tabulate_boxes(plan: Plan, sides: Any) -> Table | None:
    """The table for `decode_boxes`, int64 [n, 12]: for each image whether it may be decoded by it, and how; or None if
    none may.

    plan: a plan of one part, without ops on pixels. sides: heights and widths of the upright images, int64 [n] each.
    """
    if plan.before or plan.steps or unsupported_reason():
        return None
    boxes = plan.boxes
    scale = boxes.reduce
    top, left = boxes.top // scale, boxes.left // scale
    rows = np.minimum(-(-boxes.height // scale), -(-sides[0] // scale) - top)
    columns = np.minimum(-(-boxes.width // scale), -(-sides[1] // scale) - left)
    to_rows, to_columns = boxes.resized_height, boxes.resized_width
    may = (rows != to_rows) | (columns != to_columns)  # else only crops are left to do
    may &= (np.minimum(boxes.crop_top, boxes.crop_left) >= 0) & (np.maximum(to_rows, to_columns) <= _MAX_SIDE)
    may &= (boxes.crop_top + boxes.out_height <= to_rows) & (boxes.crop_left + boxes.out_width <= to_columns)
    may &= (rows > 0) & (columns > 0) & (rows <= MAX_SHRINK * to_rows) & (columns <= MAX_SHRINK * to_columns)
    may[list(boxes.bad)] = False
    part = 8 // scale, (scale < 8) & ~boxes.coarse, top, left, rows, columns
    to = to_rows, to_columns, boxes.crop_top, boxes.crop_left, 2 * plan.vflip + plan.hflip
    return np.stack((may, *part, *to), axis=1).astype(np.int64) if may.any() else None


def decode_boxes(
    images: Sequence[Buffer | Exception],
    table: Table,
    sizes: Sequence[tuple[int, int]],
    out: npt.NDArray[Any],
    scaling: Scaling | None = None,
    *,
    jpegs: bool = True,
) -> list[bool]:
    """`decode_resized` of several images at once; returns which ones are in `out` [n, height, width, 3].

    table: from `tabulate_boxes`. sizes: (height, width) of the upright images. jpegs: whether to decode JPEGs. Damaged
    images are left out, too; the rows of images that are left out have arbitrary content.
    """
    done = [False] * len(images)
    rows, shapes, chosen = [], [], []
    for row, may in enumerate(table[:, 0].tolist()):
        data = images[row]
        if not may or isinstance(data, Exception) or not (is_coefficients(data) or (jpegs and data[:3] == _JPEG)):
            continue
        try:
            shape = _shape_for_boxes(data, sizes[row])
            if shape is not None and shape.orientation == 1:
                shapes.append((row, _check_bytes(data, shape), *shape[:5]))
                rows.append(row)
                chosen.append(data)
        except BadSampleError:
            pass  # raised again when the image is decoded alone
    if rows:
        numbers = np.concatenate((np.array(shapes, np.int64), table[rows, 1:]), axis=1)
        reasons = load_codec().resize(chosen, numbers, out, *(scaling or _BYTES))
        for row, reason in zip(rows, reasons, strict=True):
            done[row] = not reason
    return done


def _shape_for_boxes(data: Buffer, size: tuple[int, int] | None) -> Shape | None:
    """The shape of an image that the codec may decode, else None. Raises BadSampleError."""
    if is_coefficients(data):
        shape = parse_coefficients(data)
        check_header(shape.header, size)
        return shape
    header, frame = readable_frame(data, size)
    return _shape_of(header) if frame and min(header.height, header.width) >= _LEAST_SIDE else None


def _check_bytes(data: Buffer, shape: Shape) -> bool:
    """Whether it is a JPEG; compares the checksum of coefficients. Raises BadSampleError."""
    if not shape.total_bytes:
        return True
    check_sum(data, shape)
    return False


def _check_target(out: npt.NDArray[Any], scaling: Scaling | None) -> None:
    """Raise ValueError for memory that the codec cannot write to."""
    _, across, colour = out.strides
    kind = np.dtype(np.uint8 if scaling is None else np.float32)
    fits = across == kind.itemsize or (across, colour) == (3 * kind.itemsize, kind.itemsize)
    if out.dtype != kind or out.shape[2] != 3 or not out.flags.writeable or not fits:
        raise ValueError(f"out: expected writable {kind} [height, width, 3], found {out.dtype} {out.shape}")


def stored_box(shape: Shape, region: Region | None) -> tuple[int, tuple[int, int, int, int]]:
    """The scale, and the box (top, left, height, width) in stored pixels at that scale. Raises ValueError."""
    height, width = shape.upright_size
    if region is None:
        region = Region(0, 0, height, width)
    reduce = region.reduce
    if reduce not in (1, 2, 4, 8):
        raise ValueError(f"region: a scale of 1/1, 1/2, 1/4 or 1/8, not 1/{reduce}")
    if shape.orientation != 1 and (height % reduce or width % reduce):
        reduce = 1  # as `decode_image`: the decoder counts its squares from the stored corner, which is another one
    top, left = region.top // reduce, region.left // reduce
    full = -(-height // reduce), -(-width // reduce)
    rows = min(-(-region.height // reduce), full[0] - top)
    columns = min(-(-region.width // reduce), full[1] - left)
    if top < 0 or left < 0 or rows < 1 or columns < 1:
        raise ValueError(f"region: {region} is not within the {height} x {width} pixels of the image")
    if shape.orientation in (3, 4, 7, 8):
        top = full[0] - top - rows
    if shape.orientation in (2, 3, 6, 7):
        left = full[1] - left - columns
    return reduce, (top, left, rows, columns) if shape.orientation < 5 else (left, top, columns, rows)


def _shape_of(header: ImageHeader) -> Shape:
    """The part of a JPEG's shape that determines boxes."""
    return Shape(header.height, header.width, 1, 1, 1, header.orientation, 0)


def _part(reduce: int, box: tuple[int, int, int, int], is_coarse: bool) -> tuple[int, ...]:
    """A region in the form of the codec's arguments."""
    return 8 // reduce, reduce < 8 and not is_coarse, *box


def _damaged(shape: Shape) -> BadSampleError:
    return BadSampleError(f"{MEDIUM} image: its parts do not fit into its {shape.total_bytes} bytes (damaged)")
