"""Encoded bytes to upright pixels on the CPU, for any image: RGB of 8 bits by `decode_image`, or unchanged.

`decode_unchanged` gives pixels in their own depth and channels: masks, 16-bit greys, floating-point maps. The table of
what an image becomes is in the comment above `decode_whole`.

No more of a JPEG is decoded than a region needs. There are three savings; the first is exact, and the others are used
where a resize hides them:

- Rows below the region. The height in the frame header (T.81, B.2.2) is lowered in a copy of the bytes, so the decoder
  stops there and skips to the end marker. Sequential JPEGs only: a progressive one has all rows in every scan. Where
  colours are stored with fewer rows, one more is decoded, at which their interpolation looks.
- Scale. libjpeg decodes at 1/2, 1/4 or 1/8 by inverse DCTs of fewer coefficients.
- Colour that is stored at half the size is repeated instead of interpolated: a tenth of the time.

Coefficients that a cache keeps in place of a JPEG (`readers.coefficients`) give the pixels of the JPEG, to the bit, in
every box and at every scale.

JPEGs for which libjpeg warns or fails are left to Pillow, which decides which damage is an error: it continues after
most warnings, with the same pixels, and reads colour samplings that TurboJPEG has no name for. An image that is damaged
where decoding can go past it is decoded, as by Pillow; the CRC32C of the index is there to find that.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError
from readers.decode.region import Region, Scratch, check_header, has_clean_header, pixels_of, readable_frame, upright
from readers.headers import ImageHeader, read_header
from readers.headers import bits_of as stated_bits
from readers.headers.base import MEDIUM as COEFFICIENTS
from readers.headers.pillow import opened, tiles_of
from readers.table import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "DECODER",
    "ISO",
    "bits_of",
    "bits_of_grey",
    "decode_image",
    "decode_unchanged",
    "without_all_bits",
    "without_rgb",
]


# Images decoded by Pillow: all except plain JPEGs, as RGB or unchanged.
#
# As RGB: Pillow's `convert("RGB")` of the first frame or page, without alpha. There are two exceptions, where that
# would be silently wrong:
#
# - 16-bit grey is shifted to 8 bits, as Pillow does for 16-bit colours; `convert` would make all values above 255
#   white. 12-bit grey in a TIFF also keeps its upper 8 bits.
# - Floating point, 32-bit and signed integers have no agreed 8-bit RGB form, and are refused.
#
# Unchanged: the first frame or page in its own depth and channels:
#
#     JPEG                                    uint8 [h, w], [h, w, 3]; CMYK and YCCK [h, w, 4]
#     palette (PNG, GIF, BMP, TIFF)           uint8 [h, w]: the indices, not their colours
#     grey of 1, 2 or 4 bits                  uint8 [h, w], scaled to 0 to 255
#     grey, grey with alpha, RGB, RGBA, CMYK  uint8 or uint16, [h, w] or [h, w, channels]
#     TIFF of 12 bits                         uint16 [h, w], 0 to 4095
#     TIFF of signed or 32-bit integers       int32 [h, w]
#     TIFF of floating point                  float32 [h, w]
#     CIELAB (TIFF)                           uint8 [h, w, 3], as in the file
#
# Pillow holds at most 8 bits of a colour, but can read either byte of 16-bit values, so 16-bit colours are decoded
# twice. An image of which Pillow cannot return all bits is an error. Pillow turns TIFFs upright itself, but no others.


_WITHOUT_RGB = {"F": "floating-point samples", "I": "integers of 32 bits or with a sign"}
_NO_RGB = "holds {}, which have no 8-bit RGB form; decode='unchanged' reads it"
_MISREAD = "holds {} bits a channel in planes, which Pillow misreads; rewrite it with interleaved channels"
_PALETTE = ("P", "PA")
_INDICES = (
    "has a palette, whose indices are not values to resize or to calculate with; leave decode='unchanged' out for its "
    "colours, or pack it as a field of the kind mask"
)
_BYTE = 8
ISO = ("avif", "heif")
_EIGHT_BITS = ("RGB", "RGBA", "RGBX", "CMYK", "LAB", "L", "LA")
_BITS_PER_SAMPLE, _PLANAR_CONFIGURATION = 258, 284
# Pillow's names for the layouts of which it takes the upper byte, and for the same with the lower byte.
_OTHER_BYTE = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
_HALVED = ("RGB", "RGBA", "RGBX", "CMYK")
_GREY_ALPHA_16, _FOUR_BYTES = "LA;16B", "RGBA"


def decode_whole(data: Buffer, header: ImageHeader) -> npt.NDArray[np.uint8]:
    """Upright RGB pixels, uint8 [height, width, 3]. Raises BadSampleError."""
    with opened(data, header.media, header) as image:
        bits = bits_of_grey(image)
        reason = without_rgb(image)
        if reason:
            raise BadSampleError(reason)
        _load(image, header)
        if bits:
            grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
            return upright(np.repeat(grey[:, :, None], 3, axis=2), as_stored(header))
        plain = image.convert("LA") if image.mode == "La" else image  # the only conversion that Pillow has for it
        return upright(np.array(plain.convert("RGB")), as_stored(header))


def decode_stored(data: Buffer, header: ImageHeader, *, indices: bool = True) -> npt.NDArray[Any]:
    """The pixels in their own depth and channels, in Pillow's orientation.

    Raises BadSampleError, without `indices` also for an image with a palette.
    """
    with opened(data, header.media, header) as image:
        if image.mode in _PALETTE and not indices:
            raise BadSampleError(_INDICES)
        layout, other = _layout_of(image), _other_byte(image)
        reason = without_all_bits(image, stated_bits(data) if header.media in ISO else _BYTE)
        if reason:
            raise BadSampleError(reason)
        if layout == _GREY_ALPHA_16:
            _read_as(image, _FOUR_BYTES)
        _load(image, header)
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


def as_stored(header: ImageHeader) -> int:
    """The orientation of the pixels that Pillow returns."""
    return 1 if header.media == "tiff" else header.orientation


def without_rgb(image: Image) -> str:
    """Why an image has no 8-bit RGB form, or why Pillow misreads it; "" if it can be decoded."""
    if bits_of_grey(image):
        return ""
    if bits_of(image) > _BYTE and image.mode in _EIGHT_BITS and ";" not in _layout_of(image):
        return _MISREAD.format(bits_of(image))
    return _NO_RGB.format(_WITHOUT_RGB[image.mode]) if image.mode in _WITHOUT_RGB else ""


def without_all_bits(image: Image, stated: int = _BYTE) -> str:
    """Why Pillow cannot give all bits of an image, "" where it can. stated: bits that its header says."""
    bits = max(bits_of(image), stated)
    short = bits > _BYTE and image.mode in _EIGHT_BITS and not _other_byte(image)
    return f"holds {bits} bits a channel, of which Pillow gives no more than 8" if short else ""


def bits_of_grey(image: Image) -> int:
    """Bit depth of an unsigned grey image of more than 8 bits; 0 for any other."""
    if image.mode.startswith("I;16"):
        return bits_of(image) if bits_of(image) in range(9, 17) else 16
    # Pillow before 11 has no other mode for a PNG of 16 bits.
    return 16 if image.mode == "I" and image.format == "PNG" else 0


def bits_of(image: Image) -> int:
    """Bit depth of a TIFF by its tag; 8 for other media, whose depths show in Pillow's mode."""
    depths = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (_BYTE,))
    return max((bits for bits in depths if isinstance(bits, int)), default=_BYTE)


