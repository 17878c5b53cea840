"""Boxes of JPEGs by compiled functions, strips of JPEGs, and the index of rows: libjpeg-turbo's pixels everywhere."""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from click.testing import CliRunner
from coefficient_cases import Compiled, exact, made_jpeg
from image_cases import encoded, picture
from PIL import Image
from remote_servers import Proxy
from remote_suite import BUCKET, put_files

import packer
import readers
from cache.errors import BadSampleError, DamagedSampleError, DatasetError, OutputError
from packer.cli.group import cli
from packer.jpeg_rows import row_entry
from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.coefficients.strips import decode_strips
from readers.decode import Region, decode_image
from readers.decode.cpu import has_clean_header
from readers.headers import read_header
from readers.index import ROW_FILES
from readers.loader import ImageLoader
from readers.rows.entries import RowEntry
from readers.rows.reading import Span, announce_strips, read_strips
from readers.rows.strips import Strip, find_strip, make_strip

SAMPLINGS = ("444", "422", "440", "420", "gray")
WIDE = (150, 203)
pytestmark = pytest.mark.usefixtures("compiled")


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
        return decode_image(data, region)
    except BadSampleError as error:
        return str(error)


def compiled_pixels(data: bytes, region: Region) -> Any:
    try:
        return decode_image(data, region, compiled=True)
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


# --- boxes by compiled functions --------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("quality", [35, 96])
def test_compiled_boxes_are_those_of_libjpeg(sampling: str, quality: int) -> None:
    for size, noise in ((WIDE, False), ((64, 65), True), ((81, 640), False)):
        data = made_jpeg(*size, sampling, quality, noise)
        for region in boxes(*size, 40):
            found = decode_strips(data, read_header(data), region, has_clean_header)
            assert found is not None, "it was left to libjpeg"
            assert np.array_equal(found, decode_image(data, region)), region


@pytest.mark.parametrize("orientation", range(1, 9))
def test_compiled_boxes_are_upright(orientation: int) -> None:
    data = encoded(picture(88, 120), "JPEG", orientation, quality=90, subsampling="4:2:0")
    height, width = read_header(data).upright_size
    for region in boxes(height, width, 15):
        assert np.array_equal(decode_image(data, region, compiled=True), decode_image(data, region)), region


