"""Listing a tree: the same result from one process and from several, also where processes die."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg

import packer
import readers.opening.tree
from cache.errors import BadSampleError, SourceError
from packer.conversion.options import ConvertOptions, Shards
from packer.conversion.plan import make_plan
from packer.formats import format_named
from packer.formats.base import Arena
from packer.sources.base import SomeSamples, SourceListing
from packer.sources.folder import FolderSource, list_tree, read_file
from packer.testing.formats import bounded
from readers.opening.tree import UNKNOWN, TreeFile, TreeFiles, scan
from readers.table import NamesBuilder


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a tree of a few files is divided among processes, and folders of 8 or more files are divided further."""
    for name, value in (("_ALONE_SECONDS", 0), ("_RUN", 8), ("_SLICE", 3), ("_BLOCK", 5)):
        monkeypatch.setattr(readers.opening.tree, name, value)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Folders with files of many sizes, including a dangling link, a pipe, a loop and hidden files."""
    for folder in ("b", "a", "a/deep", "c"):
        (tmp_path / folder).mkdir()
        for i in range(7):
            (tmp_path / folder / f"{i}.jpg").write_bytes(b"x" * i)
            os.utime(tmp_path / folder / f"{i}.jpg", ns=(0, 10**18 + i))
        (tmp_path / folder / ".hidden").touch()
    (tmp_path / "a/3-dangling.jpg").symlink_to("nowhere")
    (tmp_path / "b/link.jpg").symlink_to("4.jpg")
    (tmp_path / "c/loop").symlink_to("..")
    os.mkfifo(tmp_path / "b/3-pipe")
    os.mkfifo(tmp_path / "b/.pipe")
    return tmp_path


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("processes", [1, 3, 16])
def test_processes_change_nothing(mixed: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        (mixed / "b" / f"{i:02d}.png").touch()
    together: list[tuple[str, str]] = []
    listed = scan(mixed, together, processes)
    monkeypatch.undo()
    alone: list[tuple[str, str]] = []
    files = scan(mixed, alone)
    assert listed == files
    assert (listed.folders, listed.folder_times.tolist()) == (files.folders, files.folder_times.tolist())
    assert listed.folder_times.tolist() == [(mixed / folder).stat().st_mtime_ns for folder in files.folders]
    assert together == alone
    assert [reason for _, reason in alone[5:]] == ["hidden", "a link that leads back to a folder above it"]
    assert [path for path, _ in alone if path.startswith("b/")] == ["b/.hidden", "b/.pipe", "b/3-pipe"]
    facts = [file[:3] for file in files]
    assert ("b/6.jpg", 6, 10**18 + 6) in facts
    assert ("b/link.jpg", 4, 10**18 + 4) in facts
    monkeypatch.setattr("readers.coefficients.compiled.codec_if_built", lambda: None)
    assert scan(mixed, []) == files
    assert TreeFile("a/3-dangling.jpg", UNKNOWN, 0) in files
    walked = [str(Path(folder, name)) for folder, _, names in sorted(os.walk(mixed)) for name in sorted(names)]
    assert [f"{mixed}/{path}" for path in files.paths()] == [
        path for path in walked if "/." not in path and not path.endswith("-pipe")
    ]


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_vanishes_while_it_is_examined(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names are listed; the conversion reports each file as unreadable."""
    for i in range(20):
        (tmp_path / f"{i:02d}.jpg").write_bytes(b"x")
    opened, original = [], os.open

    def gone(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(path)
        if len(opened) > 1:
            raise FileNotFoundError(2, "No such file or directory")
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", gone)
    files = scan(tmp_path, [], processes)
    assert [file.bytes for file in files] == [1 if processes == 1 else UNKNOWN] * 20


@pytest.mark.usefixtures("small_tasks")
def test_a_process_that_dies_costs_nothing(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, parent, original = scan(mixed, []), os.getpid(), readers.opening.tree._examine

    def deadly(*arguments: Any) -> Any:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    monkeypatch.setattr(readers.opening.tree, "_examine", deadly)
    with bounded():
        assert scan(mixed, [], 4) == expected


def children() -> set[str]:
    """Process ids; other tests may have left helpers that live as long as the interpreter."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SourceError])
def test_an_early_end_leaves_no_children(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests may have left idle threads
    before = children()
    parent, original = os.getpid(), NamesBuilder.extend_encoded

    def interrupted(self: NamesBuilder, *arguments: Any) -> None:
        if os.getpid() == parent and children() > before:
            raise error("enough")
        original(self, *arguments)

    monkeypatch.setattr(NamesBuilder, "extend_encoded", interrupted)
    with bounded(), pytest.raises(error):
        scan(mixed, [], 3)
    assert children() <= before


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("processes", [1, 3])
def test_a_folder_that_cannot_be_read_is_an_error_in_any_process(
    mixed: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("/c"):
            raise PermissionError(13, "Permission denied")
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)  # root, the user in some test runs, reads any folder
    with bounded(), pytest.raises(SourceError, match="c: cannot be listed: Permission denied"):
        scan(mixed, [], processes)


@pytest.mark.usefixtures("small_tasks")
def test_a_program_with_threads_is_not_forked(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", None)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert len(scan(mixed, [], 4)) == 30
    finally:
        over.set()
        thread.join()


def test_no_search_for_cycles_while_listing(tree: Path) -> None:
    class Watched(FolderSource):
        def list(self, split: str | None) -> SourceListing:
            raise SourceError(f"collecting: {gc.isenabled()}")

    with pytest.raises(SourceError, match="collecting: False"):
        packer.convert(Watched(tree), "tar", tree.with_name("never"))
    assert gc.isenabled()


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """1,500 nested folders, with an image at the bottom."""
    root = tmp_path / "deep"
    root.mkdir()
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    with open(os.open("1.jpg", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor), "wb") as file:
        file.write(make_jpeg(1))
    os.close(descriptor)
    yield root
    subprocess.run(["rm", "-rf", root], check=True, timeout=120)  # shutil.rmtree would recurse too deep


def test_trees_may_be_1500_folders_deep(deep: Path, tmp_path: Path) -> None:
    assert packer.convert(deep, "tar", tmp_path / "out", run=packer.Run(workers=1)).samples == 1
    with readers.open(tmp_path / "out", verify=True) as reader, readers.open_folder(deep) as folder:
        assert [bytes(sample.image) for sample in reader] == [make_jpeg(1)]
        assert folder.keys == list(reader.keys) == ["d/" * 1500 + "1"]


@pytest.mark.usefixtures("small_tasks")
def test_links_that_multiply_the_tree_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    for level in range(25):
        (root / f"level{level}").mkdir(parents=True)
        (root / f"level{level}" / "1.jpg").write_bytes(b"x")
    for level in range(24):
        for name in ("a", "b"):
            (root / f"level{level}" / name).symlink_to(root / f"level{level + 1}")
    for processes in (1, 2):
        with bounded(), pytest.raises(SourceError, match="is reached on more than 64 paths, through links to links"):
            scan(root / "level0", [], processes)


def test_a_folder_may_be_linked_to_more_than_once(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "real").mkdir(parents=True)
    (root / "real/1.jpg").write_bytes(b"x")
    for name in ("alias", "other"):
        (root / name).symlink_to("real")
    assert [file.path for file in scan(root, [])] == ["alias/1.jpg", "other/1.jpg", "real/1.jpg"]


def test_a_listing_takes_at_most_100_bytes_a_sample() -> None:
    """The columns that exist from the walk to the tasks, and the bytes sent to a worker."""
    names = [f"n{i // 500:08d}/n{i // 500:08d}_{i * 37 % 100_000}.JPEG" for i in range(50_000)]
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        listing = list_tree(TreeFiles.of([f"train/{name}" for name in names], [100_000] * len(names)), None, "x", [])
        plan = make_plan(listing, ConvertOptions("tar", shards=Shards(shuffle=0)), format_named("tar"))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    part = listing.splits["train"]
    assert (list(part.keys[:1]), plan.samples) == (["n00000000/n00000000_0"], len(names))
    assert (after - before) / len(names) <= 100
    sent = sum(len(pickle.dumps(SomeSamples(part, shard.indices))) for shard in plan.shards)
    assert sent / len(names) <= 100


def test_a_task_sends_its_samples_and_no_others(tree: Path) -> None:
    part = FolderSource(tree).list(None).splits["train"]
    whole = [row for block in part.slices() for row in zip(*block, strict=True)]
    indices = np.array([5, 0, 3])
    sent = pickle.dumps(SomeSamples(part, indices))
    received = [row for block in pickle.loads(sent).slices() for row in zip(*block, strict=True)]
    assert received == [whole[i] for i in indices]
    assert whole[1][2][0].encode() not in sent


def test_a_folder_of_many_files_is_sorted_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        (tmp_path / f"{i * 37 % 50}.jpg").touch()
        (tmp_path / f"d{i % 7}").mkdir(exist_ok=True)
        (tmp_path / f".{i % 3}").touch()
    (tmp_path / "d3/ü.jpg").touch()
    at_once: list[tuple[str, str]] = []
    in_runs: list[tuple[str, str]] = []
    expected = scan(tmp_path, at_once)
    monkeypatch.setattr(readers.opening.tree, "_RUN", 8)
    assert scan(tmp_path, in_runs) == expected
    assert in_runs == at_once == [(f".{i}", "hidden") for i in range(3)]
    assert [file.path for file in expected] == [*sorted(f"{i}.jpg" for i in range(50)), "d3/ü.jpg"]


def test_names_that_are_not_utf8_are_listed_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).touch()
    assert [file.path for file in scan(tmp_path, [])] == ["caf\udce9.jpg"]
    with pytest.raises(SourceError, match=r"the name 'caf\\udce9\.jpg' is not UTF-8; rename it"):
        FolderSource(tmp_path).list(None)


@pytest.mark.parametrize(
    ("name", "states", "later", "message"),
    [
        ("file", 9, None, ""),
        ("file", 9, 0, ""),
        ("empty", 0, 0, ""),
        ("file", 8, None, "has changed: 8 bytes when it was listed, 9 or more now"),
        ("file", 10, 0, "has changed: 10 bytes when it was listed, 9 or more now"),
        ("file", 9, 1, "file: has changed since it was listed"),
        ("file", -1, None, "appeared while the source was being listed"),
        ("file", 64, None, "appeared while"),  # longer than the buffer
        ("pipe", 9, None, "has changed: 9 bytes when it was listed, 0"),
        ("folder", 9, None, "cannot be read: Is a directory"),
        ("missing", 9, None, "cannot be opened: No such file or directory"),
        ("looped", 9, 0, "cannot be opened: Too many levels of symbolic links"),
    ],
)
def test_a_file_is_read_alike_with_and_without_the_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, states: int, later: int | None, message: str
) -> None:
    """later: later than the file's modification time, the epoch, in ns; None: any time will do."""
    for file_name, content in (("file", b"content 9"), ("empty", b"")):
        (tmp_path / file_name).write_bytes(content)
        os.utime(tmp_path / file_name, ns=(0, 0))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "looped").symlink_to("looped")
    for _ in range(2):
        arena = Arena(lambda: None, 64)
        arena.take(3)
        refused = pytest.raises((BadSampleError, SourceError), match=message) if message else nullcontext()
        with refused:
            assert bytes(read_file(str(tmp_path / name), states, arena, later)) == b"content 9"[:states]
            assert len(arena.rest()) == 61 - states
        monkeypatch.setattr("packer.sources.folder.codec_if_built", lambda: None)
