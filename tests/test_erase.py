"""Erased samples are in no file of the set any more, and all other samples are unchanged."""

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
from set_cases import COUNTS, FORMATS, Held, check, content, convert, masks_for, pack_tree, shards, wrong
from suites.programs import run_packer

import packer
import readers
from cache.errors import OutputError
from packer.sets import change
from packer.testing.children import crashes_at
from readers.augment import CenterCrop, Resize
from readers.layout import read_dataset_info

GONE = ("cat/cat0t1", "dog/dog0t3")


def pack(root: Path, to: str = "tar", **options: Any) -> Path:
    return pack_tree(root, to, COUNTS, samples=3, **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed set; tests may not write to it."""
    return pack(tmp_path_factory.mktemp("erase") / "set")


@pytest.fixture
def target(base: Path, tmp_path: Path) -> Path:
    """A set that tests may change."""
    return Path(shutil.copytree(base, tmp_path / "set"))


def files_with(root: Path, *needles: bytes) -> list[str]:
    """The files below a directory that contain one of these byte strings, in their content or their names."""
    paths = []
    for path in root.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if any(needle in data or needle in os.fsencode(path.name) for needle in needles):
            paths.append(path.relative_to(root).as_posix())
    return paths


def without(samples: dict[str, Held], *keys: str) -> tuple[dict[str, Held], list[bytes]]:
    """The remaining samples, and the erased payloads."""
    gone = [key for key in samples if key.partition("/")[2] in keys]
    payloads = [data for key in gone for data in samples[key].fields.values()]
    return {key: value for key, value in samples.items() if key not in gone}, payloads


def times(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize("to", [*FORMATS, "raw"])
def test_no_file_holds_erased_samples_and_the_others_are_unchanged(to: str, tmp_path: Path) -> None:
    raw = {"ops": [Resize(8), CenterCrop(8)], "reencode": packer.Reencode("raw")} if to == "raw" else {}
    root = pack(tmp_path / "set", "hdf5" if raw else to, **raw)
    before, files, order = content(root), shards(root), packer.table(root).keys("train")
    expected, payloads = without(before, *GONE)
    needles = [b"cat0t1", b"dog0t3", *(payload[16 if raw else 0 :] for payload in payloads)]
    assert len(payloads) == 2 and files_with(root, *needles)
    untouched = times(root)
    planned = packer.erase(root, keys=GONE, dry_run=True)
    assert times(root) == untouched, "the dry run wrote to the set"
    result = packer.erase(root, keys=GONE, workers=1)
    for name in ("splits", "samples", "samples_before", "rewritten", "removed", "removed_bytes"):
        assert getattr(planned, name) == getattr(result, name), name
    assert (result.samples, result.samples_before, result.splits) == (2, 14, {"train": 9, "val": 3})
    check(root, expected)
    assert packer.table(root).keys("train") == [key for key in order if key not in GONE]
    assert not files_with(root, *needles) and not [name for name in result.removed if (root / name).exists()]
    now = shards(root)
    assert {name: now[name] for name in now if name in files} == {n: files[n] for n in files if n in now}
    assert result.rewritten == len(now.keys() - files.keys()) == 2 and len(files.keys() - now.keys()) == 2
    assert result.removed_bytes > 0 and not read_dataset_info(root).retired
    assert packer.extract(root, tmp_path / "back", workers=1).files == 12
    assert packer.index([root], workers=1).samples == 12
    check(root, expected)


@pytest.mark.parametrize("to", FORMATS)
def test_leftovers_of_earlier_changes_are_erased_too(to: str, tmp_path: Path) -> None:
    """Old states, shards that two splits share, fields in separate shards, samples that were dropped before."""
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


def test_all_of_a_split_and_all_of_a_class(target: Path, tmp_path: Path) -> None:
    """A class without samples keeps its name, which may be that of a person, and this is reported; label numbers
    stay."""
    keys = packer.table(target).keys("val")
    expected, payloads = without(content(target), *keys)
    result = packer.erase(target, keys=keys, split="val", workers=1)
    assert result.rewritten == 0 and result.splits == {"train": 11}
    check(target, expected)
    assert not files_with(target, *payloads)
    result = packer.erase(target, where='label == "cat"', workers=1)
    assert read_dataset_info(target).classes == ("cat", "dog") and wrong(target) == []
    assert [(copy.what, copy.where) for copy in result.copies] == [("class", "cat")]
    convert(target, tmp_path / "dogs", classes=["dog"])
    assert not files_with(tmp_path / "dogs", b"cat")


def test_one_person_of_a_table(tmp_path: Path) -> None:
    """The columns say whose the images are; no name stays, neither in the fields nor in the history."""
    tree_of(tmp_path / "scans", {f"{i}.jpg": make_jpeg(i) for i in range(6)})
    with open(tmp_path / "scans" / "scans.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "patient"], *([f"{i}.jpg", f"person-{i // 2}"] for i in range(6))])
    root, some = tmp_path / "set", tmp_path / "some"
    convert(tmp_path / "scans" / "scans.csv", root, where='patient != "nobody"')
    packer.drop(root, where='patient == "person-2"')
    packer.relabel(root, classes=["scan"])
    assert "person" not in (root / "dataset.json").read_text()
    packer.subset(root, some, lambda whole: whole.where('patient != "person-2" and width > 0'))
    result = packer.erase(some, where='patient == "person-1"', workers=1)
    assert result.samples == 2 and not files_with(some, b"person-1", b"nobody")
    text = (some / "dataset.json").read_text()
    last = json.loads(text)["history"][-1]
    assert "person" not in text and (last["operation"], last["arguments"]) == ("erase", {"where": "patient == '…'"})


def test_append_refuses_an_expression_whose_values_were_erased(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "images", {f"train/cat/{i}.jpg": make_jpeg(i) for i in range(3)})
    root = convert(source, tmp_path / "set", where='width > 1 and key != "train/cat/9"').output
    packer.erase(root, keys=["cat/0"], workers=1)
    more = tree_of(tmp_path / "more", {"train/cat/5.jpg": make_jpeg(5)})
    with pytest.raises(readers.SourceError, match="has removed the values"):
        packer.append(root, more, run=packer.Run(workers=1))


def test_copies_that_are_out_of_reach_are_named(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    packer.subset(target, tmp_path / "a subset", lambda whole: whole.where('label == "cat"'))
    first, last = (shard.path for shard in read_dataset_info(target).splits["train"].shards[::3])
    os.link(target / first, tmp_path / "another-name")
    (target / "notes.txt").write_text("ours")
    with readers.stage(target, tmp_path / "node", any_filesystem=True):
        pass
    with readers.open(target, "train") as reader:
        readers.cached(reader, "1MiB", persist=True, job="erase-test").close()
    (tmp_path / "keys.txt").write_text("cat/cat0t1\n")
    try:
        ended = run_packer("erase", target, "--keys", tmp_path / "keys.txt", "--dry-run")
        result = packer.erase(target, keys=["cat/cat0t1"], workers=1)
    finally:
        run_packer("cache", "clean", "--all")
    advice_on = {(copy.what, copy.where): copy.advice for copy in result.copies}
    advice = advice_on["link", str(tmp_path / "a subset")]
    assert advice.startswith(f"packer erase '{tmp_path / 'a subset'}' …  or, if that finds no such samples,")
    assert re.fullmatch(r"find DIR -inum \d+  finds its 1 more name", advice_on["link", str(target / first)])
    staged = [where for kind, where in advice_on if kind == "staged"]
    assert len(staged) == 1 and staged[0].startswith(str(tmp_path / "node"))
    assert [advice for (kind, _), advice in advice_on.items() if kind == "cache"] == ["packer cache clean --all"]
    assert result.unknown == ("notes.txt",)
    assert ended.returncode == 0 and "which this command does not reach:" in ended.stdout
    assert f"packer stage clean {target}" in ended.stdout and "not checked: notes.txt" in ended.stdout
    # A shard that is a link: its target is left in place and reported.
    shutil.move(target / last, tmp_path / "elsewhere.tar")
    os.symlink(tmp_path / "elsewhere.tar", target / last)
    expected, _ = without(content(target), "dog/dog0t5")
    result = packer.erase(target, keys=["dog/dog0t5"], workers=1)
    check(target, expected)
    assert (tmp_path / "elsewhere.tar").exists() and not os.path.lexists(target / last)
    assert str(tmp_path / "elsewhere.tar") in [copy.where for copy in result.copies]


def test_erasures_that_are_refused(target: Path) -> None:
    before = times(target)
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"keys": ["no/such"]}, readers.UnknownNameError, r"no sample has 1 key of those given: 'no/such'"),
        ({"where": "width > 5000"}, readers.SourceError, r"nothing is erased: 'width > 5000' is false for all"),
        (
            {"where": "width > 0"},
            readers.SourceError,
            r"none of the 14 samples is left; to erase the whole set, remove",
        ),
        ({"keys": []}, readers.SourceError, r"nothing is erased: no keys are given"),
        ({}, ValueError, r"by either an expression"),
        ({"where": "width > 0", "split": "test"}, readers.UnknownNameError, r"no split 'test'"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            packer.erase(target, workers=1, **options)
        assert {path: at for path, at in times(target).items() if path.is_file()}.items() <= before.items()


def test_foreign_shards_are_neither_written_nor_removed(target: Path, tmp_path: Path) -> None:
    for name in ("dataset.json", "SHA256SUMS", "README.md", "classes.txt"):
        (target / name).unlink()
    for path in target.glob("*.index"):
        shutil.rmtree(path)
    packer.index([target], workers=1)
    before = shards(target)
    with pytest.raises(readers.SourceError, match=r"made elsewhere.*packer reshard .* -o DIR"):
        packer.erase(target, keys=GONE, workers=1)
    assert shards(target) == before


def test_a_damaged_neighbour_is_named_and_no_sample_is_lost(target: Path) -> None:
    with readers.open(target, "train") as reader:
        path, offset, _ = reader.byte_range(list(reader.keys).index("cat/cat0t0"))
    with open(path, "r+b") as file:
        file.seek(offset + 300)
        file.write(b"\0" * 8)
    before = shards(target)
    with pytest.raises(readers.BadSampleError, match=r"cat0t0.*nothing is erased: erase this sample"):
        packer.erase(target, keys=["cat/cat0t1"], workers=1)
    assert shards(target) == before
    packer.erase(target, keys=["cat/cat0t1", "cat/cat0t0"], workers=1)
    assert wrong(target) == [] and not files_with(target, b"cat0t1")


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_is_one_clear_error_and_nothing_is_erased(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pack(tmp_path / "set", to)
    expected = content(root)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cases: list[tuple[Any, str, Any, str]] = [
        (os, "writev", full, "No space left on device; free space and .* nothing is erased so far"),
        (shutil, "disk_usage", lambda _: SimpleNamespace(free=100), r"needs [\d,]+ bytes, 100 are free there; free"),
        (change, "write_index", full, "cannot be written: No space left on device"),
    ]
    for module, name, function, message in cases[: 3 if to == "tar" else 1]:
        with monkeypatch.context() as patch, pytest.raises(OutputError, match=f"{root}: {message}"):
            patch.setattr(module, name, function)
            packer.erase(root, keys=GONE, workers=1)
    check(root, expected)


def killed_at(steps: Iterable[int], base: Path, folder: Path) -> tuple[int, int]:
    """Erase, kill the erasure at each of these steps, and erase again; returns the number of kills, and how many were
    after the commit.

    After each kill the set is the old one or the new one, and in the end no file has an erased sample.
    """
    old, kills, completed = content(base), 0, 0
    expected, payloads = without(old, *GONE)
    for step in steps:
        root = Path(shutil.copytree(base, folder / "killed"))
        killed = crashes_at(step, partial(packer.erase, root, keys=GONE, workers=1))
        state = content(root)
        assert state in (old, expected) and wrong(root) == [], step
        try:
            result = packer.erase(root, keys=GONE, workers=1)
            assert result.samples == (2 if state == old else 0), step
            completed += state != old
        except readers.UnknownNameError:  # no sample was left to erase, perhaps only the list of files
            assert state == expected and not files_with(root, *payloads, b"cat0t1", b"dog0t3"), step
        check(root, expected)
        assert not files_with(root, *payloads, b"cat0t1", b"dog0t3"), step
        shutil.rmtree(root)
        kills += killed
        if not killed:
            break
    return kills, completed


def test_a_killed_erasure_is_completed_by_the_same_command(base: Path, tmp_path: Path) -> None:
    """A few steps of an erasure; the test below tries every step."""
    assert killed_at(range(3, 80, 15), base, tmp_path)[0] > 2


@pytest.mark.faults
def test_an_erasure_that_is_killed_at_any_step_is_completed(base: Path, tmp_path: Path) -> None:
    kills, completed = killed_at(itertools.count(1), base, tmp_path)
    print(f"\nkilled at each of {kills} steps, {completed} of them after the commit")
    assert kills > 25 and completed > 5
