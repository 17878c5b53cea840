"""Coefficients to the rows of `layout`, and rows of it to samples: both ways between blocks and bytes."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.digits import (
    exceeds,
    expand,
    filled_bytes,
    has_high,
    has_low,
    has_top,
    high_digits,
    low_digits,
)
from readers.coefficients.kernels.transforms import inverse_2, inverse_4, inverse_8
from readers.coefficients.kernels.vectors import (
    add_i16,
    bits_set,
    fill_8,
    first_bit,
    load_i16,
    load_u8,
    load_u64,
    spread_bytes,
    squeeze_bytes,
    store_i16,
    store_u8,
    store_u64,
)

__all__ = ["copy_bytes", "flat_block", "pack_rows", "read_row"]

_number = types.int64
_three = types.UniTuple(_number, 3)


@njit(error_model="numpy")
def copy_bytes(source, target, count):
    for k in range(count):
        store_u8(target + k, load_u8(source + k))
    return target + count


@njit(error_model="numpy")
def _append(digits, position, packed, count):
    """Write so many half bytes behind the first `position` ones; up to 16 bytes are written."""
    place = digits + (position >> 1)
    odd = np.uint64((position & 1) << 2)
    kept = load_u64(place) & ((np.uint64(1) << odd) - np.uint64(1))
    store_u64(place, kept | packed << odd)
    store_u64(place + 8, (packed >> np.uint64(1)) >> (np.uint64(63) - odd))
    return position + count


@njit(
    _number(_number, _three, types.UniTuple(_number, 2), _number, types.int64[::1], types.int64[::1]),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def pack_rows(blocks, counts, place, limits, parts, ends):
    """Write the rows of a component, whose blocks are at the address `blocks`.

    counts: rows, blocks in a row, blocks from row to row. place: the address to write to, and the bytes there. limits:
    the address of int16 [64]. ends: of each row, in bytes from where it is written. parts: addresses of memory for the
    masks and digits of a row, 8, 8, 32 and 32 bytes a block and 32 more, and for top digits, 256 bytes a block.

    Returns the bytes written; -1 where there is no room, -2 where a coefficient is beyond its limit.
    """
    rows, width, stride = counts
    target, room = place
    out = target
    for row in range(rows):
        block = blocks + row * stride * 128
        if out + 4 * width > target + room:
            return -1
        heads = out + 2 * width
        masks_1 = masks_2 = digits_1 = digits_2 = tops = 0
        for x in range(width):
            if exceeds(block, limits):
                return -2
            store_i16(out + 2 * x, load_i16(block))
            not_dc = ~np.uint64(1)
            low, high, top = has_low(block) & not_dc, has_high(block) & not_dc, has_top(block) & not_dc
            low_head, high_head = filled_bytes(low), filled_bytes(high)
            store_u8(heads + x, low_head)
            store_u8(heads + width + x, high_head)
            if low:
                store_u64(parts[0] + masks_1, squeeze_bytes(low, low_head))
                masks_1 += bits_set(np.uint64(low_head))
                for pair in range(4):
                    bits = (low >> np.uint64(16 * pair)) & np.uint64(0xFFFF)
                    packed = low_digits(block + 32 * pair, bits)
                    digits_1 = _append(parts[2], digits_1, packed, bits_set(bits))
            if high:
                store_u64(parts[1] + masks_2, squeeze_bytes(high, high_head))
                masks_2 += bits_set(np.uint64(high_head))
                for pair in range(4):
                    bits = (high >> np.uint64(16 * pair)) & np.uint64(0xFFFF)
                    packed = high_digits(block + 32 * pair, bits)
                    digits_2 = _append(parts[3], digits_2, packed, bits_set(bits))
            while top:
                place = first_bit(top)
                top &= top - np.uint64(1)
                value = load_i16(block + 2 * place)
                store_i16(parts[4] + tops, x)
                store_u8(parts[4] + tops + 2, place)
                store_u8(parts[4] + tops + 3, (((value + 8) >> 4) + 8) >> 4)
                tops += 4
            block += 128
        bytes_1, bytes_2 = (digits_1 + 1) >> 1, (digits_2 + 1) >> 1
        if out + 4 * width + masks_1 + masks_2 + bytes_1 + bytes_2 + tops > target + room:
            return -1
        out = copy_bytes(parts[0], heads + 2 * width, masks_1)
        out = copy_bytes(parts[1], out, masks_2)
        out = copy_bytes(parts[2], out, bytes_1)
        out = copy_bytes(parts[3], out, bytes_2)
        out = copy_bytes(parts[4], out, tops)
        ends[row] = out - target
    return out - target


@njit(error_model="numpy")
def _count_bits(place, count):
    """Bits set in `count` bytes; reads up to 7 more."""
    total = 0
    stop = place + count
    while place + 8 <= stop:
        total += bits_set(load_u64(place))
        place += 8
    if place < stop:
        total += bits_set(load_u64(place) & ((np.uint64(1) << np.uint64(8 * (stop - place))) - np.uint64(1)))
    return total


@njit(error_model="numpy")
def flat_block(dc, step, size, target, stride):
    """A block of one value, which all inverse DCTs make of a DC alone."""
    value = (dc * step + 4) >> 3
    if size == 1:
        value = ((value + 512) & 1023) - 512  # the table in which libjpeg looks it up repeats itself
    value = min(max(value + 128, 0), 255)
    if size == 8:
        fill_8(value, target, stride)
    else:
        for line in range(size):
            for column in range(size):
                store_u8(target + line * stride + column, value)


@njit(error_model="numpy")
def read_row(row, end, blocks, steps, size, samples, block, places):
    """The samples of blocks of a row: size x size each, 8, 4, 2 or 1.

    row, end: addresses; 32 bytes behind `end` can be read. blocks: how many the row has, the first that is wanted, and
    the one behind the last. samples: the address for them, and the bytes from line to line. block: the address of
    memory for 64 int16. places: SPARSE to WORKING.

    Returns 0, or 1 where the parts of the row do not fit between row and end: then nothing is read outside of these
    bytes. What the coefficients are does not matter to that.
    """
    width, first, last = blocks
    target, stride = samples
    heads_1 = row + 2 * width
    heads_2 = heads_1 + width
    masks_1 = heads_2 + width
    if masks_1 > end:
        return 1
    step = load_i16(steps)
    if size == 1:
        for x in range(first, last):
            flat_block(load_i16(row + 2 * x), step, 1, target + x - first, stride)
        return 0
    masks_2 = masks_1 + _count_bits(heads_1, width)
    digits_1 = masks_2 + _count_bits(heads_2, width)
    if digits_1 > end:
        return 1
    digits_2 = digits_1 + ((_count_bits(masks_1, masks_2 - masks_1) + 1) >> 1)
    top = digits_2 + ((_count_bits(masks_2, digits_1 - masks_2) + 1) >> 1)
    if top > end or (end - top) & 3:
        return 1
    skipped_1, skipped_2 = _count_bits(heads_1, first), _count_bits(heads_2, first)
    at_1, at_2 = _count_bits(masks_1, skipped_1), _count_bits(masks_2, skipped_2)
    masks_1 += skipped_1
    masks_2 += skipped_2
    while top < end and (load_i16(top) & 0xFFFF) < first:
        top += 4
    for x in range(first, last):
        head_1, head_2 = load_u8(heads_1 + x), load_u8(heads_2 + x)
        dc = load_i16(row + 2 * x)
        has_tops = top < end and (load_i16(top) & 0xFFFF) == x
        if head_1 | head_2 == 0 and not has_tops:
            flat_block(dc, step, size, target, stride)
        else:
            mask_1, mask_2 = spread_bytes(load_u64(masks_1), head_1), spread_bytes(load_u64(masks_2), head_2)
            masks_1 += bits_set(np.uint64(head_1))
            masks_2 += bits_set(np.uint64(head_2))
            expand(mask_1, digits_1, at_1, mask_2, digits_2, at_2, dc, block)
            at_1 += bits_set(mask_1)
            at_2 += bits_set(mask_2)
            while top < end and (load_i16(top) & 0xFFFF) == x:
                digit = load_u8(top + 3)
                add_i16(block + 2 * places[load_u8(top + 2) & 63], (digit << 8) - ((digit & 128) << 9))
                top += 4
            if size == 8:
                inverse_8(block, steps, target, stride)
            elif size == 4:
                inverse_4(block, steps, target, stride)
            else:
                inverse_2(block, steps, target, stride)
        target += size
    return 0
