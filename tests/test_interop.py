"""Other programs read packer's shards, and packer adopts theirs: GNU tar, tarfile, webdataset, tfrecord, protobuf,
h5py."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import files_of, make_jpeg, tree_of

import packer
import readers
from cache.errors import FormatError, SourceError
from packer.formats import format_named
from packer.formats.base import PackedSample, ShardSpec
from readers.headers import parse_header

wds = pytest.importorskip("webdataset")
tfrecord = pytest.importorskip("tfrecord")
GNU_TAR = shutil.which("tar")
needs_tar = pytest.mark.skipif(GNU_TAR is None, reason="there is no tar program here")

Content = dict[str, tuple[bytes, int]]


def tar(*arguments: object, folder: Path | None = None) -> str:
    """Run GNU tar; any text on stderr is a failure."""
    command = [str(GNU_TAR), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0 and not done.stderr, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packed(tree: Path, pack: Callable[..., Path]) -> Callable[[str], Path]:
    """The image tree of the session packed in a format."""
    return lambda to: pack(tree, to, samples_per_shard=16, label_offset=int(to == "tfrecord"))


def originals(tree: Path, split: str) -> Content:
    """key -> (bytes, label), from the files."""
    classes = ("cat", "dog", "owl")
    return {
        name.removesuffix(".JPEG"): (data, classes.index(name.partition("/")[0]))
        for name, data in files_of(tree / split).items()
    }


def shards(root: Path, split: str) -> list[str]:
    paths = sorted(str(path) for path in root.iterdir() if path.is_file() and path.name.startswith(split))
    assert paths, f"no shards of {split} in {root}"
    return paths


def contents(root: Path, split: str | None = None) -> Content:
    with readers.open(root, split, verify=True) as reader:
        return {s.key: (bytes(s.image), -1 if s.label is None else s.label) for s in reader}


def read_with_webdataset(urls: list[str]) -> list[dict[str, Any]]:
    """Every sample; webdataset leaves its files to the garbage collector, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        samples = list(wds.WebDataset(urls, shardshuffle=False, empty_check=False))
        gc.collect()
    return samples


def tricky_shard(folder: Path, to: str) -> tuple[Path, list[PackedSample]]:
    """A shard with every field, and with keys that are hard to store."""
    fields = {"image": "image", "mask": "file", "json": "json"}
    image = make_jpeg(5)
    samples = [
        PackedSample(key, number, (image, b"mask%d" % number, b'{"n": 1}'), (f"{key}.jpg", "", ""), parse_header(image))
        for number, key in enumerate(["plain", "d/with.dot", "with blank", "Grüße/日本", "k" * 150, "__a__/b", "100%"])
    ]
    path = folder / format_named(to).shard_name("train", 0, 1)
    writer = format_named(to).open_writer(path, ShardSpec("train", fields, ("zero", "one")))
    for sample in samples:
        writer.add(sample)
    writer.finish()
    return path, samples


# --- tar: read by others ------------------------------------------------------------------------------------------
@needs_tar
def test_gnu_tar_lists_and_unpacks(packed: Callable[[str], Path], tree: Path, tmp_path: Path) -> None:
    expected = originals(tree, "train")
    names: list[str] = []
    for shard in shards(packed("tar"), "train"):
        names += tar("tf", shard).splitlines()
        tar("xf", shard, "-C", tmp_path)
    expected_names = {f"{key}.{extension}" for key in expected for extension in ("jpg", "cls", "__name__")}
    assert set(names) == expected_names, "GNU tar lists other members"
    in_order = [f"{key}.{extension}" for key in expected for extension in ("__name__", "cls", "jpg")]
    assert names == in_order, "members of a sample are not adjacent, or extensions not sorted"
    for key, (data, label) in expected.items():
        assert (tmp_path / f"{key}.jpg").read_bytes() == data, f"{key} is unpacked to other bytes"
        assert (tmp_path / f"{key}.cls").read_text() == str(label), f"the label of {key} differs"


@needs_tar
def test_gnu_tar_unpacks_tricky_keys(tmp_path: Path) -> None:
    path, samples = tricky_shard(tmp_path, "tar")
    out = tmp_path / "out"
    out.mkdir()
    tar("xf", path, "-C", out)
    assert len(list(out.rglob("*.jpg"))) == len(samples), "two keys became one file, or were left out"
    assert sorted(p.read_bytes() for p in out.rglob("*.mask.bin")) == sorted(
        bytes(s.payloads[1] or b"") for s in samples
    )


