"""The kernels in Triton: `decode_rows` decodes rows of blocks to samples, `make_pixels` converts these to RGB.

Each has a table of int64, described with it.

Needs triton: `pip install 'packer-vision[triton]'`; with TRITON_INTERPRET=1 it runs without a GPU.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError("triton", "triton", "decoding coefficients on a GPU") from error

__all__ = ["BLOCKS", "PIXELS", "decode_rows", "make_pixels"]

BLOCKS = 32  # blocks that a program decodes at a time

_COLUMNS = tl.constexpr(10)
_CHUNK = tl.constexpr(256)
_NO_BLOCK = tl.constexpr(1 << 16)

PIXELS = 1024  # per program

_BOX_COLUMNS = tl.constexpr(18)


# ------------------------------------------------------------------------------
# Inverse DCTs of blocks in Triton, bit-exact to those of libjpeg-turbo for x86.
#
# All numbers are int32; sums and products wrap. Numbers that have 16 bits in libjpeg-turbo are wrapped or saturated to
# 16 bits here as well. A pass takes eight tensors, over blocks and the other axis: in the first pass one for each line,
# in the second one for each column.


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


# ------------------------------------------------------------------------------
# `decode_rows`: samples from rows of blocks.
#
# A program decodes the wanted blocks of one row. It counts the bits of the heads and masks before them to find the
# start of their masks and digits. From there, prefix sums give the position of each digit: over BLOCKS blocks at a
# time, over the tiles of each block, and over the bits of each tile, [BLOCKS, 8, 8] in the order SPARSE.
#
# **No byte outside a row is read**, whatever the data: every load is masked by the end of the row. The host has checked
# the rows against the length of the image (`decoder.vetted_shape`). If the parts of a row do not fit into it, the
# kernel marks the image in `damaged`, and its samples are undefined. The positions of all writes depend on the table
# only.
#
# The table is int64, with a line for each component of each box. Its columns: the offset of the image in the batch; in
# the image, the offset of the index entry of the first wanted row, and of the multipliers; blocks per row; the first
# wanted block, and the one after the last; the offset of the first wanted sample, and the line stride in samples; the
# number of the first program; the number of the image.


@triton.jit
def _bits_set(values):
    """The number of set bits in values of 8 bits."""
    values -= (values >> 1) & 0x55
    values = (values & 0x33) + ((values >> 2) & 0x33)
    return (values + (values >> 4)) & 0x0F


@triton.jit
def _bytes(row, at, end):
    """Bytes of a row, int32; 0 from its end on."""
    return tl.load(row + at, mask=at < end, other=0).to(tl.int32)


@triton.jit
def _words(row, at, end):
    """Unsigned numbers of 16 bits, int32."""
    return _bytes(row, at, end) | (_bytes(row, at + 1, end) << 8)


@triton.jit
def _count_bits(row, at, count, skipped, end):
    """The number of bits set in the `count` bytes from `at`, and in the first `skipped` of these bytes."""
    total = tl.zeros([_CHUNK], tl.int32)
    before = tl.zeros([_CHUNK], tl.int32)
    for start in range(0, count, _CHUNK):
        number = start + tl.arange(0, _CHUNK)
        bits = tl.where(number < count, _bits_set(_bytes(row, at + number, end)), 0)
        total += bits
        before += tl.where(number < skipped, bits, 0)
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit
def _digits(row, heads, masks, digits, number, end):
    """The digits of one kind, int32 [BLOCKS, 8, 8], and the numbers of mask bytes and of digits that were used.

    heads: int32 [BLOCKS], 0 for unwanted blocks. masks: offset of the masks of the first block. digits: offset of the
    digits of the row. number: of the first digit of the first block.
    """
    tile = tl.arange(0, 8)[None, :]
    bit = tl.arange(0, 8)[None, None, :]
    sizes = _bits_set(heads)
    at = (masks + tl.cumsum(sizes, 0) - sizes)[:, None] + _bits_set(heads[:, None] & ((1 << tile) - 1))
    is_stored = ((heads[:, None] >> tile) & 1) != 0
    tiles = tl.where(is_stored, _bytes(row, at, end), 0)
    counts = _bits_set(tiles)
    of_block = tl.sum(counts, 1)
    first = (number + tl.cumsum(of_block, 0) - of_block)[:, None] + tl.cumsum(counts, 1) - counts
    tiles = tiles[:, :, None]
    numbers = first[:, :, None] + _bits_set(tiles & ((1 << bit) - 1))
    pairs = _bytes(row, digits + (numbers >> 1), end)
    values = ((pairs >> (4 * (numbers & 1))) & 15 ^ 8) - 8
    values = tl.where(((tiles >> bit) & 1) != 0, values, 0)
    return values, tl.sum(sizes, 0), tl.sum(of_block, 0)


@triton.jit
def _top_block(row, at, end):
    """The block of a top digit; after the last one, a number larger than that of any block."""
    return tl.where(at < end, _words(row, at, end), _NO_BLOCK)


@triton.jit
def _store_samples(samples, values, blocks, valid, stride, SIZE: tl.constexpr):
    """Store the samples of the valid blocks.

    values: int32 [BLOCKS, SIZE, SIZE]. samples: the place of the first sample of block 0.
    """
    lines = tl.arange(0, SIZE)[None, :, None]
    columns = tl.arange(0, SIZE)[None, None, :]
    at = (blocks * SIZE)[:, None, None] + lines * stride + columns
    tl.store(samples + at, values.to(tl.uint8), mask=valid[:, None, None])


@triton.jit
def decode_rows(data, table, programs, samples, damaged, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Decode the wanted blocks of rows to SIZE x SIZE samples each; SIZE is 8, 4, 2 or 1.

    data: uint8, the images of a batch, each at a multiple of 4 bytes. programs: int64, for each program its line of the
    table. samples: uint8, the output. damaged: int32 [images], set to 1 for images with inconsistent bytes.
    """
    entry = table + tl.load(programs + tl.program_id(0)) * _COLUMNS
    image = data + tl.load(entry)
    number = tl.program_id(0) - tl.load(entry + 8)
    index = (image + tl.load(entry + 1) + 4 * number).to(tl.pointer_type(tl.uint32))
    begin = tl.load(index).to(tl.int64)
    end = (tl.load(index + 1).to(tl.int64) - begin).to(tl.int32)
    row = image + begin
    steps = (image + tl.load(entry + 2)).to(tl.pointer_type(tl.int16))
    width = tl.load(entry + 3).to(tl.int32)
    first, last = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    stride = tl.load(entry + 7)
    samples += tl.load(entry + 6) + number * SIZE * stride - first * SIZE
    damaged += tl.load(entry + 9)

    if SIZE == 1:
        tl.store(damaged, 1, mask=4 * width > end)
        step = tl.load(steps).to(tl.int32)
        for start in range(first, last, BLOCKS):
            blocks = start + tl.arange(0, BLOCKS)
            values = (wrapped(_words(row, 2 * blocks, end)) * step + 4) >> 3
            values = ((values + 512) & 1023) - 512  # libjpeg's range limit table is periodic
            values = tl.minimum(tl.maximum(values + 128, 0), 255)
            _store_samples(samples, values[:, None, None], blocks, blocks < last, stride, 1)
    else:
        low_heads, high_heads, low_masks = 2 * width, 3 * width, 4 * width
        low_bytes, low_skipped = _count_bits(row, low_heads, width, first, end)
        high_bytes, high_skipped = _count_bits(row, high_heads, width, first, end)
        high_masks = low_masks + low_bytes
        low_digits = high_masks + high_bytes
        low_count, low_number = _count_bits(row, low_masks, low_bytes, low_skipped, end)
        high_count, high_number = _count_bits(row, high_masks, high_bytes, high_skipped, end)
        high_digits = low_digits + ((low_count + 1) >> 1)
        top = high_digits + ((high_count + 1) >> 1)
        tl.store(damaged, 1, mask=(top > end) | (((end - top) & 3) != 0))
        low_masks += low_skipped
        high_masks += high_skipped
        tile, bit = tl.arange(0, 8)[:, None], tl.arange(0, 8)[None, :]
        place = 8 * tile + bit
        # The index in WORKING is made of the pair of lines, the column, and the line in the pair.
        working = 32 * (bit & 1) + 16 * ((tile >> 1) & 1) + 8 * (tile & 1) + 2 * (bit >> 1) + (tile >> 2)
        multipliers = tl.load(steps + working).to(tl.int32)
        block = _top_block(row, top, end)
        for start in range(first, last, BLOCKS):
            blocks = start + tl.arange(0, BLOCKS)
            valid = blocks < last
            heads = tl.where(valid, _bytes(row, low_heads + blocks, end), 0)
            values, masks, digits = _digits(row, heads, low_masks, low_digits, low_number, end)
            low_masks += masks
            low_number += digits
            dc = wrapped(_words(row, 2 * blocks, end))
            values = tl.where((place == 0)[None, :, :], dc[:, None, None], values)
            heads = tl.where(valid, _bytes(row, high_heads + blocks, end), 0)
            upper, masks, digits = _digits(row, heads, high_masks, high_digits, high_number, end)
            high_masks += masks
            high_number += digits
            values += upper << 4
            while block < start + BLOCKS:
                matches = (place == (_bytes(row, top + 2, end) & 63))[None, :, :] & (blocks == block)[:, None, None]
                digit = (_bytes(row, top + 3, end) ^ 128) - 128
                values += tl.where(matches, digit << 8, 0)
                top += 4
                block = _top_block(row, top, end)
            made = inverse(wrapped(values * multipliers[None, :, :]), BLOCKS, SIZE)
            _store_samples(samples, made, blocks, valid, stride, SIZE)


