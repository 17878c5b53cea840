"""The shared cache where things go wrong: damaged and foreign files, no room, users that are killed, what is left."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites.shared_caches import CAPACITY, SLOTS, sample

import cache
from cache import SharedByteCache
from cache.errors import CacheFullError
from cache.filesystem import cache_budget
from cache.locks import ByteLocks
from cache.shared.layout import Layout, user_byte
from packer.testing.children import killed_in_child

LAYOUT = Layout(SLOTS, CAPACITY)
TAIL_AT = 1032
NAME = "packer-cache-{}-0123456789abcdef01234567"


def open_in(folder: Path, **options: Any) -> SharedByteCache:
    given = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY, "job": "7"}
    return SharedByteCache.open(**{**given, "directory": folder, **options})


def left_by_a_crash(folder: Path, **options: Any) -> Path:
    """A file with all slots filled, whose only user was killed."""

    def fill_and_die() -> None:
        cache = open_in(folder, **options)
        for slot in range(SLOTS):
            assert cache.put(slot, sample(slot))
        os.kill(os.getpid(), signal.SIGKILL)

    killed_in_child(fill_and_die)
    (path,) = folder.iterdir()
    return path


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def read_all(cache: SharedByteCache) -> int:
    """Every slot has its own bytes or none, and can be filled if there is room; how many there were."""
    found = 0
    for slot in range(SLOTS):
        data = cache.get(slot)
        assert data is None or data == sample(slot), f"slot {slot} has foreign bytes"
        found += data is not None
        if data is None and cache.put(slot, sample(slot)):
            assert cache.get(slot) == sample(slot)
    assert all(cache.get(slot) in (None, sample(slot)) for slot in range(SLOTS))
    return found


def test_what_a_crash_left_is_checked_and_taken_over(tmp_path: Path) -> None:
    def read_and_die() -> None:
        cache = open_in(tmp_path)
        assert cache.get(1) == sample(1)
        os.kill(os.getpid(), signal.SIGKILL)

    path = left_by_a_crash(tmp_path)
    word = struct.unpack("=Q", path.read_bytes()[LAYOUT.words_at + 8 * 5 :][:8])[0]
    for _ in range(2):  # crash after crash
        killed_in_child(read_and_die)
    patch(path, word >> 30 << 6, b"!")
    with open_in(tmp_path) as cache:
        assert cache.present().all() and not cache.put(4, b"x") and cache.get(4) == sample(4)
        assert cache.get(5) is None and cache.stats().dropped == 1 and not cache.has(5)
        assert cache.put(5, sample(5)) and cache.check(5)
        assert read_all(cache) == SLOTS
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("crashed", [True, False], ids=["crashed", "closed"])
def test_flipped_bits(tmp_path: Path, crashed: bool) -> None:
    """Anywhere in header and table, and in the bytes after a crash: an error or a miss, never wrong bytes."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        if crashed:
            path = left_by_a_crash(tmp_path)
        else:
            with open_in(tmp_path, persist=True) as cache:
                read_all(cache)
            (path,) = tmp_path.iterdir()
        parts = [(0, 1100), (LAYOUT.words_at, LAYOUT.arena_at)] + [
            (LAYOUT.arena_at, LAYOUT.arena_at + 90_000)
        ] * crashed
        low, high = parts[rng.integers(len(parts))]
        data = bytearray(path.read_bytes())
        for at in rng.integers(low, high, size=3):
            data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the cache is made under another name")
            with open_in(tmp_path) as cache:
                read_all(cache)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("words", ["overlapping", "outside", "into the table", "behind the tail"])
