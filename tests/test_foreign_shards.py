"""Shards made elsewhere: `packer convert` packs the shards that `packer index` adopts, and both refuse the same
shards."""

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
import set_cases
from conftest import make_jpeg
from PIL import Image
from suites.containers import HDF5_LAYOUTS, example, hdf5_of, rec_of, record, tar_of, write

import packer
import readers
from cache.errors import BadSampleError, NotFlatError, SourceError
from packer.sources import default_output_name, open_source
from packer.sources.base import SourceListing
from readers.layout import read_dataset_info

IMAGES = [make_jpeg(number) for number in range(5)]
LABELS = [2, 0, 1, 1, 0]
WHOLE = np.frombuffer(b"".join(IMAGES), np.uint8)
STARTS = np.cumsum([0, *map(len, IMAGES)])
PIXELS = np.random.RandomState(0).randint(0, 256, (5, 6, 7, 3), np.uint8)


def contents(root: Path) -> dict[str, Any]:
    """The complete content of a set, by split."""
    info = read_dataset_info(root)
    content: dict[str, Any] = {"classes": info.classes, "fields": dict(info.fields)}
    for split in info.splits:
        with readers.open(root, split, verify=True) as reader:
            content[split] = [
                (s.key, s.label, reader.name(i), {name: bytes(data) for name, data in s.fields.items()})
                for i, s in enumerate(reader)
            ]
    return content


def listed(path: Path, **options: Any) -> SourceListing:
    return open_source(path, **options).list(None)


def convert(source: Any, out: Path, to: str = "tar", **options: Any) -> Path:
    return set_cases.convert(source, out, to, **options).output


def ranges_with_names(file: Any) -> None:
    file["images"], file["start"], file["length"] = WHOLE, STARTS[:-1], np.diff(STARTS)
    file["filenames"], file["labels"] = ["a/1.jpg", "a/2.jpg", "../b/2.jpg", "/c.JPEG", "d.jpg"], np.array(LABELS)


def ranges_of_starts_alone(file: Any) -> None:
    file["images"], file["offset"], file["y"] = WHOLE, STARTS[:-1], np.array(LABELS, np.uint8)


def ranges_in_a_split(file: Any) -> None:
    file["val/images"], file["val/offsets"], file["val/labels"] = WHOLE, STARTS, np.array(LABELS)


def items_in_folders(file: Any) -> None:
    for number, (image, label) in pairs():
        file[f"set/val/{'abc'[label]}/{number}.jpg"] = np.void(image)
    file["something else"] = np.zeros((3, 3))


def records_of(name: str, *examples: bytes) -> Callable[[Path], Path]:
    return lambda folder: write(folder / name, b"".join(map(record, examples)))


def pairs() -> Any:
    return enumerate(zip(IMAGES, LABELS, strict=True))


IMAGENET = [
    example(image__height=6, image__encoded=image, image__filename=b"n%d.JPEG" % number, image__class__label=label,
            image__class__synset=b"s%d" % label, image__object__bbox__label=3)
    for number, (image, label) in pairs()
]  # fmt: skip
TFRECORD = b"".join(map(record, IMAGENET))
OTHER_NAMES = [
    example(jpeg=image, filename=b"/data/../%d.jpg" % n, target=label, mask__encoded=b"mask", json=b"{}")
    for n, (image, label) in pairs()
]
NAMELESS = [example(image=image, label=label, image__class__text=b"c%d" % label) for _, (image, label) in pairs()]
GAPS = [example(image=image, label=2 * label, image__class__text=b"c%d" % label) for _, (image, label) in pairs()]


def webdataset(folder: Path) -> Path:
    members = [
        (f"d/{number:04d}.{extension}", data)
        for number, (image, label) in pairs()
        for extension, data in (("cls", b"%d" % label), ("jpg", image), ("json", b"{}"), ("seg.png", b"mask"))
    ]
    return write(folder / "imagenet_val-0000.tar", tar_of(*members))


def hdf5(fill: Callable[..., object], *arguments: Any, **storage: Any) -> Callable[[Path], Path]:
    return lambda folder: hdf5_of(folder / "my.val.h5", fill, *arguments, **storage)


