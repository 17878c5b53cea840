"""Signals to `packer stage`: who gets them, and that cleaning up completes; what a kill leaves is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from suites.programs import run_packer
from suites.staging import DEADLINE, SLOWLY, copy_of, leader_of, staged, wait_for

import packer

# Says when it is ready; ends a second after the first SIGTERM, and its status is how many there were.
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


# Is signalled when all is there, but before its command was started.
BETWEEN = """
import os, signal, sys
from packer.cli.signals import CommandSignals
signals = CommandSignals(lambda: True, lambda: None)
with signals.handling():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.caught == signal.SIGTERM
    sys.exit(signals.run(("sleep", "600"), {}))
"""

# `packer` with the arguments given, in a process where every `cat` but the first takes half a second until its exec.
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
    """What our directory in a target holds, besides its own two files."""
    names = sorted(path.name for store in to.glob("packer-staged-*") for path in store.iterdir())
    return [name for name in names if name not in (".packer-staged", "lock")]


def shown(*arguments: object) -> str:
    return run_packer("stage", *arguments, check=True).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_number_of_signals_ends_the_cleaning_up(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    script = f"trap 'exit 0' TERM INT; touch {tmp_path / 'began'}; while true; do sleep 0.01; done"
    process = stage(source, tmp_path, "--cleanup", "atexit", "--", "bash", "-c", script)
    wait_for((tmp_path / "began").exists, "the command")
    end = time.monotonic() + DEADLINE
    while process.poll() is None:
        assert time.monotonic() < end, "it does not end"
        os.killpg(process.pid, number)
        time.sleep(0.002)
    _, errors = process.communicate()
    assert "cleaned up: removed" in errors, errors
    assert in_store(tmp_path) == [], "a further signal interrupted the cleaning up"


def test_a_process_that_is_being_started_does_not_keep_the_copy(source: Path, tmp_path: Path) -> None:
    """A signal to all ends the witness; its successor must not have the copy's locks when COMMAND ends meanwhile."""
    script = f"trap 'exit 0' TERM; touch {tmp_path / 'began'}; while true; do sleep 0.01; done"
    arguments = ["stage", source, "--target", tmp_path, "--cleanup", "atexit", "--", "bash", "-c", script]
    command = [sys.executable, "-c", SLOW_WITNESS, *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for((tmp_path / "began").exists, "the command")
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0 and in_store(tmp_path) == [], errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_copying_that_is_stopped_is_cleaned_up(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    ran = tmp_path / "ran"
    process = stage(source, tmp_path, "--cleanup", "atexit", "--bandwidth", SLOWLY, "--", "touch", ran)
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
    """Whether it is sent to every process, as some batch systems do, or to the one they started."""
    process = stage(source, tmp_path, "--", sys.executable, "-c", COUNTS, tmp_path / "began")
    wait_for((tmp_path / "began").exists, "the command")
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, f"{process.returncode} signals; {errors}"


def test_a_signal_just_before_the_command_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", BETWEEN], timeout=DEADLINE, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_removal_that_was_killed_is_shown_and_finished(source: Path, tmp_path: Path) -> None:
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
    assert in_store(tmp_path) == [left], "a dry run removes nothing"
    assert f"removed {copy.path}" in shown("clean", "--target", tmp_path)
    assert in_store(tmp_path) == [] and shown("ls", "--target", tmp_path) == "no staged copies\n"


def test_the_rank_that_copies_reports(source: Path, tmp_path: Path) -> None:
    """Whichever of a node's ranks it is; of the others only the first reports."""
    slurm = {"STEP_ID": "0", "PROCID": "1", "NTASKS": "2", "LOCALID": "1", "NODEID": "0", "NNODES": "1"}
    second = {f"SLURM_{name}": value for name, value in slurm.items()}
    _, errors = stage(source, tmp_path, **second).communicate(timeout=DEADLINE)
    assert f"staging to {tmp_path}" in errors and "files copied" in errors
    _, errors = stage(source, tmp_path, **second).communicate(timeout=DEADLINE)
    assert errors == "", "all is there, and the first rank says so"
    _, errors = stage(source, tmp_path, **{**second, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).communicate(
        timeout=DEADLINE
    )
    assert "already there" in errors
