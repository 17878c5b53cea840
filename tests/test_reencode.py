"""Packing checks images: images that readers could not decode are refused by name, partly decodable ones cause a
warning; re-encoded images are upright, with their colours, their depth and unique names."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert, files_of, tree_of
from image_cases import XMP_PREFIX, chunk, encoded, exif_blob, picture, pillow_rgb, with_chunks, with_segments, xmp
from PIL import Image
from suites.containers import tar_of
from test_unusual_images import DEEP, animation, deep, grey16, patched

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer import Reencode
from readers.decode import decode_image, decode_unchanged
from readers.headers import SUFFIX, frames, read_header

JPEG, PNG = encoded(picture(20, 30), "JPEG"), encoded(picture(20, 30), "PNG")
FLOATS = encoded(Image.fromarray(grey16().astype(np.float32)), "TIFF")


def packed(tmp_path: Path, files: dict[str, bytes], **options: Any) -> tuple[packer.ConvertResult, list[bytes]]:
    """These files, packed into tmp_path/set from tmp_path/src."""
    result = convert(tree_of(tmp_path / "src", files), tmp_path / "set", **options)
    with readers.open(result.output) as reader:
        return result, [bytes(reader.read(i)) for i in range(len(reader))]


def pack_one(tmp_path: Path, data: bytes, **options: Any) -> bytes:
    return packed(tmp_path, {"a.jpg": data}, overwrite=True, **options)[1][0]


# --- refusals and warnings ---------------------------------------------------------------------------------------
def test_an_image_without_an_rgb_form_is_refused_or_packed_for_unchanged(tmp_path: Path) -> None:
    files = {"a.tif": FLOATS, "b.jpg": JPEG}
    with pytest.raises(BadSampleError, match=r"a\.tif: tiff image: holds floating-point samples.*decode='unchanged'"):
        packed(tmp_path, files)
    result, images = packed(tmp_path, files, decode="unchanged", check="decode", overwrite=True)
    assert result.warnings == () and images[0] == FLOATS
    assert packer.verify(result.output, deep=True).ok, "images packed for unchanged are checked for that"
    with readers.open(result.output) as reader:
        assert decode_unchanged(reader.read(0)).dtype == np.float32
    assert packed(tmp_path, files, decode="none", overwrite=True)[1][0] == FLOATS


def test_a_set_for_rgb_is_checked_by_the_decoder_of_the_loader(tmp_path: Path) -> None:
    """Stray bytes stop simplejpeg, but not the loader; 12-bit samples stop both."""
    good = encoded(picture(48, 64), "JPEG").replace(b"\xff\xda", b"stray\xff\xda")
    result, (image,) = packed(tmp_path, {"a.jpg": good}, check="decode")
    assert packer.verify(result.output, deep=True).ok
    assert np.array_equal(decode_image(image), pillow_rgb(good))
    twelve = patched(encoded(picture(48, 64), "JPEG", progressive=True), b"\xff\xc2", 4, 12)
    with pytest.raises(BadSampleError, match=r"b\.jpg: jpeg image: has 12 bits a sample"):
        packed(tmp_path / "other", {"b.jpg": twelve})


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_further_frames_are_counted(kind: str) -> None:
    media, data = kind.lower(), animation(kind)
    assert frames(data, media) == frames(memoryview(b"x" + data)[1:], media) == 3
    assert frames(encoded(picture(20, 30), kind), media) == 1
    for cut in range(0, len(data), 7):
        assert 1 <= frames(data[:cut], media) <= 3


def test_a_cycle_of_pages_ends() -> None:
    data = bytearray(animation("TIFF", 2))
    first = int.from_bytes(data[4:8], "little")
    link = first + 2 + 12 * int.from_bytes(data[first : first + 2], "little")
    data[link : link + 4] = first.to_bytes(4, "little")
    assert frames(bytes(data), "tiff") == 1


def test_partly_decodable_images_cause_a_warning(tmp_path: Path) -> None:
    files = {"a.gif": animation("GIF"), "b.tif": animation("TIFF"), "c.png": DEEP["rgb png"][0], "d.png": PNG[:-12]}
    result, images = packed(tmp_path, files | {"e.jpg": JPEG})
    assert images == [*files.values(), JPEG], "bytes were changed"
    warnings = "\n".join(result.warnings)
    assert "1 image with damage that costs no pixels (the first: d.png)" in warnings
    assert "1 image with more than 8 bits per channel (the first: c.png)" in warnings
    assert "2 images with further frames or pages (the first: a.gif): readers decode the first one only" in warnings
    assert len(result.warnings) == 3
    again = packed(tmp_path, {})[0]
    assert again.already_done and again.warnings == result.warnings
    assert packer.verify(result.output, deep=True).ok
    assert not any("8 bits" in line for line in packed(tmp_path, {}, decode="unchanged", overwrite=True)[0].warnings)


def test_adopted_shards_are_checked_too_and_nothing_is_refused(tmp_path: Path) -> None:
    members = (("a.gif", animation("GIF")), ("b.tif", FLOATS), ("c.png", DEEP["rgb png"][0]))
    (tmp_path / "made.tar").write_bytes(tar_of(*members))
    warnings = "\n".join(packer.index([tmp_path / "made.tar"], workers=1).warnings)
    assert "1 image with further frames or pages (the first: a)" in warnings
    assert "1 image that readers cannot decode to RGB (the first: b)" in warnings
    assert "1 image with more than 8 bits per channel (the first: c)" in warnings
    with readers.open(tmp_path) as reader:
        assert len(reader) == 3 and reader.info.height.all()


# --- re-encoding -------------------------------------------------------------------------------------------------
def rotated(medium: str, orientation: int) -> bytes:
    """Colours that hardly any codec changes, and a different one in each corner."""
    blob, image = exif_blob(orientation), picture(4, 6).resize((56, 40), Image.Resampling.BICUBIC)
    if medium == "jpeg xmp":
        return with_segments(encoded(image, "JPEG", quality=95), XMP_PREFIX + xmp(orientation))
    if medium == "png xmp":
        return with_chunks(encoded(image, "PNG"), chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(orientation)))
    if medium == "webp":
        return encoded(image, "WEBP", lossless=True, exif=blob)
    if medium == "tiff":
        return encoded(image, "TIFF", tiffinfo={0x0112: orientation})
    return encoded(image, medium.upper(), exif=b"Exif\0\0" + blob)


@pytest.mark.parametrize(
    ("medium", "codec"),
    [("jpeg", "keep"), ("png", "jpeg"), ("webp", "png"), ("tiff", "webp"), ("jpeg xmp", "webp"), ("png xmp", "keep")],
)
def test_a_re_encoded_image_is_upright(tmp_path: Path, medium: str, codec: str) -> None:
    for orientation in (1, 2, 6, 8):
        data = rotated(medium, orientation)
        expected = Image.fromarray(pillow_rgb(data))
        expected.thumbnail((24, 24), Image.Resampling.LANCZOS)
        made = pack_one(tmp_path, data, reencode=Reencode(codec, 24, None, 95))
        pixels = decode_image(made)
        assert pixels.shape[:2] == (expected.height, expected.width), "squashed or rotated"
        assert np.abs(pixels.astype(int) - np.asarray(expected)).mean() < 9
        assert read_header(made).orientation == 1


@pytest.mark.parametrize(("kind", "codec"), [("JPEG", "webp"), ("PNG", "jpeg"), ("WEBP", "png")])
def test_exif_stays_with_every_codec(tmp_path: Path, kind: str, codec: str) -> None:
    exif = Image.Exif()
    exif[0x010F] = "the maker"
    data = encoded(picture(40, 56), kind, exif=exif.tobytes())
    with Image.open(io.BytesIO(pack_one(tmp_path, data, reencode=Reencode(codec, 24)))) as image:
        assert image.getexif()[0x010F] == "the maker"


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_shifted_or_kept(tmp_path: Path, kind: str) -> None:
    smooth = (np.add.outer(np.arange(40), np.arange(56)) * 680).astype(np.uint16)
    data = encoded(Image.fromarray(smooth), kind)
    kept = decode_unchanged(pack_one(tmp_path, data, reencode=Reencode("png", 28)))
    assert kept.dtype == np.uint16 and kept.shape == (20, 28)
    assert abs(float(kept.mean()) - float(smooth.mean())) < 300
    shifted = decode_image(pack_one(tmp_path, data, reencode=Reencode("jpeg", quality=95)))
    assert np.abs(shifted[:, :, 0].astype(int) - (smooth >> 8)).max() <= 4


def test_other_colours_become_8_bit_rgb(tmp_path: Path) -> None:
    """CIELAB colours, and 16-bit colours in a lossy codec."""
    lab = Image.frombytes("LAB", (50, 40), np.full((40, 50, 3), (150, 30, 220), np.uint8).tobytes())
    data = encoded(lab, "TIFF")
    made = pack_one(tmp_path, data, reencode=Reencode("png"))
    with Image.open(io.BytesIO(made)) as image:
        assert image.mode == "RGB"
    assert np.array_equal(decode_image(made), pillow_rgb(data))
    made = pack_one(tmp_path, DEEP["rgb png"][0], reencode=Reencode("webp", quality=100))
    assert abs(float(decode_image(made).mean()) - float((deep(3) >> 8).mean())) < 5


@pytest.mark.parametrize(
    ("data", "codec", "message"),
    [
        (animation("GIF"), "webp", "has 3 frames or pages, of which re-encoding would keep one"),
        (animation("WEBP"), "jpeg", "has 3 frames"),
        (animation("TIFF"), "keep", "has 3 frames"),
        (DEEP["rgb png"][0], "keep", "16 bits per channel, but Pillow writes at most 8"),
        (DEEP["rgb tiff"][0], "png", "16 bits per channel, but Pillow writes at most 8"),
    ],
    ids=["gif", "webp", "tiff", "deep png", "deep tiff"],
)
def test_an_image_that_would_lose_more_than_its_size_is_refused(
    tmp_path: Path, data: bytes, codec: str, message: str
) -> None:
    with pytest.raises(BadSampleError, match=message):
        pack_one(tmp_path, data, reencode=Reencode(codec, 12))


def test_resizing_equals_pillow_and_small_images_keep_their_bytes(tmp_path: Path) -> None:
    small = encoded(picture(50, 60), "JPEG")
    x, y = np.meshgrid(np.arange(400), np.arange(300))
    waves = np.stack([127 + 120 * np.sin(x / 40), 127 + 120 * np.cos(y / 30), (x + y) / 3], -1)
    big = encoded(Image.fromarray(waves.astype(np.uint8)), "JPEG", quality=95)
    result, images = packed(tmp_path, {"big.jpg": big, "small.jpg": small}, reencode=Reencode(resize_short=64))
    assert images[1] == small
    pixels = decode_image(images[0]).astype(int)
    reference = Image.fromarray(pillow_rgb(big)).resize((85, 64), Image.Resampling.LANCZOS)
    assert pixels.shape == (64, 85, 3) and np.abs(pixels - np.asarray(reference)).mean() < 3
    options = readers.open(result.output).dataset.made["options"]["reencode"]
    assert options == {"codec": "keep", "max_side": None, "resize_short": 64, "quality": None}
    assert "re-encoded" in packer.verify(result.output, against=tmp_path / "src", workers=1).problems[0].what


@pytest.mark.parametrize(("quality", "same"), [(95, True), (10, False)])
def test_quality_never_makes_a_file_larger(tmp_path: Path, quality: int, same: bool) -> None:
    data = encoded(picture(200, 200), "JPEG", quality=30)
    image = pack_one(tmp_path, data, reencode=Reencode(quality=quality))
    assert (image == data) is same and len(image) <= len(data)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK"])
def test_modes_and_codecs(tmp_path: Path, mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    files = {"a.img.x": encoded(picture(40, 60).convert(mode), kind)}
    for codec in ("keep", "jpeg", "png", "webp"):
        result, (image,) = packed(tmp_path, files, reencode=Reencode(codec, max_side=30), overwrite=True)
        media, height, width, *_ = read_header(image)
        assert (width, height, media) == (30, 20, kind.lower() if codec == "keep" else codec)
        suffix = "x" if media == kind.lower() else SUFFIX[media]
        assert readers.open(result.output).name(0) == f"a.img.{suffix}"


@pytest.mark.parametrize(
    "wrong", [{"codec": "gif"}, {"max_side": 0}, {"quality": 101}, {"max_side": 9, "resize_short": 9}], ids=str
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Reencode(**wrong)


# --- names -------------------------------------------------------------------------------------------------------
def test_files_that_differ_only_in_their_suffix_get_unique_names(tmp_path: Path) -> None:
    other = encoded(picture(30, 20), "PNG")
    files = {"x.jpg": JPEG, "x.png": other, "y.png": other, "z.webp": encoded(picture(20, 30), "WEBP")}
    result, images = packed(tmp_path, files, reencode=Reencode("webp"))
    assert packer.extract(result.output, tmp_path / "out").files == 4
    made = files_of(tmp_path / "out")
    assert list(made) == ["x.jpg.webp", "x.png.webp", "y.webp", "z.webp"] and sorted(made.values()) == sorted(images)
    assert packer.verify(result.output, deep=True).ok


def test_a_name_that_another_file_has_is_refused_before_packing(tmp_path: Path) -> None:
    names = ("x.jpg", "x.png", "x.jpg.webp", "x.jpg.gif")
    with pytest.raises(SourceError, match=r"would both be called x\.jpg\.webp when re-encoded; rename one"):
        packed(tmp_path, dict.fromkeys(names, PNG), reencode=Reencode("webp"))
    assert not (tmp_path / "set").exists() or not list((tmp_path / "set").glob("*.tar"))
