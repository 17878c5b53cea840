"""Headers of every format: compared with Pillow, on handmade files that Pillow does not write, and on damaged files.

Damage may only end in BadSampleError or, where the file stays well-formed, in an ImageHeader.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_cases import chunk, encoded, exif_blob, outcome, refusal, with_segments, xmp
from PIL import Image, features

from cache.errors import BadSampleError
from packer.conversion.images import check_image
from readers import headers
from readers.headers import MEDIA, SUFFIX, parse_header, sniff
from readers.headers.formats import orientation

WIDTH, HEIGHT = 13, 7


def picture(mode: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    if mode.startswith(("I;", "F")):
        return Image.new(mode, size, 7)
    red = Image.linear_gradient("L").resize(size)
    image = Image.merge("RGB", (red, red.transpose(Image.Transpose.ROTATE_180), red.point(lambda v: v ^ 0x55)))
    if mode.endswith("A"):
        image.putalpha(red)
    return image.convert(mode)


def encode(format: str, mode: str = "RGB", orientation: int = 1, **options: Any) -> bytes:
    return encoded(picture(mode), format, orientation, **options)


MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("1", "L", "P"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "I;16", "I;16B", "F", "P", "RGB", "RGBA", "CMYK"),
}
OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "RGB", {"restart_marker_blocks": 1}),
    ("JPEG", "RGB", {"comment": b"\xff\xd9", "icc_profile": b"p" * 70000}),
    ("PNG", "P", {"transparency": 0}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("WEBP", "RGB", {"icc_profile": b"odd", "xmp": b"<x/>!"}),
    ("GIF", "P", {"comment": b";" * 300, "transparency": 0}),
    ("TIFF", "RGB", {"strip_size": WIDTH * 3}),
    ("TIFF", "RGB", {"big_tiff": True}),
    *((format, "RGB", {"exif": exif_blob(1)}) for format in ("JPEG", "PNG", "WEBP", "TIFF")),
]
if features.check("libtiff"):
    OPTIONS += [("TIFF", "RGB", {"compression": name}) for name in ("tiff_lzw", "jpeg")]
IMAGES = {
    f"{format} {mode} {str(options)[:40]}": (format.lower(), encode(format, mode, **options))
    for format, mode, options in [
        *((format, mode, dict[str, Any]()) for format, modes in MODES.items() for mode in modes),
        *OPTIONS,
    ]
}
SMALL = {media: encode(media.upper(), "P" if media == "gif" else "RGB") for media in MEDIA[1:7]}
MAGICS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"RIFF\x40\0\0\0WEBP",
    b"GIF89a",
    b"II*\0",
    b"MM\0+",
    b"\x89PXL\r\n\x1a\n",
    *(b"BM" + bytes(12) + struct.pack("<I", version) for version in (12, 40, 52, 56, 64, 108, 124)),
)


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_every_image_against_pillow(image: tuple[str, bytes]) -> None:
    """Also for a view into a larger buffer; bytes after the end are legal."""
    media, data = image
    with Image.open(io.BytesIO(data)) as oracle:
        size, components = oracle.size, len(oracle.getbands())
        progressive = "progressive" in oracle.info
    process = 0 if media != "jpeg" else 0xC2 if progressive else 0xC0
    expected = (media, HEIGHT, WIDTH, components, process, 1)
    assert sniff(data) == media and size == (WIDTH, HEIGHT) and parse_header(data) == expected
    view = memoryview(b"\xff\xd9;" * 5 + data + data)[15 : 15 + len(data)]
    assert sniff(view) == media and parse_header(view) == expected and outcome(view[: len(data) // 2]) is None
    for garbage in (b"\0", b"\n", b"\xff", b"\xff\xd9", b"IEND", bytes(9001)):
        assert parse_header(data + garbage) == parse_header(memoryview(data + garbage)) == expected


@pytest.mark.parametrize("name", [name for name in IMAGES if len(IMAGES[name][1]) < 10000])
def test_truncation_at_every_byte(name: str) -> None:
    media, data = IMAGES[name]
    for stop in range(len(data)):
        assert outcome(data[:stop]) is None, f"accepted the first {stop} of {len(data)} bytes of a {media}"


def test_a_cut_names_the_end_and_is_accepted_after_the_first_image() -> None:
    for data in SMALL.values():
        assert f"the end at byte {len(data) - 1} (truncated)" in refusal(data[:-1])
    buffer = io.BytesIO()
    picture("L").save(buffer, "TIFF", save_all=True, append_images=[picture("L")])
    pages = buffer.getvalue()
    assert parse_header(pages[:-1]) == parse_header(encode("TIFF", "L"))
    two = SMALL["jpeg"] + encode("JPEG", "L")
    assert parse_header(two[:-1]) == parse_header(SMALL["jpeg"])


@given(media=st.sampled_from(sorted(SMALL)), place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_flipped_byte(media: str, place: float, value: int) -> None:
    data = bytearray(SMALL[media])
    data[int(place * len(data))] ^= value
    assert outcome(bytes(data)) == outcome(memoryview(data))


ORDINARY = [
    *(encode("JPEG", mode, **options) for mode in ("L", "RGB", "CMYK") for options in ({}, {"progressive": True})),
    *(encode("JPEG", orientation=n) for n in (1, 6)),
    *(with_segments(SMALL["jpeg"], b"http://ns.adobe.com/xap/1.0/\0" + xmp(n), b"Exif\0\0" + blob)
      for n in (3, 9) for blob in (exif_blob(8), exif_blob(5, order=">"), b"damaged", b"")),
    with_segments(SMALL["jpeg"], b"any", marker=0xFE),
]  # fmt: skip


@given(
    source=st.sampled_from(ORDINARY),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3),
    cut=st.floats(0.5, 1),
)
def test_the_compiled_parser_agrees_with_python(source: bytes, changes: list[tuple[float, int]], cut: float) -> None:
    """Unusual and damaged headers are left to Python: the header, the remarks and the errors are the same."""
    codec = pytest.importorskip("readers.coefficients.native")
    assert codec.read_jpeg_facts(source) is not None
    data = bytearray(source[: math.ceil(cut * len(source))])
    for place, value in changes:
        data[int(place**3 * len(data))] = value  # most of the flips in the header

    def checked(decode: str) -> Any:
        try:
            return check_image(memoryview(data), decode)
        except BadSampleError as error:
            return str(error)

    compiled = [checked(decode) for decode in ("none", "RGB", "unchanged")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packer.conversion.images.codec_if_built", lambda: None)
        assert compiled == [checked(decode) for decode in ("none", "RGB", "unchanged")]


@pytest.mark.parametrize("media", SMALL)
def test_extreme_bytes_in_every_header_position(media: str) -> None:
    for value in (0x00, 0x7F, 0xFF):
        for at in range(min(400, len(SMALL[media]))):
            data = bytearray(SMALL[media])
            data[at : at + 4] = bytes([value]) * len(data[at : at + 4])
            outcome(bytes(data))


@given(magic=st.sampled_from((b"", *MAGICS)), tail=st.binary(max_size=300))
def test_random_bytes(magic: bytes, tail: bytes) -> None:
    assert outcome(magic + tail) == outcome(memoryview(magic + tail))


@given(blob=st.binary(max_size=120), start=st.integers(0, 130), stop=st.integers(0, 130))
def test_orientation_of_any_bytes(blob: bytes, start: int, stop: int) -> None:
    for data in (blob, b"II*\0\x08\0\0\0" + blob, b"MM\0*" + blob):
        assert 0 <= orientation(data, start, stop) <= 8
        assert orientation(data, 0, stop) == orientation(memoryview(data), 0, stop)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\xff\x4f\xff\x51\0\x2f", "JPEG 2000"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "camera raw"),
        (b"P5\n# made by hand\n12 8\n255\n", "Netpbm"),
        (b"8BPS\0\1", "Photoshop"),
        (bytes(128) + b"DICM\2\0", "DICOM"),
        (b"\0\0\1\0\1\0\x20\x20\0\0\1\0", "icon"),
        (b'<?xml version="1.0"?>\n<svg xmlns="x">', "SVG"),
    ],
)
def test_images_of_other_formats_are_named(data: bytes, name: str) -> None:
    assert sniff(data) == ""
    assert refusal(data).startswith(f"image, byte 0: found {name}, an unsupported image format; ")


@pytest.mark.parametrize(
    "data", [b"P5 is a class of ships, 12 of them", b"\0\0\0\x18ftypisom\0\0\0\0mp41", b"<html>", b"\0\0\1\0", b""]
)
def test_other_bytes_are_not_taken_for_foreign_images(data: bytes) -> None:
    assert headers.foreign_medium(data) == headers.foreign_medium(memoryview(data)) == ""


def test_the_codes_of_media_are_frozen() -> None:
    """Columns of an index store the position in MEDIA; SUFFIX names the members of archives."""
    files = ("jpeg", "png", "webp", "gif", "bmp", "tiff"), ("avif", "heif", "jxl")
    assert ("", *files[0], "pixels", "coefficients", *files[1]) == MEDIA
    assert tuple(SUFFIX) == files[0] + files[1]
    assert [*SUFFIX.values()] == ["jpg", "png", "webp", "gif", "bmp", "tif", "avif", "heic", "jxl"]


def test_decoded_pixels_are_refused_as_files() -> None:
    data = b"\x89PXL\r\n\x1a\n" + struct.pack("<II", HEIGHT, WIDTH) + picture("RGB").tobytes()
    for view in (data, memoryview(b"xyz" + data)[3:]):
        assert headers.parse_any(view) == ("pixels", HEIGHT, WIDTH, 3, 0, 1)
        assert sniff(view) == "" and "expected the magic of jpeg" in refusal(view)
    for cut in range(len(data)):
        with pytest.raises(BadSampleError):
            headers.parse_any(data[:cut])
    assert headers.parse_any(SMALL["png"]) == parse_header(SMALL["png"])


@pytest.mark.parametrize(
    ("data", "description"),
    [
        (b"", "no bytes"),
        (b"\xff", "ff"),
        (b"\xff\xd8", "ff d8"),
        (b"RIFF\x08\0\0\0WAVE", "52 49 46 46 08 00 00 00"),
        (b"BMW M3 Coupe, a caption of a car", "42 4d 57 20 4d 33 20 43"),
    ],
)
def test_data_without_an_image(data: bytes, description: str) -> None:
    assert sniff(data) == sniff(memoryview(data)) == ""
    assert refusal(data) == f"image, byte 0: expected the magic of {', '.join(SUFFIX)}, found {description}"


# --- orientation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_invalid_orientation_is_ignored(format: str) -> None:
    assert {parse_header(encode(format, orientation=value)).orientation for value in (0, 9, 65535)} == {1}


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_of_a_blob(order: str) -> None:
    """The number type of the entry, and every cut; `test_unusual_images` compares with Pillow."""
    blob = exif_blob(6, order=order)
    assert orientation(blob, 0, 99) == orientation(b"..Exif\0\0" + blob, 2, 99) == 6
    many = blob[:8] + struct.pack(order + "H", 60000) + blob[10:]
    assert orientation(many, 0, 99) == 6
    assert orientation(exif_blob(8, 4, order=order), 0, 99) == 8
    assert orientation(exif_blob(0x10006, 4, order=order), 0, 99) == orientation(exif_blob(6, 2), 0, 99) == 1
    assert [orientation(blob, 0, stop) for stop in range(22)] == [0, *[1] * 7, *[0] * 14]


def test_animations_have_the_size_of_their_canvas() -> None:
    frames = [picture("RGB", (WIDTH, HEIGHT)), picture("L", (WIDTH, HEIGHT)).convert("RGB")]
    frames[1].paste(frames[0].crop((0, 0, 5, 3)), (2, 2))
    for format, components in (("GIF", 1), ("WEBP", 3)):
        buffer = io.BytesIO()
        frames[0].save(buffer, format, save_all=True, append_images=frames[1:], duration=50)
        header = parse_header(buffer.getvalue())
        assert header[1:4] == (HEIGHT, WIDTH, components)


# Handmade files that Pillow does not write, and invalid ones.


# --- JPEG ------------------------------------------------------------------------------------------------


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


# --- PNG -------------------------------------------------------------------------------------------------


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


def test_segments_and_chunks_are_capped() -> None:
    for many in (segment(0xE0, b""), b"\xff\xd0"):
        assert "expected a scan (SOS) within 65536 segments" in refusal(jpeg(many * 65537, SCAN))
    assert "expected a chunk IEND within 1048576 chunks" in refusal(png(bytes(12) * (1 << 20), IEND))


# --- WebP ------------------------------------------------------------------------------------------------


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


# --- GIF -------------------------------------------------------------------------------------------------


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
    assert parse_header(GIF + larger + b";")[:3] == ("gif", 7, 20), "the first image exceeds the canvas"


# --- BMP -------------------------------------------------------------------------------------------------


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


# --- TIFF ------------------------------------------------------------------------------------------------


def tiff(*entries: tuple[int, int, int, int], order: str = "<", big: bool = False, body: int = 64) -> bytes:
    """A directory of (tag, type, count, value), followed by the bytes `body`."""
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
