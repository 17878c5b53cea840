"""Any box of an image that is kept as coefficients, at 1/1, 1/2, 1/4 or 1/8 of its size: libjpeg-turbo's pixels.

`decode_resized` makes what torch's antialiased resize makes of these pixels, to the bit, without ever having them all:
a resize by itself takes about as long as decoding the box.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.coefficients.compiled import load_functions
from readers.coefficients.layout import (
    MEDIUM,
    SPARSE_TO_WORKING,
    Shape,
    check_sum,
    parse_coefficients,
)
from readers.decode.region import Region, check_header, upright
from readers.headers.base import Buffer

__all__ = [
    "MAX_SHRINK",
    "Scaling",
    "address_of",
    "decode",
    "decode_resized",
    "memory_bytes",
    "resize_bytes",
    "stored_box",
    "working_memory",
]

MAX_SHRINK = 4
_MAX_SIDE = 4096


def decode(
    data: Buffer,
    region: Region | None = None,
    out: npt.NDArray[np.uint8] | None = None,
    *,
    is_checked: bool = False,
) -> npt.NDArray[np.uint8]:
    """RGB pixels of a box, upright, uint8 [height, width, 3]: those that `decode_image` gives for the JPEG and region.

    data: what `encode` returned.
    region: the part that is needed, inside the image (None: all of it).
    out: where to put the pixels, of the shape of the result, with the bytes of a line next to each other. Otherwise
        the result may be a view with negative strides.
    is_checked: this process made these bytes, or has compared their checksum before, so it is not compared again.

    Bytes that are damaged raise BadSampleError; with `is_checked` they may also give wrong pixels, but no other memory
    is read or written. Raises ValueError for a region or `out` that does not fit, MissingExtraError,
    UnsupportedCpuError.
    """
    shape = parse_coefficients(data)
    if not is_checked:
        check_sum(data, shape)
    reduce, box = stored_box(shape, region)
    size = box[2:] if shape.orientation < 5 else (box[3], box[2])
    if out is not None and (out.shape != (*size, 3) or out.dtype != np.uint8 or not out.flags.writeable):
        raise ValueError(f"out: expected writable uint8 {(*size, 3)}, found {out.dtype} {out.shape}")
    if out is not None and shape.orientation == 1 and out.strides[1:] == (3, 1):
        return _decoded(data, shape, box, reduce, is_fancy=region is None or not region.coarse, out=out)
    pixels = np.empty((*box[2:], 3), np.uint8)
    _decoded(data, shape, box, reduce, is_fancy=region is None or not region.coarse, out=pixels)
    turned: npt.NDArray[np.uint8] = upright(pixels, shape.orientation)
    if out is None:
        return turned
    out[:] = turned
    return out


class Scaling:
    """How bytes become floats: value * factor + summand, by colour; both float32 [3].

    is_fused: rounded once, as by a fused multiplication and addition, where pixels are [height, width, 3] in memory.
    Of [3, height, width] they are rounded twice.
    """

    def __init__(self, factors: npt.NDArray[np.float32], summands: npt.NDArray[np.float32], is_fused: bool) -> None:
        self.is_fused = is_fused
        both = np.stack((factors, summands)).astype(np.float32)
        self._pixels = np.ascontiguousarray(np.tile(both, 8))
        self._planes = np.ascontiguousarray(np.repeat(both, 8, axis=1))

    def addresses(self) -> tuple[int, int]:
        """Of 24 factors and 24 summands: for eight pixels in a row, and colour by colour. Valid as long as this is."""
        return address_of(self._pixels), address_of(self._planes)


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
    """A box as torch resizes it, bilinearly and with antialiasing; cropped, then mirrored, into `out`.

    resized: the (height, width) of the whole box when it is resized.
    out: [height, width, 3]: what is wanted of that, from its `corner` (top, left) on. uint8, or float32 with `scaling`;
        the bytes of a line next to each other, or of floats those of a line of a colour.
    flips: whether it is mirrored (upside down, left to right).
    size: the (height, width) that the index promises for the upright image.

    False, and nothing done, for what `decode` and a resize are for: a side of the box more than MAX_SHRINK times what
    it is resized to, a result of more than 4096 pixels a side, an image that is stored turned or mirrored.
    Raises what `decode` raises.
    """
    shape = parse_coefficients(data)
    check_header(shape.header, size)
    reduce, box = stored_box(shape, region)
    height, width, _ = out.shape
    top, left = corner
    if min(top, left) < 0 or min(height, width) < 1 or top + height > resized[0] or left + width > resized[1]:
        raise ValueError(f"corner: {height} x {width} pixels at {corner} are not within the {resized} of the result")
    pixels = _target(out, scaling)
    if shape.orientation != 1 or max(resized) > _MAX_SIDE:
        return False
    if box[2] > MAX_SHRINK * resized[0] or box[3] > MAX_SHRINK * resized[1]:
        return False
    check_sum(data, shape)
    resize = *resized, top, left, height, width, 2 * flips[0] + flips[1]
    memory = working_memory.address(resize_bytes(box[3], height, width))
    scale = 8 // reduce, reduce < 8 and not region.coarse
    source = np.frombuffer(data, np.uint8, shape.total_bytes)
    if load_functions().resize_box(source, shape[:5], scale, box, resize, pixels, memory, SPARSE_TO_WORKING):
        raise _damaged(shape)
    return True


def _target(out: npt.NDArray[Any], scaling: Scaling | None) -> tuple[int, int, int, int, int]:
    """Where pixels are written, and as what: see `kernels.resizing`. Raises ValueError."""
    down, across, colour = out.strides
    kind = np.uint8 if scaling is None else np.float32
    if out.dtype == kind and out.shape[2] == 3 and out.flags.writeable:
        if scaling is None and (across, colour) == (3, 1):
            return address_of(out), down, 0, 0, 0
        if scaling is not None and (across, colour) == (12, 4):
            return address_of(out), down, 0, 2 if scaling.is_fused else 1, scaling.addresses()[0]
        if scaling is not None and across == 4:
            return address_of(out), down, colour, 3, scaling.addresses()[1]
    raise ValueError(f"out: expected writable {np.dtype(kind)} [height, width, 3], found {out.dtype} {out.shape}")


def stored_box(shape: Shape, region: Region | None) -> tuple[int, tuple[int, int, int, int]]:
    """The scale, and (top, left, height, width) in the pixels as stored, at that scale. Raises ValueError."""
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


def _decoded(
    data: Buffer,
    shape: Shape,
    box: tuple[int, int, int, int],
    reduce: int,
    *,
    is_fancy: bool,
    out: npt.NDArray[np.uint8],
) -> npt.NDArray[np.uint8]:
    """Decode a box into `out`, whose lines are not interrupted. Raises BadSampleError."""
    source, memory = np.frombuffer(data, np.uint8, shape.total_bytes), working_memory.address(memory_bytes(box[3]))
    lines = address_of(out), out.strides[0]
    scale = 8 // reduce, is_fancy and reduce < 8
    if load_functions().decode_box(source, shape[:5], scale, box, lines, memory, SPARSE_TO_WORKING):
        raise _damaged(shape)
    return out


def _damaged(shape: Shape) -> BadSampleError:
    return BadSampleError(f"{MEDIUM} image: its parts do not fit into its {shape.total_bytes} bytes (damaged)")


def memory_bytes(columns: int) -> int:
    """What functions that decode need for a box of so many columns: up to four rows of blocks of luma and two of each
    chroma component, two lines of chroma, and room at their ends."""
    return 768 + 68 * (columns + 256)


def resize_bytes(columns: int, height: int, width: int) -> int:
    """What `resize_box` needs for a box of so many columns and its result: that, two lines in three colours, weights
    for every line and column of the result, the lines that are combined to one of it, and that one."""
    return memory_bytes(columns) + 6 * (columns + 256) + 40 * height + 24 * (width + 8) + 99 * (width + 32) + 768


def address_of(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Memory(threading.local):
    """Memory of this thread, in which functions work."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._at = 0

    def address(self, size: int) -> int:
        """Of at least so many bytes, until the next call."""
        if len(self._bytes) < size:
            self._bytes = np.empty(size * 3 // 2, np.uint8)
            self._at = address_of(self._bytes)
        return self._at


working_memory = _Memory()
