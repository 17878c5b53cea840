"""Conversion: layouts, options and outputs, on real (small) images."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import by_subject, files_of, make_jpeg, tree_of
from PIL import Image
from suites.programs import run_packer, run_python

import packer
import readers
from readers.headers import MEDIA
from readers.opening.tree import unique_keys

FORMATS = ("hdf5", "tfrecord", "tar")


def convert(source: Any, output: Path, to: str = "tar", **options: Any) -> Path:
    return Path(packer.convert(source, to, output, **by_subject(options, workers=1)).output)


def contents(path: Path, split: str) -> dict[str, tuple[bytes, int]]:
    with readers.open(path, split, verify=True) as reader:
        return {reader.name(i): (bytes(reader.read(i)), int(reader.labels[i])) for i in range(len(reader))}


@pytest.mark.parametrize("to", FORMATS)
def test_tree_round_trip(tree: Path, tmp_path: Path, to: str) -> None:
    result = packer.convert(
        tree, to=to, output=tmp_path / "out", run=packer.Run(workers=1), shards=packer.Shards(samples=10)
    )
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
            for ours, parsed in zip(packed.info, plain.info, strict=True):
                assert ours.tolist() == parsed.tolist()
    assert not (tmp_path / "out" / ".packing").exists()
    assert packer.verify(tmp_path / "out", deep=True, against=tree, workers=1).ok


def test_every_format_to_every_other_and_back(tree: Path, tmp_path: Path) -> None:
    last = first = convert(tree, tmp_path / "hdf5", "hdf5")
    for number, to in enumerate(("tfrecord", "tar", "hdf5", "tar", "tfrecord", "hdf5")):
        last = convert(last, tmp_path / f"{number}-{to}", to)
    again, direct = files_of(last), files_of(first)
    for files in (again, direct):
        del files["dataset.json"], files["README.md"]  # they say where a set came from
    assert again == direct
    with readers.open(last, "val") as reader:
        assert reader.name(0) == "cat/cat_000.JPEG" and reader.split_info.root == "val"


@pytest.mark.parametrize("to", FORMATS)
def test_output_is_the_same_for_any_number_of_workers(tree: Path, tmp_path: Path, to: str) -> None:
    outputs = []
    for workers in (1, 2, 3):
        time.sleep(0.6)  # a time stamp anywhere would show
        out = tmp_path / str(workers)
        packer.convert(tree, to=to, output=out, run=packer.Run(workers=workers), shards=packer.Shards(samples=7))
        outputs.append(files_of(out))
    assert outputs[0] == outputs[1] == outputs[2]


def test_spawned_workers(tree: Path, tmp_path: Path) -> None:
    """A program that runs threads gets spawned workers, and the same bytes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, packer\n"
        "if __name__ == '__main__':\n"
        "    event = threading.Event()\n"
        "    thread = threading.Thread(target=event.wait); thread.start()\n"
        "    shards, run = packer.Shards(samples=9), packer.Run(workers=2)\n"
        "    try: packer.convert(sys.argv[1], to='tar', output=sys.argv[2], shards=shards, run=run)\n"
        "    finally: event.set()\n"
    )
    run_python(script, tree, tmp_path / "spawned", check=True)
    assert files_of(tmp_path / "spawned") == files_of(convert(tree, tmp_path / "here", samples_per_shard=9))


