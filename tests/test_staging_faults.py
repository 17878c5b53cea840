"""Staging that is killed, interrupted, out of space or misled: a clear end, nothing incomplete, nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import files_of
from suites.staging import (
    DEADLINE,
    SLOWLY,
    Notes,
    assert_whole,
    copy_of,
    leader_of,
    refused,
    result,
    staged,
    staged_files_of,
    start,
    tmpfs,
    wait_for,
)

import readers
from cache.errors import StagingSourceError
from cache.staging.session import Pace, transfer, work_off
from cache.staging.sources import FolderSource, StagedFile
from packer.testing.children import crashes_at


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    """A set that a test may spoil."""
    return Path(shutil.copytree(source, tmp_path / "own"))


def test_dying_leaders_are_followed(source: Path, tmp_path: Path) -> None:
    """Five processes; three times the one that copies is killed after a random while."""
    processes = [start(source, tmp_path, bytes_per_second=SLOWLY, threads=2) for _ in range(5)]
    dice = random.Random(os.getpid())

    def leader() -> subprocess.Popen[str] | None:
        """One that lives: the files of one that was killed stay for a moment."""
        return next((process for process in processes if process.pid == leader_of(tmp_path)), None)

    for _ in range(3):
        first = wait_for(leader, "a leader")
        time.sleep(dice.uniform(0, 0.3))
        chosen = leader() or first  # unknown between two files
        chosen.kill()
        chosen.communicate()
        processes.remove(chosen)
    results = [result(process) for process in processes]
    assert {one["path"] for one in results} == {str(copy_of(tmp_path))}
    assert sum(one["found"] for one in results) > 0
    assert_whole(Path(results[0]["path"]), source)


def test_interrupt(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packer", "stage", source, "--target", tmp_path, "--bandwidth", str(SLOWLY)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: leader_of(tmp_path), "copying")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out) == (130, "")
    assert "run the same command again to continue" in errors and "Traceback" not in errors
    local = copy_of(tmp_path)
    assert local is not None and not list((local / ".staging").glob("part-*")) and not (local / "dataset.json").exists()
    with pytest.raises(readers.DatasetError):
        readers.open(local)
    assert_whole(staged(source, tmp_path), source)


def test_a_directory_that_is_gone_at_the_end(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path / "node", cleanup="atexit"):
        shutil.rmtree(tmp_path / "node")


def test_a_disk_that_is_too_small(source: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "80k") as small:
        refused(r"kB needed, .* kB free; a fraction of 0\.\d+ would fit; make", source, small)
        assert list(small.iterdir()) == []
    with tmpfs(tmp_path / "few", "10m", "20") as few:
        refused(r"inodes needed, \d+ free; make room", source, few)


def test_a_disk_that_fills_up_meanwhile(source: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "600k") as small:
        process = start(source, small, bytes_per_second=SLOWLY, threads=1)
        wait_for(lambda: len(list(small.glob("packer-staged-*/*/*.tar"))) >= 2, "two shards")
        with open(small / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 1
        assert "NoRoomError" in errors and "No space left on device in the middle of copying; make room" in errors
        (small / "fill").unlink()
        with (staging := readers.stage(source, small)) as local:
            assert staging.counts.found >= 2
            assert_whole(local, source)


def test_a_target_that_is_read_only(source: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "fixed", "10m") as fixed:
        subprocess.run(["mount", "-o", "remount,ro", fixed], check=True)
        refused(r"fixed: not writable; choose another directory with target=", source, fixed)


@pytest.mark.parametrize("how", ["vanishes", "is replaced"])
def test_a_source_that_changes_in_mid_copy(own: Path, source: Path, tmp_path: Path, how: str) -> None:
    node, shard = tmp_path / "node", sorted(own.glob("*.tar"))[-1]
    good = shard.read_bytes()
    process = start(own, node, bytes_per_second=SLOWLY, threads=1)
    wait_for(lambda: len(list(node.glob("packer-staged-*/*/*.tar"))) >= 2, "two shards")
    if how == "vanishes":
        own.rename(tmp_path / "away")
        message = "cannot be read: No such file or directory; is the source still there?"
    else:
        (tmp_path / "new").write_bytes(good[:-1] + b"x")
        (tmp_path / "new").rename(shard)
        message = f"{shard}: the CRC32C of its bytes is"
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1 and message in errors and "Traceback" not in errors
    local = copy_of(node)
    assert local is not None and not (local / shard.name).exists() and not (local / "dataset.json").exists()
    if how == "vanishes":
        (tmp_path / "away").rename(own)
    else:
        shard.write_bytes(good[:-1])
        refused(rf"has {len(good) - 1} bytes, {len(good)} expected", own, node)
        shard.write_bytes(good)
    assert_whole(staged(own, node), source)


@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "index"])
def test_a_spoilt_copy_is_mended(source: Path, tmp_path: Path, how: str) -> None:
    with readers.stage(source, tmp_path) as local:
        path = local / ("train.index/label.npy" if how == "index" else "train-000001.tar")
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    notes, verify = Notes(), how in ("flipped", "index")
    with (staging := readers.stage(source, tmp_path, verify=verify, watcher=notes)) as again:
        assert again == local and staging.counts.copied == 1 and staging.counts.damaged == verify
        assert (f"{path}: damaged, copied again" in notes) == verify
        assert_whole(local, source)


def test_a_source_with_a_wrong_index(own: Path, tmp_path: Path) -> None:
    shutil.rmtree(own / "val.index")
    with pytest.raises(readers.DatasetError, match=r"val.index: the index cannot be listed"):
        readers.stage(own, tmp_path / "node").__enter__()
    text = (own / "dataset.json").read_text().replace("train.index", "../train.index")
    (own / "dataset.json").write_text(text)
    with pytest.raises(readers.DatasetError, match="leads outside: expected a path below a folder"):
        readers.stage(own, tmp_path / "node").__enter__()


def test_a_crash_at_every_step_that_changes_the_disk(source: Path, tmp_path: Path) -> None:
    """At any step: a copy that looks whole is whole, and the next staging results in the same bytes."""
    expected = staged_files_of(source)

    crashes = 0
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20, 33, 60, 85, 90, 94, 96, 98, 100, 102, 104, 106, 108, 400):
        node = tmp_path / str(step)
        crashed = crashes_at(step, partial(staged, source, node, threads=1))
        crashes += crashed
        local = copy_of(node)
        if local is not None and (local / "dataset.json").exists():
            assert {name: data for name, data in files_of(local).items() if name[0] != "."} == expected, step
        assert_whole(staged(source, node), source)
    assert crashes >= 15 and not crashed


def test_threads_stop_at_the_first_error() -> None:
    import threading

    stop, seen = threading.Event(), []

    def work(item: int) -> None:
        seen.append(item)
        if item == 3:
            raise OSError("three")

    with pytest.raises(OSError, match="three"):
        work_off(range(100_000), work, 3, stop, lambda: None)
    assert stop.is_set() and len(seen) < 100_000
    work_off([], work, 3, threading.Event(), lambda: None)


def test_a_file_that_grows_while_it_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(5000))

    class Growing(Pace):
        def moved(self, size: int) -> None:
            with open(path, "ab") as file:
                file.write(b"more")

    with pytest.raises(StagingSourceError, match="was written to while it was being copied"):
        transfer(FolderSource(tmp_path), StagedFile("a", 5000), tmp_path / "part", tmp_path / "b", Growing())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
