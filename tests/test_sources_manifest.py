"""Manifests: the meaning of columns, labels, further files, JSON, splits; each packed and read back."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import by_subject, make_jpeg, tree_of
from hypothesis import given
from hypothesis import strategies as st
from suites.layouts import PICTURES, pack_error, refusal, write_table

import packer
import readers
from cache.errors import BadSampleError, MissingExtraError, SourceError
from packer.cli import main
from packer.sources.base import SourceListing, safe_name
from packer.sources.manifest import ManifestSource, name_in_folder
from readers.fields import decode_field


def image_name(number: int) -> str:
    return f"images/{'cat' if number % 2 else 'dog'}/{number}.jpg"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of six images in two classes, with a mask for each, and a caption for one."""
    masks = {f"masks/{n}.png": make_jpeg(n, format="PNG") for n in range(6)}
    images = {image_name(n): PICTURES[n] for n in range(6)}
    return tree_of(tmp_path / "data", {**masks, **images, "captions/1.txt": b"a cat"})


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    head, *others = rows
    return write_table(path, [dict(zip(head, row, strict=True)) for row in others])  # type: ignore[arg-type]


def with_column(tree: Path, name: str, values: Sequence[object]) -> Path:
    """A table of images and a column of these values: CSV for texts, JSON Lines for typed values."""
    kind = "csv" if all(isinstance(value, str) for value in values) else "jsonl"
    rows = [{"path": image_name(n) if n < 6 else f"{n}.jpg", name: value} for n, value in enumerate(values)]
    return write_table(tree / f"m.{kind}", rows)


def listed(path: Path, split: str | None = None, **options: Any) -> SourceListing:
    return packer.open_source(path, **options).list(split)


def pack(source: Any, out: Path, to: str = "hdf5", **options: Any) -> Path:
    packer.convert(source, to, out, **by_subject(options, workers=1))
    return out


# --- fields -------------------------------------------------------------------------------------------------------
def test_fields_and_json(tree: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"Image": image_name(n), "Mask": f"masks/{n}.png", "size": n} for n in range(6)]
    rows[2]["Mask"] = None
    rows[3] |= {"note": "ü \u2028", "nested": {"a": [1, None]}}
    rows[1]["Caption Text"] = "captions/1.txt"
    manifest = write_table(tree / "m.jsonl", rows)
    manifest.write_bytes(b"\n" + manifest.read_bytes())  # blank lines are skipped
    out = pack(manifest, tmp_path / "out", "tar")
    with readers.open(out, verify=True) as reader:
        assert set(reader.fields) == {"image", "mask", "caption_text", "json"}
        assert reader[2].fields.keys() == {"image", "json"}
        assert bytes(reader.read(1, "mask")) == (tree / "masks/1.png").read_bytes()
        assert bytes(reader.read(1, "caption_text")) == b"a cat"
        assert bytes(reader.read(3, "json")) == '{"size":3,"note":"ü \u2028","nested":{"a":[1,null]}}'.encode()
        assert reader[0].label is None and list(reader.classes) == []
        with readers.open(pack(out, tmp_path / "again", "tfrecord")) as other:
            assert [sample.fields for sample in other] == [sample.fields for sample in reader]


def test_only_columns_that_always_name_files_become_fields(tree: Path) -> None:
    rows = [(image_name(n), image_name(n), "" if n < 2 else f"masks/{n}.png", "images") for n in range(0, 6, 2)]
    listing = listed(write_csv(tree / "m.csv", [("path", "file", "mask", "folder"), *rows]))
    assert dict(listing.fields) == {"image": "image", "mask": "file", "json": "json"}
    about = f'{{"file":"{image_name(0)}","folder":"images"}}'.encode()
    assert listing.splits["train"].places[0][1:] == (None, about)
    rows[-1] = (image_name(4), "", "no such file", "")
    listing = listed(write_csv(tree / "m.csv", [("path", "file", "mask", "folder"), *rows]))
    assert dict(listing.fields) == {"image": "image", "json": "json"}


