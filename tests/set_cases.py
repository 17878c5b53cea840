"""Small sets for the tests of editing sets, and their content, read sample by sample."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from conftest import by_subject, make_jpeg, tree_of

import packer
import readers
from readers.fields import encode_field
from readers.layout import DOCUMENTS, read_dataset_info

__all__ = [
    "COUNTS",
    "FORMATS",
    "OTHERS",
    "Held",
    "check",
    "content",
    "convert",
    "damage",
    "flip",
    "masks_for",
    "pack_tree",
    "shards",
    "unlisted",
    "wrong",
]


FORMATS = ("hdf5", "tar", "tfrecord")
COUNTS = {"train": {"cat": 5, "dog": 6}, "val": {"cat": 2, "dog": 1}}
OTHERS = {"train": {"dog": 2, "eel": 3}, "test": {"eel": 2}}


def convert(source: Any, root: Path, to: str = "tar", **options: Any) -> packer.ConvertResult:
    """`packer.convert` in this process, unless `workers` is set; options are plain keyword arguments."""
    return packer.convert(source, to, root, **by_subject(options, workers=1))


class Held(NamedTuple):
    """A sample of a set, read back."""

    label: str
    fields: dict[str, bytes]


def pack_tree(root: Path, to: str, counts: Mapping[str, Mapping[str, int]], seed: int = 0, **options: Any) -> Path:
    """A set of trees of images. counts: by split and class; options: of `packer.convert`."""
    files = {
        f"{split}/{name}/{name}{seed}{split[0]}{number}.jpg": make_jpeg(
            seed * 10_000 + 1000 * len(name) + 100 * len(split) + number + ord(name[0]), (32 + 8 * (number % 5), 24)
        )
        for split, classes in counts.items()
        for name, count in classes.items()
        for number in range(count)
    }
    tree = tree_of(root.with_name(f"{root.name}-images"), files)
    return convert(tree, root, to, **{"samples": 4, "checksums": True, **options}).output


def content(root: Path) -> dict[str, Held]:
    """Every sample by "split/key", each checked against its checksum."""
    samples = {}
    for split in read_dataset_info(root).splits:
        with readers.open(root, split, verify=True) as reader:
            for sample in reader:
                label = "" if sample.label is None else reader.classes[sample.label]
                fields = {name: bytes(data) for name, data in sample.fields.items()}
                assert f"{split}/{sample.key}" not in samples, f"{sample.key} occurs twice"
                samples[f"{split}/{sample.key}"] = Held(label, fields)
    return samples


def flip(path: Path, at: int) -> bytes:
    """Flip a bit of one byte of a file; returns its previous content."""
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return data


def damage(root: Path, index: int, split: str = "train") -> tuple[Path, bytes]:
    """Flip a bit in the middle of a sample's image; returns its shard and the shard's previous content."""
    with readers.open(root, split) as reader:
        path, offset, length = reader.byte_range(index)
    return path, flip(path, offset + length // 2)


def shards(root: Path) -> dict[str, tuple[int, int, int, int]]:
    """Inode, bytes and times of every file of a directory but the index: a write would change them."""
    facts = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and ".index" not in name and name not in ("dataset.json", *DOCUMENTS):
            status = os.stat(path)
            facts[name] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_dev)
    return facts


def wrong(root: Path) -> list[str]:
    """The result of `packer.verify` for a set."""
    return [str(problem) for problem in packer.verify(root, deep=True, workers=1).problems]


def unlisted(root: Path) -> set[str]:
    """The files of a set without a checksum line in SHA256SUMS, and the names in SHA256SUMS without a file."""
    info = read_dataset_info(root)
    files = {"dataset.json", *(["classes.txt"] if info.classes else ())}
    for split in info.splits.values():
        files |= {shard.path for shard in split.shards} | {f"{split.index}/{name}" for name in split.columns}
    sums = {f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}" for name in files}
    return sums ^ set((root / "SHA256SUMS").read_text().splitlines())


def check(root: Path, expected: Mapping[str, Held]) -> None:
    """Check that a set holds exactly this content, and is intact to the last byte."""
    assert "SHA256SUMS" not in read_dataset_info(root).documents or not unlisted(root)
    problems, actual = wrong(root), content(root)
    assert not problems, problems
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    labels = {key: (new.label, expected[key].label) for key, new in actual.items() if new.label != expected[key].label}
    assert not labels, labels
    assert not [key for key in actual if actual[key] != expected[key]], "the bytes differ"


def masks_for(root: Path, keys: list[str]) -> dict[str, bytes]:
    masks = {key: bytes(encode_field("mask", np.full((3, 4), 1 + i, np.uint8))) for i, key in enumerate(keys)}
    tree_of(root, {f"{key}.png": data for key, data in masks.items()})
    return masks
