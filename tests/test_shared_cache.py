"""The shared cache: the suite for segments in files and in anonymous memory, and what each does beyond it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from suites.children import in_child
from suites.shared_caches import CAPACITY, SLOTS, SharedCacheSuite, sample

from cache import SharedByteCache
from cache.errors import CacheDirectoryError, CacheFullError, ForeignCacheError
from cache.shared.file import open_file
from cache.shared.layout import TABLE


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
            (path,) = self.folder.iterdir()
            facts = path.stat()
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
        first.close()
        assert second.get(0) == b"x" and len(list(self.folder.iterdir())) == 1
        del second
        gc.collect()
        assert list(self.folder.iterdir()) == []
        with self.open() as cache:
            assert cache.get(0) is None

    def test_a_child_that_goes_removes_nothing(self) -> None:
        with self.open() as cache:
            cache.put(0, b"x")
            in_child(cache.close)
            in_child(lambda: None)
            with self.open() as other:
                assert other.get(0) == b"x"

    def test_at_exit(self) -> None:
        script = (
            "import sys, cache; it = cache.SharedByteCache.open(fingerprint='f', kind='k', slots=3, capacity_bytes=99,"
            " directory=sys.argv[1]); it.put(0, b'x'); view = it.get(0)"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", script, str(self.folder)], check=True, timeout=60)

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_at_exit_with_workers(self, method: str) -> None:
        """They are ended by multiprocessing, by a signal, and must not be the last users."""
        code = "import os, sys, test_shared_cache as it; it.keep_a_worker(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(self.folder), method]
        subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parent)

    def test_a_worker_that_outlives_its_parent(self) -> None:
        """It is the last user then, and ends in order."""
        code = "import os, sys, test_shared_cache as it; it.orphan_a_worker(sys.argv[1])"
        command = [sys.executable, "-c", code, str(self.folder)]
        done = subprocess.run(command, timeout=60, cwd=Path(__file__).parent, capture_output=True, check=True)
        assert done.stdout == b"last"

    def test_persisting(self) -> None:
        with self.open(persist=True) as cache:
            cache.put(0, b"x")
            cache.count(hits=1)
        for _ in range(2):
            with self.open() as cache:
                assert cache.get(0) == b"x" and cache.check(0) and cache.stats().hits == 1
                assert cache.stats().dropped == 0
        with self.open(capacity_bytes=2 * CAPACITY) as cache:
            assert cache.get(0) is None and cache.capacity_bytes == 2 * CAPACITY, "too small: made anew"

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

    def test_a_slot_that_is_being_filled(self) -> None:
        """Empty to all who look, and closed to all who would fill it, the filler's own process included."""
        with self.open() as cache, self.open() as other:
            segment, asked = cache._user().segment, []
            write = segment.write

            def slow_write(start: int, data: memoryview) -> None:
                for user in (cache, other):
                    asked.append((user.get(0), user.has(0), user.put(0, b"y"), user.check(0)))
                write(start, data)

            segment.write = slow_write  # type: ignore[method-assign]
            assert cache.put(0, b"x") and cache.get(0) == other.get(0) == b"x"
            assert asked == [(None, False, False, False)] * 2 and cache.stats().puts == 1

    def test_removed_between_opening_and_locking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last user was quicker: what has been opened has no name any more, so a new one is made."""
        self.open(persist=True).close()
        (path,) = self.folder.iterdir()

        def open_and_lose(path: Path) -> Any:
            found = open_file(path)
            monkeypatch.undo()
            path.unlink()
            return found

        monkeypatch.setattr("cache.shared.file.open_file", open_and_lose)
        with self.open() as cache, self.open() as other:
            assert cache.put(0, b"x") and other.get(0) == b"x" and path.exists()

    def test_killed_after_the_word_went_out(self) -> None:
        """The claim is still there; when the slot is dropped its room must not go to the next fill."""
        with self.open() as cache:
            cache.put(0, b"first")
            view, table = cache.get(0), cache._user().segment.slots
            table.pending[0], table.owners[0] = table.words[0], 1 << 20 | 7
            cache.drop(0)
            assert cache.put(0, b"other") and cache.get(0) == b"other" and view == b"first"

    def test_a_stuck_lock_costs_puts_and_nothing_else(self) -> None:
        """Its holder was stopped in the middle: half a second once, then nobody waits."""
        with self.open() as cache, self.open() as other:
            cache.put(0, b"x")
            lock = other._user()._lock
            assert lock is not None and lock.try_exclusive(TABLE)
            assert not cache.put(1, b"y") and cache.get(0) == b"x"
            assert not any(cache.put(slot, b"y") for slot in range(1, SLOTS))
            cache.drop(0)
            assert cache.get(0) is None
            lock.release(TABLE)
            assert cache.put(1, b"y") and cache.put(0, b"z") and cache.get(0) == b"z"


def read_and_wait(cache: SharedByteCache, ready: Any) -> None:
    assert cache.get(0) == b"x" and cache.stats().users == 2
    ready.set()
    time.sleep(60)


def keep_a_worker(folder: str, method: str) -> None:
    context = multiprocessing.get_context(method)
    cache = SharedByteCache.open(fingerprint="f", kind="k", slots=3, capacity_bytes=999, directory=folder)
    cache.put(0, b"x")
    ready = context.Event()
    context.Process(target=read_and_wait, args=(cache, ready), daemon=True).start()
    assert ready.wait(20)


def end_last(cache: SharedByteCache, parent: int) -> None:
    give_up = time.monotonic() + 30
    while os.getppid() == parent and time.monotonic() < give_up:
        time.sleep(0.01)
    sys.stdout.write("last" if cache.get(0) == b"x" and cache.stats().users == 1 else "not")


def orphan_a_worker(folder: str) -> None:
    cache = SharedByteCache.open(fingerprint="f", kind="k", slots=3, capacity_bytes=999, directory=folder)
    cache.put(0, b"x")
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
            done = subprocess.run(command, input=pickle.dumps(cache), capture_output=True, timeout=60, check=True)
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
