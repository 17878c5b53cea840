"""A line of pixels as float32: each byte times a factor, plus a summand, in the order that a batch has them.

torch's addcmul rounds once where its build has fused multiplications, else twice; its mul and add round twice.
"""

from __future__ import annotations

from llvmlite.ir import FloatType
from numba import njit, types
from numba.extending import intrinsic

from readers.coefficients.kernels.packing import copy_bytes
from readers.coefficients.kernels.vectors import I8, I32, call, load, nothing, shuffle, store, vector

__all__ = ["BYTES", "FLOATS", "FUSED", "PLANES", "write_floats"]

# What a line is written as: bytes; floats, rounded twice or once; floats of each colour apart, rounded twice
BYTES, FLOATS, FUSED, PLANES = range(4)

_VALUES = vector(FloatType(), 8)


def _scaled(builder, samples, factors, offset, is_fused):
    """Eight bytes as floats; the summands are 96 bytes behind the factors."""
    values = builder.uitofp(builder.zext(samples, vector(I32, 8)), _VALUES)
    scale, shift = load(builder, _VALUES, factors, offset), load(builder, _VALUES, factors, offset + 96)
    if is_fused:
        return call(builder, "llvm.fma.v8f32", _VALUES, values, scale, shift)
    return builder.fadd(builder.fmul(values, scale), shift)


def _pixels(is_fused):
    def generate(context, builder, signature, arguments):
        source, factors, target = arguments
        for offset in (0, 8, 16):
            samples = load(builder, vector(I8, 8), source, offset)
            store(builder, _scaled(builder, samples, factors, 4 * offset, is_fused), target, 4 * offset)
        return nothing(context)

    return generate


@intrinsic
def _floats_24(typing, source, factors, target):
    """24 bytes; the address of 24 factors and 24 summands."""
    return types.void(types.int64, types.int64, types.int64), _pixels(False)


@intrinsic
def _fused_24(typing, source, factors, target):
    """The same, rounded once."""
    return types.void(types.int64, types.int64, types.int64), _pixels(True)


@intrinsic
def _planes_8(typing, source, factors, target, stride):
    """Eight pixels as eight floats of each colour, `stride` bytes apart. factors: see above, by colour."""

    def generate(context, builder, signature, arguments):
        source, factors, target, stride = arguments
        pixels = load(builder, vector(I8, 24), source)
        for colour in range(3):
            samples = shuffle(builder, pixels, pixels, range(colour, 24, 3))
            store(builder, _scaled(builder, samples, factors, 32 * colour, False), target)
            target = builder.add(target, stride)
        return nothing(context)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@njit(error_model="numpy")
def write_floats(line, columns, factors, target, plane_stride, kind, spare):
    """A line of RGB, of which 24 bytes can be read at least; nothing is written behind it.

    factors: the address of 24 factors and 24 summands, float32: of as many values in a row, or of eight pixels colour
    by colour. spare: the address of 96 bytes.
    """
    step = 8
    for x in range(0, columns, step):
        if x + step > columns and columns >= step:
            x = columns - step
        place, stride = (target + (4 if kind == PLANES else 12) * x, plane_stride) if columns >= step else (spare, 32)
        if kind == PLANES:
            _planes_8(line + 3 * x, factors, place, stride)
        elif kind == FUSED:
            _fused_24(line + 3 * x, factors, place)
        else:
            _floats_24(line + 3 * x, factors, place)
    if columns < step:
        if kind == PLANES:
            for colour in range(3):
                copy_bytes(spare + 32 * colour, target + colour * plane_stride, 4 * columns)
        else:
            copy_bytes(spare, target, 12 * columns)