# ------------------------------------------------------------------------------
# `make_pixels`: converts samples to RGB, with chroma interpolated as by the "fancy" upsampling of libjpeg.
#
# A program makes PIXELS consecutive pixels of one box. Sources: jdsample.c (a triangle filter with alternating
# rounding) and jdcolor.c.
#
# The table is int64, with a line for each box. Its columns: top and left, height and width of the box; the offsets at
# which sample (0, 0) of luma, blue and red would be; line strides of luma and of chroma in samples; number of
# components; 1 if chroma is subsampled across, and down; 1 if chroma is interpolated across, and down; columns and
# lines of chroma; the offset of the pixels; the number of the first program.


@triton.jit
def _of_lines(plane, near, far, blends, pixel, count):
    """Samples of the near line or, with blends, 3 * near + far, for the pixels below `count`."""
    near_value = tl.load(plane + near, mask=pixel < count, other=128).to(tl.int32)
    far_value = tl.load(plane + far, mask=pixel < count * blends, other=0).to(tl.int32)
    return near_value + blends * (2 * near_value + far_value)


@triton.jit
def _chroma(plane, near, far, column, other, widens, blends, rounding, pixel, count):
    """Interpolated chroma, centred on 0. near, far: offsets of the lines. column, other: the near and far column."""
    near_value = _of_lines(plane, near + column, far + column, blends, pixel, count)
    far_value = _of_lines(plane, near + other, far + other, blends, pixel, count * widens)
    total = near_value + widens * (2 * near_value + far_value)
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
    entry = table + tl.load(programs + tl.program_id(0)) * _BOX_COLUMNS
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
