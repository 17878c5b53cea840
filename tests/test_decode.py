"""Decoders give Pillow's pixels, whole or in part, or raise BadSampleError."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from coefficient_cases import exact, made_jpeg
from image_cases import SIZE, encoded, picture, pillow_rgb
from PIL import Image

from cache.errors import BadSampleError
from readers.coefficients import decode_jpeg, unsupported_reason
from readers.decode import MAX_PIXELS, Region, Scratch, decode_image
from readers.decode.region import lent, with_header
from readers.headers import parse_any, read_header


def some_regions(height: int, width: int, count: int = 40, step: int = 1) -> list[Region]:
    rng = np.random.default_rng(2)
    regions = [Region(0, 0, height, width), Region(height // step * step - step, 0, step, step)]
    for _ in range(count):
        top, left = int(rng.integers(0, height, dtype=int)), int(rng.integers(0, width, dtype=int))
        top, left = top // step * step, left // step * step
        rows, columns = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
        regions.append(Region(top, left, max(step, rows // step * step), max(step, columns // step * step), step))
    return regions


JPEGS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "4:1:1": {"subsampling": "4:1:1"},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_rows": 1},
    "coarse": {"quality": 5},
    "fine": {"quality": 100, "subsampling": 0},
}


@pytest.mark.parametrize("name", JPEGS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_equal_pillow_whole_and_in_part(name: str, mode: str) -> None:
    data = encoded(picture().convert(mode), "JPEG", **JPEGS[name])
    expected, scratch = pillow_rgb(data), Scratch()
    assert np.array_equal(decode_image(data, None, scratch), expected)
    for region in some_regions(*SIZE):
        top, left, height, width, *_ = region
        pixels = decode_image(data, region, scratch)
        assert np.array_equal(pixels, expected[top : top + height, left : left + width]), region


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_equals_pillow(kind: str, orientation: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(picture(), kind, orientation, **options)
    expected = pillow_rgb(data)
    assert np.array_equal(decode_image(data), expected)
    for region in some_regions(*expected.shape[:2], count=10):
        top, left, height, width, *_ = region
        assert np.array_equal(decode_image(data, region), expected[top : top + height, left : left + width])


MODES = {
    "PNG": ["RGB", "L", "1", "P", "RGBA", "LA"],
    "WEBP": ["RGB", "L", "P", "RGBA", "LA"],
    "GIF": ["RGB", "L", "1", "P"],
    "BMP": ["RGB", "L", "1", "P", "RGBA"],
    "TIFF": ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK"],
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_other_media_and_modes_equal_pillow(kind: str, mode: str) -> None:
    data = encoded(picture().convert(mode), kind)
    assert np.array_equal(decode_image(data), pillow_rgb(data))


@pytest.mark.parametrize("reduce", [2, 4, 8])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_reduced_jpeg_has_the_size_and_the_content_of_the_region(reduce: int, orientation: int) -> None:
    data = encoded(picture(480, 640), "JPEG", orientation)
    upright = Image.fromarray(pillow_rgb(data))
    for top, left, height, width, *_ in some_regions(upright.height, upright.width, count=20, step=reduce):
        pixels = decode_image(data, Region(top, left, height, width, reduce))
        assert pixels.shape == (-(-height // reduce), -(-width // reduce), 3)
        box = upright.crop((left, top, left + width, top + height)).reduce(reduce)
        assert np.abs(np.asarray(box).astype(int) - pixels).mean() < 6


@pytest.mark.parametrize("orientation", [1, 2, 3, 6])
def test_a_size_that_cannot_be_reduced_exactly_is_still_correct(orientation: int) -> None:
    data = encoded(picture(479, 637), "JPEG", orientation)
    whole = pillow_rgb(data)
    height, width = whole.shape[:2]
    pixels = decode_image(data, Region(0, 0, height, width, 4))
    expected = whole if orientation != 1 else np.asarray(Image.fromarray(whole).reduce(4))
    assert pixels.shape == expected.shape
    assert np.abs(expected.astype(int) - pixels).mean() < 6


def test_coarse_colours_differ_little() -> None:
    data = encoded(picture(480, 640), "JPEG", quality=90)
    whole = Region(0, 0, 480, 640)
    fine, coarse = decode_image(data, whole), decode_image(data, whole._replace(coarse=True))
    assert not np.array_equal(fine, coarse)
    small = [np.asarray(Image.fromarray(pixels).resize((320, 240))).astype(int) for pixels in (fine, coarse)]
    assert np.abs(small[0] - small[1]).mean() < 0.6


def test_an_image_other_than_jpeg_is_not_reduced() -> None:
    data = encoded(picture(), "PNG")
    expected = pillow_rgb(data)
    assert np.array_equal(decode_image(data, Region(8, 16, 64, 128, 8)), expected[8:72, 16:144])


def test_the_bytes_are_not_changed_and_may_be_part_of_a_buffer() -> None:
    data = encoded(picture(), "JPEG")
    block = memoryview(b"x" * 7 + data + b"y" * 9)[7:-9]
    before = bytes(block)
    assert np.array_equal(decode_image(block, Region(0, 0, 20, 20)), pillow_rgb(data)[:20, :20])
    assert bytes(block) == before


def test_scratch_is_reused_and_not_enlarged_by_large_images() -> None:
    scratch = Scratch()
    small, large = encoded(picture(40, 40), "JPEG"), encoded(Image.new("RGB", (6000, 4500)), "JPEG")
    first = decode_image(small, None, scratch)
    address = first.__array_interface__["data"][0]
    assert decode_image(large, None, scratch).shape == (4500, 6000, 3)
    assert decode_image(small, None, scratch).__array_interface__["data"][0] == address


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_image_is_a_bad_sample_unless_all_its_pixels_are_there(kind: str) -> None:
    data = encoded(picture(40, 50), kind)
    whole, survivors = pillow_rgb(data), 0
    for size in sorted({*range(min(200, len(data))), *range(0, len(data), 97), *range(len(data) - 60, len(data))}):
        try:
            pixels = decode_image(data[:size])
        except BadSampleError:
            continue
        assert np.array_equal(pixels, whole), f"{size} of {len(data)} bytes gave other pixels"
        survivors += 1
    assert survivors <= 30, "bytes of the pixels were missing"


def test_flipped_bits_give_an_image_or_a_bad_sample() -> None:
    rng = np.random.default_rng(3)
    outcomes = set()
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encoded(picture(40, 50), kind)
        for _ in range(150):
            damaged = bytearray(data)
            for place in rng.integers(0, len(data), 3):
                damaged[place] ^= 1 << int(rng.integers(8))
            try:
                pixels = decode_image(bytes(damaged), None)
                assert pixels.ndim == 3 and pixels.dtype == np.uint8
                outcomes.add("decoded")
            except BadSampleError:
                outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}


def test_a_size_other_than_in_the_index_is_a_bad_sample() -> None:
    data = encoded(picture(), "JPEG", 6)
    assert decode_image(data, None, None, (SIZE[1], SIZE[0])).shape == (SIZE[1], SIZE[0], 3)
    with pytest.raises(BadSampleError, match=r"the index says 230 x 310 pixels, found \(310, 230\)"):
        decode_image(data, None, None, SIZE)


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    data = bytearray(encoded(picture(), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(BadSampleError, match=rf"65535 x 65535 pixels are more than the {MAX_PIXELS}"):
        decode_image(bytes(data))


def test_decoded_pixels_are_viewed_in_place() -> None:
    pixels = np.asarray(picture())
    data = memoryview(b"12345" + with_header(pixels))[5:]
    assert parse_any(data) == ("pixels", *pixels.shape, 0, 1)
    whole, box = decode_image(data), decode_image(data, Region(8, 16, 24, 32, 8), Scratch(), pixels.shape[:2])
    assert np.array_equal(whole, pixels) and np.array_equal(box, pixels[8:32, 16:48])
    assert not box.flags.writeable and lent(box).flags.writeable
    assert np.shares_memory(box, np.frombuffer(data, np.uint8)) and np.shares_memory(lent(box), box)
    for cut in (4, 15, 16, len(data) - 1):
        with pytest.raises(BadSampleError):
            decode_image(data[:cut])


# Boxes of JPEGs by the compiled codec: the same pixels as libjpeg-turbo everywhere.


SAMPLINGS = ("444", "422", "440", "420", "gray")
WIDE = (150, 203)
COMPILED = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())


def boxes(height: int, width: int, count: int, seed: int = 1) -> list[Region]:
    """Regions at all scales, some of them at the edges."""
    rng = np.random.default_rng(seed)
    regions = []
    for number in range(count):
        reduce = (1, 1, 2, 4, 8)[number % 5]
        top, left = (int(rng.integers(0, n // reduce - 1)) * reduce for n in (height, width))
        rows, columns = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
        rows, columns = (-(-n // reduce) * reduce for n in (rows, columns))
        box = (min(rows, height - top), min(columns, width - left))
        regions.append(Region(top, left, *box, reduce, bool(number % 3 == 0)))
    return regions


def pixels_of(data: bytes, region: Region, compiled: bool = True) -> Any:
    """The pixels, or the error message."""
    try:
        return decode_image(data, region, compiled=compiled)
    except BadSampleError as error:
        return str(error)


# --- the rows that libjpeg decodes ------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "411"])
def test_boxes_that_end_anywhere_have_the_pixels_of_the_whole_image(sampling: str) -> None:
    data = made_jpeg(97, 70, sampling)
    whole = exact(data)
    for bottom in range(1, 98):
        top = max(0, bottom - 3)
        assert np.array_equal(decode_image(data, Region(top, 5, bottom - top, 60)), whole[top:bottom, 5:65])
    for reduce in (2, 4, 8):
        region = Region(0, 0, 97, 70, reduce)
        whole = decode_image(data, region)
        for bottom in range(reduce, 97, reduce):
            part = decode_image(data, region._replace(height=bottom))
            assert np.array_equal(part, whole[: bottom // reduce]), (reduce, bottom)


# --- boxes by the compiled codec --------------------------------------------------------------------------------
@COMPILED
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("quality", [35, 96])
def test_compiled_boxes_equal_those_of_libjpeg(sampling: str, quality: int) -> None:
    for size, noise in ((WIDE, False), ((64, 65), True), ((81, 640), False)):
        data = made_jpeg(*size, sampling, quality, noise)
        for region in boxes(*size, 40):
            pixels = decode_jpeg(data, read_header(data), region)
            assert pixels is not None, "libjpeg decoded it"
            assert np.array_equal(pixels, decode_image(data, region, compiled=False)), region


@COMPILED
@pytest.mark.parametrize("orientation", range(1, 9))
def test_compiled_boxes_are_upright(orientation: int) -> None:
    data = encoded(picture(88, 120), "JPEG", orientation, quality=90, subsampling="4:2:0")
    height, width = read_header(data).upright_size
    for region in boxes(height, width, 15):
        assert np.array_equal(decode_image(data, region), decode_image(data, region, compiled=False)), region


@COMPILED
def test_custom_tables_and_noise() -> None:
    """Optimised Huffman tables, codes longer than the first look-up table covers, blocks with all coefficients."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (130, 140, 3), np.uint8))
    mixed = Image.composite(noise, picture(130, 140), Image.fromarray(rng.integers(0, 2, (130, 140), np.uint8) * 255))
    for image, quality in itertools.product((noise, mixed, picture(130, 140)), (100, 75, 5)):
        data = encoded(image, "JPEG", quality=quality, optimize=True, subsampling=0)
        for region in boxes(130, 140, 10):
            pixels = decode_jpeg(data, read_header(data), region)
            assert pixels is not None and np.array_equal(pixels, decode_image(data, region, compiled=False)), (
                quality,
                region,
            )


