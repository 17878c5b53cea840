"""The index for Megatron-Energon: by its layout, read with the standard library, and by the package where it is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
from itertools import groupby, pairwise
from pathlib import Path
from struct import iter_unpack
from typing import Any

import pytest
from set_cases import pack_tree

import packer
import readers
from cache.messages import Silent
from readers.layout import read_dataset_info

META = {".info.json", ".info.yaml", "split.yaml", "dataset.yaml", "index.sqlite", "index.uuid"}
COUNTS = {"train": {"cat": 5, "dog": 6}, "val": {"cat": 2}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return pack_tree(tmp_path / "set", "tar", COUNTS)


def stem(member: tarfile.TarInfo) -> str:
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def rows_of(root: Path) -> tuple[list[Any], list[Any]]:
    with contextlib.closing(sqlite3.connect(root / ".nv-meta" / "index.sqlite")) as database:
        return tuple(database.execute(f"SELECT * FROM {name} ORDER BY rowid").fetchall() for name in TABLES)  # type: ignore[return-value]


TABLES = ("samples", "sample_parts")


def test_it_says_what_tarfile_finds(root: Path) -> None:
    for path in sorted(root.glob("train-*.tar")):  # a PAX header before a sample belongs to it
        if path.name.endswith("1.tar"):
            add_pax_headers(path)
    packer.index([root], workers=1, accept_loss=True)
    files = packer.export_index(root, "energon").files
    assert set(os.listdir(root / ".nv-meta")) == META == {file.name for file in files if file.parent.name == ".nv-meta"}
    counts = json.loads((root / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    assert (root / ".nv-meta" / ".info.yaml").read_bytes() == (root / ".nv-meta" / ".info.json").read_bytes()
    info = read_dataset_info(root)
    splits = {name: [shard.path for shard in split.shards] for name, split in info.splits.items()}
    assert json.loads((root / ".nv-meta" / "split.yaml").read_text()) == {"split_parts": splits, "exclude": []}
    assert list(counts) == splits["train"] + splits["val"]
    samples: list[tuple[Any, ...]] = []
    parts: list[tuple[Any, ...]] = []
    for number, (name, count) in enumerate(counts.items()):
        with tarfile.open(root / name) as archive:
            groups = [(key, list(members)) for key, members in groupby(archive.getmembers(), stem)]
            starts = [members[0].offset for _, members in groups] + [archive.offset]
        found = [start for (start,) in iter_unpack("<Q", (root / name).with_suffix(".tar.idx").read_bytes())]
        assert found == starts and len(groups) == count
        for i, ((key, members), (start, end)) in enumerate(zip(groups, pairwise(starts), strict=True)):
            samples.append((number, key, i, start, end - start))
            parts += [(number, i, m.name[len(key) + 1 :], m.offset_data, m.size) for m in members]
    assert rows_of(root) == (samples, parts)


def add_pax_headers(path: Path) -> None:
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            member.pax_headers = {"comment": "x" * 600}
            archive.addfile(member, io.BytesIO(data))


def test_what_people_wrote_stays_and_what_cannot_be_is_said(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="next to the shards; leave output out"):
        packer.export_index(root, "energon", output=tmp_path / "elsewhere")
    packer.export_index(root, "energon")
    yaml = root / ".nv-meta" / "dataset.yaml"
    assert json.loads(yaml.read_text())["field_map"]["label"] == "cls"
    yaml.write_text("mine")
    packer.export_index(root, "energon", split="val")
    assert yaml.read_text() == "mine" and len(rows_of(root)[0]) == 2
    twice = pack_tree(tmp_path / "twice", "tar", {"train": {"cat": 2}, "test": {"cat": 2}})  # the same keys
    notes: list[str] = []

    class Listening(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    packer.export_index(twice, "energon", watcher=Listening())
    assert set(os.listdir(twice / ".nv-meta")) == META - {"index.sqlite", "index.uuid"}
    assert "the key 'cat/cat0t0' is in two splits" in notes[0]
    hdf5 = packer.convert(root, "hdf5", tmp_path / "hdf5", workers=1).output
    with pytest.raises(readers.FormatError, match="energon has no reader of hdf5 shards"):
        packer.export_index(hdf5, "energon")


@pytest.mark.filterwarnings("ignore")
def test_energon_prepares_and_reads_the_same(root: Path, tmp_path: Path) -> None:
    energon = pytest.importorskip("megatron.energon")
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    copy = Path(shutil.copytree(root, tmp_path / "theirs"))
    packer.export_index(root, "energon")
    names = list(json.loads((root / ".nv-meta" / ".info.json").read_text())["shard_counts"])
    WebdatasetPreparator.prepare_dataset(
        copy, names, split_parts_patterns=[("train", "train-.*"), ("val", "val-.*")], shuffle_seed=None, workers=1
    )
    for name in names:
        index = Path(name).with_suffix(".tar.idx")
        assert (root / index).read_bytes() == (copy / index).read_bytes(), "as energon prepare writes it"
    assert rows_of(root) == rows_of(copy)
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    for split in ("train", "val"):
        samples = energon.get_val_dataset(root, split_part=split, worker_config=config, batch_size=1)
        read = energon.get_loader(samples)
        found = [(sample.__key__[0], sample.label[0], tuple(sample.image.shape[2:])) for sample in read]
        with readers.open(root, split) as reader:
            sizes = zip(reader.info.height.tolist(), reader.info.width.tolist(), strict=True)
            assert found == list(zip(reader.keys, reader.labels.tolist(), sizes, strict=True))
