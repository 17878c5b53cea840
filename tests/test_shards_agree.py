"""`packer convert` and `packer index` give the same set of a shard made elsewhere: a layout is understood once."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import make_jpeg
from crc32c import crc32c

import packer
import readers
from cache.errors import NotFlatError
from packer.formats.example import masked_crc
from readers.layout import read_dataset_info

IMAGES = [make_jpeg(number) for number in range(4)]
WHOLE = np.frombuffer(b"".join(IMAGES), np.uint8)
STARTS = np.cumsum([0, *map(len, IMAGES)])


def hdf5(fill: Callable[[Any], None], name: str = "val.h5") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with h5py.File(folder / name, "w") as file:
            fill(file)
        return folder / name

    return make


def ranges(file: Any) -> None:
    file["images"], file["offsets"], file["labels"] = WHOLE, STARTS, np.array([1, 0, -1, 2])


def ranges_with_names(file: Any) -> None:
    file["images"], file["start"], file["length"] = WHOLE, STARTS[:-1], np.diff(STARTS)
    file["filenames"] = ["a/1.jpg", "a/2.jpg", "../b/2.jpg", "/c.JPEG"]


def ranges_in_a_group(file: Any) -> None:
    file["image/data"], file["image/offsets"], file["y"] = WHOLE, STARTS, np.array([3, 2, 1, 0], np.uint8)


def ranges_in_a_split(file: Any) -> None:
    file["test/images"], file["test/offsets"], file["test/labels"] = WHOLE, STARTS, np.arange(4)


def items(file: Any) -> None:
    for number, image in enumerate(IMAGES):
        data = file.create_dataset(f"pictures/{number + 8}", data=np.frombuffer(image, np.uint8))
        data.attrs["label"] = number


def items_beside_labels(file: Any) -> None:
    for number, image in enumerate(IMAGES):
        file[f"images/{number + 8}"] = np.frombuffer(image, np.uint8)
    file["labels"] = np.array([2, 1, 0, 1], np.uint8)


def items_in_folders(file: Any) -> None:
    for number, image in enumerate(IMAGES):
        file[f"set/test/{'cat' if number % 2 else 'dog'}/{number}.jpg"] = np.void(image)


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(**features: Any) -> bytes:
    """A framed tf.train.Example; __ in a name stands for /."""
    entries = b""
    for name, value in features.items():
        content = field(1, field(1, value)) if isinstance(value, bytes) else field(3, field(1, varint(value)))
        entries += field(1, field(1, name.replace("__", "/").encode()) + field(2, content))
    data = field(1, entries)
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(crc32c(head))) + data + struct.pack("<I", masked_crc(crc32c(data)))


def file_of(name: str, *parts: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(b"".join(parts))
        return folder / name

    return make


IMAGENET = [
    record(
        image__encoded=image,
        image__filename=b"n%d_%d.JPEG" % (number % 2, number),
        image__class__label=number % 2,
        image__class__synset=b"n%d" % (number % 2),
        image__object__bbox__label=3,
    )
    for number, image in enumerate(IMAGES)
]
OTHER_NAMES = [
    record(jpeg=image, filename=b"/data/../%d.jpg" % number, target=number, mask__encoded=b"mask", json=b"{}")
    for number, image in enumerate(IMAGES)
]
NAMELESS = [
    record(image=image, label=number, image__class__text=b"c%d" % number) for number, image in enumerate(IMAGES)
]
GAPS = [record(image=image, label=2 * n, image__class__text=b"c%d" % n) for n, image in enumerate(IMAGES)]


def webdataset(folder: Path) -> Path:
    path = folder / "imagenet_val-0000.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, image in enumerate(IMAGES):
            for extension, data in (("cls", b"%d" % number), ("jpg", image), ("json", b"{}"), ("seg.png", b"mask")):
                info = tarfile.TarInfo(f"d/{number:04d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "hdf5 ranges": hdf5(ranges),
    "hdf5 ranges with names": hdf5(ranges_with_names, "imagenet_test.h5"),
    "hdf5 ranges in a group": hdf5(ranges_in_a_group),
    "hdf5 ranges in a split": hdf5(ranges_in_a_split),
    "hdf5 items": hdf5(items),
    "hdf5 items beside labels": hdf5(items_beside_labels),
    "hdf5 items in folders": hdf5(items_in_folders),
    "tfrecord imagenet": file_of("validation-00000-of-00001", *IMAGENET),
    "tfrecord other names": file_of("my.test.tfrecord", *OTHER_NAMES),
    "tfrecord nameless": file_of("x.tfrecords", *NAMELESS),
    "tfrecord gaps in the classes": file_of("x.tfrecords", *GAPS),
    "webdataset": webdataset,
}


def contents(root: Path) -> dict[str, Any]:

    info = read_dataset_info(root)
    found: dict[str, Any] = {"classes": info.classes, "fields": dict(info.fields)}
    for split in info.splits:
        with readers.open(root, split, verify=True) as reader:
            found[split] = [
                (s.key, s.label, reader.name(i), {name: bytes(data) for name, data in s.fields.items()})
                for i, s in enumerate(reader)
            ]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convert_and_index_agree(tmp_path: Path, layout: str) -> None:
    shard = LAYOUTS[layout](tmp_path)
    indexed = packer.index([shard], tmp_path / "indexed", workers=1).output
    converted = packer.convert(shard, "tfrecord", tmp_path / "converted", workers=1).output
    assert contents(converted) == contents(indexed)
    assert packer.verify(indexed, workers=1).ok
    assert packer.verify(converted, against=shard, workers=1).ok


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("hdf5")])
def test_a_compressed_shard_converts_as_what_it_holds(tmp_path: Path, layout: str) -> None:
    shard = LAYOUTS[layout](tmp_path)
    packed = shard.with_name(shard.name + ".gz")
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(NotFlatError, match=f"packer convert {packed} --to"):
        packer.index([packed], tmp_path / "indexed", workers=1)
    flat = packer.convert(shard, "tar", tmp_path / "flat", workers=1).output
    assert contents(packer.convert(packed, "tar", tmp_path / "packed", workers=1).output) == contents(flat)


def test_a_file_of_several_splits_converts_and_is_not_adopted(tmp_path: Path) -> None:
    def splits(file: Any) -> None:
        for split in ("train", "val"):
            file[f"{split}/images"], file[f"{split}/offsets"] = WHOLE, STARTS

    shard = hdf5(splits)(tmp_path)
    with pytest.raises(NotFlatError, match=f"holds the splits train, val, .* packer convert {shard} --to"):
        packer.index([shard], tmp_path / "indexed", workers=1)
    assert packer.convert(shard, "tar", tmp_path / "out", workers=1).splits == {"train": 4, "val": 4}


@pytest.mark.parametrize(
    "damage",
    [
        record(image=IMAGES[0], label=b"cat"),
        struct.pack("<Q", 5) + b"wrong",
        record(other=b"x"),
    ],
)
def test_what_one_refuses_the_other_refuses(tmp_path: Path, damage: bytes) -> None:
    path = file_of("x.tfrecord", damage, *NAMELESS)(tmp_path)
    messages = []
    for work in (
        lambda: packer.index([path], tmp_path / "indexed", workers=1),
        lambda: packer.convert(path, "tar", tmp_path / "converted", workers=1),
    ):
        with pytest.raises(readers.PackerError) as caught:
            work()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
