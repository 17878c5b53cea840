"""Entropy-coded data of a JPEG to coefficients: sequential and progressive scans of Huffman codes (T.81, F.2 and G.2).

`find_marker` finds the end of a scan; `unstuff` copies its bytes without what markers need, cut at restarts;
`build_table` makes a table with which one look finds most codes; `read_line` decodes one line of MCUs of a sequential
scan, `read_sequential` all of them; progressive scans are those of `kernels.progressive`. `unstuff` and all that read
return 0, or the number of a reason why the JPEG keeps its bytes: what libjpeg would warn of is such a reason.

Reading is bounded: a block takes fewer than 300 bytes, and after each block what was read is compared with the end.

A table of codes, TABLE_BYTES at an address:

    0      int16[4096]   by the next 12 bits: zeros before the coefficient << 9 | bits of its value << 5 | bits of code
                         and value; 0 where the code is longer, or there is none
    8192   int64[18]     the largest code of each length, -1 for none
    8336   int64[18]     of each length, the number of a code's symbol less the code
    8480   uint8[256]    symbols

Nothing in the decoding of a coefficient but the end of its block is a branch that depends on the data: bits are filled
up without asking how many are left, and the value is taken from the bits behind its code (T.81, F.2.2.1) by shifts.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.digits import clear_block
from readers.coefficients.kernels.vectors import (
    byte_swapped,
    bytes_of_ff,
    copy_32,
    first_bit,
    item_i16,
    load_u8,
    load_u64,
    store_i16,
    store_u8,
    store_u64,
)

__all__ = [
    "AC",
    "BLOCK_BYTES",
    "DC",
    "FIRST",
    "HIGH",
    "RUN",
    "SIZE",
    "STATE",
    "STRIDE",
    "TABLE_BYTES",
    "USED",
    "WIDE",
    "build_table",
    "find_entry",
    "find_marker",
    "has_ended",
    "read_line",
    "read_sequential",
    "refilled",
    "start_scan",
    "unstuff",
    "value_of",
]

_LOOK_BITS, _LONGEST_CODE = 12, 16
_LARGEST_AT = 2 << _LOOK_BITS
_OFFSETS_AT = _LARGEST_AT + 8 * 18
_SYMBOLS_AT = _OFFSETS_AT + 8 * 18
TABLE_BYTES = _SYMBOLS_AT + 256
RUN, SIZE, USED = 9, 5, 31  # the parts of an entry: shifts, and a mask
_SIZES = 15 << SIZE
# Where a sequential scan is: what is not decoded yet, and the DC before in each component.
_PLACE, _STOP, _WORD, _BITS, _LEFT, _INTERVAL, _PREVIOUS = range(7)
STATE = 10
# Of a component in a scan: its first block, blocks from row to row, blocks of an MCU across and down, its tables
FIRST, STRIDE, WIDE, HIGH, DC, AC = range(6)
BLOCK_BYTES = 128

_number, _numbers = types.int64, types.int64[::1]
_three = types.UniTuple(_number, 3)
_plan = types.int64[:, ::1]
_options = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(_number(_number, _number), **_options)
def find_marker(source, stop):
    """The address of the first marker but restarts from source to stop; `stop` where there is none."""
    while source + 1 < stop:
        if source + 32 <= stop:
            found = bytes_of_ff(source)
            if found == 0:
                source += 32
                continue
            source += first_bit(found)
            if source + 1 == stop:
                break
        if load_u8(source) == 0xFF:
            marker = load_u8(source + 1)
            if marker != 0 and marker != 0xFF and not 0xD0 <= marker <= 0xD7:
                return source
        source += 1
    return stop


@njit(_number(_number, _number, _number, types.int64[:, ::1]), **_options)
def unstuff(source, stop, target, intervals):
    """Copy bytes from source to stop to `target`, which has room for all and 32 more.

    intervals: where the parts between restarts begin and end there, int64 [2, parts]; as many as there must be, apart
    by RST0 to RST7 in turn.
    """
    restarts = intervals.shape[1] - 1
    found = 0
    out = target
    intervals[0, 0] = 0
    while source < stop:
        if source + 32 <= stop:
            copy_32(source, out)
            marked = bytes_of_ff(source)
            plain = first_bit(marked) if marked else 32
            source += plain
            out += plain
            if plain == 32:
                continue
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


@njit(forceinline=True, error_model="numpy")
def _entry_of(symbol, bits):
    size = symbol & 15
    return (symbol >> 4) << RUN | size << SIZE | bits + size


@njit(types.void(types.Array(types.uint8, 1, "C", readonly=True), _number), **_options)
def build_table(codes, table):
    """The table of a prefix code. codes: how many there are of 1 to 16 bits, uint8 [16], and their symbols."""
    code = number = 0
    for at in range(0, TABLE_BYTES, 8):
        store_u64(table + at, np.uint64(0))
    for bits in range(1, _LONGEST_CODE + 1):
        store_u64(table + _OFFSETS_AT + 8 * bits, np.uint64(number - code))
        some = np.int64(codes[bits - 1])
        for _ in range(some):
            symbol = np.int64(codes[16 + number])
            store_u8(table + _SYMBOLS_AT + number, symbol)
            if bits <= _LOOK_BITS:
                entry = _entry_of(symbol, bits)
                first = table + 2 * (code << (_LOOK_BITS - bits))
                for at in range(1 << (_LOOK_BITS - bits)):
                    store_i16(first + 2 * at, entry)
            code += 1
            number += 1
        store_u64(table + _LARGEST_AT + 8 * bits, np.uint64(code - 1 if some else -1))
        code <<= 1


@njit(forceinline=True, error_model="numpy")
def refilled(word, bits, place):
    """At least 56 bits, left-aligned in an uint64, how many they are, and the address of the byte behind them.

    The address of the next load does not depend on the codes that are decoded meanwhile.
    """
    word |= byte_swapped(load_u64(place)) >> np.uint64(bits)
    return word, bits | 56, place + ((63 - bits) >> 3)


@njit(error_model="numpy")
def _long_entry(word, table):
    """The entry of a code of more than 12 bits, 0 where there is none."""
    bits = _LOOK_BITS + 1
    while bits <= _LONGEST_CODE:
        code = np.int64(word >> np.uint64(64 - bits))
        if code <= np.int64(load_u64(table + _LARGEST_AT + 8 * bits)):
            number = code + np.int64(load_u64(table + _OFFSETS_AT + 8 * bits))
            return _entry_of(load_u8(table + _SYMBOLS_AT + (number & 0xFF)), bits)
        bits += 1
    return 0


@njit(forceinline=True, error_model="numpy")
def find_entry(word, table):
    """What the next code stands for; 0 where it stands for nothing."""
    entry = item_i16(table, word >> np.uint64(64 - _LOOK_BITS))
    if entry == 0:
        entry = _long_entry(word, table)
    return entry


@njit(forceinline=True, error_model="numpy")
def value_of(word, entry):
    """The number behind a code: one that begins with 0 is less than nothing, and stored one too small."""
    used, size = entry & USED, (entry >> SIZE) & 15
    rest = np.int64(word << np.uint64(used - size))
    below = ~(rest >> 63)  # -1 for a negative number, else 0
    return (np.int64((np.uint64(rest ^ below) >> np.uint64(1)) >> np.uint64(63 - size)) ^ below) - below


@njit(error_model="numpy")
def start_scan(state, data, intervals, restart):
    """Begin at the first MCU."""
    state[:] = 0
    state[_PLACE], state[_STOP] = data + intervals[0, 0], data + intervals[1, 0]
    state[_LEFT] = restart


@njit(error_model="numpy")
def has_ended(state):
    """Whether the last byte has been read, and none behind it."""
    return state[_PLACE] - (state[_BITS] >> 3) == state[_STOP]


@njit(error_model="numpy")
def read_line(state, data, intervals, counts, plan, blocks, line, places):
    """Decode a line of MCUs of a sequential scan into blocks of 64 int16.

    data: the address of its bytes; intervals: where the parts between restarts begin and end in them, int64 [2, parts].
    counts: MCUs in a line, and MCUs between restarts or 0. plan: for each component in the scan its first block, blocks
    from row to row, blocks of an MCU across and down, and the addresses of its tables for DC and AC, int64 [n, 6].
    blocks: the address of the blocks; line: that of the MCUs in them. places: the address of uint8 [64], where in a
    block, in bytes, each coefficient goes.
    """
    across, restart = counts
    place, stop, bits, left = state[_PLACE], state[_STOP], state[_BITS], state[_LEFT]
    word = np.uint64(state[_WORD])
    for column in range(across):
        if restart and left == 0:
            if place - (bits >> 3) != stop:
                return 4
            state[_INTERVAL] += 1
            place, stop = data + intervals[0, state[_INTERVAL]], data + intervals[1, state[_INTERVAL]]
            word, bits, left = np.uint64(0), 0, restart
            state[_PREVIOUS:] = 0
        left -= 1
        for component in range(plan.shape[0]):
            wide, dc, ac = plan[component, WIDE], plan[component, DC], plan[component, AC]
            high, stride = plan[component, HIGH], plan[component, STRIDE]
            first = plan[component, FIRST] + line * high * stride + column * wide
            previous = state[_PREVIOUS + component]
            for row in range(high):
                block = blocks + BLOCK_BYTES * (first + row * stride)
                for _ in range(wide):
                    clear_block(block)
                    word, bits, place = refilled(word, bits, place)
                    entry = find_entry(word, dc)
                    if entry == 0:
                        return 5
                    previous += value_of(word, entry)
                    word <<= np.uint64(entry & USED)
                    bits -= entry & USED
                    store_i16(block, previous)
                    k = 0
                    while k < 63:
                        word, bits, place = refilled(word, bits, place)
                        entry = find_entry(word, ac)
                        if entry == 0:
                            return 5
                        value = value_of(word, entry)
                        word <<= np.uint64(entry & USED)
                        bits -= entry & USED
                        k += (entry >> RUN) + 1
                        if entry & _SIZES == 0:
                            if entry >> RUN != 15:
                                break
                            continue
                        if k > 63:
                            return 6
                        store_i16(block + load_u8(places + k), value)
                    if place - (bits >> 3) > stop:
                        return 7
                    block += BLOCK_BYTES
            state[_PREVIOUS + component] = previous
    state[_PLACE], state[_STOP], state[_BITS], state[_LEFT] = place, stop, bits, left
    state[_WORD] = np.int64(word)
    return 0


@njit(_number(_number, _plan, _three, _plan, _number, _number), **_options)
def read_sequential(data, intervals, counts, plan, blocks, places):
    """Decode all of a sequential scan. counts: lines of MCUs, MCUs in a line, and MCUs between restarts, or 0.

    The other arguments are those of `read_line`.
    """
    lines, across, restart = counts
    state = np.zeros(STATE, np.int64)
    start_scan(state, data, intervals, restart)
    for line in range(lines):
        status = read_line(state, data, intervals, (across, restart), plan, blocks, line, places)
        if status:
            return status
    return 0 if has_ended(state) else 4
