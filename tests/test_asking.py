"""What users write first: short names of formats, sources that are none, errors that say what to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg, tree_of
from suites.programs import run_packer

import packer
import readers
from packer.inspection import compare_orders
from readers.order import Shuffled
from readers.order.quality import shuffle_quality


@pytest.mark.parametrize(
    ("written", "meant"),
    [("h5", "hdf5"), ("HDF5", "hdf5"), ("webdataset", "tar"), ("WebDataset", "tar"), ("TFRecord", "tfrecord")],
)
def test_formats_go_by_their_other_names(tmp_path: Path, written: str, meant: str) -> None:
    tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1)})
    result = packer.convert(tmp_path / "in", written, tmp_path / "out", workers=1)
    assert result.format == meant == readers.open(tmp_path / "out").dataset.format
    assert packer.convert(tmp_path / "in", meant, tmp_path / "out", workers=1).already_done, "the same set by each name"


def test_a_format_by_another_name_on_the_command_line(tmp_path: Path) -> None:
    tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1)})
    run = partial(run_packer, "convert", tmp_path / "in", "--to", cwd=tmp_path)
    assert run("H5").stdout.startswith("in-hdf5: 1 sample ")
    wrong = run("lmdb")
    assert wrong.returncode == 2 and "'lmdb' is not one of 'hdf5', 'tfrecord', 'tar' (h5 for hdf5, " in wrong.stderr, (
        wrong.stderr
    )


@pytest.mark.parametrize("source", [["a", "b"], None, 3, {"train": "a"}])
def test_a_source_that_is_none_is_a_type_error_that_says_what_is(source: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected one path, or one Source .* name their images in a \.csv"):
        packer.convert(source, "tar", tmp_path / "out")


def test_one_shard_may_be_indexed_without_a_list(tree: Path, pack: Callable[..., Path], tmp_path: Path) -> None:
    shard = next(pack(tree).glob("val-*.tar"))
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
