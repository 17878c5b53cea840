"""Part of a set on a node: splits, a node's share, a fraction, and the source for the rest, also while more arrives."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from suites.staging import SLOWLY, assert_whole, size_of, staged, start, wait_for

import readers
from readers.opening.packed import open_copied
from readers.order import NodeLocal
from readers.staging import StageOptions, set_files


@pytest.fixture(scope="module")
def source(tree: Path, pack: Callable[..., Path]) -> Path:
    return pack(tree, samples_per_shard=5)


def shards_in(local: Path) -> list[str]:
    return sorted(path.name for path in local.glob("*.tar"))


def assert_reads(local: Path, source: Path) -> None:
    for split in ("train", "val"):
        with readers.open(local, split, fallback=source) as copy, readers.open(source, split) as original:
            everything = list(range(len(original)))
            assert [copy.read(i) for i in everything] == [original.read(i) for i in everything]
            assert [bytes(x) for x in copy.read_many(everything[::-1])] == [
                bytes(x) for x in original.read_many(everything[::-1])
            ]
            assert copy.fingerprint == original.fingerprint and copy.keys[3] == original.keys[3]
            assert [bytes(x) for x in copy.stream()] == [bytes(x) for x in original.stream()]


def test_splits(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, splits=("valid",)) as local:  # another name of val
        assert shards_in(local) == ["val-000000.tar", "val-000001.tar"]
        assert not (local / "train.index").exists()
        assert len(readers.open(local, "val")) == 9
        assert_reads(local, source)
    with readers.stage(source, tmp_path, splits=("train",)) as same:
        assert same == local and len(shards_in(local)) == 10
        assert_whole(local, source)
    with pytest.raises(readers.UnknownNameError, match="no split 'test'"):
        readers.stage(source, tmp_path, splits=("test",)).__enter__()


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 50])
def test_a_nodes_share_is_that_of_the_node_local_order(source: Path, nodes: int) -> None:
    """Every sample of local_part is in a staged shard, and every staged shard has one; without overlap each shard is
    staged once, on the first node that has one of its samples."""
    files = set_files(source)
    reader = readers.open(source, "train")
    column = reader.table.column("shard")
    seen: set[str] = set()
    for node in range(nodes):
        staged = [file.path for file in files.shards(StageOptions(splits=("train",), part=(node, nodes)))]
        part = NodeLocal(len(reader), nodes=nodes).local_part(node)
        needed = {reader.split_info.shards[number].path for number in np.unique(column[part.start : part.stop])}
        assert set(staged) == needed and len(staged) == len(needed)
        once = [file.path for file in files.shards(StageOptions(splits=("train",), part=(node, nodes), overlap=False))]
        assert set(once) == needed - seen and len(once) == len(needed - seen)
        seen |= needed
    assert seen == {shard.path for shard in reader.split_info.shards}


def test_each_node_reads_its_part_from_its_copy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for node in range(3):
        slurm = {"STEP_ID": 0, "PROCID": 2 * node, "NTASKS": 6, "LOCALID": 0, "NODEID": node, "NNODES": 3}
        for name, value in slurm.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        with readers.stage(source, tmp_path / f"node{node}", part="node") as local:
            assert 0 < len(shards_in(local)) < 10
            with readers.open(local, "train", fallback=tmp_path / "nowhere") as reader:
                for i in NodeLocal(len(reader), nodes=3).local_part(node):
                    assert reader.read(i)
            assert_reads(local, source)


@pytest.mark.parametrize(("fraction", "train", "val"), [(1e-9, 1, 1), (0.3, 3, 1), (0.99, 8, 2), (1.0, 8, 2)])
def test_a_fraction(source: Path, tmp_path: Path, fraction: float, train: int, val: int) -> None:
    with readers.stage(source, tmp_path, fraction=fraction) as local:
        names = shards_in(local)
        assert (sum("train" in name for name in names), sum("val" in name for name in names)) == (train, val)
        assert_reads(local, source)


def test_without_a_fallback_a_missing_shard_is_named(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, fraction=0.3) as local, readers.open(local, "train") as reader:
        assert reader.read(0)
        with pytest.raises(readers.StaleIndexError, match=r"train-000007.tar: shard cannot be opened"):
            reader.read(len(reader) - 1)


def test_training_starts_while_staging_goes_on(source: Path, tmp_path: Path) -> None:
    staging = readers.stage(source, tmp_path, background=True, bytes_per_second=100_000)
    with staging as local:
        reader = readers.open(local, "train", fallback=source)
        assert len(shards_in(local)) < 10 and not staging.wait(0.0)
        assert_reads(local, source)
        assert not reader.store.copy.has(7) and reader.read(len(reader) - 1)
        borrowed = reader.byte_range(len(reader) - 1)
        assert borrowed is not None and borrowed[0].parent == source
        assert staging.wait(300) and reader.store.copy.has(7)
        before = reader.store.stats().local
        wait_for(
            lambda: reader.read(len(reader) - 1) and reader.store.stats().local > before, "the reader to move over"
        )
        assert reader.byte_range(len(reader) - 1)[0] == local / "train-000007.tar"  # type: ignore[index]
        assert staging.counts.copied_bytes == size_of(source)
        assert_whole(local, source)


def test_the_thread_ends_with_the_context(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, background=True, bytes_per_second=20_000) as local:
        assert any(thread.name == "staging" for thread in threading.enumerate())
    assert not any(thread.name.startswith("stag") for thread in threading.enumerate())
    assert len(shards_in(local)) < 10 and not list((local / ".staging").glob("part-*"))
    assert_whole(staged(source, tmp_path), source)


def test_background_staging_by_many(source: Path, tmp_path: Path) -> None:
    """The leader is killed; another process's thread takes over. A process that needs little does not wait."""
    first = start(source, tmp_path, background=True, bytes_per_second=20_000, linger=60)
    wait_for(lambda: list(tmp_path.glob("packer-staged-*/*/*.tar")), "a shard")
    staging = readers.stage(source, tmp_path, background=True)
    with staging as local:
        assert len(shards_in(local)) < 10
        assert_reads(local, source)
        first.kill()
        first.communicate()
        assert staging.wait(300)
        assert_whole(local, source)


