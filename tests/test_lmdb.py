"""LMDB environments, written by the lmdb package and by hand: Caffe's Datums, and images under their names."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg
from PIL import Image
from suites.containers import varint

import packer
import readers
from cache.errors import BadSampleError, PackerError, SourceError

lmdb = pytest.importorskip("lmdb", reason="the package lmdb, which writes the environments, is not installed")

IMAGES = [make_jpeg(number) for number in range(5)]
LABELS = [2, 0, 1, 1, 0]
PIXELS = np.random.RandomState(0).randint(0, 256, (6, 7, 3), np.uint8)


def datum(data: bytes | None, label: int, shape: tuple[int, int, int] = (0, 0, 0), encoded: bool = True) -> bytes:
    """A caffe.Datum by the rules of protocol buffers alone."""
    out = b"".join(varint(number << 3) + varint(value) for number, value in zip((1, 2, 3), shape, strict=True))
    if data is not None:
        out += varint(4 << 3 | 2) + varint(len(data)) + data
    return out + varint(5 << 3) + varint(label) + varint(7 << 3) + varint(encoded)


def write(path: Path, values: dict[bytes, bytes], subdir: bool = True) -> Path:
    environment = lmdb.open(str(path), map_size=16 << 20, subdir=subdir)
    with environment, environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
    return path


def contents(root: Path, split: str | None = None) -> list[tuple[str, int | None, bytes]]:
    with readers.open(root, split, verify=True) as reader:
        return [(sample.key, sample.label, bytes(sample.image)) for sample in reader]


def datums() -> dict[bytes, bytes]:
    pairs = zip(IMAGES, LABELS, strict=True)
    return {b"%08d" % number: datum(data, label) for number, (data, label) in enumerate(pairs)}


EXPECTED = [(f"{n:08d}", label, data) for n, (data, label) in enumerate(zip(IMAGES, LABELS, strict=True))]


@pytest.mark.parametrize("workers", [1, 2])
def test_datums(tmp_path: Path, workers: int) -> None:
    path = write(tmp_path / "ilsvrc12_val_lmdb", datums(), subdir=workers == 1)
    result = packer.convert(
        path, "tar", tmp_path / "out", run=packer.Run(workers=workers), shards=packer.Shards(samples=2)
    )
    assert result.splits == {"val": 5}
    assert contents(tmp_path / "out", "val") == EXPECTED
    assert packer.verify(tmp_path / "out", against=path, workers=1).ok


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_become_png_with_red_first(tmp_path: Path, channels: int) -> None:
    planes = np.ascontiguousarray(PIXELS[..., :channels][..., ::-1].transpose(2, 0, 1))  # blue first, as OpenCV has it
    value = datum(planes.tobytes(), 3, (channels, 6, 7), encoded=False)
    packer.convert(write(tmp_path / "x", {b"0": value}), "tar", tmp_path / "out", run=packer.Run(workers=1))
    [(_, label, image)] = contents(tmp_path / "out")
    with Image.open(io.BytesIO(image)) as picture:
        assert (label, picture.format) == (3, "PNG")
        assert np.array_equal(np.asarray(picture).reshape(6, 7, channels), PIXELS[..., :channels])


def test_what_is_not_an_image_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {b"a/1.jpg": IMAGES[0], b"__len__": b"\x80\x04K\x05."})
    result = packer.convert(path, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert (result.samples, sum(result.left_out.values())) == (1, 1)


def test_a_bad_datum_falls_under_on_error(tmp_path: Path) -> None:
    wrong = {
        b"1": datum(None, 0),
        b"2": datum(b"\0" * 10, 0, (3, 6, 7), encoded=False),
        b"3": datum(IMAGES[0], 0)[:40],
        b"4": datum(b"\0" * 20, 0, (2, 2, 5), encoded=False),
        b"5": varint(6 << 3 | 2) + varint(4) + bytes(4),
        b"6": datum(IMAGES[0], 1 << 40),
        b"7": datum(IMAGES[0], -5),
        b"8": datum(b"\0" * 4, 0, ((1 << 63), (1 << 63), 4), encoded=False),
        b"9": b"\xff" * 30,
    }
    path = write(tmp_path / "x", {b"0": datum(IMAGES[0], 1)} | wrong)
    with pytest.raises(BadSampleError, match="1: is not a Datum with an image: it has no data"):
        packer.convert(path, "tar", tmp_path / "a", run=packer.Run(workers=1))
    result = packer.convert(path, "tar", tmp_path / "b", run=packer.Run(workers=1, on_error="skip"))
    assert contents(tmp_path / "b") == [("0", 1, IMAGES[0])]
    assert result.left_out == {"skipped": len(wrong)}


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: data[: len(data) // 2], "ended the process that read it: truncated"),
        (lambda data: data[:4096], "truncated|cannot"),
        (lambda data: data[:100], "truncated|not an LMDB|cannot be opened"),
        (lambda data: data[:16] + b"\xef\xbe\xad\xde" + data[20:], "no kind of source|not an LMDB"),
        (lambda data: data[:40] + b"\xff\xff\xff\x7f" + data[44:], "not an LMDB|cannot"),
    ],
)
def test_files_that_are_damaged_are_refused(tmp_path: Path, damage: Any, match: str) -> None:
    path = write(tmp_path / "x.mdb", datums(), subdir=False)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=match):
        packer.convert(path, "tar", tmp_path / "out", run=packer.Run(workers=1))


def test_an_empty_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackerError, match=f"{tmp_path}/x: holds no values"):
        packer.convert(write(tmp_path / "x", {}), "tar", tmp_path / "out", run=packer.Run(workers=1))


def test_a_read_only_environment_is_read_and_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x", datums())
    (path / "lock.mdb").unlink()
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path)}
    packer.convert(path, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path)} == before


def test_damaged_pages_end_a_process_that_is_named_or_are_harmless(tmp_path: Path) -> None:
    """liblmdb aborts or faults where a byte of the metas, the tree or its nodes is wrong: not in this process."""
    path = write(tmp_path / "x.mdb", {b"%08d" % i: datum(IMAGES[i % 5], i) for i in range(200)}, subdir=False)
    whole = path.read_bytes().rstrip(b"\0")
    whole += bytes(-len(whole) % 4096)
    rng, refusals = random.Random(1), []
    for _ in range(10):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 4, 30))):
            content[rng.randrange(len(content) // 4096) * 4096 + rng.randrange(160)] = rng.choice((0, 255, 7, 64))
        path.write_bytes(content)
        try:
            packer.open_source(path).list(None)
        except PackerError as error:
            refusals.append(str(error))
    assert refusals and all(str(path) in text for text in refusals)


def test_values_of_every_size_and_a_deep_tree(tmp_path: Path) -> None:
    values = {b"%06d" % n: datum(IMAGES[0] + bytes(n % 7000), n) for n in range(3000)}
    path = write(tmp_path / "x", values)
    listing = packer.open_source(path).list(None)
    part = listing.splits["train"]
    assert list(part.keys) == [key.decode() for key in values] and part.labels.tolist() == list(range(3000))
    packer.convert(path, "tfrecord", tmp_path / "out", run=packer.Run(workers=1))
    with readers.open(tmp_path / "out") as reader:
        assert all(bytes(reader.read(n)) == IMAGES[0] + bytes(n % 7000) for n in range(0, 3000, 37))


def test_databases_inside_are_left_out_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x", datums())
    environment = lmdb.open(str(path), max_dbs=1)
    with environment:
        environment.open_db(b"inner")
    result = packer.convert(path, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert result.samples == 5 and sum(result.left_out.values()) == 1


def test_images_come_in_the_order_of_their_keys(tmp_path: Path) -> None:
    """Pages are in the order of writing, and a large value is not in the page of its key."""
    names = [b"b/%d.jpg" % n for n in (4, 2, 0)] + [b"a/%d.jpg" % n for n in (3, 1)]
    values = {name: IMAGES[n] + bytes(9000 * (n % 2)) for n, name in enumerate(names)}
    listing = packer.open_source(write(tmp_path / "x", values)).list(None)
    assert list(listing.splits["train"].keys) == ["a/1", "a/3", "b/0", "b/2", "b/4"]
