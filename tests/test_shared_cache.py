"""The shared cache: the suite for segments in files, in anonymous memory and in an MPI window, and further promises of
each; damaged and foreign files, no room, killed users, many processes at once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from suites.programs import run_python
from suites.shared_caches import CAPACITY, HAS_MPI, MPIEXEC, SLOTS, SharedCacheSuite, sample
from suites.staging import tmpfs

import cache
from cache import SharedByteCache
from cache.errors import CacheDirectoryError, CacheFullError, ForeignCacheError
from cache.filesystem import cache_budget
from cache.locks import ByteLocks
from cache.shared.file import open_file
from cache.shared.layout import TABLE, Layout, Segment, user_byte
from packer.testing.children import in_child, killed_in_child

LAYOUT = Layout(SLOTS, CAPACITY)
TAIL_AT = 1032
NAME = "packer-cache-{}-0123456789abcdef01234567"
MANY, LIMIT_S = 300, 50
HERE = {"check": True, "timeout": 300, "cwd": Path(__file__).parent}


def open_in(folder: str | Path, **options: Any) -> SharedByteCache:
    defaults = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY, "job": "7"}
    return SharedByteCache.open(**{**defaults, "directory": folder, **options})


# --- promises beyond the suite --------------------------------------------------------------------------------------
class TestFile(SharedCacheSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> Any:
        self.folder = tmp_path
        yield
        if any(tmp_path.iterdir()):
            gc.collect()
        assert list(tmp_path.iterdir()) == [], "a segment was left behind"

    def open(self, **options: Any) -> SharedByteCache:
        return open_in(self.folder, **options)

    def test_caches_of_one_fingerprint_are_shared_and_others_are_not(self) -> None:
        with self.open() as cache, self.open(capacity_bytes=5) as same, pickle.loads(pickle.dumps(cache)) as pickled:
            assert cache.put(0, b"x") and same.get(0) == pickled.get(0) == b"x" and same.capacity_bytes == CAPACITY
            assert not same.put(0, b"y") and pickled.put(1, b"y") and same.stats().users == 3
            facts = self.the_file().stat()
            assert facts.st_mode & 0o777 == 0o600 and facts.st_uid == os.geteuid() and facts.st_nlink == 1
            assert facts.st_blocks * 512 >= CAPACITY, "the space is not reserved"
            for other in ({"fingerprint": "set2"}, {"kind": "decoded"}, {"slots": SLOTS + 1}, {"job": "8"}):
                with self.open(**other) as cache2:
                    assert cache2.get(0) is None and cache2.stats().users == 1
                    assert cache2.put(0, b"z") and cache.get(0) == b"x"

    def test_the_last_user_removes_the_file(self) -> None:
        first, second = self.open(), self.open()
        first.put(0, b"x")
        in_child(first.close)
        in_child(lambda: None)
        first.close()
        assert second.get(0) == b"x" and len(list(self.folder.iterdir())) == 1
        del second
        gc.collect()
        assert list(self.folder.iterdir()) == []
        with self.open() as cache:
            assert cache.get(0) is None

    def test_at_exit(self) -> None:
        """Workers end by multiprocessing, by a signal, and must not be the last users."""
        code = "import sys, test_shared_cache as it; it.keep_workers(sys.argv[1])"
        run_python("-W", "error", "-c", code, self.folder, **HERE)

    def test_a_worker_that_outlives_its_parent(self) -> None:
        """The worker is then the last user, and exits properly."""
        code = "import sys, test_shared_cache as it; it.orphan_a_worker(sys.argv[1])"
        assert run_python("-c", code, self.folder, **HERE).stdout == "last"

    def test_persisting(self) -> None:
        with self.open(persist=True) as cache:
            cache.put(0, b"x")
            cache.count(hits=1)
        for _ in range(2):
            with self.open() as cache:
                assert cache.get(0) == b"x" and cache.check(0) and cache.stats().hits == 1
                assert cache.stats().dropped == 0
        with self.open(capacity_bytes=2 * CAPACITY) as cache:
            assert cache.get(0) is None and cache.capacity_bytes == 2 * CAPACITY, "too small, so recreated"

    def test_options(self) -> None:
        for wrong in ({"slots": -1}, {"capacity_bytes": -1}, {"backend": "disk"}, {"capacity_bytes": 1 << 41}):
            with pytest.raises(ValueError):
                self.open(**wrong)
        with pytest.raises(ValueError, match="more than 896"):
            self.open(kind="k" * 900)
        with pytest.raises(CacheDirectoryError, match="No such file"):
            self.open(directory=self.folder / "none")
        with self.open(slots=0, capacity_bytes=0) as cache:
            assert cache.full and len(cache.present()) == 0
        with self.open(capacity_bytes=0) as cache:
            assert not cache.put(0, b"x") and cache.full and cache.get(0) is None

    def test_a_slot_that_is_being_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Empty for all readers and closed to other fills, including those of the same process."""
        with self.open() as cache, self.open() as other:
            seen, write = [], Segment.write

            def slow_write(segment: Segment, start: int, data: memoryview) -> None:
                for user in (cache, other):
                    seen.append((user.get(0), user.has(0), user.put(0, b"y"), user.check(0)))
                write(segment, start, data)

            monkeypatch.setattr(Segment, "write", slow_write)
            assert cache.put(0, b"x") and cache.get(0) == other.get(0) == b"x"
            assert seen == [(None, False, False, False)] * 2 and cache.stats().puts == 1

    def test_removed_between_opening_and_locking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last user was faster: the opened file has no name any more, so a new one is made."""
        self.open(persist=True).close()
        path = self.the_file()

        def open_and_lose(path: Path) -> Any:
            opened = open_file(path)
            monkeypatch.undo()
            path.unlink()
            return opened

        monkeypatch.setattr("cache.shared.file.open_file", open_and_lose)
        with self.open() as cache, self.open() as other:
            assert cache.put(0, b"x") and other.get(0) == b"x" and path.exists()

    def test_a_fill_killed_after_it_stored_the_word(self) -> None:
        """The claim is still set; when the slot is dropped the next fill must not use its room."""
        with self.open() as cache, open(self.the_file(), "r+b", buffering=0) as file:
            cache.put(0, b"first")
            view = cache.get(0)
            os.pwrite(file.fileno(), os.pread(file.fileno(), 8, LAYOUT.words_at), LAYOUT.pending_at)
            os.pwrite(file.fileno(), struct.pack("=I", 1 << 20 | 7), LAYOUT.owners_at)
            cache.drop(0)
            assert cache.put(0, b"other") and cache.get(0) == b"other" and view == b"first"

    def test_a_stuck_lock_delays_only_puts(self) -> None:
        """The owner of the lock was stopped: one put waits half a second, no later call waits."""
        with self.open() as cache:
            cache.put(0, b"x")
            lock = ByteLocks(os.open(self.the_file(), os.O_RDWR))
            assert lock.try_exclusive(TABLE)
            assert not any(cache.put(slot, b"y") for slot in range(1, SLOTS)) and cache.get(0) == b"x"
            cache.drop(0)
            assert cache.get(0) is None
            lock.release(TABLE)
            assert cache.put(1, b"y") and cache.put(0, b"z") and cache.get(0) == b"z"

    def the_file(self) -> Path:
        (path,) = self.folder.iterdir()
        return path


kept: list[tuple[SharedByteCache, memoryview | None]] = []


def keep_a_view(folder: str) -> SharedByteCache:
    cache = SharedByteCache.open(fingerprint="f", kind="k", slots=3, capacity_bytes=999, directory=folder)
    cache.put(0, b"x")
    kept.append((cache, cache.get(0)))
    return cache


def read_and_wait(cache: SharedByteCache, ready: Any) -> None:
    assert cache.get(0) == b"x" and cache.stats().users >= 2
    ready.set()
    time.sleep(60)


def keep_workers(folder: str) -> None:
    """A view, a forked worker and a spawned one at the end of this process."""
    cache = keep_a_view(folder)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        ready = context.Event()
        context.Process(target=read_and_wait, args=(cache, ready), daemon=True).start()  # type: ignore[attr-defined]
        assert ready.wait(300)


def end_last(cache: SharedByteCache, parent: int) -> None:
    give_up = time.monotonic() + 300
    while os.getppid() == parent and time.monotonic() < give_up:
        time.sleep(0.01)
    sys.stdout.write("last" if cache.get(0) == b"x" and cache.stats().users == 1 else "not")


def orphan_a_worker(folder: str) -> None:
    context = multiprocessing.get_context("fork")
    context.Process(target=end_last, args=(keep_a_view(folder), os.getpid())).start()
    os._exit(0)


class TestMemfd(SharedCacheSuite):
    def open(self, **options: Any) -> SharedByteCache:
        defaults = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY}
        return SharedByteCache.open(**{**defaults, "backend": "memfd", **options})

    def test_anonymous_segments_are_separate_and_pickle_while_open(self, elsewhere: Callable[..., Any]) -> None:
        with self.open() as cache, self.open() as other:
            assert cache.put(0, sample(0)) and other.get(0) is None
            assert elsewhere(in_another_process, cache) == (2, sample(0))
            gc.collect()
            assert cache.get(1) == b"y" and cache.stats().users == 1
            pickled = pickle.dumps(cache)
        with pytest.raises(ForeignCacheError):
            pickle.loads(pickled)

    def test_allocation_without_room(self) -> None:
        with pytest.raises(CacheFullError) as caught:
            self.open(capacity_bytes=(1 << 40) - (1 << 21))
        assert caught.value.errno


def in_another_process(cache: SharedByteCache) -> tuple[int, bytes]:
    """Fill a slot in another process; returns the users, and the first slot."""
    with cache:
        cache.put(1, b"y")
        return cache.stats().users, bytes(cache.get(0) or b"")


RANKS = """
import os, sys
from mpi4py import MPI
import readers
from cache import SharedByteCache

