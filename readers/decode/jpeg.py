"""JPEG on the CPU: decode no more than a region needs.

Three savings; the first is exact, and the others are asked for where a resize hides them:

- Rows below the region. The height in the frame header (T.81, B.2.2) is lowered in a copy of the bytes, so the decoder
  stops there and skips to the end marker. Sequential JPEGs only: a progressive one has all rows in every scan. The
  margin covers the rows that chroma upsampling looks at.
- Scale. libjpeg decodes at 1/2, 1/4 or 1/8 by inverse DCTs of fewer coefficients.
- Colour that is stored at half the size is repeated instead of interpolated: a tenth of the time.

Like libjpeg and Pillow, this accepts damage in the entropy-coded data that decoding can go past: the CRC32C of the
index is there to find it. A missing end is noticed by `parse_header`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from readers.decode.region import Scratch
from readers.errors import BadSampleError
from readers.headers import ImageHeader
from readers.sample import Buffer

__all__ = ["decode_rows"]

_MARGIN_ROWS = 16
_SEQUENTIAL = (0xC0, 0xC1)
_height = struct.Struct(">H")


def decode_rows(
    data: Buffer, header: ImageHeader, frame: int, bottom: int, reduce: int, coarse: bool, scratch: Scratch
) -> npt.NDArray[np.uint8]:
    """RGB pixels, uint8 [rows, columns, 3], of the rows from 0 to at least `bottom` (as stored) at 1/reduce.

    frame: the byte of `data` that holds the height. coarse: see `Region`. The array lies in `scratch`. Raises
    BadSampleError.
    """
    height, width = header.height, header.width
    rows = min(height, (bottom + _MARGIN_ROWS - 1) // _MARGIN_ROWS * _MARGIN_ROWS + _MARGIN_ROWS)
    source: Any = data
    if rows < height and header.process in _SEQUENTIAL:
        source = _shortened(data, frame, rows, scratch)
    else:
        rows = height
    shape = (-(-rows // reduce), -(-width // reduce))
    options = {"min_height": shape[0], "min_width": shape[1]} if reduce > 1 else {}
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            source, "RGB", fastupsample=coarse, buffer=scratch.pixels(rows * width * 3), strict=False, **options
        )
    except ValueError as error:
        raise BadSampleError(f"jpeg image: {error}") from error
    if pixels.shape != (*shape, 3):
        raise BadSampleError(f"jpeg image: expected {shape[0]} x {shape[1]} decoded pixels, found {pixels.shape}")
    return pixels


def _shortened(data: Buffer, frame: int, rows: int, scratch: Scratch) -> memoryview:
    """A copy of a JPEG whose frame states `rows` as its height."""
    copy = memoryview(scratch.encoded(len(data)))[: len(data)]
    copy[:] = data
    _height.pack_into(copy, frame, rows)
    return copy
