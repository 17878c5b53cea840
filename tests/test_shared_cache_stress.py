"""The shared cache under load: against a dict, with many processes at once, and with users killed at any moment."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from suites.shared_caches import sample

import cache
from cache import SharedByteCache
from cache.shared.layout import Segment
from packer.testing.children import killed_in_child

SLOTS = 300
LIMIT_S = 50


def open_in(folder: str | Path, **options: Any) -> SharedByteCache:
    given = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": 4 << 20, "job": "7"}
    return SharedByteCache.open(**{**given, "directory": folder, **options})


class AgainstADict(RuleBasedStateMachine):
    """Several users of one segment, which open, fill, drop and close; two oracles: what is there, and what was seen."""

    users = Bundle("users")
    slots = st.integers(0, 11)

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.keeper = self.opened()
        self.there: dict[int, bytes] = {}
        self.taken = 0
        self.closed: set[SharedByteCache] = set()
        self.seen: list[tuple[memoryview, bytes]] = []

    def opened(self) -> SharedByteCache:
        return open_in(self.folder.name, slots=12, capacity_bytes=4000)

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
            self.keeper.close()
            gc.collect()
            self.folder.cleanup()


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


def fill_and_read(cache: SharedByteCache, seed: int, begin: Any, results: Any) -> None:
    """All slots in its own order; returns which ones it has filled, and which had wrong bytes."""
    order = random.Random(seed).sample(range(SLOTS), SLOTS)
    begin.wait(300)
    filled, wrong = [], []
    for slot in order:
        data = cache.get(slot)
        if data is None and cache.put(slot, sample(slot)):
            filled.append(slot)
        elif data is not None and data != sample(slot):
            wrong.append(slot)
    cache.close()
    results.put((filled, wrong))


@pytest.mark.parametrize("backend", ["file", "memfd"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_four_fill_at_once(tmp_path: Path, method: str, backend: str) -> None:
    """No wrong byte, and every sample stored once."""
    context = multiprocessing.get_context(method)
    with open_in(tmp_path, backend=backend) as shared:
        begin, results = context.Barrier(4), context.Queue()
        crew = [context.Process(target=fill_and_read, args=(shared, seed, begin, results)) for seed in range(4)]
        for process in crew:
            process.start()
        found = [results.get(timeout=LIMIT_S) for _ in crew]
        for process in crew:
            process.join(LIMIT_S)
            assert process.exitcode == 0
        assert not any(wrong for _, wrong in found)
        assert sorted(slot for filled, _ in found for slot in filled) == list(range(SLOTS))
        assert all(shared.get(slot) == sample(slot) and shared.check(slot) for slot in range(SLOTS))
        stats = shared.stats()
        assert stats.puts == SLOTS and stats.users == 1
        assert shared.used_bytes == sum(-(-len(sample(slot)) // 64) * 64 for slot in range(SLOTS))
    assert list(tmp_path.iterdir()) == []


def test_eight_open_at_once(tmp_path: Path) -> None:
    """They agree on one segment, over and over."""
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        begin, results = context.Barrier(8), context.Queue()
        crew = [context.Process(target=open_together, args=(tmp_path, n, begin, results)) for n in range(8)]
        for process in crew:
            process.start()
        assert [results.get(timeout=LIMIT_S) for _ in crew] == [8] * 8
        for process in crew:
            process.join(LIMIT_S)
        assert list(tmp_path.iterdir()) == []


def open_together(folder: Path, number: int, begin: Any, results: Any) -> None:
    begin.wait(300)
    with open_in(folder) as shared:
        shared.put(number, b"x")
        begin.wait(300)
        results.put(int(shared.present().sum()))
        begin.wait(300)


def use_until_killed(folder: Path, seed: int) -> None:
    """Opens, fills, reads, drops, closes, for ever. Ends with 9 when it sees a wrong byte."""
    draw = random.Random(seed)
    try:
        while True:
            with open_in(folder) as shared:
                for _ in range(draw.randrange(400)):
                    slot = draw.randrange(SLOTS)
                    data = shared.get(slot)
                    if data is None:
                        shared.put(slot, sample(slot))
                    elif data != sample(slot):
                        os._exit(9)
                    if draw.random() < 0.002:
                        shared.drop(slot)
    except BaseException:
        os._exit(8)


def test_users_killed_at_any_moment(tmp_path: Path) -> None:
    """No wrong byte, no slot that cannot be filled, nothing left after a clean."""
    draw = random.Random(7)
    context = multiprocessing.get_context("fork")
    crew: list[Any] = []
    deadline = time.monotonic() + 8
    started = 0
    while time.monotonic() < deadline and started < 120:
        while len(crew) < 3:
            started += 1
            crew.append(context.Process(target=use_until_killed, args=(tmp_path, started)))
            crew[-1].start()
        time.sleep(draw.random() * 0.12)
        for process in draw.sample(crew, draw.choice([1, 1, 1, 3])):
            process.kill()
            process.join(LIMIT_S)
            assert process.exitcode == -signal.SIGKILL, "a wrong byte (9) or an error (8)"
            crew.remove(process)
    for process in crew:
        process.kill()
        process.join(LIMIT_S)
    with open_in(tmp_path, capacity_bytes=8 << 20) as shared:
        for slot in range(SLOTS):
            assert shared.get(slot) == sample(slot) or shared.put(slot, sample(slot))
        assert all(shared.get(slot) == sample(slot) and shared.check(slot) for slot in range(SLOTS))
    cache.clean_caches(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write_half_and_die(segment: Segment, start: int, data: memoryview) -> None:
    os.pwrite(segment.anchor.number, b"half", start)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "killed, without a file", "an error"])
def test_a_fill_that_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Others see an empty slot, fill it, and use the room it had taken."""
    with open_in(tmp_path, backend="memfd" if "without" in how else "file") as shared:
        for slot in range(20):
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
        assert all(shared.get(slot) == sample(slot) for slot in range(20)) and shared.stats().users == 1