FLAT: dict[str, Callable[[Path], Path]] = {
    **{f"hdf5 {name}": hdf5(fill, IMAGES, LABELS) for name, fill in HDF5_LAYOUTS.items() if name != "elements"},
    "hdf5 ranges with names": hdf5(ranges_with_names),
    "hdf5 ranges of starts alone": hdf5(ranges_of_starts_alone),
    "hdf5 ranges in a split": hdf5(ranges_in_a_split),
    "hdf5 items in folders": hdf5(items_in_folders),
    "tfrecord imagenet": records_of("val-00000-of-00001", *IMAGENET),
    "tfrecord other names": records_of("my.val.tfrecord", *OTHER_NAMES),
    "tfrecord nameless": records_of("val.tfrecords", *NAMELESS),
    "tfrecord gaps in the classes": records_of("val.tfrecords", *GAPS),
    "webdataset": webdataset,
    "recordio": lambda folder: write(folder / "val.rec", rec_of(IMAGES, LABELS)),
}
NOT_FLAT = {
    **{f"hdf5 {name}, gzip": hdf5(fill, IMAGES, LABELS, compression="gzip") for name, fill in HDF5_LAYOUTS.items()},
    "hdf5 elements": hdf5(HDF5_LAYOUTS["elements"], IMAGES, LABELS),
}


@pytest.mark.parametrize("layout", [*FLAT, *NOT_FLAT])
def test_convert_packs_the_shards_that_index_adopts(tmp_path: Path, layout: str) -> None:
    shard = (FLAT | NOT_FLAT)[layout](tmp_path)
    converted = convert(shard, tmp_path / "converted", "tfrecord", samples_per_shard=2)
    content = contents(converted)
    expected = [(2 * label if "gaps" in layout else label, image) for _, (image, label) in pairs()]
    assert sorted((label, fields["image"]) for _, label, _, fields in content["val"]) == sorted(expected)
    assert packer.verify(converted, against=shard, workers=1).ok
    if layout in FLAT:
        indexed = packer.index([shard], tmp_path / "indexed", workers=1).output
        assert content == contents(indexed)
        assert packer.verify(indexed, workers=1).ok
    else:
        with pytest.raises(NotFlatError, match=f"packer convert {shard} --to hdf5"):
            packer.index([shard], tmp_path / "indexed", workers=1)
        assert not (tmp_path / "indexed").exists(), "a refused adoption left a set"


@pytest.mark.parametrize("layout", ["tfrecord imagenet", "webdataset", "recordio"])
def test_a_compressed_shard_converts_like_its_content(tmp_path: Path, layout: str) -> None:
    shard = FLAT[layout](tmp_path)
    packed = write(shard.with_name(shard.name + ".gz"), gzip.compress(shard.read_bytes()))
    with pytest.raises(NotFlatError, match=f"packer convert {packed} --to"):
        packer.index([packed], tmp_path / "indexed", workers=1)
    flat = convert(shard, tmp_path / "flat", samples_per_shard=2)
    assert contents(convert(packed, tmp_path / "packed", samples_per_shard=2, workers=2)) == contents(flat)
    with pytest.raises(SourceError, match="cannot be read in shuffled order"):
        convert(packed, tmp_path / "shuffled", shuffle=1)


def test_convert_and_index_refuse_the_same_shards(tmp_path: Path) -> None:
    path, two_labels = tmp_path / "x.tfrecord", example(image=IMAGES[0], label=[1, 2])
    for damage in (record(two_labels), struct.pack("<Q", 5) + b"wrong", record(example(x=b"x"))):
        write(path, damage + TFRECORD)
        messages = set()
        for work in (lambda: packer.index([path], workers=1), lambda: convert(path, tmp_path / "out")):
            with pytest.raises(readers.PackerError) as caught:
                work()
            messages.add(str(caught.value))
        assert len(messages) == 1
    write(path, record(example(image=IMAGES[0], label=b"cat")) + TFRECORD)  # a text label among numbers
    with pytest.raises(readers.PackerError, match=r"the label 'label' is text, .* packer convert  gives"):
        packer.index([path], tmp_path / "indexed", workers=1)
    with pytest.raises(SourceError, match="others only the name 'cat'"):
        convert(path, tmp_path / "converted")


