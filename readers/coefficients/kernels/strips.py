"""A box of a baseline JPEG from its entropy-coded data: samples are made of the blocks that the box needs alone.

`decode_strips` goes through the data once, up to the last line of the box. The blocks above and beside the box are
passed over: of those only the DC matters, from which the next ones count.

Reading is bounded as in `entropy`. What libjpeg would warn of ends with a number other than 0: the JPEG is left to it.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.boxes import (
    MARGIN,
    aligned,
    begin,
    last_line,
    line_at,
    plan_components,
    repeat_edges,
    samples_of,
    write_line,
)
from readers.coefficients.kernels.codes import (
    LAST_OF_BLOCK,
    WHOLE_BLOCK,
    filled,
    next_step,
    read_coefficients,
    skip_coefficients,
    value_of,
)
from readers.coefficients.kernels.digits import exceeds
from readers.coefficients.kernels.packing import flat_block
from readers.coefficients.kernels.transforms import inverse_2, inverse_4, inverse_8
from readers.coefficients.kernels.vectors import load_i16, store_i16, store_u64

__all__ = ["decode_strips"]

_LARGEST_DC = 32767
# What `scan` says of a component: blocks of an MCU across and down, the addresses of the tables of DC and AC, of its
# multipliers and of the largest coefficients for them, int16 [64] in the order WORKING
_WIDE, _HIGH, _DC, _AC, _STEPS, _LIMITS = range(6)
# As in `boxes`
_WIDTH, _SIZE_BITS = 1, 3
_FIRST, _LAST, _NEXT, _STRIDE = 0, 1, 2, 4
# Of `cursor`: bits that were read and not used, how many, the address behind them, and where the data ends
_WORD, _LEFT, _PLACE, _STOP = range(4)

_number = types.int64
_two = types.UniTuple(_number, 2)
_four = types.UniTuple(_number, 4)
_options = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(forceinline=True, error_model="numpy")
def _write_block(dc, found, block, steps, size, target, stride):
    """The samples of a block, which is 0 afterwards."""
    if not found:
        flat_block(dc, load_i16(steps), size, target, stride)
        return
    store_i16(block, dc)
    if size == 8:
        inverse_8(block, steps, target, stride)
    elif size == 4:
        inverse_4(block, steps, target, stride)
    elif size == 2:
        inverse_2(block, steps, target, stride)
    for part in range(16):
        store_u64(block + 8 * part, np.uint64(0))


@njit(error_model="numpy")
def _decode_row(cursor, previous, counts, scan, plan, state, bottom, block, places):
    """Decode a row of MCUs; 1 for data that libjpeg would warn of, or that are beyond what is decoded exactly.

    cursor: uint64 [4]. previous: the last DC of each component. counts: the number of the row, and its MCUs. bottom: of
    each component, the last row of blocks that is needed.
    """
    row, across = counts
    word, bits, place = cursor[_WORD], np.int64(cursor[_LEFT]), np.int64(cursor[_PLACE])
    stop = np.int64(cursor[_STOP])
    for column in range(across):
        for component in range(plan.shape[0]):
            wide, high = scan[component, _WIDE], scan[component, _HIGH]
            size_bits = plan[component, _SIZE_BITS]
            steps, ac = scan[component, _STEPS], scan[component, _AC]
            for inner in range(wide * high):
                y = row * high + (inner // wide)
                x = column * wide + inner % wide
                word, bits, place = filled(word, bits, place)
                step = next_step(word, scan[component, _DC], True)
                if step == 0:
                    return 1
                dc = previous[component] + value_of(word, step)
                previous[component] = dc
                word <<= np.uint64(step & 31)
                bits -= step & 31
                k = WHOLE_BLOCK
                is_wanted = state[component, _FIRST] <= x < state[component, _LAST]
                if is_wanted and state[component, _NEXT] <= y <= bottom[component]:
                    found = False
                    if size_bits:
                        word, bits, place, k = read_coefficients(word, bits, place, ac, block, places)
                        found = k != WHOLE_BLOCK + 1
                        if found and exceeds(block, scan[component, _LIMITS]):
                            return 1
                    else:
                        word, bits, place, k = skip_coefficients(word, bits, place, ac)
                    if abs(dc) > load_i16(scan[component, _LIMITS]):
                        return 1
                    target = line_at(plan, state, component, y << size_bits)
                    target += (x - state[component, _FIRST]) << size_bits
                    _write_block(dc, found, block, steps, 1 << size_bits, target, state[component, _STRIDE])
                else:
                    word, bits, place, k = skip_coefficients(word, bits, place, ac)
                if (k < WHOLE_BLOCK and k != LAST_OF_BLOCK + 1) or place - (bits >> 3) > stop:
                    return 1
    cursor[_WORD], cursor[_LEFT], cursor[_PLACE] = word, np.uint64(bits), np.uint64(place)
    return 0


@njit(
    _number(
        *(types.UniTuple(_number, 3), types.int64[::1], _number, types.int64[:, ::1], types.UniTuple(_number, 5)),
        *(types.Tuple((_number, types.boolean)), _four, _two, _number, types.int64[::1]),
    ),
    **_options,
)
def decode_strips(data, previous, first_row, scan, shape, scale, box, pixels, memory, places):
    """RGB of a box, from the data of all components together without restarts.

    data: the address of bytes of `codes.copy_clean`, how many there are, and the bit of the first at which they begin;
    1,024 more can be read behind them. first_row: the row of MCUs that begins there; previous: the DC
    before it, by component. scan: see above. shape, scale, box, pixels: see `boxes.decode_box`. memory: the address of
    as many bytes as `memory_bytes` says. places: the place in WORKING of each coefficient, and 64 for those from 64 on,
    which are 256 in all.

    Returns 0, or 1 where the data are not such; then nothing outside of them was read, and the pixels are not valid.
    """
    top, left, lines, columns = box
    target, stride = pixels
    plan = plan_components(shape, scale[0])
    components = plan.shape[0]
    block = aligned(memory)
    spare = block + 256
    blue = spare + 128
    red = blue + aligned(columns + 2 * MARGIN)
    for part in range(16):
        store_u64(block + 8 * part, np.uint64(0))
    state = begin(plan, top, left, columns, red + aligned(columns + 2 * MARGIN), scan[0, _HIGH])
    bottom = np.zeros(3, np.int64)
    needed = state[0, _NEXT] // scan[0, _HIGH]
    for component in range(components):
        needed = min(needed, state[component, _NEXT] // scan[component, _HIGH])
        bottom[component] = last_line(plan, component, top + lines - 1) >> plan[component, _SIZE_BITS]
    if first_row > needed:
        return 1
    mcus = (plan[0, _WIDTH] + scan[0, _WIDE] - 1) // scan[0, _WIDE]
    cursor = np.zeros(4, np.uint64)
    cursor[_STOP] = np.uint64(data[0] + data[1])
    word, bits, place = filled(np.uint64(0), 0, data[0])
    cursor[_WORD], cursor[_LEFT] = word << np.uint64(data[2]), np.uint64(bits - data[2])
    cursor[_PLACE] = np.uint64(place)
    row = first_row
    across = left, columns, scale[1]
    for line in range(top, top + lines):
        for component in range(components):
            wanted = (last_line(plan, component, line) >> plan[component, _SIZE_BITS]) // scan[component, _HIGH]
            while row <= wanted:
                if _decode_row(cursor, previous, (row, mcus), scan, plan, state, bottom, block, places):
                    return 1
                for other in range(1, components):
                    if row >= state[other, _NEXT]:
                        repeat_edges(plan, state, other, line_at(plan, state, other, row << plan[other, _SIZE_BITS]))
                row += 1
        luma, cb, cr = samples_of(plan, state, line, across, blue, red)
        write_line(components, luma, cb, cr, columns, target, spare)
        target += stride
    return 0
