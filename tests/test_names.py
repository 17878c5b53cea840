"""Names from outside: what each type takes, and that a set's description is held to it."""

from __future__ import annotations

import json
import pickle

import pytest

from readers.errors import BadNameError, DatasetError
from readers.layout import parse_dataset_info
from readers.names import FieldName, IndexPath, RelativePath, ShardPath, SplitName

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


@pytest.mark.parametrize("kind", [SplitName, FieldName])
@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_a_split_or_field_is_a_plain_word(kind: type[str], name: str) -> None:
    with pytest.raises(BadNameError, match=r"cannot be the name of a (split|field): take up to 200 bytes of letters"):
        kind(name)


@pytest.mark.parametrize("name", ["train", "val-1", "_x", "a.b", "école", "x" * 200])
def test_plain_names_are_taken_as_they_are(name: str) -> None:
    assert SplitName(name) == FieldName(name) == name
    again = pickle.loads(pickle.dumps(SplitName(name)))
    assert type(again) is SplitName and again == name and json.dumps(again) == json.dumps(name)


@pytest.mark.parametrize("name", ["key", "mask.name"])
def test_a_field_does_not_take_the_place_of_a_column_of_the_index(name: str) -> None:
    with pytest.raises(BadNameError, match="the index has such columns"):
        FieldName(name)


@pytest.mark.parametrize("kind", [RelativePath, ShardPath, IndexPath])
@pytest.mark.parametrize("path", ["../x", "a/../../x", "a/..", "/x", "//x", "", ".", "a\0", "\ud800", "a/" + "x" * 256])
def test_a_path_stays_below_its_folder(kind: type[str], path: str) -> None:
    with pytest.raises(BadNameError, match=r"leads outside|no file name has more than 255"):
        kind(path)


def test_a_path_has_one_spelling() -> None:
    assert RelativePath("./a//b/./c/") == "a/b/c" and type(pickle.loads(pickle.dumps(ShardPath("a/b")))) is ShardPath


@pytest.mark.parametrize("path", [".packing", ".packing/x", "dataset.json", "./left-out.jsonl"])
def test_neither_a_shard_nor_an_index_is_one_of_the_sets_own_files(path: str) -> None:
    for kind in (ShardPath, IndexPath):
        with pytest.raises(BadNameError, match="is the set's own"):
            kind(path)
    with pytest.raises(BadNameError, match="quarantine is the set's own"):
        IndexPath("quarantine")


def described(**changes: object) -> bytes:
    split = {"samples": 0, "root": "", "index": "train.index", "shards": []}
    content = {"kind": "packer-dataset", "version": 1, "format": "tar", "fields": {"image": "image"}, "classes": []}
    split |= {name: value for name, value in changes.items() if name in ("index", "shards")}
    splits = {str(changes.get("split", "train")): split}
    return json.dumps(
        content | {"label_offset": 0, "splits": splits, "fields": changes.get("fields", content["fields"])}
    ).encode()


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
def test_a_set_with_such_names_is_not_read(changes: dict[str, object]) -> None:
    assert parse_dataset_info(described(), "good").splits["train"].index == "train.index"
    with pytest.raises(DatasetError, match=r"^set: .*(cannot be the name|leads outside|is the set's own)"):
        parse_dataset_info(described(**changes), "set")
