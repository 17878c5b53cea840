"""Huffman codes of baseline JPEGs, read one after the other or passed over several at a time (T.81, F.2.2).

`copy_clean` copies a scan without the zeros that follow its FF; `build_codes` makes the table of a code; the other
functions read by it, from a word of 64 bits of which the upper ones are the next ones of the data. They branch where a
block ends and nowhere else, as far as that can be: which code follows cannot be predicted.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.vectors import (
    byte_swapped,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    store_i16,
    store_u8,
    store_u64,
)

__all__ = [
    "CODES_BYTES",
    "LAST_OF_BLOCK",
    "WHOLE_BLOCK",
    "build_codes",
    "copy_clean",
    "filled",
    "next_step",
    "read_coefficients",
    "skip_coefficients",
    "value_of",
]

LOOK_BITS, SKIP_BITS = 11, 12
_BITS, _COUNT_AT = 31, 5
_MOST_BITS = 28  # of a code and its value; in a JPEG of 8 bits it is 26
LAST_OF_BLOCK = 63
_LONGEST_CODE = 16
_LONG_AT = 4 << LOOK_BITS
_SYMBOLS_AT = _LONG_AT + 256
_SKIPS_AT = _SYMBOLS_AT + 256
CODES_BYTES = _SKIPS_AT + (2 << SKIP_BITS)
# Coefficients that the end of a block stands for, and what ends one that is damaged
WHOLE_BLOCK, _FAULT = 128, 80
_SIXTEEN_ZEROS = 0xF0
_END_OF_IMAGE = 0xD9

_number = types.int64
_options = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(forceinline=True, error_model="numpy")
def _has_no_ff(word):
    """Whether none of eight bytes is FF."""
    inverse = ~word
    return (inverse - np.uint64(0x0101010101010101)) & word & np.uint64(0x8080808080808080) == 0


@njit(_number(_number, _number, _number), **_options)
def copy_clean(source, stop, target):
    """Copy entropy-coded bytes from source to the end marker; returns how many there are, -1 where another one comes
    first, or none before `stop`. `target` has room for all and 8 more.
    """
    out = target
    while source < stop:
        while source + 8 <= stop and _has_no_ff(load_u64(source)):
            store_u64(out, load_u64(source))
            source += 8
            out += 8
        if source == stop:
            break
        byte = load_u8(source)
        source += 1
        if byte == 0xFF:
            if source < stop and load_u8(source) == _END_OF_IMAGE:
                return out - target
            if source == stop or load_u8(source) != 0:
                break
            source += 1
        store_u8(out, byte)
        out += 1
    return -1


@njit(forceinline=True, error_model="numpy")
def _step(code, symbol, is_dc):
    """What a code stands for: bits of it and its value | bits of it << 8 | bits of the value << 16 | coefficients, of
    which the last has the value, << 24; WHOLE_BLOCK where the block ends."""
    size = symbol & 15
    count = (symbol >> 4) + 1
    if size == 0 and symbol != _SIXTEEN_ZEROS and not is_dc:
        count = WHOLE_BLOCK
    return code + size | code << 8 | size << 16 | count << 24


@njit(types.void(types.uint8[::1], types.uint8[::1], types.boolean, types.uint8[::1]), **_options)
def build_codes(counts, symbols, is_dc, codes):
    """A table of `CODES_BYTES` bytes by which codes are read, from what a Huffman table says.

    uint32 [1 << LOOK_BITS] of `_step` by the beginning of the data, 0 where the code is longer; for these int64 [16]
    with the largest code of so many bits, -1 for none, int64 [16] with the number of its symbol less the code, and the
    symbols, uint8 [256]; then uint16 [1 << SKIP_BITS]: bits and coefficients << 5 of all codes at the beginning
    """
    look = codes[:_LONG_AT].view(np.uint32)
    largest = codes[_LONG_AT : _LONG_AT + 128].view(np.int64)
    offsets = codes[_LONG_AT + 128 : _LONG_AT + 256].view(np.int64)
    skips = codes[_SKIPS_AT:].view(np.uint16)
    codes[:] = 0
    code = number = 0
    for bits in range(1, _LONGEST_CODE + 1):
        offsets[bits - 1] = number - code
        for _ in range(counts[bits - 1]):
            symbol = np.int64(symbols[number])
            codes[_SYMBOLS_AT + number] = symbol
            if bits <= LOOK_BITS:
                first = code << (LOOK_BITS - bits)
                for rest in range(1 << (LOOK_BITS - bits)):
                    look[first + rest] = _step(bits, symbol, is_dc)
            code += 1
            number += 1
        largest[bits - 1] = code - 1 if counts[bits - 1] else -1
        code <<= 1
    for index in range(1 << SKIP_BITS):
        used = count = 0
        while used < SKIP_BITS and count < WHOLE_BLOCK:
            rest = (index << used) & ((1 << SKIP_BITS) - 1)
            step = np.int64(look[rest >> (SKIP_BITS - LOOK_BITS)])
            if step == 0 or (step >> 8) & 31 > SKIP_BITS - used or used + (step & 31) > _MOST_BITS:
                break
            if count + (step >> 24) > LAST_OF_BLOCK + WHOLE_BLOCK:
                break
            used += step & 31
            count += step >> 24
        skips[index] = count << _COUNT_AT | used


@njit(error_model="numpy")
def _long_step(word, codes, is_dc):
    """`_step` of a code that is longer than LOOK_BITS; 0 for one that the table does not have."""
    for bits in range(LOOK_BITS + 1, _LONGEST_CODE + 1):
        code = np.int64(word >> np.uint64(64 - bits))
        place = codes + _LONG_AT + 8 * (bits - 1)
        if code <= np.int64(load_u64(place)):
            return _step(bits, load_u8(codes + _SYMBOLS_AT + ((code + np.int64(load_u64(place + 128))) & 0xFF)), is_dc)
    return 0


@njit(forceinline=True, error_model="numpy")
def next_step(word, codes, is_dc):
    step = load_u32(codes + 4 * np.int64(word >> np.uint64(64 - LOOK_BITS)))
    if step == 0:
        step = _long_step(word, codes, is_dc)
        if step & 31 > _MOST_BITS:
            step = 0
    return step


@njit(forceinline=True, error_model="numpy")
def value_of(word, step):
    """The value behind the code at the beginning of a word."""
    rest = word << np.uint64((step >> 8) & 31)
    size = (step >> 16) & 15
    value = np.int64((rest >> np.uint64(1)) >> np.uint64(63 - size))
    return value + ((np.int64(rest >> np.uint64(63)) - 1) & (1 - (1 << size)))


@njit(forceinline=True, error_model="numpy")
def filled(word, bits, place):
    """As `refilled`, always to 56 bits and more: two codes with their values, without a branch."""
    word |= byte_swapped(load_u64(place)) >> np.uint64(bits)
    return word, bits | 56, place + ((63 - bits) >> 3)


@njit(forceinline=True, error_model="numpy")
def _skip(word, k, codes):
    """(bits, the next coefficient) of codes at the beginning of a word; _FAULT for a code that no table has."""
    entry = load_u16(codes + _SKIPS_AT + 2 * np.int64(word >> np.uint64(64 - SKIP_BITS)))
    count = entry >> _COUNT_AT
    if entry == 0 or (k + count) & (WHOLE_BLOCK - 1) > LAST_OF_BLOCK or k + count > LAST_OF_BLOCK + WHOLE_BLOCK:
        step = next_step(word, codes, False)  # the block may end within these codes
        if step == 0:
            return 0, _FAULT
        return step & 31, k + (step >> 24)
    return entry & _BITS, k + count


@njit(error_model="numpy")
def skip_coefficients(word, bits, place, codes):
    """Pass over the AC of a block; also returns the coefficients with WHOLE_BLOCK, or 64."""
    k = 1
    while k <= LAST_OF_BLOCK:
        word, bits, place = filled(word, bits, place)
        used, k = _skip(word, k, codes)
        word <<= np.uint64(used)
        bits -= used
        if k <= LAST_OF_BLOCK:
            used, k = _skip(word, k, codes)
            word <<= np.uint64(used)
            bits -= used
    return word, bits, place, k


@njit(forceinline=True, error_model="numpy")
def _read(word, k, codes, block, places):
    """(the word without its first code and value, their bits, the next coefficient), with the value in the block."""
    step = next_step(word, codes, False)
    if step == 0:
        return word, 0, _FAULT
    k += step >> 24
    store_i16(block + 2 * places[k - 1], value_of(word, step))
    used = step & 31
    return word << np.uint64(used), used, k


@njit(error_model="numpy")
def read_coefficients(word, bits, place, codes, block, places):
    """Read the AC of a block into int16 [64] at `block`, which are 0; what is behind the block is written to, too.

    Also returns the coefficients with WHOLE_BLOCK, or 64.
    """
    k = 1
    while k <= LAST_OF_BLOCK:
        word, bits, place = filled(word, bits, place)
        word, used, k = _read(word, k, codes, block, places)
        bits -= used
        if k <= LAST_OF_BLOCK:
            word, used, k = _read(word, k, codes, block, places)
            bits -= used
    return word, bits, place, k
