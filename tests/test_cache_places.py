"""Where a cache cannot be opened as asked for, training continues: under another name or without it, with a warning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cached_sources import images
from namespaces import run_with_dev_shm

import readers
from cache import SharedByteCache
from cache.errors import CacheDirectoryError
from cache.filesystem import cache_budget

OPEN: dict[str, Any] = {"fingerprint": "set", "kind": "encoded", "slots": 8, "capacity_bytes": 4096, "job": "test"}


@pytest.fixture
def base(packed: Path) -> Iterator[Any]:
    with readers.open(packed, "train") as reader:
        yield reader


def name_of(folder: Path) -> Path:
    """Where a segment of these tests would be."""
    with SharedByteCache.open(**OPEN, directory=folder):
        (path,) = folder.iterdir()
    return path


def take_name(path: Path) -> None:
    """As anybody who may write to /dev/shm can do."""
    if os.geteuid() == 0:
        path.touch(0o600)
        os.chown(path, 12345, -1)
    else:
        path.symlink_to("elsewhere")


# --- names ---------------------------------------------------------------------------------------------------------
def test_a_name_of_another_user_blocks_no_process(tmp_path: Path) -> None:
    path = name_of(tmp_path)
    take_name(path)
    with pytest.warns(UserWarning, match="made under another name.*expected -rw|under another name.*not a segment"):
        first = SharedByteCache.open(**OPEN, directory=tmp_path)
    with pytest.warns(UserWarning, match="under another name"), SharedByteCache.open(**OPEN, directory=tmp_path) as two:
        assert first.put(3, b"x") and two.get(3) == b"x", "all processes meet under the other name"
    first.close()
    assert list(tmp_path.iterdir()) == [path], "what is not ours is left alone"


def test_a_reader_passes_through_where_all_names_are_in_use(base: Any, tmp_path: Path) -> None:
    """With one warning; the cache itself raises an error of this project."""
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = readers.cached(base, "1MiB", directory=tmp_path, job="test")
        if not reader.stats().capacity_bytes:
            break
        (path,) = [path for path in tmp_path.iterdir() if path.lstat().st_uid == os.geteuid() and not path.is_symlink()]
        reader.close()
        take_name(path)
        assert len(list(tmp_path.iterdir())) < 10, "names must end"
    with pytest.warns(UserWarning, match="so everything passes through") as warned:
        reader = readers.cached(base, "1MiB", directory=tmp_path, job="test")
    assert len(warned) == 1 and images(reader) == images(base) and reader.stats().kept == 0


@pytest.mark.parametrize("capacity", ["auto", "1MiB", 0.5])
def test_a_reader_passes_through_without_the_directory(base: Any, tmp_path: Path, capacity: Any) -> None:
    with pytest.warns(UserWarning, match="passes through.*No such file.*another tmpfs") as warned:
        reader = readers.cached(base, capacity, directory=tmp_path / "none", job="test")
    assert len(warned) == 1 and images(reader) == images(base)
    for call in (lambda: cache_budget(tmp_path / "none").bytes, lambda: open_in(tmp_path / "none")):
        with pytest.raises(CacheDirectoryError, match="No such file") as caught:
            call()
        assert isinstance(caught.value, readers.PackerError) and isinstance(caught.value, OSError)


def open_in(folder: Path) -> SharedByteCache:
    return SharedByteCache.open(**OPEN, directory=folder)


# --- makers that were stopped or killed ----------------------------------------------------------------------------
STUCK = """
import os, signal, sys
from cache import SharedByteCache
if sys.argv[2] == "fallocate":
    os.posix_fallocate = lambda *_: (print(flush=True), os.kill(os.getpid(), getattr(signal, sys.argv[3])))
else:
    os.link = lambda *_: (print(flush=True), os.kill(os.getpid(), getattr(signal, sys.argv[3])))