world = MPI.COMM_WORLD
cache = SharedByteCache.open(fingerprint="f", kind="k", slots=30, capacity_bytes=100_000, backend="mpi", comm=world)
mine = range(world.rank, 30, world.size)
assert all(cache.put(slot, bytes([slot]) * 1000) for slot in mine if slot < 20)
world.Barrier()
assert all(cache.get(slot) == bytes([slot]) * 1000 for slot in range(20)), "bytes of the other ranks"
assert cache.stats().puts == 20 and cache.stats().users == world.size
world.Barrier()  # a child is one more user
child = os.fork()
if child == 0:
    ok = cache.get(0) is not None and all(cache.put(slot, b"of a child") for slot in mine if slot >= 20)
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
world.Barrier()
assert all(cache.get(slot) == b"of a child" for slot in range(20, 30))
try:
    SharedByteCache.open(fingerprint="f", kind=f"k{world.rank}", slots=30, capacity_bytes=1, backend="mpi")
except ValueError as error:
    assert "must open the same cache" in str(error)
else:
    raise AssertionError("ranks that disagree got a cache")
view = cache.get(0)
cache.close()
assert view == bytes(1000)
world.Barrier()
with readers.open(sys.argv[1], "train") as base:
    expected = [bytes(data) for data in base.read_many(range(36))]
    with readers.cached(base, 1.0, backend="mpi", comm=world) as reader:
        assert [bytes(reader.read(i)) for i in range(world.rank, 36, world.size)] == expected[world.rank :: world.size]
        world.Barrier()
        stats = reader.stats()
        assert (stats.present, stats.misses, stats.users) == (36, 36, world.size), stats
        world.Barrier()
        assert [bytes(data) for data in reader.read_many(range(36))] == expected
        world.Barrier()
        assert reader.stats().hits == 36 * world.size and reader.stats().misses == 36
