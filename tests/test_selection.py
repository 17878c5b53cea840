"""Selections: the samples that fulfil all criteria, of any kind of reader."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg
from hypothesis import given
from hypothesis import strategies as st

import readers
from cache.errors import SourceError, StaleIndexError, UnknownNameError

KINDS = ("shards", "folder")


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, packed: Path, tree: Path) -> Iterator[Any]:
    """36 samples, 12 in each of cat, dog, owl."""
    with readers.open(packed, "train") if request.param == "shards" else readers.open_folder(tree, "train") as reader:
        yield reader


def keys(reader: Any) -> list[str]:
    return [sample.key for sample in reader]


# --- a reader like any other --------------------------------------------------------------------------------------
INDICES = [30, 2, 2, -1, 17, 0]


def test_a_selection_of_a_selection_reads_through_both(base: Any) -> None:
    reader = base.select(indices=range(35, -1, -1)).select(indices=[35 - i % 36 for i in INDICES])
    assert reader.store is base.store and reader.table.rows.tolist() == [i % 36 for i in INDICES]
    assert repr(reader) == f"Reader(6 samples of {base.table.title})"
    for call in (reader.read_many, reader.prefetch, reader.image_info):
        with pytest.raises(IndexError, match="not all inside the samples of "):
            call([0, 6])
    with pytest.raises(IndexError, match="outside the 6 items"):
        reader.keys[6]


def test_mapped_indices_are_pickled_by_path(base: Any, tmp_path: Path) -> None:
    path = tmp_path / "indices.npy"
    np.save(path, np.tile(np.arange(36), 5000))
    indices = np.load(path, mmap_mode="r")
    reader = readers.Reader(base.table.take(indices), base.store)
    text = pickle.dumps(reader)
    again = pickle.loads(text)
    assert len(text) < 20_000 and isinstance(again.table.rows, np.memmap)
    assert again.read(40) == base.read(4) and again.fingerprint == reader.fingerprint
    part = pickle.loads(pickle.dumps(readers.Reader(base.table.take(indices[7:9]), base.store)))
    assert part.table.rows.tolist() == [7, 8], "a part of a map was taken for the whole"
    path.unlink()
    with pytest.raises(StaleIndexError, match="indices of a selection cannot be mapped any more"):
        pickle.loads(text)


# --- what is asked for --------------------------------------------------------------------------------------------
def test_labels_keep_their_meaning(base: Any) -> None:
    for asked in ("dog", 1, ["dog"], [1], np.array([1]), ("dog", 1)):
        reader = base.select(labels=asked)
        assert set(reader.labels.tolist()) == {1} and len(reader) == 12
        assert {reader.classes[label] for label in reader.labels} == {"dog"}
    assert len(base.select(labels=["cat", 2])) == 24
    for wrong in ("bird", 3, -2):
        with pytest.raises(UnknownNameError, match=rf"no class {wrong!r}; it has 3: cat, dog, owl"):
            base.select(labels=["cat", wrong])


def test_keys_by_name_and_by_pattern(base: Any) -> None:
    assert keys(base.select(keys=["owl/owl_001", "cat/cat_003"])) == ["cat/cat_003", "owl/owl_001"]
    assert keys(base.select(keys="*_00[12]")) == [f"{c}/{c}_00{i}" for c in ("cat", "dog", "owl") for i in (1, 2)]
    assert len(base.select(labels="cat", keys="cat*")) == 12
    with pytest.raises(UnknownNameError, match=r"1 keys are not among the 36 asked: 'none'"):
        base.select(keys=["none", "cat/cat_003"])
    with pytest.raises(UnknownNameError, match=r"1 keys are not among the 12 asked: 'owl/owl_001'"):
        base.select(labels=0, keys=["owl/owl_001"])


def test_sizes_and_masks(base: Any) -> None:
    sizes = base.sizes()
    middle = int(np.median(sizes))
    assert base.select(min_bytes=middle).sizes().min() >= middle
    assert base.select(max_bytes=middle).sizes().max() <= middle
    assert len(base.select(min_bytes=middle)) + len(base.select(max_bytes=middle - 1)) == 36
    mask = np.arange(36) % 3 == 0
    assert base.select(mask=mask).table.rows.tolist() == np.flatnonzero(mask).tolist()
    assert base.select(mask=mask, indices=[9, 8, 3, 9]).table.rows.tolist() == [9, 3, 9]
    with pytest.raises(ValueError, match=r"mask must be bool \[36\], found int64 \[36\]"):
        base.select(mask=np.ones(36, np.int64))
    with pytest.raises(ValueError, match=r"mask must be bool \[36\], found bool \[3\]"):
        base.select(mask=[True, False, True])


def test_the_shorter_side(tmp_path: Path) -> None:
    for i, size in enumerate([(64, 48), (32, 200), (48, 48), (100, 47)]):
        (tmp_path / f"{i}.jpg").write_bytes(make_jpeg(i, size))
    (tmp_path / "9.jpg").write_bytes(b"no image")
    reader = readers.open_folder(tmp_path)
    assert keys(reader.select(min_side=48)) == ["0", "2"]
    info = reader.image_info([4, 0])
    assert (info.height.tolist(), info.media.tolist(), info.orientation.tolist()) == ([0, 48], [0, 1], [0, 1])


def test_only_the_files_of_a_selection_are_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = readers.open_folder(tree, "train")
    asked: list[int] = []
    read_one = type(reader.store).read_one

    def note(self: Any, row: int, *where: int) -> Any:
        asked.append(row)
        return read_one(self, row, *where)

    monkeypatch.setattr(type(reader.store), "read_one", note)
    reader.select(labels="dog", fraction=0.25).image_info([0, 1])
    assert len(asked) == 2
    reader.select(labels="dog", min_side=24)
    assert len(asked) == 14


@given(a=st.floats(0.01, 1), b=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_fractions(tree: Path, a: float, b: float, seed: int) -> None:
    reader = readers.open_folder(tree, "train")
    small, large = sorted((a, b))
    few, many = reader.select(fraction=small, seed=seed), reader.select(fraction=large, seed=seed)
    assert len(few) == max(1, round(36 * small)) and set(few.table.rows.tolist()) <= set(many.table.rows.tolist())
    assert (np.diff(few.table.rows) > 0).all(), "not in stored order"


def test_everything_and_nothing(base: Any) -> None:
    assert base.select().table.rows.tolist() == list(range(36))
    with pytest.raises(SourceError, match=r"nothing is selected: none of the 36 samples of .* has labels='cat', min_b"):
        base.select(labels="cat", min_bytes=10**9)
    with pytest.raises(SourceError, match="has indices=\\[\\]"):
        base.select(indices=[])
    with pytest.raises(IndexError, match="not all inside the samples of"):
        base.select(indices=[36])
    for wrong in ([0.5], [[1]], [True]):
        with pytest.raises(ValueError, match="indices must be integers in one dimension"):
            base.select(indices=wrong)
    for fraction in (0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="expected more than 0 and at most 1"):
            base.select(fraction=fraction)


# --- fingerprints -------------------------------------------------------------------------------------------------
def test_the_same_samples_have_one_fingerprint(base: Any) -> None:
    same = [base.select(labels=0), base.select(indices=range(12)), base.select(labels=[0, 1]).select(labels=0)]
    assert (
        len({reader.fingerprint for reader in same}) == 1 and base.select(labels=1).fingerprint != same[0].fingerprint
    )


def test_what_changes_a_fingerprint(packed: Path, tree: Path, tmp_path: Path) -> None:
    train, val = readers.open(packed, "train"), readers.open(packed, "val")
    assert train.fingerprint == f"{train.dataset.fingerprint()}/train" != val.fingerprint
    assert readers.open_folder(tree, "train").fingerprint != readers.open_folder(tree, "val").fingerprint
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(make_jpeg(number))
    before = readers.open_folder(tmp_path).fingerprint
    assert readers.open_folder(tmp_path).fingerprint == before
    (tmp_path / "2.jpg").write_bytes(b"")
    assert readers.open_folder(tmp_path).fingerprint != before