def test_tables_of_their_own_and_noise() -> None:
    """Optimised Huffman tables, codes longer than the tables of the first look, blocks with all coefficients."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (130, 140, 3), np.uint8))
    mixed = Image.composite(noise, picture(130, 140), Image.fromarray(rng.integers(0, 2, (130, 140), np.uint8) * 255))
    for image, quality in itertools.product((noise, mixed, picture(130, 140)), (100, 75, 5)):
        data = encoded(image, "JPEG", quality=quality, optimize=True, subsampling=0)
        for region in boxes(130, 140, 10):
            found = decode_strips(data, read_header(data), region, has_clean_header)
            assert found is not None and np.array_equal(found, decode_image(data, region)), (quality, region)


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
    assert decode_strips(data, header, region, has_clean_header) is None
    assert np.array_equal(decode_image(data, region, compiled=True), decode_image(data, region))


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
        left += decode_strips(bytes(spoiled), read_header(bytes(spoiled)), region, has_clean_header) is None
    assert 0 < left < 150


# --- strips -----------------------------------------------------------------------------------------------------
def strip_of(data: bytes, entry: RowEntry, top: int, bottom: int) -> Strip:
    header = read_header(data)
    size = (header.height, header.width)
    which = find_strip(entry, size, top, bottom)
    return make_strip(entry, data[which.start : which.stop], which, size)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("quality", "optimize"), [(92, False), (60, True)])
def test_strips_have_the_pixels_of_the_image(sampling: str, quality: int, optimize: bool) -> None:
    data = made_jpeg(*WIDE, sampling, quality)
    if optimize and sampling != "440":
        options: dict[str, Any] = {} if sampling == "gray" else {"subsampling": ":".join(sampling)}
        image = picture(*WIDE).convert("L") if sampling == "gray" else picture(*WIDE)
        data = encoded(image, "JPEG", quality=quality, optimize=True, **options)
    entry, whole = row_entry(data), exact(data)
    begun = set()
    for top in range(0, WIDE[0], 5):
        for bottom in {top + 1, min(WIDE[0], top + 30), WIDE[0]}:
            strip = strip_of(data, entry, top, bottom)
            begun.add(int(entry.bits[(strip.first_row + 15) // 16]) & 7)
            pixels = simplejpeg.decode_jpeg(strip.data, "RGB", fastdct=False, fastupsample=False, strict=True)
            wanted = whole[top:bottom]
            assert np.array_equal(pixels[top - strip.first_row : bottom - strip.first_row], wanted), (top, bottom)
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(strip.data)).convert("RGB")), pixels)
            assert pixels.shape[0] == strip.height
            if top % 8 == 0:
                for reduce in (2, 4, 8):
                    height = min(-(-(bottom - top) // reduce) * reduce, WIDE[0] - top)
                    if top + height <= bottom:
                        region = Region(top, 0, height, WIDE[1], reduce)
                        moved = region._replace(top=top - strip.first_row)
                        assert np.array_equal(decode_image(strip.data, moved), decode_image(data, region)), region
    assert len(begun) > 4, "rows begin at all bits of a byte"


def test_a_strip_is_small() -> None:
    data = made_jpeg(640, 480, "420", 90)
    strip = strip_of(data, row_entry(data), 320, 400)
    assert len(strip.data) < len(data) * 0.25 and strip.first_row == 288


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(picture(), "JPEG", progressive=True), "progressive"),
        (encoded(picture(), "JPEG", restart_marker_rows=1), "restarts"),
        (encoded(picture(), "PNG"), "not a JPEG"),
        (made_jpeg(100, 100)[:-2] + b"\0\0\xff\xd9", "damaged"),
        (made_jpeg(100, 100) + b"more", ""),
    ],
)
def test_what_has_no_entry(data: bytes, reason: str) -> None:
    if reason:
        with pytest.raises(ValueError, match=reason):
            row_entry(data)
    else:
        assert len(row_entry(data).dc) == 13


def test_spoiled_parts_are_found() -> None:
    data = made_jpeg(*WIDE, "420")
    entry = row_entry(data)
    which = find_strip(entry, WIDE, 64, 100)
    part = bytearray(data[which.start : which.stop])
    for place in (0, len(part) // 2, len(part) - 1):
        part[place] ^= 1
        with pytest.raises(DamagedSampleError, match="CRC32C"):
            make_strip(entry, bytes(part), which, WIDE)
        part[place] ^= 1
    assert make_strip(entry, bytes(part), which, WIDE).height


# --- sets -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory, compiled: Compiled) -> Path:
    """A set with row files: JPEGs of all samplings, and some images that have no rows."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "a").mkdir()
    for number in range(20):
        data = made_jpeg(200 + 13 * number, 180, SAMPLINGS[number % 5], 88, seed=number)
        (tree / "a" / f"{number:02}.jpg").write_bytes(data)
    (tree / "a" / "20.jpg").write_bytes(encoded(picture(300, 200), "JPEG", progressive=True))
    (tree / "a" / "21.jpg").write_bytes(encoded(picture(300, 200), "JPEG", 6, quality=90))
    (tree / "a" / "22.png").write_bytes(encoded(picture(300, 200), "PNG"))
    path = tmp_path_factory.mktemp("noted") / "set"
    packer.convert(tree, "tar", path, workers=1, shard_size=300_000)
    result = packer.index_jpeg_rows(path, workers=2)
    assert (result.samples, result.noted, sum(result.left_out.values())) == (23, 21, 2)
    return path


