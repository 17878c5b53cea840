"""Headers of handmade files that Pillow does not write, format by format, and of false ones."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable

import pytest
from image_cases import chunk, exif_blob, outcome, refusal
from PIL import Image

from readers.headers import parse_header

# JPEG


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">HH", 0xFF00 | marker, len(body) + 2) + body


def frame(height: int = 7, width: int = 13, components: int = 3, marker: int = 0xC0) -> bytes:
    return segment(marker, struct.pack(">BHHB", 8, height, width, components) + bytes(3 * components))


SCAN = segment(0xDA, bytes(10))
PIXELS = b"pixels"
END = b"\xff\xd9"


def jpeg(*parts: bytes) -> bytes:
    return b"\xff\xd8" + b"".join(parts)


@pytest.mark.parametrize("marker", [0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCF])
def test_process_of_a_jpeg(marker: int) -> None:
    assert parse_header(jpeg(frame(marker=marker), SCAN, PIXELS, END)) == ("jpeg", 7, 13, 3, marker, 1)


@pytest.mark.parametrize(
    "between", [b"\xff", b"\xff" * 99, b"\xff\xd0", b"\xff\x01", b"\0", b"stray bytes", b"\xff\0\0\xff"]
)
def test_bytes_between_segments_are_skipped(between: bytes) -> None:
    app = segment(0xE0, b"JFIF\0" + b"\xff\xda\xff\xd9")
    data = jpeg(app, between, frame(), between, SCAN, PIXELS, END)
    assert parse_header(data) == ("jpeg", 7, 13, 3, 0xC0, 1)
    assert parse_header(memoryview(data)) == parse_header(data)


def test_first_exif_segment_counts() -> None:
    apps = [segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0")]
    apps += [segment(0xE1, b"Exif\0\0" + exif_blob(value, order=">")) for value in (6, 8)]
    assert parse_header(jpeg(*apps, frame(), SCAN, PIXELS, END)).orientation == 6


def test_end_marker_of_a_thumbnail_is_not_the_end() -> None:
    thumbnail = jpeg(frame(2, 2), SCAN, PIXELS, END)
    data = jpeg(segment(0xE1, b"Exif\0\0" + exif_blob(3) + thumbnail), frame(), SCAN, PIXELS)
    assert refusal(data).endswith(f"found the end at byte {len(data)} (truncated)")
    assert parse_header(data + END) == ("jpeg", 7, 13, 3, 0xC0, 3)


def test_end_marker_across_search_windows() -> None:
    data = jpeg(frame(), SCAN, PIXELS)
    for length in (*range(4088, 4104), *range(8180, 8200)):
        assert parse_header(data + END + bytes(length)) == parse_header(memoryview(data + END))
        assert outcome(data + bytes(length)) is None


NO_SIZE = "expected a height and a width of 1 to 4294967295, found"
MISPLACED = "expected a segment that may come before the scan, found"
NO_END = "expected a scan and an end marker (FFD9), found the end at"
BODY = (SCAN, PIXELS, END)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (BODY, "jpeg image, byte 2: expected a frame (SOF) before the scan, found none"),
        ((frame(), frame(), *BODY), "byte 21: expected one frame (SOF) before the scan, found a second"),
        ((frame(0), *BODY), f"byte 7: {NO_SIZE} 0 and 13"),
        ((frame(width=0), *BODY), f"byte 7: {NO_SIZE} 7 and 0"),
        ((frame(components=0), *BODY), "byte 11: expected 1 to 4 components, found 0"),
        ((frame(components=5), *BODY), "byte 11: expected 1 to 4 components, found 5"),
        ((segment(0xC0, frame()[4:-1]), *BODY), "byte 4: expected a frame of 17 bytes, found 16"),
        ((b"\xff\xe0\0\1", frame(), *BODY), "byte 4: expected a segment of 2 bytes or more, found 1"),
        ((frame(), END), "byte 21: expected a segment, found the end at byte 23 (truncated)"),
        ((frame(), END, SCAN), f"byte 21: {MISPLACED} marker FFD9"),
        ((jpeg(frame(), *BODY),), f"byte 2: {MISPLACED}"),
        ((segment(0xF7, bytes(9)), SCAN), f"byte 2: {MISPLACED}"),
        ((frame(), SCAN, END), f"byte 35: {NO_END} byte 37"),
        ((frame(), SCAN, PIXELS), f"byte 35: {NO_END} byte 41"),
        ((frame(), b"stray"), "byte 21: expected a marker, found the end at byte 26 (truncated)"),
    ],
)
def test_bad_jpegs(parts: Iterable[bytes], message: str) -> None:
    assert message in refusal(jpeg(*parts))


def test_segments_are_capped() -> None:
    assert "expected a scan (SOS) within 65536 segments" in refusal(jpeg(segment(0xE0, b"") * 65537, SCAN))
    assert "expected a scan (SOS) within 65536 segments" in refusal(jpeg(b"\xff\xd0" * 65537, SCAN))


# PNG


def png(*chunks: bytes, width: int = 13, height: int = 7, colour: int = 2) -> bytes:
    first = chunk(b"IHDR", struct.pack(">IIBB3x", width, height, 8, colour))
    return b"\x89PNG\r\n\x1a\n" + first + b"".join(chunks)


DATA, IEND = chunk(b"IDAT", b"x"), chunk(b"IEND", b"")


@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
def test_exif_chunk_before_or_after_the_pixels(prefix: bytes) -> None:
    exif = chunk(b"eXIf", prefix + exif_blob(5, order=">"))
    assert parse_header(png(exif, DATA, IEND)) == ("png", 7, 13, 3, 0, 5)
    assert parse_header(png(DATA, DATA, exif, IEND)) == ("png", 7, 13, 3, 0, 5)


def test_bad_pngs() -> None:
    assert refusal(png(IEND)) == "png image, byte 33: expected a chunk IDAT before IEND, found none"
    assert "byte 16: expected a height and a width of 1 to" in refusal(png(DATA, IEND, width=0))
    assert "byte 16: expected a height and a width of 1 to" in refusal(png(DATA, IEND, height=0))
    assert "byte 25: expected a colour type of 0, 2, 3, 4 or 6, found 5" in refusal(png(DATA, IEND, colour=5))
    assert "byte 33: expected chunk b'IDAT' of 9 bytes, found the end at" in refusal(png(b"\0\0\0\x09IDATx"))
    assert "byte 8: expected a chunk IHDR of 13 bytes, found b'IDAT' of 1" in refusal(png()[:8] + DATA * 3)
    flipped = bytearray(png(DATA, IEND))
    flipped[19] ^= 1
    assert "byte 29: expected the CRC of IHDR" in refusal(bytes(flipped))


def test_chunks_are_capped() -> None:
    assert "expected a chunk IEND within 1048576 chunks" in refusal(png(bytes(12) * (1 << 20), IEND))


# WebP


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"WEBP"
    for kind, content in chunks:
        body += kind + struct.pack("<I", len(content)) + content + bytes(len(content) & 1)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def canvas(flags: int) -> tuple[bytes, bytes]:
    return b"VP8X", bytes((flags, 0, 0, 0, 12, 0, 1, 6, 0, 0))


def test_extended_webp() -> None:
    pixels = (b"VP8 ", bytes(10))
    exif = (b"EXIF", b"Exif\0\0" + exif_blob(7) + b".")
    assert parse_header(riff(canvas(0x08), (b"XMP ", b"odd"), pixels, exif)) == ("webp", 7, 65549, 3, 0, 7)
    assert parse_header(riff(canvas(0x10), exif, pixels)) == ("webp", 7, 65549, 4, 0, 7)
    assert refusal(riff(canvas(0), exif)).endswith("expected a chunk VP8, VP8L or ANMF after VP8X, found none")
    assert "byte 30: expected chunk b'ALPH' of 99 bytes, found the end of RIFF" in refusal(
        b"".join([riff(canvas(0))[:4], b"\x20\0\0\0", riff(canvas(0))[8:], b"ALPH\x63\0\0\0", bytes(200)])
    )


def test_bad_webps() -> None:
    key_frame = "byte 20: expected a key frame, 9D012A, found tag"
    assert f"{key_frame} 01, 9D012A" in refusal(riff((b"VP8 ", b"\1\0\0\x9d\x01\x2a\7\0\7\0")))
    assert f"{key_frame} 00, 9D012B" in refusal(riff((b"VP8 ", b"\0\0\0\x9d\x01\x2b\7\0\7\0")))
    assert "found 0 and 7" in refusal(riff((b"VP8 ", b"\0\0\0\x9d\x01\x2a\7\0\0\xc0")))
    assert "byte 20: expected the lossless signature 2F, found 30" in refusal(riff((b"VP8L", b"\x30" + bytes(9))))
    assert "byte 12: expected a chunk VP8, VP8L or VP8X, found b'ALPH'" in refusal(riff((b"ALPH", bytes(9))))


# GIF


GIF = b"GIF89a" + struct.pack("<HHB2x", 13, 7, 0)


def test_gif_blocks() -> None:
    frame_block = b"\x2c" + bytes(8) + b"\x80" + bytes(6) + b"\x02" + b"\x02;;" + b"\0"
    comment = b"\x21\xfe\x01;\0"
    assert parse_header(GIF + comment + frame_block + comment + b";") == ("gif", 7, 13, 1, 0, 1)
    assert refusal(GIF + comment + b";") == "gif image, byte 18: expected an image before the trailer, found none"
    assert "byte 13: expected a block 21, 2C or 3B, found 00" in refusal(GIF + b"\0" + frame_block + b";")
    assert "byte 13: expected blocks up to the trailer, found the end" in refusal(GIF + frame_block[:-3])
    nothing = GIF.replace(b"\x0d", b"\0") + frame_block + b";"
    assert "byte 6: expected a height and a width of 1 to" in refusal(nothing)
    larger = frame_block.replace(bytes(8), struct.pack("<4H", 3, 1, 17, 4), 1)
    assert parse_header(GIF + larger + b";")[:3] == ("gif", 7, 20), "the canvas holds the first image"


# BMP


def bmp(
    body: int,
    *,
    height: int = 7,
    bits: int = 32,
    compression: int = 0,
    sizes: tuple[int, int] = (0, 0),
    mask: int = 0,
) -> bytes:
    file_bytes, pixel_bytes = sizes
    info = struct.pack("<IiiHHII16x", 108, 13, height, 1, bits, compression, pixel_bytes)
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, mask)
    return b"BM" + struct.pack("<I4xI", file_bytes, 122) + info + masks + bytes(52) + bytes(body)


@pytest.mark.parametrize(("mask", "components"), [(0, 3), (0xFF000000, 4)])
def test_bitmap_alpha_mask_against_pillow(mask: int, components: int) -> None:
    data = bmp(13 * 7 * 4, compression=3, mask=mask)
    with Image.open(io.BytesIO(data)) as oracle:
        assert len(oracle.getbands()) == components
    assert parse_header(data) == ("bmp", 7, 13, components, 0, 1)


def test_bitmap_sizes() -> None:
    assert parse_header(bmp(13 * 7 * 4, height=-7)) == ("bmp", 7, 13, 3, 0, 1)
    assert parse_header(bmp(13 * 7 * 4, sizes=(0xFFFFFFFF, 0xFFFFFFFF))).components == 3
    assert "byte 122: expected pixels up to byte 486, found the end at byte 485" in refusal(bmp(13 * 7 * 4 - 1))
    assert "bmp image: not enough image data" in refusal(bmp(50, bits=8, compression=1))
    assert refusal(bmp(0, height=0)) and "Unsupported BMP pixel depth (7)" in refusal(bmp(999, bits=7))
    core = b"BM" + struct.pack("<I4xIIHHHH", 0, 26, 12, 13, 7, 1, 24)
    assert parse_header(core + bytes(40 * 7)) == ("bmp", 7, 13, 3, 0, 1)
    assert outcome(core + bytes(40 * 7 - 1)) is None


# TIFF


def tiff(*entries: tuple[int, int, int, int], order: str = "<", big: bool = False, body: int = 64) -> bytes:
    """A directory of (tag, type, count, value) and `body` bytes behind it."""
    mark = b"II" if order == "<" else b"MM"
    if big:
        head = mark + struct.pack(order + "HHHQQ", 43, 8, 0, 16, len(entries))
        rows = [struct.pack(order + "HHQQ", *entry) for entry in entries]
        return head + b"".join(rows) + bytes(8 + body)
    head = mark + struct.pack(order + "HIH", 42, 8, len(entries))
    # A SHORT is in the first two bytes of its field, in either byte order.
    rows = [struct.pack(order + ("HHIHxx" if entry[1] == 3 else "HHII"), *entry) for entry in entries]
    return head + b"".join(rows) + bytes(4 + body)


SIZE = ((256, 4, 1, 13), (257, 3, 1, 7))
STRIP = ((273, 4, 1, 8), (279, 4, 1, 64))


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_directories(order: str) -> None:
    extra = ((274, 3, 1, 6), (277, 3, 1, 4), (65000, 99, 1 << 30, 1 << 30))
    assert parse_header(tiff(*SIZE, *extra, *STRIP, order=order)) == ("tiff", 7, 13, 4, 0, 6)
    tile = ((324, 4, 1, 8), (325, 4, 1, 64))
    assert parse_header(tiff(*SIZE, *tile, order=order)) == ("tiff", 7, 13, 1, 0, 1)
    wide = [(tag, 16, total, value) for tag, _, total, value in (*SIZE, *STRIP)]
    assert parse_header(tiff(*wide, order=order, big=True)) == ("tiff", 7, 13, 1, 0, 1)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (STRIP, f"byte 8: {NO_SIZE} 0 and 0"),
        ((SIZE[0], (257, 4, 0, 7), *STRIP), f"byte 8: {NO_SIZE} 0"),
        ((SIZE[0], (257, 11, 1, 7), *STRIP), f"byte 8: {NO_SIZE} 0"),
        ((*SIZE, (277, 3, 1, 0), *STRIP), "byte 8: expected 1 to 255 samples per pixel, found 0"),
        ((*SIZE, (277, 3, 1, 256), *STRIP), "byte 8: expected 1 to 255 samples per pixel, found 256"),
        (SIZE, "byte 8: expected StripOffsets or TileOffsets, found neither"),
        ((*SIZE, (273, 4, 1, 999)), "byte 8: expected strips or tiles up to byte 1000, found the end at byte 114"),
        ((*SIZE, (273, 4, 1, 63), STRIP[1]), "byte 8: expected strips or tiles up to byte 127"),
        ((*SIZE, *STRIP, (270, 2, 9, 130)), "byte 58: expected tag 270 in bytes 130 to 139, found the end at byte 138"),
    ],
)
def test_bad_tiffs(entries: tuple[tuple[int, int, int, int], ...], message: str) -> None:
    assert message in refusal(tiff(*entries))


def test_huge_numbers_in_a_tiff() -> None:
    most = (1 << 64) - 1
    assert "tiff image, byte 16: expected at most 65535 entries" in refusal(
        b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, most)
    )
    assert f"byte {most}: expected 8 bytes, found the end at" in refusal(b"MM\0+\0\x08\0\0" + b"\xff" * 8)
    assert f"byte {0xFFFFFFFF}: expected 2 bytes, found the end at byte 8" in refusal(b"II*\0\xff\xff\xff\xff")
    wide = [(tag, 16, 1, value) for tag, _, _, value in (*SIZE, *STRIP)]
    assert "found 7 and 4294967296" in refusal(tiff((256, 16, 1, 1 << 32), *wide, big=True))
    assert "in bytes 8 to" in refusal(tiff(*wide, (270, 12, most, 8), big=True))
    strips = (273, 1, (1 << 22) + 1, 8)
    assert "expected at most 4194304 strips or tiles, found 4194305" in refusal(tiff(*SIZE, strips, body=1 << 23))