@COMPILED
@pytest.mark.parametrize(
    "data",
    [
        encoded(picture(100, 120), "JPEG", progressive=True),
        encoded(picture(100, 120), "JPEG", restart_marker_rows=1),
        encoded(picture(100, 120).convert("CMYK"), "JPEG"),
        encoded(picture(40, 120), "JPEG"),
        made_jpeg(100, 120, "411"),
        made_jpeg(100, 120).replace(b"\xff\xdb", b"\xff\xe2\0\x12ICC_PROFILE\0\2\1??\xff\xdb", 1),
        made_jpeg(100, 120).replace(b"JFIF\0\x01", b"JFIF\0\x07"),
    ],
    ids=["progressive", "restarts", "CMYK", "small", "4:1:1", "half a profile", "JFIF 7"],
)
def test_images_that_are_left_to_libjpeg(data: bytes) -> None:
    header = read_header(data)
    region = Region(8, 16, 24, 40)
    assert decode_jpeg(data, header, region) is None
    assert np.array_equal(decode_image(data, region), decode_image(data, region, compiled=False))


@COMPILED
def test_damaged_jpegs_end_as_with_libjpeg() -> None:
    """Flipped and lost bytes after the header: the same pixels, or the same error."""
    data = made_jpeg(*WIDE, "420", 85)
    scan, rng = data.index(b"\xff\xda") + 12, np.random.default_rng(5)
    left = 0
    for number in range(150):
        spoiled = bytearray(data)
        for _ in range(1 + number % 3):
            spoiled[int(rng.integers(scan, len(data) - 2))] = int(rng.integers(0, 256))
        if number % 10 == 0:
            del spoiled[int(rng.integers(scan, len(data) - 2)) : -2]
        region = boxes(*WIDE, 5, number)[0]
        data_now = bytes(spoiled)
        assert np.array_equal(pixels_of(data_now, region), pixels_of(data_now, region, False)), (number, region)
        left += decode_jpeg(data_now, read_header(data_now), region) is None
    assert 0 < left < 150
