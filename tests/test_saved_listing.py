"""A saved listing: it is not repeated, changes are detected, and a damaged listing is not used.

In a conversion by several tasks, too, one task lists, and one commit makes the set from the shards of all tasks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import convert, files_of, make_jpeg, tree_of
from suites.programs import Notes, run_packer

import packer
import readers
from cache.checksums import crc32c
from cache.errors import BadSampleError, DatasetError, OutputError, PackerError, SourceError
from packer.conversion.journal import Journal
from packer.conversion.result import ConvertResult
from packer.conversion.saved import LISTING_FILE, decode_rows, encode_rows
from packer.sources.base import SourceListing
from packer.sources.folder import FolderSource, TreeListing
from packer.testing.children import forked
from packer.testing.engines import data_of, wait_for
from readers.layout import WORK_FOLDER, read_dataset_info
from readers.opening.tree import TreeFiles, TreeSplit
from readers.table import Names

BAD = "val/owl/owl_002.JPEG"  # in the last shard


class Counted(FolderSource):
    """Records each listing in a file next to the source."""

    def list(self, split: str | None) -> SourceListing:
        with open(f"{self.root}.listed", "a") as file:
            file.write("x")
        return super().list(split)


class Unsaved(Counted):
    """A source whose listing cannot be saved, so that each task lists."""

    identity = ""


def listings(root: Path) -> int:
    """The number of listings of a source."""
    return len(Path(f"{root}.listed").read_text())


@pytest.fixture
def photos(tree: Path, tmp_path: Path) -> Path:
    """A copy of `tree` under the same name, with a file next to it that counts listings."""
    return Path(shutil.copytree(tree, tmp_path / tree.name))


@pytest.fixture
def broken(photos: Path) -> Path:
    """The same copy, whose last image is not an image."""
    (photos / BAD).write_bytes(b"not an image")
    return photos


@pytest.fixture
def run(photos: Path, tmp_path: Path) -> Callable[..., ConvertResult]:
    """Converts `photos` to tmp_path/out, as 9 + 3 shards."""

    def run(source: type[FolderSource] = Counted, **options: Any) -> ConvertResult:
        return convert(source(photos), tmp_path / "out", **{"samples": 4} | options)

    return run


@pytest.fixture
def task(run: Callable[..., ConvertResult]) -> Callable[..., ConvertResult]:
    """Runs one of several tasks."""
    return lambda number, count, *source, **options: run(*source, task=(number, count), **options)


@pytest.fixture
def unfinished(run: Callable[..., ConvertResult], broken: Path) -> Callable[..., ConvertResult]:
    """The same function, after a first conversion that packed all shards but the last."""
    with pytest.raises(BadSampleError, match=r"owl_002\.JPEG"):
        run()
    assert listings(broken) == 1
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
def test_a_resumed_conversion_does_not_list_again(
    run: Callable[..., ConvertResult], broken: Path, tmp_path: Path, options: dict[str, Any], workers: int
) -> None:
    with pytest.raises(BadSampleError):
        run(**options)
    result = run(**options, on_error="skip", workers=workers)
    assert (listings(broken), result.left_out["skipped"]) == (1, 1)
    assert 0 < result.shards_resumed < result.shards
    convert(Counted(broken), tmp_path / "again", samples=4, on_error="skip", **options)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    assert not (tmp_path / "out" / WORK_FOLDER).exists()


def test_names_of_any_kind_are_saved(tmp_path: Path) -> None:
    names = ["train/ü/1.jpg", "train/ü/deep/er/1.jpg", "train/b/1.jpg", "train/b/1.png", "train/b/x.y.z"]
    tree_of(tmp_path / "tree", {name: make_jpeg(i) for i, name in enumerate(names)})
    (tmp_path / "tree/train/ü/gone.jpg").symlink_to("nowhere")
    os.symlink("x", tmp_path / "tree" / os.fsdecode(b".caf\xe9"))
    with pytest.raises(BadSampleError):
        convert(Counted(tmp_path / "tree"), tmp_path / "out", samples=2)
    convert(Counted(tmp_path / "tree"), tmp_path / "out", samples=2, on_error="skip")
    assert listings(tmp_path / "tree") == 1
    convert(Counted(tmp_path / "tree"), tmp_path / "again", samples=2, on_error="skip")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")


@pytest.mark.parametrize("change", ["a file more", "a file less", "another name", "a folder more"])
def test_a_tree_with_other_files_is_listed_and_refused(
    unfinished: Callable[..., ConvertResult], broken: Path, change: str
) -> None:
    if change == "a file more":
        shutil.copy(broken / "val/cat/cat_000.JPEG", broken / "val/cat/new.JPEG")
    elif change == "a file less":
        (broken / "train/cat/cat_003.JPEG").unlink()
    elif change == "another name":
        (broken / "train/cat/cat_003.JPEG").rename(broken / "train/cat/zebra.JPEG")
    else:
        tree_of(broken, {"train/eel/1.JPEG": b"x"})
    with pytest.raises(OutputError, match="unfinished conversion of another source"):
        unfinished(on_error="skip")
    assert listings(broken) == 2


def test_a_folder_with_another_time_and_the_same_files_is_listed_and_resumed(
    unfinished: Callable[..., ConvertResult], broken: Path
) -> None:
    (broken / "train/cat/new").touch()
    (broken / "train/cat/new").unlink()
    assert unfinished(dry_run=True, on_error="skip").shards == 12
    assert listings(broken) == 2, "a dry run saved its listing"
    assert unfinished(on_error="skip").shards_resumed == 11
    assert listings(broken) == 3


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_rewritten_file_is_refused_until_it_is_listed_again(
    unfinished: Callable[..., ConvertResult], broken: Path, on_error: str
) -> None:
    """The size is the same, so only the modification time reveals it."""
    good = broken / "val/owl/owl_001.JPEG"
    status = good.stat()
    data = bytearray(good.read_bytes())
    data[-3] ^= 1
    with open(good, "r+b") as file:
        file.write(data)
    os.utime(good, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    for part in (broken.parent / "out" / WORK_FOLDER).glob("val-*.part"):
        part.unlink()
    with pytest.raises(SourceError, match=r"owl_001\.JPEG: has changed since it was listed.*overwrite=True"):
        unfinished(on_error=on_error)
    assert listings(broken) == 1
    assert unfinished(on_error="skip", overwrite=True).shards_resumed == 0
    assert listings(broken) == 2
    with readers.open(broken.parent / "out", split="val") as reader:
        assert bytes(reader["owl/owl_001"].image) == data


@pytest.mark.parametrize("other", [{"shuffle": 1}, {"split": "train"}, {"classes": ["cat"]}, {"check": "decode"}])
def test_other_options_list_again(
    unfinished: Callable[..., ConvertResult], broken: Path, other: dict[str, Any]
) -> None:
    with pytest.raises(OutputError, match="unfinished conversion"):
        unfinished(**other)
    assert listings(broken) == 2


# --- tasks of array jobs: in any order, killed, run twice, at the same time; then one commit -----------------------
@pytest.fixture(scope="module")
def expected(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(convert(tree, tmp_path_factory.mktemp("whole") / "out", samples=4).output)


def same_shards(out: Path, expected: dict[str, bytes]) -> None:
    """Compare everything but the name of the source."""
    assert data_of(files_of(out)) == data_of(expected)
    assert packer.verify(out, workers=1).ok


@pytest.mark.parametrize(("source", "listed"), [(Counted, 1), (Unsaved, 5)])
def test_tasks_in_any_order_and_more_than_once(
    task: Callable[..., ConvertResult],
    photos: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    source: type[FolderSource],
    listed: int,
) -> None:
    out = tmp_path / "out"
    results = [task(number, 4, source) for number in (2, 0, 2, 3, 1)]
    assert sum(result.samples for result in results) - results[0].samples == 45
    assert [result.shards_resumed for result in results] == [0, 0, 3, 0, 0]
    assert listings(photos) == listed
    assert [path.name for path in out.iterdir()] == [".packing"]
    with pytest.raises(readers.DatasetError, match="unfinished conversion"):
        readers.open(out)
    assert packer.commit(out).samples == 45
    same_shards(out, expected)
    assert packer.commit(out).already_done and task(1, 4, source).already_done


def test_a_commit_names_the_tasks_that_are_missing(task: Callable[..., ConvertResult], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="no task has packed anything here"):
        packer.commit(out)
    task(1, 6)
    before = files_of(out)
    with pytest.raises(
        OutputError, match=r"10 of 12 shards are missing, those of 5 tasks of 6: .*--task 0/6"
    ) as caught:
        packer.commit(out)
    assert "sbatch --array=0,2-5 SCRIPT" in str(caught.value)
    assert files_of(out) == before
    done = run_packer("commit", out)
    assert done.returncode == 1 and "--array=0,2-5" in done.stderr
    convert(Counted(tmp_path / "images"), out, samples=4)  # all other tasks, and the commit
    assert packer.verify(out, workers=1).ok


def test_tasks_at_the_same_time(
    task: Callable[..., ConvertResult], photos: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Each of three tasks twice, all at once; one of them lists."""
    with ExitStack() as tasks:
        for number in range(6):
            tasks.enter_context(forked(partial(task, number % 3, 3)))
    assert listings(photos) == 1
    packer.commit(tmp_path / "out")
    same_shards(tmp_path / "out", expected)


