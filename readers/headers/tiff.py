"""The header of a TIFF: the first directory, and that its values and its strips or tiles are there.

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

Source: Adobe TIFF 6.0, section 2; BigTIFF as in libtiff. Components are SamplesPerPixel: 1 with a palette.
Further images of the file are not looked at. Writers put the pixels, the directory and its values in any
order, so a cut may fall in any of them: all are checked, not only what we use.
"""

from __future__ import annotations

import struct
from operator import add
from typing import NamedTuple

from readers.headers.exif import UPRIGHT, number, xmp_orientation
from readers.headers.header import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["exif_orientation", "frames", "parse"]

_WIDTH, _HEIGHT, _ORIENTATION, _SAMPLES, _XMP = 256, 257, 274, 277, 700
# The tags of the offsets and of the lengths.
_STRIPS, _TILES = (273, 279), (324, 325)
_KINDS_BY_BYTES = {1: (1, 2, 6, 7), 2: (3, 8), 4: (4, 9, 11, 13), 8: (5, 10, 12, 16, 17, 18)}
_TYPE_BYTES = {kind: length for length, kinds in _KINDS_BY_BYTES.items() for kind in kinds}
_UNSIGNED = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
_MAX_ENTRIES = 0xFFFF
# 4 million tiles of 256 x 256 are an image of half a million pixels squared.
_MAX_NUMBERS = 1 << 22


class _Values(NamedTuple):
    """`total` values of a TIFF type from byte `at` on; `_directory` has checked that they are there."""

    kind: int
    total: int
    at: int


class _Layout(NamedTuple):
    """How one byte order and variant writes its numbers."""

    order: str
    head: struct.Struct
    entries: struct.Struct
    entry: struct.Struct
    offset: struct.Struct


def _layout(order: str, *, big: bool) -> _Layout:
    texts = ("8xQ", "Q", "HHQ8x", "Q") if big else ("4xI", "H", "HHI4x", "I")
    head, entries, entry, offset = (struct.Struct(order + text) for text in texts)
    return _Layout(order, head, entries, entry, offset)


_LAYOUTS = {
    b"II*\0": _layout("<", big=False),
    b"MM\0*": _layout(">", big=False),
    b"II+\0": _layout("<", big=True),
    b"MM\0+": _layout(">", big=True),
}


def parse(data: Buffer) -> ImageHeader:
    """The header of a TIFF's first image; raises BadSampleError. Bytes 0 to 3 are known to be a TIFF's."""
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
    return ImageHeader("tiff", height, width, components, 0, _orientation(data, layout, tags))


def exif_orientation(data: Buffer) -> int:
    """The orientation by its tag alone, without XMP, of a TIFF that `parse` takes."""
    layout = _LAYOUTS[bytes(data[:4])]
    tags = _directory(data, layout, unpack("tiff", layout.head, data, 0)[0])
    tags.pop(_XMP, None)
    return _orientation(data, layout, tags)


def frames(data: Buffer) -> int:
    """Directories in the chain, which may be a ring."""
    layout = _LAYOUTS[bytes(data[:4])]
    at, seen = int(unpack("tiff", layout.head, data, 0)[0]), set[int]()
    while at and at not in seen and len(seen) < _MAX_ENTRIES and at + layout.entries.size <= len(data):
        seen.add(at)
        entries = int(unpack("tiff", layout.entries, data, at)[0])
        following = at + layout.entries.size + entries * layout.entry.size
        if following + layout.offset.size > len(data):
            break
        at = int(layout.offset.unpack_from(data, following)[0])
    return len(seen)


def _directory(data: Buffer, layout: _Layout, at: int) -> dict[int, _Values]:
    """The values by tag of the directory at byte `at`; of a repeated tag, the first, as libtiff has it."""
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


def _orientation(data: Buffer, layout: _Layout, tags: dict[int, _Values]) -> int:
    """What the directory says, any type of number, or else the XMP in it."""
    told, xmp = tags.get(_ORIENTATION), tags.get(_XMP)
    if told is not None and told.total:
        value = number(layout.order, told.kind, data, told.at)
        return int(value) if value in range(1, 9) else UPRIGHT
    return (xmp is not None and xmp_orientation(data, xmp.at, xmp.at + xmp.total)) or UPRIGHT


def _check_pixels(data: Buffer, layout: _Layout, tags: dict[int, _Values], at: int) -> None:
    """Raise BadSampleError where a strip or tile of the directory at byte `at` lies beyond the end."""
    offsets_tag, lengths_tag = _TILES if _TILES[0] in tags else _STRIPS
    offsets = _numbers(data, layout, tags.get(offsets_tag))
    lengths = _numbers(data, layout, tags.get(lengths_tag))
    if not offsets:
        raise bad("tiff", at, "StripOffsets or TileOffsets", "neither")
    # Old writers leave out the lengths of uncompressed strips: then the offsets are all there is to check.
    end = max(map(add, offsets, lengths)) if lengths else max(offsets) + 1
    if end > len(data):
        raise truncated("tiff", at, f"strips or tiles up to byte {end}", data)
