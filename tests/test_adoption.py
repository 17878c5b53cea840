"""Adopting shards, apart from the formats, which have separate tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import files_of, make_jpeg, tree_of
from set_cases import FORMATS, convert
from suites.containers import tar_of, write

import packer
import readers
from packer.formats import format_named
from packer.formats.base import PackedSample, ShardSpec
from packer.sources.shards import split_of_name
from readers.table import NO_LABEL


def test_shards_that_share_keys(tmp_path: Path) -> None:
    for number in range(2):
        members = [
            (f"{k:04d}.{e}", d) for k in range(3) for e, d in (("jpg", make_jpeg(10 * number + k)), ("cls", b"1"))
        ]
        tree_of(tmp_path / "wds", {f"train-{number:06d}.tar": tar_of(*members)})
    shards = tmp_path / "wds"
    result = packer.index([shards], workers=1)
    assert result.warnings == ("train: shards share keys, so each key was prefixed with its shard's name",)
    with readers.open(shards) as reader:
        assert list(reader.keys)[2:4] == ["train-000000/0002", "train-000001/0000"]
        assert bytes(reader.read(3)) == make_jpeg(10)
    assert packer.verify(shards, deep=True, workers=1).ok
    assert convert(shards, tmp_path / "out-hdf5", "hdf5").samples == 6


@pytest.mark.parametrize("names", [("a/x.tar", "b/x.tar"), ("x.tfrecord-00000-of-00002", "x.tfrecord-00001-of-00002")])
def test_shards_whose_names_begin_alike_get_distinct_keys(tmp_path: Path, names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        writer = format_named("tar" if name.endswith("tar") else "tfrecord").open_writer(
            path, ShardSpec("train", {"image": "image"})
        )
        writer.add(PackedSample("k", NO_LABEL, (make_jpeg(number),), ("k.jpg",), None))
        writer.finish()
    out = packer.index([tmp_path / name for name in names], tmp_path, workers=1).output
    with readers.open(out) as reader:
        assert len(set(reader.keys)) == 2 and bytes(reader.read(1)) == make_jpeg(1)
    assert packer.verify(out, deep=True, workers=1).ok
    packer.index([out], workers=1)
    assert packer.verify(out, deep=True, workers=1).samples == 2


def test_a_key_twice_in_one_shard(tmp_path: Path) -> None:
    image = make_jpeg(1)
    shard = write(tmp_path / "train-0.tar", tar_of(("a.jpg", image), ("b.jpg", image), ("a.png", image)))
    before = files_of(tmp_path)
    with pytest.raises(readers.FormatError, match="members of 'a' are not adjacent"):
        packer.index([shard], workers=1)
    assert files_of(tmp_path) == before  # no files of the refused adoption stay


def test_links_and_the_folder_elsewhere(tree: Path, tmp_path: Path) -> None:
    packed = convert(tree, tmp_path / "set", samples=12).output
    before = {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    adopted = packer.index([packed], tmp_path / "elsewhere", workers=2).output
    assert {path.name: path.stat().st_mtime_ns for path in packed.iterdir()} == before, "shards have changed"
    assert (adopted / "train-000000.tar").is_symlink()
    # Facts in the set of the shards are kept: shards do not record the folder of the tree.
    with readers.open(adopted, "val") as reader:
        assert reader.classes == ("cat", "dog", "owl")
        assert reader.split_info.root == "val"
    assert packer.verify(adopted, against=tree, workers=1).ok
    packer.extract(adopted, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tree)


@pytest.mark.parametrize("to", FORMATS)
def test_a_lost_index_is_rebuilt_unchanged(tree: Path, tmp_path: Path, to: str) -> None:
    """With the class names, which are in the shards; only tfrecords do not record the offset that was added to
    labels."""
    offset = int(to == "tfrecord")
    packed = convert(tree, tmp_path / to, to, label_offset=offset).output
    before = files_of(packed)
    (packed / "dataset.json").unlink()
    shutil.rmtree(packed / "train.index")
    packer.index([packed], workers=2, label_offset=offset)
    after = files_of(packed)
    for info in (before, after):
        described = json.loads(info["dataset.json"])
        del described["made"], info["README.md"]  # the shards record how the set was made
        for split in described["splits"].values():
            del split["root"]  # the folder of the tree of a split is not in the shards
        info["dataset.json"] = json.dumps(described).encode()
    assert after == before
    assert packer.verify(packed, deep=True, workers=1).ok


def test_an_unfinished_conversion_is_not_adopted(tmp_path: Path) -> None:
    tree_of(tmp_path / "src", {"c/1.jpg": make_jpeg(1), "c/2.jpg": b"broken"})
    with pytest.raises(readers.BadSampleError):
        convert(tmp_path / "src", tmp_path / "out", samples=1)
    write(tmp_path / "out/train-0.tar", tar_of(("a.jpg", make_jpeg(1))))
    with pytest.raises(readers.OutputError, match="has an unfinished conversion"):
        packer.index([tmp_path / "out/train-0.tar"], workers=1)


def test_splits_are_read_from_names() -> None:
    for name, split in {
        "train-000000.tar": "train", "imagenet_val-00001-of-00008.tfrecord": "val", "shard-000.tar": "train",
        "validation-00000-of-00128": "validation", "my.test.h5": "test", "trainer-0.tar": "train",
    }.items():  # fmt: skip
        assert split_of_name(name) == split


def test_a_field_that_only_later_samples_have(tmp_path: Path) -> None:
    """Earlier samples lack the field; the first two have only an image."""
    members = [("0.jpg", make_jpeg(0)), ("1.jpg", make_jpeg(1)), ("2.jpg", make_jpeg(2)), ("2.json", b'{"id": 2}')]
    shard = tree_of(tmp_path, {"train-000000.tar": tar_of(*members)}) / "train-000000.tar"
    packer.index(shard, workers=1)
    assert packer.verify(tmp_path, workers=1).ok
    for reader in (readers.open(tmp_path), packer.open_shard(shard)):
        assert [reader.has(i, "json") for i in range(3)] == [False, False, True]
        assert bytes(reader.read(2, "json")) == b'{"id": 2}' and bytes(reader.read(2)) == make_jpeg(2)
