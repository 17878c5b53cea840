"""Rows of `layout` to samples."""

from __future__ import annotations

import numpy as np
from numba import njit

from readers.coefficients.kernels.digits import expand
from readers.coefficients.kernels.transforms import inverse_2, inverse_4, inverse_8
from readers.coefficients.kernels.vectors import (
    add_i16,
    bits_set,
    fill_8,
    load_i16,
    load_u8,
    load_u64,
    spread_bytes,
    store_u8,
)

__all__ = ["copy_bytes", "flat_block", "read_row"]


@njit(error_model="numpy")
def copy_bytes(source, target, count):
    for k in range(count):
        store_u8(target + k, load_u8(source + k))
    return target + count


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