def test_tarfile_agrees_with_the_index(packed: Callable[[str], Path]) -> None:
    root = packed("tar")
    with readers.open(root, "val") as reader:
        places = {f"{reader.keys[i]}.jpg": reader.byte_range(i) for i in range(len(reader))}
        members = {}
        for shard in shards(root, "val"):
            with tarfile.open(shard) as archive:
                for member in archive.getmembers():
                    assert member.isreg() and member.mode == 0o644 and member.mtime == 0, member.name
                    assert not member.pax_headers, f"{member.name} has a PAX header, which several readers lack"
                    if member.name.endswith(".jpg"):
                        members[member.name] = (Path(shard), member.offset_data, member.size)
        assert members == places


def test_webdataset_reads_our_shards(packed: Callable[[str], Path], tree: Path) -> None:
    expected = originals(tree, "train")
    read = read_with_webdataset(shards(packed("tar"), "train"))
    seen = {sample["__key__"]: (sample["jpg"], int(sample["cls"])) for sample in read}
    assert seen == expected
    assert list(seen) == list(expected), "the order differs"


def test_webdataset_reads_tricky_keys(tmp_path: Path) -> None:
    """Keys that webdataset would split or skip arrive under another stem; the real key is in a separate member."""
    path, samples = tricky_shard(tmp_path, "tar")
    read = read_with_webdataset([str(path)])
    assert len(read) == len(samples), "webdataset drops samples, or mixes them"
    for stored, parsed in zip(samples, read, strict=True):
        key = json.loads(parsed["__name__"])["key"] if "__name__" in parsed else parsed["__key__"]
        assert key == stored.key
        assert (parsed["jpg"], parsed["mask.bin"], parsed["json"]) == stored.payloads, f"{key} has other content"
        assert int(parsed["cls"]) == stored.label


@needs_tar
def test_sample_readers_do_not_see_the_record_of_the_set(packed: Callable[[str], Path]) -> None:
    """The record is after the end of the archive; only a tar with -i reads on, and sees it as a member."""
    shard = shards(packed("tar"), "train")[0]
    names = tar("tf", shard).splitlines()
    assert "__packer__" not in names
    assert tar("-tif", shard).splitlines() == [*names, "__packer__"]
    streamed = read_with_webdataset([f"pipe:cat {shard}"])
    assert [sample["__key__"] for sample in streamed] == [name[:-4] for name in names if name.endswith(".jpg")]


# --- tar: adopted -------------------------------------------------------------------------------------------------
@needs_tar
@pytest.mark.parametrize("kind", ["ustar", "gnu", "pax", "v7"])
def test_tars_of_gnu_tar_are_adopted(tmp_path: Path, kind: str) -> None:
    """A folder of files as users have them, with a name that needs an extended header where the format has one."""
    folder = tmp_path / "files"
    keys = ["000", "001", "sub/002"] + ([] if kind in ("ustar", "v7") else ["sub/" + "long" * 40, "sub/Grüße"])
    expected = {}
    for label, key in enumerate(keys):
        image = make_jpeg(label)
        tree_of(folder, {f"{key}.jpg": image, f"{key}.cls": b"%d" % label, f"{key}.json": b'{"k": %d}' % label})
        expected[key] = (image, label)
    files = [f"{key}.{extension}" for key in keys for extension in ("cls", "jpg", "json")]
    shard = tmp_path / "train-000000.tar"
    tar("cf", shard, f"--format={kind}", *files, folder=folder)
    result = packer.index([shard], workers=1)
    assert (result.format, result.samples, result.unreadable) == ("tar", len(keys), 0)
    assert contents(tmp_path) == expected
    with readers.open(tmp_path) as reader:
        assert reader.fields == ("image", "json")
        assert [bytes(reader.read(i, "json")) for i in range(len(keys))] == [b'{"k": %d}' % i for i in range(len(keys))]
    assert packer.verify(tmp_path, deep=True, workers=1).ok