def test_other_writers_wait_or_are_refused(task: Callable[..., ConvertResult], photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    task(0, 2)
    with Journal(out, shared=True):  # like that of a running task
        for work in (partial(packer.commit, out), partial(convert, photos, out, samples=4)):
            with pytest.raises(OutputError, match="another command is writing here"):
                work()
        assert task(1, 2).shards == 6
        with pytest.raises(OutputError, match="tasks of another conversion"):
            task(1, 2, samples=5, overwrite=True)
    with pytest.raises(OutputError, match="unfinished conversion of another source"):
        task(1, 2, samples=5)
    assert task(1, 2, samples=5, overwrite=True).shards_resumed == 0
    with pytest.raises(OutputError, match=r"those of 1 task of 2"):
        packer.commit(out)


def test_a_set_is_replaced_by_the_commit(tree: Path, task: Callable[..., ConvertResult], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(tree, out, "tfrecord")
    with pytest.raises(OutputError, match="has a set made from another source"):
        task(0, 2)
    for number in range(2):
        task(number, 2, overwrite=True)
        assert read_dataset_info(out).format == "tfrecord"
    assert packer.commit(out).format == "tar"
    assert packer.verify(out, against=tree, workers=1).ok


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ({"splits": [["../x", "", 1]]}, "cannot be read"),
        ({"splits": [["train", "", 1 << 40]]}, "impossible numbers of shards"),
        ({"splits": [["train", "", -1]]}, "impossible numbers of shards"),
        ({"tasks": 0}, "0 tasks"),
        ({"to": "zip"}, "cannot be read"),
        ({"version": 9}, "version 9"),
    ],
    ids=str,
)
def test_a_damaged_job_is_one_message(
    task: Callable[..., ConvertResult], tmp_path: Path, content: Any, match: str
) -> None:
    task(0, 1)
    file = tmp_path / "out/.packing/job.json"
    file.write_text(content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content))
    with pytest.raises(OutputError, match=rf"job\.json: cannot be read.*{match.removeprefix('cannot be read')}"):
        packer.commit(tmp_path / "out")


