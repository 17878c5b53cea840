"""The shared cache: the suite for segments in files and in anonymous memory, and what each does beyond it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from suites.programs import run_python
from suites.shared_caches import CAPACITY, SLOTS, SharedCacheSuite, sample

from cache import SharedByteCache
from cache.errors import CacheDirectoryError, CacheFullError, ForeignCacheError
from cache.locks import ByteLocks
from cache.shared.file import open_file
from cache.shared.layout import TABLE, Layout, Segment
from packer.testing.children import in_child


class TestFile(SharedCacheSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> Any:
        self.folder = tmp_path
        yield
        gc.collect()
        assert list(tmp_path.iterdir()) == [], "a segment was left behind"

    def open(self, **options: Any) -> SharedByteCache:
        given = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY, "job": "7"}
        return SharedByteCache.open(**{**given, "directory": self.folder, **options})

    def test_the_same_is_shared_and_others_are_not(self) -> None:
        with self.open() as cache, self.open(capacity_bytes=5) as same:
            assert cache.put(0, b"x") and same.get(0) == b"x" and same.capacity_bytes == CAPACITY
            assert not same.put(0, b"y") and same.stats().users == 2
            for other in ({"fingerprint": "set2"}, {"kind": "decoded"}, {"slots": SLOTS + 1}, {"job": "8"}):
                with self.open(**other) as cache2:
                    assert cache2.get(0) is None and cache2.stats().users == 1
                    assert cache2.put(0, b"z") and cache.get(0) == b"x"

    def test_the_file(self) -> None:
        with self.open():
            facts = self.the_file().stat()
            assert facts.st_mode & 0o777 == 0o600 and facts.st_uid == os.geteuid() and facts.st_nlink == 1
            assert facts.st_blocks * 512 >= CAPACITY, "the space is reserved"

    def test_a_pickle_is_the_same_segment(self) -> None:
        with self.open() as cache:
            cache.put(0, b"x")
            with pickle.loads(pickle.dumps(cache)) as other:
                assert other.get(0) == b"x" and other.put(1, b"y") and cache.get(1) == b"y"
                assert cache.stats().users == 2

    def test_the_last_user_removes_it(self) -> None:
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

    @pytest.mark.parametrize("function", ["keep_a_view", "keep_a_fork", "keep_a_spawned_worker"])
    def test_at_exit(self, function: str) -> None:
        """Workers are ended by multiprocessing, by a signal, and must not be the last users."""
        code = f"import sys, test_shared_cache as it; it.{function}(sys.argv[1])"
        run_python("-W", "error", "-c", code, self.folder, check=True, timeout=300, cwd=Path(__file__).parent)

    def test_a_worker_that_outlives_its_parent(self) -> None:
        """It is then the last user, and ends properly."""
        code = "import sys, test_shared_cache as it; it.orphan_a_worker(sys.argv[1])"
        done = run_python("-c", code, self.folder, check=True, timeout=300, cwd=Path(__file__).parent)
        assert done.stdout == "last"

    def test_persisting(self) -> None:
        with self.open(persist=True) as cache:
            cache.put(0, b"x")
            cache.count(hits=1)
        for _ in range(2):
            with self.open() as cache:
                assert cache.get(0) == b"x" and cache.check(0) and cache.stats().hits == 1
                assert cache.stats().dropped == 0
        with self.open(capacity_bytes=2 * CAPACITY) as cache:
            assert cache.get(0) is None and cache.capacity_bytes == 2 * CAPACITY, "too small: created again"

    def test_no_folder(self) -> None:
        with pytest.raises(CacheDirectoryError, match="No such file"):
            self.open(directory=self.folder / "none")

    def test_options(self) -> None:
        for wrong in ({"slots": -1}, {"capacity_bytes": -1}, {"backend": "disk"}, {"capacity_bytes": 1 << 41}):
            with pytest.raises(ValueError):
                self.open(**wrong)
        with pytest.raises(ValueError, match="more than 896"):
            self.open(kind="k" * 900)

    def test_nothing_at_all(self) -> None:
        with self.open(slots=0, capacity_bytes=0) as cache:
            assert cache.full and len(cache.present()) == 0
        with self.open(capacity_bytes=0) as cache:
            assert not cache.put(0, b"x") and cache.full and cache.get(0) is None

    def test_a_slot_that_is_being_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Empty for all readers and closed to other fills, those of its own process included."""
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
        """The last user was quicker: what has been opened has no name any more, so a new one is made."""
        self.open(persist=True).close()
        path = self.the_file()

        def open_and_lose(path: Path) -> Any:
            found = open_file(path)
            monkeypatch.undo()
            path.unlink()
            return found

        monkeypatch.setattr("cache.shared.file.open_file", open_and_lose)
        with self.open() as cache, self.open() as other:
            assert cache.put(0, b"x") and other.get(0) == b"x" and path.exists()

    def test_killed_after_the_word_was_stored(self) -> None:
        """The claim is still there; when the slot is dropped its room must not be used by the next fill."""
        layout = Layout(SLOTS, CAPACITY)
        with self.open() as cache, open(self.the_file(), "r+b", buffering=0) as file:
            cache.put(0, b"first")
            view = cache.get(0)
            os.pwrite(file.fileno(), os.pread(file.fileno(), 8, layout.words_at), layout.pending_at)
            os.pwrite(file.fileno(), struct.pack("=I", 1 << 20 | 7), layout.owners_at)
            cache.drop(0)
            assert cache.put(0, b"other") and cache.get(0) == b"other" and view == b"first"

    def test_a_stuck_lock_costs_puts_and_nothing_else(self) -> None:
        """Its owner was stopped: half a second once, then nothing waits."""
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