def check_rows(reader: readers.Reader, *, parts: bool) -> None:
    """Every sample's rows; parts: whether fewer bytes than the image are enough."""
    small = 0
    for i in range(len(reader)):
        whole = bytes(reader.read(i))
        height = int(reader.info.height[i])
        top = height // 2
        strip = reader.read_rows(i, top, top + 20)
        pixels, wanted = (np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in (strip.data, whole))
        assert np.array_equal(pixels[top - strip.first_row : top + 20 - strip.first_row], wanted[top : top + 20])
        small += len(strip.data) < len(whole) // 2
    assert small == (21 if parts else 0)


def test_rows_of_every_reader(noted: Path, tmp_path: Path) -> None:
    reader = readers.open(noted)
    check_rows(reader, parts=True)
    check_rows(readers.open(noted, verify=True, backend="mmap"), parts=True)
    check_rows(pickle.loads(pickle.dumps(reader)), parts=True)
    chosen = reader.select(indices=[5, 3, 20])
    assert chosen.read_rows(0, 100, 120) == reader.read_rows(5, 100, 120)
    assert chosen.read_rows(2, 100, 120).height == 0
    cached = readers.cached(reader, capacity="64MB")
    check_rows(cached, parts=False)
    assert cached.stats().filled and packer.verify(noted, deep=True).ok
    with pytest.raises(ValueError, match="rows"):
        reader.read_rows(0, 20, 20)
    with pytest.raises(IndexError):
        reader.read_rows(23, 0, 1)


def test_the_set_is_the_same_with_rows(noted: Path, tmp_path: Path) -> None:
    """Fingerprints, and so resume tokens and caches; `packer index` keeps the rows, and can make them again."""
    copy = shutil.copytree(noted, tmp_path / "set", symlinks=True)
    with_rows = readers.open(copy)
    info = with_rows.dataset
    without = {name: {n: c for n, c in s.columns.items() if n not in ROW_FILES} for name, s in info.splits.items()}
    assert all(set(ROW_FILES) <= set(split.columns) for split in info.splits.values())
    splits = {name: replace(split, columns=without[name]) for name, split in info.splits.items()}
    assert replace(info, splits=splits).fingerprint() == info.fingerprint()
    packer.index(copy)
    assert set(ROW_FILES) <= set(readers.open(copy).split_info.columns)
    assert packer.index_jpeg_rows(copy).noted == 21 and packer.verify(copy).ok
    check_rows(readers.open(copy), parts=True)


