"""Parse the header of an encoded image without decoding it.

    >>> from readers.headers import parse_header
    >>> parse_header(data)
    ImageHeader(media='jpeg', height=375, width=500, components=3, process=192, orientation=1)

`data` is the whole encoded image: bytes, or a one-dimensional memoryview of bytes, which may be part of a larger
buffer. The modules state the bytes that they read; each parser relies on the magic that `sniff` has seen, and notices a
truncated file by what the format says about its own end. None decodes pixels but for compressed BMPs, which takes 20 to
1,500 times as long.

A format has an entry in `_FORMATS`: how its header is parsed, and how many frames or pages it holds, of which readers
decode the first. The pictures that some cameras put behind a JPEG (MPF), mostly previews, are not counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from cache.errors import BadSampleError
from readers.headers.base import (
    FOREIGN_SUFFIXES,
    MEDIA,
    PIXELS_MAGIC,
    SUFFIX,
    Buffer,
    ImageHeader,
    RefusedImageError,
    foreign_medium,
    parse_coefficients_header,
    parse_pixels,
    sniff,
)
from readers.headers.base import MAGIC as COEFFICIENTS_MAGIC
from readers.headers.formats import (
    PNG_BITS,
    UPRIGHT,
    gif_frames,
    parse_frame,
    parse_gif,
    parse_jpeg,
    parse_png,
    parse_tiff,
    parse_webp,
    png_frames,
    stores_rgb,
    tiff_bits,
    tiff_frames,
    webp_frames,
)
from readers.headers.pillow import iso_bits, iso_frames, parse_bmp, parse_decodable, parse_iso

__all__ = [
    "FOREIGN_SUFFIXES",
    "MEDIA",
    "SUFFIX",
    "ImageHeader",
    "bits_of",
    "exif_orientation",
    "first_deep",
    "foreign_medium",
    "frames",
    "parse_any",
    "parse_header",
    "read_frame",
    "read_header",
    "sniff",
    "stores_rgb",
]


class _Format(NamedTuple):
    """has_exif: whether `parse` takes exif_only, to read no XMP."""

    parse: Callable[..., ImageHeader]
    has_exif: bool = True
    frames: Callable[[Buffer], int] = lambda data: 1


_FORMATS = {
    "jpeg": _Format(parse_jpeg),
    "png": _Format(parse_png, frames=png_frames),
    "webp": _Format(parse_webp, frames=webp_frames),
    "gif": _Format(parse_gif, has_exif=False, frames=gif_frames),
    "bmp": _Format(parse_bmp, has_exif=False),
    "tiff": _Format(parse_tiff, frames=tiff_frames),
    **{
        media: _Format(partial(parse_iso, media=media), has_exif=False, frames=partial(iso_frames, media=media))
        for media in ("avif", "heif")
    },
    "jxl": _Format(partial(parse_iso, media="jxl"), has_exif=False),
}
_DEEP = (b"\x89", b"I", b"M", b"\0")  # how PNGs, TIFFs and ISO files begin


def parse_header(data: Buffer) -> ImageHeader:
    """The header of an encoded image. Raises BadSampleError, and no other error, for bytes that are no image.

    The message names the byte, counted from the start of `data`, with what was expected and found; for a BMP it is
    Pillow's message.
    """
    media = sniff(data)
    if media:
        return _FORMATS[media].parse(data)
    foreign = foreign_medium(data)
    if foreign:
        advice = "write it as jpeg, png or webp first"
        if foreign == "DICOM":
            advice = "write its pixels as an array:  numpy.save('x.npy', pydicom.dcmread(path).pixel_array)"
        raise BadSampleError(f"image, byte 0: found {foreign}, an unsupported image format; {advice}")
    start = bytes(data[:8]).hex(" ") or "no bytes"
    raise BadSampleError(f"image, byte 0: expected the magic of {', '.join(_FORMATS)}, found {start}")


def parse_any(data: Buffer) -> ImageHeader:
    """The header of a reader's payload: an encoded image, or a cache's pixels or coefficients of an image.

    Pixels and coefficients exist only in caches; in a file or a shard, `sniff` and `parse_header` refuse them.
    """
    magic = data[: len(PIXELS_MAGIC)]
    if magic == PIXELS_MAGIC:
        return parse_pixels(data)
    return parse_coefficients_header(data) if magic == COEFFICIENTS_MAGIC else parse_header(data)


def read_header(data: Buffer) -> ImageHeader:
    """The header for decoders: by `parse_any`, or by Pillow for an image that only Pillow can decode.

    A damaged image is decoded to determine this. Raises BadSampleError.
    """
    return read_frame(data)[0]


def read_frame(data: Buffer) -> tuple[ImageHeader, int]:
    """(header, offset of the height in a JPEG's frame) of an image; the offset is 0 if only Pillow can decode it."""
    media = sniff(data)
    try:
        if media == "jxl":
            return parse_iso(data, media, keep=True), 0
        return parse_frame(data) if media == "jpeg" else (parse_any(data), 0)
    except RefusedImageError:
        raise
    except BadSampleError as error:
        if not media:
            raise
        try:
            return parse_decodable(data, media), 0
        except BadSampleError:
            raise error from None


def bits_of(data: Buffer) -> int:
    """Bits of a value of a PNG, TIFF, AVIF or HEIC, as its header says; 8 for others and for bytes that are no image.

    Grey and palette images may have fewer than 8. A TIFF's values may also be signed or floating point.
    """
    media = sniff(data)
    try:
        if media == "png":
            return data[PNG_BITS]
        if media in ("avif", "heif"):
            return iso_bits(data)
        return tiff_bits(data) if media == "tiff" else 8
    except (BadSampleError, LookupError, struct.error):
        return 8


def first_deep(images: Iterable[Buffer | Exception]) -> int:
    """The position of the first image with more than 8 bits a value; -1 if there is none."""
    for place, data in enumerate(images):
        # Most images are JPEGs, which the first byte excludes.
        if not isinstance(data, Exception) and data[:1] in _DEEP and bits_of(data) > 8:
            return place
    return -1


def exif_orientation(data: Buffer) -> int:
    """The orientation by EXIF alone, as used by libraries that read no XMP; upright for a damaged header."""
    known = _FORMATS.get(sniff(data))
    try:
        return known.parse(data, exif_only=True).orientation if known is not None and known.has_exif else UPRIGHT
    except BadSampleError:
        return UPRIGHT


def frames(data: Buffer, media: str) -> int:
    """Number of frames or pages, at least 1; in a damaged file, of those before the damage. Never raises."""
    try:
        return max(1, _FORMATS[media].frames(data))
    except (BadSampleError, LookupError, struct.error):
        return 1
