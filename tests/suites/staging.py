"""Processes that stage a set slowly, the state of a target, and the expected content of a copy."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import files_of

import packer
import readers
from readers.layout import DOCUMENTS

DEADLINE = 300.0
SLOWLY = 60_000  # bytes a second: the small set takes some seconds

SCRIPT = """
import json, sys, time
import readers
source, to, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
linger = options.pop("linger", 0)
try:
    with (staging := readers.stage(source, to, **options)) as local:
        print(json.dumps({"path": str(local), **vars(staging.counts)}), flush=True)
        with readers.open(local, "train", fallback=source) as reader:
            print(json.dumps([len(reader.read(i)) for i in range(len(reader))]), flush=True)
        time.sleep(linger)
except readers.PackerError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(1)
"""


def staged(source: Path | str, target: Path, **options: Any) -> Path:
    """Stage a set and release the copy, which stays on disk."""
    with readers.stage(source, target, **options) as local:
        return local


def refused(message: str, source: Path | str, target: Path, **options: Any) -> None:
    """Check that staging fails with this message."""
    with pytest.raises(readers.StagingError, match=message):
        staged(source, target, **options)


@contextlib.contextmanager
def tmpfs(folder: Path, size: str, inodes: str = "0") -> Iterator[Path]:
    """A tmpfs of this size. Skips the test without the right to mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "tmpfs", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount a tmpfs: {error}")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", folder], timeout=300, check=True)


def size_of(path: Path) -> int:
    """The bytes of the staged files of a set or a copy, without the records of staging."""
    return sum(len(data) for name, data in staged_files_of(path).items() if ".staging" not in Path(name).parts)


def start(source: Path, to: Path | str, environ: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """A process in a new session that stages and reads."""
    command = [sys.executable, "-c", SCRIPT, str(source), str(to), json.dumps(options)]
    env = {**os.environ, **(environ or {})}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=env
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The results of a process from `start`, which must have succeeded."""
    out, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    staged: dict[str, Any] = json.loads(out.splitlines()[0])
    return staged


def wait_for(condition: Callable[[], Any], why: str) -> Any:
    end = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {DEADLINE} s for {why}"
        time.sleep(0.005)
    return value


def copy_of(to: Path) -> Path | None:
    """The only copy in a target."""
    copies = [path.parent for path in to.glob("packer-staged-*/*/.staging")]
    return copies[0] if copies else None


def leader_of(to: Path) -> int | None:
    """The process that is copying now, by the names of its temporary files."""
    parts = list(to.glob("packer-staged-*/*/.staging/part-*"))
    return int(parts[0].name.split("-")[1]) if parts else None


def staged_files_of(root: Path) -> dict[str, bytes]:
    """The files of a set that are staged: all but those for readers without packer."""
    return {path: data for path, data in files_of(root).items() if path not in DOCUMENTS}


def assert_whole(local: Path, source: Path) -> None:
    """Check that a copy holds the bytes of its source and no unfinished files."""
    copied = {path: data for path, data in files_of(local).items() if not path.startswith(".staging/")}
    assert copied == staged_files_of(source)
    assert not list((local / ".staging").glob("part-*"))
    assert packer.verify(local, workers=1).ok
    with readers.open(local, "train") as copy, readers.open(source, "train") as original:
        assert [copy.read(i) for i in range(len(copy))] == [original.read(i) for i in range(len(original))]
        assert copy.fingerprint == original.fingerprint
