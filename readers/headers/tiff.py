"""The header of a TIFF; and the orientation in EXIF, which is a small TIFF inside a JPEG, PNG or WebP, or in XMP.

             TIFF                            BigTIFF
    0        "II" or "MM": byte order        same
    2        uint16 42                       uint16 43, uint16 8, uint16 0
    then     uint32 offset of a directory    uint64
    directory: number of entries, uint16     uint64
    entry    uint16 tag, uint16 type,        same
             uint32 number of values,        uint64,
             4 bytes: the values, or their   8 bytes
             offset if they need more
    then     uint32 offset of the next       uint64

Sources: Adobe TIFF 6.0, section 2; BigTIFF as in libtiff; CIPA DC-008 (Exif 2.32), 4.6; XMP specification part 1, 7.

Components are SamplesPerPixel: 1 with a palette. Only the first image is examined. Writers put the pixels, the
directory and its values in any order, so a file may be cut in any of them: all are checked, not only those used here.

An image with a damaged EXIF blob is not rejected: it has no orientation. Pillow's `exif_transpose` decides what a blob
means, odd ones included: the first value of any type of number; XMP where EXIF has no such entry at all.
"""

from __future__ import annotations

import re
import struct
from operator import add
from typing import NamedTuple

from readers.headers.base import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["EXIF_PREFIX", "UPRIGHT", "orientation", "parse_tiff", "tiff_bits", "tiff_frames", "xmp_orientation"]

# JPEG puts this before the blob; so do some writers of PNG and WebP, which should not, and some write it twice.
EXIF_PREFIX = b"Exif\0\0"
UPRIGHT = 1

_BITS = 258
_WIDTH, _HEIGHT, _ORIENTATION, _SAMPLES, _XMP = 256, 257, 274, 277, 700
# The tags of the offsets and of the lengths.
_STRIPS, _TILES = (273, 279), (324, 325)
_EXIF_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_TYPE_BYTES = {**_EXIF_TYPE_BYTES, 17: 8, 18: 8}
_UNSIGNED = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
_NUMBERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 13: "I", 16: "Q"}
_RATIONALS = {5: "II", 10: "ii"}
# The second pair is of writers that swap the 42 and not the rest.
_EXIF_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}
_in_xmp = re.compile(rb'tiff:Orientation(?:="|>)([0-9])').search
_MAX_ENTRIES = 0xFFFF
# 4 million tiles of 256 x 256 are an image of half a million pixels squared.
_MAX_NUMBERS = 1 << 22


class _Values(NamedTuple):
    """`total` values of a TIFF type from byte `at` on; `_directory` has checked that they are there."""

    kind: int
    total: int
    at: int


class _Layout:
    """How one byte order and variant writes its numbers."""

    def __init__(self, order: str, *, big: bool) -> None:
        self.order = order
        formats = ("8xQ", "Q", "HHQ8x", "Q") if big else ("4xI", "H", "HHI4x", "I")
        self.head, self.entries, self.entry, self.offset = (struct.Struct(order + text) for text in formats)


_LAYOUTS = {
    b"II*\0": _Layout("<", big=False),
    b"MM\0*": _Layout(">", big=False),
    b"II+\0": _Layout("<", big=True),
    b"MM\0+": _Layout(">", big=True),
}


def parse_tiff(data: Buffer, *, exif_only: bool = False) -> ImageHeader:
    """The header of a TIFF's first image; raises BadSampleError. Bytes 0 to 3 are known to be a TIFF's.

    exif_only: take the orientation from its tag alone, and not from XMP.
    """
    layout = _LAYOUTS[bytes(data[:4])]
    at = unpack("tiff", layout.head, data, 0)[0]
    tags = _directory(data, layout, at)
    height = _number(data, layout, tags.get(_HEIGHT), absent=0)
    width = _number(data, layout, tags.get(_WIDTH), absent=0)
    check_size("tiff", at, height, width)
    components = _number(data, layout, tags.get(_SAMPLES), absent=1)
    if not 1 <= components <= 255:
        raise bad("tiff", at, "1 to 255 samples per pixel", components)
    _check_pixels(data, layout, tags, at)
    found, xmp = tags.get(_ORIENTATION), tags.get(_XMP)
    rotated = UPRIGHT
    if found is not None and found.total:
        rotated = _first_orientation(layout.order, found.kind, data, found.at)
    elif xmp is not None and not exif_only:
        rotated = xmp_orientation(data, xmp.at, xmp.at + xmp.total) or UPRIGHT
    return ImageHeader("tiff", height, width, components, 0, rotated)


def tiff_bits(data: Buffer) -> int:
    """Bits of a value of the first image, the most of several channels; 1 where the file does not say, as TIFF has it.

    Raises BadSampleError."""
    layout = _LAYOUTS[bytes(data[:4])]
    tags = _directory(data, layout, unpack("tiff", layout.head, data, 0)[0])
    return max(_numbers(data, layout, tags.get(_BITS)), default=1)


