"""A box of an image from its rows of blocks, in one go: inverse DCT, upsampling and colours, line by line.

Of each component no more is in memory than the row of blocks that a line of pixels needs, or two where lines are
interpolated, so samples stay in the cache next to the core until they are pixels.

A caller that wants lines of pixels makes a plan, begins, and asks for the samples of one line after another:
`decode_box` here, `resize_box` in `kernels.resizing`. `kernels.strips` decodes rows of blocks of a JPEG itself.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.colours import (
    blend_16,
    grey_16,
    repeat_16,
    rgb_32,
    widen_16_even,
    widen_16_odd,
    widen_rows_even,
    widen_rows_odd,
)
from readers.coefficients.kernels.packing import copy_bytes, read_row
from readers.coefficients.kernels.vectors import load_u8, load_u32, store_u8

__all__ = [
    "MARGIN",
    "SOURCE",
    "aligned",
    "begin",
    "decode_box",
    "last_line",
    "line_at",
    "next_line",
    "plan_components",
    "repeat_edges",
    "samples_of",
    "write_line",
    "write_pixels",
]

MARGIN = 64  # samples that may be read or written on both sides of a line
_TAIL_BYTES = 32
_TABLES_AT, _TABLE_BYTES, _INDEX_BYTES, _BLOCK = 24, 128, 4, 8
# What `plan` says of a component: the byte at which its index begins, blocks in a row, the byte at which its
# multipliers begin, log2 of the samples that a block gives in a line, whether it is still subsampled across and down
# (0 or 1), samples in a line, and lines
_INDEX, _WIDTH, _STEPS, _SIZE_BITS, _ACROSS, _DOWN, _COLUMNS, _LINES = range(8)
# What changes: blocks from first to last are decoded up to row `_NEXT`, to samples at `_RING`, `_STRIDE` bytes a line;
# of the rows of blocks the last `_MASK` + 1 are kept, a power of two
_FIRST, _LAST, _NEXT, _RING, _STRIDE, _MASK = range(6)

# What the bytes of an image are given as
SOURCE = types.Array(types.uint8, 1, "C", readonly=True)
_number = types.int64
_two = types.UniTuple(_number, 2)


@njit(forceinline=True, error_model="numpy")
def aligned(number):
    """The next number of whole cache lines."""
    return (number + 63) & ~63


@njit(error_model="numpy")
def plan_components(shape, size):
    """What has to be known of each component, int64 [components, 8].

    shape: height, width, components, and how often chroma is subsampled across and down. size: samples of a block of
    luma in a line. As in libjpeg (jdmaster.c), chroma is scaled less than luma where that leaves no samples to make up.
    """
    height, width, components, chroma_across, chroma_down = shape
    plan = np.empty((components, 8), np.int64)
    index, steps = _TABLES_AT + _TABLE_BYTES * components, _TABLES_AT
    for component in range(components):
        across, down = (chroma_across, chroma_down) if component else (1, 1)
        own, bits = size, 0
        while own < _BLOCK and across * size % (2 * own) == 0 and down * size % (2 * own) == 0:
            own *= 2
        while 1 << bits < own:
            bits += 1
        plan[component, _INDEX], plan[component, _STEPS] = index, steps
        plan[component, _WIDTH] = (width + _BLOCK * across - 1) // (_BLOCK * across)
        plan[component, _SIZE_BITS] = bits
        plan[component, _ACROSS], plan[component, _DOWN] = across * size // own - 1, down * size // own - 1
        plan[component, _COLUMNS] = (width * own + _BLOCK * across - 1) // (_BLOCK * across)
        plan[component, _LINES] = (height * own + _BLOCK * down - 1) // (_BLOCK * down)
        index += _INDEX_BYTES * ((height + _BLOCK * down - 1) // (_BLOCK * down))
        steps += _TABLE_BYTES
    return plan


@njit(forceinline=True, error_model="numpy")
def line_at(plan, state, component, line):
    """The address of the first sample that was decoded of a line."""
    bits = plan[component, _SIZE_BITS]
    slot = (line >> bits) & state[component, _MASK]
    inner = line & ((1 << bits) - 1)
    return state[component, _RING] + ((slot << bits) + inner) * state[component, _STRIDE]


@njit(forceinline=True, error_model="numpy")
def begin(plan, top, left, columns, memory, high):
    """The state before the first line of a box: which blocks of each component it needs, and where their samples go.

    high: rows of blocks of luma that are decoded at once; where chroma is interpolated from two rows, twice as many of
    luma are kept then.
    """
    state = np.zeros((3, 6), np.int64)
    kept = 1 + plan[plan.shape[0] - 1, _DOWN]
    for component in range(plan.shape[0]):
        bits, across, down = plan[component, _SIZE_BITS], plan[component, _ACROSS], plan[component, _DOWN]
        first = max((left >> across) - across, 0)
        last = min(((left + columns - 1) >> across) + across, plan[component, _COLUMNS] - 1)
        state[component, _FIRST] = first >> bits
        state[component, _LAST] = (last >> bits) + 1
        state[component, _NEXT] = max((top >> down) - down, 0) >> bits
        samples = (state[component, _LAST] - state[component, _FIRST]) << bits
        state[component, _STRIDE] = aligned(samples + 2 * MARGIN)
        state[component, _RING] = memory + MARGIN
        state[component, _MASK] = (high * kept - 1 if high > 1 else 0) if component == 0 else kept - 1
        memory += (state[component, _STRIDE] << bits) * (1 + state[component, _MASK])
    return state


@njit(forceinline=True, error_model="numpy")
def _decode_rows(image, plan, state, component, wanted, block, places):
    """Decode the rows of blocks up to `wanted`; 1 where the bytes are damaged."""
    data, total = image
    bits, width = plan[component, _SIZE_BITS], plan[component, _WIDTH]
    first, last = state[component, _FIRST], state[component, _LAST]
    stride = state[component, _STRIDE]
    while state[component, _NEXT] < wanted:
        row = state[component, _NEXT]
        entry = data + plan[component, _INDEX] + 4 * row
        begin, end = load_u32(entry), load_u32(entry + 4)
        if begin > end or end > total - _TAIL_BYTES:
            return 1
        target = line_at(plan, state, component, row << bits)
        steps = data + plan[component, _STEPS]
        blocks, samples = (width, first, last), (target, stride)
        if read_row(data + begin, data + end, blocks, steps, 1 << bits, samples, block, places):
            return 1
        repeat_edges(plan, state, component, target)
        state[component, _NEXT] = row + 1
    return 0


@njit(forceinline=True, error_model="numpy")
def repeat_edges(plan, state, component, target):
    """Of a row of blocks at `target`: the filter sees the outermost samples again beyond the edges."""
    if plan[component, _ACROSS]:
        bits, first = plan[component, _SIZE_BITS], state[component, _FIRST]
        edge = plan[component, _COLUMNS] - (first << bits)
        for _ in range(1 << bits):
            if first == 0:
                store_u8(target - 1, load_u8(target))
            if edge <= (state[component, _LAST] - first) << bits:
                store_u8(target + edge, load_u8(target + edge - 1))
            target += state[component, _STRIDE]


@njit(forceinline=True, error_model="numpy")
def _chroma(plan, state, component, line, left, columns, is_fancy, wide):
    """The address of the chroma of a line from the pixel `left` on; where it is subsampled, it is made at `wide`."""
    across, down = plan[component, _ACROSS], plan[component, _DOWN]
    offset = (left >> across) - (state[component, _FIRST] << plan[component, _SIZE_BITS])
    near = line_at(plan, state, component, line >> down) + offset
    if not is_fancy or (across and plan[component, _COLUMNS] <= 2):
        if not across:
            return near
        for k in range(0, (columns + 2) >> 1, 16):
            repeat_16(near + k, wide + 2 * k)
        return wide + (left & 1)
    if down:
        other = (line >> 1) + (1 if line & 1 else -1)
        other = min(max(other, 0), plan[component, _LINES] - 1)
        far = line_at(plan, state, component, other) + offset
        if not across:
            for k in range(0, columns, 16):
                blend_16(near + k, far + k, 2 if line & 1 else 1, wide + k)
        elif left & 1:
            for k in range(0, (columns + 1) >> 1, 16):
                widen_rows_odd(near + k, far + k, wide + 2 * k)
        else:
            for k in range(0, (columns + 1) >> 1, 16):
                widen_rows_even(near + k, far + k, wide + 2 * k)
        return wide
    if not across:
        return near
    if left & 1:
        for k in range(0, (columns + 1) >> 1, 16):
            widen_16_odd(near + k, wide + 2 * k)
    else:
        for k in range(0, (columns + 1) >> 1, 16):
            widen_16_even(near + k, wide + 2 * k)
    return wide


@njit(error_model="numpy")
def next_line(image, plan, state, line, across, memory, places):
    """0 and the addresses of the samples of Y, Cb and Cr of a line; 1 and nothing where the bytes are damaged.

    Lines are asked for in their order. image: its address and bytes. across: the first column, how many, and whether
    chroma is interpolated. memory: addresses for a block, and for a line of blue and of red.
    """
    block, blue, red = memory
    for component in range(plan.shape[0]):
        wanted = (last_line(plan, component, line) >> plan[component, _SIZE_BITS]) + 1
        if _decode_rows(image, plan, state, component, wanted, block, places):
            return 1, 0, 0, 0
    luma, cb, cr = samples_of(plan, state, line, across, blue, red)
    return 0, luma, cb, cr


@njit(forceinline=True, error_model="numpy")
def last_line(plan, component, line):
    """The last line of a component that a line of pixels needs."""
    if plan[component, _DOWN]:
        return min((line >> 1) + 1, plan[component, _LINES] - 1)
    return line


@njit(error_model="numpy")
def samples_of(plan, state, line, across, blue, red):
    """The addresses of the samples of Y, Cb and Cr of a line whose blocks are decoded; see `next_line`."""
    left, columns, is_fancy = across
    luma = line_at(plan, state, 0, line) + left - (state[0, _FIRST] << plan[0, _SIZE_BITS])
    if plan.shape[0] == 1:
        return luma, luma, luma
    cb = _chroma(plan, state, 1, line, left, columns, is_fancy, blue)
    return luma, cb, _chroma(plan, state, 2, line, left, columns, is_fancy, red)


@njit(error_model="numpy")
def write_pixels(luma, blue, red, columns, target, spare):
    """A line of RGB; nothing is written behind it."""
    for x in range(0, columns - 31, 32):
        rgb_32(luma + x, blue + x, red + x, target + 3 * x)
    if columns & 31:
        if columns > 32:
            x = columns - 32
            rgb_32(luma + x, blue + x, red + x, target + 3 * x)
        else:
            rgb_32(luma, blue, red, spare)
            copy_bytes(spare, target, 3 * columns)


@njit(error_model="numpy")
def _write_grey(luma, columns, target, spare):
    for x in range(0, columns - 15, 16):
        grey_16(luma + x, target + 3 * x)
    rest = columns & 15
    if rest:
        grey_16(luma + columns - rest, spare)
        copy_bytes(spare, target + 3 * (columns - rest), 3 * rest)


@njit(forceinline=True, error_model="numpy")
def write_line(components, luma, blue, red, columns, target, spare):
    """A line of RGB from its samples; nothing is written behind it. spare: the address of 96 bytes."""
    if components == 1:
        _write_grey(luma, columns, target, spare)
    else:
        write_pixels(luma, blue, red, columns, target, spare)


@njit(
    _number(
        *(SOURCE, types.UniTuple(_number, 5), types.Tuple((_number, types.boolean)), types.UniTuple(_number, 4)),
        *(_two, _number, types.int64[::1]),
    ),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def decode_box(source, shape, scale, box, pixels, memory, places):
    """RGB of a box.

    source: the bytes of an image, whose header was checked. shape: see `plan_components`. scale: samples of a block of
    luma in a line, and whether chroma is interpolated. box: top, left, height and width, at that scale. pixels: the
    address for them, and the bytes from line to line. memory: the address of as many bytes as `memory_bytes` says.
    places: SPARSE to WORKING. Returns 0, or 1 where the bytes are damaged; then nothing outside of them was read, and
    the pixels are not valid.
    """
    image = source.ctypes.data, len(source)
    top, left, lines, columns = box
    target, stride = pixels
    block = aligned(memory)
    spare = block + 128
    blue = spare + 128
    red = blue + aligned(columns + 2 * MARGIN)
    plan = plan_components(shape, scale[0])
    state = begin(plan, top, left, columns, red + aligned(columns + 2 * MARGIN), 1)
    across = left, columns, scale[1]
    for line in range(top, top + lines):
        status, luma, cb, cr = next_line(image, plan, state, line, across, (block, blue, red), places)
        if status:
            return 1
        write_line(plan.shape[0], luma, cb, cr, columns, target, spare)
        target += stride
    return 0
