"""A process may fork while threads read: the child can read, and never waits for a lock of a thread that it lacks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import TrainerError
from packer.testing.children import end_of
from readers import Threads
from readers.caching import cached
from readers.loader import ImageLoader
from readers.opening.packed import open_copied, open_packed
from readers.order import Shuffled
from readers.torch import ImageDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
COUNT = 40
SECONDS = 30.0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 JPEGs in 20 shards."""
    root = tmp_path_factory.mktemp("forks")
    (root / "images").mkdir()
    for i in range(COUNT):
        (root / "images" / f"{i:02d}.jpg").write_bytes(make_jpeg(i))
    packer.convert(root / "images", to="tar", output=root / "set", shards=packer.Shards(samples=2))
    return root / "set"


def ends_in_child(work: Callable[[], Any]) -> bool:
    """Whether `work` succeeds in a forked child within 30 s."""

    def child() -> str:
        work()
        return "done"

    return end_of(child, seconds=30) == "done"


@contextmanager
def threads_that(work: Callable[[], Any], count: int = 2) -> Iterator[None]:
    """Run `work` repeatedly in some threads, which have started when this returns."""
    ended, begun = threading.Event(), threading.Barrier(count + 1)

    def run() -> None:
        begun.wait()
        while not ended.is_set():
            work()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(SECONDS)


def slow_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network: opening a shard takes a while."""
    original = os.open

    def slow(*args: Any, **kwargs: Any) -> int:
        time.sleep(0.002)
        return original(*args, **kwargs)

    monkeypatch.setattr(os, "open", slow)


def read_all(reader: Any) -> None:
    for index in range(COUNT):
        reader.read(index)


@pytest.mark.parametrize("kind", ["packed", "staged"])
def test_a_child_reads_while_threads_of_its_parent_open_shards(
    packed: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "packed":
        reader: Any = open_packed(packed, open_shards=3)
    else:
        (tmp_path / "copy").mkdir()
        reader = open_copied(tmp_path / "copy", fallback=packed, open_shards=3)
    slow_opens(monkeypatch)
    with threads_that(lambda: read_all(reader)):
        for _ in range(6):
            assert ends_in_child(lambda: read_all(reader)), "a child waits for a lock that none of its threads holds"


def test_a_child_reads_while_a_cache_is_filled(
    packed: Path, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_opens(monkeypatch)
    for _ in range(2):
        with cached(open_packed(packed, open_shards=2), 1 << 20, **place) as reader:
            reader.fill_ahead(Shuffled(COUNT, 1), epoch=0)
            for _ in range(2):
                assert ends_in_child(lambda: (read_all(reader), reader.read_many(np.arange(COUNT)))), "a child hangs"


def test_workers_start_while_a_loader_is_under_way(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_opens(monkeypatch)
    reader = open_packed(packed, open_shards=2)
    for seed in range(2):
        under_way = iter(ImageLoader(reader, 2, threads=Threads(3, prefetch=4), seed=seed))
        next(under_way)
        with threads_that(lambda: read_all(reader), 1):
            loader = DataLoader(ImageDataset(reader), 10, num_workers=2, timeout=SECONDS)
            labels = torch.cat([labels for _, labels in loader])
        assert len(labels) == COUNT and sum(1 for _ in under_way) == COUNT // 2 - 1


def test_a_child_does_not_wait_for_the_loop_of_its_parent(packed: Path) -> None:
    reader = readers.open(packed)
    loader = ImageLoader(reader, 2, threads=3)
    under_way = iter(loader)
    next(under_way)

    def continue_in_child() -> None:
        with pytest.raises(TrainerError, match="before the process was forked"):
            next(under_way)
        assert sum(1 for _ in loader) == COUNT // 2

    for _ in range(4):
        assert ends_in_child(continue_in_child), "a child waits for threads that it does not have"
    assert sum(1 for _ in under_way) == COUNT // 2 - 1, "the loop of the parent has ended"


@pytest.mark.faults
def test_hundreds_of_forks(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_opens(monkeypatch)
    (tmp_path / "copy").mkdir()
    forks = 0
    for reader in (open_packed(packed, open_shards=3), open_copied(tmp_path / "copy", fallback=packed)):
        loader = ImageLoader(reader, 2, threads=3)
        with threads_that(lambda reader=reader: (read_all(reader), reader.close())):
            for _ in range(200):
                under_way = iter(loader)
                next(under_way)
                assert ends_in_child(lambda reader=reader: (read_all(reader), reader.close())), f"hung at {forks}"
                forks += 1
    print(f"\n{forks} forks while threads read: every child read, too")


def test_an_index_opens_without_compiling_anything(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CPython before 3.11.8 a child that is forked while another thread compiles cannot compile (gh-106905)."""
    with monkeypatch.context() as patched:
        patched.setattr("ast.parse", None)
        with readers.open(packed) as reader:
            payload, width = reader.read(0), reader.info.width[0]
    assert len(payload) > 0 and width == 32
