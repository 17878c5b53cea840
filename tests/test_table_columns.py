"""Columns of the table that a set was packed from: expressions over them, and splits that keep groups together."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from set_cases import convert
from suites.programs import run_packer
from view_client import Client

import packer
import readers
from packer.sets.deal import deal_groups
from readers.table import Table
from readers.where import TableFacts, json_columns, parse_where

PATIENTS = ("P0", "P0", "P1", "P1", "P1", "P2", "P3", "", "P4", "P4", "P5", "P5")
AGES = (31, 31, 7, 8, 9, 50, 64, 12, 70, "", 40, 41)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of six patients, one of them unknown, in a CSV file; tests may not change it."""
    scans = tmp_path_factory.mktemp("table") / "scans"
    tree_of(scans, {f"{i // 4}/{i}.jpg": make_jpeg(i, (16 + i, 16)) for i in range(12)})
    with open(scans / "scans.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["path", "label", "patient", "age", "taken on"])
        for i in range(12):
            out.writerow([f"{i // 4}/{i}.jpg", ("ill", "well")[i % 2], PATIENTS[i], AGES[i], f"2024-0{1 + i % 9}-01"])
    return scans / "scans.csv"


@pytest.fixture(scope="module")
def packed(table: Path) -> Path:
    """The table as a set; tests may not change it."""
    return convert(table, table.parent.parent / "set").output


EXPRESSIONS: dict[str, Callable[[str, Any, int], bool]] = {
    'patient == "P0"': lambda patient, age, i: patient == "P0",
    'patient != "P0"': lambda patient, age, i: patient not in ("P0", ""),
    'patient in ("P1", "P3")': lambda patient, age, i: patient in ("P1", "P3"),
    'patient not in ("P1", "P3")': lambda patient, age, i: patient not in ("P1", "P3", ""),
    'not patient == "P0"': lambda patient, age, i: patient != "P0",
    'matches(patient, "P[45]")': lambda patient, age, i: patient in ("P4", "P5"),
    'has("patient")': lambda patient, age, i: patient != "",
    "age > 30": lambda patient, age, i: age != "" and age > 30,
    "9 <= age < 50": lambda patient, age, i: age != "" and 9 <= age < 50,
    "age in (7, 64)": lambda patient, age, i: age in (7, 64),
    "age != 7 and width < 20": lambda patient, age, i: age not in (7, "") and i < 4,
    'column("taken on") >= "2024-08-01"': lambda patient, age, i: i % 9 >= 7,
    'label == "ill" and patient == "P1"': lambda patient, age, i: i % 2 == 0 and patient == "P1",
    'folder == "2" or patient == "P0"': lambda patient, age, i: i >= 8 or patient == "P0",
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_sees_the_columns_of_the_table(table: Path, packed: Path, tmp_path: Path, text: str) -> None:
    """In a reader, a subset, and a conversion, whose listing has the columns or which reads the samples first."""
    expected = [f"{i // 4}/{i}" for i in range(12) if EXPRESSIONS[text](PATIENTS[i], AGES[i], i)]
    assert 0 < len(expected) < 12
    with readers.open(packed) as reader:
        assert list(reader.select(where=text).keys) == expected
        assert list(reader.select(indices=np.arange(12)[::-1], where=text).keys) == expected[::-1]
    assert packer.table(packed).every(1).where(text).keys("train") == expected
    for name, source in (("hdf5", table), ("tfrecord", packed)):
        made = convert(source, tmp_path / name, name, where=text)
        assert packer.table(tmp_path / name).keys("train") == expected
        assert made.left_out == {"not chosen": 12 - len(expected)}


def test_a_listed_column_decides_before_samples_are_read(table: Path, tmp_path: Path) -> None:
    planned = convert(table, tmp_path / "out", where='patient == "P0" and width > 16', dry_run=True)
    assert planned.samples == 2 and planned.undecided == "(width > 16)"


def test_invalid_expressions_on_columns(table: Path, packed: Path, tmp_path: Path) -> None:
    unknown: Any = readers.UnknownNameError
    for text, error, message in (
        ('patiemt == "P0"', unknown, r"'patiemt' is not known.*json: age, patient, taken on; did you mean patient"),
        ('has("patiemt")', unknown, r"patiemt"),
        ("patient == 7", ValueError, r"asks for numbers in a column that has none, but values such as 'P0'"),
        ("patient == width", ValueError, r"expected a column of the table, and a number or a text"),
        ("patient in ('P0', 3)", ValueError, r"with only numbers or only texts"),
        ("patient in 'P0'", ValueError, r"expected  column == value  or  column in"),
    ):
        with readers.open(packed) as reader, pytest.raises(error, match=message):
            reader.select(where=text)
        with pytest.raises(error, match=message):
            packer.drop(packed, where=text)
        with pytest.raises(error, match=message):
            convert(table, tmp_path / "out", where=text)
    with pytest.raises(unknown, match=r"no sample has 'patiemt' in its field json.*age, patient"):
        convert(packed, tmp_path / "out", where='not patiemt == "P0"')  # a source whose samples are read first
    assert not (tmp_path / "out").exists()


def test_the_viewer_finds_samples_by_a_column(packed: Path) -> None:
    with packer.view(packed) as viewing, Client(viewing.url) as client:
        document = client.where("train", 'patient == "P1"').json
        values = np.frombuffer(client.get(document["url"]).body, "<u4", offset=document["start"])
        assert values.tolist() == [2, 3, 4]
        wrong = client.where("train", 'patiemt == "P1"')
        assert wrong.status == 400 and "did you mean patient" in wrong.error


def test_a_merged_table_has_the_columns_of_all_its_sets(packed: Path, tmp_path: Path) -> None:
    tree_of(tmp_path / "more", {"train/ill/x.jpg": make_jpeg(99)})
    both = packer.table(packed).concat(packer.table(convert(tmp_path / "more", tmp_path / "plain").output))
    assert both.where('patient == "P0"').keys("train") == ["0/0", "0/1"]
    assert len(both.where('not patient == "P0"')) == 11


NUMBERS = st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats()
JSON = st.none() | NUMBERS | st.text("xyz", max_size=3) | st.lists(NUMBERS, max_size=2)


@given(st.lists(st.dictionaries(st.sampled_from("ab"), JSON), min_size=2, max_size=6), st.integers(-3, 3))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
def test_members_of_any_type_compare_as_python_compares_numbers(members: list[dict[str, Any]], number: int) -> None:
    payloads = [(str(i), json.dumps(member).encode()) for i, member in enumerate([*members, {"a": 1}])]
    facts = TableFacts(Table.of([key for key, _ in payloads]), columns=lambda names: json_columns(payloads, names))
    values = [json.loads(data).get("a") for _, data in payloads]
    expected = [isinstance(value, (int, float)) and value < number for value in values]
    assert parse_where(f"a < {number}").mask(facts).tolist() == expected


def groups_of(root: Path) -> dict[str, set[str]]:
    groups = {}
    for split in packer.table(root).splits:
        with readers.open(root, split) as reader:
            groups[split] = {json.loads(bytes(reader.read(i, "json")))["patient"] for i in range(len(reader))}
    return groups


@pytest.mark.parametrize("stratify", [False, True])
def test_no_group_is_in_two_splits(table: Path, packed: Path, tmp_path: Path, stratify: bool) -> None:
    shares, known = {"train": 0.6, "val": 0.4}, 'has("patient")'
    packer.subset(packed, tmp_path / "some", lambda whole: whole.where(known))
    options: dict[str, Any] = {"seed": 3, "stratify": stratify, "group": "patient"}
    packer.split(tmp_path / "some", shares, tmp_path / "split", **options)
    convert(table, tmp_path / "dealt", "hdf5", fractions=shares, where=known, **options)
    for root in (tmp_path / "split", tmp_path / "dealt"):
        groups = groups_of(root)
        assert groups["train"] | groups["val"] == {"P0", "P1", "P2", "P3", "P4", "P5"}
        assert not groups["train"] & groups["val"] and packer.verify(root).ok
    assert groups_of(tmp_path / "split") == groups_of(tmp_path / "dealt"), "the seed alone does not decide"
    assert packer.table(tmp_path / "split").counts in ({"train": 7, "val": 4}, {"train": 6, "val": 5})
    made = packer.split(packed, {"train": 0.7, "val": 0.3}, tmp_path / "folders", group="folder")
    assert made.splits == {"train": 8, "val": 4}
    assert len({key.partition("/")[0] for key in packer.table(tmp_path / "folders").keys("val")}) == 1


def test_groups_that_cannot_be_distributed(table: Path, packed: Path, tmp_path: Path) -> None:
    shares = {"a": 0.5, "b": 0.5}
    without = r"1 sample of 12 without a value in the column 'patient', such as '1/7'"
    with pytest.raises(readers.SourceError, match=without):
        packer.split(packed, shares, group="patient")
    with pytest.raises(readers.UnknownNameError, match=r"no column 'patiemt'.*did you mean patient"):
        packer.split(packed, shares, group="patiemt")
    with pytest.raises(readers.SourceError, match=r"packer split --group age"):
        convert(packed, tmp_path / "out", fractions=shares, group="age")
    with pytest.raises(ValueError, match=r"give fractions, too"):
        convert(table, tmp_path / "out", group="patient")
    tree_of(tmp_path / "one", {"train/cat/x.jpg": make_jpeg(1), "train/cat/y.jpg": make_jpeg(2)})
    single = convert(tmp_path / "one", tmp_path / "single").output
    with pytest.raises(readers.SourceError, match=r"no sample of 2 would be in 'b', since no folder may be in two"):
        packer.split(single, shares, group="folder")


def test_the_commands_report_the_actual_shares(table: Path, tmp_path: Path) -> None:
    out, group = tmp_path / "out", ["--group", "patient"]
    deal = ["--split-fractions", "train=0.6,val=0.4", "--where", 'has("patient")', *group]
    ended = run_packer("convert", table, "--to", "tar", "-o", out, *deal)
    assert ended.returncode == 0, ended.stderr
    assert "every patient is in one split: train 63.6% (asked 60.0%), val 36.4% (asked 40.0%)" in ended.stdout
    ended = run_packer("split", out, "--split", "train", "--fractions", "a=0.5,b=0.5", *group)
    assert ended.returncode == 0 and "every patient is in one split: a " in ended.stdout


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=80),
    st.sampled_from([(0.5, 0.5), (0.8, 0.2), (0.7, 0.2, 0.1)]),
    st.integers(0, 5),
)
def test_groups_stay_together_and_the_shares_are_close(
    samples: list[tuple[int, int]], shares: tuple[float, ...], seed: int
) -> None:
    groups, classes = (np.unique([row[i] for row in samples], return_inverse=True)[1].astype(np.int64) for i in (0, 1))
    dealt = deal_groups(groups, classes, shares, seed)
    assert (dealt == deal_groups(groups, classes, shares, seed)).all()
    assert all(len(set(dealt[groups == group].tolist())) == 1 for group in range(int(groups.max()) + 1))
    alone = deal_groups(groups, np.zeros_like(classes), shares, seed)
    off = np.abs(np.bincount(alone, minlength=len(shares)) - np.array(shares) * len(groups))
    assert off.max() <= np.bincount(groups).max() + 1
    assert len(set(dealt.tolist())) == min(len(shares), int(groups.max()) + 1)
