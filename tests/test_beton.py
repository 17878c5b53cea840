"""Files of FFCV, by their public layout."""

from __future__ import annotations

import io
import json
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer.testing.sources import Found, SourceSuite, found
from readers.fields import decode_field
from readers.loader import ImageLoader

PICTURES = [make_jpeg(number, (16 + 4 * number, 24)) for number in range(5)]
PIXELS = np.random.default_rng(3).integers(0, 256, (2, 9, 7, 3), np.uint8)
FLOAT, INT, IMAGE, BYTES, ARRAY, JSON = range(6)
PAGE = 1 << 21


class Beton:
    """Fills a file: fields as (name, type, dtype of its metadata, arguments)."""

    def __init__(self, *fields: tuple[str, int, Any, bytes]) -> None:
        self.fields = fields
        self.record = np.dtype([(name, kind) for name, _, kind, _ in fields], align=True)
        self.rows: list[tuple[Any, ...]] = []
        self.heap = bytearray()
        self.allocations: list[tuple[int, int, int]] = []

    def put(self, data: bytes) -> int:
        """Where the data will be, from the start of the heap."""
        at = len(self.heap)
        self.heap += data
        self.allocations.append((len(self.rows), at, len(data)))
        return at

    def write(self, path: Path, **changes: int) -> Path:
        """changes: of the numbers in the header."""
        head = 24 + 1041 * len(self.fields)
        start = -(-(head + len(self.rows) * self.record.itemsize) // PAGE) * PAGE
        moved = [tuple(_moved(value, start) for value in row) for row in self.rows]
        described = b"".join(
            struct.pack("<B16s1024s", number, name.encode(), arguments) for name, number, _, arguments in self.fields
        )
        heap = bytes(self.heap).ljust(-(-len(self.heap) // PAGE) * PAGE, b"\0")
        header = {
            "version": 2,
            "fields": len(self.fields),
            "page": PAGE,
            "samples": len(self.rows),
            "table": start + len(heap),
        } | changes
        data = struct.pack("<HHIQQ", *header.values()) + described + np.array(moved, self.record).tobytes()
        table = b"".join(struct.pack("<QQQ", sample, start + at, size) for sample, at, size in self.allocations)
        path.write_bytes(data.ljust(start, b"\0") + heap + table)
        return path


GOLDEN = Path(__file__).parent / "golden" / "ffcv-1.0.2.beton.xz"


def test_a_file_of_ffcv_itself(tmp_path: Path) -> None:
    """Written once by DatasetWriter of ffcv 1.0.2, with write_mode="proportion": pixels, and a JPEG."""
    (tmp_path / "train.beton").write_bytes(lzma.decompress(GOLDEN.read_bytes()))
    y, x = np.mgrid[0:24, 0:20]
    (samples,) = found(packer.open_source(tmp_path / "train.beton")).splits.values()
    assert len(samples) == 6
    for number, (_, label, (picture, blob, vector, record)) in enumerate(samples):
        planes = [x * (3 + number) % 256, y * (5 + number) % 256, (x + y + number * 9) % 256]
        expected = np.stack(planes, axis=-1)[: 20 + number]
        difference = np.abs(np.asarray(Image.open(io.BytesIO(picture or b""))).astype(int) - expected).max()
        assert difference <= (12 if number == 2 else 0) and (picture or b"").startswith(b"\xff\xd8") == (number == 2)
        assert (label, blob, json.loads(record or b"")) == (
            number % 3,
            b"x" * number,
            {"weight": number / 4, "about": {"n": number}},
        )
        assert np.array_equal(decode_field("array", vector or b""), np.arange(6).reshape(2, 3) + number)


class At(int):
    """A place in the heap."""


def _moved(value: Any, start: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(item, start) for item in value)
    return start + value if isinstance(value, At) else value


IMAGE_TYPE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
BYTES_TYPE = np.dtype([("ptr", "<u8"), ("size", "<u8")])


def array_arguments(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    text = json.dumps(dtype.descr).encode()
    return struct.pack("<32Q", *shape, *[0] * (32 - len(shape))) + struct.pack("<Q", len(text)) + text


def image(beton: Beton, value: bytes | np.ndarray) -> tuple[int, int, int, At]:
    if isinstance(value, bytes):
        width, height = Image.open(io.BytesIO(value)).size
        return 0, width, height, At(beton.put(value))
    return 1, value.shape[1], value.shape[0], At(beton.put(value.tobytes()))


def filled() -> Beton:
    """Images of both modes, labels, and a field of every other kind."""
    beton = Beton(
        ("picture", IMAGE, IMAGE_TYPE, b""),
        ("label", INT, "<i8", b""),
        ("weight", FLOAT, "<f8", b""),
        ("blob", BYTES, BYTES_TYPE, b""),
        ("vector", ARRAY, "<u8", array_arguments(np.dtype("<f4"), (2, 3))),
        ("about", JSON, BYTES_TYPE, b""),
    )
    for number, value in enumerate([*PICTURES, *PIXELS]):
        text = json.dumps({"n": number}).encode() + b"\0"
        blob = bytes(number)
        vector = (np.arange(6, dtype="<f4") + number).tobytes()
        beton.rows.append(
            (
                image(beton, value),
                number % 3,
                number / 2,
                (At(beton.put(blob)), len(blob)),
                At(beton.put(vector)),
                (At(beton.put(text)), len(text)),
            )
        )
    return beton


class TestBeton(SourceSuite):
    damages, changed_bytes = 1000, 2200 + 6 * 1041  # the header, the fields, the metadata; then come pages of zeros

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return filled().write(tmp_path / "train.beton")

    @pytest.fixture
    def truth(self, root: Path) -> Found:
        read = found(self.open(root))
        assert read.fields == ("image", "blob", "vector", "json")
        for number, (key, label, (picture, blob, vector, record)) in enumerate(read.splits["train"]):
            assert (key, label, blob) == (f"train/{number:08d}", number % 3, bytes(number))
            assert json.loads(record or b"") == {"weight": number / 2, "about": {"n": number}}
            assert np.array_equal(decode_field("array", vector or b""), np.arange(6).reshape(2, 3) + number)
            if number < len(PICTURES):
                assert picture == PICTURES[number]
            else:
                pixels = np.asarray(Image.open(io.BytesIO(picture or b"")))
                assert np.array_equal(pixels, PIXELS[number - len(PICTURES)])
        return read


@pytest.mark.parametrize(
    ("field", "labels"),
    [
        (("score", FLOAT, "<f8", b""), [0.25, 0.5, 1.75]),
        (
            ("label", ARRAY, "<u8", array_arguments(np.dtype("<f4"), (3,))),
            [[0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [0.0] * 3],
        ),
    ],
    ids=["fractions", "vectors"],
)
def test_labels_that_are_not_class_numbers(tmp_path: Path, field: Any, labels: list[Any]) -> None:
    """They are the labels of training, in the field that they come from."""
    beton = Beton(("image", IMAGE, IMAGE_TYPE, b""), field)
    for value, label in zip(PICTURES, labels, strict=False):
        place = At(beton.put(np.array(label, "<f4").tobytes())) if isinstance(label, list) else label
        beton.rows.append((image(beton, value), place))
    count = len(beton.rows)
    source = packer.open_source(beton.write(tmp_path / "train.beton"), label_column=field[0])
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        batches = ImageLoader(reader, count, fields=("label",), shuffle=False, threads=1)
        (found_labels,) = next(iter(batches))
    assert np.array_equal(found_labels.numpy(), np.array(labels[:count], found_labels.numpy().dtype))


def small(path: Path, change: Callable[[Beton], object] = lambda beton: None, **header: int) -> Path:
    """Two images with labels."""
    beton = Beton(("image", IMAGE, IMAGE_TYPE, b""), ("label", INT, "<i8", b""))
    for number, picture in enumerate(PICTURES[:2]):
        beton.rows.append((image(beton, picture), number))
    change(beton)
    return beton.write(path, **header)


def with_row(beton: Beton, number: int, **values: Any) -> None:
    picture, label = beton.rows[number]
    names = IMAGE_TYPE.names or ()
    changed = tuple(values.get(name, value) for name, value in zip(names, picture, strict=True))
    beton.rows[number] = (changed, values.get("label", label))


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        (lambda beton: with_row(beton, 1, data_ptr=1 << 60), {}, "where nothing was allocated"),
        (lambda beton: with_row(beton, 1, data_ptr=At(7)), {}, "where nothing was allocated"),
        (lambda beton: beton.allocations.__setitem__(1, (1, len(PICTURES[0]), 1 << 40)), {}, "outside of the data"),
        (lambda beton: beton.allocations.__setitem__(0, (0, 0, (1 << 64) - 9)), {}, "outside of the data"),
        (lambda beton: [with_row(beton, 1, data_ptr=At(0)), *[beton.rows.append(beton.rows[1])] * 9], {}, None),
        (lambda beton: beton.rows.extend([beton.rows[1]] * 9000), {}, "places are shared"),
        (lambda beton: beton.allocations.clear(), {}, "has no table of allocations"),
        (lambda beton: with_row(beton, 0, label=-5), {}, "row 1: the label -5 is out of range"),
        (lambda beton: None, {"samples": 1 << 40}, "truncated, or the program that wrote it did not finish"),
        (lambda beton: None, {"samples": (1 << 64) - 1}, "truncated, or the program that wrote it did not finish"),
        (lambda beton: None, {"samples": 0}, "no samples"),
        (lambda beton: None, {"table": 0}, "did not finish"),
        (lambda beton: None, {"table": 1 << 50}, "truncated"),
        (lambda beton: None, {"fields": 200}, "the type|two fields"),
        (lambda beton: None, {"version": 1}, "version 1"),
        (lambda beton: setattr(beton, "fields", (("image", 255, IMAGE_TYPE, b""), beton.fields[1])), {}, "of its own"),
    ],
)
def test_a_file_that_lies(
    tmp_path: Path, change: Callable[[Beton], object], header: dict[str, int], message: str | None
) -> None:
    path = small(tmp_path / "x.beton", change, **header)
    if message is None:  # an image of several samples is still within what the file has
        assert len(packer.open_source(path).list(None).splits["train"]) > 2
        return
    with pytest.raises(SourceError, match=message):
        packer.open_source(path).list(None)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (np.dtype("O"), (3,), "expected numbers"),
        (np.dtype([("a", "<f4"), ("b", "<f4")]), (3,), "an unknown kind"),
        (np.dtype("<f4"), (1 << 40, 1 << 40), "expected numbers"),
        (np.dtype("<f4"), (1 << 30,), "outside of the data"),
    ],
)
def test_an_array_that_lies(tmp_path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], message: str) -> None:
    beton = Beton(("image", IMAGE, IMAGE_TYPE, b""), ("vector", ARRAY, "<u8", array_arguments(dtype, shape)))
    beton.rows.append((image(beton, PICTURES[0]), At(beton.put(bytes(12)))))
    with pytest.raises(SourceError, match=message):
        packer.open_source(beton.write(tmp_path / "x.beton")).list(None)


def test_pixels_that_are_not_of_their_size(tmp_path: Path) -> None:
    path = small(tmp_path / "val.beton", lambda beton: with_row(beton, 1, mode=1))
    with pytest.raises(BadSampleError, match=r"'image': is of the mode 1 and has .* bytes, expected pixels"):
        found(packer.open_source(path))
