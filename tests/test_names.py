"""Names from outside: which names each type accepts, and that the description of a set must have valid names."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import files_of, tree_of

import packer
from cache.errors import BadNameError, DatasetError, SourceError
from packer.cli import main
from packer.sources.base import SourceListing
from packer.sources.folder import FolderSource
from readers.layout import FieldName, IndexPath, RelativePath, ShardPath, SplitName, parse_dataset_info

HOSTILE = [
    "../evil",
    "/etc",
    "..",
    ".",
    ".hid",
    "",
    "a b",
    "a/b",
    "a\\b",
    "a\nb",
    "a\0b",
    "\ud800",
    "x" * 201,
    "é" * 101,
]
PATHS = ["../x", "a/../../x", "a/..", "/x", "//x", "", ".", "a\0", "\ud800", "a/" + "x" * 256]


def test_a_split_or_field_is_a_plain_word_and_a_path_stays_below_its_folder() -> None:
    for name in HOSTILE:
        for kind in (SplitName, FieldName):
            with pytest.raises(BadNameError, match=r"cannot be the name of a (split|field): take up to 200"):
                kind(name)
    for path in PATHS:
        for of_path in (RelativePath, ShardPath, IndexPath):
            with pytest.raises(BadNameError, match=r"leads outside|no file name has more than 255"):
                of_path(path)


@pytest.mark.parametrize("name", ["train", "val-1", "_x", "a.b", "école", "x" * 200])
def test_plain_names_are_accepted_unchanged(name: str) -> None:
    assert SplitName(name) == FieldName(name) == name
    again = pickle.loads(pickle.dumps(SplitName(name)))
    assert type(again) is SplitName and again == name and json.dumps(again) == json.dumps(name)


def test_a_field_cannot_replace_a_column_of_the_index() -> None:
    for name in ("key", "mask.name"):
        with pytest.raises(BadNameError, match="the index has columns of that name"):
            FieldName(name)


def test_a_path_has_one_spelling() -> None:
    assert RelativePath("./a//b/./c/") == "a/b/c" and type(pickle.loads(pickle.dumps(ShardPath("a/b")))) is ShardPath


def test_a_shard_or_an_index_cannot_be_another_file_of_the_set() -> None:
    for path in (".packing", ".packing/x", "dataset.json", "./left-out.jsonl"):
        for kind in (ShardPath, IndexPath):
            with pytest.raises(BadNameError, match="belongs to the set"):
                kind(path)
    with pytest.raises(BadNameError, match="quarantine belongs to the set"):
        IndexPath("quarantine")


def described(split: str = "train", fields: dict[str, str] | None = None, **changes: object) -> bytes:
    """A dataset.json. changes: members of its split to replace."""
    splits = {split: {"samples": 0, "root": "", "index": "train.index", "shards": [], **changes}}
    content = {"kind": "packer-dataset", "version": 1, "format": "tar", "classes": [], "label_offset": 0}
    return json.dumps(content | {"splits": splits, "fields": fields or {"image": "image"}}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"split": "../evil"},
        {"index": "../x"},
        {"index": ".packing"},
        {"index": "dataset.json"},
        {"fields": {"image": "image", "../x": "file"}},
        {"fields": {"image": "image", "key": "file"}},
        {"shards": [{"path": "../x", "bytes": 0, "samples": 0, "crc32c": "00000000"}]},
        {"shards": [{"path": ".packing/x", "bytes": 0, "samples": 0, "crc32c": "00000000"}]},
    ],
    ids=str,
)
def test_a_set_with_invalid_names_is_refused(changes: Any) -> None:
    assert parse_dataset_info(described(), "good").splits["train"].index == "train.index"
    with pytest.raises(DatasetError, match=r"^set: .*(cannot be the name|leads outside|is the set's own)"):
        parse_dataset_info(described(**changes), "set")


@pytest.mark.parametrize("split", ["../evil", "{tmp}/absolute", "a b", ".hid"])
def test_a_hostile_split_is_refused_before_anything_is_written(tree: Path, tmp_path: Path, split: str) -> None:
    """By option and in a column of a manifest, when packing and when indexing."""
    split = split.format(tmp=tmp_path)
    flat = tree / "val/cat"
    packer.convert(flat, to="tar", output=tmp_path / "good", run=packer.Run(workers=1))
    table = f"path,split\n{flat / 'cat_000.JPEG'},{split}\n".encode()
    tree_of(tmp_path, {"x.tar": (tmp_path / "good/train-000000.tar").read_bytes(), "m.csv": table})
    shard, before = tmp_path / "x.tar", files_of(tmp_path)
    out = str(tmp_path / "made/out")
    for arguments in (
        ("convert", str(flat), "--to", "tar", "-o", out, "--split", split),
        ("index", str(shard), "-o", out, "--split", split),
        ("index", str(shard), "-o", out, "--field", f"{split}=x"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        assert stopped.value.code == 2, f"{arguments} is a usage error"
    for call in (
        lambda: packer.convert(
            flat, to="tar", output=out, choose=packer.Choose(split=split), run=packer.Run(workers=1)
        ),
        lambda: packer.index([shard], out, split=split, workers=1),
        lambda: packer.index([shard], out, fields={split: "x"}, workers=1),
    ):
        with pytest.raises(BadNameError, match="cannot be the name of"):
            call()
    with pytest.raises(SourceError, match=r"m\.csv: line 2: column 'split'.*cannot be the name of a split"):
        packer.convert(tmp_path / "m.csv", to="tar", output=out, run=packer.Run(workers=1))
    assert files_of(tmp_path) == before and not (tmp_path / "made").exists()


class _Named(FolderSource):
    def list(self, split: str | None) -> SourceListing:
        listing = super().list(split)
        listing.splits = {"../evil": next(iter(listing.splits.values()))}
        return listing


def test_no_source_names_a_split_outside_the_output(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'../evil' cannot be the name of a split"):
        packer.convert(_Named(tree), to="tar", output=tmp_path / "out", run=packer.Run(workers=1))
    assert list(tmp_path.iterdir()) == []
