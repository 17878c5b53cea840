"""Parsers for the headers of PNG, WebP, GIF, JPEG and TIFF.

PNG, WebP and GIF are chains of chunks. Their parsers follow the chain to its end, which a truncated file lacks, without
reading the pixels. Bytes after the end are legal.

PNG (W3C, third edition, 5 and 11), big-endian:

    0    8 bytes  89 50 4E 47 0D 0A 1A 0A
    8    chunks   uint32 n, 4 bytes type, n bytes, uint32 CRC of type and bytes, the last one IEND
    IHDR          uint32 width, uint32 height, uint8 bits, uint8 colour type, 3 bytes
    tEXt          keyword, 0, text
    zTXt          keyword, 0, uint8 0 (deflate), text
    iTXt          keyword, 0, uint8 compressed, uint8 0, language, 0, keyword translated, 0, text in UTF-8

Components are the channels of the colour type: grey 1, RGB 3, palette 1, grey with alpha 2, RGB with alpha 4;
transparency by tRNS adds none. Only the CRC of IHDR is checked. The orientation is that of eXIf, or else of the text
"Raw profile type exif" (written by ImageMagick: three lines, then EXIF in hexadecimal), or else of XMP in the text
"XML:com.adobe.xmp"; the last of several counts, as in Pillow.

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

The size is that of the screen, or the extent of the first image if that is larger; components is 1, the palette index.
Any byte of the pixels may equal the trailer, so the parser follows all blocks, one step per 255 bytes.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from operator import add
from typing import NamedTuple

import numpy as np

from cache.errors import BadSampleError
from readers.headers.base import Buffer, ImageHeader, RefusedImageError, bad, check_size, truncated, unpack

PNG_BITS = 24  # position of the number of bits per value
_PNG_COMPONENTS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# A million chunks of 8 kB, the smallest common size of IDAT, are 8 GB.
_MAX_PNG_CHUNKS = 1 << 20
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_EXIF, _RAW_EXIF, _XMP = b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp"
_LONGEST_KEYWORD = 80
_MAX_TEXT_BYTES = 1 << 20  # Pillow refuses an image with a longer text
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
    """Parse the header of a PNG; the caller has checked its signature. Raises BadSampleError.

    exif_only: take the orientation only from eXIf, not from texts.
    """
    length, kind, width, height, _bits, colour, crc = unpack("png", _PNG_FIRST, data, 8)
    if kind != b"IHDR" or length != 13:
        raise bad("png", 8, "a chunk IHDR of 13 bytes", f"{kind!r} of {length}")
    actual = zlib.crc32(data[12:29])
    if actual != crc:
        raise bad("png", 29, f"the CRC of IHDR {actual:08X}", f"{crc:08X}")
    check_size("png", 16, height, width)
    if colour not in _PNG_COMPONENTS:
        raise bad("png", 25, "a colour type of 0, 2, 3, 4 or 6", colour)
    has_pixels = False
    metadata: dict[bytes, tuple[bytes, int, int]] = {}
    for kind, start, stop in _png_chunks(data):
        if kind == b"IDAT":
            has_pixels = True
        elif kind == b"IHDR":  # decoders differ in the IHDR that they use
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
    """The number of frames in acTL, which comes before the pixels (11.3.6.1); 1 without acTL."""
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
    """The orientation from the metadata chunks of a PNG.

    metadata: for each keyword, (type, first byte of the contents, byte after them) of its chunk.
    """
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
    """The text after the keyword of a chunk of this type; empty if it is damaged or a decompression bomb."""
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
    """Parse the header of a WebP; the caller has checked RIFF and WEBP. Raises BadSampleError.

    exif_only: take the orientation only from the EXIF chunk, not from XMP.
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
        by_kind: dict[bytes, tuple[int, int]] = {}
        for kind, start, stop in chunks:
            by_kind.setdefault(kind, (start, stop))
        if not by_kind.keys() & {b"VP8 ", b"VP8L", b"ANMF"}:
            raise bad("webp", end, "a chunk VP8, VP8L or ANMF after VP8X", "none")
        rotated = orientation(data, *by_kind[b"EXIF"]) if b"EXIF" in by_kind else 0
        if not rotated and b"XMP " in by_kind and not exif_only:
            rotated = xmp_orientation(data, *by_kind[b"XMP "])
    return ImageHeader("webp", height, width, components, 0, rotated or UPRIGHT)


