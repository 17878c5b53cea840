"""A hostile dataset.json, index or report: every command ends with an error of this project, or works.

The long loop is marked `faults`; TRIALS (default 1000) is its length, SEED makes it repeatable.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from set_cases import FORMATS, convert

import packer
import readers
from cache.errors import DatasetError
from packer.cli import main

TRIALS = int(os.environ.get("TRIALS", "1000"))
SEED = int(os.environ.get("SEED", "0"))
VALUES: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1e308, float("nan"), "", "x", "../x", "\0", "\ud800"]
VALUES += [[], [1], ["a"], {}, {"a": 1}, "a" * 5000, [[[]]]]
HOSTILE_MADE: list[Any] = [{"left_out": 5}, {"left_out": {"a": "b"}}, {"payload_bytes": "x"}, {"options": 7}]
HOSTILE_MADE += [{"options": {"split": 3}}, {"plan": []}, {"by": {}, "source": ["x"]}]
VALUES += HOSTILE_MADE
REPORTS = [b"[]\n", b"{}\n", b"null\n", b"\xff\xfe\n", b"[" * 100_000]
COLUMN_BYTES = [b"\xff" * 8, b"\0" * 8, b"\x01" + b"\0" * 7]


@pytest.fixture(scope="module")
def sets(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A set of each format; read-only."""
    root = tmp_path_factory.mktemp("hostile")
    return {to: convert(tree / "val", root / to, to).output for to in FORMATS}


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def forget_checksums(content: dict[str, Any]) -> None:
    for split in content["splits"].values():
        split.pop("columns", None)


def commands(root: Path, tree: Path, scratch: Path, to: str) -> dict[str, Callable[[], object]]:
    """What users do with a set."""
    return {
        "inspect": lambda: packer.inspect(root).to_dict(),
        "inspect, as text": lambda: run_cli("inspect", str(root)),
        "verify": lambda: packer.verify(root, workers=1, deep=True),
        "verify against": lambda: packer.verify(root, against=tree, workers=1),
        "extract": lambda: packer.extract(root, scratch / "tree"),
        "convert from": lambda: convert(root, scratch / "set"),
        "convert again": lambda: convert(tree, root, to),
        "select": lambda: list(readers.open(root).select(indices=range(2)).keys),
        "index": lambda: packer.index([root], workers=1),
    }


def run_cli(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert end.value.code in (0, 1), f"status {end.value.code}"


def outcomes(root: Path, tree: Path, scratch: Path, to: str) -> dict[str, str]:
    """How each command ends; any error that is not a PackerError is raised."""
    found = {}
    for name, command in commands(root, tree, scratch, to).items():
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            command()
            found[name] = "ok"
        except readers.PackerError as error:
            found[name] = type(error).__name__
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return found


def test_hostile_members_of_made_are_ignored(
    sets: dict[str, Path], tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(sets["tar"], tmp_path / "set"))
    for made in (*HOSTILE_MADE, 7):
        edit(root, lambda content, made=made: content.update(made=made))  # type: ignore[misc]
        found = outcomes(root, tree / "val", tmp_path / "scratch", "tar")
        assert found.pop("convert again") == "OutputError", "a foreign set passed for that of this conversion"
        assert set(found.values()) == {"ok"}, found


@pytest.mark.parametrize("name", ["key", "image.name"])
def test_string_offsets_that_fall(sets: dict[str, Path], tree: Path, tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(sets["hdf5"], tmp_path / "set"))
    edit(root, forget_checksums)
    (path,) = root.glob(f"*.index/{name}.offset.npy")
    offsets = np.load(path)
    offsets[1:-1] = offsets[1:-1][::-1]
    np.save(path, offsets)
    assert not packer.verify(root, workers=1).ok
    found = outcomes(root, tree / "val", tmp_path / "scratch", "hdf5")
    assert found["extract"] == found["convert from"] == "DatasetError", found


def test_a_hostile_report(sets: dict[str, Path], tree: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets["tar"], tmp_path / "set"))
    for report in REPORTS:
        (root / "left-out.jsonl").write_bytes(report)
        with pytest.raises(readers.DatasetError, match=r"left-out\.jsonl"):
            packer.verify(root, against=tree / "val", workers=1)


def members(content: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every member, however deep."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in items for place in [(content, key), *members(value)]]


def spoil_json(text: str, choice: random.Random) -> str:
    content = json.loads(text)
    for _ in range(choice.randint(1, 3)):
        found = members(content)
        inside_made = [place for place in found if place[1] == "made"]
        container, key = choice.choice(inside_made if inside_made and choice.random() < 0.2 else found)
        if isinstance(container, dict) and choice.random() < 0.15:
            del container[key]
        else:
            container[key] = copy.deepcopy(choice.choice(VALUES))
    return json.dumps(content)


def spoil_bytes(data: bytes, choice: random.Random) -> bytes:
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(data) + 1)
        flipped = bytes(byte ^ 1 << choice.randrange(8) for byte in data[at : at + 1])
        changes = [flipped + data[at + 1 :], choice.choice(COLUMN_BYTES) + data[at + 8 :], b"zz" + data[at:], b""]
        data = data[:at] + choice.choices(changes, [5, 2, 2, 1])[0]
    return data


def spoil(root: Path, choice: random.Random) -> str:
    """Damage one file of a set; which one."""
    if choice.random() < 0.5:
        edit(root, forget_checksums)  # so that what is wrong with a column is met and not only its checksum
    description, report = root / "dataset.json", root / "left-out.jsonl"
    path = choice.choice([description] * 5 + [report] + choice.sample(sorted(root.glob("*.index/*.npy")), 4))
    if path == report:
        path.write_bytes(choice.choice(REPORTS))
    elif path == description and choice.random() < 0.8:
        path.write_text(spoil_json(path.read_text(), choice))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), choice))
    return path.name


def test_a_label_that_is_no_class_is_refused_by_name(sets: dict[str, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets["tar"], tmp_path / "set"))
    edit(root, forget_checksums)
    column = root / "train.index/label.npy"
    labels = np.load(column)
    for label in (3, -2, 1 << 40):
        labels[-1] = label
        np.save(column, labels)
        message = rf"\('owl/owl_002'\) has the label {label}, expected 0 to 2, or -1 for none"
        for use in (lambda one: one.labels, lambda one: one[0].label, lambda one: one.select([0]).labels):
            with pytest.raises(DatasetError, match=message), readers.open(root) as reader:
                use(reader)
        assert not packer.verify(root, workers=1).ok


@pytest.mark.faults
def test_any_damage_is_a_packer_error_or_harmless(
    sets: dict[str, Path], tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = random.Random(SEED)
    counts: Counter[str] = Counter()
    for trial in range(TRIALS):
        to = FORMATS[trial % 3]
        root = Path(shutil.copytree(sets[to], tmp_path / "set"))
        where = spoil(root, choice)
        try:
            counts.update(outcomes(root, tree / "val", tmp_path / "scratch", to).values())
        except AssertionError as error:
            raise AssertionError(f"trial {trial} ({to}, {where}): {error}") from error
        shutil.rmtree(root)
        capsys.readouterr()
    with capsys.disabled():
        print(f"\n{TRIALS} sets spoiled, each under 9 commands: {dict(counts)}")
    assert counts["ok"] and counts["DatasetError"], f"the trials were all alike: {counts}"
