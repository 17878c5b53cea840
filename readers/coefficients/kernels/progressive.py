"""Progressive scans of Huffman codes to coefficients (T.81, G.2), over the tables and bits of `kernels.entropy`."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.entropy import (
    AC,
    BLOCK_BYTES,
    DC,
    FIRST,
    HIGH,
    RUN,
    SIZE,
    STRIDE,
    USED,
    WIDE,
    find_entry,
    refilled,
    value_of,
)
from readers.coefficients.kernels.vectors import add_i16, load_i16, load_u8, store_i16

__all__ = ["read_progressive"]

_number, _numbers = types.int64, types.int64[::1]
_three = types.UniTuple(_number, 3)
_plan = types.int64[:, ::1]
_options = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(forceinline=True, error_model="numpy")
def _corrected(coefficient, step, word, bits, place):
    """A bit more of a coefficient that is known not to be 0."""
    word, bits, place = refilled(word, bits, place)
    value = load_i16(coefficient)
    if word >> np.uint64(63) and value & step == 0:
        add_i16(coefficient, step if value >= 0 else -step)
    return word << np.uint64(1), bits - 1, place


@njit(_number(_number, _plan, _three, _plan, _number, _number, _numbers), **_options)
def read_progressive(data, intervals, counts, plan, blocks, places, band):
    """Decode one scan of several into blocks, which are 0 before the first one.

    band: first and last coefficient of the scan, and the bits above and below, see `markers.Scan`.
    The other arguments are those of `read_sequential`.
    """
    first, last, above, low = band[0], band[1], band[2], band[3]
    lines, across, restart = counts
    previous = np.zeros(4, np.int64)
    interval = 0
    place, stop = data + intervals[0, 0], data + intervals[1, 0]
    word, bits, left = np.uint64(0), 0, restart
    line = column = 0
    step = 1 << low
    run = 0  # blocks whose band ends with nothing new
    for _ in range(lines * across):
        if restart and left == 0:
            if place - (bits >> 3) != stop:
                return 4
            interval += 1
            place, stop = data + intervals[0, interval], data + intervals[1, interval]
            word, bits, left = np.uint64(0), 0, restart
            previous[:] = 0
            run = 0
        left -= 1
        for component in range(plan.shape[0]):
            wide, high = plan[component, WIDE], plan[component, HIGH]
            for inner in range(wide * high):
                row, rest = line * high + (inner >> (wide - 1)), inner & (wide - 1)  # wide is 1 or 2
                number = plan[component, FIRST] + row * plan[component, STRIDE] + column * wide + rest
                block = blocks + BLOCK_BYTES * number
                word, bits, place = refilled(word, bits, place)
                if first == 0:
                    if above:
                        if word >> np.uint64(63):
                            add_i16(block, step)
                        used = 1
                    else:
                        entry = find_entry(word, plan[component, DC])
                        if entry == 0:
                            return 5
                        used = entry & USED
                        previous[component] += value_of(word, entry)
                        store_i16(block, previous[component] << low)
                    word <<= np.uint64(used)
                    bits -= used
                else:
                    k = first
                    if run == 0:
                        while k <= last:
                            word, bits, place = refilled(word, bits, place)
                            entry = find_entry(word, plan[component, AC])
                            if entry == 0:
                                return 5
                            value = value_of(word, entry)
                            word <<= np.uint64(entry & USED)
                            bits -= entry & USED
                            zeros, size = entry >> RUN, (entry >> SIZE) & 15
                            if size == 0 and zeros < 15:
                                run = 1 << zeros
                                if zeros:
                                    word, bits, place = refilled(word, bits, place)
                                    run += np.int64(word >> np.uint64(64 - zeros))
                                    word <<= np.uint64(zeros)
                                    bits -= zeros
                                break
                            if above:
                                if size > 1:
                                    return 8
                                while k <= last:
                                    coefficient = block + load_u8(places + k)
                                    if load_i16(coefficient) != 0:
                                        word, bits, place = _corrected(coefficient, step, word, bits, place)
                                    elif zeros == 0:
                                        break
                                    else:
                                        zeros -= 1
                                    k += 1
                            else:
                                k += zeros
                            if size:
                                if k > last:
                                    return 6
                                store_i16(block + load_u8(places + k), value << low)
                            k += 1
                    if run > 0:
                        if above:
                            while k <= last:
                                coefficient = block + load_u8(places + k)
                                if load_i16(coefficient) != 0:
                                    word, bits, place = _corrected(coefficient, step, word, bits, place)
                                k += 1
                        run -= 1
                if place - (bits >> 3) > stop:
                    return 7
        column += 1
        if column == across:
            column = 0
            line += 1
    return 0 if place - (bits >> 3) == stop else 4
