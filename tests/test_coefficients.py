"""Images kept as DCT coefficients decode to libjpeg-turbo's exact pixels, in any box and at any scale."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coefficient_cases import SAMPLINGS, exact, made_jpeg, reduced, stored_coefficients
from crc32c import crc32c
from image_cases import SIZE, encoded, picture, pillow_rgb
from jpeg_maker import FLAT, GAPS, LONG, Jpeg, random_blocks, segment
from PIL import Image
from suites.programs import run_python

from cache.errors import BadSampleError, UnsupportedCpuError
from readers import coefficients
from readers.augment import Normalize
from readers.augment.cpu import Finish
from readers.augment.geometry import Job, Pass
from readers.coefficients import (
    Refused,
    Scaling,
    decode,
    decode_resized,
    encode,
    encode_strictly,
    parse_coefficients,
    unsupported_reason,
)
from readers.coefficients.compiled import load_codec
from readers.decode import Region, decode_image
from readers.options import Decode, _warn_of_libjpeg

if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
ZIGZAG = sorted(range(64), key=lambda n: (n // 8 + n % 8, n // 8 if (n // 8 + n % 8) % 2 else n % 8))
COLOUR = [(2, 2), (1, 1), (1, 1)]
GOLDEN = (
    "894443540d0a1a0a7122ec1b0800080001011101cf00000001000b000200140006001800070021000f00280010002e00"
    "1c0035001d00370004001600090023000d002600120030001a0033001f0039002a003c002c003e000300150005001700"
    "080022000e00270011002f001b0034001e0038002b003d000a0024000c002500130031001900320020003a0029003b00"
    "2d003f0036004000a0000000af000000b3ff09090608020854011d000001ff"
) + "00" * 32


def check(data: bytes, expected: np.ndarray | None = None) -> bytes:
    """Encode, compare all pixels, and return the coefficients."""
    kept = encode_strictly(data, max_ratio=200)
    assert np.array_equal(decode(kept), exact(data) if expected is None else expected)
    return kept


def random_region(rng: np.random.Generator, full: tuple[int, ...], scaled: tuple[int, ...], factor: int) -> Region:
    """A box within an image of the size `full`, at least one pixel large at the scale `scaled`."""
    (top, bottom), (left, right) = (np.sort(rng.choice(side + 1, 2, replace=False)) for side in scaled)
    height, width = min(bottom * factor, full[0]) - top * factor, min(right * factor, full[1]) - left * factor
    return Region(*map(int, (top * factor, left * factor, height, width)), factor)


# --- pixels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "gray"])
def test_images_of_any_size_have_their_pixels(sampling: str) -> None:
    for height, width in [(n, n) for n in range(1, 18)] + [(1, 17), (17, 1), (2, 9), (9, 2), (3, 40), (40, 3), (33, 4)]:
        for quality in (30, 95):
            check(made_jpeg(height, width, sampling, quality))
    for height, width, quality in ((231, 310, 90), (64, 64, 50), (100, 333, 98), (333, 100, 10)):
        check(made_jpeg(height, width, sampling, quality))
    for quality in (1, 5, 25, 60, 85, 100):
        check(made_jpeg(70, 90, sampling, quality, noise=True))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_wide_and_high_images_have_their_pixels(sampling: str) -> None:
    for height, width in ((9, 65_500), (65_500, 9)):
        kept = check(made_jpeg(height, width, sampling, 80))
        box = Region(height // 2, width // 2, height - height // 2, width - width // 2)
        assert np.array_equal(decode(kept, box), exact(made_jpeg(height, width, sampling, 80))[box.top :, box.left :])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("progressive", [False, True])
def test_pillows_jpegs_have_their_pixels(mode: str, progressive: bool) -> None:
    everywhere = itertools.product(
        ({}, {"restart_marker_blocks": 3}, {"restart_marker_rows": 1}, {"optimize": True}), (0, 1, 2), (40, 92)
    )
    for options, sampling, quality in everywhere:
        image = picture(61, 83, seed=quality).convert(mode)
        check(encoded(image, "JPEG", quality=quality, subsampling=sampling, progressive=progressive, **options))


@pytest.mark.parametrize("factors", [[(1, 1)], *([pair, (1, 1), (1, 1)] for pair in SAMPLINGS.values())], ids=str)
@pytest.mark.parametrize("code", [FLAT, LONG, GAPS], ids=["flat", "long", "gaps"])
def test_jpegs_that_no_encoder_makes_have_their_pixels(factors: list[tuple[int, int]], code: tuple) -> None:
    rng = np.random.default_rng(len(factors))
    for height, width in ((8, 8), (21, 35), (50, 17)):
        blocks = random_blocks(rng, height, width, factors)
        steps = rng.integers(1, 12, 64)
        for interleaved, progressive, restart in ((True, False, 2), (False, False, 0), (True, True, 5)):
            check(Jpeg(height, width, factors, blocks, steps, code, restart, interleaved, progressive).encode())


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_wild_coefficients_have_the_same_pixels_or_are_refused(sampling: tuple[int, int]) -> None:
    """With values beyond those of images libjpeg's 16-bit sums overflow, in a way that the codec reproduces."""
    rng = np.random.default_rng(5)
    factors = [sampling, (1, 1), (1, 1)]
    kept = 0
    for largest in (200, 900, 2000, 8191, 12_000):
        for _ in range(4):
            blocks = random_blocks(rng, 40, 40, factors, largest)
            for component in blocks:
                component[..., 0] = rng.integers(-largest, largest + 1, component.shape[:2])
            data = Jpeg(40, 40, factors, blocks).encode()
            if max(int(abs(component).max()) for component in blocks) > 8191:
                with pytest.raises(Refused, match="beyond what images of 8 bits have"):
                    encode_strictly(data, 200)
            else:
                kept, coefficients = kept + 1, encode_strictly(data, 200)
                assert np.array_equal(decode(coefficients), exact(data))
                for factor in (2, 4, 8):
                    region = Region(0, 0, 40, 40, factor)
                    assert np.array_equal(decode(coefficients, region), reduced(data, factor)), factor
    assert kept >= 12