def test_named_fields_take_precedence(tree: Path) -> None:
    rows = [(image_name(n), f"masks/{n}.png", f"masks/{n}.png") for n in (0, 2)]
    manifest = write_csv(tree / "m.csv", [("path", "a", "b"), *rows])
    assert dict(listed(manifest, fields={"mask": "b"}).fields) == {"image": "image", "mask": "file", "a": "file"}
    assert "the columns 'a' and 'b' would both become the field 'b'" in refusal(manifest, fields={"b": "a"})
    for name in ("image", "json", "Mask", "a/b", "", "key"):
        assert "a field cannot be called" in refusal(manifest, fields={name: "b"})
    assert "no column 'c' for the field mask; it has 'path', 'a', 'b'" in refusal(manifest, fields={"mask": "c"})


@pytest.mark.parametrize("as_text", [False, True])
def test_arrays_of_a_column_have_one_dtype(tree: Path, tmp_path: Path, as_text: bool) -> None:
    values: list[Any] = [[1, 2], [], [0.5, 2], [3], None]
    rows = [{"path": image_name(n), "v": json.dumps(v) if as_text and v is not None else v, "w": [n], "e": []}
            for n, v in enumerate(values)]  # fmt: skip
    manifest = write_table(tree / "m.jsonl", rows)
    source = packer.open_source(manifest, fields={"v:array": "v", "w:array": "w", "e:array": "e"})
    with readers.open(pack(source, tmp_path / "out")) as reader:
        arrays = [decode_field("array", reader.read(i, "v")) for i in range(4)]
        assert [value.tolist() for value in arrays] == values[:4] and not reader.has(4, "v")
        assert {value.dtype for value in arrays} == {np.dtype(np.float64)}
        assert all(decode_field("array", reader.read(0, name)).dtype == np.int64 for name in ("w", "e"))


# --- labels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "labels", "classes"),
    [
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        (["7", "0", "7"], [7, 0, 7], ()),
        (["3.0", "", "-1"], [3, -1, -1], ()),
        (["01", "02", "10", "01"], [1, 2, 10, 1], ()),
        (["0", "0.0", "1"], [0, 0, 1], ()),
        (["-1", "1", "1.0"], [-1, 1, 1], ()),
        (["001", "002", ""], [1, 2, -1], ()),
        (["10", "9", "x", "y", "z"], [0, 1, 2, 3, 4], ("10", "9", "x", "y", "z")),
        (["2", "NaN", "5", "nan", "10"], [2, -1, 5, -1, 10], ()),
        (["2", "None", "N/A"], [2, -1, -1], ()),
        (["cat", "nan", "None"], [1, -1, 0], ("None", "cat")),
        (["", " a ", "a"], [-1, 0, 0], ("a",)),
        (["", "", ""], [-1, -1, -1], ()),
        ([1, None, 5.0], [1, -1, 5], ()),
        ([True, False, -1], [1, 0, -1], ()),
        ([3, "b", "c", None], [0, 1, 2, -1], ("3", "b", "c")),
        ([2, "NaN", 5], [2, -1, 5], ()),
        ([math.nan, 2, 2], [-1, 2, 2], ()),
    ],
)
def test_labels(tree: Path, values: list[Any], labels: list[int], classes: tuple[str, ...]) -> None:
    listing = listed(with_column(tree, "Label", values))
    assert (listing.splits["train"].labels.tolist(), listing.classes) == (labels, classes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["2", "10", "l", "5", "2"], "line 4: .*the label 'l' is a name, but 4 other labels are whole numbers"),
        (["2", "cat"], "line 3: .*'cat' is a name, but 1 other label is a whole number"),
        ([*"0123456789" * 6, *"abcde"], "line 62: .*'a' is a name, but 60 other labels .* 4 more rows"),
        (["1", "0.5", "3"], "line 3: .*the label '0.5' is not a whole number.* write a whole number"),
        (["0,5", "1e-3"], "line 2: .*the label '0,5' is not a whole number"),
        (["01", "2", "1"], "line 4: the label '1' is the same number as '01' in line 2"),
        (["10", "3", "03"], "line 4: the label '03' is the same number as '3' in line 3"),
        (["001", "02", "01"], "line 4: the label '01' is the same number as '001' in line 2"),
        (["1", "2", "01", "01"], "line 4: the label '01' is the same number as '1' in line 2"),
        (["7", "07.0"], "line 3: the label '07' is the same number as '7' in line 2"),
        *(([1, value], "line 2: the label") for value in (-2, 0.5, [1], {"a": 1}, 1 << 60, "a\0", "\ud800")),
    ],
)
def test_an_invalid_label_is_an_error_with_its_line(tree: Path, values: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=rf"m\.(csv|jsonl): {message}"):
        listed(with_column(tree, "label", values))


