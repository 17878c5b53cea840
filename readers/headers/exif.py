"""The orientation in an EXIF blob: a small TIFF file inside a JPEG, PNG or WebP.

    0   2 bytes  byte order, "II" little-endian or "MM" big-endian
    2   uint16   42
    4   uint32   offset of the first directory, from the start of the blob
    directory:   uint16 number of entries, then entries of 12 bytes
    entry:       uint16 tag, uint16 type, uint32 count, 4 bytes value

Source: CIPA DC-008 (Exif 2.32), 4.6. A damaged blob is no reason to reject an image: its orientation is 1.
XMP packets, which may repeat the orientation, are not read.
"""

from __future__ import annotations

import struct

from readers.headers.header import Buffer

__all__ = ["PREFIX", "orientation"]

# JPEG puts this before the blob; so do some writers of PNG and WebP, which should not.
PREFIX = b"Exif\0\0"

_ORIENTATION = 0x0112
_SHORT, _LONG = 3, 4
_MAX_ENTRIES = 1024
_DIRECTORY = {b"II*\0": struct.Struct("<I"), b"MM\0*": struct.Struct(">I")}
_COUNT = {b"II*\0": struct.Struct("<H"), b"MM\0*": struct.Struct(">H")}
_ENTRY = {b"II*\0": struct.Struct("<HH4xH2x"), b"MM\0*": struct.Struct(">HH4xH2x")}
_LONG_ENTRY = {b"II*\0": struct.Struct("<8xI"), b"MM\0*": struct.Struct(">8xI")}


def orientation(data: Buffer, start: int, stop: int) -> int:
    """EXIF orientation 1..8 of the blob in bytes [start, stop) of `data`, 1 without one. Never raises."""
    if data[start : start + len(PREFIX)] == PREFIX:
        start += len(PREFIX)
    stop = min(stop, len(data))
    magic = bytes(data[start : start + 4])
    if magic not in _COUNT or stop < start + 8:
        return 1
    at = start + int(_DIRECTORY[magic].unpack_from(data, start + 4)[0])
    if at + 2 > stop:
        return 1
    entries = min(_COUNT[magic].unpack_from(data, at)[0], (stop - at - 2) // 12, _MAX_ENTRIES)
    entry = _ENTRY[magic].unpack_from
    for position in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, value = entry(data, position)
        if tag == _ORIENTATION:
            if kind == _LONG:
                value = _LONG_ENTRY[magic].unpack_from(data, position)[0]
            return int(value) if kind in (_SHORT, _LONG) and 1 <= value <= 8 else 1
    return 1
