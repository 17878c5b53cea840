"""Packed sets and folders: promises beyond the suite of all readers."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites.programs import run_python

import cache.errors
import readers
from cache.errors import CacheError, DatasetError, PackerError, SourceError, StaleIndexError, UnknownNameError
from cache.stores.ranges import plan_reads
from readers.opening.packed import open_packed
from readers.table import COLUMNS, Strings, column_names


@pytest.fixture(scope="module")
def packed(tree: Path, pack: Callable[..., Path]) -> Path:
    """train: 36 samples in 6 shards, val: 9 in 2; read-only."""
    return pack(tree, samples_per_shard=6)


@pytest.fixture(scope="module")
def images(tree: Path) -> list[bytes]:
    """The images of the split train, in order."""
    return [path.read_bytes() for path in sorted((tree / "train").rglob("*.JPEG"))]


def open_descriptors(folder: Path) -> list[str]:
    """The shards below a folder that this process has open (index columns are mapped, and close with the reader)."""
    paths = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    return [path for path in paths if path.startswith(f"{folder}/") and path.endswith(".tar")]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each reading system call."""
    calls: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("cache.stores.files.preadv", preadv)
    return calls


# --- reading ------------------------------------------------------------------------------------------------------
def test_byte_ranges_and_names(packed: Path, images: list[bytes]) -> None:
    with readers.open(packed) as reader:
        for i, image in enumerate(images):
            path, offset, length = reader.byte_range(i)  # type: ignore[misc]
            assert path.read_bytes()[offset : offset + length] == image, f"sample {i} has another range"
        for index in (36, -37, 10**9):
            for call in (lambda i=index: reader.has(i, "image"), lambda i=index: reader.byte_range(i)):
                with pytest.raises(IndexError, match=rf"sample {index} is outside the 36 of .*train"):
                    call()
        assert repr(reader) == f"Reader({packed} (train), 36 samples)" and reader.name(4) == "cat/cat_004.JPEG"


def test_neighbours_are_fetched_together(packed: Path, images: list[bytes], reads: list[int]) -> None:
    """One system call for all samples of a shard, in spite of the headers between them; one for a repeated sample."""
    with readers.open(packed) as reader:
        order = random.Random(0).sample(range(36), 36)
        assert [bytes(view) for view in reader.read_many(order)] == [images[i] for i in order]
        assert len(reads) == 6, f"36 samples of 6 shards took {len(reads)} reads"
        reads.clear()
        reader.read_many([4] * 20)
        assert reads == [len(images[4])], "a repeated sample was read more than once"
        reads.clear()
        assert list(reader.read_many([])) == [] and reads == []


def test_few_shards_open_at_a_time(packed: Path, images: list[bytes]) -> None:
    reader = open_packed(packed, open_shards=1)
    order = [i % 36 for i in range(0, 36 * 7, 7)]
    assert [reader.read(i) for i in order] == [images[i] for i in order]
    assert len(open_descriptors(packed)) == 1, "more shards are open than allowed"
    assert [bytes(view) for view in reader.read_many(order)] == [images[i] for i in order]
    assert len(open_descriptors(packed)) == 1
    reader.close()
    assert open_descriptors(packed) == [], "close() left descriptors open"
    assert reader.read(0) == images[0]
    del reader
    gc.collect()
    assert open_descriptors(packed) == [], "a dropped reader left descriptors open"


