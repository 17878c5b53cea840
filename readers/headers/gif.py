"""The header of a GIF: its screen descriptor, and that the blocks lead to the trailer.

    0    "GIF87a" or "GIF89a"
    6    uint16 width, uint16 height, uint8 flags (80: palette of 2 << (flags & 7) colours), 2 bytes, palette
    then blocks:  21, uint8 label, sub-blocks                                                   extension
                  2C, 8 bytes, uint8 flags as above, palette, uint8 code size, sub-blocks       image
                  3B                                                                            trailer
    sub-blocks    uint8 n, n bytes; n = 0 ends them

Source: GIF89a specification, 1990. Little-endian. The size is the canvas of the animation, or of the first image where
that is larger; components is 1, the palette index. Any byte of the pixels may equal the trailer, so all blocks are
followed, one step per 255 bytes. Bytes after the trailer are ignored.
"""

from __future__ import annotations

import struct

from readers.headers.header import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["frames", "parse"]

_SCREEN = struct.Struct("<6xHHB2x")
_PLACE = struct.Struct("<xHHHH")
_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B
_IMAGE_FLAGS = 9
_IMAGE_BYTES = 10


def parse(data: Buffer) -> ImageHeader:
    """The header of a GIF; raises BadSampleError. Its signature is known to be there."""
    width, height, flags = unpack("gif", _SCREEN, data, 0)
    at = _SCREEN.size + _palette_bytes(flags)
    pixels = False
    try:
        while (block := data[at]) != _TRAILER:
            if block == _EXTENSION:
                at = _skip(data, at + 2)
            elif block == _IMAGE:
                if not pixels:
                    height, width = _canvas(data, at, height, width)
                at = _skip(data, at + _IMAGE_BYTES + _palette_bytes(data[at + _IMAGE_FLAGS]) + 1)
                pixels = True
            else:
                raise bad("gif", at, "a block 21, 2C or 3B", f"{block:02X}")
    except IndexError as error:
        raise truncated("gif", at, "blocks up to the trailer", data) from error
    if not pixels:
        raise bad("gif", at, "an image before the trailer", "none")
    check_size("gif", 6, height, width)
    return ImageHeader("gif", height, width, 1, 0, 1)


def frames(data: Buffer) -> int:
    """Images up to the trailer, or to the damage."""
    _, _, flags = unpack("gif", _SCREEN, data, 0)
    at, count = _SCREEN.size + _palette_bytes(flags), 0
    try:
        while (block := data[at]) in (_EXTENSION, _IMAGE):
            if block == _IMAGE:
                count += 1
                at = _skip(data, at + _IMAGE_BYTES + _palette_bytes(data[at + _IMAGE_FLAGS]) + 1)
            else:
                at = _skip(data, at + 2)
    except IndexError:
        pass
    return count


def _canvas(data: Buffer, at: int, height: int, width: int) -> tuple[int, int]:
    """The size of the screen, enlarged to hold the image that begins at byte `at`."""
    left, top, columns, rows = unpack("gif", _PLACE, data, at)
    return max(height, top + rows), max(width, left + columns)


def _palette_bytes(flags: int) -> int:
    return 3 * (2 << (flags & 7)) if flags & 0x80 else 0


def _skip(data: Buffer, at: int) -> int:
    """The byte after the sub-blocks that begin at byte `at`; IndexError where they do not end."""
    while length := data[at]:
        at += length + 1
    return at + 1