def webp_frames(data: Buffer) -> int:
    """The number of frames of an animation; 0 for a still image."""
    end = min(len(data), 8 + unpack("webp", _RIFF, data, 0)[0])
    return sum(kind == b"ANMF" for kind, _, _ in _webp_chunks(data, end))


def _webp_chunks(data: Buffer, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, first byte of the contents, byte after them) of each chunk up to `end`, at least one."""
    at = _WEBP_FIRST
    while at < end or at == _WEBP_FIRST:
        kind, length = unpack("webp", _WEBP_CHUNK, data, at)
        start = at + _WEBP_CHUNK.size
        if start + length > end:
            raise bad("webp", at, f"chunk {kind!r} of {length} bytes", f"the end of RIFF at byte {end}")
        yield kind, start, start + length
        at = start + length + (length & 1)


def _lossy(data: Buffer, at: int) -> tuple[int, int, int]:
    """(height, width, components) in a VP8 chunk with contents from byte `at`."""
    tag, code, width, height = unpack("webp", _LOSSY, data, at)
    if tag & 1 or code != b"\x9d\x01\x2a":
        raise bad("webp", at, "a key frame, 9D012A", f"tag {tag:02X}, {code.hex().upper()}")
    return height & 0x3FFF, width & 0x3FFF, 3


def _lossless(data: Buffer, at: int) -> tuple[int, int, int]:
    """(height, width, components) in a VP8L chunk with contents from byte `at`."""
    signature, bits = unpack("webp", _LOSSLESS, data, at)
    if signature != 0x2F:
        raise bad("webp", at, "the lossless signature 2F", f"{signature:02X}")
    return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF), 4 if bits >> 28 & 1 else 3


def _extended(data: Buffer, at: int) -> tuple[int, int, int]:
    """(height, width, components) in a VP8X chunk with contents from byte `at`."""
    flags, low_width, high_width, low_height, high_height = unpack("webp", _EXTENDED, data, at)
    return 1 + (high_height << 16 | low_height), 1 + (high_width << 16 | low_width), 4 if flags & 0x10 else 3


_WEBP_SIZES = {b"VP8 ": _lossy, b"VP8L": _lossless, b"VP8X": _extended}


# GIF


def parse_gif(data: Buffer) -> ImageHeader:
    """Parse the header of a GIF; the caller has checked its signature. Raises BadSampleError."""
    width, height, _ = unpack("gif", _GIF_SCREEN, data, 0)
    first, *_ = _gif_images(data)
    left, top, columns, rows = unpack("gif", _GIF_PLACE, data, first)
    height, width = max(height, top + rows), max(width, left + columns)
    check_size("gif", 6, height, width)
    return ImageHeader("gif", height, width, 1, 0, 1)


def gif_frames(data: Buffer) -> int:
    """The number of images up to the trailer, or up to the first damage."""
    count = 0
    try:
        for _ in _gif_images(data):
            count += 1
    except BadSampleError:
        pass
    return count


def _gif_images(data: Buffer) -> Iterator[int]:
    """The start byte of each image up to the trailer, at least one. Raises BadSampleError."""
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
    """The byte after the sub-blocks from byte `at`. Raises IndexError if they do not end."""
    while length := data[at]:
        at += length + 1
    return at + 1


# The header of a JPEG: the segments up to the first scan; the parser also checks for an end marker.
#
#     FF D8                       start of image
#     FF xx, uint16 n, n-2 bytes  segments: APPn, DQT, DHT, ...; any number of FF may come before a marker
#     FF Cx, uint16 n, uint8 precision, uint16 height, uint16 width, uint8 components, 3 bytes each: the frame
#     FF DA, uint16 n, n-2 bytes  start of scan, then entropy-coded data, in which FF D9 cannot occur
#     FF D9                       end of image; bytes after it are legal and common
#
# Source: ITU-T T.81, annex B. Big-endian. Like libjpeg, the parser skips stray bytes between segments and takes no
# height from a DNL segment. Like Pillow, it joins several APP1 segments with EXIF, and takes the last of those with
# XMP.
#
# A progressive JPEG may have any number of scans, and a decoder visits all pixels in each scan, however short: a scan
# of a dozen bytes can cost as much as an image. So the number of scans is limited for large images, as the
# documentation of libjpeg-turbo recommends (doc/usage.txt, "-maxscans"). Encoders write about ten scans, and at most
# 20.


_SCAN = 0xFFDA
_APP1 = 0xFFE1
_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_SKIPPED = frozenset((0xFFC4, 0xFFCC, 0xFFDB, 0xFFDC, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0))) - {_APP1}
_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"
_PROGRESSIVE = 2  # the lower bits of the SOF markers of progressive images
_STANDALONE = frozenset((0xFF01, *range(0xFFD0, 0xFFD8)))
# Longer metadata is split into segments of 64 kB: 65,536 of them are 4 GB.
_MAX_SEGMENTS = 1 << 16
_SEARCH_BYTES = 4096
# The number of scans that an image of any size may have, and the number of pixels that the decoder may visit in an
# image with more scans: a few seconds of work.
_MOST_SCANS, _MOST_SCANNED_PIXELS = 32, 1 << 31
_LEAST_SCAN_BYTES = 10

_segment = struct.Struct(">HH").unpack_from
_frame = struct.Struct(">5xHHB").unpack_from
_next_marker = re.compile(rb"\xff[^\x00\xff]").search
_adobe = re.compile(rb"\xff\xee..Adobe.{6}(.)", re.DOTALL).search
_RGB = [ord(name) for name in "RGB"]


def parse_jpeg(data: Buffer, *, exif_only: bool = False) -> ImageHeader:
    """Parse the header of a JPEG; the caller has checked that it begins with FF D8 FF. Raises BadSampleError.

    exif_only: take the orientation only from EXIF, not from XMP, and do not check for an end marker.
    """
    return parse_frame(data, exif_only=exif_only)[0]


def parse_frame(data: Buffer, *, exif_only: bool = False) -> tuple[ImageHeader, int]:
    """As `parse_jpeg`, with the position of the height in the frame (uint16, big-endian)."""
    # Optimised, because it runs once per sample of a conversion: one loop, frequent segments first, local names, few
    # slices.
    segment = _segment
    skipped = _SKIPPED
    height = width = components = process = frame = 0
    exif: list[tuple[int, int]] = []
    xmp = (0, 0)
    at = 2
    try:
        for _ in range(_MAX_SEGMENTS):
            code, size = segment(data, at)
            if code in skipped:
                pass
            elif code == _SCAN:
                break
            elif code in _FRAMES:
                if process:
                    raise bad("jpeg", at, "one frame (SOF) before the scan", "a second one")
                height, width, components = _read_frame(data, at, size)
                process, frame = code & 0xFF, at + 5
            elif code == _APP1:
                if data[at + 4 : at + 10] == EXIF_PREFIX:
                    exif.append((at + 10, at + 2 + size))
                elif data[at + 4 : at + 4 + len(_XMP_PREFIX)] == _XMP_PREFIX:
                    xmp = (at + 4 + len(_XMP_PREFIX), at + 2 + size)
            else:
                at = _resume(data, at, code)
                continue
            if size < 2:
                raise bad("jpeg", at + 2, "a segment of 2 bytes or more", size)
            at += size + 2
        else:
            raise bad("jpeg", at, f"a scan (SOS) within {_MAX_SEGMENTS} segments", "more segments")
    except struct.error as error:
        raise truncated("jpeg", at, "a segment", data) from error
    if not process:
        raise bad("jpeg", at, "a frame (SOF) before the scan", "none")
    scan = at + 2 + size
    if process & 3 == _PROGRESSIVE or data[at + 4 : at + 5] != bytes((components,)):
        check_scans(data, at, height * width)
    if not exif_only and (data[-1] != 0xD9 or data[-2] != 0xFF or len(data) < scan + 3):
        _find_end(data, scan)
    rotated = 0
    if len(exif) == 1:
        rotated = orientation(data, *exif[0])
    elif exif:
        blob = b"".join(bytes(data[start:stop]) for start, stop in exif)
        rotated = orientation(blob, 0, len(blob))
    if not rotated and xmp[0] and not exif_only:
        rotated = xmp_orientation(data, *xmp)
    return ImageHeader("jpeg", height, width, components, process, rotated or UPRIGHT), frame


def header_of_facts(data: Buffer, facts: tuple[int, ...]) -> ImageHeader:
    """The header of a JPEG from the compiled `read_jpeg_facts`; the same as that of `parse_jpeg`."""
    height, width, components, process, exif, exif_stop, xmp, xmp_stop = facts
    rotated = orientation(data, exif, exif_stop) if exif else 0
    if not rotated and xmp:
        rotated = xmp_orientation(data, xmp, xmp_stop)
    return ImageHeader("jpeg", height, width, components, process, rotated or UPRIGHT)


def stores_rgb(data: Buffer, frame: int) -> bool:
    """Whether a JPEG stores RGB in place of YCbCr. frame: the position of the height, from `parse_frame`.

    The rule follows libjpeg (jdapimin.c): an Adobe segment with transform 0 or, without such a segment, the component
    names R, G and B. Unlike libjpeg, it ignores a JFIF segment, and the Adobe segment may be that of a thumbnail, so
    that the result is True for some JPEGs of YCbCr.
    """
    if data[frame + 4] != 3:
        return False
    adobe = _adobe(data, 2, frame + _SEARCH_BYTES)
    return adobe[1] == b"\0" if adobe is not None else [data[frame + at] for at in (5, 8, 11)] == _RGB


def check_scans(data: Buffer, start: int, pixels: int) -> None:
    """Raise RefusedImageError if the scans from byte `start`, of an image with so many pixels, take too long."""
    if (len(data) - start) // _LEAST_SCAN_BYTES * pixels <= _MOST_SCANNED_PIXELS:
        return  # too short for too many scans; the count takes about 2 % of the time of decoding
    codes = np.frombuffer(data, np.uint8)[start:]
    scans = np.count_nonzero((codes[1:] == _SCAN & 0xFF) & (codes[:-1] == 0xFF))
    if scans > _MOST_SCANS and scans * pixels > _MOST_SCANNED_PIXELS:
        limit = max(_MOST_SCANS, _MOST_SCANNED_PIXELS // pixels)
        most = f"at most {limit} scans of {pixels:,} pixels, which are decoded"
        raise RefusedImageError(str(bad("jpeg", start, most, f"{scans} scans")))


def _read_frame(data: Buffer, at: int, size: int) -> tuple[int, int, int]:
    """(height, width, components) of the frame segment at byte `at`. Raises BadSampleError, and struct.error if it is
    truncated."""
    height, width, components = _frame(data, at)
    if not 1 <= components <= 4:
        raise bad("jpeg", at + 9, "1 to 4 components", components)
    if size != 8 + 3 * components:
        raise bad("jpeg", at + 2, f"a frame of {8 + 3 * components} bytes", size)
    check_size("jpeg", at + 5, height, width)
    return height, width, components


def _resume(data: Buffer, at: int, code: int) -> int:
    """The byte after `at` at which to continue, if no known segment begins at `at`. Raises BadSampleError."""
    if code in _STANDALONE:
        return at + 2
    match = _next_marker(data, at)
    if match is None:
        raise truncated("jpeg", at, "a marker", data)
    if match.start() == at:
        raise bad("jpeg", at, "a segment that may come before the scan", f"marker {code:04X}")
    return match.start()


def _find_end(data: Buffer, scan: int) -> None:
    """Raise BadSampleError unless an end marker follows at least one byte of the scan, which begins at byte `scan`.

    Searches backwards in small copies, because a memoryview has no search and few bytes follow the marker.
    """
    stop = len(data)
    while stop >= scan + 3:
        start = max(scan + 1, stop - _SEARCH_BYTES)
        if bytes(data[start:stop]).rfind(b"\xff\xd9") >= 0:
            return
        stop = start + 1
    raise truncated("jpeg", scan, "a scan and an end marker (FFD9)", data)


# The header of a TIFF; and the orientation in EXIF, a small TIFF inside a JPEG, PNG or WebP, or in XMP.
#
#              TIFF                            BigTIFF
#     0        "II" or "MM": byte order        same
#     2        uint16 42                       uint16 43, uint16 8, uint16 0
#     then     uint32 offset of a directory    uint64
#     directory: number of entries, uint16     uint64
#     entry    uint16 tag, uint16 type,        same
#              uint32 number of values,        uint64,
#              4 bytes: the values, or their   8 bytes
#              offset if they need more
#     then     uint32 offset of the next       uint64
#
# Sources: Adobe TIFF 6.0, section 2; BigTIFF as in libtiff; CIPA DC-008 (Exif 2.32), 4.6; XMP specification part 1, 7.
#
# Components are SamplesPerPixel: 1 with a palette. Only the first image is examined. A file has the pixels, the
# directory and its values in any order, so truncation can affect any of them: all are checked, not only the values used
# here.
#
# An image with a damaged EXIF blob is accepted, as upright. Unusual blobs are interpreted as by Pillow's
# `exif_transpose`: the first value counts, of any numeric type; XMP counts if EXIF has no orientation entry.


# The prefix of the blob in a JPEG. Some encoders wrongly write it in PNG and WebP, too, and some write it twice.
EXIF_PREFIX = b"Exif\0\0"
UPRIGHT = 1

_BITS = 258
_WIDTH, _HEIGHT, _ORIENTATION, _SAMPLES, _TIFF_XMP = 256, 257, 274, 277, 700
# Tags of the offsets and of the lengths.
_STRIPS, _TILES = (273, 279), (324, 325)
_EXIF_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_TYPE_BYTES = {**_EXIF_TYPE_BYTES, 17: 8, 18: 8}
_UNSIGNED = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
_NUMBERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 13: "I", 16: "Q"}
_RATIONALS = {5: "II", 10: "ii"}
# Some encoders swap the bytes of the 42 only: the second pair.
_EXIF_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}
_in_xmp = re.compile(rb'tiff:Orientation(?:="|>)([0-9])').search
_MAX_ENTRIES = 0xFFFF
# 4 million tiles of 256 x 256 pixels are an image of half a million pixels per side.
_MAX_NUMBERS = 1 << 22


class _Values(NamedTuple):
    """`total` values of a TIFF type from byte `at`; `_directory` has checked that they are inside the file."""

    kind: int
    total: int
    at: int


class _Layout:
    """The number formats of one byte order, in TIFF or BigTIFF."""

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
    """Parse the header of the first image of a TIFF; the caller has checked bytes 0 to 3. Raises BadSampleError.

    exif_only: take the orientation only from its tag, not from XMP.
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
    orientation, xmp = tags.get(_ORIENTATION), tags.get(_TIFF_XMP)
    rotated = UPRIGHT
    if orientation is not None and orientation.total:
        rotated = _first_orientation(layout.order, orientation.kind, data, orientation.at)
    elif xmp is not None and not exif_only:
        rotated = xmp_orientation(data, xmp.at, xmp.at + xmp.total) or UPRIGHT
    return ImageHeader("tiff", height, width, components, 0, rotated)


