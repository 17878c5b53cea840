"""What users write first: short representations, slices and keys, names of formats, errors that say what to write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg

import packer
import readers
from packer.inspection import compare_orders
from readers.errors import UnknownNameError
from readers.order import Shuffled
from readers.order.quality import shuffle_quality


@pytest.fixture(scope="module")
def packed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("asking") / "set"
    packer.convert(tree, "tar", out, workers=1)
    return out


@pytest.fixture(params=["shards", "folder", "selected", "cached"])
def reader(request: pytest.FixtureRequest, tree: Path, packed: Path, tmp_path: Path) -> Iterator[Any]:
    if request.param == "folder":
        opened: Any = readers.open_folder(tree, "train")
    else:
        opened = readers.open(packed, "train")
    if request.param == "selected":
        opened = opened.select(indices=range(36))
    if request.param == "cached":
        opened = readers.cached(opened, 1.0, directory=tmp_path)
    with opened:
        yield opened


def test_samples_by_number_slice_and_key(reader: Any) -> None:
    assert [sample.key for sample in reader[0:3]] == list(reader.keys[:3])
    assert [sample.key for sample in reader[-2:]] == list(reader.keys[-2:])
    assert reader[::-6][0] == reader[35] == reader[-1] == reader[np.int64(35)]
    assert reader[100:] == []
    assert reader["dog/dog_003"] == reader[15] and reader["dog/dog_003"].label == 1


def test_what_is_no_sample_is_an_error_that_says_what_is(reader: Any) -> None:
    with pytest.raises(UnknownNameError, match="no sample has the key 'cow/1'; the first is 'cat/cat_000'"):
        reader["cow/1"]
    with pytest.raises(LookupError):
        reader["cow/1"]
    for wrong in (1.5, None, [1, 2], np.arange(3)):
        with pytest.raises(TypeError, match="by its number, its key or a slice, not by"):
            reader[wrong]
    with pytest.raises(IndexError):
        reader[36]


def test_a_sample_is_shown_in_one_line(reader: Any) -> None:
    shown = repr(reader[0])
    assert shown == f"Sample('cat/cat_000', label=0, {{image: {len(reader[0].image)} bytes}})"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("h5", "hdf5"), ("HDF5", "hdf5"), ("webdataset", "tar"), ("WebDataset", "tar"), ("TFRecord", "tfrecord")],
)
def test_formats_go_by_their_other_names(tmp_path: Path, written: str, meant: str) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "in/a/1.jpg").write_bytes(make_jpeg(1))
    result = packer.convert(tmp_path / "in", written, tmp_path / "out", workers=1)
    assert result.format == meant == readers.open(tmp_path / "out").dataset.format
    assert packer.convert(tmp_path / "in", meant, tmp_path / "out", workers=1).already_done, "the same set by each name"


def test_a_format_by_another_name_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "in/a/1.jpg").write_bytes(make_jpeg(1))
    line = [sys.executable, "-m", "packer", "convert", tmp_path / "in", "--to"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": False, "cwd": tmp_path}
    assert subprocess.run([*line, "H5"], **options).stdout.startswith("in-hdf5: 1 sample ")
    wrong = subprocess.run([*line, "lmdb"], **options)
    assert wrong.returncode == 2 and "'lmdb' is not one of 'hdf5', 'tfrecord', 'tar' (h5 is hdf5, " in wrong.stderr, (
        wrong.stderr
    )


@pytest.mark.parametrize("source", [["a", "b"], None, 3, {"train": "a"}])
def test_a_source_that_is_none_is_a_type_error_that_says_what_is(source: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected one path, or one Source .* name their images in a \.csv"):
        packer.convert(source, "tar", tmp_path / "out")


def test_one_shard_may_be_indexed_without_a_list(packed: Path, tmp_path: Path) -> None:
    shard = next(packed.glob("val-*.tar"))
    assert packer.index(str(shard), tmp_path / "out", workers=1).samples == 9


@pytest.mark.parametrize("samples", [50, 400, 9469])
def test_a_global_shuffle_is_worth_a_global_shuffle(samples: int) -> None:
    assert [shuffle_quality(Shuffled(samples, seed)) for seed in range(5)] == [1.0] * 5


def test_an_order_holds_no_more_than_the_split(packed: Path) -> None:
    reports = {report.name: report for report in compare_orders(packed, "train")}
    with readers.open(packed, "train") as reader:
        size = int(reader.sizes().sum())
    assert reports["global shuffle"].quality == 1.0
    assert {report.memory_bytes for report in reports.values()} == {0, size}
