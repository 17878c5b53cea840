"""The header of a PNG: IHDR, the orientation in eXIf, and that the chunks lead to IEND.

    0    8 bytes  89 50 4E 47 0D 0A 1A 0A
    8    chunks   uint32 n, 4 bytes type, n bytes, uint32 CRC of type and bytes
    IHDR          uint32 width, uint32 height, uint8 bits, uint8 colour type, 3 bytes

Source: W3C PNG (third edition), 5 and 11. Big-endian. Components are the channels of the colour type: grey 1,
RGB 3, palette 1, grey with alpha 2, RGB with alpha 4; transparency by tRNS adds none. Only IHDR's CRC is
checked. Bytes after IEND are legal.
"""

from __future__ import annotations

import struct
import zlib

from readers.headers.exif import orientation
from readers.headers.header import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["parse"]

_COMPONENTS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# A million of 8 kB, the smallest IDAT in common use, are 8 GB.
_MAX_CHUNKS = 1 << 20

_FIRST_CHUNK = struct.Struct(">I4sIIBB3xI")
_CHUNK = struct.Struct(">I4s")
_CRC_BYTES = 4


def parse(data: Buffer) -> ImageHeader:
    """The header of a PNG; raises BadSampleError. Its signature is known to be there."""
    length, kind, width, height, _bits, colour, crc = unpack("png", _FIRST_CHUNK, data, 8)
    if kind != b"IHDR" or length != 13:
        raise bad("png", 8, "a chunk IHDR of 13 bytes", f"{kind!r} of {length}")
    found = zlib.crc32(data[12:29])
    if found != crc:
        raise bad("png", 29, f"the CRC of IHDR {found:08X}", f"{crc:08X}")
    check_size("png", 16, height, width)
    if colour not in _COMPONENTS:
        raise bad("png", 25, "a colour type of 0, 2, 3, 4 or 6", colour)
    return ImageHeader("png", height, width, _COMPONENTS[colour], 0, _walk(data))


def _walk(data: Buffer) -> int:
    """Follow the chunks after IHDR to the end of IEND; the orientation. eXIf may come after the pixels."""
    at = 8 + _FIRST_CHUNK.size
    pixels = False
    rotated = 1
    for _ in range(_MAX_CHUNKS):
        length, kind = unpack("png", _CHUNK, data, at)
        after = at + _CHUNK.size + length + _CRC_BYTES
        if after > len(data):
            raise truncated("png", at, f"chunk {kind!r} of {length} bytes", data)
        if kind == b"IDAT":
            pixels = True
        elif kind == b"eXIf":
            rotated = orientation(data, at + _CHUNK.size, after - _CRC_BYTES)
        elif kind == b"IEND":
            if not pixels:
                raise bad("png", at, "a chunk IDAT before IEND", "none")
            return rotated
        at = after
    raise bad("png", at, f"a chunk IEND within {_MAX_CHUNKS} chunks", "more chunks")
