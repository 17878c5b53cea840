"""Weighted sums of pixels, along lines and down columns, as torch resizes uint8: weights of 16 bits, sums of 32.

    a line of bytes, each colour apart      ──► `filter_8`   ──► pairs: values of two lines, 16 bits each, side by side
    pairs of all lines that a result needs  ──► `combine_32` ──► RGB

What vpmaddwd multiplies and adds are two neighbours along a line, then two lines of a pair. Whole numbers are added, so
their order does not matter, and weights of a mean of bytes never leave 0 to 255: nothing is clamped.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from readers.coefficients.kernels.colours import interleave
from readers.coefficients.kernels.vectors import (
    I8,
    I16,
    I32,
    I64,
    call,
    load,
    nothing,
    repeated,
    shuffle,
    splat,
    store,
    vector,
)

__all__ = ["COLUMN_BYTES", "LINE_BYTES", "STEP_BYTES", "WEIGHTS_AT", "combine_32", "filter_8"]

# What `filter_8` needs for 8 results: uint32 window of the first four, uint32 window of the others; from 32 on, for
# each half of 16 bytes, which byte of the window is which; from 64 on, for every step, int16 [16]: two weights a result
LINE_BYTES, STEP_BYTES = 64, 32
# What `combine_32` needs for a line: uint32 first pair, uint32 pairs; then two weights, int16, for each pair
COLUMN_BYTES, WEIGHTS_AT = 40, 8

_BYTES, _WORDS, _SUMS = vector(I8, 16), vector(I16, 16), vector(I32, 8)


def _sums(builder, count, shift):
    """Places for sums, each half of what they are divided by; and the vector of shifts that divide them."""
    shifts = repeated(builder, builder.trunc(shift, I32), 8)
    half = builder.shl(splat(I32, 8, 1), builder.sub(shifts, splat(I32, 8, 1)))
    places = [cgutils.alloca_once(builder, _SUMS) for _ in range(count)]
    for place in places:
        builder.store(half, place)
    return places, shifts


def _add_products(builder, place, values, weights):
    products = call(builder, "llvm.x86.avx2.pmadd.wd", _SUMS, values, weights)
    builder.store(builder.add(builder.load(place), products), place)


@intrinsic
def filter_8(typing, lines, strides, table, steps, target, target_stride, shift):
    """8 results of two lines in three colours, as pairs.

    lines: the address of the first line of the first colour. strides: bytes to the other line, and from colour to
    colour. table: see above. steps: of two weights each. target: the address for 8 pairs of 4 bytes of the first
    colour; target_stride: bytes to those of the next.
    """

    def generate(context, builder, signature, arguments):
        lines, strides, table, steps, target, target_stride, shift = arguments
        stride, colour_stride = (builder.extract_value(strides, k) for k in (0, 1))
        order = load(builder, vector(I8, 32), table, 32)
        windows = [builder.add(lines, builder.zext(load(builder, I32, table, at), I64)) for at in (0, 4)]
        offsets = []
        for colour in range(3):
            offset = builder.mul(colour_stride, I64(colour))
            offsets += [offset, builder.add(offset, stride)]
        sums, shifts = _sums(builder, 6, shift)
        with cgutils.for_range(builder, steps) as loop:
            weights = load(builder, _WORDS, builder.add(table, builder.mul(loop.index, I64(STEP_BYTES))), LINE_BYTES)
            moved = [builder.add(window, builder.mul(loop.index, I64(2))) for window in windows]
            for offset, place in zip(offsets, sums, strict=True):
                low, high = (load(builder, _BYTES, builder.add(window, offset)) for window in moved)
                both = shuffle(builder, low, high, range(32))
                words = call(builder, "llvm.x86.avx2.pshuf.b", both.type, both, order)
                _add_products(builder, place, builder.bitcast(words, _WORDS), weights)
        for colour in range(3):
            upper, lower = (builder.lshr(builder.load(one), shifts) for one in sums[2 * colour : 2 * colour + 2])
            pairs = builder.or_(upper, builder.shl(lower, splat(I32, 8, 16)))
            store(builder, pairs, builder.add(target, builder.mul(target_stride, I64(colour))))
        return nothing(context)

    number = types.int64
    two = types.UniTuple(number, 2)
    return types.void(number, two, number, number, number, number, number), generate


@intrinsic
def combine_32(typing, ring, strides, last_slot, table, shift, target):
    """32 pixels, 96 bytes at `target`, from the pairs of several lines.

    ring: the address of pairs of the first colour in slot 0. strides: bytes from slot to slot, and from colour to
    colour. last_slot: one less than their number, a power of two. table: see above.
    """

    def generate(context, builder, signature, arguments):
        ring, strides, last_slot, table, shift, target = arguments
        slot_stride, colour_stride = (builder.extract_value(strides, k) for k in (0, 1))
        first, count = (builder.zext(load(builder, I32, table, at), I64) for at in (0, 4))
        sums, shifts = _sums(builder, 12, shift)
        with cgutils.for_range(builder, count) as loop:
            slot = builder.and_(builder.add(first, loop.index), last_slot)
            pairs = builder.add(ring, builder.mul(slot, slot_stride))
            weights = load(builder, I32, builder.add(table, builder.mul(loop.index, I64(4))), WEIGHTS_AT)
            weights = builder.bitcast(repeated(builder, weights, 8), _WORDS)
            for colour in range(3):
                place = builder.add(pairs, builder.mul(colour_stride, I64(colour)))
                for part in range(4):
                    _add_products(builder, sums[4 * colour + part], load(builder, _WORDS, place, 32 * part), weights)
        colours = []
        for colour in range(3):
            parts = [builder.lshr(builder.load(one), shifts) for one in sums[4 * colour : 4 * colour + 4]]
            halves = [call(builder, "llvm.x86.avx2.packssdw", _WORDS, *parts[k : k + 2]) for k in (0, 2)]
            packed = call(builder, "llvm.x86.avx2.packuswb", vector(I8, 32), *halves)
            packed = builder.bitcast(packed, _SUMS)
            ordered = shuffle(builder, packed, packed, [0, 4, 1, 5, 2, 6, 3, 7])
            colours.append(builder.bitcast(ordered, vector(I8, 32)))
        interleave(builder, colours, target)
        return nothing(context)

    number = types.int64
    return types.void(number, types.UniTuple(number, 2), number, number, number, number), generate