@pytest.mark.parametrize(
    ("column", "values", "parts"),
    [
        ("label", [*"abcdefghij", "7"], ["1 row, the first in line 12: '7'"]),
        ("label", ["cat", "dog", "cat|dog", "bee; cat", "x|y", "a, b"],
         ["'bee; cat' look like several in one", "(3 classes)", '["bee", "cat"]']),
        ("diagnosis", ["mel", "nv", "nv"], ["it has 'diagnosis'", "label_column='COLUMN'"]),
    ],
)  # fmt: skip
def test_suspicious_labels_are_a_warning(tree: Path, column: str, values: list[str], parts: list[str]) -> None:
    manifest = with_column(tree, column, values)
    (warning,) = listed(manifest).warnings
    assert all(part in warning for part in parts), warning
    assert column == "label" or not listed(manifest, label_column=column).warnings


def test_a_table_of_images_alone_has_no_warnings(tree: Path) -> None:
    assert not listed(write_csv(tree / "files.csv", [("filename",), (image_name(0),)])).warnings


# --- splits, paths and keys ---------------------------------------------------------------------------------------
def test_splits(tree: Path) -> None:
    rows = [(image_name(n), "dog" if n == 5 else "cat", "val" if n > 3 else "train") for n in range(6)]
    manifest = write_csv(tree / "m.csv", [("path", "class", "Split"), *rows])
    assert listed(manifest, "val").splits["val"].labels.tolist() == [0, 1]
    listing = listed(manifest, "train")
    assert list(listing.splits) == ["train"]
    assert listing.classes == ("cat", "dog")  # as in the whole table: labels mean the same in each split
    with pytest.raises(SourceError, match="no split 'test'; it has train, val"):
        listed(manifest, "test")
    assert list(listed(write_csv(tree / "n.csv", [("path",), (image_name(0),)]), "test").splits) == ["test"]
    for bad in ("", "a/b", "..", "a b"):
        error = refusal(write_csv(tree / "m.csv", [("path", "split"), (image_name(0), bad)]))
        assert "line 2: " in error and "cannot be the name of a split" in error


def test_splits_that_differ_by_case_alone_are_refused(tree: Path, tmp_path: Path) -> None:
    manifest = write_csv(tree / "m.csv", [("path", "split"), (image_name(0), "VAL"), (image_name(1), "val")])
    error = pack_error(manifest, tmp_path / "out", SourceError)
    assert "has the splits 'VAL' and 'val', whose names differ only in case" in error


def test_the_same_image_twice(tree: Path) -> None:
    for other in (image_name(0), f"./{image_name(0)}", f"{tree}/{image_name(0)}", f"x/../{image_name(0)}"):
        manifest = write_csv(tree / "m.csv", [("path",), (image_name(0),), (image_name(1),), (other,)])
        assert "lines 2 and 4 have the same image 'images/dog/0.jpg'" in refusal(manifest)
    rows = [("path", "split"), (image_name(0), "train"), (image_name(0), "val")]
    parts = listed(write_csv(tree / "m.csv", rows)).splits
    assert {name: len(part) for name, part in parts.items()} == {"train": 1, "val": 1}


def test_names_and_keys(tree: Path, tmp_path: Path) -> None:
    tree_of(tree, {"deep/x.jpg": PICTURES[3]})
    paths = [(f"../{image_name(0)}",), (f"{tree}/{image_name(1)}",), (".//x.jpg",)]
    manifest = write_csv(tree / "deep" / "m.csv", [("path",), *paths])
    part = listed(manifest).splits["train"]
    assert part.keys == ["images/dog/0", str(tree / "images/cat/1").lstrip("/"), "x"]
    assert part.names[0] == ("images/dog/0.jpg",)
    assert listed(manifest, folder=tree / "deep").splits["train"].keys[2] == "x"
    with readers.open(pack(manifest, tmp_path / "out")) as reader:
        assert bytes(reader.read(1)) == (tree / image_name(1)).read_bytes()


