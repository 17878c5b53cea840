"""Staging that is killed, interrupted, signalled, out of space or misled, and by several nodes and jobs at once: a
clear end, no incomplete copy, no lost file. A node is a mount namespace with a tmpfs and Slurm's variables."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import files_of
from suites.programs import Notes, run_packer
from suites.staging import (
    DEADLINE,
    SCRIPT,
    SLOWLY,
    assert_whole,
    copy_of,
    leader_of,
    refused,
    result,
    size_of,
    staged,
    staged_files_of,
    start,
    tmpfs,
    wait_for,
)

import packer
import readers
from cache.errors import StagingSourceError
from cache.staging.session import Pace, transfer
from cache.staging.sources import FolderSource, StagedFile
from packer.testing.children import crashes_at
from readers.staging import StageOptions, set_files


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    """A set that a test may damage."""
    return Path(shutil.copytree(source, tmp_path / "own"))


def test_dying_leaders_are_followed(source: Path, tmp_path: Path) -> None:
    """Four processes; twice the copying one is killed after a random time."""
    processes = [start(source, tmp_path, bytes_per_second=SLOWLY, threads=2) for _ in range(4)]
    dice = random.Random(os.getpid())

    def leader() -> subprocess.Popen[str] | None:
        """The living leader: files of a killed one stay for a moment."""
        return next((process for process in processes if process.pid == leader_of(tmp_path)), None)

    for _ in range(2):
        first = wait_for(leader, "a leader")
        time.sleep(dice.uniform(0, 0.3))
        chosen = leader() or first  # unknown between two files
        chosen.kill()
        chosen.communicate()
        processes.remove(chosen)
    results = [result(process) for process in processes]
    assert {outcome["path"] for outcome in results} == {str(copy_of(tmp_path))}
    assert sum(outcome["found"] for outcome in results) > 0
    assert_whole(Path(results[0]["path"]), source)


def test_ctrl_c(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packer", "stage", source, "--target", tmp_path, "--bandwidth", f"{SLOWLY}B"]
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
    with readers.stage(source, tmp_path / "node", cleanup="atexit"):
        shutil.rmtree(tmp_path / "node")


def test_a_disk_that_is_too_small(source: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "80k") as small:
        refused(r"kB needed, .* kB free; a fraction of 0\.\d+ would fit; make", source, small)
        assert list(small.iterdir()) == []
    with tmpfs(tmp_path / "few", "10m", "20") as few:
        refused(r"inodes needed, \d+ free; make room", source, few)
    with tmpfs(tmp_path / "fixed", "10m") as fixed:
        subprocess.run(["mount", "-o", "remount,ro", fixed], check=True)
        refused(r"fixed: not writable; choose another directory with target=", source, fixed)


def test_a_disk_that_fills_up_during_staging(source: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "600k") as small:
        process = start(source, small, bytes_per_second=SLOWLY, threads=1)
        wait_for(lambda: len(list(small.glob("packer-staged-*/*/*.tar"))) >= 2, "two shards")
        with open(small / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 1
        assert "NoRoomError" in errors and "No space left on device during the copy; make room" in errors
        (small / "fill").unlink()
        with (staging := readers.stage(source, small)) as local:
            assert staging.counts.found >= 2
            assert_whole(local, source)


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
        refused(rf"has {len(good) - 1} bytes, expected {len(good)}", own, node)
        shard.write_bytes(good)
    assert_whole(staged(own, node), source)


@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "index"])
def test_a_damaged_copy_is_repaired(source: Path, tmp_path: Path, how: str) -> None:
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
    """After every step a copy that looks complete is complete, and the next staging gives the same bytes."""
    expected = staged_files_of(source)

    crashes = 0
    for step in (1, 2, 3, 4, 6, 8, 10, 12, 33, 85, 94, 98, 102, 106, 400):
        node = tmp_path / str(step)
        crashed = crashes_at(step, partial(staged, source, node, threads=1))
        crashes += crashed
        local = copy_of(node)
        if local is not None and (local / "dataset.json").exists():
            assert {name: data for name, data in files_of(local).items() if name[0] != "."} == expected, step
        assert_whole(staged(source, node), source)
    assert crashes >= 9 and not crashed


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


# Creates a file when ready; ends a second after the first SIGTERM; the exit status is the number of SIGTERMs.
COUNTS = """
import signal, sys, time
times = []
signal.signal(signal.SIGTERM, lambda number, frame: times.append(time.monotonic()))
open(sys.argv[1], "w").close()
while not times or time.monotonic() < times[0] + 1:
    time.sleep(0.01)
sys.exit(len(times))
"""
# Removes all copies below argv[1], and is killed at the third file.
KILLED = """
import os, pathlib, signal, sys
import packer
unlink, left = pathlib.Path.unlink, [3]
def counted(path, missing_ok=False):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(path, missing_ok=missing_ok)
pathlib.Path.unlink = counted
packer.clean_staged(target=sys.argv[1])
"""


# Gets a signal when staging is complete, but before the command was started.
BETWEEN = """
import os, signal, sys
from packer.cli.signals import CommandSignals
signals = CommandSignals(lambda: True, lambda: None)
with signals.handling():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.caught == signal.SIGTERM
    sys.exit(signals.run(("sleep", "600"), {}))
