"""Unusual images: packer reads every image that Pillow reads, upright and with Pillow's pixels; images that would
silently be wrong are refused by name."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from image_cases import (
    XMP_PREFIX,
    chunk,
    encoded,
    exif_blob,
    picture,
    pillow_rgb,
    with_chunks,
    with_segments,
    xmp,
)
from PIL import Image

from cache.errors import BadSampleError
from packer.conversion.images import check_image
from readers.coefficients.encode import encode_strictly
from readers.coefficients.markers import Refused
from readers.decode import Region, Scratch, decode_image, decode_unchanged
from readers.decode.region import with_header
from readers.headers import parse_header, read_header
from readers.headers.pillow import missing_plugin, parse_decodable

JPEG = encoded(picture(48, 64), "JPEG", quality=90)


def patched(data: bytes, marker: bytes, at: int, *values: int) -> bytes:
    """A JPEG with other bytes in the segment that begins with `marker`, counted from the marker."""
    place = data.index(marker) + at
    return data[:place] + bytes(values) + data[place + len(values) :]


def before(data: bytes, marker: bytes, more: bytes) -> bytes:
    place = data.index(marker)
    return data[:place] + more + data[place:]


# Each of these stops simplejpeg, or our header parser.
JPEGS = {
    "stray bytes before the scan": before(JPEG, b"\xff\xda", b"\1\2\3"),
    "stray bytes before the tables": before(JPEG, b"\xff\xdb", b"stray"),
    "stray bytes before the end": before(JPEG, b"\xff\xd9", b"\0" * 5),
    "a colour profile whose parts do not fit": before(JPEG, b"\xff\xdb", b"\xff\xe2\0\x12ICC_PROFILE\0\3\2xx"),
    "4:1:0": patched(JPEG, b"\xff\xc0", 11, 0x42),
    "luma sampled as 3 x 1": patched(JPEG, b"\xff\xc0", 11, 0x31),
    "chroma sampled differently": patched(JPEG, b"\xff\xc0", 14, 0x21),
    "a second image behind the first": JPEG + JPEG,
    "damage in the pixels": patched(JPEG, b"\xff\xda", 300, 0x55, 0xAA, 0x12),
}


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_that_pillow_reads_has_its_pixels_whole_and_in_part(name: str) -> None:
    data, scratch = JPEGS[name], Scratch()
    expected = pillow_rgb(data)
    assert np.array_equal(decode_image(data, None, scratch, expected.shape[:2]), expected)  # type: ignore[arg-type]
    for region in (Region(0, 0, 8, 64), Region(16, 8, 16, 24), Region(40, 0, 8, 64)):
        top, left, height, width, *_ = region
        assert np.array_equal(decode_image(data, region, scratch), expected[top : top + height, left : left + width])
    if name in ("stray bytes before the scan", "4:1:0", "a colour profile whose parts do not fit"):
        with pytest.raises(ValueError):  # otherwise the test would prove nothing
            simplejpeg.decode_jpeg(data, "RGB", strict=False)


def test_an_image_on_which_libjpeg_fails_is_refused_and_returns_no_old_memory() -> None:
    """A progressive JPEG with a warning, followed by a scan that names missing tables."""
    data, scratch = encoded(picture(48, 64), "JPEG", progressive=True), Scratch()
    second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    data = data[:second] + b"\1\2\3" + patched(data[second:], b"\xff\xda", 6, 0x33)
    decode_image(JPEG, None, scratch)
    for region in (None, Region(0, 0, 8, 64)):
        with pytest.raises(BadSampleError, match="jpeg image: "):
            decode_image(data, region, scratch)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [*((4, bits, f"has {bits} bits a sample") for bits in (2, 12, 16)), (1, 0xC5, "SOF5"), (1, 0xCB, "SOF11")],
)
def test_a_jpeg_of_an_unsupported_coding_is_refused_by_name(at: int, value: int, message: str) -> None:
    data = patched(JPEG, b"\xff\xc0", at, value)
    with pytest.raises(OSError):
        pillow_rgb(data)
    for check in (decode_image, lambda image: check_image(image, "RGB")):
        with pytest.raises(BadSampleError, match=message) as caught:
            check(data)
        assert "0x" not in str(caught.value) and "BytesIO" not in str(caught.value), "an address of an object"


# --- depth ------------------------------------------------------------------------------------------------------
def grey16(height: int = 40, width: int = 50) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.random.default_rng(5).integers(0, 65536, (height, width), np.uint16)


def test_16_or_12_bit_grey_keeps_its_mean() -> None:
    values = grey16()
    swapped = Image.frombytes("I;16B", (50, 40), values.astype(">u2").tobytes())
    twelve = b"".join(struct.pack(">I", int(a >> 4) << 12 | int(b >> 4))[1:] for a, b in values.reshape(-1, 2))
    for data in (
        encoded(Image.fromarray(values), "PNG"),
        encoded(Image.fromarray(values), "TIFF"),
        encoded(swapped, "TIFF"),
        tiff({256: [50], 257: [40], 258: [12], 262: [1], 277: [1], 278: [40]}, [twelve]),
    ):
        pixels = decode_image(data)
        assert np.array_equal(pixels, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2))
        assert abs(float(pixels.mean()) - float(values.mean()) / 257) < 1


def test_images_without_an_rgb_form_are_refused_by_name() -> None:
    for dtype, kind in ((np.float32, "floating-point"), (np.int32, "integers of 32 bits")):
        data = encoded(Image.fromarray(grey16().astype(dtype)), "TIFF")
        with pytest.raises(BadSampleError, match=rf"tiff image: holds {kind}.* no 8-bit RGB form.*decode='unchanged'"):
            decode_image(data)
    lab = encoded(Image.frombytes("LAB", (50, 40), grey16(40, 75).tobytes()), "TIFF")
    assert np.array_equal(decode_image(lab), pillow_rgb(lab)), "CIELAB has an RGB form"


def test_a_bomb_is_refused_in_clear_words() -> None:
    """A PNG of a few bytes that claims 400 million pixels, and an image between our limit and Pillow's."""
    small = encoded(Image.new("L", (1, 1)), "PNG")
    for size, message in (((20_000, 20_000), "400000000|20000 x 20000 pixels"), ((15_000, 15_000), "225000000 pixels")):
        header = chunk(b"IHDR", struct.pack(">II5B", *size, 8, 0, 0, 0, 0))
        with pytest.raises(BadSampleError, match=message):
            decode_image(small[:8] + header + small[33:])