def test_a_late_part_of_another_plan_or_one_without_its_shard_is_not_used(
    task: Callable[..., ConvertResult], tmp_path: Path
) -> None:
    """Files that a worker which outlived its conversion writes into the folder of the next one."""
    out, late = tmp_path / "out", tmp_path / "late"
    task(0, 1, shuffle=1)
    shutil.copytree(out / ".packing", late)
    task(0, 1, shuffle=2, overwrite=True)
    expected = {path.name: path.read_bytes() for path in (out / ".packing").glob("*.tar")}
    for path in late.glob("*.tar*"):
        shutil.copy(path, out / ".packing")
    assert task(0, 1, shuffle=2).shards_resumed == 0
    assert {path.name: path.read_bytes() for path in (out / ".packing").glob("*.tar")} == expected
    (out / ".packing" / min(expected)).unlink()
    assert task(0, 1, shuffle=2).shards_resumed == 11
    assert {path.name: path.read_bytes() for path in (out / ".packing").glob("*.tar")} == expected


def test_invalid_tasks(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="i from 0 to n - 1"):
        convert(tree, tmp_path / "out", task=(2, 2))
    with pytest.raises(ValueError, match="tasks share a directory"):
        packer.convert(tree, "tar", "s3://bucket/set", run=packer.Run(task=(0, 2)))
    with pytest.raises(ValueError, match="one process: no engine=, no task="):
        packer.convert(iter([]), "tar", tmp_path / "out", run=packer.Run(task=(0, 2)))