def test_another_folder(tree: Path, tmp_path: Path) -> None:
    manifest = write_csv(tmp_path / "m.tsv", [("img", "caption"), (image_name(0), 'a "dog"')])
    part = listed(manifest, folder=tree).splits["train"]
    assert part.keys == ["images/dog/0"]
    assert part.places[0] == ((image_name(0), len(PICTURES[0])), b'{"caption":"a \\"dog\\""}')
    assert "no such folder" in refusal(manifest, folder=tree / "nowhere")


def test_images_in_another_folder_are_searched_by_name(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that the message suggests is not refused because of files that the first one has left."""
    manifest = write_csv(tmp_path / "labels.csv", [("filename", "label"), *((f"{n}.jpg", "a") for n in (1, 3, 5))])
    line = ["convert", str(manifest), "--to", "tar", "-o", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(line)
    output = capsys.readouterr().err
    assert stopped.value.code == 1 and f"{tmp_path}/1.jpg" in output and "--folder DIR" in output, output
    with pytest.raises(SystemExit) as stopped:
        main([*line, "--folder", str(tree / "images/cat")])
    assert not stopped.value.code and "1 class" in capsys.readouterr().out


def test_a_conversion_without_packed_samples_is_replaced(tree: Path, tmp_path: Path) -> None:
    pack_error(tree_of(tmp_path / "bad", {"a/1.jpg": PICTURES[1][:100]}), tmp_path / "out")
    assert (tmp_path / "out/.packing/plan.json").is_file()
    assert packer.convert(tree / "images", "tar", tmp_path / "out", run=packer.Run(workers=1)).samples == 6


def test_missing_files_fall_under_on_error(tree: Path, tmp_path: Path) -> None:
    names = [(image_name(0), "masks/0.png"), ("gone.jpg", "masks/2.png"), (image_name(4), "gone.png"), ("images", "")]
    source = packer.open_source(write_csv(tree / "m.csv", [("path", "mask"), *names]), fields={"mask": "mask"})
    with pytest.raises(BadSampleError, match=r"gone\.jpg: 'gone\.jpg' cannot be opened"):
        pack(source, tmp_path / "a")
    out = pack(source, tmp_path / "b", on_error="skip")
    with readers.open(out) as reader:
        assert list(reader.keys) == ["images/dog/0"]
    report = [json.loads(line) for line in (out / "left-out.jsonl").read_text().splitlines()]
    gone = [f"'gone.{suffix}' cannot be opened: No such file or directory" for suffix in ("jpg", "png")]
    assert [line["reason"] for line in report] == [*gone, "'images' is not a regular file"]


# --- table formats ------------------------------------------------------------------------------------------------
def test_csv_dialects(tree: Path) -> None:
    text = f'\ufeff, Path ,note\r\n0,{image_name(0)},"two\nlines, ""quoted"""\r\n\r\n1,{image_name(1)},ü\r\n'
    (tree / "m.csv").write_bytes(text.encode())
    part = listed(tree / "m.csv").splits["train"]
    assert part.places[0][1] == b'{"note":"two\\nlines, \\"quoted\\""}'
    assert part.places[1][1] == '{"note":"ü"}'.encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty; a manifest starts with a row of column names"),
        (b"path\n", "m.csv: no rows"),
        (b"a,b\nx,y\n", "no column of image paths .*it has 'a', 'b'; name it with  path_column="),
        (b"path,a\n1.jpg\n", "line 2: has 1 values, but the header has 2 columns"),
        (b'path,a\n"x\n1",2\n1.jpg,2,3\n', "line 4: has 3 values"),
        (b'path\n"1.jpg\n2.jpg\n', "line 2: malformed"),
        (b"path,path\n1,2\n", "two columns are called 'path'"),
        (b"path\n\xff.jpg\n", "not UTF-8"),
        (b"path,a\n,1\n", "line 2: no path in the column 'path'"),
        (b"path\nhttps://x/1.jpg\n", "line 2: 'https://x/1.jpg' is a URL"),
        (b"path\n../..\n", r"line 2: '\.\./\.\.' is not the path of a file"),
        ('{"path": "x"\n', "line 1: not JSON"),
        ('{"path": "x"}\n[1]\n', "line 2: expected a JSON object, found list"),
        ("[" * 100_000 + "\n", "line 1: not JSON"),
        ('{"path": {"bytes": null}}\n', "line 1: the column 'path' has a dict, expected the path of a file"),
        ('{"path": "a\\u0000b"}\n', "cannot be the name of a sample"),
        ('{"path": "\\ud800"}\n', "not UTF-8"),
        ("", "no column of image paths"),
    ],
    ids=repr,
)
def test_malformed_tables(tmp_path: Path, text: bytes | str, message: str) -> None:
    """bytes are a CSV, str is JSON Lines."""
    manifest = tmp_path / ("m.csv" if isinstance(text, bytes) else "m.jsonl")
    manifest.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=message):
        ManifestSource(manifest).list(None)


