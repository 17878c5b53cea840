"""The commands that change sets: what they would do, what they do, and what they say of mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from conftest import make_jpeg, tree_of
from set_cases import COUNTS, OTHERS, masks_for, pack_tree, wrong

import readers
from packer.cli import main


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets; tests may not write to them."""
    root = tmp_path_factory.mktemp("base")
    pack_tree(root / "one", "tar", COUNTS)
    pack_tree(root / "two", "tar", OTHERS, seed=1)
    return root


@pytest.fixture
def one(base: Path, tmp_path: Path) -> Path:
    """A set that may be changed."""
    return Path(shutil.copytree(base / "one", tmp_path / "set"))


@pytest.fixture
def two(base: Path) -> Path:
    """Another set."""
    return base / "two"


COMMANDS = {
    "append": ["{set}", "{other}", "--workers", "1"],
    "merge": ["{set}", "{other}", "-o", "{out}"],
    "split": ["{set}", "--fractions", "train=0.5,val=0.5", "--seed", "1", "--stratify"],
    "subset": [
        "{set}",
        "-o",
        "{out}",
        "--where",
        'min_side >= 24 and label in ("cat", 1)',
        "--every",
        "2",
        "--limit",
        "3",
    ],
    "drop": ["{set}", "--keys", "{keys}"],
    "relabel": ["{set}", "--map", "cat=tiger"],
    "dedup": ["{set}", "--near", "0", "--workers", "1"],
    "add-field": ["{set}", "{masks}", "--name", "mask", "--workers", "1"],
    "reshard": ["{set}", "-o", "{out}", "--to", "hdf5", "--workers", "1"],
    "prune": ["{set}"],
}


Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: its status, what it prints, and what it says on stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, one: Path, two: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "keys.txt").write_text("cat/cat0t0\ndog/dog0t1\n")
    masks_for(tmp_path / "masks", ["cat/cat0t0"])
    places = {
        "set": one,
        "other": two,
        "out": tmp_path / "out",
        "keys": tmp_path / "keys.txt",
        "masks": tmp_path / "masks",
    }
    arguments = [argument.format(**places) for argument in COMMANDS[name]]
    state = (one / "dataset.json").read_bytes()
    status, planned, errors = run(name, *arguments, "--dry-run", "--json")
    assert status == 0, errors
    assert (one / "dataset.json").read_bytes() == state and not (tmp_path / "out").exists()
    status, done, errors = run(name, *arguments, "--json")
    assert status == 0, errors
    would, did = json.loads(planned), json.loads(done)
    for key in ("samples", "splits", "classes", "groups", "files"):
        assert would.get(key) == did.get(key), key
    out = tmp_path / "out" if (tmp_path / "out").exists() else one
    assert wrong(out) == [] and not (out / ".packing").exists()


def test_append_takes_the_options_that_name_what_a_source_calls_things(one: Path, tmp_path: Path, run: Run) -> None:
    tree_of(tmp_path / "scans" / "images", {f"{i}.jpg": make_jpeg(90 + i) for i in range(2)})
    table = tmp_path / "scans" / "new.csv"
    table.write_text("file,finding\n0.jpg,dog\n1.jpg,cat\n")
    options = ["--split", "train", "--workers", "1"]
    status, _, errors = run("append", one, table, *options)
    assert status == 1 and "name another folder with  --folder DIR" in errors
    named = ["--folder", table.parent / "images", "--label-column", "finding"]
    status, _, errors = run("append", one, table, *named, *options)
    assert (status, "warning" in errors) == (0, False), errors
    with readers.open(one, "train") as reader:
        assert {key: reader.classes[label] for key, label in zip(reader.keys, reader.labels, strict=True)}.items() >= {
            ("0", "dog"),
            ("1", "cat"),
        }


def test_drop_says_that_the_bytes_stay_and_what_removes_them(one: Path, run: Run) -> None:
    status, shown, errors = run("drop", one, "--where", 'key == "cat/cat0t1"')
    assert status == 0 and f"until  packer reshard {one}  and  packer prune {one}" in shown, errors
    for command in ("reshard", "prune"):
        assert run(command, one)[0] == 0
    assert not [path for path in one.rglob("*") if path.is_file() and b"cat0t1" in path.read_bytes()]


def test_append_of_one_class_that_the_set_has_is_no_matter_for_a_warning(one: Path, tmp_path: Path, run: Run) -> None:
    for name in ("cat", "fox"):
        tree_of(tmp_path / name, {f"train/{name}/new.jpg": make_jpeg(80)})
        status, _, errors = run("append", one, tmp_path / name, "--workers", "1")
        assert (status, "one class only" in errors) == (0, name == "fox"), errors


def test_commands_say_what_is_wrong(one: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "keys.txt").write_text("no/such\n")
    for arguments, status, message in (
        (["drop", one, "--where", "widht > 3"], 1, "at character 1: 'widht' is not known; there are label"),
        (["drop", one, "--keys", tmp_path / "keys.txt"], 1, "no sample has 1 key of those given: 'no/such'"),
        (["drop", one, "--where", 'label == "fox"'], 1, "no class 'fox'; there are 2: cat, dog"),
        (["drop", one, "--where", "width > 0"], 1, "none of the 14 samples is left"),
        (["split", one, "--fractions", "a=0.5,b"], 2, "'b' is not NAME=VALUE"),
        (["subset", one, "-o", one, "--every", "2"], 1, "holds a set; choose another output"),
        (["relabel", one, "--map", "fox=cat"], 1, "no class 'fox'"),
        (["merge", one, "-o", tmp_path / "o"], 2, "expected two sets or more"),
    ):
        found, _, errors = run(*arguments)
        assert (found, message in errors) == (status, True), errors
    assert not (tmp_path / "o").exists() and not (one / ".packing").exists()
