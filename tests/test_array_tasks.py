"""Conversions by the tasks of array jobs: in any order, killed, run twice, at the same time; then one commit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import convert
from suites.programs import Notes, run_packer

import packer
import readers
from cache.errors import OutputError, SourceError
from packer.conversion.journal import Journal
from packer.conversion.result import ConvertResult
from packer.sources.base import SourceListing
from packer.sources.folder import FolderSource
from packer.testing.children import forked
from packer.testing.engines import data_of, wait_for
from packer.testing.samples import files_of
from readers.layout import read_dataset_info


class Counted(FolderSource):
    """Notes each listing in a file next to the source's."""

    def list(self, split: str | None) -> SourceListing:
        with open(f"{self.root}.listed", "a") as file:
            file.write("x")
        return super().list(split)


class Unsaved(Counted):
    """Its listing cannot be kept, so that each task lists."""

    identity = ""


@pytest.fixture(scope="module")
def expected(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(convert(tree, tmp_path_factory.mktemp("whole") / "out", samples=4).output)


@pytest.fixture
def photos(tree: Path, tmp_path: Path) -> Path:
    """A copy of `tree` under the same name, whose listings are counted next to it."""
    return Path(shutil.copytree(tree, tmp_path / tree.name))


@pytest.fixture
def run(photos: Path, tmp_path: Path) -> Callable[..., ConvertResult]:
    """Runs a task, into tmp_path/out."""

    def run(number: int, count: int, source: type[FolderSource] = Counted, **options: Any) -> ConvertResult:
        return convert(source(photos), tmp_path / "out", **{"samples": 4, "task": (number, count)} | options)

    return run


def same_shards(out: Path, expected: dict[str, bytes]) -> None:
    """Compare all but what names the source."""
    assert data_of(files_of(out)) == data_of(expected)
    assert packer.verify(out, workers=1).ok


@pytest.mark.parametrize(("source", "listings"), [(Counted, 1), (Unsaved, 5)])
def test_tasks_in_any_order_and_more_than_once(
    run: Callable[..., ConvertResult],
    photos: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    source: type[FolderSource],
    listings: int,
) -> None:
    out = tmp_path / "out"
    results = [run(number, 4, source) for number in (2, 0, 2, 3, 1)]
    assert sum(result.samples for result in results) - results[0].samples == 45
    assert [result.shards_resumed for result in results] == [0, 0, 3, 0, 0]
    assert Path(f"{photos}.listed").read_text() == listings * "x"
    assert [path.name for path in out.iterdir()] == [".packing"]
    with pytest.raises(readers.DatasetError, match="unfinished conversion"):
        readers.open(out)
    assert packer.commit(out).samples == 45
    same_shards(out, expected)
    assert packer.commit(out).already_done and run(1, 4, source).already_done


def test_a_commit_names_the_tasks_that_are_missing(run: Callable[..., ConvertResult], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="no task has packed anything here"):
        packer.commit(out)
    run(1, 6)
    before = files_of(out)
    with pytest.raises(
        OutputError, match=r"10 of 12 shards are missing, those of 5 tasks of 6: .*--task 0/6"
    ) as caught:
        packer.commit(out)
    assert "sbatch --array=0,2-5 SCRIPT" in str(caught.value)
    assert files_of(out) == before
    done = run_packer("commit", out)
    assert done.returncode == 1 and "--array=0,2-5" in done.stderr
    convert(Counted(tmp_path / "images"), out, samples=4)  # all the rest, and the commit
    assert packer.verify(out, workers=1).ok


def test_tasks_at_the_same_time(
    run: Callable[..., ConvertResult], photos: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Each of three tasks twice, all at once; one of them lists."""
    with ExitStack() as tasks:
        for number in range(6):
            tasks.enter_context(forked(partial(run, number % 3, 3)))
    assert Path(f"{photos}.listed").read_text() == "x"
    packer.commit(tmp_path / "out")
    same_shards(tmp_path / "out", expected)


def test_what_else_writes_waits_or_is_refused(run: Callable[..., ConvertResult], photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(0, 2)
    with Journal(out, shared=True):  # as of a task that runs
        for work in (partial(packer.commit, out), partial(convert, photos, out, samples=4)):
            with pytest.raises(OutputError, match="another command is writing here"):
                work()
        assert run(1, 2).shards == 6
        with pytest.raises(OutputError, match="tasks of another conversion"):
            run(1, 2, samples=5, overwrite=True)
    with pytest.raises(OutputError, match="unfinished conversion of another source"):
        run(1, 2, samples=5)
    assert run(1, 2, samples=5, overwrite=True).shards_resumed == 0
    with pytest.raises(OutputError, match=r"those of 1 task of 2"):
        packer.commit(out)


def test_a_set_is_replaced_by_the_commit(tree: Path, run: Callable[..., ConvertResult], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(tree, out, "tfrecord")
    with pytest.raises(OutputError, match="holds a set made from another source"):
        run(0, 2)
    for number in range(2):
        run(number, 2, overwrite=True)
        assert read_dataset_info(out).format == "tfrecord"
    assert packer.commit(out).format == "tar"
    assert packer.verify(out, against=tree, workers=1).ok


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ({"splits": [["../x", "", 1]]}, "cannot be read"),
        ({"splits": [["train", "", 1 << 40]]}, "numbers of shards that no set has"),
        ({"splits": [["train", "", -1]]}, "numbers of shards that no set has"),
        ({"tasks": 0}, "0 tasks"),
        ({"to": "zip"}, "cannot be read"),
        ({"version": 9}, "version 9"),
    ],
    ids=str,
)
def test_a_damaged_job_is_one_message(
    run: Callable[..., ConvertResult], tmp_path: Path, content: Any, match: str
) -> None:
    run(0, 1)
    file = tmp_path / "out/.packing/job.json"
    file.write_text(content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content))
    with pytest.raises(OutputError, match=rf"job\.json: cannot be read.*{match.removeprefix('cannot be read')}"):
        packer.commit(tmp_path / "out")


def test_a_late_part_of_another_plan_is_not_used(run: Callable[..., ConvertResult], tmp_path: Path) -> None:
    """What a worker writes that outlived its conversion, into the folder of the next one."""
    out, late = tmp_path / "out", tmp_path / "late"
    run(0, 1, shuffle=1)
    shutil.copytree(out / ".packing", late)
    run(0, 1, shuffle=2, overwrite=True)
    expected = {path.name: path.read_bytes() for path in (out / ".packing").glob("*.tar")}
    for path in late.glob("*.tar*"):
        shutil.copy(path, out / ".packing")
    assert run(0, 1, shuffle=2).shards_resumed == 0
    assert {path.name: path.read_bytes() for path in (out / ".packing").glob("*.tar")} == expected


def test_tasks_that_cannot_be(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="i from 0 to n - 1"):
        convert(tree, tmp_path / "out", task=(2, 2))
    with pytest.raises(ValueError, match="tasks share a directory"):
        packer.convert(tree, "tar", "s3://bucket/set", run=packer.Run(task=(0, 2)))
    with pytest.raises(ValueError, match="one process: no engine=, no task="):
        packer.convert(iter([]), "tar", tmp_path / "out", run=packer.Run(task=(0, 2)))


def test_an_empty_share_and_an_empty_set(run: Callable[..., ConvertResult], photos: Path, tmp_path: Path) -> None:
    assert run(99, 100).shards == 0
    shutil.rmtree(tmp_path / "out")
    for image in photos.rglob("*.JPEG"):
        image.write_bytes(b"")
    run(0, 1, on_error="skip")
    with pytest.raises(SourceError, match="no images, so no set is made"):
        packer.commit(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_task_waits_for_the_listing_of_another(run: Callable[..., ConvertResult], tmp_path: Path) -> None:
    """It says so; one that was killed while it listed is not waited for."""
    notes = Notes()
    with ExitStack() as other:
        listing = other.enter_context(Journal(tmp_path / "out", shared=True))
        other.enter_context(listing.planning(lambda: None))
        with ThreadPoolExecutor(1) as side:
            waiting = side.submit(run, 0, 1, watcher=notes)
            wait_for(lambda: any("waiting for the task that lists" in line for line in notes.lines), "its note")
            other.close()
            assert waiting.result(300).shards == 12