def test_wrong_offsets(tmp_path: Path, words: str) -> None:
    """A damaged table yields neither foreign bytes nor a fill over other samples."""
    path = left_by_a_crash(tmp_path)
    at = LAYOUT.words_at
    if words == "overlapping":
        patch(path, at, path.read_bytes()[at + 8 : at + 16])
    elif words == "behind the tail":
        patch(path, TAIL_AT, struct.pack("=Q", LAYOUT.arena_at + 64))
    else:
        offset = LAYOUT.total_bytes if words == "outside" else 4096
        patch(path, at, struct.pack("=Q", (offset // 64) << 30 | 200))
    with open_in(tmp_path) as cache:
        read_all(cache)
        assert all(cache.get(slot) == sample(slot) for slot in range(SLOTS))


def test_wrong_words_while_it_is_in_use(tmp_path: Path) -> None:
    with open_in(tmp_path) as cache:
        cache.put(0, b"x")
        (path,) = tmp_path.iterdir()
        for offset, length in ((0, 5), (1 << 39, 5), (LAYOUT.total_bytes, 1), (LAYOUT.arena_at, CAPACITY + 99)):
            word = struct.pack("=Q", (offset // 64) << 30 | length)
            patch(path, LAYOUT.words_at + 8, word)
            assert cache.get(1) is None and cache.get(0) == b"x"
            patch(path, LAYOUT.words_at + 8, word)
            assert not cache.check(1) and not cache.has(1)
        assert cache.put(1, b"y") and cache.get(1) == b"y"
        patch(path, LAYOUT.crcs_at + 4, b"\0\0\0\0")
        assert not cache.check(1) and cache.get(1) is None


@pytest.mark.parametrize("size", [0, 7, 100, LAYOUT.arena_at, LAYOUT.total_bytes - 1, LAYOUT.total_bytes + 1])
def test_a_truncated_file_is_replaced(tmp_path: Path, size: int) -> None:
    os.truncate(left_by_a_crash(tmp_path), size)
    with open_in(tmp_path) as cache:
        assert cache.capacity_bytes == CAPACITY and read_all(cache) == 0


def test_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    with open_in(tmp_path):
        (path,) = tmp_path.iterdir()
    other = tmp_path / "other"
    makers: list[Callable[[], object]] = [
        lambda: path.symlink_to(other),
        lambda: path.mkdir(),
        lambda: os.mkfifo(path, 0o600),
        lambda: path.write_bytes(b"other bytes") and path.chmod(0o600),
        lambda: path.touch(0o644),
    ]
    if os.geteuid() == 0:
        makers.append(lambda: (path.touch(0o600), os.chown(path, 12345, -1)))
    for make in makers:
        make()
        before = path.lstat()
        with pytest.warns(UserWarning, match="made under another name"), open_in(tmp_path) as made:
            assert made.put(0, b"x") and made.get(0) == b"x"
        assert cache.clean_caches(tmp_path, all=True) == []
        assert path.lstat() == before and not other.exists()
        path.rmdir() if path.is_dir() else path.unlink()


def test_another_version_is_not_attached(tmp_path: Path) -> None:
    with open_in(tmp_path) as cache:
        (path,) = tmp_path.iterdir()
        patch(path, 8, struct.pack("=I", 2))
        with pytest.warns(UserWarning, match="version 1"), open_in(tmp_path) as other:
            assert other.get(0) is None
        assert cache.put(0, b"x") and cache.get(0) == b"x"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount a tmpfs: {error}")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode().strip()}")
    yield folder
    gc.collect()
    subprocess.run(["umount", "-l", str(folder)], timeout=300, check=True)


def test_a_full_tmpfs(small_tmpfs: Path) -> None:
    with pytest.raises(CacheFullError, match="no room for a cache segment") as caught:
        open_in(small_tmpfs, capacity_bytes=8 << 20)
    assert caught.value.errno and list(small_tmpfs.iterdir()) == []
    with open_in(small_tmpfs, capacity_bytes=2 << 20) as cache:
        with pytest.raises(CacheFullError):
            open_in(small_tmpfs, capacity_bytes=2 << 20, kind="other")
        with pytest.raises(OSError):
            (small_tmpfs / "rest").write_bytes(bytes(4 << 20))
        stored = [slot for slot in range(SLOTS) if cache.put(slot, sample(slot, 100_000))]
        assert len(stored) == 20 and all(cache.get(slot) == sample(slot, 100_000) for slot in stored)


def test_the_budget(small_tmpfs: Path) -> None:
    assert cache_budget(small_tmpfs).bytes == 2 << 20, "half of it is margin"
    assert cache_budget(small_tmpfs).is_cramped and not cache_budget().is_cramped
    assert 0 <= cache_budget().bytes < cache.available_memory_bytes() + (1 << 30)
    assert 0 <= cache_budget(None).bytes < cache.available_memory_bytes() + (1 << 30)


def test_list_and_clean(tmp_path: Path) -> None:
    (tmp_path / "packer-cache-0-not").write_bytes(b"")
    (tmp_path / "data").write_bytes(b"x")
    half_made = tmp_path / f"{NAME.format(os.geteuid())}.0123456789abcdef"
    left_by = tmp_path / "crash"
    left_by.mkdir()
    left_by_a_crash(left_by).rename(tmp_path / NAME.format(os.geteuid()))
    with open_in(tmp_path, kind="warm", persist=True) as warm:
        warm.put(0, b"x")
    with open_in(tmp_path, kind="used") as used:
        half_made.touch(0o600)
        used.count(hits=7)
        assert used.put(3, sample(3))
        infos = {info.kind: info for info in cache.list_caches(tmp_path) if info.slots}
        assert set(infos) == {"encoded", "warm", "used"} and len(cache.list_caches(tmp_path)) == 4
        info = infos["used"]
        assert (info.job, info.fingerprint, info.uid, info.slots) == ("7", "set", os.geteuid(), SLOTS)
        assert info.in_use and info.users == (os.getpid(),) and info.stats.hits == 7 and info.stats.users == 1
        assert info.capacity_bytes == CAPACITY and info.used_bytes == used.used_bytes and 0 <= info.age_s < 600
        assert not infos["warm"].in_use and infos["warm"].persist and infos["warm"].users == ()
        removed = cache.clean_caches(tmp_path)
        assert {info.kind for info in removed} == {"encoded", ""} and used.get(3) == sample(3)
        assert {info.kind for info in cache.clean_caches(tmp_path, all=True)} == {"warm"}
        assert [info.kind for info in cache.list_caches(tmp_path)] == ["used"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crash", "data", "packer-cache-0-not"]


def test_sigterm(tmp_path: Path) -> None:
    """By default it leaves the file for the next user; who asks for it leaves nothing, and still dies of the signal."""
    script = (
        "import sys, os, signal, cache; {}; it = cache.SharedByteCache.open(fingerprint='f', kind='k', slots=3,"
        "capacity_bytes=99, directory=sys.argv[1]); print(flush=True); signal.pause()"
    )
    chained = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); cache.remove_on_sigterm()"
    for asked, code, left in (("pass", -15, 1), ("cache.remove_on_sigterm()", -15, 0), (chained, 5, 0)):
        command = [sys.executable, "-c", script.format(asked), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            process.terminate()
            assert process.wait(300) == code
        assert len(list(tmp_path.iterdir())) == left
        assert len(cache.clean_caches(tmp_path)) == left


def test_no_descriptor_and_no_mapping_is_left(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("packer-cache")

    gc.collect()
    before = counts()
    for backend in ("file", "memfd"):
        for _ in range(3):
            cache = open_in(tmp_path, backend=backend)
            cache.put(0, b"x")
            view = cache.get(0)
            cache.close()
            assert view == b"x"
    del cache, view
    gc.collect()
    assert counts() == before


def test_numbers_run_out(tmp_path: Path) -> None:
    """Beyond 1022 users one reads and does not fill."""
    with open_in(tmp_path) as cache:
        cache.put(0, b"x")
        (path,) = tmp_path.iterdir()
        lock = ByteLocks(os.open(path, os.O_RDWR))
        for number in range(2, 1023):
            assert lock.try_exclusive(user_byte(number))
        with open_in(tmp_path) as onlooker:
            assert onlooker.get(0) == b"x" and not onlooker.put(1, b"y")
            onlooker.count(hits=1)
            assert onlooker.stats().hits == 0
