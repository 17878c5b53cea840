"""Any box of an image that is kept as coefficients, at 1/1, 1/2, 1/4 or 1/8 of its size: libjpeg-turbo's pixels."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.coefficients.compiled import load_functions
from readers.coefficients.layout import (
    INDEX_BYTES,
    MEDIUM,
    SPARSE_TO_WORKING,
    TABLE_BYTES,
    TABLES_AT,
    Shape,
    blocks_of,
    check_sum,
    parse_coefficients,
)
from readers.decode.region import Region, upright
from readers.headers.base import Buffer

__all__ = ["box_plan", "decode", "memory_bytes", "stored_box"]

_BLOCK = 8
_local = threading.local()


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


def stored_box(shape: Shape, region: Region | None) -> tuple[int, tuple[int, int, int, int]]:
    """The scale, and (top, left, height, width) in the pixels as stored, at that scale. Raises ValueError."""
    height, width = shape.header.upright_size
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
    functions = load_functions()
    source = np.frombuffer(data, np.uint8)
    size = 8 // reduce
    memory = _memory(box[3])
    image, lines = (source.ctypes.data, shape.total_bytes), (out.ctypes.data, out.strides[0])
    plan, is_fancy = box_plan(shape, size), is_fancy and size > 1
    status = functions.decode_box(image, plan, box, is_fancy, lines, memory.ctypes.data, SPARSE_TO_WORKING)
    if status:
        raise BadSampleError(f"{MEDIUM} image: its parts do not fit into its {shape.total_bytes} bytes (damaged)")
    return out


def box_plan(shape: Shape, size: int) -> npt.NDArray[np.int64]:
    """What the compiled function has to know of each component, int64 [components, 8].

    size: samples of a block of luma in a line. As in libjpeg (jdmaster.c), chroma is scaled less than luma where that
    leaves no samples to make up.
    """
    plan = np.empty((shape.components, 8), np.int64)
    index, steps = shape.index_at, TABLES_AT
    for component in range(shape.components):
        across, down = (shape.across, shape.down) if component else (1, 1)
        rows, blocks = blocks_of(shape, component)
        own = size
        while own < _BLOCK and not across * size % (2 * own) and not down * size % (2 * own):
            own *= 2
        columns = -(-shape.width * own // (across * _BLOCK))
        lines = -(-shape.height * own // (down * _BLOCK))
        ratios = across * size // own - 1, down * size // own - 1
        plan[component] = (index, blocks, steps, own.bit_length() - 1, *ratios, columns, lines)
        index += INDEX_BYTES * rows
        steps += TABLE_BYTES
    return plan


def memory_bytes(columns: int) -> int:
    """What the compiled function needs for a box of so many columns: lines of blocks, two rows of three components at
    most, two lines of chroma, and room at their ends."""
    return 512 + 50 * (columns + 256)


def _memory(columns: int) -> npt.NDArray[np.uint8]:
    """Memory of this thread."""
    memory: npt.NDArray[np.uint8] | None = getattr(_local, "memory", None)
    if memory is None or len(memory) < memory_bytes(columns):
        memory = _local.memory = np.empty(memory_bytes(columns) * 3 // 2, np.uint8)
    return memory