def test_columns_by_name(tree: Path) -> None:
    manifest = write_csv(tree / "m.csv", [("path", "other", "y"), ("nowhere", image_name(0), "cat")])
    listing = listed(manifest, path_column="other", label_column="y")
    assert listing.classes == ("cat",) and listing.splits["train"].keys == ["images/dog/0"]
    for option in ("path_column", "label_column"):
        assert f"no column 'z' ({option}='z'); it has 'path', 'other', 'y'" in refusal(manifest, **{option: "z"})
    assert "or a manifest only" in refusal(tree, path_column="path")


def test_parquet(tree: Path) -> None:
    table = pa.table(
        {
            "image_path": [image_name(n) for n in range(3)],
            "label": pa.array([1, None, 0], pa.int32()),
            "mask": ["masks/0.png", None, "masks/2.png"],
            "when": pa.array([0, 1_500, None], pa.timestamp("ns")),
            "day": [datetime.date(2024, 2, 29)] * 3,
            "price": [decimal.Decimal("1.50")] * 3,
            "raw": [b"\x00\xff"] * 3,
            "score": [math.nan, math.inf, 0.5],
            "box": [[1.0, math.nan]] * 3,
            "word": pa.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    pa.parquet.write_table(table, tree / "m.parquet")
    listing = listed(tree / "m.parquet")
    assert dict(listing.fields) == {"image": "image", "mask": "file", "json": "json"}
    assert listing.splits["train"].labels.tolist() == [1, -1, 0]
    first, second = (json.loads(listing.splits["train"].places[i][2]) for i in (0, 1))
    expected = {"when": "1970-01-01T00:00:00", "day": "2024-02-29", "price": "1.50", "raw": "AP8="}
    assert first == {**expected, "score": None, "box": [1.0, None], "word": "x"}
    assert second["when"] == "1970-01-01T00:00:00.000001"
    (tree / "broken.pq").write_bytes((tree / "m.parquet").read_bytes()[:-20])
    assert "cannot be read as Parquet" in refusal(tree / "broken.pq")


def test_parquet_without_pyarrow(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tree / "m.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"reading Parquet needs pyarrow: .*packer-vision\[parquet\]"):
        listed(tree / "m.parquet")


def test_changes_of_a_table_change_the_plan(tree: Path) -> None:
    def stamps(note: str) -> list[int]:
        manifest = write_csv(tree / "m.csv", [("path", "note"), (image_name(0), note)])
        return listed(manifest).splits["train"].stamps.tolist()

    before = stamps("a")
    assert stamps("a") == before != stamps("b")
    os.utime(tree / image_name(0), ns=(0, 7))
    assert stamps("a") != before


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from(["/a/b", "/"]))
def test_names_never_lead_outside(path: str, folder: str) -> None:
    for name in (safe_name(path), name_in_folder(path, folder)):
        assert not name.startswith("/") and ".." not in name.split("/")
        assert safe_name(name) == name or not name