def test_more_shards_than_the_limit_of_open_files(packed: Path, images: list[bytes], backend: str = "mmap") -> None:
    """In a process that may open only a few files: the shards opened first are closed, and the bytes are the same."""
    script = (
        "import resource, sys, readers, crc32c, os\n"
        f"reader = readers.open({str(packed)!r}, backend={backend!r}, verify=True)\n"
        "reader.table.columns.check(); reader.keys\n"
        "used = max(map(int, os.listdir('/proc/self/fd')))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))\n"
        "print([crc32c.crc32c(reader.read(i * 7 % 36)) for i in range(36)])\n"
        "print([crc32c.crc32c(view) for i in range(36) for view in reader.read_many([i, i])])\n"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    singly, together = map(json.loads, done.stdout.splitlines())
    assert singly == [crc32c(images[i * 7 % 36]) for i in range(36)]
    assert together == [crc32c(image) for image in images for _ in range(2)]


def test_pickles_carry_paths_not_descriptors_or_keys(packed: Path) -> None:
    reader = open_packed(packed, "val", backend="mmap", verify=True, open_shards=3)
    reader[reader.keys[3]]  # builds the index of keys
    text = pickle.dumps(reader)
    assert len(text) < 8000, f"{len(text)} bytes: the pickle carries data"
    reader.close()
    again = pickle.loads(text)
    files = again.store.source
    assert (again.split, files.mapped, files.open_shards) == ("val", True, 3)
    assert open_descriptors(packed) == [], "unpickling opened a shard"
    assert [sample.key for sample in again] == [sample.key for sample in reader]


def test_every_key_finds_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an index of 8 bytes a sample; of samples with one key, the first; also where two keys share a hash."""
    keys = [f"{i * 7919 % 5000:04d}" for i in range(5000)]
    table = readers.Table.of(keys)
    assert [table.find(key) for key in keys[::37]] == list(range(0, 5000, 37))
    chosen = table.take([9, 4, 4, 9])
    assert (chosen.find(keys[9]), chosen.find(keys[4])) == (0, 1)
    for missing in ("", "5000", "0"):
        with pytest.raises(UnknownNameError, match=f"no sample has the key '{missing}'; the first is '0000'"):
            table.find(missing)
    with pytest.raises(UnknownNameError, match=r"no sample has the key 'a'$"):
        readers.Table.of([]).find("a")
    monkeypatch.setattr("readers.table.hash", len, raising=False)
    few = readers.Table.of(["bb", "aa", "c", "cc"])
    assert [few.find(key) for key in ("bb", "aa", "c", "cc")] == [0, 1, 2, 3]
    for missing in ("dd", "d", ""):
        with pytest.raises(UnknownNameError, match=f"no sample has the key '{missing}'"):
            few.find(missing)


def test_an_empty_split(tmp_path: Path) -> None:
    split = {"samples": 0, "root": "", "index": "train.index", "shards": []}
    content = {"kind": "packer-dataset", "version": 1, "format": "tfrecord", "fields": {"image": "image"}}
    content |= {"classes": [], "label_offset": 0, "splits": {"train": split}}
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    (tmp_path / "train.index").mkdir()
    dtypes = {"image.offset": "<u8", "image.length": "<u8", "image.crc32c": "<u4", "key": "u1", "image.name": "u1"}
    for file in column_names(["image"]):
        name = file.removesuffix(".npy")
        ends = name in ("key.offset", "image.name.offset")
        dtype = "<u8" if ends else {**COLUMNS, **dtypes}[name]
        np.save(tmp_path / "train.index" / file, np.zeros(int(ends), dtype))
    with readers.open(tmp_path) as reader:
        assert (len(reader), list(reader), list(reader.keys), list(reader.stream())) == (0, [], [], [])
        assert reader.read_many([]) == []
        with pytest.raises(IndexError, match="sample 0 is outside the 0 of"):
            reader.read(0)


# --- splits -------------------------------------------------------------------------------------------------------
def test_split_names(packed: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(packed, tmp_path / "set"))
    content = json.loads((root / "dataset.json").read_text())
    train, val = content["splits"]["train"], content["splits"]["val"]

    def rewrite(splits: dict[str, Any]) -> None:
        (root / "dataset.json").write_text(json.dumps({**content, "splits": splits}))

    assert (len(readers.open(root)), len(readers.open(root, "train"))) == (36, 36)
    for stored in ("val", "valid", "validation"):
        rewrite({"train": train, stored: val})
        for requested in ("val", "valid", "validation"):
            reader = readers.open(root, requested)
            assert (reader.split, len(reader)) == (stored, 9), f"{requested} asked for, {stored} stored"
    rewrite({"val": val})
    assert readers.open(root).split == "val", "the only split needs no name"
    rewrite({"first": train, "test": val})
    with pytest.raises(UnknownNameError, match="no split 'val'; it has first, test"):
        readers.open(root, "val")
    with pytest.raises(UnknownNameError, match="choose a split: first, test") as caught:
        readers.open(root)
    assert readers.open(packed).dataset.to_json() == (packed / "dataset.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="backend must be 'pread' or 'mmap', not 'magic'"):
        readers.open(packed, backend="magic")  # type: ignore[arg-type]
    assert isinstance(caught.value, LookupError) and isinstance(caught.value, DatasetError)


# --- folders ------------------------------------------------------------------------------------------------------
def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(make_jpeg(number))
    reader = readers.open_folder(tmp_path)
    assert [(sample.key, sample.label) for sample in reader] == [("0", None), ("1", None), ("2", None)]
    assert (reader.labels.tolist(), tuple(reader.classes), reader.split) == ([-1, -1, -1], (), "train")


def test_invalid_folders(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    reader = readers.open_folder(tmp_path / "tree", "val")
    (tmp_path / "tree" / "val" / reader.name(2)).unlink()
    reader.prefetch([2])
    with pytest.raises(StaleIndexError, match=rf"{reader.name(2)}: cannot be read any more"):
        reader.read_many([1, 2])
    (tmp_path / "empty").mkdir()
    for folder, split, message in (
        ("tree", "test", "no split 'test'; it has train, val"),
        ("nowhere", None, "not a directory"),
        ("empty", None, "no image files found"),
    ):
        with pytest.raises(SourceError, match=message):
            readers.open_folder(tmp_path / folder, split)


def test_errors_are_also_builtins() -> None:
    for error in vars(cache.errors).values():
        if isinstance(error, type) and issubclass(error, Exception) and error not in (PackerError, CacheError):
            builtin = {kind for kind in error.__mro__ if kind.__module__ == "builtins"}
            assert issubclass(error, PackerError) and builtin - {Exception, BaseException, object}, error


# --- string columns -----------------------------------------------------------------------------------------------
TEXTS = st.lists(st.text(max_size=12), max_size=30)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=TEXTS, data=st.data())
def test_string_columns_behave_like_lists(texts: list[str], data: st.DataObject) -> None:
    column = Strings.of(texts)
    assert len(column) == len(texts) and list(column) == texts and column == texts
    assert column.blob.tobytes() == "".join(texts).encode() and column.offsets.dtype == np.uint64
    part = data.draw(st.slices(len(texts)))
    assert column[part] == texts[part]
    for i in range(-len(texts), len(texts)):
        assert column[i] == texts[i]
    for i in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError, match=f"index {i} is outside the {len(texts)} items"):
            column[i]
    assert list(reversed(column)) == texts[::-1]
    if texts:
        picked = data.draw(st.lists(st.integers(0, len(texts) - 1)))
        assert column.take(np.array(picked, np.int64)) == [texts[i] for i in picked]
        assert texts[0] in column and column.index(texts[-1]) == texts.index(texts[-1])
    other = data.draw(TEXTS)
    assert (column == Strings.of(other)) == (texts == other) == (column == other)
    assert column != "".join(texts)


def test_string_columns_longer_than_a_block() -> None:
    texts = [str(i) for i in range(70_000)]
    column = Strings.of(texts)
    assert list(column) == texts and column[69_999] == "69999"


def test_wrong_offsets() -> None:
    blob = np.frombuffer(b"abcdef", np.uint8)

    def column(*offsets: int) -> Strings:
        return Strings(blob, np.array(offsets, np.uint64))

    for offsets in ((), (0, 5), (1, 6), (0, 7), (0, 2**64 - 1)):
        with pytest.raises(DatasetError, match="offset"):
            column(*offsets)
    falling = column(0, 4, 2, 6)
    with pytest.raises(DatasetError, match="are not ascending"):
        list(falling)
    with pytest.raises(DatasetError, match="string 1 has the offsets 4 to 2"):
        falling[1]
    with pytest.raises(DatasetError, match="string 0 has the offsets 0 to 99"):
        column(0, 99, 6)[0]
    with pytest.raises(UnicodeEncodeError):
        Strings.of(["\ud800"])


# --- read plans ----------------------------------------------------------------------------------------------------
SIZE = 200
RANGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, SIZE), st.integers(0, 60)).map(
        lambda r: (r[0], r[1], min(r[2], SIZE - r[1]))
    ),
    max_size=25,
)


@given(ranges=RANGES, gap=st.integers(0, 40), limit=st.integers(1, 120), repeat=st.booleans())
def test_read_plans(ranges: list[tuple[int, int, int]], gap: int, limit: int, repeat: bool) -> None:
    """Executes a plan on random bytes: every wanted range must be where the plan says."""
    ranges = ranges * 2 if repeat else ranges
    shards = [np.random.default_rng(number).bytes(SIZE) for number in range(3)]
    shard, offset, length = np.array(ranges, np.int64).reshape(-1, 3).T
    plan = plan_reads(shard.astype(np.uint32), offset, length, gap, limit)
    runs = list(zip(plan.run_shard.tolist(), plan.run_offset.tolist(), plan.run_length.tolist(), strict=True))
    buffer = bytearray(plan.total_bytes)
    for (s, o, n), place in zip(runs, plan.run_place.tolist(), strict=True):
        assert 0 <= o <= o + n <= SIZE and 0 <= place <= place + n <= len(buffer), (
            "a run leaves its shard or the buffer"
        )
        buffer[place : place + n] = shards[s][o : o + n]
    for (s, o, n), place in zip(ranges, plan.place.tolist(), strict=True):
        assert buffer[place : place + n] == shards[s][o : o + n], f"range {(s, o, n)} is not at {place}"
    assert len(buffer) == sum(n for _, _, n in runs), "the buffer is not filled exactly"
    assert runs == sorted(runs), "runs are not in the order of the disk"
    for (s, o, n), (t, p, _) in itertools.pairwise(runs):
        assert s < t or o + n <= p, "bytes are read twice"
    for s, o, n in runs:
        spare = widest_gap([(p, p + m) for t, p, m in ranges if t == s and o <= p <= p + m <= o + n])
        assert spare <= gap, f"a run bridges {spare} unwanted bytes"
        if n > limit:
            check_not_cuttable(s, o, n, ranges, limit)


def widest_gap(ranges: list[tuple[int, int]]) -> int:
    """Between neighbours; an empty range counts as one."""
    widest, reach = 0, min(start for start, _ in ranges)
    for start, stop in sorted(ranges):
        widest, reach = max(widest, start - reach), max(reach, stop)
    return widest


def check_not_cuttable(shard: int, begin: int, length: int, ranges: list[tuple[int, int, int]], limit: int) -> None:
    """A run over the limit must have no cut beyond the limit that splits no wanted range."""
    inside = sorted((o, o + n) for s, o, n in ranges if s == shard and begin <= o < begin + length)
    for o in {o for o, _ in inside if o > begin}:
        splits_none = all(end <= o for p, end in inside if p < o)
        beyond = all(end - begin > limit for p, end in inside if p == o)
        assert not (splits_none and beyond), f"[{begin}, {begin + length}) could be cut at {o}"


def test_an_empty_plan() -> None:
    empty_column = np.zeros(0, np.int64)
    plan = plan_reads(empty_column, empty_column, empty_column)
    assert plan.total_bytes == 0 and all(len(part) == 0 for part in plan[:-1])


@pytest.mark.parametrize(("gap", "limit", "runs"), [(9, 100, 2), (10, 100, 1), (11, 100, 1), (10, 19, 2), (10, 20, 1)])
def test_the_widest_gap_and_the_longest_run(gap: int, limit: int, runs: int) -> None:
    """Two ranges of 5 bytes, 10 apart: one run of 20 bytes where both limits allow it."""
    plan = plan_reads(np.zeros(2, np.uint32), np.array([0, 15], np.int64), np.array([5, 5], np.int64), gap, limit)
    assert len(plan.run_offset) == runs


def test_plans_of_large_offsets() -> None:
    offset = np.array([1 << 45, 5, (1 << 45) + 100], np.int64)
    plan = plan_reads(np.zeros(3, np.uint32), offset, np.array([100, 7, 50], np.int64))
    assert plan.run_offset.tolist() == [5, 1 << 45] and plan.run_length.tolist() == [7, 150]
    assert plan.place.tolist() == [7, 0, 107]
