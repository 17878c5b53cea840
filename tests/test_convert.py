"""Conversion: layouts, options, outputs and dry runs, on real (small) images."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import convert, files_of, make_jpeg, tree_of
from image_cases import encoded
from PIL import Image
from suites.programs import run_packer

import packer
import readers
from packer import Reencode
from readers.headers import MEDIA

FORMATS = ("hdf5", "tfrecord", "tar")


@pytest.mark.parametrize("to", FORMATS)
def test_tree_round_trip(tree: Path, tmp_path: Path, to: str) -> None:
    """With any number of workers; label numbers may start above 0 in the shards, and the reader starts at 0."""
    result = convert(tree, tmp_path / "out", to, samples=10, label_offset=1)
    assert (result.samples, result.splits, result.classes, result.shards) == (45, {"train": 36, "val": 9}, 3, 5)
    assert result.payload_bytes == sum(len(data) for data in files_of(tree).values())
    for split in ("train", "val"):
        with (
            readers.open(tmp_path / "out", split, verify=True) as packed,
            readers.open_folder(tree, split) as plain,
        ):
            assert packed.classes == ("cat", "dog", "owl") == plain.classes
            assert list(packed.keys) == plain.keys
            assert packed.labels.tolist() == plain.labels.tolist()
            assert [packed.read(i) for i in range(len(packed))] == [plain.read(i) for i in range(len(plain))]
            for column, parsed in zip(packed.info, plain.info, strict=True):
                assert column.tolist() == parsed.tolist()
    assert not (tmp_path / "out" / ".packing").exists()
    assert packer.verify(tmp_path / "out", deep=True, against=tree, workers=1).ok
    if to == "hdf5":
        with h5py.File(tmp_path / "out/val-00000-of-00001.h5") as file:
            assert file["label"][:].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    time.sleep(0.6)  # any stored time stamp would differ
    with ThreadPoolExecutor(1) as thread:  # a program with threads gets spawned workers, others forked ones
        busy = threading.Event()
        if to == "tar":
            thread.submit(busy.wait)
        convert(tree, tmp_path / "by 3", to, samples=10, label_offset=1, workers=3)
        busy.set()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "by 3")


def test_every_format_to_every_other_and_back(tree: Path, tmp_path: Path) -> None:
    last = first = convert(tree, tmp_path / "hdf5", "hdf5").output
    for number, to in enumerate(("tfrecord", "tar", "hdf5", "tar", "tfrecord", "hdf5")):
        last = convert(last, tmp_path / f"{number}-{to}", to).output
    again, direct = files_of(last), files_of(first)
    for files in (again, direct):
        del files["dataset.json"], files["README.md"]  # the documents name the source of a set
    assert again == direct
    with readers.open(last, "val") as reader:
        assert reader.name(0) == "cat/cat_000.JPEG" and reader.split_info.root == "val"


def test_formats_have_other_names(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1)})
    for written, meant in (("h5", "hdf5"), ("HDF5", "hdf5"), ("WebDataset", "tar"), ("TFRecord", "tfrecord")):
        out = tmp_path / written
        assert convert(source, out, written).format == meant
        assert convert(source, out, meant).already_done, "the names give different sets"
    assert run_packer("convert", source, "--to", "TFRecord", "-o", out).returncode == 0


# --- the packed files --------------------------------------------------------------------------------------------
def test_the_default_output_is_named_after_the_source(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert packer.convert(tree, to="tar", run=packer.Run(workers=1)).output == Path("images-tar")
    assert (tmp_path / "images-tar" / "dataset.json").exists()
    (tmp_path / "mine").symlink_to(tree)
    assert packer.convert("mine", run=packer.Run(workers=1)).output == Path("mine-hdf5"), "not the given name"
    monkeypatch.chdir(tree)
    with pytest.raises(readers.OutputError, match="images-hdf5: is inside the source"):
        packer.convert(".")


def test_class_folders_without_splits_and_a_flat_folder(tmp_path: Path) -> None:
    files = {"b/2.jpg": make_jpeg(2), "a/deep/er/1.jpg": make_jpeg(1), "a/deep-x/1.jpg": make_jpeg(3)}
    convert(tree_of(tmp_path / "src", files), tmp_path / "out", split="holdout")
    with readers.open(tmp_path / "out") as reader:
        assert (reader.split, reader.classes) == ("holdout", ("a", "b"))
        # torchvision sorts by folder path: "a/deep-x" comes before "a/deep/er"
        assert list(reader.keys) == ["a/deep-x/1", "a/deep/er/1", "b/2"]
        assert reader.labels.tolist() == [0, 0, 1]
    flat = tree_of(tmp_path / "flat", {"x.jpg": make_jpeg(1), "y.jpg": make_jpeg(2)})
    for to in FORMATS:
        convert(flat, tmp_path / to, to)
        with readers.open(tmp_path / to) as reader:
            assert reader.labels.tolist() == [-1, -1] and reader[0].label is None and reader.classes == ()
        assert packer.verify(tmp_path / to, workers=1).ok


def test_split_option(tree: Path, tmp_path: Path) -> None:
    out = convert(tree, tmp_path / "out", split="val").output
    assert list(json.loads((out / "dataset.json").read_text())["splits"]) == ["val"]
    only_owls = shutil.copytree(tree, tmp_path / "owls")
    shutil.rmtree(only_owls / "val/cat")
    with readers.open(convert(only_owls, tmp_path / "owl-val", split="val").output) as reader:  # labels as in train
        assert reader.classes == ("cat", "dog", "owl") and set(reader.labels.tolist()) == {1, 2}
    assert readers.open_folder(tree, "valid").split == "val"  # other names of the same split
    with pytest.raises(readers.SourceError, match=r"no split 'test'; it has train, val"):
        convert(tree, tmp_path / "out2", split="test")


def test_unpacked_files_are_reported_and_images_outside_the_splits_are_an_error(tree: Path, tmp_path: Path) -> None:
    files = {"a/notes.txt": b"no image", "a/1.jpg": make_jpeg(1), "a/.hidden.jpg": b"x", ".cache/x.jpg": b"x"}
    source = tree_of(tmp_path / "src", files)
    (source / "a/loop").symlink_to(source)
    (source / "a/linked.jpg").symlink_to(source / "a/1.jpg")
    assert convert(source, tmp_path / "out").left_out == {"not packed": 4}
    lines = [json.loads(line) for line in (tmp_path / "out/left-out.jsonl").read_text().splitlines()]
    assert {line["name"]: line["reason"] for line in lines} == {
        ".cache": "hidden",
        "a/.hidden.jpg": "hidden",
        "a/loop": "a link that leads back to a folder above it",
        "a/notes.txt": "not an image: text",
    }
    with readers.open(tmp_path / "out") as reader:
        assert list(reader.keys) == ["a/1", "a/linked"]
    splits = tree_of(shutil.copytree(tree, tmp_path / "splits"), {"noisy.csv": b"path,label\n"})
    assert convert(splits, tmp_path / "out1").left_out == {"not packed": 1}
    tree_of(splits, {"extra/cat/1.jpg": make_jpeg(1)})
    with pytest.raises(readers.SourceError, match=r"'extra/cat/1.jpg' is outside the split 'train'.*split='train'"):
        convert(splits, tmp_path / "out2")


@pytest.mark.parametrize("to", FORMATS)
def test_the_content_decides_the_format_not_the_suffix(tmp_path: Path, to: str) -> None:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    kinds = {"c/b.bmp": "BMP", "c/g.dat": "GIF", "c/p.JPEG": "PNG", "c/t.tif": "TIFF", "c/w": "WEBP"}
    source = tree_of(tmp_path / "src", {name: encoded(picture, kind) for name, kind in kinds.items()})
    convert(source, tmp_path / "out", to)
    with readers.open(tmp_path / "out") as reader:
        media = {reader.name(i): MEDIA[reader.info.media[i]].upper() for i in range(len(reader))}
        assert media == kinds
    assert packer.verify(tmp_path / "out", deep=True, against=source, workers=1).ok


def test_shuffle_is_seeded_and_loses_nothing(tree: Path, tmp_path: Path) -> None:
    keys = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        with readers.open(convert(tree, tmp_path / name, "tfrecord", shuffle=seed).output, "train") as reader:
            keys[name] = list(reader.keys)
    assert keys["a"] == keys["b"] != keys["c"]
    assert sorted(keys["a"]) == sorted(keys["c"]) == readers.open_folder(tree, "train").keys
    assert packer.verify(tmp_path / "a", against=tree, workers=1).ok


@pytest.mark.parametrize("to", FORMATS)
def test_names_that_differ_only_in_their_suffix(tmp_path: Path, to: str) -> None:
    names = ["c/a.jpeg", "c/a.jpg", "c/b.jpg", "c/b.jpg.jpg", "c/dotted.name.v1.jpg"]
    source = tree_of(tmp_path / "src", {name: make_jpeg(len(name)) for name in names})
    convert(source, tmp_path / "out", to)
    with readers.open(tmp_path / "out") as reader:
        assert len(set(reader.keys)) == 5 and sorted(map(reader.name, range(5))) == names
    packer.extract(tmp_path / "out", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


# --- bad images --------------------------------------------------------------------------------------------------
@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Seven images, of which one is cut off, one is not an image, and one is a dangling link."""
    files = {f"train/c/{number}.jpg": make_jpeg(number) for number in range(6)}
    files |= {"train/c/3.jpg": make_jpeg(3)[:-200], "train/c/4.jpg": b"not an image at all"}
    tree_of(tmp_path / "src", files)
    (tmp_path / "src/train/c/5b.jpg").symlink_to("nowhere.jpg")
    return tmp_path / "src"


