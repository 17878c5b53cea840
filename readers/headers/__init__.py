"""Parse the header of an encoded image without decoding it.

    >>> from readers.headers import parse_header
    >>> parse_header(data)
    ImageHeader(media='jpeg', height=375, width=500, components=3, process=192, orientation=1)

`data` is the whole encoded image: bytes, or a one-dimensional memoryview of bytes that may lie anywhere in a
larger buffer. One module per format states the bytes it reads; its `parse` relies on the magic that
`sniff` has seen. Each also notices a truncated file, by what the format says about its own end; none looks at
the pixels. Pillow finds that out by decoding alone, which takes 20 to 1,500 times as long.

A format has an entry in `_FORMATS`: how its header is parsed, the orientation by EXIF alone, and how many frames or
pages it holds, of which readers decode the first. The pictures that some cameras put behind a JPEG (MPF) are not
counted: previews and gain maps, mostly.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from cache.errors import BadSampleError
from readers.headers import bmp, gif, jpeg, pillow, pixels, png, tiff, webp
from readers.headers.foreign import FOREIGN_SUFFIXES, foreign_medium
from readers.headers.header import MEDIA, SUFFIX, Buffer, ImageHeader

__all__ = [
    "FOREIGN_SUFFIXES",
    "MEDIA",
    "SUFFIX",
    "ImageHeader",
    "exif_orientation",
    "foreign_medium",
    "frames",
    "parse_header",
    "parse_held",
    "read_frame",
    "read_header",
    "sniff",
]


class _Format(NamedTuple):
    parse: Callable[[Buffer], ImageHeader]
    exif: Callable[[Buffer], int] | None = None
    frames: Callable[[Buffer], int] | None = None


_FORMATS = {
    "jpeg": _Format(jpeg.parse, jpeg.exif_orientation),
    "png": _Format(png.parse, png.exif_orientation, png.frames),
    "webp": _Format(webp.parse, webp.exif_orientation, webp.frames),
    "gif": _Format(gif.parse, frames=gif.frames),
    "bmp": _Format(bmp.parse),
    "tiff": _Format(tiff.parse, tiff.exif_orientation, tiff.frames),
}
_HEAD_BYTES = 18


def sniff(data: Buffer) -> str:
    """The medium of `data` by its first bytes: one of MEDIA, "" for no image that we know. Never raises."""
    head = bytes(data[:_HEAD_BYTES])
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "webp"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "tiff"
    # Two letters are too few: a caption may begin with them.
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in bmp.VERSIONS:
        return "bmp"
    return ""


def parse_header(data: Buffer) -> ImageHeader:
    """The header of an encoded image; raises BadSampleError, and nothing else, for bytes that are not one.

    The message names the byte, counted from the start of `data`, and what was expected and found there.
    """
    known = _FORMATS.get(sniff(data))
    if known is None:
        foreign = foreign_medium(data)
        if foreign:
            raise BadSampleError(
                f"image, byte 0: found {foreign}, an image format that is not read; write it as jpeg, png or webp first"
            )
        found = bytes(data[:8]).hex(" ") or "no bytes"
        raise BadSampleError(f"image, byte 0: expected the magic of {', '.join(_FORMATS)}, found {found}")
    return known.parse(data)


def parse_held(data: Buffer) -> ImageHeader:
    """The header of what a reader hands out: that of a file's bytes, or of pixels that a cache has decoded.

    Pixels lie in memory only. In a file, or a shard, they are no image: `sniff` and `parse_header` do not know them.
    """
    return pixels.parse(data) if data[: len(pixels.MAGIC)] == pixels.MAGIC else parse_header(data)


def read_header(data: Buffer) -> ImageHeader:
    """The header that a decoder goes by: that of `parse_held`, or of an image that is refused there but decodes.

    So whatever Pillow reads has a header. An image with damage is decoded to find out. Raises BadSampleError.
    """
    return read_frame(data)[0]


def read_frame(data: Buffer) -> tuple[ImageHeader, int]:
    """The same, and the byte at which the frame of a JPEG states its height; 0 for what only Pillow decodes."""
    media = sniff(data)
    try:
        return jpeg.parse_frame(data) if media == "jpeg" else (parse_held(data), 0)
    except BadSampleError as error:
        if not media:
            raise
        try:
            return pillow.parse(data, media), 0
        except BadSampleError:
            raise error from None


def exif_orientation(data: Buffer) -> int:
    """The orientation by EXIF alone, of an image with a header: by what other libraries turn it, which read no XMP."""
    known = _FORMATS.get(sniff(data))
    try:
        return known.exif(data) if known is not None and known.exif is not None else 1
    except (BadSampleError, struct.error):
        return 1  # an image with damage, which other libraries do not read at all


def frames(data: Buffer, media: str) -> int:
    """Frames or pages, 1 or more; those up to the damage of a damaged file. Never raises."""
    known = _FORMATS.get(media)
    try:
        return max(1, known.frames(data)) if known is not None and known.frames is not None else 1
    except (BadSampleError, LookupError, struct.error):
        return 1
