"""A Triton kernel that converts samples to RGB, with chroma interpolated as by the "fancy" upsampling of libjpeg.

A program makes PIXELS consecutive pixels of one box. Sources: jdsample.c (a triangle filter with alternating rounding)
and jdcolor.c; `kernels.colours` is the same for CPUs.

The table is int64, with a line for each box. Its columns: top and left, height and width of the box; the offsets at
which sample (0, 0) of luma, blue and red would be; line strides of luma and of chroma in samples; number of components;
1 if chroma is subsampled across, and down; 1 if chroma is interpolated across, and down; columns and lines of chroma;
the offset of the pixels; the number of the first program.

Needs triton: `pip install 'packer-vision[triton]'`; with TRITON_INTERPRET=1 it runs without a GPU.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError("triton", "triton", "decoding coefficients on a GPU") from error

__all__ = ["PIXELS", "make_pixels"]

PIXELS = 1024  # per program

_COLUMNS = tl.constexpr(18)


@triton.jit
def _of_lines(plane, near, far, blends, pixel, count):
    """Samples of the near line or, with blends, 3 * near + far, for the pixels below `count`."""
    here = tl.load(plane + near, mask=pixel < count, other=128).to(tl.int32)
    there = tl.load(plane + far, mask=pixel < count * blends, other=0).to(tl.int32)
    return here + blends * (2 * here + there)


@triton.jit
def _chroma(plane, near, far, column, other, widens, blends, rounding, pixel, count):
    """Interpolated chroma, centred on 0. near, far: offsets of the lines. column, other: the near and far column."""
    here = _of_lines(plane, near + column, far + column, blends, pixel, count)
    there = _of_lines(plane, near + other, far + other, blends, pixel, count * widens)
    total = here + widens * (2 * here + there)
    return ((total + rounding) >> (2 * (widens + blends))) - 128


@triton.jit
def _neighbour(at, odd, count):
    """The position before `at`, or after it where `odd`, clamped to 0..count - 1."""
    return tl.minimum(tl.maximum(at + 2 * odd - 1, 0), count - 1)


@triton.jit
def _store(out, values, inside):
    tl.store(out, tl.minimum(tl.maximum(values, 0), 255).to(tl.uint8), mask=inside)


@triton.jit
def make_pixels(table, programs, samples, out, PIXELS: tl.constexpr):
    """Make the RGB pixels of boxes.

    programs: int64, for each program its line of the table. samples: uint8, the output of `decode_rows`. out: uint8,
    the boxes one after another, [3, height, width] each.
    """
    entry = table + tl.load(programs + tl.program_id(0)) * _COLUMNS
    top, left = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    height, width = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    stride, chroma_stride = tl.load(entry + 7), tl.load(entry + 8)
    across, down = tl.load(entry + 10).to(tl.int32), tl.load(entry + 11).to(tl.int32)
    widens, blends = tl.load(entry + 12).to(tl.int32), tl.load(entry + 13).to(tl.int32)
    number = tl.program_id(0) - tl.load(entry + 17).to(tl.int32)
    pixel = number * PIXELS + tl.arange(0, PIXELS)
    plane = height * width
    inside = pixel < plane
    y, x = pixel // width + top, pixel % width + left

    line, column = y >> down, x >> across
    odd_y, odd_x = y & 1, x & 1
    other_line = _neighbour(line, odd_y, tl.load(entry + 15).to(tl.int32))
    other = _neighbour(column, odd_x, tl.load(entry + 14).to(tl.int32))
    one_way = widens * (1 + odd_x) + blends * (1 + odd_y)
    rounding = tl.where(widens * blends != 0, 8 - odd_x, one_way)
    coloured = tl.where(tl.load(entry + 9) == 3, plane, 0)
    near, far = line * chroma_stride, other_line * chroma_stride
    luma = tl.load(samples + tl.load(entry + 4) + y * stride + x, mask=inside, other=0).to(tl.int32)
    blue = _chroma(samples + tl.load(entry + 5), near, far, column, other, widens, blends, rounding, pixel, coloured)
    red = _chroma(samples + tl.load(entry + 6), near, far, column, other, widens, blends, rounding, pixel, coloured)

    out += tl.load(entry + 16)
    _store(out + pixel, luma + ((91881 * red + 32768) >> 16), inside)
    _store(out + plane + pixel, luma + ((-22554 * blue - 46802 * red + 32768) >> 16), inside)
    _store(out + 2 * plane + pixel, luma + ((116130 * blue + 32768) >> 16), inside)
