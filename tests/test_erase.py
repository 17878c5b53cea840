"""Samples that are erased are in no file of the set any more, and all others are as they were."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_jpeg, tree_of
from set_cases import FORMATS, Held, check, content, masks_for, pack_tree, shards, wrong
from suites.programs import run_packer

import packer
import readers
from cache.errors import OutputError
from packer.testing.children import crashes_at
from readers.augment import CenterCrop, Resize
from readers.layout import read_dataset_info

COUNTS = {"train": {"cat": 5, "dog": 6}, "val": {"cat": 2, "dog": 1}}
GONE = ("cat/cat0t1", "dog/dog0t3")


def pack(root: Path, to: str = "tar", **options: Any) -> Path:
    return pack_tree(root, to, COUNTS, samples_per_shard=3, **options)


def files_with(root: Path, *needles: bytes) -> list[str]:
    """The files below a directory that hold one of these texts, in their bytes or their names."""
    found = []
    for path in root.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if any(needle in data or needle in os.fsencode(path.name) for needle in needles):
            found.append(path.relative_to(root).as_posix())
    return found


def without(held: dict[str, Held], *keys: str) -> tuple[dict[str, Held], list[bytes]]:
    """What is left, and the payloads that are gone."""
    gone = [key for key in held if key.partition("/")[2] in keys]
    payloads = [data for key in gone for data in held[key].fields.values()]
    return {key: value for key, value in held.items() if key not in gone}, payloads


@pytest.mark.parametrize("to", FORMATS)
def test_no_file_holds_what_was_erased_and_the_rest_is_as_it_was(to: str, tmp_path: Path) -> None:
    root = pack(tmp_path / "set", to)
    before, files, order = content(root), shards(root), packer.table(root).keys("train")
    expected, payloads = without(before, *GONE)
    assert len(payloads) == 2 and files_with(root, *payloads, b"cat0t1")
    result = packer.erase(root, keys=GONE, workers=1)
    assert (result.samples, result.samples_before, result.splits) == (2, 14, {"train": 9, "val": 3})
    check(root, expected)
    assert packer.table(root).keys("train") == [key for key in order if key not in GONE]
    assert not files_with(root, *payloads, b"cat0t1", b"dog0t3")
    now = shards(root)
    assert {name: now[name] for name in now if name in files} == {n: files[n] for n in files if n in now}
    assert result.rewritten == len(now.keys() - files.keys()) == 2 and len(files.keys() - now.keys()) == 2
    assert result.removed_bytes > 0 and not read_dataset_info(root).retired
    assert packer.extract(root, tmp_path / "back", workers=1).files == 12
    again = packer.index([root], workers=1)
    assert again.samples == 12
    check(root, expected)


@pytest.mark.parametrize("to", FORMATS)
def test_what_earlier_changes_left_behind_is_erased_too(to: str, tmp_path: Path) -> None:
    """Old states, shards that two splits share, fields in shards of their own, samples that were dropped before."""
    root = pack(tmp_path / "set", to)
    masks_for(tmp_path / "masks", ["cat/cat0t1", "cat/cat0t2", "dog/dog0t3", "dog/dog0v0"])
    packer.add_field(root, tmp_path / "masks", "mask", run=packer.Run(workers=1))
    pack_tree(tmp_path / "more", to, {"train": {"cat": 2}}, seed=3)
    packer.append(root, tmp_path / "more-images", run=packer.Run(workers=1))
    packer.split(root, {"a": 0.5, "b": 0.5}, split="train", seed=1)
    packer.relabel(root, names={"cat": "felis"})
    packer.drop(root, where='key == "dog/dog0t5"')
    assert len(read_dataset_info(root).retired) > 2 and "dog0t5" not in (root / "dataset.json").read_text()
    with pytest.raises(readers.UnknownNameError, match=r"samples that were dropped: packer reshard .* packer prune"):
        packer.erase(root, keys=["dog/dog0t5"], workers=1)
    expected, payloads = without(content(root), *GONE)
    assert len(payloads) == 4
    result = packer.erase(root, where='key in ("cat/cat0t1", "dog/dog0t3")', workers=1)
    assert "dropped" in [copy.what for copy in result.copies] and result.unknown == ()
    check(root, expected)
    assert not files_with(root, *payloads, b"cat0t1", b"dog0t3")
    packer.erase(root, keys=["cat/cat0t2"], workers=1)
    expected, payloads = without(expected, "cat/cat0t2")
    check(root, expected)
    assert not files_with(root, *payloads, b"cat0t2") and not [name for name in shards(root) if ".2.2" in name]
    assert packer.reshard(root, tmp_path / "out", run=packer.Run(workers=1)).samples == len(expected)


def test_raw_pixels_stay_raw(tmp_path: Path) -> None:
    ops = [Resize(8), CenterCrop(8)]
    root = pack(tmp_path / "set", "hdf5", ops=ops, reencode=packer.Reencode("raw"))
    expected, payloads = without(content(root), *GONE)
    packer.erase(root, keys=GONE, workers=1)
    check(root, expected)
    assert not files_with(root, b"cat0t1", *(payload[16:] for payload in payloads))


def test_all_of_a_shard_and_all_of_a_split(tmp_path: Path) -> None:
    root = pack(tmp_path / "set")
    keys = packer.table(root).keys("val")
    expected, payloads = without(content(root), *keys)
    result = packer.erase(root, keys=keys, split="val", workers=1)
    assert result.rewritten == 0 and result.splits == {"train": 11}
    check(root, expected)
    assert not files_with(root, *payloads)


def test_one_person_of_a_table(tmp_path: Path) -> None:
    """The columns say whose the images are, and no name stays: not in the fields, not in the history."""
    tree_of(tmp_path / "scans", {f"{i}.jpg": make_jpeg(i) for i in range(6)})
    with open(tmp_path / "scans" / "scans.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "patient"], *([f"{i}.jpg", f"person-{i // 2}"] for i in range(6))])
    where = 'patient != "person-2" and width > 0'
    root = tmp_path / "set"
    packer.convert(
        tmp_path / "scans" / "scans.csv",
        "tar",
        root,
        choose=packer.Choose(where='patient != "nobody"'),
        run=packer.Run(workers=1),
    )
    packer.drop(root, where='patient == "person-2"')
    packer.relabel(root, classes=["scan"])
    assert not files_with(root / "dataset.json", b"person-2") and "person" not in (root / "dataset.json").read_text()
    packer.subset(root, tmp_path / "some", lambda whole: whole.where(where))
    result = packer.erase(tmp_path / "some", where='patient == "person-1"', workers=1)
    assert result.samples == 2 and not files_with(tmp_path / "some", b"person-1", b"nobody")
    text = (tmp_path / "some" / "dataset.json").read_text()
    assert "person" not in text and [one["operation"] for one in json.loads(text)["history"]][-1] == "erase"
    assert json.loads(text)["history"][-1]["arguments"] == {"where": "patient == '…'"}


def test_a_class_without_samples_keeps_its_name_and_that_is_said(tmp_path: Path) -> None:
    """Classes may be people; the numbers of the others stay."""
    root = pack(tmp_path / "set")
    result = packer.erase(root, where='label == "cat"', workers=1)
    assert read_dataset_info(root).classes == ("cat", "dog") and wrong(root) == []
    assert [(copy.what, copy.where) for copy in result.copies] == [("class", "cat")]
    packer.convert(root, "tar", tmp_path / "dogs", choose=packer.Choose(classes=["dog"]), run=packer.Run(workers=1))
    assert not files_with(tmp_path / "dogs", b"cat")


def test_a_dry_run_writes_nothing_and_says_the_same(tmp_path: Path) -> None:
    root = pack(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    planned = packer.erase(root, keys=GONE, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    done = packer.erase(root, keys=GONE, workers=1)
    for name in ("splits", "samples", "samples_before", "rewritten", "removed", "removed_bytes"):
        assert getattr(planned, name) == getattr(done, name), name
    assert not [name for name in done.removed if (root / name).exists()]


def test_copies_that_are_out_of_reach_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    root = pack(tmp_path / "set")
    packer.subset(root, tmp_path / "a subset", lambda whole: whole.where('label == "cat"'))
    first = read_dataset_info(root).splits["train"].shards[0].path
    os.link(root / first, tmp_path / "another-name")
    (root / "notes.txt").write_text("ours")
    with readers.stage(root, tmp_path / "node", any_filesystem=True):
        pass
    with readers.open(root, "train") as reader:
        cached = readers.cached(reader, "1MiB", persist=True, job="erase-test")
        cached.close()
    try:
        ended = run_packer("erase", root, "--keys", keys_file(tmp_path), "--dry-run")
        result = packer.erase(root, keys=["cat/cat0t1"], workers=1)
    finally:
        run_packer("cache", "clean", "--all")
    found = {(copy.what, copy.where): copy.advice for copy in result.copies}
    advice = found["link", str(tmp_path / "a subset")]
    assert advice.startswith(f"packer erase '{tmp_path / 'a subset'}' …  or, if that finds no such samples,")
    assert re.fullmatch(r"find DIR -inum \d+  finds its 1 more name", found["link", str(root / first)])
    staged = [where for what, where in found if what == "staged"]
    assert len(staged) == 1 and staged[0].startswith(str(tmp_path / "node"))
    assert [advice for (what, _), advice in found.items() if what == "cache"] == ["packer cache clean --all"]
    assert result.unknown == ("notes.txt",)
    assert ended.returncode == 0 and "which this command does not reach:" in ended.stdout
    assert f"packer stage clean {root}" in ended.stdout and "not looked at: notes.txt" in ended.stdout


def keys_file(folder: Path) -> Path:
    (folder / "keys.txt").write_text("cat/cat0t1\n")
    return folder / "keys.txt"


def test_a_shard_that_is_a_link_is_left_where_it_leads(tmp_path: Path) -> None:
    root = pack(tmp_path / "set")
    path = read_dataset_info(root).splits["train"].shards[0].path
    shutil.move(root / path, tmp_path / "elsewhere.tar")
    os.symlink(tmp_path / "elsewhere.tar", root / path)
    expected, _ = without(content(root), "cat/cat0t1")
    result = packer.erase(root, keys=["cat/cat0t1"], workers=1)
    check(root, expected)
    assert (tmp_path / "elsewhere.tar").exists() and not os.path.lexists(root / path)
    assert [copy.where for copy in result.copies] == [str(tmp_path / "elsewhere.tar")]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keys": ["no/such"]}, readers.UnknownNameError, r"no sample has 1 key of those given: 'no/such'"),
        ({"where": "width > 5000"}, readers.SourceError, r"nothing is erased: 'width > 5000' is false for all"),
        ({"where": "width > 0"}, readers.SourceError, r"none of the 14 samples is left; to erase all of it, remove"),
        ({"keys": []}, readers.SourceError, r"nothing is erased: no keys are given"),
        ({}, ValueError, r"give either an expression"),
        ({"where": "width > 0", "split": "test"}, readers.UnknownNameError, r"no split 'test'"),
    ],
)
def test_what_cannot_be_erased(tmp_path: Path, options: Any, error: Any, message: str) -> None:
    root = pack(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    with pytest.raises(error, match=message):
        packer.erase(root, workers=1, **options)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before


def test_shards_of_others_are_neither_written_nor_removed(tmp_path: Path) -> None:
    root = pack(tmp_path / "set")
    for path in (root / "dataset.json", root / "SHA256SUMS", root / "README.md", root / "classes.txt"):
        path.unlink()
    for path in root.glob("*.index"):
        shutil.rmtree(path)
    packer.index([root], workers=1)
    before = shards(root)
    with pytest.raises(readers.SourceError, match=r"made elsewhere.*packer reshard .* -o DIR"):
        packer.erase(root, keys=GONE, workers=1)
    assert shards(root) == before
    packer.reshard(root, tmp_path / "ours", run=packer.Run(workers=1))
    expected, payloads = without(content(tmp_path / "ours"), *GONE)
    packer.erase(tmp_path / "ours", keys=GONE, workers=1)
    check(tmp_path / "ours", expected)
    assert not files_with(tmp_path / "ours", *payloads)


def test_a_damaged_neighbour_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    root = pack(tmp_path / "set")
    with readers.open(root, "train") as reader:
        path, offset, _ = reader.byte_range(list(reader.keys).index("cat/cat0t0"))
    with open(path, "r+b") as file:
        file.seek(offset + 300)
        file.write(b"\0" * 8)
    before = shards(root)
    with pytest.raises(readers.BadSampleError, match=r"cat0t0.*nothing is erased: erase this sample"):
        packer.erase(root, keys=["cat/cat0t1"], workers=1)
    assert shards(root) == before
    packer.erase(root, keys=["cat/cat0t1", "cat/cat0t0"], workers=1)
    assert wrong(root) == [] and not files_with(root, b"cat0t1")


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_is_one_clear_error_and_nothing_is_erased(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pack(tmp_path / "set", to)
    expected = content(root)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(
            OutputError,
            match=rf"{root}: No space left on device; make room and .* nothing is erased so far",
        ):
            packer.erase(root, keys=GONE, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(OutputError, match=rf"{root}: needs [\d,]+ bytes, 100 are free there; make room"):
            packer.erase(root, keys=GONE, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr("packer.sets.change.write_index", full)
        with pytest.raises(OutputError, match=f"{root}: cannot be written: No space left on device"):
            packer.erase(root, keys=GONE, workers=1)
    check(root, expected)


def killed_at(steps: Iterable[int], folder: Path) -> tuple[int, int]:
    """Erase, kill it at each of these steps, and erase again; how often it was killed, and how often after the commit.

    Every time it is the old set or the new one, and in the end no file has what was erased.
    """
    base = pack(folder / "base")
    old, kills, completed = content(base), 0, 0
    expected, payloads = without(old, *GONE)
    for step in steps:
        root = Path(shutil.copytree(base, folder / "set"))
        killed = crashes_at(step, partial(packer.erase, root, keys=GONE, workers=1))
        found = content(root)
        assert found in (old, expected) and wrong(root) == [], step
        try:
            result = packer.erase(root, keys=GONE, workers=1)
            assert result.samples == (2 if found == old else 0), step
            completed += found != old
        except readers.UnknownNameError:  # nothing was left to do, but perhaps for the list of files
            assert found == expected and not files_with(root, *payloads, b"cat0t1", b"dog0t3"), step
        check(root, expected)
        assert not files_with(root, *payloads, b"cat0t1", b"dog0t3"), step
        shutil.rmtree(root)
        kills += killed
        if not killed:
            break
    return kills, completed


def test_a_killed_erasure_is_completed_by_the_same_command(tmp_path: Path) -> None:
    """A few steps of it; the test below tries every one."""
    assert killed_at(range(3, 80, 15), tmp_path)[0] > 2


@pytest.mark.faults
def test_an_erasure_that_is_killed_at_any_step_is_completed(tmp_path: Path) -> None:
    kills, completed = killed_at(itertools.count(1), tmp_path)
    print(f"\nkilled at each of {kills} steps, {completed} of them after the commit")
    assert kills > 25 and completed > 5


def test_samples_are_not_appended_by_an_expression_that_has_lost_its_values(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "images", {f"train/cat/{i}.jpg": make_jpeg(i) for i in range(3)})
    where = 'width > 1 and key != "train/cat/9"'
    root = Path(
        packer.convert(
            source, "tar", tmp_path / "set", run=packer.Run(workers=1), choose=packer.Choose(where=where)
        ).output
    )
    packer.erase(root, keys=["cat/0"], workers=1)
    more = tree_of(tmp_path / "more", {"train/cat/5.jpg": make_jpeg(5)})
    with pytest.raises(readers.SourceError, match="has lost its values"):
        packer.append(root, more, run=packer.Run(workers=1))
