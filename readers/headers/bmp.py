"""The header of a BMP, and that its pixels are there.

    0    "BM", uint32 file bytes, 4 bytes, uint32 offset of the pixels
    14   uint32 n: the bytes of this second header, which names its version
         n = 12: uint16 width, uint16 height, uint16 planes, uint16 bits
         others: int32 width, int32 height (negative: top row first), uint16 planes, uint16 bits,
                 uint32 compression, uint32 pixel bytes, 16 bytes
    54   with bit fields: uint32 masks of red, green, blue and alpha

Source: Microsoft, Bitmap Storage. Little-endian. Rows of uncompressed pixels fill whole uint32, so their end
is computed; the sizes in the file, which many writers leave 0 or wrong, are used for compressed pixels only.
Components are 1 with a palette, 4 at 32 bits with an alpha mask, else 3.
"""

from __future__ import annotations

import struct

from readers.headers.header import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["VERSIONS", "parse"]

VERSIONS = frozenset((12, 40, 52, 56, 64, 108, 124))

_FILE = struct.Struct("<2xI4xII")
_CORE = struct.Struct("<18xHHHH")
_INFO = struct.Struct("<18xiiHHII")
_ALPHA = struct.Struct("<66xI")
_OS2 = 64
_NO_COMPRESSION, _BIT_FIELDS, _ALPHA_BIT_FIELDS = 0, 3, 6
_COMPONENTS = {1: 1, 2: 1, 4: 1, 8: 1, 16: 3, 24: 3, 32: 3}


def parse(data: Buffer) -> ImageHeader:
    """The header of a BMP; raises BadSampleError. Its first two bytes and version are known."""
    file_bytes, offset, version = unpack("bmp", _FILE, data, 0)
    compression = pixel_bytes = 0
    if version == 12:
        width, height, planes, bits = unpack("bmp", _CORE, data, 0)
    else:
        width, height, planes, bits, compression, pixel_bytes = unpack("bmp", _INFO, data, 0)
    height = abs(height)
    check_size("bmp", 18, height, width)
    if planes != 1 or bits not in _COMPONENTS:
        raise bad("bmp", 18, "1 plane of 1, 2, 4, 8, 16, 24 or 32 bits", f"{planes} of {bits}")
    # OS/2 gives 3 another meaning: a Huffman code.
    fields = version != _OS2 and compression in (_BIT_FIELDS, _ALPHA_BIT_FIELDS)
    start = max(offset, 14 + version)
    if compression == _NO_COMPRESSION or fields:
        end = start + (width * bits + 31) // 32 * 4 * height
    else:
        end = start + pixel_bytes if pixel_bytes else file_bytes
    if end > len(data):
        raise truncated("bmp", start, f"pixels up to byte {end}", data)
    alpha = bits == 32 and fields and (version >= 56 or compression == _ALPHA_BIT_FIELDS)
    components = 4 if alpha and unpack("bmp", _ALPHA, data, 0)[0] else _COMPONENTS[bits]
    return ImageHeader("bmp", height, width, components, 0, 1)
