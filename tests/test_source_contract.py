"""Every source keeps the contract of `packer.testing.sources`: trees, archives, tables, sets and files of records."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import make_jpeg, tree_of
from suites.containers import COMPRESS, HDF5_LAYOUTS, example, hdf5_of, rec_of, record, tar_of, write, zip_of

import packer
from cache.errors import SourceError
from packer.testing.sources import Found, SourceSuite
from readers.layout import DOCUMENTS

CLASSES = ("cat", "dog")
PICTURES = {
    f"{split}/{CLASSES[number % 2]}/{number}.jpg": make_jpeg(number, (16 + 4 * number, 24))
    for number, split in enumerate(["train"] * 9 + ["val"] * 3)
}
NAMES = sorted(PICTURES, key=lambda name: name.split("/"))  # a tree's own order


def of_split(split: str) -> list[str]:
    return [name for name in NAMES if name.startswith(f"{split}/")]


@pytest.fixture
def of_tree() -> Found:
    """What a tree of these pictures has, however it is kept."""
    splits = {
        split: [
            (name.split("/", 1)[1][: -len(".jpg")], CLASSES.index(name.split("/")[1]), (PICTURES[name],))
            for name in of_split(split)
        ]
        for split in ("train", "val")
    }
    return Found(splits, CLASSES)


class OfATree(SourceSuite):
    @pytest.fixture
    def truth(self, of_tree: Found) -> Found:
        return of_tree


class TestFolder(OfATree):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tree_of(tmp_path / "images", PICTURES)

    def whole_files(self, root: Path) -> bool:
        return True


@pytest.mark.parametrize("compression", COMPRESS)
class TestTar(OfATree):
    @pytest.fixture
    def root(self, tmp_path: Path, compression: str) -> Path:
        data = tar_of(*((f"images/{name}", PICTURES[name]) for name in NAMES))
        return write(tmp_path / f"images.{compression}", COMPRESS[compression](data))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
class TestZip(OfATree):
    @pytest.fixture
    def root(self, tmp_path: Path, method: int) -> Path:
        data = zip_of(*((f"images/{name}", PICTURES[name]) for name in NAMES), method=method)
        return write(tmp_path / "images.zip", data)


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
class TestPackedSet(OfATree):
    @pytest.fixture
    def root(self, tmp_path: Path, to: str) -> Path:
        packer.convert(
            tree_of(tmp_path / "images", PICTURES),
            to,
            tmp_path / "set",
            run=packer.Run(workers=1),
            shards=packer.Shards(samples=5),
        )
        shutil.rmtree(tmp_path / "images")
        return tmp_path / "set"

    def files(self, root: Path) -> set[Path]:
        return {path for path in super().files(root) if path.name not in DOCUMENTS}

    def test_files_that_change_make_another_listing(self, root: Path) -> None:
        """Not by their times: a set knows the checksums of its samples."""

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in self.files(root) if path.parent == root and path.suffix != ".json"}


class TestHdf5OfItems(OfATree):
    """A data set an image, in groups like folders."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        with h5py.File(tmp_path / "images.h5", "w") as file:
            for name in NAMES:
                file[name] = np.void(PICTURES[name])
        return tmp_path / "images.h5"


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(
                [rows[0], *(["" if value is None else value for value in row.values()] for row in rows)]
            )


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
class TestManifest(SourceSuite):
    """A table with splits, labels, and a mask for every second image."""

    @pytest.fixture
    def root(self, tmp_path: Path, suffix: str) -> Path:
        root, rows = tree_of(tmp_path / "images", PICTURES), []
        for number, name in enumerate(NAMES):
            mask = None if number % 2 else f"masks/{number}.png"
            if mask is not None:
                (root / mask).parent.mkdir(exist_ok=True)
                (root / mask).write_bytes(b"mask %d" % number)
            split, label = name.split("/")[:2]
            rows.append({"path": name, "label": label, "split": split, "mask": mask})
        write_table(root / f"table.{suffix}", rows)
        return root / f"table.{suffix}"

    @pytest.fixture
    def truth(self) -> Found:
        splits: dict[str, Any] = {"train": [], "val": []}
        for number, name in enumerate(NAMES):
            split, label = name.split("/")[:2]
            mask = None if number % 2 else b"mask %d" % number
            splits[split].append((name[: -len(".jpg")], CLASSES.index(label), (PICTURES[name], mask)))
        return Found(splits, CLASSES, ("image", "mask"))

    def files(self, root: Path) -> set[Path]:
        return super().files(root.parent)

    def whole_files(self, root: Path) -> bool:
        return True


class OfRecords(SourceSuite):
    """Of numbered images with numbers for labels."""

    @pytest.fixture
    def truth(self) -> Found:
        return Found({"train": [(f"train/{i:08d}", i % 3, (PICTURES[name],)) for i, name in enumerate(NAMES)]})


@pytest.mark.parametrize("layout", ["ranges", "elements"])
class TestHdf5(OfRecords):
    """All images in one data set."""

    @pytest.fixture
    def root(self, tmp_path: Path, layout: str) -> Path:
        images, labels = [PICTURES[name] for name in NAMES], [number % 3 for number in range(len(NAMES))]
        return hdf5_of(tmp_path / "train.h5", HDF5_LAYOUTS[layout], images, labels)


@pytest.mark.parametrize("suffix", ["tfrecord", "tfrecord.gz"])
class TestTFRecord(OfRecords):
    @pytest.fixture
    def root(self, tmp_path: Path, suffix: str) -> Path:
        records = b"".join(
            record(example(image__encoded=PICTURES[name], image__class__label=number % 3))
            for number, name in enumerate(NAMES)
        )
        return write(tmp_path / f"train.{suffix}", gzip.compress(records) if suffix.endswith("gz") else records)


class TestWebDataset(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        members = [((f"{i}.jpg", PICTURES[name]), (f"{i}.cls", b"%d" % (i % 3))) for i, name in enumerate(NAMES)]
        return write(tmp_path / "train.tar", tar_of(*(member for pair in members for member in pair)))

    @pytest.fixture
    def truth(self) -> Found:
        return Found({"train": [(str(i), i % 3, (PICTURES[name],)) for i, name in enumerate(NAMES)]})


class TestRecordIO(OfRecords):
    """As MXNet writes it."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        images = [PICTURES[name] for name in NAMES]
        return write(tmp_path / "train.rec", rec_of(images, [number % 3 for number in range(len(NAMES))]))


@pytest.mark.parametrize("subdir", [True, False], ids=["directory", "file"])
class TestLmdb(OfATree):
    """Images under their names."""

    @pytest.fixture
    def root(self, tmp_path: Path, subdir: bool) -> Path:
        lmdb = pytest.importorskip("lmdb", reason="the package lmdb, which writes the environments, is not installed")
        environment = lmdb.open(str(tmp_path / "images.lmdb"), map_size=16 << 20, subdir=subdir, lock=False)
        with environment, environment.begin(write=True) as transaction:
            for name in NAMES:
                transaction.put(name.encode(), PICTURES[name])
        return tmp_path / "images.lmdb"

    def open(self, root: Path) -> Any:
        source = super().open(root)
        source.isolated = False  # listed in this process, which is quicker; other tests do otherwise
        return source

    @pytest.mark.parametrize("keep", [0.3])
    def test_files_cut_short(self, root: Path, truth: Found, keep: float) -> None:
        """Which ends the process that reads them."""
        for path in self.data_files(root):
            os.truncate(path, int(path.stat().st_size * keep))
        with pytest.raises(SourceError):
            packer.open_source(root).list(None)
