"""A listing that is saved: nobody lists again, what has changed is noticed, and what is damaged is not used."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import by_subject, files_of, tree_of

import packer
import readers
from cache.checksums import crc32c
from cache.errors import BadSampleError, DatasetError, OutputError, SourceError
from cache.files import Folder
from packer.conversion.options import Choose, ConvertOptions, Shards
from packer.conversion.plan import check_listing, make_plan
from packer.conversion.result import ConvertResult
from packer.conversion.saved import (
    LISTING_FILE,
    Prepared,
    SavedSamples,
    decode_rows,
    encode_rows,
    load,
    question_of,
    save,
)
from packer.formats import format_named
from packer.sources.base import SourceListing
from packer.sources.folder import FolderSource, TreeListing
from readers.layout import WORK_FOLDER
from readers.opening.tree import TreeFiles, TreeSplit
from readers.table import Names

BAD = "val/owl/owl_002.JPEG"  # in the last shard


class Counted(FolderSource):
    """Counts how often it is listed."""

    calls = 0

    def list(self, split: str | None) -> SourceListing:
        Counted.calls += 1
        return super().list(split)


@pytest.fixture
def photos(tree: Path, tmp_path: Path) -> Path:
    """A copy of `tree` whose last image is none."""
    root = Path(shutil.copytree(tree, tmp_path / "photos"))
    (root / BAD).write_bytes(b"not an image")
    return root


@pytest.fixture
def convert(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConvertResult]:
    """Converts `photos` to tmp_path/out, as 9 + 3 shards."""
    monkeypatch.setattr(Counted, "calls", 0)

    def call(**options: Any) -> ConvertResult:
        return packer.convert(Counted(photos), "tar", tmp_path / "out", **by_subject(options, samples=4, workers=1))

    return call


@pytest.fixture
def unfinished(convert: Callable[..., ConvertResult]) -> Callable[..., ConvertResult]:
    """The same, when a first conversion has packed all shards but the last."""
    with pytest.raises(BadSampleError, match=r"owl_002\.JPEG"):
        convert()
    assert Counted.calls == 1
    return convert


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": 7},
        {"where": "class_name != 'cat' and bytes > 0", "shuffle": 7},
        {"classes": ["owl", "dog"]},
    ],
    ids=str,
)
def test_what_is_resumed_is_not_listed_again(
    convert: Callable[..., ConvertResult], photos: Path, tmp_path: Path, options: dict[str, Any], workers: int
) -> None:
    with pytest.raises(BadSampleError):
        convert(**options)
    result = convert(**options, on_error="skip", workers=workers)
    assert (Counted.calls, result.left_out["skipped"]) == (1, 1)
    assert 0 < result.shards_resumed < result.shards
    again = tmp_path / "again"
    packer.convert(
        Counted(photos),
        "tar",
        again,
        **by_subject(options, samples=4, workers=1, on_error="skip"),
    )
    assert files_of(again) == files_of(tmp_path / "out")


@pytest.mark.parametrize("change", ["a file more", "a file less", "another name", "a folder more"])
def test_a_tree_with_other_files_is_listed_and_refused(
    unfinished: Callable[..., ConvertResult], photos: Path, change: str
) -> None:
    if change == "a file more":
        shutil.copy(photos / "val/cat/cat_000.JPEG", photos / "val/cat/new.JPEG")
    elif change == "a file less":
        (photos / "train/cat/cat_003.JPEG").unlink()
    elif change == "another name":
        (photos / "train/cat/cat_003.JPEG").rename(photos / "train/cat/zebra.JPEG")
    else:
        tree_of(photos, {"train/eel/1.JPEG": b"x"})
    with pytest.raises(OutputError, match="unfinished conversion of another source"):
        unfinished(on_error="skip")
    assert Counted.calls == 2


def test_a_folder_with_another_time_and_the_same_files_is_listed_and_resumed(
    unfinished: Callable[..., ConvertResult], photos: Path
) -> None:
    (photos / "train/cat/new").touch()
    (photos / "train/cat/new").unlink()
    assert unfinished(on_error="skip").shards_resumed == 11
    assert Counted.calls == 2


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_was_written_anew_in_its_place_is_refused_until_it_is_listed(
    unfinished: Callable[..., ConvertResult], photos: Path, on_error: str
) -> None:
    """Of the same size, so only its time tells."""
    good = photos / "val/owl/owl_001.JPEG"
    found = good.stat()
    data = bytearray(good.read_bytes())
    data[-3] ^= 1
    with open(good, "r+b") as file:
        file.write(data)
    os.utime(good, ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))
    for part in (photos.parent / "out" / WORK_FOLDER).glob("val-*.part"):
        part.unlink()
    with pytest.raises(SourceError, match=r"owl_001\.JPEG: has changed since it was listed.*overwrite=True"):
        unfinished(on_error=on_error)
    assert Counted.calls == 1
    assert unfinished(on_error="skip", overwrite=True).shards_resumed == 0
    assert Counted.calls == 2
    with readers.open(photos.parent / "out", split="val") as reader:
        assert bytes(reader["owl/owl_001"].image) == data


@pytest.mark.parametrize("other", [{"shuffle": 1}, {"split": "train"}, {"classes": ["cat"]}, {"check": "decode"}])
def test_other_options_list_again(unfinished: Callable[..., ConvertResult], other: dict[str, Any]) -> None:
    with pytest.raises(OutputError, match="unfinished conversion"):
        unfinished(**other)
    assert Counted.calls == 2


def test_nothing_is_saved_by_a_dry_run_or_left_by_a_conversion(
    unfinished: Callable[..., ConvertResult], tmp_path: Path
) -> None:
    assert unfinished(dry_run=True, on_error="skip").shards == 12
    assert Counted.calls == 2
    unfinished(on_error="skip")
    assert Counted.calls == 2
    assert not (tmp_path / "out" / WORK_FOLDER).exists()


# --- the file -----------------------------------------------------------------------------------------------------
OPTIONS = ConvertOptions("tar", shards=Shards(samples=5, shuffle=3))


def listed(root: Path, options: ConvertOptions = OPTIONS) -> Prepared:
    """A listing whose properties are not the usual ones."""
    listing = FolderSource(root).list(None)
    listing = replace(listing, warnings=["of a kind"], max_workers=3, where="width > 1", not_chosen=2)
    for part in listing.splits.values():
        check_listing(part, "x")
    return Prepared(make_plan(listing, options, format_named(options.to)), listing)


@pytest.fixture
def saved(tree: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a set with a saved listing, and the question."""
    (tmp_path / "out" / WORK_FOLDER).mkdir(parents=True)
    question = question_of(FolderSource(tree), OPTIONS, Choose())
    with Folder(tmp_path / "out" / WORK_FOLDER) as work:
        save(tmp_path / "out", work, question, listed(tree))
    yield tmp_path / "out", question


