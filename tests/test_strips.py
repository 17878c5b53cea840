"""Boxes of JPEGs by the compiled codec: libjpeg-turbo's pixels everywhere."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from coefficient_cases import exact, made_jpeg
from image_cases import encoded, picture
from PIL import Image

from cache.errors import BadSampleError
from readers.coefficients import decode_jpeg, unsupported_reason
from readers.decode import Region, decode_image
from readers.headers import read_header

if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

SAMPLINGS = ("444", "422", "440", "420", "gray")
WIDE = (150, 203)


def boxes(height: int, width: int, count: int, seed: int = 1) -> list[Region]:
    """Regions of all scales, some of them at the edges."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        reduce = (1, 1, 2, 4, 8)[number % 5]
        top, left = (int(rng.integers(0, n // reduce - 1)) * reduce for n in (height, width))
        rows, columns = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
        rows, columns = (-(-n // reduce) * reduce for n in (rows, columns))
        box = (min(rows, height - top), min(columns, width - left))
        found.append(Region(top, left, *box, reduce, bool(number % 3 == 0)))
    return found


def by_libjpeg(data: bytes, region: Region) -> Any:
    """The pixels, or why there are none."""
    try:
        return decode_image(data, region, compiled=False)
    except BadSampleError as error:
        return str(error)


def compiled_pixels(data: bytes, region: Region) -> Any:
    try:
        return decode_image(data, region)
    except BadSampleError as error:
        return str(error)


# --- how many rows libjpeg decodes ------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "411"])
def test_boxes_that_end_anywhere_have_the_pixels_of_the_whole(sampling: str) -> None:
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
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("quality", [35, 96])
def test_compiled_boxes_are_those_of_libjpeg(sampling: str, quality: int) -> None:
    for size, noise in ((WIDE, False), ((64, 65), True), ((81, 640), False)):
        data = made_jpeg(*size, sampling, quality, noise)
        for region in boxes(*size, 40):
            found = decode_jpeg(data, read_header(data), region)
            assert found is not None, "it was left to libjpeg"
            assert np.array_equal(found, decode_image(data, region, compiled=False)), region


@pytest.mark.parametrize("orientation", range(1, 9))
def test_compiled_boxes_are_upright(orientation: int) -> None:
    data = encoded(picture(88, 120), "JPEG", orientation, quality=90, subsampling="4:2:0")
    height, width = read_header(data).upright_size
    for region in boxes(height, width, 15):
        assert np.array_equal(decode_image(data, region), decode_image(data, region, compiled=False)), region


def test_tables_of_their_own_and_noise() -> None:
    """Optimised Huffman tables, codes longer than the tables of the first look, blocks with all coefficients."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (130, 140, 3), np.uint8))
    mixed = Image.composite(noise, picture(130, 140), Image.fromarray(rng.integers(0, 2, (130, 140), np.uint8) * 255))
    for image, quality in itertools.product((noise, mixed, picture(130, 140)), (100, 75, 5)):
        data = encoded(image, "JPEG", quality=quality, optimize=True, subsampling=0)
        for region in boxes(130, 140, 10):
            found = decode_jpeg(data, read_header(data), region)
            assert found is not None and np.array_equal(found, decode_image(data, region, compiled=False)), (
                quality,
                region,
            )


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
def test_what_is_left_to_libjpeg(data: bytes) -> None:
    header = read_header(data)
    region = Region(8, 16, 24, 40)
    assert decode_jpeg(data, header, region) is None
    assert np.array_equal(decode_image(data, region), decode_image(data, region, compiled=False))


def test_damaged_jpegs_end_as_with_libjpeg() -> None:
    """Flipped and lost bytes behind the header: the same pixels, or the same error."""
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
        wanted, found = by_libjpeg(bytes(spoiled), region), compiled_pixels(bytes(spoiled), region)
        assert np.array_equal(wanted, found), (number, region)
        left += decode_jpeg(bytes(spoiled), read_header(bytes(spoiled)), region) is None
    assert 0 < left < 150