"""

# `packer` with these arguments, in a process where every `cat` but the first takes half a second until its exec.
SLOW_WITNESS = """
import subprocess, sys, time
from packer.cli import main
popen, started = subprocess.Popen, []
def slowly(arguments, **options):
    if arguments == ["cat"]:
        if started:
            options["preexec_fn"] = lambda: time.sleep(0.5)
        started.append(arguments)
    return popen(arguments, **options)
subprocess.Popen = slowly
main()
"""


def stage(source: Path, to: Path, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "packer", "stage", source, "--target", to, *arguments]
    env = {**os.environ, **environ}
    return subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, start_new_session=True, env=env)


def in_store(to: Path) -> list[str]:
    """The content of packer's directory in a target, apart from two administrative files."""
    names = sorted(path.name for store in to.glob("packer-staged-*") for path in store.iterdir())
    return [name for name in names if name not in (".packer-staged", "lock")]


def shown(*arguments: object) -> str:
    return run_packer("stage", *arguments, check=True).stdout


def test_signals_do_not_interrupt_the_cleanup(source: Path, tmp_path: Path) -> None:
    script = f"trap 'exit 0' TERM INT; touch {tmp_path / 'began'}; while true; do sleep 0.01; done"
    process = stage(source, tmp_path, "--cleanup", "atexit", "--", "bash", "-c", script)
    wait_for((tmp_path / "began").exists, "the command")
    end = time.monotonic() + DEADLINE
    while process.poll() is None:
        assert time.monotonic() < end, "the command does not end"
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.002)
    _, errors = process.communicate()
    assert "cleaned up: removed" in errors, errors
    assert in_store(tmp_path) == [], "a further signal interrupted the cleaning up"