def test_a_background_error_does_not_stop_training(source: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(source, tmp_path / "own"))
    staging = readers.stage(own, tmp_path / "node", background=True, bytes_per_second=SLOWLY, threads=1)
    with staging as local:
        reader = readers.open(local, "train", fallback=source)
        own.rename(tmp_path / "away")
        with pytest.raises(readers.StagingError, match="is the source still there"):
            staging.wait(300)
        assert all(reader.read(i) for i in range(len(reader)))


def test_the_fallback_reader_is_pickled_and_closed(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, fraction=0.3) as local:
        reader = readers.open(local, "train", fallback=source, verify=True)
        last = reader.read(len(reader) - 1)
        reader.close()
        assert reader.read(len(reader) - 1) == last
        again = pickle.loads(pickle.dumps(reader))
        copied = again.store.source
        assert again.read(len(reader) - 1) == last and copied.copy.has(0) and not copied.copy.has(7)
        mapped = readers.open(local, "train", fallback=source, backend="mmap")
        assert bytes(mapped.read(len(reader) - 1)) == last
        few = open_copied(local, "train", fallback=source, open_shards=1)
        assert [few.read(i) for i in range(len(few))] == [reader.read(i) for i in range(len(few))]


def test_without_anything_local(source: Path, tmp_path: Path) -> None:
    assert_reads(tmp_path / "nothing", source)
    with pytest.raises(readers.DatasetError, match="no such directory"):
        readers.open(tmp_path / "nothing", fallback=tmp_path / "neither")