@pytest.mark.parametrize(
    ("written", "meant"), [("h5", "hdf5"), ("HDF5", "hdf5"), ("WebDataset", "tar"), ("TFRecord", "tfrecord")]
)
def test_formats_have_other_names(tmp_path: Path, written: str, meant: str) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1)})
    assert packer.convert(source, written, tmp_path / "out", run=packer.Run(workers=1)).format == meant
    assert packer.convert(source, meant, tmp_path / "out", run=packer.Run(workers=1)).already_done, (
        "the same set by each name"
    )
    assert run_packer("convert", source, "--to", written, "-o", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("source", [None, 3, {"train": "a"}])
def test_other_things_than_sources_are_a_type_error(source: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a path, a Source"):
        packer.convert(source, "tar", tmp_path / "out")


def test_default_output_is_named_after_the_source(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert packer.convert(tree, to="tar", run=packer.Run(workers=1)).output == Path("images-tar")
    assert (tmp_path / "images-tar" / "dataset.json").exists()
    (tmp_path / "mine").symlink_to(tree)
    assert packer.convert("mine", run=packer.Run(workers=1)).output == Path("mine-hdf5"), "as the user called it"
    monkeypatch.chdir(tree)
    with pytest.raises(readers.OutputError, match="images-hdf5: is inside the source"):
        packer.convert(".")


def test_class_folders_without_splits(tmp_path: Path) -> None:
    files = {"b/2.jpg": make_jpeg(2), "a/deep/er/1.jpg": make_jpeg(1), "a/deep-x/1.jpg": make_jpeg(3)}
    with readers.open(convert(tree_of(tmp_path / "src", files), tmp_path / "out", split="holdout")) as reader:
        assert (reader.split, reader.classes) == ("holdout", ("a", "b"))
        # torchvision sorts by folder path: "a/deep-x" comes before "a/deep/er"
        assert list(reader.keys) == ["a/deep-x/1", "a/deep/er/1", "b/2"]
        assert reader.labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize("to", FORMATS)
def test_flat_folder_has_no_labels(tmp_path: Path, to: str) -> None:
    out = convert(tree_of(tmp_path / "src", {"x.jpg": make_jpeg(1), "y.jpg": make_jpeg(2)}), tmp_path / "out", to)
    with readers.open(out) as reader:
        assert reader.labels.tolist() == [-1, -1] and reader[0].label is None and reader.classes == ()
    assert packer.verify(out, workers=1).ok


def test_split_option(tree: Path, tmp_path: Path) -> None:
    out = convert(tree, tmp_path / "out", split="val")
    assert list(json.loads((out / "dataset.json").read_text())["splits"]) == ["val"]
    only_owls = shutil.copytree(tree, tmp_path / "owls")
    shutil.rmtree(only_owls / "val/cat")
    with readers.open(convert(only_owls, tmp_path / "owl-val", split="val")) as reader:  # labels as in train
        assert reader.classes == ("cat", "dog", "owl") and set(reader.labels.tolist()) == {1, 2}
    assert readers.open_folder(tree, "valid").split == "val"  # other names of the same split
    with pytest.raises(readers.SourceError, match=r"no split 'test'; it has train, val"):
        convert(tree, tmp_path / "out2", split="test")


def test_images_outside_the_splits_are_never_lost_silently(tree: Path, tmp_path: Path) -> None:
    source = tree_of(shutil.copytree(tree, tmp_path / "src"), {"noisy.csv": b"path,label\n"})
    assert packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1)).samples == 45
    line = json.loads((tmp_path / "out/left-out.jsonl").read_text())
    assert (line["name"], line["action"]) == ("noisy.csv", "not packed")
    tree_of(source, {"extra/cat/1.jpg": make_jpeg(1)})
    with pytest.raises(readers.SourceError, match=r"'extra/cat/1.jpg' is outside the split 'train'.*split='train'"):
        convert(source, tmp_path / "out2")


def test_files_that_are_not_packed_are_reported(tmp_path: Path) -> None:
    images = {name: make_jpeg(1) for name in ("a/1.jpg", "a/.hidden.jpg", ".cache/x.jpg")}
    source = tree_of(tmp_path / "src", {"a/notes.txt": b"no image", **images})
    (source / "a/loop").symlink_to(source)
    (source / "a/linked.jpg").symlink_to(source / "a/1.jpg")
    result = packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))
    lines = [json.loads(line) for line in (tmp_path / "out/left-out.jsonl").read_text().splitlines()]
    assert {line["name"]: line["reason"] for line in lines} == {
        ".cache": "hidden",
        "a/.hidden.jpg": "hidden",
        "a/loop": "a link that leads back to a folder above it",
        "a/notes.txt": "not an image: text",
    }
    assert result.left_out == {"not packed": 4}
    with readers.open(tmp_path / "out") as reader:
        assert list(reader.keys) == ["a/1", "a/linked"]


@pytest.mark.parametrize("to", FORMATS)
def test_content_decides_not_the_suffix(tmp_path: Path, to: str) -> None:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    kinds = {"c/b.bmp": "BMP", "c/g.dat": "GIF", "c/p.JPEG": "PNG", "c/t.tif": "TIFF", "c/w": "WEBP"}
    source = tree_of(tmp_path / "src", {name: encoded(picture, kind) for name, kind in kinds.items()})
    out = convert(source, tmp_path / "out", to)
    with readers.open(out) as reader:
        media = {reader.name(i): MEDIA[reader.info.media[i]].upper() for i in range(len(reader))}
        assert media == kinds
    assert packer.verify(out, deep=True, against=source, workers=1).ok


def test_headers_go_into_the_index(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "1.jpg": make_jpeg(1, (40, 20), progressive=True, exif=exif),
        "2.jpg": encoded(Image.new("CMYK", (8, 16)), "JPEG"),
        "3.jpg": encoded(Image.new("L", (8, 9)), "JPEG"),
    }
    with readers.open(convert(tree_of(tmp_path / "src", files), tmp_path / "out", "hdf5")) as reader:
        info = reader.info
        assert info.width.tolist() == [40, 8, 8] and info.height.tolist() == [20, 16, 9]
        assert info.components.tolist() == [3, 4, 1] and info.orientation.tolist() == [6, 1, 1]
        assert info.process.tolist() == [0xC2, 0xC0, 0xC0]