def _load(image: Image, header: ImageHeader) -> None:
    """Decode the image. Raises BadSampleError if its size differs from its header."""
    image.load()
    expected = header.upright_size if header.media == "tiff" else (header.height, header.width)
    size = (image.height, image.width)
    if size != expected:
        raise BadSampleError(f"expected {expected} pixels (height, width), found {size}")


def _layout_of(image: Image) -> str:
    """Pillow's name for the layout of a pixel's values in the file; "" if they are stored in planes."""
    arguments = (tile[-1] for tile in tiles_of(image))
    names = {argument[0] if isinstance(argument, tuple) and argument else argument for argument in arguments}
    name = names.pop() if len(names) == 1 else ""
    return name if isinstance(name, str) else ""


def _other_byte(image: Image) -> str:
    """The layout with which Pillow takes the other byte of 16-bit values; "" if there is none."""
    kind, _, byte_order = _layout_of(image).rpartition(";16")
    # For channels stored in planes, libtiff chooses the layout.
    in_planes = getattr(image, "tag_v2", {}).get(_PLANAR_CONFIGURATION) == 2
    return (
        f"{kind};16{_OTHER_BYTE[byte_order]}" if kind in _HALVED and byte_order in _OTHER_BYTE and not in_planes else ""
    )


def _read_as(image: Any, layout: str) -> None:
    """Make Pillow read the values with another layout than the file's."""
    tiles = []
    for tile in tiles_of(image):
        *where, arguments = tile
        other = layout if isinstance(arguments, str) else (layout, *arguments[1:])
        tiles.append(tile._replace(args=other) if hasattr(tile, "_replace") else (*where, other))
    image.tile = tiles


