"""The headers of formats that are chains of chunks: PNG, WebP and GIF. The chain is followed to its end, which a
truncated file lacks; the pixels are not looked at. Bytes after the end are legal.

PNG (W3C, third edition, 5 and 11), big-endian:

    0    8 bytes  89 50 4E 47 0D 0A 1A 0A
    8    chunks   uint32 n, 4 bytes type, n bytes, uint32 CRC of type and bytes, the last one IEND
    IHDR          uint32 width, uint32 height, uint8 bits, uint8 colour type, 3 bytes
    tEXt          keyword, 0, text
    zTXt          keyword, 0, uint8 0 (deflate), text
    iTXt          keyword, 0, uint8 compressed, uint8 0, language, 0, keyword translated, 0, text in UTF-8

Components are the channels of the colour type: grey 1, RGB 3, palette 1, grey with alpha 2, RGB with alpha 4;
transparency by tRNS adds none. Only IHDR's CRC is checked. The orientation is that of eXIf, or else of the text "Raw
profile type exif" (three lines, then EXIF in hexadecimal: ImageMagick's), or else of XMP in the text
"XML:com.adobe.xmp"; of several, the last one counts, as in Pillow.

WebP (RFC 9649 and RFC 6386, 9.1), little-endian:

    0    "RIFF", uint32 n, "WEBP"      n bytes follow byte 8
    12   chunks                        4 bytes type, uint32 n, n bytes, one more if n is odd
    "VP8 "  3 bytes tag (bit 0 clear: key frame), 9D 01 2A, 14 bits width, 2 scale, 14 bits height, 2 scale
    "VP8L"  2F, 14 bits width - 1, 14 bits height - 1, 1 bit alpha is used, 3 bits version
    "VP8X"  uint8 flags (10: alpha), 3 bytes, uint24 width - 1, uint24 height - 1; pixels and EXIF follow

Components are 4 with alpha and 3 without. An animation has the size of its canvas.

GIF (GIF89a specification, 1990), little-endian:

    0    "GIF87a" or "GIF89a"
    6    uint16 width, uint16 height, uint8 flags (80: palette of 2 << (flags & 7) colours), 2 bytes, palette
    then blocks:  21, uint8 label, sub-blocks                                                   extension
                  2C, 8 bytes, uint8 flags as above, palette, uint8 code size, sub-blocks       image
                  3B                                                                            trailer
    sub-blocks    uint8 n, n bytes; n = 0 ends them

The size is that of the screen, or of the first image where that is larger; components is 1, the palette index. Any byte
of the pixels may equal the trailer, so all blocks are followed, one step per 255 bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from cache.errors import BadSampleError
from readers.headers.base import Buffer, ImageHeader, RefusedImageError, bad, check_size, truncated, unpack
from readers.headers.tiff import UPRIGHT, orientation, xmp_orientation

__all__ = ["PNG_BITS", "gif_frames", "parse_gif", "parse_png", "parse_webp", "png_frames", "webp_frames"]

PNG_BITS = 24  # the byte that says how many bits a value has
_PNG_COMPONENTS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# A million of 8 kB, the smallest IDAT in common use, are 8 GB.
_MAX_PNG_CHUNKS = 1 << 20
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_EXIF, _RAW_EXIF, _XMP = b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp"
_LONGEST_KEYWORD = 80
_MAX_TEXT_BYTES = 1 << 20  # Pillow's limit, above which it refuses the image
_PNG_FIRST = struct.Struct(">I4sIIBB3xI")
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_FRAMES = struct.Struct(">I")

_WEBP_FIRST = 12
_RIFF = struct.Struct("<4xI4x")
_WEBP_CHUNK = struct.Struct("<4sI")
_LOSSY = struct.Struct("<B2x3sHH")
_LOSSLESS = struct.Struct("<BI")
_EXTENDED = struct.Struct("<B3xHBHB")

_GIF_SCREEN = struct.Struct("<6xHHB2x")
_GIF_PLACE = struct.Struct("<xHHHH")
_GIF_EXTENSION, _GIF_IMAGE, _GIF_TRAILER = 0x21, 0x2C, 0x3B
_GIF_IMAGE_FLAGS, _GIF_IMAGE_BYTES = 9, 10


# PNG


def parse_png(data: Buffer, *, exif_only: bool = False) -> ImageHeader:
    """The header of a PNG, whose signature has been seen; raises BadSampleError.

    exif_only: take the orientation from eXIf alone, and from no text.
    """
    length, kind, width, height, _bits, colour, crc = unpack("png", _PNG_FIRST, data, 8)
    if kind != b"IHDR" or length != 13:
        raise bad("png", 8, "a chunk IHDR of 13 bytes", f"{kind!r} of {length}")
    found = zlib.crc32(data[12:29])
    if found != crc:
        raise bad("png", 29, f"the CRC of IHDR {found:08X}", f"{crc:08X}")
    check_size("png", 16, height, width)
    if colour not in _PNG_COMPONENTS:
        raise bad("png", 25, "a colour type of 0, 2, 3, 4 or 6", colour)
    has_pixels = False
    metadata: dict[bytes, tuple[bytes, int, int]] = {}
    for kind, start, stop in _png_chunks(data):
        if kind == b"IDAT":
            has_pixels = True
        elif kind == b"IHDR":  # decoders differ in which of the two sizes they take
            raise RefusedImageError(str(bad("png", start - _PNG_CHUNK.size, "one chunk IHDR", "a second one")))
        elif kind == b"eXIf":
            metadata[_EXIF] = kind, start, stop
        elif kind in _PNG_TEXTS and not exif_only:
            keyword = bytes(data[start : min(stop, start + _LONGEST_KEYWORD)]).partition(b"\0")[0]
            if keyword in (_EXIF, _RAW_EXIF, _XMP):
                metadata[keyword] = kind, start + len(keyword) + 1, stop
    if not has_pixels:
        raise bad("png", start - _PNG_CHUNK.size, "a chunk IDAT before IEND", "none")
    rotated = _png_orientation(data, metadata) if metadata else UPRIGHT
    return ImageHeader("png", height, width, _PNG_COMPONENTS[colour], 0, rotated)


def png_frames(data: Buffer) -> int:
    """What acTL says, which comes before the pixels (11.3.6.1); 1 without it."""
    for kind, start, _ in _png_chunks(data):
        if kind == b"acTL":
            return int(unpack("png", _PNG_FRAMES, data, start)[0])
        if kind == b"IDAT":
            break
    return 1


def _png_chunks(data: Buffer) -> Iterator[tuple[bytes, int, int]]:
    """(type, first byte of the contents, byte after them) of each chunk after IHDR up to IEND."""
    at, end, unpack_from = 8 + _PNG_FIRST.size, len(data), _PNG_CHUNK.unpack_from
    for _ in range(_MAX_PNG_CHUNKS):
        start = at + 8
        if start > end:
            raise truncated("png", at, "8 bytes", data)
        length, kind = unpack_from(data, at)
        if start + length + 4 > end:
            raise truncated("png", at, f"chunk {kind!r} of {length} bytes", data)
        yield kind, start, start + length
        if kind == b"IEND":
            return
        at = start + length + 4
    raise bad("png", at, f"a chunk IEND within {_MAX_PNG_CHUNKS} chunks", "more chunks")


def _png_orientation(data: Buffer, metadata: dict[bytes, tuple[bytes, int, int]]) -> int:
    """The orientation by chunks found by their keyword: (type, first byte of the contents, byte after them)."""
    rotated = 0
    if _EXIF in metadata:
        rotated = orientation(data, *metadata[_EXIF][1:])
    elif _RAW_EXIF in metadata:
        lines = _text(data, *metadata[_RAW_EXIF]).decode("latin-1").split("\n")
        try:
            blob = bytes.fromhex("".join(lines[3:]))
        except ValueError:
            blob = b""
        rotated = orientation(blob, 0, len(blob))
    if not rotated and _XMP in metadata:
        rotated = xmp_orientation(_text(data, *metadata[_XMP]))
    return rotated or UPRIGHT


def _text(data: Buffer, kind: bytes, start: int, stop: int) -> bytes:
    """The text of a chunk of this type after its keyword; empty where it is damaged or a decompression bomb."""
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


# WebP


def parse_webp(data: Buffer, *, exif_only: bool = False) -> ImageHeader:
    """The header of a WebP, whose RIFF and WEBP have been seen; raises BadSampleError.

    exif_only: take the orientation from the EXIF chunk alone, and not from XMP.
    """
    end = 8 + unpack("webp", _RIFF, data, 0)[0]
    if end > len(data):
        raise truncated("webp", 4, f"{end} bytes, as RIFF says", data)
    chunks = _webp_chunks(data, end)
    kind, start, _ = next(chunks)
    if kind not in _WEBP_SIZES:
        raise bad("webp", _WEBP_FIRST, "a chunk VP8, VP8L or VP8X", repr(kind))
    height, width, components = _WEBP_SIZES[kind](data, start)
    check_size("webp", start, height, width)
    rotated = UPRIGHT
    if kind == b"VP8X":
        found: dict[bytes, tuple[int, int]] = {}
        for kind, start, stop in chunks:
            found.setdefault(kind, (start, stop))
        if not found.keys() & {b"VP8 ", b"VP8L", b"ANMF"}:
            raise bad("webp", end, "a chunk VP8, VP8L or ANMF after VP8X", "none")
        rotated = orientation(data, *found[b"EXIF"]) if b"EXIF" in found else 0
        if not rotated and b"XMP " in found and not exif_only:
            rotated = xmp_orientation(data, *found[b"XMP "])
    return ImageHeader("webp", height, width, components, 0, rotated or UPRIGHT)


def webp_frames(data: Buffer) -> int:
    """Frames of an animation; 0 for a still image."""
    end = min(len(data), 8 + unpack("webp", _RIFF, data, 0)[0])
    return sum(kind == b"ANMF" for kind, _, _ in _webp_chunks(data, end))


def _webp_chunks(data: Buffer, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, first byte of the contents, byte after them) of one chunk or more up to `end`."""
    at = _WEBP_FIRST
    while at < end or at == _WEBP_FIRST:
        kind, length = unpack("webp", _WEBP_CHUNK, data, at)
        start = at + _WEBP_CHUNK.size
        if start + length > end:
            raise bad("webp", at, f"chunk {kind!r} of {length} bytes", f"the end of RIFF at byte {end}")
        yield kind, start, start + length
        at = start + length + (length & 1)


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