# --- HDF5 ---
@pytest.mark.parametrize(
    ("array", "expected", "storage"),
    [
        (PIXELS, PIXELS, {"compression": "lzf"}),
        (PIXELS[..., 0], PIXELS[..., 0], {}),
        (PIXELS[..., :1], PIXELS[..., 0], {"compression": "lzf"}),
        (np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2)), PIXELS, {}),
    ],
    ids=["NHWC", "NHW", "NHW1", "NCHW"],
)
def test_pixels_become_png(tmp_path: Path, array: Any, expected: Any, storage: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("train_x", data=array, **storage)
        file["target"] = np.array(LABELS)
    with readers.open(convert(tmp_path / "x.h5", tmp_path / "out")) as reader:
        assert reader.labels.tolist() == LABELS and reader.keys[1] == "x/00000001"
        for i in range(5):
            with Image.open(io.BytesIO(reader.read(i))) as image:
                assert image.format == "PNG" and np.array_equal(np.asarray(image), expected[i])


def test_a_file_of_several_splits_converts_and_is_not_adopted(tmp_path: Path) -> None:
    def splits(file: Any) -> None:
        for split in ("train", "test"):
            HDF5_LAYOUTS["elements"](group := file.create_group(split), IMAGES, LABELS)
            group["filenames"] = [f"{split}/{i}.jpg".encode() for i in range(5)]

    shard = hdf5_of(tmp_path / "x.h5", splits)
    with pytest.raises(NotFlatError, match=f"has the splits train, test, .* packer convert {shard} --to"):
        packer.index([shard], tmp_path / "indexed", workers=1)
    source = open_source(shard, label_offset=-1)
    listing = source.list(None)
    assert {name: part.root for name, part in listing.splits.items()} == {"train": "train", "test": "test"}
    assert listing.splits["test"].keys[4] == "test/4" and listing.splits["test"].labels[0] == 3
    assert list(source.list("test").splits) == ["test"]
    with pytest.raises(SourceError, match="no split 'val'; it has train, test"):
        source.list("val")


def test_hdf5_files_that_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "no data set of images found"),
        ({"images": PIXELS[0, 0]}, "/images has uint8 of shape"),
        ({"images": PIXELS.ravel()}, "has no table of offsets"),
        ({"images": PIXELS, "labels": [1, 2]}, "/labels has shape .* expected 5 whole numbers"),
        ({"images": PIXELS, "labels": [-9] * 5}, "the label -9 is out of range"),
        ({"a": PIXELS, "b": PIXELS}, r"which of these holds the samples: /a, /b\? Name it"),
    ]
    for data_sets, message in cases:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            for name, data in data_sets.items():
                file[name] = np.asarray(data)
        with pytest.raises(SourceError, match=message):
            listed(tmp_path / "x.h5")
    whole = FLAT["hdf5 ranges"](tmp_path).read_bytes()
    for damaged in (whole[: len(whole) // 2], b""):
        with pytest.raises(SourceError, match="cannot be opened as HDF5, damaged or truncated"):
            listed(write(tmp_path / "y.h5", damaged))
    for to, suffix in (("hdf5", "h5"), ("tar", "tar")):
        own = next(convert(tmp_path / "my.val.h5", tmp_path / to, to).glob(f"*.{suffix}"))
        with pytest.raises(SourceError, match=rf"a shard of a packed set; .*packer index {own}"):
            listed(own)


# --- TFRecord ---
def test_tfrecords_of_packer_convert_with_all_fields(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"path": "1.jpg", "mask": "1.png", "n": 1}\n{"path": "a.b.jpg", "n": 2}\n')
    for number, name in enumerate(("1.jpg", "a.b.jpg", "1.png")):
        write(tmp_path / name, IMAGES[number])
    first = convert(tmp_path / "m.jsonl", tmp_path / "first", "tfrecord")
    shard = next(first.glob("*.tfrecord"))
    second = convert(write(tmp_path / "x.tfrecord.gz", gzip.compress(shard.read_bytes())), tmp_path / "second")
    assert contents(first)["fields"] == {"image": "image", "mask": "file", "json": "json"}
    assert contents(first) == contents(second)


def test_labels_that_count_from_one(tmp_path: Path) -> None:
    data = b"".join(record(example(image=IMAGES[n], label=n + 1, image__class__text=b"c%d" % n)) for n in range(3))
    listing = listed(write(tmp_path / "x.tfrecords", data))
    assert listing.splits["train"].labels.tolist() == [1, 2, 3] and listing.classes == ()
    assert any("labels run from 1 to 3 and none is 0" in warning for warning in listing.warnings)
    listing = listed(tmp_path / "x.tfrecords", label_offset=1)
    assert listing.splits["train"].labels.tolist() == [0, 1, 2] and listing.classes == ("c0", "c1", "c2")
    assert listing.warnings == []
    assert listing.splits["train"].keys[2] == "x/00000002"


def test_classes_names_and_unsupported_features(tmp_path: Path) -> None:
    listing = listed(write(tmp_path / "x.tfrecord", TFRECORD))
    part = listing.splits["train"]
    assert (listing.classes, part.keys[4], part.names[4]) == (("s0", "s1", "s2"), "n4", ("n4.JPEG",))
    data = example(image=IMAGES[0], image__object__bbox__label=[1, 2], source_id=b"7")
    listing = listed(write(tmp_path / "x.tfrecord", record(data)))
    assert listing.warnings == [f"{tmp_path}/x.tfrecord: features left out: image/object/bbox/label, source_id"]


def test_names_that_lead_outside_or_occur_twice(tmp_path: Path) -> None:
    same = record(example(image=IMAGES[0], filename=b"/data/../1.jpg"))
    other = record(example(image=IMAGES[1], filename=b"../data/1.jpg"))
    listing = listed(write(tmp_path / "x.tfrecord", same))
    assert listing.splits["train"].keys == ["1"] and listing.splits["train"].names == [("1.jpg",)]
    listing = listed(write(tmp_path / "x.tfrecord", same + same + other))
    assert listing.splits["train"].keys == ["x/00000000", "x/00000001", "x/00000002"]
    assert "occur twice" in listing.warnings[0]


def test_broken_tfrecords(tmp_path: Path) -> None:
    for data, match in (
        (b"", "no samples"),
        (b"short", "ends inside the record at byte 0: truncated"),
        (b"not a record at all", "the record at byte 0 has a wrong length checksum: damaged, or not a TFRecord"),
        (TFRECORD[:-3], "truncated"),
        (TFRECORD + b"\0" * 5, "ends inside the record at byte"),
        (record(b"\xff" * 40), "record 0 at byte 0: "),
        (record(example(x=1, y=b"a")), "no feature 'image/encoded'; it has x, y; name the image with"),
        (record(example(image=IMAGES[0], label=-5)), "the label -5 is out of range"),
    ):
        for content in (data, gzip.compress(data)):
            with pytest.raises(SourceError, match=match):
                listed(write(tmp_path / "x.tfrecord", content))
    whole = gzip.compress(TFRECORD)
    for cut in (20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        with pytest.raises(SourceError, match="truncated"):
            listed(write(tmp_path / "x.tfrecord.gz", whole[:cut]))


def test_bad_records_fall_under_on_error(tmp_path: Path) -> None:
    data = record(IMAGENET[0]) + record(IMAGENET[1], damaged=True) + record(example(a=1)) + record(IMAGENET[2])
    path = write(tmp_path / "x.tfrecord", data)
    with pytest.raises(BadSampleError, match=r"x/00000001: the record at byte \d+ has a wrong checksum: damaged"):
        convert(path, tmp_path / "a")
    samples = contents(convert(path, tmp_path / "b", on_error="skip"))["train"]
    assert [fields["image"] for _, _, _, fields in samples] == [IMAGES[0], IMAGES[2]]


# --- detection of the source ---
def test_the_kind_of_a_file_is_its_content(tmp_path: Path) -> None:
    for path in (write(tmp_path / "nameless", TFRECORD), write(tmp_path / "zipped.bin", gzip.compress(TFRECORD))):
        assert open_source(path).title == f"TFRecord file {path}"
    path = FLAT["hdf5 ranges"](tmp_path).rename(tmp_path / "file.mat")
    assert open_source(path).title == f"HDF5 file {path}"
    unknown = {"x.jpg": IMAGES[0], "empty": b"", "x.txt.gz": gzip.compress(b"text"), "x.gz": b"\x1f\x8b"}
    for name, data in unknown.items():
        with pytest.raises(SourceError, match=f"{name}: not a known kind of source: a packed set, an LMDB"):
            open_source(write(tmp_path / name, data))
    with pytest.raises(SourceError, match="no such file"):
        open_source(tmp_path / "nowhere")


def test_default_output_names() -> None:
    for name, expected in {
        "a/imagenette2.tar.gz": "imagenette2", "x.y.tgz": "x.y", "x.zip": "x", "x.CSV": "x", "x.h5": "x",
        "x.parquet": "x", "x.tfrecord.gz": "x", "v1.2": "v1.2", ".tar": ".tar", "a/": "a",
    }.items():  # fmt: skip
        assert default_output_name(name, "hdf5") == default_output_name(Path(name), "hdf5") == f"{expected}-hdf5"
