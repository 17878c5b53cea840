"""Trees, archives, tables, packed sets, record files and folders of these keep the contract of sources."""

from __future__ import annotations

import gzip
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import by_subject, make_jpeg, tree_of
from suites.containers import COMPRESS, HDF5_LAYOUTS, example, hdf5_of, rec_of, record, tar_of, write, zip_of
from suites.layouts import PICTURES, Layout, LayoutSuite, refusal, write_table

import packer
from cache.errors import SourceError
from packer.testing.sources import Content, content_of
from readers.layout import DOCUMENTS

CLASSES = ("cat", "dog")
TREE = {
    f"{split}/{CLASSES[number % 2]}/{number}.jpg": PICTURES[number]
    for number, split in enumerate(["train"] * 9 + ["val"] * 3)
}
NAMES = sorted(TREE, key=lambda name: name.split("/"))  # the order of a tree
MEMBERS = [(f"images/{name}", TREE[name]) for name in NAMES]


# --- trees and tables ---------------------------------------------------------------------------------------------
def tree_content(root: Path | None = None, *more: Callable[[int], bytes | None]) -> Content:
    """The content of a tree of these pictures, in any container. more: further fields, as functions of a sample's
    number."""
    splits: dict[str, Any] = {"train": [], "val": []}
    for place, name in enumerate(NAMES):
        split, label, _ = name.split("/")
        fields = (TREE[name], *(value(place) for value in more))
        splits[split].append((name[len(split) + 1 : -len(".jpg")], CLASSES.index(label), fields))
    return Content(splits, CLASSES)


def tar_layout(suffix: str) -> Layout:
    data = COMPRESS[suffix](tar_of(*MEMBERS))
    return Layout(lambda folder: write(folder / f"images.{suffix}", data), tree_content)


def zip_layout(method: int) -> Layout:
    return Layout(lambda folder: write(folder / "images.zip", zip_of(*MEMBERS, method=method)), tree_content)


def packed_layout(to: str) -> Layout:
    def pack(folder: Path) -> Path:
        packer.convert(tree_of(folder / "images", TREE), to, folder / "set", **by_subject({}, workers=1, samples=5))
        shutil.rmtree(folder / "images")
        return folder / "set"

    return Layout(pack, tree_content, f"*.{ {'hdf5': 'h5'}.get(to, to) }*", tuple(f"*/{name}" for name in DOCUMENTS))


def items(folder: Path) -> Path:
    """A dataset for each image, in groups that correspond to folders."""
    with h5py.File(folder / "images.h5", "w") as file:
        for name in NAMES:
            file[name] = np.void(TREE[name])
    return folder / "images.h5"


def table_layout(suffix: str) -> Layout:
    """With splits, labels, and a mask for every second image."""

    def tabulated(folder: Path) -> Path:
        root, rows = tree_of(folder / "images", TREE), []
        for place, name in enumerate(NAMES):
            split, label = name.split("/")[:2]
            rows.append({"path": name, "label": label, "split": split, "mask": f"{place}.png" if place % 2 else None})
            if place % 2:
                (root / f"{place}.png").write_bytes(b"mask %d" % place)
        return write_table(root / f"table.{suffix}", rows)

    def truth(root: Path) -> Content:
        of = tree_content(None, lambda place: b"mask %d" % place if place % 2 else None)
        splits = {name: [(f"{name}/{key}", *rest) for key, *rest in samples] for name, samples in of.splits.items()}
        return Content(splits, CLASSES, ("image", "mask"))

    return Layout(tabulated, truth, whole=True, folder=True)


# --- records ------------------------------------------------------------------------------------------------------
def as_tar(path: Path, numbers: range) -> Path:
    members = [
        (f"{n:06d}.{kind}", data) for n in numbers for kind, data in (("jpg", PICTURES[n]), ("cls", b"%d" % (n % 3)))
    ]
    return write(path.with_suffix(".tar"), tar_of(*members))


def records_of(numbers: range) -> bytes:
    return b"".join(record(example(image__encoded=PICTURES[n], image__class__label=n % 3)) for n in numbers)


def as_hdf5(layout: str) -> Callable[[Path, range], Path]:
    def fill(path: Path, numbers: range) -> Path:
        images, labels = [PICTURES[number] for number in numbers], [number % 3 for number in numbers]
        return hdf5_of(path.with_suffix(".h5"), HDF5_LAYOUTS[layout], images, labels)

    return fill


SHARDS: dict[str, Callable[[Path, range], Path]] = {
    "tar": as_tar,
    "tfrecord": lambda path, numbers: write(path.with_suffix(".tfrecord"), records_of(numbers)),
    "tfrecord.gz": lambda path, numbers: write(path.with_suffix(".tfrecord.gz"), gzip.compress(records_of(numbers))),
    "hdf5 ranges": as_hdf5("ranges"),
    "hdf5 elements": as_hdf5("elements"),
    "recordio": lambda path, numbers: write(
        path.with_suffix(".rec"), rec_of([PICTURES[n] for n in numbers], [n % 3 for n in numbers])
    ),
}
BY_FILE = {"train-00": range(4), "train-01": range(4, 9), "val-00": range(9, 14)}


def folder_of(root: Path, shard: Callable[[Path, range], Path] = as_tar) -> Path:
    root.mkdir()
    for name, numbers in BY_FILE.items():
        shard(root / name, numbers)
    return root


def shards_content(named: bool, files: dict[str, range]) -> Content:
    """The keys are the names in the shard, or the positions in it."""
    splits: dict[str, Any] = {}
    for name, numbers in files.items():
        for place, number in enumerate(numbers):
            key = f"{number:06d}" if named else f"{name}/{place:08d}"
            splits.setdefault(name.partition("-")[0], []).append((key, number % 3, (PICTURES[number],)))
    return Content(splits)


