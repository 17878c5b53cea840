"""The header of a WebP: its first chunk, the orientation in its EXIF or XMP chunk, and that the RIFF size is there.

    0    "RIFF", uint32 n, "WEBP"      n bytes follow byte 8
    12   chunks                        4 bytes type, uint32 n, n bytes, one more if n is odd
    "VP8 "  3 bytes tag (bit 0 clear: key frame), 9D 01 2A, 14 bits width, 2 scale, 14 bits height, 2 scale
    "VP8L"  2F, 14 bits width - 1, 14 bits height - 1, 1 bit alpha is used, 3 bits version
    "VP8X"  uint8 flags (10: alpha), 3 bytes, uint24 width - 1, uint24 height - 1; pixels and EXIF follow

Sources: RFC 9649 and RFC 6386, 9.1. Little-endian. Components are 4 with alpha and 3 without. An animation
has the size of its canvas. Bytes after the RIFF size are legal.
"""

from __future__ import annotations

import struct

from readers.headers.exif import UPRIGHT, orientation, xmp_orientation
from readers.headers.header import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["exif_orientation", "frames", "parse"]

_FIRST = 12
_MAX_CHUNKS = 1 << 20

_RIFF = struct.Struct("<4xI4x")
_CHUNK = struct.Struct("<4sI")
_LOSSY = struct.Struct("<B2x3sHH")
_LOSSLESS = struct.Struct("<BI")
_EXTENDED = struct.Struct("<B3xHBHB")


def parse(data: Buffer) -> ImageHeader:
    """The header of a WebP; raises BadSampleError. RIFF and WEBP are known to be there."""
    end = 8 + unpack("webp", _RIFF, data, 0)[0]
    if end > len(data):
        raise truncated("webp", 4, f"{end} bytes, as RIFF says", data)
    kind, after = _chunk(data, _FIRST, end)
    if kind not in _SIZES:
        raise bad("webp", _FIRST, "a chunk VP8, VP8L or VP8X", repr(kind))
    start = _FIRST + _CHUNK.size
    height, width, components = _SIZES[kind](data, start)
    check_size("webp", start, height, width)
    rotated = _walk(data, after, end) if kind == b"VP8X" else 1
    return ImageHeader("webp", height, width, components, 0, rotated)


def exif_orientation(data: Buffer) -> int:
    """The orientation by the EXIF chunk alone, without XMP, of a WebP that `parse` takes."""
    end = 8 + unpack("webp", _RIFF, data, 0)[0]
    at = _FIRST
    while at < end:
        start = at
        kind, at = _chunk(data, at, end)
        if kind == b"EXIF":
            return orientation(data, start + _CHUNK.size, at) or UPRIGHT
    return UPRIGHT


def frames(data: Buffer) -> int:
    """Frames of an animation; 1 of a still image."""
    end = min(len(data), 8 + unpack("webp", _RIFF, data, 0)[0])
    at, count = _FIRST, 0
    while at < end:
        kind, at = _chunk(data, at, end)
        count += kind == b"ANMF"
    return max(1, count)


def _lossy(data: Buffer, at: int) -> tuple[int, int, int]:
    """Height, width and components of the chunk VP8 whose contents begin at byte `at`."""
    tag, code, width, height = unpack("webp", _LOSSY, data, at)
    if tag & 1 or code != b"\x9d\x01\x2a":
        raise bad("webp", at, "a key frame, 9D012A", f"tag {tag:02X}, {code.hex().upper()}")
    return height & 0x3FFF, width & 0x3FFF, 3


def _lossless(data: Buffer, at: int) -> tuple[int, int, int]:
    """Height, width and components of the chunk VP8L whose contents begin at byte `at`."""
    signature, bits = unpack("webp", _LOSSLESS, data, at)
    if signature != 0x2F:
        raise bad("webp", at, "the lossless signature 2F", f"{signature:02X}")
    return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF), 4 if bits >> 28 & 1 else 3


def _extended(data: Buffer, at: int) -> tuple[int, int, int]:
    """Height, width and components of the chunk VP8X whose contents begin at byte `at`."""
    flags, low_width, high_width, low_height, high_height = unpack("webp", _EXTENDED, data, at)
    return 1 + (high_height << 16 | low_height), 1 + (high_width << 16 | low_width), 4 if flags & 0x10 else 3


_SIZES = {b"VP8 ": _lossy, b"VP8L": _lossless, b"VP8X": _extended}


def _chunk(data: Buffer, at: int, end: int) -> tuple[bytes, int]:
    """Type of the chunk at byte `at`, and the byte after it, which must not lie beyond `end`."""
    kind, length = unpack("webp", _CHUNK, data, at)
    after = at + _CHUNK.size + length
    if after > end:
        raise bad("webp", at, f"chunk {kind!r} of {length} bytes", f"the end of RIFF at byte {end}")
    return kind, after + (length & 1)


def _walk(data: Buffer, at: int, end: int) -> int:
    """Follow the chunks after VP8X up to `end`; the orientation. Raises where there are no pixels."""
    pixels = False
    exif = xmp = (0, 0)
    for _ in range(_MAX_CHUNKS):
        if at >= end:
            break
        kind, after = _chunk(data, at, end)
        if kind in (b"VP8 ", b"VP8L", b"ANMF"):
            pixels = True
        elif kind == b"EXIF":
            exif = exif if exif[0] else (at + _CHUNK.size, after)
        elif kind == b"XMP ":
            xmp = xmp if xmp[0] else (at + _CHUNK.size, after)
        at = after
    if not pixels:
        raise bad("webp", at, "a chunk VP8, VP8L or ANMF after VP8X", "none")
    return (exif[0] and orientation(data, *exif)) or (xmp[0] and xmp_orientation(data, *xmp)) or UPRIGHT