class TestBadImages:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        files = {f"train/c/{number}.jpg": make_jpeg(number) for number in range(6)}
        files |= {"train/c/3.jpg": make_jpeg(3)[:-200], "train/c/4.jpg": b"not an image at all"}
        tree_of(tmp_path / "src", files)
        (tmp_path / "src/train/c/5b.jpg").symlink_to("nowhere.jpg")
        return tmp_path / "src"

    def test_raise_names_the_file_and_what_to_do(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(readers.BadSampleError, match=r"c/3\.jpg: jpeg image.*on_error='skip' or"):
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out/dataset.json").exists()
        with pytest.raises(readers.DatasetError, match="unfinished conversion"):
            readers.open(tmp_path / "out")

    @pytest.mark.parametrize("to", FORMATS)
    def test_skip(self, source: Path, tmp_path: Path, to: str) -> None:
        result = packer.convert(source, to=to, output=tmp_path / "out", run=packer.Run(workers=1, on_error="skip"))
        assert result.left_out == {"skipped": 3}
        assert sorted(contents(tmp_path / "out", "train")) == ["c/0.jpg", "c/1.jpg", "c/2.jpg", "c/5.jpg"]
        check = packer.verify(tmp_path / "out", against=source, workers=1)
        assert check.ok and check.left_out == 3

    def test_quarantine_copies_and_reports(self, source: Path, tmp_path: Path) -> None:
        out = convert(source, tmp_path / "out", "hdf5", on_error="quarantine")
        bad = {f"train/c/{number}.jpg": (source / f"train/c/{number}.jpg").read_bytes() for number in (3, 4)}
        assert files_of(out / "quarantine") == bad
        lines = [json.loads(line) for line in (out / "left-out.jsonl").read_text().splitlines()]
        names = [("c/3.jpg", "quarantined"), ("c/4.jpg", "quarantined"), ("c/5b.jpg", "quarantined")]
        assert [(line["name"], line["action"]) for line in lines] == names
        assert "cannot be opened" in lines[2]["reason"]

    def test_another_policy_continues_with_the_same_shards(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(readers.BadSampleError):
            convert(source, tmp_path / "out", samples_per_shard=1)
        result = packer.convert(
            source, "tar", tmp_path / "out", run=packer.Run(workers=1, on_error="skip"), shards=packer.Shards(samples=1)
        )
        assert (result.shards_resumed, result.samples) == (3, 4)
        again = convert(source, tmp_path / "b", samples_per_shard=1, on_error="skip")
        assert files_of(tmp_path / "out") == files_of(again)

    def test_check_decode_finds_what_headers_do_not_show(self, tmp_path: Path) -> None:
        source = tree_of(tmp_path / "src", {"a.jpg": make_jpeg(1, (64, 64)), "b.png": _broken_png()})
        out = convert(source, tmp_path / "o1")
        with pytest.raises(readers.BadSampleError, match=r"b\.png: does not decode"):
            convert(source, tmp_path / "o2", check="decode")
        assert [problem.key for problem in packer.verify(out, deep=True, workers=1).problems] == ["b"]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _broken_png() -> bytes:
    noise = np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    data = bytearray(encoded(Image.fromarray(noise), "PNG"))
    middle = data.index(b"IDAT") + 40
    data[middle : middle + 8] = bytes(8)
    return bytes(data)


def test_shuffle_is_seeded_and_loses_nothing(tree: Path, tmp_path: Path) -> None:
    keys = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        out = packer.convert(
            tree, to="tfrecord", output=tmp_path / name, run=packer.Run(workers=1), shards=packer.Shards(shuffle=seed)
        ).output
        with readers.open(out, "train") as reader:
            keys[name] = list(reader.keys)
    assert keys["a"] == keys["b"] != keys["c"]
    assert sorted(keys["a"]) == sorted(keys["c"]) == readers.open_folder(tree, "train").keys
    assert packer.verify(tmp_path / "a", against=tree, workers=1).ok


@pytest.mark.parametrize("to", FORMATS)
def test_label_offset_is_in_the_shards_and_not_in_the_reader(tree: Path, tmp_path: Path, to: str) -> None:
    out = packer.convert(
        tree, to=to, output=tmp_path / "out", run=packer.Run(workers=1), shards=packer.Shards(label_offset=1)
    ).output
    with readers.open(out, "val") as reader:
        assert reader.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert packer.verify(out, against=tree, workers=1).ok
    if to == "hdf5":
        import h5py

        with h5py.File(out / "val-00000-of-00001.h5") as file:
            assert file["label"][:].tolist() == [1] * 3 + [2] * 3 + [3] * 3


@pytest.mark.parametrize("to", FORMATS)
def test_names_that_differ_only_in_their_suffix(tmp_path: Path, to: str) -> None:
    names = ["c/a.jpeg", "c/a.jpg", "c/b.jpg", "c/b.jpg.jpg", "c/dotted.name.v1.jpg"]
    source = tree_of(tmp_path / "src", {name: make_jpeg(len(name)) for name in names})
    out = convert(source, tmp_path / "out", to)
    assert sorted(contents(out, "train")) == names
    with readers.open(out) as reader:
        assert len(set(reader.keys)) == 5
    packer.extract(out, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["a.jpg", "b.png"], ["a", "b"]),
        (["a.jpg", "a.png", "b.png"], ["a.jpg", "a.png", "b"]),
        (["a.jpg", "a.txt"], ["a", "a.txt"]),
        (["a.b", "a.c", "a.b.jpg"], ["a.b", "a.c", "a.b.jpg"]),
        ([".x", "d.e/f"], [".x", "d.e/f"]),
    ],
)
def test_unique_keys(names: list[str], keys: list[str]) -> None:
    assert unique_keys(names) == keys


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    try:
        with open(os.fsencode(tmp_path / "src") + b"/\xff\xfe.jpg", "wb") as file:
            file.write(make_jpeg(1))
    except OSError:
        pytest.skip("this filesystem allows only UTF-8 names")
    with pytest.raises(readers.SourceError, match="not UTF-8; rename it"):
        convert(tmp_path / "src", tmp_path / "out")


