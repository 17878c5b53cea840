"""Tables: what is known of samples is taken, joined and located, and the bytes stay those of the samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from set_cases import FORMATS

import packer
import readers
from cache.stores import Store
from readers.augment import CenterCrop
from readers.loader import ImageLoader
from readers.torch import ImageDataset


@pytest.fixture(scope="module")
def sets(tree: Path, pack: Callable[..., Path]) -> dict[str, Path]:
    return {to: pack(tree, to, samples_per_shard=6) for to in FORMATS}


def everything(reader: Any) -> list[tuple[str, str, bytes]]:
    return [(s.key, reader.classes[s.label], bytes(s.image)) for s in reader]


def test_readers_one_after_the_other(sets: dict[str, Path], tree: Path) -> None:
    parts = [
        readers.open(sets["tar"], "val").select(labels=["owl", "cat"]),
        readers.open(sets["hdf5"], "train").select(indices=[30, 2, 2, 17]),
        readers.open_folder(tree, "val"),
    ]
    both = readers.concat(parts)
    expected = [one for part in parts for one in everything(part)]
    assert everything(both) == expected and len(both) == sum(map(len, parts))
    order = np.random.default_rng(1).permutation(len(both))
    assert [bytes(data) for data in both.read_many(order)] == [expected[i][2] for i in order]
    assert everything(pickle.loads(pickle.dumps(both))) == expected
    assert [both.name(i) for i in (0, 7)] == [parts[0].name(0), parts[1].name(1)]
    assert both.fingerprint != readers.concat(parts[::-1]).fingerprint
    both.close()


def test_classes_are_unified_by_name(sets: dict[str, Path]) -> None:
    class Bytes(Store):
        def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
            return b"x%d" % row

    other = readers.Reader(readers.Table.of(["a", "b", "c"], [0, 1, -1], ["zebra", "owl"]), Bytes())
    both = readers.concat([readers.open(sets["tar"], "val"), other])
    assert both.classes == ("cat", "dog", "owl", "zebra") and both.labels[-3:].tolist() == [3, 2, -1]
    assert both.class_to_idx["zebra"] == 3 and bytes(both.read(-2)) == b"x1"
    with pytest.raises(ValueError, match="the same fields"):
        readers.concat([other, readers.Reader(readers.Table.of(["a"], sizes={"mask": [1]}), Bytes())])


def test_a_cache_under_a_selection_serves_the_whole(sets: dict[str, Path], place: dict[str, Any]) -> None:
    """And a cache over a cache: in memory over one on a disk."""
    with readers.open(sets["tar"], "train") as base:
        expected = [bytes(data) for data in base.read_many(range(36))]
        slow = readers.cached(base, **place)
        disk = {**place, "directory": place["directory"].parent / "disk"}
        disk["directory"].mkdir()
        below = readers.cached(base, **disk)
        above = readers.cached(below, **place)
        few = above.select(indices=[5, 30, 5])
        assert [bytes(data) for data in few.read_many(range(3))] == [expected[i] for i in (5, 30, 5)]
        assert (above.stats().present, below.stats().present) == (2, 2)
        again = readers.cached(below.select(indices=[30, 5]), **{**place, "job": "another"})
        assert [bytes(again.read(i)) for i in (0, 1)] == [expected[30], expected[5]]
        assert below.stats().hits >= 2, "what the first tier has was read again"
        for reader in (slow, again, above):
            reader.close()
        assert [bytes(data) for data in base.read_many(range(36))] == expected
        assert list(disk["directory"].iterdir()) == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_shard_is_read_without_an_index(sets: dict[str, Path], to: str) -> None:
    with readers.open(sets[to], "train") as packed:
        first = packed.split_info.shards[0]
        with packer.open_shard(sets[to] / first.path) as shard:
            assert [(s.key, s.label, bytes(s.image)) for s in shard] == [
                (s.key, s.label, bytes(s.image)) for s in packed[: first.samples]
            ]
            few = shard.select(labels=[0])
            assert len(few) > 0 and set(few.labels.tolist()) == {0}
            assert [bytes(d) for d in pickle.loads(pickle.dumps(few)).stream()] == [bytes(d) for d in few.stream()]
    with pytest.raises(readers.SourceError, match=r"not a file; .*readers\.open"):
        packer.open_shard(sets[to])


def test_the_words_of_torchvision(sets: dict[str, Path]) -> None:
    with readers.open(sets["tar"], "train") as reader:
        numbers = {"cat": 0, "dog": 1, "owl": 2}
        assert reader.class_to_idx == numbers == ImageDataset(reader).class_to_idx
        loader = ImageLoader(reader, 4, augment=[CenterCrop(16)])
        assert loader.dataset is reader and len(loader.dataset) == 36
        assert loader.dataset.class_to_idx == numbers and loader.dataset[0].key == reader.keys[0]
