"""A listing that is saved: nobody lists again, what has changed is noticed, and what is damaged is not used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert, files_of, make_jpeg, tree_of

import readers
from cache.checksums import crc32c
from cache.errors import BadSampleError, DatasetError, OutputError, PackerError, SourceError
from packer.conversion.result import ConvertResult
from packer.conversion.saved import LISTING_FILE, decode_rows, encode_rows
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
def run(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConvertResult]:
    """Converts `photos` to tmp_path/out, as 9 + 3 shards."""
    monkeypatch.setattr(Counted, "calls", 0)
    return lambda **options: convert(Counted(photos), tmp_path / "out", **{"samples": 4} | options)


@pytest.fixture
def unfinished(run: Callable[..., ConvertResult]) -> Callable[..., ConvertResult]:
    """The same, when a first conversion has packed all shards but the last."""
    with pytest.raises(BadSampleError, match=r"owl_002\.JPEG"):
        run()
    assert Counted.calls == 1
    return run


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({}, 1),
        ({"where": "class_name != 'cat' and bytes > 0", "shuffle": 7}, 1),
        ({"shuffle": 7}, 2),
        ({"classes": ["owl", "dog"]}, 1),
    ],
    ids=str,
)
def test_what_is_resumed_is_not_listed_again(
    run: Callable[..., ConvertResult], photos: Path, tmp_path: Path, options: dict[str, Any], workers: int
) -> None:
    with pytest.raises(BadSampleError):
        run(**options)
    result = run(**options, on_error="skip", workers=workers)
    assert (Counted.calls, result.left_out["skipped"]) == (1, 1)
    assert 0 < result.shards_resumed < result.shards
    convert(Counted(photos), tmp_path / "again", samples=4, on_error="skip", **options)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    assert not (tmp_path / "out" / WORK_FOLDER).exists()


def test_names_of_any_kind_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "calls", 0)
    names = ["train/ü/1.jpg", "train/ü/deep/er/1.jpg", "train/b/1.jpg", "train/b/1.png", "train/b/x.y.z"]
    tree_of(tmp_path / "tree", {name: make_jpeg(i) for i, name in enumerate(names)})
    (tmp_path / "tree/train/ü/gone.jpg").symlink_to("nowhere")
    os.symlink("x", tmp_path / "tree" / os.fsdecode(b".caf\xe9"))
    with pytest.raises(BadSampleError):
        convert(Counted(tmp_path / "tree"), tmp_path / "out", samples=2)
    convert(Counted(tmp_path / "tree"), tmp_path / "out", samples=2, on_error="skip")
    assert Counted.calls == 1
    convert(Counted(tmp_path / "tree"), tmp_path / "again", samples=2, on_error="skip")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")


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
    assert unfinished(dry_run=True, on_error="skip").shards == 12
    assert Counted.calls == 2, "a dry run lists, and saves nothing"
    assert unfinished(on_error="skip").shards_resumed == 11
    assert Counted.calls == 3


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


# --- the file ----------------------------------------------------------------------------------------------------
def lies(whole: bytes) -> list[bytes]:
    """The file with heads that lie, and right checksums."""
    length = int.from_bytes(whole[-16:-8], "little")
    files = []
    for change in (
        {"shards": [0, 1 << 62, 0]}, {"shards": [-8, 40, 0]}, {"folders": "x"}, {"splits": [["../up", "", 12]]},
        {"splits": [["train", "train", 1 << 40]]}, {"classes": 7}, {"left_out": [1]}, {"more": {}},
        {"more": {"max_workers": [], "where": 7}},
    ):  # fmt: skip
        head = json.dumps(json.loads(whole[-16 - length : -16]) | change).encode()
        tail = len(head).to_bytes(8, "little") + crc32c(head).to_bytes(4, "little") + whole[-4:]
        files.append(whole[: -16 - length] + head + tail)
    return files


def test_a_damaged_file_is_not_used(unfinished: Callable[..., ConvertResult], tmp_path: Path) -> None:
    """Prefixes, and flipped bits: it is listed again, or refused where the damage is in what tasks read."""
    work = tmp_path / "out" / WORK_FOLDER
    whole = (work / LISTING_FILE).read_bytes()
    shutil.copytree(work, tmp_path / "kept")
    places = [len(whole) * i // 40 for i in range(40)]
    damaged = [whole[:size] for size in places[::8]]
    damaged += [whole[:at] + bytes([whole[at] ^ 1 << i % 8]) + whole[at + 1 :] for i, at in enumerate(places)]
    outcomes = {"listed": 0, "refused": 0, "not read": 0}
    for data in [*damaged, *lies(whole)]:
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "kept", work)
        (work / LISTING_FILE).write_bytes(data)
        Counted.calls = 0
        try:
            assert unfinished(on_error="skip").samples == 44
            outcomes["listed" if Counted.calls else "not read"] += 1
        except SourceError as error:
            assert "remove that file and run the same command again" in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0 and outcomes["listed"] > len(lies(whole)), outcomes


@pytest.mark.parametrize("what", ["none", "link", "fifo", "folder"])
def test_what_is_no_file_is_not_loaded(unfinished: Callable[..., ConvertResult], tmp_path: Path, what: str) -> None:
    file = tmp_path / "out" / WORK_FOLDER / LISTING_FILE
    file.rename(tmp_path / "elsewhere")
    if what == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    try:
        unfinished(on_error="skip")
    except (PackerError, OSError) as error:
        assert str(file) in str(error)
    assert Counted.calls == 2


def with_names(files: TreeFiles, name: str) -> TreeFiles:
    return TreeFiles(files.folders, files.folder, Names.of([name] * len(files.names)), files.facts, files.rows)


def with_folders(files: TreeFiles, folder: str) -> TreeFiles:
    return TreeFiles([folder] * len(files.folders), files.folder, files.names, files.facts, files.rows)


def test_a_block_that_leads_elsewhere_or_has_another_header(tree: Path) -> None:
    """Of files that somebody else may write: the rows of a shard are those of the tree, or refused."""
    part = FolderSource(tree).list(None).splits["train"]
    assert isinstance(part, TreeListing)
    block = encode_rows(part, range(4))
    assert decode_rows(block, 3).keys == part.keys[:4]
    names = ("../x", "..", "/etc/passwd", "a\0b", "")
    folders = ("train/../../", "/train/", "/", "train//x/", "val/cat/", "train/a\0b/", "train/cat")
    for change, values, message in (
        (with_names, names, "a name is (not|empty)"),
        (with_folders, folders, "leads out"),
    ):
        for value in values:
            split = TreeSplit(part.root, change(part.part.files, value), part.part.labels)
            with pytest.raises(DatasetError, match=message):
                decode_rows(encode_rows(TreeListing(split, part.whole), range(4)), 3)
    for was, now in (
        (b'"folder", "<i4", 4', b'"folder", "<i4", 3'),
        (b'"folder", "<i4", 4', b'"folder", "<i4",-4'),
        (b'"folder", "<i4", 4', b'"folder", "|O1", 4'),
        (b'"bytes", "<i8", 4', b'"bytes", "<i8", 9'),
        (b'"root": "train"', b'"root": "other"'),
        (b'"columns"', b'"colunms"'),
    ):
        assert was in block
        with pytest.raises(DatasetError):
            decode_rows(block.replace(was, now), 3)
    for classes in (0, 1):
        with pytest.raises(DatasetError, match="labels: a number is outside"):
            decode_rows(encode_rows(part, np.array([0, 35])), classes)
