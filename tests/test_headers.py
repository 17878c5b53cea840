"""Headers of every format: against Pillow, on handmade files that Pillow does not write, and on damaged ones.

A fault may only end in BadSampleError or, where the damage leaves a well-formed file, in an ImageHeader.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_cases import encoded, exif_blob, outcome, refusal
from PIL import Image, features

from cache.errors import BadSampleError
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
SMALL = {media: encode(media.upper(), "P" if media == "gif" else "RGB") for media in MEDIA[1:-2]}
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


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    return IMAGES[request.param]


def test_every_image_against_pillow(image: tuple[str, bytes]) -> None:
    media, data = image
    with Image.open(io.BytesIO(data)) as oracle:
        size, components = oracle.size, len(oracle.getbands())
        progressive = "progressive" in oracle.info
    process = 0 if media != "jpeg" else 0xC2 if progressive else 0xC0
    assert sniff(data) == media and size == (WIDTH, HEIGHT)
    assert parse_header(data) == (media, HEIGHT, WIDTH, components, process, 1)


def test_a_view_into_a_larger_buffer(image: tuple[str, bytes]) -> None:
    _, data = image
    buffer = bytearray(b"\xff\xd9;" * 5 + data + data)
    view = memoryview(buffer)[15 : 15 + len(data)]
    assert sniff(view) == sniff(data)
    assert parse_header(view) == parse_header(data)
    assert outcome(view[: len(data) // 2]) is None


@pytest.mark.parametrize("garbage", [b"\0", b"\n", b"\xff", b"\xff\xd9", b"IEND", bytes(9001)])
def test_bytes_after_the_end_are_legal(image: tuple[str, bytes], garbage: bytes) -> None:
    _, data = image
    assert parse_header(data + garbage) == parse_header(data)
    assert parse_header(memoryview(data + garbage)) == parse_header(data)


@pytest.mark.parametrize("name", [name for name in IMAGES if len(IMAGES[name][1]) < 10000])
def test_cut_at_every_byte(name: str) -> None:
    media, data = IMAGES[name]
    for stop in range(len(data)):
        assert outcome(data[:stop]) is None, f"accepted the first {stop} of {len(data)} bytes of a {media}"


@pytest.mark.parametrize("media", SMALL)
def test_a_cut_names_the_end(media: str) -> None:
    data = SMALL[media]
    assert f"the end at byte {len(data) - 1} (truncated)" in refusal(data[:-1])


def test_a_cut_after_the_first_image_is_accepted() -> None:
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
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\xff\x0a\0\0", "JPEG XL"),
        (b"\0\0\0\x1cftypavif\0\0\0\0mif1miaf", "AVIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0avif", "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"P5\n# made by hand\n12 8\n255\n", "Netpbm"),
        (b"8BPS\0\1", "Photoshop"),
        (bytes(128) + b"DICM\2\0", "DICOM"),
        (b"\0\0\1\0\1\0\x20\x20\0\0\1\0", "icon"),
        (b'<?xml version="1.0"?>\n<svg xmlns="x">', "SVG"),
    ],
)
def test_images_of_other_formats_are_named(data: bytes, name: str) -> None:
    assert sniff(data) == ""
    assert refusal(data).startswith(f"image, byte 0: found {name}, an image format that is not read; ")


@pytest.mark.parametrize(
    "data", [b"P5 is a class of ships, 12 of them", b"\0\0\0\x18ftypisom\0\0\0\0mp41", b"<html>", b"\0\0\1\0", b""]
)
def test_other_bytes_are_not_taken_for_foreign_images(data: bytes) -> None:
    assert headers.foreign_medium(data) == headers.foreign_medium(memoryview(data)) == ""


def test_the_codes_of_media_are_frozen() -> None:
    """Columns of an index store the position in MEDIA; SUFFIX names the members of archives."""
    assert MEDIA == ("", "jpeg", "png", "webp", "gif", "bmp", "tiff", "pixels", "coefficients")
    assert tuple(SUFFIX) == MEDIA[1:-2] and [*SUFFIX.values()] == ["jpg", "png", "webp", "gif", "bmp", "tif"]


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
    ("data", "found"),
    [
        (b"", "no bytes"),
        (b"\xff", "ff"),
        (b"\xff\xd8", "ff d8"),
        (b"RIFF\x08\0\0\0WAVE", "52 49 46 46 08 00 00 00"),
        (b"BMW M3 Coupe, a caption of a car", "42 4d 57 20 4d 33 20 43"),
    ],
)
def test_no_image(data: bytes, found: str) -> None:
    assert sniff(data) == sniff(memoryview(data)) == ""
    assert refusal(data) == f"image, byte 0: expected the magic of jpeg, png, webp, gif, bmp, tiff, found {found}"


# Orientation


@pytest.mark.parametrize("value", [0, 9, 65535])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_invalid_orientation_is_none(format: str, value: int) -> None:
    assert parse_header(encode(format, orientation=value)).orientation == 1


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_of_a_blob(order: str) -> None:
    """Its type of number, and where it is cut; `test_unusual_images` compares with Pillow."""
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
