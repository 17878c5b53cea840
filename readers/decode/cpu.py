"""Encoded bytes to upright pixels on the CPU, whatever the image is: RGB of 8 bits for `decode_image`, or unchanged.

`decode_unchanged` gives pixels in their own depth and channels: masks, 16-bit greys, floating-point maps.

    JPEG                                    uint8 [h, w], [h, w, 3]; CMYK and YCCK [h, w, 4]
    palette (PNG, GIF, BMP, TIFF)           uint8 [h, w]: the indices, not their colours
    grey of 1, 2 or 4 bits                  uint8 [h, w], scaled to 0 to 255
    grey, grey with alpha, RGB, RGBA, CMYK  uint8 or uint16, [h, w] or [h, w, channels]
    TIFF of 12 bits                         uint16 [h, w], 0 to 4095
    TIFF of integers with a sign, 32 bits   int32 [h, w]
    TIFF of floating point                  float32 [h, w]
    CIELAB (TIFF)                           uint8 [h, w, 3], as in the file

Upright, and of the first frame or page, like RGB. Pillow holds no more than 8 bits of a colour, but reads either half
of 16, so such images are decoded twice. What it cannot give in full is an error that says so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.decode.jpeg import check_coding, decode_rows
from readers.decode.orient import upright, upright_size
from readers.decode.pillow import EIGHT_BITS, as_stored, bits_of, check_size, decode_whole, layout_of, tiles_of
from readers.decode.region import Region, Scratch, check_pixels, pixels_of
from readers.headers import ImageHeader, read_frame, read_header
from readers.headers.pillow import opened
from readers.sample import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DECODER", "decode_image", "decode_unchanged", "without_all_bits"]

# Named in resume tokens: another decoder may give slightly other pixels.
DECODER = "cpu"
# Pillow's names of layouts of which it takes the upper byte, and those by which it takes the lower one.
_OTHER_BYTE = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
_HALVED = ("RGB", "RGBA", "RGBX", "CMYK")
_PLANAR_CONFIGURATION = 284
_GREY_ALPHA_16, _FOUR_BYTES = "LA;16B", "RGBA"


def decode_image(
    data: Buffer,
    region: Region | tuple[int, int, int, int, int, bool] | None = None,
    scratch: Scratch | None = None,
    size: tuple[int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """RGB pixels of an encoded image, upright, uint8 [height, width, 3].

    region: the part that is wanted (None: all of it). Only JPEGs can be reduced; of other images the box comes in full
    size. scratch: memory to use; the result may lie in it, and lasts until its next use. Of an image that is decoded
    already the result is a read-only view of `data`. size: the (height, width) that the index promises for the upright
    image. Raises BadSampleError.
    """
    header, frame = read_frame(data)
    seen = upright_size(header.height, header.width, header.orientation)
    if size is not None and seen != size:
        raise BadSampleError(f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {seen}")
    check_pixels(header.height, header.width)
    if region is None:
        region = Region(0, 0, *seen)
    top, left, height, width, reduce, coarse = region
    if header.orientation != 1 and (header.height % reduce or header.width % reduce):
        reduce = 1  # the decoder counts its squares from the stored corner, which is another one
    pixels = None
    if frame:
        check_coding(data, header, frame)
    if frame and header.components != 4:
        bottom = top + height if header.orientation == 1 else header.height
        pixels = decode_rows(data, header, frame, bottom, reduce, coarse, scratch or Scratch())
        if pixels is not None and header.orientation != 1:
            pixels = upright(pixels, header.orientation)
    if pixels is None:
        pixels, reduce = (pixels_of if header.media == "pixels" else decode_whole)(data, header), 1
    top, left, height, width = top // reduce, left // reduce, -(-height // reduce), -(-width // reduce)
    return pixels[top : top + height, left : left + width]


def decode_unchanged(data: Buffer, size: tuple[int, int] | None = None) -> npt.NDArray[Any]:
    """The upright pixels of an encoded image, [height, width] or [height, width, channels], as described at the top.

    size: the (height, width) that the index promises for the upright image. Raises BadSampleError.
    """
    header = read_header(data)
    if header.media == "pixels":
        raise BadSampleError("the cache holds this image as 8-bit RGB; keep='encoded' leaves it unchanged")
    seen = upright_size(header.height, header.width, header.orientation)
    if size is not None and seen != size:
        raise BadSampleError(f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {seen}")
    check_pixels(header.height, header.width)
    is_rgb = header.media == "jpeg" and header.components == 3
    stored = decode_image(data) if is_rgb else upright(_stored(data, header), as_stored(header))
    return np.array(stored)


def _stored(data: Buffer, header: ImageHeader) -> npt.NDArray[Any]:
    """The pixels as Pillow leaves them."""
    with opened(data, header.media) as image:
        layout, other = layout_of(image), _other_byte(image)
        reason = without_all_bits(image)
        if reason:
            raise BadSampleError(reason)
        if layout == _GREY_ALPHA_16:
            _read_as(image, _FOUR_BYTES)
        image.load()
        check_size(image, header)
        upper = _array(image)
    if layout == _GREY_ALPHA_16:
        return upper.view(">u2").astype(np.uint16)
    if not other:
        return upper
    with opened(data, header.media) as image:
        _read_as(image, other)
        image.load()
        both: npt.NDArray[Any] = np.bitwise_or(upper.astype(np.uint16) << 8, _array(image))
        return both


def without_all_bits(image: Image) -> str:
    """Why Pillow cannot give all bits of an image, "" where it can."""
    short = bits_of(image) > 8 and image.mode in EIGHT_BITS and not _other_byte(image)
    return f"holds {bits_of(image)} bits a channel, of which Pillow gives no more than 8" if short else ""


def _other_byte(image: Image) -> str:
    """The layout by which Pillow takes the other byte of values of 16 bits; "" where there is none."""
    kind, _, byte_order = layout_of(image).rpartition(";16")
    halved = kind in _HALVED and byte_order in _OTHER_BYTE and not _in_planes(image)
    return f"{kind};16{_OTHER_BYTE[byte_order]}" if halved else ""


def _array(image: Image) -> npt.NDArray[Any]:
    """The values of an image."""
    values = np.array(image)
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    if image.mode == "I" and image.format == "PNG":
        return values.astype(np.uint16)
    native: npt.NDArray[Any] = values.astype(values.dtype.newbyteorder("="), copy=False)
    return native


def _in_planes(image: Image) -> bool:
    """Whether the channels of a TIFF lie apart; libtiff then reads them by layouts of its own choice."""
    return bool(getattr(image, "tag_v2", {}).get(_PLANAR_CONFIGURATION) == 2)


def _read_as(image: Any, layout: str) -> None:
    """Have Pillow take the values for others than they are."""
    tiles = []
    for tile in tiles_of(image):
        *where, arguments = tile
        other = layout if isinstance(arguments, str) else (layout, *arguments[1:])
        tiles.append(tile._replace(args=other) if hasattr(tile, "_replace") else (*where, other))
    image.tile = tiles
