"""Sets that are changed while they are read, by many processes at once, or by killed commands: either the old state or
the new."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from set_cases import Held, check, content, pack_tree, unlisted, wrong

import packer
import readers
from packer.testing.children import crashes_at, forked
from readers.fields import encode_field
from readers.layout import read_dataset_info

COUNTS = {"train": {"cat": 4, "dog": 3}, "val": {"dog": 2}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets, and masks; tests may not write to them."""
    root = tmp_path_factory.mktemp("base")
    pack_tree(root / "set", "tar", COUNTS, samples=3)
    pack_tree(root / "other", "tar", {"train": {"eel": 2}}, seed=1)
    mask = bytes(encode_field("mask", np.ones((2, 2), np.uint8)))
    tree_of(root / "masks", {"cat/cat0t1.png": mask, "dog/dog0v1.png": mask})
    return root


@pytest.fixture
def editable(base: Path, tmp_path: Path) -> Path:
    """A set that tests may change."""
    return Path(shutil.copytree(base / "set", tmp_path / "set"))


CHANGES: dict[str, Callable[[Path, Path, Path], Any]] = {
    "drop": lambda root, base, out: packer.drop(root, where='label == "cat"'),
    "relabel": lambda root, base, out: packer.relabel(root, names={"cat": "dog"}),
    "split": lambda root, base, out: packer.split(root, {"a": 0.5, "b": 0.5}, split="train"),
    "append": lambda root, base, out: packer.append(root, base / "other-images", run=packer.Run(workers=1)),
    "append a set": lambda root, base, out: packer.append(root, base / "other", run=packer.Run(workers=1)),
    "add-field": lambda root, base, out: packer.add_field(root, base / "masks", "mask", run=packer.Run(workers=1)),
    "reshard": lambda root, base, out: packer.reshard(root, to="tfrecord", run=packer.Run(workers=1)),
    "erase": lambda root, base, out: packer.erase(root, where='label == "cat"', workers=1),
    "prune": lambda root, base, out: packer.prune(root),
    "merge": lambda root, base, out: packer.merge([root, base / "other"], out),
    "subset": lambda root, base, out: packer.subset(root, out, lambda whole: whole.every(2)),
    "reshard to another": lambda root, base, out: packer.reshard(root, out, to="hdf5", run=packer.Run(workers=1)),
}


def leftovers(root: Path) -> set[str]:
    """Files of a directory that are neither part of its set nor retired."""
    info = read_dataset_info(root)
    known = {"dataset.json", *info.documents, *(retired.path for retired in info.retired)}
    for split in info.splits.values():
        known |= {split.index, *(shard.path for shard in split.shards)}
    paths = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    return {
        name for name in paths if not any(f"{name}/".startswith(f"{k}/") or k.startswith(f"{name}/") for k in known)
    }


def killed_at_steps(name: str, base: Path, folder: Path, steps: range | itertools.count[int]) -> int:
    """Run a change and kill it at each of these disk-changing calls; returns the number of kills."""
    root, out = folder / "set", folder / "out"

    def prepare() -> None:
        for path in (root, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base / "set", root)
        if name == "prune":
            packer.relabel(root, names={"cat": "fox"})

    prepare()
    old = content(root)
    CHANGES[name](root, base, out)
    target = out if out.exists() else root
    new, kills = content(target), 0
    for step in steps:
        prepare()
        killed = crashes_at(step, partial(CHANGES[name], root, base, out))
        where = f"{name}, killed at step {step}"
        if target == out:
            assert content(root) == old, where
        if target == root or (out / "dataset.json").exists():
            state = content(target)
            assert state in (old, new), where
            assert wrong(target) == [], where
        else:
            state = old
        is_old = state == old if target == root else not (out / "dataset.json").exists()
        if is_old and killed:
            CHANGES[name](root, base, out)
        else:  # the next command finds the files of the killed one
            packer.relabel(target, names={})
        check(target, new)
        assert leftovers(target) == set(), where
        if not killed:
            return kills
        kills += 1
    return kills


@pytest.mark.parametrize("name", CHANGES)
def test_killed_at_some_steps(name: str, base: Path, tmp_path: Path) -> None:
    """A few kills around the middle and the end of each change; the test below tries every step."""
    assert killed_at_steps(name, base, tmp_path, range(1, 60, 19)) > 0


@pytest.mark.faults
@pytest.mark.parametrize("name", CHANGES)
def test_killed_at_every_step(name: str, base: Path, tmp_path: Path) -> None:
    kills = killed_at_steps(name, base, tmp_path, itertools.count(1))
    print(f"\n{name}: killed at each of {kills} steps")
    assert kills > (2 if name == "prune" else 20)


def test_concurrent_appends(editable: Path, tmp_path: Path) -> None:
    """All samples are there once; meanwhile a set that was opened before is read to its end."""
    expected, count = content(editable), 8
    trees = []
    for number in range(count):
        names = [f"train/n{number}/{number}_{i}.jpg" for i in range(2)]
        files = {name: make_jpeg(5000 + 2 * number + i) for i, name in enumerate(names)}
        trees.append(tree_of(tmp_path / f"tree{number}", files))
        expected |= {name[:-4]: Held(f"n{number}", {"image": data}) for name, data in files.items()}
    with readers.open(editable, "train") as early, ExitStack() as running:
        for tree in trees:
            running.enter_context(forked(partial(packer.append, editable, tree, run=packer.Run(workers=1))))
        before = [bytes(early.read(i)) for i in range(len(early))]
        keys = list(early.keys)
    check(editable, expected)
    assert keys == [key.partition("/")[2] for key in content(editable) if key.startswith("train/")][: len(keys)]
    assert before == [expected[f"train/{key}"].fields["image"] for key in keys]
    history = read_dataset_info(editable).history
    assert [operation.samples for operation in history] == [(9 + 2 * n, 11 + 2 * n) for n in range(count)]
    assert leftovers(editable) == set()