def test_an_empty_share_and_an_empty_set(task: Callable[..., ConvertResult], photos: Path, tmp_path: Path) -> None:
    assert task(99, 100).shards == 0
    shutil.rmtree(tmp_path / "out")
    for image in photos.rglob("*.JPEG"):
        image.write_bytes(b"")
    task(0, 1, on_error="skip")
    with pytest.raises(SourceError, match="no images, so no set is made"):
        packer.commit(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_task_waits_for_the_listing_of_another(task: Callable[..., ConvertResult], tmp_path: Path) -> None:
    """It says that it waits; a task that was killed while listing is not waited for."""
    notes = Notes()
    with ExitStack() as other:
        listing = other.enter_context(Journal(tmp_path / "out", shared=True))
        other.enter_context(listing.planning(lambda: None))
        with ThreadPoolExecutor(1) as side:
            waiting = side.submit(task, 0, 1, watcher=notes)
            wait_for(lambda: any("waiting for the task that lists" in line for line in notes.lines), "its note")
            other.close()
            assert waiting.result(300).shards == 12


# --- the file ----------------------------------------------------------------------------------------------------
def false_headers(whole: bytes) -> list[bytes]:
    """The file with false headers that have correct checksums."""
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


def test_a_damaged_file_is_not_used(unfinished: Callable[..., ConvertResult], broken: Path, tmp_path: Path) -> None:
    """Prefixes, and flipped bits: the source is listed again, or refused where the damage is in the part that tasks
    read."""
    work = tmp_path / "out" / WORK_FOLDER
    whole = (work / LISTING_FILE).read_bytes()
    shutil.copytree(work, tmp_path / "kept")
    places = [len(whole) * i // 24 for i in range(24)]
    damaged = [whole[:size] for size in places[::8]]
    damaged += [whole[:at] + bytes([whole[at] ^ 1 << i % 8]) + whole[at + 1 :] for i, at in enumerate(places)]
    outcomes = {"listed": 0, "refused": 0, "not read": 0}
    for data in [*damaged, *false_headers(whole)]:
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "kept", work)
        (work / LISTING_FILE).write_bytes(data)
        before = listings(broken)
        try:
            assert unfinished(on_error="skip").samples == 44
            outcomes["not read" if listings(broken) == before else "listed"] += 1
        except SourceError as error:
            assert "remove that file and run the same command again" in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0 and outcomes["listed"] > len(false_headers(whole)), outcomes


@pytest.mark.parametrize("kind", ["none", "link", "fifo", "folder"])
def test_only_regular_files_are_loaded(
    unfinished: Callable[..., ConvertResult], broken: Path, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "out" / WORK_FOLDER / LISTING_FILE
    file.rename(tmp_path / "elsewhere")
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    try:
        unfinished(on_error="skip")
    except (PackerError, OSError) as error:
        assert str(file) in str(error)
    assert listings(broken) == 2


def with_names(files: TreeFiles, name: str) -> TreeFiles:
    return TreeFiles(files.folders, files.folder, Names.of([name] * len(files.names)), files.facts, files.rows)


def with_folders(files: TreeFiles, folder: str) -> TreeFiles:
    return TreeFiles([folder] * len(files.folders), files.folder, files.names, files.facts, files.rows)


def test_a_block_with_another_offset_or_header(tree: Path) -> None:
    """In files that other users may write: the rows of a shard are those of the tree, or are refused."""
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
