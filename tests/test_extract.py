"""The original tree back, and nothing written where it should not be."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from conftest import files_of, make_jpeg

import packer
import readers
from packer.extraction import safe_path


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_the_tree_comes_back(tree: Path, tmp_path: Path, to: str) -> None:
    packed = packer.convert(tree, to=to, output=tmp_path / "set", workers=1, shuffle=3).output
    result = packer.extract(packed, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tree)
    assert (result.files, result.kept, result.labels_file) == (45, 0, False)
    assert packer.extract(packed, tmp_path / "back").kept == 45  # again: nothing to do


def test_keys_and_split(tree: Path, tmp_path: Path) -> None:
    packed = packer.convert(tree, to="tar", output=tmp_path / "set", workers=1).output
    packer.extract(packed, tmp_path / "back", split="val", keys=["dog/*", "owl/owl_001"])
    assert sorted(files_of(tmp_path / "back")) == [
        "val/dog/dog_000.JPEG", "val/dog/dog_001.JPEG", "val/dog/dog_002.JPEG", "val/owl/owl_001.JPEG",
    ]  # fmt: skip
    with pytest.raises(readers.UnknownNameError, match=r"no key matches fish/\*"):
        packer.extract(packed, tmp_path / "none", keys=["fish/*"])


def test_files_in_the_way(tree: Path, tmp_path: Path) -> None:
    packed = packer.convert(tree, to="tar", output=tmp_path / "set", workers=1).output
    target = tmp_path / "back/train/cat/cat_000.JPEG"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"mine")
    with pytest.raises(readers.OutputError, match="exists with other bytes; add --overwrite"):
        packer.extract(packed, tmp_path / "back")
    assert target.read_bytes() == b"mine"
    packer.extract(packed, tmp_path / "back", overwrite=True)
    assert files_of(tmp_path / "back") == files_of(tree)


def test_damage_is_never_extracted(tree: Path, tmp_path: Path) -> None:
    packed = packer.convert(tree, to="tar", output=tmp_path / "set", workers=1).output
    with readers.open(packed, "train") as reader:
        place = reader.byte_range(0)
        assert place is not None
    data = bytearray(place[0].read_bytes())
    data[place[1] + 300] ^= 1
    place[0].write_bytes(data)
    with pytest.raises(readers.DamagedSampleError, match="cat/cat_000"):
        packer.extract(packed, tmp_path / "back")


@pytest.mark.parametrize("name", ["../evil.jpg", "/tmp/evil.jpg", "a/../../evil.jpg", "", "a\0b"])
def test_hostile_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(readers.OutputError, match="leads out of"):
        safe_path(tmp_path / "out", name)


def test_a_hostile_set_writes_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "src/c").mkdir(parents=True)
    (tmp_path / "src/c/xx.jpg").write_bytes(make_jpeg(1))
    packed = packer.convert(tmp_path / "src", to="tar", output=tmp_path / "set", workers=1).output
    key = packed / "train.index" / "key.npy"
    key.write_bytes(key.read_bytes().replace(b"c/xx", b"../x"))
    content = json.loads((packed / "dataset.json").read_text())
    del content["splits"]["train"]["columns"]  # whoever forges an index can forge its checksums
    (packed / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(readers.OutputError, match=r"'\.\./x\.jpg', which leads out of"):
        packer.extract(packed, tmp_path / "deep/back")
    assert files_of(tmp_path / "deep") == {}


def test_links_in_the_output_are_not_followed(tree: Path, tmp_path: Path) -> None:
    packed = packer.convert(tree, to="tar", output=tmp_path / "set", workers=1).output
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back/train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(readers.OutputError, match="is a link; nothing is written behind it"):
        packer.extract(packed, tmp_path / "back")
    assert files_of(tmp_path / "elsewhere") == {}


def test_labels_that_folders_do_not_tell(tmp_path: Path) -> None:
    """WebDataset shards have labels but no class folders: labels.csv keeps them, and packs again."""
    source = tmp_path / "wds"
    source.mkdir()
    for number in range(4):
        (source / f"{number:04d}.jpg").write_bytes(make_jpeg(number))
        (source / f"{number:04d}.cls").write_bytes(b"%d" % (number % 2))
        (source / f"{number:04d}.json").write_text(json.dumps({"id": number}))
    import tarfile

    with tarfile.open(tmp_path / "train-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(source.iterdir()):
            tar.add(path, path.name)
    adopted = packer.index([tmp_path / "train-000000.tar"], tmp_path / "set", workers=1).output
    result = packer.extract(adopted, tmp_path / "back")
    assert result.labels_file
    with open(tmp_path / "back/labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["path"], row["label"], row["split"]) for row in rows] == [
        ("0000.jpg", "0", "train"), ("0001.jpg", "1", "train"), ("0002.jpg", "0", "train"), ("0003.jpg", "1", "train"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "back/0002.json").read_text()) == {"id": 2}
