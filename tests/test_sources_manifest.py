"""Manifests: which columns mean what, labels, further files, JSON, splits; each packed and read back."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import by_subject, make_jpeg, tree_of
from hypothesis import given
from hypothesis import strategies as st
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadSampleError, MissingExtraError, SourceError
from packer.sources import open_source
from packer.sources.base import SourceListing, safe_name
from packer.sources.manifest import ManifestSource, name_in_folder
from readers.fields import decode_field


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of six images in two classes, a mask for each, and a caption for one."""
    masks = {f"masks/{'cat' if n % 2 else 'dog'}/{n}.png": make_jpeg(n, format="PNG") for n in range(6)}
    images = {image_name(n): make_jpeg(n) for n in range(6)}
    return tree_of(tmp_path / "data", {**masks, **images, "captions/1.txt": b"a cat"})


def image_name(number: int) -> str:
    return f"images/{'cat' if number % 2 else 'dog'}/{number}.jpg"


def write_csv(path: Path, rows: Iterable[Sequence[object]], delimiter: str = ",") -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def listed(path: Path, split: str | None = None, **options: Any) -> SourceListing:
    return ManifestSource(path, **options).list(split)


def pack(source: Any, out: Path, to: str = "hdf5", **options: Any) -> Path:
    packer.convert(source, to, out, **by_subject(options, workers=1))
    return out


def test_fields_and_json(tree: Path, tmp_path: Path) -> None:
    rows = [{"Image": image_name(n), "Mask": f"masks/{'cat' if n % 2 else 'dog'}/{n}.png", "size": n} for n in range(6)]
    rows[2]["Mask"] = None
    rows[3] |= {"note": "ü \u2028", "nested": {"a": [1, None]}}
    rows[1]["Caption Text"] = "captions/1.txt"
    out = pack(write_lines(tree / "m.jsonl", rows), tmp_path / "out", "tar")
    with readers.open(out, verify=True) as reader:
        assert set(reader.fields) == {"image", "mask", "caption_text", "json"}
        assert reader[2].fields.keys() == {"image", "json"}
        assert bytes(reader.read(1, "mask")) == (tree / "masks/cat/1.png").read_bytes()
        assert bytes(reader.read(1, "caption_text")) == b"a cat"
        assert bytes(reader.read(3, "json")) == '{"size":3,"note":"ü \u2028","nested":{"a":[1,null]}}'.encode()
        assert reader[0].label is None and list(reader.classes) == []
        again = pack(out, tmp_path / "again", "tfrecord")
        with readers.open(again) as other:
            assert [sample.fields for sample in other] == [sample.fields for sample in reader]


def test_only_columns_that_always_name_files_become_fields(tree: Path) -> None:
    rows = [(image_name(n), image_name(n), "" if n < 2 else f"masks/dog/{n}.png", "images") for n in range(0, 6, 2)]
    listing = listed(write_csv(tree / "m.csv", [("path", "file", "mask", "folder"), *rows]))
    assert dict(listing.fields) == {"image": "image", "mask": "file", "json": "json"}
    place = listing.splits["train"].places[0]
    assert place[1:] == (None, f'{{"file":"{image_name(0)}","folder":"images"}}'.encode())
    rows[-1] = (image_name(4), "", "no such file", "")
    listing = listed(write_csv(tree / "m.csv", [("path", "file", "mask", "folder"), *rows]))
    assert dict(listing.fields) == {"image": "image", "json": "json"}


def test_named_fields_win(tree: Path, tmp_path: Path) -> None:
    rows = [(image_name(n), f"masks/dog/{n}.png", f"masks/dog/{n}.png") for n in (0, 2)]
    manifest = write_csv(tree / "m.csv", [("path", "a", "b"), *rows])
    source = open_source(manifest, fields={"mask": "b"})
    assert dict(source.list(None).fields) == {"image": "image", "mask": "file", "a": "file"}
    with pytest.raises(SourceError, match="the columns 'a' and 'b' would both become the field 'b'"):
        listed(manifest, fields={"b": "a"})
    for name in ("image", "json", "Mask", "a/b", "", "key"):
        with pytest.raises(SourceError, match="a field cannot be called"):
            listed(manifest, fields={name: "b"})
    with pytest.raises(SourceError, match="no column 'c' for the field mask; it has 'path', 'a', 'b'"):
        listed(manifest, fields={"mask": "c"})


