"""The orientation in an EXIF blob: a small TIFF file inside a JPEG, PNG or WebP; and in XMP, which may stand in for it.

    0   2 bytes  byte order, "II" little-endian or "MM" big-endian
    2   uint16   42
    4   uint32   offset of the first directory, from the start of the blob
    directory:   uint16 number of entries, then entries of 12 bytes
    entry:       uint16 tag, uint16 type, uint32 count, 4 bytes: the values, or their offset if they need more

Source: CIPA DC-008 (Exif 2.32), 4.6; XMP specification part 1, 7. A damaged blob is no reason to reject an image: it
has no orientation. What counts, of blobs that say it in odd ways too, is what Pillow's `exif_transpose` makes of them:
any type of number, its first value; XMP where EXIF has no such entry at all.
"""

from __future__ import annotations

import re
import struct

from readers.headers.header import Buffer

__all__ = ["PREFIX", "UPRIGHT", "number", "orientation", "xmp_orientation"]

# JPEG puts this before the blob; so do some writers of PNG and WebP, which should not, and some write it twice.
PREFIX = b"Exif\0\0"
UPRIGHT = 1

_ORIENTATION = 0x0112
# The second pair is of writers that swap the 42 and not the rest.
_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_NUMBERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 13: "I", 16: "Q"}
_RATIONALS = {5: "II", 10: "ii"}
_in_xmp = re.compile(rb'tiff:Orientation(?:="|>)([0-9])').search


def orientation(data: Buffer, start: int, stop: int) -> int:
    """EXIF orientation 1..8 of the blob in bytes [start, stop) of `data`, 0 where it says none. Never raises."""
    for _ in range(2):
        if data[start : start + len(PREFIX)] == PREFIX:
            start += len(PREFIX)
    stop = min(stop, len(data))
    if stop <= start:
        return 0
    order = _ORDERS.get(bytes(data[start : start + 4]), "")
    if not order or stop < start + 8:
        return UPRIGHT  # something is there, if not what it should be: Pillow looks no further
    at = start + int(struct.unpack_from(order + "I", data, start + 4)[0])
    if at + 2 > stop:
        return 0
    entries = min(struct.unpack_from(order + "H", data, at)[0], (stop - at - 2) // 12)
    entry, total_bytes = struct.Struct(order + "HHII").unpack_from, 0
    for position in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, count, offset = entry(data, position)
        length, place = count * _TYPE_BYTES.get(kind, 0), position + 8
        if length > 4:
            total_bytes += length
            if total_bytes > stop - start:
                continue
            place = start + offset
            if place + length > stop:
                return 0
        if tag == _ORIENTATION and length:
            return _valid(number(order, kind, data, place))
    return 0


def xmp_orientation(data: Buffer, start: int = 0, stop: int | None = None) -> int:
    """The same of an XMP packet."""
    match = _in_xmp(data, start, len(data) if stop is None else stop)
    return _valid(int(match[1])) if match else 0


def number(order: str, kind: int, data: Buffer, at: int) -> float:
    """A number of a TIFF type and byte order ("<", ">") at byte `at`; 0 for a type that is none."""
    if kind in _RATIONALS:
        above, below = struct.unpack_from(order + _RATIONALS[kind], data, at)
        return float(above / below) if below else 0
    return float(struct.unpack_from(order + _NUMBERS[kind], data, at)[0]) if kind in _NUMBERS else 0


def _valid(value: float) -> int:
    """An orientation; upright for a number that is none."""
    return int(value) if value in range(1, 9) else UPRIGHT