def _array(image: Image) -> npt.NDArray[Any]:
    """The values of an image."""
    values = np.array(image)
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    if image.mode == "I" and image.format == "PNG":
        return values.astype(np.uint16)
    native: npt.NDArray[Any] = values.astype(values.dtype.newbyteorder("="), copy=False)
    return native


# Named in resume tokens: another decoder may give slightly different pixels.
DECODER = "cpu"
_SEQUENTIAL = (0xC0, 0xC1)
_height = struct.Struct(">H")
# simplejpeg raises libjpeg's first warning, or its error. Extraneous bytes before the end marker come after all pixels;
# those left over after a lowered height may come before any marker.
_BYTES_BEFORE_THE_END = re.compile(r"extraneous bytes before marker 0xd9$").search
_BYTES_LEFT_OVER = re.compile(r"extraneous bytes before marker 0x..$").search


def decode_image(
    data: Buffer,
    region: Region | tuple[int, int, int, int, int, bool] | None = None,
    scratch: Scratch | None = None,
    size: tuple[int, int] | None = None,
    *,
    compiled: bool = True,
) -> npt.NDArray[np.uint8]:
    """RGB pixels of an encoded image, upright, uint8 [height, width, 3]. Raises BadSampleError.

    data: the encoded image, or what a cache keeps of it. Where that is pixels, the result is a read-only view of them;
        of coefficients, the pixels are those of the JPEG, and their checksum is compared.
    region: the part that is needed (None: all of it). Only JPEGs can be reduced; other images are cropped at full size.
    scratch: memory to use; the result may be a view of it, valid until its next use.
    size: the (height, width) that the index promises for the upright image.
    compiled: decode baseline JPEGs by the codec of this package (`readers.coefficients`), where it was built: it is
        quicker and gives the same pixels. Otherwise libjpeg does.
    """
    header, frame = readable_frame(data, size)
    if region is None:
        region = Region(0, 0, *header.upright_size)
    if header.media == COEFFICIENTS:
        return _decode_coefficients(data, header, Region(*region), scratch)
    top, left, height, width, reduce, coarse = region
    if header.orientation != 1 and (header.height % reduce or header.width % reduce):
        reduce = 1  # the decoder counts its squares from the stored corner, which is another one
    pixels = None
    if frame and compiled and header.process in _SEQUENTIAL:
        from readers.coefficients import decode_jpeg, unsupported_reason  # loads crc32c

        if not unsupported_reason():
            pixels = decode_jpeg(data, header, Region(*region), scratch)
            if pixels is not None:
                return pixels
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

    size: (height, width) of the upright image by the index. indices: whether to accept the indices of a palette, on
    which arithmetic is meaningless. Raises BadSampleError.
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
    """Decode a box of coefficients; it is stored at the beginning of `scratch`."""
    from readers.coefficients import decode  # loads crc32c

    if scratch is None or header.orientation != 1:
        return decode(data, region)
    shape = (-(-region.height // region.reduce), -(-region.width // region.reduce), 3)
    count = math.prod(shape)
    return decode(data, region, np.frombuffer(scratch.pixels(count), np.uint8, count).reshape(shape))


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
        decoded = simplejpeg.decode_jpeg(source, "RGB", fastupsample=coarse, buffer=memory, strict=True, **options)
    except ValueError as error:
        if not harmless(str(error)) or not has_clean_header(source):
            return None
        # It raised after the last row, so all pixels are in place.
        return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)
    pixels: npt.NDArray[np.uint8] | None = decoded if decoded.shape == shape else None
    return pixels
