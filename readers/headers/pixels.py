"""Decoded pixels behind a header of their own: what a cache of decoded images hands out, ready to be looked at.

    0    89 "PXL" 0D 0A 1A 0A       the magic; the bytes after the name are PNG's, and for the same reasons
    8    uint32 height, uint32 width
    16   height x width pixels, row by row, each uint8 red, green, blue

Little-endian. Images are upright and there is no compression: for files there is PNG.
"""

from __future__ import annotations

import struct

from readers.headers.header import Buffer, ImageHeader, check_size, truncated, unpack

__all__ = ["HEADER_BYTES", "MAGIC", "header", "parse"]

MAGIC = b"\x89PXL\r\n\x1a\n"
_SIZE = struct.Struct("<8xII")
HEADER_BYTES = _SIZE.size


def header(height: int, width: int) -> bytes:
    """The 16 bytes before so many pixels."""
    return MAGIC + struct.pack("<II", height, width)


def parse(data: Buffer) -> ImageHeader:
    """The header of decoded pixels; raises BadSampleError. Its magic is known."""
    height, width = unpack("pixels", _SIZE, data, 0)
    check_size("pixels", 8, height, width)
    end = HEADER_BYTES + height * width * 3
    if end > len(data):
        raise truncated("pixels", HEADER_BYTES, f"pixels up to byte {end}", data)
    return ImageHeader("pixels", height, width, 3, 0, 1)