def keep_a_view(folder: str) -> tuple[SharedByteCache, memoryview | None]:
    cache = SharedByteCache.open(fingerprint="f", kind="k", slots=3, capacity_bytes=999, directory=folder)
    cache.put(0, b"x")
    kept.append((cache, cache.get(0)))
    return kept[0]


kept: list[tuple[SharedByteCache, memoryview | None]] = []


def read_and_wait(cache: SharedByteCache, ready: Any) -> None:
    assert cache.get(0) == b"x" and cache.stats().users == 2
    ready.set()
    time.sleep(60)


def keep_a_fork(folder: str, method: str = "fork") -> None:
    context = multiprocessing.get_context(method)
    ready = context.Event()
    context.Process(target=read_and_wait, args=(keep_a_view(folder)[0], ready), daemon=True).start()
    assert ready.wait(300)


keep_a_spawned_worker = partial(keep_a_fork, method="spawn")


def end_last(cache: SharedByteCache, parent: int) -> None:
    give_up = time.monotonic() + 300
    while os.getppid() == parent and time.monotonic() < give_up:
        time.sleep(0.01)
    sys.stdout.write("last" if cache.get(0) == b"x" and cache.stats().users == 1 else "not")


def orphan_a_worker(folder: str) -> None:
    cache, _ = keep_a_view(folder)
    multiprocessing.get_context("fork").Process(target=end_last, args=(cache, os.getpid())).start()
    os._exit(0)


class TestMemfd(SharedCacheSuite):
    def open(self, **options: Any) -> SharedByteCache:
        given = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY}
        return SharedByteCache.open(**{**given, "backend": "memfd", **options})

    def test_each_is_its_own(self) -> None:
        with self.open() as cache, self.open() as other:
            assert cache.put(0, b"x") and other.get(0) is None

    def test_a_pickle_in_another_process(self) -> None:
        with self.open() as cache:
            cache.put(0, sample(0))
            script = (
                "import sys, pickle; cache = pickle.loads(sys.stdin.buffer.read()); cache.put(1, b'y');"
                "assert cache.stats().users == 2; sys.stdout.buffer.write(cache.get(0))"
            )
            command = [sys.executable, "-W", "error", "-c", script]
            done = subprocess.run(command, input=pickle.dumps(cache), capture_output=True, timeout=300, check=True)
            assert done.stdout == sample(0) and cache.get(1) == b"y" and cache.stats().users == 1

    def test_a_pickle_that_outlived_it(self) -> None:
        cache = self.open()
        pickled = pickle.dumps(cache)
        cache.close()
        with pytest.raises(ForeignCacheError):
            pickle.loads(pickled)

    def test_no_room(self) -> None:
        with pytest.raises(CacheFullError) as caught:
            self.open(capacity_bytes=(1 << 40) - (1 << 21))
        assert caught.value.errno
