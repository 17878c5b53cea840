"""Inverse DCTs of blocks in Triton, bit-exact to those of libjpeg-turbo for x86; see also `kernels.transforms`.

All numbers are int32; sums and products wrap. Numbers that have 16 bits in libjpeg-turbo are wrapped or saturated to
16 bits here as well. A pass takes eight tensors, over blocks and the other axis: in the first pass one for each line,
in the second one for each column.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError("triton", "triton", "decoding coefficients on a GPU") from error

__all__ = ["inverse", "wrapped"]


@triton.jit
def wrapped(values):
    """The lower 16 bits of int32 values, with sign."""
    return (values << 16) >> 16


@triton.jit
def _saturated(values):
    """Values clamped to the range of int16."""
    return tl.minimum(tl.maximum(values, -32768), 32767)


@triton.jit
def _descaled(values, SHIFT: tl.constexpr, CENTRE: tl.constexpr):
    """Values divided by 2^SHIFT and rounded, plus CENTRE."""
    return (values + ((1 << (SHIFT - 1)) + (CENTRE << SHIFT))) >> SHIFT


@triton.jit
def _pass_8(i0, i1, i2, i3, i4, i5, i6, i7):
    """A pass of jidctint.c. Constants have 13 fractional bits; four of the sums have 16 bits, as in libjpeg-turbo."""
    middle = (i2 + i6) * 4433
    even_2 = middle - i6 * 15137
    even_3 = middle + i2 * 6270
    even_0 = wrapped(i0 + i4) << 13
    even_1 = wrapped(i0 - i4) << 13
    z3 = wrapped(i7 + i3)
    z4 = wrapped(i5 + i1)
    z5 = (z3 + z4) * 9633
    z1 = (i7 + i1) * -7373
    z2 = (i5 + i3) * -20995
    z3 = z3 * -16069 + z5
    z4 = z4 * -3196 + z5
    odd_0 = i1 * 12299 + z1 + z4
    odd_1 = i3 * 25172 + z2 + z3
    odd_2 = i5 * 16819 + z2 + z4
    odd_3 = i7 * 2446 + z1 + z3
    first, second = even_0 + even_3, even_1 + even_2
    third, fourth = even_1 - even_2, even_0 - even_3
    even = tl.join(tl.join(first + odd_0, fourth - odd_3), tl.join(third + odd_2, second - odd_1))
    odd = tl.join(tl.join(second + odd_1, third - odd_2), tl.join(fourth + odd_3, first - odd_0))
    return tl.join(even, odd)


@triton.jit
def _pass_4(i0, i1, i2, i3, i5, i6, i7):
    """A pass of jidctred.c: 4 samples from 8 coefficients without coefficient 4."""
    total = i0 << 14
    middle = i2 * 15137 - i6 * 6270
    plus, minus = total + middle, total - middle
    odd_0 = i1 * 8697 - i7 * 1730 + i5 * 11893 - i3 * 17799
    odd_2 = i1 * 20995 - i7 * 4176 - i5 * 4926 + i3 * 7373
    return tl.join(tl.join(plus + odd_2, minus - odd_0), tl.join(minus + odd_0, plus - odd_2))


@triton.jit
def _pass_2(i0, i1, i3, i5, i7):
    """A pass of jidctred.c: 2 samples from the first and the odd coefficients of 8."""
    total = i0 << 15
    part = i1 * 29692 - i3 * 10426 + i5 * 6967 - i7 * 5906
    return tl.join(total + part, total - part)


@triton.jit
def _eight(values, BLOCKS: tl.constexpr, LINES: tl.constexpr):
    """A tensor [BLOCKS, LINES, 8] as eight tensors [BLOCKS, LINES]."""
    even, odd = tl.split(tl.reshape(values, [BLOCKS, LINES, 2, 2, 2]))
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    v0, v4 = tl.split(even_0)
    v2, v6 = tl.split(even_1)
    v1, v5 = tl.split(odd_0)
    v3, v7 = tl.split(odd_1)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def inverse(values, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """The samples of blocks, 0 to 255, int32 [BLOCKS, SIZE, SIZE] by line and column. SIZE: 8, 4 or 2.

    values: coefficients times multipliers in the range of int16, int32 [BLOCKS, 8, 8], in the order SPARSE.
    """
    # The bits of a place in SPARSE are the upper two of its line, the three of its column, and the lowest of its line.
    parts = tl.permute(tl.reshape(values, [BLOCKS, 2, 2, 2, 4, 2]), (0, 3, 4, 1, 2, 5))
    i0, i1, i2, i3, i4, i5, i6, i7 = _eight(parts, BLOCKS, 8)
    if SIZE == 8:
        lines = _saturated(_descaled(_pass_8(i0, i1, i2, i3, i4, i5, i6, i7), 11, 0))
    elif SIZE == 4:
        lines = _saturated(_descaled(_pass_4(i0, i1, i2, i3, i5, i6, i7), 12, 0))
    else:
        lines = _descaled(_pass_2(i0, i1, i3, i5, i7), 13, 0)
    lines = tl.permute(tl.reshape(lines, [BLOCKS, 8, SIZE]), (0, 2, 1))
    i0, i1, i2, i3, i4, i5, i6, i7 = _eight(lines, BLOCKS, SIZE)
    if SIZE == 8:
        made = _descaled(_pass_8(i0, i1, i2, i3, i4, i5, i6, i7), 18, 128)
    elif SIZE == 4:
        made = _descaled(_pass_4(i0, i1, i2, i3, i5, i6, i7), 19, 0) + 128
    else:
        i1, i3, i5, i7 = _saturated(i1), _saturated(i3), _saturated(i5), _saturated(i7)  # i0 stays as it is
        made = _descaled(_pass_2(i0, i1, i3, i5, i7), 20, 0) + 128
    return tl.minimum(tl.maximum(tl.reshape(made, [BLOCKS, SIZE, SIZE]), 0), 255)
