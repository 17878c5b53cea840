"""Inverse DCTs of a block to 8 x 8, 4 x 4 or 2 x 2 samples: those of libjpeg-turbo for x86, to the bit.

A block and its multipliers are int16 [64] in the order `layout.WORKING`: four vectors of 16, in which lines
(0, 4), (2, 6), (1, 5) and (3, 7) alternate column by column. Sums of two products are what vpmaddwd computes, so the
arithmetic is libjpeg-turbo's: products of 16 bits, sums of 32, and 16 bits with saturation between the two passes.

Sources: jidctint.c (8 x 8; the algorithm of Loeffler, Ligtenberg and Moschytz) and jidctred.c (4 x 4, 2 x 2), whose
constants have 13 bits of fraction; between the passes there are 2 more.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from readers.coefficients.kernels.vectors import (
    I8,
    I16,
    I32,
    I64,
    call,
    constant,
    load,
    nothing,
    shuffle,
    splat,
    store,
    vector,
)

__all__ = ["inverse_2", "inverse_4", "inverse_8"]

_WORDS = vector(I16, 16)
_SUMS = vector(I32, 8)
_CENTRE = 128
_FRACTION, _BETWEEN = 13, 2


def _fixed(number):
    return round(number * (1 << _FRACTION))


_0_298, _0_390, _0_541, _0_765 = map(_fixed, (0.298631336, 0.390180644, 0.541196100, 0.765366865))
_0_899, _1_175, _1_501, _1_847 = map(_fixed, (0.899976223, 1.175875602, 1.501321110, 1.847759065))
_1_961, _2_053, _2_562, _3_072 = map(_fixed, (1.961570560, 2.053119869, 2.562915447, 3.072711026))


def _products(builder, pairs, first, second):
    """first * a + second * b for eight pairs (a, b) of int16."""
    factors = constant(I16, [first, second] * 8)
    return call(builder, "llvm.x86.avx2.pmadd.wd", _SUMS, pairs, factors)


def _saturated(builder, low, high):
    """Eight int32 each to 16 int16, in each half of four of the first and four of the second."""
    return call(builder, "llvm.x86.avx2.packssdw", _WORDS, low, high)


def _bytes(builder, low, high):
    return call(builder, "llvm.x86.avx2.packuswb", vector(I8, 32), low, high)


def _loaded(builder, block, steps):
    """The coefficients times their multipliers, as pairs of lines (0, 4), (2, 6), (1, 5), (3, 7)."""
    return [builder.mul(load(builder, _WORDS, block, 32 * k), load(builder, _WORDS, steps, 32 * k)) for k in range(4)]


def _regrouped(builder, pairs):
    """Pairs (0, 4), (2, 6), (1, 7), (5, 3)."""
    even, middle, one_five, three_seven = pairs
    one_seven = shuffle(builder, one_five, three_seven, [lane + 16 * (lane & 1) for lane in range(16)])
    five_three = shuffle(builder, one_five, three_seven, [lane + 15 if lane & 1 else lane + 1 for lane in range(16)])
    return even, middle, one_seven, five_three


def _across(builder, halves):
    """Pairs of columns (0, 4), (2, 6), (1, 7), (5, 3) of eight lines.

    halves: four vectors, each of four columns of a line and of the line four below it, then of the other four columns.
    """
    lines = []
    for half in halves:
        quarters = builder.bitcast(half, vector(I64, 4))
        line = builder.bitcast(shuffle(builder, quarters, quarters, [0, 2, 1, 3]), _WORDS)
        order = [base + column for base in (0, 8) for column in (0, 4, 2, 6, 1, 7, 5, 3)]
        lines.append(builder.bitcast(shuffle(builder, line, line, order), _SUMS))
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    first, second = shuffle(builder, lines[0], lines[1], low), shuffle(builder, lines[2], lines[3], low)
    third, fourth = shuffle(builder, lines[0], lines[1], high), shuffle(builder, lines[2], lines[3], high)
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    chosen = ((first, second, low), (first, second, high), (third, fourth, low), (third, fourth, high))
    return [builder.bitcast(shuffle(builder, *one), _WORDS) for one in chosen]


def _even_8(builder, total, difference, inner):
    """The even halves of four pairs of results, from the sum and the difference of lines 0 and 4."""
    second = _products(builder, inner, _0_541, _0_541 - _1_847)
    third = _products(builder, inner, _0_541 + _0_765, _0_541)
    return [
        builder.add(total, third),
        builder.add(difference, second),
        builder.sub(difference, second),
        builder.sub(total, third),
    ]


def _results_8(builder, even, odd, shift):
    """Eight vectors of int32, in order."""
    shifts = splat(I32, 8, shift)
    upper = [builder.ashr(builder.add(even[k], odd[k]), shifts) for k in range(4)]
    return [*upper, *(builder.ashr(builder.sub(even[k], odd[k]), shifts) for k in (3, 2, 1, 0))]


def _first_pass_8(builder, pairs):
    """Of lines (0, 4), (2, 6), (1, 5), (3, 7). The encoder has seen that no sum of two of them leaves 16 bits, so the
    odd half is taken apart by lines."""
    outer, inner, one_five, three_seven = pairs
    shift = _FRACTION - _BETWEEN
    rounding = splat(I32, 8, 1 << (shift - 1))
    total = builder.add(_products(builder, outer, 1 << _FRACTION, 1 << _FRACTION), rounding)
    difference = builder.add(_products(builder, outer, 1 << _FRACTION, -(1 << _FRACTION)), rounding)
    factors = (  # of lines 1, 5, 3 and 7
        (_1_501 - _0_899 + _1_175 - _0_390, _1_175 - _0_390, _1_175, _1_175 - _0_899),
        (_1_175, _1_175 - _2_562, _3_072 - _2_562 + _1_175 - _1_961, _1_175 - _1_961),
        (_1_175 - _0_390, _2_053 - _2_562 + _1_175 - _0_390, _1_175 - _2_562, _1_175),
        (_1_175 - _0_899, _1_175, _1_175 - _1_961, _0_298 - _0_899 + _1_175 - _1_961),
    )
    odd = [
        builder.add(_products(builder, one_five, *four[:2]), _products(builder, three_seven, *four[2:]))
        for four in factors
    ]
    return _results_8(builder, _even_8(builder, total, difference, inner), odd, shift)


def _second_pass_8(builder, pairs):
    """Of columns (0, 4), (2, 6), (1, 7), (5, 3). Sums of two of them are of 16 bits and wrap, as in libjpeg-turbo."""
    outer, inner, one_seven, five_three = pairs
    shift = _FRACTION + _BETWEEN + 3
    swapped = shuffle(builder, outer, outer, [lane ^ 1 for lane in range(16)])
    rounding = splat(I32, 8, (1 << (shift - 1)) + (_CENTRE << shift))
    total = builder.add(_products(builder, builder.add(outer, swapped), 1 << _FRACTION, 0), rounding)
    difference = builder.add(_products(builder, builder.sub(outer, swapped), 1 << _FRACTION, 0), rounding)
    both = builder.add(one_seven, five_three)  # 1 + 5, 7 + 3
    z3 = _products(builder, both, _1_175, _1_175 - _1_961)
    z4 = _products(builder, both, _1_175 - _0_390, _1_175)
    odd = [
        builder.add(_products(builder, one_seven, _1_501 - _0_899, -_0_899), z4),
        builder.add(_products(builder, five_three, -_2_562, _3_072 - _2_562), z3),
        builder.add(_products(builder, five_three, _2_053 - _2_562, -_2_562), z4),
        builder.add(_products(builder, one_seven, -_0_899, _0_298 - _0_899), z3),
    ]
    return _results_8(builder, _even_8(builder, total, difference, inner), odd, shift)


@intrinsic
def inverse_8(typing, block, steps, target, stride):
    """8 x 8 samples to `target`, `stride` bytes from line to line."""

    def generate(context, builder, signature, arguments):
        block, steps, target, stride = arguments
        lines = _first_pass_8(builder, _loaded(builder, block, steps))
        pairs = _across(builder, [_saturated(builder, lines[k], lines[k + 4]) for k in range(4)])
        columns = _second_pass_8(builder, pairs)
        c04, c15, c26, c37 = (_saturated(builder, columns[k], columns[k + 4]) for k in range(4))
        order = [base + 4 * column + line for base in (0, 16) for line in range(4) for column in (0, 2, 1, 3)]
        left, right = _bytes(builder, c04, c15), _bytes(builder, c26, c37)  # columns 0 4 1 5, columns 2 6 3 7
        left, right = (builder.bitcast(shuffle(builder, one, one, order), _WORDS) for one in (left, right))
        for first, lanes in ((0, range(4)), (2, range(4, 8))):
            both = [16 * side + base + lane for base in (0, 8) for lane in lanes for side in (0, 1)]
            words = builder.bitcast(shuffle(builder, left, right, both), vector(I64, 4))
            for lane, line in enumerate((first, first + 1, first + 4, first + 5)):
                place = builder.add(target, builder.mul(stride, I64(line)))
                store(builder, builder.extract_element(words, I32(lane)), place)
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _pass_4(builder, pairs, shift):
    """One pass: four vectors of eight int32, whose sums wrap."""
    outer, inner, one_seven, five_three = pairs
    rounding = splat(I32, 8, 1 << (shift - 1))
    total = builder.add(_products(builder, outer, 1 << (_FRACTION + 1), 0), rounding)
    middle = _products(builder, inner, _1_847, -_0_765)
    plus, minus = builder.add(total, middle), builder.sub(total, middle)
    odd_0 = builder.add(
        _products(builder, one_seven, _fixed(1.061594337), -_fixed(0.211164243)),
        _products(builder, five_three, _fixed(1.451774981), -_fixed(2.172734803)),
    )
    odd_2 = builder.add(
        _products(builder, one_seven, _2_562, -_fixed(0.509795579)),
        _products(builder, five_three, -_fixed(0.601344887), _0_899),
    )
    results = builder.add(plus, odd_2), builder.add(minus, odd_0), builder.sub(minus, odd_0), builder.sub(plus, odd_2)
    return [builder.ashr(one, splat(I32, 8, shift)) for one in results]


@intrinsic
def inverse_4(typing, block, steps, target, stride):
    """4 x 4 samples, the block at half its size."""

    def generate(context, builder, signature, arguments):
        block, steps, target, stride = arguments
        lines = _pass_4(builder, _regrouped(builder, _loaded(builder, block, steps)), _FRACTION - _BETWEEN + 1)
        pairs = _across(builder, [_saturated(builder, line, line) for line in lines])
        columns = _pass_4(builder, pairs, _FRACTION + _BETWEEN + 4)
        left, right = (
            builder.add(_saturated(builder, *two), splat(I16, 16, _CENTRE)) for two in (columns[:2], columns[2:])
        )
        samples = _bytes(builder, left, right)
        samples = shuffle(builder, samples, samples, [4 * column + line for line in range(4) for column in range(4)])
        words = builder.bitcast(samples, vector(I32, 4))
        for line in range(4):
            store(
                builder, builder.extract_element(words, I32(line)), builder.add(target, builder.mul(stride, I64(line)))
            )
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def inverse_2(typing, block, steps, target, stride):
    """2 x 2 samples, the block at a quarter of its size: of columns 0, 1, 3, 5 and 7 alone."""
    odd = _fixed(3.624509785), -_fixed(1.272758580), _fixed(0.850430095), -_fixed(0.720959822)

    def generate(context, builder, signature, arguments):
        block, steps, target, stride = arguments
        outer, _, one_seven, five_three = _regrouped(builder, _loaded(builder, block, steps))
        shift = _FRACTION - _BETWEEN + 2
        rounding = splat(I32, 8, 1 << (shift - 1))
        total = builder.shl(_products(builder, outer, 1 << _FRACTION, 0), splat(I32, 8, 2))
        total = builder.add(total, rounding)
        part = builder.add(
            _products(builder, one_seven, odd[0], odd[3]), _products(builder, five_three, odd[2], odd[1])
        )
        upper, lower = (
            builder.ashr(one, splat(I32, 8, shift)) for one in (builder.add(total, part), builder.sub(total, part))
        )
        words = _saturated(builder, upper, lower)
        factors = constant(I16, [0, odd[0], 0, odd[1]] * 2 + [0, odd[2], 0, odd[3]] * 2)
        sums = call(builder, "llvm.x86.avx2.pmadd.wd", _SUMS, words, factors)
        # lanes 0, 1 and 4, 5 are parts of the upper line, 2, 3 and 6, 7 of the lower one
        quarters = [shuffle(builder, sums, sums, [lane, lane, lane + 2, lane + 2]) for lane in (0, 1, 4, 5)]
        part = quarters[0]
        for one in quarters[1:]:
            part = builder.add(part, one)
        part = builder.mul(part, constant(I32, [1, -1, 1, -1]))
        total = builder.shl(shuffle(builder, upper, lower, [0, 0, 8, 8]), splat(I32, 4, _FRACTION + 2))
        shift = _FRACTION + _BETWEEN + 5
        rounding = splat(I32, 4, 1 << (shift - 1))
        samples = builder.ashr(builder.add(builder.add(total, part), rounding), splat(I32, 4, shift))
        samples = builder.add(samples, splat(I32, 4, _CENTRE))
        samples = call(builder, "llvm.smax.v4i32", samples.type, samples, splat(I32, 4, 0))
        samples = call(builder, "llvm.smin.v4i32", samples.type, samples, splat(I32, 4, 255))
        words = builder.bitcast(builder.trunc(samples, vector(I8, 4)), vector(I16, 2))
        store(builder, builder.extract_element(words, I32(0)), target)
        store(builder, builder.extract_element(words, I32(1)), builder.add(target, stride))
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate
