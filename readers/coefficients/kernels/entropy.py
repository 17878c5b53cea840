"""Entropy-coded data of a JPEG to coefficients: sequential and progressive scans of Huffman codes (T.81, F.2 and G.2).

`find_marker` finds the end of a scan; `unstuff` copies its bytes without what markers need, cut at restarts;
`build_table` makes a table with which one look finds most codes together with the bits behind them; `read_sequential`
and `read_progressive` decode a scan. `unstuff` and these two return 0, or the number of a reason why the JPEG keeps its
bytes: what libjpeg would warn of is such a reason.

Reading is bounded: a block takes at most MOST_BYTES, and before each block what was read is compared with the end.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.vectors import byte_swapped, load_u8, load_u64, store_u8, store_u64

__all__ = [
    "LOOK_BITS",
    "MOST_BYTES",
    "build_table",
    "find_marker",
    "has_no_ff",
    "read_progressive",
    "read_sequential",
    "unstuff",
]

LOOK_BITS = 11
MOST_BYTES = 1024
# An entry: value << 16 | symbol << 8 | bits of all of it. With _PARTIAL the bits are those of the code alone, since the
# value does not fit; 0 where the code is longer than LOOK_BITS.
_PARTIAL = 0x80
_LONGEST_CODE = 16

_number, _numbers = types.int64, types.int64[::1]
_tables = types.Tuple((types.int32[:, ::1], types.int64[:, ::1], types.int64[:, ::1], types.uint8[:, ::1]))
_options = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(forceinline=True, error_model="numpy")
def has_no_ff(word):
    """Whether none of eight bytes is FF."""
    inverse = ~word
    return (inverse - np.uint64(0x0101010101010101)) & word & np.uint64(0x8080808080808080) == 0


@njit(_number(_number, _number), **_options)
def find_marker(source, stop):
    """The address of the first marker but restarts from source to stop; `stop` where there is none."""
    while source + 1 < stop:
        if source + 8 <= stop and has_no_ff(load_u64(source)):
            source += 8
            continue
        if load_u8(source) == 0xFF:
            marker = load_u8(source + 1)
            if marker != 0 and marker != 0xFF and not 0xD0 <= marker <= 0xD7:
                return source
        source += 1
    return stop


@njit(_number(_number, _number, _number, types.int64[:, ::1]), **_options)
def unstuff(source, stop, target, intervals):
    """Copy bytes from source to stop to `target`, which has room for all and 8 more.

    intervals: where the parts between restarts begin and end there, int64 [2, parts]; as many as there must be, apart
    by RST0 to RST7 in turn.
    """
    restarts = intervals.shape[1] - 1
    found = 0
    out = target
    intervals[0, 0] = 0
    while source < stop:
        while source + 8 <= stop and has_no_ff(load_u64(source)):
            store_u64(out, load_u64(source))
            source += 8
            out += 8
        if source == stop:
            break
        byte = load_u8(source)
        source += 1
        if byte == 0xFF:
            while source < stop and load_u8(source) == 0xFF:
                source += 1
            if source == stop:
                return 1
            marker = load_u8(source)
            source += 1
            if marker:
                if found == restarts or marker != 0xD0 + (found & 7):
                    return 2
                intervals[1, found] = out - target
                found += 1
                intervals[0, found] = out - target
                continue
        store_u8(out, byte)
        out += 1
    intervals[1, found] = out - target
    return 0 if found == restarts else 3


@njit(types.void(types.uint8[::1], types.uint8[::1], types.int32[::1], _numbers, _numbers), **_options)
def build_table(counts, symbols, look, largest, offsets):
    """The table of a prefix code. largest, offsets, int64 [18]: of each length, for codes that `look` does not have."""
    code = 0
    number = 0
    look[:] = 0
    for bits in range(1, _LONGEST_CODE + 1):
        offsets[bits] = number - code
        for _ in range(counts[bits - 1]):
            if bits <= LOOK_BITS:
                symbol = np.int64(symbols[number])
                size = symbol & 15
                first = code << (LOOK_BITS - bits)
                for rest in range(1 << (LOOK_BITS - bits)):
                    if size == 0:
                        entry = symbol << 8 | bits
                    elif bits + size <= LOOK_BITS:
                        value = rest >> (LOOK_BITS - bits - size)
                        if value < 1 << (size - 1):
                            value += 1 - (1 << size)
                        entry = value << 16 | symbol << 8 | bits + size
                    else:
                        entry = symbol << 8 | _PARTIAL | bits
                    look[first + rest] = entry
            code += 1
            number += 1
        largest[bits] = code - 1 if counts[bits - 1] else -1
        code <<= 1


@njit(forceinline=True, error_model="numpy")
def _refilled(word, bits, place):
    """At least 32 bits, left-aligned in an uint64, how many they are, and the address of the byte behind them."""
    if bits < 32:
        word |= byte_swapped(load_u64(place)) >> np.uint64(bits)
        place += (63 - bits) >> 3
        bits |= 56
    return word, bits, place


@njit(forceinline=True, error_model="numpy")
def _next(word, table, tables):
    """(bits, symbol, value) of the code at the beginning of a word and the value behind it; 0 bits for no code."""
    look, largest, offsets, symbols = tables
    entry = np.int64(look[table, np.int64(word >> np.uint64(64 - LOOK_BITS))])
    if entry & _PARTIAL == 0 and entry != 0:
        return entry & 0x7F, (entry >> 8) & 0xFF, entry >> 16
    if entry != 0:
        bits = entry & 0x7F
        symbol = (entry >> 8) & 0xFF
    else:
        bits = LOOK_BITS + 1
        while bits <= _LONGEST_CODE and np.int64(word >> np.uint64(64 - bits)) > largest[table, bits]:
            bits += 1
        if bits > _LONGEST_CODE:
            return 0, 0, 0
        place = np.int64(word >> np.uint64(64 - bits)) + offsets[table, bits]
        symbol = np.int64(symbols[table, place & 0xFF])
    size = symbol & 15
    value = 0
    if size:
        value = np.int64((word << np.uint64(bits)) >> np.uint64(64 - size))
        if value < 1 << (size - 1):
            value += 1 - (1 << size)
    return bits + size, symbol, value


_scan = (_number, types.int64[:, ::1], types.UniTuple(_number, 3), types.int64[:, ::1], _tables)


@njit(_number(*_scan, types.int16[:, ::1], _numbers), **_options)
def read_sequential(data, intervals, counts, plan, tables, blocks, places):
    """Decode a scan into blocks.

    data: the address of its bytes; intervals: where the parts between restarts begin and end in them, int64 [2, parts].
    counts: of MCUs, of MCUs in a line, and of MCUs between restarts, or 0. plan: for each component in the scan its
    first block, blocks in a row, blocks of an MCU across and down, and the tables for DC and AC. tables: of
    `build_table`, one behind the other. places: where the coefficients go in a block.
    """
    mcus, across, restart = counts
    components = plan.shape[0]
    previous = np.zeros(4, np.int64)
    interval = 0
    place, stop = data + intervals[0, 0], data + intervals[1, 0]
    word, bits, left = np.uint64(0), 0, restart
    line = column = 0
    for _ in range(mcus):
        if restart and left == 0:
            if place - (bits >> 3) != stop:
                return 4
            interval += 1
            place, stop = data + intervals[0, interval], data + intervals[1, interval]
            word, bits, left = np.uint64(0), 0, restart
            previous[:] = 0
        left -= 1
        for component in range(components):
            wide, high = plan[component, 2], plan[component, 3]
            for inner in range(wide * high):
                row = line * high + inner // wide
                block = blocks[plan[component, 0] + row * plan[component, 1] + column * wide + inner % wide]
                word, bits, place = _refilled(word, bits, place)
                used, _, value = _next(word, plan[component, 4], tables)
                if used == 0:
                    return 5
                word <<= np.uint64(used)
                bits -= used
                block[:] = 0
                previous[component] += value
                block[0] = previous[component]
                table = plan[component, 5]
                k = 1
                while k < 64:
                    word, bits, place = _refilled(word, bits, place)
                    used, symbol, value = _next(word, table, tables)
                    if used == 0:
                        return 5
                    word <<= np.uint64(used)
                    bits -= used
                    k += symbol >> 4
                    if symbol & 15:
                        if k > 63:
                            return 6
                        block[places[k]] = value
                    elif symbol != 0xF0:
                        break
                    k += 1
                if place - (bits >> 3) > stop:
                    return 7
        column += 1
        if column == across:
            column = 0
            line += 1
    return 0 if place - (bits >> 3) == stop else 4


@njit(forceinline=True, error_model="numpy")
def _corrected(block, at, step, word, bits, place):
    """A bit more of a coefficient that is known not to be 0."""
    word, bits, place = _refilled(word, bits, place)
    if word >> np.uint64(63) and np.int64(block[at]) & step == 0:
        block[at] += step if block[at] >= 0 else -step
    return word << np.uint64(1), bits - 1, place


@njit(_number(*_scan, types.int16[:, ::1], _numbers, _numbers), **_options)
def read_progressive(data, intervals, counts, plan, tables, blocks, places, band):
    """Decode one scan of several into blocks, which are 0 before the first one.

    band: first and last coefficient of the scan, and the bits above and below, see `markers.Scan`.
    The other arguments are those of `read_sequential`.
    """
    first, last, above, low = band[0], band[1], band[2], band[3]
    mcus, across, restart = counts
    components = plan.shape[0]
    previous = np.zeros(4, np.int64)
    interval = 0
    place, stop = data + intervals[0, 0], data + intervals[1, 0]
    word, bits, left = np.uint64(0), 0, restart
    line = column = 0
    step = 1 << low
    run = 0  # blocks whose band ends with nothing new
    for _ in range(mcus):
        if restart and left == 0:
            if place - (bits >> 3) != stop:
                return 4
            interval += 1
            place, stop = data + intervals[0, interval], data + intervals[1, interval]
            word, bits, left = np.uint64(0), 0, restart
            previous[:] = 0
            run = 0
        left -= 1
        for component in range(components):
            wide, high = plan[component, 2], plan[component, 3]
            for inner in range(wide * high):
                row = line * high + inner // wide
                block = blocks[plan[component, 0] + row * plan[component, 1] + column * wide + inner % wide]
                word, bits, place = _refilled(word, bits, place)
                if first == 0:
                    if above:
                        if word >> np.uint64(63):
                            block[0] |= step
                        used = 1
                    else:
                        used, _, value = _next(word, plan[component, 4], tables)
                        if used == 0:
                            return 5
                        previous[component] += value
                        block[0] = previous[component] << low
                    word <<= np.uint64(used)
                    bits -= used
                else:
                    k = first
                    if run == 0:
                        while k <= last:
                            word, bits, place = _refilled(word, bits, place)
                            used, symbol, value = _next(word, plan[component, 5], tables)
                            if used == 0:
                                return 5
                            word <<= np.uint64(used)
                            bits -= used
                            zeros, size = symbol >> 4, symbol & 15
                            if size == 0 and zeros < 15:
                                run = 1 << zeros
                                if zeros:
                                    word, bits, place = _refilled(word, bits, place)
                                    run += np.int64(word >> np.uint64(64 - zeros))
                                    word <<= np.uint64(zeros)
                                    bits -= zeros
                                break
                            if above:
                                if size > 1:
                                    return 8
                                while k <= last:
                                    if block[places[k]] != 0:
                                        word, bits, place = _corrected(block, places[k], step, word, bits, place)
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
                                block[places[k]] = value << low
                            k += 1
                    if run > 0:
                        if above:
                            while k <= last:
                                if block[places[k]] != 0:
                                    word, bits, place = _corrected(block, places[k], step, word, bits, place)
                                k += 1
                        run -= 1
                if place - (bits >> 3) > stop:
                    return 7
        column += 1
        if column == across:
            column = 0
            line += 1
    return 0 if place - (bits >> 3) == stop else 4
