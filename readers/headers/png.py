"""The header of a PNG: IHDR, the orientation in eXIf or a text, and that the chunks lead to IEND.

    0    8 bytes  89 50 4E 47 0D 0A 1A 0A
    8    chunks   uint32 n, 4 bytes type, n bytes, uint32 CRC of type and bytes
    IHDR          uint32 width, uint32 height, uint8 bits, uint8 colour type, 3 bytes
    tEXt          keyword, 0, text
    zTXt          keyword, 0, uint8 0 (deflate), text
    iTXt          keyword, 0, uint8 compressed, uint8 0, language, 0, keyword translated, 0, text in UTF-8

Source: W3C PNG (third edition), 5 and 11. Big-endian. Components are the channels of the colour type: grey 1,
RGB 3, palette 1, grey with alpha 2, RGB with alpha 4; transparency by tRNS adds none. Only IHDR's CRC is
checked. Bytes after IEND are legal.

The orientation is that of eXIf, or else of the text "Raw profile type exif" (three lines, then EXIF in hexadecimal:
ImageMagick's), or else of XMP in the text "XML:com.adobe.xmp"; of several, the last one counts, as in Pillow.
"""

from __future__ import annotations

import struct
import zlib

from readers.headers.exif import UPRIGHT, orientation, xmp_orientation
from readers.headers.header import Buffer, ImageHeader, bad, check_size, truncated, unpack

__all__ = ["exif_orientation", "frames", "parse"]

_COMPONENTS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# A million of 8 kB, the smallest IDAT in common use, are 8 GB.
_MAX_CHUNKS = 1 << 20
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_EXIF, _RAW_EXIF, _XMP = b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp"
_KEYWORDS = (_EXIF, _RAW_EXIF, _XMP)
_LONGEST_KEYWORD = 80
_MAX_TEXT_BYTES = 1 << 20  # Pillow's limit, for which it refuses the image

_FIRST_CHUNK = struct.Struct(">I4sIIBB3xI")
_CHUNK = struct.Struct(">I4s")
_FRAMES = struct.Struct(">I")
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


def exif_orientation(data: Buffer) -> int:
    """The orientation by eXIf alone, without texts, of a PNG that `parse` takes."""
    at = 8 + _FIRST_CHUNK.size
    rotated = UPRIGHT
    while True:
        length, kind = _CHUNK.unpack_from(data, at)
        if kind == b"eXIf":
            rotated = orientation(data, at + _CHUNK.size, at + _CHUNK.size + length) or UPRIGHT
        elif kind == b"IEND":
            return rotated
        at += _CHUNK.size + length + _CRC_BYTES


def frames(data: Buffer) -> int:
    """What acTL says, which comes before the pixels (W3C PNG, third edition, 11.3.6.1); 1 without it."""
    at = 8 + _FIRST_CHUNK.size
    for _ in range(_MAX_CHUNKS):
        length, kind = unpack("png", _CHUNK, data, at)
        if kind == b"acTL":
            return int(unpack("png", _FRAMES, data, at + _CHUNK.size)[0])
        if kind == b"IDAT":
            break
        at += _CHUNK.size + length + _CRC_BYTES
    return 1


def _walk(data: Buffer) -> int:
    """Follow the chunks after IHDR to the end of IEND; the orientation. eXIf and texts may come after the pixels."""
    at = 8 + _FIRST_CHUNK.size
    pixels = False
    told: dict[bytes, tuple[bytes, int, int]] = {}
    for _ in range(_MAX_CHUNKS):
        length, kind = unpack("png", _CHUNK, data, at)
        start = at + _CHUNK.size
        after = start + length + _CRC_BYTES
        if after > len(data):
            raise truncated("png", at, f"chunk {kind!r} of {length} bytes", data)
        if kind == b"IDAT":
            pixels = True
        elif kind == b"eXIf":
            told[_EXIF] = kind, start, start + length
        elif kind in _TEXTS:
            keyword = bytes(data[start : start + min(length, _LONGEST_KEYWORD)]).partition(b"\0")[0]
            if keyword in _KEYWORDS:
                told[keyword] = kind, start + len(keyword) + 1, start + length
        elif kind == b"IEND":
            if not pixels:
                raise bad("png", at, "a chunk IDAT before IEND", "none")
            return _orientation(data, told) if told else UPRIGHT
        at = after
    raise bad("png", at, f"a chunk IEND within {_MAX_CHUNKS} chunks", "more chunks")


def _orientation(data: Buffer, told: dict[bytes, tuple[bytes, int, int]]) -> int:
    """What the chunks say that were found by keyword: (type, first byte of the contents, byte after them)."""
    rotated = 0
    if _EXIF in told:
        rotated = orientation(data, *told[_EXIF][1:])
    elif _RAW_EXIF in told:
        blob = _unhexed(_text(data, *told[_RAW_EXIF]))
        rotated = orientation(blob, 0, len(blob))
    if not rotated and _XMP in told:
        rotated = xmp_orientation(_text(data, *told[_XMP]))
    return rotated or UPRIGHT


def _text(data: Buffer, kind: bytes, start: int, stop: int) -> bytes:
    """The text of a chunk of this type, from the byte after its keyword on; empty where it is damaged or a bomb."""
    text = bytes(data[start:stop])
    packed = kind == b"zTXt"
    if packed:
        text = text[1:]
    elif kind == b"iTXt":
        packed, text = text[:1] != b"\0", text[2:].split(b"\0", 2)[-1]
    if not packed:
        return text
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(text, _MAX_TEXT_BYTES)
    except zlib.error:
        return b""
    return b"" if unpacking.unconsumed_tail else text


def _unhexed(text: bytes) -> bytes:
    try:
        return bytes.fromhex("".join(text.decode("latin-1").split("\n")[3:]))
    except ValueError:
        return b""