def test_a_starting_process_does_not_keep_the_copy(source: Path, tmp_path: Path) -> None:
    """A signal to all processes ends the witness; its successor must not hold the copy's locks when COMMAND ends
    meanwhile."""
    script = f"trap 'exit 0' TERM; touch {tmp_path / 'began'}; while true; do sleep 0.01; done"
    arguments = ["stage", source, "--target", tmp_path, "--cleanup", "atexit", "--", "bash", "-c", script]
    command = [sys.executable, "-c", SLOW_WITNESS, *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for((tmp_path / "began").exists, "the command")
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0 and in_store(tmp_path) == [], errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_stopped_copying_is_cleaned_up(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    ran = tmp_path / "ran"
    process = stage(source, tmp_path, "--cleanup", "atexit", "--bandwidth", f"{SLOWLY}B", "--", "touch", ran)
    wait_for(lambda: leader_of(tmp_path), "copying")
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.003)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number and not ran.exists()
    assert "cleaned up: removed" in errors and "run the same command again" in errors and "Traceback" not in errors
    assert in_store(tmp_path) == []


@pytest.mark.parametrize("to_all", [True, False], ids=["to-all", "to-packer"])
def test_the_command_gets_a_signal_once(source: Path, tmp_path: Path, to_all: bool) -> None:
    """Whether the signal is sent to every process, as by some batch systems, or only to the first."""
    process = stage(source, tmp_path, "--", sys.executable, "-c", COUNTS, tmp_path / "began")
    wait_for((tmp_path / "began").exists, "the command")
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, f"{process.returncode} signals; {errors}"


def test_a_signal_just_before_the_command_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", BETWEEN], timeout=DEADLINE, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_killed_removal_is_shown_and_finished(source: Path, tmp_path: Path) -> None:
    staged(source, tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=DEADLINE, check=False)
    assert killed.returncode == -signal.SIGKILL and copy_of(tmp_path) is not None
    (left,) = in_store(tmp_path)
    assert left.startswith("removing-")
    (copy,) = packer.staged_copies(tmp_path)
    assert copy.leaving and not copy.in_use, copy
    assert 0 < copy.bytes < copy.wanted_bytes and Path(copy.path).name == left
    assert "half removed" in shown("ls", "--target", tmp_path) and left in shown("ls", "--target", tmp_path)
    assert f"would remove {copy.path}" in shown("clean", "--target", tmp_path, "--dry-run")
    assert in_store(tmp_path) == [left], "the dry run removed files"
    assert f"removed {copy.path}" in shown("clean", "--target", tmp_path)
    assert in_store(tmp_path) == [] and shown("ls", "--target", tmp_path) == "no staged copies\n"


def test_the_rank_that_copies_reports(source: Path, tmp_path: Path) -> None:
    """Any rank of a node may copy; of the other ranks only the first reports."""

    def said_by(rank: str) -> str:
        slurm = {"STEP_ID": "0", "PROCID": rank, "NTASKS": "2", "LOCALID": rank, "NODEID": "0", "NNODES": "1"}
        environ = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
        return run_packer("stage", source, "--target", tmp_path, env=environ, check=True).stderr

    output = said_by("1")
    assert f"staging to {tmp_path}" in output and "files copied" in output
    assert said_by("1") == "", "the first rank does not report the complete copy"
    assert "already there" in said_by("0")


NODES, RANKS = 3, 2
# Ranks of one node, started in its namespace; prints the files they staged and read, and the shards on the node, as
# JSON.
NODE = """
import json, os, subprocess, sys
node, nodes, ranks, script, source, to, options = json.loads(sys.argv[1])
processes = []
for local in range(ranks):
    slurm = {"JOB_ID": 7, "STEP_ID": 0, "PROCID": node * ranks + local, "NTASKS": nodes * ranks, "LOCALID": local,
             "NODEID": node, "NNODES": nodes, "TASKS_PER_NODE": f"{ranks}(x{nodes})", "TMPDIR": to}
    env = {**os.environ, **{f"SLURM_{name}": str(value) for name, value in slurm.items()}}
    command = [sys.executable, "-c", script, source, "$SLURM_TMPDIR", options]
    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True))
said = [process.communicate(timeout=300)[0].splitlines() for process in processes]
staged = [json.loads(lines[0]) for lines in said]
shards = sorted(name for name in os.listdir(staged[0]["path"]) if name.endswith(".tar"))
whole = {name: os.path.getsize(os.path.join(staged[0]["path"], name)) for name in shards}
print(json.dumps({"staged": staged, "read": [json.loads(lines[1]) for lines in said], "shards": whole}))
"""


def in_namespace(command: list[str], place: Path) -> list[str]:
    """A command with a private tmpfs at `place`, in new user, mount and network namespaces."""
    script = 'mount -t tmpfs -o size=20m tmpfs "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", script, str(place), *command]


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        command = in_namespace(["true"], tmp_path_factory.mktemp("probe"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if done.returncode:
        pytest.skip(f"no namespaces for this user: {done.stderr.strip()}")


@pytest.mark.usefixtures("namespaces")
def test_each_node_stages_its_part_once(source: Path, tmp_path: Path) -> None:
    options = json.dumps({"part": "node", "bytes_per_second": 4 * SLOWLY})
    nodes = []
    for node in range(NODES):
        arguments = json.dumps([node, NODES, RANKS, SCRIPT, str(source), str(tmp_path), options])
        command = in_namespace([sys.executable, "-c", NODE, arguments], tmp_path)
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    reports: list[dict[str, Any]] = []
    for process in nodes:
        out, errors = process.communicate(timeout=2 * DEADLINE)
        assert process.returncode == 0, errors
        reports.append(json.loads(out))
    files = set_files(source)
    for node, report in enumerate(reports):
        options = StageOptions(part=(node, NODES))
        expected = {file.path: file.bytes for file in files.shards(options)}
        assert report["shards"] == expected
        assert sorted(rank["copied"] > 0 for rank in report["staged"]) == [False] * (RANKS - 1) + [True]
        moved = sum(rank["copied_bytes"] for rank in report["staged"])
        assert moved == sum(expected.values()) + sum(f.bytes for f in [*files.index(options), files.head])
        assert report["read"] == [reports[0]["read"][0]] * RANKS and len(report["read"][0]) == 36
    assert len({rank["path"] for report in reports for rank in report["staged"]}) == 1
    assert list(tmp_path.iterdir()) == []  # it existed only in their namespaces


def test_two_jobs_stage_one_set_at_once(source: Path, tmp_path: Path) -> None:
    """With other options and other ends: bytes are copied once, and cleaning up leaves the files that the other job
    uses."""
    two = start(source, tmp_path, {"SLURM_JOB_ID": "2"}, cleanup="atexit", bytes_per_second=SLOWLY, linger=DEADLINE)
    wait_for(lambda: leader_of(tmp_path), "the one that copies")
    job = start(source, tmp_path, {"SLURM_JOB_ID": "1"}, cleanup="atexit", splits=["train"], bytes_per_second=SLOWLY)
    first = result(job)
    wait_for(lambda: all(copy.bytes == copy.wanted_bytes for copy in packer.staged_copies(tmp_path)), "the other job")
    local = Path(first["path"])
    wait_for((local / "dataset.json").exists, "the end of its copying")
    assert_whole(local, source)
    assert [copy.in_use for copy in packer.staged_copies(tmp_path)] == [True]
    two.terminate()  # a killed job cleans up nothing, and loses nothing
    out, _ = two.communicate(timeout=DEADLINE)
    second = json.loads(out.splitlines()[0])
    assert second["path"] == first["path"]
    assert first["copied_bytes"] + second["copied_bytes"] == size_of(source)
    with readers.stage(source, tmp_path, cleanup="atexit") as again:
        assert_whole(again, source)
    assert copy_of(tmp_path) is None