# --- orientation -------------------------------------------------------------------------------------------------
PNG = encoded(picture(20, 30), "PNG")


def jpeg_with(*segments: bytes) -> bytes:
    return with_segments(JPEG, *segments)


def png_with(*chunks: tuple[bytes, bytes], end: bool = False) -> bytes:
    return with_chunks(PNG, *(chunk(kind, content) for kind, content in chunks), at_the_end=end)


def raw_profile(blob: bytes) -> bytes:
    return b"\nexif\n%8d\n" % len(blob) + blob.hex().encode() + b"\n"


def turned(orientation: int) -> dict[str, bytes]:
    """Images that store their orientation, each in another of the possible places."""
    blob, packet, element = exif_blob(orientation), xmp(orientation), xmp(orientation, attribute=False)
    exif, raw, text = b"Exif\0\0" + blob, b"Raw profile type exif\0", b"XML:com.adobe.xmp\0\0\0\0\0"
    packed = b"XML:com.adobe.xmp\0\1\0en\0\0" + zlib.compress(packet)
    return {
        "jpeg, exif": jpeg_with(exif),
        "jpeg, exif in two parts": jpeg_with(exif[:20], b"Exif\0\0" + exif[20:]),
        "jpeg, xmp": jpeg_with(XMP_PREFIX + packet),
        "jpeg, xmp element": jpeg_with(XMP_PREFIX + element),
        "jpeg, last xmp": jpeg_with(XMP_PREFIX + xmp(3), XMP_PREFIX + packet),
        "jpeg, xmp and exif": jpeg_with(XMP_PREFIX + xmp(3), exif),
        "png, exif": png_with((b"eXIf", blob)),
        "png, raw profile": png_with((b"tEXt", raw + raw_profile(exif)), end=True),
        "png, packed raw profile": png_with((b"zTXt", raw + b"\0" + zlib.compress(raw_profile(blob)))),
        "png, xmp": png_with((b"iTXt", text + packet), end=True),
        "png, packed xmp": png_with((b"iTXt", packed)),
        "png, xmp element": png_with((b"iTXt", text + element)),
        "png, xmp and exif": png_with((b"eXIf", blob), (b"iTXt", text + xmp(3))),
        "webp, exif": encoded(picture(20, 30), "WEBP", lossless=True, exif=blob),
        "webp, xmp": encoded(picture(20, 30), "WEBP", lossless=True, xmp=packet),
        "tiff, exif": encoded(picture(20, 30), "TIFF", tiffinfo={0x0112: orientation}),
        "tiff, xmp": encoded(picture(20, 30), "TIFF", tiffinfo={700: packet}),
    }


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_in_the_index_equals_that_of_pillow(orientation: int) -> None:
    for place, data in turned(orientation).items():
        expected = pillow_rgb(data)
        assert read_header(data).orientation == orientation, place
        pixels = decode_image(data, None, None, expected.shape[:2])  # type: ignore[arg-type]
        assert np.array_equal(pixels, expected), place