def test_wide_steps_have_their_pixels() -> None:
    """16-bit tables, as from quality 1 without a limit."""
    blocks = random_blocks(np.random.default_rng(1), 30, 30, COLOUR, largest=3)
    for component in blocks:
        component[..., 0] = np.clip(component[..., 0], -3, 3)
    steps = np.random.default_rng(2).integers(200, 2500, 64)
    check(Jpeg(30, 30, COLOUR, blocks, steps, process=0xC1).encode())


# --- scales, boxes, orientation -----------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "gray"])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_scales_have_their_pixels(sampling: str, factor: int) -> None:
    for height, width in [(8 + n, 25 - n) for n in range(17)] + [(231, 310), (9, 200), (64, 64), (120, 8)]:
        for data in (made_jpeg(height, width, sampling), made_jpeg(height, width, sampling, 30, noise=True)):
            pixels = decode(encode_strictly(data, 200), Region(0, 0, height, width, factor))
            assert np.array_equal(pixels, reduced(data, factor)), (height, width)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, "gray"])
def test_any_box_has_the_pixels_of_the_whole_image(sampling: str) -> None:
    rng = np.random.default_rng(3)
    sources = [
        made_jpeg(h, w, sampling, 85, seed=n) for n, (h, w) in enumerate(((97, 131), (200, 61), (16, 16), (3, 5)))
    ]
    for data in sources:
        kept, whole = encode_strictly(data, 200), exact(data)
        scaled = {1: whole} | {n: reduced(data, n) for n in (2, 4, 8) if min(whole.shape[:2]) >= n}
        for _ in range(150):
            factor = int(rng.choice(list(scaled)))
            region = random_region(rng, whole.shape, scaled[factor].shape[:2], factor)
            top, left, box = region.top // factor, region.left // factor, decode(kept, region)
            assert np.array_equal(box, scaled[factor][top : top + len(box), left : left + box.shape[1]]), region


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(64, 96), SIZE])
def test_regions_equal_those_of_decode_image(orientation: int, size: tuple[int, int]) -> None:
    """Upright, also with repeated chroma, and where the scale does not divide the sides."""
    image = picture(*size)
    data = encoded(image, "JPEG", orientation, quality=88, subsampling=2)
    kept = encode_strictly(data)
    height, width = pillow_rgb(data).shape[:2]
    assert parse_coefficients(kept).header.upright_size == (height, width)
    assert np.array_equal(decode(kept), pillow_rgb(data))
    for region in (
        Region(0, 0, height, width, 2),
        Region(8, 16, 40, 24, 4),
        Region(16, 8, height - 16, width - 8, 8),
        Region(5, 7, 31, 29),
        Region(3, 2, 33, 40, 1, coarse=True),
        Region(8, 8, 32, 48, 2, coarse=True),
    ):
        expected = decode_image(data, region)
        assert np.array_equal(decode(kept, region), expected), region
        out = np.zeros((expected.shape[0] + 2, expected.shape[1] + 3, 3), np.uint8)
        inner = out[1:-1, 1:-2]
        assert decode(kept, region, inner) is inner and np.array_equal(inner, expected)
        inner[:] = 0
        assert not out.any()  # no bytes around it were written


