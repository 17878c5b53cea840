"""Staging in the background that follows an order: local reads, each sample once, resumed anywhere, never stuck."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites.staging import SLOWLY, assert_whole, copy_of, refused, staged, start, wait_for

import readers
from cache.locks import FlockFile
from cache.staging import session
from cache.staging.sources import StagedFile
from cache.stores.copied import CopyStats
from readers import Ranks
from readers.augment import Resize
from readers.loader import ImageLoader
from readers.order import Order, Shuffled, StagedFirst, staged_first

FOREVER = 1000.0  # of patience: a wait that does not end by itself exceeds all limits of tests
BATCH = 4


@pytest.fixture(scope="module")
def order(source: Path) -> StagedFirst:
    with readers.open(source, "train") as reader:
        return staged_first(reader.split_info, seed=3, window=3)


def read_epoch(reader: readers.Reader, order: Order, step: Callable[[int], Any] = lambda position: None) -> None:
    for position in range(0, len(order), BATCH):
        step(position)
        reader.read_many(order.indices(0, np.arange(position, min(position + BATCH, len(order)))))


def open_staged(local: Path, source: Path, patience_seconds: float = 0.0) -> readers.Reader:
    return readers.open(local, "train", fallback=source, patience_seconds=patience_seconds)


def order_of_arrival(local: Path) -> list[str]:
    ready = json.loads((local / ".staging/ready.json").read_text())["files"]
    return sorted((name for name in ready if name.endswith(".tar")), key=lambda name: float(ready[name][2]))


def names(source: Path, shards: Any) -> list[str]:
    with readers.open(source, "train") as reader:
        return [reader.split_info.shards[number].path for number in shards]


def test_shards_come_as_the_order_wants_them(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    staging = readers.stage(source, tmp_path, background=True, order=order, threads=1)
    with staging as local:
        assert staging.wait(300)
        arrived = order_of_arrival(local)
        assert arrived[:9] == names(source, order.shards()) != sorted(arrived[:9])
        assert all(name.startswith("val") for name in arrived[9:]) and len(arrived) == 12
        assert_whole(local, source)


def test_most_reads_are_local_while_a_global_shuffle_reads_the_source(
    source: Path, order: StagedFirst, tmp_path: Path
) -> None:
    """The copy is capped, training is not."""
    with readers.stage(source, tmp_path / "a", background=True, bytes_per_second=SLOWLY / 4) as local:
        reader = open_staged(local, source)
        read_epoch(reader, Shuffled(len(reader), 3))
        plain = reader.store.stats()
    staging = readers.stage(source, tmp_path / "b", background=True, order=order, bytes_per_second=SLOWLY)
    with staging as local:
        reader = open_staged(local, source, FOREVER)
        read_epoch(reader, order)
        first = reader.store.stats()
    assert plain.local + plain.source == first.local + first.source == 36
    assert plain.local_share < 0.5 and plain.waited_seconds == 0
    assert first.local_share > 0.9 and first.waited_seconds > 0


def test_in_step_with_staging_it_reads_the_copy_without_waiting(
    source: Path, order: StagedFirst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is let through, then as many samples as it has are read: no timing, and no patience.

    The window of three shards wants one shard more than that, half a window.
    """
    gate, transfer = threading.Semaphore(0), session.transfer

    def gated(source: Any, file: StagedFile, *arguments: Any) -> int:
        while file.path.endswith(".tar") and not gate.acquire(timeout=0.05):
            arguments[-1].check()
        return transfer(source, file, *arguments)

    monkeypatch.setattr(session, "transfer", gated)
    shares = {}
    for name, one in (("first", order), ("global", Shuffled(36, 3))):
        options = {"order": order} if name == "first" else {}
        gate = threading.Semaphore(1)
        with readers.stage(source, tmp_path / name, background=True, threads=1, **options) as local:
            reader = open_staged(local, source)

            def one_more(position: int, reader: readers.Reader = reader, gate: threading.Semaphore = gate) -> None:
                gate.release()
                arrived = min(9, position // BATCH + 2)
                wait_for(lambda: sum(map(reader.store.copy.has, range(9))) >= arrived, "a shard")
                reader.store.close()  # check the copy now, not in a second

            read_epoch(reader, one, one_more)
            shares[name] = reader.store.stats().local_share
    assert shares["first"] == 1.0 and 0.3 < shares["global"] < 0.8


def loaders(order: Order, local: Path, source: Path, world: int) -> list[ImageLoader]:
    return [
        ImageLoader(
            open_staged(local, source, FOREVER), BATCH, order=order, ranks=Ranks(rank, world, "exact"),
            augment=[Resize((8, 8))], fields=("image", "index"), threads=1,
        )
        for rank in range(world)
    ]  # fmt: skip


def test_an_epoch_is_resumed_on_another_node(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    """Two ranks stop during staging; three continue elsewhere, where shards come in the order of what is left."""
    seen: list[int] = []
    with readers.stage(source, tmp_path / "a", background=True, order=order, bytes_per_second=SLOWLY) as local:
        states = []
        for loader in loaders(order, local, source, 2):
            batches = iter(loader)
            for _ in range(2):
                seen += next(batches)[1].tolist()
            states.append(loader.state_dict())
            del batches
        assert states[0] == states[1] and states[0]["cursor"] == 16
    assert len(set(seen)) == 16
    staging = readers.stage(source, tmp_path / "b", background=True, order=order, resume=states[0], threads=1)
    with staging as local:
        for loader in loaders(order.with_seed(8), local, source, 3):
            loader.load_state_dict(states[0])
            for _, indices in loader:
                seen += indices.tolist()
            assert loader.reader.store.stats().local_share == 1
        assert staging.wait(300)
        assert order_of_arrival(local)[:9] == names(source, order.shards(0, 16))
    assert sorted(seen) == list(range(36)) and order.shards(0, 16).tolist() != order.shards().tolist()


def test_patience_ends(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    """With a leader that copies nothing, and with none; a failed wait is the last."""
    local = staged(source, tmp_path, background=True, order=order, bytes_per_second=10_000)
    lock = FlockFile(local / ".staging/leader")
    for patience, held in ((0.2, True), (FOREVER, False)):
        assert not held or lock.take()
        reader = open_staged(local, source, patience)
        assert len(reader.read(0))
        waited = reader.store.stats().waited_seconds
        read_epoch(reader, order)
        assert reader.store.stats().source == 37 and reader.store.stats().local == 0
        assert reader.store.stats().waited_seconds == waited >= 0.2
        lock.release()


def test_what_is_waited_for_is_not_announced(
    source: Path, order: StagedFirst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would read it from the source, and staging once more."""
    announced: list[Path] = []

    def note(descriptor: int, ranges: Any) -> None:
        announced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent)

    monkeypatch.setattr("cache.stores.files.prefetch", note)
    some = staged(source, tmp_path / "some", fraction=0.3)
    none_yet = staged(source, tmp_path / "all", background=True, order=order, bytes_per_second=10_000)
    for local, patience, places in (
        (some, FOREVER, {some, source}),  # the rest does not come
        (none_yet, FOREVER, set()),
        (none_yet, 0.0, {source}),
    ):
        announced.clear()
        reader = open_staged(local, source, patience)
        reader.prefetch(range(36))
        assert set(announced) == places
        with pytest.raises(IndexError):
            reader.prefetch([36])


def test_nothing_waits_for_a_shard_that_is_not_wanted(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, fraction=0.3) as local:
        lock = FlockFile(local / ".staging/leader")
        assert lock.take()
        reader = open_staged(local, source, FOREVER)
        read_epoch(reader, Shuffled(36))
        assert 0 < reader.store.stats().local < 36 and reader.store.stats().waited_seconds < 1
        lock.release()
    nothing = open_staged(tmp_path / "nothing", source, FOREVER)
    read_epoch(nothing, Shuffled(36))
    assert nothing.store.stats().source == 36


def test_a_wait_outlives_the_leader(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    """The process that copies is killed while this one waits for a shard; its own thread brings it."""
    first = start(source, tmp_path, background=True, bytes_per_second=SLOWLY, linger=60)
    wait_for(lambda: (path := copy_of(tmp_path)) and (path / "dataset.json").exists(), "the index")
    with readers.stage(source, tmp_path, background=True, order=order, bytes_per_second=SLOWLY) as local:
        reader = open_staged(local, source, FOREVER)

        def kill(position: int) -> None:
            if position == BATCH:
                first.kill()

        read_epoch(reader, order, kill)
        first.communicate()
        assert reader.store.stats().local_share > 0.9


@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_every_way_to_read_is_counted(source: Path, tmp_path: Path, backend: Any) -> None:
    with readers.stage(source, tmp_path, fraction=0.3) as local:
        reader = readers.open(local, "train", fallback=source, backend=backend)
        assert isinstance(reader, readers.Reader) and reader.store.stats() == CopyStats()
        assert reader.store.stats().local_share == 0
        here = sum(shard.samples for n, shard in enumerate(reader.split_info.shards) if reader.store.copy.has(n))
        reader.read_many(list(range(-36, 0)))
        assert (reader.store.stats().local, reader.store.stats().source) == (here, 36 - here) and 0 < here < 36
        assert len(list(reader.stream())) == len(list(reader)) == 36
        for index in (0, -1):
            reader.read(index)
        assert (reader.store.stats().local, reader.store.stats().source) == (3 * here + 1, 3 * (36 - here) + 1)
        assert reader.store.stats().local_share == (3 * here + 1) / 110
        assert pickle.loads(pickle.dumps(reader)).store.stats() == CopyStats()
        for index in (36, -37):
            for read in (reader.read, lambda i: reader.read_many([i])):
                with pytest.raises(IndexError):
                    read(index)
        assert reader.store.stats().local + reader.store.stats().source == 110


def test_what_does_not_go_together(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the background"):
        readers.stage(source, tmp_path, order=order)
    with pytest.raises(ValueError, match="without the order"):
        readers.stage(source, tmp_path, background=True, resume={})
    with pytest.raises(ValueError, match="a set with a fallback"):
        readers.open(source, "train", patience_seconds=1)
    with pytest.raises(ValueError, match="0 or more, not nan"):
        open_staged(source, source, float("nan"))
    other = StagedFirst(np.array([0, 5, 36]))
    refused("no split has the 2 shards with 36 samples", source, tmp_path, background=True, order=other)
    token = ImageLoader(
        readers.open(source, "train"), 4, augment=[Resize((8, 8))], ranks=Ranks(rank=0, world_size=1)
    ).state_dict()
    with pytest.raises(readers.ResumeError, match="cannot continue with kind=staged-first"):
        readers.stage(source, tmp_path, background=True, order=order, resume=token).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_ends_all_waiting(
    source: Path, order: StagedFirst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues from the source, and `wait` raises the error."""
    transfer, third = session.transfer, names(source, order.shards())[2]

    def full(source: Any, file: StagedFile, *arguments: Any) -> int:
        if file.path == third:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return transfer(source, file, *arguments)

    monkeypatch.setattr(session, "transfer", full)
    staging = readers.stage(source, tmp_path, background=True, order=order, threads=1)
    with staging as local:
        reader = open_staged(local, source, FOREVER)
        read_epoch(reader, order)
        assert reader.store.stats().local <= 8 and reader.store.stats().source >= 28
        with pytest.raises(readers.StagingError, match="No space left on device in the middle of copying; make room"):
            staging.wait(300)
