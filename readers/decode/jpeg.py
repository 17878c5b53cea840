"""JPEG on the CPU: decode no more than a region needs.

Three savings; the first is exact, and the others are asked for where a resize hides them:

- Rows below the region. The height in the frame header (T.81, B.2.2) is lowered in a copy of the bytes, so the decoder
  stops there and skips to the end marker. Sequential JPEGs only: a progressive one has all rows in every scan. The
  margin covers the rows that chroma upsampling looks at.
- Scale. libjpeg decodes at 1/2, 1/4 or 1/8 by inverse DCTs of fewer coefficients.
- Colour that is stored at half the size is repeated instead of interpolated: a tenth of the time.

What libjpeg warns of or fails on is left to Pillow (`readers.decode.pillow`), which has the last word on what is
damaged beyond use: it goes on after most warnings, with the same pixels, and reads colour samplings that TurboJPEG has
no name for. An image that is damaged where decoding can go past it is decoded, as Pillow does; the CRC32C of the index
is there to find that.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError
from readers.decode.region import Scratch
from readers.headers import ImageHeader
from readers.sample import Buffer

__all__ = ["check_coding", "decode_rows", "has_clean_header"]

_MARGIN_ROWS = 16
_BITS = 8
_PROCESSES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA)
_SEQUENTIAL = (0xC0, 0xC1)
_height = struct.Struct(">H")
# simplejpeg raises what libjpeg said first of all, or what it failed on. Bytes before the end marker follow all pixels,
# and those that a lowered height leaves over come before any marker.
_BYTES_BEFORE_THE_END = re.compile(r"extraneous bytes before marker 0xd9$").search
_BYTES_LEFT_OVER = re.compile(r"extraneous bytes before marker 0x..$").search


def decode_rows(
    data: Buffer, header: ImageHeader, frame: int, bottom: int, reduce: int, coarse: bool, scratch: Scratch
) -> npt.NDArray[np.uint8] | None:
    """RGB pixels, uint8 [rows, columns, 3], of the rows from 0 to at least `bottom` (as stored) at 1/reduce.

    frame: the byte of `data` that holds the height. coarse: see `Region`. The array lies in `scratch`. None where it
    takes Pillow to say what the image looks like.
    """
    height, width = header.height, header.width
    rows = min(height, (bottom + _MARGIN_ROWS - 1) // _MARGIN_ROWS * _MARGIN_ROWS + _MARGIN_ROWS)
    source: Any = data
    harmless = _BYTES_BEFORE_THE_END
    if rows < height and header.process in _SEQUENTIAL:
        source, harmless = _shortened(data, frame, rows, scratch), _BYTES_LEFT_OVER
    else:
        rows = height
    shape = (-(-rows // reduce), -(-width // reduce), 3)
    options = {"min_height": shape[0], "min_width": shape[1]} if reduce > 1 else {}
    memory = scratch.pixels(rows * width * 3)
    try:
        # strict: without it even what libjpeg gives up on passes for decoded, with what was in `memory` for pixels.
        found = simplejpeg.decode_jpeg(source, "RGB", fastupsample=coarse, buffer=memory, strict=True, **options)
    except ValueError as error:
        if not harmless(str(error)) or not has_clean_header(source):
            return None
        # It raised behind the last row: the pixels are where they belong.
        return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)
    pixels: npt.NDArray[np.uint8] | None = found if found.shape == shape else None
    return pixels


def check_coding(data: Buffer, header: ImageHeader, frame: int) -> None:
    """Raise BadSampleError for what neither TurboJPEG nor Pillow takes.

    Other than 8 bits a sample, which the frame states before its height at `frame`; two components; hierarchical
    JPEGs, and lossless ones of arithmetic coding.
    """
    bits = data[frame - 1]
    if bits != _BITS:
        raise BadSampleError(f"jpeg image: has {bits} bits a sample; no decoder here takes other than {_BITS}")
    if header.components == 2:
        raise BadSampleError("jpeg image: has 2 components; decoders here take 1, 3 or 4")
    if header.process not in _PROCESSES:
        raise BadSampleError(f"jpeg image: is of process SOF{header.process & 15}, which no decoder here takes")


def has_clean_header(source: Any) -> bool:
    """Whether libjpeg has nothing to say against a JPEG before its pixels: TurboJPEG decodes no others."""
    try:
        simplejpeg.decode_jpeg_header(source, strict=True)
    except ValueError:
        return False
    return True


def _shortened(data: Buffer, frame: int, rows: int, scratch: Scratch) -> memoryview:
    """A copy of a JPEG whose frame states `rows` as its height."""
    copy = memoryview(scratch.encoded(len(data)))[: len(data)]
    copy[:] = data
    _height.pack_into(copy, frame, rows)
    return copy