def rows_of(prepared: Prepared) -> list[list[tuple[Any, ...]]]:
    """Of each shard: key, label, names, bytes, path of every sample."""
    shards = []
    for number in range(len(prepared.plan.shards)):
        blocks = prepared.samples(number).slices()
        rows = [row for block in blocks for row in zip(*block, strict=True)]
        shards.append([(*row[:4], row[4][0]) for row in rows])
    return shards


def test_what_is_loaded_is_what_was_listed(tree: Path, saved: tuple[Path, str]) -> None:
    out, question = saved
    loaded, expected = load(out, question, OPTIONS, tree), listed(tree)
    assert loaded is not None
    assert rows_of(loaded) == rows_of(expected)
    assert loaded.plan.fingerprint == expected.plan.fingerprint
    assert loaded.plan.specs == expected.plan.specs
    assert [(s.split, s.name, len(s.indices), s.source_bytes) for s in loaded.plan.shards] == [
        (s.split, s.name, len(s.indices), s.source_bytes) for s in expected.plan.shards
    ]
    for name in {field.name for field in fields(SourceListing)} - {"splits", "watched"}:
        assert getattr(loaded.listing, name) == getattr(expected.listing, name), name
    assert list(loaded.paths(FolderSource(tree))) == [
        f"{tree}/{row[4]}" for shard in rows_of(expected) for row in shard
    ]
    assert loaded.samples(0).slices is not None and isinstance(loaded.samples(0), SavedSamples)


def test_names_of_any_kind_are_saved(tmp_path: Path) -> None:
    names = [
        "train/ü/1.jpg",
        "train/ü/deep/er/1.jpg",
        "train/b/1.jpg",
        "train/b/1.txt",
        "train/b/x.y.z",
        "train/b/none",
    ]
    tree_of(tmp_path / "tree", {name: b"x" * i for i, name in enumerate(names)})
    (tmp_path / "tree/train/b/gone.jpg").symlink_to("nowhere")
    os.symlink("x", tmp_path / "tree" / os.fsdecode(b".caf\xe9"))
    (tmp_path / "out" / WORK_FOLDER).mkdir(parents=True)
    source = FolderSource(tmp_path / "tree")
    prepared, question = listed(tmp_path / "tree"), question_of(source, OPTIONS, Choose())
    expected = rows_of(prepared)
    with Folder(tmp_path / "out" / WORK_FOLDER) as work:
        assert rows_of(save(tmp_path / "out", work, question, prepared)) == expected
    loaded = load(tmp_path / "out", question, OPTIONS, source.root)
    assert loaded is not None
    assert rows_of(loaded) == expected
    assert loaded.listing.left_out == [(os.fsdecode(b".caf\xe9"), "hidden")]


