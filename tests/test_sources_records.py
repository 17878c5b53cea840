"""HDF5 and TFRecord files made elsewhere, by h5py and by hand, packed and read back."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from crc32c import crc32c
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer.sources import default_output_name, open_source
from packer.sources.base import SourceListing
from packer.sources.shards import ShardSource


def picture(number: int, format: str = "JPEG") -> bytes:
    memory = io.BytesIO()
    Image.new("RGB", (8 + number, 6), (number * 9 % 256, 90, 200)).save(memory, format)
    return memory.getvalue()


PICTURES = [picture(number) for number in range(5)]
LABELS = [2, 0, 1, 1, 0]
PIXELS = np.random.RandomState(0).randint(0, 256, (5, 6, 7, 3), np.uint8)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def pack(source: Any, out: Path, to: str = "tar", **options: Any) -> Path:
    packer.convert(source, to, out, **{"workers": 1, **options})
    return out


def samples(directory: Path, split: str | None = None) -> list[tuple[int | None, bytes]]:
    with readers.open(directory, split, verify=True) as reader:
        return [(sample.label, bytes(sample.image)) for sample in reader]


# --- HDF5 ---


def elements(file: Any, **storage: Any) -> None:
    data = file.create_dataset("images", (5,), h5py.vlen_dtype(np.uint8), **storage)
    for i, content in enumerate(PICTURES):
        data[i] = np.frombuffer(content, np.uint8)
    file["labels"] = np.array(LABELS, np.int64)


def ranges(file: Any, **storage: Any) -> None:
    file.create_dataset("images", data=np.frombuffer(b"".join(PICTURES), np.uint8), **storage)
    file["offsets"] = np.cumsum([0, *map(len, PICTURES)])
    file["labels"] = np.array(LABELS, np.uint8)


def ranges_with_lengths(file: Any, **storage: Any) -> None:
    group = file.create_group("image")
    group.create_dataset("data", data=np.frombuffer(b"".join(PICTURES), np.uint8), **storage)
    group["start"] = np.cumsum([0, *map(len, PICTURES[:-1])]).astype(np.uint64)
    group["length"] = np.array([*map(len, PICTURES)], np.uint32)
    file["y"] = np.array(LABELS, np.int32)


def items(file: Any, **storage: Any) -> None:
    for i, content in enumerate(PICTURES):
        data = file.create_dataset(f"pictures/{i + 8}", data=np.frombuffer(content, np.uint8), **storage)
        data.attrs["label"] = LABELS[i]


def items_beside_labels(file: Any, **storage: Any) -> None:
    for i, content in enumerate(PICTURES):
        file.create_dataset(f"images/{i + 8}", data=np.frombuffer(content, np.uint8), **storage)
    file["labels"] = np.array(LABELS)


@pytest.mark.parametrize("layout", [elements, ranges, ranges_with_lengths, items, items_beside_labels])
@pytest.mark.parametrize("storage", [{}, {"compression": "gzip"}], ids=["contiguous", "gzip"])
def test_hdf5_layouts(tmp_path: Path, layout: Callable[..., None], storage: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "val.h5", "w") as file:
        layout(file, **storage)
    source = open_source(tmp_path / "val.h5")
    assert isinstance(source, ShardSource)
    out = pack(source, tmp_path / "out", samples_per_shard=2)
    assert samples(out, "val") == list(zip(LABELS, PICTURES, strict=True))
    two = pack(source, tmp_path / "two", samples_per_shard=2, workers=2, shuffle=3)
    assert sorted(samples(two)) == sorted(zip(LABELS, PICTURES, strict=True))


def test_hdf5_items_are_a_tree(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for i, content in enumerate(PICTURES):
            file[f"set/{'val' if i > 3 else 'train'}/{'cat' if i % 2 else 'dog'}/{i}.jpg"] = np.void(content)
    with readers.open(pack(tmp_path / "x.hdf5", tmp_path / "out"), "train") as reader:
        assert list(reader.keys) == ["cat/1", "cat/3", "dog/0", "dog/2"]
        assert list(reader.classes) == ["cat", "dog"] and reader.labels.tolist() == [0, 0, 1, 1]
        assert bytes(reader.read(2)) == PICTURES[0]


@pytest.mark.parametrize("storage", [{}, {"compression": "lzf"}], ids=["contiguous", "lzf"])
@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (PIXELS, PIXELS),
        (PIXELS[..., 0], PIXELS[..., 0]),
        (PIXELS[..., :1], PIXELS[..., 0]),
        (np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2)), PIXELS),
    ],
    ids=["NHWC", "NHW", "NHW1", "NCHW"],
)
def test_pixels_become_png(tmp_path: Path, array: Any, expected: Any, storage: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("train_x", data=array, **storage)
        file["target"] = np.array(LABELS)
    with readers.open(pack(tmp_path / "x.h5", tmp_path / "out")) as reader:
        assert reader.labels.tolist() == LABELS
        assert reader.keys[1] == "x/00000001"
        for i in range(5):
            with Image.open(io.BytesIO(reader.read(i))) as image:
                assert image.format == "PNG"
                assert np.array_equal(np.asarray(image), expected[i])


def test_hdf5_splits_and_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for split in ("train", "test"):
            elements(group := file.create_group(split))
            group["filenames"] = [f"{split}/{i}.jpg".encode() for i in range(5)]
    source = ShardSource(tmp_path / "x.h5", label_offset=-1)
    listing = source.list(None)
    assert {name: part.root for name, part in listing.splits.items()} == {"train": "train", "test": "test"}
    assert listing.splits["test"].keys[4] == "test/4" and listing.splits["test"].labels[0] == 3
    assert list(source.list("test").splits) == ["test"]
    with pytest.raises(SourceError, match="no split 'val'; it has train, test"):
        source.list("val")


@pytest.mark.parametrize(
    ("data_sets", "message"),
    [
        ({}, "no data set of images found"),
        ({"images": PIXELS.astype(np.float32)}, "/images holds float32 of shape"),
        ({"images": PIXELS[0, 0]}, "/images holds uint8 of shape"),
        ({"images": PIXELS.ravel()}, "has no table of offsets beside it"),
        ({"images": PIXELS.ravel(), "offsets": [0, 9, 5]}, "the offsets of /images do not fit"),
        ({"images": PIXELS.ravel(), "offsets": [0, 1 << 40]}, "the offsets of /images do not fit"),
        ({"images": PIXELS, "labels": [1, 2]}, "/labels has shape .* expected 5 whole numbers"),
        ({"images": PIXELS, "labels": [-9] * 5}, "the label -9 is out of range"),
        ({"a": PIXELS, "b": PIXELS}, r"which of these holds the images: /a, /b\? Name it"),
    ],
)
def test_hdf5_files_that_are_refused(tmp_path: Path, data_sets: dict[str, Any], message: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, data in data_sets.items():
            file[name] = np.asarray(data)
    with pytest.raises(SourceError, match=message):
        ShardSource(tmp_path / "x.h5").list(None)


def test_hdf5_files_that_are_damaged_or_ours(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        elements(file)
    whole = (tmp_path / "x.h5").read_bytes()
    with pytest.raises(SourceError, match="cannot be opened as HDF5, damaged or truncated"):
        open_source(write(tmp_path / "y.h5", whole[: len(whole) // 2])).list(None)
    with pytest.raises(SourceError, match="cannot be opened as HDF5"):
        open_source(write(tmp_path / "z.h5", b"")).list(None)
    ours = next(pack(tmp_path / "x.h5", tmp_path / "out", "hdf5").glob("*.h5"))
    with pytest.raises(SourceError, match=rf"a shard of a packed set; .*packer index {ours}"):
        open_source(ours).list(None)


# --- TFRecord ---


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(name: str, value: bytes | int | list[int]) -> bytes:
    """A map entry, made by the encoding rules of protocol buffers alone."""
    if isinstance(value, bytes):
        content = message(1, message(1, value))
    else:
        numbers = [value] if isinstance(value, int) else value
        content = message(3, message(1, b"".join(varint(n & (1 << 64) - 1) for n in numbers)))
    return message(1, message(1, name.encode()) + message(2, content))


def example(**features: Any) -> bytes:
    return message(1, b"".join(feature(name.replace("__", "/"), value) for name, value in features.items()))


def record(data: bytes, break_data: bool = False) -> bytes:
    def mask(crc: int) -> bytes:
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    head = struct.pack("<Q", len(data))
    return head + mask(crc32c(head)) + data + mask(crc32c(data) ^ break_data)


def imagenet(number: int, **more: Any) -> bytes:
    return example(
        image__height=6,
        image__encoded=PICTURES[number],
        image__filename=f"n{number}.JPEG".encode(),
        image__class__label=LABELS[number],
        image__class__synset=f"s{LABELS[number]}".encode(),
        **more,
    )


IMAGENET = b"".join(record(imagenet(number)) for number in range(5))


def listed(path: Path, **options: Any) -> SourceListing:
    return ShardSource(path, **options).list(None)


@pytest.mark.parametrize("compressed", [False, True])
def test_tfrecord(tmp_path: Path, compressed: bool) -> None:
    path = write(tmp_path / "validation-00000-of-00001", gzip.compress(IMAGENET) if compressed else IMAGENET)
    source = open_source(path)
    assert isinstance(source, ShardSource)
    out = pack(source, tmp_path / "out", samples_per_shard=2)
    assert samples(out, "validation") == list(zip(LABELS, PICTURES, strict=True))
    with readers.open(out) as reader:
        assert list(reader.classes) == ["s0", "s1", "s2"]
        assert list(reader.keys) == [f"n{number}" for number in range(5)]
    two = pack(source, tmp_path / "two", samples_per_shard=2, workers=2)
    assert {path.name: path.read_bytes() for path in out.glob("*.tar")} == {
        path.name: path.read_bytes() for path in two.glob("*.tar")
    }
    if compressed:
        with pytest.raises(SourceError, match="cannot be read in shuffled order"):
            pack(source, tmp_path / "three", shuffle=1)


def test_our_own_tfrecords_go_round(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"path": "1.jpg", "mask": "1.png", "n": 1}\n{"path": "a.b.jpg", "n": 2}\n')
    write(tmp_path / "1.jpg", PICTURES[0])
    write(tmp_path / "a.b.jpg", PICTURES[1])
    write(tmp_path / "1.png", picture(1, "PNG"))
    first = pack(tmp_path / "m.jsonl", tmp_path / "first", "tfrecord")
    shard = next(first.glob("*.tfrecord"))
    second = pack(write(tmp_path / "x.tfrecord.gz", gzip.compress(shard.read_bytes())), tmp_path / "second")
    with readers.open(first) as a, readers.open(second) as b:
        assert list(a.fields) == list(b.fields) == ["image", "mask", "json"]
        assert [(s.key, s.label, s.fields) for s in a] == [(s.key, s.label, s.fields) for s in b]


def test_records_of_another_writer(tmp_path: Path) -> None:
    tfrecord = pytest.importorskip("tfrecord")
    writer = tfrecord.TFRecordWriter(str(tmp_path / "test.tfrecord"))
    for number, content in enumerate(PICTURES):
        writer.write({"image": (content, "byte"), "label": (LABELS[number], "int"), "score": (0.5, "float")})
    writer.close()
    listing = listed(tmp_path / "test.tfrecord")
    assert listing.warnings == [f"{tmp_path}/test.tfrecord: features left behind: score"]
    out = pack(tmp_path / "test.tfrecord", tmp_path / "out")
    assert samples(out, "test") == list(zip(LABELS, PICTURES, strict=True))


def test_labels_that_count_from_one(tmp_path: Path) -> None:
    data = b"".join(record(example(image=PICTURES[n], label=n + 1, image__class__text=b"c%d" % n)) for n in range(3))
    listing = listed(write(tmp_path / "x.tfrecords", data))
    assert listing.splits["train"].labels.tolist() == [1, 2, 3] and listing.classes == ()
    assert any("labels run from 1 to 3 and none is 0" in warning for warning in listing.warnings)
    listing = listed(tmp_path / "x.tfrecords", label_offset=1)
    assert listing.splits["train"].labels.tolist() == [0, 1, 2] and listing.classes == ("c0", "c1", "c2")
    assert listing.warnings == []
    assert listing.splits["train"].keys[2] == "x/00000002"


def test_what_stays_behind(tmp_path: Path) -> None:
    data = record(imagenet(0, image__object__bbox__label=[1, 2], source_id=b"7"))
    listing = listed(write(tmp_path / "x.tfrecord", data))
    assert listing.warnings == [f"{tmp_path}/x.tfrecord: features left behind: image/object/bbox/label, source_id"]
    same = record(example(image=PICTURES[0], filename=b"/data/../1.jpg"))
    other = record(example(image=PICTURES[1], filename=b"../data/1.jpg"))
    listing = listed(write(tmp_path / "x.tfrecord", same))
    assert listing.splits["train"].keys == ["1"] and listing.splits["train"].names == [("1.jpg",)]
    listing = listed(write(tmp_path / "x.tfrecord", same + same + other))
    assert listing.splits["train"].keys == ["x/00000000", "x/00000001", "x/00000002"]
    assert "occur twice" in listing.warnings[0]


@pytest.mark.parametrize(
    ("data", "message_"),
    [
        (b"", "no samples"),
        (b"short", "ends inside the record at byte 0: truncated"),
        (b"not a record at all", "the record at byte 0 has a wrong length checksum: damaged, or no TFRecord"),
        (IMAGENET[:-3], "truncated"),
        (IMAGENET[: len(IMAGENET) // 2], "truncated"),
        (IMAGENET + b"\0" * 5, "ends inside the record at byte"),
        (record(b"\xff" * 40), "record 0 at byte 0: "),
        (record(example(x=1, y=b"a")), "no feature 'image/encoded'; it has x, y; name the image with"),
        (record(example(image=PICTURES[0], label=b"cat")), "the label 'label' holds 0 numbers of kind bytes"),
        (record(example(image=PICTURES[0], label=[1, 2])), "the label 'label' holds 2 numbers of kind int64"),
        (record(example(image=PICTURES[0], label=-5)), "the label -5 is out of range"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_broken_tfrecords(tmp_path: Path, data: bytes, message_: str, compressed: bool) -> None:
    path = write(tmp_path / "x.tfrecord", gzip.compress(data) if compressed else data)
    with pytest.raises(SourceError, match=message_):
        listed(path)


def test_truncated_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(IMAGENET)
    for cut in (20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        with pytest.raises(SourceError, match="truncated"):
            listed(write(tmp_path / "x.tfrecord.gz", whole[:cut]))


def test_bad_records_fall_under_on_error(tmp_path: Path) -> None:
    data = record(imagenet(0)) + record(imagenet(1), break_data=True) + record(example(a=1)) + record(imagenet(2))
    path = write(tmp_path / "x.tfrecord", data)
    with pytest.raises(BadSampleError, match=r"x/00000001: the record at byte \d+ has a wrong checksum: damaged"):
        pack(path, tmp_path / "a")
    out = pack(path, tmp_path / "b", on_error="skip")
    assert [image for _, image in samples(out)] == [PICTURES[0], PICTURES[2]]


# --- dispatch ---


def test_kinds_are_told_by_content(tmp_path: Path) -> None:
    for path in (write(tmp_path / "nameless", IMAGENET), write(tmp_path / "zipped.bin", gzip.compress(IMAGENET))):
        assert open_source(path).title == f"TFRecord file {path}"
    with h5py.File(tmp_path / "file.mat", "w") as file:
        elements(file)
    assert open_source(tmp_path / "file.mat").title == f"HDF5 file {tmp_path}/file.mat"
    for name, data in (
        ("x.jpg", PICTURES[0]),
        ("empty", b""),
        ("x.txt.gz", gzip.compress(b"text")),
        ("x.gz", b"\x1f\x8b"),
    ):
        with pytest.raises(
            SourceError, match=f"{name}: no kind of source that packer knows: an image folder, a packed"
        ):
            open_source(write(tmp_path / name, data))
    with pytest.raises(SourceError, match="no such file"):
        open_source(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/imagenette2.tar.gz", "imagenette2"),
        ("x.y.tgz", "x.y"),
        ("x.zip", "x"),
        ("x.CSV", "x"),
        ("x.parquet", "x"),
        ("x.tfrecord.gz", "x"),
        ("x.h5", "x"),
        ("v1.2", "v1.2"),
        (".tar", ".tar"),
        ("a/", "a"),
    ],
)
def test_default_output_names(name: str, expected: str) -> None:
    assert default_output_name(name, "hdf5") == default_output_name(Path(name), "hdf5") == f"{expected}-hdf5"