def test_an_open_reader_keeps_reading_the_old_state(editable: Path, base: Path) -> None:
    """Also columns that were not mapped yet, and copies in other processes; until the old files are pruned."""
    old = content(editable)
    with readers.open(editable, "train", verify=True) as early, readers.open(editable, "val") as unread:
        for name in ("drop", "add-field", "append", "reshard"):
            CHANGES[name](editable, base, editable)
        for reader in (early, pickle.loads(pickle.dumps(early))):
            read = {f"train/{s.key}": Held(reader.classes[s.label], dict(s.fields)) for s in reader}
            assert {k: Held(h.label, {n: bytes(d) for n, d in h.fields.items()}) for k, h in read.items()} == {
                key: sample for key, sample in old.items() if key.startswith("train/")
            }
            assert reader.info.width.min() > 0 and reader.name(0).startswith("cat")
        assert packer.prune(editable).files
        with pytest.raises(
            readers.StaleIndexError, match="has been replaced by another since it was opened; open it again"
        ):
            unread.read(1)
    assert content(editable).keys() != old.keys() and wrong(editable) == []


def test_old_indexes_are_removed_after_a_month_unless_in_use(editable: Path) -> None:
    packer.relabel(editable, names={"cat": "fox"})
    packer.drop(editable, where="width == 32", split="train")
    (retired,) = read_dataset_info(editable).retired
    assert (editable / retired.path).is_dir()
    text = (editable / "dataset.json").read_text()
    (editable / "dataset.json").write_text(text.replace(retired.since, "2020-01-01T00:00:00Z"))
    packer.relabel(editable, names={"fox": "cat"})
    assert not (editable / retired.path).exists() and read_dataset_info(editable).retired == ()
    info, content_json = read_dataset_info(editable), json.loads((editable / "dataset.json").read_text())
    used = [info.splits["train"].index, info.splits["train"].shards[0].path, "elsewhere"]  # packer index  may do that
    content_json["retired"] = [{"path": path, "since": "2020-01-01T00:00:00Z"} for path in used]
    (editable / "dataset.json").write_text(json.dumps(content_json))
    expected = content(editable)
    packer.prune(editable)
    check(editable, expected)


def test_a_staged_copy_keeps_the_staged_state(editable: Path, tmp_path: Path) -> None:
    old = content(editable)
    with readers.stage(editable, tmp_path / "node", any_filesystem=True) as first:
        packer.relabel(editable, names={"cat": "dog"})
        with readers.stage(editable, tmp_path / "node", any_filesystem=True) as second:
            assert content(second) == content(editable) != old
        assert content(first) == old


def test_an_unfinished_conversion_and_a_hostile_list_of_names(editable: Path, base: Path, tmp_path: Path) -> None:
    (editable / ".packing").mkdir()
    (editable / ".packing" / "names.json").write_text('["../outside", "train-000000.tar"]')
    (tmp_path / "outside").write_text("theirs")
    with pytest.raises(readers.OutputError, match=r"names.json: cannot be read .*packer verify"):
        packer.drop(editable, where="label == 0")
    (editable / ".packing" / "names.json").write_text('["train-000000.tar", "nothing"]')
    for other in (
        lambda: packer.index([editable], workers=1),
        lambda: packer.convert(base / "other", "tar", editable, overwrite=True),
    ):
        with pytest.raises(readers.PackerError, match="a command that changed this set was killed; run  packer prune"):
            other()
    packer.relabel(editable, names={"cat": "fox"})
    assert wrong(editable) == [] and (tmp_path / "outside").exists()
    out = tmp_path / "out"
    (out / ".packing").mkdir(parents=True)
    (out / ".packing" / "plan.json").write_text("{}")
    with pytest.raises(readers.OutputError, match="has an unfinished conversion"):
        packer.subset(editable, out, lambda whole: whole.every(2))
    assert os.listdir(out) == [".packing"]


def test_a_full_disk_leaves_the_old_set_or_only_the_documents_are_missing(
    editable: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, rename = content(editable), os.rename
    for failing in range(1, 12):
        left = itertools.count(failing - 1, -1)

        def full(*arguments: Any, left: Any = left, **named: Any) -> None:
            if next(left) == 0:
                raise OSError(28, os.strerror(28))
            rename(*arguments, **named)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "rename", full)
                CHANGES["append"](editable, base, editable)
        except readers.OutputError as error:
            assert "No space left" in str(error)
        else:
            break
        assert content(editable) == expected and leftovers(editable) == set()
    else:
        pytest.fail("the append never got through")
    assert failing > 4 and wrong(editable) == [] and not (editable / "SHA256SUMS").exists()
    packer.prune(editable)
    assert unlisted(editable) == set()