def test_repeated_chroma_equals_that_of_decode_image() -> None:
    for sampling, (height, width) in itertools.product(SAMPLINGS, ((40, 56), (41, 57), (17, 3), (2, 2))):
        data, inner = (
            made_jpeg(height, width, sampling),
            Region(height // 2, width // 3, 1, 2 if width > 2 else 1, 1, True),
        )
        for region in (Region(0, 0, height, width, 1, True), inner):
            assert np.array_equal(decode(encode_strictly(data, 200), region), decode_image(data, region)), sampling


def test_a_region_or_memory_that_does_not_fit_is_an_error() -> None:
    kept = encode_strictly(made_jpeg(20, 30))
    for region in ((20, 0, 1, 1), (0, 30, 1, 1), (-1, 0, 4, 4), (0, 0, 0, 4), (0, 0, 8, 8, 3)):
        with pytest.raises(ValueError, match="region: "):
            decode(kept, Region(*region))
    for out in (np.zeros((20, 30, 4), np.uint8), np.zeros((20, 30, 3), np.int8), np.zeros((19, 30, 3), np.uint8)):
        with pytest.raises(ValueError, match="out: expected writable"):
            decode(kept, out=out)


# --- supported and unsupported JPEGs ------------------------------------------------------------------------------
def test_the_bytes_are_as_documented() -> None:
    """An independent reader of the layout recovers the coefficients that the JPEG was written from."""
    rng = np.random.default_rng(8)
    for factors in ([(1, 1)], COLOUR):
        blocks = random_blocks(rng, 30, 50, factors, largest=700)
        steps = rng.integers(1, 10, 64)
        kept = encode_strictly(Jpeg(30, 50, factors, blocks, steps).encode())
        components, tables = stored_coefficients(kept)
        assert len(components) == len(blocks)
        natural = np.argsort(ZIGZAG)
        for component, table, written in zip(components, tables, blocks, strict=True):
            rows, columns = component.shape[:2]
            assert np.array_equal(component.reshape(rows, columns, 64), written[:rows, :columns, natural])
            assert np.array_equal(table.reshape(64), steps[natural])
    # Caches on a disk outlive versions: a new layout needs a new version number.
    blocks = [np.zeros((1, 1, 64), np.int64)]
    blocks[0][0, 0, [0, 1, 2, 40]] = (-77, 5, -300, 17)
    kept = encode_strictly(Jpeg(8, 8, [(1, 1)], blocks, np.arange(1, 65)).encode())
    assert kept.hex() == GOLDEN


def test_coefficients_are_at_most_twice_the_jpeg() -> None:
    data = made_jpeg(64, 64, "444", 90)
    assert len(encode_strictly(data)) <= 2 * len(data)
    flat = encoded(Image.new("RGB", (640, 640), "teal"), "JPEG", progressive=True)
    with pytest.raises(Refused, match="too many times the JPEG's bytes"):
        encode_strictly(flat)


def _jpeg(**changes: object) -> bytes:
    values = {"height": 24, "width": 24, "factors": COLOUR, **changes}
    factors = values["factors"]
    blocks = random_blocks(np.random.default_rng(1), 24, 24, factors)  # type: ignore[arg-type]
    return Jpeg(**{"blocks": blocks, **values}).encode()  # type: ignore[arg-type]


def _changed(data: bytes, marker: int, offset: int, value: int) -> bytes:
    at = data.index(bytes([0xFF, marker])) + offset
    return data[:at] + bytes([value]) + data[at + 1 :]


def _part(scans: int) -> bytes:
    """The first scans of a progressive JPEG, with an end marker."""
    data = encoded(picture(40, 40), "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(rb"\xff\xda", data)]
    return data[: starts[scans]] + b"\xff\xd9"


REFUSED = {
    "a PNG": (lambda: encoded(picture(9, 9), "PNG"), "not a JPEG"),
    "CMYK": (lambda: encoded(picture(20, 20).convert("CMYK"), "JPEG"), "4 components"),
    "12 bits": (lambda: _jpeg(bits=12, process=0xC1), "12 bits"),
    "arithmetic": (lambda: _jpeg(process=0xC9), "process SOF9"),
    "lossless": (lambda: _jpeg(process=0xC3), "process SOF3"),
    "4:1:1": (lambda: made_jpeg(40, 40, "411"), "sampling factors"),
    "subsampled luma": (lambda: _jpeg(factors=[(1, 1), (2, 1), (1, 1)]), "sampling factors"),
    "RGB by Adobe": (lambda: _jpeg(before=segment(0xEE, b"Adobe\0\x64\0\0\0\0\0")), "colours other"),
    "YCCK's transform": (lambda: _jpeg(before=segment(0xEE, b"Adobe\0\x64\0\0\0\0\2")), "colours other"),
    "an incomplete progressive": (lambda: _part(3), "not complete"),
    "a scan is missing": (lambda: _part(1), "not complete"),
    "truncated": (lambda: _jpeg()[:-40] + b"\xff\xd9", "truncated|a code that"),
    "without an end": (lambda: _jpeg()[:-2], "truncated|expected"),
    "bytes left over": (lambda: _jpeg()[:-2] + b"\0\0\0\xff\xd9", "left over"),
    "restarts out of order": (lambda: _jpeg(restart=1).replace(b"\xff\xd1", b"\xff\xd2", 1), "out of order"),
    "restarts without an interval": (
        lambda: _jpeg(restart=1).replace(b"\xff\xdd\0\x04\0\1", b"\xff\xdd\0\x04\0\0"),
        "out of order",
    ),
    "an unused code": (lambda: _jpeg(code=LONG)[:-60] + b"\xfe" * 58 + b"\xff\xd9", "code that|left over"),
    "a table that is no code": (lambda: _changed(_jpeg(), 0xC4, 5, 3), "Huffman table"),
    "no table of quantisation": (lambda: _changed(_jpeg(), 0xDB, 4, 1), "without its table"),
    "quantisation by 0": (lambda: _changed(_jpeg(), 0xDB, 9, 0), "quantisation by 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_a_reason(case: str) -> None:
    make, message = REFUSED[case]
    data = make()
    with pytest.raises(Refused, match=message):
        encode_strictly(data)
    assert encode(data) is None


@pytest.mark.parametrize("kind", ["sequential", "progressive"])
def test_damaged_jpegs_are_refused_or_have_libjpegs_pixels(kind: str) -> None:
    """Every byte of a small JPEG is changed, and every prefix of it is tried."""
    if kind == "progressive":
        data = encoded(picture(17, 23), "JPEG", progressive=True, quality=60)
    else:
        data = _jpeg(restart=2, code=GAPS)
    start, rng, kept = data.index(b"\xff\xda"), np.random.default_rng(1), 0
    damaged = [data[:n] for n in range(0, len(data), 7)]
    for at in range(2, len(data)):
        if at > start or at % 3 == 0:
            damaged.append(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    for jpeg in damaged:
        coefficients = encode(jpeg)
        if coefficients is not None and parse_coefficients(coefficients).orientation == 1:
            kept += 1
            assert np.array_equal(decode(coefficients), decode_image(jpeg))
    assert kept > 20


# --- trust --------------------------------------------------------------------------------------------------------
def test_damage_is_detected() -> None:
    kept = encode_strictly(made_jpeg(40, 50, "420"))
    for at in range(0, len(kept), 5):
        with pytest.raises(BadSampleError):
            decode(kept[:at] + bytes([kept[at] ^ 4]) + kept[at + 1 :])
    for size in (0, 7, 23, 24, 200, len(kept) - 1):
        with pytest.raises(BadSampleError, match="truncated"):
            decode(kept[:size])
    assert np.array_equal(decode(memoryview(b"x" + kept + b"more")[1:]), decode(kept))


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, b"\x88", "byte 0: expected the magic"),
        (12, b"\0\0", "byte 12: expected a height"),
        (16, b"\2", "byte 16: expected version 1, found 2"),
        (17, b"\2", "byte 17: expected 1 or 3 components, found 2"),
        (18, b"\x13", "byte 18: expected a subsampling"),
        (19, b"\0", "byte 19: expected an orientation"),
        (20, b"\0\0\0\0", "byte 20: expected"),
        (20, b"\xff\xff\xff\x7f", "truncated"),
        (8, b"\1\2\3\4", "CRC32C"),
    ],
)
def test_errors_of_headers_name_the_fault(at: int, value: bytes, message: str) -> None:
    kept = encode_strictly(made_jpeg(16, 16))
    with pytest.raises(BadSampleError, match=message):
        decode(kept[:at] + value + kept[at + len(value) :])


# --- the compiled codec -------------------------------------------------------------------------------------------
def test_a_codec_built_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_codec(), "VERSION", 1)
    assert "was built from other sources" in unsupported_reason.__wrapped__()
    with pytest.raises(UnsupportedCpuError):
        load_codec()


def test_a_missing_codec_is_one_warning_where_it_would_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readers.coefficients.unsupported_reason", lambda: "no compiler")
    _warn_of_libjpeg.cache_clear()
    with pytest.warns(UserWarning, match="libjpeg decodes JPEGs, in about twice the time: no compiler; decoder='cpu'"):
        assert Decode().uses_codec()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Decode().uses_codec() and not Decode(decoder="cpu").uses_codec()
    _warn_of_libjpeg.cache_clear()
    with pytest.raises(UnsupportedCpuError, match="no compiler"):
        Decode(decoder="compiled").uses_codec()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("source", ["module.c", "affine.c"])
def test_the_codec_compiles_without_the_headers_of_python(source: str) -> None:
    folder = Path(coefficients.__file__).parent / "_codec"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-DWITHOUT_PYTHON_H", "-fsyntax-only"]
    done = subprocess.run(["gcc", *flags, str(folder / source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_do_not_disturb_each_other() -> None:
    sources = [made_jpeg(60 + n, 90 - n, sampling, seed=n) for n, sampling in enumerate([*SAMPLINGS, "gray"] * 4)]
    expected = [exact(data) for data in sources]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            decoded = pool.map(lambda data: decode(encode_strictly(data, 200)), sources)
            assert all(map(np.array_equal, decoded, expected))


@pytest.fixture
def best() -> Iterator[Any]:
    """The codec; afterwards the variant of this CPU is active again."""
    codec = load_codec()
    yield codec
    codec.choose()


@pytest.mark.parametrize("variant", ["avx2", "avx2_tables", "sse4", "neon", "plain"])
def test_every_variant_gives_the_same_pixels(variant: str, best: Any) -> None:
    try:
        best.choose(variant)
    except ValueError:
        pytest.skip(f"this CPU has no variant {variant}")
    made = [made_jpeg(100, 150, sampling, 88) for sampling in (*SAMPLINGS, "gray")]
    made += [encoded(picture(90, 70), "JPEG", progressive=True), made_jpeg(70, 66, "420", 100, noise=True)]
    for number, data in enumerate(made):
        results = []
        for name in (variant, ""):
            best.choose(name)
            kept = encode_strictly(data, 200)
            results += [kept, decode_image(data).tobytes(), decode(kept).tobytes()]
            results += [decode(kept, Region(0, 0, 64, 64, reduce)).tobytes() for reduce in (2, 4, 8)]
            for image in (data, kept):
                bytes_, floats = np.empty((31, 45, 3), np.uint8), np.empty((3, 31, 45), np.float32).transpose(1, 2, 0)
                box = Region(3, 5, 60, 57)
                assert decode_resized(image, box, (31, 45), bytes_) == (number != 5 or image is kept)
                decode_resized(image, box, (31, 45), floats, scaling=Scaling(np.float32([[2, 3, 4], [5, 6, 7]]), True))
                results += [bytes_.tobytes(), floats.tobytes()] if number != 5 or image is kept else []
        half = len(results) // 2
        assert results[:half] == results[half:], number


def test_arguments_that_do_not_fit_one_another_are_refused(best: Any) -> None:
    """Invalid arguments cannot lead the codec outside its buffers."""
    kept, out = encode_strictly(made_jpeg(16, 24)), np.empty((16, 24, 3), np.uint8)
    shape, region = (16, 24, 3, 1, 1), (8, 1, 0, 0, 16, 24)
    assert best.decode(kept, shape, region, out) == 0
    wrong: list[tuple[Any, ...]] = [
        (kept[:100], shape, region, out),
        (kept, (16, 24, 2, 1, 1), region, out),
        (kept, (16, 24, 3, 3, 1), region, out),
        (kept, (70_000, 24, 3, 1, 1), region, out),
        (kept, shape, (8, 1, 1, 0, 16, 24), out),
        (kept, shape, (7, 1, 0, 0, 14, 21), out),
        (kept, shape, region, out[1:]),
        (kept, shape, region, out.astype(np.float32)),
        (kept, shape, region, out.transpose(1, 0, 2)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="native: "):
            best.decode(*arguments)


WITHOUT = """
import sys
sys.modules["readers.coefficients.native"] = None
from cache.errors import UnsupportedCpuError
from readers.coefficients import decode, encode
from readers.decode import decode_image
data = open(sys.argv[1], "rb").read()
print(decode_image(data).shape, encode(data))
try:
    decode(bytes.fromhex(sys.argv[2]))
except UnsupportedCpuError as error:
    print(error)
"""


def test_without_the_codec_libjpeg_decodes(tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(made_jpeg(70, 80))
    done = run_python("-c", WITHOUT, str(tmp_path / "one.jpg"), GOLDEN, cwd=ROOT)
    shape, error = done.stdout.splitlines()
    assert shape == "(70, 80, 3) None" and "the compiled codec" in error and "keep='encoded' works" in error, (
        done.stderr
    )


# Decoded and resized in one pass: exactly torch's resize of the pixels.


Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def by_torch(pixels: Pixels, resized: tuple[int, int]) -> Pixels:
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(image, resized, mode="bilinear", antialias=True, align_corners=False)
    return made[0].permute(1, 2, 0).numpy()


def region_of(rng: np.random.Generator, height: int, width: int) -> Region:
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
    """At any position, scale, output size, crop, flip and layout; no byte around the result is written."""
    rng = np.random.default_rng(11)
    images = [
        encode_strictly(made_jpeg(*size, sampling, 90, noise, seed), 200)
        for seed, (size, noise) in enumerate((((91, 130), True), ((203, 61), False), ((17, 9), True)))
    ]
    for trial in range(240):
        image = images[trial % len(images)]
        shape = parse_coefficients(image)
        region = region_of(rng, shape.height, shape.width)
        pixels = decode(image, region)
        resized = tuple(int(rng.integers(-(-side // 4), 2 * side + 40)) for side in pixels.shape[:2])
        height, width = (int(rng.integers(1, side + 1)) for side in resized)
        top, left = int(rng.integers(resized[0] - height + 1)), int(rng.integers(resized[1] - width + 1))
        flips = bool(rng.integers(2)), bool(rng.integers(2))
        around = np.full((3, height + 2, width + 3) if trial % 2 else (height + 2, width + 3, 3), 77, np.uint8)
        out = (around.transpose(1, 2, 0) if trial % 2 else around)[1:-1, 1:-2]
        assert decode_resized(image, region, resized, out, corner=(top, left), flips=flips)
        expected = by_torch(pixels, resized)[top : top + height, left : left + width]
        expected = expected[:: -1 if flips[0] else 1, :: -1 if flips[1] else 1]
        assert np.array_equal(out, expected), (trial, region, resized, (top, left), flips)
        out[:] = 77
        assert (around == 77).all(), (trial, region, resized)


def test_every_pair_of_sizes_has_torchs_weights() -> None:
    """Sides of the box from 1 to 300, and outputs from a quarter of the side up, with values that reveal every
    weight."""
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
def test_floats_equal_those_of_a_batch(planar: bool, normalize: Normalize | None) -> None:
    """To the last bit, at every width; no byte around the result is written."""
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


def test_images_that_are_resized_separately() -> None:
    """Strong reductions, huge outputs, and images that are stored rotated."""
    image, out = encode_strictly(made_jpeg(64, 96)), np.full((4, 4, 3), 9, np.uint8)
    cases = [(image, Region(0, 0, 61, 40), (15, 40)), (image, Region(0, 0, 60, 41), (60, 10))]
    cases += [(image, Region(0, 0, 64, 96, 2), (7, 12)), (image, Region(0, 0, 8, 8), (4097, 8))]
    for orientation in range(2, 9):
        cases.append((encode_strictly(encoded(picture(40, 56), "JPEG", orientation)), Region(0, 0, 40, 40), (20, 20)))
    for data, region, resized in cases:
        assert not decode_resized(data, region, resized, out) and (out == 9).all()


def test_results_that_do_not_fit() -> None:
    image, region = encode_strictly(made_jpeg(40, 56)), Region(0, 0, 40, 40)
    for corner in ((1, 0), (0, 1), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"corner: 20 x 20 pixels at .* are not within the \(20, 20\)"):
            decode_resized(image, region, (20, 20), np.empty((20, 20, 3), np.uint8), corner=corner)
    read_only = np.frombuffer(bytes(1200), np.uint8).reshape(20, 20, 3)
    apart = np.empty((20, 40, 3), np.uint8)[:, ::2]
    for out in (np.empty((20, 20, 3)), np.empty((20, 20, 4), np.uint8), read_only, apart):
        with pytest.raises(ValueError, match=r"out: expected writable uint8"):
            decode_resized(image, region, (20, 20), out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not within the 40 x 56 pixels of the image"):
        decode_resized(image, Region(30, 60, 8, 8), (8, 8), np.empty((8, 8, 3), np.uint8))


def test_damage_is_found_before_a_resize() -> None:
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