def tiff_frames(data: Buffer) -> int:
    """Directories in the chain, which may be a ring."""
    layout = _LAYOUTS[bytes(data[:4])]
    at, seen = int(unpack("tiff", layout.head, data, 0)[0]), set[int]()
    while at and at not in seen and len(seen) < _MAX_ENTRIES and at + layout.entries.size <= len(data):
        seen.add(at)
        following = at + layout.entries.size + layout.entries.unpack_from(data, at)[0] * layout.entry.size
        if following + layout.offset.size > len(data):
            break
        at = int(layout.offset.unpack_from(data, following)[0])
    return len(seen)


def orientation(data: Buffer, start: int, stop: int) -> int:
    """EXIF orientation 1..8 of the blob in bytes [start, stop) of `data`, 0 where it says none. Never raises."""
    for _ in range(2):
        if data[start : start + len(EXIF_PREFIX)] == EXIF_PREFIX:
            start += len(EXIF_PREFIX)
    stop = min(stop, len(data))
    if stop <= start:
        return 0
    order = _EXIF_ORDERS.get(bytes(data[start : start + 4]), "")
    if not order or stop < start + 8:
        return UPRIGHT  # there is a blob, if not a valid one: Pillow looks no further
    at = start + int(struct.unpack_from(order + "I", data, start + 4)[0])
    if at + 2 > stop:
        return 0
    entries = min(struct.unpack_from(order + "H", data, at)[0], (stop - at - 2) // 12)
    entry, total_bytes = struct.Struct(order + "HHII").unpack_from, 0
    for position in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, count, offset = entry(data, position)
        length, value = count * _EXIF_TYPE_BYTES.get(kind, 0), position + 8
        if length > 4:
            total_bytes += length
            if total_bytes > stop - start:
                continue
            value = start + offset
            if value + length > stop:
                return 0
        if tag == _ORIENTATION and length:
            return _first_orientation(order, kind, data, value)
    return 0


def xmp_orientation(data: Buffer, start: int = 0, stop: int | None = None) -> int:
    """The same for an XMP packet."""
    match = _in_xmp(data, start, len(data) if stop is None else stop)
    return _valid(int(match[1])) if match else 0


def _first_orientation(order: str, kind: int, data: Buffer, at: int) -> int:
    """The orientation by the value of a TIFF type and byte order ("<", ">") at byte `at`."""
    if kind in _RATIONALS:
        above, below = struct.unpack_from(order + _RATIONALS[kind], data, at)
        return _valid(above / below if below else 0)
    return _valid(struct.unpack_from(order + _NUMBERS[kind], data, at)[0] if kind in _NUMBERS else 0)


def _valid(value: float) -> int:
    """The value as an orientation; upright for a number that is not one."""
    return int(value) if value in range(1, 9) else UPRIGHT


def _directory(data: Buffer, layout: _Layout, at: int) -> dict[int, _Values]:
    """The values by tag of the directory at byte `at`; for a repeated tag, the first, as in libtiff."""
    entries = unpack("tiff", layout.entries, data, at)[0]
    if entries > _MAX_ENTRIES:
        raise bad("tiff", at, f"at most {_MAX_ENTRIES} entries", entries)
    first = at + layout.entries.size
    after = first + entries * layout.entry.size
    unpack("tiff", layout.offset, data, after)
    tags: dict[int, _Values] = {}
    inline_bytes = layout.offset.size
    for position in range(first, after, layout.entry.size):
        tag, kind, total = layout.entry.unpack_from(data, position)
        length = total * _TYPE_BYTES.get(kind, 0)
        value = position + layout.entry.size - inline_bytes
        if length > inline_bytes:
            value = layout.offset.unpack_from(data, value)[0]
            if value + length > len(data):
                raise truncated("tiff", position, f"tag {tag} in bytes {value} to {value + length}", data)
        tags.setdefault(tag, _Values(kind, total, value))
    return tags


def _numbers(data: Buffer, layout: _Layout, values: _Values | None) -> tuple[int, ...]:
    """The numbers of a tag; none without it, or where its type is not one of unsigned integers."""
    if values is None or values.kind not in _UNSIGNED:
        return ()
    if values.total > _MAX_NUMBERS:
        raise bad("tiff", values.at, f"at most {_MAX_NUMBERS} strips or tiles", values.total)
    return struct.unpack_from(f"{layout.order}{values.total}{_UNSIGNED[values.kind]}", data, values.at)


def _number(data: Buffer, layout: _Layout, values: _Values | None, *, absent: int) -> int:
    """The first number of a tag, or `absent`."""
    if values is None or values.total == 0:
        return absent
    return next(iter(_numbers(data, layout, values._replace(total=1))), absent)


def _check_pixels(data: Buffer, layout: _Layout, tags: dict[int, _Values], at: int) -> None:
    """Raise BadSampleError where a strip or tile of the directory at byte `at` ends beyond the file."""
    offsets_tag, lengths_tag = _TILES if _TILES[0] in tags else _STRIPS
    offsets = _numbers(data, layout, tags.get(offsets_tag))
    lengths = _numbers(data, layout, tags.get(lengths_tag))
    if not offsets:
        raise bad("tiff", at, "StripOffsets or TileOffsets", "neither")
    # Old writers leave out the lengths of uncompressed strips: then the offsets are all there is to check.
    end = max(map(add, offsets, lengths)) if lengths else max(offsets) + 1
    if end > len(data):
        raise truncated("tiff", at, f"strips or tiles up to byte {end}", data)
