"""Folders of shards made elsewhere, as one source, of each format of the registry."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg
from suites.containers import HDF5_LAYOUTS, example, hdf5_of, rec_of, record, tar_of, write

import packer
from cache.errors import SourceError
from packer.testing.sources import Found, SourceSuite, found

PICTURES = [make_jpeg(number) for number in range(14)]
BY_FILE = {"train-00": range(4), "train-01": range(4, 9), "val-00": range(9, 14)}


def as_tar(path: Path, numbers: range) -> Path:
    members = [
        (f"{number:06d}.{suffix}", data)
        for number in numbers
        for suffix, data in (("jpg", PICTURES[number]), ("cls", b"%d" % (number % 3)))
    ]
    return write(path.with_suffix(".tar"), tar_of(*members))


def as_tfrecord(path: Path, numbers: range) -> Path:
    records = (record(example(image__encoded=PICTURES[n], image__class__label=n % 3)) for n in numbers)
    return write(path.with_suffix(".tfrecord"), b"".join(records))


def as_packed_tfrecord(path: Path, numbers: range) -> Path:
    plain = as_tfrecord(path, numbers)
    packed = write(path.with_suffix(".tfrecord.gz"), gzip.compress(plain.read_bytes()))
    plain.unlink()
    return packed


def as_hdf5(path: Path, numbers: range) -> Path:
    images, labels = [PICTURES[number] for number in numbers], [number % 3 for number in numbers]
    return hdf5_of(path.with_suffix(".h5"), HDF5_LAYOUTS["ranges"], images, labels)


def as_items(path: Path, numbers: range) -> Path:
    """A compressed data set for each image: none is one byte range."""
    images, labels = [PICTURES[number] for number in numbers], [number % 3 for number in numbers]
    return hdf5_of(path.with_suffix(".h5"), HDF5_LAYOUTS["elements"], images, labels)


def as_recordio(path: Path, numbers: range) -> Path:
    return write(path.with_suffix(".rec"), rec_of([PICTURES[n] for n in numbers], [n % 3 for n in numbers]))


WRITERS: dict[str, Callable[[Path, range], Path]] = {
    "tar": as_tar,
    "tfrecord": as_tfrecord,
    "tfrecord.gz": as_packed_tfrecord,
    "hdf5": as_hdf5,
    "hdf5 elements": as_items,
    "recordio": as_recordio,
}


def folder_of(root: Path, writer: Callable[[Path, range], Path]) -> Path:
    root.mkdir()
    for name, numbers in BY_FILE.items():
        writer(root / name, numbers)
    return root


@pytest.mark.parametrize("format", WRITERS)
class TestContract(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path, format: str) -> Path:
        return folder_of(tmp_path / "shards", WRITERS[format])

    @pytest.fixture
    def truth(self, format: str) -> Found:
        splits: dict[str, Any] = {"train": [], "val": []}
        for name, numbers in BY_FILE.items():
            for place, number in enumerate(numbers):
                key = f"{number:06d}" if format == "tar" else f"{name}/{place:08d}"
                splits[name[: name.index("-")]].append((key, number % 3, (PICTURES[number],)))
        return Found(splits)


def test_the_folders_of_splits_say_the_split(tmp_path: Path) -> None:
    for split, numbers in (("train", range(5)), ("val", range(5, 9))):
        (tmp_path / "set" / split).mkdir(parents=True)
        as_tar(tmp_path / "set" / split / "000000", numbers)
    listing = packer.open_source(tmp_path / "set").list(None)
    assert {name: len(part) for name, part in listing.splits.items()} == {"train": 5, "val": 4}


def test_names_without_a_split_are_one(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    as_tar(tmp_path / "set/000000", range(3))
    as_tar(tmp_path / "set/000002", range(3, 6))
    listing = packer.open_source(tmp_path / "set").list("val")
    assert {name: len(part) for name, part in listing.splits.items()} == {"val": 6}
    assert [text for text in listing.warnings if "1 shard are missing" in text or "1 shard is missing" in text]


def test_keys_that_several_shards_have_begin_with_their_shard(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name in ("a", "b"):
        as_tar(tmp_path / "set" / name, range(2))
    keys = [key for key, _, _ in found(packer.open_source(tmp_path / "set")).splits["train"]]
    assert keys == ["a/000000", "a/000001", "b/000000", "b/000001"]


def test_a_folder_converts_to_another_format(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "shards", as_tar)
    result = packer.convert(root, "hdf5", tmp_path / "out", run=packer.Run(workers=1))
    assert result.splits == {"train": 9, "val": 5}
    assert packer.convert(tmp_path / "out", "tfrecord", tmp_path / "again", run=packer.Run(workers=1)).samples == 14


@pytest.mark.parametrize(
    "what", ["several formats", "a shard of a packed set", "a damaged shard", "a shard that changed"]
)
def test_folders_that_are_refused(tmp_path: Path, what: str) -> None:
    root = folder_of(tmp_path / "shards", as_tar)
    if what == "several formats":
        as_hdf5(root / "train-02", range(3))
    elif what == "a shard of a packed set":
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
        next((tmp_path / "out").glob("train*.tar")).rename(root / "train-02.tar")
    elif what == "a damaged shard":
        path = root / "val-00.tar"
        path.write_bytes(path.read_bytes()[:3000])
    expected = {
        "several formats": "shards of several formats",
        "a shard of a packed set": r"train-02\.tar: a shard of a packed set",
        "a damaged shard": r"val-00\.tar",
        "a shard that changed": r"val-00\.tar: has changed since it was listed",
    }[what]
    source = packer.open_source(root)
    with pytest.raises(SourceError, match=expected):
        source.list(None)
        as_tar(root / "val-00", range(9, 13))
        with source.open():
            pass


def test_a_tree_with_an_archive_in_it_is_a_tree(tmp_path: Path) -> None:
    (tmp_path / "set/cat").mkdir(parents=True)
    (tmp_path / "set/cat/1.jpg").write_bytes(PICTURES[1])
    as_tar(tmp_path / "set/old", range(3))
    result = packer.convert(tmp_path / "set", "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert (result.samples, result.classes) == (1, 1)


def texts_of(path: Path, feature: str, texts: list[bytes], **more: int) -> Path:
    samples = (
        example(**{"image__encoded": make_jpeg(number), "image__key": b"%d" % number, feature: text}, **more)
        for number, text in enumerate(texts)
    )
    return write(path, b"".join(map(record, samples)))


@pytest.mark.parametrize("feature", ["image__class__text", "image__class__label", "label"])
def test_names_of_classes_without_numbers_are_labels(tmp_path: Path, feature: str) -> None:
    source = packer.open_source(texts_of(tmp_path / "x.tfrecord", feature, [b"dog", b"cat", b"dog"]))
    listing = source.list(None)
    assert (listing.classes, listing.splits["train"].labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    (tmp_path / "shards").mkdir()
    for number, texts in enumerate(([b"10", b"2"], [b"7", b"2"])):
        texts_of(tmp_path / f"shards/{number}.tfrecord", feature, texts)
    listing = packer.open_source(tmp_path / "shards").list(None)
    assert (listing.classes, listing.splits["train"].labels.tolist()) == ((), [10, 2, 7, 2])


def test_names_of_classes_without_numbers_are_named_by_an_index(tmp_path: Path) -> None:
    texts_of(tmp_path / "x.tfrecord", "image__class__text", [b"dog", b"cat"])
    result = packer.index(tmp_path / "x.tfrecord", output=tmp_path / "out", workers=1)
    assert any("2 images (the first: 0) with the name of a class and no number" in text for text in result.warnings)


def test_names_and_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    texts_of(folder / "0.tfrecord", "image__class__text", [b"cat", b"cat"], image__class__label=0)
    texts_of(folder / "1.tfrecord", "image__class__text", [b"cat"])
    listing = packer.open_source(folder).list(None)
    assert (listing.classes, listing.splits["train"].labels.tolist()) == (("cat",), [0, 0, 0])
    texts_of(folder / "1.tfrecord", "image__class__text", [b"owl"])
    with pytest.raises(SourceError, match="others only the name 'owl'"):
        packer.open_source(folder).list(None)