def tiff_bits(data: Buffer) -> int:
    """Bits per value of the first image, the maximum over its channels; 1, the default of TIFF, without the tag.

    Raises BadSampleError."""
    layout = _LAYOUTS[bytes(data[:4])]
    tags = _directory(data, layout, unpack("tiff", layout.head, data, 0)[0])
    return max(_numbers(data, layout, tags.get(_BITS)), default=1)


def tiff_frames(data: Buffer) -> int:
    """The number of directories in the chain, each counted once if the chain is a ring."""
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
    """The EXIF orientation, 1..8, in the blob in bytes [start, stop) of `data`; 0 without one. Never raises."""
    for _ in range(2):
        if data[start : start + len(EXIF_PREFIX)] == EXIF_PREFIX:
            start += len(EXIF_PREFIX)
    stop = min(stop, len(data))
    if stop <= start:
        return 0
    order = _EXIF_ORDERS.get(bytes(data[start : start + 4]), "")
    if not order or stop < start + 8:
        return UPRIGHT  # as Pillow, which does not read XMP after an invalid blob
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
    """The orientation, 1..8, in an XMP packet in bytes [start, stop) of `data`; 0 without one."""
    match = _in_xmp(data, start, len(data) if stop is None else stop)
    return _valid(int(match[1])) if match else 0