def test_a_bad_image_is_named_and_another_policy_continues_with_the_same_shards(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(readers.BadSampleError, match=r"c/3\.jpg: jpeg image.*on_error='skip' or"):
        convert(damaged, tmp_path / "out", samples=1)
    assert not (tmp_path / "out/dataset.json").exists()
    with pytest.raises(readers.DatasetError, match="unfinished conversion"):
        readers.open(tmp_path / "out")
    result = convert(damaged, tmp_path / "out", samples=1, on_error="skip")
    assert (result.shards_resumed, result.samples) == (3, 4)
    again = convert(damaged, tmp_path / "b", samples=1, on_error="skip").output
    assert files_of(tmp_path / "out") == files_of(again)


@pytest.mark.parametrize("to", FORMATS)
def test_bad_images_are_skipped_or_quarantined(damaged: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    assert convert(damaged, out, to, on_error="skip").left_out == {"skipped": 3}
    with readers.open(out, "train", verify=True) as reader:
        assert list(map(reader.name, range(len(reader)))) == ["c/0.jpg", "c/1.jpg", "c/2.jpg", "c/5.jpg"]
    check = packer.verify(out, against=damaged, workers=1)
    assert check.ok and check.left_out == 3
    assert convert(damaged, out, to, on_error="quarantine", overwrite=True).left_out == {"quarantined": 3}
    bad = {f"train/c/{number}.jpg": (damaged / f"train/c/{number}.jpg").read_bytes() for number in (3, 4)}
    assert files_of(out / "quarantine") == bad
    lines = [json.loads(line) for line in (out / "left-out.jsonl").read_text().splitlines()]
    assert [(line["name"], line["action"]) for line in lines] == [
        (f"c/{name}.jpg", "quarantined") for name in ("3", "4", "5b")
    ]
    assert "cannot be opened" in lines[2]["reason"]


def test_check_decode_finds_damage_behind_headers(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    png = bytearray(encoded(Image.fromarray(noise), "PNG"))
    middle = png.index(b"IDAT") + 40
    png[middle : middle + 8] = bytes(8)
    source = tree_of(tmp_path / "src", {"a.jpg": make_jpeg(1, (64, 64)), "b.png": bytes(png)})
    out = convert(source, tmp_path / "o1").output
    with pytest.raises(readers.BadSampleError, match=r"b\.png: does not decode"):
        convert(source, tmp_path / "o2", check="decode")
    assert [problem.key for problem in packer.verify(out, deep=True, workers=1).problems] == ["b"]


# --- outputs -----------------------------------------------------------------------------------------------------
def test_the_same_command_again_does_nothing_and_another_needs_overwrite(tree: Path, tmp_path: Path) -> None:
    out = tree_of(convert(tree, tmp_path / "out").output, {"mine.txt": b"a note"})
    before = files_of(out)
    result = convert(tree, out)
    assert result.already_done and result.samples == 45
    with pytest.raises(readers.OutputError, match="overwrite=True to replace it"):
        convert(tree, out, "hdf5")
    assert files_of(out) == before
    convert(tree, out, "hdf5", overwrite=True)
    names = {"dataset.json", "mine.txt", "README.md", "classes.txt", "train.index", "val.index"}
    assert {path.name for path in out.iterdir()} == names | {"train-00000-of-00001.h5", "val-00000-of-00001.h5"}
    assert packer.verify(out, against=tree, workers=1).ok


def test_outputs_that_are_refused(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tree_of(tmp_path / "foreign", {"thesis.tex": b"precious"})
    for overwrite in (False, True):
        with pytest.raises(readers.OutputError, match="not empty and not a packed set"):
            convert(tree, foreign, overwrite=overwrite)
    with pytest.raises(readers.OutputError, match="is a file"):
        convert(tree, foreign / "thesis.tex")
    assert files_of(foreign) == {"thesis.tex": b"precious"}
    source = tree_of(tmp_path / "src", {"c/1.jpg": make_jpeg(1)})
    with pytest.raises(readers.OutputError, match="is inside the source"):
        convert(source, source / "packed")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(readers.OutputError, match=r"needs [\d,]+ bytes, 1,000 are free"):
        convert(tree, tmp_path / "out")


def test_sources_that_are_refused(tmp_path: Path) -> None:
    for source in (None, 3, {"train": "a"}):
        with pytest.raises(TypeError, match="expected a path, a Source"):
            convert(source, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for name, message in (("nothing", "no such file"), ("empty", "no files found")):
        with pytest.raises(readers.SourceError, match=message):
            convert(tmp_path / name, tmp_path / "out")
    try:
        with open(os.fsencode(tmp_path / "empty") + b"/\xff\xfe.jpg", "wb") as file:
            file.write(make_jpeg(1))
    except OSError:
        pytest.skip("this filesystem allows only UTF-8 names")
    with pytest.raises(readers.SourceError, match="not UTF-8; rename it"):
        convert(tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize(
    "wrong",
    [
        {"to": "zip"}, {"on_error": "ignore"}, {"samples": 0}, {"size": "a lot"}, {"size": 5, "samples": 5},
        {"shuffle": -1}, {"workers": 0}, {"label_offset": -1},
    ],
)  # fmt: skip
def test_wrong_options(tree: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        convert(tree, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


# --- dry runs ----------------------------------------------------------------------------------------------------
@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """300 images, and an empty directory for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    files = {f"class{i % 3}/{i:03d}.jpg": make_jpeg(i, (48 + i % 40, 64)) for i in range(300)}
    return tree_of(tmp_path / "images", files)


@pytest.mark.parametrize(
    ("to", "reencode"), [("hdf5", None), ("tfrecord", Reencode("png")), ("tar", Reencode(max_side=16))]
)
def test_the_size_that_a_dry_run_expects_is_about_right(
    images: Path, tmp_path: Path, to: str, reencode: Reencode | None
) -> None:
    """Measured by packing some of the samples, whose files are removed."""
    options = {"reencode": reencode, "samples": 100}
    planned = convert(images, tmp_path / "out", to, dry_run=True, **options)
    assert planned.dry_run and (planned.samples, planned.shards) == (300, 3)
    assert planned.expected_bytes is not None and planned.expected_seconds is not None
    assert planned.expected_seconds > 0 and not (tmp_path / "out").exists()
    assert list((tmp_path / "temporary").iterdir()) == []
    made = convert(images, tmp_path / "out", to, **options)
    assert planned.expected_bytes == pytest.approx(made.shard_bytes, rel=0.1)


def test_a_dry_run_prints_size_and_time_and_continues_after_bad_images(images: Path, tmp_path: Path) -> None:
    shown = run_packer("convert", images, "--to", "tar", "-o", tmp_path / "out", "--dry-run").stdout
    assert "would hold 300 samples" in shown and "as measured by packing some of the samples" in shown
    value = json.loads(run_packer("convert", images, "--to", "tar", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert value["expected_bytes"] > value["payload_bytes"] and value["expected_seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "temporary"]
    for path in images.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:100])
    assert packer.convert(images, to="tar", output=tmp_path / "out", dry_run=True).samples == 300