@needs_tar
def test_a_whole_folder_packed_by_gnu_tar_is_adopted(tmp_path: Path) -> None:
    """With directory members, names that begin with "./", and a file that is not an image."""
    images = {f"d/{number}.png": make_jpeg(number) for number in range(4)}
    folder = tree_of(tmp_path / "files", images | {"d/z.webp": b"no image"})
    tar("cf", tmp_path / "val-000000.tar", "--sort=name", "-C", folder, ".")
    result = packer.index([tmp_path / "val-000000.tar"], workers=1)
    assert (result.splits, result.unreadable, len(result.warnings)) == ({"val": 5}, 1, 1)
    assert [data for data, _ in contents(tmp_path).values()] == [*images.values(), b"no image"]


def test_shards_of_webdataset_are_adopted(tree: Path, tmp_path: Path) -> None:
    expected = originals(tree, "train")
    masks = {key: key.encode() for key in expected}
    pattern = str(tmp_path / "imagenet_train-%06d.tar")
    with wds.ShardWriter(pattern, maxcount=10, verbose=0) as sink:
        for key, (data, label) in expected.items():
            sink.write({"__key__": key, "jpg": data, "cls": label, "mask.png": masks[key], "json": {"key": key}})
    result = packer.index([tmp_path], workers=2, classes=["cat", "dog", "owl"])
    assert (result.splits, result.shards) == ({"train": 36}, 4)
    assert contents(tmp_path) == expected
    with readers.open(tmp_path) as reader:
        assert reader.fields == ("image", "json", "mask") and reader.classes == ("cat", "dog", "owl")
        assert {s.key: s.fields["mask"] for s in reader} == masks
        assert all(json.loads(bytes(s.fields["json"])) == {"key": s.key} for s in reader)
    assert packer.verify(tmp_path, deep=True, workers=1).ok


def test_other_extensions_are_named_by_options(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "train-0.tar")) as sink:
        sink.write({"__key__": "a", "input.jpg": make_jpeg(1), "class": 4, "seg.png": b"seg"})
    with pytest.raises(FormatError, match="no sample has an image; name it with image_key="):
        packer.index([tmp_path / "train-0.tar"], workers=1)
    packer.index(
        [tmp_path / "train-0.tar"],
        workers=1,
        image_key="input.jpg",
        label_key="class",
        fields={"mask": "seg.png"},
        label_offset=1,
    )
    with readers.open(tmp_path) as reader:
        assert (reader[0].label, reader[0].fields) == (3, {"image": make_jpeg(1), "mask": b"seg"})


# --- TFRecord: read by others -------------------------------------------------------------------------------------
def test_the_tfrecord_package_reads_our_shards(packed: Callable[[str], Path], tree: Path) -> None:
    """Labels are stored from 1, as in the ImageNet records, because the set was packed with label_offset=1."""
    expected = originals(tree, "train")
    seen = {}
    for shard in shards(packed("tfrecord"), "train"):
        for features in tfrecord.reader.tfrecord_loader(shard, None):
            name = bytes(features["image/filename"]).decode()
            seen[name] = (bytes(features["image/encoded"]), int(features["image/class/label"][0]) - 1)
            assert bytes(features["image/class/synset"]).decode() == name.partition("/")[0]
    assert seen == {f"{key}.JPEG": value for key, value in expected.items()}


def test_protobuf_parses_our_examples(tmp_path: Path) -> None:
    path, samples = tricky_shard(tmp_path, "tfrecord")
    for data, written in zip(tfrecord.reader.tfrecord_iterator(str(path)), samples, strict=True):
        message = tfrecord.example_pb2.Example()
        message.ParseFromString(bytes(data))
        features = message.features.feature
        stored = {name: list(getattr(f, str(f.WhichOneof("kind"))).value) for name, f in features.items()}
        header = written.header
        assert header is not None
        expected: dict[str, list[object]] = {
            "image/encoded": [written.payloads[0]],
            "image/format": [b"JPEG"],
            "image/filename": [f"{written.key}.jpg".encode()],
            "image/height": [header.height],
            "image/width": [header.width],
            "image/channels": [3],
            "image/colorspace": [b"RGB"],
            "image/class/label": [written.label],
            "mask/encoded": [written.payloads[1]],
            "json": [written.payloads[2]],
        }
        if written.label < 2:
            expected |= {key: [(b"zero", b"one")[written.label]] for key in ("image/class/synset", "image/class/text")}
        assert stored == expected, f"the features of {written.key!r} differ"
        assert message.SerializeToString() and message.ByteSize() == len(data), "protobuf writes other bytes"


