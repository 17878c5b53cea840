"""Encoded bytes to upright pixels on the CPU, for any image: RGB of 8 bits by `decode_image`, or unchanged.

`decode_unchanged` gives pixels in their own depth and channels: masks, 16-bit greys, floating-point maps. The table of
what an image becomes is in `readers.decode.pillow`.

No more of a JPEG is decoded than a region needs. There are three savings; the first is exact, and the others are used
where a resize hides them:

- Rows below the region. The height in the frame header (T.81, B.2.2) is lowered in a copy of the bytes, so the decoder
  stops there and skips to the end marker. Sequential JPEGs only: a progressive one has all rows in every scan. Where
  colours are stored with fewer rows, one more is decoded, at which their interpolation looks.
- Scale. libjpeg decodes at 1/2, 1/4 or 1/8 by inverse DCTs of fewer coefficients.
- Colour that is stored at half the size is repeated instead of interpolated: a tenth of the time.

Coefficients that a cache keeps in place of a JPEG (`readers.coefficients`) give the pixels of the JPEG, to the bit, in
every box and at every scale.

JPEGs for which libjpeg warns or fails are left to Pillow, which decides what is damaged beyond use: it continues after
most warnings, with the same pixels, and reads colour samplings that TurboJPEG has no name for. An image that is damaged
where decoding can go past it is decoded, as by Pillow; the CRC32C of the index is there to find that.
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
from readers.decode.pillow import as_stored, decode_stored, decode_whole
from readers.decode.region import Region, Scratch, check_header, pixels_of, upright
from readers.headers import ImageHeader, read_frame, read_header
from readers.headers.coefficients import MEDIUM as COEFFICIENTS
from readers.sample import Buffer

__all__ = ["DECODER", "check_coding", "decode_image", "decode_unchanged", "has_clean_header"]

# Named in resume tokens: another decoder may give slightly different pixels.
DECODER = "cpu"
_BITS = 8
_PROCESSES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA)
_SEQUENTIAL = (0xC0, 0xC1)
_height = struct.Struct(">H")
# simplejpeg raises the first warning of libjpeg, or its error. Bytes before the end marker follow all pixels, and those
# that a lowered height leaves over come before any marker.
_BYTES_BEFORE_THE_END = re.compile(r"extraneous bytes before marker 0xd9$").search
_BYTES_LEFT_OVER = re.compile(r"extraneous bytes before marker 0x..$").search


def decode_image(
    data: Buffer,
    region: Region | tuple[int, int, int, int, int, bool] | None = None,
    scratch: Scratch | None = None,
    size: tuple[int, int] | None = None,
    *,
    compiled: bool = False,
) -> npt.NDArray[np.uint8]:
    """RGB pixels of an encoded image, upright, uint8 [height, width, 3]. Raises BadSampleError.

    data: the encoded image, or what a cache keeps of it. Where that is pixels, the result is a read-only view of them;
        of coefficients, the pixels are those of the JPEG, and their checksum is compared.
    region: the part that is needed (None: all of it). Only JPEGs can be reduced; other images are cropped at full size.
    scratch: memory to use; the result may be a view of it, valid until its next use.
    size: the (height, width) that the index promises for the upright image.
    compiled: decode baseline JPEGs by compiled functions (`readers.coefficients.strips`), which is quicker and gives
        the same pixels. Raises MissingExtraError, UnsupportedCpuError.
    """
    header, frame = read_frame(data)
    check_header(header, size)
    if region is None:
        region = Region(0, 0, *header.upright_size)
    if header.media == COEFFICIENTS:
        return _decode_coefficients(data, header, Region(*region), scratch)
    top, left, height, width, reduce, coarse = region
    if header.orientation != 1 and (header.height % reduce or header.width % reduce):
        reduce = 1  # the decoder counts its squares from the stored corner, which is another one
    pixels = None
    if frame:
        check_coding(data, header, frame)
    if frame and compiled and header.process in _SEQUENTIAL:
        from readers.coefficients.strips import decode_strips  # loads crc32c

        found = decode_strips(data, header, Region(*region), has_clean_header, scratch)
        if found is not None:
            return found
    if frame and header.components != 4:
        bottom = top + height if header.orientation == 1 else header.height
        pixels = _decode_rows(data, header, frame, bottom, reduce, coarse, scratch or Scratch())
        if pixels is not None and header.orientation != 1:
            pixels = upright(pixels, header.orientation)
    if pixels is None:
        pixels, reduce = (pixels_of if header.media == "pixels" else decode_whole)(data, header), 1
    top, left, height, width = top // reduce, left // reduce, -(-height // reduce), -(-width // reduce)
    return pixels[top : top + height, left : left + width]


def decode_unchanged(data: Buffer, size: tuple[int, int] | None = None, *, indices: bool = True) -> npt.NDArray[Any]:
    """The upright pixels of an encoded image, [height, width] or [height, width, channels], in their own depth.

    size: the (height, width) that the index promises for the upright image. indices: whether those of a palette are
    wanted, which are not values to calculate with. Raises BadSampleError.
    """
    header = read_header(data)
    if header.media == "pixels":
        raise BadSampleError("the cache holds this image as 8-bit RGB; keep='encoded' leaves it unchanged")
    check_header(header, size)
    if header.media in ("jpeg", COEFFICIENTS) and header.components == 3:
        return np.array(decode_image(data))
    if header.media == COEFFICIENTS:
        return np.array(decode_image(data)[..., 0])
    return np.array(upright(decode_stored(data, header, indices=indices), as_stored(header)))


def _decode_coefficients(
    data: Buffer, header: ImageHeader, region: Region, scratch: Scratch | None
) -> npt.NDArray[np.uint8]:
    """The same, of coefficients. Only the box is in `scratch`, at its beginning."""
    from readers.coefficients import decode  # loads crc32c

    if scratch is None or header.orientation != 1:
        return decode(data, region)
    shape = (-(-region.height // region.reduce), -(-region.width // region.reduce), 3)
    count = math.prod(shape)
    return decode(data, region, np.frombuffer(scratch.pixels(count), np.uint8, count).reshape(shape))


def check_coding(data: Buffer, header: ImageHeader, frame: int) -> None:
    """Raise BadSampleError for a JPEG that neither TurboJPEG nor Pillow takes.

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
    """Whether libjpeg reports nothing for a JPEG before its pixels: TurboJPEG decodes no others."""
    try:
        simplejpeg.decode_jpeg_header(source, strict=True)
    except ValueError:
        return False
    return True