@pytest.mark.parametrize("what", ["question", "none", "link", "fifo", "folder"])
def test_what_is_not_loaded(saved: tuple[Path, str], tree: Path, what: str) -> None:
    out, question = saved
    file = out / WORK_FOLDER / LISTING_FILE
    if what == "question":
        question = question_of(FolderSource(tree, "tree"), OPTIONS, Choose())
    else:
        file.rename(out / "elsewhere")
    if what == "link":
        file.symlink_to(out / "elsewhere")
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    assert load(out, question, OPTIONS, tree) is None


def test_a_damaged_file_is_not_used(saved: tuple[Path, str], tree: Path) -> None:
    """Each prefix, and a flipped bit at each of many bytes: nothing is loaded, or the rows are right, or refused."""
    out, question = saved
    file = out / WORK_FOLDER / LISTING_FILE
    whole = file.read_bytes()
    expected = rows_of(listed(tree))
    chance = random.Random(1)
    damaged = [whole[:size] for size in range(0, len(whole), 61)]
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged.append(bytes(data))
    refused = 0
    for data in damaged:
        file.write_bytes(data)
        loaded = load(out, question, OPTIONS, tree)
        if loaded is None:
            refused += 1
            continue
        with pytest.raises(SourceError, match="remove that file and run the same command again"):
            rows_of(loaded)
    assert 0 < refused < len(damaged)
    file.write_bytes(whole)
    assert rows_of(load(out, question, OPTIONS, tree) or listed(tree)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"shards": [0, 1 << 62, 0]},
        {"shards": [-8, 40, 0]},
        {"folders": "x"},
        {"splits": [["../up", "", 12]]},
        {"splits": [["train", "train", 1 << 40]]},
        {"classes": 7},
        {"left_out": [1]},
        {"more": {}},
        {"more": {"max_workers": [], "where": 7}},
    ],
)
def test_a_head_that_lies(saved: tuple[Path, str], tree: Path, change: dict[str, Any]) -> None:
    """With a right checksum, too."""
    out, question = saved
    file = out / WORK_FOLDER / LISTING_FILE
    whole = file.read_bytes()
    length = int.from_bytes(whole[-16:-8], "little")
    head = json.dumps(json.loads(whole[-16 - length : -16]) | change).encode()
    tail = len(head).to_bytes(8, "little") + crc32c(head).to_bytes(4, "little") + whole[-4:]
    file.write_bytes(whole[: -16 - length] + head + tail)
    assert load(out, question, OPTIONS, tree) is None


HOSTILE: list[tuple[str, Callable[[TreeFiles], TreeFiles]]] = [
    ("a name is not", lambda files: with_names(files, "../x")),
    ("a name is not", lambda files: with_names(files, "..")),
    ("a name is not", lambda files: with_names(files, "/etc/passwd")),
    ("a name is not", lambda files: with_names(files, "a\0b")),
    ("a name is empty", lambda files: with_names(files, "")),
    *(
        ("leads out", lambda files, folder=folder: with_folders(files, folder))  # type: ignore[misc]
        for folder in ("train/../../", "/train/", "/", "train//x/", "val/cat/", "train/a\0b/", "train/cat")
    ),
]


def with_names(files: TreeFiles, name: str) -> TreeFiles:
    return TreeFiles(files.folders, files.folder, Names.of([name] * len(files.names)), files.facts, files.rows)


def with_folders(files: TreeFiles, folder: str) -> TreeFiles:
    return TreeFiles([folder] * len(files.folders), files.folder, files.names, files.facts, files.rows)


@pytest.mark.parametrize(("message", "change"), HOSTILE)
def test_a_block_that_leads_elsewhere(tree: Path, message: str, change: Callable[[TreeFiles], TreeFiles]) -> None:
    part = listed(tree).listing.splits["train"]
    assert isinstance(part, TreeListing)
    assert decode_rows(encode_rows(part, range(4)), 3).keys == part.keys[:4]
    split = TreeSplit(part.root, change(part.part.files), part.part.labels)
    with pytest.raises(DatasetError, match=message):
        decode_rows(encode_rows(TreeListing(split, part.whole), range(4)), 3)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"folder", "<i4", 4', b'"folder", "<i4", 3'),
        (b'"folder", "<i4", 4', b'"folder", "<i4",-4'),
        (b'"folder", "<i4", 4', b'"folder", "|O1", 4'),
        (b'"bytes", "<i8", 4', b'"bytes", "<i8", 9'),
        (b'"root": "train"', b'"root": "other"'),
        (b'"columns"', b'"colunms"'),
    ],
)
def test_a_block_with_another_header(tree: Path, was: bytes, now: bytes) -> None:
    block = encode_rows(listed(tree).listing.splits["train"], range(4))
    assert was in block
    with pytest.raises(DatasetError):
        decode_rows(block.replace(was, now), 3)


@pytest.mark.parametrize("classes", [0, 1])
def test_labels_are_those_of_classes(tree: Path, classes: int) -> None:
    part = listed(tree).listing.splits["train"]
    with pytest.raises(DatasetError, match="labels: a number is outside"):
        decode_rows(encode_rows(part, np.array([0, 35])), classes)
