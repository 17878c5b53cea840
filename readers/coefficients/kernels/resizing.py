"""A box of an image, resized with antialiasing, in one go: from lines of samples to lines of the result.

    two lines of the box, each colour apart ──► filtered along the lines ──► a ring of such pairs, as many as a line of
    the result needs ──► filtered down the columns ──► a line of the result, in its place, as bytes or as floats

So what lies between stays in the cache next to the core. The arithmetic is torch's for uint8 (UpSampleKernel.cpp), to
the bit: a triangle as wide as the scale, its weights as float64, normalised, then as int16 with as many bits of
fraction as the largest of them leaves; first along lines, rounded to uint8, then down columns.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from readers.coefficients.kernels.boxes import MARGIN, SOURCE, aligned, begin, next_line, plan_components
from readers.coefficients.kernels.colours import planes_32
from readers.coefficients.kernels.filters import (
    COLUMN_BYTES,
    LINE_BYTES,
    STEP_BYTES,
    WEIGHTS_AT,
    combine_32,
    filter_8,
)
from readers.coefficients.kernels.floats import BYTES, write_floats
from readers.coefficients.kernels.packing import copy_bytes
from readers.coefficients.kernels.vectors import copy_32, load_u32, store_u32

__all__ = ["resize_box"]

_TAPS = 9  # what a result is made of, at a scale of 4 at most
_SLOTS = 8  # pairs of lines that are kept, at most
_NOTHING = 0x80  # in an order of bytes: 0
_MOST_BITS = 22

_number = types.int64


@njit(error_model="numpy")
def _weigh(size, resized, spans, weights):
    """The weights that make each of `resized` values from those of `size`; returns the bits of fraction for int16.

    spans: int64 [resized, 2], the first value that counts and the one behind the last. weights: float64
    [resized, _TAPS].
    """
    scale = size / resized
    support, inverse = max(scale, 1.0), 1.0 / max(scale, 1.0)
    largest = 0.0
    for number in range(resized):
        centre = scale * (number + 0.5)
        start = max(int(centre - support + 0.5), 0)
        stop = min(int(centre + support + 0.5), size)
        total = 0.0
        for k in range(stop - start):
            weights[number, k] = max(1.0 - abs((k + start - centre + 0.5) * inverse), 0.0)
            total += weights[number, k]
        for k in range(stop - start):
            weights[number, k] /= total
            largest = max(largest, weights[number, k])
        spans[number, 0], spans[number, 1] = start, stop
    bits = 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


@njit(error_model="numpy")
def _two_weights(weights, spans, number, place, bits):
    """The weights of the values at a place and behind it, as two int16; 0 where they do not count."""
    both = 0
    for k in range(2):
        if spans[number, 0] <= place + k < spans[number, 1]:
            weight = weights[number, place + k - spans[number, 0]]
            both |= int(0.5 + weight * (1 << bits)) << (16 * k)
    return both


@njit(error_model="numpy")
def _tabulate_lines(size, resized, chosen, table):
    """Write what `filter_8` needs for each eight results along a line, of `resized` from `size` values.

    chosen: the first result that is wanted, how many, and whether they are mirrored. Returns the first value that they
    need, how many, steps, and the bits of fraction. Windows are counted from that value.
    """
    first, count, is_mirrored = chosen
    spans, weights = np.empty((resized, 2), np.int64), np.empty((resized, _TAPS))
    bits = _weigh(size, resized, spans, weights)
    left, taps = spans[first, 0], 0
    for number in range(first, first + count):
        taps = max(taps, spans[number, 1] - spans[number, 0])
    steps = (taps + 1) >> 1
    for half in range(0, count + 7 & ~7, 4):  # which share a window
        at = table + (half >> 3) * (LINE_BYTES + STEP_BYTES * steps) + 16 * (half >> 2 & 1)
        leftmost = first + (count - min(half + 4, count) if is_mirrored else half)
        window = spans[leftmost, 0] if half < count else left
        store_u32(at - 12 * (half >> 2 & 1), window - left)
        for k in range(4):
            number = first + (count - 1 - half - k if is_mirrored else half + k)
            is_wanted = half + k < count
            place = spans[number, 0] if is_wanted else window
            store_u32(at + 32, (place - window) | _NOTHING << 8 | (place - window + 1) << 16 | _NOTHING << 24)
            for step in range(steps):
                both = _two_weights(weights, spans, number, place + 2 * step, bits) if is_wanted else 0
                store_u32(at + LINE_BYTES + STEP_BYTES * step, both)
            at += 4
    return left, spans[first + count - 1, 1] - left, steps, bits


@njit(error_model="numpy")
def _tabulate_columns(size, resized, chosen, table):
    """Write what `combine_32` needs for each line of the result, of `resized` from `size` lines.

    chosen: the first result that is wanted, and how many. Returns the first line that they need, how many, how many
    pairs one of them needs at most, and the bits of fraction. Pairs are counted from that line.
    """
    first, count = chosen
    spans, weights = np.empty((resized, 2), np.int64), np.empty((resized, _TAPS))
    bits = _weigh(size, resized, spans, weights)
    top, most = spans[first, 0], 0
    for number in range(first, first + count):
        pair = (spans[number, 0] - top) >> 1
        pairs = ((spans[number, 1] - top - 1) >> 1) - pair + 1
        store_u32(table, pair)
        store_u32(table + 4, pairs)
        for k in range(pairs):
            both = _two_weights(weights, spans, number, top + 2 * (pair + k), bits)
            store_u32(table + WEIGHTS_AT + 4 * k, both)
        most = max(most, pairs)
        table += COLUMN_BYTES
    return top, spans[first + count - 1, 1] - top, most, bits


@njit(error_model="numpy")
def _split_colours(samples, columns, is_grey, target, stride):
    """A line of samples as lines of red, green and blue; of grey as one."""
    luma, blue, red = samples
    for x in range(0, columns, 32):
        if is_grey:
            copy_32(luma + x, target + x)
        else:
            planes_32(luma + x, blue + x, red + x, target + x, stride)


@njit(error_model="numpy")
def _combine(ring, strides, last_slot, table, bits, columns, target, spare):
    """A line of the result; nothing is written behind it."""
    for x in range(0, columns - 31, 32):
        combine_32(ring + 4 * x, strides, last_slot, table, bits, target + 3 * x)
    if columns & 31:
        if columns > 32:
            x = columns - 32
            combine_32(ring + 4 * x, strides, last_slot, table, bits, target + 3 * x)
        else:
            combine_32(ring, strides, last_slot, table, bits, spare)
            copy_bytes(spare, target, 3 * columns)


@njit(
    _number(
        *(SOURCE, types.UniTuple(_number, 5), types.Tuple((_number, types.boolean)), types.UniTuple(_number, 4)),
        *(types.UniTuple(_number, 7), types.UniTuple(_number, 5), _number, types.int64[::1]),
    ),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def resize_box(source, shape, scale, box, resize, pixels, memory, places):
    """RGB of a box that is resized, cropped and mirrored.

    source, shape, scale, box, places: as of `decode_box`. resize: height and width of the whole box when it is resized,
    each a quarter of the box or more; top, left, height and width of the part of that which is wanted; and how it is
    mirrored: 1 left to right, 2 upside down, 3 both. pixels: the address for the first line; the bytes from line to
    line, and from colour to colour; as what they are written, and by which factors (`kernels.floats`). memory: the
    address of as many bytes as `resize_bytes` says. Returns 0, or 1 where the bytes are damaged.
    """
    image = source.ctypes.data, len(source)
    rows, columns, top, left, height, width, mirrored = resize
    line_table = aligned(memory)
    chosen = left, width, mirrored & 1
    first_column, needed, steps, line_bits = _tabulate_lines(box[3], columns, chosen, line_table)
    group_bytes = LINE_BYTES + STEP_BYTES * steps
    column_table = line_table + ((width + 7) >> 3) * group_bytes
    first_line, lines, pairs, column_bits = _tabulate_columns(box[2], rows, (top, height), column_table)
    last_slot = 1
    while last_slot < pairs - 1:
        last_slot = 2 * last_slot + 1

    ring = aligned(column_table + COLUMN_BYTES * height)
    colour_stride = 4 * ((width + 31) & ~31)
    slot_stride = 3 * colour_stride
    planes = ring + _SLOTS * slot_stride + MARGIN
    stride = aligned(needed + 2 * MARGIN)
    line_of_bytes = planes + 6 * stride
    spare = line_of_bytes + aligned(3 * width + 32)
    block = spare + 128
    blue = block + 128
    red = blue + stride

    plan = plan_components(shape, scale[0])
    is_grey = plan.shape[0] == 1
    across = box[1] + first_column, needed, scale[1]
    first_line += box[0]
    state = begin(plan, first_line, across[0], needed, red + stride, 1)
    target, target_stride, plane_stride, kind, factors = pixels
    if mirrored & 2:
        target += (height - 1) * target_stride
        target_stride = -target_stride
    left_over, table = height, column_table
    for pair in range((lines + 1) >> 1):
        for k in range(min(2, lines - 2 * pair)):
            line = first_line + 2 * pair + k
            status, luma, cb, cr = next_line(image, plan, state, line, across, (block, blue, red), places)
            if status:
                return 1
            _split_colours((luma, cb, cr), needed, is_grey, planes + k * stride, 2 * stride)
        slot = ring + (pair & last_slot) * slot_stride
        strides = stride, 0 if is_grey else 2 * stride
        for x in range(0, width, 8):
            at = line_table + (x >> 3) * group_bytes
            filter_8(planes, strides, at, steps, slot + 4 * x, colour_stride, line_bits)
        while left_over and load_u32(table) + load_u32(table + 4) - 1 <= pair:
            made = target if kind == BYTES else line_of_bytes
            _combine(ring, (slot_stride, colour_stride), last_slot, table, column_bits, width, made, spare)
            if kind != BYTES:
                write_floats(made, width, factors, target, plane_stride, kind, spare)
            target += target_stride
            table += COLUMN_BYTES
            left_over -= 1
    return 0