print("good", flush=True)
"""


@pytest.mark.skipif(not HAS_MPI, reason="mpi4py is not installed")
class TestMpi(SharedCacheSuite):
    def open(self, **options: Any) -> SharedByteCache:
        defaults = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY}
        return SharedByteCache.open(**{**defaults, "backend": "mpi", **options})

    def test_unsupported_options(self) -> None:
        with self.open() as cache, pytest.raises(TypeError, match="MPI window"):
            pickle.dumps(cache)
        with pytest.raises(CacheFullError, match="no room for a window"):
            self.open(capacity_bytes=1 << 39)

    @pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed")
    def test_three_ranks(self, tmp_path: Path, packed: Path) -> None:
        """The cache itself, and readers over it."""
        script = tmp_path / "ranks.py"
        script.write_text(RANKS)
        command = [str(MPIEXEC), "-n", "3", sys.executable, str(script), str(packed)]
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
        assert done.returncode == 0 and done.stdout.count("good") == 3, done.stdout + done.stderr
        assert list(tmp_path.iterdir()) == [script], "the file of the lock still has a name"


@pytest.mark.skipif(HAS_MPI, reason="mpi4py is installed")
def test_without_mpi4py() -> None:
    with pytest.raises(ImportError, match="pip install 'packer"):
        SharedByteCache.open(fingerprint="f", kind="k", slots=1, capacity_bytes=1, backend="mpi")


# --- damaged and foreign files --------------------------------------------------------------------------------------
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
    """Check that every slot has its bytes or none, and can be filled if there is room; returns the number of filled
    slots."""
    there = 0
    for slot in range(SLOTS):
        data = cache.get(slot)
        assert data is None or data == sample(slot), f"slot {slot} has foreign bytes"
        there += data is not None
        if data is None and cache.put(slot, sample(slot)):
            assert cache.get(slot) == sample(slot)
    assert all(cache.get(slot) in (None, sample(slot)) for slot in range(SLOTS))
    return there


def test_the_file_of_a_crash_is_checked_and_taken_over(tmp_path: Path) -> None:
    def read_and_die() -> None:
        cache = open_in(tmp_path)
        assert cache.get(1) == sample(1)
        os.kill(os.getpid(), signal.SIGKILL)

    path = left_by_a_crash(tmp_path)
    word = struct.unpack("=Q", path.read_bytes()[LAYOUT.words_at + 8 * 5 :][:8])[0]
    for _ in range(2):  # repeated crashes
        killed_in_child(read_and_die)
    patch(path, word >> 30 << 6, b"!")
    with open_in(tmp_path) as cache:
        assert cache.present().all() and not cache.put(4, b"x") and cache.get(4) == sample(4)
        assert cache.get(5) is None and cache.stats().dropped == 1 and not cache.has(5)
        assert cache.put(5, sample(5)) and cache.check(5)
        assert read_all(cache) == SLOTS
    assert not list(tmp_path.iterdir())


def test_flipped_bits(tmp_path: Path) -> None:
    """At any position of header and table, and in the bytes after a crash: an error or a miss, never wrong bytes."""
    rng = np.random.default_rng(3)
    for trial in range(40):
        parts = [(0, 1100), (LAYOUT.words_at, LAYOUT.arena_at)]
        if trial % 2:
            path = left_by_a_crash(tmp_path)
            parts.append((LAYOUT.arena_at, LAYOUT.arena_at + 90_000))
        else:
            with open_in(tmp_path, persist=True) as cache:
                read_all(cache)
            (path,) = tmp_path.iterdir()
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
    """A damaged table causes neither foreign bytes nor a fill over other samples."""
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


def test_wrong_words_in_a_cache_in_use(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("size", [0, 100, LAYOUT.total_bytes - 1, LAYOUT.total_bytes + 1])
def test_a_truncated_file_is_replaced(tmp_path: Path, size: int) -> None:
    os.truncate(left_by_a_crash(tmp_path), size)
    with open_in(tmp_path) as cache:
        assert cache.capacity_bytes == CAPACITY and read_all(cache) == 0


def test_foreign_files_stay_unchanged(tmp_path: Path) -> None:
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
        with pytest.warns(UserWarning, match="made under another name"):
            made, two = open_in(tmp_path), open_in(tmp_path)
        assert made.put(0, b"x") and two.get(0) == b"x", "the processes do not share the other name"
        made.close()
        two.close()
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


# --- limits, lists, ends --------------------------------------------------------------------------------------------
def test_a_full_tmpfs(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", "4m") as folder:
        assert cache_budget(folder).bytes == 2 << 20, "the margin is not one half"
        assert cache_budget(folder).is_cramped
        with pytest.raises(CacheFullError, match="no room for a cache segment") as caught:
            open_in(folder, capacity_bytes=8 << 20)
        assert caught.value.errno and list(folder.iterdir()) == []
        with open_in(folder, capacity_bytes=2 << 20) as shared:
            with pytest.raises(CacheFullError):
                open_in(folder, capacity_bytes=2 << 20, kind="other")
            with pytest.raises(OSError):
                (folder / "rest").write_bytes(bytes(4 << 20))
            stored = [slot for slot in range(SLOTS) if shared.put(slot, sample(slot, 100_000))]
            assert len(stored) == 20 and all(shared.get(slot) == sample(slot, 100_000) for slot in stored)


def test_the_budget_of_this_machine() -> None:
    assert not cache_budget().is_cramped
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
    """By default it leaves the file for the next user; on request it leaves no file, and still dies of the signal."""
    script = (
        "import sys, os, signal, cache; {}; it = cache.SharedByteCache.open(fingerprint='f', kind='k', slots=3,"
        "capacity_bytes=99, directory=sys.argv[1]); print(flush=True); signal.pause()"
    )
    chained = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); cache.remove_on_sigterm()"
    for call, code, left in (("pass", -15, 1), ("cache.remove_on_sigterm()", -15, 0), (chained, 5, 0)):
        command = [sys.executable, "-c", script.format(call), str(tmp_path)]
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
    for backend in ("file", "memfd", "file", "memfd"):
        cache = open_in(tmp_path, backend=backend)
        cache.put(0, b"x")
        view = cache.get(0)
        cache.close()
        assert view == b"x"
    del cache, view
    gc.collect()
    assert counts() == before


def test_more_users_than_numbers(tmp_path: Path) -> None:
    """Beyond 1022 users a process reads and does not fill."""
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


# --- under load -----------------------------------------------------------------------------------------------------
class AgainstADict(RuleBasedStateMachine):
    """Several users of one segment open, fill, drop and close; two references: the filled slots, and the bytes seen."""

    users = Bundle("users")
    slots = st.integers(0, 11)

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.all: list[SharedByteCache] = []
        self.keeper = self.opened()
        self.there: dict[int, bytes] = {}
        self.taken = 0
        self.closed: set[SharedByteCache] = set()
        self.seen: list[tuple[memoryview, bytes]] = []

    def opened(self) -> SharedByteCache:
        self.all.append(open_in(self.folder.name, slots=12, capacity_bytes=4000))
        return self.all[-1]

    @rule(target=users)
    def open_another(self) -> SharedByteCache:
        return self.opened()

    @rule(user=users)
    def close(self, user: SharedByteCache) -> None:
        user.close()
        self.closed.add(user)

    @rule(user=users, slot=slots, data=st.binary(max_size=900))
    def put(self, user: SharedByteCache, slot: int, data: bytes) -> None:
        if user in self.closed:
            return
        need = max(64, -(-len(data) // 64) * 64)
        fits = self.taken + need <= 4000 // 64 * 64
        assert user.put(slot, data) == (slot not in self.there and fits)
        if slot not in self.there and fits:
            self.there[slot] = data
            self.taken += need

    @rule(user=users, slot=slots)
    def drop(self, user: SharedByteCache, slot: int) -> None:
        if user not in self.closed:
            user.drop(slot)
            self.there.pop(slot, None)

    @rule(user=users, slot=slots)
    def look(self, user: SharedByteCache, slot: int) -> None:
        if user in self.closed:
            return
        view = user.get(slot)
        assert view == self.there.get(slot) and user.check(slot) == user.has(slot) == (slot in self.there)
        if view is not None:
            self.seen.append((view, self.there[slot]))

    @invariant()
    def nothing_changes_under_a_reader(self) -> None:
        assert all(view == data for view, data in self.seen)
        assert self.keeper.used_bytes == self.taken
        assert self.keeper.present().nonzero()[0].tolist() == sorted(self.there)

    def teardown(self) -> None:
        if hasattr(self, "keeper"):
            for user in self.all:
                user.close()
            self.folder.cleanup()


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)


def fill_and_read(open_it: Callable[[], SharedByteCache], seed: int, begin: Any, results: Any) -> None:
    """Fill and read all slots in a random order; returns the slots that it filled, and those with wrong bytes."""
    order = random.Random(seed).sample(range(MANY), MANY)
    begin.wait(300)
    cache = open_it()
    filled, wrong = [], []
    for slot in order:
        data = cache.get(slot)
        if data is None and cache.put(slot, sample(slot)):
            filled.append(slot)
        elif data is not None and data != sample(slot):
            wrong.append(slot)
    begin.wait(300)
    cache.close()
    results.put((filled, wrong))


@pytest.mark.parametrize("backend", ["file", "memfd"])
def test_five_open_and_fill_at_once(tmp_path: Path, backend: str) -> None:
    """They agree on one segment: no wrong byte, and every sample is stored once."""
    context = multiprocessing.get_context("fork")
    options: dict[str, Any] = {"backend": backend, "slots": MANY, "capacity_bytes": 4 << 20}
    for _ in range(2):
        shared = open_in(tmp_path, **options) if backend == "memfd" else None
        begin, results = context.Barrier(5), context.Queue()
        open_it = lambda shared=shared: shared or open_in(tmp_path, **options)  # noqa: E731
        crew = [context.Process(target=fill_and_read, args=(open_it, seed, begin, results)) for seed in range(5)]
        for process in crew:
            process.start()
        outcomes = [results.get(timeout=LIMIT_S) for _ in crew]
        for process in crew:
            process.join(LIMIT_S)
            assert process.exitcode == 0
        assert not any(wrong for _, wrong in outcomes)
        assert sorted(slot for filled, _ in outcomes for slot in filled) == list(range(MANY))
        if shared is not None:
            assert all(shared.get(slot) == sample(slot) and shared.check(slot) for slot in range(MANY))
            assert shared.stats().puts == MANY and shared.stats().users == 1
            shared.close()
        assert list(tmp_path.iterdir()) == []


def use_until_killed(folder: Path, seed: int) -> None:
    """Open, fill, read, drop and close for ever. Exits with 9 on a wrong byte."""
    draw = random.Random(seed)
    try:
        while True:
            with open_in(folder, slots=MANY, capacity_bytes=4 << 20) as shared:
                for _ in range(draw.randrange(400)):
                    slot = draw.randrange(MANY)
                    data = shared.get(slot)
                    if data is None:
                        shared.put(slot, sample(slot))
                    elif data != sample(slot):
                        os._exit(9)
                    if draw.random() < 0.002:
                        shared.drop(slot)
    except BaseException:
        os._exit(8)


@pytest.mark.parametrize("count", [15, pytest.param(400, marks=pytest.mark.faults)])
def test_users_killed_and_stopped_at_any_moment(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrong byte, no blocked process, no slot that cannot be filled, and no file left after a clean."""
    monkeypatch.setattr("cache.shared.file.STANDSTILL_SECONDS", 0.5)
    warnings.simplefilter("ignore")  # under another name, after a standstill
    draw = random.Random(7)
    context = multiprocessing.get_context("fork")
    crew: list[Any] = []
    started = 0
    while started < count:
        while len(crew) < 3:
            started += 1
            crew.append(context.Process(target=use_until_killed, args=(tmp_path, started)))
            crew[-1].start()
        time.sleep(draw.random() * 0.12)
        for process in draw.sample(crew, draw.choice([1, 1, 1, 3]) if started < count else 3):
            if draw.random() < 0.25:  # while the others continue
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(draw.random() * 0.05)
            process.kill()
            process.join(LIMIT_S)
            assert process.exitcode == -signal.SIGKILL, "a wrong byte (9) or an error (8)"
            crew.remove(process)
    with open_in(tmp_path, slots=MANY, capacity_bytes=8 << 20) as shared:
        for slot in range(MANY):
            assert shared.get(slot) == sample(slot) or shared.put(slot, sample(slot))
        assert all(shared.get(slot) == sample(slot) and shared.check(slot) for slot in range(MANY))
    cache.clean_caches(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write_half_and_die(segment: Segment, start: int, data: memoryview) -> None:
    os.pwrite(segment.anchor.number, b"half", start)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "killed, without a file", "an error"])
def test_a_fill_that_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Others see an empty slot, fill it, and use the room that the failed fill had taken."""
    with open_in(tmp_path, backend="memfd" if "without" in how else "file") as shared:
        for slot in range(5):
            with monkeypatch.context() as context:
                context.setattr(Segment, "write", None if how == "an error" else write_half_and_die)
                if how == "an error":
                    with pytest.raises(TypeError):
                        shared.put(slot, sample(slot))
                else:
                    killed_in_child(partial(shared.put, slot, sample(slot)))
            assert shared.get(slot) is None and not shared.has(slot)
            used = shared.used_bytes
            assert shared.put(slot, sample(slot)) and shared.used_bytes == used
        assert all(shared.get(slot) == sample(slot) for slot in range(5)) and shared.stats().users == 1
