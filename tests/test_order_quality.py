"""What orders cost and are worth: the figures rise and fall as they should, and agree with counting by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of

import packer
import readers
from readers.order import (
    BlockShuffled,
    NodeLocal,
    Order,
    Sequential,
    Shuffled,
    ShuffleReport,
    Weighted,
    block_shuffled,
    describe,
    read_amplification,
    shuffle_quality,
)

N = 100_000


def blocks(window: int, samples: int = 100) -> BlockShuffled:
    return BlockShuffled(np.arange(0, N + 1, samples), window)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quality")
    sizes = {i: (16 + i % 7 * 16, 32) for i in range(400)}
    tree_of(root / "tree", {f"class{i // 100}/{i:04d}.jpg": make_jpeg(i % 40, size) for i, size in sizes.items()})
    packer.convert(
        root / "tree", to="tar", output=root / "set", run=packer.Run(workers=1), shards=packer.Shards(samples=150)
    )
    return root


# --- mixing -------------------------------------------------------------------------------------------------------
def test_better_mixing_rates_higher() -> None:
    ladder: list[Order] = [Sequential(N), blocks(1), blocks(4), blocks(16), blocks(64), Shuffled(N)]
    rated = [shuffle_quality(order) for order in ladder]
    assert rated[0] < 0.01 < rated[1] and rated == sorted(rated), rated
    assert rated[-1] > 0.85 and 0.05 < rated[3] < 0.6
    assert shuffle_quality(NodeLocal(N, 4)) > 0.8, "nodes take turns, so together they mix"
    assert shuffle_quality(Weighted(np.arange(N) ** 4.0)) < 0.1


@pytest.mark.parametrize("window", [8, 128])
def test_a_block_shuffle_rates_as_its_window_says(window: int) -> None:
    """window / (window + batch): a batch is drawn from the blocks of one window."""
    rated = np.mean([shuffle_quality(blocks(window), epoch, batch_size=64) for epoch in range(5)])
    assert rated == pytest.approx(window / (window + 64), rel=0.3)


def test_a_global_shuffle_rates_one_on_average() -> None:
    """Uncapped, over seeds: the formula is the variance that is observed."""
    n, size = 1000, 100
    means = [Shuffled(n, seed).indices(0, np.arange(size)).mean() for seed in range(1500)]
    observed = np.mean(((np.array(means) + 0.5) / n - 0.5) ** 2)
    expected = (1 - 1 / n**2) / 12 / size * (n - size) / (n - 1)
    assert abs(observed / expected - 1) < 0.1


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 17])
def test_small_sets_have_figures_too(n: int) -> None:
    for order in (Sequential(n), Shuffled(n)):
        assert 0 <= shuffle_quality(order) <= 1


# --- reading ------------------------------------------------------------------------------------------------------
def by_hand(reader: Any, order: list[list[int]], unit: int) -> float:
    """Units touched, one by one."""
    fetched = used = 0
    for samples in order:
        units = set()
        for i in samples:
            path, offset, length = reader.byte_range(i)
            units |= {(path, unit_number) for unit_number in range(offset // unit, (offset + length - 1) // unit + 1)}
            used += length
        fetched += len(units) * unit
    return fetched / used


@pytest.mark.parametrize("unit", [1, 4096])
def test_samples_one_by_one(packed: Path, unit: int) -> None:
    with readers.open(packed / "set") as reader:
        found = read_amplification(Shuffled(400), reader, request_bytes=unit)
        assert found == pytest.approx(by_hand(reader, [[i] for i in range(400)], unit))


def test_blocks_once_and_whole(packed: Path) -> None:
    with readers.open(packed / "set") as reader:
        order = block_shuffled(reader, block_bytes=64 << 10, window=2)
        parts = [list(range(a, b)) for a, b in zip(order.starts, order.starts[1:], strict=False)]
        assert sorted(i for part in parts for i in part) == list(range(400)) and len(parts) > 4
        assert max(int(reader.sizes()[part[:-1]].sum()) for part in parts) < 64 << 10
        whole = read_amplification(order, reader)
        assert whole >= by_hand(reader, parts, 512), "headers between the samples are read too"
        singly = read_amplification(Shuffled(400), reader)
        assert 1 <= read_amplification(Sequential(400), reader) <= whole < singly


def test_folders_and_selections(packed: Path) -> None:
    with readers.open_folder(packed / "tree") as plain:
        sizes = plain.sizes()
        expected = (-(-sizes // 4096) * 4096).sum() / sizes.sum()
        assert read_amplification(Shuffled(400), plain) == pytest.approx(expected)
        assert read_amplification(Shuffled(100), plain.select(labels=0)) > 1
    with readers.open(packed / "set") as reader:
        few = reader.select(indices=range(0, 400, 40))
        apart, singly = read_amplification(BlockShuffled(np.array([0, 10])), few), read_amplification(Shuffled(10), few)
        assert apart == pytest.approx(singly), "samples far apart are not read together"
        assert read_amplification(Shuffled(10), few) > read_amplification(Shuffled(10), few, request_bytes=512)


def test_a_report_that_people_read(packed: Path) -> None:
    assert (
        str(ShuffleReport(1.0249, 0.9301)) == "reads 1.02 bytes per byte used; mixes 0.93 as well as a global shuffle"
    )
    with readers.open(packed / "set") as reader:
        report = describe(Shuffled(400), reader)
        assert report.read_amplification == read_amplification(Shuffled(400), reader)
        assert report.shuffle_quality == shuffle_quality(Shuffled(400)) and "bytes per byte used" in str(report)
        assert read_amplification(Shuffled(0), reader) == 1
        with pytest.raises(ValueError, match="request_bytes is 0"):
            read_amplification(Shuffled(400), reader, request_bytes=0)