class TestOutputs:
    def test_the_same_command_again_does_nothing(self, tree: Path, tmp_path: Path) -> None:
        before = files_of(convert(tree, tmp_path / "out"))
        result = packer.convert(tree, to="tar", output=tmp_path / "out", run=packer.Run(workers=1))
        assert result.already_done and result.samples == 45
        assert files_of(tmp_path / "out") == before

    def test_another_command_needs_overwrite(self, tree: Path, tmp_path: Path) -> None:
        out = tree_of(convert(tree, tmp_path / "out"), {"mine.txt": b"a note"})
        before = files_of(out)
        with pytest.raises(readers.OutputError, match="overwrite=True to replace it"):
            convert(tree, out, "hdf5")
        assert files_of(out) == before
        convert(tree, out, "hdf5", overwrite=True)
        shards = ["train-00000-of-00001.h5", "train.index", "val-00000-of-00001.h5", "val.index"]
        assert {path.name for path in out.iterdir()} == {
            "dataset.json",
            "mine.txt",
            "README.md",
            "classes.txt",
            *shards,
        }
        assert packer.verify(out, against=tree, workers=1).ok

    def test_a_foreign_folder_is_left_alone(self, tree: Path, tmp_path: Path) -> None:
        tree_of(tmp_path / "out", {"thesis.tex": b"precious"})
        for overwrite in (False, True):
            with pytest.raises(readers.OutputError, match="not empty and not a packed set"):
                convert(tree, tmp_path / "out", overwrite=overwrite)
        assert files_of(tmp_path / "out") == {"thesis.tex": b"precious"}
        with pytest.raises(readers.OutputError, match="is a file"):
            convert(tree, tmp_path / "out/thesis.tex")

    def test_output_inside_the_source(self, tmp_path: Path) -> None:
        source = tree_of(tmp_path / "src", {"c/1.jpg": make_jpeg(1)})
        with pytest.raises(readers.OutputError, match="is inside the source"):
            convert(source, source / "packed")

    def test_dry_run_writes_nothing(self, tree: Path, tmp_path: Path) -> None:
        result = packer.convert(tree, to="tar", output=tmp_path / "out", dry_run=True, shards=packer.Shards(samples=10))
        assert result.dry_run and (result.samples, result.shards) == (45, 5)
        assert not (tmp_path / "out").exists()

    def test_too_little_space_is_refused_before_the_first_byte(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(readers.OutputError, match=r"needs [\d,]+ bytes, 1,000 are free"):
            convert(tree, tmp_path / "out")

    def test_missing_and_empty_sources(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for name, message in (("nothing", "no such file"), ("empty", "no files found")):
            with pytest.raises(readers.SourceError, match=message):
                convert(tmp_path / name, tmp_path / "out")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"to": "zip"}, {"on_error": "ignore"}, {"samples_per_shard": 0}, {"shard_size": "a lot"},
            {"shard_size": 5, "samples_per_shard": 5}, {"shuffle": -1}, {"workers": 0}, {"label_offset": -1},
        ],
    )  # fmt: skip
    def test_wrong_options(self, tree: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            convert(tree, tmp_path / "out", **wrong)
        assert not (tmp_path / "out").exists()