_WEBP_SIZES = {b"VP8 ": _lossy, b"VP8L": _lossless, b"VP8X": _extended}


# GIF


def parse_gif(data: Buffer) -> ImageHeader:
    """The header of a GIF, whose signature has been seen; raises BadSampleError."""
    width, height, _ = unpack("gif", _GIF_SCREEN, data, 0)
    first, *_ = _gif_images(data)
    left, top, columns, rows = unpack("gif", _GIF_PLACE, data, first)
    height, width = max(height, top + rows), max(width, left + columns)
    check_size("gif", 6, height, width)
    return ImageHeader("gif", height, width, 1, 0, 1)


def gif_frames(data: Buffer) -> int:
    """Images up to the trailer, or to the damage."""
    count = 0
    try:
        for _ in _gif_images(data):
            count += 1
    except BadSampleError:
        pass
    return count


def _gif_images(data: Buffer) -> Iterator[int]:
    """The byte at which each image begins, one or more, up to the trailer."""
    at = _GIF_SCREEN.size + _palette_bytes(unpack("gif", _GIF_SCREEN, data, 0)[2])
    has_images = False
    try:
        while (block := data[at]) != _GIF_TRAILER:
            if block == _GIF_EXTENSION:
                at = _after_sub_blocks(data, at + 2)
            elif block == _GIF_IMAGE:
                yield at
                has_images = True
                at = _after_sub_blocks(data, at + _GIF_IMAGE_BYTES + _palette_bytes(data[at + _GIF_IMAGE_FLAGS]) + 1)
            else:
                raise bad("gif", at, "a block 21, 2C or 3B", f"{block:02X}")
    except IndexError as error:
        raise truncated("gif", at, "blocks up to the trailer", data) from error
    if not has_images:
        raise bad("gif", at, "an image before the trailer", "none")


def _palette_bytes(flags: int) -> int:
    return 3 * (2 << (flags & 7)) if flags & 0x80 else 0


def _after_sub_blocks(data: Buffer, at: int) -> int:
    """The byte after the sub-blocks that begin at byte `at`; IndexError where they do not end."""
    while length := data[at]:
        at += length + 1
    return at + 1
