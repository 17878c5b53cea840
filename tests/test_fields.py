"""Kinds of fields: bytes equal those of numpy, Pillow and JSON; hostile fields are refused; sets carry fields."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import make_jpeg
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError, DatasetError, FormatError, SourceError, UnknownNameError
from readers.fields import KINDS, check_field, decode_field, encode_field
from readers.layout import FIELD_KINDS
from readers.table import parse_npy

ARRAYS = [
    np.arange(12, dtype=np.int64).reshape(3, 4),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(5, np.float16),
    np.zeros((0, 4), np.float32),
    np.array([True, False]),
    np.arange(3, dtype=">i4"),
    np.array([1 + 2j], np.complex64),
    np.arange(9, dtype=np.uint8)[::2],
]

NUMBERS = (np.arange(35).reshape(5, 7) * 3) % 256


def saved(array: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def image_bytes(pixels: Any, codec: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(out, codec, **options)
    return out.getvalue()


def test_every_kind_of_a_set_can_be_decoded() -> None:
    assert set(KINDS) == set(FIELD_KINDS)


# --- arrays -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_arrays_equal_those_of_numpy_both_ways(array: Any) -> None:
    for parsed in (parse_npy(saved(array)), np.load(io.BytesIO(bytes(encode_field("array", array))))):
        np.testing.assert_array_equal(parsed, array)
        assert parsed.dtype.newbyteorder("=") == array.dtype.newbyteorder("=") and parsed.shape == array.shape
    own = parse_npy(memoryview(saved(array)))
    assert own.flags.writeable and own.flags.c_contiguous and own.dtype.isnative


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"
GOOD = saved(np.zeros((2, 2), np.float32))


def with_header(text: str, values: int = 16, version: bytes = b"\x01\x00") -> bytes:
    size = len(text.encode("latin-1")).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + text.encode("latin-1") + bytes(values)


HOSTILE = {
    "nothing": b"",
    "another magic": b"PK\x03\x04" + GOOD[4:],
    "version 9": with_header(HEADER, version=b"\x09\x00"),
    "a pickle": saved(np.array([{}], object), allow_pickle=True),
    "strings": saved(np.array(["a"])),
    "code": with_header("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (2, 2), }"),
    "a negative side": with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 2), }"),
    "an order of its own": with_header("{'descr': '<f4', 'fortran_order': 1, 'shape': (2, 2), }"),
    "too few values": with_header(HEADER, 15),
    "too many values": with_header(HEADER, 17),
    "2^60 values": with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1073741824, 1073741824), }"),
    "no values of a huge shape": with_header(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999), }", 0
    ),
    "40 sides": with_header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({'1, ' * 40}), }}", 1),
    "a long header": with_header(HEADER + " " * 20_000),
    "a header beyond the end": b"\x93NUMPY\x02\x00" + (1 << 31).to_bytes(4, "little") + HEADER.encode(),
    "a number of many digits": with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 9000},), }}"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_arrays_are_bad_samples(data: bytes) -> None:
    with pytest.raises(BadSampleError, match=r"not an array in \.npy form: found"):
        parse_npy(data)


def test_an_array_cut_anywhere_is_a_bad_sample() -> None:
    for stop in range(len(GOOD)):
        with pytest.raises(BadSampleError):
            parse_npy(GOOD[:stop])


def test_a_header_with_any_changed_byte_gives_an_array_or_a_bad_sample() -> None:
    for at in range(len(GOOD) - 16):
        for value in (0, 0x27, 0x28, 0x39, 0xFF, GOOD[at] ^ 1):
            data = GOOD[:at] + bytes((value,)) + GOOD[at + 1 :]
            try:
                array = parse_npy(data)
            except BadSampleError:
                continue
            assert array.nbytes == 16, "more memory than the values need"


def test_booleans_are_0_and_1_whatever_the_bytes_are() -> None:
    data = saved(np.array([False, True, True]))
    assert parse_npy(data[:-3] + b"\x00\x02\xff").view(np.uint8).tolist() == [0, 1, 1]


BAD_VALUES = [
    ("boxes", [1, 2, 3, 4], r"boxes are \[k, 4\], not \[4\]"),
    ("boxes", [[1, 2, 3]], r"boxes are \[k, 4\], not \[1, 3\]"),
    ("boxes", [[1, 2, 3, 4], [5, 2, 4, 9]], "box 1 is .* expected x0, y0, x1, y1 with x0 <= x1"),
    ("boxes", [[1, 2, 3, np.nan]], "box 0 has a number that is not finite"),
    ("boxes", [["a", "b", "c", "d"]], "boxes are numbers, not"),
    ("points", [[1, 2, 3]], r"points are \[..., 2\], not \[1, 3\]"),
    ("array", [[1], [1, 2]], "is not an array"),
    ("array", [None], "an array of object cannot be packed"),
    ("mask", np.zeros((4, 4, 3), np.uint8), r"a mask is \[h, w\] of integers, not uint8 \[4, 4, 3\]"),
    ("mask", np.zeros((4, 4)), "integers, not float64"),
    ("mask", np.full((2, 2), 1 << 40), "must fit into int32, found"),
    ("image", np.zeros((4, 4), np.float32), r"an image is encoded bytes, uint8 .* not float32"),
    ("text", 5, "a text is a str, or a list of str"),
    ("text", ["one\ntwo", "three"], "a text in a list has a line break"),
    ("text", "\ud800", "cannot be encoded as UTF-8"),
    ("json", {1, 2}, "cannot be written as JSON"),
    ("file", "text", "a file is bytes, not str"),
]


@pytest.mark.parametrize(("kind", "value", "message"), BAD_VALUES)
def test_values_of_another_kind_are_refused(kind: str, value: Any, message: str) -> None:
    with pytest.raises(BadSampleError, match=message):
        encode_field(kind, value)


VALUES = [
    ("boxes", [[1, 2, 3, 4]], np.float32([[1, 2, 3, 4]])),
    ("boxes", [], np.zeros((0, 4), np.float32)),
    ("points", [[[1, 2], [np.nan, 3]]], np.float32([[[1, 2], [np.nan, 3]]])),
    ("points", (), np.zeros((0, 2), np.float32)),
    ("array", [], np.zeros(0, np.int64)),
    ("array", [3, 4], np.array([3, 4])),
    ("text", "ein Bär", "ein Bär"),
    ("text", ["a cat", "on a mat"], "a cat\non a mat"),
    ("json", {"tags": ["red", None], "n": 1.5}, {"tags": ["red", None], "n": 1.5}),
]


@pytest.mark.parametrize(("kind", "value", "expected"), VALUES)
def test_encoded_values_come_back(kind: str, value: Any, expected: Any) -> None:
    data = encode_field(kind, value)
    decoded = decode_field(kind, data)
    if isinstance(expected, np.ndarray):
        assert decoded.dtype == expected.dtype
        np.testing.assert_array_equal(decoded, expected)
    else:
        assert decoded == expected
    assert encode_field(kind, data) == data, "bytes were changed"


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("text", b"\xff\xfe", "not text in UTF-8"),
        ("json", b"{", "not JSON in UTF-8"),
        ("json", b"[" * 100_000, "not JSON in UTF-8"),
        ("boxes", saved(np.zeros((2, 4), np.complex64)), "boxes are numbers, not complex64"),
        ("mask", b"no image", "expected the magic of jpeg, png"),
        ("mask", make_jpeg(1), r"losslessly encoded \(PNG, TIFF, BMP or GIF\), not jpeg"),
        ("mask", image_bytes(np.zeros((4, 4, 3), np.uint8)), "has 3 channels, expected one for a mask"),
        ("mask", image_bytes(np.zeros((4, 4), np.float32), "TIFF"), "one channel of integers, not float32"),
        ("mask", image_bytes(NUMBERS.astype(np.uint8))[:50], "truncated"),
    ],
)
def test_bytes_of_another_kind_are_bad_samples(kind: str, data: bytes, message: str) -> None:
    with pytest.raises(BadSampleError, match=message):
        decode_field(kind, data)
    with pytest.raises(BadSampleError):
        check_field(kind, data, deep=True)


# --- masks --------------------------------------------------------------------------------------------------------


def palette(pixels: Any) -> Image.Image:
    image = Image.new("P", (pixels.shape[1], pixels.shape[0]))
    image.putpalette([value for i in range(256) for value in (255 - i, i, 7)])
    image.putdata(pixels.ravel().tolist())
    return image


def few_bits(mask: Any, bits: int) -> bytes:
    """A PNG of greys, made from a palette PNG."""
    data = bytearray(image_bytes(palette(mask), bits=bits))
    start = data.index(b"PLTE") - 4
    assert data[24:26] == bytes((bits, 3))
    data[25] = 0
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    size = int.from_bytes(data[start : start + 4], "big") + 12
    return bytes(data[:start] + data[start + size :])


def turned(mask: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return image_bytes(mask, exif=exif)


GREY, BITS, FEW = NUMBERS.astype(np.uint8), NUMBERS % 2 == 0, np.arange(35, dtype=np.uint8).reshape(5, 7)
MASKS: dict[str, tuple[bytes, Any]] = {
    **{f"palette in {codec}": (image_bytes(palette(FEW), codec), FEW) for codec in ("PNG", "TIFF", "BMP", "GIF")},
    **{f"one bit in {codec}": (image_bytes(BITS, codec), BITS.astype(np.uint8)) for codec in ("PNG", "TIFF", "BMP")},
    **{f"{bits} bits, not scaled": (few_bits(GREY % (1 << bits), bits), GREY % (1 << bits)) for bits in (2, 4)},
    "turned": (turned(GREY), np.rot90(GREY, -1)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_the_stored_numbers(name: str) -> None:
    data, expected = MASKS[name]
    np.testing.assert_array_equal(decode_field("mask", data), expected)


@pytest.mark.parametrize(
    ("low", "high", "given", "stored"),
    [
        *((np.iinfo(dtype).min, np.iinfo(dtype).max, dtype, dtype) for dtype in (np.uint8, np.uint16, np.int32)),
        *((0, high, np.int64, dtype) for high, dtype in ((200, np.uint8), (60_000, np.uint16), (1 << 20, np.int32))),
    ],
)
def test_masks_keep_their_numbers_in_the_smallest_type(low: int, high: int, given: Any, stored: Any) -> None:
    mask = np.array([[0, 1, 25], [low, high, 7]], given)
    decoded = decode_field("mask", encode_field("mask", mask))
    assert decoded.dtype == stored
    np.testing.assert_array_equal(decoded, mask)


# --- sets ---------------------------------------------------------------------------------------------------------
FIELDS = {
    "mask:mask": "seg",
    "boxes:boxes": "bbox",
    "box_labels:array": "ids",
    "points:points": "keypoints",
    "caption:text": "title",
    "note:text": "words",
}


def table(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "t.jsonl"


def pictures(root: Path, count: int = 3, side: int = 40) -> list[dict[str, Any]]:
    """Rows of a table, with their files: an image, a mask, boxes, a caption in the table, and a caption in a file."""
    rows: list[dict[str, Any]] = []
    for n in range(count):
        (root / f"{n}.jpg").write_bytes(make_jpeg(n, (side + 20, side)))
        (root / f"{n}.png").write_bytes(image_bytes(np.full((side, side + 20), n, np.uint8)))
        (root / f"{n}.txt").write_text(f"words of {n}")
        boxes = [[2 * i, 4, 2 * i + 6, 10] for i in range(n)]
        rows.append({"path": f"{n}.jpg", "seg": f"{n}.png", "bbox": boxes, "ids": list(range(n)), "split": "train"})
        rows[-1] |= {"keypoints": [[n, 8]], "title": f"number {n}", "words": f"{n}.txt", "weight": n / 2}
    rows[0] |= {"seg": None, "title": None}
    return rows


@pytest.mark.parametrize("to", ["tar", "tfrecord", "hdf5"])
def test_every_format_keeps_fields_and_their_kinds(to: str, tmp_path: Path) -> None:
    source = packer.open_source(table(tmp_path, pictures(tmp_path)), fields=FIELDS)
    packer.convert(source, to, tmp_path / "set", run=packer.Run(workers=1))
    assert packer.verify(tmp_path / "set", deep=True, against=source, workers=1).ok
    packer.convert(tmp_path / "set", "tar", tmp_path / "again", run=packer.Run(workers=1))
    for name in ("set", "again"):
        with readers.open(tmp_path / name) as reader:
            kinds = {name.partition(":")[0]: name.partition(":")[2] for name in FIELDS}
            assert reader.kinds == {"image": "image", **kinds, "json": "json"}
            assert not reader.has(0, "mask") and not reader.has(0, "caption")
            values = {field: decode_field(kind, reader.read(2, field)) for field, kind in reader.kinds.items()}
        assert values["boxes"].tolist() == [[0, 4, 6, 10], [2, 4, 8, 10]] and values["box_labels"].tolist() == [0, 1]
        assert (values["mask"] == 2).all() and values["points"].tolist() == [[2, 8]]
        assert (values["caption"], values["note"], values["json"]) == ("number 2", "words of 2", {"weight": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seg": "1.jpg"}, "1.jpg: field mask: a mask is losslessly encoded"),
        ({"words": "latin.txt"}, "1.jpg: field note: not text in UTF-8"),
    ],
)
def test_a_field_of_another_kind_is_refused_when_it_is_packed(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = pictures(tmp_path)
    (tmp_path / "latin.txt").write_bytes("Bär".encode("latin-1"))
    rows[1] |= change
    source = packer.open_source(table(tmp_path, rows), fields=FIELDS)
    with pytest.raises(BadSampleError, match=message):
        packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1, on_error="skip"), overwrite=True)
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == ["0", "2"]


@pytest.mark.parametrize(
    ("fields", "rows", "message"),
    [
        ({"boxes:boxes": "bbox"}, [{"bbox": [[1, 2, 3]]}], r"line 1: column 'bbox', field boxes: boxes are \[k, 4\]"),
        ({"boxes:boxes": "bbox"}, [{"bbox": "[[1, 2"}], "line 1: column 'bbox', field boxes: Expecting"),
        ({"caption:text": "title"}, [{"title": 5}], "field caption: a text is a str"),
        ({"mask:stencil": "seg"}, [{"seg": "a"}], "'stencil' is not a kind; kinds are image, file, json, mask"),
    ],
)
def test_wrong_values_of_a_table_are_named_with_their_line(
    fields: dict[str, str], rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    (tmp_path / "0.jpg").write_bytes(make_jpeg(0))
    source = packer.open_source(table(tmp_path, [{"path": "0.jpg", **row} for row in rows]), fields=fields)
    with pytest.raises(SourceError, match=message):
        packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))


def test_a_deep_check_finds_a_field_of_another_kind(tmp_path: Path) -> None:
    source = packer.open_source(table(tmp_path, pictures(tmp_path)), fields={"seg": "seg", "note": "words"})
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1), shards=packer.Shards(checksums=False))
    info = json.loads((tmp_path / "set/dataset.json").read_text())
    info["fields"] |= {"seg": "mask", "note": "boxes"}
    (tmp_path / "set/dataset.json").write_text(json.dumps(info))
    result = packer.verify(tmp_path / "set", deep=True, workers=1)
    assert len(result.problems) == 3 and all("field note: not an array" in str(problem) for problem in result.problems)


def test_kinds_can_be_added_to_a_set_without_them(tmp_path: Path) -> None:
    source = packer.open_source(table(tmp_path, pictures(tmp_path)), fields={"seg": "seg"})
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        typed = reader.with_kinds({"seg": "mask"})
        assert (reader.kinds["seg"], typed.kinds["seg"]) == ("file", "mask")
        assert typed.fingerprint == reader.fingerprint and typed.select(indices=[2]).kinds["seg"] == "mask"
        assert readers.concat([typed, typed]).kinds == typed.kinds
        with pytest.raises(ValueError, match="in order and kind"):
            readers.concat([typed, reader])
        with pytest.raises(UnknownNameError, match="no field 'nowhere'"):
            reader.with_kinds({"nowhere": "mask"})
        with pytest.raises(ValueError, match="a field other than the image is of kind image, file"):
            reader.with_kinds({"seg": "stencil"})


def test_unknown_kinds_in_files_are_refused(tmp_path: Path) -> None:
    packer.convert(
        packer.open_source(table(tmp_path, pictures(tmp_path))), "hdf5", tmp_path / "set", run=packer.Run(workers=1)
    )
    shard = next((tmp_path / "set").glob("*.h5"))
    with h5py.File(shard, "r+") as file:
        kinds = file.attrs["field_kinds"]
        file.attrs["field_kinds"] = np.array([b"image", *[b"xx"] * (len(kinds) - 1)])
    with pytest.raises(FormatError, match="expected kinds of image, file"):
        packer.index([shard], tmp_path / "other", workers=1)
    info = json.loads((tmp_path / "set/dataset.json").read_text())
    info["fields"]["image"] = "xx"
    (tmp_path / "set/dataset.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match="fields must map names to image, file, json, mask"):
        readers.open(tmp_path / "set")
