"""A row of samples to a row of pixels: interpolation of chroma as by libjpeg's "fancy" upsampling, and YCbCr to RGB.

Everything works on whole vectors, so it reads and writes up to 32 samples beyond what is asked for; the memory for rows
has room for that. Sources: jdsample.c (the triangle filter, whose roundings alternate) and jdcolor.c.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from readers.coefficients.kernels.vectors import (
    I8,
    I16,
    I32,
    call,
    constant,
    load,
    nothing,
    shuffle,
    splat,
    store,
    vector,
)

__all__ = [
    "blend_16",
    "grey_16",
    "interleave",
    "planes_32",
    "repeat_16",
    "rgb_32",
    "widen_16_even",
    "widen_16_odd",
    "widen_rows_even",
    "widen_rows_odd",
]

_SAMPLES = vector(I8, 16)
_WORDS = vector(I16, 16)


def _words(builder, address, offset=0):
    return builder.zext(load(builder, _SAMPLES, address, offset), _WORDS)


def _three(builder, words):
    return builder.mul(words, splat(I16, 16, 3))


def _weighted(builder, near, far, rounding, shift):
    total = builder.add(builder.add(_three(builder, near), far), splat(I16, 16, rounding))
    return builder.lshr(total, splat(I16, 16, shift))


def _alternate(builder, first, second, target):
    """32 bytes: those of the two vectors in turn."""
    store(builder, builder.or_(first, builder.shl(second, splat(I16, 16, 8))), target)


def _widen(odd, rows):
    """The filter from 16 samples to 32 bytes. odd: from the right half of a sample on; rows: 2 for between two rows."""
    left_rounding, right_rounding, shift = (8, 7, 4) if rows == 2 else (1, 2, 2)

    def generate(context, builder, signature, arguments):
        *sources, target = arguments

        def column(offset):
            if rows == 1:
                return _words(builder, sources[0], offset)
            near, far = (_words(builder, one, offset) for one in sources)
            return builder.add(_three(builder, near), far)

        here = column(0)
        if odd:
            after = column(1)
            first = _weighted(builder, here, after, right_rounding, shift)
            second = _weighted(builder, after, here, left_rounding, shift)
        else:
            first = _weighted(builder, here, column(-1), left_rounding, shift)
            second = _weighted(builder, here, column(1), right_rounding, shift)
        _alternate(builder, first, second, target)
        return nothing(context)

    return generate


@intrinsic
def widen_16_even(typing, source, target):
    """16 samples to 32, along a row; reads the samples on both sides."""
    return types.void(types.int64, types.int64), _widen(False, 1)


@intrinsic
def widen_16_odd(typing, source, target):
    """The same from the right half of the first sample on."""
    return types.void(types.int64, types.int64), _widen(True, 1)


@intrinsic
def widen_rows_even(typing, near, far, target):
    """16 samples to 32, between two rows."""
    return types.void(types.int64, types.int64, types.int64), _widen(False, 2)


@intrinsic
def widen_rows_odd(typing, near, far, target):
    """The same from the right half of the first sample on."""
    return types.void(types.int64, types.int64, types.int64), _widen(True, 2)


@intrinsic
def blend_16(typing, near, far, rounding, target):
    """16 samples between two rows: (3 near + far + rounding) / 4."""

    def generate(context, builder, signature, arguments):
        near, far, rounding, target = arguments
        total = builder.add(_three(builder, _words(builder, near)), _words(builder, far))
        both = builder.insert_element(splat(I16, 16, 0), builder.trunc(rounding, I16), I32(0))
        total = builder.add(total, shuffle(builder, both, both, [0] * 16))
        store(builder, builder.trunc(builder.lshr(total, splat(I16, 16, 2)), _SAMPLES), target)
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def repeat_16(typing, source, target):
    """16 samples to 32, each twice."""

    def generate(context, builder, signature, arguments):
        words = _words(builder, arguments[0])
        _alternate(builder, words, words, arguments[1])
        return nothing(context)

    return types.void(types.int64, types.int64), generate


@intrinsic
def grey_16(typing, source, target):
    """16 samples to 48 bytes, each three times."""

    def generate(context, builder, signature, arguments):
        samples = load(builder, _SAMPLES, arguments[0])
        store(builder, shuffle(builder, samples, samples, [k // 3 for k in range(48)]), arguments[1])
        return nothing(context)

    return types.void(types.int64, types.int64), generate


def _upper_half(builder, words, factor):
    """words * factor / 2 ** 16, rounded down, of int16."""
    wide = vector(I32, 32)
    product = builder.mul(builder.sext(words, wide), splat(I32, 32, factor))
    return builder.trunc(builder.ashr(product, splat(I32, 32, 16)), words.type)


def _nearest(builder, words, factor):
    """words * factor / 2 ** 16, rounded to the nearest."""
    twice = _upper_half(builder, builder.shl(words, splat(I16, 32, 1)), factor)
    return builder.ashr(builder.add(twice, splat(I16, 32, 1)), splat(I16, 32, 1))


def _green(builder, blue, red):
    """(-0.34414 blue + 0.28586 red), rounded to the nearest; red is left out of it once."""
    parts = []
    for base in (0, 16):
        pairs = [one for lane in range(base, base + 16) for one in (lane, 32 + lane)]
        both = shuffle(builder, blue, red, pairs)
        sums = []
        for half in (0, 16):
            factors = constant(I16, [-22_554, 65_536 - 46_802] * 8)
            words = shuffle(builder, both, both, range(half, half + 16))
            products = call(builder, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), words, factors)
            products = builder.add(products, splat(I32, 8, 1 << 15))
            sums.append(builder.ashr(products, splat(I32, 8, 16)))
        parts.append(builder.trunc(shuffle(builder, *sums, range(16)), _WORDS))
    return shuffle(builder, *parts, range(32))


def _red_green_blue(builder, samples):
    """32 pixels from the addresses of three rows of samples, as three vectors of bytes: libjpeg's tables in 16 bits.

    Their factors 1.402, 1.772 and 0.71414 are taken apart into whole numbers and a rest that fits.
    """
    words = vector(I16, 32)
    y, cb, cr = (builder.zext(load(builder, vector(I8, 32), one), words) for one in samples)
    cb, cr = (builder.sub(one, splat(I16, 32, 128)) for one in (cb, cr))
    red = builder.add(builder.add(y, cr), _nearest(builder, cr, 91_881 - 65_536))
    green = builder.add(builder.sub(y, cr), _green(builder, cb, cr))
    blue = builder.add(builder.add(y, builder.shl(cb, splat(I16, 32, 1))), _nearest(builder, cb, 116_130 - 131_072))
    colours = []
    for one in (red, green, blue):
        one = call(builder, "llvm.smax.v32i16", words, one, splat(I16, 32, 0))
        one = call(builder, "llvm.smin.v32i16", words, one, splat(I16, 32, 255))
        colours.append(builder.trunc(one, vector(I8, 32)))
    return colours


def interleave(builder, colours, target):
    """Three vectors of 32 bytes as 32 pixels, 96 bytes at `target`."""
    for base in (0, 16):
        r, g, b = (shuffle(builder, one, one, range(base, base + 16)) for one in colours)
        pairs, single = shuffle(builder, r, g, range(32)), shuffle(builder, b, b, range(32))
        pixels = shuffle(builder, pairs, single, [one for k in range(16) for one in (k, 16 + k, 32 + k)])
        store(builder, pixels, target, 3 * base)


@intrinsic
def rgb_32(typing, luma, blue, red, target):
    """32 pixels from three rows of samples to 96 bytes."""

    def generate(context, builder, signature, arguments):
        interleave(builder, _red_green_blue(builder, arguments[:3]), arguments[3])
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def planes_32(typing, luma, blue, red, target, stride):
    """The same with the colours apart: 32 bytes of red, and so many bytes behind them green, then blue."""

    def generate(context, builder, signature, arguments):
        *samples, target, stride = arguments
        for colour in _red_green_blue(builder, samples):
            store(builder, colour, target)
            target = builder.add(target, stride)
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate
