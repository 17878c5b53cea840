"""Commands that are killed, run out of space or run twice: no partial result looks complete, no data is lost, and the
same command ends with the same bytes.

TRIALS (default 200) is the number of kills of each real command in `make test-faults`; SEED makes a run repeatable.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import convert, files_of, make_jpeg, tree_of
from suites.programs import run_packer, run_python

import packer
import readers
from cache.messages import Silent
from packer.conversion.journal import Journal
from packer.testing.children import crashes_at, end_of, forked, in_child
from packer.testing.engines import DEADLINE, Unsendable, parts, wait_for
from packer.workers import Workers, run_shards

TRIALS = int(os.environ.get("TRIALS", "200"))
SEED = int(os.environ.get("SEED", "0"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
ROOT = Path(packer.__file__).resolve().parent.parent
SLOWLY = """
import sys, time, packer
from packer.sources.folder import FolderReader, FolderSource

class Reader(FolderReader):
    count = 0

    def read(self, place, arena):
        self.count += 1
        time.sleep(0.01 if self.count < 8 else 0.3)  # two shards or so, and then hardly more
        return super().read(place, arena)

class Source(FolderSource):
    def open(self):
        return Reader(str(self.root))

tree, out, to = sys.argv[1:]
packer.convert(Source(tree), to, out, shards=packer.Shards(samples=4), run=packer.Run(workers=2))
"""


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --- one command -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("to", "how"), [("hdf5", "killed"), ("tfrecord", "a killed worker"), ("tar", "interrupted")])
def test_a_conversion_that_ends_early_is_resumed(tree: Path, tmp_path: Path, to: str, how: str) -> None:
    """No other process writes meanwhile; the same command continues at the first missing shard; until then it is no
    set."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOWLY, tree, out, to]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: parts(out) >= 2, "two whole shards")
    workers = children_of(process.pid)
    for overwrite in (False, True):
        with pytest.raises(readers.OutputError, match="another command is writing here"):
            convert(tree, out, to, samples=4, overwrite=overwrite)
    if how == "killed":
        process.kill()
    elif how == "interrupted":
        os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
    else:
        os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    if how == "a killed worker":
        assert "WorkerError: a worker process died" in errors and "run the same command again" in errors
    wait_for(lambda: not any(map(alive, workers)), "the workers to end")
    assert [path.name for path in out.iterdir()] == [".packing"], "shards or dataset.json exist already"
    with pytest.raises(readers.DatasetError, match=r"unfinished conversion.*same  packer convert  again"):
        readers.open(out)
    assert convert(tree, out, to, samples=4).shards_resumed >= 2
    convert(tree, tmp_path / "reference", to, samples=4)
    assert files_of(out) == files_of(tmp_path / "reference")


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.faults)])
@pytest.mark.parametrize("how", ["a new set", "a set replaced", "tasks", "files extracted"])
def test_a_crash_at_each_step_that_changes_the_disk(tree: Path, tmp_path: Path, how: str, every: int) -> None:
    """After each crash no incomplete set or file looks complete, and the same commands end with the same bytes."""
    out, old = tmp_path / "out", convert(tree, tmp_path / "old", "tfrecord").output

    def work() -> None:
        if how == "tasks":
            for number in range(2):
                convert(tree, out, samples=40, task=(number, 2))
            packer.commit(out)
        elif how == "files extracted":
            packer.extract(old, out, workers=1)
        else:
            replaces = how == "a set replaced" and (out / "dataset.json").exists()  # a commit has moved the folder away
            convert(tree, out, samples=40, overwrite=replaces)

    def begin() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if how == "a set replaced":
            shutil.copytree(old, out)

    begin()
    work()
    whole = files_of(out)
    for step in range(1, 400, every):
        begin()
        crashed = crashes_at(step, work)
        if how == "files extracted":
            files = files_of(out).items() if out.exists() else ()
            partial = {name for name, data in files if data != whole.get(name)}
            assert all(name.startswith(".extracting/") for name in partial), f"after a crash at step {step}"
        elif (out / "dataset.json").exists():
            assert packer.verify(out, workers=1).ok, f"an incomplete set looks complete after step {step}"
        if not crashed:
            break
        work()
        assert files_of(out) == whole, f"after a crash at step {step}"
    assert 40 < step < 390


class SentOnce:
    """Passes the check, and cannot be pickled again for the workers."""

    pickled = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        SentOnce.pickled += 1
        if SentOnce.pickled > 2:
            time.sleep(0.2)  # the run is ending by then
        if SentOnce.pickled > 1:
            raise TypeError("not again")
        return SentOnce, ()


def test_a_source_that_cannot_be_sent_to_workers_ends_the_run(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(readers.SourceError, match=r"cannot be sent to worker processes: not for others; use workers=1"):
        convert(Unsendable(tree), tmp_path / "out", workers=2)
    assert convert(Unsendable(tree), tmp_path / "out").samples == 45

    def work() -> str:
        try:
            run_shards(print, [source := SentOnce()] * 8, 8, Workers(2), Silent(), (8, 8), source=source)
        except TypeError as error:
            return str(error)
        return "no error"

    assert end_of(work, ("not again",)) == "not again"


@pytest.mark.parametrize("turns", [50, pytest.param(5000, marks=pytest.mark.faults)])
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


# --- no room -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", ["hdf5", "tar"])
def test_a_file_size_limit_is_one_clear_error(tree: Path, tmp_path: Path, to: str) -> None:
    """RLIMIT_FSIZE stands for a full disk: writes fail in the middle of a shard."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        with pytest.raises(readers.OutputError, match=r"File too large; free space and run the same command again"):
            convert(tree, tmp_path / "out", to)

    in_child(limited)
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(left) == ["listing", "lock", "plan.json"]
    convert(tree, tmp_path / "out", to)
    assert packer.verify(tmp_path / "out", against=tree, workers=1).ok


@contextmanager
def small_filesystem(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_filesystem(tree: Path, tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", "200k") as small:
        with pytest.raises(readers.OutputError, match=r"No space left on device") as caught:
            convert(tree, small / "out", samples=4, workers=2)
        assert caught.value.errno == errno.ENOSPC and not (small / "out/dataset.json").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        assert convert(tree, small / "out", samples=4).shards_resumed > 0
        convert(tree, tmp_path / "reference", samples=4)
        assert files_of(small / "out") == files_of(tmp_path / "reference")


@pytest.mark.parametrize("step", [8192, pytest.param(4096, marks=pytest.mark.faults)])
def test_a_filesystem_that_is_full_at_any_moment_of_an_hdf5_shard(tmp_path: Path, step: int) -> None:
    """The HDF5 library writes its structures when it closes a file, and reports system errors in its own format."""
    tree = tree_of(tmp_path / "in", {f"a/{number}.jpg": make_jpeg(number, (256, 256)) for number in range(12)})
    payload, ended = sum(path.stat().st_size for path in tree.rglob("*.jpg")), set()
    with small_filesystem(tmp_path / "small", "8m") as small:
        for room in range(payload, payload + 400_000, step):
            (small / "fill").write_bytes(bytes(shutil.disk_usage(small).free - room))
            try:
                convert(tree, small / "out", "hdf5")
                ended.add("packed")
            except readers.OutputError as error:
                ended.add("full" if "No space left on device; free space and run" in str(error) else "known before")
            (small / "fill").unlink()
            shutil.rmtree(small / "out", ignore_errors=True)
    assert ended == {"known before", "full", "packed"}


# --- real commands, killed at random -----------------------------------------------------------------------------
def kill(process: subprocess.Popen[str], choice: random.Random) -> str:
    """Send one signal to the whole group, the main process or one of its workers; returns a description."""
    number = choice.choice(SIGNALS)
    whom = choice.choice(("group", "main", "worker"))
    children = children_of(process.pid)
    try:
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(choice.choice(children) if whom == "worker" and children else process.pid, number)
    except ProcessLookupError:
        return "too late"
    return f"{number.name} {whom}"


def has_ended(group: int) -> bool:
    """Whether a group has no process left. Workers notice within moments that their parent has gone."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.faults
@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar", "tar --overwrite"])
def test_killed_at_any_moment(to: str, tmp_path: Path) -> None:
    """With --overwrite, another set exists before; afterwards the folder never has a mixture of both."""
    out, states = tmp_path / "out", []
    to, _, overwrite = to.partition(" ")
    for number in range(2):  # trees with the same names, whose files all differ between the two
        files = {
            f"{split}/{name}/{name}_{i:03d}.JPEG": make_jpeg(1000 * number + i, (96, 64))
            for split, count in (("train", 30), ("val", 6))
            for name in ("cat", "dog")
            for i in range(count + number)
        }
        tree = tree_of(tmp_path / f"tree{number}" / "images", files)
        states.append(files_of(convert(tree, tmp_path / f"set{number}", to, samples=9).output))
    old, whole = states

    def begin() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if overwrite:
            shutil.copytree(tmp_path / "set0", out)

    command = ["-m", "packer", "convert", tree, "--to", to, "-o", out, "--workers", 2, "--samples-per-shard", 9]
    command += [overwrite] if overwrite else []
    begin()
    started = time.monotonic()
    run_python(*command, timeout=DEADLINE, check=True)
    seconds = time.monotonic() - started
    choice = random.Random(f"{SEED} {to} {overwrite}")
    counts = {"ended": 0, "killed": 0}
    for trial in range(TRIALS):
        begin()
        words, quiet = [sys.executable, *map(str, command)], subprocess.DEVNULL
        process = subprocess.Popen(words, stdout=quiet, stderr=subprocess.PIPE, text=True, start_new_session=True)
        # The first tenth is the start of Python; most kills hit the work.
        time.sleep(seconds * choice.uniform(0.1, 1.1))
        how = kill(process, choice)
        _, errors = process.communicate(timeout=DEADLINE)
        wait_for(lambda: has_ended(process.pid), "the processes of the killed command to end")  # noqa: B023
        where = f"trial {trial}, {how}, status {process.returncode}"
        # Python's own output during its start does not count.
        is_packer = any(f"{ROOT / layer}/" in errors for layer in ("packer", "readers", "cache"))
        assert not is_packer or "Traceback" not in errors, f"{where}: {errors}"
        if (out / "dataset.json").exists():
            contents = {name: data for name, data in files_of(out).items() if not name.startswith(".packing/")}
            assert contents == whole or (overwrite and contents == old), f"{where}: neither the old nor the new set"
        again = run_packer(*command[2:], timeout=DEADLINE)
        assert again.returncode == 0 and files_of(out) == whole, f"{where}: {again.stderr}"
        counts["ended" if process.returncode == 0 else "killed"] += 1
    print(f"\n{to}: {TRIALS} trials: {counts}; the command takes {seconds:.2f} s")
    assert counts["killed"] > TRIALS // 3, f"too few commands were killed while they ran: {counts}"
