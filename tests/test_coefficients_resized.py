"""Images kept as DCT coefficients, decoded and resized in one go: what torch makes of their pixels, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coefficient_cases import SAMPLINGS, made_jpeg
from crc32c import crc32c
from image_cases import encoded, picture

from cache.errors import BadSampleError
from readers.augment import Normalize
from readers.augment.cpu import Finish
from readers.augment.geometry import Job, Pass
from readers.coefficients import decode, decode_resized, encode_strictly, parse_coefficients, unsupported_reason
from readers.decode import Region

if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def by_torch(pixels: Pixels, resized: tuple[int, int]) -> Pixels:
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(image, resized, mode="bilinear", antialias=True, align_corners=False)
    return made[0].permute(1, 2, 0).numpy()


def random_region(rng: np.random.Generator, height: int, width: int) -> Region:
    reduce = int(rng.choice([1, 1, 2, 4, 8]))
    ends = []
    for side in (height, width):
        cells = -(-side // reduce)
        start = int(rng.integers(cells))
        length = int(rng.integers(1, cells - start + 1))
        ends.append((start * reduce, min(length * reduce, side - start * reduce)))
    (top, rows), (left, columns) = ends
    return Region(top, left, rows, columns, reduce, bool(rng.integers(2)))


@pytest.mark.parametrize("sampling", [*SAMPLINGS, "gray"])
def test_random_boxes_have_the_pixels_of_torchs_resize(sampling: str) -> None:
    """At any place, scale, size of the result, crop of that and flip; nothing around the result is written."""
    rng = np.random.default_rng(11)
    images = [
        encode_strictly(made_jpeg(*size, sampling, 90, noise, seed), 200)
        for seed, (size, noise) in enumerate((((91, 130), True), ((203, 61), False), ((17, 9), True)))
    ]
    for trial in range(240):
        image = images[trial % len(images)]
        shape = parse_coefficients(image)
        region = random_region(rng, shape.height, shape.width)
        pixels = decode(image, region)
        resized = tuple(int(rng.integers(-(-side // 4), 2 * side + 40)) for side in pixels.shape[:2])
        height, width = (int(rng.integers(1, side + 1)) for side in resized)
        top, left = int(rng.integers(resized[0] - height + 1)), int(rng.integers(resized[1] - width + 1))
        flips = bool(rng.integers(2)), bool(rng.integers(2))
        around = np.full((height + 2, width + 3, 3), 77, np.uint8)
        out = around[1:-1, 1:-2]
        assert decode_resized(image, region, resized, out, corner=(top, left), flips=flips)
        expected = by_torch(pixels, resized)[top : top + height, left : left + width]
        expected = expected[:: -1 if flips[0] else 1, :: -1 if flips[1] else 1]
        assert np.array_equal(out, expected), (trial, region, resized, (top, left), flips)
        out[:] = 77
        assert (around == 77).all(), (trial, region, resized)


def test_every_pair_of_sizes_has_torchs_weights() -> None:
    """Sides of the box from 1 to 300, and results from a quarter of that up, of values that show every weight."""
    rng = np.random.default_rng(3)
    image = encode_strictly(made_jpeg(300, 300, noise=True, quality=98), 200)
    pixels = decode(image)
    for side in range(1, 301):
        least = -(-side // 4)
        for size in {least, least + 1, max(side - 1, 1), side, side + 1, *rng.integers(least, 260 + least, 3).tolist()}:
            out = np.empty((size, 5, 3), np.uint8)
            assert decode_resized(image, Region(0, 0, side, 5), (size, 5), out)
            assert np.array_equal(out, by_torch(pixels[:side, :5], (size, 5))), (side, size)
            out = np.empty((3, size, 3), np.uint8)
            assert decode_resized(image, Region(0, 0, 3, side), (3, size), out)
            assert np.array_equal(out, by_torch(pixels[:3, :side], (3, size))), (side, size)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("normalize", [None, Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))], ids=str)
def test_floats_are_those_of_a_batch(planar: bool, normalize: Normalize | None) -> None:
    """To the last bit, at every width; nothing around the result is written."""
    finish = Finish(torch.float32, planar, normalize)
    scaling = finish.scaling()
    assert scaling is not None
    image, region = encode_strictly(made_jpeg(64, 96, "420", noise=True), 200), Region(3, 5, 60, 80)
    for width in (*range(1, 41), 64, 95):
        size = (21, width)
        small = np.empty((*size, 3), np.uint8)
        assert decode_resized(image, region, (80, 100), small, corner=(9, 2), flips=(False, True))
        pixels = torch.from_numpy(small).permute(2, 0, 1)[None]
        expected = torch.empty((1, 3, *size), memory_format=torch.contiguous_format if planar else torch.channels_last)
        job = Job(Pass(region, (80, 100), (9, 2), (), (), size))
        finish.store(pixels, (pixels,), (job,), expected)
        around = np.full((3, 23, width + 2) if planar else (23, width + 2, 3), 7, np.float32)
        out = around.transpose(1, 2, 0)[1:-1, 1:-1] if planar else around[1:-1, 1:-1]
        assert decode_resized(
            image, region, (80, 100), out, corner=(9, 2), flips=(False, True), scaling=scaling, size=(64, 96)
        )
        assert np.array_equal(out, expected[0].permute(1, 2, 0).numpy()), width
        out[:] = 7
        assert (around == 7).all(), width


@pytest.mark.parametrize(
    ("region", "resized"),
    [
        (Region(0, 0, 61, 40), (15, 40)),
        (Region(0, 0, 60, 41), (60, 10)),
        (Region(0, 0, 64, 96, 2), (7, 12)),
        (Region(0, 0, 8, 8), (4097, 8)),
    ],
)
def test_what_a_resize_by_itself_is_for(region: Region, resized: tuple[int, int]) -> None:
    image = encode_strictly(made_jpeg(64, 96))
    out = np.full((4, 4, 3), 9, np.uint8)
    assert not decode_resized(image, region, resized, out) and (out == 9).all()


@pytest.mark.parametrize("orientation", range(2, 9))
def test_images_that_are_stored_turned_are_left_to_others(orientation: int) -> None:
    image = encode_strictly(encoded(picture(40, 56), "JPEG", orientation))
    out = np.full((20, 20, 3), 9, np.uint8)
    assert not decode_resized(image, Region(0, 0, 40, 40), (20, 20), out) and (out == 9).all()


def test_results_that_do_not_fit() -> None:
    image, region = encode_strictly(made_jpeg(40, 56)), Region(0, 0, 40, 40)
    for corner in ((1, 0), (0, 1), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"corner: 20 x 20 pixels at .* are not within the \(20, 20\)"):
            decode_resized(image, region, (20, 20), np.empty((20, 20, 3), np.uint8), corner=corner)
    read_only = np.frombuffer(bytes(1200), np.uint8).reshape(20, 20, 3)
    planar = np.empty((3, 20, 20), np.uint8).transpose(1, 2, 0)
    for out in (np.empty((20, 20, 3)), np.empty((20, 20, 4), np.uint8), read_only, planar):
        with pytest.raises(ValueError, match=r"out: expected writable uint8"):
            decode_resized(image, region, (20, 20), out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not within the 40 x 56 pixels of the image"):
        decode_resized(image, Region(30, 60, 8, 8), (8, 8), np.empty((8, 8, 3), np.uint8))


def test_damage_is_found() -> None:
    image, out = bytearray(encode_strictly(made_jpeg(64, 64))), np.empty((32, 32, 3), np.uint8)
    image[-40] ^= 1
    with pytest.raises(BadSampleError, match="CRC32C"):
        decode_resized(bytes(image), Region(0, 0, 64, 64), (32, 32), out)
    shape = parse_coefficients(image)
    image[shape.index_at : shape.index_at + 4] = b"\xff\xff\xff\x7f"
    image[8:12] = crc32c(image[12:]).to_bytes(4, "little")
    with pytest.raises(BadSampleError, match="parts do not fit into its"):
        decode_resized(bytes(image), Region(0, 0, 64, 64), (32, 32), out)
    with pytest.raises(BadSampleError, match="the index says 64 x 65 pixels"):
        decode_resized(bytes(image), Region(0, 0, 64, 64), (32, 32), out, size=(64, 65))