def _decode_rows(
    data: Buffer, header: ImageHeader, frame: int, bottom: int, reduce: int, coarse: bool, scratch: Scratch
) -> npt.NDArray[np.uint8] | None:
    """RGB pixels, uint8 [rows, columns, 3], of the rows from 0 to at least `bottom` (as stored) at 1/reduce.

    frame: the byte of `data` that holds the height. coarse: see `Region`. The array is a view of `scratch`. None where
    only Pillow can decode the image.
    """
    height, width = header.height, header.width
    down = data[frame + 6 : frame + 5 + 3 * header.components : 3]  # sampling factors, those of rows in the lower half
    rows = min(height, bottom + (reduce if any(factors & 15 != 1 for factors in down) else 0))
    source: Any = data
    harmless = _BYTES_BEFORE_THE_END
    if rows < height and header.process in _SEQUENTIAL:
        source, harmless = memoryview(scratch.encoded(len(data)))[: len(data)], _BYTES_LEFT_OVER
        source[:] = data
        _height.pack_into(source, frame, rows)
    else:
        rows = height
    shape = (-(-rows // reduce), -(-width // reduce), 3)
    options = {"min_height": shape[0], "min_width": shape[1]} if reduce > 1 else {}
    memory = scratch.pixels(rows * width * 3)
    try:
        # strict: without it even images on which libjpeg gives up pass for decoded, with the old contents of `memory`.
        found = simplejpeg.decode_jpeg(source, "RGB", fastupsample=coarse, buffer=memory, strict=True, **options)
    except ValueError as error:
        if not harmless(str(error)) or not has_clean_header(source):
            return None
        # It raised behind the last row: the pixels are where they belong.
        return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)
    pixels: npt.NDArray[np.uint8] | None = found if found.shape == shape else None
    return pixels
