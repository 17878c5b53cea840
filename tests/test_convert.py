"""Conversion: every layout, option and way out, on real (small) images."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import files_of, make_jpeg
from PIL import Image

import packer
import readers
from readers.headers import MEDIA, parse_header
from readers.tree import unique_keys

FORMATS = ("hdf5", "tfrecord", "tar")


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def contents(path: Path, split: str) -> dict[str, tuple[bytes, int]]:
    with readers.open(path, split, verify=True) as reader:
        return {reader.name(i): (bytes(reader.read(i)), int(reader.labels[i])) for i in range(len(reader))}


@pytest.mark.parametrize("to", FORMATS)
def test_tree_round_trip(tree: Path, tmp_path: Path, to: str) -> None:
    result = packer.convert(tree, to=to, output=tmp_path / "out", workers=1, samples_per_shard=10)
    assert (result.samples, result.splits, result.classes, result.shards) == (
        45,
        {"train": 36, "val": 9},
        3,
        5,
    )
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
    first = packer.convert(tree, to="hdf5", output=tmp_path / "hdf5", workers=1).output
    for number, to in enumerate(("tfrecord", "tar", "hdf5", "tar", "tfrecord", "hdf5")):
        first = packer.convert(first, to=to, output=tmp_path / f"{number}-{to}", workers=1).output
    again = files_of(first)
    direct = files_of(tmp_path / "hdf5")
    del again["dataset.json"], direct["dataset.json"]  # it says where a set came from
    assert again == direct
    with readers.open(first, "val") as reader:
        assert reader.name(0) == "cat/cat_000.JPEG"
        assert reader.split_info.root == "val"


@pytest.mark.parametrize("to", FORMATS)
def test_output_is_the_same_for_any_number_of_workers(tree: Path, tmp_path: Path, to: str) -> None:
    outputs = []
    for workers in (1, 2, 3):
        time.sleep(0.6)  # a time stamp anywhere would show
        out = tmp_path / str(workers)
        packer.convert(tree, to=to, output=out, workers=workers, samples_per_shard=7)
        outputs.append(files_of(out))
    assert outputs[0] == outputs[1] == outputs[2]


def test_spawned_workers(tree: Path, tmp_path: Path) -> None:
    """A program that runs threads gets spawned workers, and the same bytes."""
    script = (
        "import sys, threading, packer\n"
        "if __name__ == '__main__':\n"
        "    event = threading.Event()\n"
        "    thread = threading.Thread(target=event.wait); thread.start()\n"
        "    try: packer.convert(sys.argv[1], to='tar', output=sys.argv[2], workers=2, samples_per_shard=9)\n"
        "    finally: event.set()\n"
    )
    path = write(tmp_path / "script.py", script.encode())
    subprocess.run([sys.executable, path, tree, tmp_path / "spawned"], check=True, timeout=120)
    packer.convert(tree, to="tar", output=tmp_path / "here", workers=1, samples_per_shard=9)
    assert files_of(tmp_path / "spawned") == files_of(tmp_path / "here")


def test_default_output_is_named_after_the_source(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert packer.convert(tree, to="tar", workers=1).output == Path("images-tar")
    assert (tmp_path / "images-tar" / "dataset.json").exists()


def test_class_folders_without_splits(tmp_path: Path) -> None:
    write(tmp_path / "src/b/2.jpg", make_jpeg(2))
    write(tmp_path / "src/a/deep/er/1.jpg", make_jpeg(1))
    write(tmp_path / "src/a/deep-x/1.jpg", make_jpeg(3))
    out = packer.convert(tmp_path / "src", to="tar", output=tmp_path / "out", workers=1, split="holdout").output
    with readers.open(out) as reader:
        assert reader.split == "holdout"
        assert reader.classes == ("a", "b")
        # torchvision sorts by folder path: "a/deep-x" comes before "a/deep/er"
        assert list(reader.keys) == ["a/deep-x/1", "a/deep/er/1", "b/2"]
        assert reader.labels.tolist() == [0, 0, 1]


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    write(tmp_path / "src/x.jpg", make_jpeg(1))
    write(tmp_path / "src/y.jpg", make_jpeg(2))
    for to in FORMATS:
        out = packer.convert(tmp_path / "src", to=to, output=tmp_path / to, workers=1).output
        with readers.open(out) as reader:
            assert reader.labels.tolist() == [-1, -1]
            assert reader[0].label is None
            assert reader.classes == ()
        assert packer.verify(out, workers=1).ok


def test_split_option(tree: Path, tmp_path: Path) -> None:
    out = packer.convert(tree, to="tar", output=tmp_path / "out", split="val", workers=1).output
    assert list(json.loads((out / "dataset.json").read_text())["splits"]) == ["val"]
    only_owls = tmp_path / "owls"
    shutil.copytree(tree, only_owls)
    shutil.rmtree(only_owls / "val/cat")
    packer.convert(only_owls, to="tar", output=tmp_path / "owl-val", split="val", workers=1)
    with readers.open(tmp_path / "owl-val") as reader:  # labels mean the same as in train
        assert reader.classes == ("cat", "dog", "owl")
        assert set(reader.labels.tolist()) == {1, 2}
    assert readers.open_folder(tree, "valid").split == "val"  # other names of the same split
    with pytest.raises(readers.SourceError, match=r"no split 'test'; it has train, val"):
        packer.convert(tree, to="tar", output=tmp_path / "out2", split="test", workers=1)


def test_images_beside_the_splits_are_never_lost_silently(tree: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(tree, source)
    write(source / "noisy.csv", b"path,label\n")
    result = packer.convert(source, to="tar", output=tmp_path / "out", workers=1)
    assert result.samples == 45
    assert json.loads((tmp_path / "out/left-out.jsonl").read_text()) == {
        "name": "noisy.csv",
        "reason": "beside the splits",
        "action": "not packed",
    }
    write(source / "extra/cat/1.jpg", make_jpeg(1))
    with pytest.raises(readers.SourceError, match=r"'extra/cat/1.jpg' lies beside the split 'train'.*split='train'"):
        packer.convert(source, to="tar", output=tmp_path / "out2", workers=1)


def test_what_is_not_packed_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write(source / "a/1.jpg", make_jpeg(1))
    write(source / "a/notes.txt", b"no image")
    write(source / "a/.hidden.jpg", make_jpeg(2))
    write(source / ".cache/x.jpg", make_jpeg(3))
    (source / "a/loop").symlink_to(source)
    (source / "a/linked.jpg").symlink_to(source / "a/1.jpg")
    result = packer.convert(source, to="tar", output=tmp_path / "out", workers=1)
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


def test_content_decides_not_the_suffix(tmp_path: Path) -> None:
    source = tmp_path / "src"
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    for name, kind in (
        ("p.JPEG", "PNG"),
        ("w", "WEBP"),
        ("g.dat", "GIF"),
        ("b.bmp", "BMP"),
        ("t.tif", "TIFF"),
    ):
        out = io.BytesIO()
        picture.save(out, kind)
        write(source / "c" / name, out.getvalue())
    for to in FORMATS:
        packer.convert(source, to=to, output=tmp_path / to, workers=1)
        with readers.open(tmp_path / to) as reader:
            media = {reader.name(i): MEDIA[reader.info.media[i]] for i in range(len(reader))}
            assert media == {
                "c/b.bmp": "bmp",
                "c/g.dat": "gif",
                "c/p.JPEG": "png",
                "c/t.tif": "tiff",
                "c/w": "webp",
            }
            assert bytes(reader.read(0)) == (source / reader.name(0)).read_bytes()
        assert packer.verify(tmp_path / to, deep=True, against=source, workers=1).ok


def test_headers_go_into_the_index(tmp_path: Path) -> None:
    source = tmp_path / "src"
    exif = Image.Exif()
    exif[0x0112] = 6
    write(source / "1.jpg", make_jpeg(1, (40, 20), progressive=True, exif=exif))
    out = io.BytesIO()
    Image.new("CMYK", (8, 16)).save(out, "JPEG")
    write(source / "2.jpg", out.getvalue())
    out = io.BytesIO()
    Image.new("L", (8, 9)).save(out, "JPEG")
    write(source / "3.jpg", out.getvalue())
    packer.convert(source, to="hdf5", output=tmp_path / "out", workers=1)
    with readers.open(tmp_path / "out") as reader:
        info = reader.info
        assert info.width.tolist() == [40, 8, 8]
        assert info.height.tolist() == [20, 16, 9]
        assert info.components.tolist() == [3, 4, 1]
        assert info.process.tolist() == [0xC2, 0xC0, 0xC0]
        assert info.orientation.tolist() == [6, 1, 1]


class TestBadImages:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        for number in range(6):
            write(tmp_path / f"src/train/c/{number}.jpg", make_jpeg(number))
        write(tmp_path / "src/train/c/3.jpg", make_jpeg(3)[:-200])
        write(tmp_path / "src/train/c/4.jpg", b"this is no image at all")
        (tmp_path / "src/train/c/5b.jpg").symlink_to("nowhere.jpg")
        return tmp_path / "src"

    def test_raise_names_the_file_and_the_way_out(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(readers.BadSampleError, match=r"c/3\.jpg: jpeg image.*on_error='skip' or"):
            packer.convert(source, to="tar", output=tmp_path / "out", workers=1)
        assert not (tmp_path / "out/dataset.json").exists()
        with pytest.raises(readers.DatasetError, match="unfinished conversion"):
            readers.open(tmp_path / "out")

    @pytest.mark.parametrize("to", FORMATS)
    def test_skip(self, source: Path, tmp_path: Path, to: str) -> None:
        result = packer.convert(source, to=to, output=tmp_path / "out", workers=1, on_error="skip")
        assert result.left_out == {"skipped": 3}
        assert sorted(contents(result.output, "train")) == ["c/0.jpg", "c/1.jpg", "c/2.jpg", "c/5.jpg"]
        check = packer.verify(result.output, against=source, workers=1)
        assert check.ok and check.left_out == 3

    def test_quarantine_copies_aside_and_reports(self, source: Path, tmp_path: Path) -> None:
        result = packer.convert(source, to="hdf5", output=tmp_path / "out", workers=1, on_error="quarantine")
        assert files_of(result.output / "quarantine") == {
            "train/c/3.jpg": (source / "train/c/3.jpg").read_bytes(),
            "train/c/4.jpg": (source / "train/c/4.jpg").read_bytes(),
        }
        lines = [json.loads(line) for line in (result.output / "left-out.jsonl").read_text().splitlines()]
        assert [(line["name"], line["action"]) for line in lines] == [
            ("c/3.jpg", "quarantined"),
            ("c/4.jpg", "quarantined"),
            ("c/5b.jpg", "quarantined"),
        ]
        assert "cannot be opened" in lines[2]["reason"]

    def test_another_policy_goes_on_from_the_same_shards(self, source: Path, tmp_path: Path) -> None:
        options = {"to": "tar", "output": tmp_path / "out", "workers": 1, "samples_per_shard": 1}
        with pytest.raises(readers.BadSampleError):
            packer.convert(source, **options)
        result = packer.convert(source, on_error="skip", **options)
        assert result.shards_resumed == 3
        assert result.samples == 4
        again = packer.convert(source, to="tar", output=tmp_path / "b", workers=1, samples_per_shard=1, on_error="skip")
        assert files_of(result.output) == files_of(again.output)

    def test_check_decode_finds_what_headers_do_not_show(self, tmp_path: Path) -> None:
        whole = make_jpeg(1, (64, 64))
        hollow = whole[:-60] + b"\xff\xd9"  # most of the pixels are gone, but there is an end marker
        write(tmp_path / "src/a.jpg", whole)
        write(tmp_path / "src/b.png", _broken_png())
        assert parse_header(hollow).width == 64
        assert packer.convert(tmp_path / "src", to="tar", output=tmp_path / "o1", workers=1).samples == 2
        with pytest.raises(readers.BadSampleError, match=r"b\.png: does not decode"):
            packer.convert(tmp_path / "src", to="tar", output=tmp_path / "o2", workers=1, check="decode")
        check = packer.verify(tmp_path / "o1", deep=True, workers=1)
        assert [problem.key for problem in check.problems] == ["b"]


def _broken_png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(out, "PNG")
    data = bytearray(out.getvalue())
    middle = data.index(b"IDAT") + 40
    data[middle : middle + 8] = bytes(8)
    return bytes(data)


def test_shuffle_is_seeded_and_loses_nothing(tree: Path, tmp_path: Path) -> None:
    keys = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        out = packer.convert(tree, to="tfrecord", output=tmp_path / name, workers=1, shuffle=seed).output
        with readers.open(out, "train") as reader:
            keys[name] = list(reader.keys)
    assert keys["a"] == keys["b"] != keys["c"]
    assert sorted(keys["a"]) == sorted(keys["c"]) == readers.open_folder(tree, "train").keys
    assert packer.verify(tmp_path / "a", against=tree, workers=1).ok


@pytest.mark.parametrize("to", FORMATS)
def test_label_offset_is_in_the_shards_and_not_in_the_reader(tree: Path, tmp_path: Path, to: str) -> None:
    out = packer.convert(tree, to=to, output=tmp_path / "out", workers=1, label_offset=1).output
    with readers.open(out, "val") as reader:
        assert reader.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert packer.verify(out, against=tree, workers=1).ok
    if to == "hdf5":
        import h5py

        with h5py.File(out / "val-00000-of-00001.h5") as file:
            assert file["label"][:].tolist() == [1] * 3 + [2] * 3 + [3] * 3


class TestReencode:
    def test_resize_short(self, tmp_path: Path) -> None:
        small = make_jpeg(2, (60, 50))
        x, y = np.meshgrid(np.arange(400), np.arange(300))
        waves = np.stack([127 + 120 * np.sin(x / 40), 127 + 120 * np.cos(y / 30), (x + y) / 3], -1)
        out = io.BytesIO()
        Image.fromarray(waves.astype(np.uint8)).save(out, "JPEG", quality=95)
        big = out.getvalue()
        write(tmp_path / "src/big.jpg", big)
        write(tmp_path / "src/small.jpg", small)
        how = packer.Reencode(resize_short=64)
        packed = packer.convert(tmp_path / "src", to="tar", output=tmp_path / "out", workers=1, reencode=how).output
        with readers.open(packed) as reader:
            assert (reader.info.width.tolist(), reader.info.height.tolist()) == ([85, 60], [64, 50])
            assert bytes(reader.read(1)) == small  # needs no change, keeps its bytes
            ours = np.asarray(Image.open(io.BytesIO(reader.read(0))).convert("RGB"), np.int16)
            reference = Image.open(io.BytesIO(big)).convert("RGB").resize((85, 64), Image.Resampling.LANCZOS)
            assert np.abs(ours - np.asarray(reference, np.int16)).mean() < 3
        made = json.loads((packed / "dataset.json").read_text())["made"]["options"]["reencode"]
        assert made == {"codec": "keep", "max_side": None, "resize_short": 64, "quality": None}
        check = packer.verify(packed, against=tmp_path / "src", workers=1)
        assert "re-encoded" in check.problems[0].what

    def test_quality_never_makes_a_file_larger(self, tmp_path: Path) -> None:
        data = make_jpeg(1, (200, 200), quality=30)
        write(tmp_path / "src/a.jpg", data)
        for quality, same in ((95, True), (10, False)):
            how = packer.Reencode(quality=quality)
            out = tmp_path / str(quality)
            packer.convert(tmp_path / "src", to="tar", output=out, workers=1, reencode=how)
            with readers.open(out) as reader:
                assert (bytes(reader.read(0)) == data) is same
                assert len(reader.read(0)) <= len(data)

    @pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK"])
    def test_modes_and_codecs(self, tmp_path: Path, mode: str) -> None:
        kind = "JPEG" if mode == "CMYK" else "PNG"
        out = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).convert(mode).save(
            out, kind
        )
        write(tmp_path / "src/c/a.img.x", out.getvalue())
        for codec in ("keep", "jpeg", "png", "webp"):
            how = packer.Reencode(codec, max_side=30)
            packed = packer.convert(
                tmp_path / "src", to="hdf5", output=tmp_path / codec, workers=1, reencode=how
            ).output
            with readers.open(packed) as reader:
                assert (reader.info.width[0], reader.info.height[0]) == (30, 20)
                media = MEDIA[reader.info.media[0]]
                assert media == (kind.lower() if codec == "keep" else codec)
                if media != kind.lower():
                    assert (
                        reader.name(0) == {"jpeg": "c/a.img.jpg", "png": "c/a.img.png", "webp": "c/a.img.webp"}[codec]
                    )

    def test_options_are_checked(self) -> None:
        for wrong in (
            {"codec": "gif"},
            {"max_side": 0},
            {"quality": 101},
            {"max_side": 9, "resize_short": 9},
        ):
            with pytest.raises(ValueError):
                packer.Reencode(**wrong)

    def test_the_result_is_upright(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        write(tmp_path / "src/a.jpg", make_jpeg(1, (80, 40), exif=exif))
        how = packer.Reencode(max_side=20)
        packer.convert(tmp_path / "src", to="tar", output=tmp_path / "out", workers=1, reencode=how)
        with readers.open(tmp_path / "out") as reader:
            assert reader.info.orientation.tolist() == [1]
            assert (reader.info.height[0], reader.info.width[0]) == (20, 10)


def test_names_that_differ_only_in_their_suffix(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.jpeg", "b.jpg", "b.jpg.jpg", "dotted.name.v1.jpg"):
        write(tmp_path / "src/c" / name, make_jpeg(len(name)))
    for to in FORMATS:
        out = packer.convert(tmp_path / "src", to=to, output=tmp_path / to, workers=1).output
        assert sorted(contents(out, "train")) == [
            "c/a.jpeg", "c/a.jpg", "c/b.jpg", "c/b.jpg.jpg", "c/dotted.name.v1.jpg",
        ]  # fmt: skip
        with readers.open(out) as reader:
            assert len(set(reader.keys)) == 5
        packer.extract(out, tmp_path / f"{to}-back")
        assert files_of(tmp_path / f"{to}-back") == files_of(tmp_path / "src")


def test_unique_keys() -> None:
    assert unique_keys(["a.jpg", "b.png"]) == ["a", "b"]
    assert unique_keys(["a.jpg", "a.png", "b.png"]) == ["a.jpg", "a.png", "b"]
    assert unique_keys(["a.jpg", "a.txt"]) == ["a", "a.txt"]
    assert unique_keys(["a.b", "a.c", "a.b.jpg"]) == ["a.b", "a.c", "a.b.jpg"]
    assert unique_keys([".x", "d.e/f"]) == [".x", "d.e/f"]


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "src/c"
    folder.mkdir(parents=True)
    try:
        with open(os.fsencode(folder) + b"/\xff\xfe.jpg", "wb") as file:
            file.write(make_jpeg(1))
    except OSError:
        pytest.skip("this filesystem allows only UTF-8 names")
    with pytest.raises(readers.SourceError, match="not UTF-8; rename it"):
        packer.convert(tmp_path / "src", to="tar", output=tmp_path / "out", workers=1)


class TestOutputs:
    def test_the_same_command_again_does_nothing(self, tree: Path, tmp_path: Path) -> None:
        packer.convert(tree, to="tar", output=tmp_path / "out", workers=1)
        before = files_of(tmp_path / "out")
        result = packer.convert(tree, to="tar", output=tmp_path / "out", workers=1)
        assert result.already_done and result.samples == 45
        assert files_of(tmp_path / "out") == before

    def test_another_command_needs_overwrite(self, tree: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        packer.convert(tree, to="tar", output=out, workers=1)
        write(out / "mine.txt", b"a note")
        before = files_of(out)
        with pytest.raises(readers.OutputError, match="overwrite=True to replace it"):
            packer.convert(tree, to="hdf5", output=out, workers=1)
        assert files_of(out) == before
        packer.convert(tree, to="hdf5", output=out, workers=1, overwrite=True)
        assert sorted(path.name for path in out.iterdir()) == [
            "dataset.json", "mine.txt", "train-00000-of-00001.h5", "train.index", "val-00000-of-00001.h5", "val.index",
        ]  # fmt: skip
        assert packer.verify(out, against=tree, workers=1).ok

    def test_a_folder_that_is_not_ours_is_left_alone(self, tree: Path, tmp_path: Path) -> None:
        write(tmp_path / "out/thesis.tex", b"precious")
        for overwrite in (False, True):
            with pytest.raises(readers.OutputError, match="not empty and not a packed set"):
                packer.convert(tree, to="tar", output=tmp_path / "out", workers=1, overwrite=overwrite)
        assert files_of(tmp_path / "out") == {"thesis.tex": b"precious"}
        with pytest.raises(readers.OutputError, match="is a file"):
            packer.convert(tree, to="tar", output=tmp_path / "out/thesis.tex", workers=1)

    def test_output_inside_the_source(self, tmp_path: Path) -> None:
        write(tmp_path / "src/c/1.jpg", make_jpeg(1))
        with pytest.raises(readers.OutputError, match="is inside the source"):
            packer.convert(tmp_path / "src", to="tar", output=tmp_path / "src/packed", workers=1)

    def test_dry_run_writes_nothing(self, tree: Path, tmp_path: Path) -> None:
        result = packer.convert(tree, to="tar", output=tmp_path / "out", dry_run=True, samples_per_shard=10)
        assert result.dry_run and (result.samples, result.shards) == (45, 5)
        assert not (tmp_path / "out").exists()

    def test_too_little_space_is_refused_before_the_first_byte(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(readers.OutputError, match=r"needs [\d,]+ bytes, 1,000 are free"):
            packer.convert(tree, to="tar", output=tmp_path / "out", workers=1)

    def test_missing_and_empty_sources(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(readers.SourceError, match="no such file"):
            packer.convert(tmp_path / "nothing", to="tar")
        with pytest.raises(readers.SourceError, match="no files found"):
            packer.convert(tmp_path / "empty", to="tar", output=tmp_path / "out")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"to": "zip"}, {"on_error": "ignore"}, {"samples_per_shard": 0}, {"shard_size": "a lot"},
            {"shard_size": 5, "samples_per_shard": 5}, {"shuffle": -1}, {"workers": 0}, {"label_offset": -1},
        ],
    )  # fmt: skip
    def test_wrong_options(self, tree: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
        with pytest.raises(ValueError):
            packer.convert(tree, **{"to": "tar", "output": tmp_path / "out", **wrong})
        assert not (tmp_path / "out").exists()