def turned_by_pillow(data: bytes) -> tuple[int, int] | None:
    """The size to which Pillow rotates an image; None where it fails on the metadata."""
    try:
        return pillow_rgb(data).shape[:2]  # type: ignore[return-value]
    except Exception:
        return None


@given(
    orientation=st.integers(0, 9),
    kind=st.integers(0, 19),
    count=st.integers(0, 4),
    order=st.sampled_from("<>"),
    place=st.integers(0, 40),
    flip=st.integers(0, 255),
    packet=st.sampled_from((b"", xmp(6), xmp(8, attribute=False))),
)
def test_odd_and_damaged_exif_is_interpreted_as_by_pillow(
    orientation: int, kind: int, count: int, order: str, place: int, flip: int, packet: bytes
) -> None:
    blob = bytearray(exif_blob(orientation, kind, count, order))
    if place < len(blob):
        blob[place] ^= flip
    segments = [b"Exif\0\0" + bytes(blob), *([XMP_PREFIX + packet] if packet else [])]
    data = with_segments(JPEG, *segments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = turned_by_pillow(data)
        shape = decode_image(data).shape[:2]
    if size is not None:
        assert shape == size


# --- images that our parsers refuse ----------------------------------------------------------------------------------
def animation(kind: str, count: int = 3) -> bytes:
    first, *others = (picture(20, 30).rotate(9 * number) for number in range(count))
    return encoded(first, kind, save_all=True, append_images=others)


def tiff_with_a_lost_tag() -> bytes:
    """A TIFF whose software tag points beyond the end of the file."""
    data = bytearray(encoded(picture(20, 30), "TIFF", software="a name that is long enough"))
    entry = data.index(struct.pack("<HH", 305, 2))
    struct.pack_into("<I", data, entry + 8, 1 << 24)
    return bytes(data)


def gif_with_a_small_screen() -> bytes:
    """A GIF that is as large as its first image."""
    data = bytearray(encoded(picture(20, 30), "GIF"))
    struct.pack_into("<HH", data, 6, 10, 10)
    return bytes(data)


DAMAGED = {
    "gif that claims another size": gif_with_a_small_screen(),
    "png without IEND": PNG[:-12],
    "gif without its trailer": encoded(picture(20, 30), "GIF")[:-1],
    "gif cut in its second frame": animation("GIF")[:-90],
    "bmp of two planes": patched(encoded(picture(20, 30), "BMP"), b"BM", 26, 2),
    "tiff with a tag that leads nowhere": tiff_with_a_lost_tag(),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_that_costs_no_pixels_costs_no_image(name: str) -> None:
    data = DAMAGED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pillow_rgb(data)
        header = read_header(data)
        assert (header.height, header.width) == expected.shape[:2]
        assert np.array_equal(decode_image(data), expected)


# --- unchanged ---------------------------------------------------------------------------------------------------
def png16(values: np.ndarray[Any, Any], colour: int) -> bytes:
    """A 16-bit PNG of colour type 0, 2, 4 or 6."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = (
        chunk(b"IHDR", struct.pack(">II5B", width, height, 16, colour, 0, 0, 0)),
        chunk(b"IDAT", zlib.compress(rows)),
        chunk(b"IEND", b""),
    )
    return PNG[:8] + b"".join(chunks)


def tiff(tags: dict[int, list[int]], strips: list[bytes], order: str = "<") -> bytes:
    """A TIFF of these tags (32-bit numbers) and these strips."""
    tags = tags | {259: [1], 273: [0] * len(strips), 279: [len(strip) for strip in strips]}
    start = 8 + 2 + 12 * len(tags) + 4
    place = start + sum(4 * len(numbers) for numbers in tags.values())
    tags[273] = [place + sum(map(len, strips[:number])) for number in range(len(strips))]
    entries = beyond = b""
    for tag, numbers in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        entries += struct.pack(order + "HHI", tag, 4, len(numbers))
        entries += packed if len(packed) == 4 else struct.pack(order + "I", start + len(beyond))
        beyond += packed if len(packed) > 4 else b""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "IH", 8, len(tags))
    return (head + entries + bytes(4) + beyond).ljust(place, b"\0") + b"".join(strips)


def tiff16(values: np.ndarray[Any, Any], photometric: int, order: str = "<", *, planes: bool = False) -> bytes:
    """A 16-bit TIFF, [h, w, channels], in one strip, or in one for each channel."""
    height, width, channels = values.shape
    values = values.astype(order + "u2")
    strips = [plane.tobytes() for plane in np.moveaxis(values, 2, 0)] if planes else [values.tobytes()]
    tags = {256: [width], 257: [height], 258: [16] * channels, 262: [photometric], 277: [channels], 278: [height]}
    return tiff(tags | {284: [2 if planes else 1]}, strips, order)


def deep(channels: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.random.default_rng(channels).integers(0, 65536, (20, 30, channels), np.uint16)


DEEP = {
    "grey png": (png16(deep(1), 0), 1),
    "rgb png": (png16(deep(3), 2), 3),
    "grey png with alpha": (png16(deep(2), 4), 2),
    "rgb png with alpha": (png16(deep(4), 6), 4),
    "rgb tiff": (tiff16(deep(3), 2), 3),
    "big-endian rgb tiff": (tiff16(deep(3), 2, ">"), 3),
    "cmyk tiff": (tiff16(deep(4), 5), 4),
}


@pytest.mark.parametrize("name", DEEP)
def test_unchanged_gives_all_16_bits_of_all_channels(name: str) -> None:
    data, channels = DEEP[name]
    pixels = decode_unchanged(data)
    assert pixels.dtype == np.uint16 and pixels.shape == ((20, 30) if channels == 1 else (20, 30, channels))
    assert np.array_equal(pixels.reshape(20, 30, channels), deep(channels))
    if channels == 3:
        assert np.array_equal(decode_image(data), deep(3) >> 8), "RGB takes the upper 8 of 16 bits"


def test_unchanged_keeps_floats_signs_indices_and_masks() -> None:
    values = grey16()
    for dtype in (np.float32, np.int32):
        pixels = decode_unchanged(encoded(Image.fromarray(values.astype(dtype) - 40000), "TIFF"))
        assert pixels.dtype == dtype and np.array_equal(pixels, values.astype(dtype) - 40000)
    indices = (values % 21).astype(np.uint8)
    mask = Image.fromarray(indices).convert("P")
    mask.putdata(indices.ravel().tolist())
    mask.putpalette([value % 256 for value in range(0, 63 * 7, 7)])
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        pixels = decode_unchanged(encoded(mask, kind))
        assert pixels.dtype == np.uint8 and np.array_equal(pixels, indices), kind
    bits = Image.fromarray(indices > 10)
    assert np.array_equal(decode_unchanged(encoded(bits, "PNG")), np.where(indices > 10, 255, 0))
    for mode, shape in (("L", (48, 64)), ("RGB", (48, 64, 3)), ("CMYK", (48, 64, 4))):
        assert decode_unchanged(encoded(picture(48, 64).convert(mode), "JPEG")).shape == shape


def test_unchanged_images_are_upright_and_of_the_promised_size() -> None:
    data = encoded(Image.fromarray(grey16()), "PNG", 6)
    assert np.array_equal(decode_unchanged(data, (50, 40)), np.rot90(grey16(), -1))
    with pytest.raises(BadSampleError, match=r"the index says 40 x 50 pixels, found \(50, 40\)"):
        decode_unchanged(data, (40, 50))


def test_images_that_would_be_misread_are_refused() -> None:
    data = tiff16(deep(3), 2, planes=True)
    assert not np.array_equal(pillow_rgb(data), deep(3) >> 8), "Pillow reads them by now, so there is nothing to refuse"
    with pytest.raises(BadSampleError, match="16 bits a channel in planes, which Pillow misreads"):
        decode_image(data)
    with pytest.raises(BadSampleError, match="16 bits a channel, of which Pillow gives no more than 8"):
        decode_unchanged(data)
    with pytest.raises(BadSampleError, match="holds this image as 8-bit RGB; keep='encoded'"):
        decode_unchanged(with_header(np.zeros((4, 5, 3), np.uint8)))


def test_a_png_with_a_second_header_is_refused() -> None:
    """Pillow uses the size of the second header, other decoders that of the first."""
    data = encoded(picture(48, 64), "PNG")
    first = data[8:33]
    body = first[4:8] + struct.pack(">II", 32, 24) + first[16:21]
    second = first[:4] + body + struct.pack(">I", zlib.crc32(body))
    for at in (33, data.index(b"IEND") - 4):
        twice = data[:at] + second + data[at:]
        for check in (decode_image, decode_unchanged, lambda image: check_image(image, "RGB"), parse_header):
            with pytest.raises(
                BadSampleError, match=rf"png image, byte {at}: expected one chunk IHDR, found a second one"
            ):
                check(twice)


# --- scans --------------------------------------------------------------------------------------------------------
def scans_of(data: bytes) -> tuple[bytes, list[bytes]]:
    """The bytes before the first scan of a progressive JPEG, and its scans with the tables before them."""
    starts = [match.start() for match in re.finditer(b"\xff\xda", data)]
    return data[: starts[0]], [data[a:b] for a, b in itertools.pairwise((*starts, len(data) - 2))]


def with_scans(side: tuple[int, int], count: int) -> bytes:
    """A grey JPEG of this size, whose last scan is repeated `count` times."""
    data = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    head, scans = scans_of(data)
    frame = head.index(b"\xff\xc2") + 5
    head = head[:frame] + struct.pack(">HH", *side) + head[frame + 4 :]
    return b"".join((head, *scans, scans[-1] * count, b"\xff\xd9"))


@pytest.mark.parametrize("cut", [0, 2], ids=["whole", "without an end marker"])
def test_scans_that_take_too_long_are_refused_before_they_are_decoded(cut: int) -> None:
    """Without the limit, 12 kB would take a minute: libjpeg processes 33 million pixels a thousand times."""
    data = with_scans((8192, 4096), 1000)
    data = data[: len(data) - cut]
    assert len(data) < 1 << 15
    checks: list[Callable[[bytes], object]] = [decode_image, decode_unchanged, lambda image: check_image(image, "RGB")]
    # Pillow decodes some images that packer's parser refuses.
    for check in (*checks, lambda image: parse_decodable(image, "jpeg")):
        with pytest.raises(BadSampleError, match=r"at most 64 scans of 33,554,432 pixels, .* found 10\d\d scans"):
            check(data)
    with pytest.raises(Refused):
        encode_strictly(data)


def test_genuine_progressive_images_have_few_enough_scans() -> None:
    for sides, extra in (((65_000, 5_000), 16), ((5_000, 4_000), 90), ((500, 400), 1000)):
        assert parse_header(with_scans(sides, extra)).upright_size == sides
    assert parse_header(encoded(picture(48, 64), "JPEG", progressive=True)).process == 0xC2


def test_an_image_with_a_scan_for_each_coefficient_decodes() -> None:
    head, (direct, band, *rest) = scans_of(encoded(Image.new("L", (64, 64), 77), "JPEG", progressive=True))
    end = 2 + struct.unpack(">H", band[2:4])[0]
    codes = band[end:].partition(b"\xff\xc4")[0]  # without coefficients: runs of finished blocks
    scans = [band[: end - 3] + bytes((k, k, 0)) + codes for k in range(1, 64)]
    refining = next(scan.partition(b"\xff\xc4")[0] for scan in rest if scan[end - 3] == 0)  # DC coefficients
    data = b"".join((head, direct, *scans, refining, b"\xff\xd9"))
    assert data.count(b"\xff\xda") == 65
    assert np.array_equal(decode_image(data), np.full((64, 64, 3), 77))


# --- AVIF, HEIC and JPEG XL -------------------------------------------------------------------------------------------
PLUGINS = {"avif": "AVIF", "heif": "HEIF", "jxl": "JXL"}


@pytest.fixture(params=PLUGINS)
def medium(request: pytest.FixtureRequest) -> str:
    missing = missing_plugin(request.param)
    if missing:
        pytest.skip(missing)
    return str(request.param)


def test_images_of_plugins_have_pillows_upright_pixels(medium: str) -> None:
    for mode, orientation in itertools.product(("RGB", "RGBA", "L"), (1, 6)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {} if orientation == 1 else {"exif": exif.tobytes()}
        data = encoded(picture(48, 64).convert(mode), PLUGINS[medium], **options)
        header, remarks = check_image(data, "RGB")
        assert (header.media, remarks) == (medium, ()) and header == read_header(memoryview(b"x" + data)[1:])
        expected = pillow_rgb(data)
        assert header.upright_size == expected.shape[:2] and np.array_equal(decode_image(data), expected)
        assert np.array_equal(decode_image(data, Region(8, 4, 16, 20)), expected[8:24, 4:24])
        own = decode_unchanged(data)
        assert own.shape[:2] == expected.shape[:2] and own.ndim == (2 if mode == "L" else 3)


def test_each_read_opens_a_jpeg_xl_once_since_opening_decodes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := missing_plugin("jxl"):
        pytest.skip(missing)
    data, opens, opened = encoded(picture(48, 64), "JXL"), [0], Image.open
    monkeypatch.setattr(Image, "open", lambda *of, **more: (opens.append(0), opened(*of, **more))[1])
    for number, read in enumerate((decode_image, decode_unchanged, lambda data: check_image(data, "RGB")), 2):
        read(data)
        assert len(opens) == number


def test_a_truncated_or_changed_plugin_image_is_a_bad_sample(medium: str) -> None:
    exif = Image.Exif()
    exif[0x010E] = "boxes"  # a JPEG XL treats such bytes as metadata
    for options in ({}, {"exif": exif.tobytes()}):
        data = encoded(picture(48, 64), PLUGINS[medium], **options)
        for stop in (*range(12, 400), *range(400, len(data), 40), len(data) - 1):
            with pytest.raises(BadSampleError, match=rf"^{medium} image"):
                check_image(data[:stop], "RGB")
        for at in range(0, min(len(data), 600), 3):
            changed = data[:at] + bytes((data[at] ^ 0xFF,)) + data[at + 1 :]
            for check in (lambda data: check_image(data, "RGB"), decode_image):
                with contextlib.suppress(BadSampleError):
                    check(changed)


def test_a_bomb_is_refused_before_its_pixels_are_made() -> None:
    if missing := missing_plugin("jxl"):
        pytest.skip(missing)
    sides = 0b11 << 1 | ((1 << 30) - 1) << 3 | 1 << 33  # any size of 30 bits, as wide as high
    for head in (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n" + struct.pack(">I4s", 0, b"jxlc") + b"\xff\x0a"):
        with pytest.raises(BadSampleError, match="jxl image: 1073741824 x 1073741824 pixels are more than"):
            check_image(head + sides.to_bytes(10, "little"), "RGB")


def test_deep_and_further_images_are_remarked() -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    file = pillow_heif.from_bytes("RGB;16", (64, 48), (np.arange(48 * 64 * 3) * 7).astype(np.uint16).tobytes())
    file.add_from_pillow(picture(48, 64))
    out = io.BytesIO()
    file.save(out)
    assert missing_plugin("heif") == "" and check_image(out.getvalue(), "RGB")[1] == ("over_8_bits", "further_frames")
    with pytest.raises(BadSampleError, match="holds 10 bits a channel, of which Pillow gives no more than 8"):
        check_image(out.getvalue(), "unchanged")
    with pytest.raises(BadSampleError, match="holds 10 bits"):
        decode_unchanged(out.getvalue())


def test_missing_plugins_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pillow_heif", "pillow_jxl"):
        monkeypatch.setitem(sys.modules, name, None)
    for head, extra in ((b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heif"), (b"\xff\x0a", "jxl")):
        data = head + struct.pack(">I4s", 108, b"mdat") + bytes(100)
        with pytest.raises(BadSampleError, match=rf"{extra} image: is not read .*'packer-vision\[{extra}\]'"):
            check_image(data, "RGB")
