"""The storage format of images as quantised DCT coefficients, and the checks before they are decoded.

All numbers are little-endian. A block is 8 x 8 coefficients of one component; a row is a row of blocks. Blocks that
only pad an MCU are not stored.

    0    89 "DCT" 0D 0A 1A 0A
    8    uint32   CRC32C of all bytes from 12 on
    12   uint16   height, uint16 width: of the image as stored, in pixels, 1 to 65535
    16   uint8    version, 1
    17   uint8    components: 1 (grey) or 3 (Y, Cb, Cr)
    18   uint8    subsampling of chroma: 16 * horizontal + vertical factor, each 1 or 2; 17 for grey
    19   uint8    orientation, 1 to 8 (EXIF)
    20   uint32   total number of bytes
    24   int16[64] for each component: the multipliers of its coefficients, in the order WORKING
    ..   uint32   for each row of each component: the byte at which it begins; then the byte at which the last one ends
    ..   the rows, one after another, component by component
    ..   32 zero bytes, so that loads of whole words stay within the image

A coefficient is low + 16 * high + 256 * top, with low and high in -8..7. Each block has two masks of 64 bits, in the
order SPARSE, which mark its nonzero low digits and its nonzero high digits. A byte of a mask covers a tile of two lines
and four columns. Only nonzero bytes of a mask are stored; the bits of its head mark them. The DC is stored separately
and is in no mask. A row of n blocks is

    int16[n]      DC, not as a difference
    uint8[n]      heads of the low digits, uint8[n] heads of the high digits: bit i stands for byte i of the mask
    uint8[]       the bytes of all masks of low digits, block by block; then those of high digits
    uint8[]       low digits, two per byte, the lower half first, block by block; then high digits, which begin at a
                  whole byte
    4 bytes       for each coefficient with a top digit: uint16 block in the row, uint8 place in SPARSE, int8 top;
                  sorted by block. The list ends at the end of the row

The position of each part of a row follows from the bit counts of the parts before it. So the only stored positions are
those of the rows; every use checks them against the length of the data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.errors import BadSampleError
from readers.headers import ImageHeader
from readers.headers.base import (
    HEADER,
    MAGIC,
    MEDIUM,
    VERSION,
    Buffer,
    bad,
    parse_coefficients_header,
    truncated,
    upright_size,
)

__all__ = [
    "INDEX_BYTES",
    "MAGIC",
    "MEDIUM",
    "SPARSE_ZIGZAG",
    "SUBSAMPLINGS",
    "TABLES_AT",
    "TABLE_BYTES",
    "TAIL_BYTES",
    "WORKING_ZIGZAG",
    "Shape",
    "blocks_of",
    "check_sum",
    "is_coefficients",
    "pack_header",
    "parse_coefficients",
]

TABLES_AT, TABLE_BYTES, INDEX_BYTES, TAIL_BYTES = 24, 128, 4, 32
SUBSAMPLINGS = ((1, 1), (2, 1), (1, 2), (2, 2))
_SUMMED_FROM = 12

# The place of coefficient k of a JPEG in a block, 8 * line + column: the zigzag of T.81, figure A.6.
_DIAGONALS = [(i, s - i) if s % 2 == 0 else (s - i, i) for s in range(15) for i in range(s, -1, -1)]
_ZIGZAG = np.array([8 * line + column for line, column in _DIAGONALS if line < 8 and column < 8])
# Bit b of a mask stands for the place SPARSE[b] of a block: tiles of 2 lines x 4 columns, each column by column.
SPARSE = np.array(
    [
        8 * (2 * lines + line) + 4 * half + c
        for lines in range(4)
        for half in (0, 1)
        for c in range(4)
        for line in (0, 1)
    ]
)
# Lines that an inverse DCT processes in pairs; the order WORKING interleaves the two lines of a pair, column by column.
PAIRS = ((0, 4), (2, 6), (1, 5), (3, 7))
WORKING = np.array([8 * line + column for pair in PAIRS for column in range(8) for line in pair])


def _between(target: npt.NDArray[np.int64], source: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices that turn a block in the order `source` into the order `target`."""
    return np.argsort(source)[target].astype(np.int64)


SPARSE_ZIGZAG = _between(SPARSE, _ZIGZAG)  # for each bit of a mask, the number of its coefficient in a JPEG
WORKING_ZIGZAG = _between(WORKING, _ZIGZAG)


class Shape(NamedTuple):
    """The content of the header: the size in pixels as stored, and the number and layout of the parts after it."""

    height: int
    width: int
    components: int
    across: int  # subsampling factors of chroma
    down: int
    orientation: int
    total_bytes: int

    @property
    def header(self) -> ImageHeader:
        return ImageHeader(MEDIUM, self.height, self.width, self.components, 0, self.orientation)

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""
        return upright_size(self.height, self.width, self.orientation)

    @property
    def index_at(self) -> int:
        return TABLES_AT + TABLE_BYTES * self.components

    @property
    def rows_at(self) -> int:
        rows = blocks_of(self, 0)[0] + (self.components - 1) * blocks_of(self, 1)[0]
        return self.index_at + INDEX_BYTES * (rows + 1)


def blocks_of(shape: Shape, component: int) -> tuple[int, int]:
    """(rows, blocks per row) of a component."""
    across, down = (shape.across, shape.down) if component else (1, 1)
    return -(-shape.height // (8 * down)), -(-shape.width // (8 * across))


def is_coefficients(data: Buffer) -> bool:
    """Whether bytes from a cache are an image in this format; only the magic is checked."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def pack_header(shape: Shape, summed: Buffer) -> bytes:
    """The first 24 bytes of an image. summed: all bytes after them, for the checksum."""
    sampling = 16 * shape.across + shape.down
    fields = (shape.height, shape.width, VERSION, shape.components, sampling, shape.orientation, shape.total_bytes)
    head = HEADER.pack(MAGIC, 0, *fields)
    return HEADER.pack(MAGIC, crc32c(summed, crc32c(head[_SUMMED_FROM:])), *fields)


def parse_coefficients(data: Buffer) -> Shape:
    """Parse the header, with every field checked, also against the length of `data`. Raises BadSampleError."""
    header = parse_coefficients_header(data)
    *_, sampling, _, total = HEADER.unpack_from(data)
    if divmod(sampling, 16) not in (SUBSAMPLINGS if header.components == 3 else ((1, 1),)):
        raise bad(MEDIUM, 18, f"a subsampling of {header.components} components", sampling)
    shape = Shape(
        header.height, header.width, header.components, sampling >> 4, sampling & 15, header.orientation, total
    )
    if total < shape.rows_at + TAIL_BYTES:
        raise bad(MEDIUM, 20, f"{shape.rows_at + TAIL_BYTES} bytes or more", total)
    if total > len(data):
        raise truncated(MEDIUM, 20, f"{total} bytes", data)
    return shape


def check_sum(data: Buffer, shape: Shape) -> None:
    """Raise BadSampleError if the CRC32C in the header is not that of the bytes."""
    expected = int.from_bytes(data[8:12], "little")
    actual = crc32c(memoryview(data)[_SUMMED_FROM : shape.total_bytes])
    if actual != expected:
        raise BadSampleError(f"{MEDIUM} image: its bytes have the CRC32C {actual:08x}, not {expected:08x} (damaged)")
