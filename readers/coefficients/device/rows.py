"""A Triton kernel that decodes rows of blocks to samples.

A program decodes the wanted blocks of one row. It counts the bits of the heads and masks before them to find the start
of their masks and digits. From there, prefix sums give the position of each digit: over BLOCKS blocks at a time, over
the tiles of each block, and over the bits of each tile, [BLOCKS, 8, 8] in the order SPARSE.

**No byte outside a row is read**, whatever the data: every load is masked by the end of the row. The host has checked
the rows against the length of the image (`decoder.vetted_shape`). If the parts of a row do not fit into it, the kernel
marks the image in `damaged`, and its samples are undefined. The positions of all writes depend on the table only.

The table is int64, with a line for each component of each box. Its columns: the offset of the image in the batch; in
the image, the offset of the index entry of the first wanted row, and of the multipliers; blocks per row; the first
wanted block, and the one after the last; the offset of the first wanted sample, and the line stride in samples; the
number of the first program; the number of the image.

Needs triton: `pip install 'packer-vision[triton]'`; with TRITON_INTERPRET=1 it runs without a GPU.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError("triton", "triton", "decoding coefficients on a GPU") from error

from readers.coefficients.device.transforms import inverse, wrapped

__all__ = ["BLOCKS", "decode_rows"]

BLOCKS = 32  # blocks that a program decodes at a time

_COLUMNS = tl.constexpr(10)
_CHUNK = tl.constexpr(256)
_NO_BLOCK = tl.constexpr(1 << 16)


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
def _store_samples(samples, values, blocks, wanted, stride, SIZE: tl.constexpr):
    """Store the samples of the wanted blocks.

    values: int32 [BLOCKS, SIZE, SIZE]. samples: the place of the first sample of block 0.
    """
    lines = tl.arange(0, SIZE)[None, :, None]
    columns = tl.arange(0, SIZE)[None, None, :]
    at = (blocks * SIZE)[:, None, None] + lines * stride + columns
    tl.store(samples + at, values.to(tl.uint8), mask=wanted[:, None, None])


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
            wanted = blocks < last
            heads = tl.where(wanted, _bytes(row, low_heads + blocks, end), 0)
            values, masks, digits = _digits(row, heads, low_masks, low_digits, low_number, end)
            low_masks += masks
            low_number += digits
            dc = wrapped(_words(row, 2 * blocks, end))
            values = tl.where((place == 0)[None, :, :], dc[:, None, None], values)
            heads = tl.where(wanted, _bytes(row, high_heads + blocks, end), 0)
            upper, masks, digits = _digits(row, heads, high_masks, high_digits, high_number, end)
            high_masks += masks
            high_number += digits
            values += upper << 4
            while block < start + BLOCKS:
                here = (place == (_bytes(row, top + 2, end) & 63))[None, :, :] & (blocks == block)[:, None, None]
                digit = (_bytes(row, top + 3, end) ^ 128) - 128
                values += tl.where(here, digit << 8, 0)
                top += 4
                block = _top_block(row, top, end)
            made = inverse(wrapped(values * multipliers[None, :, :]), BLOCKS, SIZE)
            _store_samples(samples, made, blocks, wanted, stride, SIZE)