given = {"fingerprint": "set", "slots": 8, "capacity_bytes": 4096, "job": "test"}
SharedByteCache.open(kind=sys.argv[4], directory=sys.argv[1], **given)
"""


def stuck(folder: Path, at: str, how: str, kind: str = "encoded") -> subprocess.Popen[bytes]:
    """A process that makes a segment and meets a signal before that call."""
    process = subprocess.Popen([sys.executable, "-c", STUCK, folder, at, how, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    return process


def test_a_stopped_maker_blocks_others_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.shared.file.STANDSTILL_SECONDS", 0.2)
    with stuck(tmp_path, "fallocate", "SIGSTOP") as process:
        try:
            with pytest.warns(UserWarning, match=r"another name.*no progress for 0.2 s; it may have been stopped"):
                first = open_in(tmp_path)
            with pytest.warns(UserWarning, match="another name"), open_in(tmp_path) as second:
                assert first.put(0, b"x") and second.get(0) == b"x", "those that continue share one"
            first.close()
        finally:
            process.kill()
    with open_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [], "what the stopped one left goes with the next"


@pytest.mark.parametrize("at", ["fallocate", "link"])
def test_the_next_cache_removes_what_killed_makers_leave(tmp_path: Path, at: str) -> None:
    """Of any data set: that one may never be opened again."""
    with stuck(tmp_path, at, "SIGKILL", kind="of another set") as process:
        assert process.wait(300) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with open_in(tmp_path):
        assert left not in tmp_path.iterdir(), f"{left} stays for ever"


# --- /dev/shm ------------------------------------------------------------------------------------------------------
TRAIN = """
import sys, warnings, readers
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    reader = readers.cached(readers.open(sys.argv[1], "train"), job="test")
for warning in warned:
    print(warning.message, file=sys.stderr)
data = [bytes(image) for image in reader.read_many(range(36))]
assert data == [bytes(image) for image in reader.read_many(range(36))] and len(data) == 36
stats = reader.stats()
print(len(warned), stats.kept, stats.hits)
"""


def test_training_works_without_dev_shm(packed: Path, tmp_path: Path) -> None:
    done = run_with_dev_shm("", tmp_path / "dev", sys.executable, "-c", TRAIN, packed)
    assert (done.returncode, done.stdout) == (0, "1 0 0\n"), done.stderr
    assert "passes through" in done.stderr and "/dev/shm" in done.stderr


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_commands_work_without_dev_shm(tree: Path, packed: Path, tmp_path: Path, command: str) -> None:
    """Worker processes share locks there, so one process does the work, and says why."""
    more = [tree, "-o", tmp_path / "out", "--to", "tar"] if command == "convert" else [packed]
    words = [sys.executable, "-m", "packer", command, *more, "--workers", "2"]
    done = run_with_dev_shm("", tmp_path / "dev", *words)
    assert done.returncode == 0, done.stderr
    assert "this process does all the work; mount a tmpfs there" in done.stderr
    assert command == "verify" or (tmp_path / "out" / "dataset.json").exists()


NO_FILES = """
import sys, tempfile, packer
def made(*_, **__):
    raise AssertionError("a file that a kill would leave")
tempfile.mkstemp = tempfile.mkdtemp = made
shards, run = packer.Shards(samples=9), packer.Run(workers=2)
print(packer.convert(sys.argv[1], "tar", sys.argv[2], shards=shards, run=run).samples)
"""


def test_workers_share_no_file_that_a_kill_would_leave(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_FILES, str(tree), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "45\n"), done.stderr


def test_a_small_dev_shm_is_used_with_a_warning(packed: Path, tmp_path: Path) -> None:
    """A container's 64 MiB, here as much smaller than the set as that is than ImageNet."""
    done = run_with_dev_shm("size=208k", tmp_path / "dev", sys.executable, "-c", TRAIN, packed)
    assert done.returncode == 0, done.stderr
    warned, kept, hits = map(int, done.stdout.split())
    assert warned == 1 and "--shm-size" in done.stderr and "--ipc=host" in done.stderr, done.stderr
    assert kept == hits > 0, f"it kept {kept} of 36 samples: {done.stderr}"