def shard_layout(name: str) -> Layout:
    return Layout(
        lambda folder: SHARDS[name](folder / "train", range(12)),
        lambda root: shards_content(name == "tar", {"train": range(12)}),
    )


def folder_layout(name: str) -> Layout:
    return Layout(
        lambda folder: folder_of(folder / "set", SHARDS[name]), lambda root: shards_content(name == "tar", BY_FILE)
    )


LAYOUTS = {
    "tree": Layout(lambda folder: tree_of(folder / "images", TREE), tree_content, whole=True),
    **{suffix: tar_layout(suffix) for suffix in COMPRESS},
    "zip stored": zip_layout(zipfile.ZIP_STORED),
    "zip deflated": zip_layout(zipfile.ZIP_DEFLATED),
    "hdf5 items": Layout(items, tree_content),
    **{suffix: table_layout(suffix) for suffix in ("csv", "tsv", "jsonl", "parquet")},
    **{f"one {name}": shard_layout(name) for name in SHARDS},
    **{f"a folder of {name}": folder_layout(name) for name in ("tar", "tfrecord.gz", "hdf5 elements", "recordio")},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
class TestSources(LayoutSuite):
    pass


@pytest.mark.parametrize("layout", [packed_layout(to) for to in ("hdf5", "tfrecord", "tar")], ids=lambda its: its.data)
class TestPackedSet(LayoutSuite):
    def test_files_that_change_make_another_listing(self, root: Path) -> None:
        """File times do not matter: a set knows the checksums of its samples."""

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in super().data_files(root) if path.parent == root}


# --- folders of shards --------------------------------------------------------------------------------------------
def test_the_names_of_folders_are_the_splits(tmp_path: Path) -> None:
    for split, numbers in (("train", range(5)), ("val", range(5, 9))):
        (tmp_path / "set" / split).mkdir(parents=True)
        as_tar(tmp_path / "set" / split / "000000", numbers)
    listing = packer.open_source(tmp_path / "set").list(None)
    assert {name: len(part) for name, part in listing.splits.items()} == {"train": 5, "val": 4}


def test_names_without_a_split_form_one_split(tmp_path: Path) -> None:
    """A missing number is a warning; keys that occur in several shards are prefixed with the shard."""
    for name in ("000000", "000002"):
        as_tar(tmp_path / name, range(2))
    source = packer.open_source(tmp_path)
    listing = source.list("val")
    assert {name: len(part) for name, part in listing.splits.items()} == {"val": 4}
    assert any("1 shard are missing" in text or "1 shard is missing" in text for text in listing.warnings)
    keys = [key for key, _, _ in content_of(source).splits["train"]]
    assert keys == ["000000/000000", "000000/000001", "000002/000000", "000002/000001"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("several formats", "shards of several formats"),
        ("a shard of a packed set", "train-02.tar: a shard of a packed set"),
        ("a damaged shard", "val-00.tar"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, case: str, expected: str) -> None:
    root = folder_of(tmp_path / "shards")
    if case == "several formats":
        SHARDS["recordio"](root / "train-02", range(3))
    elif case == "a shard of a packed set":
        packer.convert(root, "tar", tmp_path / "out", run=packer.Run(workers=1))
        next((tmp_path / "out").glob("train*.tar")).rename(root / "train-02.tar")
    else:
        (root / "val-00.tar").write_bytes((root / "val-00.tar").read_bytes()[:3000])
    assert expected in refusal(root)


def test_a_shard_that_changes_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    source = packer.open_source(folder_of(tmp_path / "shards"))
    source.list(None)
    as_tar(tmp_path / "shards/val-00", range(9, 13))
    with pytest.raises(SourceError, match=r"val-00\.tar: has changed since it was listed"), source.open():
        pass


def test_a_tree_with_an_archive_in_it_is_a_tree(tmp_path: Path) -> None:
    tree_of(tmp_path / "set", {"cat/1.jpg": PICTURES[1]})
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
    listing = packer.open_source(texts_of(tmp_path / "x.tfrecord", feature, [b"dog", b"cat", b"dog"])).list(None)
    assert (listing.classes, listing.splits["train"].labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    (tmp_path / "shards").mkdir()
    for number, texts in enumerate(([b"10", b"2"], [b"7", b"2"])):
        texts_of(tmp_path / f"shards/{number}.tfrecord", feature, texts)
    listing = packer.open_source(tmp_path / "shards").list(None)
    assert (listing.classes, listing.splits["train"].labels.tolist()) == ((), [10, 2, 7, 2])


def test_an_index_names_class_names_without_numbers(tmp_path: Path) -> None:
    texts_of(tmp_path / "x.tfrecord", "image__class__text", [b"dog", b"cat"])
    result = packer.index(tmp_path / "x.tfrecord", output=tmp_path / "out", workers=1)
    assert any("2 images (the first: 0) with a class name but no number" in text for text in result.warnings)


def test_names_and_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    texts_of(tmp_path / "0.tfrecord", "image__class__text", [b"cat", b"cat"], image__class__label=0)
    texts_of(tmp_path / "1.tfrecord", "image__class__text", [b"cat"])
    listing = packer.open_source(tmp_path).list(None)
    assert (listing.classes, listing.splits["train"].labels.tolist()) == (("cat",), [0, 0, 0])
    texts_of(tmp_path / "1.tfrecord", "image__class__text", [b"owl"])
    assert "others only the name 'owl'" in refusal(tmp_path)