def _first_orientation(order: str, kind: int, data: Buffer, at: int) -> int:
    """The orientation from the value at byte `at`. order: "<" or ">", the byte order. kind: its TIFF type."""
    if kind in _RATIONALS:
        above, below = struct.unpack_from(order + _RATIONALS[kind], data, at)
        return _valid(above / below if below else 0)
    return _valid(struct.unpack_from(order + _NUMBERS[kind], data, at)[0] if kind in _NUMBERS else 0)


def _valid(value: float) -> int:
    """The value as an orientation; upright for any number but 1 to 8."""
    return int(value) if value in range(1, 9) else UPRIGHT


def _directory(data: Buffer, layout: _Layout, at: int) -> dict[int, _Values]:
    """The values of the directory at byte `at`, by tag; the first of repeated tags counts, as in libtiff. Raises
    BadSampleError."""
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
    """The numbers of a tag; () without the tag, or if its type is not an unsigned integer. Raises BadSampleError."""
    if values is None or values.kind not in _UNSIGNED:
        return ()
    if values.total > _MAX_NUMBERS:
        raise bad("tiff", values.at, f"at most {_MAX_NUMBERS} strips or tiles", values.total)
    return struct.unpack_from(f"{layout.order}{values.total}{_UNSIGNED[values.kind]}", data, values.at)


def _number(data: Buffer, layout: _Layout, values: _Values | None, *, absent: int) -> int:
    """The first number of a tag; `absent` without one."""
    if values is None or values.total == 0:
        return absent
    return next(iter(_numbers(data, layout, values._replace(total=1))), absent)


def _check_pixels(data: Buffer, layout: _Layout, tags: dict[int, _Values], at: int) -> None:
    """Raise BadSampleError if a strip or tile of the directory at byte `at` ends after the end of the file."""
    offsets_tag, lengths_tag = _TILES if _TILES[0] in tags else _STRIPS
    offsets = _numbers(data, layout, tags.get(offsets_tag))
    lengths = _numbers(data, layout, tags.get(lengths_tag))
    if not offsets:
        raise bad("tiff", at, "StripOffsets or TileOffsets", "neither")
    # Old encoders omit the lengths of uncompressed strips; then only the offsets can be checked.
    end = max(map(add, offsets, lengths)) if lengths else max(offsets) + 1
    if end > len(data):
        raise truncated("tiff", at, f"strips or tiles up to byte {end}", data)
