"""The digits of a block's coefficients: from int16 to masks and packed half bytes, and back. See `layout`.

A mask of 64 bits has 16 for each pair of lines, in which lines alternate column by column. So the 16 half bytes of a
pair, spread to where the mask has bits, are eight bytes: one for each column, with the upper line in the lower half.
"""

from __future__ import annotations

from llvmlite.ir import Undefined
from numba import types
from numba.extending import intrinsic

from readers.coefficients.kernels.vectors import (
    I8,
    I16,
    I32,
    I64,
    load,
    nothing,
    pack_bits,
    shuffle,
    splat,
    spread_bits,
    store,
    vector,
)

__all__ = [
    "clear_block",
    "exceeds",
    "expand",
    "filled_bytes",
    "has_high",
    "has_low",
    "has_top",
    "high_digits",
    "low_digits",
]

_HALVES = 0x1111111111111111
_WORDS = vector(I16, 16)
_BLOCK = vector(I16, 64)


def _half_bytes(builder, bits):
    """16 bits as 16 half bytes, each all ones or 0."""
    spread = spread_bits(builder, bits, I64(_HALVES))
    return builder.sub(builder.shl(spread, I64(4)), spread)


def _pair_of_lines(builder, digits, position, bits):
    """The half bytes from number `position` on at the set ones of 16 bits; reads 16 bytes."""
    place = builder.add(digits, builder.lshr(position, I64(1)))
    odd = builder.shl(builder.and_(position, I64(1)), I64(2))
    word = builder.lshr(load(builder, I64, place), odd)
    # the rest of the first byte of the next word: two shifts, since one by 64 is not defined
    rest = builder.shl(builder.shl(load(builder, I64, place, 8), I64(1)), builder.sub(I64(63), odd))
    return spread_bits(builder, builder.or_(word, rest), _half_bytes(builder, bits))


def _pairs_of_lines(builder, digits, position, mask):
    pairs = []
    for number in range(4):
        bits = builder.and_(builder.lshr(mask, I64(16 * number)), I64(0xFFFF))
        pairs.append(_pair_of_lines(builder, digits, position, bits))
        position = builder.add(position, builder.ctpop(bits))
    return pairs


def _in_working_order(builder, pairs, scale):
    """Four vectors in the order WORKING of digits with a sign, times 2 ** scale."""
    halves = []
    for first, second in (pairs[:2], pairs[2:]):
        both = builder.insert_element(vector(I64, 2)(Undefined), first, I32(0))
        both = builder.insert_element(both, second, I32(1))
        halves.append(builder.bitcast(both, vector(I8, 16)))
    low, high = [], []
    for base in (0, 8):
        alternating = [one for column in range(8) for one in (base + column, 16 + base + column)]
        words = builder.zext(shuffle(builder, *halves, alternating), _WORDS)
        low.append(_signed(builder, builder.shl(words, splat(I16, 16, 12)), scale))
        upper = builder.and_(words, splat(I16, 16, 0xF0))
        high.append(_signed(builder, builder.shl(upper, splat(I16, 16, 8)), scale))
    return low + high


def _signed(builder, words, scale):
    return builder.ashr(words, splat(I16, 16, 12 - scale))


@intrinsic
def expand(typing, low_mask, low, low_at, high_mask, high, high_at, dc, block):
    """The coefficients of a block, without top digits, to int16 [64] at `block` in the order WORKING.

    low, high: where the digits of the row begin; low_at, high_at: the numbers of the first ones of the block. Reads up
    to 16 bytes behind the byte in which the last digit is.
    """

    def generate(context, builder, signature, arguments):
        low_mask, low, low_at, high_mask, high, high_at, dc, block = arguments
        vectors = _in_working_order(builder, _pairs_of_lines(builder, low, low_at, low_mask), 0)
        vectors[0] = builder.insert_element(vectors[0], builder.trunc(dc, I16), I32(0))
        for k, one in enumerate(vectors):
            store(builder, one, block, 32 * k)
        with builder.if_then(builder.icmp_unsigned("!=", high_mask, I64(0))):
            added = _in_working_order(builder, _pairs_of_lines(builder, high, high_at, high_mask), 4)
            for k, (one, more) in enumerate(zip(vectors, added, strict=True)):
                store(builder, builder.add(one, more), block, 32 * k)
        return nothing(context)

    word, number = types.uint64, types.int64
    return types.void(word, number, number, word, number, number, number, number), generate


def _shifted(builder, values, number):
    """16 to the power of `number` times what is left above the lower digits, and something below that."""
    lanes = values.type.count
    return builder.add(values, splat(I16, lanes, (0, 8, 136)[number])) if number else values


def _has_digit(number):
    @intrinsic
    def has_digit(typing, block):
        """A mask of the int16 of a block that have the digit: low, high, or anything above."""

        def generate(context, builder, signature, arguments):
            values = _shifted(builder, load(builder, _BLOCK, arguments[0]), number)
            values = builder.and_(values, splat(I16, 64, (0x0F, 0xF0, -0x100)[number]))
            return builder.bitcast(builder.icmp_signed("!=", values, splat(I16, 64, 0)), I64)

        return types.uint64(types.int64), generate

    return has_digit


has_low, has_high, has_top = _has_digit(0), _has_digit(1), _has_digit(2)


@intrinsic
def clear_block(typing, block):
    """64 int16 of 0."""

    def generate(context, builder, signature, arguments):
        for k in range(4):
            store(builder, splat(I16, 16, 0), arguments[0], 32 * k)
        return nothing(context)

    return types.void(types.int64), generate


def _digits_of(number):
    @intrinsic
    def digits_of(typing, values, bits):
        """The digits of those of 16 int16 at an address whose bit is set, packed."""

        def generate(context, builder, signature, arguments):
            values = _shifted(builder, load(builder, _WORDS, arguments[0]), number)
            values = builder.lshr(values, splat(I16, 16, 4 * number)) if number else values
            pairs = builder.bitcast(builder.and_(values, splat(I16, 16, 15)), vector(I32, 8))
            pairs = builder.or_(pairs, builder.lshr(pairs, splat(I32, 8, 12)))
            halves = builder.bitcast(builder.trunc(pairs, vector(I8, 8)), I64)
            return pack_bits(builder, halves, _half_bytes(builder, arguments[1]))

        return types.uint64(types.int64, types.uint64), generate

    return digits_of


low_digits, high_digits = _digits_of(0), _digits_of(1)


@intrinsic
def exceeds(typing, block, limits):
    """A mask of the int16 of a block that are beyond +- their limit."""

    def generate(context, builder, signature, arguments):
        values, limits = (load(builder, _BLOCK, one) for one in arguments)
        zero = splat(I16, 64, 0)
        size = builder.select(builder.icmp_signed("<", values, zero), builder.sub(zero, values), values)
        return builder.bitcast(builder.icmp_unsigned(">", size, limits), I64)

    return types.uint64(types.int64, types.int64), generate


@intrinsic
def filled_bytes(typing, mask):
    """Which of the 8 bytes of a mask are not 0, as 8 bits."""

    def generate(context, builder, signature, arguments):
        parts = builder.bitcast(arguments[0], vector(I8, 8))
        return builder.zext(builder.bitcast(builder.icmp_signed("!=", parts, splat(I8, 8, 0)), I8), I64)

    return types.int64(types.uint64), generate
