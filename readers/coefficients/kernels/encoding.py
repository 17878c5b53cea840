"""A JPEG's blocks to the rows of `layout`, line of MCUs by line: a line is packed while it is in the CPU's cache.

A sequential scan of all components is decoded here as well, so that no more than one line of its blocks is in memory.
What other JPEGs have of blocks is decoded before, all of it.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.digits import (
    exceeds,
    filled_bytes,
    has_high,
    has_low,
    has_top,
    high_digits,
    low_digits,
)
from readers.coefficients.kernels.entropy import STATE, has_ended, read_line, start_scan
from readers.coefficients.kernels.vectors import (
    bits_set,
    copy_memory,
    first_bit,
    load_i16,
    load_u8,
    load_u32,
    squeeze_bytes,
    store_i16,
    store_u8,
    store_u32,
    store_u64,
)

__all__ = ["encode_lines"]

_BLOCK_BYTES, _INDEX_BYTES, _TAIL_BYTES = 128, 4, 32
# Of a component: rows, blocks in a row, its first block, blocks from row to row, rows in a line of MCUs, the address of
# its limits, where its rows go, and where the next one goes.
_ROWS, _WIDTH, _FIRST, _STRIDE, _DOWN, _LIMITS, _BEGIN, _NEXT = range(8)
_TOO_LONG, _TOO_LARGE = 9, 10
_MOST_WITHOUT_TOP = 136  # a value without a top digit is not farther from 0

_number = types.int64
_three, _four = types.UniTuple(_number, 3), types.UniTuple(_number, 4)
_columns = types.int64[:, ::1]


@njit(error_model="numpy")
def _append(digits, position, packed, count):
    """Write so many half bytes behind the first `position` ones; 9 bytes are written."""
    place = digits + (position >> 1)
    odd = np.uint64((position & 1) << 2)
    # of a byte, which the store before has written as a whole: more would have to wait for two of them
    kept = np.uint64(load_u8(place)) & ((np.uint64(1) << odd) - np.uint64(1))
    store_u64(place, kept | packed << odd)
    store_u8(place + 8, np.int64(packed >> np.uint64(60)))
    return position + count


@njit(error_model="numpy")
def _pack_row(block, width, limits, out, room, parts):
    """Write a row of blocks to `out`; returns its bytes, or less a reason.

    limits: the address of the largest value of each coefficient, int16 [64], and the least of these. out: has `room`
    bytes, and 12 a block and 16 more behind these. parts: memory for what begins where others end: masks of high
    digits, low digits, high digits and top digits, 8, 32, 32 and 256 bytes a block, and 16 more each.
    """
    if 4 * width > room:
        return -_TOO_LONG
    masks_2, digits_1, digits_2, tops = parts
    heads = out + 2 * width
    at = heads + 2 * width
    at_2 = masks_2
    count_1 = count_2 = 0
    at_top = tops
    limit = load_i16(limits)
    is_close = load_i16(limits + _BLOCK_BYTES) < _MOST_WITHOUT_TOP
    not_dc = ~np.uint64(1)
    for x in range(width):
        dc = load_i16(block)
        low, high, top = has_low(block) & not_dc, has_high(block) & not_dc, has_top(block) & not_dc
        if abs(dc) > limit or ((top != 0 or is_close) and exceeds(block, limits) != 0):
            return -_TOO_LARGE
        store_i16(out + 2 * x, dc)
        low_head, high_head = filled_bytes(low), filled_bytes(high)
        store_u8(heads + x, low_head)
        store_u8(heads + width + x, high_head)
        if low:
            store_u64(at, squeeze_bytes(low, low_head))
            at += bits_set(np.uint64(low_head))
            for pair in range(4):
                bits = (low >> np.uint64(16 * pair)) & np.uint64(0xFFFF)
                count_1 = _append(digits_1, count_1, low_digits(block + 32 * pair, bits), bits_set(bits))
        if high:
            store_u64(at_2, squeeze_bytes(high, high_head))
            at_2 += bits_set(np.uint64(high_head))
            for pair in range(4):
                bits = (high >> np.uint64(16 * pair)) & np.uint64(0xFFFF)
                count_2 = _append(digits_2, count_2, high_digits(block + 32 * pair, bits), bits_set(bits))
        while top:
            place = first_bit(top)
            top &= top - np.uint64(1)
            store_i16(at_top, x)
            store_u8(at_top + 2, place)
            store_u8(at_top + 3, (load_i16(block + 2 * place) + 136) >> 8)
            at_top += 4
        block += _BLOCK_BYTES
    bytes_1, bytes_2 = (count_1 + 1) >> 1, (count_2 + 1) >> 1
    size = at - out + at_2 - masks_2 + bytes_1 + bytes_2 + at_top - tops
    if size > room:
        return -_TOO_LONG
    copy_memory(masks_2, at, at_2 - masks_2)
    at += at_2 - masks_2
    copy_memory(digits_1, at, bytes_1)
    copy_memory(digits_2, at + bytes_1, bytes_2)
    copy_memory(tops, at + bytes_1 + bytes_2, at_top - tops)
    return size


@njit(error_model="numpy")
def _joined(components, image, index, rows_at, room):
    """Put the rows of all components behind each other, and where each ends into the index; returns the bytes of the
    image, or less a reason."""
    at = rows_at
    store_u32(index, at)
    for component in range(components.shape[0]):
        begin = components[component, _BEGIN]
        size = components[component, _NEXT] - begin
        if at + size + _TAIL_BYTES > room:
            return -_TOO_LONG
        if begin != image + at:
            copy_memory(begin, image + at, size)
        for _ in range(components[component, _ROWS]):
            index += _INDEX_BYTES
            store_u32(index, load_u32(index) + at)
        at += size
    for k in range(0, _TAIL_BYTES, 8):
        store_u64(image + at + k, np.uint64(0))
    return at + _TAIL_BYTES


@njit(
    _number(_number, _columns, _three, _columns, _columns, _four, _four, _three),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def encode_lines(data, intervals, counts, plan, components, parts, addresses, image):
    """Pack all blocks, after decoding them where they come from a sequential scan of all components.

    data, intervals, plan: of that scan, see `entropy.read_line`; data is 0 where the blocks are there. counts: lines of
    MCUs, and of a scan the MCUs in a line, and those between restarts. components: int64 [n, 8], see above. parts: see
    `_pack_row`. addresses: of blocks, of one line where there is a scan; of places, see `read_line`; of the index; of
    the image. image: where the rows begin in it, its room, and the room of each component.

    Returns the bytes of the image, of which all but header and multipliers are written, or less a reason.
    """
    lines, across, restart = counts
    blocks, places, index, target = addresses
    rows_at, room, room_each = image
    state = np.zeros(STATE, np.int64)
    if data:
        start_scan(state, data, intervals, restart)
    for line in range(lines):
        if data:
            status = read_line(state, data, intervals, (across, restart), plan, blocks, 0, places)
            if status:
                return -status
        ends = index
        for component in range(components.shape[0]):
            rows, down = components[component, _ROWS], components[component, _DOWN]
            for inner in range(down):
                row = line * down + inner
                if row < rows:
                    at = inner if data else row
                    block = components[component, _FIRST] + at * components[component, _STRIDE]
                    out, begin = components[component, _NEXT], components[component, _BEGIN]
                    size = _pack_row(
                        blocks + _BLOCK_BYTES * block,
                        components[component, _WIDTH],
                        components[component, _LIMITS],
                        out,
                        room_each - (out - begin),
                        parts,
                    )
                    if size < 0:
                        return size
                    components[component, _NEXT] = out + size
                    store_u32(ends + _INDEX_BYTES * (row + 1), out + size - begin)
            ends += _INDEX_BYTES * rows
    if data and not has_ended(state):
        return -4
    return _joined(components, target, index, rows_at, room)