def test_tfrecord_checksums_equal_those_of_the_tfrecord_package(packed: Callable[[str], Path]) -> None:
    """The package skips checksums when reading and computes them when writing: its writer frames the same records."""
    masked_crc = tfrecord.writer.TFRecordWriter.masked_crc
    [shard] = shards(packed("tfrecord"), "val")
    records = [bytes(data) for data in tfrecord.reader.tfrecord_iterator(shard)]
    framed = b""
    for data in records:
        length = len(data).to_bytes(8, "little")
        framed += length + masked_crc(length) + data + masked_crc(data)
    assert Path(shard).read_bytes() == framed


# --- TFRecord: adopted --------------------------------------------------------------------------------------------
def test_tfrecords_of_the_tfrecord_package_are_adopted(tmp_path: Path) -> None:
    images = [make_jpeg(number) for number in range(5)]
    writer = tfrecord.writer.TFRecordWriter(str(tmp_path / "validation-00000-of-00001"))
    for number, image in enumerate(images):
        writer.write(
            {"photo": (image, "byte"), "y": (number + 1, "int"), "w": (0.5, "float"), "id": (b"i%d" % number, "byte")}
        )
    writer.close()
    shard = tmp_path / "validation-00000-of-00001"
    with pytest.raises(FormatError, match=r"no feature 'image/encoded'; it has id, photo, w, y; .*image_key='KEY'"):
        packer.index([shard], workers=1)
    assert not (tmp_path / "dataset.json").exists(), "a refused adoption left a set behind"
    result = packer.index([shard], workers=1, image_key="photo", label_key="y", label_offset=1, fields={"id": "id"})
    assert (result.format, result.splits) == ("tfrecord", {"validation": 5})
    with readers.open(tmp_path, "val", verify=True) as reader:
        assert [reader.read(i) for i in range(5)] == images
        assert [reader.read(i, "id") for i in range(5)] == [b"i%d" % i for i in range(5)]
        assert reader.labels.tolist() == [0, 1, 2, 3, 4]
        assert len(set(reader.keys)) == 5


# --- HDF5 ---------------------------------------------------------------------------------------------------------
def test_h5py_reads_our_shards(packed: Callable[[str], Path], tree: Path) -> None:
    """The reading code that the format documentation promises, with h5py alone."""
    seen = {}
    for shard in shards(packed("hdf5"), "train"):
        with h5py.File(shard) as file:
            data, offset, length = (file[f"image/{name}"] for name in ("data", "offset", "length"))
            assert data.chunks is None and data.dtype == np.uint8, "the images are not one contiguous dataset"
            keys, labels = file["key"].asstr()[:], file["label"][:]
            for i, key in enumerate(keys):
                start = int(offset[i])
                seen[key] = (data[start : start + int(length[i])].tobytes(), int(labels[i]))
            assert [bytes(name).decode() for name in file.attrs["classes"]] == ["cat", "dog", "owl"]
            assert bytes(file.attrs["split"]) == b"train" and file.attrs["version"] == 1
    assert seen == originals(tree, "train")


def test_h5py_reads_tricky_keys(tmp_path: Path) -> None:
    path, samples = tricky_shard(tmp_path, "hdf5")
    with h5py.File(path) as file:
        assert file["key"].asstr()[:].tolist() == [sample.key for sample in samples]
        assert file["image/name"].asstr()[:].tolist() == [sample.names[0] for sample in samples]
        for field, number in (("image", 0), ("mask", 1), ("json", 2)):
            first, count = int(file[f"{field}/offset"][3]), int(file[f"{field}/length"][3])
            assert file[f"{field}/data"][first : first + count].tobytes() == samples[3].payloads[number]


# --- adoption -----------------------------------------------------------------------------------------------------
def test_two_formats_at_once_are_refused(packed: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="index one format at a time"):
        packer.index([*shards(packed("tar"), "val"), *shards(packed("hdf5"), "val")], tmp_path / "out", workers=1)


def test_labels_below_the_offset_are_refused(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "train-0.tar")) as sink:
        sink.write({"__key__": "a", "jpg": make_jpeg(1), "cls": 0})
    with pytest.raises(FormatError, match=r"label -2 .*label offset"):
        packer.index([tmp_path / "train-0.tar"], workers=1, label_offset=2)