@pytest.mark.parametrize("column", range(3))
def test_spoiled_row_files(noted: Path, tmp_path: Path, column: int) -> None:
    """A lie in the index is an error or is found out, whichever byte it is in; pixels are never wrong."""
    copy = shutil.copytree(noted, tmp_path / "set", symlinks=True)
    path = copy / readers.open(copy).split_info.index / ROW_FILES[column]
    whole, rng = path.read_bytes(), np.random.default_rng(column)
    found = 0
    for _ in range(25):
        spoiled = bytearray(whole)
        spoiled[int(rng.integers(128, len(whole)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(spoiled))
        try:
            check_rows(readers.open(copy), parts=True)
        except DatasetError as error:
            assert "image.rows" in str(error) or "--jpeg-rows" in str(error)
            found += 1
    assert found == 25
    path.write_bytes(whole[:-1])
    with pytest.raises(DatasetError):
        check_rows(readers.open(copy), parts=True)
    path.write_bytes(bytes(spoiled))
    assert not packer.verify(copy).ok


def test_lies_with_a_right_checksum(noted: Path) -> None:
    """An entry that says of itself that it is right: no byte outside the sample is read."""
    from crc32c import crc32c

    from readers.rows.entries import RowColumns, pack_entry
    from readers.rows.strips import rows_of
    from readers.strings import Strings

    data = made_jpeg(*WIDE, "420")
    entry, crc = row_entry(data), crc32c(data)
    heads = np.frombuffer(entry.head, np.uint8)

    def read(lie: RowEntry) -> RowEntry:
        packed = np.frombuffer(pack_entry(lie, 0, crc), np.uint8)
        columns = RowColumns(Strings(packed, np.array([0, len(packed)], np.uint64)), heads, "here")
        return columns.entry(0, crc, len(data), lambda head: rows_of(head, WIDE[0]))

    assert np.array_equal(read(entry).bits, entry.bits)
    far, turned, early = (entry.bits.copy() for _ in range(3))
    far[-1] = 8 * len(data) + 64
    turned[[3, 4]] = turned[[4, 3]]
    early[0] += 1
    for bits in (far, turned, early):
        with pytest.raises(DatasetError, match="not in order"):
            read(entry._replace(bits=bits))
    with pytest.raises(DatasetError, match="expected"):
        read(entry._replace(dc=entry.dc[:-1]))
    wrong = entry.bits.copy()
    wrong[4] += 16
    with pytest.raises(DamagedSampleError, match="CRC32C"):
        strip_of(data, read(entry._replace(bits=wrong)), 80, 90)


def batches(reader: readers.Reader, ops: list[Any], **options: Any) -> list[torch.Tensor]:
    loader = ImageLoader(reader, 5, augment=ops, seed=3, threads=2, **options)
    return [images for images, _ in loader]


@pytest.mark.parametrize("ops", [[RandomResizedCrop(64), RandomHorizontalFlip()], [Resize(96), CenterCrop(64)]])
def test_the_loader_makes_the_same_batches(noted: Path, ops: list[Any]) -> None:
    reader = readers.open(noted)
    whole = readers.cached(reader, capacity="64MB")
    wanted = batches(whole, ops)
    for options in ({}, {"decoder": "compiled"}, {"decoder": "compiled", "views": 2}):
        for source in (reader, whole):
            found = batches(source, ops, **options)
            if "views" in options:
                assert all(torch.equal(found[i][0], wanted[i]) for i in range(len(wanted)))  # type: ignore[call-overload]
            else:
                assert all(map(torch.equal, found, wanted))


def test_a_remote_reader_fetches_the_rows_alone(noted: Path, proxy: Proxy) -> None:
    """By one range a strip, announced or not; the loader's batches are the same."""
    url = f"s3://{BUCKET}/rows/set"
    put_files(noted, url)
    local = readers.open(noted)
    with readers.open(url) as remote:
        check_rows(remote, parts=True)
        proxy.log.clear()
        strip = remote.read_rows(7, 150, 170)
        first, last = (int(byte) for byte in proxy.gets()[0].rpartition("bytes=")[2].split("-"))
        assert len(proxy.gets()) == 1 and last + 1 - first < len(strip.data) < len(local.read(7)) // 2
        assert strip == local.read_rows(7, 150, 170)
        indices, spans = np.array([2, 9, 14, 20]), [Span(100, 120)] * 4
        announce_strips(remote.table, remote.store, indices, spans)
        found = read_strips(remote.table, remote.store, indices, spans, remote.read_many)
        assert found == [local.read_rows(int(i), 100, 120) for i in indices]
        before = len(proxy.gets())
        announce_strips(remote.table, remote.store, indices, spans)
        read_strips(remote.table, remote.store, indices, spans, remote.read_many)
        announced = len(proxy.gets()) - before
        read_strips(remote.table, remote.store, indices, spans, remote.read_many)
        assert len(proxy.gets()) - before == 2 * announced, "what is announced is fetched once"
        ops = [RandomResizedCrop(64), RandomHorizontalFlip()]
        assert all(map(torch.equal, batches(remote, ops), batches(local, ops)))


def test_commands(noted: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(noted, tmp_path / "set", symlinks=True)
    done = CliRunner().invoke(cli, ["index", "--jpeg-rows", str(copy)])
    assert done.exit_code == 0 and "the rows of 21 of 23 samples noted in" in done.output, done.output
    refused = CliRunner().invoke(cli, ["index", "--jpeg-rows", str(copy), "--split", "train"])
    assert refused.exit_code == 2 and "takes one directory" in refused.output
    with pytest.raises(OutputError, match="not a directory of this machine"):
        packer.index_jpeg_rows("s3://bucket/set")