@pytest.mark.parametrize(
    ("values", "labels", "classes"),
    [
        (["b", "a", "b"], [1, 0, 1], ("a", "b")),
        (["7", "0", "7"], [7, 0, 7], ()),
        (["3.0", "", "-1"], [3, -1, -1], ()),
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
    """Text as a CSV has it; values of other types as JSON has them."""
    if all(isinstance(value, str) for value in values):
        manifest = write_csv(tree / "m.csv", [("path", "Label"), *((image_name(n), v) for n, v in enumerate(values))])
    else:
        rows = [{"path": image_name(n), "label": value} for n, value in enumerate(values)]
        manifest = write_lines(tree / "m.jsonl", rows)
    listing = listed(manifest)
    assert (listing.splits["train"].labels.tolist(), listing.classes) == (labels, classes)


@pytest.mark.parametrize(
    ("values", "line", "what"),
    [
        (["2", "10", "l", "5", "2"], 4, "the label 'l' is a name, but 4 other labels are whole numbers"),
        (["2", "cat"], 3, "'cat' is a name, but 1 other label is a whole number"),
        ([*"0123456789" * 6, "a", "b", "c", "d", "e"], 62, "'a' is a name, but 60 other labels .* 4 more rows"),
        (["1", "0.5", "3"], 3, "the label '0.5' is not a whole number"),
        (["0,5", "1e-3"], 2, "the label '0,5' is not a whole number"),
    ],
)
def test_a_stray_label_is_an_error_with_its_line(tree: Path, values: list[str], line: int, what: str) -> None:
    rows = [(f"{n}.jpg", value) for n, value in enumerate(values)]
    with pytest.raises(SourceError, match=rf"m\.csv: line {line}: .*{what}.* write a whole number"):
        listed(write_csv(tree / "m.csv", [("path", "label"), *rows]))


def test_numbers_among_names_are_a_warning(tree: Path) -> None:
    rows = [(image_name(n) if n < 6 else f"{n}.jpg", value) for n, value in enumerate([*"abcdefghij", "7"])]
    listing = listed(write_csv(tree / "m.csv", [("path", "label"), *rows]))
    assert listing.classes[0] == "7" and len(listing.classes) == 11
    assert len(listing.warnings) == 1 and "1 row, the first in line 12: '7'" in listing.warnings[0]


@pytest.mark.parametrize(
    ("values", "line", "what"),
    [
        (["01", "2", "1"], 4, "the label '1' is the same number as '01' in line 2"),
        (["10", "3", "03"], 4, "the label '03' is the same number as '3' in line 3"),
        (["001", "02", "01"], 4, "the label '01' is the same number as '001' in line 2"),
    ],
)
def test_codes_are_not_joined_that_only_look_like_the_same_number(
    tree: Path, values: list[str], line: int, what: str
) -> None:
    rows = [(image_name(n), value) for n, value in enumerate(values)]
    with pytest.raises(SourceError, match=rf"m\.csv: line {line}: {what}"):
        listed(write_csv(tree / "m.csv", [("path", "label"), *rows]))


@pytest.mark.parametrize("values", [["01", "02", "10", "01"], ["0", "0.0", "1"], ["-1", "1", "1.0"], ["00", "01", ""]])
def test_numbers_that_are_written_alike_are_numbers(tree: Path, values: list[str]) -> None:
    rows = [(image_name(n), value) for n, value in enumerate(values)]
    found = listed(write_csv(tree / "m.csv", [("path", "label"), *rows]))
    assert found.splits["train"].labels.tolist() == [int(float(value or -1)) for value in values]


@pytest.mark.parametrize("as_text", [False, True])
def test_arrays_of_a_column_have_one_dtype(tree: Path, tmp_path: Path, as_text: bool) -> None:
    values: list[Any] = [[1, 2], [], [0.5, 2], [3], None]
    rows = [{"path": image_name(n), "v": json.dumps(v) if as_text and v is not None else v, "w": [n], "e": []}
            for n, v in enumerate(values)]  # fmt: skip
    manifest = write_lines(tree / "m.jsonl", rows)
    source = open_source(manifest, fields={"v:array": "v", "w:array": "w", "e:array": "e"})
    with readers.open(pack(source, tmp_path / "out")) as reader:
        found = [decode_field("array", reader.read(i, "v")) for i in range(4)]
        assert [value.tolist() for value in found] == values[:4] and not reader.has(4, "v")
        assert {value.dtype for value in found} == {np.dtype(np.float64)}
        for name in ("w", "e"):
            assert decode_field("array", reader.read(0, name)).dtype == np.int64


def test_splits_that_differ_by_case_alone_are_refused(tree: Path, tmp_path: Path) -> None:
    rows = [("path", "split"), (image_name(0), "VAL"), (image_name(1), "val")]
    with pytest.raises(SourceError, match="has the splits 'VAL' and 'val', whose names differ by case alone"):
        pack(write_csv(tree / "m.csv", rows), tmp_path / "out")


def test_a_table_whose_columns_are_unknown_names_them(tree: Path, tmp_path: Path) -> None:
    rows = [(image_name(n), "mel" if n % 2 else "nv", f"P{n}") for n in range(6)]
    manifest = write_csv(tree / "labels.csv", [("filename", "diagnosis", "patient"), *rows])
    (warning,) = packer.convert(manifest, "tar", tmp_path / "out", run=packer.Run(workers=1)).warnings
    assert "it has 'diagnosis', 'patient'" in warning and "label_column='COLUMN'" in warning
    assert not listed(manifest, label_column="diagnosis").warnings
    images_only = write_csv(tree / "files.csv", [("filename",), *((name,) for name, _, _ in rows)])
    assert not listed(images_only).warnings


def test_images_that_are_in_another_folder_are_looked_for_by_name(tree: Path, tmp_path: Path) -> None:
    """The command that the message suggests is not refused for what the first one has left."""
    manifest = write_csv(tmp_path / "labels.csv", [("filename", "label"), *((f"{n}.jpg", "a") for n in (1, 3, 5))])
    line = ("convert", manifest, "--to", "tar", "-o", tmp_path / "out", "--workers", 1)
    done = run_packer(*line)
    assert done.returncode == 1 and f"{tmp_path}/1.jpg" in done.stderr and "--folder DIR" in done.stderr, done.stderr
    done = run_packer(*line, "--folder", tree / "images/cat")
    assert done.returncode == 0 and "1 class" in done.stdout, done.stderr


def test_a_conversion_that_has_packed_nothing_is_replaced(tree: Path, tmp_path: Path) -> None:
    bad = tree_of(tmp_path / "bad", {"a/1.jpg": make_jpeg(1)[:100]})
    with pytest.raises(BadSampleError):
        packer.convert(bad, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert (tmp_path / "out/.packing/plan.json").is_file()
    assert packer.convert(tree / "images", "tar", tmp_path / "out", run=packer.Run(workers=1)).samples == 6


def test_several_labels_in_a_text_are_a_warning(tree: Path) -> None:
    rows = [(image_name(n), label) for n, label in enumerate(["cat", "dog", "cat|dog", "bee; cat", "x|y", "a, b"])]
    (warning,) = listed(write_csv(tree / "m.csv", [("path", "label"), *rows])).warnings
    assert "'bee; cat' look like several in one" in warning and "(3 classes)" in warning, warning
    assert '["bee", "cat"]' in warning


@pytest.mark.parametrize(("labels", "line"), [(["01", "2", "1"], 4), (["1", "2", "01", "01"], 4), (["7", "07.0"], 3)])
def test_two_spellings_of_a_number_are_refused(tree: Path, labels: list[str], line: int) -> None:
    manifest = write_csv(
        tree / "m.csv", [("path", "label"), *((image_name(n), label) for n, label in enumerate(labels))]
    )
    with pytest.raises(SourceError, match=rf"line {line}: the label .* is the same number as .* in line 2"):
        listed(manifest)


def test_one_spelling_of_numbers_is_right(tree: Path) -> None:
    for labels in (["001", "002", "001"], ["1", "1.0", "2"]):
        rows = [(image_name(n), label) for n, label in enumerate(labels)]
        assert listed(write_csv(tree / "m.csv", [("path", "label"), *rows])).splits["train"].labels.min() == 1


@pytest.mark.parametrize("value", [-2, 0.5, [1], {"a": 1}, 1 << 60, "a\0", "\ud800"])
def test_what_is_no_label(tree: Path, value: Any) -> None:
    rows = [{"path": image_name(0), "label": 1}, {}, {"path": image_name(1), "label": value}]
    text = "".join(json.dumps(row) + "\n" if row else "\n" for row in rows)
    (tree / "m.jsonl").write_text(text)
    with pytest.raises(SourceError, match=r"m\.jsonl: line 3: the label"):
        listed(tree / "m.jsonl")


def test_splits(tree: Path, tmp_path: Path) -> None:
    rows = [(image_name(n), "dog" if n == 5 else "cat", "val" if n > 3 else "train") for n in range(6)]
    manifest = write_csv(tree / "m.csv", [("path", "class", "Split"), *rows])
    out = pack(manifest, tmp_path / "out")
    with readers.open(out, "val") as reader:
        assert reader.labels.tolist() == [0, 1] and len(reader) == 2
    listing = listed(manifest, "train")
    assert list(listing.splits) == ["train"]
    assert listing.classes == ("cat", "dog")  # as in the whole: labels mean the same in each split
    with pytest.raises(SourceError, match="no split 'test'; it has train, val"):
        listed(manifest, "test")
    assert list(listed(write_csv(tree / "n.csv", [("path",), (image_name(0),)]), "test").splits) == ["test"]
    for bad in ("", "a/b", "..", "a b"):
        with pytest.raises(SourceError, match=r"line 2: .* cannot be the name of a split"):
            listed(write_csv(tree / "m.csv", [("path", "split"), (image_name(0), bad)]))


def test_the_same_image_twice(tree: Path) -> None:
    for other in (image_name(0), f"./{image_name(0)}", f"{tree}/{image_name(0)}", f"x/../{image_name(0)}"):
        manifest = write_csv(tree / "m.csv", [("path",), (image_name(0),), (image_name(1),), (other,)])
        with pytest.raises(SourceError, match=r"lines 2 and 4 have the same image 'images/dog/0\.jpg'"):
            listed(manifest)
    rows = [("path", "split"), (image_name(0), "train"), (image_name(0), "val")]
    assert {name: len(part) for name, part in listed(write_csv(tree / "m.csv", rows)).splits.items()} == {
        "train": 1,
        "val": 1,
    }


def test_names_and_keys(tree: Path, tmp_path: Path) -> None:
    (tree / "deep").mkdir()
    manifest = write_csv(
        tree / "deep" / "m.csv",
        [("path",), (f"../{image_name(0)}",), (f"{tree}/{image_name(1)}",), (".//x.jpg",)],
    )
    (tree / "deep" / "x.jpg").write_bytes(make_jpeg(3))
    part = listed(manifest).splits["train"]
    outside = str(tree / "images/cat/1").lstrip("/")
    assert part.keys == ["images/dog/0", outside, "x"]
    assert part.names[0] == ("images/dog/0.jpg",)
    part = listed(manifest, folder=tree / "deep").splits["train"]
    assert part.keys[2] == "x"
    with readers.open(pack(manifest, tmp_path / "out")) as reader:
        assert bytes(reader.read(1)) == (tree / image_name(1)).read_bytes()


def test_another_folder(tree: Path, tmp_path: Path) -> None:
    manifest = write_csv(tmp_path / "m.tsv", [("img", "caption"), (image_name(0), 'a "dog"')], "\t")
    part = listed(manifest, folder=tree).splits["train"]
    assert part.keys == ["images/dog/0"]
    assert part.places[0] == ((image_name(0), len(make_jpeg(0))), b'{"caption":"a \\"dog\\""}')
    with pytest.raises(SourceError, match="no such folder"):
        listed(manifest, folder=tree / "nowhere")


def test_missing_files_fall_under_on_error(tree: Path, tmp_path: Path) -> None:
    rows = [
        (image_name(0), "masks/dog/0.png"),
        ("gone.jpg", "masks/dog/2.png"),
        (image_name(4), "gone.png"),
        ("images", ""),
    ]
    manifest = write_csv(tree / "m.csv", [("path", "mask"), *rows])
    source = ManifestSource(manifest, fields={"mask": "mask"})
    with pytest.raises(BadSampleError, match=r"gone\.jpg: 'gone\.jpg' cannot be opened"):
        pack(source, tmp_path / "a")
    out = pack(source, tmp_path / "b", on_error="skip")
    with readers.open(out) as reader:
        assert list(reader.keys) == ["images/dog/0"]
    report = [json.loads(line) for line in (out / "left-out.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in report] == [
        "'gone.jpg' cannot be opened: No such file or directory",
        "'gone.png' cannot be opened: No such file or directory",
        "'images' is not a regular file",
    ]


def test_csv_as_it_comes(tree: Path) -> None:
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
        ('{"path": {"bytes": null}}\n', "line 1: the column 'path' holds a dict, expected the path of a file"),
        ('{"path": "a\\u0000b"}\n', "cannot be the name of a sample"),
        ('{"path": "\\ud800"}\n', "not UTF-8"),
        ("", "no column of image paths"),
    ],
    ids=repr,
)
def test_malformed_tables(tmp_path: Path, text: bytes | str, message: str) -> None:
    """Bytes are those of a CSV, text is JSON Lines."""
    manifest = tmp_path / ("m.csv" if isinstance(text, bytes) else "m.jsonl")
    manifest.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=message):
        listed(manifest)


def test_columns_that_are_named(tree: Path) -> None:
    manifest = write_csv(tree / "m.csv", [("path", "other", "y"), ("nowhere", image_name(0), "cat")])
    listing = listed(manifest, path_column="other", label_column="y")
    assert listing.classes == ("cat",) and listing.splits["train"].keys == ["images/dog/0"]
    for option in ("path_column", "label_column"):
        with pytest.raises(SourceError, match=r"no column 'z' \(\w+_column='z'\); it has 'path', 'other', 'y'"):
            listed(manifest, **{option: "z"})
    with pytest.raises(SourceError, match="or a manifest only"):
        open_source(tree, path_column="path")


def test_parquet(tree: Path, tmp_path: Path) -> None:
    table = pa.table(
        {
            "image_path": [image_name(n) for n in range(3)],
            "label": pa.array([1, None, 0], pa.int32()),
            "mask": ["masks/dog/0.png", None, "masks/dog/2.png"],
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
    assert first == {
        "when": "1970-01-01T00:00:00",
        "day": "2024-02-29",
        "price": "1.50",
        "raw": "AP8=",
        "score": None,
        "box": [1.0, None],
        "word": "x",
    }
    assert second["when"] == "1970-01-01T00:00:00.000001"
    with readers.open(pack(tree / "m.parquet", tmp_path / "out")) as reader:
        assert reader[1].fields.keys() == {"image", "json"}
    (tree / "broken.pq").write_bytes((tree / "m.parquet").read_bytes()[:-20])
    with pytest.raises(SourceError, match="cannot be read as Parquet"):
        listed(tree / "broken.pq")


def test_parquet_without_pyarrow(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tree / "m.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"reading Parquet needs pyarrow: .*packer-vision\[parquet\]"):
        listed(tree / "m.parquet")


def test_changes_make_another_plan(tree: Path) -> None:
    def stamps(note: str) -> list[int]:
        path = write_csv(tree / "m.csv", [("path", "note"), (image_name(0), note)])
        return listed(path).splits["train"].stamps.tolist()

    before = stamps("a")
    assert stamps("a") == before != stamps("b")
    os.utime(tree / image_name(0), ns=(0, 7))
    assert stamps("a") != before


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from(["/a/b", "/"]))
def test_names_never_lead_out(path: str, folder: str) -> None:
    for name in (safe_name(path), name_in_folder(path, folder)):
        assert not name.startswith("/") and ".." not in name.split("/")
        assert safe_name(name) == name or not name
