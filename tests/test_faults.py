"""Conversions that are killed, starved of space or run twice: nothing incomplete looks complete, nothing is lost."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from conftest import by_subject, files_of, make_jpeg, tree_of

import packer
import readers
from cache.messages import Silent
from packer.conversion.journal import Journal
from packer.sources.folder import FolderSource
from packer.testing.children import crashes_at, end_of, forked, in_child
from packer.workers import Workers, run_shards

DEADLINE = 300.0
SLOW = """
import sys, time
import packer, readers
from packer.sources.folder import FolderReader, FolderSource

class SlowReader(FolderReader):
    def read(self, place, arena):
        time.sleep(0.02)
        return super().read(place, arena)

class SlowSource(FolderSource):
    def open(self):
        return SlowReader(str(self.root))

if __name__ == "__main__":
    try:
        packer.convert(SlowSource(sys.argv[1]), to=sys.argv[3], output=sys.argv[2], workers=2, samples_per_shard=4)
    except readers.PackerError as error:
        print(type(error).__name__, error, file=sys.stderr)
        sys.exit(1)
"""


def wait_for(what: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, f"waited {DEADLINE} s for {why}"
        time.sleep(0.01)


def start_slow(tree: Path, out: Path, to: str = "tar") -> subprocess.Popen[str]:
    script = out.parent / "slow.py"
    script.write_text(SLOW)
    return subprocess.Popen(
        [sys.executable, script, tree, out, to], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def parts(out: Path) -> list[Path]:
    return sorted((out / ".packing").glob("*.part"))


def reference(tree: Path, out: Path, to: str = "tar") -> dict[str, bytes]:
    packer.convert(tree, to=to, output=out, run=packer.Run(workers=1), shards=packer.Shards(samples=4))
    return files_of(out)


@pytest.mark.parametrize(
    ("to", "how"),
    [*((to, "killed") for to in ("hdf5", "tfrecord", "tar")), ("tar", "a killed worker"), ("tar", "interrupted")],
)
def test_a_conversion_that_ends_early_is_resumed(tree: Path, tmp_path: Path, to: str, how: str) -> None:
    """The same command continues at the first missing shard; until then, the directory is not a set."""
    out = tmp_path / "out"
    process = start_slow(tree, out, to)
    wait_for(lambda: len(parts(out)) >= 2, "two whole shards")
    workers = children_of(process.pid)
    if how == "killed":
        process.kill()
    elif how == "interrupted":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    else:
        os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    if how == "a killed worker":
        assert "WorkerError a worker process died" in errors and "run the same command again" in errors
    wait_for(lambda: not any(map(alive, workers)), "the workers to end")
    assert [path.name for path in out.iterdir()] == [".packing"], "shards or dataset.json are there already"
    with pytest.raises(readers.DatasetError, match=r"unfinished conversion.*same  packer convert  again"):
        readers.open(out)
    assert (
        packer.convert(
            tree, to=to, output=out, run=packer.Run(workers=2), shards=packer.Shards(samples=4)
        ).shards_resumed
        >= 2
    )
    assert files_of(out) == reference(tree, tmp_path / "reference", to)


class _Unsendable(FolderSource):
    def __reduce__(self) -> str:
        raise TypeError("not for others")


def test_a_source_that_cannot_be_sent_to_workers(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(readers.SourceError, match=r"cannot be sent to worker processes: not for others; use workers=1"):
        packer.convert(_Unsendable(tree), to="tar", output=tmp_path / "out", run=packer.Run(workers=2))
    assert packer.convert(_Unsendable(tree), to="tar", output=tmp_path / "out", run=packer.Run(workers=1)).samples == 45


class _SentOnce:
    """Passes the check, and cannot be pickled again for the workers."""

    pickled = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        _SentOnce.pickled += 1
        if _SentOnce.pickled > 2:
            time.sleep(0.2)  # the run is ending by then
        if _SentOnce.pickled > 1:
            raise TypeError("not again")
        return _SentOnce, ()


def test_tasks_that_cannot_be_pickled_for_the_workers_end_the_run() -> None:
    def work() -> str:
        try:
            run_shards(print, [source := _SentOnce()] * 8, 8, Workers(2), Silent(), (8, 8), source=source)
        except TypeError as error:
            return str(error)
        return "no error"

    assert end_of(work, ("not again",)) == "not again"


def test_two_conversions_into_one_output_refuse_each_other(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_slow(tree, out)
    try:
        wait_for(lambda: (out / ".packing" / "plan.json").exists(), "the first conversion to begin")
        for overwrite in (False, True):
            with pytest.raises(readers.OutputError, match="another command is writing here"):
                packer.convert(
                    tree,
                    to="tar",
                    output=out,
                    run=packer.Run(workers=1),
                    shards=packer.Shards(samples=4),
                    overwrite=overwrite,
                )
    finally:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert files_of(out) == reference(tree, tmp_path / "reference")


@pytest.mark.parametrize("turns", [100, pytest.param(5000, marks=pytest.mark.faults)])
def test_a_working_folder_has_one_owner_at_a_time(tmp_path: Path, turns: int) -> None:
    """Four processes: each takes the folder, is alone in it, and removes it; the others wait at its lock meanwhile."""
    out, alone = tmp_path / "out", tmp_path / "alone"

    def take_turns() -> None:
        taken = 0
        while taken < turns:
            try:
                with Journal(out) as journal:
                    os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
                    assert journal.work.names() == ["lock"]
                    alone.unlink()
                    taken += 1
            except readers.OutputError as error:
                assert "another command is writing here" in str(error), error

    with ExitStack() as four:
        for _ in range(4):
            four.enter_context(forked(take_turns))
    assert list(out.iterdir()) == [], "a working folder was left"
    print(f"\n{4 * turns} turns of four processes")


def test_a_changed_source_does_not_mix_with_the_old_one(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for number in range(8):
        (source / "c").mkdir(parents=True, exist_ok=True)
        (source / "c" / f"{number}.jpg").write_bytes(make_jpeg(number))
    (source / "c/7.jpg").write_bytes(b"broken")
    options = by_subject({}, to="tar", output=tmp_path / "out", workers=1, samples=2)
    with pytest.raises(readers.BadSampleError):
        packer.convert(source, **options)
    (source / "c/7.jpg").write_bytes(make_jpeg(7))
    with pytest.raises(readers.SourceError, match=r"7\.jpg: has changed since it was listed.*overwrite=True"):
        packer.convert(source, **options)
    assert packer.convert(source, overwrite=True, **options).shards_resumed == 0
    assert packer.verify(tmp_path / "out", against=source, workers=1).ok


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_a_file_size_limit_is_one_clear_error(tree: Path, tmp_path: Path, to: str) -> None:
    """RLIMIT_FSIZE stands for a full disk: writes fail in the middle of a shard."""

    def convert() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        with pytest.raises(readers.OutputError, match=r"File too large; make room and run the same command again"):
            packer.convert(tree, to=to, output=tmp_path / "out", run=packer.Run(workers=1))

    in_child(convert)
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(left) == ["listing", "lock", "plan.json"]
    packer.convert(tree, to=to, output=tmp_path / "out", run=packer.Run(workers=1))
    assert packer.verify(tmp_path / "out", against=tree, workers=1).ok


def test_a_full_filesystem(tree: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with pytest.raises(readers.OutputError, match=r"No space left on device") as caught:
            packer.convert(
                tree, to="tar", output=small / "out", run=packer.Run(workers=2), shards=packer.Shards(samples=4)
            )
        assert caught.value.errno == errno.ENOSPC
        assert not (small / "out/dataset.json").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        assert (
            packer.convert(
                tree, to="tar", output=small / "out", run=packer.Run(workers=2), shards=packer.Shards(samples=4)
            ).shards_resumed
            > 0
        )
        assert files_of(small / "out") == reference(tree, tmp_path / "reference")
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_filesystem_that_is_full_at_any_moment_of_an_hdf5_shard(tmp_path: Path) -> None:
    """The HDF5 library writes its structures when it closes a file, and reports system errors in its own way."""
    tree = tree_of(tmp_path / "in", {f"a/{number}.jpg": make_jpeg(number, (256, 256)) for number in range(12)})
    payload, small, ended = sum(path.stat().st_size for path in tree.rglob("*.jpg")), tmp_path / "small", set()
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        for room in range(payload, payload + 400_000, 4096):
            (small / "fill").write_bytes(bytes(shutil.disk_usage(small).free - room))
            try:
                packer.convert(tree, to="hdf5", output=small / "out", run=packer.Run(workers=1))
                ended.add("packed")
            except readers.OutputError as error:
                ended.add("full" if "No space left on device; make room and run" in str(error) else "known before")
            (small / "fill").unlink()
            shutil.rmtree(small / "out", ignore_errors=True)
    finally:
        subprocess.run(["umount", small], check=True)
    assert ended == {"known before", "full", "packed"}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_crash_at_every_step_that_changes_the_disk(tree: Path, tmp_path: Path, replaced: bool) -> None:
    """After any step: no set looks complete that is not, and the same command ends with the same bytes."""
    options = by_subject({}, to="tar", workers=1, samples=40)
    expected = files_of(packer.convert(tree, output=tmp_path / "reference", **options).output)
    old = packer.convert(tree, to="tfrecord", output=tmp_path / "old", run=packer.Run(workers=1)).output
    crashes = 0
    for step in range(1, 400):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        if replaced:
            shutil.copytree(old, out)
        crashed = crashes_at(step, partial(packer.convert, tree, output=out, overwrite=replaced, **options))
        if (out / "dataset.json").exists():
            assert packer.verify(out, workers=1).ok, f"an incomplete set looks complete after step {step}"
        if not crashed:
            break
        crashes += 1
        packer.convert(tree, output=out, overwrite=replaced, **options)
        assert files_of(out) == expected, f"after a crash at step {step}"
    else:
        pytest.fail("the conversion never got through")
    assert crashes > 40
